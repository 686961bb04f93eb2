"""The planted faults. Each changes one line; the text before stands exactly once in its file, which a test checks."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        name: what is wrong then.
        module: file below `ctxcache/`.
        before, after: a piece of the file, and what it becomes.
        compiled: whether the line is compiled code, so that nothing compiled before can serve.
        excuse: why it may be missed; empty where it must be caught.
    """

    name: str
    module: str
    before: str
    after: str
    compiled: bool = False
    excuse: str = ""


_WAYS_OUT = """\
    Row("{0}", "{0}", S.PREFILLING,          S.RELEASED, DRAIN),
    Row("{0}", "{0}", S.DRAFTING,            S.RELEASED, DRAIN, kinds=FROZEN),
    Row("{0}", "{0}", S.DECODING,            S.RELEASED, DRAIN),
    Row("{0}", "{0}", S.COMPACTING,          S.RELEASED, DRAIN),
    Row("{0}", "{0}", S.SETTLED,             S.RELEASED, ()),
    Row("{0}", "{0}", S.FINISHING_IN_FLIGHT, S.RELEASED, DRAIN),
"""
"""The rows by which a request is left from every state but the first and the last."""

_EVERY_WAY_OUT = f"""\
{_WAYS_OUT.format("finish")}\
    Row("finish", "finish", S.FINISHING_SETTLED,   S.RELEASED, ()),

    Row("abandon", "abandon", S.ADMITTED,            S.RELEASED, ()),
{_WAYS_OUT.format("abandon")}"""
"""The same of both triggers, and what stands between them."""

_ENQUEUE_FAILED = """\
    Row("device_failed", "", S.ADMITTED,            S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.PREFILLING,          S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.DRAFTING,            S.FINISHING_IN_FLIGHT, (), kinds=FROZEN),
    Row("device_failed", "", S.DECODING,            S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.COMPACTING,          S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.SETTLED,             S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.FINISHING_IN_FLIGHT, S.FINISHING_IN_FLIGHT, ()),
    Row("device_failed", "", S.FINISHING_SETTLED,   S.FINISHING_IN_FLIGHT, ()),
"""
"""Every row of the trigger that accounts for a failed enqueue."""


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "finish does not drain",
        "fsm/table.py",
        _WAYS_OUT.format("finish"),
        _WAYS_OUT.format("finish").replace("DRAIN", "()"),
    ),
    Mutant(
        "abandon does not drain",
        "fsm/table.py",
        _WAYS_OUT.format("abandon"),
        _WAYS_OUT.format("abandon").replace("DRAIN", "()"),
    ),
    Mutant(
        "a failed enqueue counts as settled",
        "fsm/table.py",
        _ENQUEUE_FAILED,
        _ENQUEUE_FAILED.replace("S.FINISHING_IN_FLIGHT, ()", "S.FINISHING_SETTLED, ()"),
    ),
    Mutant(
        "captures are published unproven",
        "fsm/table.py",
        "STEP     = (CAPTURE, SYNCHRONIZE)",
        "STEP     = (CAPTURE,)",
    ),
    Mutant(
        "a compaction is not proven",
        "fsm/table.py",
        "MOVE_BASE_SLOTS, MOVE_DRAFT_SLOTS, SYNCHRONIZE)",
        "MOVE_BASE_SLOTS, MOVE_DRAFT_SLOTS)",
        excuse="no page is at risk: the step before was waited for, a draft's initialisation is proven before the mapping is "
        "uploaded, and rows and slots move in stream order; tests/request/test_steps.py counts the synchronisation",
    ),
    Mutant(
        "an MTP boundary is published unproven",
        "fsm/table.py",
        "(CAPTURE_BOUNDARY, CAPTURE_HIDDEN, SYNCHRONIZE)",
        "(CAPTURE_BOUNDARY, CAPTURE_HIDDEN)",
    ),
    Mutant(
        "a frozen prompt is published before its draft is proven",
        "fsm/table.py",
        'Row("settle_draft",     "begin_batch_compaction", S.DRAFTING, S.SETTLED,    DRAIN,',
        'Row("settle_draft",     "begin_batch_compaction", S.DRAFTING, S.SETTLED,    (),',
    ),
    Mutant(
        "shutdown ends a quarantine unproven",
        "fsm/table.py",
        'Row("shutdown", "shutdown", S.POISONED, S.RELEASED, DRAIN)',
        'Row("shutdown", "shutdown", S.POISONED, S.RELEASED, ())',
    ),
    Mutant(
        "drafting counts as settled",
        "fsm/table.py",
        _EVERY_WAY_OUT,
        re.sub(r"(S\.DRAFTING, .*)DRAIN", r"\1()", _EVERY_WAY_OUT),
    ),
    Mutant(
        "decoding counts as settled",
        "fsm/table.py",
        _EVERY_WAY_OUT,
        re.sub(r"(S\.DECODING, .*)DRAIN", r"\1()", _EVERY_WAY_OUT),
    ),
    Mutant(
        "error codes of a drain are ignored",
        "fsm/machine.py",
        "succeeded = code is None or bool(code == 0)",
        "succeeded = True",
    ),
    Mutant(
        "a failed drain releases all the same",
        "request/custody.py",
        '        status = self.fire(request, "abandon")\n        if status is Status.OK:',
        '        status = self.fire(request, "abandon")\n        if True:',
    ),
    Mutant(
        "abandon releases before it drains",
        "request/custody.py",
        'status = self.fire(request, "abandon")',
        'self.release(request); status = self.fire(request, "abandon")',
    ),
    Mutant(
        "the first lease of a batch is forgotten",
        "request/custody.py",
        "for lease in request.batch.leases:",
        "for lease in request.batch.leases[1:]:",
    ),
    Mutant(
        "a dropped handle is not looked after",
        "request/custody.py",
        "            run_alone(self._lock, False, run_alone, self._link.state, True, self.reap)",
        "            pass",
    ),
    Mutant(
        "a quarantine is never released",
        "request/custody.py",
        "            self.release(self.quarantine.request)\n",
        "            self.quarantine.request = None\n",
    ),
    Mutant(
        "a finish publishes what a device failure made worthless",
        "coordinator.py",
        "if not live.discards_unpublished:",
        "if True:",
    ),
    Mutant(
        "a finish publishes frozen prompts before it drains",
        "coordinator.py",
        'status = self._custody.fire(live, "finish")',
        'live.publication.publish_frozen(live.batch); status = self._custody.fire(live, "finish")',
    ),
    Mutant(
        "grown pages do not reach the page table",
        "coordinator.py",
        "self._binding.extend_rows(growth)",
        "pass",
    ),
    Mutant(
        "cold slots keep another request's state",
        "request/request.py",
        "self.batch.reuse_lengths == 0)",
        "self.batch.reuse_lengths < 0)",
    ),
    Mutant(
        "the draft's rows are not uploaded",
        "request/request.py",
        "        if self.batch.rules.paired:\n            self._upload(",
        "        if False:\n            self._upload(",
    ),
    Mutant(
        "checkpoints are not restored",
        "request/request.py",
        "if self.link.storage is not None and self.restores is not None:",
        "if self.link.storage is not None and self.restores is None:",
    ),
    Mutant(
        "device lengths start at zero",
        "request/request.py",
        "self.link.ops.reset_lengths(self.link.resources.base_cache, self.batch.reuse_lengths, self.link.stream)",
        "self.link.ops.reset_lengths(self.link.resources.base_cache, self.batch.reuse_lengths * 0, self.link.stream)",
    ),
    Mutant(
        "the wrong page counts as a checkpoint's partial page",
        "request/snapshot_jobs.py",
        "else exact_length // tokens_per_page",
        "else (exact_length - 1) // tokens_per_page - 1",
    ),
    Mutant(
        "a partial page is saved one token short",
        "request/snapshot_jobs.py",
        "checkpoint.exact_length - index * tokens_per_page,",
        "checkpoint.exact_length - index * tokens_per_page - 1,",
    ),
    Mutant(
        "an MTP draft's partial page is the base's",
        "request/snapshot_jobs.py",
        "int(checkpoint.lease.draft_pages[index]) if paired",
        "int(checkpoint.lease.base_pages[index]) if paired",
    ),
    Mutant(
        "the draft's rows do not grow",
        "request/device_binding.py",
        "_extend_rows(self.link.resources.draft_page_table, growth.draft)",
        "pass",
    ),
    Mutant(
        "a step is prepared one token short",
        "request/room.py",
        "target = length + extra[0]\n",
        "target = length + extra[0] - 1\n",
        compiled=True,
    ),
    Mutant(
        "rows are trusted after a failed drain",
        "coordinator.py",
        "self._binding.distrust_device_rows()",
        "pass",
    ),
    Mutant(
        "an ended sequence is published beyond what base and draft agree on",
        "request/publication_policy.py",
        "self._publish_common(batch, slot, int(batch.common[slot]))",
        "self._publish_common(batch, slot, int(batch.committed[slot]))",
    ),
    Mutant(
        "reservations are not retired",
        "request/publication_policy.py",
        "        self._manager.retire_snapshots(lease, staged.snapshots)\n",
        "        pass\n",
    ),
    Mutant(
        "a boundary is published though its drain failed",
        "coordinator.py",
        "        if status is Status.OK:\n            with self._custody.committing(live):\n                live.publication.publish_boundary",
        "        if True:\n            with self._custody.committing(live):\n                live.publication.publish_boundary",
    ),
    Mutant(
        "block keys stay in their slots when sequences move",
        "request/batch.py",
        'for name in ("leases", "keys", "extras", "media", "staged"):',
        'for name in ("leases", "extras", "media", "staged"):',
    ),
    Mutant(
        "survivors are released in place of the retired",
        "request/batch.py",
        "for slot in np.flatnonzero(mapping == RETIRED)",
        "for slot in np.flatnonzero(mapping != RETIRED)",
    ),
    Mutant(
        "tokens stay in their slots when sequences move",
        "request/batch.py",
        "self.tokens[new, :length] = self.tokens[old, :length]",
        "pass",
    ),
    Mutant(
        "the identity is left out of the keys",
        "keys/chain.py",
        "root = self._unlabelled if extras is _NO_EXTRAS or extras == _NO_EXTRAS else self._root_digest(extras)",
        "root = self._unlabelled",
    ),
    Mutant(
        "a verification may write no further than a plain step",
        "request/execution_modes.py",
        "return DecodingKvHeadroom(spec.verify_size, spec.drafting_step * spec.drafting_top_k)",
        "return DecodingKvHeadroom(1, 1)",
    ),
    Mutant(
        "a speculative hit keeps the block whose draft state depends on another successor",
        "manager/planning.py",
        "reused = matched - 1 if replays or rewinds else matched",
        "reused = matched - 1 if rewinds else matched",
    ),
    Mutant(
        "a fully cached prompt has nothing left to compute",
        "manager/planning.py",
        "reused = matched - 1 if replays or rewinds else matched",
        "reused = matched - 1 if replays else matched",
    ),
    Mutant(
        "a paired hit takes blocks whose draft page is not cached",
        "manager/planning.py",
        "matched = num_paired if request.paired else indexed",
        "matched = indexed",
    ),
    Mutant(
        "a second request is admitted beside the first",
        "request/custody.py",
        "return None if self.active is None else Status.REQUEST_FAILED",
        "return None",
    ),
    Mutant(
        "a poisoned coordinator admits",
        "request/quarantine.py",
        "        if self.poisoned:\n            return",
        "        if False:\n            return",
    ),
    Mutant(
        "a shutdown does not mind an active request",
        "request/custody.py",
        "        if self.active is not None:\n            return Status.REQUEST_FAILED",
        "        if False:\n            return Status.REQUEST_FAILED",
    ),
    Mutant(
        "a recovery does not wait for the proof",
        "request/quarantine.py",
        "if not (self.poisoned and self.shut):",
        "if not self.poisoned:",
    ),
    Mutant(
        "a coordinator that is left releases before it drains",
        "request/custody.py",
        "            self.abandon(self.active)\n",
        "            self.release(self.active)\n",
    ),
    Mutant(
        "a step is foretold without a look at the pages",
        "coordinator.py",
        "return self._manager.can_grow_leases(batch.lease_rows, targets.base_pages, targets.draft_pages) & targets.fit",
        "return targets.fit",
    ),
    Mutant(
        "an explanation matches in another mode than the request",
        "request/lookup.py",
        "            mode=admission.execution_mode,\n            bypass=admission.bypass,",
        "            bypass=admission.bypass,",
    ),
    Mutant(
        "every sequence of a batch has the identity of the first",
        "request/lookup.py",
        "keys = self._hasher.start(sequence.extras)\n        if not admission.bypass",
        "keys = self._hasher.start(admission.sequences[0].extras)\n        if not admission.bypass",
    ),
    Mutant(
        "media stay in their slots when sequences move",
        "request/batch.py",
        'for name in ("leases", "keys", "extras", "media", "staged"):',
        'for name in ("leases", "keys", "extras", "staged"):',
    ),
    Mutant(
        "media are left out of the keys of what is generated",
        "request/batch.py",
        "keys.extend(self.tokens[slot, :length], self.media_of(slot, length))",
        "keys.extend(self.tokens[slot, :length], None)",
    ),
    Mutant(
        "rows behind a batch go on naming pages",
        "request/device_binding.py",
        "table.set_rows(np.arange(table.max_batch, dtype=np.int32), counts, np.concatenate(rows))",
        "table.set_rows(np.arange(len(rows), dtype=np.int32), counts[: len(rows)], np.concatenate(rows))",
    ),
    Mutant(
        "rows of retired sequences go on naming pages",
        "device/page_table.py",
        "rows, lengths = np.full_like(self._rows, page_rows.UNUSED), np.zeros_like(self._lengths)",
        "rows, lengths = self._rows.copy(), self._lengths.copy()",
    ),
    Mutant(
        "a row keeps the tail of the one before",
        "device/page_rows.py",
        "        for k in range(count, lengths[row]):\n            rows[row, k] = UNUSED",
        "        for k in range(count, count):\n            rows[row, k] = UNUSED",
        compiled=True,
    ),
    Mutant(
        "the page sanitizer finds nothing wrong",
        "request/page_sanitizer.py",
        "            if wrong.size:\n",
        "            if False:\n",
    ),
    Mutant(
        "the page sanitizer looks at the first sequence alone",
        "request/page_sanitizer.py",
        "(slot, 0, self._num_shared(batch, slot)) for slot in range(batch.size)",
        "(slot, 0, self._num_shared(batch, slot)) for slot in range(1)",
    ),
    Mutant(
        "shared pages are not pinned",
        "manager/acquire.py",
        "    pin(cache, c.BASE, shared)\n",
        "    pass\n",
        compiled=True,
    ),
    Mutant(
        "the end of a lease frees pages that the cache keeps",
        "manager/pools.py",
        "        if resource[c.CACHE_REFS, at] == 0:\n            resource[c.FREE_STACK, offset + free] = held[i]",
        "        if resource[c.CACHE_REFS, at] >= 0:\n            resource[c.FREE_STACK, offset + free] = held[i]",
        compiled=True,
    ),
    Mutant(
        "the default headroom does not shrink",
        "request/validation.py",
        "default.draft_extra_tokens, shrinks=True)",
        "default.draft_extra_tokens, shrinks=False)",
    ),
    Mutant(
        "an explicit headroom shrinks as the default does",
        "request/validation.py",
        "            shrinks=False,\n        )",
        "            shrinks=True,\n        )",
    ),
    Mutant(
        "a full row can be stepped",
        "request/room.py",
        "fits = length < longest[0] and (shrinks or target <= longest[0])",
        "fits = length <= longest[0] and (shrinks or target <= longest[0])",
        compiled=True,
    ),
    Mutant(
        "a row ends one token early",
        "request/room.py",
        "fits = length < longest[0] and (shrinks or target <= longest[0])",
        "fits = length < longest[0] - 1 and (shrinks or target <= longest[0])",
        compiled=True,
    ),
    Mutant(
        "the capacity is that of whole pages",
        "request/room.py",
        "capacity[slot] = min(pages * tokens_per_page, longest[0])\n        if",
        "capacity[slot] = pages * tokens_per_page\n        if",
        compiled=True,
    ),
    Mutant(
        "a shorter draft ends a request",
        "request/room.py",
        "            draft[slot] = draft_pages if fits else 0\n",
        "            fits = fits and length + extra[1] <= longest[1]\n            draft[slot] = draft_pages if fits else 0\n",
        compiled=True,
    ),
    Mutant(
        "a draft's pages go on to the base's end",
        "request/room.py",
        "draft_pages = -(-min(length + extra[1], longest[1]) // tokens_per_page)",
        "draft_pages = -(-min(length + extra[1], longest[0]) // tokens_per_page)",
        compiled=True,
    ),
    Mutant(
        "a prompt may take the whole row",
        "request/validation.py",
        "extras = (1, 0) if headroom.shrinks else (max(1, headroom.base), headroom.draft)",
        "extras = (0, 0) if headroom.shrinks else (headroom.base, headroom.draft)",
    ),
    Mutant(
        "a commit beyond the capacity is taken",
        "request/batch.py",
        "            _check_capacity(report.committed, self.capacity),\n",
        "            -1,\n",
    ),
    Mutant(
        "the capacity stays what the admission had",
        "request/batch.py",
        "        np.maximum(self.capacity, targets.capacity, out=self.capacity)\n",
        "",
    ),
    Mutant(
        "a decode step is reported without its synchronisation",
        "testing/runtime/steps.py",
        "        self.compute_step(accepted, lags)\n        self.wait()\n        self.complete(completed)\n",
        "        self.compute_step(accepted, lags)\n        self.complete(completed)\n",
    ),
    Mutant(
        "a step writes a token behind those that it was prepared for",
        "testing/runtime/work.py",
        "span = Span(valid=start, start=start, stop=stop, junk_stop=max(stop, junk_stop), length=start, row=row)",
        "span = Span(valid=start, start=start, stop=stop, junk_stop=max(stop, junk_stop) + 1, length=start, row=row)",
    ),
    Mutant(
        "more blocks are evicted than pages are lacking",
        "manager/eviction.py",
        "most = num_base - state[c.FREE + c.BASE]\n",
        "most = cache.node.shape[1]\n",
        compiled=True,
    ),
    Mutant(
        "a leased block leaves the cache although others could go",
        "manager/eviction.py",
        " or resource[c.LEASE_REFS, block] > leases_allowed:",
        ":",
        compiled=True,
    ),
    Mutant(
        "a hit that ends amid a record refreshes nothing",
        "manager/acquire.py",
        "        keep_apart(cache, last)\n",
        "        pass\n",
        compiled=True,
    ),
    Mutant(
        "a checkpoint that many start from goes before they do",
        "manager/publish.py",
        "            touch(cache, started)  #",
        "            pass  #",
        compiled=True,
    ),
    Mutant(
        "a draft page that another record shares is counted once",
        "manager/draft_pages.py",
        "            cache.resource[c.CACHE_REFS, at] += 1\n",
        "            pass\n",
        compiled=True,
    ),
    Mutant(
        "where keys of a lease's blocks differ the publication is taken",
        "manager/publish.py",
        "        return NOT_OWN_PREFIX, -1",
        "        pass",
        compiled=True,
    ),
)
