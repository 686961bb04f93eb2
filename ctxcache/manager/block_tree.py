"""Which block follows which: the tree of blocks."""

from __future__ import annotations

from ctxcache.arguments import Int32s, Int64s
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager import layout as c


@njit_part
def write_path(node: Int32s, deepest: int, path: Int32s) -> int:
    """Fill `path` with the blocks that end at `deepest`; return the one before them (-1: none), -2 where they are too few."""
    at, i = deepest, path.size - 1
    while i >= 0:
        if at < 0:
            return -2
        path[i] = at
        i -= 1
        # Pages that were taken together mostly follow each other: the next one need not wait for this one's load.
        while i >= 0 and at > 0 and node[c.PARENT, at] == at - 1:
            at -= 1
            path[i] = at
            i -= 1
        at = node[c.PARENT, at]
    return int(at)


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
