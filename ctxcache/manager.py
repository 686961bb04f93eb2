"""The CUDA-free manager: plan, acquire, grow, publish, release.

Single writer, no thread, no lock. The rules are said in `ctxcache.interface.CacheManager`; here arguments are checked,
and compiled code works on arrays. No Python object exists per block, record or batch row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import as_count, as_keys, as_rows, check_exact_keys
from ctxcache.checkpoints import list_lengths
from ctxcache.config import EXECUTION_MODES
from ctxcache.core import (
    CAPACITY,
    CHECKPOINT_KINDS,
    CHECKPOINTS_ALLOWED,
    COMMITTED,
    EVICTED,
    EXISTING,
    FREE,
    KNOWN,
    NUM_BASE,
    NUM_DRAFT,
    NUM_NODES,
    NUM_RECORDS,
    PAIRED,
    PAIRED_COMMITS,
    PAIRED_KINDS,
    PUBLISHED,
    RECLAIMED,
    REFUSED,
    RESERVED,
    RESERVED_LENGTH,
    RESOURCE_KIND,
    RESTORED,
    allocate_arena,
    allocate_core,
)
from ctxcache.endpoints import (
    BEYOND_PAGES,
    FOUND,
    NO_CHAIN,
    NOT_OWN_PREFIX,
    SLOT_TAKEN,
    publish_endpoint,
)
from ctxcache.errors import ContractError, InvariantError
from ctxcache.eviction import evict_everything
from ctxcache.ids import (
    AcquireStatus,
    ContextCacheDeploymentKind,
    ContextCacheExecutionMode,
    PublishStatus,
    ResourceType,
)
from ctxcache.invariants import check_invariants
from ctxcache.lease_arena import LeaseArena
from ctxcache.leases import (
    BAD_ROW,
    BASE_PAGES,
    BASE_ROWS,
    DRAFT_PAGES,
    DRAFT_ROWS,
    NUM_GROWTH_ENTRIES,
    STALE,
    WIDEST_BASE,
    WIDEST_DRAFT,
    acquire_lease,
    count_growth,
    drop_slots,
    grow_all,
    grow_lease,
    mark_growable,
    reserve_slots,
)
from ctxcache.metrics import PoolOccupancy
from ctxcache.outcomes import (
    NO_GROWTH,
    AcquireResult,
    CacheRequestLease,
    HybridCheckpointKey,
    HybridSnapshotReservation,
    LeaseGrowth,
    ManagerCounters,
    MatchResult,
    PageGrowth,
    PublishResult,
    ReusePlan,
)
from ctxcache.planning import PlanRequest, explain_match, make_plan, match_shared_blocks
from ctxcache.record_list import RecordList

_VANILLA = ContextCacheExecutionMode.VANILLA
_PAIRED_MODES = frozenset({ContextCacheExecutionMode.EAGLE, ContextCacheExecutionMode.MTP})
_REFUSALS = {
    NOT_OWN_PREFIX: "the keys differ from those of blocks that the lease reused or published; pass its own sequence's keys",
    NO_CHAIN: "the keys are not one chain behind what is published; hash the whole sequence in one go",
    BEYOND_PAGES: "that is more than the lease has pages; publish only what lies within them",
    SLOT_TAKEN: "the reserved slots hold a checkpoint published before; retire them and reserve again",
}
_NO_TARGETS = np.empty(0, np.int32)
_NO_EXACT = np.zeros(4, np.uint64)


class ContextCacheManager:
    """Owns pools, block index, records and leases of one cache. See `CacheManager` for what each method promises.

    Args:
        tokens_per_page: tokens in a page, P.
        num_base_pages: base KV pages; 0 for `PURE_RECURRENT`.
        num_draft_pages: draft KV pages; only for `EAGLE` and `HYBRID_MTP`.
        num_recurrent_snapshots: recurrent snapshot slots; only for kinds with recurrent layers.
        num_partial_kv_snapshots: partial-KV snapshot slots; only for `HYBRID` and `HYBRID_MTP`.
        max_records: records kept at most; 0 keeps nothing.
        kind: the deployment, which decides what a plan may reuse.

    Raises:
        ContractError: a negative number, no token a page, or a pool that the kind has no use for.
    """

    def __init__(
        self,
        *,
        tokens_per_page: int,
        num_base_pages: int,
        num_draft_pages: int = 0,
        num_recurrent_snapshots: int = 0,
        num_partial_kv_snapshots: int = 0,
        max_records: int = 1024,
        kind: ContextCacheDeploymentKind = ContextCacheDeploymentKind.VANILLA,
    ) -> None:
        self._page_tokens = as_count("tokens_per_page", tokens_per_page, least=1)
        self._kind = kind
        self._has_pages = kind is not ContextCacheDeploymentKind.PURE_RECURRENT
        self._has_checkpoints = kind in CHECKPOINT_KINDS
        self._mtp = kind is ContextCacheDeploymentKind.HYBRID_MTP
        capacities = (
            self._pool_size("num_base_pages", num_base_pages, useful=self._has_pages),
            self._pool_size("num_draft_pages", num_draft_pages, useful=kind in PAIRED_KINDS),
            self._pool_size("num_recurrent_snapshots", num_recurrent_snapshots, useful=self._has_checkpoints),
            self._pool_size(
                "num_partial_kv_snapshots", num_partial_kv_snapshots, useful=self._has_checkpoints and self._has_pages
            ),
        )
        self._core = allocate_core(kind, capacities, as_count("max_records", max_records))
        self._state = self._core.state
        self._arena = LeaseArena(self._core, allocate_arena(kind))
        self._records = RecordList(self._core)

    def _pool_size(self, name: str, size: int, *, useful: bool) -> int:
        size = as_count(name, size)
        if size and not useful:
            raise ContractError(f"{name} is {size}, but a {self._kind.name} deployment has no such pool; leave it 0")
        return size

    @property
    def tokens_per_page(self) -> int:
        """Tokens in a page."""
        return self._page_tokens

    @property
    def kind(self) -> ContextCacheDeploymentKind:
        """The deployment."""
        return self._kind

    # Planning: reads only.

    def plan(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: ContextCacheExecutionMode = _VANILLA,
        base_extra_tokens: int = 1,
        draft_extra_tokens: int = 0,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> ReusePlan:
        """Say what an input could reuse now, and what it needs besides. See `CacheManager.plan`."""
        request = self._request(keys, num_tokens, mode, base_extra_tokens, draft_extra_tokens, bypass, exact_keys)
        return make_plan(self._core, request, self)

    def match(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: ContextCacheExecutionMode = _VANILLA,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> MatchResult:
        """Say how far an input matches and what stopped it. See `CacheManager.match`."""
        return explain_match(self._core, self._request(keys, num_tokens, mode, 0, 0, bypass, exact_keys))

    def candidate_checkpoint_lengths(self, keys: NDArray[np.uint64], num_tokens: int) -> NDArray[np.int32]:
        """Name the exact lengths worth hashing for an input. See `CacheManager.candidate_checkpoint_lengths`."""
        if not self._has_checkpoints:
            raise ContractError(f"a {self._kind.name} deployment has no checkpoints; plan without exact_keys")
        request = self._request(keys, num_tokens, EXECUTION_MODES[self._kind][-1], 0, 0, False, ())
        core = self._core
        lengths = np.empty(int(self._state[NUM_RECORDS]), np.int32)
        path = match_shared_blocks(core, request)
        count = list_lengths(core, path, request.keys, self._page_tokens, request.num_tokens, lengths)
        return np.unique(lengths[:count])[::-1]

    def _request(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        mode: ContextCacheExecutionMode,
        base_extra_tokens: int,
        draft_extra_tokens: int,
        bypass: bool,  # noqa: FBT001 - handed through
        exact_keys: Iterable[HybridCheckpointKey],
    ) -> PlanRequest:
        if mode not in EXECUTION_MODES[self._kind]:
            served = ", ".join(served.name for served in EXECUTION_MODES[self._kind])
            raise ContractError(f"mode is {mode!r}; a {self._kind.name} deployment serves {served}")
        num_tokens = as_count("num_tokens", num_tokens, least=1)
        draft_extra_tokens = as_count("draft_extra_tokens", draft_extra_tokens)
        paired = mode in _PAIRED_MODES
        if draft_extra_tokens and not paired:
            raise ContractError(
                f"draft_extra_tokens is {draft_extra_tokens}, but {mode.name} runs no paired draft; leave it 0"
            )
        # The plain mode of an MTP deployment writes no draft state, so it can use and make no checkpoint.
        cold = bypass or (self._mtp and not paired)
        exact = check_exact_keys(exact_keys)
        if exact and not self._has_checkpoints:
            raise ContractError(f"exact_keys has entries, but a {self._kind.name} deployment has no checkpoints")
        return PlanRequest(
            keys=as_keys(keys, 0 if cold else num_tokens // self._page_tokens),
            num_tokens=num_tokens,
            tokens_per_page=self._page_tokens,
            mode=mode,
            bypass=cold,
            has_pages=self._has_pages,
            has_checkpoints=self._has_checkpoints,
            paired=paired,
            base_extra_tokens=as_count("base_extra_tokens", base_extra_tokens),
            draft_extra_tokens=draft_extra_tokens,
            exact_keys=exact,
        )

    # Leases.

    def acquire(self, plan: ReusePlan) -> AcquireResult:
        """Turn a plan into a lease, whole or not at all. See `CacheManager.acquire`."""
        if not isinstance(plan, ReusePlan) or plan._owner is not self:  # noqa: SLF001 - the plan's maker
            raise ContractError(f"{plan!r} is no plan of this manager; pass one that its plan() returned")
        last_key, record, serial = plan._proof  # noqa: SLF001
        paired = plan.execution_mode in _PAIRED_MODES
        reused, drafts = plan.reused_base_pages.size, plan.reused_draft_pages
        ask = np.array(
            (
                plan.base_page_demand,
                plan.draft_page_demand,
                paired,
                record,
                serial,
                self._has_checkpoints and (paired or not self._mtp),
                plan.matched_base_pages.size if paired and record < 0 else 0,
            ),
            np.int64,
        )
        arena = self._arena
        arena.make_room(reused + plan.base_page_demand, drafts.size + plan.draft_page_demand, new_row=True)
        row = acquire_lease(self._core, arena.arrays, plan.matched_base_pages, last_key, reused, drafts, ask)
        if row >= 0:
            return AcquireResult(arena.handle(row), AcquireStatus.ACQUIRED, plan)
        status = AcquireStatus.STALE_PLAN if row == STALE else AcquireStatus.INSUFFICIENT_CAPACITY
        return AcquireResult(None, status, plan)

    def release(self, lease: CacheRequestLease) -> None:
        """Return every hold of the lease. See `CacheManager.release`."""
        self._arena.release(lease)

    def grow(self, lease: CacheRequestLease, base_pages: int = 0, draft_pages: int = 0) -> bool:
        """Append private pages, whole or not at all. See `CacheManager.grow`."""
        arena = self._arena
        row = arena.row_of(lease)
        base_pages = as_count("base_pages", base_pages)
        draft_pages = as_count("draft_pages", draft_pages)
        fields = arena.arrays.lease
        if draft_pages and fields[PAIRED, row] != 1:
            raise ContractError(f"draft_pages is {draft_pages}, but the lease runs no paired draft; leave it 0")
        arena.make_room(
            int(fields[NUM_BASE, row]) + base_pages, int(fields[NUM_DRAFT, row]) + draft_pages, new_row=False
        )
        return grow_lease(self._core, arena.arrays, row, base_pages, draft_pages)

    def grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> LeaseGrowth | None:
        """Grow many leases, all or none. See `CacheManager.grow_leases`."""
        rows, base, draft, answer = self._count_growth(lease_rows, base_page_targets, draft_page_targets)
        if answer is None:
            return NO_GROWTH
        self._arena.make_room(int(answer[WIDEST_BASE]), int(answer[WIDEST_DRAFT]), new_row=False)
        base_out = np.empty(3 * answer[BASE_ROWS] + answer[BASE_PAGES], np.int32)
        draft_out = np.empty(3 * answer[DRAFT_ROWS] + answer[DRAFT_PAGES], np.int32)
        if not grow_all(self._core, self._arena.arrays, rows, base, draft, answer, base_out, draft_out):
            return None
        draft_growth = _page_growth(draft_out, int(answer[DRAFT_ROWS])) if answer[DRAFT_ROWS] else NO_GROWTH.draft
        return LeaseGrowth(_page_growth(base_out, int(answer[BASE_ROWS])), draft_growth)

    def can_grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]:
        """Tell which leases could grow, greedily in order. See `CacheManager.can_grow_leases`."""
        rows, base, draft, _ = self._count_growth(lease_rows, base_page_targets, draft_page_targets)
        fits = np.empty(rows.size, np.bool_)
        mark_growable(self._state, self._arena.arrays.lease, rows, base, draft, fits)
        return fits

    def _count_growth(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64] | None]:
        rows = as_rows("lease_rows", lease_rows)
        base = as_rows("base_page_targets", base_page_targets, rows.size)
        draft = _NO_TARGETS
        if draft_page_targets is not None:
            draft = as_rows("draft_page_targets", draft_page_targets, rows.size)
        answer = np.empty(NUM_GROWTH_ENTRIES, np.int64)
        if not count_growth(self._arena.arrays.lease, self._state, rows, base, draft, answer):
            return rows, base, draft, None
        if answer[BAD_ROW] >= 0:
            position = int(answer[BAD_ROW])
            raise ContractError(
                f"lease_rows[{position}] is {int(rows[position])}: no live lease, named before, or a lease without a paired "
                "draft that was to get draft pages; pass each live lease's row once"
            )
        return rows, base, draft, answer

    # Publication.

    def publish(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        resident_state_length: int,
        *,
        draft_state_length: int = 0,
    ) -> PublishResult:
        """Make full blocks reusable, whole or not at all. See `CacheManager.publish`."""
        if self._has_checkpoints:
            raise ContractError(f"a {self._kind.name} deployment publishes checkpoints; call publish_checkpoint")
        row = self._arena.row_of(lease)
        resident = as_count("resident_state_length", resident_state_length)
        draft = as_count("draft_state_length", draft_state_length)
        if draft and self._arena.arrays.lease[PAIRED, row] != 1:
            raise ContractError(f"draft_state_length is {draft}, but the lease runs no paired draft; leave it 0")
        if draft > resident:
            raise ContractError(
                f"draft_state_length is {draft}, more than the {resident} resident tokens; pass at most these"
            )
        blocks = resident // self._page_tokens
        if blocks == 0:
            raise ContractError(
                f"{resident} resident tokens hold no full block of {self._page_tokens}; publish when there is one"
            )
        return self._publish(row, keys, blocks, draft // self._page_tokens, 0, _NO_EXACT)

    def _publish(
        self,
        row: int,
        keys: NDArray[np.uint64],
        blocks: int,
        draft_blocks: int,
        exact_length: int,
        exact: NDArray[np.uint64],
    ) -> PublishResult:
        fields = self._arena.arrays.lease
        keys = as_keys(keys, max(blocks, int(fields[KNOWN, row])))
        offer = np.array((row, blocks, draft_blocks, exact_length), np.int64)
        path = np.empty(blocks, np.int32)
        answer, record, serial = publish_endpoint(self._core, self._arena.arrays, keys, exact, offer, path)
        if answer < 0:
            if answer not in _REFUSALS:
                raise InvariantError(
                    f"publication of {blocks} blocks by lease row {row} found a page that is not its own"
                )
            raise ContractError(f"publication of {blocks} blocks refused: {_REFUSALS[answer]}")
        kept = self._core.serial[record] == serial
        return PublishResult(
            status=PublishStatus.EXISTING_RECORD if answer == FOUND else PublishStatus.PUBLISHED,
            record=self._records.view(record) if kept else None,
            canonical_base_pages=path,
            published_full_block_count=int(fields[PUBLISHED, row]),
        )

    # Checkpoints of recurrent state.

    def reserve_snapshots(self, lease: CacheRequestLease, exact_length: int) -> HybridSnapshotReservation | None:
        """Take the slots for one capture; `None` under pressure. See `CacheManager.reserve_snapshots`."""
        row = self._checkpoint_row(lease)
        fields = self._arena.arrays.lease
        length = as_count("exact_length", exact_length, least=1)
        if fields[RESERVED, row] >= 0:
            raise ContractError("the lease holds a reservation already; publish and retire it first")
        if self._has_pages and length > fields[NUM_BASE, row] * self._page_tokens:
            raise ContractError(f"exact_length is {length}, beyond the lease's {int(fields[NUM_BASE, row])} pages")
        needs_partial = self._has_pages and (self._mtp or length % self._page_tokens != 0)
        if not reserve_slots(self._core, self._arena.arrays, row, length, int(needs_partial)):
            return None
        recurrent, partial = (int(slot) for slot in fields[RESERVED : RESERVED + 2, row])
        return HybridSnapshotReservation(recurrent, partial if needs_partial else None)

    def publish_checkpoint(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        checkpoint: HybridCheckpointKey,
        reservation: HybridSnapshotReservation,
    ) -> PublishResult:
        """Make captured state reusable at its exact length. See `CacheManager.publish_checkpoint`."""
        row = self._checkpoint_row(lease)
        self._check_reservation(row, reservation)
        (checkpoint,) = check_exact_keys((checkpoint,))
        length = checkpoint.exact_length
        if length != self._arena.arrays.lease[RESERVED_LENGTH, row]:
            reserved = int(self._arena.arrays.lease[RESERVED_LENGTH, row])
            raise ContractError(
                f"the checkpoint's exact length is {length}, but the slots were reserved for {reserved}"
            )
        full_blocks = length // self._page_tokens
        keys = as_keys(keys, full_blocks)
        digest = checkpoint.exact_prefix_digest
        anchor = keys[full_blocks - 1] if full_blocks else (0, 0)
        exact = np.array((digest.hi, digest.lo, *anchor), np.uint64)
        shared = 0
        if self._has_pages:
            shared = (length - 1) // self._page_tokens if self._mtp else full_blocks
        return self._publish(row, keys, shared, shared if self._mtp else 0, length, exact)

    def retire_snapshots(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
        """End the lease's hold on its reserved slots. See `CacheManager.retire_snapshots`."""
        row = self._arena.row_of(lease)
        self._check_reservation(row, reservation)
        drop_slots(self._core, self._arena.arrays.lease, row, RESERVED)

    def release_restored_snapshots(self, lease: CacheRequestLease) -> None:
        """End the lease's hold on the slots it was restored from. See `CacheManager.release_restored_snapshots`."""
        drop_slots(self._core, self._arena.arrays.lease, self._arena.row_of(lease), RESTORED)

    def _checkpoint_row(self, lease: CacheRequestLease) -> int:
        row = self._arena.row_of(lease)
        if self._arena.arrays.lease[CHECKPOINTS_ALLOWED, row] != 1:
            raise ContractError(
                f"this lease of a {self._kind.name} deployment makes no checkpoints; its state is not captured"
            )
        return row

    def _check_reservation(self, row: int, reservation: HybridSnapshotReservation) -> None:
        recurrent, partial = (int(slot) for slot in self._arena.arrays.lease[RESERVED : RESERVED + 2, row])
        held = HybridSnapshotReservation(recurrent, partial if partial >= 0 else None) if recurrent >= 0 else None
        if reservation != held or held is None:
            raise ContractError(
                f"{reservation!r} is not what the lease holds ({held!r}); pass its own reservation, once"
            )

    # The whole cache.

    def clear(self) -> None:
        """Evict every record. See `CacheManager.clear`."""
        if self.num_leases:
            raise ContractError(f"{self.num_leases} leases are out; release them before clear()")
        evict_everything(self._core)

    def pool(self, resource_type: ResourceType) -> PoolOccupancy:
        """Return free and capacity of one pool."""
        kind = RESOURCE_KIND[resource_type]
        return PoolOccupancy(int(self._state[FREE + kind]), int(self._state[CAPACITY + kind]))

    @property
    def records(self) -> RecordList:
        """The records from least to most recently used."""
        return self._records

    @property
    def num_leases(self) -> int:
        """How many leases are out."""
        return len(self._arena)

    @property
    def num_indexed_blocks(self) -> int:
        """How many blocks the index holds: those that a lookup can reach."""
        return int(self._state[NUM_NODES])

    @property
    def cache_bytes(self) -> int:
        """Bytes of index, tree, pools, records and LRU order: what the cache costs apart from the leases that are out."""
        return sum(array.nbytes for array in self._core)

    def counters(self) -> ManagerCounters:
        """Return the totals."""
        committed, existing, refused, paired, evicted = (
            int(self._state[entry]) for entry in (COMMITTED, EXISTING, REFUSED, PAIRED_COMMITS, EVICTED)
        )
        base, draft, recurrent, partial = (int(count) for count in self._state[RECLAIMED : RECLAIMED + 4])
        return ManagerCounters(
            publication_attempts=committed + existing + refused,
            committed_publications=committed,
            existing_publications=existing,
            refused_publications=refused,
            spec_pair_publications=paired,
            evicted_records=evicted,
            reclaimed_base_kv_pages=base,
            reclaimed_draft_kv_pages=draft,
            reclaimed_recurrent_snapshots=recurrent,
            reclaimed_partial_kv_snapshots=partial,
        )

    def check_invariants(self) -> None:
        """Check the five invariants in full; `InvariantError` names the first that does not hold."""
        check_invariants(self._core, self._arena.arrays)


def _page_growth(out: NDArray[np.int32], num_rows: int) -> PageGrowth:
    return PageGrowth(
        indices=out[:num_rows],
        first_page_indices=out[num_rows : 2 * num_rows],
        page_counts=out[2 * num_rows : 3 * num_rows],
        page_ids=out[3 * num_rows :],
    )
