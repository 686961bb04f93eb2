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
from ctxcache.manager.lru import join_draft_page, leave_draft_page
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
def write_draft_path(cache: CacheArrays, record: int, path: Int32s) -> None:
    """Fill `path` with the record's draft pages; it is as long as the record's draft path."""
    if path.size == 0:
        return
    path[path.size - 1] = cache.record[c.LAST_DRAFT_PAGE, record]
    block = last_paired_block(cache.node, cache.record, record)
    for i in range(path.size - 2, -1, -1):
        path[i] = cache.node[c.PAIR_PAGE, block]
        block = _parent_of(cache.node, block)


@njit_part
def newest_paired_through(cache: CacheArrays, block: int, depth: int) -> int:
    """Return the record made last of those that pair `block`, the last of `depth` blocks. There must be one.

    Mostly that is the newest record through the block. Where a base-only record is newer, the part of the tree below
    that is paired is searched, without the branches that hold nothing newer than what was found.
    """
    newest = cache.node[c.NEWEST, block]
    if newest >= 0 and cache.record[c.NUM_PAIRED_BLOCKS, newest] >= depth:
        return int(newest)
    best = _newest_pairing_ending_at(cache, block, depth, -1)
    at = cache.node[c.FIRST_CHILD, block]
    while at >= 0:
        newest = cache.node[c.NEWEST, at]
        hopeless = best >= 0 and newest >= 0 and cache.serial[newest] < cache.serial[best]
        below = -1
        if not hopeless:
            # A record may end below with a draft path that ends at or after `block`, whatever lies between.
            best = _newest_pairing_ending_at(cache, at, depth, best)
            below = cache.node[c.FIRST_CHILD, at]
        while below < 0 and at != block:
            below = cache.node[c.NEXT_SIBLING, at]
            if below < 0:
                at = cache.node[c.PARENT, at]
        if at == block:
            break
        at = below
    return int(best)


@njit_part
def _newest_pairing_ending_at(cache: CacheArrays, block: int, depth: int, best: int) -> int:
    record = cache.resource[c.FIRST_RECORD, block]
    while record >= 0:
        if cache.record[c.NUM_PAIRED_BLOCKS, record] >= depth and (
            best < 0 or cache.serial[record] > cache.serial[best]
        ):
            best = record
        record = cache.record[c.NEXT_AT_ENDPOINT, record]
    return int(best)
