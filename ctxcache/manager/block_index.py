"""Which block has which key, and which block follows which: open addressing beside a tree of blocks.

A slot is -1, or an id in the low bits and above them how many slots it lies behind its home, as far as that fits. So a
search compares only keys with the right home, and a removal moves others without looking at their keys. The last entry
of the array is no slot: it holds the number of low bits.

Prefix closure (an indexed block's ancestors are indexed) lets a lookup search for the deepest indexed key instead of
probing every block.
"""

from __future__ import annotations

import numpy as np

from ctxcache.arguments import Int32s, Int64s, Words
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager.layout import (
    EXTENDED_RECORDS,
    FIRST_CHILD,
    GHOSTS,
    NEWEST,
    NEXT_AT_ENDPOINT,
    NEXT_SIBLING,
    NUM_NODES,
    OWNER,
    PARENT,
    PREVIOUS_SIBLING,
    Core,
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_GHOST_MASK = np.uint64(GHOSTS - 1)


@njit_in_place
def home_of(low: np.uint64, num_slots: int) -> int:
    """Return the slot where the search for a key with this low word begins."""
    spread = (low * _GOLDEN) >> _HALF
    return int(np.int64((spread * np.uint64(num_slots)) >> _HALF))


@njit_in_place
def find(key: Words, slot: Int32s, high: np.uint64, low: np.uint64) -> int:
    """Return the id with this key, or -1."""
    size = slot.size - 1
    bits = slot[size]
    farthest = (1 << (31 - bits)) - 1
    at, distance = home_of(low, size), 0
    while True:
        entry = slot[at]
        if entry < 0:
            return -1
        if entry >> bits == min(distance, farthest):
            found = entry & ((1 << bits) - 1)
            if key[found, 1] == low and key[found, 0] == high:
                return int(found)
        distance += 1
        at += 1
        if at == size:
            at = 0


@njit_in_place
def insert(key: Words, slot: Int32s, new: int, high: np.uint64, low: np.uint64) -> bool:
    """Give `new` this key; `False`, and nothing changed, when another id has it."""
    size = slot.size - 1
    bits = slot[size]
    farthest = (1 << (31 - bits)) - 1
    at, distance = home_of(low, size), 0
    while True:
        entry = slot[at]
        if entry < 0:
            slot[at] = (min(distance, farthest) << bits) | new
            key[new, 0] = high
            key[new, 1] = low
            return True
        if entry >> bits == min(distance, farthest):
            found = entry & ((1 << bits) - 1)
            if key[found, 1] == low and key[found, 0] == high:
                return False
        distance += 1
        at += 1
        if at == size:
            at = 0


@njit_inlined
def remove(key: Words, slot: Int32s, old: int) -> None:
    """Take `old` out. Later entries of its run move back, so that no search meets a gap (and no tombstone piles up)."""
    size = slot.size - 1
    bits = slot[size]
    farthest = (1 << (31 - bits)) - 1
    mask = (1 << bits) - 1
    gap = home_of(key[old, 1], size)
    while slot[gap] & mask != old:
        gap = gap + 1 if gap + 1 < size else 0
    at, to_gap = gap, 0
    while True:
        at = at + 1 if at + 1 < size else 0
        to_gap += 1
        entry = slot[at]
        if entry < 0:
            break
        distance = entry >> bits
        if distance == farthest:
            distance = at - home_of(key[entry & mask, 1], size)
            distance = distance if distance >= 0 else distance + size
        # Selections rather than a branch, which no processor would predict.
        moves = distance >= to_gap
        moved = (min(distance - to_gap, farthest) << bits) | (entry & mask)
        slot[gap] = moved if moves else slot[gap]
        gap = at if moves else gap
        to_gap = 0 if moves else to_gap
    slot[gap] = -1


def ids_in(slot: Int32s) -> list[int]:
    """Return all ids that a table holds, for checks."""
    mask = (1 << int(slot[-1])) - 1
    return [entry & mask for entry in slot[:-1].tolist() if entry >= 0]


@njit_in_place
def find_deepest(key: Words, slot: Int32s, keys: Words, num_blocks: int) -> tuple[int, int]:
    """Return how many leading blocks of `keys` are indexed, and the last of them (-1): O(log blocks) probes."""
    if num_blocks == 0:
        return 0, -1
    deepest = find(key, slot, keys[num_blocks - 1, 0], keys[num_blocks - 1, 1])
    if deepest >= 0:
        return num_blocks, deepest
    matched, unmatched = 0, num_blocks
    step = 1
    while unmatched - matched > 1:
        # Gallop from the front until something is missing, then halve.
        middle = matched + step if matched + step < unmatched else (matched + unmatched) // 2
        found = find(key, slot, keys[middle - 1, 0], keys[middle - 1, 1])
        if found >= 0:
            matched, deepest = middle, found
            step *= 2
        else:
            unmatched = middle
            step = num_blocks
    return matched, deepest


@njit_part
def write_path(node: Int32s, deepest: int, path: Int32s) -> bool:
    """Fill `path` with the blocks that end at `deepest`; `False` when that block is not so deep as `path` is long."""
    at, i = deepest, path.size - 1
    while i >= 0:
        if at < 0:
            return False
        path[i] = at
        i -= 1
        # Pages that were taken together mostly follow each other: the next one need not wait for this one's load.
        while i >= 0 and at > 0 and node[PARENT, at] == at - 1:
            at -= 1
            path[i] = at
            i -= 1
        at = node[PARENT, at]
    return at < 0


@njit_in_place
def link(state: Int64s, node: Int32s, child: int, parent: int) -> None:
    """Make `child`, which has no children, a child of `parent` (-1: a first block)."""
    state[NUM_NODES] += 1
    node[PARENT, child] = parent
    node[FIRST_CHILD, child] = -1
    node[PREVIOUS_SIBLING, child] = -1
    node[NEXT_SIBLING, child] = -1
    if parent < 0:
        return
    first = node[FIRST_CHILD, parent]
    if first >= 0:
        node[NEXT_SIBLING, child] = first
        node[PREVIOUS_SIBLING, first] = child
    node[FIRST_CHILD, parent] = child


@njit_inlined
def unlink(state: Int64s, node: Int32s, child: int) -> None:
    """Take a childless block out of the tree."""
    state[NUM_NODES] -= 1
    before = node[PREVIOUS_SIBLING, child]
    after = node[NEXT_SIBLING, child]
    if after >= 0:
        node[PREVIOUS_SIBLING, after] = before
    if before >= 0:
        node[NEXT_SIBLING, before] = after
    elif node[PARENT, child] >= 0:
        node[FIRST_CHILD, node[PARENT, child]] = after


@njit_inlined
def note_ghost(ghost: Words, low: np.uint64) -> None:
    """Remember that a key with this low word was here lately."""
    ghost[low & _GHOST_MASK] = low


@njit_part
def note_newest(node: Int32s, block: int, made: int) -> None:
    """Make `made` the newest record of `block` and of all its ancestors: it has just been made there."""
    while block >= 0:
        node[NEWEST, block] = made
        block = node[PARENT, block]


@njit_inlined
def forget_newest(node: Int32s, block: int, gone: int) -> None:
    """Let no block name a record that goes and ends at `block`. Where it is the newest, it is so all the way down."""
    while block >= 0 and node[NEWEST, block] == gone:
        node[NEWEST, block] = -1
        block = node[PARENT, block]


@njit_part
def newest_through(core: Core, block: int) -> int:
    """Return the record made last of those whose path holds `block`.

    Where it is not known any more, it is found among the children, which may have to be asked first, and is noted. A
    block in work holds `-2 - best so far` (so -1: none so far, or nothing known).
    """
    node, serial = core.node, core.serial
    if node[NEWEST, block] >= 0:
        return int(node[NEWEST, block])
    at = block
    node[NEWEST, at] = -2 - _newest_ending_at(core, at)
    child = node[FIRST_CHILD, at]
    while True:
        if child < 0:
            node[NEWEST, at] = -2 - node[NEWEST, at]
            if at == block:
                return int(node[NEWEST, at])
            child = at
            at = node[PARENT, at]
        elif node[NEWEST, child] < 0:
            at = child
            node[NEWEST, at] = -2 - _newest_ending_at(core, at)
            child = node[FIRST_CHILD, at]
        else:
            best = -2 - node[NEWEST, at]
            candidate = node[NEWEST, child]
            if best < 0 or serial[candidate] > serial[best]:
                node[NEWEST, at] = -2 - candidate
            child = node[NEXT_SIBLING, child]


@njit_part
def _newest_ending_at(core: Core, block: int) -> int:
    best = core.resource[OWNER, block]
    if core.state[EXTENDED_RECORDS] and best >= 0:
        other = core.record[NEXT_AT_ENDPOINT, best]
        while other >= 0:
            if core.serial[other] > core.serial[best]:
                best = other
            other = core.record[NEXT_AT_ENDPOINT, other]
    return int(best)
