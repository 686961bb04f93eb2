"""What must go so that a demand fits: the least recently used records that free something lacking, and no more."""

from __future__ import annotations

from ctxcache.arguments import Int32s
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.block_index import note_ghost, remove
from ctxcache.manager.block_tree import forget_newest, unlink
from ctxcache.manager.draft_pages import detach_pairs, last_paired_block
from ctxcache.manager.layout import CacheArrays, LeaseArrays
from ctxcache.manager.lru import drop_record, forget_evictable, leave_endpoint, mark_evictable, oldest_evictable
from ctxcache.manager.pools import let_go, reclaim_if_idle
from ctxcache.manager.prefetch import fetch_behind, fetch_slot


@njit_inlined
def evict_record(cache: CacheArrays, gone: int) -> None:
    """Take a record out, and let go of what nothing else needs: see `ContextCacheManager` for the order."""
    state, node, resource, record = cache.state, cache.node, cache.resource, cache.record
    if gone < 0 or cache.serial[gone] == 0:
        raise InvariantError("a record that is not there is evicted")
    state[c.EVICTED] += 1
    forget_evictable(cache, gone)
    block = record[c.ENDPOINT, gone]
    forget_newest(node, block, gone)
    if state[c.EXTENDED_RECORDS]:
        if record[c.NUM_PAIRED_BLOCKS, gone] > 0:
            detach_pairs(cache, gone)
        if state[c.HAS_CHECKPOINTS]:
            _drop_checkpoint(cache, gone)
    leave_endpoint(state, resource, record, gone)
    drop_record(cache, gone)
    # Blocks of its path: [0, block] stay, for a child or another record | (block, end] go: free, or private to a lease
    while block >= 0 and node[c.FIRST_CHILD, block] < 0 and resource[c.FIRST_RECORD, block] < 0:
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
        block = node[c.PARENT, block]
    if block >= 0 and resource[c.FIRST_RECORD, block] >= 0:
        mark_evictable(cache, c.BASE, resource[c.FIRST_RECORD, block])


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
    for kind in range(c.NUM_RESOURCE_KINDS):
        if need[kind] > state[c.FREE + kind] + state[c.IDLE + kind]:
            return False
    while True:
        # The least recently used record that frees something lacking: the lowest place among the lacking kinds' first ones.
        lacking = False
        oldest = -1
        for kind in range(c.NUM_RESOURCE_KINDS):
            if need[kind] <= state[c.FREE + kind]:
                continue
            lacking = True
            place = oldest_evictable(cache, kind)
            if place >= 0 and (oldest < 0 or place < oldest):
                oldest = place
        if not lacking:
            return True
        if oldest >= 0:
            fetch_behind(cache, oldest)
        if state[c.NUM_STRADDLING] > 0:
            oldest = _older_behind_a_lease(cache, leases, need, oldest)
        evict_record(cache, cache.recency[oldest] if oldest >= 0 else _oldest_in_the_way(cache, need))


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
def _oldest_in_the_way(cache: CacheArrays, need: tuple[int, int, int, int]) -> int:
    """Return the least recently used record that holds an unleased page of a lacking kind together with others."""
    record = cache.state[c.OLDEST_RECORD]
    for _ in range(cache.state[c.NUM_RECORDS]):
        if need[c.BASE] > cache.state[c.FREE + c.BASE]:
            block = cache.record[c.ENDPOINT, record]
            while block >= 0:
                if cache.resource[c.LEASE_REFS, block] == 0:
                    return int(record)
                block = cache.node[c.PARENT, block]
        if need[c.DRAFT] > cache.state[c.FREE + c.DRAFT] and cache.record[c.NUM_PAIRED_BLOCKS, record] > 0:
            offset = cache.state[c.OFFSET + c.DRAFT]
            page = cache.record[c.LAST_DRAFT_PAGE, record]
            block = last_paired_block(cache.node, cache.record, record)
            while page >= 0:
                if cache.resource[c.LEASE_REFS, offset + page] == 0:
                    return int(record)
                page = cache.node[c.PAIR_PAGE, block]
                block = cache.node[c.PARENT, block]
        record = cache.record[c.NEWER, record]
    return -1


@njit_in_place
def evict_beyond(cache: CacheArrays, max_records: int) -> None:
    """Evict the least recently used records beyond a limit, whoever leases their pages."""
    while cache.state[c.NUM_RECORDS] > max_records:
        evict_record(cache, cache.state[c.OLDEST_RECORD])
