"""Who holds which page or slot: leases' holds, the cache's holds, and what is free.

Each resource is in exactly one of: free; leased only; cached and leased; cached and idle. Calls take runs of pages: the
common case of a run is a loop over local arrays.
"""

from __future__ import annotations

from ctxcache.arguments import Int32s, Int64s
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager.layout import ACTIVE, CACHED, DRAFT, FREE, FREE_STACK, IDLE, OFFSET, OWNER, RECLAIMED, Core
from ctxcache.manager.lru import refresh


@njit_in_place
def take(state: Int64s, resource: Int32s, kind: int, taken: Int32s) -> None:
    """Fill `taken` with free resources, each with its first lease hold. There must be so many."""
    offset = state[OFFSET + kind]
    top = offset + state[FREE + kind] - 1
    for i in range(taken.size):
        each = resource[FREE_STACK, top - i]
        resource[ACTIVE, offset + each] = 1
        taken[i] = each
    state[FREE + kind] -= taken.size


@njit_in_place
def pin(core: Core, kind: int, held: Int32s) -> None:
    """Add a lease's hold to each of these cached resources."""
    resource, offset = core.resource, core.state[OFFSET + kind]
    woken = 0
    for each in held:
        at = offset + each
        resource[ACTIVE, at] += 1
        if resource[ACTIVE, at] == 1:
            woken += 1
            if resource[OWNER, at] >= 0:
                refresh(core, kind, resource[OWNER, at])
    core.state[IDLE + kind] -= woken


@njit_part
def unpin(core: Core, kind: int, held: Int32s) -> None:
    """End a lease's hold on each of these, the last one first. What nobody holds then is free."""
    resource, offset = core.resource, core.state[OFFSET + kind]
    free, idle = core.state[FREE + kind], 0
    for i in range(held.size - 1, -1, -1):
        at = offset + held[i]
        resource[ACTIVE, at] -= 1
        if resource[ACTIVE, at] > 0:
            continue
        if resource[CACHED, at] == 0:
            resource[FREE_STACK, offset + free] = held[i]
            free += 1
            continue
        idle += 1
        if resource[OWNER, at] >= 0:
            refresh(core, kind, resource[OWNER, at])
    core.state[FREE + kind] = free
    core.state[IDLE + kind] += idle


@njit_part
def hold(core: Core, kind: int, held: int) -> None:
    """Add a hold of the cache to a leased resource."""
    at = core.state[OFFSET + kind] + held
    core.resource[CACHED, at] += 1
    # A draft page that somebody else needs too makes no record ripe.
    if kind == DRAFT and core.resource[OWNER, at] >= 0:
        refresh(core, kind, core.resource[OWNER, at])


@njit_in_place
def let_go(core: Core, kind: int, held: int) -> None:
    """End a hold of the cache. What nobody holds then is free, and counts as reclaimed."""
    at = core.state[OFFSET + kind] + held
    core.resource[CACHED, at] -= 1
    if core.resource[CACHED, at] == 0:
        reclaim_if_idle(core.state, core.resource, kind, held)
    elif core.resource[OWNER, at] >= 0:
        refresh(core, kind, core.resource[OWNER, at])


@njit_inlined
def reclaim_if_idle(state: Int64s, resource: Int32s, kind: int, held: int) -> None:
    """Return a resource that the cache has just let go of to its pool, unless a lease holds it."""
    offset = state[OFFSET + kind]
    if resource[ACTIVE, offset + held] == 0:
        state[IDLE + kind] -= 1
        state[RECLAIMED + kind] += 1
        resource[FREE_STACK, offset + state[FREE + kind]] = held
        state[FREE + kind] += 1


@njit_part
def copy_pages(source: Int32s, target: Int32s) -> None:
    """Copy page ids into the beginning of `target`; assigning to a slice would allocate, in case the two overlap."""
    for i in range(source.size):
        target[i] = source[i]
