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
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager.layout import (
    DRAFT,
    ENDPOINT,
    FIRST_CHILD,
    LAST_DRAFT_PAGE,
    NEWEST,
    NEXT_AT_ENDPOINT,
    NEXT_SIBLING,
    NUM_BLOCKS,
    NUM_PAIRED_BLOCKS,
    OWNER,
    PAIR_COUNT,
    PAIR_PAGE,
    PARENT,
    RECLAIMED,
    Core,
)
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
        if node[PAIR_PAGE, path[middle]] >= 0:
            paired = middle
        else:
            unpaired = middle
    if paired == 0 and node[PAIR_COUNT, path[0]] == 0:
        return 0
    return paired + 1


@njit_part
def last_paired_block(node: Int32s, record: Int32s, which: int) -> int:
    """Return the block where the record's draft path ends, which must not be empty."""
    block = record[ENDPOINT, which]
    for _ in range(record[NUM_BLOCKS, which] - record[NUM_PAIRED_BLOCKS, which]):
        block = node[PARENT, block]
    return int(block)


@njit_part
def attach_pairs(core: Core, record: int, pages: Int32s) -> None:
    """Give a record, or lengthen, its draft path: `pages[i]` is the publisher's draft page of block i."""
    old_end, old_page = -1, -1
    if core.record[NUM_PAIRED_BLOCKS, record] > 0:
        old_end = last_paired_block(core.node, core.record, record)
        old_page = core.record[LAST_DRAFT_PAGE, record]
        leave_draft_page(core.state, core.resource, core.record, record)
    core.record[NUM_PAIRED_BLOCKS, record] = pages.size
    block = last_paired_block(core.node, core.record, record)
    join_draft_page(core.state, core.resource, core.record, record, pages[pages.size - 1])
    hold(core, DRAFT, pages[pages.size - 1])
    core.node[PAIR_COUNT, block] += 1
    for i in range(pages.size - 2, -1, -1):
        if core.node[PAIR_PAGE, block] >= 0:
            break
        core.node[PAIR_PAGE, block] = pages[i]
        hold(core, DRAFT, pages[i])
        block = core.node[PARENT, block]
        core.node[PAIR_COUNT, block] += 1
    if old_end >= 0:
        # The longer path runs through the old end, which is therefore needed still; only its own page is not.
        core.node[PAIR_COUNT, old_end] -= 1
        reclaimed = core.state[RECLAIMED + DRAFT]
        let_go(core, DRAFT, old_page)
        core.state[RECLAIMED + DRAFT] = reclaimed  # only what an eviction returns counts


@njit_part
def detach_pairs(core: Core, record: int) -> None:
    """Let go of a record's draft path, last page first, as far as no other record needs it."""
    block = last_paired_block(core.node, core.record, record)
    page = core.record[LAST_DRAFT_PAGE, record]
    leave_draft_page(core.state, core.resource, core.record, record)
    core.record[NUM_PAIRED_BLOCKS, record] = 0
    let_go(core, DRAFT, page)
    core.node[PAIR_COUNT, block] -= 1
    while core.node[PAIR_COUNT, block] == 0 and core.node[PAIR_PAGE, block] >= 0:
        page = core.node[PAIR_PAGE, block]
        core.node[PAIR_PAGE, block] = -1
        let_go(core, DRAFT, page)
        block = core.node[PARENT, block]
        core.node[PAIR_COUNT, block] -= 1


@njit_in_place
def write_draft_path(core: Core, record: int, path: Int32s) -> None:
    """Fill `path` with the record's draft pages; it is as long as the record's draft path."""
    if path.size == 0:
        return
    path[path.size - 1] = core.record[LAST_DRAFT_PAGE, record]
    block = last_paired_block(core.node, core.record, record)
    for i in range(path.size - 2, -1, -1):
        path[i] = core.node[PAIR_PAGE, block]
        block = core.node[PARENT, block]


@njit_part
def newest_paired_through(core: Core, block: int, depth: int) -> int:
    """Return the record made last of those that pair `block`, the last of `depth` blocks. There must be one.

    Mostly that is the newest record through the block. Where a base-only record is newer, the part of the tree below
    that is paired is searched, without the branches that hold nothing newer than what was found.
    """
    newest = core.node[NEWEST, block]
    if newest >= 0 and core.record[NUM_PAIRED_BLOCKS, newest] >= depth:
        return int(newest)
    best = _newest_pairing_ending_at(core, block, depth, -1)
    at = core.node[FIRST_CHILD, block]
    while at >= 0:
        newest = core.node[NEWEST, at]
        hopeless = best >= 0 and newest >= 0 and core.serial[newest] < core.serial[best]
        below = -1
        if not hopeless:
            # A record may end below with a draft path that ends at or after `block`, whatever lies between.
            best = _newest_pairing_ending_at(core, at, depth, best)
            below = core.node[FIRST_CHILD, at]
        while below < 0 and at != block:
            below = core.node[NEXT_SIBLING, at]
            if below < 0:
                at = core.node[PARENT, at]
        if at == block:
            break
        at = below
    return int(best)


@njit_part
def _newest_pairing_ending_at(core: Core, block: int, depth: int, best: int) -> int:
    record = core.resource[OWNER, block]
    while record >= 0:
        if core.record[NUM_PAIRED_BLOCKS, record] >= depth and (best < 0 or core.serial[record] > core.serial[best]):
            best = record
        record = core.record[NEXT_AT_ENDPOINT, record]
    return int(best)
