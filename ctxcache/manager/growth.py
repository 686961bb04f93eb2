"""Leases grow: private pages are appended, to one or to many leases, whole or not at all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctxcache.arguments import Flags, Int32s, Int64s, as_integer, as_rows
from ctxcache.errors import ContractError, InvariantError
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.eviction import make_room
from ctxcache.manager.layout import CacheArrays, LeaseArrays
from ctxcache.manager.lease_table import LeaseTable, check_row
from ctxcache.manager.pools import copy_pages, take
from ctxcache.manager.results import NO_GROWTH, CacheRequestLease, LeaseGrowth, PageGrowth

_NO_TARGETS = np.empty(0, np.int32)


class GrowthCount(NamedTuple):
    """What growth to the targets of a call takes.

    Attributes:
        base_rows: leases that get base pages.
        base_pages: how many they get together.
        draft_rows: leases that get draft pages.
        draft_pages: how many they get together.
        widest_base: largest base target of a lease that grows.
        widest_draft: the same for drafts.
        bad_position: position of the first row that is no live lease's, or named twice, or has no paired draft to grow;
            -1 where there is none.
    """

    base_rows: int
    base_pages: int
    draft_rows: int
    draft_pages: int
    widest_base: int
    widest_draft: int
    bad_position: int


# One lease


def grow(table: LeaseTable, lease: CacheRequestLease, base_pages: int, draft_pages: int) -> bool:
    """Append so many private pages to a lease; `False`: not enough, nothing has changed."""
    row = table.row_of(lease)
    base_pages = as_integer("base_pages", base_pages)
    draft_pages = as_integer("draft_pages", draft_pages)
    fields = table.arrays.fields
    if draft_pages and fields[c.PAIRED, row] != 1:
        raise ContractError(f"draft_pages is {draft_pages}, but the lease runs no paired draft; leave it 0")
    table.ensure_room(
        int(fields[c.NUM_BASE, row]) + base_pages, int(fields[c.NUM_DRAFT, row]) + draft_pages, new_row=False
    )
    return grow_lease(table.cache, table.arrays, row, base_pages, draft_pages)


@njit_in_place
def grow_lease(cache: CacheArrays, leases: LeaseArrays, row: int, base_pages: int, draft_pages: int) -> bool:
    """Append so many private pages to one lease; `False` and nothing changed when they cannot be had."""
    check_row(leases, row)
    if not make_room(cache, leases, (base_pages, draft_pages, 0, 0)):
        return False
    fields = leases.fields
    num_base, num_draft = fields[c.NUM_BASE, row] + base_pages, fields[c.NUM_DRAFT, row] + draft_pages
    if num_base > leases.base_pages.shape[1] or num_draft > leases.draft_pages.shape[1]:
        raise InvariantError("a lease grows without room for its pages")
    # [0, NUM_BASE) as they were | [NUM_BASE, num_base) new; draft pages likewise
    take(cache.state, cache.resource, c.BASE, leases.base_pages[row, fields[c.NUM_BASE, row] : num_base])
    fields[c.NUM_BASE, row] = num_base
    take(cache.state, cache.resource, c.DRAFT, leases.draft_pages[row, fields[c.NUM_DRAFT, row] : num_draft])
    fields[c.NUM_DRAFT, row] = num_draft
    return True


# Many leases


def grow_leases(
    table: LeaseTable, lease_rows: Int32s, base_page_targets: Int32s, draft_page_targets: Int32s | None
) -> LeaseGrowth | None:
    """Grow many leases to so many pages each, all or none; `None`: not enough, nothing has changed."""
    rows, base, draft, count = _count(table, lease_rows, base_page_targets, draft_page_targets)
    if count.base_rows + count.draft_rows == 0:
        return NO_GROWTH
    state = table.cache.state
    if count.base_pages > state[c.CAPACITY + c.BASE] or count.draft_pages > state[c.CAPACITY + c.DRAFT]:
        return None
    table.ensure_room(count.widest_base, count.widest_draft, new_row=False)
    base_out = np.empty(3 * count.base_rows + count.base_pages, np.int32)
    draft_out = np.empty(3 * count.draft_rows + count.draft_pages, np.int32)
    if not grow_all(table.cache, table.arrays, rows, base, draft, count, base_out, draft_out):
        return None
    draft_growth = _page_growth(draft_out, count.draft_rows) if count.draft_rows else NO_GROWTH.draft
    return LeaseGrowth(_page_growth(base_out, count.base_rows), draft_growth)


def can_grow_leases(
    table: LeaseTable, lease_rows: Int32s, base_page_targets: Int32s, draft_page_targets: Int32s | None
) -> Flags:
    """Tell for each lease, greedily in order, whether it could grow with those before it that could."""
    rows, base, draft, _ = _count(table, lease_rows, base_page_targets, draft_page_targets)
    fits = np.empty(rows.size, np.bool_)
    mark_growable(table.cache.state, table.arrays.fields, rows, base, draft, fits)
    return fits


def _count(
    table: LeaseTable, lease_rows: Int32s, base_page_targets: Int32s, draft_page_targets: Int32s | None
) -> tuple[Int32s, Int32s, Int32s, GrowthCount]:
    rows = as_rows("lease_rows", lease_rows)
    base = as_rows("base_page_targets", base_page_targets, rows.size)
    draft = _NO_TARGETS
    if draft_page_targets is not None:
        draft = as_rows("draft_page_targets", draft_page_targets, rows.size)
    count = GrowthCount(*count_growth(table.arrays.fields, table.cache.state, rows, base, draft))
    if count.bad_position >= 0:
        raise ContractError(
            f"lease_rows[{count.bad_position}] is {int(rows[count.bad_position])}: no live lease, named before, or a lease "
            "without a paired draft that was to get draft pages; pass each live lease's row once"
        )
    return rows, base, draft, count


def _page_growth(out: Int32s, num_rows: int) -> PageGrowth:
    # [0, rows) indices | [rows, 2 * rows) first page indices | [2 * rows, 3 * rows) counts | the pages
    return PageGrowth(
        indices=out[:num_rows],
        first_page_indices=out[num_rows : 2 * num_rows],
        page_counts=out[2 * num_rows : 3 * num_rows],
        page_ids=out[3 * num_rows :],
    )


@njit_in_place
def count_growth(
    fields: Int32s, state: Int64s, rows: Int32s, base_targets: Int32s, draft_targets: Int32s
) -> tuple[int, int, int, int, int, int, int]:
    """Count what growth to the targets takes, up to the first bad row; return a `GrowthCount`."""
    base_rows, base_pages, widest_base = 0, 0, 0
    draft_rows, draft_pages, widest_draft = 0, 0, 0
    bad_position = -1
    state[c.MARK] += 1
    mark = state[c.MARK] & 0x3FFFFFFF
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= fields.shape[1] or fields[c.LIVE, row] != 1 or fields[c.LEASE_MARK, row] == mark:
            bad_position = i
            break
        fields[c.LEASE_MARK, row] = mark
        more = base_targets[i] - fields[c.NUM_BASE, row]
        if more > 0:
            base_rows += 1
            base_pages += more
            widest_base = max(widest_base, base_targets[i])
        if draft_targets.size > 0:
            more = draft_targets[i] - fields[c.NUM_DRAFT, row]
            if more > 0:
                if fields[c.PAIRED, row] != 1:
                    bad_position = i
                    break
                draft_rows += 1
                draft_pages += more
                widest_draft = max(widest_draft, draft_targets[i])
    return base_rows, base_pages, draft_rows, draft_pages, widest_base, widest_draft, bad_position


@njit_in_place
def grow_all(
    cache: CacheArrays,
    leases: LeaseArrays,
    rows: Int32s,
    base_targets: Int32s,
    draft_targets: Int32s,
    count: GrowthCount,
    base: Int32s,
    draft: Int32s,
) -> bool:
    """Grow all leases as counted by `count_growth`; `False` and nothing changed when the pages cannot be had.

    `base` and `draft` (`3 * rows + pages` entries each) receive indices, first page indices, counts, and page ids.
    """
    if not make_room(cache, leases, (count.base_pages, count.draft_pages, 0, 0)):
        return False
    if count.widest_base > leases.base_pages.shape[1] or count.widest_draft > leases.draft_pages.shape[1]:
        raise InvariantError("a lease grows without room for its pages")
    state, resource, fields = cache.state, cache.resource, leases.fields
    _grow_kind(
        state, resource, c.BASE, leases.base_pages, fields[c.NUM_BASE], rows, base_targets, count.base_rows, base
    )
    if count.draft_rows > 0:
        _grow_kind(
            state,
            resource,
            c.DRAFT,
            leases.draft_pages,
            fields[c.NUM_DRAFT],
            rows,
            draft_targets,
            count.draft_rows,
            draft,
        )
    return True


@njit_part
def _grow_kind(
    state: Int64s,
    resource: Int32s,
    kind: int,
    pages: Int32s,
    counts: Int32s,
    rows: Int32s,
    targets: Int32s,
    num_growing: int,
    out: Int32s,
) -> None:
    grown = 0
    filled = 3 * num_growing
    for i in range(rows.size):
        row = rows[i]
        # [0, first) as they were | [first, target) new
        first = counts[row]
        more = targets[i] - first
        if more <= 0:
            continue
        if first < 0 or grown == num_growing or filled + more > out.size:
            raise InvariantError("leases grow by more pages than were counted")
        new = out[filled : filled + more]
        take(state, resource, kind, new)
        copy_pages(new, pages[row, first:])
        counts[row] = first + more
        out[grown] = i
        out[num_growing + grown] = first
        out[2 * num_growing + grown] = more
        filled += more
        grown += 1


@njit_in_place
def mark_growable(
    state: Int64s, fields: Int32s, rows: Int32s, base_targets: Int32s, draft_targets: Int32s, fits: Flags
) -> None:
    """Set `fits[i]` where lease i could grow after those before it that could."""
    base_left = state[c.FREE + c.BASE] + state[c.IDLE + c.BASE]
    draft_left = state[c.FREE + c.DRAFT] + state[c.IDLE + c.DRAFT]
    for i in range(rows.size):
        base_more = max(0, base_targets[i] - fields[c.NUM_BASE, rows[i]])
        draft_more = max(0, draft_targets[i] - fields[c.NUM_DRAFT, rows[i]]) if draft_targets.size > 0 else 0
        fits[i] = base_more <= base_left and draft_more <= draft_left
        if fits[i]:
            base_left -= base_more
            draft_left -= draft_more
