"""The steps of a runtime around a model without weights, on whatever device ops it is given.

Every byte that the model reads is held against the oracle. Each step is one method; one that does not end with `OK` raises
`RequestEnded`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ctxcache.coordinator import ContextCacheCoordinator
from ctxcache.device.ops import DeviceOps
from ctxcache.device.resources import make_resources
from ctxcache.ids import ContextCacheCommitPolicy, ContextCacheLookupPolicy
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.request.execution_modes import STEP_RULES, CommonLengths
from ctxcache.request.handle import BeginRequestResult, RequestHandle
from ctxcache.testing.deferred import Use
from ctxcache.testing.oracle import Transcript
from ctxcache.testing.runtime.deployments import (
    SPECULATIVE_MODES,
    STEP_TOKENS,
    Sizes,
    make_config,
    make_deployment,
    make_hidden_states,
)
from ctxcache.testing.runtime.identities import Media, extras_of, media_of
from ctxcache.testing.runtime.lengths import LengthRules
from ctxcache.testing.runtime.synchronizer import ScriptedSynchronizer
from ctxcache.testing.runtime.work import MODEL_ROW, RESTORED_ROW, ModelWork, Running, sample

_REMEMBERED = 6
"""Sequences that a runtime remembers."""


class RequestEnded(Exception):  # noqa: N818 - an outcome, not an error
    """The request is over, or as good as over: a step did not end with `OK`."""


class Runtime:
    """One deployment, its coordinator, and at most one request.

    Attributes:
        kind, sizes: as asked for.
        ops: what the coordinator is given; the innermost ops that they wrap allocate.
        stream: the coordinator's.
        sync: the synchroniser; a `ScriptedSynchronizer` unless another one is given.
        config: the cache's configuration.
        resources: pools and page tables.
        mapping: device array for compactions.
        hidden: the base's hidden rows; `None` where nothing saves them.
        coordinator: under test.
        violations: wrong bytes, rows and lengths that the model found.
        handle: the present request's, or the last one's.
        mode: its execution mode.
        running: its sequences in slot order; empty between requests.
        model_failed: whether a wait of the request failed, so that nothing of it may be kept.
        history: the tokens of sequences that ended lately; what a conversation goes on from.
        device_failed: whether an operation of the request failed on the device; set by whoever caught it.
    """

    def __init__(
        self,
        kind: Kind,
        sizes: Sizes,
        ops: DeviceOps,
        *,
        stream: Any = None,
        synchronizer: Any = None,
        **settings: Any,
    ) -> None:
        self.kind = kind
        self.sizes = sizes
        self.ops = ops
        self.stream = stream
        self.sync = ScriptedSynchronizer() if synchronizer is None else synchronizer
        self.deployment = make_deployment(kind, sizes)
        self.config = make_config(self.deployment, sizes, **settings)
        allocator = _innermost(ops)
        self.resources = make_resources(self.deployment, stream, allocator)
        self.mapping = allocator.allocate((sizes.max_batch,), "int32")
        self.hidden = make_hidden_states(self.deployment, allocator)
        self.coordinator = self.build()
        self.violations: list[str] = []
        self.handle: RequestHandle | None = None
        self.running: list[Running] = []
        self.mode = Mode.VANILLA
        self.model_failed = False
        self.device_failed = False
        self.history: deque[tuple[int, ...]] = deque(maxlen=_REMEMBERED)
        self._next_running: list[Running] = []
        self._model = ModelWork(self.resources, self.hidden, self.enqueue, self.violations)
        self._lengths = LengthRules(self.sizes, has_pages=kind is not Kind.PURE_RECURRENT)
        self._step: tuple[list[ContextCacheSequenceAdvance], list[int]] = ([], [])

    def build(self) -> ContextCacheCoordinator:
        """Build a coordinator over the resources; the first one must have let go of them."""
        return ContextCacheCoordinator(
            self.config, self.deployment, self.kind, self.resources, self.stream, self.sync, device_ops=self.ops
        )

    def enqueue(self, work: Callable[[], None], uses: Sequence[Use]) -> None:
        """Let the model work: at once, and looking into an array waits for it where that is needed."""
        del uses
        work()

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
        result = self.try_begin(admission, headroom, owners)
        if result.admission is None:
            raise RequestEnded(f"begin_request: {result.status.name}")
        if result.admission.prefill_starts[0] not in (explained, 0):  # 0: only a cold retry fitted
            self.violations.append(f"explain said {explained}, reused are {result.admission.prefill_starts[0]}")
        return result.admission.prefill_starts

    def try_begin(
        self,
        admission: ContextCacheBatchAdmission,
        headroom: DecodingKvHeadroom | None = None,
        identities: Sequence[int] = (),
    ) -> BeginRequestResult:
        """Begin a request, whatever comes of it; where it begins, the model runs it from now on."""
        result = self.coordinator.begin_request(admission, self.stream, headroom=headroom)
        if result.admission is not None:
            prompts = [sequence.token_ids for sequence in admission.sequences]
            media = [sequence.per_position_media_hash for sequence in admission.sequences]
            self.follow(result.admission.request, prompts, admission.execution_mode, identities, media)
        return result

    def follow(
        self,
        handle: RequestHandle,
        prompts: Sequence[Any],
        mode: Mode = Mode.VANILLA,
        identities: Sequence[int] = (),
        media: Sequence[Any] = (),
    ) -> None:
        """Run a request that was admitted, each prompt of its own identity where those are given."""
        self.handle = handle
        self.mode = mode
        self.model_failed = self.device_failed = False
        self.running = []
        for slot, (prompt, state) in enumerate(zip(prompts, handle.inspect().sequences, strict=True)):
            transcript = Transcript(prompt, identities[slot] if identities else 0)
            start = state.reuse_token_length
            digests: Media = media[slot] if media else None
            self.running.append(Running(state.lease, digests, transcript, start, start, 0, start, start))

    def prepare(self) -> None:
        """Bind the request to the device; what lies in the slots is another request's until then."""
        self._must(self.coordinator.prepare_prefill(self.request))
        self.check_capacities()

    def compute_prompts(self, endpoints: Iterable[int] = ()) -> None:
        """Enqueue the prefill. With MTP it pauses at the given lengths, where endpoints are published."""
        for slot, running in enumerate(self.running):
            end = len(running.transcript)
            stops = [length for length in endpoints if running.reused < length <= end] if self.mode is Mode.MTP else []
            if self.mode is Mode.MTP and running.reused:
                self._must(
                    self.coordinator.restore_hybrid_mtp_boundary_hidden(self.request, slot, self.hidden, RESTORED_ROW)
                )
                self._model.fold(slot, running)
            for stop in dict.fromkeys((*stops, end)):
                self._compute(slot, running, stop, "prefill")
                if stop in stops:
                    self._model.leave_hidden_row(slot, running, stop)
                    self._must(
                        self.coordinator.publish_hybrid_mtp_endpoint(self.request, slot, stop, self.hidden, MODEL_ROW)
                    )

    def capture(self) -> None:
        """Let checkpoints be captured behind the prefill."""
        self._must(self.coordinator.enqueue_prefill_captures(self.request))

    def wait(self) -> None:
        """Synchronise, as a runtime does before it looks at what its model computed; the model here has done it."""

    def finalize(self) -> None:
        """Report the prompts complete, and let the draft initialise behind them where it does."""
        advances = self.sample_first()
        self._must(
            self.coordinator.finalize_prefill_publication(
                self.request, advances, self.common_lengths([running.common for running in self.running])
            )
        )
        if self.mode is Mode.EAGLE:
            for slot, running in enumerate(self.running):
                self._model.compute_draft(slot, running, running.common, running.common, "draft initialisation")

    def sample_first(self) -> list[ContextCacheSequenceAdvance]:
        """Sample the token behind every prompt; returns what is to be reported."""
        advances = []
        for running in self.running:
            token = self.sample(running.transcript)
            running.transcript.extend([token])
            running.common = running.committed
            advances.append(ContextCacheSequenceAdvance([token], running.committed))
        return advances

    def sample(self, transcript: Transcript) -> int:
        """Return the token that follows."""
        return sample(transcript)

    def grow(self, headroom: DecodingKvHeadroom | None = None) -> None:
        """Prepare a decode step, which must come out as was foretold, and as the lengths say."""
        foretold = bool(self.coordinator.can_prepare_decode_step(self.request, headroom=headroom).all())
        targets = self._lengths.targets(self.mode, [running.committed for running in self.running], headroom)
        leases = [running.lease for running in self.running]
        roomy = targets is not None and self._lengths.has_pages_for(
            self.coordinator.manager, self.mode, leases, targets
        )
        status = self.coordinator.prepare_decode_step(self.request, headroom=headroom)
        if foretold is (status is Status.REQUEST_FAILED):
            self.violations.append(f"a step that {'could' if foretold else 'could not'} be prepared gave {status.name}")
        if targets is None and status is Status.OK:
            self.violations.append("a step was prepared that would compute beyond the longest sequence")
        if roomy and status is Status.REQUEST_FAILED:
            self.violations.append("a step was refused for which there is room in every row, and pages are free")
        self._must(status)
        self.check_capacities(targets)

    def check_capacities(self, targets: Sequence[tuple[int, int]] | None = None) -> None:
        """Hold how far the sequences may write against their pages, and against what the step aims at."""
        for slot, state in enumerate(self.request.inspect().sequences):
            found, aim = (state.capacity, state.draft_capacity), None if targets is None else targets[slot]
            wrong = self._lengths.wrong_capacities(self.mode, state.lease, found, aim)
            if wrong:
                self.violations.append(f"slot {slot}: {wrong}")
        if self.request.capacities.tolist() != [state.capacity for state in self.request.inspect().sequences]:
            self.violations.append(
                f"capacities are {self.request.capacities.tolist()}, and the sequences say otherwise"
            )

    def roomy_headroom(self, more_tokens: int) -> DecodingKvHeadroom:
        """Return the mode's own headroom and so many tokens more, of every kind of page that it has."""
        base, draft = STEP_TOKENS[self.mode]
        return DecodingKvHeadroom(base + more_tokens, draft + more_tokens if self.paired else 0)

    def compute_step(self, accepted: Sequence[int] = (), lags: Sequence[int] = ()) -> None:
        """Enqueue one step: every sequence accepts so many tokens, and its draft lags so many behind (EAGLE)."""
        advances, common = [], []
        rules = STEP_RULES[self.mode]
        base_tokens, draft_tokens = STEP_TOKENS[self.mode]
        for slot, (running, state) in enumerate(zip(self.running, self.request.inspect().sequences, strict=True)):
            wanted = accepted[slot % len(accepted)] if accepted else 1
            before = running.committed
            room = min(base_tokens, state.capacity - before)
            drafts = not self.paired or before < state.draft_capacity  # behind the draft's end there are none
            count = max(1, min(wanted, room)) if drafts and not rules.single_token else 1
            tokens = []
            for _ in range(count):
                tokens.append(self.sample(running.transcript))
                running.transcript.extend(tokens[-1:])
            self._compute(slot, running, before + count, "step", junk_stop=before + (room if drafts else 1))
            advances.append(ContextCacheSequenceAdvance(tokens, running.committed))
            lag = lags[slot % len(lags)] if lags else 0
            running.common = max(running.common, min(running.committed - lag, state.draft_capacity))
            if self.paired:
                valid = running.common if self.mode is Mode.EAGLE else min(running.committed, state.draft_capacity)
                junk = min(max(valid, before + draft_tokens), state.draft_capacity)
                self._model.compute_draft(slot, running, valid, junk, "draft step")
            common.append(running.common)
        self._step = (advances, common)

    def complete(self, completed: Sequence[int] = ()) -> None:
        """Report the step complete; `completed` slots may keep their generated state."""
        advances, common = self._step
        self._must(
            self.coordinator.complete_decode_step(self.request, advances, tuple(completed), self.common_lengths(common))
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
        self._must(self.coordinator.begin_batch_compaction(self.request, mapping, len(kept), self.mapping))
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

    def spoil_states(self) -> None:
        """Leave in every recurrent slot what another request would."""
        self._model.spoil_states()

    def _compute(self, slot: int, running: Running, stop: int, what: str, *, junk_stop: int = 0) -> None:
        self._model.compute(slot, running, stop, what, junk_stop=junk_stop, batch=len(self.running))
        if self.mode is Mode.MTP:
            draft_stop = min(stop - 1, self.sizes.longest_draft)
            self._model.compute_draft(slot, running, draft_stop, draft_stop, f"draft {what}")

    def common_lengths(self, lengths: list[int]) -> list[int] | None:
        """Return what is reported of the lengths on which base and draft agree."""
        return None if STEP_RULES[self.mode].common_lengths is CommonLengths.REFUSED else lengths

    def _must(self, status: Status) -> None:
        if status is not Status.OK:
            raise RequestEnded(status.name)


def _innermost(ops: Any) -> Any:
    while hasattr(ops, "inner"):
        ops = ops.inner
    return ops
