"""What must go so that a demand fits: the least recently used records that free something lacking, and no more."""

from __future__ import annotations

from ctxcache.arguments import Int32s
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager.block_index import note_ghost, remove
from ctxcache.manager.block_tree import forget_newest, unlink
from ctxcache.manager.draft_pages import detach_pairs, last_paired_block
from ctxcache.manager.layout import (
    BASE,
    CACHE_REFS,
    DRAFT,
    ENDPOINT,
    EVICTED,
    EXTENDED_RECORDS,
    FIRST_CHILD,
    FIRST_RECORD,
    FREE,
    FRESH_LEASES,
    HAS_CHECKPOINTS,
    IDLE,
    KNOWN,
    LAST_DRAFT_PAGE,
    LEASE_REFS,
    LIVE,
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
    PAIR_COUNT,
    PAIR_PAGE,
    PARENT,
    PARTIAL,
    PREVIOUS_SIBLING,
    RECENCY_PLACE,
    RECURRENT,
    RECURRENT_SLOT,
    STRADDLES,
    CacheArrays,
    LeaseArrays,
)
from ctxcache.manager.lru import drop_record, forget_evictable, leave_endpoint, mark_evictable, oldest_evictable
from ctxcache.manager.pools import let_go, reclaim_if_idle
from ctxcache.manager.prefetch import fetch_behind, fetch_slot


@njit_inlined
def evict_record(cache: CacheArrays, gone: int) -> None:
    """Take a record out, and let go of what nothing else needs: see `ContextCacheManager` for the order."""
    state, node, resource, record = cache.state, cache.node, cache.resource, cache.record
    if gone < 0 or cache.serial[gone] == 0:
        raise InvariantError("a record that is not there is evicted")
    state[EVICTED] += 1
    forget_evictable(cache, gone)
    block = record[ENDPOINT, gone]
    forget_newest(node, block, gone)
    if state[EXTENDED_RECORDS]:
        if record[NUM_PAIRED_BLOCKS, gone] > 0:
            detach_pairs(cache, gone)
        if state[HAS_CHECKPOINTS]:
            _drop_checkpoint(cache, gone)
    leave_endpoint(state, resource, record, gone)
    drop_record(cache, gone)
    # The record's path, from its end upwards: [0, block] needed by a child or another record | (block, end] free, or leased
    while block >= 0 and node[FIRST_CHILD, block] < 0 and resource[FIRST_RECORD, block] < 0:
        ahead = node[PARENT, block]
        if ahead >= 0 and node[PARENT, ahead] >= 0:
            fetch_slot(cache.slot, cache.key[node[PARENT, ahead], 1])
        unlink(state, node, block)
        note_ghost(cache.ghost, cache.key[block, 1])
        remove(cache.key, cache.slot, block)
        if resource[CACHE_REFS, block] != 1:
            raise InvariantError("an indexed block's page is not the cache's")
        resource[CACHE_REFS, block] = 0
        reclaim_if_idle(state, resource, BASE, block)
        block = node[PARENT, block]
    if block >= 0 and resource[FIRST_RECORD, block] >= 0:
        mark_evictable(cache, BASE, resource[FIRST_RECORD, block])


@njit_part
def _drop_checkpoint(cache: CacheArrays, gone: int) -> None:
    note_ghost(cache.ghost, cache.exact_key[gone, 1])
    if cache.key.shape[0] == 0:  # no block is indexed, so none is noted: the last full block stands for the way there
        note_ghost(cache.ghost, cache.exact_key[gone, 3])
    remove(cache.exact_key, cache.exact_slot, gone)
    for kind in (RECURRENT, PARTIAL):
        row = RECURRENT_SLOT + kind - RECURRENT
        slot = cache.record[row, gone]
        if slot >= 0:
            cache.record[row, gone] = -1
            cache.resource[FIRST_RECORD, cache.state[OFFSET + kind] + slot] = -1
            let_go(cache, kind, slot)


@njit_in_place
def make_room(cache: CacheArrays, leases: LeaseArrays, need: tuple[int, int, int, int]) -> bool:
    """Evict until so many of each kind are free; `False` and nothing evicted when that cannot be reached."""
    state = cache.state
    for kind in range(NUM_RESOURCE_KINDS):
        if need[kind] > state[FREE + kind] + state[IDLE + kind]:
            return False
    while True:
        # The least recently used record that frees something lacking: the lowest place among the lacking kinds' first ones.
        lacking = False
        oldest = -1
        for kind in range(NUM_RESOURCE_KINDS):
            if need[kind] <= state[FREE + kind]:
                continue
            lacking = True
            place = oldest_evictable(cache, kind)
            if place >= 0 and (oldest < 0 or place < oldest):
                oldest = place
        if not lacking:
            return True
        if oldest >= 0:
            fetch_behind(cache, oldest)
        if state[NUM_STRADDLING] > 0:
            oldest = _older_behind_a_lease(cache, leases, need, oldest)
        evict_record(cache, cache.recency[oldest] if oldest >= 0 else _oldest_in_the_way(cache, need))


@njit_part
def _older_behind_a_lease(cache: CacheArrays, leases: LeaseArrays, need: tuple[int, int, int, int], oldest: int) -> int:
    """Return the place of a record older than `oldest` whose last page is leased, but that frees a page before it.

    Only a lease that published behind pages of others holds the last page of a path without those before it. Such a
    record is not evictable; it is found through the lease.
    """
    state = cache.state
    for row in range(state[FRESH_LEASES]):
        if leases.fields[LIVE, row] != 1 or leases.fields[STRADDLES, row] == 0:
            continue
        if need[BASE] > state[FREE + BASE]:
            known = leases.base_pages[row, : leases.fields[KNOWN, row]]
            record = _record_behind_base_pages(cache, known)
            if record >= 0 and (oldest < 0 or cache.record[RECENCY_PLACE, record] < oldest):
                oldest = cache.record[RECENCY_PLACE, record]
        if need[DRAFT] > state[FREE + DRAFT]:
            for i in range(leases.fields[NUM_DRAFT, row]):
                record = _record_behind_draft_page(cache, leases.draft_pages[row, i])
                if record >= 0 and (oldest < 0 or cache.record[RECENCY_PLACE, record] < oldest):
                    oldest = cache.record[RECENCY_PLACE, record]
    return oldest


@njit_part
def _record_behind_base_pages(cache: CacheArrays, pages: Int32s) -> int:
    """Return the record that ends at the deepest indexed one of a lease's pages and frees a page before it, or -1."""
    node, resource = cache.node, cache.resource
    last = pages.size - 1
    while last >= 0 and resource[CACHE_REFS, pages[last]] == 0:
        last -= 1
    if last < 0:
        return -1
    block = pages[last]
    record = resource[FIRST_RECORD, block]
    if record < 0 or node[FIRST_CHILD, block] >= 0:
        return -1
    if cache.state[EXTENDED_RECORDS] and cache.record[NEXT_AT_ENDPOINT, record] >= 0:
        return -1
    while resource[LEASE_REFS, block] > 0:
        only_child = node[NEXT_SIBLING, block] < 0 and node[PREVIOUS_SIBLING, block] < 0
        block = node[PARENT, block]
        if block < 0 or not only_child or resource[FIRST_RECORD, block] >= 0:
            return -1
    return int(record)


@njit_part
def _record_behind_draft_page(cache: CacheArrays, page: int) -> int:
    """Return the record whose draft path ends with a leased page and that frees a draft page before it, or -1."""
    node, resource, offset = cache.node, cache.resource, cache.state[OFFSET + DRAFT]
    record = resource[FIRST_RECORD, offset + page]
    if record < 0 or resource[CACHE_REFS, offset + page] > 1:
        return -1
    block = last_paired_block(node, cache.record, record)
    while node[PAIR_COUNT, block] == 1 and node[PAIR_PAGE, block] >= 0:
        before = offset + node[PAIR_PAGE, block]
        if resource[LEASE_REFS, before] == 0 and resource[CACHE_REFS, before] == 1:
            return int(record)
        block = node[PARENT, block]
    return -1


@njit_part
def _oldest_in_the_way(cache: CacheArrays, need: tuple[int, int, int, int]) -> int:
    """Return the least recently used record that holds an unleased page of a lacking kind together with others."""
    record = cache.state[OLDEST_RECORD]
    for _ in range(cache.state[NUM_RECORDS]):
        if need[BASE] > cache.state[FREE + BASE]:
            block = cache.record[ENDPOINT, record]
            while block >= 0:
                if cache.resource[LEASE_REFS, block] == 0:
                    return int(record)
                block = cache.node[PARENT, block]
        if need[DRAFT] > cache.state[FREE + DRAFT] and cache.record[NUM_PAIRED_BLOCKS, record] > 0:
            offset = cache.state[OFFSET + DRAFT]
            page = cache.record[LAST_DRAFT_PAGE, record]
            block = last_paired_block(cache.node, cache.record, record)
            while page >= 0:
                if cache.resource[LEASE_REFS, offset + page] == 0:
                    return int(record)
                page = cache.node[PAIR_PAGE, block]
                block = cache.node[PARENT, block]
        record = cache.record[NEWER, record]
    return -1


@njit_in_place
def evict_beyond(cache: CacheArrays, max_records: int) -> None:
    """Evict the least recently used records beyond a limit, whoever leases their pages."""
    while cache.state[NUM_RECORDS] > max_records:
        evict_record(cache, cache.state[OLDEST_RECORD])
