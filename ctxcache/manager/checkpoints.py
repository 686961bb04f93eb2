"""States at exact lengths, looked up: which lengths are worth hashing for an input, and which record a key names."""

from __future__ import annotations

from collections.abc import Iterable

from ctxcache.arguments import NOT_ITERABLE, Int32s, Words, as_integer, describe
from ctxcache.errors import ContractError
from ctxcache.ids import Hash128
from ctxcache.jit import njit_in_place
from ctxcache.manager import layout as c
from ctxcache.manager.block_index import find
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
def list_lengths(
    cache: CacheArrays, path: Int32s, keys: Words, tokens_per_page: int, below: int, lengths: Int32s
) -> int:
    """Write the lengths, below a limit, of the checkpoints that end on a path; return how many, repeats included.

    Where no blocks are indexed, all checkpoints end before the first block, and the key of a checkpoint's last full block
    tells which may match. `lengths` has room for every record.
    """
    count = _list_from(cache, cache.state[c.ROOT_RECORD], keys, tokens_per_page, below, lengths, 0)
    for block in path:
        if cache.resource[c.FIRST_RECORD, block] >= 0:
            count = _list_from(
                cache, cache.resource[c.FIRST_RECORD, block], keys, tokens_per_page, below, lengths, count
            )
    return count


@njit_in_place
def _list_from(
    cache: CacheArrays, record: int, keys: Words, tokens_per_page: int, below: int, lengths: Int32s, count: int
) -> int:
    while record >= 0:
        length = cache.record[c.EXACT_LENGTH, record]
        if length < below and _may_match(cache, record, keys, length // tokens_per_page):
            lengths[count] = length
            count += 1
        record = cache.record[c.NEXT_AT_ENDPOINT, record]
    return count


@njit_in_place
def _may_match(cache: CacheArrays, record: int, keys: Words, blocks: int) -> bool:
    if blocks == 0 or cache.key.shape[0] > 0:
        return True
    return bool(cache.exact_key[record, 2] == keys[blocks - 1, 0] and cache.exact_key[record, 3] == keys[blocks - 1, 1])
