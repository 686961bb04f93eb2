"""Publication: canonical pages, records and their limit, and transactions that leave no trace when refused."""

from __future__ import annotations

import pytest
from support.manager import Runtime, keys_of, run_of

from ctxcache.errors import ContractError
from ctxcache.ids import PublishStatus


def test_blocks_within_the_resident_length_become_reusable():
    """Eleven resident tokens publish two blocks of four; a later request starts at eight."""
    runtime = Runtime()
    lease = runtime.begin(run_of("T", 15))
    result = runtime.publish(lease, run_of("T", 15), 11)
    assert result.status is PublishStatus.PUBLISHED
    assert result.canonical_base_pages.tolist() == lease.base_pages.tolist()[:2] == [0, 1]
    assert result.published_full_block_count == lease.published_full_block_count == 2
    assert result.record.base_page_path.tolist() == [0, 1]
    assert result.record.draft_page_path.size == 0
    assert result.record.exact_checkpoint_length == 0
    assert (result.record.recurrent_snapshot_slot, result.record.partial_kv_snapshot_slot) == (None, None)
    assert runtime.start(run_of("T", 15)) == 8


def test_h06_a_twin_keeps_its_own_pages_and_gives_them_back():
    """Two equal prompts run side by side: the second publication is EXISTING, its pages stay private to its lease."""
    runtime = Runtime(8, page=128)
    first, second = (runtime.begin(run_of("T", 257)) for _ in range(2))
    assert runtime.free() == 2
    own = second.base_pages.tolist()
    assert runtime.publish(first, run_of("T", 257)).status is PublishStatus.PUBLISHED
    result = runtime.publish(second, run_of("T", 257))
    assert result.status is PublishStatus.EXISTING_RECORD
    assert result.canonical_base_pages.tolist() == first.base_pages.tolist()[:2]
    assert second.base_pages.tolist() == own
    assert second.published_full_block_count == 2
    runtime.release(first, second)
    assert (runtime.free(), runtime.manager.num_indexed_blocks) == (6, 2)


def test_descendants_of_a_duplicate_extend_the_canonical_chain():
    """A twin that gets further hangs its new block behind the canonical pages, and only that one of its pages is kept."""
    runtime = Runtime(8)
    first, second = (runtime.begin(run_of("T", 13)) for _ in range(2))
    runtime.publish(first, run_of("T", 13), 8)
    result = runtime.publish(second, run_of("T", 13), 12)
    assert result.canonical_base_pages.tolist() == [0, 1, 6]
    runtime.release(second, first)
    assert runtime.free() == 5
    assert runtime.begin(run_of("T", 13)).base_pages.tolist()[:3] == [0, 1, 6]


def test_publishing_again_as_the_sequence_grows():
    """A lease publishes its prompt and later its answer: two records on one path, no page twice."""
    runtime = Runtime()
    tokens = run_of("T", 17)
    lease = runtime.begin(tokens[:9])
    runtime.publish(lease, tokens[:9])
    assert runtime.manager.grow(lease, 2)
    result = runtime.publish(lease, tokens)
    assert (result.status, result.published_full_block_count) == (PublishStatus.PUBLISHED, 4)
    assert runtime.paths() == [[0, 1], [0, 1, 2, 3]]
    counters = runtime.manager.counters()
    assert (counters.publication_attempts, counters.committed_publications) == (2, 2)


def test_publishing_nothing_new_touches_without_counting():
    """A second call for the same blocks reports EXISTING and makes the record most recent; it is no attempt."""
    runtime = Runtime()
    lease = runtime.begin(run_of("T", 9))
    record = runtime.publish(lease, run_of("T", 9)).record
    runtime.run(run_of("U", 4))
    again = runtime.publish(lease, run_of("T", 9))
    assert (again.status, again.record) == (PublishStatus.EXISTING_RECORD, record)
    assert list(runtime.manager.records)[-1] == record
    assert runtime.manager.counters().publication_attempts == 2


def test_a_hit_that_publishes_its_prefix_counts_as_an_existing_endpoint():
    """What a sequence reused it has not itself published, so its first publication is an attempt."""
    runtime = Runtime()
    runtime.run(run_of("T", 9))
    lease = runtime.begin(run_of("T", 10))
    assert lease.published_full_block_count == 0
    assert runtime.publish(lease, run_of("T", 10)).status is PublishStatus.EXISTING_RECORD
    counters = runtime.manager.counters()
    assert (counters.publication_attempts, counters.existing_publications) == (2, 1)


def test_an_evicted_prefix_is_published_anew_from_the_leases_own_pages():
    """The record that a lease reused is gone; the lease still holds the pages and publishes them again with its own."""
    runtime = Runtime(8, max_records=1)
    runtime.run(run_of("T", 9))
    lease = runtime.begin(run_of("T", 13))
    runtime.run(run_of("U", 4))
    assert runtime.start(run_of("T", 13)) == 0
    result = runtime.publish(lease, run_of("T", 13))
    assert result.canonical_base_pages.tolist() == lease.base_pages.tolist()[:3]
    assert runtime.start(run_of("T", 13)) == 12


def test_over_the_limit_the_least_recently_used_record_goes():
    """A third record under a limit of two evicts the oldest, also while its pages are leased."""
    runtime = Runtime(8, max_records=2)
    lease = runtime.begin(run_of("A", 5))
    runtime.publish(lease, run_of("A", 5))
    for letter in "BC":
        runtime.run(run_of(letter, 4), base_extra_tokens=0)
    assert [runtime.start(run_of(letter, 5)) for letter in "ABC"] == [0, 4, 4]
    assert runtime.manager.counters().evicted_records == 1
    runtime.release(lease)
    assert runtime.free() == 6


def test_a_limit_of_none_keeps_nothing():
    """With max_records=0 a publication succeeds and its record is gone at once."""
    runtime = Runtime(4, max_records=0)
    lease = runtime.begin(run_of("T", 9))
    result = runtime.publish(lease, run_of("T", 9))
    assert (result.status, result.record) == (PublishStatus.PUBLISHED, None)
    assert (len(runtime.manager.records), runtime.manager.num_indexed_blocks) == (0, 0)
    runtime.release(lease)
    assert runtime.free() == 4


def test_a_record_extended_under_a_limit_keeps_its_stem():
    """With room for one record, a longer one of the same sequence replaces the shorter, and no block is lost."""
    runtime = Runtime(8, max_records=1)
    runtime.run(run_of("T", 8))
    runtime.run(run_of("T", 12))
    assert runtime.paths() == [[0, 1, 2]]
    assert runtime.manager.counters().reclaimed_base_kv_pages == 0


@pytest.mark.parametrize("token", [0, 3, 4, 7])
def test_a_prefix_that_is_not_the_leases_own_is_refused(token):
    """Tokens that differ anywhere in what the lease reused are another sequence's; nothing changes but the counter."""
    runtime = Runtime()
    runtime.run(run_of("T", 9))
    lease = runtime.begin(run_of("T", 13))
    before = runtime.everything()
    tokens = run_of("T", 13)
    tokens[token] += 1
    keys = keys_of(tokens)
    with pytest.raises(ContractError, match="keys differ"):
        runtime.manager.publish(lease, keys, 13)
    with pytest.raises(ContractError, match="keys differ"):
        runtime.publish(lease, run_of("U", 13))
    runtime.manager.check_invariants()
    assert runtime.everything() == before
    counters = runtime.manager.counters()
    assert (counters.refused_publications, counters.publication_attempts) == (2, 3)
    assert runtime.publish(lease, run_of("T", 13)).status is PublishStatus.PUBLISHED


def test_what_a_lease_published_it_cannot_take_back():
    """Also blocks that the lease itself published are settled, be they canonical or duplicates."""
    runtime = Runtime()
    first, twin = (runtime.begin(run_of("T", 13)) for _ in range(2))
    for lease in (first, twin):
        runtime.publish(lease, run_of("T", 13), 8)
        with pytest.raises(ContractError, match="keys differ"):
            runtime.publish(lease, run_of("T", 4) + run_of("U", 9))


def test_keys_that_repeat_are_refused_without_a_trace():
    """A key that another block has already is no chain; the blocks entered before it are taken out again."""
    runtime = Runtime()
    lease = runtime.begin(run_of("T", 17))
    before = runtime.everything()
    keys = keys_of(run_of("T", 17)).copy()
    keys[2] = keys[0]
    with pytest.raises(ContractError, match="chain"):
        runtime.manager.publish(lease, keys, 17)
    runtime.manager.check_invariants()
    assert runtime.everything() == before
    runtime.publish(lease, run_of("T", 17))


@pytest.mark.parametrize(
    ("resident", "options", "message"),
    [
        (3, {}, "no full block"),
        (0, {}, "no full block"),
        (-1, {}, "resident_state_length"),
        (9.0, {}, "resident_state_length"),
        (33, {}, "rows"),
        (17, {}, "more than the lease has pages"),
        (9, {"draft_state_length": 4}, "paired draft"),
    ],
)
def test_publications_that_cannot_be_are_refused(resident, options, message):
    """Too little, too much, the wrong kind of number, or a draft where there is none: refused, and nothing changes."""
    runtime = Runtime()
    lease = runtime.begin(run_of("T", 9), base_extra_tokens=0)
    before = runtime.everything()
    with pytest.raises(ContractError, match=message):
        runtime.publish(lease, run_of("T", 16), resident, **({"draft_state_length": 0} | options))
    runtime.manager.check_invariants()
    assert runtime.everything() == before


def test_records_are_views_that_know_when_they_are_gone():
    """Views of one record are equal and hash alike; reading an evicted one is refused, asking whether it is there is not."""
    runtime = Runtime(4)
    runtime.run(run_of("T", 9))
    (record,) = runtime.manager.records
    (again,) = runtime.manager.records
    assert (record, hash(record), repr(record)) == (again, hash(again), "CacheRecord(serial=1)")
    assert record != "record"
    assert record.cached
    runtime.manager.clear()
    assert not record.cached
    for read in ("base_page_path", "draft_page_path", "recurrent_snapshot_slot", "exact_checkpoint_length"):
        with pytest.raises(ContractError, match="evicted"):
            getattr(record, read)
    runtime.run(run_of("T", 9))
    (successor,) = runtime.manager.records
    assert successor != record


def test_a_lease_may_leave_one_record():
    """Published three times, moving: one record, at the last end, and nothing evicted; a found one stays where it is."""
    runtime = Runtime(12)
    runtime.run(run_of("T", 4), base_extra_tokens=0)
    tokens = run_of("T", 24)
    lease = runtime.begin(tokens, base_extra_tokens=0)
    for length in (4, 8, 12, 24):
        result = runtime.publish(lease, tokens, length, moves_own_record=True)
    assert result.status is PublishStatus.PUBLISHED
    assert [len(path) for path in runtime.paths()] == [1, 6]
    assert runtime.manager.counters().evicted_records == 0
    assert runtime.publish(lease, tokens, 8, moves_own_record=True).status is PublishStatus.PUBLISHED
    assert [len(path) for path in runtime.paths()] == [6, 1, 2]


def test_a_moved_record_gives_way_to_one_that_stands_there():
    """Where another record ends at the new end it is touched, and the own one goes, uncounted; an evicted one is made anew."""
    runtime = Runtime(16, max_records=3)
    tokens = run_of("T", 16)
    lease = runtime.begin(tokens)
    runtime.publish(lease, tokens, 8, moves_own_record=True)
    runtime.run(tokens)
    result = runtime.publish(lease, tokens, 16, moves_own_record=True)
    assert result.status is PublishStatus.EXISTING_RECORD
    assert [len(path) for path in runtime.paths()] == [4]
    assert runtime.manager.counters().evicted_records == 0
    other = runtime.begin(run_of("U", 8))
    own = runtime.publish(other, run_of("U", 8), 4, moves_own_record=True).record
    for letter in "VWX":
        runtime.run(run_of(letter, 4), base_extra_tokens=0)
    assert not own.cached
    assert runtime.publish(other, run_of("U", 8), 8, moves_own_record=True).record.base_page_path.size == 2


def test_a_moved_record_leaves_what_others_stand_on():
    """Another sequence forked off at the own record's end: its blocks stay, and the last uses on either side are kept."""
    runtime = Runtime(12)
    tokens = run_of("T", 16)
    lease = runtime.begin(tokens, base_extra_tokens=0)
    runtime.publish(lease, tokens, 8, moves_own_record=True)
    runtime.run(tokens[:8] + run_of("U", 4), base_extra_tokens=0)
    runtime.publish(lease, tokens, 16, moves_own_record=True)
    assert [len(path) for path in runtime.paths()] == [3, 4]
    runtime.release(lease)
    runtime.begin(run_of("V", 32), base_extra_tokens=0)
    assert [len(path) for path in runtime.paths()] == [4]


@pytest.mark.parametrize("used", ["B", "AB", "ABCD", "DCBA", "ABACABAD"])
def test_order_survives_any_number_of_uses(used):
    """Uses fill the order of recency over and over; the order, of eviction too, is that of the last uses all the while."""
    runtime = Runtime(8)
    for letter in "ABCD":
        runtime.run(run_of(letter, 4), base_extra_tokens=0)
    paths = dict(zip("ABCD", runtime.paths(), strict=True))
    order = list("ABCD")
    for _ in range(len(runtime.manager._cache.recency)):
        for letter in used:
            runtime.release(runtime.begin(run_of(letter, 5)))
            order.remove(letter)
            order.append(letter)
            assert runtime.paths() == [paths[each] for each in order]
    runtime.manager.check_invariants()
    runtime.begin(run_of("X", 22))
    assert {letter for letter in "ABCD" if runtime.start(run_of(letter, 5))} == set(order[2:])


def test_counters_balance_and_never_fall():
    """After hits, twins, refusals and evictions: attempts are committed plus existing plus refused."""
    runtime = Runtime(6, max_records=3)
    last = None
    for step, letter in enumerate("ABACBADCAB"):
        lease = runtime.begin(run_of(letter, 5 + step))
        runtime.publish(lease, run_of(letter, 5 + step))
        if step % 3 == 0:
            with pytest.raises(ContractError, match="keys differ"):
                runtime.publish(lease, run_of("Z", 20), 5 + step)
        runtime.release(lease)
        now = runtime.manager.counters()
        assert now.publication_attempts == (
            now.committed_publications + now.existing_publications + now.refused_publications
        )
        if last is not None:
            assert all(getattr(now, name) >= getattr(last, name) for name in now.__slots__)
        last = now
    assert last.evicted_records > 0
