"""What can be seen of a manager, as values that compare; and the keys of the sequences that the tests use."""

from __future__ import annotations

from functools import cache

import numpy as np

from ctxcache.ids import ResourceType
from ctxcache.keys.chain import hash_exact_prefix, hash_full_blocks
from ctxcache.manager.results import HybridCheckpointKey
from ctxcache.testing import shadow

HASH_KEY = bytes(16)


@cache
def keys_of(tokens: tuple[int, ...], tokens_per_page: int) -> np.ndarray:
    """Keys of the full blocks of a sequence."""
    return hash_full_blocks(tokens, tokens_per_page, key=HASH_KEY)


@cache
def checkpoint_of(tokens: tuple[int, ...], tokens_per_page: int) -> HybridCheckpointKey:
    """Key of the state after exactly these tokens."""
    return HybridCheckpointKey(hash_exact_prefix(tokens, tokens_per_page, key=HASH_KEY), len(tokens))


def exact_keys_behind(tokens: tuple[int, ...], blocks: int, tokens_per_page: int) -> np.ndarray:
    """Exact keys of all lengths within the block behind so many, hashed one by one."""
    start = blocks * tokens_per_page
    lengths = range(start, min(start + tokens_per_page, len(tokens)) + 1)
    digests = [hash_exact_prefix(tokens[:length], tokens_per_page, key=HASH_KEY) for length in lengths]
    return np.array([(digest.hi, digest.lo) for digest in digests], np.uint64)


def plain(value):
    """Return a result of a manager as a value that compares: arrays as lists, handles and owners left out."""
    if isinstance(value, np.ndarray):
        assert value.dtype in (np.int32, np.bool_), value.dtype
        return value.tolist()
    if hasattr(value, "base_page_path"):
        return record_view(value)
    if hasattr(value, "__dataclass_fields__"):
        hidden = {"_owner", "_proof", "lease", "plan"}
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__ if name not in hidden}
    return value


def record_view(record) -> tuple:
    """Everything to be seen of a record."""
    assert record.cached
    return shadow.record_view(record)


def lease_view(lease) -> tuple:
    """Everything to be seen of a lease."""
    return (
        lease.row,
        lease.generation,
        lease.released,
        lease.base_pages.tolist(),
        lease.draft_pages.tolist(),
        lease.recurrent_snapshot_slot,
        lease.partial_kv_snapshot_slot,
        lease.published_full_block_count,
    )


def view(manager, leases) -> dict:
    """Everything to be seen of a manager, but for the counters."""
    return {
        "pools": {kind: manager.pool(kind) for kind in ResourceType},
        "records": [record_view(record) for record in manager.records],
        "num_records": len(manager.records),
        "leases": [lease_view(lease) for lease in leases],
        "num_leases": manager.num_leases,
        "num_indexed_blocks": manager.num_indexed_blocks,
    }
