"""Published endpoints: their LRU order, and for each kind of resource which of them free one at once when evicted.

Each use of a record takes the next place of a line, `Core.line`, and leaves a gap where the record was. So the order of
places is the order of use; the ripe records of a kind are a set of places, and the least of them is the next to evict. The
line does not run out: with every use a sweep moves a few records down into the gaps, keeping their order, and when it has
come to the end of the line, the line ends where it has moved the last one.

With `R` records at most, a sweep that begins with the line ending at `e` takes `u = e / 3` uses (four places a use, of
which one is new), and ends it at `R + u` at the latest. So lines begin to be swept no later than at `1.5 * R`, and end no
later than at `2 * R`.
"""

from __future__ import annotations

from ctxcache.arguments import Int32s, Int64s, Words
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager.bitset import add, discard, holds, least
from ctxcache.manager.layout import (
    ACTIVE,
    BASE,
    CACHED,
    DRAFT,
    ENDPOINT,
    EXTENDED_RECORDS,
    FIRST_CHILD,
    FIRST_LEAF,
    FREE_RECORD,
    LAST_DRAFT_PAGE,
    LAST_SERIAL,
    LINE_END,
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
    RECURRENT,
    RECURRENT_SLOT,
    ROOT_RECORD,
    SETTLED,
    SWEPT,
    USED,
    Core,
)

_SWEEP = 4


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
    _sweep(core)
    _link_newest(core, made)
    _join_endpoint(core, made, endpoint)
    return int(made)


@njit_inlined
def drop_record(core: Core, gone: int) -> None:
    """Take a record out of the LRU order and give its row back. It must have left its endpoint before, and be ripe no more."""
    state, record = core.state, core.record
    _unlink(core, gone)
    core.serial[gone] = 0
    record[ENDPOINT, gone] = -1
    record[NEWER, gone] = state[FREE_RECORD]
    state[FREE_RECORD] = gone
    state[NUM_RECORDS] -= 1


@njit_in_place
def touch(core: Core, used: int) -> None:
    """Make a record the most recently used."""
    _sweep(core)  # first: nothing may move into the gap while the marks are still there
    leaf, before = core.state[FIRST_LEAF], core.record[USED, used]
    _unlink(core, used)
    _link_newest(core, used)
    for kind in range(core.ripe.shape[0]):
        _move_mark(core.ripe[kind], leaf, before, core.record[USED, used])


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


@njit_inlined
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
    """Mark a record as ripe for its kind, or not, as it is now."""
    ripe, leaf, place = core.ripe[kind], core.state[FIRST_LEAF], core.record[USED, record]
    marked = holds(ripe, leaf, place)
    if is_ripe(core, kind, record) == marked:
        return
    if marked:
        discard(ripe, leaf, place)
    else:
        add(ripe, leaf, place)


@njit_inlined
def forget_ripe(core: Core, gone: int) -> None:
    """Let a record be ripe for no kind."""
    leaf, place = core.state[FIRST_LEAF], core.record[USED, gone]
    for kind in range(core.ripe.shape[0]):
        if holds(core.ripe[kind], leaf, place):
            discard(core.ripe[kind], leaf, place)


@njit_inlined
def oldest_ripe(core: Core, kind: int) -> int:
    """Return the place in the line of the least recently used ripe record. -1: there is none."""
    return least(core.ripe[kind], core.state[FIRST_LEAF])


@njit_part
def _link_newest(core: Core, used: int) -> None:
    state, record = core.state, core.record
    last = state[NEWEST_RECORD]
    record[OLDER, used] = last
    record[NEWER, used] = -1
    if last >= 0:
        record[NEWER, last] = used
    else:
        state[OLDEST_RECORD] = used
    state[NEWEST_RECORD] = used
    core.line[state[LINE_END]] = used
    record[USED, used] = state[LINE_END]
    state[LINE_END] += 1


@njit_inlined
def _unlink(core: Core, gone: int) -> None:
    state, record = core.state, core.record
    older, newer = record[OLDER, gone], record[NEWER, gone]
    if older >= 0:
        record[NEWER, older] = newer
    else:
        state[OLDEST_RECORD] = newer
    if newer >= 0:
        record[OLDER, newer] = older
    else:
        state[NEWEST_RECORD] = older
    core.line[record[USED, gone]] = -1


@njit_part
def _sweep(core: Core) -> None:
    """Go on moving records down into the gaps of the line."""
    state, line, leaf = core.state, core.line, core.state[FIRST_LEAF]
    at, settled = state[SWEPT], state[SETTLED]
    for _ in range(_SWEEP):
        if at == state[LINE_END]:
            state[LINE_END] = settled
            at, settled = 0, 0
            if state[LINE_END] == 0:
                break
        moved = line[at]
        if moved >= 0:
            if settled < at:
                line[at] = -1
                line[settled] = moved
                core.record[USED, moved] = settled
                for kind in range(core.ripe.shape[0]):
                    _move_mark(core.ripe[kind], leaf, at, settled)
            settled += 1
        at += 1
    state[SWEPT] = at
    state[SETTLED] = settled


@njit_part
def _move_mark(ripe: Words, leaf: int, before: int, after: int) -> None:
    if holds(ripe, leaf, before):
        discard(ripe, leaf, before)
        add(ripe, leaf, after)
