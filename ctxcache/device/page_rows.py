"""The arithmetic of page-table rows: compiled loops over plain arrays, without a Python object per row or page.

A table of `B` rows and `W` columns is kept as

- `rows int32[B, W]`: the host's truth, `row[:length]` live page ids, -1 from there on;
- `lengths int32[B]`: live pages of each row;
- `mirror int32[B, W]`: what the device holds once everything enqueued has run, `UNKNOWN` after a failed upload;
- `dirty int32[B, 2]`: per row the half-open column range that may differ from the mirror; empty when `first >= last`.

An upload moves the entries of the dirty ranges that do differ.
"""

from __future__ import annotations

from ctxcache.arguments import Int32s
from ctxcache.jit import njit_in_place, njit_part

UNUSED = -1
"""Fills a row behind its live pages, on the host and on the device."""

UNKNOWN = -2
"""In the mirror: the device's entry may be anything. Differs from every page id and from `UNUSED`."""

OK = 0
BAD_SLOT = 1
NOT_AT_END = 2
ROW_FULL = 3
BAD_PAGE = 4
BAD_COUNT = 5
"""What `append_pages` and `replace_rows` report, with the index of the offending entry."""

BAD_ROW_PAGE = -1
HOLE_IN_ROW = -2
"""What `count_changes` reports in place of a count, with the row and the column."""


@njit_part
def mark_dirty(dirty: Int32s, row: int, first: int, last: int) -> None:
    """Widen the dirty range of one row to cover `[first, last)`."""
    if first >= last:
        return
    if dirty[row, 0] >= dirty[row, 1]:
        dirty[row, 0] = first
        dirty[row, 1] = last
    else:
        dirty[row, 0] = min(dirty[row, 0], first)
        dirty[row, 1] = max(dirty[row, 1], last)


@njit_part
def _check_append(lengths: Int32s, slots: Int32s, firsts: Int32s, counts: Int32s, width: int) -> tuple[int, int, int]:
    """Check the entries and complement the length of each row that passed, so that a row named twice is found.

    Returns:
        `(OK, number of rows complemented, pages in all)` or `(what is wrong, number of rows complemented, 0)`; the
        offending entry is the one after the complemented ones.
    """
    total = 0
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0 or slot >= len(lengths):
            return BAD_SLOT, i, 0
        if firsts[i] < 0 or firsts[i] != lengths[slot]:
            return NOT_AT_END, i, 0
        if counts[i] < 0:
            return BAD_COUNT, i, 0
        if firsts[i] + counts[i] > width:
            return ROW_FULL, i, 0
        total += counts[i]
        lengths[slot] = ~lengths[slot]
    return OK, len(slots), total


@njit_in_place
def append_pages(
    table: tuple[Int32s, Int32s, Int32s],
    slots: Int32s,
    firsts: Int32s,
    counts: Int32s,
    page_ids: Int32s,
    num_pages: int,
) -> tuple[int, int]:
    """Append `counts[i]` pages to row `slots[i]`, whose length must be `firsts[i]`. All entries or none.

    Args:
        table: `(rows, lengths, dirty)`.
        slots: rows to grow, each at most once.
        firsts: the present length of each.
        counts: pages to append to each.
        page_ids: the pages of all rows, one after the other.
        num_pages: page ids are below this.

    Returns:
        `(OK, 0)`, or what is wrong and the index of the entry (of the page for `BAD_PAGE`).
    """
    rows, lengths, dirty = table
    code, num_complemented, total = _check_append(lengths, slots, firsts, counts, rows.shape[1])
    for i in range(num_complemented):
        lengths[slots[i]] = firsts[i]
    if code != OK:
        return code, num_complemented
    if total != len(page_ids):
        return BAD_COUNT, len(slots)
    for i in range(total):
        if page_ids[i] < 0 or page_ids[i] >= num_pages:
            return BAD_PAGE, i
    offset = 0
    for i in range(len(slots)):
        row = slots[i]
        end = firsts[i] + counts[i]
        mark_dirty(dirty, row, firsts[i], end)
        for column in range(firsts[i], end):
            rows[row, column] = page_ids[offset]
            offset += 1
        lengths[row] = end
    return OK, 0


@njit_in_place
def replace_rows(
    table: tuple[Int32s, Int32s, Int32s], slots: Int32s, counts: Int32s, page_ids: Int32s, num_pages: int
) -> tuple[int, int]:
    """Give row `slots[i]` its next `counts[i]` pages of `page_ids` and clear its tail. All rows or none.

    Args:
        table: `(rows, lengths, dirty)`.
        slots: rows to set; of a row that is named twice the last entry stands.
        counts: pages of each row.
        page_ids: the pages of all rows, one after the other.
        num_pages: page ids are below this.

    Returns:
        `(OK, 0)`, or what is wrong and the index of the entry (of the page for `BAD_PAGE`).
    """
    rows, lengths, dirty = table
    total = 0
    for i in range(len(slots)):
        if slots[i] < 0 or slots[i] >= rows.shape[0]:
            return BAD_SLOT, i
        if counts[i] < 0:
            return BAD_COUNT, i
        if counts[i] > rows.shape[1]:
            return ROW_FULL, i
        total += counts[i]
    if total != len(page_ids):
        return BAD_COUNT, len(slots)
    for i in range(total):
        if page_ids[i] < 0 or page_ids[i] >= num_pages:
            return BAD_PAGE, i
    offset = 0
    for i in range(len(slots)):
        row = slots[i]
        count = counts[i]
        mark_dirty(dirty, row, 0, max(count, lengths[row]))
        for k in range(count):
            rows[row, k] = page_ids[offset + k]
        for k in range(count, lengths[row]):
            rows[row, k] = UNUSED
        offset += count
        lengths[row] = count
    return OK, 0


@njit_in_place
def replace_table(table: tuple[Int32s, Int32s, Int32s], new_rows: Int32s, new_lengths: Int32s) -> None:
    """Replace every row and its length. One compiled call, so that no interrupt leaves rows with others' lengths.

    Args:
        table: `(rows, lengths, dirty)`.
        new_rows: `int32[B, W]`, `UNUSED` behind the live pages.
        new_lengths: `int32[B]`, live pages of each.
    """
    rows, lengths, dirty = table
    for row in range(rows.shape[0]):
        mark_dirty(dirty, row, 0, rows.shape[1])
        for column in range(rows.shape[1]):
            rows[row, column] = new_rows[row, column]
        lengths[row] = new_lengths[row]


@njit_in_place
def count_changes(rows: Int32s, mirror: Int32s, dirty: Int32s, num_pages: int) -> tuple[int, int, int]:
    """Check the dirty ranges and count the entries in them that differ from the mirror.

    Returns:
        `(count, 0, 0)`, or `(BAD_ROW_PAGE | HOLE_IN_ROW, row, column)` for the first broken invariant.
    """
    count = 0
    width = rows.shape[1]
    for row in range(rows.shape[0]):
        first = dirty[row, 0]
        last = dirty[row, 1]
        if first >= last:
            continue
        for column in range(first, last):
            page = rows[row, column]
            if page < UNUSED or page >= num_pages:
                return BAD_ROW_PAGE, row, column
            if page != mirror[row, column]:
                count += 1
        # The neighbours on both sides belong to the check: a range may have been cleared below a live id.
        for column in range(max(first, 1), min(last + 1, width)):
            if rows[row, column] != UNUSED and rows[row, column - 1] == UNUSED:
                return HOLE_IN_ROW, row, column
    return count, 0, 0


@njit_in_place
def write_changes(rows: Int32s, mirror: Int32s, dirty: Int32s, out: Int32s) -> int:
    """Write `(row * W + column, page id)` of every differing entry to `out int32[n, 2]` and make the mirror agree.

    Returns:
        How many entries were written: what `count_changes` said.
    """
    count = 0
    width = rows.shape[1]
    for row in range(rows.shape[0]):
        for column in range(dirty[row, 0], dirty[row, 1]):
            if rows[row, column] != mirror[row, column]:
                out[count, 0] = row * width + column
                out[count, 1] = rows[row, column]
                mirror[row, column] = rows[row, column]
                count += 1
        dirty[row, 0] = 0
        dirty[row, 1] = 0
    return count


@njit_in_place
def take_changes(rows: Int32s, mirror: Int32s, dirty: Int32s, num_pages: int, out: Int32s) -> tuple[int, int, int]:
    """Do what `count_changes` does and, where `out` is long enough for all of them, `write_changes` in the same call."""
    count, row, column = count_changes(rows, mirror, dirty, num_pages)
    if 0 < count <= len(out):
        write_changes(rows, mirror, dirty, out)
    return count, row, column
