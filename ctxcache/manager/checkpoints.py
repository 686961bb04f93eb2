"""States at exact lengths, looked up: which lengths are worth hashing for an input, and which record a key names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ctxcache.arguments import NOT_ITERABLE, Int32s, Words, as_integer, describe
from ctxcache.errors import ContractError
from ctxcache.ids import Hash128
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.block_index import find, insert, remove
from ctxcache.manager.layout import CacheArrays
from ctxcache.manager.results import HybridCheckpointKey


def check_exact_keys(exact_keys: Iterable[HybridCheckpointKey]) -> tuple[HybridCheckpointKey, ...]:
    """Return checkpoint keys as a tuple, each with a digest and a length of at least 1."""
    try:
        checked = tuple(iter(exact_keys))
    except NOT_ITERABLE:
        raise ContractError(f"exact_keys is {describe(exact_keys)}; pass a run of HybridCheckpointKey") from None
    for key in checked:
        if not isinstance(key, HybridCheckpointKey) or not isinstance(key.exact_prefix_digest, Hash128):
            raise ContractError(f"exact_keys holds {describe(key)}; pass HybridCheckpointKey(Hash128(...), length)")
        as_integer("exact_length", key.exact_length, 1)
    return checked


@njit_in_place
def find_checkpoint(cache: CacheArrays, digest: Words, length: int, path: Int32s) -> int:
    """Return the record with this digest and length whose full blocks are the leading ones of `path`, or -1."""
    record = find(cache.exact_key, cache.exact_slot, digest[0], digest[1])
    if record < 0 or cache.record[c.EXACT_LENGTH, record] != length:
        return -1
    blocks = cache.record[c.NUM_BLOCKS, record]
    if blocks > path.size or (blocks > 0 and path[blocks - 1] != cache.record[c.ENDPOINT, record]):
        return -1
    return int(record)


@njit_in_place
def find_longest(cache: CacheArrays, digests: Words, first_length: int, below: int, path: Int32s) -> int:
    """Return the longest checkpoint's length, below a limit, that one of the digests names; row i is of `first_length + i`.

    0 where there is none. Costs a probe a row, whatever else is cached.
    """
    for i in range(min(digests.shape[0], below - first_length) - 1, -1, -1):
        if first_length + i > 0 and find_checkpoint(cache, digests[i], first_length + i, path) >= 0:
            return first_length + i
    return 0


@njit_in_place
def list_anchors(cache: CacheArrays, path: Int32s, keys: Words, num_blocks: int, counts: Int32s) -> int:
    """Write behind how many of an input's full blocks checkpoints end, the most first; return how many such counts there are.

    `counts` has room for `num_blocks + 1`.
    """
    found = 0
    has_pages = cache.key.shape[0] > 0
    for blocks in range(path.size if has_pages else num_blocks, -1, -1):
        if _first_behind(cache, path, keys, blocks) >= 0:
            counts[found] = blocks
            found += 1
    return found


@njit_in_place
def _first_behind(cache: CacheArrays, path: Int32s, keys: Words, blocks: int) -> int:
    """Return the first record of those that end behind so many of an input's full blocks, or -1."""
    if cache.key.shape[0] == 0:
        if blocks == 0:
            return find(cache.exact_key[:, 2:], cache.anchor_slot, np.uint64(0), np.uint64(0))
        return find(cache.exact_key[:, 2:], cache.anchor_slot, keys[blocks - 1, 0], keys[blocks - 1, 1])
    return int(cache.resource[c.FIRST_RECORD, path[blocks - 1]] if blocks > 0 else cache.state[c.ROOT_RECORD])


@njit_in_place
def list_lengths(cache: CacheArrays, path: Int32s, keys: Words, num_blocks: int, below: int, lengths: Int32s) -> int:
    """Write the lengths, below a limit, of the checkpoints that end behind full blocks of an input; return how many.

    Repeats included. `lengths` has room for every record.
    """
    count = 0
    for blocks in range((path.size if cache.key.shape[0] > 0 else num_blocks) + 1):
        record = _first_behind(cache, path, keys, blocks)
        while record >= 0:
            if cache.record[c.EXACT_LENGTH, record] < below:
                lengths[count] = cache.record[c.EXACT_LENGTH, record]
                count += 1
            record = cache.record[c.NEXT_AT_ENDPOINT, record]
    return count


@njit_part
def join_anchor(cache: CacheArrays, made: int) -> None:
    """Enter a record, where no blocks are indexed, in the list of those with its last full block."""
    key, record = cache.exact_key[:, 2:], cache.record
    first = find(key, cache.anchor_slot, key[made, 0], key[made, 1])
    record[c.NEXT_AT_ENDPOINT, made] = -1
    record[c.PREVIOUS_AT_ENDPOINT, made] = first
    if first < 0:
        insert(key, cache.anchor_slot, made, key[made, 0], key[made, 1])
        return
    # Behind the first: the table names that one still.
    after = record[c.NEXT_AT_ENDPOINT, first]
    record[c.NEXT_AT_ENDPOINT, made] = after
    record[c.NEXT_AT_ENDPOINT, first] = made
    if after >= 0:
        record[c.PREVIOUS_AT_ENDPOINT, after] = made


@njit_part
def leave_anchor(cache: CacheArrays, gone: int) -> None:
    """Take a record out of that list."""
    key, record = cache.exact_key[:, 2:], cache.record
    before, after = record[c.PREVIOUS_AT_ENDPOINT, gone], record[c.NEXT_AT_ENDPOINT, gone]
    if after >= 0:
        record[c.PREVIOUS_AT_ENDPOINT, after] = before
    if before >= 0:
        record[c.NEXT_AT_ENDPOINT, before] = after
        return
    remove(key, cache.anchor_slot, gone)
    if after >= 0:
        insert(key, cache.anchor_slot, after, key[after, 0], key[after, 1])
