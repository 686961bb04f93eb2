"""What must go so that a demand fits: the least recently used records that free something lacking, and no more."""

from __future__ import annotations

import numpy as np

from ctxcache.arguments import Int32s, Int64s
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager.block_index import forget_newest, note_ghost, remove, unlink
from ctxcache.manager.draft_pages import detach_pairs, last_paired_block
from ctxcache.manager.layout import (
    ACTIVE,
    BASE,
    CACHED,
    DRAFT,
    ENDPOINT,
    EVICTED,
    EXTENDED_RECORDS,
    FIRST_CHILD,
    FREE,
    FRESH_LEASES,
    HAS_CHECKPOINTS,
    IDLE,
    KNOWN,
    LAST_DRAFT_PAGE,
    LIVE,
    MAX_RECORDS,
    NEWER,
    NEXT_AT_ENDPOINT,
    NEXT_SIBLING,
    NUM_DRAFT,
    NUM_PAIRED_BLOCKS,
    NUM_RECORDS,
    NUM_RESOURCE_KINDS,
    NUM_STRADDLING,
    OFFSET,
    OLDEST_RECORD,
    OWNER,
    PAIR_COUNT,
    PAIR_PAGE,
    PARENT,
    PARTIAL,
    PARTIAL_SLOT,
    PREVIOUS_SIBLING,
    RECURRENT,
    RECURRENT_SLOT,
    STRADDLES,
    USED,
    Arena,
    Core,
)
from ctxcache.manager.lru import drop_record, forget_ripe, leave_endpoint, oldest_ripe, refresh
from ctxcache.manager.pools import let_go, reclaim_if_idle
from ctxcache.manager.prefetch import fetch_behind, fetch_slot


@njit_inlined
def evict_record(core: Core, gone: int) -> None:
    """Take a record out, and let go of what nothing else needs: see `CacheManager` for the order."""
    state, node, resource, record = core.state, core.node, core.resource, core.record
    state[EVICTED] += 1
    forget_ripe(core, gone)
    block = record[ENDPOINT, gone]
    forget_newest(node, block, gone)
    if state[EXTENDED_RECORDS]:
        if record[NUM_PAIRED_BLOCKS, gone] > 0:
            detach_pairs(core, gone)
        if state[HAS_CHECKPOINTS]:
            _drop_checkpoint(core, gone)
    leave_endpoint(state, resource, record, gone)
    drop_record(core, gone)
    while block >= 0 and node[FIRST_CHILD, block] < 0 and resource[OWNER, block] < 0:
        ahead = node[PARENT, block]
        if ahead >= 0 and node[PARENT, ahead] >= 0:
            fetch_slot(core.slot, core.key[node[PARENT, ahead], 1])
        unlink(state, node, block)
        note_ghost(core.ghost, core.key[block, 1])
        remove(core.key, core.slot, block)
        resource[CACHED, block] = 0
        reclaim_if_idle(state, resource, BASE, block)
        block = node[PARENT, block]
    if block >= 0 and resource[OWNER, block] >= 0:
        refresh(core, BASE, resource[OWNER, block])


@njit_part
def _drop_checkpoint(core: Core, gone: int) -> None:
    note_ghost(core.ghost, core.exact_key[gone, 1])
    if core.key.shape[0] == 0:  # no block is indexed, so none is noted: the last full block stands for the way there
        note_ghost(core.ghost, core.exact_key[gone, 3])
    remove(core.exact_key, core.exact_slot, gone)
    for kind in (RECURRENT, PARTIAL):
        row = RECURRENT_SLOT if kind == RECURRENT else PARTIAL_SLOT
        slot = core.record[row, gone]
        if slot >= 0:
            core.record[row, gone] = -1
            core.resource[OWNER, core.state[OFFSET + kind] + slot] = -1
            let_go(core, kind, slot)


@njit_part
def is_feasible(state: Int64s, need: tuple[int, int, int, int]) -> bool:
    """Whether so many of each kind could be free at once."""
    for kind in range(NUM_RESOURCE_KINDS):  # noqa: SIM110 - compiled code has no generators
        if need[kind] > state[FREE + kind] + state[IDLE + kind]:
            return False
    return True


@njit_in_place
def make_room(core: Core, arena: Arena, need: tuple[int, int, int, int]) -> None:
    """Evict until so many of each kind are free. The demand must be feasible."""
    state = core.state
    while True:
        lacking = False
        oldest = -1
        for kind in range(NUM_RESOURCE_KINDS):
            if need[kind] <= state[FREE + kind]:
                continue
            lacking = True
            place = oldest_ripe(core, kind)
            if place >= 0 and (oldest < 0 or place < oldest):
                oldest = place
        if not lacking:
            return
        if oldest >= 0:
            fetch_behind(core, oldest)
        if state[NUM_STRADDLING] > 0:
            oldest = _older_behind_a_lease(core, arena, need, oldest)
        evict_record(core, core.line[oldest] if oldest >= 0 else _oldest_in_the_way(core, need))


@njit_part
def _older_behind_a_lease(core: Core, arena: Arena, need: tuple[int, int, int, int], oldest: int) -> int:
    """Return the place of a record older than `oldest` whose last page is leased, but that frees a page before it.

    Only a lease that published behind pages of others holds the last page of a path without those before it. Such a
    record is not ripe; it is found through the lease.
    """
    state = core.state
    for row in range(state[FRESH_LEASES]):
        if arena.lease[LIVE, row] != 1 or arena.lease[STRADDLES, row] == 0:
            continue
        if need[BASE] > state[FREE + BASE]:
            known = arena.base_rows[row, : arena.lease[KNOWN, row]]
            oldest = _older_of(core.record, oldest, _record_behind_base_pages(core, known))
        if need[DRAFT] > state[FREE + DRAFT]:
            for i in range(arena.lease[NUM_DRAFT, row]):
                record = _record_behind_draft_page(core, arena.draft_rows[row, i])
                oldest = _older_of(core.record, oldest, record)
    return oldest


@njit_part
def _older_of(record: Int32s, oldest: int, other: int) -> int:
    if other < 0:
        return oldest
    place = int(record[USED, other])
    return place if oldest < 0 or place < oldest else oldest


@njit_part
def _record_behind_base_pages(core: Core, pages: Int32s) -> int:
    """Return the record that ends at the deepest indexed one of a lease's pages and frees a page before it, or -1."""
    node, resource = core.node, core.resource
    last = pages.size - 1
    while last >= 0 and resource[CACHED, pages[last]] == 0:
        last -= 1
    if last < 0:
        return -1
    block = pages[last]
    record = resource[OWNER, block]
    if record < 0 or node[FIRST_CHILD, block] >= 0:
        return -1
    if core.state[EXTENDED_RECORDS] and core.record[NEXT_AT_ENDPOINT, record] >= 0:
        return -1
    while resource[ACTIVE, block] > 0:
        only_child = node[NEXT_SIBLING, block] < 0 and node[PREVIOUS_SIBLING, block] < 0
        block = node[PARENT, block]
        if block < 0 or not only_child or resource[OWNER, block] >= 0:
            return -1
    return int(record)


@njit_part
def _record_behind_draft_page(core: Core, page: int) -> int:
    """Return the record whose draft path ends with a leased page and that frees a draft page before it, or -1."""
    node, resource, offset = core.node, core.resource, core.state[OFFSET + DRAFT]
    record = resource[OWNER, offset + page]
    if record < 0 or resource[CACHED, offset + page] > 1:
        return -1
    block = last_paired_block(node, core.record, record)
    while node[PAIR_COUNT, block] == 1 and node[PAIR_PAGE, block] >= 0:
        before = offset + node[PAIR_PAGE, block]
        if resource[ACTIVE, before] == 0 and resource[CACHED, before] == 1:
            return int(record)
        block = node[PARENT, block]
    return -1


@njit_part
def _oldest_in_the_way(core: Core, need: tuple[int, int, int, int]) -> int:
    """Return the least recently used record that holds an unleased page of a lacking kind together with others."""
    record = core.state[OLDEST_RECORD]
    while record >= 0:
        if need[BASE] > core.state[FREE + BASE]:
            block = core.record[ENDPOINT, record]
            while block >= 0:
                if core.resource[ACTIVE, block] == 0:
                    return int(record)
                block = core.node[PARENT, block]
        if need[DRAFT] > core.state[FREE + DRAFT] and core.record[NUM_PAIRED_BLOCKS, record] > 0:
            offset = core.state[OFFSET + DRAFT]
            page = core.record[LAST_DRAFT_PAGE, record]
            block = last_paired_block(core.node, core.record, record)
            while page >= 0:
                if core.resource[ACTIVE, offset + page] == 0:
                    return int(record)
                page = core.node[PAIR_PAGE, block]
                block = core.node[PARENT, block]
        record = core.record[NEWER, record]
    return int(record)


@njit_part
def enforce_record_limit(core: Core) -> None:
    """Evict the least recently used records beyond the limit, whoever leases their pages."""
    while core.state[NUM_RECORDS] > core.state[MAX_RECORDS]:
        evict_record(core, core.state[OLDEST_RECORD])


@njit_in_place
def evict_everything(core: Core) -> None:
    """Evict every record, the least recently used first, and forget lately evicted keys."""
    while core.state[NUM_RECORDS] > 0:
        evict_record(core, core.state[OLDEST_RECORD])
    for i in range(core.ghost.size):
        core.ghost[i] = np.uint64(0)
