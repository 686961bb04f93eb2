"""The CUDA-free manager: plan, acquire, grow, publish, release.

Single writer, no thread, no lock. The rules are said in `ctxcache.testing.manager_contract.CacheManager`; here arguments are checked,
and compiled code works on arrays. No Python object exists per block, record or batch row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import as_flag, as_integer, as_keys, check_member
from ctxcache.config import EXECUTION_MODES
from ctxcache.errors import ContractError
from ctxcache.ids import (
    PAIRED_KINDS,
    RECURRENT_KINDS,
    AcquireStatus,
    ContextCacheDeploymentKind,
    ContextCacheExecutionMode,
    ResourceType,
)
from ctxcache.manager.acquire import (
    STALE,
    acquire_lease,
)
from ctxcache.manager.checkpoints import list_lengths
from ctxcache.manager.eviction import evict_everything
from ctxcache.manager.invariants import check_invariants
from ctxcache.manager.layout import (
    CAPACITY,
    COMMITTED,
    EVICTED,
    EXISTING,
    FREE,
    NUM_NODES,
    NUM_RECORDS,
    PAIRED_COMMITS,
    RECLAIMED,
    REFUSED,
    RESOURCE_KIND,
    allocate_arena,
    allocate_core,
)
from ctxcache.manager.lease_table import LeaseArena
from ctxcache.manager.planning import PlanRequest, check_exact_keys, explain_match, make_plan, match_shared_blocks
from ctxcache.manager.publish import Publisher
from ctxcache.manager.records import RecordList
from ctxcache.manager.results import (
    AcquireResult,
    CacheRequestLease,
    HybridCheckpointKey,
    HybridSnapshotReservation,
    LeaseGrowth,
    ManagerCounters,
    MatchResult,
    PublishResult,
    ReusePlan,
)
from ctxcache.metrics import PoolOccupancy

_VANILLA = ContextCacheExecutionMode.VANILLA
_PAIRED_MODES = (ContextCacheExecutionMode.EAGLE, ContextCacheExecutionMode.MTP)
"""A tuple: members are hashed by Python code, and two comparisons are faster."""


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
        ContractError: a negative number, no token a page, a kind that is no `ContextCacheDeploymentKind`, or a pool that
            the kind has no use for.
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
        check_member("kind", kind, ContextCacheDeploymentKind)
        self._page_tokens = as_integer("tokens_per_page", tokens_per_page, 1)
        self._kind = kind
        self._modes = EXECUTION_MODES[kind]
        self._has_pages = kind is not ContextCacheDeploymentKind.PURE_RECURRENT
        self._has_checkpoints = kind in RECURRENT_KINDS
        self._mtp = kind is ContextCacheDeploymentKind.HYBRID_MTP
        capacities = (
            self._pool_size("num_base_pages", num_base_pages, useful=self._has_pages),
            self._pool_size("num_draft_pages", num_draft_pages, useful=kind in PAIRED_KINDS),
            self._pool_size("num_recurrent_snapshots", num_recurrent_snapshots, useful=self._has_checkpoints),
            self._pool_size(
                "num_partial_kv_snapshots", num_partial_kv_snapshots, useful=self._has_checkpoints and self._has_pages
            ),
        )
        self._core = allocate_core(kind, capacities, as_integer("max_records", max_records))
        self._state = self._core.state
        self._arena = LeaseArena(self._core, allocate_arena(kind))
        self._records = RecordList(self._core)
        self._publisher = Publisher(self._core, self._arena, self._records, kind, self._page_tokens)

    def _pool_size(self, name: str, size: int, *, useful: bool) -> int:
        size = as_integer(name, size)
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
        request = self._request(keys, num_tokens, self._modes[-1], 0, 0, False, ())
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
        check_member("mode", mode, ContextCacheExecutionMode)
        if mode not in self._modes:
            served = ", ".join(served.name for served in self._modes)
            raise ContractError(f"mode is {mode.name}; a {self._kind.name} deployment serves {served}")
        num_tokens = as_integer("num_tokens", num_tokens, 1)
        draft_extra_tokens = as_integer("draft_extra_tokens", draft_extra_tokens)
        paired = mode in _PAIRED_MODES
        if draft_extra_tokens and not paired:
            raise ContractError(
                f"draft_extra_tokens is {draft_extra_tokens}, but {mode.name} runs no paired draft; leave it 0"
            )
        # The plain mode of an MTP deployment writes no draft state, so it can use and make no checkpoint.
        cold = as_flag("bypass", bypass) or (self._mtp and not paired)
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
            base_extra_tokens=as_integer("base_extra_tokens", base_extra_tokens),
            draft_extra_tokens=draft_extra_tokens,
            exact_keys=exact,
        )

    # Leases.

    def acquire(self, plan: ReusePlan) -> AcquireResult:
        """Turn a plan into a lease, whole or not at all. See `CacheManager.acquire`."""
        if not isinstance(plan, ReusePlan) or plan._owner is not self:  # noqa: SLF001 - the plan's maker
            raise ContractError(f"{plan!r} is no plan of this manager; pass one that its plan() returned")
        last_key, record, serial, matched, drafts = plan._proof  # noqa: SLF001
        paired = plan.execution_mode in _PAIRED_MODES
        reused = plan.reused_base_pages.size
        ask = np.array(
            (
                plan.base_page_demand,
                plan.draft_page_demand,
                paired,
                record,
                serial,
                self._has_checkpoints and (paired or not self._mtp),
                matched.size if paired and record < 0 else 0,
            ),
            np.int64,
        )
        arena = self._arena
        arena.ensure_room(reused + plan.base_page_demand, drafts.size + plan.draft_page_demand, new_row=True)
        lease = arena.next_handle()
        try:
            row = acquire_lease(self._core, arena.arrays, matched, last_key, reused, drafts, ask)
            if row >= 0:
                return AcquireResult(lease, AcquireStatus.ACQUIRED, plan)
        except BaseException:  # an interrupt: the caller gets no handle, so nobody else could release it
            arena.take_back(lease)
            raise
        status = AcquireStatus.STALE_PLAN if row == STALE else AcquireStatus.INSUFFICIENT_CAPACITY
        return AcquireResult(None, status, plan)

    def release(self, lease: CacheRequestLease) -> None:
        """Return every hold of the lease. See `CacheManager.release`."""
        self._arena.release(lease)

    def release_all(self) -> None:
        """Release every lease that is out, those too whose handle an interrupt kept from its caller."""
        for lease in self._arena.live_leases():
            self.release(lease)

    def grow(self, lease: CacheRequestLease, base_pages: int = 0, draft_pages: int = 0) -> bool:
        """Append private pages, whole or not at all. See `CacheManager.grow`."""
        return self._arena.grow(lease, base_pages, draft_pages)

    def grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> LeaseGrowth | None:
        """Grow many leases, all or none. See `CacheManager.grow_leases`."""
        return self._arena.grow_leases(lease_rows, base_page_targets, draft_page_targets)

    def can_grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]:
        """Tell which leases could grow, greedily in order. See `CacheManager.can_grow_leases`."""
        return self._arena.can_grow_leases(lease_rows, base_page_targets, draft_page_targets)

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
        return self._publisher.publish(lease, keys, resident_state_length, draft_state_length)

    def reserve_snapshots(self, lease: CacheRequestLease, exact_length: int) -> HybridSnapshotReservation | None:
        """Take the slots for one capture; `None` under pressure. See `CacheManager.reserve_snapshots`."""
        return self._publisher.reserve_snapshots(lease, exact_length)

    def publish_checkpoint(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        checkpoint: HybridCheckpointKey,
        reservation: HybridSnapshotReservation,
    ) -> PublishResult:
        """Make captured state reusable at its exact length. See `CacheManager.publish_checkpoint`."""
        return self._publisher.publish_checkpoint(lease, keys, checkpoint, reservation)

    def retire_snapshots(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
        """End the lease's hold on its reserved slots. See `CacheManager.retire_snapshots`."""
        self._publisher.retire_snapshots(lease, reservation)

    def release_restored_snapshots(self, lease: CacheRequestLease) -> None:
        """End the lease's hold on the slots it was restored from. See `CacheManager.release_restored_snapshots`."""
        self._publisher.release_restored_snapshots(lease)

    # The whole cache.

    def clear(self) -> None:
        """Evict every record. See `CacheManager.clear`."""
        if self.num_leases:
            raise ContractError(f"{self.num_leases} leases are out; release them before clear()")
        evict_everything(self._core)

    def pool(self, resource_type: ResourceType) -> PoolOccupancy:
        """Return free and capacity of one pool."""
        check_member("resource_type", resource_type, ResourceType)
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
