"""Publication as one transaction: new blocks into the index, one record at their end.

Everything that can be wrong is looked at before the first lasting change; the one thing found out late, that keys are
no chain, is undone. Nothing after that can fail.
"""

from __future__ import annotations

from ctxcache.arguments import Int32s, Int64s, Words
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager.block_index import find, find_deepest, insert, link, note_newest, remove, write_path
from ctxcache.manager.draft_pages import attach_pairs
from ctxcache.manager.eviction import enforce_record_limit
from ctxcache.manager.layout import (
    ACTIVE,
    BASE,
    CACHED,
    COMMITTED,
    EXACT_LENGTH,
    EXISTING,
    EXTENDED_RECORDS,
    HAS_PAIRS,
    KNOWN,
    NUM_BASE,
    NUM_BLOCKS,
    NUM_DRAFT,
    NUM_PAIRED_BLOCKS,
    NUM_STRADDLING,
    OFFSET,
    OWNER,
    PAIR_COUNT,
    PAIR_PAGE,
    PAIRED_COMMITS,
    PARTIAL,
    PARTIAL_SLOT,
    PUBLISHED,
    RECURRENT,
    RECURRENT_SLOT,
    REFUSED,
    RESERVED,
    STRADDLES,
    Arena,
    Core,
)
from ctxcache.manager.lru import new_record, refresh, touch
from ctxcache.manager.pools import copy_pages, hold
from ctxcache.manager.prefetch import fetch_slot

# Entries of the request array of `publish_endpoint`.
OFFER_ROW, OFFER_BLOCKS, OFFER_DRAFT_BLOCKS, OFFER_LENGTH = range(4)
# Answers. The negative ones are refusals.
MADE, FOUND, CHANGED = 0, 1, 2
NOT_OWN_PREFIX, NO_CHAIN, BEYOND_PAGES, SLOT_TAKEN, CORRUPT = -1, -2, -3, -4, -5

_SLOTS_AHEAD = 8  # blocks between asking for a slot's memory and writing there


@njit_in_place
def publish_endpoint(
    core: Core, arena: Arena, keys: Words, exact: Words, offer: Int64s, path: Int32s
) -> tuple[int, int, int]:
    """Publish a lease's leading full blocks and record their end; return (answer, record, its serial).

    Args:
        core: the cache.
        arena: the leases.
        keys: of the sequence's blocks, at least as many as are published and as the lease is known to have.
        exact: exact-prefix digest of a checkpoint, two words, and the key of its last full block (zeros before the
            first), two words; ignored where `OFFER_LENGTH` is 0.
        offer: see the names above; `OFFER_LENGTH` is a checkpoint's exact length, or 0.
        path: `int32[OFFER_BLOCKS]`, receives the canonical pages. Meaningless after a refusal.
    """
    row, blocks, draft_blocks, length = (
        offer[OFFER_ROW],
        offer[OFFER_BLOCKS],
        offer[OFFER_DRAFT_BLOCKS],
        offer[OFFER_LENGTH],
    )
    attempt = length > 0 or blocks > arena.lease[PUBLISHED, row]
    answer, record = _publish(core, arena, keys, exact, row, blocks, draft_blocks, length, path)
    if answer < 0:
        if attempt:
            core.state[REFUSED] += 1
        return answer, -1, 0
    if answer != FOUND:
        core.state[COMMITTED] += 1
        if draft_blocks > 0:
            core.state[PAIRED_COMMITS] += 1
    elif attempt:
        core.state[EXISTING] += 1
    arena.lease[PUBLISHED, row] = max(arena.lease[PUBLISHED, row], blocks)
    _note_keys(core, arena, keys, row, blocks)
    _note_straddling(core, arena, row, path, draft_blocks)
    serial = core.serial[record]
    enforce_record_limit(core)
    return answer, record, serial


@njit_in_place
def _publish(
    core: Core,
    arena: Arena,
    keys: Words,
    exact: Words,
    row: int,
    blocks: int,
    draft_blocks: int,
    length: int,
    path: Int32s,
) -> tuple[int, int]:
    if blocks > arena.lease[NUM_BASE, row] or draft_blocks > arena.lease[NUM_DRAFT, row]:
        return BEYOND_PAGES, -1
    if not _is_own_prefix(core.key, keys, arena.base_rows[row, : arena.lease[KNOWN, row]]):
        return NOT_OWN_PREFIX, -1
    standing = -1
    if length > 0:
        standing = find(core.exact_key, core.exact_slot, exact[0], exact[1])
        if standing >= 0 and core.record[EXACT_LENGTH, standing] != length:
            return NO_CHAIN, -1
        if standing < 0 and _slot_is_taken(core, arena.lease[RESERVED, row]):
            return SLOT_TAKEN, -1
    pages = arena.base_rows[row, :blocks]
    matched, tip = find_deepest(core.key, core.slot, keys, blocks)
    if matched > 0 and not write_path(core.node, tip, path[:matched]):
        return NO_CHAIN, -1
    refusal = _index_blocks(core, keys[matched:blocks], pages[matched:])
    if refusal < 0:
        return refusal, -1
    if matched < blocks:
        copy_pages(pages[matched:], path[matched:])
        _enter_blocks(core, pages[matched:], tip)
        tip = pages[blocks - 1]
    if length == 0 and core.resource[OWNER, tip] >= 0:
        standing = core.resource[OWNER, tip]
    if standing >= 0:
        touch(core, standing)
        if draft_blocks > 0 and draft_blocks > core.record[NUM_PAIRED_BLOCKS, standing]:
            attach_pairs(core, standing, arena.draft_rows[row, :draft_blocks])
            return CHANGED, standing
        return FOUND, standing
    made = new_record(core, tip)
    if core.state[EXTENDED_RECORDS]:
        _fill_record(core, arena, made, exact, row, blocks, draft_blocks, length)
    note_newest(core.node, tip, made)
    return MADE, made


@njit_part
def _is_own_prefix(key: Words, keys: Words, known: Int32s) -> bool:
    """Whether the known blocks of the lease have the keys that they had: a leased page's key outlives its record."""
    for i in range(known.size):  # noqa: SIM110 - compiled code has no generators
        if key[known[i], 1] != keys[i, 1] or key[known[i], 0] != keys[i, 0]:
            return False
    return True


@njit_part
def _note_keys(core: Core, arena: Arena, keys: Words, row: int, blocks: int) -> None:
    """Settle the identity of blocks just published: also pages that are no canonical ones remember their keys."""
    for i in range(arena.lease[KNOWN, row], blocks):
        page = arena.base_rows[row, i]
        if core.resource[CACHED, page] == 0:
            core.key[page, 0] = keys[i, 0]
            core.key[page, 1] = keys[i, 1]
    arena.lease[KNOWN, row] = max(arena.lease[KNOWN, row], blocks)


@njit_part
def _note_straddling(core: Core, arena: Arena, row: int, path: Int32s, draft_blocks: int) -> None:
    """Note that a lease has published behind pages of others: those may be freed while its own, further on, are leased."""
    if arena.lease[STRADDLES, row] == 1:
        return
    behind_others, straddles = False, False
    for i in range(path.size):
        own = arena.base_rows[row, i] == path[i]
        straddles |= own and behind_others
        behind_others |= not own
    for i in range(1, draft_blocks):
        straddles |= core.node[PAIR_PAGE, path[i]] != arena.draft_rows[row, i - 1]
    if straddles:
        arena.lease[STRADDLES, row] = 1
        core.state[NUM_STRADDLING] += 1


@njit_part
def _slot_is_taken(core: Core, slot: int) -> bool:
    return bool(core.resource[CACHED, core.state[OFFSET + RECURRENT] + slot] > 0)


@njit_part
def _index_blocks(core: Core, keys: Words, pages: Int32s) -> int:
    """Enter pages in the index under their keys; all, or none and a refusal."""
    key, slot, resource = core.key, core.slot, core.resource
    refusal = 0
    done = 0
    while done < pages.size:
        page = pages[done]
        if done + _SLOTS_AHEAD < pages.size:
            fetch_slot(slot, keys[done + _SLOTS_AHEAD, 1])
        if resource[CACHED, page] > 0 or resource[ACTIVE, page] == 0:
            refusal = CORRUPT
            break
        if not insert(key, slot, page, keys[done, 0], keys[done, 1]):
            refusal = NO_CHAIN
            break
        done += 1
    if refusal < 0:
        for i in range(done):
            remove(key, slot, pages[i])
    return refusal


@njit_part
def _enter_blocks(core: Core, pages: Int32s, parent: int) -> None:
    """Hang indexed pages into the tree, one behind the other, below `parent`. Leases hold them, so none is idle."""
    state, node, resource = core.state, core.node, core.resource
    tip = parent
    for page in pages:
        if state[HAS_PAIRS]:
            node[PAIR_PAGE, page] = -1
            node[PAIR_COUNT, page] = 0
        link(state, node, page, tip)
        resource[CACHED, page] = 1
        tip = page
    if parent >= 0 and resource[OWNER, parent] >= 0:
        refresh(core, BASE, resource[OWNER, parent])


@njit_part
def _fill_record(
    core: Core, arena: Arena, made: int, exact: Words, row: int, blocks: int, draft_blocks: int, length: int
) -> None:
    record = core.record
    record[NUM_BLOCKS, made] = blocks
    record[NUM_PAIRED_BLOCKS, made] = 0
    record[EXACT_LENGTH, made] = length
    if length > 0:
        insert(core.exact_key, core.exact_slot, made, exact[0], exact[1])
        core.exact_key[made, 2] = exact[2]
        core.exact_key[made, 3] = exact[3]
        for kind in (RECURRENT, PARTIAL):
            slot = arena.lease[RESERVED + kind - RECURRENT, row]
            if slot >= 0:
                record[RECURRENT_SLOT if kind == RECURRENT else PARTIAL_SLOT, made] = slot
                core.resource[OWNER, core.state[OFFSET + kind] + slot] = made
                hold(core, kind, slot)
    if draft_blocks > 0:
        attach_pairs(core, made, arena.draft_rows[row, :draft_blocks])
