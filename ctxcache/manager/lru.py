"""Published endpoints: their LRU order, and for each kind of resource which of them free one at once when evicted.

The entries of the order are *records*, and without checkpoints *marks* too. Recency is kept a block, but not written down
a block: an entry stands for the blocks from its end down to the next entry's end,

    first block ... [ blocks of entry a ] a [ blocks of entry b ] b ... [ blocks of a record ] end

which were all used last when its end was. For every use goes from the first block down to some block, and that one becomes
an entry (a mark, where no record ends there); so does a block at which a second path leaves. Hence a use of one of these
blocks is a use of them all. A block without children always has a record; marks stand before others only, and are taken
over by the record whose end comes up to them.

Within one use, what lies deeper counts as more recent. That decides which of two records on one path a limit on records
takes first (the inner one, with which no block goes), and nothing else: of one path, only the end can be evicted.

Each use of an entry takes the next place of `CacheArrays.recency`, and leaves a gap where the record was. So the order of
places is the order of use; the evictable records of a kind are a set of places, and the least of them is the next to go.
Places do not run out: with every use a sweep moves a few records down into the gaps, keeping their order, and when it has
come to the end, the order ends where it has moved the last one.

    [0, SETTLED) swept, without gaps | [SETTLED, SWEPT) all gaps | [SWEPT, RECENCY_END) used since, with gaps | unused

With `R` records at most, a sweep that begins with the order ending at `e` takes `u = e / 3` uses (four places a use, of
which one is new), and ends it at `R + u` at the latest. So an order begins to be swept no later than at `1.5 * R`, and ends
no later than at `2 * R`.
"""

from __future__ import annotations

from ctxcache.arguments import Int32s, Int64s, Words
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.bitset import add, discard, holds, least
from ctxcache.manager.layout import CacheArrays

_SWEEP = 4


@njit_part
def new_mark(cache: CacheArrays, endpoint: int) -> int:
    """Make an entry, the most recently used, that ends at `endpoint` (-1: before the first full block). It is no record yet."""
    state = cache.state
    made = state[c.FREE_RECORD]
    if made < 0 or cache.serial[made] != 0:
        raise InvariantError("a record is made without a free one")
    _sweep(cache)
    state[c.FREE_RECORD] = cache.record[c.NEWER, made]
    cache.serial[made] = c.IS_MARK
    cache.record[c.ENDPOINT, made] = endpoint
    cache.record[c.SHORTENED_IN, made] = 0
    cache.record[c.ABOVE, made] = -1
    _link_newest(cache, made)
    # The list of records that end at one block, or before the first one, begins with it.
    # Where no blocks are indexed, there is a list for every last full block instead; see `checkpoints`.
    first = cache.resource[c.FIRST_RECORD, endpoint] if endpoint >= 0 else state[c.ROOT_RECORD]
    if cache.key.shape[0] == 0:
        first = -1
    if state[c.EXTENDED_RECORDS]:
        cache.record[c.NUM_PAIRED_BLOCKS, made] = 0
        cache.record[c.NEXT_AT_ENDPOINT, made] = first
        cache.record[c.PREVIOUS_AT_ENDPOINT, made] = -1
        if first >= 0:
            cache.record[c.PREVIOUS_AT_ENDPOINT, first] = made
    if endpoint >= 0:
        cache.resource[c.FIRST_RECORD, endpoint] = made
        # Two records that end at one block keep it for each other.
        mark_evictable(cache, c.BASE, made)
        if first >= 0:
            mark_evictable(cache, c.BASE, first)
    elif cache.key.shape[0] > 0:
        state[c.ROOT_RECORD] = made
    return int(made)


@njit_in_place
def make_record(cache: CacheArrays, entry: int) -> None:
    """Make a mark a record."""
    state = cache.state
    if cache.serial[entry] != c.IS_MARK:
        raise InvariantError("what is no mark becomes a record")
    state[c.NUM_RECORDS] += 1
    state[c.LAST_SERIAL] += 1
    cache.serial[entry] = state[c.LAST_SERIAL]
    add(cache.evictable[cache.evictable.shape[0] - 1], state[c.FIRST_LEAF], _place_of(cache, entry))


@njit_in_place
def make_mark(cache: CacheArrays, entry: int) -> None:
    """Make a record a mark: others stand on its blocks."""
    if cache.serial[entry] <= 0:
        raise InvariantError("what is no record becomes a mark")
    cache.state[c.NUM_RECORDS] -= 1
    cache.serial[entry] = c.IS_MARK
    discard(cache.evictable[cache.evictable.shape[0] - 1], cache.state[c.FIRST_LEAF], _place_of(cache, entry))


@njit_inlined
def drop_entry(cache: CacheArrays, gone: int) -> None:
    """Take an entry out of the LRU order and give its row back. It must have left its endpoint before, and be evictable no more."""
    state, record = cache.state, cache.record
    state[c.NUM_RECORDS] -= cache.serial[gone] > 0
    _unlink(cache, gone)
    cache.serial[gone] = 0
    record[c.ENDPOINT, gone] = -1
    record[c.NEWER, gone] = state[c.FREE_RECORD]
    state[c.FREE_RECORD] = gone


@njit_in_place
def take_over(cache: CacheArrays, record: int, mark: int) -> None:
    """Let a record whose end has come up to a mark have the mark's end, and its place in the order. The mark is gone."""
    if cache.serial[mark] != c.IS_MARK or cache.serial[record] <= 0:
        raise InvariantError("a record takes over what is no mark")
    place, end = _place_of(cache, mark), cache.record[c.ENDPOINT, mark]
    forget_evictable(cache, record)
    forget_evictable(cache, mark)
    _unlink(cache, record)
    older, newer = cache.record[c.OLDER, mark], cache.record[c.NEWER, mark]
    cache.record[c.ABOVE, record] = cache.record[c.ABOVE, mark]
    drop_entry(cache, mark)
    _link(cache, record, older, newer, place)
    cache.record[c.ENDPOINT, record] = end
    cache.resource[c.FIRST_RECORD, end] = record
    add(cache.evictable[cache.evictable.shape[0] - 1], cache.state[c.FIRST_LEAF], place)
    for kind in range(cache.evictable.shape[0] - 1):
        mark_evictable(cache, kind, record)


@njit_in_place
def touch(cache: CacheArrays, used: int) -> None:
    """Make an entry the most recently used."""
    if used < 0 or cache.serial[used] == 0:
        raise InvariantError("a record that is not there is used")
    _sweep(cache)  # first: nothing may move into the gap while the marks are still there
    leaf, before = cache.state[c.FIRST_LEAF], _place_of(cache, used)
    _unlink(cache, used)
    _link_newest(cache, used)
    for kind in range(cache.evictable.shape[0]):
        _move_mark(cache.evictable[kind], leaf, before, cache.record[c.RECENCY_PLACE, used])


@njit_part
def keep_apart(cache: CacheArrays, block: int) -> None:
    """Let an entry end at a block: what lies behind it will not be used with it, or paths are about to part there."""
    node, first_record, above = cache.node, cache.resource[c.FIRST_RECORD], cache.record[c.ABOVE]
    if first_record[block] >= 0:
        return
    # It lies amid the blocks of the entry below it, of which it takes the upper part.
    below = node[c.FIRST_CHILD, block]
    left = node.shape[1]
    while below >= 0 and first_record[below] < 0 and left > 0:
        below = node[c.FIRST_CHILD, below]
        left -= 1
    if below < 0 or left == 0:
        raise InvariantError("no entry ends behind a block")
    made = new_mark(cache, block)
    above[made] = above[first_record[below]]
    above[first_record[below]] = made


@njit_part
def use_path_to(cache: CacheArrays, entry: int) -> None:
    """Make the entries on the path to one the most recently used, the one itself last."""
    above = cache.record[c.ABOVE]
    # Upwards every link is turned round, so that the way down is known; downwards they are turned back.
    below, at, num_entries = -1, entry, 0
    while at >= 0:
        above[at], below, at = below, at, above[at]
        num_entries += 1
    if below == entry and num_entries > 1:  # links in a circle lead back to where one began
        raise InvariantError("an entry is its own ancestor")
    at, over = below, -1
    while at >= 0:
        above[at], over, at = over, at, above[at]
        touch(cache, over)


@njit_inlined
def leave_endpoint(state: Int64s, resource: Int32s, record: Int32s, gone: int) -> None:
    """Take a record out of the list of those that end where it does."""
    after = -1
    if state[c.EXTENDED_RECORDS]:
        after = record[c.NEXT_AT_ENDPOINT, gone]
        before = record[c.PREVIOUS_AT_ENDPOINT, gone]
        if after >= 0:
            record[c.PREVIOUS_AT_ENDPOINT, after] = before
        if before >= 0:
            record[c.NEXT_AT_ENDPOINT, before] = after
            return
    endpoint = record[c.ENDPOINT, gone]
    if endpoint >= 0:
        resource[c.FIRST_RECORD, endpoint] = after
    else:
        state[c.ROOT_RECORD] = after


@njit_part
def join_draft_page(state: Int64s, resource: Int32s, record: Int32s, made: int, page: int) -> None:
    """Enter a record in the list of those whose draft path ends with this page. Its reference is the caller's to take."""
    at = state[c.OFFSET + c.DRAFT] + page
    first = resource[c.FIRST_RECORD, at]
    record[c.LAST_DRAFT_PAGE, made] = page
    record[c.NEXT_AT_DRAFT, made] = first
    record[c.PREVIOUS_AT_DRAFT, made] = -1
    if first >= 0:
        record[c.PREVIOUS_AT_DRAFT, first] = made
    resource[c.FIRST_RECORD, at] = made


@njit_part
def leave_draft_page(state: Int64s, resource: Int32s, record: Int32s, gone: int) -> None:
    """Take a record out of that list."""
    if record[c.LAST_DRAFT_PAGE, gone] < 0:
        raise InvariantError("a record without a draft path gives one up")
    after = record[c.NEXT_AT_DRAFT, gone]
    before = record[c.PREVIOUS_AT_DRAFT, gone]
    if after >= 0:
        record[c.PREVIOUS_AT_DRAFT, after] = before
    if before >= 0:
        record[c.NEXT_AT_DRAFT, before] = after
    else:
        resource[c.FIRST_RECORD, state[c.OFFSET + c.DRAFT] + record[c.LAST_DRAFT_PAGE, gone]] = after
    record[c.LAST_DRAFT_PAGE, gone] = -1


@njit_in_place
def is_evictable(cache: CacheArrays, kind: int, record: int) -> bool:
    """Whether evicting this record alone is known to free a resource of that kind at once."""
    if kind == c.BASE:
        block = cache.record[c.ENDPOINT, record]
        if block < 0 or cache.node[c.FIRST_CHILD, block] >= 0 or cache.resource[c.LEASE_REFS, block] > 0:
            return False
        if not cache.state[c.EXTENDED_RECORDS]:
            return True
        return bool(cache.record[c.NEXT_AT_ENDPOINT, record] < 0 and cache.record[c.PREVIOUS_AT_ENDPOINT, record] < 0)
    if kind == c.DRAFT:
        held = cache.record[c.LAST_DRAFT_PAGE, record]
    else:
        held = cache.record[c.RECURRENT_SLOT if kind == c.RECURRENT else c.PARTIAL_SLOT, record]
    if held < 0:
        return False
    at = cache.state[c.OFFSET + kind] + held
    return bool(cache.resource[c.LEASE_REFS, at] == 0 and cache.resource[c.CACHE_REFS, at] == 1)


@njit_inlined
def _place_of(cache: CacheArrays, record: int) -> int:
    place = cache.record[c.RECENCY_PLACE, record]
    if place < 0 or place >= cache.state[c.RECENCY_END] or cache.recency[place] != record:
        raise InvariantError("a record is not at its place in the LRU order")
    return int(place)


@njit_part
def mark_evictable(cache: CacheArrays, kind: int, record: int) -> None:
    """Mark a record as evictable for a kind, or not, as it is now."""
    evictable, leaf, place = cache.evictable[kind], cache.state[c.FIRST_LEAF], _place_of(cache, record)
    marked = holds(evictable, leaf, place)
    if is_evictable(cache, kind, record) == marked:
        return
    if marked:
        discard(evictable, leaf, place)
    else:
        add(evictable, leaf, place)


@njit_inlined
def forget_evictable(cache: CacheArrays, gone: int) -> None:
    """Let a record be evictable for no kind."""
    leaf, place = cache.state[c.FIRST_LEAF], _place_of(cache, gone)
    for kind in range(cache.evictable.shape[0]):
        if holds(cache.evictable[kind], leaf, place):
            discard(cache.evictable[kind], leaf, place)


@njit_inlined
def oldest_record(cache: CacheArrays) -> int:
    """Return the least recently used record. -1: there is none."""
    place = oldest_evictable(cache, cache.evictable.shape[0] - 1)
    return int(cache.recency[place]) if place >= 0 else -1


@njit_inlined
def oldest_evictable(cache: CacheArrays, kind: int) -> int:
    """Return the place in the LRU order of the least recently used evictable record. -1: there is none."""
    place = least(cache.evictable[kind], cache.state[c.FIRST_LEAF])
    if place >= cache.state[c.RECENCY_END]:
        raise InvariantError("a place behind the end of the LRU order is marked as evictable")
    return place


@njit_part
def _link_newest(cache: CacheArrays, used: int) -> None:
    _link(cache, used, cache.state[c.NEWEST_RECORD], -1, cache.state[c.RECENCY_END])
    cache.state[c.RECENCY_END] += 1


@njit_part
def _link(cache: CacheArrays, used: int, older: int, newer: int, place: int) -> None:
    state, record = cache.state, cache.record
    record[c.OLDER, used] = older
    record[c.NEWER, used] = newer
    if older >= 0:
        record[c.NEWER, older] = used
    else:
        state[c.OLDEST_RECORD] = used
    if newer >= 0:
        record[c.OLDER, newer] = used
    else:
        state[c.NEWEST_RECORD] = used
    cache.recency[place] = used
    record[c.RECENCY_PLACE, used] = place


@njit_inlined
def _unlink(cache: CacheArrays, gone: int) -> None:
    state, record = cache.state, cache.record
    place = _place_of(cache, gone)
    older, newer = record[c.OLDER, gone], record[c.NEWER, gone]
    if older >= 0:
        record[c.NEWER, older] = newer
    else:
        state[c.OLDEST_RECORD] = newer
    if newer >= 0:
        record[c.OLDER, newer] = older
    else:
        state[c.NEWEST_RECORD] = older
    cache.recency[place] = -1


@njit_part
def _sweep(cache: CacheArrays) -> None:
    """Go on moving records down into the gaps, so that there is a place for the use that comes next."""
    state, recency, leaf = cache.state, cache.recency, cache.state[c.FIRST_LEAF]
    at, settled = state[c.SWEPT], state[c.SETTLED]
    if settled < 0 or settled > at or at > state[c.RECENCY_END] or state[c.RECENCY_END] > recency.size:
        raise InvariantError("the sweep of the LRU order is outside of it")
    for _ in range(_SWEEP):
        if at == state[c.RECENCY_END]:
            state[c.RECENCY_END] = settled
            at, settled = 0, 0
            if state[c.RECENCY_END] == 0:
                break
        moved = recency[at]
        if moved >= 0:
            if settled < at:
                recency[at] = -1
                recency[settled] = moved
                cache.record[c.RECENCY_PLACE, moved] = settled
                for kind in range(cache.evictable.shape[0]):
                    _move_mark(cache.evictable[kind], leaf, at, settled)
            settled += 1
        at += 1
    state[c.SWEPT] = at
    state[c.SETTLED] = settled
    if state[c.RECENCY_END] >= recency.size:
        raise InvariantError("the LRU order has no place left")


@njit_part
def _move_mark(evictable: Words, leaf: int, before: int, after: int) -> None:
    if holds(evictable, leaf, before):
        discard(evictable, leaf, before)
        add(evictable, leaf, after)
