"""Sequences' holds while they run: an arena with one row a lease. Acquire, grow, release.

A lease's pages are `base_rows[row, :NUM_BASE]` and `draft_rows[row, :NUM_DRAFT]`; the arena must be large enough before
a call (`with_larger_arena`), so that no call fails in the middle.
"""

from __future__ import annotations

from ctxcache.arguments import Flags, Int32s, Int64s, Words
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager.block_index import newest_through
from ctxcache.manager.draft_pages import count_paired, newest_paired_through
from ctxcache.manager.eviction import is_feasible, make_room
from ctxcache.manager.layout import (
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
    NUM_LEASE_ROWS,
    NUM_LEASES,
    NUM_PAIRED_BLOCKS,
    NUM_STRADDLING,
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
    STRADDLES,
    Arena,
    Core,
)
from ctxcache.manager.lru import touch
from ctxcache.manager.pools import copy_pages, pin, take, unpin

# Entries of the request array of `acquire_lease`.
ASK_BASE, ASK_DRAFT, ASK_PAIRED, ASK_RECORD, ASK_SERIAL, ASK_CHECKPOINTS, ASK_PAIRED_DEPTH = range(7)
NUM_ASK_ENTRIES = 7
ACQUIRED, STALE, INSUFFICIENT = -1, -2, -3


@njit_in_place
def acquire_lease(
    core: Core, arena: Arena, matched: Int32s, last_key: Words, reused: int, drafts: Int32s, ask: Int64s
) -> int:
    """Lease what a plan names; return the row, or `STALE` or `INSUFFICIENT` with nothing changed.

    Args:
        core: the cache.
        arena: the leases.
        matched: canonical pages of the matched blocks, of which the first `reused` are shared.
        last_key: key of the last matched block, two words.
        reused: blocks to share.
        drafts: draft pages to share.
        ask: see the names above; `ASK_RECORD` is the checkpoint to restore, or -1.
    """
    checkpoint = ask[ASK_RECORD]
    if checkpoint >= 0:
        if core.serial[checkpoint] != ask[ASK_SERIAL]:
            return STALE
    elif not _still_matches(core, matched, last_key, drafts, ask[ASK_PAIRED_DEPTH]):
        return STALE
    shared = matched[:reused]
    if not (_fits(core, BASE, shared, ask[ASK_BASE]) and _fits(core, DRAFT, drafts, ask[ASK_DRAFT])):
        return INSUFFICIENT

    row = _open_row(core.state, arena.lease)
    lease = arena.lease
    copy_pages(shared, arena.base_rows[row])
    copy_pages(drafts, arena.draft_rows[row])
    pin(core, BASE, shared)
    pin(core, DRAFT, drafts)
    if checkpoint >= 0:
        lease[RESTORED, row] = core.record[RECURRENT_SLOT, checkpoint]
        lease[RESTORED + 1, row] = core.record[PARTIAL_SLOT, checkpoint]
        for i in range(2):
            if lease[RESTORED + i, row] >= 0:
                pin(core, RECURRENT + i, lease[RESTORED + i, row : row + 1])
        touch(core, checkpoint)
    elif matched.size > 0:
        touch(core, _record_that_was_hit(core, matched, ask[ASK_PAIRED_DEPTH]))
    make_room(core, arena, (ask[ASK_BASE], ask[ASK_DRAFT], 0, 0))
    lease[NUM_BASE, row] = reused + ask[ASK_BASE]
    lease[NUM_DRAFT, row] = drafts.size + ask[ASK_DRAFT]
    take(core.state, core.resource, BASE, arena.base_rows[row, reused : lease[NUM_BASE, row]])
    take(core.state, core.resource, DRAFT, arena.draft_rows[row, drafts.size : lease[NUM_DRAFT, row]])
    lease[PAIRED, row] = ask[ASK_PAIRED]
    lease[CHECKPOINTS_ALLOWED, row] = ask[ASK_CHECKPOINTS]
    lease[KNOWN, row] = reused
    return row


@njit_part
def _still_matches(core: Core, matched: Int32s, last_key: Words, drafts: Int32s, paired_depth: int) -> bool:
    if matched.size == 0:
        return True
    last = matched[matched.size - 1]
    if core.resource[CACHED, last] == 0 or core.key[last, 0] != last_key[0] or core.key[last, 1] != last_key[1]:
        return False
    # The key names the whole prefix; what may differ is which pages are canonical for it now.
    node = core.node
    for i in range(matched.size - 1, 0, -1):
        if node[PARENT, matched[i]] != matched[i - 1]:
            return False
    if node[PARENT, matched[0]] >= 0:
        return False
    if paired_depth > 0:
        if count_paired(core.node, matched) < paired_depth:
            return False
        for i in range(drafts.size):
            if node[PAIR_PAGE, matched[i + 1]] != drafts[i]:
                return False
    return True


@njit_part
def _fits(core: Core, kind: int, shared: Int32s, demand: int) -> bool:
    """Whether a demand is feasible once the shared pages cannot be evicted."""
    spare = core.state[FREE + kind] + core.state[IDLE + kind] - demand
    if spare >= shared.size:
        return True
    offset, resource = core.state[OFFSET + kind], core.resource
    for page in shared:
        if resource[ACTIVE, offset + page] == 0:
            spare -= 1
    return bool(spare >= 0)


@njit_part
def _record_that_was_hit(core: Core, matched: Int32s, paired_depth: int) -> int:
    if paired_depth > 0:
        last = matched[paired_depth - 1]
        ending = core.resource[OWNER, last]
        if ending >= 0 and core.record[NUM_PAIRED_BLOCKS, ending] >= core.record[NUM_BLOCKS, ending]:
            return int(ending)
        return newest_paired_through(core, last, paired_depth)
    last = matched[matched.size - 1]
    if core.resource[OWNER, last] >= 0:
        return int(core.resource[OWNER, last])
    return newest_through(core, last)


@njit_part
def _open_row(state: Int64s, lease: Int32s) -> int:
    row = state[FREE_LEASE]
    if row >= 0:
        state[FREE_LEASE] = lease[LEASE_MARK, row]
    else:
        row = state[FRESH_LEASES]
        state[FRESH_LEASES] = row + 1
    lease[LIVE, row] = 1
    for field in range(LIVE + 1, NUM_LEASE_ROWS):
        lease[field, row] = -1
    lease[PUBLISHED, row] = 0
    lease[RESERVED_LENGTH, row] = 0
    lease[STRADDLES, row] = 0
    state[NUM_LEASES] += 1
    return int(row)


@njit_in_place
def release_lease(core: Core, arena: Arena, row: int) -> None:
    """Return every hold of a live lease, its last page first, and give the row back."""
    lease = arena.lease
    unpin(core, BASE, arena.base_rows[row, : lease[NUM_BASE, row]])
    unpin(core, DRAFT, arena.draft_rows[row, : lease[NUM_DRAFT, row]])
    drop_slots(core, lease, row, RESTORED)
    drop_slots(core, lease, row, RESERVED)
    lease[LIVE, row] = 0
    lease[GENERATION, row] += 1
    lease[LEASE_MARK, row] = core.state[FREE_LEASE]
    core.state[FREE_LEASE] = row
    core.state[NUM_LEASES] -= 1
    core.state[NUM_STRADDLING] -= lease[STRADDLES, row]


@njit_in_place
def drop_slots(core: Core, lease: Int32s, row: int, first_field: int) -> None:
    """End the lease's hold on its restored or its reserved snapshot slots."""
    for i in range(2):
        if lease[first_field + i, row] >= 0:
            unpin(core, RECURRENT + i, lease[first_field + i, row : row + 1])
            lease[first_field + i, row] = -1
    if first_field == RESERVED:
        lease[RESERVED_LENGTH, row] = 0


@njit_in_place
def reserve_slots(core: Core, arena: Arena, row: int, exact_length: int, num_partial: int) -> bool:
    """Take a recurrent slot and `num_partial` (0 or 1) partial-KV slots; `False` and nothing changed when it cannot be."""
    need = (0, 0, 1, num_partial)
    if not is_feasible(core.state, need):
        return False
    make_room(core, arena, need)
    lease = arena.lease
    take(core.state, core.resource, RECURRENT, lease[RESERVED, row : row + 1])
    take(core.state, core.resource, PARTIAL, lease[RESERVED + 1, row : row + num_partial])
    lease[RESERVED_LENGTH, row] = exact_length
    return True


@njit_in_place
def grow_lease(core: Core, arena: Arena, row: int, base_pages: int, draft_pages: int) -> bool:
    """Append so many private pages to one lease; `False` and nothing changed when they cannot be had."""
    need = (base_pages, draft_pages, 0, 0)
    if not is_feasible(core.state, need):
        return False
    make_room(core, arena, need)
    lease = arena.lease
    num_base, num_draft = lease[NUM_BASE, row] + base_pages, lease[NUM_DRAFT, row] + draft_pages
    take(core.state, core.resource, BASE, arena.base_rows[row, lease[NUM_BASE, row] : num_base])
    take(core.state, core.resource, DRAFT, arena.draft_rows[row, lease[NUM_DRAFT, row] : num_draft])
    lease[NUM_BASE, row] = num_base
    lease[NUM_DRAFT, row] = num_draft
    return True


# Entries of the answer of `count_growth`.
BASE_ROWS, BASE_PAGES, DRAFT_ROWS, DRAFT_PAGES, WIDEST_BASE, WIDEST_DRAFT, BAD_ROW = range(7)
NUM_GROWTH_ENTRIES = 7


@njit_in_place
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
    return bool(answer[BASE_ROWS] + answer[DRAFT_ROWS] > 0)


@njit_in_place
def grow_all(
    core: Core,
    arena: Arena,
    rows: Int32s,
    base_targets: Int32s,
    draft_targets: Int32s,
    answer: Int64s,
    base: Int32s,
    draft: Int32s,
) -> bool:
    """Grow all leases as counted by `count_growth`; `False` and nothing changed when the pages cannot be had.

    `base` and `draft` (`3 * rows + pages` entries each) receive indices, first page indices, counts, and page ids.
    """
    need = (answer[BASE_PAGES], answer[DRAFT_PAGES], 0, 0)
    if not is_feasible(core.state, need):
        return False
    make_room(core, arena, need)
    state, resource, lease = core.state, core.resource, arena.lease
    _grow_kind(state, resource, BASE, arena.base_rows, lease[NUM_BASE], rows, base_targets, answer[BASE_ROWS], base)
    if answer[DRAFT_ROWS] > 0:
        _grow_kind(
            state, resource, DRAFT, arena.draft_rows, lease[NUM_DRAFT], rows, draft_targets, answer[DRAFT_ROWS], draft
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
        first = counts[row]
        more = targets[i] - first
        if more <= 0:
            continue
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
    state: Int64s, lease: Int32s, rows: Int32s, base_targets: Int32s, draft_targets: Int32s, fits: Flags
) -> None:
    """Set `fits[i]` where lease i could grow after those before it that could."""
    base_left = state[FREE + BASE] + state[IDLE + BASE]
    draft_left = state[FREE + DRAFT] + state[IDLE + DRAFT]
    for i in range(rows.size):
        base_more = max(0, base_targets[i] - lease[NUM_BASE, rows[i]])
        draft_more = max(0, draft_targets[i] - lease[NUM_DRAFT, rows[i]]) if draft_targets.size > 0 else 0
        fits[i] = base_more <= base_left and draft_more <= draft_left
        if fits[i]:
            base_left -= base_more
            draft_left -= draft_more
