"""Who holds which page or slot: references of leases, references of the cache, and what is free.

Each resource is in exactly one of: free; leased only; cached and leased; cached and idle. Calls take runs of pages: the
common case of a run is a loop over local arrays.
"""

from __future__ import annotations

from ctxcache.arguments import Int32s, Int64s
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.layout import CacheArrays
from ctxcache.manager.lru import mark_evictable


@njit_in_place
def take(state: Int64s, resource: Int32s, kind: int, taken: Int32s) -> None:
    """Fill `taken` with free resources, each with its first lease reference. There must be so many."""
    # The pool's stack: [0, free - taken) stays | [free - taken, free) given out, from its end
    offset, free = state[c.OFFSET + kind], state[c.FREE + kind]
    if taken.size > free:
        raise InvariantError("a resource is taken from an empty pool")
    top = offset + free - 1
    held = 0
    for i in range(taken.size):
        each = resource[c.FREE_STACK, top - i]
        held |= resource[c.LEASE_REFS, offset + each] | resource[c.CACHE_REFS, offset + each]
        resource[c.LEASE_REFS, offset + each] = 1
        taken[i] = each
    if held != 0:
        raise InvariantError("a resource that somebody holds was on the free list")
    state[c.FREE + kind] -= taken.size


@njit_in_place
def pin(cache: CacheArrays, kind: int, held: Int32s) -> None:
    """Add a lease's reference to each of these cached resources."""
    resource, offset = cache.resource, cache.state[c.OFFSET + kind]
    woken = 0
    for each in held:
        at = offset + each
        if resource[c.CACHE_REFS, at] <= 0:
            raise InvariantError("a resource is pinned that the cache does not hold")
        resource[c.LEASE_REFS, at] += 1
        if resource[c.LEASE_REFS, at] == 1:
            woken += 1
            if resource[c.FIRST_RECORD, at] >= 0:
                mark_evictable(cache, kind, resource[c.FIRST_RECORD, at])
    cache.state[c.IDLE + kind] -= woken
    if cache.state[c.IDLE + kind] < 0:
        raise InvariantError("more resources are pinned than were idle")


@njit_part
def unpin(cache: CacheArrays, kind: int, held: Int32s) -> None:
    """End a lease's reference to each of these, the last one first. What nobody holds then is free."""
    resource, offset = cache.resource, cache.state[c.OFFSET + kind]
    free, idle = cache.state[c.FREE + kind], 0
    if held.size > cache.state[c.CAPACITY + kind] - free:
        raise InvariantError("more resources are given back than are out")
    for i in range(held.size - 1, -1, -1):
        at = offset + held[i]
        if resource[c.LEASE_REFS, at] <= 0:
            raise InvariantError("a resource is given back that no lease holds")
        resource[c.LEASE_REFS, at] -= 1
        if resource[c.LEASE_REFS, at] > 0:
            continue
        if resource[c.CACHE_REFS, at] == 0:
            resource[c.FREE_STACK, offset + free] = held[i]
            free += 1
            continue
        idle += 1
        if resource[c.FIRST_RECORD, at] >= 0:
            mark_evictable(cache, kind, resource[c.FIRST_RECORD, at])
    cache.state[c.FREE + kind] = free
    cache.state[c.IDLE + kind] += idle


@njit_part
def hold(cache: CacheArrays, kind: int, held: int) -> None:
    """Add a reference of the cache to a leased resource."""
    at = cache.state[c.OFFSET + kind] + held
    if held < 0 or cache.resource[c.LEASE_REFS, at] <= 0:
        raise InvariantError("the cache takes hold of a resource that no lease holds")
    cache.resource[c.CACHE_REFS, at] += 1
    # A draft page that somebody else needs too makes no record evictable.
    if kind == c.DRAFT and cache.resource[c.FIRST_RECORD, at] >= 0:
        mark_evictable(cache, kind, cache.resource[c.FIRST_RECORD, at])


@njit_in_place
def let_go(cache: CacheArrays, kind: int, held: int) -> None:
    """End a reference of the cache. What nobody holds then is free, and counts as reclaimed."""
    at = cache.state[c.OFFSET + kind] + held
    if held < 0 or cache.resource[c.CACHE_REFS, at] <= 0:
        raise InvariantError("the cache lets go of a resource that it does not hold")
    cache.resource[c.CACHE_REFS, at] -= 1
    if cache.resource[c.CACHE_REFS, at] == 0:
        reclaim_if_idle(cache.state, cache.resource, kind, held)
    elif cache.resource[c.FIRST_RECORD, at] >= 0:
        mark_evictable(cache, kind, cache.resource[c.FIRST_RECORD, at])


@njit_inlined
def reclaim_if_idle(state: Int64s, resource: Int32s, kind: int, held: int) -> None:
    """Return a resource that the cache has just let go of to its pool, unless a lease holds it."""
    offset = state[c.OFFSET + kind]
    if resource[c.LEASE_REFS, offset + held] == 0:
        if state[c.IDLE + kind] <= 0 or state[c.FREE + kind] >= state[c.CAPACITY + kind]:
            raise InvariantError("a resource is reclaimed of a pool that has none idle, or all free")
        state[c.IDLE + kind] -= 1
        state[c.RECLAIMED + kind] += 1
        resource[c.FREE_STACK, offset + state[c.FREE + kind]] = held
        state[c.FREE + kind] += 1


@njit_part
def copy_pages(source: Int32s, target: Int32s) -> None:
    """Copy page ids into the beginning of `target`; assigning to a slice would allocate, in case the two overlap."""
    if source.size > target.size:
        raise InvariantError("more pages are copied than there is room for")
    for i in range(source.size):
        target[i] = source[i]
