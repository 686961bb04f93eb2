"""The coordinator: the life of a request, told in order, and around it the life of the coordinator itself.

Every operation reads the same way. Decide: check the arguments against the batch, in a state that the lifecycle allows.
Act and confirm: fire one transition, whose hooks touch the device. Commit: move host state, once the device confirmed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import as_integer
from ctxcache.config import ContextCacheConfig, DeploymentConfig, EngineConfig, validate_context_cache_deployment
from ctxcache.device.arrays import check_int32_target, check_writable, view_array
from ctxcache.device.op_checks import check_hidden_states
from ctxcache.device.ops import DeviceOps, HiddenRow, RuntimeDeviceOps, StreamSynchronizer
from ctxcache.device.resources import ContextCachePhysicalResources, check_devices, check_successor, make_resources
from ctxcache.device.snapshots import checkpoint_slots, snapshot_pool_bytes
from ctxcache.device.streams import same_stream
from ctxcache.errors import ContractError
from ctxcache.fsm import is_declared, require_declared
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind, ResourceType
from ctxcache.keys.chain import KeyHasher
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.metrics import ContextCacheMetrics, CoordinatorCounters
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.request.batch import Batch
from ctxcache.request.custody import Custody, close, end_of_life, serialised
from ctxcache.request.device_binding import bind_device
from ctxcache.request.explain import IdentityMemory, MatchExplanation, explain_match
from ctxcache.request.handle import AdmissionResult, BeginRequestResult, RequestHandle
from ctxcache.request.lookup import Acquirer
from ctxcache.request.page_sanitizer import NoSanitizer, PageSanitizer
from ctxcache.request.publication_policy import choose_publication
from ctxcache.request.request import BoundaryCopy, PendingCompaction, Request
from ctxcache.request.room import PageTargets
from ctxcache.request.validation import AdmissionRules, read_mapping
from ctxcache.session import CoordinatorSession

_LOG = logging.getLogger("ctxcache")


class ContextCacheCoordinator:
    """Owns the host and device lifecycle of one request at a time around the manager. Has no thread of its own.

    Operations are serialised: a second thread waits. A call from inside a hook, a synchroniser or a callback of the same
    coordinator is refused. As a context manager it abandons an active request and shuts down at the end.

    Args:
        config: how the cache behaves.
        deployment: what is deployed.
        deployment_kind: what `validate_context_cache_deployment` says of it.
        resources: caches and page tables; borrowed, and bound to this coordinator until it is shut down.
        stream: the one stream that all device work is enqueued on; see `ctxcache.device.streams`. On the per-thread default
            stream, which is another stream in every thread, operations that may touch the device are refused in any other
            thread than this one.
        synchronizer: proves that stream idle: `None` or 0 is success, anything else a failed drain. The default waits
            for the stream.
        device_ops: all device work goes through these; the default is the base cache's own.

    Raises:
        DeploymentError: deployment, kind, configuration and resources do not agree, or a resource lies on another device
            than the ops work on.
        ContractError: a resource belongs to another live coordinator.
    """

    def __init__(
        self,
        config: ContextCacheConfig,
        deployment: DeploymentConfig,
        deployment_kind: ContextCacheDeploymentKind,
        resources: ContextCachePhysicalResources,
        stream: Any,
        synchronizer: StreamSynchronizer | None = None,
        *,
        device_ops: DeviceOps | None = None,
    ) -> None:
        self._kind = deployment_kind
        self._failure = ""
        self._counters = CoordinatorCounters()
        binding = bind_device(
            config, deployment, deployment_kind, resources, stream, synchronizer, device_ops, self._counters
        )
        self._binding = binding
        self._tokens_per_page = tokens_per_page = deployment.base.tokens_per_page
        self._rules = AdmissionRules(deployment, deployment_kind, enabled=config.enabled)
        self._manager = ContextCacheManager(
            tokens_per_page=tokens_per_page,
            num_base_pages=binding.num_base_pages,
            num_draft_pages=binding.num_draft_pages,
            num_recurrent_snapshots=binding.num_recurrent_snapshots,
            num_partial_kv_snapshots=binding.num_partial_kv_snapshots,
            max_records=config.max_records,
            kind=deployment_kind,
        )
        hasher = KeyHasher(tokens_per_page, config.hash_key)
        self._identities = IdentityMemory(hasher, tokens_per_page)
        self._acquirer = Acquirer(
            self._manager, hasher, self._counters, binding.room, has_checkpoints=binding.link.storage is not None
        )
        self._custody = Custody(self._manager, binding.link)
        self._sanitizer = NoSanitizer()
        if config.page_sanitizer and binding.num_base_pages:
            self._sanitizer = PageSanitizer(self._custody, self._manager, binding.link, tokens_per_page)
        binding.bind(self._custody)
        weakref.finalize(self, end_of_life, self._custody, resources)

    @classmethod
    def build(
        cls,
        engine: EngineConfig | DeploymentConfig,
        *,
        kv_pools: Sequence[Any] | None = None,
        recurrent: Sequence[Any] | None = None,
        conv: Sequence[Any] | None = None,
        stream: Any = None,
        device_ops: RuntimeDeviceOps | None = None,
        snapshots: int | None = None,
        **config: Any,
    ) -> Self:
        """Build a coordinator with all that it needs: what `__init__` takes apart, for the usual case.

        Args:
            engine: the model; a whole deployment where there is a speculative scheme.
            kv_pools: pools of the base engine to borrow, as for `HybridCacheManager.from_arrays`. The default is to allocate
                them. A draft's cache is always allocated.
            recurrent: its states; lent together with `kv_pools`, where it has both.
            conv: its convolution states, likewise.
            stream: the one stream that all device work is enqueued on.
            device_ops: all device work goes through these; the default is a `NumbaDeviceOps()`.
            snapshots: checkpoints of recurrent layers to pay for. The default is `checkpoint_slots` for as many conversations
                as the largest batch has sequences; budgets in bytes that are among `config` win.
            config: fields of `ContextCacheConfig`.

        Raises:
            DeploymentError: as `__init__`, and what the parts have against their arguments.
        """
        deployment = engine if isinstance(engine, DeploymentConfig) else DeploymentConfig(engine)
        kind = validate_context_cache_deployment(deployment)
        batch = deployment.base.max_batch_size
        budgets = snapshot_pool_bytes(deployment, checkpoint_slots(batch, batch) if snapshots is None else snapshots)
        settings = ContextCacheConfig(**{**budgets, **config})
        resources = make_resources(deployment, stream, device_ops, kv_pools=kv_pools, recurrent=recurrent, conv=conv)
        return cls(settings, deployment, kind, resources, stream)

    # The life of a request

    @serialised
    def begin_request(
        self, admission: ContextCacheBatchAdmission, stream: Any, *, headroom: DecodingKvHeadroom | None = None
    ) -> BeginRequestResult:
        """Admit a batch: find what each sequence can reuse, and lease the pages of its first working set.

        Args:
            admission: the sequences, and how they run. Read before this returns, and not kept.
            stream: the coordinator's stream; another one is refused.
            headroom: tokens beyond the prompt that the first working set covers; by default what the mode's step may write:
                one token, or the verified and drafted ones.

        Returns:
            `OK` with a handle in phase `ADMITTED`, which its holder has to `finish` or `abandon` (or use as a context manager),
            and with `prefill_starts`, one token offset a sequence, where prefill begins. `REQUEST_FAILED` when a request is
            active or a sequence does not fit now; `failure` says which. `POISONED` after a failed drain.

        Raises:
            ContractError: a bad argument, a sequence that could never fit, or the coordinator is shut down. Nothing has changed.
            InvariantError: the library's own state is broken; please report it.
        """
        self._require_own_stream(stream)
        checked = self._rules.read_admission(admission, headroom)
        self._custody.reap()
        refusal = self._custody.refusal()
        if refusal is not None:
            if refusal is Status.REQUEST_FAILED:
                self._fail("another request is active; finish it, or leave its block, first")
            return BeginRequestResult(refusal)
        try:
            acquired = self._acquirer.acquire(checked)
            if isinstance(acquired, str):
                return BeginRequestResult(self._fail(acquired))
            batch = Batch(checked, acquired, self._binding.room)
            policy = choose_publication(self._kind, batch.execution_mode, publishes=batch.publishes)
            publication = policy(self._manager, self._tokens_per_page, self._counters, self._identities)
            request = Request(batch, publication, self._binding.link)
            handle = RequestHandle(self, self._custody, request)
            result = BeginRequestResult(Status.OK, AdmissionResult(handle, batch.reuse_lengths.tolist()))
            self._acquirer.count(acquired, bypass=not batch.publishes)
            self._custody.active = request
        except BaseException:  # out of host memory, or interrupted: nobody holds a handle, so nobody else can release
            self._custody.active = None
            # An interrupt may have fallen between a lease and its note. One request runs at a time, and this one is none
            # yet: whatever lease is out is a part of it.
            self._manager.release_all()
            raise
        return result

    @serialised
    def prepare_prefill(self, request: RequestHandle) -> Status:
        """Bind every row: page tables, device lengths, and the state that is restored or zeroed. Enqueues only.

        Raises:
            ContractError: not in phase `ADMITTED`. Nothing has changed.
            DeviceError: an op failed while it was enqueued; the request can only be finished or abandoned.
        """
        live = self._live(request, "prepare_prefill")
        with self._custody.committing(live):
            self._binding.bind_rows(live.batch)
            live.restores = self._binding.restore_jobs(live.batch)
        self._custody.fire(live, "prepare_prefill")
        if live.restores is not None:
            self._counters.hybrid_restores += len(live.restores)
        return self._sanitizer.check_reused(live)

    @serialised
    def enqueue_prefill_captures(self, request: RequestHandle) -> Status:
        """Reserve and enqueue checkpoints at the end of every prompt, before the runtime's prefill synchronisation.

        Without recurrent layers nothing happens. A sequence is skipped, which is no error, when it bypasses the cache,
        when its length is published already, and when no snapshot slot can be had.

        Raises:
            ContractError: no prefill is under way. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "enqueue_captures")
        with self._custody.committing(live):
            live.captures = live.publication.stage_prefill(live.batch)
        if live.captures is None:
            return Status.OK
        status = self._custody.fire(live, "enqueue_captures")
        live.captures = None
        return status

    @serialised
    def finalize_prefill_publication(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance,
        common_state_lengths: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> Status:
        """Advance every sequence past its prompt and publish what is ready; the runtime has synchronised already.

        Args:
            request: a request whose prefill has been prepared.
            advances: one a sequence: exactly one accepted token, the sampled one, and the whole prompt committed.
            common_state_lengths: one a sequence, equal to the committed length: required for EAGLE, optional for shared
                KV, refused otherwise.

        Raises:
            ContractError: any of that does not hold. Nothing has changed.
        """
        live = self._live(request, "finalize_prefill")
        batch = live.batch
        report = batch.read_prefill(advances, common_state_lengths)
        if not batch.rules.drafts:
            status = self._sanitizer.sum_slots(live, "sum_prompts", range(batch.size), batch.num_tokens)
            if status is not Status.OK:
                return status
        status = self._custody.fire(live, "finalize_prefill")
        with self._custody.committing(live):
            batch.advance(report)
            live.publication.publish_prefill(batch)
        return status

    @serialised
    def prepare_decode_step(self, request: RequestHandle, *, headroom: DecodingKvHeadroom | None = None) -> Status:
        """Grow every sequence to what the next step may write, all or none, and upload the rows that grew.

        Args:
            request: a request whose prefill is finalised, or whose last step is complete.
            headroom: tokens beyond the committed ones; the default is the mode's.

        Returns:
            `OK`; or `REQUEST_FAILED` when rows or pages run out: no sequence has grown, and the request is finishing.

        Raises:
            ContractError: another phase, or a bad headroom. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "prepare_decode")
        batch = live.batch
        targets = batch.aim(self._rules.read_headroom(headroom, batch.execution_mode))
        with self._custody.committing(live):
            growth = None
            if targets.all_fit:
                growth = self._manager.grow_leases(batch.lease_rows, targets.base_pages, targets.draft_pages)
            if growth is not None:
                self._binding.extend_rows(growth)
                batch.reserve_tokens(targets)
        if growth is None:
            self._custody.fire(live, "capacity_exhausted")
            return self._fail(self._why_not(batch, targets))
        return self._custody.fire(live, "prepare_decode")

    @serialised
    def can_prepare_decode_step(
        self, request: RequestHandle, *, headroom: DecodingKvHeadroom | None = None
    ) -> NDArray[np.bool_]:
        """Tell which sequences could grow for the next step, `bool[batch]`, without any effect.

        Sequences are judged in slot order, each beside those before it that could. A runtime compacts the others away
        and then prepares the step.

        Raises:
            ContractError: as for `prepare_decode_step`.
        """
        batch = self._live(request, "prepare_decode").batch
        targets = batch.aim(self._rules.read_headroom(headroom, batch.execution_mode))
        return self._growable(batch, targets)

    @serialised
    def complete_decode_step(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance,
        publishable_completed_slots: Sequence[int] | NDArray[np.int32] = (),
        common_state_lengths: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> Status:
        """Advance every sequence past a step, and publish those that have just ended; the runtime has synchronised.

        Args:
            request: a request whose decode step has been prepared.
            advances: one a sequence: one accepted token (speculative modes: at least one), and as many more committed,
                within the pages that the step was prepared with.
            publishable_completed_slots: slots whose generated state may be kept; unique. Naming a slot ends nothing.
            common_state_lengths: how far base and draft state agree, one a sequence: required for EAGLE, optional for
                shared KV, refused otherwise.

        Returns:
            `OK`; `POISONED` when checkpoints were captured and their one synchronisation failed.

        Raises:
            ContractError: any of that does not hold. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "complete_decode")
        batch = live.batch
        report = batch.read_decode(advances, publishable_completed_slots, common_state_lengths)
        status = self._sanitizer.sum_step(live, report.kept, report.committed)
        if status is not Status.OK:
            return status
        with self._custody.committing(live):
            live.captures = live.publication.stage_decode(batch, report.kept, report.committed)
        status = self._custody.fire(live, "complete_decode")
        self._counters.hybrid_capture_synchronizations += live.captures is not None
        live.captures = None
        if status is not Status.OK:
            return status
        with self._custody.committing(live):
            batch.advance(report)
            live.publication.publish_frozen(batch)
            live.publication.publish_decode(batch, report.kept)
        return status

    @serialised
    def begin_batch_compaction(
        self,
        request: RequestHandle,
        old_to_new: Sequence[int] | NDArray[np.int32],
        new_batch_size: int,
        device_batch_mapping: Any,
    ) -> Status:
        """Check the one old-to-new mapping and upload it, before any slot moves.

        Args:
            request: a settled request.
            old_to_new: the new slot of each slot, or -1 for a sequence that leaves. Survivors keep their order and fill
                `0 .. new_batch_size-1`. Copied.
            new_batch_size: how many survive.
            device_batch_mapping: the caller's device `int32[m]`, `m >= batch`; receives the mapping, and is kept alive
                until `compact_batch`.

        Returns:
            `OK`; `POISONED` when a pending draft initialisation could not be proven complete.

        Raises:
            ContractError: any of that does not hold. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._of(request)
        unsettled = is_declared(live, "settle_draft")
        if not unsettled:
            require_declared(live, "begin_compaction")
        mapping, survivors = read_mapping(old_to_new, new_batch_size, live.batch.size)
        check_int32_target("device_batch_mapping", device_batch_mapping, live.batch.size, self._binding.location)
        if unsettled:
            status = self._sanitizer.sum_frozen(live, "sum_settled")
            if status is Status.OK:
                status = self._custody.fire(live, "settle_draft")
            if status is not Status.OK:
                return status
            with self._custody.committing(live):
                live.publication.publish_frozen(live.batch)
        live.compaction = PendingCompaction(mapping, survivors, device_batch_mapping)
        return self._custody.fire(live, "begin_compaction")

    @serialised
    def compact_batch(self, request: RequestHandle) -> Status:
        """Move rows, lengths and slot state to the new slots, synchronise once, then let the retired sequences go.

        Returns:
            `OK`; the request is finishing when no sequence survives. `POISONED` when the synchronisation failed: then the
            whole old batch is quarantined.

        Raises:
            ContractError: no compaction was begun. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "compact")
        status = self._custody.fire(live, "compact")
        compaction = live.compaction
        if status is not Status.OK or compaction is None:
            return status
        with self._custody.committing(live):
            for lease in live.batch.retired_leases(compaction.mapping):
                self._manager.release(lease)
            live.batch.compact(compaction.mapping)
            live.compaction = None
        return status

    # Hybrid models with MTP alone: the draft's input at a boundary folds in the base's hidden row there

    @serialised
    def publish_hybrid_mtp_endpoint(
        self,
        request: RequestHandle,
        slot: int,
        resident_state_length: int,
        base_hidden_states: Any,
        boundary_hidden_row: int,
    ) -> Status:
        """Capture and publish the state that a running prefill has reached in one sequence. Synchronises once.

        Captures recurrent state, the paired boundary pages and the hidden row. The prefill stays in flight. Nothing
        happens for a bypass, an empty prefix (length 0), a length that this sequence has published, or under pressure.

        Args:
            request: a request whose prefill is under way, in mode `MTP`.
            slot: the sequence.
            resident_state_length: leading tokens of it whose state has been enqueued, at most the prompt.
            base_hidden_states: device array `[batch, rows, hidden_size]` of the base's `hidden_dtype`. Borrowed for the
                call.
            boundary_hidden_row: its row (axis 1) for the last of those tokens.

        Returns:
            `OK`; `POISONED` when the synchronisation failed.

        Raises:
            ContractError: another deployment kind or phase, an index out of range, an array of another shape. Nothing
                has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "publish_boundary")
        row = self._hidden_row(live, slot, base_hidden_states, boundary_hidden_row)
        batch = live.batch
        length = as_integer("resident_state_length", resident_state_length, 0, int(batch.num_tokens[slot]) + 1)
        if length == 0:
            return Status.OK
        status = self._sanitizer.sum_slots(live, "sum_boundary", (slot,), np.full(batch.size, length, np.int32))
        if status is not Status.OK:
            return status
        with self._custody.committing(live):
            live.captures = live.publication.stage_boundary(batch, slot, length)
        if live.captures is None:
            return Status.OK
        live.boundary = BoundaryCopy(int(live.captures.recurrent_snapshot_slots[0]), row)
        status = self._custody.fire(live, "publish_boundary")
        live.captures = live.boundary = None
        if status is Status.OK:
            with self._custody.committing(live):
                live.publication.publish_boundary(batch, slot)
        return status

    @serialised
    def restore_hybrid_mtp_boundary_hidden(
        self, request: RequestHandle, slot: int, base_hidden_states: Any, destination_row: int
    ) -> Status:
        """Copy the hidden row of the checkpoint that a sequence was restored from to where the runtime folds it in.

        Enqueues only; no synchronisation.

        Args:
            request: a request whose prefill is under way, in mode `MTP`.
            slot: a sequence that hit a checkpoint.
            base_hidden_states: device array `[batch, rows, hidden_size]` of the base's `hidden_dtype`. Borrowed until the
                next synchronisation.
            destination_row: the row (axis 1) to write.

        Raises:
            ContractError: another deployment kind or phase, an index out of range, an array of another shape, or a
                sequence that started cold. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "restore_boundary")
        row = self._hidden_row(live, slot, base_hidden_states, destination_row)
        check_writable("base_hidden_states", view_array(base_hidden_states))
        snapshot_slot = live.batch.leases[slot].recurrent_snapshot_slot
        if snapshot_slot is None:
            raise ContractError(f"slot {slot} started cold, so no hidden row was saved for it; compute it instead")
        live.boundary = BoundaryCopy(snapshot_slot, row)
        status = self._custody.fire(live, "restore_boundary")
        live.boundary = None
        return status

    def _hidden_row(self, live: Request, slot: int, hidden_states: Any, row: int) -> HiddenRow:
        storage = self._binding.link.storage
        if storage is None or storage.hidden_rows is None:
            raise ContractError(f"a {self._kind.name} deployment saves no hidden rows; only HYBRID_MTP does")
        slot = as_integer("slot", slot, 0, live.batch.size)
        rows = check_hidden_states(storage, HiddenRow(hidden_states, slot, 0)).shape[1]
        return HiddenRow(hidden_states, slot, as_integer("the hidden row", row, 0, rows))

    # The end of a request

    @serialised
    def finish(self, request: RequestHandle) -> Status:
        """End a request: drain what is pending, publish what was frozen, release everything. Idempotent.

        Returns:
            `OK`, also for an empty handle; `POISONED` when the drain failed and the request is quarantined.

        Raises:
            ContractError: the handle is another coordinator's.
        """
        live = self._of(request, may_be_empty=True)
        if not live.held:
            return Status.OK
        status = self._sanitizer.sum_frozen(live, "sum_finished") if live.pending else Status.OK
        if status is Status.OK:
            status = self._custody.fire(live, "finish")
        if status is not Status.OK:
            return status
        try:
            if not live.discards_unpublished:
                with self._custody.committing(live):
                    live.publication.publish_frozen(live.batch)
        finally:
            self._custody.release(live)
        return status

    @serialised
    def abandon(self, request: RequestHandle) -> Status:
        """End a request without publishing: drain what is pending, release everything. Idempotent.

        Returns and raises as `finish`.
        """
        live = self._of(request, may_be_empty=True)
        return self._custody.abandon(live) if live.held else Status.OK

    def session(self, token_lists: Sequence[Any], **admission_options: Any) -> CoordinatorSession:
        """Return a session over one request, for `with`: see `ctxcache.session.CoordinatorSession`."""
        return CoordinatorSession(self, token_lists, **admission_options)

    # The whole cache

    @serialised
    def shutdown(self) -> Status:
        """Stop admitting, and end a quarantine by proving the device idle. Idempotent; published records stay.

        Returns:
            `OK`; `POISONED` when the drain failed again and the quarantine is kept; `REQUEST_FAILED` while a request is
            active.
        """
        status = self._custody.shutdown()
        if status is Status.OK:
            self._binding.unbind(self._custody)
        return status

    @serialised
    def recover(self) -> Status:
        """Reopen admission after a poisoning that `shutdown()` has ended with `OK`.

        The caller states with this call that the CUDA context is healthy; after a sticky error it is not.

        Returns:
            `OK`; there is no other outcome than that and an exception.

        Raises:
            ContractError: there was no poisoning, `shutdown()` has not returned `OK` since, or a resource has been bound to
                another coordinator meanwhile.
            InvariantError: the manager's state is damaged; the coordinator stays shut.
        """
        self._custody.quarantine.require_recoverable()
        self._binding.bind(self._custody)
        self._binding.distrust_device_rows()
        self._custody.recover()
        return Status.OK

    @serialised
    def clear(self) -> None:
        """Evict every record and forget every key: weights were reloaded, an adapter replaced under its name.

        Raises:
            ContractError: a request is active or quarantined. Nothing has changed.
        """
        if not self.idle:
            raise ContractError("clear() is refused while a request is active or quarantined; finish it first")
        self._manager.clear()
        self._identities.clear()

    @serialised
    def verify_pages(self) -> int:
        """Sum every page that is published, and compare with what was noted then. For debugging; synchronises once.

        Looks only where `ContextCacheConfig(page_sanitizer=True)` had sums noted. Possible beside an active request too: a
        shared page is never written.

        Returns:
            Pages that were compared, all of them whole.

        Raises:
            PageCorruptionError: some were written; names each page, its layer and its record.
            ContractError: the page sanitizer is off, or the coordinator is poisoned or shut down. Nothing has changed.
            DeviceError: the device failed; an active request can only be finished or abandoned.
        """
        if self._custody.refusal() is Status.POISONED:
            raise ContractError("verify_pages() is refused after a failed drain; shutdown(), then recover()")
        return self._sanitizer.verify(self._custody.active)

    @serialised
    def explain(self, admission: ContextCacheBatchAdmission) -> list[MatchExplanation]:
        """Say for each sequence what it would reuse now, and why not more. Changes nothing.

        Raises:
            ContractError: as for `begin_request`.
        """
        checked = self._rules.read_admission(admission)
        return [
            explain_match(
                index,
                sequence.tokens.size,
                self._acquirer.match(checked, sequence),
                self._tokens_per_page,
                other_identity=self._identities.knows_another(sequence.tokens, sequence.media, sequence.extras),
            )
            for index, sequence in enumerate(checked.sequences)
        ]

    def metrics(self) -> ContextCacheMetrics:
        """Return a snapshot of all counters and of the present occupancy, as they were at one moment.

        It never waits for the device, and may be called from anywhere, also in hooks.
        """
        return self._custody.ask(self._metrics)

    def _metrics(self) -> ContextCacheMetrics:
        manager, managed = self._manager, asdict(self._manager.counters())
        return ContextCacheMetrics(
            **asdict(self._counters),
            **managed,
            published_endpoints=managed["committed_publications"] + managed["existing_publications"],
            current_records=len(manager.records),
            base_kv_pages=manager.pool(ResourceType.BASE_KV_PAGE),
            draft_kv_pages=manager.pool(ResourceType.DRAFT_KV_PAGE),
            recurrent_snapshots=manager.pool(ResourceType.RECURRENT_SNAPSHOT),
            partial_kv_snapshots=manager.pool(ResourceType.PARTIAL_KV_SNAPSHOT),
        )

    @serialised
    def replace_device_ops(self, device_ops: DeviceOps) -> None:
        """Let all later device work go through other ops: wrappers of the present ones, for tests.

        Raises:
            ContractError: a request is active or quarantined. Nothing has changed.
            DeploymentError: they work on another device than the present ones. Nothing has changed.
        """
        if not self.idle:
            raise ContractError("device ops are replaced between requests; finish the present one first")
        check_devices(device_ops, self._kind, self._binding.link.resources)
        check_successor(device_ops, self._binding.link.ops)
        self._binding.link.ops = device_ops

    @property
    def manager(self) -> ContextCacheManager:
        """The manager: read it, do not mutate it."""
        return self._manager

    @property
    def poisoned(self) -> bool:
        """Whether a drain has failed, and `recover()` has not been called since."""
        return self._custody.quarantine.poisoned

    @property
    def poison_cause(self) -> BaseException | int | None:
        """The exception or the code that failed the drain, or `None`."""
        return self._custody.quarantine.cause

    @property
    def failure(self) -> str:
        """Why an operation last answered `REQUEST_FAILED`: which sequence, what it lacks, what to do. Empty before that."""
        return self._failure

    @property
    def in_forked_child(self) -> bool:
        """Whether this is a child process, whose parent owns the device: leaving a `with` block does nothing then."""
        return self._custody.in_forked_child

    @property
    def stream(self) -> Any:
        """The coordinator's one stream."""
        return self._binding.link.stream

    @property
    def resources(self) -> ContextCachePhysicalResources:
        """The caches and page tables that it was built with."""
        return self._binding.link.resources

    @property
    def device_ops(self) -> DeviceOps:
        """The ops that all device work goes through."""
        return self._binding.link.ops

    @property
    def idle(self) -> bool:
        """Whether no request is active or quarantined."""
        return self._custody.active is None and self._custody.quarantine.request is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close(self._custody, self._binding.link.resources)
        if self._custody.quarantine.shut:
            self._binding.unbind(self._custody)

    def _fail(self, reason: str) -> Status:
        """Answer that capacity is lacking, and keep and log why."""
        self._failure = reason
        _LOG.info("request failed: %s", reason)
        return Status.REQUEST_FAILED

    def _growable(self, batch: Batch, targets: PageTargets) -> NDArray[np.bool_]:
        """Tell of each sequence, `bool[batch]`, whether it can be stepped beside those before it that can."""
        return self._manager.can_grow_leases(batch.lease_rows, targets.base_pages, targets.draft_pages) & targets.fit

    def _why_not(self, batch: Batch, targets: PageTargets) -> str:
        """Say of the first sequence that cannot be stepped beside those before it why that is so."""
        slot = int(np.argmin(self._growable(batch, targets)))
        committed = int(batch.committed[slot])
        if not targets.fit[slot]:
            return (
                f"sequence {slot} of the batch has {committed} tokens with state, and a step needs room for more within "
                f"max_sequence_length {self._binding.room.max_tokens}; end it, or give a smaller headroom"
            )
        held = batch.leases[slot].base_pages.size
        wanted = f"{int(targets.base_pages[slot])} base pages and has {held}"
        if targets.draft_pages is not None:
            wanted += f", {int(targets.draft_pages[slot])} draft pages and has {batch.leases[slot].draft_pages.size}"
        return (
            f"sequence {slot} of the batch, with {committed} tokens, needs {wanted}; {self._manager.pool(ResourceType.BASE_KV_PAGE).free} "
            "base pages are free, and what leases hold cannot be evicted: end a sequence, or raise num_pages"
        )

    def _require_own_stream(self, stream: Any) -> None:
        if not same_stream(stream, self.stream):
            raise ContractError(f"the request is on stream {stream!r}; this coordinator was built for {self.stream!r}")

    def _of(self, handle: RequestHandle, *, may_be_empty: bool = False) -> Request:
        """Return the request of one of this coordinator's handles."""
        if not isinstance(handle, RequestHandle):
            raise ContractError(f"request is a {type(handle).__name__}; pass the RequestHandle of an admission")
        return handle.request_of(self, may_be_empty=may_be_empty)

    def _live(self, handle: RequestHandle, trigger: str) -> Request:
        """Return the request of a handle, in a state from which the lifecycle has the trigger."""
        request = self._of(handle)
        require_declared(request, trigger)
        return request
