"""Publication as one transaction: new blocks into the index, one record at their end.

Everything that can be wrong is looked at before the first lasting change; the one thing found out late, that keys are
no chain, is undone. Nothing after that can fail.
"""

from __future__ import annotations

from ctxcache.core import (
    ACTIVE,
    BASE,
    CACHED,
    COMMITTED,
    EXACT_LENGTH,
    EXISTING,
    EXTENDED_RECORDS,
    KNOWN,
    NUM_BASE,
    NUM_BLOCKS,
    NUM_DRAFT,
    NUM_PAIRED_BLOCKS,
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
    SERIAL,
    Core,
    Int32s,
    Int64s,
    Words,
)
from ctxcache.eviction import enforce_record_limit
from ctxcache.index import find, find_deepest, insert, link, note_newest, remove, write_path
from ctxcache.jit import njit
from ctxcache.pairs import attach_pairs
from ctxcache.pools import hold
from ctxcache.records import new_record, refresh, touch

# Entries of the request array of `publish_endpoint`.
OFFER_ROW, OFFER_BLOCKS, OFFER_DRAFT_BLOCKS, OFFER_LENGTH = range(4)
# Answers. The negative ones are refusals.
MADE, FOUND, CHANGED = 0, 1, 2
NOT_OWN_PREFIX, NO_CHAIN, BEYOND_PAGES, SLOT_TAKEN, CORRUPT = -1, -2, -3, -4, -5


@njit
def publish_endpoint(core: Core, keys: Words, exact: Words, offer: Int64s, path: Int32s) -> tuple[int, int, int]:
    """Publish a lease's leading full blocks and record their end; return (answer, record, its serial).

    Args:
        core: the arrays.
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
    attempt = length > 0 or blocks > core.lease[PUBLISHED, row]
    answer, record = _publish(core, keys, exact, row, blocks, draft_blocks, length, path)
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
    core.lease[PUBLISHED, row] = max(core.lease[PUBLISHED, row], blocks)
    _note_keys(core, keys, row, blocks)
    serial = core.stamp[SERIAL, record]
    enforce_record_limit(core)
    return answer, record, serial


@njit
def _publish(
    core: Core, keys: Words, exact: Words, row: int, blocks: int, draft_blocks: int, length: int, path: Int32s
) -> tuple[int, int]:
    if blocks > core.lease[NUM_BASE, row] or draft_blocks > core.lease[NUM_DRAFT, row]:
        return BEYOND_PAGES, -1
    if not _is_own_prefix(core, keys, row):
        return NOT_OWN_PREFIX, -1
    standing = -1
    if length > 0:
        standing = find(core.exact_key, core.exact_slot, exact[0], exact[1])
        if standing >= 0 and core.record[EXACT_LENGTH, standing] != length:
            return NO_CHAIN, -1
        if standing < 0 and _slots_are_taken(core, row):
            return SLOT_TAKEN, -1
    matched, tip = find_deepest(core.key, core.slot, keys, blocks)
    if matched > 0 and not write_path(core, tip, path[:matched]):
        return NO_CHAIN, -1
    refusal = _index_blocks(core, keys, row, matched, blocks)
    if refusal < 0:
        return refusal, -1
    for i in range(matched, blocks):
        page = core.base_rows[row, i]
        path[i] = page
        _enter(core, page, tip)
        tip = page
    if length == 0 and core.resource[OWNER, tip] >= 0:
        standing = core.resource[OWNER, tip]
    if standing >= 0:
        touch(core, standing)
        if draft_blocks > 0 and draft_blocks > core.record[NUM_PAIRED_BLOCKS, standing]:
            attach_pairs(core, standing, core.draft_rows[row, :draft_blocks])
            return CHANGED, standing
        return FOUND, standing
    made = new_record(core, tip)
    if core.state[EXTENDED_RECORDS]:
        _fill_record(core, made, exact, row, blocks, draft_blocks, length)
    note_newest(core, tip, made)
    return MADE, made


@njit
def _is_own_prefix(core: Core, keys: Words, row: int) -> bool:
    """Whether the known blocks of the lease have the keys that they had: a leased page's key outlives its record."""
    for i in range(core.lease[KNOWN, row]):
        page = core.base_rows[row, i]
        if core.key[page, 1] != keys[i, 1] or core.key[page, 0] != keys[i, 0]:
            return False
    return True


@njit
def _note_keys(core: Core, keys: Words, row: int, blocks: int) -> None:
    """Settle the identity of blocks just published: also pages that are no canonical ones remember their keys."""
    for i in range(core.lease[KNOWN, row], blocks):
        page = core.base_rows[row, i]
        if core.resource[CACHED, page] == 0:
            core.key[page] = keys[i]
    core.lease[KNOWN, row] = max(core.lease[KNOWN, row], blocks)


@njit
def _slots_are_taken(core: Core, row: int) -> bool:
    slot = core.lease[RESERVED, row]
    return core.resource[CACHED, core.state[OFFSET + RECURRENT] + slot] > 0


@njit
def _index_blocks(core: Core, keys: Words, row: int, first: int, end: int) -> int:
    """Enter the lease's pages of blocks [first, end) in the index under their keys; all, or none and a refusal."""
    refusal = 0
    done = first
    while done < end:
        page = core.base_rows[row, done]
        if core.resource[CACHED, page] > 0 or core.resource[ACTIVE, page] == 0:
            refusal = CORRUPT
            break
        if not insert(core.key, core.slot, page, keys[done, 0], keys[done, 1]):
            refusal = NO_CHAIN
            break
        done += 1
    if refusal < 0:
        for i in range(first, done):
            remove(core.key, core.slot, core.base_rows[row, i])
    return refusal


@njit
def _enter(core: Core, page: int, parent: int) -> None:
    if core.node.shape[0] > PAIR_PAGE:
        core.node[PAIR_PAGE, page] = -1
        core.node[PAIR_COUNT, page] = 0
    link(core, page, parent)
    hold(core, BASE, page)
    if parent >= 0 and core.resource[OWNER, parent] >= 0:
        refresh(core, BASE, core.resource[OWNER, parent])


@njit
def _fill_record(core: Core, made: int, exact: Words, row: int, blocks: int, draft_blocks: int, length: int) -> None:
    record = core.record
    record[NUM_BLOCKS, made] = blocks
    record[NUM_PAIRED_BLOCKS, made] = 0
    record[EXACT_LENGTH, made] = length
    if length > 0:
        insert(core.exact_key, core.exact_slot, made, exact[0], exact[1])
        if core.anchor.shape[0] > 0:
            core.anchor[made] = exact[2:4]
        for kind in (RECURRENT, PARTIAL):
            slot = core.lease[RESERVED + kind - RECURRENT, row]
            if slot >= 0:
                record[RECURRENT_SLOT if kind == RECURRENT else PARTIAL_SLOT, made] = slot
                core.resource[OWNER, core.state[OFFSET + kind] + slot] = made
                hold(core, kind, slot)
    if draft_blocks > 0:
        attach_pairs(core, made, core.draft_rows[row, :draft_blocks])
