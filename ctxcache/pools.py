"""Who holds which page or slot: leases' holds, the cache's holds, and what is free.

Each resource is in exactly one of: free; leased only; cached and leased; cached and idle.
"""

from __future__ import annotations

from ctxcache.core import ACTIVE, CACHED, DRAFT, FREE, FREE_STACK, IDLE, OFFSET, OWNER, RECLAIMED, Core
from ctxcache.jit import njit
from ctxcache.records import refresh


@njit
def take(core: Core, kind: int) -> int:
    """Give a free resource its first lease hold. There must be a free one."""
    left = core.state[FREE + kind] - 1
    core.state[FREE + kind] = left
    offset = core.state[OFFSET + kind]
    taken = core.resource[FREE_STACK, offset + left]
    core.resource[ACTIVE, offset + taken] = 1
    return taken


@njit
def pin(core: Core, kind: int, resource: int) -> None:
    """Add a lease's hold to a cached resource."""
    at = core.state[OFFSET + kind] + resource
    core.resource[ACTIVE, at] += 1
    if core.resource[ACTIVE, at] == 1:
        core.state[IDLE + kind] -= 1
        if core.resource[OWNER, at] >= 0:
            refresh(core, kind, core.resource[OWNER, at])


@njit
def unpin(core: Core, kind: int, resource: int) -> None:
    """End a lease's hold. What nobody holds then is free."""
    at = core.state[OFFSET + kind] + resource
    core.resource[ACTIVE, at] -= 1
    if core.resource[ACTIVE, at] > 0:
        return
    if core.resource[CACHED, at] == 0:
        _push_free(core, kind, resource)
        return
    core.state[IDLE + kind] += 1
    if core.resource[OWNER, at] >= 0:
        refresh(core, kind, core.resource[OWNER, at])


@njit
def hold(core: Core, kind: int, resource: int) -> None:
    """Add a hold of the cache to a leased resource."""
    at = core.state[OFFSET + kind] + resource
    core.resource[CACHED, at] += 1
    # A draft page that somebody else needs too makes no record ripe.
    if kind == DRAFT and core.resource[OWNER, at] >= 0:
        refresh(core, kind, core.resource[OWNER, at])


@njit
def let_go(core: Core, kind: int, resource: int) -> None:
    """End a hold of the cache. What nobody holds then is free, and counts as reclaimed."""
    at = core.state[OFFSET + kind] + resource
    core.resource[CACHED, at] -= 1
    if core.resource[CACHED, at] > 0:
        if core.resource[OWNER, at] >= 0:
            refresh(core, kind, core.resource[OWNER, at])
        return
    if core.resource[ACTIVE, at] == 0:
        core.state[IDLE + kind] -= 1
        core.state[RECLAIMED + kind] += 1
        _push_free(core, kind, resource)


@njit
def _push_free(core: Core, kind: int, resource: int) -> None:
    free = core.state[FREE + kind]
    core.resource[FREE_STACK, core.state[OFFSET + kind] + free] = resource
    core.state[FREE + kind] = free + 1
