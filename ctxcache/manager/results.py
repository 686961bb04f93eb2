"""What the manager hands out: plans, leases, records, results, counters. Values and handles, no behaviour of its own.

Two managers make them: `ctxcache.manager.manager.ContextCacheManager` and its plain-Python twin in `ctxcache.testing`.
Handles (`CacheRequestLease`, `CacheRecord`) ask the manager that made them through the two protocols below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import ContractError
from ctxcache.ids import (
    AcquireStatus,
    ContextCacheExecutionMode,
    Hash128,
    MissReason,
    PublishStatus,
    ReusePlanKind,
    SpecReplayMode,
)

PageIds: TypeAlias = NDArray[np.int32]
"""Physical page ids in logical order, `int32[pages]`; entry `i` holds tokens `[i * P, (i + 1) * P)`."""


@dataclass(frozen=True, slots=True, order=True)
class HybridCheckpointKey:
    """Which state a checkpoint holds: that after exactly these tokens.

    Attributes:
        exact_prefix_digest: keyed digest of the first `exact_length` tokens and the sequence's extras.
        exact_length: tokens that the state has seen, at least 1.
    """

    exact_prefix_digest: Hash128
    exact_length: int


@dataclass(frozen=True, slots=True)
class HybridSnapshotReservation:
    """Snapshot slots that a lease holds for one capture, until `retire_snapshots` or the lease's release.

    Attributes:
        recurrent_snapshot_slot: slot of the recurrent snapshot pool.
        partial_kv_snapshot_slot: slot of the partial-KV pool, or `None` where the length needs none.
    """

    recurrent_snapshot_slot: int
    partial_kv_snapshot_slot: int | None


@dataclass(frozen=True, slots=True, eq=False)
class ReusePlan:
    """What a request could reuse at the moment of planning, and what it needs besides. Holds nothing.

    Lengths are in tokens. Arrays are the plan's own and read-only.

    Attributes:
        kind: `STANDARD`; `NO_REUSABLE_PREFIX` when nothing is reused; `FULL_INPUT_REWIND` when every token of a
            page-aligned input matched and the last block is computed again (also when that leaves nothing).
        execution_mode: the mode that was planned for.
        bypass: nothing was looked up.
        input_token_count: tokens of the input, n.
        matched_token_length: tokens that matched. Attention: full blocks, the rewound or replayed one included;
            hybrid and recurrent: the checkpoint's exact length.
        reused_token_length: tokens that need not be computed, `<= matched_token_length` and `< n`.
        matched_base_pages: `int32[matched // P]`, canonical pages of the matched full blocks. For checkpoints: of
            the shared full blocks.
        reused_base_pages: `int32[r]`, the leading part of them that the lease will share.
        reused_draft_pages: `int32[d]`, draft pages that the lease will share; empty without a paired draft.
        base_page_demand: private base pages to allocate.
        draft_page_demand: private draft pages to allocate.
        recurrent_snapshot_slot: slot to restore from, or `None`.
        partial_kv_snapshot_slot: slot to restore from, or `None`.
        exact_checkpoint_length: exact length of the checkpoint that is reused; 0 without one.
        spec_replay_mode: `FULL_PAGE` when a matched block is computed again for the draft model's sake (EAGLE and
            shared KV, whenever a block matched, also when that leaves nothing to reuse).
    """

    kind: ReusePlanKind
    execution_mode: ContextCacheExecutionMode
    bypass: bool
    input_token_count: int
    matched_token_length: int
    reused_token_length: int
    matched_base_pages: PageIds
    reused_base_pages: PageIds
    reused_draft_pages: PageIds
    base_page_demand: int
    draft_page_demand: int
    recurrent_snapshot_slot: int | None
    partial_kv_snapshot_slot: int | None
    exact_checkpoint_length: int
    spec_replay_mode: SpecReplayMode
    _owner: object = field(repr=False)
    """The manager that made the plan."""
    _proof: Any = field(repr=False)
    """What that manager looks at again in `acquire` to see whether the plan still holds."""


class LeaseOwner(Protocol):
    """What a lease asks of the manager that made it. Each raises `ContractError` for a released lease."""

    def lease_base_pages(self, lease: CacheRequestLease) -> PageIds: ...  # noqa: D102 - see the lease's properties
    def lease_draft_pages(self, lease: CacheRequestLease) -> PageIds: ...  # noqa: D102
    def lease_snapshot_slots(self, lease: CacheRequestLease) -> tuple[int | None, int | None]: ...  # noqa: D102
    def lease_published_full_block_count(self, lease: CacheRequestLease) -> int: ...  # noqa: D102
    def lease_is_released(self, lease: CacheRequestLease) -> bool: ...  # noqa: D102


class CacheRequestLease:
    """One sequence's hold on pages and snapshot slots while it runs. Opaque; compared by identity; released once.

    The manager keeps what is leased; a lease only names a row of the manager's table and the generation in which it
    was given out, so a handle that outlived its release is recognised. Reading a property of a released lease
    raises `ContractError`, and so does releasing it again.

    Attributes:
        row: row of the table; what `grow_leases` and `can_grow_leases` take. A fresh table gives 0, 1, 2 ...; the row
            released last is given out first.
        generation: how often that row had been released before.
    """

    __slots__ = ("__weakref__", "_owner", "generation", "row")

    row: int
    generation: int

    def __init__(self, owner: LeaseOwner, row: int, generation: int) -> None:
        self._owner = owner
        self.row = row
        self.generation = generation

    @property
    def owner(self) -> LeaseOwner:
        """The manager that made the lease."""
        return self._owner

    @property
    def released(self) -> bool:
        """Whether the lease has been released."""
        return self._owner.lease_is_released(self)

    @property
    def base_pages(self) -> PageIds:
        """Base pages in logical order, a copy: shared ones first, then private ones. Growth appends."""
        return self._owner.lease_base_pages(self)

    @property
    def draft_pages(self) -> PageIds:
        """Draft pages in logical order, a copy; empty without a paired draft."""
        return self._owner.lease_draft_pages(self)

    @property
    def recurrent_snapshot_slot(self) -> int | None:
        """Slot to restore recurrent state from, held until `release_restored_snapshots`; `None` for a cold start."""
        return self._owner.lease_snapshot_slots(self)[0]

    @property
    def partial_kv_snapshot_slot(self) -> int | None:
        """Slot to restore the boundary page from, held until `release_restored_snapshots`; `None` without one."""
        return self._owner.lease_snapshot_slots(self)[1]

    @property
    def published_full_block_count(self) -> int:
        """Full blocks that this sequence itself has published; 0 at first, also after a hit."""
        return self._owner.lease_published_full_block_count(self)

    def __copy__(self) -> NoReturn:
        raise ContractError("a lease cannot be copied; acquire another one")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise ContractError("a lease cannot be pickled; it means something to its own manager only")

    def __repr__(self) -> str:
        return f"CacheRequestLease(row={self.row}, generation={self.generation})"


class RecordOwner(Protocol):
    """What a record view asks of the manager that made it. Each raises `ContractError` once the record is evicted."""

    def record_is_cached(self, record: CacheRecord) -> bool: ...  # noqa: D102 - see the record's properties
    def record_base_page_path(self, record: CacheRecord) -> PageIds: ...  # noqa: D102
    def record_draft_page_path(self, record: CacheRecord) -> PageIds: ...  # noqa: D102
    def record_snapshot_slots(self, record: CacheRecord) -> tuple[int | None, int | None]: ...  # noqa: D102
    def record_exact_checkpoint_length(self, record: CacheRecord) -> int: ...  # noqa: D102


class CacheRecord:
    """One published endpoint, as a view: paths are computed when asked for. Equal when it is the same publication.

    Reading a property after the record was evicted raises `ContractError`; `cached` tells.

    Attributes:
        serial: number of the publication that made the record; grows with every new record of a manager, from 1.
    """

    __slots__ = ("_index", "_owner", "serial")

    serial: int

    def __init__(self, owner: RecordOwner, index: int, serial: int) -> None:
        self._owner = owner
        self._index = index
        self.serial = serial

    @property
    def cached(self) -> bool:
        """Whether the record is still there."""
        return self._owner.record_is_cached(self)

    @property
    def base_page_path(self) -> PageIds:
        """Canonical base pages from the first block to the endpoint, `int32[blocks]`."""
        return self._owner.record_base_page_path(self)

    @property
    def draft_page_path(self) -> PageIds:
        """Draft pages paired with the first blocks of the base path; empty for a base-only record."""
        return self._owner.record_draft_page_path(self)

    @property
    def recurrent_snapshot_slot(self) -> int | None:
        """The record's recurrent snapshot, or `None`."""
        return self._owner.record_snapshot_slots(self)[0]

    @property
    def partial_kv_snapshot_slot(self) -> int | None:
        """The record's partial-KV snapshot, or `None`."""
        return self._owner.record_snapshot_slots(self)[1]

    @property
    def exact_checkpoint_length(self) -> int:
        """Exact length of a checkpoint in tokens; 0 for an attention-only endpoint."""
        return self._owner.record_exact_checkpoint_length(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheRecord) and other._owner is self._owner and other.serial == self.serial

    def __hash__(self) -> int:
        return hash((id(self._owner), self.serial))

    def __repr__(self) -> str:
        return f"CacheRecord(serial={self.serial})"


@dataclass(frozen=True, slots=True, eq=False)
class AcquireResult:
    """What became of a plan.

    Attributes:
        lease: the lease, when `status` is `ACQUIRED`; else `None`.
        status: `ACQUIRED`, `STALE_PLAN` or `INSUFFICIENT_CAPACITY`.
        plan: the plan that was to be acquired.
    """

    lease: CacheRequestLease | None
    status: AcquireStatus
    plan: ReusePlan


@dataclass(frozen=True, slots=True, eq=False)
class PublishResult:
    """What a publication did.

    Attributes:
        status: `PUBLISHED` when a record was made, or gained or lengthened its draft path; `EXISTING_RECORD` when the
            endpoint was recorded already and has only become the most recently used.
        record: the record at the endpoint; `None` when the limit on records (0) let it go at once.
        published_full_block_count: full blocks that the lease itself has now published.
    """

    status: PublishStatus
    record: CacheRecord | None
    published_full_block_count: int

    @property
    def canonical_base_pages(self) -> PageIds:
        """The cache's pages of the published blocks, `int32[blocks]`, read from the record as it is when asked.

        An entry differs from the lease's own page where another sequence had published that block first. Empty where
        there is no record; `ContractError` once it was evicted.
        """
        return self.record.base_page_path if self.record is not None else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class PageGrowth:
    """Pages that were appended to some of many leases, `g` of them, in the order of the call.

    Attributes:
        indices: `int32[g]`, positions in the call's arrays (a batch's slots), rising.
        first_page_indices: `int32[g]`, logical index of the first new page of each.
        page_counts: `int32[g]`, new pages of each, at least 1.
        page_ids: `int32[page_counts.sum()]`, the pages, those of one lease next to each other.
    """

    indices: NDArray[np.int32]
    first_page_indices: NDArray[np.int32]
    page_counts: NDArray[np.int32]
    page_ids: PageIds

    @classmethod
    def nothing(cls) -> PageGrowth:
        """Return growth of no lease."""
        empty = np.empty(0, np.int32)
        return cls(empty, empty, empty, empty)


@dataclass(frozen=True, slots=True, eq=False)
class LeaseGrowth:
    """What `grow_leases` appended: base pages and, for paired drafts, draft pages."""

    base: PageGrowth
    draft: PageGrowth

    def __bool__(self) -> bool:
        """Whether anything grew."""
        return bool(self.base.indices.size or self.draft.indices.size)


NO_GROWTH = LeaseGrowth(PageGrowth.nothing(), PageGrowth.nothing())
"""What `grow_leases` returns when no lease had to grow; shared."""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """How far an input matches the cache, and what stopped it: what `explain` is made of. Nothing was touched.

    Attributes:
        matched_full_blocks: leading full blocks whose keys are indexed, whoever may use them.
        matched_token_length: as in the plan for the same arguments.
        reused_token_length: as in the plan.
        kind: the plan's kind.
        reason: why not the whole input is reused, judged in this order.
            `BYPASS`: bypass was asked for, or the mode looks nothing up.
            `EMPTY_CACHE`: there is no record.
            Attention modes, when every full block matched: `REPLAY` (EAGLE, shared KV), `REWIND` (page-aligned input),
            `PARTIAL_BLOCK` (the tail shorter than a block is never shared).
            EAGLE, when more blocks matched than are paired: `UNPAIRED_DRAFT`.
            Attention modes otherwise: `EVICTED` when the first block that did not match was evicted lately; `NO_MATCH`
            when it is the first block; else `DIVERGED`.
            Checkpoint modes: `NONE` when a checkpoint of n - 1 tokens is reused. Else, without a reusable checkpoint
            `EVICTED` when one of the given exact keys, or the first unmatched block (without pages: a checkpoint
            whose last full block is one of the input's), was evicted lately;
            `WRONG_CHECKPOINT_LENGTH` when a given key's checkpoint is there but has at least n tokens;
            `NO_CHECKPOINT` when blocks matched; `NO_MATCH`. With one: `PARTIAL_BLOCK` when all full blocks matched,
            else `DIVERGED`.
    """

    matched_full_blocks: int
    matched_token_length: int
    reused_token_length: int
    kind: ReusePlanKind
    reason: MissReason


@dataclass(frozen=True, slots=True)
class ManagerCounters:
    """Totals since construction; none ever decreases.

    `publication_attempts == committed_publications + existing_publications + refused_publications`. An attempt is a
    publish call that had something to publish: a full block beyond those that its lease itself has published, or a
    checkpoint; a call that made or changed a record always counts.

    Attributes:
        publication_attempts: publish calls that had something to publish.
        committed_publications: those that returned `PUBLISHED`.
        existing_publications: those that returned `EXISTING_RECORD`.
        refused_publications: those refused with `ContractError` because what they named is not the lease's own prefix, is
            no chain of keys, or reaches beyond the lease's pages.
        spec_pair_publications: committed publications whose record has a draft path.
        evicted_records: records that went, for whatever reason.
        shortened_records: records that lost blocks from their end and stayed, each once in an operation.
        reclaimed_base_kv_pages: base pages that an eviction returned to the pool (a page that was leased then is not
            counted, also not when its lease ends).
        reclaimed_draft_kv_pages: the same of draft pages.
        reclaimed_recurrent_snapshots: the same of recurrent snapshot slots.
        reclaimed_partial_kv_snapshots: the same of partial-KV snapshot slots.
    """

    publication_attempts: int
    committed_publications: int
    existing_publications: int
    refused_publications: int
    spec_pair_publications: int
    evicted_records: int
    shortened_records: int
    reclaimed_base_kv_pages: int
    reclaimed_draft_kv_pages: int
    reclaimed_recurrent_snapshots: int
    reclaimed_partial_kv_snapshots: int
