"""Turning a plan into a lease: what is pinned, what is evicted for it and in which order, and what a refusal leaves."""

from __future__ import annotations

import copy
import pickle

import pytest
from support.manager import Runtime, keys_of, run_of

from ctxcache.errors import ContractError
from ctxcache.ids import AcquireStatus


def test_h10_an_infeasible_hit_undoes_nothing_because_it_did_nothing():
    """One page, block A cached: A plus a token is refused without a trace; a cold request of one page then evicts A."""
    runtime = Runtime(1)
    lease = runtime.begin(run_of("A", 4), base_extra_tokens=0)
    runtime.publish(lease, run_of("A", 4))
    runtime.release(lease)
    before = runtime.everything()
    result = runtime.acquire(run_of("A", 5))
    assert (result.status, result.lease) == (AcquireStatus.INSUFFICIENT_CAPACITY, None)
    assert result.plan.reused_token_length == 4
    assert runtime.everything() == before
    assert runtime.manager.counters().evicted_records == 0
    cold = runtime.begin(run_of("B", 4), base_extra_tokens=0)
    assert cold.base_pages.tolist() == [0]
    assert runtime.manager.counters().reclaimed_base_kv_pages == 1
    assert len(runtime.manager.records) == 0


def test_the_matched_prefix_is_pinned_before_anything_is_evicted():
    """A request whose own prefix is the oldest record keeps it and evicts the younger one instead."""
    runtime = Runtime(5)
    runtime.run(run_of("T", 8), base_extra_tokens=0)
    runtime.run(run_of("U", 12), base_extra_tokens=0)
    lease = runtime.begin(run_of("T", 17), base_extra_tokens=0)
    assert lease.base_pages.tolist()[:2] == [0, 1]
    assert runtime.paths() == [[0, 1]]
    assert runtime.start(run_of("U", 13)) == 0


def test_a_fresh_pool_gives_its_lowest_pages_first_and_takes_the_last_page_back_first():
    """Page ids repeat from run to run: 0, 1, 2 from a fresh pool; a released lease's first page is given next."""
    runtime = Runtime(6)
    first, second = runtime.begin(run_of("A", 9)), runtime.begin(run_of("B", 5))
    assert (first.base_pages.tolist(), second.base_pages.tolist()) == ([0, 1, 2], [3, 4])
    runtime.release(first)
    assert runtime.begin(run_of("C", 13)).base_pages.tolist() == [0, 1, 2, 5]


def test_eviction_takes_only_as_many_records_as_it_needs_oldest_first():
    """Of three records with one page each, a demand for two pages beside one free page takes the oldest only."""
    runtime = Runtime(4)
    for letter in "ABC":
        runtime.run(run_of(letter, 4), base_extra_tokens=0)
    runtime.begin(run_of("D", 7))
    assert [runtime.start(run_of(letter, 5)) for letter in "ABC"] == [0, 4, 4]
    assert runtime.manager.counters().evicted_records == 1


def test_a_hit_makes_a_record_most_recently_used():
    """The record that a request hits is passed over by the next eviction."""
    runtime = Runtime(3)
    for letter in "AB":
        runtime.run(run_of(letter, 4), base_extra_tokens=0)
    runtime.release(runtime.begin(run_of("A", 5), base_extra_tokens=0))
    runtime.begin(run_of("C", 8), base_extra_tokens=0)
    assert [runtime.start(run_of(letter, 5)) for letter in "AB"] == [4, 0]


def test_a_hit_in_the_middle_refreshes_what_matched_and_no_tail_behind_it():
    """Of two branches and a record used later, the branches' tails go first although their stem was used last."""
    runtime = Runtime(8)
    stem = run_of("S", 4)
    runtime.run(stem + run_of("A", 4), base_extra_tokens=0)
    runtime.run(stem + run_of("B", 4), base_extra_tokens=0)
    runtime.run(run_of("X", 4), base_extra_tokens=0)
    paths = runtime.paths()
    runtime.release(runtime.begin(stem + run_of("C", 1)))
    assert runtime.paths() == paths
    lease = runtime.begin(run_of("Y", 24), base_extra_tokens=0)
    assert runtime.paths() == [paths[2], [0]]
    counters = runtime.manager.counters()
    assert (counters.evicted_records, counters.shortened_records) == (1, 1)
    runtime.release(lease)
    assert runtime.start(stem + run_of("C", 1)) == 4


def test_a_record_shortened_to_where_a_hit_ended_is_as_recent_as_that_hit():
    """Of a record, the blocks that were hit later stay behind a record used in between; the tail goes before it."""
    runtime = Runtime(9)
    runtime.run(run_of("T", 24), base_extra_tokens=0)
    runtime.run(run_of("X", 4), base_extra_tokens=0)
    runtime.release(runtime.begin(run_of("T", 9), base_extra_tokens=0))
    t, x = runtime.paths()
    runtime.release(runtime.begin(run_of("Y", 16), base_extra_tokens=0))
    assert runtime.paths() == [t[:4], x]
    runtime.release(runtime.begin(run_of("Y", 24), base_extra_tokens=0))
    assert runtime.paths() == [x, t[:2]]
    runtime.release(runtime.begin(run_of("Y", 28), base_extra_tokens=0))
    assert runtime.paths() == [t[:2]]
    runtime.begin(run_of("Y", 32), base_extra_tokens=0)
    assert runtime.paths() == [t[:1]]


def test_records_that_would_free_nothing_lacking_are_passed_over():
    """The oldest record's page is leased and the next one has a descendant: the youngest goes, the others stay."""
    runtime = Runtime(5)
    runtime.run(run_of("A", 4), base_extra_tokens=0)
    pin = runtime.begin(run_of("A", 5), base_extra_tokens=0)
    runtime.run(run_of("B", 4), base_extra_tokens=0)
    runtime.run(run_of("B", 8), base_extra_tokens=0)
    a, b, longer_b = runtime.paths()
    runtime.begin(run_of("C", 8), base_extra_tokens=0)
    assert runtime.paths() == [a, b]
    assert len(longer_b) == 2
    assert pin.base_pages.tolist()[0] == a[0]


def test_a_page_below_leased_descendants_can_still_be_reclaimed():
    """A record whose end is leased holds an unleased page in front of it: when nothing else is left, it goes for that."""
    runtime = Runtime(4)
    first, twin = (runtime.begin(run_of("T", 8), base_extra_tokens=0) for _ in range(2))
    runtime.publish(first, run_of("T", 4))
    assert runtime.publish(twin, run_of("T", 8)).canonical_base_pages.tolist() == [0, 3]
    runtime.release(first)
    assert runtime.free() == 1
    cold = runtime.begin(run_of("U", 8), base_extra_tokens=0)
    assert sorted(cold.base_pages.tolist()) == [0, 1]
    assert len(runtime.manager.records) == 0
    assert twin.base_pages.tolist() == [2, 3]
    runtime.release(twin, cold)
    assert runtime.free() == 4


def test_a_leased_page_is_not_reclaimed_when_its_record_goes():
    """The record of running sequences may be evicted; their pages stay theirs and become free with the last lease."""
    runtime = Runtime(4, max_records=1)
    runtime.run(run_of("T", 4), base_extra_tokens=0)
    lease, other = runtime.begin(run_of("T", 5)), runtime.begin(run_of("T", 5))
    runtime.release(other)
    runtime.run(run_of("U", 4), base_extra_tokens=0)
    assert lease.base_pages.tolist()[0] == 0
    assert runtime.start(run_of("T", 5)) == 0
    assert runtime.manager.counters().reclaimed_base_kv_pages == 0
    assert runtime.free() == 1
    runtime.release(lease)
    assert runtime.free() == 3


def test_h09_no_index_entry_outlives_its_page():
    """Runs that evict each other never find each other's pages; the index is as large as the cache at every step."""
    runtime = Runtime(4, page=128)
    for tokens, start, cached in (
        (run_of("T", 257), 0, 2),
        (run_of("U", 385), 0, 3),
        (run_of("T", 258), 0, 3),
        (run_of("U", 386), 128, 3),
    ):
        assert runtime.run(tokens) == start
        assert runtime.manager.num_indexed_blocks == cached == 4 - runtime.free()


def test_h11_evicting_one_branch_keeps_the_shared_stem():
    """Two records share a stem; when one goes, its own tail is freed, the stem stays and is found by the other."""
    runtime = Runtime(8, page=128, max_records=2)
    stem = run_of("T", 256)
    v = stem + run_of("V", 129)
    runtime.run(run_of("T", 385))
    runtime.run(v)
    assert runtime.free() == 4
    runtime.run(run_of("W", 129))
    assert runtime.free() == 4
    assert runtime.start(run_of("T", 386)) == 256
    assert runtime.start([*v, 7]) == 384
    assert runtime.manager.num_indexed_blocks == 4


def test_h12_a_lease_is_released_once_and_not_used_afterwards():
    """Second release, and every use after the first, is refused; pools and free lists stay as they were."""
    runtime = Runtime()
    lease = runtime.begin(run_of("T", 9))
    runtime.release(lease)
    assert lease.released
    before = runtime.everything()
    for use in (
        lambda: runtime.manager.release(lease),
        lambda: runtime.manager.grow(lease, 1),
        lambda: runtime.publish(lease, run_of("T", 9)),
        lambda: runtime.manager.release_restored_snapshots(lease),
        lambda: lease.base_pages,
        lambda: lease.draft_pages,
        lambda: lease.recurrent_snapshot_slot,
        lambda: lease.partial_kv_snapshot_slot,
        lambda: lease.published_full_block_count,
    ):
        with pytest.raises(ContractError, match="released"):
            use()
    assert runtime.everything() == before
    successor = runtime.begin(run_of("T", 9))
    assert (successor.row, successor.generation) == (lease.row, lease.generation + 1)
    with pytest.raises(ContractError, match="released"):
        runtime.manager.release(lease)
    assert not successor.released


def test_a_lease_of_another_manager_is_refused():
    """Handles know their manager."""
    one, other = Runtime(), Runtime()
    lease = other.begin(run_of("T", 9))
    with pytest.raises(ContractError, match="no lease of this manager"):
        one.manager.release(lease)
    with pytest.raises(ContractError, match="no lease of this manager"):
        one.manager.publish(None, keys_of(run_of("T", 9)), 9)
    assert not lease.released


def test_a_lease_cannot_be_duplicated():
    """Copies and pickles would be released twice; both are refused."""
    lease = Runtime().begin(run_of("T", 9))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ContractError, match="lease"):
            duplicate(lease)
    assert repr(lease) == "CacheRequestLease(row=0, generation=0)"


def test_a_leases_pages_are_copies():
    """Writing into what a lease returned does not reach the manager."""
    runtime = Runtime()
    lease = runtime.begin(run_of("T", 9))
    lease.base_pages[:] = 7
    assert lease.base_pages.tolist() == [0, 1, 2]
    assert lease.draft_pages.size == 0
    assert (lease.recurrent_snapshot_slot, lease.partial_kv_snapshot_slot) == (None, None)


def test_clear_forgets_everything_but_waits_for_leases():
    """clear() is refused while a lease is out; afterwards nothing matches and all pages are free."""
    runtime = Runtime()
    runtime.run(run_of("T", 9))
    lease = runtime.begin(run_of("U", 5))
    before = runtime.everything()
    with pytest.raises(ContractError, match="leases are out"):
        runtime.manager.clear()
    assert runtime.everything() == before
    runtime.release(lease)
    runtime.manager.clear()
    runtime.manager.check_invariants()
    assert (len(runtime.manager.records), runtime.free(), runtime.start(run_of("T", 9))) == (0, 8, 0)


def test_more_leases_than_the_first_arena_holds():
    """The arena grows in rows and columns; nobody's pages move."""
    runtime = Runtime(200)
    leases = [runtime.begin(run_of(chr(65 + i % 26), 3 + 4 * (i // 26))) for i in range(40)]
    wide = runtime.begin(run_of("z", 150))
    assert [lease.row for lease in leases] == list(range(40))
    pages = [page for lease in [*leases, wide] for page in lease.base_pages.tolist()]
    assert len(set(pages)) == len(pages) == 200 - runtime.free()
    runtime.release(wide, *leases)
    assert runtime.free() == 200
