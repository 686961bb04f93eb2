"""From checked sequences to leases: hash, plan, share what is there, then take the rest; the whole batch or nothing."""

from __future__ import annotations

import time

import numpy as np

from ctxcache.errors import InvariantError
from ctxcache.ids import (
    ResourceType,
    ReusePlanKind,
    SpecReplayMode,
)
from ctxcache.keys.chain import KeyHasher, SequenceKeys
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.results import HybridCheckpointKey, MatchResult, ReusePlan
from ctxcache.metrics import CoordinatorCounters
from ctxcache.request.batch import AcquiredSequence, AcquireSequenceResult
from ctxcache.request.execution_modes import STEP_RULES
from ctxcache.request.room import PageTargets, Room
from ctxcache.request.validation import CheckedAdmission, CheckedSequence


class Acquirer:
    """Turns admissions into leases. Counts nothing but the time it took until the whole batch is in."""

    def __init__(
        self,
        manager: ContextCacheManager,
        hasher: KeyHasher,
        counters: CoordinatorCounters,
        room: Room,
        *,
        has_checkpoints: bool,
    ) -> None:
        self._manager = manager
        self._room = room
        self._has_checkpoints = has_checkpoints
        self._hasher = hasher
        self._counters = counters

    def acquire(self, admission: CheckedAdmission) -> list[AcquiredSequence] | str:
        """Acquire every sequence, or none: then the answer is why.

        What all sequences reuse is pinned before anything is evicted for any of them, so that their order changes no start.
        Where they do not all fit beside these pins, sequences go cold, from the last one back.

        What raises leaves leases out, the last of them perhaps noted nowhere: see `ContextCacheManager.release_all`.
        """
        started = time.perf_counter_ns()
        try:
            acquired = [self._share(admission, one, bypass=admission.bypass) for one in admission.sequences]
            targets = self._room.aim(
                np.array([sequence.tokens.size for sequence in admission.sequences], np.int32),
                admission.headroom,
                paired=STEP_RULES[admission.execution_mode].paired,
            )
            hits = [index for index, one in enumerate(acquired) if one.plan.reused_token_length > 0]
            while not self._grow(acquired, targets):
                if not hits:
                    reason = self._why_not(acquired, targets)
                    for one in reversed(acquired):
                        self._manager.release(one.lease)
                    return reason
                index = hits.pop()
                self._manager.release(acquired[index].lease)
                acquired[index] = self._share(admission, admission.sequences[index], bypass=True, forced_cold=True)
        finally:
            self._counters.planning_nanoseconds += time.perf_counter_ns() - started
        return acquired

    def _share(
        self, admission: CheckedAdmission, sequence: CheckedSequence, *, bypass: bool, forced_cold: bool = False
    ) -> AcquiredSequence:
        """Hash and plan, and lease what is reused; private pages come for all sequences together."""
        keys = self._hasher.start(sequence.extras)
        if not admission.bypass:
            keys.extend(sequence.tokens, sequence.media)
        plan = self._plan(admission, sequence, keys, bypass=bypass)
        result = self._manager.acquire(plan, shares_only=True)
        if result.lease is None:
            raise InvariantError(f"a plan of this moment was answered with {result.status.name}; please report this")
        return AcquiredSequence(sequence, keys, AcquireSequenceResult(result.lease, result.status, plan, forced_cold))

    def _grow(self, acquired: list[AcquiredSequence], targets: PageTargets) -> bool:
        rows = np.array([one.lease.row for one in acquired], np.int32)
        return self._manager.grow_leases(rows, targets.base_pages, targets.draft_pages) is not None

    def _why_not(self, acquired: list[AcquiredSequence], targets: PageTargets) -> str:
        rows = np.array([one.lease.row for one in acquired], np.int32)
        index = int(np.argmin(self._manager.can_grow_leases(rows, targets.base_pages, targets.draft_pages)))
        plan = acquired[index].plan
        draft = f" and {plan.draft_page_demand} draft pages" if plan.draft_page_demand else ""
        free = self._manager.pool(ResourceType.BASE_KV_PAGE).free
        return (
            f"sequence {index} of the batch, with {plan.input_token_count} tokens, needs {plan.base_page_demand} base pages{draft} "
            f"beside those before it; {free} base pages are free, and what leases hold cannot be evicted: admit fewer "
            "sequences, or raise num_pages"
        )

    def _plan(
        self, admission: CheckedAdmission, sequence: CheckedSequence, keys: SequenceKeys, *, bypass: bool
    ) -> ReusePlan:
        base_extra, draft_extra = self._room.extra_tokens(sequence.tokens.size, admission.headroom)
        return self._manager.plan(
            keys.full_block_keys,
            sequence.tokens.size,
            mode=admission.execution_mode,
            base_extra_tokens=base_extra,
            draft_extra_tokens=draft_extra if STEP_RULES[admission.execution_mode].paired else 0,
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

    def count(self, acquired: list[AcquiredSequence], *, bypass: bool) -> None:
        """Move the admission counters for a batch that was admitted whole."""
        counters = self._counters
        counters.admitted_sequences += len(acquired)
        if bypass:
            counters.lookup_bypass_sequences += len(acquired)
        for sequence in acquired:
            counters.forced_cold_sequences += sequence.result.forced_cold
            plan = sequence.plan
            counters.media_aware_sequences += sequence.said.has_media
            counters.hit_sequences += plan.matched_token_length > 0
            counters.matched_tokens += plan.matched_token_length
            counters.reused_tokens += plan.reused_token_length
            counters.standard_plans += plan.kind is ReusePlanKind.STANDARD
            counters.no_reusable_prefix_plans += plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX
            counters.full_input_rewind_plans += plan.kind is ReusePlanKind.FULL_INPUT_REWIND
            counters.spec_full_page_replays += plan.spec_replay_mode is SpecReplayMode.FULL_PAGE
