"""Draft pages beside base blocks.

Draft KV at the end of a block depends on the token that follows. So a draft page belongs to a block together with its
successor: it is kept at the *successor's* node (`PAIR_PAGE`), and two records that share blocks 0..i+1 share the draft
pages of blocks 0..i by construction. The draft page of a record's last paired block has no such successor yet and is
the record's own (`LAST_DRAFT_PAGE`).

Draft paths are prefixes, so a node has a `PAIR_PAGE` only where its parent has one too (first blocks apart).
`PAIR_COUNT` of a node counts what needs its block's draft page: children with a `PAIR_PAGE`, and draft paths that end
at the block.
"""

from __future__ import annotations

from ctxcache.arguments import Int32s
from ctxcache.errors import InvariantError
from ctxcache.jit import njit_in_place, njit_inlined, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.layout import CacheArrays
from ctxcache.manager.lru import join_draft_page, leave_draft_page, mark_evictable
from ctxcache.manager.pools import hold, let_go


@njit_part
def count_paired(node: Int32s, path: Int32s) -> int:
    """Return how many leading blocks of a base path are paired by one record."""
    if path.size == 0:
        return 0
    paired, unpaired = 0, path.size  # path[paired] has a draft page for the block before it; path[unpaired] has not
    while unpaired - paired > 1:
        middle = (paired + unpaired) // 2
        if node[c.PAIR_PAGE, path[middle]] >= 0:
            paired = middle
        else:
            unpaired = middle
    if paired == 0 and node[c.PAIR_COUNT, path[0]] == 0:
        return 0
    return paired + 1


@njit_part
def last_paired_block(node: Int32s, record: Int32s, which: int) -> int:
    """Return the block where the record's draft path ends, which must not be empty.

    Base path: `[0, NUM_PAIRED_BLOCKS) paired | [NUM_PAIRED_BLOCKS, NUM_BLOCKS) base only`, the last block of which is
    ENDPOINT.
    """
    block = record[c.ENDPOINT, which]
    for _ in range(record[c.NUM_BLOCKS, which] - record[c.NUM_PAIRED_BLOCKS, which]):
        block = _parent_of(node, block)
    if block < 0:
        raise InvariantError("a draft path ends before the first block")
    return int(block)


@njit_inlined
def _parent_of(node: Int32s, block: int) -> int:
    """Return the block before one whose draft path comes from there."""
    if block < 0 or node[c.PARENT, block] < 0:
        raise InvariantError("a draft path goes on before the first block")
    return int(node[c.PARENT, block])


@njit_part
def attach_pairs(cache: CacheArrays, record: int, pages: Int32s) -> None:
    """Give a record, or lengthen, its draft path: `pages[i]` is the publisher's draft page of block i."""
    old_end, old_page = -1, -1
    if cache.record[c.NUM_PAIRED_BLOCKS, record] > 0:
        old_end = last_paired_block(cache.node, cache.record, record)
        old_page = cache.record[c.LAST_DRAFT_PAGE, record]
        leave_draft_page(cache.state, cache.resource, cache.record, record)
    cache.record[c.NUM_PAIRED_BLOCKS, record] = pages.size
    block = last_paired_block(cache.node, cache.record, record)
    join_draft_page(cache.state, cache.resource, cache.record, record, pages[pages.size - 1])
    hold(cache, c.DRAFT, pages[pages.size - 1])
    cache.node[c.PAIR_COUNT, block] += 1
    # The draft page of block i is kept at block i + 1, from the end up to where another record has paired before.
    for i in range(pages.size - 2, -1, -1):
        if cache.node[c.PAIR_PAGE, block] >= 0:
            break
        cache.node[c.PAIR_PAGE, block] = pages[i]
        hold(cache, c.DRAFT, pages[i])
        block = _parent_of(cache.node, block)
        cache.node[c.PAIR_COUNT, block] += 1
    if old_end >= 0:
        # The longer path runs through the old end, which is therefore needed still; only its own page is not.
        cache.node[c.PAIR_COUNT, old_end] -= 1
        reclaimed = cache.state[c.RECLAIMED + c.DRAFT]
        let_go(cache, c.DRAFT, old_page)
        cache.state[c.RECLAIMED + c.DRAFT] = reclaimed  # only what an eviction returns counts


@njit_part
def detach_pairs(cache: CacheArrays, record: int) -> None:
    """Let go of a record's draft path, last page first, as far as no other record needs it."""
    block = last_paired_block(cache.node, cache.record, record)
    page = cache.record[c.LAST_DRAFT_PAGE, record]
    leave_draft_page(cache.state, cache.resource, cache.record, record)
    cache.record[c.NUM_PAIRED_BLOCKS, record] = 0
    let_go(cache, c.DRAFT, page)
    cache.node[c.PAIR_COUNT, block] -= 1
    if cache.node[c.PAIR_COUNT, block] < 0:
        raise InvariantError("a block's draft page is needed less often than never")
    while cache.node[c.PAIR_COUNT, block] == 0 and cache.node[c.PAIR_PAGE, block] >= 0:
        page = cache.node[c.PAIR_PAGE, block]
        cache.node[c.PAIR_PAGE, block] = -1
        let_go(cache, c.DRAFT, page)
        block = _parent_of(cache.node, block)
        cache.node[c.PAIR_COUNT, block] -= 1


@njit_in_place
def give_up_last_pair(cache: CacheArrays, record: int) -> None:
    """Shorten a record's draft path by a block, and let go of that block's draft page.

    The page of the block before was kept for both at the block itself. It is the record's own now, and the other records'
    that need it there still.
    """
    block, page = last_paired_block(cache.node, cache.record, record), cache.record[c.LAST_DRAFT_PAGE, record]
    leave_draft_page(cache.state, cache.resource, cache.record, record)
    cache.record[c.NUM_PAIRED_BLOCKS, record] -= 1
    cache.node[c.PAIR_COUNT, block] -= 1
    if cache.node[c.PAIR_COUNT, block] < 0:
        raise InvariantError("a block's draft page is needed less often than never")
    let_go(cache, c.DRAFT, page)
    before = cache.node[c.PAIR_PAGE, block]
    if before >= 0:
        at, parent = cache.state[c.OFFSET + c.DRAFT] + before, _parent_of(cache.node, block)
        if cache.node[c.PAIR_COUNT, block] == 0:
            cache.node[c.PAIR_PAGE, block] = -1
        else:
            cache.resource[c.CACHE_REFS, at] += 1
            cache.node[c.PAIR_COUNT, parent] += 1
        join_draft_page(cache.state, cache.resource, cache.record, record, before)
    if (before >= 0) != (cache.record[c.NUM_PAIRED_BLOCKS, record] > 0):
        raise InvariantError("a draft path is not as long as its record counts")
    mark_evictable(cache, c.DRAFT, record)


@njit_in_place
def write_draft_path(cache: CacheArrays, record: int, path: Int32s) -> None:
    """Fill `path` with the record's draft pages; it is as long as the record's draft path."""
    if path.size == 0:
        return
    path[path.size - 1] = cache.record[c.LAST_DRAFT_PAGE, record]
    block = last_paired_block(cache.node, cache.record, record)
    for i in range(path.size - 2, -1, -1):
        path[i] = cache.node[c.PAIR_PAGE, block]
        block = _parent_of(cache.node, block)
