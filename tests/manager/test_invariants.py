"""The invariant checker can fail: one word of the manager's memory is changed at a time, and it says which rule broke."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from support.manager import keys_of
from support.manager_memory import Memory

from ctxcache.errors import InvariantError
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.manager import layout as c
from ctxcache.manager.block_index import remove
from ctxcache.manager.invariants import name_what_is_broken
from ctxcache.manager.lru import drop_entry, forget_evictable, make_mark
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.manager.soundness import is_sound

CORRUPTIONS: list[tuple[str, Kind, Callable[[Memory], object]]] = []


def breaks(message: str, kind: Kind = Kind.VANILLA) -> Callable[[Callable[[Memory], object]], Callable[..., object]]:
    """Register a corruption and what the checker has to say about it."""

    def register(corrupt: Callable[[Memory], object]) -> Callable[..., object]:
        CORRUPTIONS.append((message, kind, corrupt))
        return corrupt

    return register


# The LRU order


@breaks("the LRU order is longer than there are records")
def order_in_a_circle(m: Memory) -> None:
    m.record[c.NEWER, m.newest] = m.oldest


@breaks("does not know its older neighbour")
def neighbour_forgotten(m: Memory) -> None:
    m.record[c.OLDER, m.order[1]] = -1


@breaks("of the LRU order is dead")
def record_without_serial(m: Memory) -> None:
    m.cache.serial[m.oldest] = 0


@breaks("was used before its older neighbour")
def order_against_use(m: Memory) -> None:
    used = m.record[c.RECENCY_PLACE]
    used[m.oldest], used[m.newest] = used[m.newest], used[m.oldest]


@breaks("the LRU order does not end at the newest record")
def newest_misnamed(m: Memory) -> None:
    m.state[c.NEWEST_RECORD] = m.oldest


@breaks("the number of records is wrong")
def records_overcounted(m: Memory) -> None:
    m.state[c.NUM_RECORDS] += 1


@breaks("there are more records than the limit")
def limit_below_the_records(m: Memory) -> None:
    m.state[c.MAX_RECORDS] = 3


@breaks("6 records live, 5 are in the LRU order")
def record_outside_the_order(m: Memory) -> None:
    m.cache.serial[m.state[c.FREE_RECORD]] = 99


# Paths, index and tree


@breaks("is its own ancestor")
def path_in_a_circle(m: Memory) -> None:
    m.node[c.PARENT, m.trunk] = m.leaf


@breaks("a block is indexed twice")
def block_indexed_twice(m: Memory) -> None:
    slot = m.cache.slot[:-1]
    slot[int((slot < 0).argmax())] = slot[int((slot >= 0).argmax())]


@breaks("are indexed or needed, not both")
def block_not_indexed(m: Memory) -> None:
    remove(m.cache.key, m.cache.slot, m.leaf)


@breaks("the number of indexed blocks is wrong")
def blocks_overcounted(m: Memory) -> None:
    m.state[c.NUM_NODES] += 1


@breaks("is not found by its key")
def key_of_another(m: Memory) -> None:
    m.cache.key[m.leaf] = m.cache.key[m.trunk]


@breaks("does not know its parent")
def child_of_another(m: Memory) -> None:
    m.node[c.FIRST_CHILD, m.leaf] = m.trunk


@breaks("does not know its elder sibling")
def sibling_forgotten(m: Memory) -> None:
    younger = m.node[c.NEXT_SIBLING, m.node[c.FIRST_CHILD, m.trunk]]
    m.node[c.PREVIOUS_SIBLING, younger] = -1


@breaks("lists 0 of 2 children")
def children_unlisted(m: Memory) -> None:
    m.node[c.FIRST_CHILD, m.trunk] = -1


# Endpoints


@breaks("is listed at block")
def record_listed_elsewhere(m: Memory) -> None:
    m.resource[c.FIRST_RECORD, m.trunk] = m.newest


@breaks("the lists of records by endpoint differ from the LRU order")
def record_unlisted(m: Memory) -> None:
    m.resource[c.FIRST_RECORD, m.leaf] = -1


@breaks("are indexed or needed, not both")
def end_without_a_record(m: Memory) -> None:
    make_mark(m.cache, m.newest)


@breaks("where paths part")
def fork_without_an_entry(m: Memory) -> None:
    mark = int(m.resource[c.FIRST_RECORD, m.trunk])
    forget_evictable(m.cache, mark)
    m.resource[c.FIRST_RECORD, m.trunk] = -1
    drop_entry(m.cache, mark)


@breaks("does not know the one above it")
def entry_above_forgotten(m: Memory) -> None:
    m.record[c.ABOVE, m.newest] = -1


# Pools and leases


@breaks("the number of leases is wrong")
def leases_overcounted(m: Memory) -> None:
    m.state[c.NUM_LEASES] += 1


@breaks("a base KV page is on the free list twice")
def page_free_twice(m: Memory) -> None:
    m.resource[c.FREE_STACK, 1] = m.resource[c.FREE_STACK, 0]


@breaks("has 1 lease references, leases have 0")
def hold_of_no_lease(m: Memory) -> None:
    m.resource[c.LEASE_REFS, m.free] += 1


@breaks("has 0 lease references, leases have 1")
def lease_without_its_hold(m: Memory) -> None:
    m.resource[c.LEASE_REFS, m.lease.base_pages[-1]] -= 1


@breaks("has 1 cache references, records have 0")
def hold_of_no_record(m: Memory) -> None:
    m.resource[c.CACHE_REFS, m.free] = 1


@breaks("has 0 cache references, records have 1")
def record_without_its_hold(m: Memory) -> None:
    m.resource[c.CACHE_REFS, m.path(m.oldest)[-1]] = 0


@breaks("are free and held")
def page_free_and_held(m: Memory) -> None:
    m.resource[c.FREE_STACK, 0] = m.leaf


@breaks("1 of 24 base KV pages are lost")
def page_lost(m: Memory) -> None:
    m.state[c.FREE + c.BASE] -= 1


@breaks("base KV pages are idle")
def idle_overcounted(m: Memory) -> None:
    m.state[c.IDLE + c.BASE] += 1


# Records by last use, and the marks of the evictable ones


@breaks("the recency's ends")
def recency_beyond_its_end(m: Memory) -> None:
    m.state[c.RECENCY_END] = m.recency.size + 1


@breaks("the recency differs from the LRU order")
def recency_against_the_order(m: Memory) -> None:
    places = m.record[c.RECENCY_PLACE, m.order[:2]]
    m.recency[places] = m.recency[places[::-1]]


@breaks("the recency is filled where it is swept")
def recency_ends_too_early(m: Memory) -> None:
    m.state[[c.SETTLED, c.SWEPT]] = 0
    m.state[c.RECENCY_END] = m.record[c.RECENCY_PLACE, m.newest]


@breaks("does not know its place")
def place_forgotten(m: Memory) -> None:
    m.record[c.RECENCY_PLACE, m.newest] += 1


@breaks("other entries are noted as records")
def records_not_noted(m: Memory) -> None:
    m.cache.evictable[-1] = 0


@breaks("are marked as evictable wrongly")
def evictable_records_unmarked(m: Memory) -> None:
    m.cache.evictable[c.BASE] = 0


@breaks("another record is the oldest evictable one")
def oldest_evictable_record_hidden(m: Memory) -> None:
    m.cache.evictable[c.BASE, 0] = 0  # the root; the leaves below still hold the members


# Draft pages beside base blocks


@breaks("pairs 9 of 3 blocks", Kind.EAGLE)
def more_pairs_than_blocks(m: Memory) -> None:
    m.record[c.NUM_PAIRED_BLOCKS, m.newest] = 9


@breaks("are held by no record, or by none any more", Kind.EAGLE)
def pair_of_no_record(m: Memory) -> None:
    m.node[c.PAIR_PAGE, m.trunk] = m.free


@breaks("names no record that ends with it", Kind.EAGLE)
def draft_page_without_its_record(m: Memory) -> None:
    m.resource[c.FIRST_RECORD, m.at(c.DRAFT, int(m.record[c.LAST_DRAFT_PAGE, m.newest]))] = -1


@breaks("counts its pairs wrongly", Kind.EAGLE)
def pairs_overcounted(m: Memory) -> None:
    m.node[c.PAIR_COUNT, m.leaf] += 1


# Checkpoints


@breaks("two records have recurrent snapshot", Kind.HYBRID)
def snapshot_shared(m: Memory) -> None:
    m.record[c.RECURRENT_SLOT, m.newest] = m.record[c.RECURRENT_SLOT, m.oldest]


@breaks("does not name record", Kind.HYBRID)
def snapshot_of_another(m: Memory) -> None:
    m.resource[c.FIRST_RECORD, m.at(c.PARTIAL, int(m.record[c.PARTIAL_SLOT, m.oldest]))] = m.newest


@breaks("has no recurrent snapshot", Kind.HYBRID)
def checkpoint_without_state(m: Memory) -> None:
    m.record[c.RECURRENT_SLOT, m.newest] = -1


@breaks("is not found by its exact key", Kind.HYBRID)
def exact_key_of_another(m: Memory) -> None:
    m.cache.exact_key[m.newest] = m.cache.exact_key[m.oldest]


@breaks("recurrent snapshot 0 has", Kind.HYBRID)
def snapshot_held_by_nobody(m: Memory) -> None:
    m.resource[c.LEASE_REFS, m.at(c.RECURRENT, 0)] += 1


@pytest.mark.parametrize(
    ("message", "kind", "corrupt"), CORRUPTIONS, ids=[corrupt.__name__ for _, _, corrupt in CORRUPTIONS]
)
def test_every_corruption_is_found_and_named(message: str, kind: Kind, corrupt: Callable[[Memory], object]) -> None:
    """One spoilt word of a sound memory raises `InvariantError` for the rule that it breaks."""
    memory = Memory(kind)
    corrupt(memory)
    with pytest.raises(InvariantError, match=re.escape(message)):
        memory.manager.check_invariants()
    with suppress(InvariantError):
        assert not is_sound(memory.cache, memory.leases)


@pytest.mark.parametrize("kind", [Kind.VANILLA, Kind.EAGLE, Kind.HYBRID])
def test_what_is_sound_has_no_name(kind: Kind) -> None:
    """The plain and the compiled check agree on memory that nobody spoilt."""
    memory = Memory(kind)
    name_what_is_broken(memory.cache, memory.leases)
    assert is_sound(memory.cache, memory.leases)


def test_checking_costs_less_than_a_microsecond_a_block() -> None:
    """As many blocks as a small pool has are checked in far less time than plain Python would take."""
    manager = ContextCacheManager(tokens_per_page=1, num_base_pages=100_000, max_records=100_000)
    for start in range(0, 100_000, 100):
        keys = keys_of(list(range(start, start + 100)), 1)
        lease = manager.acquire(manager.plan(keys, 100, base_extra_tokens=0)).lease
        manager.publish(lease, keys, 100)
        manager.release(lease)
    manager.check_invariants()
    times = []
    for _ in range(5):
        started = time.thread_time()
        manager.check_invariants()
        times.append(time.thread_time() - started)
    assert min(times) < 100_000 * 1e-6
