"""The Python side of leases: handles in, rows out; room in the arena before anything that must not fail."""

from __future__ import annotations

from ctxcache.core import (
    CAPACITY,
    FREE_LEASE,
    FRESH_LEASES,
    GENERATION,
    LIVE,
    NUM_BASE,
    NUM_DRAFT,
    NUM_LEASES,
    PUBLISHED,
    RESTORED,
    Arena,
    Core,
    with_larger_arena,
)
from ctxcache.errors import ContractError
from ctxcache.leases import release_lease
from ctxcache.outcomes import CacheRequestLease, PageIds


class LeaseArena:
    """Owns the arena's arrays, which are replaced by larger ones when they are full.

    Attributes:
        arrays: the present arrays.
    """

    arrays: Arena

    def __init__(self, core: Core, arrays: Arena) -> None:
        self._core = core
        self.arrays = arrays
        self._num_base_pages, self._num_draft_pages = (int(size) for size in core.state[CAPACITY : CAPACITY + 2])

    def __len__(self) -> int:
        return int(self._core.state[NUM_LEASES])

    def make_room(self, num_base_pages: int, num_draft_pages: int, *, new_row: bool) -> None:
        """Enlarge the arena for a lease of so many pages, and for one more lease. Nobody can see it.

        No lease can have more pages than there are, so that a demand for more, which will be refused, takes no memory.
        """
        arrays, state = self.arrays, self._core.state
        num_base_pages = min(num_base_pages, self._num_base_pages)
        num_draft_pages = min(num_draft_pages, self._num_draft_pages)
        rows = arrays.lease.shape[1]
        full = new_row and state[FREE_LEASE] < 0 and state[FRESH_LEASES] == rows
        if full or num_base_pages > arrays.base_rows.shape[1] or num_draft_pages > arrays.draft_rows.shape[1]:
            self.arrays = with_larger_arena(arrays, rows + full, num_base_pages, num_draft_pages)

    def handle(self, row: int) -> CacheRequestLease:
        """Return the handle of a row that has just been given out."""
        return CacheRequestLease(self, row, int(self.arrays.lease[GENERATION, row]))

    def row_of(self, lease: CacheRequestLease) -> int:
        """Return the row of a live lease of this manager; `ContractError` for any other object."""
        if not isinstance(lease, CacheRequestLease) or lease.owner is not self:
            raise ContractError(f"{lease!r} is no lease of this manager; pass one that its acquire() returned")
        if self.lease_is_released(lease):
            raise ContractError(f"{lease!r} was released; a lease is released once and not used afterwards")
        return lease.row

    def release(self, lease: CacheRequestLease) -> None:
        """Return every hold of a live lease."""
        release_lease(self._core, self.arrays, self.row_of(lease))

    def lease_is_released(self, lease: CacheRequestLease) -> bool:
        """Whether the handle outlived its lease."""
        fields = self.arrays.lease
        return bool(fields[GENERATION, lease.row] != lease.generation or fields[LIVE, lease.row] != 1)

    def lease_base_pages(self, lease: CacheRequestLease) -> PageIds:
        """See `CacheRequestLease.base_pages`."""
        row = self.row_of(lease)
        return self.arrays.base_rows[row, : self.arrays.lease[NUM_BASE, row]].copy()

    def lease_draft_pages(self, lease: CacheRequestLease) -> PageIds:
        """See `CacheRequestLease.draft_pages`."""
        row = self.row_of(lease)
        return self.arrays.draft_rows[row, : self.arrays.lease[NUM_DRAFT, row]].copy()

    def lease_snapshot_slots(self, lease: CacheRequestLease) -> tuple[int | None, int | None]:
        """Return the restored recurrent and partial-KV slots, `None` where absent."""
        row = self.row_of(lease)
        recurrent, partial = (int(slot) for slot in self.arrays.lease[RESTORED : RESTORED + 2, row])
        return recurrent if recurrent >= 0 else None, partial if partial >= 0 else None

    def lease_published_full_block_count(self, lease: CacheRequestLease) -> int:
        """See `CacheRequestLease.published_full_block_count`."""
        return int(self.arrays.lease[PUBLISHED, self.row_of(lease)])
