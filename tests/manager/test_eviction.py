"""What goes: the least recently used block that nothing follows, one by one, and what becomes of its record.

A lease that computed a prefix again publishes behind pages of others: it holds the end of the path, not its beginning.
"""

from __future__ import annotations

import pytest
from support.manager_views import keys_of

from ctxcache.ids import AcquireStatus
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.testing import ReferenceManager

BOTH = pytest.mark.parametrize("make", [ContextCacheManager, ReferenceManager], ids=["fast", "twin"])


def begin(manager, *tokens, mode=Mode.VANILLA, bypass=False):
    """Lease one page a token, and publish all of them."""
    plan = manager.plan(keys_of(tokens, 1), len(tokens), mode=mode, base_extra_tokens=0, bypass=bypass)
    result = manager.acquire(plan)
    assert result.status is AcquireStatus.ACQUIRED
    paired = {"draft_state_length": len(tokens)} if mode is Mode.EAGLE else {}
    record = manager.publish(result.lease, keys_of(tokens, 1), len(tokens), **paired).record
    return result.lease, record


@BOTH
def test_one_page_lacking_takes_one_page(make):
    """The least recently used record has 15 pages and one is lacking: 14 stay, and the record with them."""
    manager = make(tokens_per_page=1, num_base_pages=20)
    for tokens in (range(15), range(100, 105)):
        manager.release(begin(manager, *tokens)[0])
    begin(manager, 7)
    first, second, _ = manager.records
    assert (first.base_page_path.size, second.base_page_path.size) == (14, 5)
    counters = manager.counters()
    assert (counters.evicted_records, counters.shortened_records, counters.reclaimed_base_kv_pages) == (0, 1, 1)
    manager.check_invariants()


@BOTH
def test_a_record_counts_as_shortened_once_in_an_operation(make):
    """Growth by three pages, then by one, takes four of one record: it was shortened twice, and evicted when it is used up."""
    manager = make(tokens_per_page=1, num_base_pages=9)
    manager.release(begin(manager, *range(8))[0])
    lease, _ = begin(manager, 50)
    assert manager.grow(lease, 3)
    assert manager.grow(lease, 1)
    counters = manager.counters()
    assert (counters.evicted_records, counters.shortened_records, counters.reclaimed_base_kv_pages) == (0, 2, 4)
    assert manager.grow(lease, 4)
    counters = manager.counters()
    assert (counters.evicted_records, counters.shortened_records, counters.reclaimed_base_kv_pages) == (1, 2, 8)
    manager.check_invariants()


@BOTH
def test_a_record_that_comes_up_to_another_ones_end_is_gone(make):
    """A longer record of the same sequence loses its own blocks; the shorter one then stands for what both had."""
    manager = make(tokens_per_page=1, num_base_pages=6)
    manager.release(begin(manager, 1, 2)[0])
    manager.release(begin(manager, 1, 2, 3, 4)[0])
    begin(manager, 5, 6, 7)
    assert [record.base_page_path.size for record in manager.records] == [2, 3, 3]
    assert manager.counters().reclaimed_base_kv_pages == 1
    lease = manager.acquire(manager.plan(keys_of((8,), 1), 1, base_extra_tokens=0)).lease
    assert [record.serial for record in manager.records] == [1, 3]
    counters = manager.counters()
    assert (counters.evicted_records, counters.shortened_records) == (1, 1)
    manager.release(lease)
    manager.check_invariants()


@BOTH
@pytest.mark.parametrize("limit", [1, 2])
def test_a_record_beyond_the_limit_goes_whole(make, limit):
    """Over the limit on records the least recent one goes down to the fork, also past what a hit made recent."""
    manager = make(tokens_per_page=1, num_base_pages=20, max_records=limit)
    manager.release(begin(manager, 1, 2, 3, 4, 5)[0])
    manager.release(manager.acquire(manager.plan(keys_of((1, 2, 3, 9), 1), 4)).lease)
    manager.release(begin(manager, 1, 2, 8)[0])
    manager.release(begin(manager, 7)[0])
    assert len(manager.records) == limit
    assert manager.num_indexed_blocks == {1: 1, 2: 4}[limit]
    assert manager.counters().shortened_records == 0
    manager.check_invariants()


@BOTH
def test_an_unleased_end_goes_before_what_stands_behind_a_leased_one(make):
    """The older record's end is leased, two pages before it are not: a younger idle record goes first, then these."""
    manager = make(tokens_per_page=1, num_base_pages=6)
    first, first_record = begin(manager, 1, 2, 3)
    _, straddling = begin(manager, 1, 2, 4, bypass=True)
    manager.release(first)
    newest, newest_record = begin(manager, 5)
    manager.release(newest)
    assert not first_record.cached
    begin(manager, 6)
    assert not newest_record.cached
    assert straddling.cached
    begin(manager, 7)
    assert straddling.base_page_path.size == 1
    manager.check_invariants()


@BOTH
def test_a_leased_end_with_nothing_idle_before_it_stays(make):
    """Where the pages before it are leased too, evicting the older record frees nothing, and it is passed over."""
    manager = make(tokens_per_page=1, num_base_pages=4, max_records=2)
    lease, record = begin(manager, 1, 2, 3)
    other, idle = begin(manager, 5)
    manager.release(other)
    begin(manager, 6)
    assert record.cached
    assert not idle.cached
    manager.release(lease)
    manager.check_invariants()
