"""The manager's memory: a structure of arrays that compiled code works on, and the names of its rows.

Every array is allocated once, for the whole pool; only those of the leases grow, and are apart for that. A base page id
is also the id of the block (tree node) that the page is canonical for. `-1` stands for "none" in every array of ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s, Int64s, Words
from ctxcache.ids import ResourceType
from ctxcache.manager.bitset import allocate_bits, first_leaf_for
from ctxcache.manager.traits import DeploymentTraits

# Kinds of resources: the order of the four pools in every array that has a row or an entry for each.
# int64 values, not literals: Numba would compile everything that takes a literal kind once for each.
NUM_RESOURCE_KINDS = 4
BASE, DRAFT, RECURRENT, PARTIAL = cast("tuple[int, int, int, int]", tuple(np.arange(NUM_RESOURCE_KINDS)))
RESOURCE_KIND = {
    ResourceType.BASE_KV_PAGE: BASE,
    ResourceType.DRAFT_KV_PAGE: DRAFT,
    ResourceType.RECURRENT_SNAPSHOT: RECURRENT,
    ResourceType.PARTIAL_KV_SNAPSHOT: PARTIAL,
}

# Rows of `CacheArrays.node`, by base page id. The last two exist only where drafts are paired.
PARENT, FIRST_CHILD, NEXT_SIBLING, PREVIOUS_SIBLING = range(4)
PAIR_PAGE = 4  # draft page of the *parent's* block, computed with this block as successor
PAIR_COUNT = 5  # children with a PAIR_PAGE, plus records whose draft path ends at this block
NUM_NODE_ROWS, NUM_PAIRED_NODE_ROWS = 4, 6

# Rows of `CacheArrays.resource`. A pool's entries begin at `state[OFFSET + kind]`; base pages begin at 0.
LEASE_REFS = 0  # leases that hold it
CACHE_REFS = 1  # holds of the cache: 1 for an indexed base page, records and pairs for the others
FIRST_RECORD = (
    2  # head of the list of records that end at the base page, have the draft page last, or have the snapshot
)
FREE_STACK = 3  # per pool: ids that nobody holds, the next one to give last
NUM_RESOURCE_ROWS = 4

# Rows of `CacheArrays.record`. Kinds without checkpoints and drafts have the first six only.
ENDPOINT = 0  # last block of the base path
OLDER, NEWER = 1, 2  # neighbours in LRU order; NEWER also chains free records
RECENCY_PLACE = 3  # its place in `CacheArrays.recency`
SHORTENED_IN = 4  # the eviction (`state[EVICTION]`) that shortened it last
ABOVE = 5  # without checkpoints: the next entry on the way to the first block
NUM_BLOCKS = 6  # of the base path, which ends at ENDPOINT: known, so that a draft path's end is found from there
NUM_PAIRED_BLOCKS, LAST_DRAFT_PAGE = 7, 8  # of the draft path: how long, and its last page
EXACT_LENGTH = 9  # of a checkpoint in tokens; 0: none
RECURRENT_SLOT, PARTIAL_SLOT = 10, 11  # next to each other, as their kinds are
NEXT_AT_ENDPOINT, PREVIOUS_AT_ENDPOINT, NEXT_AT_DRAFT, PREVIOUS_AT_DRAFT = 12, 13, 14, 15
NUM_PLAIN_RECORD_ROWS, NUM_RECORD_ROWS = 6, 16

IS_MARK = -1
"""Serial of an entry that is no record: it only keeps the last use of the blocks before it apart. See `lru`."""

# Entries of `CacheArrays.state`. The first groups have one entry per kind of resource.
# IDLE resources are cached and not leased: with the FREE ones all that a demand can be met from.
FREE, IDLE, CAPACITY, OFFSET, RECLAIMED = (NUM_RESOURCE_KINDS * i for i in range(5))
(
    RECENCY_END,  # places of `CacheArrays.recency` from here on were not used yet, or are again
    SWEPT,  # places below were looked at by the sweep under way
    SETTLED,  # places below were filled by it
    FIRST_LEAF,  # of each set of `CacheArrays.evictable`; see `ctxcache.manager.bitset`
    LAST_SERIAL,
    NUM_RECORDS,
    MAX_RECORDS,
    OLDEST_RECORD,
    NEWEST_RECORD,
    FREE_RECORD,
    ROOT_RECORD,  # first record that ends before the first full block
    NUM_NODES,
    HAS_CHECKPOINTS,
    HAS_PAIRS,
    EXTENDED_RECORDS,
    NUM_LEASES,
    FREE_LEASE,
    FRESH_LEASES,  # rows that were never given out begin here
    MARK,
    COMMITTED,
    EXISTING,
    REFUSED,
    PAIRED_COMMITS,
    EVICTED,
    SHORTENED,
    EVICTION,  # number of the eviction that is under way, or was last
    NUM_STRADDLING,
) = range(NUM_RESOURCE_KINDS * 5, NUM_RESOURCE_KINDS * 5 + 27)
NUM_STATE_ENTRIES = NUM_RESOURCE_KINDS * 5 + 27

# Rows of `LeaseArrays.fields`, by lease row.
GENERATION, LIVE, NUM_BASE, NUM_DRAFT, PAIRED = range(5)  # PAIRED: runs a paired draft
RESTORED = 5  # + 0 recurrent, + 1 partial: slots that the lease was restored from
RESERVED = 7  # + 0 recurrent, + 1 partial: slots reserved for a capture
RESERVED_LENGTH = 9
PUBLISHED = 10  # full blocks that the lease itself has published
KNOWN = 11  # full blocks whose identity is settled: reused or published, with `key` of its page
CHECKPOINTS_ALLOWED = 12
LEASE_MARK = 13  # `state[MARK]` of the last batch call that named the row; also chains free rows
STRADDLES = 14  # 1: it has published behind blocks whose canonical pages are others'; `state[NUM_STRADDLING]` counts
STARTED_FROM, STARTED_SERIAL = 15, 16  # checkpoint that it was restored from; a serial is kept modulo `MODULUS`
OWN_RECORD, OWN_SERIAL = 17, 18  # without checkpoints: the record that it has made last
NUM_LEASE_ROWS = 19

MODULUS = 1 << 30
"""Counts that are kept in an int32 begin again here."""

GHOSTS = 4096
"""Entries of the direct-mapped memory of lately evicted keys."""

_SPARE_PLACES = 64
_SLOTS_PER_KEY = 1.6  # open addressing at a load of 0.625 when every page is indexed
_INITIAL_LEASES, _INITIAL_LEASE_PAGES = 16, 16


class CacheArrays(NamedTuple):
    """All that the cache knows; see the row names above.

    `N` base pages, `R` entries at most: with checkpoints one more than the limit of records (one is made before the oldest
    goes), else one for every block, for there are marks too. The rows of
    `node`, `resource` and `record` lie side by side in memory: what is known of one block or record is in one or two cache
    lines, and the next one to evict is seldom near the last.
    """

    state: Int64s
    key: Words  # [N, 2] key of each indexed block, and of each known block of a lease, (hi, lo)
    slot: Int32s  # open addressing: block by key; see `ctxcache.manager.block_index`
    node: Int32s  # [4 or 6, N] the tree of blocks
    resource: Int32s  # [4, all resources] holds, and the pools' free stacks
    record: Int32s  # [6 or 16, R]
    serial: Int64s  # [R] number of the publication that made each record; IS_MARK: a mark; 0: unused
    recency: Int32s  # entries by last use, the oldest first, with gaps (-1); see `ctxcache.manager.lru`
    evictable: (
        Words  # [2 or 5, words] per kind the places in `recency` of records that free one, last those of all records
    )
    exact_key: Words  # [R or 0, 4] of each checkpoint: exact-prefix digest, and key of its last full block
    exact_slot: Int32s  # open addressing: record by exact-prefix digest
    anchor_slot: Int32s  # without pages, open addressing: of the records with one last full block the first, by its key
    ghost: Words  # [GHOSTS] low word of lately evicted keys, at index `low word % GHOSTS`


class LeaseArrays(NamedTuple):
    """What leases hold: `A` rows, of which some are given out.

    The pages of a row are `base_pages[row, :NUM_BASE]` and `draft_pages[row, :NUM_DRAFT]`, in logical order.
    """

    fields: Int32s  # [19, A]
    base_pages: Int32s  # [A, width]
    draft_pages: Int32s  # [A, width]


def allocate_cache(traits: DeploymentTraits, capacities: tuple[int, int, int, int], max_records: int) -> CacheArrays:
    """Allocate empty pools of the given capacities, in the order of the kinds of resources."""
    num_pages, _, num_recurrent, _ = capacities
    checkpoints, pairs = traits.has_checkpoints, traits.has_pairs
    extended = checkpoints or pairs
    num_records = (min(max_records, num_recurrent) if checkpoints else num_pages) + 1
    num_exact = num_records if checkpoints else 0
    places = num_places(num_records)
    cache = CacheArrays(
        state=np.zeros(NUM_STATE_ENTRIES, np.int64),
        key=np.zeros((num_pages, 2), np.uint64),
        slot=_empty_slots(num_pages),
        node=_side_by_side(NUM_PAIRED_NODE_ROWS if pairs else NUM_NODE_ROWS, num_pages),
        resource=_side_by_side(NUM_RESOURCE_ROWS, sum(capacities)),
        record=_side_by_side(NUM_RECORD_ROWS if extended else NUM_PLAIN_RECORD_ROWS, num_records),
        serial=np.zeros(num_records, np.int64),
        recency=np.full(places, -1, np.int32),
        evictable=allocate_bits(1 + (NUM_RESOURCE_KINDS if extended else 1), places),
        exact_key=np.zeros((num_exact, 4), np.uint64),
        exact_slot=_empty_slots(num_exact),
        anchor_slot=_empty_slots(0 if traits.has_pages else num_exact),
        ghost=np.zeros(GHOSTS, np.uint64),
    )
    if pairs:
        cache.node[PAIR_COUNT] = 0
    cache.resource[[LEASE_REFS, CACHE_REFS]] = 0
    cache.record[NEWER, : num_records - 1] = np.arange(1, num_records)
    state = cache.state
    for name in (OLDEST_RECORD, NEWEST_RECORD, ROOT_RECORD, FREE_LEASE):
        state[name] = -1
    state[[MAX_RECORDS, HAS_CHECKPOINTS, HAS_PAIRS, EXTENDED_RECORDS]] = max_records, checkpoints, pairs, extended
    state[FIRST_LEAF] = first_leaf_for(places)
    offset = 0
    for index, capacity in enumerate(capacities):
        state[[FREE + index, CAPACITY + index, OFFSET + index]] = capacity, capacity, offset
        cache.resource[FREE_STACK, offset : offset + capacity] = np.arange(capacity - 1, -1, -1)
        offset += capacity
    return cache


def num_places(num_records: int) -> int:
    """Return how long `CacheArrays.recency` has to be for so many records; `ctxcache.manager.lru` says why."""
    return 2 * num_records + _SPARE_PLACES


def _side_by_side(rows: int, columns: int) -> Int32s:
    """Return `int32[rows, columns]` of -1 whose columns are contiguous.

    There are two columns at least: with fewer, rows are contiguous too, which to compiled code is another type of array.
    """
    return np.full((max(columns, 2), rows), -1, np.int32).T


def allocate_leases(traits: DeploymentTraits) -> LeaseArrays:
    """Allocate room for a few leases."""
    return LeaseArrays(
        fields=_unused_leases(_INITIAL_LEASES),
        base_pages=np.empty((_INITIAL_LEASES, _INITIAL_LEASE_PAGES), np.int32),
        draft_pages=np.empty((_INITIAL_LEASES, _INITIAL_LEASE_PAGES if traits.has_pairs else 0), np.int32),
    )


def with_more_room(leases: LeaseArrays, num_leases: int, num_base_pages: int, num_draft_pages: int) -> LeaseArrays:
    """Return arrays with the same leases and at least so many rows and columns, doubling."""
    rows = _doubled(leases.fields.shape[1], num_leases)
    fields = _unused_leases(rows)
    fields[:, : leases.fields.shape[1]] = leases.fields
    return LeaseArrays(
        fields=fields,
        base_pages=_enlarged(leases.base_pages, rows, _doubled(leases.base_pages.shape[1], num_base_pages)),
        draft_pages=_enlarged(leases.draft_pages, rows, _doubled(leases.draft_pages.shape[1], num_draft_pages)),
    )


def _unused_leases(rows: int) -> Int32s:
    fields = np.full((NUM_LEASE_ROWS, rows), -1, np.int32)
    fields[[GENERATION, LIVE]] = 0
    return fields


def _empty_slots(num_ids: int) -> Int32s:
    """Return a hash table for ids below `num_ids`; what its entries mean is said in `ctxcache.manager.block_index`."""
    slots = np.full(max(8, int(num_ids * _SLOTS_PER_KEY)) + 1, -1, np.int32)
    slots[-1] = max(1, (num_ids - 1).bit_length())
    return slots


def _doubled(present: int, wanted: int) -> int:
    size = max(present, 1) if wanted else present
    while size < wanted:
        size *= 2
    return size


def _enlarged(array: NDArray[Any], rows: int, width: int) -> NDArray[Any]:
    larger = np.zeros((rows, width), array.dtype)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger
