"""The sequences of one request, as arrays over slots, and how a step moves them forward.

The tokens of one slot, between two operations:

    [0, reused)           shared pages: computed by earlier requests, held by this lease and by the cache
    [reused, committed)   private pages: computed by this request; published full blocks are the cache's too
    [committed, tokens)   after the prefill exactly one, the sampled token: known, and not computed yet
    [committed, capacity) where the next step may write: within the pages that the lease has

With a draft, `common` says how far both models' states agree, `[0, common)`, and `draft_capacity` ends the draft's pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import RETIRED, Int32s, Words
from ctxcache.errors import ContractError
from ctxcache.ids import (
    AcquireStatus,
    ContextCacheCommitPolicy,
    ContextCacheLookupPolicy,
    Hash128,
    PublicationPoint,
)
from ctxcache.jit import njit
from ctxcache.keys.chain import SequenceKeys
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.manager.results import CacheRequestLease, HybridCheckpointKey, HybridSnapshotReservation, ReusePlan
from ctxcache.request.admission import ContextCacheBatchAdvance, ContextCacheSequenceAdvance
from ctxcache.request.execution_modes import STEP_RULES, StepRules
from ctxcache.request.room import Headroom, PageTargets, Room
from ctxcache.request.validation import CheckedAdmission, CheckedSequence, StepReport, read_report

NOT_FROZEN = -1

_SPARE_TOKENS = 64
"""Room behind the prompts that a batch begins with: host memory follows the tokens that live, whatever the pages could hold."""


@dataclass(frozen=True, slots=True)
class StagedHybridPublication:
    """A checkpoint whose capture is reserved or enqueued, and not yet published."""

    checkpoint: HybridCheckpointKey
    snapshots: HybridSnapshotReservation
    point: PublicationPoint


@dataclass(frozen=True, slots=True, eq=False)
class AcquireSequenceResult:
    """One sequence's acquisition: its lease, how it went, by which plan, and whether only a cold retry fitted."""

    lease: CacheRequestLease
    status: AcquireStatus
    plan: ReusePlan
    forced_cold: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AcquiredSequence:
    """One sequence of an admission that has its lease: what it asked for, its keys, and what it got."""

    said: CheckedSequence
    keys: SequenceKeys
    result: AcquireSequenceResult

    @property
    def lease(self) -> CacheRequestLease:
        """Its hold on pages and snapshot slots."""
        return self.result.lease

    @property
    def plan(self) -> ReusePlan:
        """What it reuses."""
        return self.result.plan


class Batch:
    """The sequences of one request in slot order. Every array has one entry a slot; compaction shortens them all.

    Attributes:
        execution_mode, lookup_policy, commit_policy: as admitted.
        rules: the mode's rules.
        leases: one lease a slot.
        lease_rows: `int32[n]`, the leases' rows in the manager.
        tokens: `int32[n, w]`; slot `i` has `num_tokens[i]` of them.
        num_tokens, reuse_lengths, committed, common: lengths in tokens, `int32[n]`.
        frozen: prefill boundary that awaits the first verification, `NOT_FROZEN` where none does.
        published_blocks: full blocks that this sequence itself has published.
        published_exact: longest exact length that this sequence itself has published.
        capacity: tokens that the base pages of the prepared working set cover.
        draft_capacity: the same of its draft pages; `capacity` where the mode has none.
        keys: one growing run of block keys a slot.
        extras: identity of each slot's blocks.
        media: `None`, or `uint64[w, 2]` digests, zero beyond the prompt.
        staged: checkpoint reserved or captured and not yet published, or `None`.
    """

    __slots__ = (
        "_most_tokens",
        "_room",
        "capacity",
        "commit_policy",
        "committed",
        "common",
        "draft_capacity",
        "execution_mode",
        "extras",
        "frozen",
        "keys",
        "lease_rows",
        "leases",
        "lookup_policy",
        "media",
        "num_tokens",
        "published_blocks",
        "published_exact",
        "reuse_lengths",
        "rules",
        "staged",
        "tokens",
    )

    def __init__(
        self,
        admission: CheckedAdmission,
        sequences: list[AcquiredSequence],
        room: Room,
    ) -> None:
        size = len(sequences)
        self._room = room
        self.execution_mode = admission.execution_mode
        self.lookup_policy = admission.lookup_policy
        self.commit_policy = admission.commit_policy
        self.rules: StepRules = STEP_RULES[admission.execution_mode]
        self.leases: list[CacheRequestLease] = [sequence.lease for sequence in sequences]
        self.lease_rows: Int32s = np.array([lease.row for lease in self.leases], np.int32)
        self.num_tokens: Int32s = np.array([sequence.said.tokens.size for sequence in sequences], np.int32)
        self.reuse_lengths: Int32s = np.array([sequence.plan.reused_token_length for sequence in sequences], np.int32)
        self.committed: Int32s = self.reuse_lengths.copy()
        self.common: Int32s = np.zeros(size, np.int32)
        self.frozen: Int32s = np.full(size, NOT_FROZEN, np.int32)
        self.published_blocks: Int32s = np.zeros(size, np.int32)
        self.published_exact: Int32s = np.zeros(size, np.int32)
        targets = room.aim(self.num_tokens, admission.headroom, paired=self.rules.paired)
        self.capacity: Int32s = targets.capacity
        self.draft_capacity: Int32s = targets.draft_capacity.copy()
        self._most_tokens = int(self.num_tokens.max())  # of any slot, or more
        self.tokens: Int32s = np.empty((size, self._most_tokens + _SPARE_TOKENS), np.int32)
        self.keys: list[SequenceKeys] = [sequence.keys for sequence in sequences]
        self.extras: list[BlockKeyExtras] = [sequence.said.extras for sequence in sequences]
        self.media: list[Words | None] = [sequence.said.media for sequence in sequences]
        self.staged: list[StagedHybridPublication | None] = [None] * size
        for slot, sequence in enumerate(sequences):
            length = sequence.said.tokens.size
            self.tokens[slot, :length] = sequence.said.tokens

    @property
    def size(self) -> int:
        """Sequences in the batch."""
        return len(self.leases)

    @property
    def publishes(self) -> bool:
        """Whether this request makes anything reusable."""
        return self.lookup_policy is ContextCacheLookupPolicy.USE_CACHE

    @property
    def publishes_generated(self) -> bool:
        """Whether state of generated tokens is made reusable too."""
        return self.publishes and self.commit_policy is ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS

    @property
    def has_unpublished(self) -> bool:
        """Whether a checkpoint is staged or a prefill boundary is frozen."""
        return any(staged is not None for staged in self.staged) or bool((self.frozen != NOT_FROZEN).any())

    def extend_keys(self, slot: int, length: int) -> NDArray[np.uint64]:
        """Return the keys of the full blocks of the first `length` tokens, `uint64[length // P, 2]` or more."""
        keys = self.keys[slot]
        keys.extend(self.tokens[slot, :length], self._media(slot, length))
        return keys.full_block_keys

    def exact_key(self, slot: int, length: int) -> Hash128:
        """Return the exact-prefix key of the first `length` tokens."""
        self.extend_keys(slot, length)
        return self.keys[slot].exact_key(self.tokens[slot, :length], self._media(slot, length), length)

    def _media(self, slot: int, length: int) -> Words | None:
        media = self.media[slot]
        if media is not None and length > len(media):  # what is generated has none
            media = self.media[slot] = np.concatenate((media, np.zeros((length, 2), np.uint64)))
        return None if media is None else media[:length]

    def aim(self, headroom: Headroom) -> PageTargets:
        """Say what each sequence must hold so that a step may write so far beyond the committed tokens."""
        return self._room.aim(self.committed, headroom, paired=self.rules.paired)

    def read_prefill(
        self, advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance, common_lengths: Any
    ) -> StepReport:
        """Check the report of a prefill: the whole prompt is materialised, and there is one sampled token."""
        report = read_report(advances, (), common_lengths, self.rules.common_lengths, self.size)
        self._refuse(
            _check_prefill(report.tokens, report.counts, report.committed, self.num_tokens),
            "accepted {count} of its row's {width} tokens and committed {committed}; after prefill accept exactly one token (the sampled one) "
            "and commit the whole prompt of {tokens} tokens",
            report,
        )
        if report.common is not None and not np.array_equal(report.common, self.num_tokens):
            raise ContractError(
                f"common_state_lengths is {report.common.tolist()}; after prefill each equals the committed length, "
                f"{self.num_tokens.tolist()}"
            )
        self._make_room(report)
        return report

    def read_decode(
        self,
        advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance,
        completed: Any,
        common_lengths: Any,
    ) -> StepReport:
        """Check the report of a step: it goes on from the batch, and stays within the prepared working set."""
        report = read_report(advances, completed, common_lengths, self.rules.common_lengths, self.size)
        expected = "exactly one token" if self.rules.single_token else "at least one token"
        self._refuse(
            _check_decode(report.tokens, report.counts, report.committed, self.committed, self.rules.single_token),
            f"accepted {{count}} of its row's {{width}} tokens and committed {{committed}} after {{before}}; accept {expected}, "
            "and commit as many more",
            report,
        )
        self._refuse(
            _check_capacity(report.committed, self.capacity),
            "committed {committed}, beyond the {capacity} tokens that the step was prepared for; give "
            "prepare_decode_step a larger headroom",
            report,
        )
        if report.common is not None:
            self._check_common(report.common, report.committed)
        self._make_room(report)
        return report if self.publishes_generated else replace(report, kept=report.kept[:0])

    def _check_common(self, common: Int32s, committed: Int32s) -> None:
        """Refuse common lengths that shrink, pass the committed ones, or reach beyond the prepared draft pages."""
        slot = _check_common(common, self.common, committed)
        if slot >= 0:
            raise ContractError(
                f"common_state_lengths[{slot}] is {common[slot]}; it must lie in "
                f"[{self.common[slot]}, {committed[slot]}]: not below its last value, not beyond the committed length"
            )
        slot = _check_capacity(common, self.draft_capacity)
        if slot >= 0:
            raise ContractError(
                f"common_state_lengths[{slot}] is {common[slot]}, beyond the {self.draft_capacity[slot]} tokens that the "
                "step's draft pages cover; give prepare_decode_step a larger draft headroom, or report what the draft has"
            )

    def _refuse(self, slot: int, template: str, report: StepReport) -> None:
        """Refuse the advance of a slot in the words of a template; nothing where the slot is -1."""
        if slot < 0:
            return
        values = {
            "count": report.counts[slot],
            "width": report.tokens.shape[1],
            "committed": report.committed[slot],
            "tokens": self.num_tokens[slot],
            "before": self.committed[slot],
            "capacity": self.capacity[slot],
        }
        raise ContractError(f"advance {slot} " + template.format(**values))

    def _make_room(self, report: StepReport) -> None:
        """Make room for the tokens of a checked report, so that memory is not lacking once it is committed."""
        self._most_tokens += report.tokens.shape[1]
        if self._most_tokens <= self.tokens.shape[1]:
            return
        self._most_tokens = int((self.num_tokens + report.counts).max())
        if self._most_tokens > self.tokens.shape[1]:
            roomier = np.empty((self.size, 2 * self._most_tokens), np.int32)
            roomier[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = roomier

    def advance(self, report: StepReport) -> None:
        """Append the accepted tokens and move the lengths, as a checked report says."""
        _append(self.tokens, self.num_tokens, report.tokens, report.counts)
        self.committed[:] = report.committed
        if report.common is not None:
            self.common[:] = report.common

    def reserve_tokens(self, targets: PageTargets) -> None:
        """Take note of the tokens that the grown working set covers, on base and on draft pages; it never shrinks."""
        np.maximum(self.capacity, targets.capacity, out=self.capacity)
        np.maximum(self.draft_capacity, targets.draft_capacity, out=self.draft_capacity)

    def retired_leases(self, mapping: Int32s) -> list[CacheRequestLease]:
        """Return the leases of the sequences that leave by a checked mapping."""
        return [self.leases[slot] for slot in np.flatnonzero(mapping == RETIRED)]

    def compact(self, mapping: Int32s) -> None:
        """Keep the survivors of a checked mapping, in order."""
        keep = np.flatnonzero(mapping != RETIRED)
        for new, old in enumerate(keep):  # in rising order new <= old, so no row is overwritten before it has moved
            length = self.num_tokens[old]
            self.tokens[new, :length] = self.tokens[old, :length]
        self.tokens = self.tokens[: keep.size]
        for name in (
            "lease_rows",
            "num_tokens",
            "reuse_lengths",
            "committed",
            "common",
            "frozen",
            "published_blocks",
            "published_exact",
            "capacity",
            "draft_capacity",
        ):
            setattr(self, name, getattr(self, name)[keep])
        for name in ("leases", "keys", "extras", "media", "staged"):
            rows = getattr(self, name)
            setattr(self, name, [rows[slot] for slot in keep])


@njit
def _check_prefill(tokens: Int32s, counts: Int32s, committed: Int32s, num_tokens: Int32s) -> int:
    """Return the first slot that is wrong, or -1."""
    for slot in range(counts.size):
        if counts[slot] != 1 or tokens.shape[1] < 1 or committed[slot] != num_tokens[slot]:
            return slot
    return -1


@njit
def _check_decode(tokens: Int32s, counts: Int32s, committed: Int32s, before: Int32s, single_token: bool) -> int:  # noqa: FBT001 - njit
    for slot in range(counts.size):
        if counts[slot] < 1 or counts[slot] > tokens.shape[1] or (single_token and counts[slot] != 1):
            return slot
        if committed[slot] != before[slot] + counts[slot]:
            return slot
    return -1


@njit
def _check_capacity(committed: Int32s, capacity: Int32s) -> int:
    for slot in range(committed.size):
        if committed[slot] > capacity[slot]:
            return slot
    return -1


@njit
def _check_common(common: Int32s, before: Int32s, committed: Int32s) -> int:
    for slot in range(common.size):
        if common[slot] < before[slot] or common[slot] > committed[slot]:
            return slot
    return -1


@njit
def _append(tokens: Int32s, num_tokens: Int32s, accepted: Int32s, counts: Int32s) -> None:
    for slot in range(counts.size):
        start = num_tokens[slot]
        for index in range(counts[slot]):
            tokens[slot, start + index] = accepted[slot, index]
        num_tokens[slot] = start + counts[slot]
