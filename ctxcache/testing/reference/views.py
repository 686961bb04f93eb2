"""The plain-Python manager as its callers see it: pools, records, leases and counters, all read off the state."""

from __future__ import annotations

from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import Hash128, ResourceType
from ctxcache.manager.results import CacheRecord, CacheRequestLease, ManagerCounters, PageIds
from ctxcache.metrics import PoolOccupancy
from ctxcache.testing.reference.plans import page_ids
from ctxcache.testing.reference.state import (
    BASE,
    DRAFT,
    PARTIAL,
    RECURRENT,
    Keys,
    LeaseState,
    RecordState,
    ReferenceState,
)


class ReferenceViews:
    """The state of a `ReferenceManager`, and everything about it that only reads."""

    def __init__(
        self,
        *,
        tokens_per_page: int,
        num_base_pages: int,
        num_draft_pages: int = 0,
        num_recurrent_snapshots: int = 0,
        num_partial_kv_snapshots: int = 0,
        max_records: int = 1024,
        kind: Kind = Kind.VANILLA,
    ) -> None:
        self._tokens_per_page = tokens_per_page
        self._max_records = max_records
        self._kind = kind
        self._state = ReferenceState(
            {
                BASE: num_base_pages,
                DRAFT: num_draft_pages,
                RECURRENT: num_recurrent_snapshots,
                PARTIAL: num_partial_kv_snapshots,
            }
        )
        self._generations: list[int] = []  # by lease row: how often it was released
        self._free_rows: list[int] = []  # released rows, the last one first to give
        self._last_serial = 0
        self._committed = self._existing = self._refused = self._paired_commits = 0

    def pool(self, resource_type: ResourceType) -> PoolOccupancy:
        """See `CacheManager.pool`."""
        pool = self._state.pools[resource_type]
        return PoolOccupancy(len(pool.free), pool.capacity)

    @property
    def records(self) -> list[CacheRecord]:
        """See `CacheManager.records`."""
        return [self._view(record) for record in self._state.records]

    @property
    def num_leases(self) -> int:
        """See `CacheManager.num_leases`."""
        return len(self._state.leases)

    @property
    def num_indexed_blocks(self) -> int:
        """See `CacheManager.num_indexed_blocks`."""
        return len(self._state.page_of)

    def counters(self) -> ManagerCounters:
        """See `CacheManager.counters`."""
        return ManagerCounters(
            publication_attempts=self._committed + self._existing + self._refused,
            committed_publications=self._committed,
            existing_publications=self._existing,
            refused_publications=self._refused,
            spec_pair_publications=self._paired_commits,
            evicted_records=self._state.evicted_records,
            reclaimed_base_kv_pages=self._state.reclaimed[BASE],
            reclaimed_draft_kv_pages=self._state.reclaimed[DRAFT],
            reclaimed_recurrent_snapshots=self._state.reclaimed[RECURRENT],
            reclaimed_partial_kv_snapshots=self._state.reclaimed[PARTIAL],
        )

    def check_invariants(self) -> None:
        """See `CacheManager.check_invariants`."""
        self._state.check_invariants()

    def _view(self, record: RecordState) -> CacheRecord:
        return CacheRecord(self, record.serial, record.serial)

    def _seen(self, view: CacheRecord) -> RecordState:
        for record in self._state.records:
            if record.serial == view.serial:
                return record
        raise ContractError(f"{view!r} was evicted")

    def record_is_cached(self, record: CacheRecord) -> bool:
        """See `CacheRecord.cached`."""
        return any(state.serial == record.serial for state in self._state.records)

    def record_base_page_path(self, record: CacheRecord) -> PageIds:
        """See `CacheRecord.base_page_path`."""
        return page_ids([self._state.page_of[key] for key in self._seen(record).keys])

    def record_draft_page_path(self, record: CacheRecord) -> PageIds:
        """See `CacheRecord.draft_page_path`."""
        return page_ids(self._seen(record).draft_pages)

    def record_snapshot_slots(self, record: CacheRecord) -> tuple[int | None, int | None]:
        """See `CacheRecord.recurrent_snapshot_slot`."""
        snapshots = self._seen(record).snapshots
        return snapshots.get(RECURRENT), snapshots.get(PARTIAL)

    def record_exact_checkpoint_length(self, record: CacheRecord) -> int:
        """See `CacheRecord.exact_checkpoint_length`."""
        checkpoint = self._seen(record).checkpoint
        return 0 if checkpoint is None else checkpoint.exact_length

    def lease_is_released(self, lease: CacheRequestLease) -> bool:
        """See `CacheRequestLease.released`."""
        state = self._state.leases.get(lease.row)
        return state is None or state.generation != lease.generation

    def lease_base_pages(self, lease: CacheRequestLease) -> PageIds:
        """See `CacheRequestLease.base_pages`."""
        return page_ids(self._leased(lease).base_pages)

    def lease_draft_pages(self, lease: CacheRequestLease) -> PageIds:
        """See `CacheRequestLease.draft_pages`."""
        return page_ids(self._leased(lease).draft_pages)

    def lease_snapshot_slots(self, lease: CacheRequestLease) -> tuple[int | None, int | None]:
        """See `CacheRequestLease.recurrent_snapshot_slot`."""
        restored = self._leased(lease).restored
        return restored.get(RECURRENT), restored.get(PARTIAL)

    def lease_known_keys(self, lease: CacheRequestLease) -> Keys:
        """Return the keys of the blocks that a lease reused or published: its own prefix."""
        return self._leased(lease).known_keys

    @property
    def lately_evicted_keys(self) -> frozenset[Hash128]:
        """Keys of blocks and checkpoints that were evicted since the last `clear`."""
        return frozenset(self._state.gone)

    def lease_published_full_block_count(self, lease: CacheRequestLease) -> int:
        """See `CacheRequestLease.published_full_block_count`."""
        return self._leased(lease).published_full_block_count

    def _leased(self, lease: CacheRequestLease) -> LeaseState:
        if lease.owner is not self:
            raise ContractError("the lease is another manager's")
        state = self._state.leases.get(lease.row)
        if state is None or state.generation != lease.generation:
            raise ContractError(f"{lease!r} was released before; acquire another one")
        return state
