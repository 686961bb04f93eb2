"""Which block, or checkpoint, has which key: a hash table with open addressing. Also the keys that went lately (ghosts).

A slot is -1, or an id in the low bits and above them how many slots it lies behind its first one, as far as that fits. So
a search compares only keys that begin at the right slot, and a removal moves others without looking at their keys. The
last entry of the array is no slot: it holds the number of low bits.

Prefix closure (an indexed block's ancestors are indexed) lets a lookup search for the deepest indexed key instead of
probing every block.
"""

from __future__ import annotations

import numpy as np

from ctxcache.arguments import Int32s, Words
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined
from ctxcache.manager.layout import GHOSTS

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_GHOST_MASK = np.uint64(GHOSTS - 1)


@njit_in_place
def first_slot_of(low: np.uint64, num_slots: int) -> int:
    """Return the slot where the search for a key with this low word begins."""
    spread = (low * _GOLDEN) >> _HALF
    return int(np.int64((spread * np.uint64(num_slots)) >> _HALF))


@njit_in_place
def find(key: Words, slot: Int32s, high: np.uint64, low: np.uint64) -> int:
    """Return the id with this key, or -1."""
    size = slot.size - 1
    bits = slot[size]
    farthest = (1 << (31 - bits)) - 1
    at, distance = first_slot_of(low, size), 0
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
            if distance > size:
                raise InvariantError("an index of blocks has no empty slot")
            at = 0


@njit_in_place
def insert(key: Words, slot: Int32s, new: int, high: np.uint64, low: np.uint64) -> bool:
    """Give `new` this key; `False`, and nothing changed, when another id has it."""
    size = slot.size - 1
    bits = slot[size]
    farthest = (1 << (31 - bits)) - 1
    at, distance = first_slot_of(low, size), 0
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
            if distance > size:
                raise InvariantError("an index of blocks has no empty slot")
            at = 0


@njit_inlined
def remove(key: Words, slot: Int32s, old: int) -> None:
    """Take `old` out. Later entries of its run move back, so that no search meets a gap (and no tombstone piles up)."""
    size = slot.size - 1
    bits = slot[size]
    farthest = (1 << (31 - bits)) - 1
    mask = (1 << bits) - 1
    gap, to_gap = first_slot_of(key[old, 1], size), 0
    while slot[gap] < 0 or slot[gap] & mask != old:
        # No gap lies before a key's slot, behind which nobody would find it.
        if slot[gap] < 0 or to_gap == size:
            raise InvariantError("a block is taken out of an index that does not hold it")
        gap = gap + 1 if gap + 1 < size else 0
        to_gap += 1
    at, to_gap = gap, 0
    while True:
        at = at + 1 if at + 1 < size else 0
        to_gap += 1
        entry = slot[at]
        if entry < 0:
            break
        distance = entry >> bits
        if distance == farthest:
            distance = at - first_slot_of(key[entry & mask, 1], size)
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
    # [0, matched) indexed | [matched, unmatched - 1) not looked at | block unmatched - 1 not indexed
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


@njit_inlined
def note_ghost(ghost: Words, low: np.uint64) -> None:
    """Remember that a key with this low word was here lately."""
    ghost[low & _GHOST_MASK] = low
