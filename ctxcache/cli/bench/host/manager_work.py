"""What `ctxcache bench host` times on the manager: keys, lookups, insertions and evictions, each as a piece of work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.cli.bench.verdicts import Spread, spread_of
from ctxcache.errors import InvariantError
from ctxcache.keys.chain import hash_full_blocks
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.results import CacheRequestLease

_VOCABULARY = 151_936
_SEED = 1
_WARM = 3
"""Runs of each work that do not count."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the workloads are. The defaults are the peers'.

    Attributes:
        prompt_tokens: of the prompt that is hashed, met whole, and inserted cold.
        request_tokens: of a request that must evict.
        cached_blocks: blocks of a full cache.
        leaves: one-page leaves that are evicted at once.
        batches: sequences of a decode step.
        context_tokens: tokens of each sequence before its first step.
        steps: decode steps, and triggers, that are timed.
        repeats: of everything else.
    """

    prompt_tokens: int = 32_768
    request_tokens: int = 4_096
    cached_blocks: int = 100_000
    leaves: int = 64
    batches: tuple[int, ...] = (64, 256)
    context_tokens: int = 2_048
    steps: int = 256
    repeats: int = 100


QUICK = Sizes(1_024, 512, 600, 8, (2, 4), 256, 4, 3)
"""Sizes that only show that everything runs."""


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work that is timed again and again.

    Attributes:
        prepare: makes what one run takes; not timed.
        act: the run; timed.
        settle: takes what the run returned, and makes room for the next; not timed.
    """

    act: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    settle: Callable[[Any], object] = lambda _: None


def time_work(work: Work, repeats: int) -> Spread:
    """Return the spread of so many single runs, in microseconds, after a few that do not count."""
    times = []
    for run in range(repeats + _WARM):
        prepared = work.prepare()
        started = time.perf_counter_ns()
        result = work.act(prepared)
        taken = time.perf_counter_ns() - started
        work.settle(result)
        if run >= _WARM:
            times.append(taken / 1e3)
    return spread_of(times)


def random_tokens(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Return token ids that nothing else has."""
    return rng.integers(0, _VOCABULARY, count, np.int32)


def make_manager(block: int, num_blocks: int) -> ContextCacheManager:
    """Return an empty manager whose every block may be a record of its own."""
    return ContextCacheManager(tokens_per_page=block, num_base_pages=num_blocks, max_records=num_blocks)


def admit(manager: ContextCacheManager, keys: NDArray[np.uint64], num_tokens: int) -> CacheRequestLease:
    """Look up and lease what an input takes, without headroom."""
    lease = manager.acquire(manager.plan(keys, num_tokens, base_extra_tokens=0)).lease
    if lease is None:
        raise InvariantError(f"a benchmark's input of {num_tokens} tokens found no room; please report this")
    return lease


def insert(manager: ContextCacheManager, tokens: NDArray[np.int32]) -> CacheRequestLease:
    """Hash a prompt, look it up, lease its pages and publish them."""
    keys = hash_full_blocks(tokens, manager.tokens_per_page)
    lease = admit(manager, keys, tokens.size)
    manager.publish(lease, keys, tokens.size)
    return lease


def fill(manager: ContextCacheManager, num_blocks: int, blocks_each: int, rng: np.random.Generator) -> None:
    """Publish prompts of so many blocks, and release them, until so many blocks are cached."""
    for _ in range(num_blocks // blocks_each):
        manager.release(insert(manager, random_tokens(rng, blocks_each * manager.tokens_per_page)))


def hash_prompt(block: int, sizes: Sizes) -> Work:
    """The keys of a whole prompt."""
    tokens = random_tokens(np.random.default_rng(_SEED), sizes.prompt_tokens)
    return Work(lambda _: hash_full_blocks(tokens, block))


def full_hit(block: int, sizes: Sizes) -> Work:
    """Hash, look up, pin, list of pages, and release, of a prompt of which all but one token are cached."""
    return hit_in(make_manager(block, 2 * (sizes.prompt_tokens // block) + 64), sizes.prompt_tokens)


def hit_in(manager: ContextCacheManager, num_tokens: int) -> Work:
    """The same in a given cache, which gets the prompt first."""
    tokens = random_tokens(np.random.default_rng(_SEED), num_tokens + 1)
    manager.release(insert(manager, tokens))

    def act(_: None) -> int:
        lease = admit(manager, hash_full_blocks(tokens, manager.tokens_per_page), tokens.size)
        pages = lease.base_pages
        manager.release(lease)
        return pages.size

    return Work(act)


def cold_insert(block: int, sizes: Sizes) -> Work:
    """Hash, lookup, lease and publication of a prompt that nothing is cached of, into a cache with room."""
    rng = np.random.default_rng(_SEED)
    manager = make_manager(block, 40 * (sizes.prompt_tokens // block))

    def make_room(lease: CacheRequestLease) -> None:
        manager.release(lease)
        if manager.num_indexed_blocks > 30 * (sizes.prompt_tokens // block):
            manager.clear()

    return Work(lambda tokens: insert(manager, tokens), lambda: random_tokens(rng, sizes.prompt_tokens), make_room)


def evicting_request(block: int, sizes: Sizes) -> Work:
    """Hash, lookup, eviction, lease, publication and release of a cold request in a cache that is full."""
    manager = make_manager(block, sizes.cached_blocks)
    blocks = sizes.request_tokens // block
    fill(manager, sizes.cached_blocks, blocks, np.random.default_rng(_SEED))
    return evict_in(manager, sizes.request_tokens)


def evict_in(manager: ContextCacheManager, num_tokens: int) -> Work:
    """The same in a given cache, which is full."""
    rng = np.random.default_rng(_SEED + 1)
    return Work(lambda tokens: manager.release(insert(manager, tokens)), lambda: random_tokens(rng, num_tokens))


def evict_leaves(block: int, sizes: Sizes) -> Work:
    """Eviction of one-page records, by a lease that grows by their pages, in a cache that is full of them."""
    manager = make_manager(block, sizes.cached_blocks)
    fill(manager, sizes.cached_blocks, 1, np.random.default_rng(_SEED))
    return evict_leaves_in(manager, sizes.leaves)


def evict_leaves_in(manager: ContextCacheManager, leaves: int) -> Work:
    """The same in a given cache; what was evicted is replaced after each run."""
    rng = np.random.default_rng(_SEED + 1)
    block = manager.tokens_per_page

    def prepare() -> CacheRequestLease:
        return admit(manager, hash_full_blocks(random_tokens(rng, block), block), block)

    def act(lease: CacheRequestLease) -> CacheRequestLease:
        if not manager.grow(lease, base_pages=leaves):
            raise InvariantError("a benchmark found nothing to evict; please report this")
        return lease

    def settle(lease: CacheRequestLease) -> None:
        manager.release(lease)
        fill(manager, leaves + 1, 1, rng)

    return Work(act, prepare, settle)


def bytes_a_block(block: int, sizes: Sizes) -> float:
    """Return what a full cache of one-page records holds for each cached block: index, tree, records and LRU order."""
    manager = make_manager(block, sizes.cached_blocks)
    fill(manager, sizes.cached_blocks, 1, np.random.default_rng(_SEED))
    return manager.cache_bytes / manager.num_indexed_blocks
