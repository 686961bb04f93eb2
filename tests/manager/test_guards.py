"""Compiled code guards what it stands on: with one word of its memory spoilt, an operation raises, and never goes on in silence.

No input is known that leads there. A broken rule must be loud all the same, and must not hang.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.manager import checkpoint_of, keys_of, run_of
from support.manager_memory import Memory

from ctxcache.errors import InvariantError
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.manager import layout as c
from ctxcache.manager.block_index import insert, remove
from ctxcache.manager.block_tree import unlink
from ctxcache.manager.draft_pages import give_up_last_pair
from ctxcache.manager.eviction import evict_record, give_up_blocks
from ctxcache.manager.growth import grow_lease
from ctxcache.manager.lease_table import drop_slots, release_lease
from ctxcache.manager.lru import make_mark, make_record, take_over, touch
from ctxcache.manager.pools import let_go, take

Case = Callable[[Memory], Callable[[], object]]
CASES: list[tuple[str, Kind, Case]] = []


def guard(message: str, kind: Kind = Kind.VANILLA) -> Callable[[Case], Case]:
    """Register a case: it spoils the memory and returns the operation that has to notice."""

    def register(case: Case) -> Case:
        CASES.append((message, kind, case))
        return case

    return register


# Pools


@guard("taken from an empty pool")
def more_is_taken_than_is_free(m):
    return lambda: take(m.state, m.resource, c.BASE, np.empty(m.state[c.FREE + c.BASE] + 1, np.int32))


@guard("that somebody holds was on the free list")
def a_cached_page_is_free(m):
    m.resource[c.FREE_STACK, m.state[c.FREE + c.BASE] - 1] = m.leaf
    return m.grow()


@guard("pinned that the cache does not hold")
def a_matched_page_is_not_cached(m):
    operation = m.begin(run_of("a", 14))
    m.resource[c.CACHE_REFS, m.trunk] = 0
    return operation


@guard("more resources are pinned than were idle")
def no_page_is_idle(m):
    operation = m.begin(run_of("c", 9))
    m.state[c.IDLE + c.BASE] = 0
    return operation


@guard("given back that no lease holds")
def a_leased_page_has_no_reference(m):
    m.resource[c.LEASE_REFS, m.lease.base_pages[-1]] = 0
    return lambda: m.manager.release(m.lease)


@guard("more resources are given back than are out")
def every_page_is_free(m):
    m.state[c.FREE + c.BASE] = m.state[c.CAPACITY + c.BASE]
    return lambda: m.manager.release(m.lease)


@guard("lets go of a resource that it does not hold", Kind.HYBRID)
def a_snapshot_is_not_cached(m):
    operation = m.clear()
    m.resource[c.CACHE_REFS, m.at(c.RECURRENT, int(m.record[c.RECURRENT_SLOT, m.oldest]))] = 0
    return operation


@guard("lets go of a resource that it does not hold")
def nothing_is_let_go(m):
    return lambda: let_go(m.cache, c.BASE, -1)


@guard("takes hold of a resource that no lease holds", Kind.HYBRID)
def a_reserved_slot_has_no_reference(m):
    tokens = run_of("a", 13)
    reservation = m.manager.reserve_snapshots(m.lease, 13)
    m.resource[c.LEASE_REFS, m.at(c.RECURRENT, reservation.recurrent_snapshot_slot)] = 0
    return lambda: m.manager.publish_checkpoint(m.lease, keys_of(tokens), checkpoint_of(tokens), reservation)


@guard("reclaimed of a pool that has none idle")
def nothing_is_idle_at_the_end(m):
    operation = m.clear()
    m.state[c.IDLE + c.BASE] = 0
    return operation


# Records and their order of use


@guard("not there is evicted")
def the_next_to_go_has_no_place(m):
    m.recency[m.record[c.RECENCY_PLACE, m.oldest]] = -1
    return m.until_full()


@guard("not there is evicted")
def a_dead_record_is_next(m):
    m.cache.serial[m.oldest] = 0
    return m.until_full()


@guard("not there is evicted")
def nobody_is_the_oldest(m):
    operation = m.clear()
    m.cache.evictable[-1] = 0
    return operation


@guard("not there is evicted", Kind.HYBRID)
def no_record_is_evicted(m):
    return lambda: evict_record(m.cache, -1)


@guard("not there is evicted")
def no_record_is_shortened(m):
    return lambda: give_up_blocks(m.cache, -1, 1, 0)


@guard("does not end where it should")
def a_block_names_another_record(m):
    operation = m.clear()
    m.resource[c.FIRST_RECORD, m.path(m.oldest)[-1]] = m.newest
    return operation


@guard("where paths part")
def a_fork_has_no_entry(m):
    operation = m.clear()
    m.resource[c.FIRST_RECORD, m.trunk] = -1
    return operation


@guard("no entry ends behind a block")
def a_path_goes_in_a_circle(m):
    operation = m.begin(run_of("a", 6))
    m.node[c.FIRST_CHILD, m.trunk] = m.path(m.newest)[1]
    m.resource[c.FIRST_RECORD, m.path(m.newest)] = -1
    m.node[c.FIRST_CHILD, m.leaf] = m.trunk
    return operation


@guard("its own ancestor")
def an_entry_stands_above_itself(m):
    operation = m.begin(run_of("a", 14))
    m.record[c.ABOVE, m.resource[c.FIRST_RECORD, m.trunk]] = m.newest
    return operation


@guard("becomes a record")
def a_record_is_made_twice(m):
    return lambda: make_record(m.cache, m.newest)


@guard("becomes a mark")
def a_mark_is_made_twice(m):
    return lambda: make_mark(m.cache, int(m.resource[c.FIRST_RECORD, m.trunk]))


@guard("takes over what is no mark")
def a_record_is_taken_over(m):
    return lambda: take_over(m.cache, m.newest, m.oldest)


@guard("is not as long as its record counts", Kind.EAGLE)
def a_draft_path_counts_too_little(m):
    block = m.path(m.oldest)[-1]
    m.node[c.PAIR_PAGE, block] = -1
    return lambda: give_up_last_pair(m.cache, m.oldest)


@guard("not there is used")
def no_record_is_used(m):
    return lambda: touch(m.cache, -1)


@guard("without a free one")
def no_record_is_free(m):
    operation, _, _ = m.publish()
    m.state[c.FREE_RECORD] = -1
    return operation


@guard("without a free one")
def a_live_record_is_free(m):
    operation, _, _ = m.publish()
    m.state[c.FREE_RECORD] = m.oldest
    return operation


@guard("not at its place in the LRU order")
def a_place_is_far_outside(m):
    operation = m.begin(run_of("c", 9))
    m.record[c.RECENCY_PLACE, m.resource[c.FIRST_RECORD, m.path(m.order[1])[-1]]] = 1 << 20
    return operation


@guard("not at its place in the LRU order")
def a_place_is_negative(m):
    operation = m.begin(run_of("c", 9))
    m.record[c.RECENCY_PLACE, m.order[1]] = -1
    return operation


@guard("has no place left")
def the_order_of_use_is_full(m):
    operation = m.begin(run_of("c", 9))
    m.state[c.RECENCY_END] = m.recency.size
    return operation


@guard("the sweep of the LRU order is outside of it")
def the_sweep_went_too_far(m):
    operation = m.begin(run_of("c", 9))
    m.state[c.SWEPT] = m.state[c.RECENCY_END] + 1
    return operation


@guard("behind the end of the LRU order is marked")
def the_order_of_use_is_empty(m):
    m.state[c.RECENCY_END] = 0
    return m.until_full()


# Index and tree


@guard("taken out of an index that does not hold it")
def a_block_is_not_indexed(m):
    operation = m.clear()
    remove(m.cache.key, m.cache.slot, m.path(m.oldest)[-1])
    return operation


@guard("no empty slot")
def a_lookup_finds_no_end(m):
    slots = m.cache.slot[:-1]
    slots[slots < 0] = slots.max()
    return lambda: m.runtime.plan(Memory.NEW)


@guard("no empty slot")
def an_insertion_finds_no_end(m):
    slots = m.cache.slot[:-1]
    slots[slots < 0] = slots.max()
    return lambda: insert(m.cache.key, m.cache.slot, m.free, np.uint64(1), np.uint64(2))


@guard("is taken out")
def a_block_with_children_goes(m):
    return lambda: unlink(m.state, m.node, m.trunk)


@guard("is taken out")
def the_tree_is_empty(m):
    operation = m.clear()
    m.state[c.NUM_NODES] = 0
    return operation


@guard("more blocks are to be indexed than there are pages")
def the_tree_is_full(m):
    operation, _, _ = m.publish()
    m.state[c.NUM_NODES] = m.node.shape[1]
    return operation


@guard("is not the cache's")
def an_indexed_page_is_cached_twice(m):
    operation = m.clear()
    m.resource[c.CACHE_REFS, m.path(m.oldest)[-1]] = 2
    return operation


# Leases


@guard("is out already")
def a_live_row_is_free(m):
    operation = m.begin()
    m.state[c.FREE_LEASE] = m.lease.row
    return operation


@guard("more base pages than it has room for")
def a_lease_has_fewer_than_no_pages(m):
    m.leases.fields[c.NUM_BASE, m.lease.row] = -1
    return lambda: m.manager.release(m.lease)


@guard("more draft pages than it has room for", Kind.EAGLE)
def a_lease_has_too_many_draft_pages(m):
    m.leases.fields[c.NUM_DRAFT, m.lease.row] = 1 << 20
    return lambda: m.manager.release(m.lease)


@guard("is not live")
def a_row_is_released_twice(m):
    m.manager.release(m.lease)
    return lambda: release_lease(m.cache, m.leases, m.lease.row)


@guard("is not live")
def a_row_beyond_the_table_is_released(m):
    return lambda: release_lease(m.cache, m.leases, m.leases.fields.shape[1])


@guard("is not live", Kind.HYBRID)
def slots_of_a_released_row_are_dropped(m):
    m.manager.release(m.lease)
    return lambda: drop_slots(m.cache, m.leases.fields, m.lease.row, c.RESTORED)


@guard("grows without room for its pages")
def a_row_is_too_narrow(m):
    narrow = m.leases._replace(base_pages=m.leases.base_pages[:, :5].copy())
    return lambda: grow_lease(m.cache, narrow, m.lease.row, 3, 0)


@guard("slots are reserved for a lease that has reserved some", Kind.HYBRID)
def half_a_reservation_is_left(m):
    m.leases.fields[c.RESERVED + 1, m.lease.row] = 0
    return lambda: m.manager.reserve_snapshots(m.lease, 13)


# Publication


@guard("publishes a page that is not its own")
def a_private_page_is_cached(m):
    operation, _, pages = m.publish()
    m.resource[c.CACHE_REFS, pages[1]] = 1
    return operation


@guard("publishes a page that is not its own")
def a_private_page_is_not_leased(m):
    operation, _, pages = m.publish()
    m.resource[c.LEASE_REFS, pages[1]] = 0
    return operation


@guard("publishes a page that is not its own")
def a_private_page_is_none(m):
    operation, row, _ = m.publish()
    m.leases.base_pages[row, 1] = -1
    return operation


@guard("knows more blocks than it has pages")
def a_lease_knows_too_much(m):
    m.leases.fields[c.NUM_BASE, m.lease.row] = 1
    return lambda: m.manager.publish(m.lease, keys_of(run_of("a", 14)), 4)


# Draft pages


@guard("without a draft path gives one up", Kind.EAGLE)
def a_draft_path_has_no_last_page(m):
    operation = m.clear()
    m.record[c.LAST_DRAFT_PAGE, m.oldest] = -1
    return operation


@guard("needed less often than never", Kind.EAGLE)
def a_draft_page_is_needed_by_nobody(m):
    operation = m.clear()
    m.node[c.PAIR_COUNT, m.path(m.oldest)[-1]] = 0
    return operation


@guard("goes on before the first block", Kind.EAGLE)
def a_draft_path_is_shorter_than_that(m):
    operation = m.clear()
    m.record[c.NUM_BLOCKS, m.oldest] = 9
    return operation


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("message", "kind", "case"), CASES, ids=[case.__name__ for _, _, case in CASES])
def test_a_broken_rule_is_loud(message: str, kind: Kind, case: Case) -> None:
    """The operation that meets the spoilt word raises `InvariantError`, and says what it stood on."""
    operation = case(Memory(kind))
    with pytest.raises(InvariantError, match=message):
        operation()


def test_a_lease_that_was_not_had_holds_nothing() -> None:
    """A broken rule met in the middle of `acquire`: what was pinned by then is given back, and no lease is out for it."""
    m = Memory(Kind.VANILLA)
    tokens = run_of("c", 4 * (int(m.state[c.FREE + c.BASE]) + 3))
    plan = m.runtime.plan(tokens)
    assert plan.reused_token_length
    before = m.resource[c.LEASE_REFS].copy()
    m.recency[m.record[c.RECENCY_PLACE, m.oldest]] = -1
    with pytest.raises(InvariantError, match="not there is evicted"):
        m.manager.acquire(plan)
    assert m.manager.num_leases == 1
    assert m.resource[c.LEASE_REFS].tolist() == before.tolist()


@pytest.mark.parametrize("spoilt", [c.FREE_RECORD, c.NUM_NODES])
def test_a_publication_that_fails_says_so_before_it_counts(spoilt: int) -> None:
    """A publication that meets a broken rule is no publication: no counter moves, no record is made."""
    m = Memory(Kind.VANILLA)
    operation, _, _ = m.publish()
    before, records = m.manager.counters(), len(m.manager.records)
    m.state[spoilt] = -1 if spoilt == c.FREE_RECORD else m.node.shape[1]
    with pytest.raises(InvariantError):
        operation()
    assert (m.manager.counters(), len(m.manager.records)) == (before, records)
