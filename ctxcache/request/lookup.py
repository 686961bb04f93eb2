"""From checked sequences to leases: hash, plan, acquire, and one cold retry; the whole batch or nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ctxcache.errors import ContractError
from ctxcache.ids import (
    AcquireStatus,
    ContextCacheDeploymentKind,
    ContextCacheLookupPolicy,
    ReusePlanKind,
    SpecReplayMode,
)
from ctxcache.keys.chain import KeyHasher, SequenceKeys
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.results import CacheRequestLease, HybridCheckpointKey, MatchResult, ReusePlan
from ctxcache.metrics import CoordinatorCounters
from ctxcache.request.admission import ContextCacheBatchAdmission, DecodingKvHeadroom
from ctxcache.request.batch import AcquiredSequence
from ctxcache.request.execution_modes import STEP_RULES, runs_cold
from ctxcache.request.validation import SequenceIntake


@dataclass(slots=True, eq=False)
class Acquisition:
    """What a batch has got so far: one acquired sequence a slot, and how many of them only fitted cold.

    The caller makes it, so that what is held is known to somebody at every moment, whatever interrupts.
    """

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

    def acquire(
        self,
        acquisition: Acquisition,
        admission: ContextCacheBatchAdmission,
        intakes: list[SequenceIntake],
        headroom: DecodingKvHeadroom,
        lookup_policy: ContextCacheLookupPolicy,
    ) -> bool:
        """Acquire every sequence in order; `False` when one does not fit, and then none is held.

        What raises leaves leases out, the last of them perhaps noted nowhere: see `ContextCacheManager.release_all`.
        """
        started = time.perf_counter_ns()
        try:
            for intake in intakes:
                keys = self._hasher.start(intake.extras)
                result = self._acquire_one(admission, intake, keys, headroom, lookup_policy)
                if result.lease is None:
                    for sequence in reversed(acquisition.sequences):
                        self._manager.release(sequence.lease)
                    return False
                acquisition.sequences.append(AcquiredSequence(intake, keys, result.plan, result.lease))
                acquisition.forced_cold += result.forced_cold
        finally:
            self._counters.planning_nanoseconds += time.perf_counter_ns() - started
        return True

    def _plan(
        self,
        admission: ContextCacheBatchAdmission,
        intake: SequenceIntake,
        keys: SequenceKeys,
        headroom: DecodingKvHeadroom,
        *,
        bypass: bool,
    ) -> ReusePlan:
        return self._manager.plan(
            keys.full_block_keys,
            intake.tokens.size,
            mode=admission.execution_mode,
            base_extra_tokens=headroom.base_extra_tokens,
            draft_extra_tokens=headroom.draft_extra_tokens if STEP_RULES[admission.execution_mode].paired else 0,
            bypass=bypass,
            exact_keys=() if bypass else self._checkpoint_keys(intake, keys),
        )

    def _checkpoint_keys(
        self, intake: SequenceIntake, keys: SequenceKeys, *, of_whole_input: bool = False
    ) -> list[HybridCheckpointKey]:
        """Return exact-prefix keys of the lengths at which this input could meet a checkpoint, longest first.

        A checkpoint of the whole input cannot serve it; its key is for those who ask why.
        """
        if not self._has_checkpoints:
            return []
        num_tokens = intake.tokens.size
        lengths = self._manager.candidate_checkpoint_lengths(keys.full_block_keys, num_tokens).tolist()
        return [
            HybridCheckpointKey(keys.exact_key(intake.tokens, intake.media, length), length)
            for length in ([num_tokens, *lengths] if of_whole_input else lengths)
        ]

    def _acquire_one(
        self,
        admission: ContextCacheBatchAdmission,
        intake: SequenceIntake,
        keys: SequenceKeys,
        headroom: DecodingKvHeadroom,
        lookup_policy: ContextCacheLookupPolicy,
    ) -> AcquireSequenceResult:
        """Hash, plan and acquire; where a hit pins exactly what eviction would need, once more without it.

        `keys` are extended by what is looked up: nothing, when the sequence bypasses the cache.
        """
        bypass = lookup_policy is ContextCacheLookupPolicy.BYPASS
        if not bypass:
            keys.extend(intake.tokens, intake.media)
        plan = self._plan(admission, intake, keys, headroom, bypass=bypass)
        result = self._manager.acquire(plan)
        forced_cold = result.status is AcquireStatus.INSUFFICIENT_CAPACITY and plan.reused_token_length > 0
        if forced_cold:
            result = self._manager.acquire(self._plan(admission, intake, keys, headroom, bypass=True))
        return AcquireSequenceResult(result.lease, result.status, result.plan, forced_cold)

    def match(
        self, admission: ContextCacheBatchAdmission, intake: SequenceIntake, lookup_policy: ContextCacheLookupPolicy
    ) -> MatchResult:
        """Say how far one sequence matches, and what stopped it. Changes nothing."""
        keys = self._hasher.start(intake.extras)
        keys.extend(intake.tokens, intake.media)
        return self._manager.match(
            keys.full_block_keys,
            intake.tokens.size,
            mode=admission.execution_mode,
            bypass=lookup_policy is ContextCacheLookupPolicy.BYPASS,
            exact_keys=self._checkpoint_keys(intake, keys, of_whole_input=True),
        )

    def count(self, acquisition: Acquisition, lookup_policy: ContextCacheLookupPolicy) -> None:
        """Move the admission counters for a batch that was admitted whole."""
        counters = self._counters
        counters.admitted_sequences += len(acquisition.sequences)
        counters.forced_cold_sequences += acquisition.forced_cold
        if lookup_policy is ContextCacheLookupPolicy.BYPASS:
            counters.lookup_bypass_sequences += len(acquisition.sequences)
        for sequence in acquisition.sequences:
            plan = sequence.plan
            counters.media_aware_sequences += sequence.intake.has_media
            counters.hit_sequences += plan.matched_token_length > 0
            counters.matched_tokens += plan.matched_token_length
            counters.reused_tokens += plan.reused_token_length
            counters.standard_plans += plan.kind is ReusePlanKind.STANDARD
            counters.no_reusable_prefix_plans += plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX
            counters.full_input_rewind_plans += plan.kind is ReusePlanKind.FULL_INPUT_REWIND
            counters.spec_full_page_replays += plan.spec_replay_mode is SpecReplayMode.FULL_PAGE


def effective_lookup_policy(
    admission: ContextCacheBatchAdmission, intakes: list[SequenceIntake], kind: ContextCacheDeploymentKind
) -> ContextCacheLookupPolicy:
    """Say whether a batch looks anything up: not when it drafts over media, nor in a mode that always runs cold."""
    drafts_over_media = STEP_RULES[admission.execution_mode].speculative and any(intake.has_media for intake in intakes)
    if drafts_over_media or runs_cold(kind, admission.execution_mode):
        return ContextCacheLookupPolicy.BYPASS
    return admission.lookup_policy


def check_working_set(
    intakes: list[SequenceIntake],
    headroom: DecodingKvHeadroom,
    tokens_per_page: int,
    row_pages: int,
    draft_row_pages: int,
) -> None:
    """Refuse a sequence whose first working set does not fit a page-table row.

    Args:
        intakes: the sequences.
        headroom: tokens beyond each.
        tokens_per_page: P.
        row_pages: pages of a row of the base's table.
        draft_row_pages: pages of a row of the draft's table; 0 where the mode uses no draft pages.
    """
    sides = [("base", headroom.base_extra_tokens, row_pages)]
    if draft_row_pages:
        sides.append(("draft", headroom.draft_extra_tokens, draft_row_pages))
    for index, intake in enumerate(intakes):
        for side, extra, limit in sides:
            pages = -(-(intake.tokens.size + extra) // tokens_per_page)
            if pages > limit:
                raise ContractError(
                    f"sequence {index} has {intake.tokens.size} tokens and {side} headroom {extra}, {pages} pages of "
                    f"{tokens_per_page} tokens; a page-table row has {limit}: shorten it, or raise max_sequence_length"
                )
