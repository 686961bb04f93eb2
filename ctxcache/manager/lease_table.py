"""What sequences hold while they run: one row a lease. Rows are opened and given back; handles in, rows out.

There is room for a row and its pages before anything that must not fail (`LeaseTable.ensure_room`).
"""

from __future__ import annotations

import numpy as np

from ctxcache.arguments import Int32s, Int64s
from ctxcache.errors import ContractError, InvariantError
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.layout import CacheArrays, LeaseArrays, allocate_leases, with_more_room
from ctxcache.manager.pools import unpin
from ctxcache.manager.results import CacheRequestLease, PageIds
from ctxcache.manager.traits import DeploymentTraits


@njit_part
def open_row(state: Int64s, fields: Int32s) -> int:
    """Give out a row that holds nothing yet."""
    row = state[c.FREE_LEASE] if state[c.FREE_LEASE] >= 0 else state[c.FRESH_LEASES]
    if row >= fields.shape[1] or fields[c.LIVE, row] != 0:
        raise InvariantError("a lease is opened without a free row")
    if row == state[c.FREE_LEASE]:
        state[c.FREE_LEASE] = fields[c.LEASE_MARK, row]
    else:
        state[c.FRESH_LEASES] = row + 1
    fields[c.LIVE, row] = 1
    for field in range(c.LIVE + 1, c.NUM_LEASE_ROWS):
        fields[field, row] = -1
    fields[c.NUM_BASE, row] = 0
    fields[c.NUM_DRAFT, row] = 0
    fields[c.PUBLISHED, row] = 0
    fields[c.RESERVED_LENGTH, row] = 0
    fields[c.STRADDLES, row] = 0
    state[c.NUM_LEASES] += 1
    return int(row)


@njit_part
def check_row(leases: LeaseArrays, row: int) -> None:
    """Check that a row is a live lease's, and that what it counts lies within its pages."""
    fields = leases.fields
    if row < 0 or row >= fields.shape[1] or fields[c.LIVE, row] != 1:
        raise InvariantError("the row of a lease is not live")
    if fields[c.NUM_BASE, row] < 0 or fields[c.NUM_BASE, row] > leases.base_pages.shape[1]:
        raise InvariantError("a lease counts more base pages than it has room for")
    if fields[c.NUM_DRAFT, row] < 0 or fields[c.NUM_DRAFT, row] > leases.draft_pages.shape[1]:
        raise InvariantError("a lease counts more draft pages than it has room for")


@njit_in_place
def release_lease(cache: CacheArrays, leases: LeaseArrays, row: int) -> None:
    """Return every hold of a live lease, its last page first, and give the row back."""
    check_row(leases, row)
    fields = leases.fields
    unpin(cache, c.BASE, leases.base_pages[row, : fields[c.NUM_BASE, row]])
    unpin(cache, c.DRAFT, leases.draft_pages[row, : fields[c.NUM_DRAFT, row]])
    drop_slots(cache, fields, row, c.RESTORED)
    drop_slots(cache, fields, row, c.RESERVED)
    fields[c.LIVE, row] = 0
    fields[c.GENERATION, row] += 1
    fields[c.LEASE_MARK, row] = cache.state[c.FREE_LEASE]
    cache.state[c.FREE_LEASE] = row
    cache.state[c.NUM_LEASES] -= 1
    cache.state[c.NUM_STRADDLING] -= fields[c.STRADDLES, row]


@njit_in_place
def drop_slots(cache: CacheArrays, fields: Int32s, row: int, first_field: int) -> None:
    """End the lease's hold on its restored or its reserved snapshot slots."""
    if fields[c.LIVE, row] != 1:
        raise InvariantError("the row of a lease is not live")
    for i in range(2):
        if fields[first_field + i, row] >= 0:
            unpin(cache, c.RECURRENT + i, fields[first_field + i, row : row + 1])
            fields[first_field + i, row] = -1
    if first_field == c.RESERVED:
        fields[c.RESERVED_LENGTH, row] = 0


class LeaseTable:
    """Owns the leases' arrays, which are replaced by larger ones when they are full, and answers for the handles.

    Attributes:
        cache: whose resources the leases hold.
        traits: of the deployment.
        arrays: the present arrays.
    """

    cache: CacheArrays
    traits: DeploymentTraits
    arrays: LeaseArrays

    def __init__(self, cache: CacheArrays, traits: DeploymentTraits) -> None:
        self.cache = cache
        self.traits = traits
        self.arrays = allocate_leases(traits)
        self._most_base_pages, self._most_draft_pages = (int(size) for size in cache.state[c.CAPACITY : c.CAPACITY + 2])

    def __len__(self) -> int:
        return int(self.cache.state[c.NUM_LEASES])

    def ensure_room(self, num_base_pages: int, num_draft_pages: int, *, new_row: bool) -> None:
        """Enlarge the arrays for a lease of so many pages, and for one more lease. Nobody can see it.

        No lease can have more pages than there are, so that a demand for more, which will be refused, takes no memory.
        """
        arrays, state = self.arrays, self.cache.state
        num_base_pages = min(num_base_pages, self._most_base_pages)
        num_draft_pages = min(num_draft_pages, self._most_draft_pages)
        rows = arrays.fields.shape[1]
        full = new_row and state[c.FREE_LEASE] < 0 and state[c.FRESH_LEASES] == rows
        if full or num_base_pages > arrays.base_pages.shape[1] or num_draft_pages > arrays.draft_pages.shape[1]:
            self.arrays = with_more_room(arrays, rows + full, num_base_pages, num_draft_pages)

    def next_handle(self) -> CacheRequestLease:
        """Return the handle of the row that `open_row` gives out next; there is room for it.

        It is made before anything is held, so that nothing is ever held without a handle. Until the row is given out it
        reads as released.
        """
        state = self.cache.state
        row = int(state[c.FREE_LEASE])
        if row < 0:
            row = int(state[c.FRESH_LEASES])
        if self.arrays.fields[c.LIVE, row] != 0:
            raise InvariantError(f"lease row {row} is to be given out, and is out already")
        return CacheRequestLease(self, row, int(self.arrays.fields[c.GENERATION, row]))

    def take_back(self, lease: CacheRequestLease) -> None:
        """Return what a handle that never reached its caller holds by now, if anything."""
        if not self.lease_is_released(lease):
            release_lease(self.cache, self.arrays, lease.row)

    def live_leases(self) -> list[CacheRequestLease]:
        """Return a handle for every lease that is out, by row."""
        fields = self.arrays.fields
        return [
            CacheRequestLease(self, row, int(fields[c.GENERATION, row]))
            for row in np.flatnonzero(fields[c.LIVE]).tolist()
        ]

    def row_of(self, lease: CacheRequestLease) -> int:
        """Return the row of a live lease of this manager; `ContractError` for any other object."""
        if not isinstance(lease, CacheRequestLease) or lease.owner is not self:
            raise ContractError(f"{lease!r} is no lease of this manager; pass one that its acquire() returned")
        if self.lease_is_released(lease):
            raise ContractError(f"{lease!r} was released; a lease is released once and not used afterwards")
        return lease.row

    # What handles ask: `ctxcache.manager.results.LeaseOwner`.

    def lease_is_released(self, lease: CacheRequestLease) -> bool:
        """Whether the handle outlived its lease."""
        fields = self.arrays.fields
        return bool(fields[c.GENERATION, lease.row] != lease.generation or fields[c.LIVE, lease.row] != 1)

    def lease_base_pages(self, lease: CacheRequestLease) -> PageIds:
        """Return a copy of the base pages, in logical order."""
        row = self.row_of(lease)
        return self.arrays.base_pages[row, : self.arrays.fields[c.NUM_BASE, row]].copy()

    def lease_draft_pages(self, lease: CacheRequestLease) -> PageIds:
        """Return a copy of the draft pages, in logical order."""
        row = self.row_of(lease)
        return self.arrays.draft_pages[row, : self.arrays.fields[c.NUM_DRAFT, row]].copy()

    def lease_snapshot_slots(self, lease: CacheRequestLease) -> tuple[int | None, int | None]:
        """Return the restored recurrent and partial-KV slots, `None` where absent."""
        row = self.row_of(lease)
        recurrent, partial = (int(slot) for slot in self.arrays.fields[c.RESTORED : c.RESTORED + 2, row])
        return recurrent if recurrent >= 0 else None, partial if partial >= 0 else None

    def lease_published_full_block_count(self, lease: CacheRequestLease) -> int:
        """Return how many full blocks the lease itself has published."""
        return int(self.arrays.fields[c.PUBLISHED, self.row_of(lease)])
