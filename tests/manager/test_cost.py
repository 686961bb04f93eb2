"""What operations cost, by counting steps and bytes: no clock is read."""

from __future__ import annotations

import numpy as np
import pytest
from support.manager import HASH_KEY, Runtime, checkpoint_of, keys_of, run_of

from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.keys.chain import KeyHasher
from ctxcache.keys.tokens import as_token_array
from ctxcache.manager import block_index as index
from ctxcache.manager import eviction
from ctxcache.manager.layout import EVICTED, FREE
from ctxcache.manager.manager import ContextCacheManager


class Counting:
    """Stands in for a compiled function and counts its calls."""

    def __init__(self, function):
        self.function = function
        self.calls = 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


@pytest.mark.parametrize("matched", [0, 1, 2, 37, 1023, 1024, 2047, 2048])
def test_a_lookup_searches_instead_of_probing_every_block(monkeypatch, matched):
    """The deepest of 2,048 blocks is found with at most 2 * log2(2048) + 2 probes, wherever the match ends."""
    runtime = Runtime(2048, page=1)
    tokens = run_of("T", matched) + run_of("U", 2048 - matched)
    if matched:
        lease = runtime.manager.acquire(runtime.plan(tokens, base_extra_tokens=0)).lease
        runtime.manager.publish(lease, keys_of(tokens, 1), matched)
    probes = Counting(index.find)
    monkeypatch.setattr(index, "find", probes)
    cache = runtime.manager._cache
    found, deepest = index.find_deepest.py_func(cache.key, cache.slot, keys_of(tokens, 1), 2048)
    assert (found, deepest) == (matched, matched - 1)
    assert probes.calls <= 24


@pytest.mark.parametrize("num_records", [64, 1024])
def test_eviction_looks_at_no_record_that_stays(monkeypatch, num_records):
    """Freeing 32 pages from one-page records takes 32 and scans none, whatever the number of records."""
    runtime = Runtime(num_records, page=1, max_records=num_records)
    for i in range(num_records):
        lease = runtime.manager.acquire(runtime.plan([i], base_extra_tokens=0)).lease
        runtime.manager.publish(lease, keys_of([i], 1), 1)
        runtime.manager.release(lease)
    evictions, scans, asked = Counting(eviction.give_up_blocks), Counting(None), Counting(eviction.oldest_evictable)
    monkeypatch.setattr(eviction, "_evict_blocks", eviction._evict_blocks.py_func)
    monkeypatch.setattr(eviction, "give_up_blocks", evictions)
    monkeypatch.setattr(eviction, "_oldest_in_the_way", scans)
    monkeypatch.setattr(eviction, "oldest_evictable", asked)
    eviction.make_room.py_func(runtime.manager._cache, runtime.manager._leases.arrays, (32, 0, 0, 0))
    assert (evictions.calls, asked.calls, scans.calls) == (32, 32, 0)
    assert runtime.manager._state[FREE] == runtime.manager._state[EVICTED] == 32
    runtime.manager.check_invariants()


def test_records_that_cannot_go_are_not_looked_at(monkeypatch):
    """A hundred older records with leased pages, or with descendants, are not even asked when one page is lacking."""
    runtime = Runtime(202, page=1, max_records=400)
    leases = []
    for i in range(100):
        leases.append(runtime.manager.acquire(runtime.plan([i], base_extra_tokens=0)).lease)
        runtime.manager.publish(leases[-1], keys_of([i], 1), 1)
    conversation = list(range(1000, 1102))
    for length in range(1, 103):
        runtime.run(conversation[:length], base_extra_tokens=0)
    asked = Counting(eviction.oldest_evictable)
    monkeypatch.setattr(eviction, "_evict_blocks", eviction._evict_blocks.py_func)
    monkeypatch.setattr(eviction, "oldest_evictable", asked)
    eviction.make_room.py_func(runtime.manager._cache, runtime.manager._leases.arrays, (1, 0, 0, 0))
    assert asked.calls == 1
    assert len(runtime.manager.records) == 201


def test_a_long_conversation_costs_memory_for_its_tokens_only():
    """200 turns of 512 tokens at block 16: as many cached pages as blocks, one record a turn, no array grows."""
    page, turn, turns = 16, 512, 200
    runtime = Runtime(turns * turn // page + 1, page=page, max_records=turns)
    tokens = run_of("T", turns * turn)
    keys = keys_of(tokens, page)
    size = runtime.manager.cache_bytes
    for k in range(1, turns + 1):
        plan = runtime.manager.plan(keys[: k * turn // page], k * turn)
        assert plan.reused_token_length == (k - 1) * turn
        lease = runtime.manager.acquire(plan).lease
        runtime.manager.publish(lease, keys, k * turn)
        runtime.manager.release(lease)
    assert runtime.manager.num_indexed_blocks == turns * turn // page
    assert len(runtime.manager.records) == turns
    assert runtime.manager.cache_bytes == size
    assert size <= 96 * turns * turn // page + 64 * 1024
    runtime.manager.check_invariants()


@pytest.mark.parametrize("max_records", [1024, 100_000])
def test_a_cached_block_costs_at_most_96_bytes(max_records):
    """All arrays together, with one record for every block and with few: at most 96 bytes a page."""
    manager = ContextCacheManager(tokens_per_page=16, num_base_pages=100_000, max_records=max_records)
    assert manager.cache_bytes <= 96 * 100_000


def test_growing_that_grows_nothing_allocates_no_pages_and_evicts_nothing():
    """A decode step below the next page boundary is one counting pass: growth proper is not entered."""
    runtime = Runtime(64)
    leases = [runtime.begin(run_of(chr(65 + i), 2)) for i in range(8)]
    rows = np.array([lease.row for lease in leases], np.int32)
    before = runtime.everything()
    assert not runtime.manager.grow_leases(rows, np.ones(8, np.int32))
    assert runtime.everything() == before


def test_checkpoint_candidates_cost_what_lies_on_the_path(monkeypatch):
    """Checkpoints of other prefixes are not looked at: listing lengths walks the input's own blocks."""
    from ctxcache.manager import checkpoints

    runtime = Runtime(512, page=1, kind=Kind.HYBRID, num_recurrent_snapshots=200, num_partial_kv_snapshots=1)
    for i in range(100):
        runtime.run([i, i + 1])
    runtime.run([500, 501, 502])
    seen = Counting(checkpoints._first_behind)
    monkeypatch.setattr(checkpoints, "_first_behind", seen)
    cache, keys = runtime.manager._cache, keys_of([500, 501, 502, 503], 1)
    path = np.array(list(runtime.manager.records)[-1].base_page_path)
    lengths = np.empty(200, np.int32)
    assert checkpoints.list_lengths.py_func(cache, path, keys, 4, 4, lengths) == 1
    assert seen.calls == 4


@pytest.mark.parametrize("kind", [Kind.HYBRID, Kind.PURE_RECURRENT])
def test_looking_a_checkpoint_up_costs_nothing_for_other_users(kind):
    """With one user's checkpoint behind the first block or with 120, as many keys are probed, and in one call."""
    from ctxcache.manager import checkpoints

    pages = {Kind.HYBRID: 400, Kind.PURE_RECURRENT: 0}[kind]
    partial = {"num_partial_kv_snapshots": 200} if pages else {}
    shared, probes = run_of("S", 128), []
    runtime = Runtime(pages, page=128, kind=kind, num_recurrent_snapshots=200, **partial)
    for user in range(120):
        runtime.run([*shared, 10_000 + user, *range(user)])
        if user in {0, 119}:
            asked = []
            tokens = [*shared, 10_000, 5]
            hasher = KeyHasher(128, HASH_KEY).start()
            prepared = as_token_array(tokens)
            hasher.extend(prepared, None)

            def behind(blocks, hasher=hasher, prepared=prepared, asked=asked):
                asked.append(hasher.exact_keys_behind(prepared, None, blocks))
                return asked[-1]

            found = runtime.manager.longest_checkpoint(hasher.full_block_keys, len(tokens), behind)
            assert found == checkpoint_of(tokens[:129], 128)
            probes.append([len(keys) for keys in asked])
    assert probes[0] == probes[1] == [3]
    assert checkpoints.find_longest(runtime.manager._cache, asked[0], 128, 129, np.empty(0, np.int32)) == 0
