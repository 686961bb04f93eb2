"""Leases and records of the plain-Python manager as their holders see them: handles, read off the state."""

from __future__ import annotations

from ctxcache.errors import ContractError
from ctxcache.manager.results import CacheRecord, CacheRequestLease, PageIds
from ctxcache.testing.reference.plans import page_ids
from ctxcache.testing.reference.state import PARTIAL, RECURRENT, LeaseState, RecordState, ReferenceState


class ReferenceHandles:
    """Makes handles for a state, and answers what they ask: see `LeaseOwner` and `RecordOwner` of the results."""

    def __init__(self, state: ReferenceState) -> None:
        self._state = state

    def leased(self, lease: CacheRequestLease) -> LeaseState:
        """Return what a live lease of this manager holds; `ContractError` for any other."""
        if lease.owner is not self:
            raise ContractError("the lease is another manager's")
        if self.lease_is_released(lease):
            raise ContractError(f"{lease!r} was released before; acquire another one")
        return self._state.leases[lease.row]

    def view(self, record: RecordState) -> CacheRecord:
        """Return the handle of a record."""
        return CacheRecord(self, record.serial, record.serial)

    def _seen(self, view: CacheRecord) -> RecordState:
        if not self.record_is_cached(view):
            raise ContractError(f"{view!r} was evicted")
        return next(record for record in self._state.records if record.serial == view.serial)

    # ruff: noqa: D102 - each is said at the property of the handle that asks

    def record_is_cached(self, record: CacheRecord) -> bool:
        return any(state.serial == record.serial for state in self._state.records)

    def record_base_page_path(self, record: CacheRecord) -> PageIds:
        return page_ids([self._state.page_of[key] for key in self._seen(record).keys])

    def record_draft_page_path(self, record: CacheRecord) -> PageIds:
        return page_ids(self._seen(record).draft_pages)

    def record_snapshot_slots(self, record: CacheRecord) -> tuple[int | None, int | None]:
        snapshots = self._seen(record).snapshots
        return snapshots.get(RECURRENT), snapshots.get(PARTIAL)

    def record_exact_checkpoint_length(self, record: CacheRecord) -> int:
        checkpoint = self._seen(record).checkpoint
        return 0 if checkpoint is None else checkpoint.exact_length

    def lease_is_released(self, lease: CacheRequestLease) -> bool:
        state = self._state.leases.get(lease.row)
        return state is None or state.generation != lease.generation

    def lease_base_pages(self, lease: CacheRequestLease) -> PageIds:
        return page_ids(self.leased(lease).base_pages)

    def lease_draft_pages(self, lease: CacheRequestLease) -> PageIds:
        return page_ids(self.leased(lease).draft_pages)

    def lease_snapshot_slots(self, lease: CacheRequestLease) -> tuple[int | None, int | None]:
        restored = self.leased(lease).restored
        return restored.get(RECURRENT), restored.get(PARTIAL)

    def lease_published_full_block_count(self, lease: CacheRequestLease) -> int:
        return self.leased(lease).published_full_block_count
