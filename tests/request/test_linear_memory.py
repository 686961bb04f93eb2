"""A long conversation costs memory for its tokens once, not once a turn."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from ctxcache.ids import AcquireStatus, PublishStatus, ResourceType
from ctxcache.keys.chain import KeyHasher
from ctxcache.manager.manager import ContextCacheManager

NUM_TURNS, TURN_TOKENS = 200, 512
CACHE_BYTES_PER_BLOCK = 96
FIXED_BYTES = 128 * 1024
"""What does not depend on the tokens: the memory of evicted keys (32 KiB), counters, handles, Python's own objects."""
LEASE_BYTES_PER_BLOCK = 128
"""The arena of leases keeps rows of page ids, doubled as they grow: 16 rows of at most twice 4 bytes a page."""


def forget(keys: np.ndarray) -> None:
    """Keep nothing of a turn."""


def talk(tokens_per_page: int, after_turn: Callable[[np.ndarray], None]) -> tuple[int, ContextCacheManager]:
    """Hold the conversation. Return the largest memory held between turns, in bytes, and the manager at its end.

    Every turn is a request of its own over the whole history: hash it, lease it, publish prompt and answer, release it.
    `after_turn` is given the keys of each turn, and may hold on to them: what it keeps is counted.
    """
    num_blocks = NUM_TURNS * TURN_TOKENS // tokens_per_page
    tokens = np.random.default_rng(1).integers(0, 50_000, NUM_TURNS * TURN_TOKENS, dtype=np.int32)
    hasher = KeyHasher(tokens_per_page, bytes(16))
    # A whole turn elsewhere first: what compiled code costs is not the conversation's.
    run_turn(ContextCacheManager(tokens_per_page=tokens_per_page, num_base_pages=num_blocks + 1), hasher, tokens, 0)
    most = 0
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        manager = ContextCacheManager(tokens_per_page=tokens_per_page, num_base_pages=num_blocks + 1)
        for turn in range(NUM_TURNS):
            after_turn(run_turn(manager, hasher, tokens, turn * TURN_TOKENS))
            gc.collect(0)
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    return most, manager


def run_turn(manager: ContextCacheManager, hasher: KeyHasher, tokens: np.ndarray, history: int) -> np.ndarray:
    """One turn: half of its new tokens are the prompt's, half are generated. Returns the keys of all its blocks."""
    prompt, end = history + TURN_TOKENS // 2, history + TURN_TOKENS
    sequence = hasher.start()
    sequence.extend(tokens[:prompt], None)
    plan = manager.plan(sequence.full_block_keys, prompt)
    assert plan.reused_token_length == history
    result = manager.acquire(plan)
    assert result.status is AcquireStatus.ACQUIRED
    lease = result.lease
    manager.publish(lease, sequence.full_block_keys, prompt)
    pages = -(-(end + 1) // hasher.tokens_per_page) - lease.base_pages.size
    assert manager.grow(lease, pages)
    sequence.extend(tokens[:end], None)
    assert manager.publish(lease, sequence.full_block_keys, end).status is PublishStatus.PUBLISHED
    manager.release(lease)
    return sequence.full_block_keys


def bound(tokens_per_page: int) -> int:
    """What the conversation may hold: linear in its tokens."""
    num_blocks = NUM_TURNS * TURN_TOKENS // tokens_per_page + 1
    return num_blocks * (CACHE_BYTES_PER_BLOCK + LEASE_BYTES_PER_BLOCK) + FIXED_BYTES


@pytest.mark.parametrize("tokens_per_page", [16, 128])
def test_a_conversation_keeps_memory_linear_in_tokens(tokens_per_page):
    """200 turns of 512 tokens, each over the whole history: as many blocks as tokens, and bytes in proportion."""
    held, manager = talk(tokens_per_page, forget)
    num_blocks = NUM_TURNS * TURN_TOKENS // tokens_per_page
    assert manager.num_indexed_blocks == num_blocks
    pool = manager.pool(ResourceType.BASE_KV_PAGE)
    assert pool.capacity - pool.free == num_blocks
    assert len(manager.records) == 2 * NUM_TURNS
    assert [record.base_page_path.size for record in manager.records][-1] == num_blocks
    assert manager.cache_bytes <= CACHE_BYTES_PER_BLOCK * (num_blocks + 1) + FIXED_BYTES
    assert held <= bound(tokens_per_page)
    manager.check_invariants()


@pytest.mark.parametrize("tokens_per_page", [16, 128])
def test_the_bound_would_show_a_quadratic_cache(tokens_per_page):
    """The same bound fails where each turn keeps no more than the keys of its own history, 16 bytes a block."""
    kept: list[np.ndarray] = []
    held, _ = talk(tokens_per_page, kept.append)
    assert held > 2 * bound(tokens_per_page)
