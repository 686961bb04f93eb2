"""The Python side of leases: handles in, rows out; room in the arena before anything that must not fail."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import as_integer, as_rows
from ctxcache.errors import ContractError
from ctxcache.manager.acquire import (
    BAD_ROW,
    BASE_PAGES,
    BASE_ROWS,
    DRAFT_PAGES,
    DRAFT_ROWS,
    NUM_GROWTH_ENTRIES,
    WIDEST_BASE,
    WIDEST_DRAFT,
    count_growth,
    grow_all,
    grow_lease,
    mark_growable,
    release_lease,
)
from ctxcache.manager.layout import (
    CAPACITY,
    FREE_LEASE,
    FRESH_LEASES,
    GENERATION,
    LIVE,
    NUM_BASE,
    NUM_DRAFT,
    NUM_LEASES,
    PAIRED,
    PUBLISHED,
    RESTORED,
    Arena,
    Core,
    with_larger_arena,
)
from ctxcache.manager.results import NO_GROWTH, CacheRequestLease, LeaseGrowth, PageGrowth, PageIds

_NO_TARGETS = np.empty(0, np.int32)


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

    def ensure_room(self, num_base_pages: int, num_draft_pages: int, *, new_row: bool) -> None:
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

    def next_handle(self) -> CacheRequestLease:
        """Return the handle of the row that `acquire_lease` gives out next; there is room for it.

        It is made before anything is held, so that nothing is ever held without a handle. Until the row is given out it
        reads as released.
        """
        state = self._core.state
        row = int(state[FREE_LEASE])
        if row < 0:
            row = int(state[FRESH_LEASES])
        return CacheRequestLease(self, row, int(self.arrays.lease[GENERATION, row]))

    def take_back(self, lease: CacheRequestLease) -> None:
        """Return what a handle that never reached its caller holds by now, if anything."""
        if not self.lease_is_released(lease):
            release_lease(self._core, self.arrays, lease.row)

    def live_leases(self) -> list[CacheRequestLease]:
        """Return a handle for every lease that is out, by row."""
        fields = self.arrays.lease
        return [
            CacheRequestLease(self, row, int(fields[GENERATION, row])) for row in np.flatnonzero(fields[LIVE]).tolist()
        ]

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

    def grow(self, lease: CacheRequestLease, base_pages: int, draft_pages: int) -> bool:
        """See `CacheManager.grow`."""
        row = self.row_of(lease)
        base_pages = as_integer("base_pages", base_pages)
        draft_pages = as_integer("draft_pages", draft_pages)
        fields = self.arrays.lease
        if draft_pages and fields[PAIRED, row] != 1:
            raise ContractError(f"draft_pages is {draft_pages}, but the lease runs no paired draft; leave it 0")
        self.ensure_room(
            int(fields[NUM_BASE, row]) + base_pages, int(fields[NUM_DRAFT, row]) + draft_pages, new_row=False
        )
        return grow_lease(self._core, self.arrays, row, base_pages, draft_pages)

    def grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None,
    ) -> LeaseGrowth | None:
        """See `CacheManager.grow_leases`."""
        rows, base, draft, answer = self._count_growth(lease_rows, base_page_targets, draft_page_targets)
        if answer is None:
            return NO_GROWTH
        if answer[BASE_PAGES] > self._num_base_pages or answer[DRAFT_PAGES] > self._num_draft_pages:
            return None
        self.ensure_room(int(answer[WIDEST_BASE]), int(answer[WIDEST_DRAFT]), new_row=False)
        base_out = np.empty(3 * answer[BASE_ROWS] + answer[BASE_PAGES], np.int32)
        draft_out = np.empty(3 * answer[DRAFT_ROWS] + answer[DRAFT_PAGES], np.int32)
        if not grow_all(self._core, self.arrays, rows, base, draft, answer, base_out, draft_out):
            return None
        draft_growth = _page_growth(draft_out, int(answer[DRAFT_ROWS])) if answer[DRAFT_ROWS] else NO_GROWTH.draft
        return LeaseGrowth(_page_growth(base_out, int(answer[BASE_ROWS])), draft_growth)

    def can_grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None,
    ) -> NDArray[np.bool_]:
        """See `CacheManager.can_grow_leases`."""
        rows, base, draft, _ = self._count_growth(lease_rows, base_page_targets, draft_page_targets)
        fits = np.empty(rows.size, np.bool_)
        mark_growable(self._core.state, self.arrays.lease, rows, base, draft, fits)
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
        if not count_growth(self.arrays.lease, self._core.state, rows, base, draft, answer):
            return rows, base, draft, None
        if answer[BAD_ROW] >= 0:
            position = int(answer[BAD_ROW])
            raise ContractError(
                f"lease_rows[{position}] is {int(rows[position])}: no live lease, named before, or a lease without a paired "
                "draft that was to get draft pages; pass each live lease's row once"
            )
        return rows, base, draft, answer


def _page_growth(out: NDArray[np.int32], num_rows: int) -> PageGrowth:
    return PageGrowth(
        indices=out[:num_rows],
        first_page_indices=out[num_rows : 2 * num_rows],
        page_counts=out[2 * num_rows : 3 * num_rows],
        page_ids=out[3 * num_rows :],
    )
