"""Sequences' holds while they run: an arena with one row a lease. Acquire, grow, release.

A lease's pages are `base_rows[row, :NUM_BASE]` and `draft_rows[row, :NUM_DRAFT]`; the arena must be large enough before
a call (`with_larger_arena`), so that no call fails in the middle.
"""

from __future__ import annotations

from ctxcache.core import (
    ACTIVE,
    BASE,
    CACHED,
    CHECKPOINTS_ALLOWED,
    DRAFT,
    FREE,
    FREE_LEASE,
    FRESH_LEASES,
    GENERATION,
    IDLE,
    KNOWN,
    LEASE_MARK,
    LIVE,
    MARK,
    NUM_BASE,
    NUM_BLOCKS,
    NUM_DRAFT,
    NUM_LEASES,
    NUM_PAIRED_BLOCKS,
    OFFSET,
    OWNER,
    PAIR_PAGE,
    PAIRED,
    PARENT,
    PARTIAL,
    PARTIAL_SLOT,
    PUBLISHED,
    RECURRENT,
    RECURRENT_SLOT,
    RESERVED,
    RESERVED_LENGTH,
    RESTORED,
    SERIAL,
    Core,
    Flags,
    Int32s,
    Int64s,
    Words,
)
from ctxcache.eviction import is_feasible, make_room
from ctxcache.index import newest_through
from ctxcache.jit import njit
from ctxcache.pairs import count_paired, newest_paired_through
from ctxcache.pools import pin, take, unpin
from ctxcache.records import touch

# Entries of the request array of `acquire_lease`.
ASK_BASE, ASK_DRAFT, ASK_PAIRED, ASK_RECORD, ASK_SERIAL, ASK_CHECKPOINTS, ASK_PAIRED_DEPTH = range(7)
NUM_ASK_ENTRIES = 7
ACQUIRED, STALE, INSUFFICIENT = -1, -2, -3


@njit
def acquire_lease(core: Core, matched: Int32s, last_key: Words, reused: int, drafts: Int32s, ask: Int64s) -> int:
    """Lease what a plan names; return the row, or `STALE` or `INSUFFICIENT` with nothing changed.

    Args:
        core: the arrays.
        matched: canonical pages of the matched blocks, of which the first `reused` are shared.
        last_key: key of the last matched block, two words.
        reused: blocks to share.
        drafts: draft pages to share.
        ask: see the names above; `ASK_RECORD` is the checkpoint to restore, or -1.
    """
    checkpoint = ask[ASK_RECORD]
    if checkpoint >= 0:
        if core.stamp[SERIAL, checkpoint] != ask[ASK_SERIAL]:
            return STALE
    elif not _still_matches(core, matched, last_key, drafts, ask[ASK_PAIRED_DEPTH]):
        return STALE
    if not _fits_beside_pins(core, matched[:reused], drafts, ask):
        return INSUFFICIENT

    row = _open_row(core)
    lease = core.lease
    for i in range(reused):
        core.base_rows[row, i] = matched[i]
        pin(core, BASE, matched[i])
    for i in range(drafts.size):
        core.draft_rows[row, i] = drafts[i]
        pin(core, DRAFT, drafts[i])
    if checkpoint >= 0:
        lease[RESTORED, row] = core.record[RECURRENT_SLOT, checkpoint]
        pin(core, RECURRENT, lease[RESTORED, row])
        lease[RESTORED + 1, row] = core.record[PARTIAL_SLOT, checkpoint]
        if lease[RESTORED + 1, row] >= 0:
            pin(core, PARTIAL, lease[RESTORED + 1, row])
        touch(core, checkpoint)
    elif matched.size > 0:
        touch(core, _record_that_was_hit(core, matched, ask[ASK_PAIRED_DEPTH]))
    make_room(core, (ask[ASK_BASE], ask[ASK_DRAFT], 0, 0))
    lease[NUM_BASE, row] = reused
    lease[NUM_DRAFT, row] = drafts.size
    lease[PAIRED, row] = ask[ASK_PAIRED]
    lease[CHECKPOINTS_ALLOWED, row] = ask[ASK_CHECKPOINTS]
    _append_pages(core, row, BASE, ask[ASK_BASE])
    _append_pages(core, row, DRAFT, ask[ASK_DRAFT])
    lease[KNOWN, row] = reused
    return row


@njit
def _still_matches(core: Core, matched: Int32s, last_key: Words, drafts: Int32s, paired_depth: int) -> bool:
    if matched.size == 0:
        return True
    last = matched[matched.size - 1]
    if core.resource[CACHED, last] == 0 or core.key[last, 0] != last_key[0] or core.key[last, 1] != last_key[1]:
        return False
    # The key names the whole prefix; what may differ is which pages are canonical for it now.
    for i in range(matched.size - 1, 0, -1):
        if core.node[PARENT, matched[i]] != matched[i - 1]:
            return False
    if core.node[PARENT, matched[0]] >= 0:
        return False
    if paired_depth > 0:
        if count_paired(core, matched) < paired_depth:
            return False
        for i in range(drafts.size):
            if core.node[PAIR_PAGE, matched[i + 1]] != drafts[i]:
                return False
    return True


@njit
def _fits_beside_pins(core: Core, shared: Int32s, drafts: Int32s, ask: Int64s) -> bool:
    """Whether the demand is feasible once the shared pages cannot be evicted."""
    idle = core.state[IDLE + BASE]
    if (
        ask[ASK_BASE] > core.state[FREE + BASE] + idle
        or ask[ASK_DRAFT] > core.state[FREE + DRAFT] + core.state[IDLE + DRAFT]
    ):
        return False
    for page in shared:
        if core.resource[ACTIVE, page] == 0:
            idle -= 1
    if ask[ASK_BASE] > core.state[FREE + BASE] + idle:
        return False
    idle = core.state[IDLE + DRAFT]
    for page in drafts:
        if core.resource[ACTIVE, core.state[OFFSET + DRAFT] + page] == 0:
            idle -= 1
    return ask[ASK_DRAFT] <= core.state[FREE + DRAFT] + idle


@njit
def _record_that_was_hit(core: Core, matched: Int32s, paired_depth: int) -> int:
    if paired_depth > 0:
        last = matched[paired_depth - 1]
        ending = core.resource[OWNER, last]
        if ending >= 0 and core.record[NUM_PAIRED_BLOCKS, ending] >= core.record[NUM_BLOCKS, ending]:
            return ending
        return newest_paired_through(core, last, paired_depth)
    last = matched[matched.size - 1]
    if core.resource[OWNER, last] >= 0:
        return core.resource[OWNER, last]
    return newest_through(core, last)


@njit
def _open_row(core: Core) -> int:
    row = core.state[FREE_LEASE]
    if row >= 0:
        core.state[FREE_LEASE] = core.lease[LEASE_MARK, row]
    else:
        row = core.state[FRESH_LEASES]
        core.state[FRESH_LEASES] = row + 1
    generation = core.lease[GENERATION, row]
    core.lease[:, row] = -1
    core.lease[GENERATION, row] = generation
    core.lease[LIVE, row] = 1
    core.lease[PUBLISHED, row] = 0
    core.lease[RESERVED_LENGTH, row] = 0
    core.state[NUM_LEASES] += 1
    return row


@njit
def _append_pages(core: Core, row: int, kind: int, num_pages: int) -> None:
    rows, count = (core.base_rows, NUM_BASE) if kind == BASE else (core.draft_rows, NUM_DRAFT)
    first = core.lease[count, row]
    for i in range(first, first + num_pages):
        rows[row, i] = take(core, kind)
    core.lease[count, row] = first + num_pages


@njit
def release_lease(core: Core, row: int) -> None:
    """Return every hold of a live lease, its last page first, and give the row back."""
    lease = core.lease
    for i in range(lease[NUM_BASE, row] - 1, -1, -1):
        unpin(core, BASE, core.base_rows[row, i])
    for i in range(lease[NUM_DRAFT, row] - 1, -1, -1):
        unpin(core, DRAFT, core.draft_rows[row, i])
    drop_slots(core, row, RESTORED)
    drop_slots(core, row, RESERVED)
    lease[LIVE, row] = 0
    lease[GENERATION, row] += 1
    lease[LEASE_MARK, row] = core.state[FREE_LEASE]
    core.state[FREE_LEASE] = row
    core.state[NUM_LEASES] -= 1


@njit
def drop_slots(core: Core, row: int, first_field: int) -> None:
    """End the lease's hold on its restored or its reserved snapshot slots."""
    for i in range(2):
        slot = core.lease[first_field + i, row]
        if slot >= 0:
            core.lease[first_field + i, row] = -1
            unpin(core, RECURRENT + i, slot)
    if first_field == RESERVED:
        core.lease[RESERVED_LENGTH, row] = 0


@njit
def reserve_slots(core: Core, row: int, exact_length: int, num_partial: int) -> bool:
    """Take a recurrent slot and `num_partial` (0 or 1) partial-KV slots for one capture; `False` and nothing changed when they cannot be had."""
    need = (0, 0, 1, num_partial)
    if not is_feasible(core, need):
        return False
    make_room(core, need)
    core.lease[RESERVED, row] = take(core, RECURRENT)
    core.lease[RESERVED + 1, row] = take(core, PARTIAL) if num_partial > 0 else -1
    core.lease[RESERVED_LENGTH, row] = exact_length
    return True


# Entries of the answer of `count_growth`.
BASE_ROWS, BASE_PAGES, DRAFT_ROWS, DRAFT_PAGES, WIDEST_BASE, WIDEST_DRAFT, BAD_ROW = range(7)
NUM_GROWTH_ENTRIES = 7


@njit
def count_growth(
    lease: Int32s, state: Int64s, rows: Int32s, base_targets: Int32s, draft_targets: Int32s, answer: Int64s
) -> bool:
    """Count what growth to the targets takes; `False` when nothing has to grow and every row is a live lease's.

    `answer[BAD_ROW]` is the position of the first row that is no live lease's, or named twice, or has no paired draft to
    grow; -1 otherwise.
    """
    answer[:] = 0
    answer[BAD_ROW] = -1
    state[MARK] += 1
    mark = state[MARK] & 0x3FFFFFFF
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= lease.shape[1] or lease[LIVE, row] != 1 or lease[LEASE_MARK, row] == mark:
            answer[BAD_ROW] = i
            return True
        lease[LEASE_MARK, row] = mark
        more = base_targets[i] - lease[NUM_BASE, row]
        if more > 0:
            answer[BASE_ROWS] += 1
            answer[BASE_PAGES] += more
            answer[WIDEST_BASE] = max(answer[WIDEST_BASE], base_targets[i])
        if draft_targets.size > 0:
            more = draft_targets[i] - lease[NUM_DRAFT, row]
            if more > 0:
                if lease[PAIRED, row] != 1:
                    answer[BAD_ROW] = i
                    return True
                answer[DRAFT_ROWS] += 1
                answer[DRAFT_PAGES] += more
                answer[WIDEST_DRAFT] = max(answer[WIDEST_DRAFT], draft_targets[i])
    return answer[BASE_ROWS] + answer[DRAFT_ROWS] > 0


@njit
def grow_all(
    core: Core, rows: Int32s, base_targets: Int32s, draft_targets: Int32s, answer: Int64s, base: Int32s, draft: Int32s
) -> bool:
    """Grow all leases as counted by `count_growth`; `False` and nothing changed when the pages cannot be had.

    `base` and `draft` (`3 * rows + pages` entries each) receive indices, first page indices, counts, and page ids.
    """
    need = (answer[BASE_PAGES], answer[DRAFT_PAGES], 0, 0)
    if not is_feasible(core, need):
        return False
    make_room(core, need)
    _grow_kind(core, BASE, rows, base_targets, answer[BASE_ROWS], base)
    if answer[DRAFT_ROWS] > 0:
        _grow_kind(core, DRAFT, rows, draft_targets, answer[DRAFT_ROWS], draft)
    return True


@njit
def _grow_kind(core: Core, kind: int, rows: Int32s, targets: Int32s, num_growing: int, out: Int32s) -> None:
    arena, count = (core.base_rows, NUM_BASE) if kind == BASE else (core.draft_rows, NUM_DRAFT)
    grown = 0
    filled = 3 * num_growing
    for i in range(rows.size):
        row = rows[i]
        first = core.lease[count, row]
        more = targets[i] - first
        if more <= 0:
            continue
        _append_pages(core, row, kind, more)
        out[grown] = i
        out[num_growing + grown] = first
        out[2 * num_growing + grown] = more
        for page in range(first, first + more):
            out[filled] = arena[row, page]
            filled += 1
        grown += 1


@njit
def mark_growable(core: Core, rows: Int32s, base_targets: Int32s, draft_targets: Int32s, fits: Flags) -> None:
    """Set `fits[i]` where lease i could grow after those before it that could."""
    base_left = core.state[FREE + BASE] + core.state[IDLE + BASE]
    draft_left = core.state[FREE + DRAFT] + core.state[IDLE + DRAFT]
    for i in range(rows.size):
        base_more = max(0, base_targets[i] - core.lease[NUM_BASE, rows[i]])
        draft_more = max(0, draft_targets[i] - core.lease[NUM_DRAFT, rows[i]]) if draft_targets.size > 0 else 0
        fits[i] = base_more <= base_left and draft_more <= draft_left
        if fits[i]:
            base_left -= base_more
            draft_left -= draft_more
