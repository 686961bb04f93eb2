"""What must go so that a demand fits, and no more.

With checkpoints a record is one thing: the least recently used ones go that free something lacking. Without, records give
up their blocks one by one, from the end: of the blocks without children that no lease pins, the least recently used goes
first. The oldest entry of the LRU order that ends at such a block holds it at its end, and as all blocks of an entry were
used last together (`ctxcache.manager.lru`), the one before it is next, until the entry is used up: there the record is
taken for what ends there, with the last use of that.
"""

from __future__ import annotations

from ctxcache.arguments import Int32s
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.block_index import note_ghost, remove
from ctxcache.manager.block_tree import unlink
from ctxcache.manager.checkpoints import leave_anchor
from ctxcache.manager.draft_pages import detach_pairs, give_up_last_pair, last_paired_block
from ctxcache.manager.layout import CacheArrays, LeaseArrays
from ctxcache.manager.lru import (
    drop_entry,
    forget_evictable,
    leave_endpoint,
    make_mark,
    mark_evictable,
    oldest_evictable,
    oldest_record,
    take_over,
)
from ctxcache.manager.pools import let_go, reclaim_if_idle
from ctxcache.manager.prefetch import fetch_behind, fetch_slot


@njit_inlined
def evict_record(cache: CacheArrays, gone: int) -> None:
    """Take a record with a checkpoint out, and let go of what nothing else needs: see `ContextCacheManager` for the order."""
    state, node, resource, record = cache.state, cache.node, cache.resource, cache.record
    if gone < 0 or cache.serial[gone] == 0:
        raise InvariantError("a record that is not there is evicted")
    state[c.EVICTED] += 1
    forget_evictable(cache, gone)
    block = record[c.ENDPOINT, gone]
    if record[c.NUM_PAIRED_BLOCKS, gone] > 0:
        detach_pairs(cache, gone)
    _drop_checkpoint(cache, gone)
    if cache.key.shape[0] > 0:
        leave_endpoint(state, resource, record, gone)
    else:
        leave_anchor(cache, gone)
    drop_entry(cache, gone)
    # Blocks of its path: [0, block] stay, for a child or another record | (block, end] go: free, or private to a lease
    while block >= 0 and node[c.FIRST_CHILD, block] < 0 and resource[c.FIRST_RECORD, block] < 0:
        block = _evict_block(cache, block)
    if block >= 0 and resource[c.FIRST_RECORD, block] >= 0:
        mark_evictable(cache, c.BASE, resource[c.FIRST_RECORD, block])


@njit_inlined
def _evict_block(cache: CacheArrays, block: int) -> int:
    """Take a block without children out; return the one before it. Its page is free, or private to a lease."""
    state, node, resource = cache.state, cache.node, cache.resource
    ahead = node[c.PARENT, block]
    if ahead >= 0 and node[c.PARENT, ahead] >= 0:
        fetch_slot(cache.slot, cache.key[node[c.PARENT, ahead], 1])
    unlink(state, node, block)
    note_ghost(cache.ghost, cache.key[block, 1])
    remove(cache.key, cache.slot, block)
    if resource[c.CACHE_REFS, block] != 1:
        raise InvariantError("an indexed block's page is not the cache's")
    resource[c.CACHE_REFS, block] = 0
    reclaim_if_idle(state, resource, c.BASE, block)
    return int(ahead)


@njit_inlined
def give_up_blocks(cache: CacheArrays, shorter: int, most: int, leases_allowed: int) -> None:
    """Take out blocks from a record's end: at most so many, none before a fork or another entry's end, and none leased.

        blocks of its path:  [0, end) stay | [end, old end) go; the record ends before `end`, or is gone

    The record is gone where nothing is left, another record ends, or other blocks follow. The first block goes also when it
    is leased: its page is its leases' alone then. Of the others, those that more than `leases_allowed` hold stay.
    """
    state, node, resource, record = cache.state, cache.node, cache.resource, cache.record
    if shorter < 0 or cache.serial[shorter] <= 0:
        raise InvariantError("a record that is not there is evicted")
    block = record[c.ENDPOINT, shorter]
    if resource[c.FIRST_RECORD, block] != shorter:
        raise InvariantError("a record does not end where it should")
    resource[c.FIRST_RECORD, block] = -1
    entry = -1
    while most > 0:
        if state[c.EXTENDED_RECORDS]:
            record[c.ENDPOINT, shorter] = block
            if record[c.NUM_PAIRED_BLOCKS, shorter] == record[c.NUM_BLOCKS, shorter]:
                give_up_last_pair(cache, shorter)
            record[c.NUM_BLOCKS, shorter] -= 1
        block, most = _evict_block(cache, block), most - 1
        if block < 0:
            break
        entry = resource[c.FIRST_RECORD, block]
        if entry >= 0 or node[c.FIRST_CHILD, block] >= 0 or resource[c.LEASE_REFS, block] > leases_allowed:
            break
    if block >= 0 and node[c.FIRST_CHILD, block] < 0 and (entry < 0 or cache.serial[entry] == c.IS_MARK):
        if entry >= 0:
            take_over(cache, shorter, entry)
        else:
            record[c.ENDPOINT, shorter] = block
            resource[c.FIRST_RECORD, block] = shorter
            mark_evictable(cache, c.BASE, shorter)
        if record[c.SHORTENED_IN, shorter] != state[c.EVICTION]:
            record[c.SHORTENED_IN, shorter] = state[c.EVICTION]
            state[c.SHORTENED] += 1
        return
    if block >= 0 and entry < 0:
        raise InvariantError("no entry ends where paths part")
    state[c.EVICTED] += 1
    state[c.SHORTENED] -= record[c.SHORTENED_IN, shorter] == state[c.EVICTION]
    if state[c.EXTENDED_RECORDS] and record[c.NUM_PAIRED_BLOCKS, shorter] > 0:
        record[c.ENDPOINT, shorter] = block
        detach_pairs(cache, shorter)
    forget_evictable(cache, shorter)
    drop_entry(cache, shorter)
    if entry >= 0:
        mark_evictable(cache, c.BASE, entry)


@njit_part
def _drop_whole(cache: CacheArrays, gone: int) -> None:
    """Take a record out with its blocks down to the next record's end or fork; with none, where others stand on them."""
    if gone < 0:
        raise InvariantError("a record that is not there is evicted")
    if cache.node[c.FIRST_CHILD, cache.record[c.ENDPOINT, gone]] >= 0:
        if cache.state[c.EXTENDED_RECORDS] and cache.record[c.NUM_PAIRED_BLOCKS, gone] > 0:
            detach_pairs(cache, gone)
            mark_evictable(cache, c.DRAFT, gone)
        make_mark(cache, gone)
        cache.state[c.EVICTED] += 1
        return
    serial = cache.serial[gone]
    while cache.serial[gone] == serial:
        give_up_blocks(cache, gone, cache.node.shape[1], c.MODULUS)


@njit_part
def _drop_checkpoint(cache: CacheArrays, gone: int) -> None:
    note_ghost(cache.ghost, cache.exact_key[gone, 1])
    if cache.key.shape[0] == 0:  # no block is indexed, so none is noted: the last full block stands for the way there
        note_ghost(cache.ghost, cache.exact_key[gone, 3])
    remove(cache.exact_key, cache.exact_slot, gone)
    for kind in (c.RECURRENT, c.PARTIAL):
        row = c.RECURRENT_SLOT + kind - c.RECURRENT
        slot = cache.record[row, gone]
        if slot >= 0:
            cache.record[row, gone] = -1
            cache.resource[c.FIRST_RECORD, cache.state[c.OFFSET + kind] + slot] = -1
            let_go(cache, kind, slot)


@njit_in_place
def make_room(cache: CacheArrays, leases: LeaseArrays, need: tuple[int, int, int, int]) -> bool:
    """Evict until so many of each kind are free; `False` and nothing evicted when that cannot be reached."""
    state = cache.state
    lacking = False
    for kind in range(c.NUM_RESOURCE_KINDS):
        if need[kind] > state[c.FREE + kind] + state[c.IDLE + kind]:
            return False
        lacking |= need[kind] > state[c.FREE + kind]
    if lacking:
        state[c.EVICTION] = (state[c.EVICTION] + 1) % c.MODULUS
        if state[c.HAS_CHECKPOINTS]:
            _evict_records(cache, leases, need)
        else:
            _evict_blocks(cache, need[c.BASE], need[c.DRAFT])
    return True


@njit_part
def _evict_blocks(cache: CacheArrays, num_base: int, num_draft: int) -> None:
    """Evict blocks, and then draft pages alone, until so many are free. The least recently used go first, ends before starts."""
    state = cache.state
    while num_base > state[c.FREE + c.BASE]:
        place = oldest_evictable(cache, c.BASE)
        most = num_base - state[c.FREE + c.BASE]
        if place >= 0:
            fetch_behind(cache, place)
            shorter = cache.recency[place]
        else:  # what is idle lies before the end of a path that is leased
            shorter, most = _oldest_in_the_way(cache, c.BASE), 1
        give_up_blocks(cache, shorter, most, 0)
    while num_draft > state[c.FREE + c.DRAFT]:
        place = oldest_evictable(cache, c.DRAFT)
        give_up_last_pair(cache, cache.recency[place] if place >= 0 else _oldest_in_the_way(cache, c.DRAFT))


@njit_part
def _evict_records(cache: CacheArrays, leases: LeaseArrays, need: tuple[int, int, int, int]) -> None:
    """Evict whole records until so many of each kind are free."""
    state = cache.state
    while True:
        # The least recently used record that frees something lacking: the lowest place among the lacking kinds' first ones.
        lacking = -1
        oldest = -1
        for kind in range(c.NUM_RESOURCE_KINDS):
            if need[kind] <= state[c.FREE + kind]:
                continue
            lacking = kind
            place = oldest_evictable(cache, kind)
            if place >= 0 and (oldest < 0 or place < oldest):
                oldest = place
        if lacking < 0:
            return
        if oldest >= 0:
            fetch_behind(cache, oldest)
        if state[c.NUM_STRADDLING] > 0:
            oldest = _older_behind_a_lease(cache, leases, need, oldest)
        evict_record(cache, cache.recency[oldest] if oldest >= 0 else _oldest_in_any_way(cache, need))


@njit_part
def _older_behind_a_lease(cache: CacheArrays, leases: LeaseArrays, need: tuple[int, int, int, int], oldest: int) -> int:
    """Return the place of a record older than `oldest` whose last page is leased, but that frees a page before it.

    Only a lease that published behind pages of others holds the last page of a path without those before it. Such a
    record is not evictable; it is found through the lease.
    """
    state = cache.state
    for row in range(state[c.FRESH_LEASES]):
        if leases.fields[c.LIVE, row] != 1 or leases.fields[c.STRADDLES, row] == 0:
            continue
        if need[c.BASE] > state[c.FREE + c.BASE]:
            known = leases.base_pages[row, : leases.fields[c.KNOWN, row]]
            record = _record_behind_base_pages(cache, known)
            if record >= 0 and (oldest < 0 or cache.record[c.RECENCY_PLACE, record] < oldest):
                oldest = cache.record[c.RECENCY_PLACE, record]
        if need[c.DRAFT] > state[c.FREE + c.DRAFT]:
            for i in range(leases.fields[c.NUM_DRAFT, row]):
                record = _record_behind_draft_page(cache, leases.draft_pages[row, i])
                if record >= 0 and (oldest < 0 or cache.record[c.RECENCY_PLACE, record] < oldest):
                    oldest = cache.record[c.RECENCY_PLACE, record]
    return oldest


@njit_part
def _record_behind_base_pages(cache: CacheArrays, pages: Int32s) -> int:
    """Return the record that ends at the deepest indexed one of a lease's pages and frees a page before it, or -1."""
    node, resource = cache.node, cache.resource
    last = pages.size - 1
    while last >= 0 and resource[c.CACHE_REFS, pages[last]] == 0:
        last -= 1
    if last < 0:
        return -1
    block = pages[last]
    record = resource[c.FIRST_RECORD, block]
    if record < 0 or node[c.FIRST_CHILD, block] >= 0:
        return -1
    if cache.state[c.EXTENDED_RECORDS] and cache.record[c.NEXT_AT_ENDPOINT, record] >= 0:
        return -1
    while resource[c.LEASE_REFS, block] > 0:
        only_child = node[c.NEXT_SIBLING, block] < 0 and node[c.PREVIOUS_SIBLING, block] < 0
        block = node[c.PARENT, block]
        if block < 0 or not only_child or resource[c.FIRST_RECORD, block] >= 0:
            return -1
    return int(record)


@njit_part
def _record_behind_draft_page(cache: CacheArrays, page: int) -> int:
    """Return the record whose draft path ends with a leased page and that frees a draft page before it, or -1."""
    node, resource, offset = cache.node, cache.resource, cache.state[c.OFFSET + c.DRAFT]
    record = resource[c.FIRST_RECORD, offset + page]
    if record < 0 or resource[c.CACHE_REFS, offset + page] > 1:
        return -1
    block = last_paired_block(node, cache.record, record)
    while node[c.PAIR_COUNT, block] == 1 and node[c.PAIR_PAGE, block] >= 0:
        before = offset + node[c.PAIR_PAGE, block]
        if resource[c.LEASE_REFS, before] == 0 and resource[c.CACHE_REFS, before] == 1:
            return int(record)
        block = node[c.PARENT, block]
    return -1


@njit_part
def _oldest_in_any_way(cache: CacheArrays, need: tuple[int, int, int, int]) -> int:
    """Return the least recently used record that holds an unleased page of a lacking kind together with others."""
    oldest = -1
    for kind in (c.BASE, c.DRAFT):
        if need[kind] > cache.state[c.FREE + kind]:
            record = _oldest_in_the_way(cache, kind)
            if oldest < 0 or (
                record >= 0 and cache.record[c.RECENCY_PLACE, record] < cache.record[c.RECENCY_PLACE, oldest]
            ):
                oldest = record
    return oldest


@njit_part
def _oldest_in_the_way(cache: CacheArrays, kind: int) -> int:
    """Return the least recently used record whose path, up to a childless block where blocks go one by one, holds an unleased page."""
    by_block = kind == c.BASE and not cache.state[c.HAS_CHECKPOINTS]
    record, left = cache.state[c.OLDEST_RECORD], cache.serial.size
    while record >= 0 and left > 0:
        end = cache.record[c.ENDPOINT, record]
        if not (by_block and cache.node[c.FIRST_CHILD, end] >= 0) and _holds_unleased(cache, kind, record):
            return int(record)
        record = cache.record[c.NEWER, record]
        left -= 1
    return -1


@njit_part
def _holds_unleased(cache: CacheArrays, kind: int, record: int) -> bool:
    offset, block, page = cache.state[c.OFFSET + kind], cache.record[c.ENDPOINT, record], -1
    if kind == c.DRAFT:
        if cache.record[c.NUM_PAIRED_BLOCKS, record] == 0:
            return False
        block, page = last_paired_block(cache.node, cache.record, record), cache.record[c.LAST_DRAFT_PAGE, record]
    else:
        page = block
    while page >= 0:
        if cache.resource[c.LEASE_REFS, offset + page] == 0:
            return True
        page = cache.node[c.PARENT if kind == c.BASE else c.PAIR_PAGE, block]
        block = cache.node[c.PARENT, block]
    return False


@njit_in_place
def evict_beyond(cache: CacheArrays, max_records: int) -> None:
    """Evict the least recently used records beyond a limit, whoever leases their pages."""
    state = cache.state
    if state[c.NUM_RECORDS] > max_records:
        state[c.EVICTION] = (state[c.EVICTION] + 1) % c.MODULUS
    while state[c.NUM_RECORDS] > max_records:
        if state[c.HAS_CHECKPOINTS]:
            evict_record(cache, oldest_record(cache))
        else:
            _drop_whole(cache, oldest_record(cache))
