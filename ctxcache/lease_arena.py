"""The Python side of leases: handles in, rows out; room in the arena before anything that must not fail."""

from __future__ import annotations

from ctxcache.core import (
    FREE_LEASE,
    FRESH_LEASES,
    GENERATION,
    LIVE,
    NUM_BASE,
    NUM_DRAFT,
    NUM_LEASES,
    PUBLISHED,
    RESTORED,
    Core,
    with_larger_arena,
)
from ctxcache.errors import ContractError
from ctxcache.leases import release_lease
from ctxcache.outcomes import CacheRequestLease, PageIds


class LeaseArena:
    """Owns the arrays, since only the arena's are ever replaced by larger ones.

    Attributes:
        core: the present arrays.
    """

    core: Core

    def __init__(self, core: Core) -> None:
        self.core = core

    def __len__(self) -> int:
        return int(self.core.state[NUM_LEASES])

    def make_room(self, num_base_pages: int, num_draft_pages: int, *, new_row: bool) -> None:
        """Enlarge the arena for a lease of so many pages, and for one more lease. Nobody can see it."""
        core = self.core
        rows = core.lease.shape[1]
        full = new_row and core.state[FREE_LEASE] < 0 and core.state[FRESH_LEASES] == rows
        if full or num_base_pages > core.base_rows.shape[1] or num_draft_pages > core.draft_rows.shape[1]:
            self.core = with_larger_arena(core, rows + full, num_base_pages, num_draft_pages)

    def handle(self, row: int) -> CacheRequestLease:
        """Return the handle of a row that has just been given out."""
        return CacheRequestLease(self, row, int(self.core.lease[GENERATION, row]))

    def row_of(self, lease: CacheRequestLease) -> int:
        """Return the row of a live lease of this manager; `ContractError` for any other object."""
        if not isinstance(lease, CacheRequestLease) or lease.owner is not self:
            raise ContractError(f"{lease!r} is no lease of this manager; pass one that its acquire() returned")
        if self.lease_is_released(lease):
            raise ContractError(f"{lease!r} was released; a lease is released once and not used afterwards")
        return lease.row

    def release(self, lease: CacheRequestLease) -> None:
        """Return every hold of a live lease."""
        release_lease(self.core, self.row_of(lease))

    def lease_is_released(self, lease: CacheRequestLease) -> bool:
        """Whether the handle outlived its lease."""
        fields = self.core.lease
        return bool(fields[GENERATION, lease.row] != lease.generation or fields[LIVE, lease.row] != 1)

    def lease_base_pages(self, lease: CacheRequestLease) -> PageIds:
        """See `CacheRequestLease.base_pages`."""
        row = self.row_of(lease)
        return self.core.base_rows[row, : self.core.lease[NUM_BASE, row]].copy()

    def lease_draft_pages(self, lease: CacheRequestLease) -> PageIds:
        """See `CacheRequestLease.draft_pages`."""
        row = self.row_of(lease)
        return self.core.draft_rows[row, : self.core.lease[NUM_DRAFT, row]].copy()

    def lease_snapshot_slots(self, lease: CacheRequestLease) -> tuple[int | None, int | None]:
        """Return the restored recurrent and partial-KV slots, `None` where absent."""
        row = self.row_of(lease)
        recurrent, partial = (int(slot) for slot in self.core.lease[RESTORED : RESTORED + 2, row])
        return recurrent if recurrent >= 0 else None, partial if partial >= 0 else None

    def lease_published_full_block_count(self, lease: CacheRequestLease) -> int:
        """See `CacheRequestLease.published_full_block_count`."""
        return int(self.core.lease[PUBLISHED, self.row_of(lease)])
