"""Published endpoints: their LRU order, and for each kind of resource a heap of those whose eviction frees one at once.

The heaps have four children a node: a node's children share a cache line, and the order is in the entries themselves.
"""

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
    PLACE,
    PREVIOUS_AT_DRAFT,
    PREVIOUS_AT_ENDPOINT,
    QUEUE_SIZE,
    RECURRENT,
    RECURRENT_SLOT,
    ROOT_RECORD,
    USED,
    Core,
    Int32s,
    Int64s,
)
from ctxcache.jit import njit_in_place, njit_part

_CLOCK_LIMIT = 2**31 - 1
_RECORD_MASK = 2**32 - 1


@njit_part
def new_record(core: Core, endpoint: int) -> int:
    """Make a record, the most recently used, that ends at `endpoint` (-1: before the first full block)."""
    state = core.state
    made = state[FREE_RECORD]
    state[FREE_RECORD] = core.record[NEWER, made]
    state[NUM_RECORDS] += 1
    state[LAST_SERIAL] += 1
    core.serial[made] = state[LAST_SERIAL]
    core.record[ENDPOINT, made] = endpoint
    _renumber_when_due(core)
    _link_newest(state, core.record, made)
    _join_endpoint(core, made, endpoint)
    return int(made)


@njit_part
def drop_record(state: Int64s, record: Int32s, serial: Int64s, gone: int) -> None:
    """Take a record out of the LRU order and give its place back. It must have left its endpoint and heaps before."""
    _unlink(state, record, gone)
    serial[gone] = 0
    record[ENDPOINT, gone] = -1
    record[NEWER, gone] = state[FREE_RECORD]
    state[FREE_RECORD] = gone
    state[NUM_RECORDS] -= 1


@njit_in_place
def touch(core: Core, used: int) -> None:
    """Make a record the most recently used."""
    _renumber_when_due(core)
    _unlink(core.state, core.record, used)
    _link_newest(core.state, core.record, used)
    for kind in range(core.queue.shape[0]):
        place = core.record[PLACE + kind, used]
        if place >= 0:
            core.queue[kind, place] = entry_of(core.record, used)
            _sink(core.queue[kind], core.record[PLACE + kind], place, core.state[QUEUE_SIZE + kind])


@njit_part
def _join_endpoint(core: Core, made: int, endpoint: int) -> None:
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
    if endpoint >= 0:
        # Two records that end at one block keep it for each other.
        refresh(core, BASE, core.resource[OWNER, endpoint])
        if first >= 0:
            refresh(core, BASE, core.record[NEXT_AT_ENDPOINT, made])


@njit_part
def leave_endpoint(state: Int64s, resource: Int32s, record: Int32s, gone: int) -> None:
    """Take a record out of that list."""
    after = -1
    if state[EXTENDED_RECORDS]:
        after = record[NEXT_AT_ENDPOINT, gone]
        before = record[PREVIOUS_AT_ENDPOINT, gone]
        if after >= 0:
            record[PREVIOUS_AT_ENDPOINT, after] = before
        if before >= 0:
            record[NEXT_AT_ENDPOINT, before] = after
            return
    endpoint = record[ENDPOINT, gone]
    if endpoint >= 0:
        resource[OWNER, endpoint] = after
    else:
        state[ROOT_RECORD] = after


@njit_part
def join_draft_page(state: Int64s, resource: Int32s, record: Int32s, made: int, page: int) -> None:
    """Enter a record in the list of those whose draft path ends with this page. Its cache hold is the caller's to take."""
    at = state[OFFSET + DRAFT] + page
    first = resource[OWNER, at]
    record[LAST_DRAFT_PAGE, made] = page
    record[NEXT_AT_DRAFT, made] = first
    record[PREVIOUS_AT_DRAFT, made] = -1
    if first >= 0:
        record[PREVIOUS_AT_DRAFT, first] = made
    resource[OWNER, at] = made


@njit_part
def leave_draft_page(state: Int64s, resource: Int32s, record: Int32s, gone: int) -> None:
    """Take a record out of that list."""
    after = record[NEXT_AT_DRAFT, gone]
    before = record[PREVIOUS_AT_DRAFT, gone]
    if after >= 0:
        record[PREVIOUS_AT_DRAFT, after] = before
    if before >= 0:
        record[NEXT_AT_DRAFT, before] = after
    else:
        resource[OWNER, state[OFFSET + DRAFT] + record[LAST_DRAFT_PAGE, gone]] = after
    record[LAST_DRAFT_PAGE, gone] = -1


@njit_in_place
def is_ripe(core: Core, kind: int, record: int) -> bool:
    """Whether evicting this record alone is known to free a resource of that kind at once."""
    if kind == BASE:
        block = core.record[ENDPOINT, record]
        if block < 0 or core.node[FIRST_CHILD, block] >= 0 or core.resource[ACTIVE, block] > 0:
            return False
        if not core.state[EXTENDED_RECORDS]:
            return True
        return bool(core.record[NEXT_AT_ENDPOINT, record] < 0 and core.record[PREVIOUS_AT_ENDPOINT, record] < 0)
    if kind == DRAFT:
        held = core.record[LAST_DRAFT_PAGE, record]
    else:
        held = core.record[RECURRENT_SLOT if kind == RECURRENT else PARTIAL_SLOT, record]
    if held < 0:
        return False
    at = core.state[OFFSET + kind] + held
    return bool(core.resource[ACTIVE, at] == 0 and core.resource[CACHED, at] == 1)


@njit_part
def refresh(core: Core, kind: int, record: int) -> None:
    """Enter a record in the heap of its kind, or take it out, as it is ripe or not now."""
    queued = core.record[PLACE + kind, record] >= 0
    if is_ripe(core, kind, record) == queued:
        return
    if queued:
        leave_queue(core.state, core.queue, core.record, kind, record)
        return
    size = core.state[QUEUE_SIZE + kind]
    core.state[QUEUE_SIZE + kind] = size + 1
    core.queue[kind, size] = entry_of(core.record, record)
    _rise(core.queue[kind], core.record[PLACE + kind], size)


@njit_in_place
def oldest_ripe(state: Int64s, queue: Int64s, kind: int) -> int:
    """Return the heap entry of the least recently used ripe record; entries compare by last use. -1: there is none."""
    return int(queue[kind, 0]) if state[QUEUE_SIZE + kind] > 0 else -1


@njit_in_place
def record_of(entry: int) -> int:
    """Return the record of a heap entry."""
    return entry & _RECORD_MASK


@njit_part
def leave_queue(state: Int64s, queue: Int64s, record: Int32s, kind: int, gone: int) -> None:
    """Take a record out of the heap of a kind, if it is there."""
    places, heap = record[PLACE + kind], queue[kind]
    place = places[gone]
    if place < 0:
        return
    places[gone] = -1
    size = state[QUEUE_SIZE + kind] - 1
    state[QUEUE_SIZE + kind] = size
    if place == size:
        return
    heap[place] = heap[size]
    if place > 0 and heap[place] < heap[(place - 1) // 4]:
        _rise(heap, places, place)
    else:
        _sink(heap, places, place, size)


@njit_part
def entry_of(record: Int32s, entered: int) -> int:
    """Return the heap entry of a record: an older use compares as smaller."""
    return (int(record[USED, entered]) << 32) | entered


@njit_part
def _rise(heap: Int64s, places: Int32s, place: int) -> None:
    entry = heap[place]
    while place > 0:
        above = (place - 1) // 4
        if heap[above] < entry:
            break
        heap[place] = heap[above]
        places[heap[place] & _RECORD_MASK] = place
        place = above
    heap[place] = entry
    places[entry & _RECORD_MASK] = place


@njit_part
def _sink(heap: Int64s, places: Int32s, place: int, size: int) -> None:
    entry = heap[place]
    while True:
        first = 4 * place + 1
        if first >= size:
            break
        below = first
        for other in range(first + 1, min(first + 4, size)):
            if heap[other] < heap[below]:
                below = other
        if heap[below] > entry:
            break
        heap[place] = heap[below]
        places[heap[place] & _RECORD_MASK] = place
        place = below
    heap[place] = entry
    places[entry & _RECORD_MASK] = place


@njit_part
def _link_newest(state: Int64s, record: Int32s, used: int) -> None:
    last = state[NEWEST_RECORD]
    record[OLDER, used] = last
    record[NEWER, used] = -1
    if last >= 0:
        record[NEWER, last] = used
    else:
        state[OLDEST_RECORD] = used
    state[NEWEST_RECORD] = used
    state[CLOCK] += 1
    record[USED, used] = state[CLOCK]


@njit_part
def _unlink(state: Int64s, record: Int32s, gone: int) -> None:
    older, newer = record[OLDER, gone], record[NEWER, gone]
    if older >= 0:
        record[NEWER, older] = newer
    else:
        state[OLDEST_RECORD] = newer
    if newer >= 0:
        record[OLDER, newer] = older
    else:
        state[NEWEST_RECORD] = older


@njit_part
def _renumber_when_due(core: Core) -> None:
    """Count uses from 1 again before the clock overflows its 31 bits: once in two thousand million uses."""
    if core.state[CLOCK] < _CLOCK_LIMIT:
        return
    clock = 0
    at = core.state[OLDEST_RECORD]
    while at >= 0:
        clock += 1
        core.record[USED, at] = clock
        at = core.record[NEWER, at]
    core.state[CLOCK] = clock
    for kind in range(core.queue.shape[0]):
        # The order is the same, so each heap keeps its shape.
        for place in range(core.state[QUEUE_SIZE + kind]):
            core.queue[kind, place] = entry_of(core.record, core.queue[kind, place] & _RECORD_MASK)
