"""Published endpoints: their LRU order, and for each kind of resource a heap of those whose eviction frees one at once."""

from __future__ import annotations

from ctxcache.core import (
    ACTIVE,
    BASE,
    CACHED,
    CLOCK,
    DRAFT,
    ENDPOINT,
    EXTENDED_RECORDS,
    FIRST_CHILD,
    FREE_RECORD,
    LAST_DRAFT_PAGE,
    LAST_SERIAL,
    NEWER,
    NEWEST_RECORD,
    NEXT_AT_DRAFT,
    NEXT_AT_ENDPOINT,
    NUM_RECORDS,
    OFFSET,
    OLDER,
    OLDEST_RECORD,
    OWNER,
    PARTIAL_SLOT,
    PREVIOUS_AT_DRAFT,
    PREVIOUS_AT_ENDPOINT,
    QUEUE_SIZE,
    RECURRENT,
    RECURRENT_SLOT,
    ROOT_RECORD,
    SERIAL,
    USED,
    Core,
    Int32s,
    Int64s,
)
from ctxcache.jit import njit


@njit
def new_record(core: Core, endpoint: int) -> int:
    """Make a record, the most recently used, that ends at `endpoint` (-1: before the first full block)."""
    state = core.state
    made = state[FREE_RECORD]
    state[FREE_RECORD] = core.record[NEWER, made]
    state[NUM_RECORDS] += 1
    state[LAST_SERIAL] += 1
    core.stamp[SERIAL, made] = state[LAST_SERIAL]
    core.record[ENDPOINT, made] = endpoint
    _link_newest(core, made)
    join_endpoint(core, made, endpoint)
    return made


@njit
def drop_record(core: Core, gone: int) -> None:
    """Take a record out of the LRU order and give its place back. Its endpoint must have been left before."""
    _unlink(core, gone)
    core.stamp[SERIAL, gone] = 0
    core.record[:, gone] = -1
    core.record[NEWER, gone] = core.state[FREE_RECORD]
    core.state[FREE_RECORD] = gone
    core.state[NUM_RECORDS] -= 1


@njit
def touch(core: Core, used: int) -> None:
    """Make a record the most recently used."""
    _unlink(core, used)
    _link_newest(core, used)
    for kind in range(core.queue.shape[0] // 2):
        place = core.queue[2 * kind + 1, used]
        if place >= 0:
            _sink(
                core.queue[2 * kind], core.queue[2 * kind + 1], core.stamp[USED], place, core.state[QUEUE_SIZE + kind]
            )


@njit
def join_endpoint(core: Core, made: int, endpoint: int) -> None:
    """Enter a record in the list of those that end at a block, or before the first one."""
    first = core.resource[OWNER, endpoint] if endpoint >= 0 else core.state[ROOT_RECORD]
    if core.state[EXTENDED_RECORDS]:
        core.record[NEXT_AT_ENDPOINT, made] = first
        core.record[PREVIOUS_AT_ENDPOINT, made] = -1
        if first >= 0:
            core.record[PREVIOUS_AT_ENDPOINT, first] = made
    if endpoint >= 0:
        core.resource[OWNER, endpoint] = made
    else:
        core.state[ROOT_RECORD] = made
    if first >= 0:
        refresh(core, BASE, first)
    refresh(core, BASE, made)


@njit
def leave_endpoint(core: Core, gone: int) -> None:
    """Take a record out of that list."""
    endpoint = core.record[ENDPOINT, gone]
    after = -1
    if core.state[EXTENDED_RECORDS]:
        after = core.record[NEXT_AT_ENDPOINT, gone]
        before = core.record[PREVIOUS_AT_ENDPOINT, gone]
        if after >= 0:
            core.record[PREVIOUS_AT_ENDPOINT, after] = before
        if before >= 0:
            core.record[NEXT_AT_ENDPOINT, before] = after
            return
    if endpoint >= 0:
        core.resource[OWNER, endpoint] = after
    else:
        core.state[ROOT_RECORD] = after


@njit
def join_draft_page(core: Core, made: int, page: int) -> None:
    """Enter a record in the list of those whose draft path ends with this page. Its cache hold is the caller's to take."""
    at = core.state[OFFSET + DRAFT] + page
    first = core.resource[OWNER, at]
    core.record[LAST_DRAFT_PAGE, made] = page
    core.record[NEXT_AT_DRAFT, made] = first
    core.record[PREVIOUS_AT_DRAFT, made] = -1
    if first >= 0:
        core.record[PREVIOUS_AT_DRAFT, first] = made
    core.resource[OWNER, at] = made


@njit
def leave_draft_page(core: Core, gone: int) -> None:
    """Take a record out of that list."""
    page = core.record[LAST_DRAFT_PAGE, gone]
    after = core.record[NEXT_AT_DRAFT, gone]
    before = core.record[PREVIOUS_AT_DRAFT, gone]
    if after >= 0:
        core.record[PREVIOUS_AT_DRAFT, after] = before
    if before >= 0:
        core.record[NEXT_AT_DRAFT, before] = after
    else:
        core.resource[OWNER, core.state[OFFSET + DRAFT] + page] = after
    core.record[LAST_DRAFT_PAGE, gone] = -1


@njit
def is_ripe(core: Core, kind: int, record: int) -> bool:
    """Whether evicting this record alone is known to free a resource of that kind at once."""
    if kind == BASE:
        block = core.record[ENDPOINT, record]
        if block < 0 or core.node[FIRST_CHILD, block] >= 0 or core.resource[ACTIVE, block] > 0:
            return False
        if not core.state[EXTENDED_RECORDS]:
            return True
        return core.record[NEXT_AT_ENDPOINT, record] < 0 and core.record[PREVIOUS_AT_ENDPOINT, record] < 0
    if kind == DRAFT:
        held = core.record[LAST_DRAFT_PAGE, record]
    else:
        held = core.record[RECURRENT_SLOT if kind == RECURRENT else PARTIAL_SLOT, record]
    if held < 0:
        return False
    at = core.state[OFFSET + kind] + held
    return core.resource[ACTIVE, at] == 0 and core.resource[CACHED, at] == 1


@njit
def refresh(core: Core, kind: int, record: int) -> None:
    """Enter a record in the heap of its kind, or take it out, as it is ripe or not now."""
    queue, places, used = core.queue[2 * kind], core.queue[2 * kind + 1], core.stamp[USED]
    place = places[record]
    size = core.state[QUEUE_SIZE + kind]
    if is_ripe(core, kind, record):
        if place < 0:
            queue[size] = record
            places[record] = size
            core.state[QUEUE_SIZE + kind] = size + 1
            _rise(queue, places, used, size)
    elif place >= 0:
        leave_queue(core, kind, record)


@njit
def leave_queue(core: Core, kind: int, record: int) -> None:
    """Take a record out of the heap of a kind, if it is there."""
    queue, places, used = core.queue[2 * kind], core.queue[2 * kind + 1], core.stamp[USED]
    place = places[record]
    if place < 0:
        return
    places[record] = -1
    size = core.state[QUEUE_SIZE + kind] - 1
    core.state[QUEUE_SIZE + kind] = size
    if place == size:
        return
    queue[place] = queue[size]
    places[queue[place]] = place
    _rise(queue, places, used, place)
    _sink(queue, places, used, place, size)


@njit
def _link_newest(core: Core, record: int) -> None:
    state = core.state
    last = state[NEWEST_RECORD]
    core.record[OLDER, record] = last
    core.record[NEWER, record] = -1
    if last >= 0:
        core.record[NEWER, last] = record
    else:
        state[OLDEST_RECORD] = record
    state[NEWEST_RECORD] = record
    state[CLOCK] += 1
    core.stamp[USED, record] = state[CLOCK]


@njit
def _unlink(core: Core, record: int) -> None:
    older, newer = core.record[OLDER, record], core.record[NEWER, record]
    if older >= 0:
        core.record[NEWER, older] = newer
    else:
        core.state[OLDEST_RECORD] = newer
    if newer >= 0:
        core.record[OLDER, newer] = older
    else:
        core.state[NEWEST_RECORD] = older


@njit
def _rise(queue: Int32s, places: Int32s, used: Int64s, place: int) -> None:
    record = queue[place]
    while place > 0:
        above = (place - 1) // 2
        if used[queue[above]] <= used[record]:
            break
        queue[place] = queue[above]
        places[queue[place]] = place
        place = above
    queue[place] = record
    places[record] = place


@njit
def _sink(queue: Int32s, places: Int32s, used: Int64s, place: int, size: int) -> None:
    record = queue[place]
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and used[queue[below + 1]] < used[queue[below]]:
            below += 1
        if used[queue[below]] >= used[record]:
            break
        queue[place] = queue[below]
        places[queue[place]] = place
        place = below
    queue[place] = record
    places[record] = place
