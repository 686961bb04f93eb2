"""Publication: a lease's leading blocks into the index, one record at their end. Whole, or not at all.

    blocks of the sequence:  [0, matched) indexed already: canonical pages, perhaps another lease's
                             [matched, blocks) new: the lease's own pages become canonical
                             [blocks, pages of the lease) not published, private

Everything that can be wrong is looked at before the first lasting change; the one thing found out late, that keys are
no chain, is undone. Nothing after that can fail.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctxcache.arguments import Int32s, Words, as_flag, as_integer, as_keys
from ctxcache.errors import ContractError, InvariantError
from ctxcache.ids import PublishStatus
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.block_index import find, find_deepest, insert, remove
from ctxcache.manager.block_tree import link, write_path
from ctxcache.manager.checkpoints import join_anchor
from ctxcache.manager.draft_pages import attach_pairs, detach_pairs
from ctxcache.manager.eviction import evict_beyond
from ctxcache.manager.layout import CacheArrays, LeaseArrays
from ctxcache.manager.lease_table import LeaseTable, check_row
from ctxcache.manager.lru import (
    drop_entry,
    forget_evictable,
    keep_apart,
    make_mark,
    make_record,
    mark_evictable,
    new_mark,
    touch,
    use_path_to,
)
from ctxcache.manager.pools import copy_pages, hold
from ctxcache.manager.prefetch import fetch_slot
from ctxcache.manager.record_views import RecordViews
from ctxcache.manager.results import CacheRequestLease, PublishResult

# Answers. The negative ones are refusals.
MADE, FOUND, CHANGED = 0, 1, 2
NOT_OWN_PREFIX, NO_CHAIN, BEYOND_PAGES, SLOT_TAKEN = -1, -2, -3, -4

_REFUSALS = {
    NOT_OWN_PREFIX: "the keys differ from those of blocks that the lease reused or published; pass its own sequence's keys",
    NO_CHAIN: "the keys are not one chain behind what is published; hash the whole sequence in one go",
    BEYOND_PAGES: "that is more than the lease has pages; publish only what lies within them",
    SLOT_TAKEN: "the reserved slots hold a checkpoint published before; retire them and reserve again",
}
_NO_EXACT = np.zeros(4, np.uint64)
_INSERTS_AHEAD = 8  # blocks between asking for a slot's memory and writing there


class Offer(NamedTuple):
    """What a lease offers to the cache. Compiled code gets it as a plain tuple, which it takes in faster, and names it again.

    Attributes:
        row: of the lease.
        num_blocks: leading full blocks to publish.
        num_draft_blocks: those of them that are paired with draft pages.
        exact_length: of a checkpoint that holds the state there; 0 without one.
        moves_own: 1 where the record that the lease made before goes.
    """

    row: int
    num_blocks: int
    num_draft_blocks: int
    exact_length: int
    moves_own: int


class Publication(NamedTuple):
    """What became of an offer: one of the answers above, the record at its end (-1), and that record's serial."""

    answer: int
    record: int
    serial: int


def publish_blocks(
    table: LeaseTable,
    records: RecordViews,
    lease: CacheRequestLease,
    keys: Words,
    resident_state_length: int,
    draft_state_length: int,
    *,
    moves_own_record: bool,
) -> PublishResult:
    """Publish the full blocks of a lease within so many tokens."""
    traits = table.traits
    if traits.has_checkpoints:
        raise ContractError(f"a {traits.kind.name} deployment publishes checkpoints; call publish_checkpoint")
    row = table.row_of(lease)
    resident = as_integer("resident_state_length", resident_state_length)
    draft = as_integer("draft_state_length", draft_state_length)
    if draft and table.arrays.fields[c.PAIRED, row] != 1:
        raise ContractError(f"draft_state_length is {draft}, but the lease runs no paired draft; leave it 0")
    if draft > resident:
        raise ContractError(
            f"draft_state_length is {draft}, more than the {resident} resident tokens; pass at most these"
        )
    page = traits.tokens_per_page
    if resident < page:
        raise ContractError(f"{resident} resident tokens hold no full block of {page}; publish when there is one")
    moves = int(as_flag("moves_own_record", moves_own_record))
    return publish_offer(table, records, keys, Offer(row, resident // page, draft // page, 0, moves), _NO_EXACT)


def publish_offer(table: LeaseTable, records: RecordViews, keys: Words, offer: Offer, exact: Words) -> PublishResult:
    """Publish what a lease offers, and say what became of it; `exact` as in `publish_endpoint`."""
    fields, blocks = table.arrays.fields, offer.num_blocks
    keys = as_keys(keys, max(blocks, int(fields[c.KNOWN, offer.row])))
    path = np.empty(blocks, np.int32)
    made = Publication(*publish_endpoint(table.cache, table.arrays, keys, exact, tuple(offer), path))
    if made.answer < 0:
        raise ContractError(f"publication of {blocks} blocks refused: {_REFUSALS[made.answer]}")
    kept = table.cache.serial[made.record] == made.serial
    return PublishResult(
        status=PublishStatus.EXISTING_RECORD if made.answer == FOUND else PublishStatus.PUBLISHED,
        record=records.view(made.record) if kept else None,
        published_full_block_count=int(fields[c.PUBLISHED, offer.row]),
    )


@njit_in_place
def publish_endpoint(
    cache: CacheArrays, leases: LeaseArrays, keys: Words, exact: Words, offered: tuple[int, ...], path: Int32s
) -> tuple[int, int, int]:
    """Publish a lease's leading full blocks and record their end; return a `Publication`.

    Args:
        cache: the cache.
        leases: the leases.
        keys: of the sequence's blocks, at least as many as are published and as the lease is known to have.
        exact: exact-prefix digest of a checkpoint, two words, and the key of its last full block (zeros before the
            first), two words; ignored without a checkpoint.
        offered: what is published, an `Offer`.
        path: `int32[num_blocks]`, to work in: with checkpoints the canonical pages, else those from the known blocks on.
    """
    offer = Offer(*offered)
    check_row(leases, offer.row)
    row, blocks, fields = offer.row, offer.num_blocks, leases.fields
    if fields[c.KNOWN, row] > fields[c.NUM_BASE, row] or max(blocks, fields[c.KNOWN, row]) > keys.shape[0]:
        raise InvariantError("a lease knows more blocks than it has pages or keys")
    attempt = offer.exact_length > 0 or blocks > fields[c.PUBLISHED, row]
    answer, record = _publish(cache, leases, keys, exact, offer, path)
    serial = 0
    if answer < 0:
        if attempt:
            cache.state[c.REFUSED] += 1
    else:
        if answer != FOUND:
            cache.state[c.COMMITTED] += 1
            if offer.num_draft_blocks > 0:
                cache.state[c.PAIRED_COMMITS] += 1
        elif attempt:
            cache.state[c.EXISTING] += 1
        fields[c.PUBLISHED, row] = max(fields[c.PUBLISHED, row], blocks)
        _note_keys(cache, leases, keys, row, blocks)
        if cache.state[c.HAS_CHECKPOINTS]:
            _note_straddling(cache, leases, row, path, offer.num_draft_blocks)
        serial = cache.serial[record]
        started = fields[c.STARTED_FROM, row]
        if started >= 0 and cache.serial[started] % c.MODULUS == fields[c.STARTED_SERIAL, row]:
            touch(cache, started)  # what starts there stands on it, and goes before it
        evict_beyond(cache, cache.state[c.MAX_RECORDS])
    return answer, record, serial


@njit_part
def _publish(
    cache: CacheArrays, leases: LeaseArrays, keys: Words, exact: Words, offer: Offer, path: Int32s
) -> tuple[int, int]:
    row, blocks, draft_blocks, length = offer.row, offer.num_blocks, offer.num_draft_blocks, offer.exact_length
    fields = leases.fields

    # Is it the lease's to offer?
    if blocks > fields[c.NUM_BASE, row] or draft_blocks > fields[c.NUM_DRAFT, row]:
        return BEYOND_PAGES, -1
    known = fields[c.KNOWN, row]
    if known > 0 and not _has_key(cache.key, leases.base_pages[row, known - 1], keys[known - 1]):
        return NOT_OWN_PREFIX, -1

    # What stands there already: indexed blocks, and a record at the end.
    standing = -1
    if length > 0:
        standing = find(cache.exact_key, cache.exact_slot, exact[0], exact[1])
        if standing >= 0 and cache.record[c.EXACT_LENGTH, standing] != length:
            return NO_CHAIN, -1
        slot = fields[c.RESERVED, row]
        if slot < 0:
            raise InvariantError("a checkpoint is published without reserved slots")
        if standing < 0 and cache.resource[c.CACHE_REFS, cache.state[c.OFFSET + c.RECURRENT] + slot] > 0:
            return SLOT_TAKEN, -1
    # Where the last block that the lease knows is still indexed, all before it are: they were looked at when it was new.
    settled, before = 0, -1
    if length == 0 and known > 0:
        settled = min(known, blocks)
        before = find(cache.key, cache.slot, keys[settled - 1, 0], keys[settled - 1, 1])
        settled = settled if before >= 0 else 0
    matched, tip = find_deepest(cache.key, cache.slot, keys[settled:], blocks - settled)
    matched, tip = settled + matched, tip if matched > 0 else before
    if write_path(cache.node, tip, path[settled:matched]) != before:
        return NO_CHAIN, -1
    if length == 0 and matched == blocks:
        standing = cache.resource[c.FIRST_RECORD, tip]
    if standing < 0 and cache.state[c.FREE_RECORD] < 0:
        raise InvariantError("a record is to be made without a free one")
    if cache.state[c.NUM_NODES] + blocks - matched > cache.key.shape[0]:
        raise InvariantError("more blocks are to be indexed than there are pages")

    # New blocks.
    new_pages = leases.base_pages[row, matched:blocks]
    if not _index_blocks(cache, keys[matched:blocks], new_pages):
        return NO_CHAIN, -1
    above = -1
    if length == 0 and tip >= 0:
        keep_apart(cache, tip)
        above = cache.resource[c.FIRST_RECORD, tip]
    if matched < blocks:
        if length > 0:
            copy_pages(new_pages, path[matched:])
        _enter_blocks(cache, new_pages, tip)
        tip = new_pages[blocks - matched - 1]

    # The record at their end, and the use of all this.
    if length == 0 and matched == blocks:
        standing = above
    elif standing < 0:
        standing = new_mark(cache, tip)
        cache.record[c.ABOVE, standing] = above
    if length > 0:
        touch(cache, standing)
    else:
        use_path_to(cache, standing)
    answer = FOUND
    if cache.serial[standing] == c.IS_MARK:
        make_record(cache, standing)
        if cache.state[c.EXTENDED_RECORDS]:
            _fill_record(cache, leases, standing, exact, offer)
        answer = MADE
    elif draft_blocks > 0 and draft_blocks > cache.record[c.NUM_PAIRED_BLOCKS, standing]:
        attach_pairs(cache, standing, leases.draft_pages[row, :draft_blocks])
        answer = CHANGED
    if length == 0:
        _note_own(cache, fields, offer, answer, standing)
    return answer, standing


@njit_part
def _note_own(cache: CacheArrays, fields: Int32s, offer: Offer, answer: int, record: int) -> None:
    """Note the record that a lease has made, and where it moves let go of the one that it made before.

    Where paths part at that one's end, or other entries lie between, it stays as a mark. Else the new record, which is the
    next one below it, has its blocks too.
    """
    own = fields[c.OWN_RECORD, offer.row]
    if own >= 0 and (own == record or cache.serial[own] % c.MODULUS != fields[c.OWN_SERIAL, offer.row]):
        own = -1
    if offer.moves_own and own >= 0 and offer.num_blocks > fields[c.PUBLISHED, offer.row]:
        if cache.state[c.EXTENDED_RECORDS] and cache.record[c.NUM_PAIRED_BLOCKS, own] > 0:
            detach_pairs(cache, own)
            mark_evictable(cache, c.DRAFT, own)
        make_mark(cache, own)
        behind = cache.node[c.FIRST_CHILD, cache.record[c.ENDPOINT, own]]
        if cache.record[c.ABOVE, record] == own and cache.node[c.NEXT_SIBLING, behind] < 0:
            cache.record[c.ABOVE, record] = cache.record[c.ABOVE, own]
            cache.resource[c.FIRST_RECORD, cache.record[c.ENDPOINT, own]] = -1
            forget_evictable(cache, own)
            drop_entry(cache, own)
        fields[c.OWN_RECORD, offer.row] = -1
    if answer == MADE:
        fields[c.OWN_RECORD, offer.row] = record
        fields[c.OWN_SERIAL, offer.row] = cache.serial[record] % c.MODULUS


@njit_part
def _has_key(key: Words, page: int, wanted: Words) -> bool:
    """Whether a page has the key that it had: a leased page's key outlives its record, and names all before it."""
    return bool(key[page, 1] == wanted[1] and key[page, 0] == wanted[0])


@njit_part
def _note_keys(cache: CacheArrays, leases: LeaseArrays, keys: Words, row: int, blocks: int) -> None:
    """Settle the identity of blocks just published: also pages that are no canonical ones remember their keys."""
    for i in range(leases.fields[c.KNOWN, row], blocks):
        page = leases.base_pages[row, i]
        if cache.resource[c.CACHE_REFS, page] == 0:
            cache.key[page, 0] = keys[i, 0]
            cache.key[page, 1] = keys[i, 1]
    leases.fields[c.KNOWN, row] = max(leases.fields[c.KNOWN, row], blocks)


@njit_part
def _note_straddling(cache: CacheArrays, leases: LeaseArrays, row: int, path: Int32s, draft_blocks: int) -> None:
    """Note that a lease has published behind pages of others: those may be freed while its own, further on, are leased."""
    if leases.fields[c.STRADDLES, row] == 1:
        return
    behind_others, straddles = False, False
    for i in range(path.size):
        own = leases.base_pages[row, i] == path[i]
        straddles |= own and behind_others
        behind_others |= not own
    for i in range(1, draft_blocks):
        straddles |= cache.node[c.PAIR_PAGE, path[i]] != leases.draft_pages[row, i - 1]
    if straddles:
        leases.fields[c.STRADDLES, row] = 1
        cache.state[c.NUM_STRADDLING] += 1


@njit_part
def _index_blocks(cache: CacheArrays, keys: Words, pages: Int32s) -> bool:
    """Enter pages in the index under their keys; all, or none and `False` where a key is there already."""
    key, slot, resource = cache.key, cache.slot, cache.resource
    done = 0
    sound = True
    while done < pages.size:
        page = pages[done]
        if done + _INSERTS_AHEAD < pages.size:
            fetch_slot(slot, keys[done + _INSERTS_AHEAD, 1])
        sound = (
            page >= 0
            and resource[c.CACHE_REFS, page] == 0
            and resource[c.LEASE_REFS, page] > 0
            and resource[c.FIRST_RECORD, page] < 0
        )
        if not sound or not insert(key, slot, page, keys[done, 0], keys[done, 1]):
            break
        done += 1
    if done == pages.size:
        return True
    # [0, done) indexed: taken out again | [done, size) untouched
    for i in range(done):
        remove(key, slot, pages[i])
    if not sound:
        raise InvariantError("a lease publishes a page that is not its own")
    return False


@njit_part
def _enter_blocks(cache: CacheArrays, pages: Int32s, parent: int) -> None:
    """Hang indexed pages into the tree, one behind the other, below `parent`. Leases hold them, so none is idle."""
    state, node, resource = cache.state, cache.node, cache.resource
    tip = parent
    for page in pages:
        if state[c.HAS_PAIRS]:
            node[c.PAIR_PAGE, page] = -1
            node[c.PAIR_COUNT, page] = 0
        link(state, node, page, tip)
        resource[c.CACHE_REFS, page] = 1
        tip = page
    if parent >= 0 and resource[c.FIRST_RECORD, parent] >= 0:
        mark_evictable(cache, c.BASE, resource[c.FIRST_RECORD, parent])


@njit_part
def _fill_record(cache: CacheArrays, leases: LeaseArrays, made: int, exact: Words, offer: Offer) -> None:
    record = cache.record
    record[c.NUM_BLOCKS, made] = offer.num_blocks
    record[c.NUM_PAIRED_BLOCKS, made] = 0
    record[c.EXACT_LENGTH, made] = offer.exact_length
    if offer.exact_length > 0:
        insert(cache.exact_key, cache.exact_slot, made, exact[0], exact[1])
        cache.exact_key[made, 2] = exact[2]
        cache.exact_key[made, 3] = exact[3]
        if cache.key.shape[0] == 0:
            join_anchor(cache, made)
        for kind in (c.RECURRENT, c.PARTIAL):
            slot = leases.fields[c.RESERVED + kind - c.RECURRENT, offer.row]
            if slot >= 0:
                record[c.RECURRENT_SLOT + kind - c.RECURRENT, made] = slot
                cache.resource[c.FIRST_RECORD, cache.state[c.OFFSET + kind] + slot] = made
                hold(cache, kind, slot)
    if offer.num_draft_blocks > 0:
        attach_pairs(cache, made, leases.draft_pages[offer.row, : offer.num_draft_blocks])
