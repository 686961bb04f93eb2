"""States at exact lengths: which lengths are worth hashing for an input, and which record a key names."""

from __future__ import annotations

from ctxcache.arguments import Int32s, Words
from ctxcache.jit import njit_in_place
from ctxcache.manager.block_index import find
from ctxcache.manager.layout import ENDPOINT, EXACT_LENGTH, NEXT_AT_ENDPOINT, NUM_BLOCKS, OWNER, ROOT_RECORD, Core


@njit_in_place
def find_checkpoint(core: Core, digest: Words, length: int, path: Int32s) -> int:
    """Return the record with this digest and length whose full blocks are the leading ones of `path`, or -1."""
    record = find(core.exact_key, core.exact_slot, digest[0], digest[1])
    if record < 0 or core.record[EXACT_LENGTH, record] != length:
        return -1
    blocks = core.record[NUM_BLOCKS, record]
    if blocks > path.size or (blocks > 0 and path[blocks - 1] != core.record[ENDPOINT, record]):
        return -1
    return int(record)


@njit_in_place
def list_lengths(core: Core, path: Int32s, keys: Words, tokens_per_page: int, below: int, lengths: Int32s) -> int:
    """Write the lengths, below a limit, of the checkpoints that end on a path; return how many, repeats included.

    Where no blocks are indexed, all checkpoints end before the first block, and the key of a checkpoint's last full block
    tells which may match. `lengths` has room for every record.
    """
    count = _list_from(core, core.state[ROOT_RECORD], keys, tokens_per_page, below, lengths, 0)
    for block in path:
        if core.resource[OWNER, block] >= 0:
            count = _list_from(core, core.resource[OWNER, block], keys, tokens_per_page, below, lengths, count)
    return count


@njit_in_place
def _list_from(
    core: Core, record: int, keys: Words, tokens_per_page: int, below: int, lengths: Int32s, count: int
) -> int:
    while record >= 0:
        length = core.record[EXACT_LENGTH, record]
        if length < below and _may_match(core, record, keys, length // tokens_per_page):
            lengths[count] = length
            count += 1
        record = core.record[NEXT_AT_ENDPOINT, record]
    return count


@njit_in_place
def _may_match(core: Core, record: int, keys: Words, blocks: int) -> bool:
    if blocks == 0 or core.key.shape[0] > 0:
        return True
    return bool(core.exact_key[record, 2] == keys[blocks - 1, 0] and core.exact_key[record, 3] == keys[blocks - 1, 1])
