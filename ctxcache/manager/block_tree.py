"""Which block follows which: the tree of blocks, and the record made last through each of them."""

from __future__ import annotations

from ctxcache.arguments import Int32s, Int64s
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.layout import CacheArrays


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
        while i >= 0 and at > 0 and node[c.PARENT, at] == at - 1:
            at -= 1
            path[i] = at
            i -= 1
        at = node[c.PARENT, at]
    return at < 0


@njit_in_place
def link(state: Int64s, node: Int32s, child: int, parent: int) -> None:
    """Make `child`, which has no children, a child of `parent` (-1: a first block)."""
    state[c.NUM_NODES] += 1
    node[c.PARENT, child] = parent
    node[c.FIRST_CHILD, child] = -1
    node[c.PREVIOUS_SIBLING, child] = -1
    node[c.NEXT_SIBLING, child] = -1
    if parent < 0:
        return
    first = node[c.FIRST_CHILD, parent]
    if first >= 0:
        node[c.NEXT_SIBLING, child] = first
        node[c.PREVIOUS_SIBLING, first] = child
    node[c.FIRST_CHILD, parent] = child


@njit_inlined
def unlink(state: Int64s, node: Int32s, child: int) -> None:
    """Take a childless block out of the tree."""
    if node[c.FIRST_CHILD, child] >= 0 or state[c.NUM_NODES] <= 0:
        raise InvariantError("a block with children, or of an empty tree, is taken out")
    state[c.NUM_NODES] -= 1
    before = node[c.PREVIOUS_SIBLING, child]
    after = node[c.NEXT_SIBLING, child]
    if after >= 0:
        node[c.PREVIOUS_SIBLING, after] = before
    if before >= 0:
        node[c.NEXT_SIBLING, before] = after
    elif node[c.PARENT, child] >= 0:
        node[c.FIRST_CHILD, node[c.PARENT, child]] = after


@njit_part
def note_newest(node: Int32s, block: int, made: int) -> None:
    """Make `made` the newest record of `block` and of all its ancestors: it has just been made there."""
    left = node.shape[1]
    while block >= 0:
        node[c.NEWEST, block] = made
        block = node[c.PARENT, block]
        left -= 1
        if left < 0:
            raise InvariantError("a block is its own ancestor")


@njit_inlined
def forget_newest(node: Int32s, block: int, gone: int) -> None:
    """Let no block name a record that goes and ends at `block`. Where it is the newest, it is so all the way down."""
    while block >= 0 and node[c.NEWEST, block] == gone:
        node[c.NEWEST, block] = -1
        block = node[c.PARENT, block]


@njit_part
def newest_through(cache: CacheArrays, block: int) -> int:
    """Return the record made last of those whose path holds `block`.

    Where it is not known any more, it is found among the children, which may have to be asked first, and is noted. A
    block in work holds `-2 - best so far` (so -1: none so far, or nothing known).
    """
    node, serial = cache.node, cache.serial
    if node[c.NEWEST, block] >= 0:
        return int(node[c.NEWEST, block])
    at, left = block, node.shape[1]  # blocks that may still be entered
    node[c.NEWEST, at] = -2 - _newest_ending_at(cache, at)
    child = node[c.FIRST_CHILD, at]
    while True:
        if child < 0:
            node[c.NEWEST, at] = -2 - node[c.NEWEST, at]
            if at == block:
                return int(node[c.NEWEST, at])
            child = at
            at = node[c.PARENT, at]
            if at < 0:
                raise InvariantError("a child does not know its parent")
        elif node[c.NEWEST, child] < 0:
            at, left = child, left - 1
            if left < 0:
                raise InvariantError("a block is its own ancestor")
            node[c.NEWEST, at] = -2 - _newest_ending_at(cache, at)
            child = node[c.FIRST_CHILD, at]
        else:
            best = -2 - node[c.NEWEST, at]
            candidate = node[c.NEWEST, child]
            if best < 0 or serial[candidate] > serial[best]:
                node[c.NEWEST, at] = -2 - candidate
            child = node[c.NEXT_SIBLING, child]


@njit_part
def _newest_ending_at(cache: CacheArrays, block: int) -> int:
    best = cache.resource[c.FIRST_RECORD, block]
    if cache.state[c.EXTENDED_RECORDS] and best >= 0:
        other = cache.record[c.NEXT_AT_ENDPOINT, best]
        while other >= 0:
            if cache.serial[other] > cache.serial[best]:
                best = other
            other = cache.record[c.NEXT_AT_ENDPOINT, other]
    return int(best)
