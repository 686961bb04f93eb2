"""The five invariants of the manager, checked in full from first principles: what is cached is recomputed from records.

What `soundness` finds unsound is gone through once more in plain Python, slowly, to say what it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ctxcache.errors import InvariantError
from ctxcache.manager import layout as c
from ctxcache.manager.bitset import members
from ctxcache.manager.block_index import find, ids_in
from ctxcache.manager.layout import CacheArrays, LeaseArrays
from ctxcache.manager.lru import is_evictable, oldest_evictable
from ctxcache.manager.soundness import is_sound

_KIND_NAMES = ("base KV page", "draft KV page", "recurrent snapshot", "partial-KV snapshot")


def check_invariants(cache: CacheArrays, leases: LeaseArrays) -> None:
    """Raise `InvariantError` for the first invariant that does not hold. What is sound is found so in compiled code."""
    try:
        sound = is_sound(cache, leases)
    except InvariantError:  # a search without an end: what leads there has a name below
        sound = False
    if not sound:
        name_what_is_broken(cache, leases)
        raise InvariantError("the manager's memory is not sound, and it could not be told where; please report this")


def name_what_is_broken(cache: CacheArrays, leases: LeaseArrays) -> None:
    """Raise `InvariantError` for the first invariant that does not hold, in plain Python."""
    entries = _check_order(cache)
    records = [entry for entry in entries if cache.serial[entry] > 0]
    paths = {record: _path(cache, cache.record[c.ENDPOINT, record]) for record in records}
    cached = _expected_cached(cache, paths)
    _check_index(cache, paths)
    _check_tree(cache)
    _check_pairs(cache, paths)
    _check_endpoints(cache, entries)
    _check_entries(cache, entries)
    _check_pools(cache, leases, cached)
    _check_recency(cache, entries)


def _require(holds: Any, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def _path(cache: CacheArrays, block: int) -> list[int]:
    path: list[int] = []
    while block >= 0:
        _require(len(path) < len(cache.key), f"block {block} is its own ancestor")
        path.append(int(block))
        block = cache.node[c.PARENT, block]
    return path[::-1]


def _check_order(cache: CacheArrays) -> list[int]:
    """Invariant 4: the LRU order holds every record and every mark once."""
    order: list[int] = []
    record, before, used = int(cache.state[c.OLDEST_RECORD]), -1, -1
    alive = int((cache.serial != 0).sum())
    while record >= 0:
        _require(len(order) < alive, "the LRU order is longer than there are records")
        _require(cache.record[c.OLDER, record] == before, f"record {record} does not know its older neighbour")
        _require(cache.serial[record] != 0, f"record {record} of the LRU order is dead")
        _require(cache.record[c.RECENCY_PLACE, record] > used, f"record {record} was used before its older neighbour")
        used = int(cache.record[c.RECENCY_PLACE, record])
        order.append(record)
        before, record = record, int(cache.record[c.NEWER, record])
    _require(cache.state[c.NEWEST_RECORD] == before, "the LRU order does not end at the newest record")
    _require(alive == len(order), f"{alive} records live, {len(order)} are in the LRU order")
    num_records = int((cache.serial > 0).sum())
    _require(num_records == cache.state[c.NUM_RECORDS], "the number of records is wrong")
    _require(num_records <= cache.state[c.MAX_RECORDS], "there are more records than the limit")
    return order


def _draft_path(cache: CacheArrays, record: int, path: list[int]) -> list[int]:
    paired = int(cache.record[c.NUM_PAIRED_BLOCKS, record]) if cache.state[c.EXTENDED_RECORDS] else 0
    if paired <= 0:
        return []
    _require(paired <= len(path), f"record {record} pairs {paired} of {len(path)} blocks")
    pages = [int(cache.node[c.PAIR_PAGE, block]) for block in path[1:paired]]
    return [*pages, int(cache.record[c.LAST_DRAFT_PAGE, record])]


def _expected_cached(cache: CacheArrays, paths: dict[int, list[int]]) -> list[Counter[int]]:
    """What records hold, per kind: blocks once, a draft page once per successor and once per record that ends with it."""
    cached: list[Counter[int]] = [Counter() for _ in range(c.NUM_RESOURCE_KINDS)]
    cached[c.BASE].update({block for path in paths.values() for block in path})
    pairs: set[tuple[int, int]] = set()
    for record, path in paths.items():
        drafts = _draft_path(cache, record, path)
        pairs.update(zip(path[1:], drafts[:-1], strict=False))
        cached[c.DRAFT].update(drafts[-1:])
        if cache.state[c.HAS_CHECKPOINTS]:
            for kind, row in ((c.RECURRENT, c.RECURRENT_SLOT), (c.PARTIAL, c.PARTIAL_SLOT)):
                slot = int(cache.record[row, record])
                if slot >= 0:
                    cached[kind][slot] += 1
                    _require(cached[kind][slot] == 1, f"two records have {_KIND_NAMES[kind]} {slot}")
                    owner = cache.resource[c.FIRST_RECORD, cache.state[c.OFFSET + kind] + slot]
                    _require(owner == record, f"{_KIND_NAMES[kind]} {slot} does not name record {record}")
            _require(cache.record[c.RECURRENT_SLOT, record] >= 0, f"checkpoint {record} has no recurrent snapshot")
            exact = find(cache.exact_key, cache.exact_slot, cache.exact_key[record, 0], cache.exact_key[record, 1])
            _require(exact == record, f"checkpoint {record} is not found by its exact key")
    cached[c.DRAFT].update(page for _, page in pairs)
    if cache.state[c.HAS_PAIRS]:
        held = {(block, int(page)) for block, page in enumerate(cache.node[c.PAIR_PAGE]) if page >= 0}
        _require(
            held == pairs,
            f"draft pages {sorted(held ^ pairs)} (block, page) are held by no record, or by none any more",
        )
    return cached


def _check_index(cache: CacheArrays, paths: dict[int, list[int]]) -> None:
    """Invariant 3: every indexed block's page is cached, and its ancestors are indexed."""
    indexed = ids_in(cache.slot)
    _require(len(set(indexed)) == len(indexed), "a block is indexed twice")
    needed = {block for path in paths.values() for block in path}
    _require(set(indexed) == needed, f"blocks {sorted(needed ^ set(indexed))} are indexed or needed, not both")
    _require(cache.state[c.NUM_NODES] == len(indexed), "the number of indexed blocks is wrong")
    for block in indexed:
        found = find(cache.key, cache.slot, cache.key[block, 0], cache.key[block, 1])
        _require(found == block, f"block {block} is not found by its key")
        parent = cache.node[c.PARENT, block]
        _require(parent < 0 or parent in needed, f"the parent of block {block} is not indexed")


def _check_tree(cache: CacheArrays) -> None:
    for block in ids_in(cache.slot):
        child, before = int(cache.node[c.FIRST_CHILD, block]), -1
        while child >= 0:
            _require(cache.node[c.PARENT, child] == block, f"child {child} does not know its parent {block}")
            _require(cache.node[c.PREVIOUS_SIBLING, child] == before, f"child {child} does not know its elder sibling")
            before, child = child, int(cache.node[c.NEXT_SIBLING, child])
    children = Counter(int(cache.node[c.PARENT, block]) for block in ids_in(cache.slot))
    for block, count in children.items():
        if block >= 0:
            listed, child = 0, int(cache.node[c.FIRST_CHILD, block])
            while child >= 0:
                listed, child = listed + 1, int(cache.node[c.NEXT_SIBLING, child])
            _require(listed == count, f"block {block} lists {listed} of {count} children")


def _check_entries(cache: CacheArrays, entries: list[int]) -> None:
    """Where blocks are used one by one: an entry ends wherever paths part, and knows the one above it."""
    if cache.state[c.HAS_CHECKPOINTS]:
        return
    for block in ids_in(cache.slot):
        child = int(cache.node[c.FIRST_CHILD, block])
        forks = child >= 0 and cache.node[c.NEXT_SIBLING, child] >= 0
        _require(
            not forks or cache.resource[c.FIRST_RECORD, block] >= 0, f"no entry ends at block {block}, where paths part"
        )
    for entry in entries:
        above = int(cache.node[c.PARENT, cache.record[c.ENDPOINT, entry]])
        while above >= 0 and cache.resource[c.FIRST_RECORD, above] < 0:
            above = int(cache.node[c.PARENT, above])
        known = int(cache.resource[c.FIRST_RECORD, above]) if above >= 0 else -1
        _require(cache.record[c.ABOVE, entry] == known, f"entry {entry} does not know the one above it")


def _check_pairs(cache: CacheArrays, paths: dict[int, list[int]]) -> None:
    if not cache.state[c.HAS_PAIRS]:
        return
    expected: Counter[int] = Counter()
    for block in ids_in(cache.slot):
        if cache.node[c.PAIR_PAGE, block] >= 0:
            expected[int(cache.node[c.PARENT, block])] += 1
    for record, path in paths.items():
        drafts = _draft_path(cache, record, path)
        if drafts:
            expected[path[len(drafts) - 1]] += 1
            last = int(cache.state[c.OFFSET + c.DRAFT]) + drafts[-1]
            _require(
                cache.resource[c.FIRST_RECORD, last] >= 0, f"draft page {drafts[-1]} names no record that ends with it"
            )
    for block in ids_in(cache.slot):
        _require(cache.node[c.PAIR_COUNT, block] == expected[block], f"block {block} counts its pairs wrongly")


def _check_endpoints(cache: CacheArrays, records: list[int]) -> None:
    """Invariant 4: the record maps agree with each other."""
    listed: list[int] = []
    heads = [(block, int(cache.resource[c.FIRST_RECORD, block])) for block in range(len(cache.key))]
    anchors = [(-1, head) for head in ids_in(cache.anchor_slot)]
    for endpoint, head in [*heads, *anchors, (-1, int(cache.state[c.ROOT_RECORD]))]:
        record = head
        while record >= 0:
            _require(cache.record[c.ENDPOINT, record] == endpoint, f"record {record} is listed at block {endpoint}")
            listed.append(record)
            record = int(cache.record[c.NEXT_AT_ENDPOINT, record]) if cache.state[c.EXTENDED_RECORDS] else -1
    _require(sorted(listed) == sorted(records), "the lists of records by endpoint differ from the LRU order")


def _lease_holds(cache: CacheArrays, leases: LeaseArrays) -> list[Counter[int]]:
    holds: list[Counter[int]] = [Counter() for _ in range(c.NUM_RESOURCE_KINDS)]
    live = [row for row in range(leases.fields.shape[1]) if leases.fields[c.LIVE, row] == 1]
    _require(len(live) == cache.state[c.NUM_LEASES], "the number of leases is wrong")
    for row in live:
        holds[c.BASE].update(leases.base_pages[row, : leases.fields[c.NUM_BASE, row]].tolist())
        holds[c.DRAFT].update(leases.draft_pages[row, : leases.fields[c.NUM_DRAFT, row]].tolist())
        for first in (c.RESTORED, c.RESERVED):
            for i in range(2):
                slot = int(leases.fields[first + i, row])
                if slot >= 0:
                    holds[c.RECURRENT + i][slot] += 1
    return holds


def _check_pools(cache: CacheArrays, leases: LeaseArrays, cached: list[Counter[int]]) -> None:
    """Invariants 1 and 2: each resource is free, or held as often as leases and records say."""
    holds = _lease_holds(cache, leases)
    for kind, name in enumerate(_KIND_NAMES):
        capacity, offset = int(cache.state[c.CAPACITY + kind]), int(cache.state[c.OFFSET + kind])
        free = cache.resource[c.FREE_STACK, offset : offset + int(cache.state[c.FREE + kind])].tolist()
        _require(len(set(free)) == len(free), f"a {name} is on the free list twice")
        idle = 0
        for resource in range(capacity):
            lease_refs, cache_refs = cache.resource[[c.LEASE_REFS, c.CACHE_REFS], offset + resource]
            _require(
                lease_refs == holds[kind][resource],
                f"{name} {resource} has {lease_refs} lease references, leases have {holds[kind][resource]}",
            )
            _require(
                cache_refs == cached[kind][resource],
                f"{name} {resource} has {cache_refs} cache references, records have {cached[kind][resource]}",
            )
            idle += bool(cache_refs and not lease_refs)
        held = {resource for resource in range(capacity) if holds[kind][resource] or cached[kind][resource]}
        _require(not held & set(free), f"{name}s {sorted(held & set(free))} are free and held")
        _require(
            len(free) + len(held) == capacity, f"{capacity - len(free) - len(held)} of {capacity} {name}s are lost"
        )
        _require(
            idle == cache.state[c.IDLE + kind], f"{idle} {name}s are idle, {cache.state[c.IDLE + kind]} are counted"
        )


def _check_recency(cache: CacheArrays, records: list[int]) -> None:
    """Invariant 4: the order of recency holds every record once, in LRU order, and the evictable ones are marked."""
    end, settled, swept = (int(cache.state[entry]) for entry in (c.RECENCY_END, c.SETTLED, c.SWEPT))
    _require(
        settled <= swept <= end <= cache.recency.size, f"the recency's ends {settled}, {swept}, {end} are out of order"
    )
    _require(
        [record for record in cache.recency.tolist() if record >= 0] == records,
        "the recency differs from the LRU order",
    )
    _require(
        (cache.recency[settled:swept] < 0).all() and (cache.recency[end:] < 0).all(),
        "the recency is filled where it is swept",
    )
    for record in records:
        _require(
            cache.recency[cache.record[c.RECENCY_PLACE, record]] == record, f"record {record} does not know its place"
        )
    leaf = int(cache.state[c.FIRST_LEAF])
    marked = [int(cache.recency[place]) for place in members(cache.evictable[-1], leaf)]
    _require(
        marked == [record for record in records if cache.serial[record] > 0],
        "other entries are noted as records than are",
    )
    for kind in range(cache.evictable.shape[0] - 1):
        marked = [int(cache.recency[place]) for place in members(cache.evictable[kind], leaf)]
        evictable = {record for record in records if is_evictable(cache, kind, record)}
        _require(set(marked) == evictable, f"records {sorted(evictable ^ set(marked))} are marked as evictable wrongly")
        _require(
            not marked or cache.recency[oldest_evictable(cache, kind)] == marked[0],
            "another record is the oldest evictable one",
        )
