"""From checked sequences to leases: hash, plan, acquire, and one cold retry; the whole batch or nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ctxcache.ids import (
    AcquireStatus,
    ReusePlanKind,
    SpecReplayMode,
)
from ctxcache.keys.chain import KeyHasher, SequenceKeys
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.results import CacheRequestLease, HybridCheckpointKey, MatchResult, ReusePlan
from ctxcache.metrics import CoordinatorCounters
from ctxcache.request.batch import AcquiredSequence
from ctxcache.request.execution_modes import STEP_RULES
from ctxcache.request.validation import CheckedAdmission, CheckedSequence


@dataclass(slots=True, eq=False)
class Acquisition:
    """What a batch has got: one acquired sequence a slot, and how many of them only fitted cold."""

    sequences: list[AcquiredSequence] = field(default_factory=list)
    forced_cold: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class AcquireSequenceResult:
    """One sequence's acquisition: its lease, how it went, by which plan, and whether only a cold retry fitted."""

    lease: CacheRequestLease | None
    status: AcquireStatus
    plan: ReusePlan
    forced_cold: bool = False


class Acquirer:
    """Turns admissions into leases. Counts nothing but the time it took until the whole batch is in."""

    def __init__(
        self,
        manager: ContextCacheManager,
        hasher: KeyHasher,
        counters: CoordinatorCounters,
        *,
        has_checkpoints: bool,
    ) -> None:
        self._manager = manager
        self._has_checkpoints = has_checkpoints
        self._hasher = hasher
        self._counters = counters

    def acquire(self, admission: CheckedAdmission) -> Acquisition | None:
        """Acquire every sequence in order; `None` when one does not fit, and then none is held.

        What raises leaves leases out, the last of them perhaps noted nowhere: see `ContextCacheManager.release_all`.
        """
        started = time.perf_counter_ns()
        acquisition = Acquisition()
        try:
            for sequence in admission.sequences:
                keys = self._hasher.start(sequence.extras)
                result = self._acquire_one(admission, sequence, keys)
                if result.lease is None:
                    for acquired in reversed(acquisition.sequences):
                        self._manager.release(acquired.lease)
                    return None
                acquisition.sequences.append(AcquiredSequence(sequence, keys, result.plan, result.lease))
                acquisition.forced_cold += result.forced_cold
        finally:
            self._counters.planning_nanoseconds += time.perf_counter_ns() - started
        return acquisition

    def _plan(
        self, admission: CheckedAdmission, sequence: CheckedSequence, keys: SequenceKeys, *, bypass: bool
    ) -> ReusePlan:
        headroom = admission.headroom
        return self._manager.plan(
            keys.full_block_keys,
            sequence.tokens.size,
            mode=admission.execution_mode,
            base_extra_tokens=headroom.base_extra_tokens,
            draft_extra_tokens=headroom.draft_extra_tokens if STEP_RULES[admission.execution_mode].paired else 0,
            bypass=bypass,
            exact_keys=() if bypass else self._longest_checkpoint(sequence, keys),
        )

    def _longest_checkpoint(self, sequence: CheckedSequence, keys: SequenceKeys) -> list[HybridCheckpointKey]:
        """Return the key of the longest checkpoint that this input can start from, if there is one."""
        if not self._has_checkpoints:
            return []
        tokens, media = sequence.tokens, sequence.media
        key = self._manager.longest_checkpoint(
            keys.full_block_keys, tokens.size, lambda blocks: keys.exact_keys_behind(tokens, media, blocks)
        )
        return [] if key is None else [key]

    def _possible_checkpoints(self, sequence: CheckedSequence, keys: SequenceKeys) -> list[HybridCheckpointKey]:
        """Return the keys of all lengths at which this input could have met a checkpoint, and of the whole input.

        For those who ask why: a checkpoint of the whole input cannot serve it.
        """
        if not self._has_checkpoints:
            return []
        num_tokens = sequence.tokens.size
        lengths = self._manager.candidate_checkpoint_lengths(keys.full_block_keys, num_tokens).tolist()
        return [
            HybridCheckpointKey(keys.exact_key(sequence.tokens, sequence.media, length), length)
            for length in [num_tokens, *lengths]
        ]

    def _acquire_one(
        self, admission: CheckedAdmission, sequence: CheckedSequence, keys: SequenceKeys
    ) -> AcquireSequenceResult:
        """Hash, plan and acquire; where a hit pins exactly what eviction would need, once more without it.

        `keys` are extended by what is looked up: nothing, when the sequence bypasses the cache.
        """
        if not admission.bypass:
            keys.extend(sequence.tokens, sequence.media)
        plan = self._plan(admission, sequence, keys, bypass=admission.bypass)
        result = self._manager.acquire(plan)
        forced_cold = result.status is AcquireStatus.INSUFFICIENT_CAPACITY and plan.reused_token_length > 0
        if forced_cold:
            result = self._manager.acquire(self._plan(admission, sequence, keys, bypass=True))
        return AcquireSequenceResult(result.lease, result.status, result.plan, forced_cold)

    def match(self, admission: CheckedAdmission, sequence: CheckedSequence) -> MatchResult:
        """Say how far one sequence matches, and what stopped it. Changes nothing."""
        keys = self._hasher.start(sequence.extras)
        keys.extend(sequence.tokens, sequence.media)
        return self._manager.match(
            keys.full_block_keys,
            sequence.tokens.size,
            mode=admission.execution_mode,
            bypass=admission.bypass,
            exact_keys=self._possible_checkpoints(sequence, keys),
        )

    def count(self, acquisition: Acquisition, *, bypass: bool) -> None:
        """Move the admission counters for a batch that was admitted whole."""
        counters = self._counters
        counters.admitted_sequences += len(acquisition.sequences)
        counters.forced_cold_sequences += acquisition.forced_cold
        if bypass:
            counters.lookup_bypass_sequences += len(acquisition.sequences)
        for sequence in acquisition.sequences:
            plan = sequence.plan
            counters.media_aware_sequences += sequence.said.has_media
            counters.hit_sequences += plan.matched_token_length > 0
            counters.matched_tokens += plan.matched_token_length
            counters.reused_tokens += plan.reused_token_length
            counters.standard_plans += plan.kind is ReusePlanKind.STANDARD
            counters.no_reusable_prefix_plans += plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX
            counters.full_input_rewind_plans += plan.kind is ReusePlanKind.FULL_INPUT_REWIND
            counters.spec_full_page_replays += plan.spec_replay_mode is SpecReplayMode.FULL_PAGE
