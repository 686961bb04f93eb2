"""Whether the manager's memory is sound, in one compiled pass of a few accesses a block: yes or no.

What is cached is recomputed from records, as in `invariants`, which takes a hundred times as long and names what is wrong.
Every index is looked at before it is used: memory that is not sound may hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctxcache.arguments import Int32s, Int64s, Words
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.bitset import holds, least
from ctxcache.manager.block_index import find
from ctxcache.manager.layout import CacheArrays, LeaseArrays
from ctxcache.manager.lru import is_evictable


class Recomputed(NamedTuple):
    """What is found out on the way, from records and leases alone.

    Attributes:
        depth: `int32[N]`, blocks before each needed one, plus 1; 0: no record's path holds it.
        pairs: `int32[N]`, how often each block's draft page is needed.
        paired: `int32[N]`, 1 where the draft page of the block before is kept.
        leased: `int32[all resources]`, how many leases hold each.
        cached: `int32[all resources]`, how often records do.
    """

    depth: Int32s
    pairs: Int32s
    paired: Int32s
    leased: Int32s
    cached: Int32s


def is_sound(cache: CacheArrays, leases: LeaseArrays) -> bool:
    """Check the five invariants; `InvariantError` where a search in the index finds no end."""
    num_pages, num_resources = len(cache.key), cache.resource.shape[1]
    found = Recomputed(*(np.zeros(size, np.int32) for size in (*[num_pages] * 3, num_resources, num_resources)))
    return is_sound_memory(cache, leases, found)


@njit_in_place
def is_sound_memory(cache: CacheArrays, leases: LeaseArrays, found: Recomputed) -> bool:
    """Check the five invariants with zeroed memory to work in."""
    return (
        _order_is_sound(cache)
        and _paths_are_sound(cache, found)
        and _index_is_sound(cache, cache.key, cache.slot, found.depth)
        and _tree_is_sound(cache, found.depth)
        and _lists_are_sound(cache)
        and _records_are_sound(cache, found)
        and _pairs_are_sound(cache, found)
        and _entries_are_sound(cache, found.depth)
        and _leases_are_sound(cache, leases, found.leased)
        and _pools_are_sound(cache, found)
        and _marks_are_sound(cache)
    )


@njit_part
def _order_is_sound(cache: CacheArrays) -> bool:
    """Invariant 4: the LRU order and the places hold every record and every mark once."""
    state, record, recency = cache.state, cache.record, cache.recency
    settled, swept, end = state[c.SETTLED], state[c.SWEPT], state[c.RECENCY_END]
    if not 0 <= settled <= swept <= end <= recency.size:
        return False
    alive, num_records = 0, 0
    for serial in cache.serial:
        alive += serial != 0
        num_records += serial > 0
    if num_records != state[c.NUM_RECORDS] or num_records > state[c.MAX_RECORDS]:
        return False
    at, before, used = state[c.OLDEST_RECORD], -1, -1
    for _ in range(alive):
        if at < 0 or at >= cache.serial.size or record[c.OLDER, at] != before or cache.serial[at] == 0:
            return False
        place = record[c.RECENCY_PLACE, at]
        if place <= used or place >= end or recency[place] != at:
            return False
        if not -1 <= record[c.ENDPOINT, at] < cache.key.shape[0]:
            return False
        used, before, at = place, at, record[c.NEWER, at]
    if at >= 0 or state[c.NEWEST_RECORD] != before:
        return False
    for place in range(recency.size):
        alive -= recency[place] >= 0
        if recency[place] >= 0 and (settled <= place < swept or place >= end):
            return False
    return bool(alive == 0)


@njit_part
def _paths_are_sound(cache: CacheArrays, found: Recomputed) -> bool:
    """Find all blocks that records need; no block may be its own ancestor."""
    parent, depth = cache.node[c.PARENT], found.depth
    for entry in range(cache.serial.size):
        if cache.serial[entry] <= 0:
            continue
        block, num_new = cache.record[c.ENDPOINT, entry], 0
        while block >= 0 and depth[block] == 0:
            num_new += 1
            block = parent[block]
            if num_new > depth.size or block >= depth.size:
                return False
        deep = num_new + (depth[block] if block >= 0 else 0)
        block = cache.record[c.ENDPOINT, entry]
        for i in range(num_new):
            depth[block] = deep - i
            block = parent[block]
    for block in range(depth.size):
        found.cached[block] = depth[block] > 0
    return True


@njit_part
def _index_is_sound(cache: CacheArrays, key: Words, slot: Int32s, depth: Int32s) -> bool:
    """Invariant 3: what is indexed is what is needed, each found by its key."""
    mask, num_indexed = (1 << slot[slot.size - 1]) - 1, 0
    for i in range(slot.size - 1):
        if slot[i] >= 0:
            num_indexed += 1
            block = slot[i] & mask
            if block >= depth.size or depth[block] == 0:
                return False
    if num_indexed != cache.state[c.NUM_NODES]:
        return False
    for block in range(depth.size):
        if depth[block] > 0:
            num_indexed -= 1
            if find(key, slot, key[block, 0], key[block, 1]) != block:
                return False
    return bool(num_indexed == 0)


@njit_part
def _tree_is_sound(cache: CacheArrays, depth: Int32s) -> bool:
    """Each needed block is listed once by the one before it, and nothing else is."""
    node, expected, listed = cache.node, 0, 0
    for block in range(depth.size):
        if depth[block] == 0:
            continue
        expected += node[c.PARENT, block] >= 0
        child, before = node[c.FIRST_CHILD, block], -1
        while child >= 0:
            listed += 1
            if child >= depth.size or depth[child] == 0 or listed > depth.size:
                return False
            if node[c.PARENT, child] != block or node[c.PREVIOUS_SIBLING, child] != before:
                return False
            before, child = child, node[c.NEXT_SIBLING, child]
    return bool(listed == expected)


@njit_part
def _lists_are_sound(cache: CacheArrays) -> bool:
    """Invariant 4: each entry is listed once, where it ends."""
    unlisted = 0
    for serial in cache.serial:
        unlisted += serial != 0
    for block in range(cache.key.shape[0]):
        unlisted = _without_list(cache, cache.resource[c.FIRST_RECORD, block], block, unlisted)
    unlisted = _without_list(cache, cache.state[c.ROOT_RECORD], -1, unlisted)
    slot = cache.anchor_slot
    for i in range(slot.size - 1):
        if slot[i] >= 0:
            unlisted = _without_list(cache, slot[i] & ((1 << slot[slot.size - 1]) - 1), -1, unlisted)
    return bool(unlisted == 0)


@njit_part
def _without_list(cache: CacheArrays, entry: int, block: int, unlisted: int) -> int:
    """Return how many entries are unlisted without those of one list; -1 where that is unsound."""
    while entry >= 0 and unlisted >= 0:
        sound = entry < cache.serial.size and cache.serial[entry] != 0 and cache.record[c.ENDPOINT, entry] == block
        unlisted = unlisted - 1 if sound else -1
        entry = cache.record[c.NEXT_AT_ENDPOINT, entry] if sound and cache.state[c.EXTENDED_RECORDS] else -1
    return unlisted


@njit_part
def _records_are_sound(cache: CacheArrays, found: Recomputed) -> bool:
    """Find what records hold beside blocks: draft paths and snapshots."""
    state, record, resource, node = cache.state, cache.record, cache.resource, cache.node
    for entry in range(cache.serial.size if state[c.EXTENDED_RECORDS] else 0):
        if cache.serial[entry] <= 0:
            continue
        block, num_paired = record[c.ENDPOINT, entry], record[c.NUM_PAIRED_BLOCKS, entry]
        if num_paired > 0:
            page = record[c.LAST_DRAFT_PAGE, entry]
            deep = found.depth[block] if block >= 0 else 0
            if num_paired > deep or not 0 <= page < state[c.CAPACITY + c.DRAFT]:
                return False
            found.cached[state[c.OFFSET + c.DRAFT] + page] += 1
            if resource[c.FIRST_RECORD, state[c.OFFSET + c.DRAFT] + page] < 0:
                return False
            for _ in range(deep - num_paired):
                block = node[c.PARENT, block]
            found.pairs[block] += 1
            while node[c.PARENT, block] >= 0 and found.paired[block] == 0:
                found.paired[block] = 1
                block = node[c.PARENT, block]
                found.pairs[block] += 1
        if state[c.HAS_CHECKPOINTS] and not _snapshots_are_sound(cache, entry, found.cached):
            return False
    return True


@njit_part
def _snapshots_are_sound(cache: CacheArrays, entry: int, cached: Int32s) -> bool:
    state = cache.state
    if cache.record[c.RECURRENT_SLOT, entry] < 0:
        return False
    for kind in (c.RECURRENT, c.PARTIAL):
        slot = cache.record[c.RECURRENT_SLOT + kind - c.RECURRENT, entry]
        if slot >= state[c.CAPACITY + kind]:
            return False
        if slot >= 0:
            cached[state[c.OFFSET + kind] + slot] += 1
            if cache.resource[c.FIRST_RECORD, state[c.OFFSET + kind] + slot] != entry:
                return False
    key = cache.exact_key
    return bool(find(key, cache.exact_slot, key[entry, 0], key[entry, 1]) == entry)


@njit_part
def _pairs_are_sound(cache: CacheArrays, found: Recomputed) -> bool:
    """A draft page is kept where a record's draft path goes on, and counted as often as it is needed."""
    if not cache.state[c.HAS_PAIRS]:
        return True
    for block in range(found.paired.size):
        page = cache.node[c.PAIR_PAGE, block]
        if (page >= 0) != (found.paired[block] == 1) or page >= cache.state[c.CAPACITY + c.DRAFT]:
            return False
        if page >= 0:
            found.cached[cache.state[c.OFFSET + c.DRAFT] + page] += 1
        if found.depth[block] > 0 and cache.node[c.PAIR_COUNT, block] != found.pairs[block]:
            return False
    return True


@njit_part
def _entries_are_sound(cache: CacheArrays, depth: Int32s) -> bool:
    """Where blocks are used one by one: an entry ends wherever paths part, and knows the one above it."""
    node, first_record = cache.node, cache.resource[c.FIRST_RECORD]
    if cache.state[c.HAS_CHECKPOINTS]:
        return True
    for block in range(depth.size):
        if depth[block] == 0:
            continue
        child, entry = node[c.FIRST_CHILD, block], first_record[block]
        if entry < 0:
            if child < 0 or node[c.NEXT_SIBLING, child] >= 0:
                return False
            continue
        above = node[c.PARENT, block]
        while above >= 0 and first_record[above] < 0:
            above = node[c.PARENT, above]
        if cache.record[c.ABOVE, entry] != (first_record[above] if above >= 0 else -1):
            return False
    return True


@njit_part
def _leases_are_sound(cache: CacheArrays, leases: LeaseArrays, leased: Int32s) -> bool:
    """Find what leases hold."""
    state, fields, live = cache.state, leases.fields, 0
    for row in range(fields.shape[1]):
        if fields[c.LIVE, row] != 1:
            continue
        live += 1
        num_base, num_draft = fields[c.NUM_BASE, row], fields[c.NUM_DRAFT, row]
        if not (0 <= num_base <= leases.base_pages.shape[1] and 0 <= num_draft <= leases.draft_pages.shape[1]):
            return False
        sound = _held_are_sound(state, c.BASE, leases.base_pages[row, :num_base], leased)
        sound &= _held_are_sound(state, c.DRAFT, leases.draft_pages[row, :num_draft], leased)
        for first in (c.RESTORED, c.RESERVED):
            for i in range(2):
                if fields[first + i, row] >= 0:
                    sound &= _held_are_sound(state, c.RECURRENT + i, fields[first + i, row : row + 1], leased)
        if not sound:
            return False
    return bool(live == state[c.NUM_LEASES])


@njit_part
def _held_are_sound(state: Int64s, kind: int, held: Int32s, leased: Int32s) -> bool:
    for each in held:
        if not 0 <= each < state[c.CAPACITY + kind]:
            return False
        leased[state[c.OFFSET + kind] + each] += 1
    return True


@njit_part
def _pools_are_sound(cache: CacheArrays, found: Recomputed) -> bool:
    """Invariants 1 and 2: each resource is free, or held as often as leases and records say."""
    state, resource = cache.state, cache.resource
    for kind in range(c.NUM_RESOURCE_KINDS):
        capacity, offset, free = state[c.CAPACITY + kind], state[c.OFFSET + kind], state[c.FREE + kind]
        num_held, idle = 0, 0
        for at in range(offset, offset + capacity):
            leased, cached = found.leased[at], found.cached[at]
            if resource[c.LEASE_REFS, at] != leased or resource[c.CACHE_REFS, at] != cached:
                return False
            num_held += leased > 0 or cached > 0
            idle += cached > 0 and leased == 0
        if idle != state[c.IDLE + kind] or free + num_held != capacity:
            return False
        for i in range(offset, offset + free):
            at = offset + resource[c.FREE_STACK, i]
            if not offset <= at < offset + capacity or found.leased[at] != 0 or found.cached[at] != 0:
                return False
            found.leased[at] = -1  # met: it may not be there twice
    return True


@njit_part
def _marks_are_sound(cache: CacheArrays) -> bool:
    """The evictable entries of each kind, and the records, are marked at their places, and nothing else is."""
    leaf, last = cache.state[c.FIRST_LEAF], cache.evictable.shape[0] - 1
    for kind in range(last + 1):
        words, num_marked, first = cache.evictable[kind], 0, -1
        for place in range(cache.state[c.RECENCY_END]):
            entry = cache.recency[place]
            marked = entry >= 0 and (cache.serial[entry] > 0 if kind == last else is_evictable(cache, kind, entry))
            if marked != holds(words, leaf, place):
                return False
            num_marked += marked
            first = place if marked and first < 0 else first
        for i in range(leaf, words.size):
            word = words[i]
            while word != np.uint64(0):
                word &= word - np.uint64(1)
                num_marked -= 1
        if num_marked != 0 or least(words, leaf) != first:
            return False
    return True
