"""A runtime around a model without weights, as careful as a real one must be: what the sweep and the simulation drive.

It enqueues its model's work on a lazy stream, synchronises where a runtime does, and every byte that it reads is held
against the oracle. Each step is one method; one that does not end with `OK` raises `RequestEnded`.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ctxcache.admission import (
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.coordinator import ContextCacheCoordinator
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.handle import RequestHandle
from ctxcache.identity import BlockKeyExtras
from ctxcache.ids import ContextCacheCommitPolicy, ContextCacheLookupPolicy, ResourceType
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.modes import STEP_RULES, CommonLengths
from ctxcache.outcomes import CacheRequestLease
from ctxcache.testing.deferred import DeferredDeviceOps, Use
from ctxcache.testing.deployments import (
    SPECULATIVE_MODES,
    STEP_TOKENS,
    Sizes,
    make_config,
    make_deployment,
    make_hidden_states,
    make_resources,
)
from ctxcache.testing.fake_model import HiddenModel, PagedModel, RecurrentModel, Span
from ctxcache.testing.faults import OUTSIDE, FaultInjector, FaultPlan
from ctxcache.testing.identities import Media, extras_of, media_behind, media_of
from ctxcache.testing.key_oracle import KeyOracle
from ctxcache.testing.ledger import OwnershipLedger
from ctxcache.testing.oracle import Part, Transcript
from ctxcache.testing.probes import probe_poisoned

_MODEL_ROW, _RESTORED_ROW = 0, 1
"""Rows of the hidden states: where the model leaves its own, and where a restored one goes."""


_REMEMBERED = 6
"""Sequences that a runtime remembers."""


class RequestEnded(Exception):  # noqa: N818 - an outcome, not an error
    """The request is over, or as good as over: a step did not end with `OK`."""


class WaitFailed(Exception):  # noqa: N818 - likewise
    """The runtime's own synchronisation failed: its model did not run to the end."""


@dataclass(slots=True, eq=False)
class Running:
    """One sequence of the batch, as the runtime knows it. Lengths are in tokens.

    Attributes:
        lease: its hold on pages, to be read.
        media: digests of its prompt's positions, `None` for text.
        transcript: its tokens.
        reused: what the prefill did not compute.
        committed: tokens whose state is materialised, or will be once the stream has run.
        common: tokens on which base and draft agree.
        draft_valid: tokens whose draft state holds.
        draft_length: the draft's device length.
    """

    lease: CacheRequestLease
    media: Media
    transcript: Transcript
    reused: int
    committed: int
    common: int
    draft_valid: int
    draft_length: int


class FakeRuntime:
    """One deployment, its coordinator, and at most one request.

    Attributes:
        kind, sizes, page_sanitizer: as asked for.
        deferred: the lazy stream.
        ops: what the coordinator is given: faults around the lazy stream.
        coordinator: under test.
        ledger: looks at every change of an owner.
        violations: wrong bytes, rows and lengths that the model found.
        handle: the present request's, or the last one's.
        running: its sequences in slot order; empty between requests.
        outcomes: what the synchroniser answers next, in order; then success.
        model_failed: whether a wait of the request failed, so that nothing of it may be kept.
        history: the tokens of sequences that ended lately; what a conversation goes on from.
        device_failed: whether an operation of the request failed on the device; set by whoever caught it.
    """

    def __init__(
        self,
        kind: Kind,
        sizes: Sizes | None = None,
        *,
        seed: int = 0,
        plan: FaultPlan | None = None,
        page_sanitizer: bool = False,
    ) -> None:
        self.kind = kind
        self.page_sanitizer = page_sanitizer
        self.sizes = Sizes() if sizes is None else sizes
        self.deployment = make_deployment(kind, self.sizes)
        host = NumpyDeviceOps()
        self.deferred = DeferredDeviceOps(host, random.Random(seed))  # noqa: S311 - a schedule is no secret
        self.ops = FaultInjector(self.deferred, plan)
        self.resources = make_resources(self.deployment, host)
        self.outcomes: list[int | None] = []
        self.coordinator = ContextCacheCoordinator(
            make_config(self.deployment, self.sizes, page_sanitizer=page_sanitizer),
            self.deployment,
            kind,
            self.resources,
            None,
            self._answer,
            device_ops=self.ops,
        )
        self.ledger = OwnershipLedger(self.coordinator, self.deferred)
        self.violations: list[str] = []
        KeyOracle(self.coordinator.manager, self._identity_of, self.violations)
        self.handle: RequestHandle | None = None
        self.running: list[Running] = []
        self.mode = Mode.VANILLA
        self.model_failed = False
        self.device_failed = False
        self.history: deque[tuple[int, ...]] = deque(maxlen=_REMEMBERED)
        self._mapping = host.allocate((self.sizes.max_batch,), "int32")
        self._next_running: list[Running] = []
        self._num_poisonings = 0
        self._hidden = make_hidden_states(self.deployment, host)
        base, draft = self.resources.base_cache, self.resources.draft_cache
        self._base = PagedModel(base, self.resources.base_page_table, (Part.KEY, Part.VALUE), self.violations)
        self._recurrent = RecurrentModel(base, self.violations)
        self._draft: PagedModel | None = None
        if draft is not None:
            parts = (Part.DRAFT_KEY, Part.DRAFT_VALUE)
            self._draft = PagedModel(draft, self.resources.draft_page_table, parts, self.violations)
        self._hidden_model = None if self._hidden is None else HiddenModel(self._hidden, self.violations)
        self._step: tuple[list[ContextCacheSequenceAdvance], list[int]] = ([], [])

    @property
    def native_mode(self) -> Mode:
        """The mode that the deployment is made for."""
        return SPECULATIVE_MODES.get(self.kind, Mode.VANILLA)

    @property
    def paired(self) -> bool:
        """Whether the present request runs a draft with pages of its own."""
        return STEP_RULES[self.mode].paired

    @property
    def request(self) -> RequestHandle:
        """The present request's handle."""
        if self.handle is None:
            raise RequestEnded("no request was begun")
        return self.handle

    # The steps of a request

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        mode: Mode | None = None,
        identities: Sequence[int] = (),
        bypass: bool = False,
        prefill_only: bool = False,
        headroom: DecodingKvHeadroom | None = None,
    ) -> list[int]:
        """Admit prompts, each of its own identity where those are given; returns where prefill starts."""
        chosen = self.native_mode if mode is None else mode
        owners = [*identities, *(0 for _ in prompts)][: len(prompts)]
        media = [media_of(owner, prompt) for owner, prompt in zip(owners, prompts, strict=True)]
        policies = ContextCacheCommitPolicy
        admission = ContextCacheBatchAdmission(
            [
                ContextCacheSequenceAdmission(prompt, extras_of(owner), digests)
                for prompt, owner, digests in zip(prompts, owners, media, strict=True)
            ],
            chosen,
            ContextCacheLookupPolicy.BYPASS if bypass else ContextCacheLookupPolicy.USE_CACHE,
            policies.PREFILL_STATE_ONLY if prefill_only else policies.INCLUDING_GENERATED_TOKENS,
        )
        explained = self.coordinator.explain(admission)[0].reused_tokens
        result = self.coordinator.begin_request(admission, None, headroom=headroom)
        if result.admission is None:
            raise RequestEnded(f"begin_request: {result.status.name}")
        if result.admission.prefill_starts[0] not in (explained, 0):  # 0: only a cold retry fitted
            self.violations.append(f"explain said {explained}, reused are {result.admission.prefill_starts[0]}")
        self.handle = result.admission.request
        self.mode = chosen
        self.model_failed = self.device_failed = False
        self.running = [
            Running(state.lease, digests, Transcript(prompt, owner), start, start, 0, start, start)
            for prompt, owner, digests, start, state in zip(
                prompts, owners, media, result.admission.prefill_starts, self.handle.inspect().sequences, strict=True
            )
        ]
        return result.admission.prefill_starts

    def prepare(self) -> None:
        """Bind the request to the device; what lies in the slots is another request's until then."""
        self._must(self.coordinator.prepare_prefill(self.request))

    def compute_prompts(self, endpoints: Iterable[int] = ()) -> None:
        """Enqueue the prefill. With MTP it pauses at the given lengths, where endpoints are published."""
        for slot, running in enumerate(self.running):
            end = len(running.transcript)
            stops = [length for length in endpoints if running.reused < length <= end] if self.mode is Mode.MTP else []
            if self.mode is Mode.MTP and running.reused:
                self._must(
                    self.coordinator.restore_hybrid_mtp_boundary_hidden(self.request, slot, self._hidden, _RESTORED_ROW)
                )
                self._fold(slot, running)
            for stop in dict.fromkeys((*stops, end)):
                self._compute(slot, running, stop, "prefill")
                if stop in stops:
                    self._leave_hidden_row(slot, running, stop)
                    self._must(
                        self.coordinator.publish_hybrid_mtp_endpoint(self.request, slot, stop, self._hidden, _MODEL_ROW)
                    )

    def capture(self) -> None:
        """Let checkpoints be captured behind the prefill."""
        self._must(self.coordinator.enqueue_prefill_captures(self.request))

    def wait(self) -> None:
        """Synchronise, as a runtime does before it looks at what its model computed."""
        self.ops.operation(OUTSIDE)
        self.model_failed = True
        try:
            code = self.ops.synchronize(None, self._answer)
        except Exception as error:
            raise WaitFailed(repr(error)) from error
        if code:
            raise WaitFailed(f"code {code}")
        self.model_failed = False

    def finalize(self) -> None:
        """Report the prompts complete, and let the draft initialise behind them where it does."""
        advances = []
        for running in self.running:
            length = running.committed
            token = self._sample(running)
            running.transcript.extend([token])
            running.common = length
            advances.append(ContextCacheSequenceAdvance([token], length))
        status = self.coordinator.finalize_prefill_publication(
            self.request, advances, self._common([r.common for r in self.running])
        )
        self._must(status)
        if self.mode is Mode.EAGLE:
            for slot, running in enumerate(self.running):
                self._compute_draft(slot, running, running.common, running.common, "draft initialisation")

    def grow(self, headroom: DecodingKvHeadroom | None = None) -> None:
        """Prepare a decode step, which must come out as was foretold."""
        foretold = bool(self.coordinator.can_prepare_decode_step(self.request, headroom=headroom).all())
        status = self.coordinator.prepare_decode_step(self.request, headroom=headroom)
        if foretold is (status is Status.REQUEST_FAILED):
            self.violations.append(f"a step that {'could' if foretold else 'could not'} be prepared gave {status.name}")
        self._must(status)

    def roomy_headroom(self, more_tokens: int) -> DecodingKvHeadroom:
        """Return the mode's own headroom and so many tokens more, of every kind of page that it has."""
        base, draft = STEP_TOKENS[self.mode]
        return DecodingKvHeadroom(base + more_tokens, draft + more_tokens if self.paired else 0)

    def compute_step(self, accepted: Sequence[int] = (), lags: Sequence[int] = ()) -> None:
        """Enqueue one step: every sequence accepts so many tokens, and its draft lags so many behind (EAGLE)."""
        advances, common = [], []
        rules = STEP_RULES[self.mode]
        base_tokens, draft_tokens = STEP_TOKENS[self.mode]
        for slot, running in enumerate(self.running):
            wanted = accepted[slot % len(accepted)] if accepted else 1
            count = 1 if rules.single_token else max(1, min(wanted, base_tokens))
            before = running.committed
            tokens = []
            for _ in range(count):
                tokens.append(self._sample(running))
                running.transcript.extend(tokens[-1:])
            self._compute(slot, running, before + count, "step", junk_stop=before + base_tokens)
            advances.append(ContextCacheSequenceAdvance(tokens, running.committed))
            lag = lags[slot % len(lags)] if lags else 0
            running.common = max(running.common, running.committed - lag)
            if self._draft is not None and self.paired:
                valid = running.common if self.mode is Mode.EAGLE else running.committed
                junk = max(valid, before + draft_tokens)
                self._compute_draft(slot, running, valid, junk, "draft step")
            common.append(running.common)
        self._step = (advances, common)

    def complete(self, completed: Sequence[int] = ()) -> None:
        """Report the step complete; `completed` slots may keep their generated state."""
        advances, common = self._step
        self._must(
            self.coordinator.complete_decode_step(self.request, advances, tuple(completed), self._common(common))
        )

    def decode(self, completed: Sequence[int] = (), accepted: Sequence[int] = (), lags: Sequence[int] = ()) -> None:
        """One whole decode step."""
        self.grow()
        self.compute_step(accepted, lags)
        self.wait()
        self.complete(completed)

    def prefill(self, endpoints: Iterable[int] = ()) -> None:
        """One whole prefill."""
        self.prepare()
        self.compute_prompts(endpoints)
        self.capture()
        self.wait()
        self.finalize()

    def begin_compaction(self, keep: Sequence[int]) -> None:
        """Begin to let all slots go but those in `keep`."""
        kept = sorted(slot for slot in set(keep) if slot < len(self.running))
        mapping = [kept.index(slot) if slot in kept else -1 for slot in range(len(self.running))]
        self._must(self.coordinator.begin_batch_compaction(self.request, mapping, len(kept), self._mapping))
        self._next_running = [self.running[slot] for slot in kept]

    def compact(self) -> None:
        """Move the survivors."""
        self._must(self.coordinator.compact_batch(self.request))
        self.running = self._next_running

    def finish(self) -> None:
        """End the request, keeping what it has published. After a device failure nothing more may be published."""
        self.history.extend(tuple(running.transcript.tokens) for running in self.running)
        before = self.coordinator.manager.counters().publication_attempts
        status = self.coordinator.finish(self.request)
        if self.device_failed and self.coordinator.manager.counters().publication_attempts != before:
            self.violations.append("a finish published what a device failure had made worthless")
        self._must(status)
        self.running = []

    def abandon(self) -> None:
        """End the request without publishing anything."""
        self._must(self.coordinator.abandon(self.request))
        self.running = []

    def drop(self) -> None:
        """Lose the handle, as a runtime does that forgets it; the collector abandons the request."""
        self.running = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            self.handle = None

    def settle(self) -> bool:
        """Do what is to be done after anything went wrong; returns whether the coordinator admits again.

        Abandons what is left, and after a failed drain shuts down and recovers; every other such device has lost the work
        that had not run. May raise what the coordinator raises.
        """
        self.running = []
        if self.handle is not None and self.handle.valid:
            self.coordinator.abandon(self.handle)
        if self.coordinator.poisoned:
            probe_poisoned(self)
            self._num_poisonings += 1
            if self._num_poisonings % 2:
                self.deferred.lose_waiting()
            if self.coordinator.shutdown() is Status.OK:
                probe_poisoned(self)
                self.coordinator.recover()
        return not self.coordinator.poisoned

    def spoil_states(self) -> None:
        """Leave in every recurrent slot what another request would."""
        self._recurrent.spoil(0x5A5A5A5A5A5A5A5A)

    # The model

    def _compute(self, slot: int, running: Running, stop: int, what: str, *, junk_stop: int = 0) -> None:
        start, transcript = running.committed, running.transcript
        row = tuple(running.lease.base_pages.tolist())
        span = Span(valid=start, start=start, stop=stop, junk_stop=max(stop, junk_stop), length=start, row=row)
        running.committed = stop

        batch = len(self.running)

        def work() -> None:
            self._base.run(slot, transcript, span, what)
            self._base.check_idle_rows(batch, what)
            self._recurrent.run(slot, transcript, start, stop, what)

        self.deferred.enqueue(work, uses=self._uses(running.lease, ResourceType.BASE_KV_PAGE, span, what))
        if self.mode is Mode.MTP:
            self._compute_draft(slot, running, stop - 1, stop - 1, f"draft {what}")

    def _compute_draft(self, slot: int, running: Running, stop: int, junk_stop: int, what: str) -> None:
        model, transcript = self._draft, running.transcript
        if model is None or stop < running.draft_valid:
            return
        start = running.draft_valid
        row, junk_stop = tuple(running.lease.draft_pages.tolist()), max(stop, junk_stop)
        span = Span(valid=start, start=start, stop=stop, junk_stop=junk_stop, length=running.draft_length, row=row)
        running.draft_valid = running.draft_length = stop
        uses = self._uses(running.lease, ResourceType.DRAFT_KV_PAGE, span, what)
        self.deferred.enqueue(lambda: model.run(slot, transcript, span, what), uses=uses)

    def _fold(self, slot: int, running: Running) -> None:
        """Compute the draft's state of the boundary token from the restored hidden row."""
        transcript, length, model = running.transcript, running.reused, self._hidden_model
        running.draft_valid = length - 1
        if model is not None:
            self.deferred.enqueue(lambda: model.check(slot, _RESTORED_ROW, transcript, length, "fold"))
        self._compute_draft(slot, running, length, length, "fold")

    def _leave_hidden_row(self, slot: int, running: Running, length: int) -> None:
        transcript, model = running.transcript, self._hidden_model
        if model is not None:
            self.deferred.enqueue(lambda: model.write(slot, _MODEL_ROW, transcript, length))

    def _uses(self, lease: CacheRequestLease, resource: ResourceType, span: Span, what: str) -> list[Use]:
        pages = (lease.base_pages if resource is ResourceType.BASE_KV_PAGE else lease.draft_pages).tolist()
        first, size = span.start // self.sizes.tokens_per_page, self.sizes.tokens_per_page
        last = -(-span.junk_stop // size)
        writes = span.junk_stop > span.start
        return [Use(resource, page, writes and first <= index < last, what) for index, page in enumerate(pages[:last])]

    def _identity_of(self, lease: CacheRequestLease) -> tuple[list[int], BlockKeyExtras, Media] | None:
        """Return whose tokens a lease holds."""
        running = next((running for running in self.running if running.lease is lease), None)
        if running is None:
            return None
        said = running.transcript
        return said.tokens, extras_of(said.identity), media_behind(running.media, len(said))

    def _sample(self, running: Running) -> int:
        """Return the token that follows: a function of all that came before, from a tiny vocabulary."""
        words = running.transcript.words(Part.KEY, 0, len(running.transcript) - 1, len(running.transcript))
        return int(words[0] % 3)

    def _common(self, lengths: list[int]) -> list[int] | None:
        return None if STEP_RULES[self.mode].common_lengths is CommonLengths.REFUSED else lengths

    def _answer(self, stream: Any) -> int | None:
        del stream
        return self.outcomes.pop(0) if self.outcomes else None

    def _must(self, status: Status) -> None:
        if status is not Status.OK:
            raise RequestEnded(status.name)
