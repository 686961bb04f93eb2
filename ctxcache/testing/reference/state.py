"""What the plain-Python manager remembers: pools, leases and records. Everything else is recomputed from them.

Nothing here is counted twice. A page is leased when a lease names it, cached when a record's path does, and free when
it lies on its pool's stack; the index is what the records reach.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ctxcache.errors import InvariantError
from ctxcache.ids import Hash128, ResourceType
from ctxcache.manager.results import HybridCheckpointKey, HybridSnapshotReservation

BASE, DRAFT = ResourceType.BASE_KV_PAGE, ResourceType.DRAFT_KV_PAGE
RECURRENT, PARTIAL = ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT

Keys: TypeAlias = tuple[Hash128, ...]
"""Keys of a sequence's leading full blocks."""
Demand: TypeAlias = dict[ResourceType, int]
NO_SHARE: dict[ResourceType, set[int]] = {}
"""A demand that shares nothing."""


@dataclass(eq=False)
class Pool:
    """Resources `0 .. capacity - 1`; `free` is a stack whose end is given out first."""

    capacity: int
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(reversed(range(self.capacity)))


@dataclass(eq=False)
class LeaseState:
    """What one lease holds, and what it may publish."""

    generation: int
    paired: bool
    may_publish_checkpoints: bool
    base_pages: list[int]
    draft_pages: list[int]
    known_keys: Keys  # of the blocks it reused or published: its own prefix
    restored: dict[ResourceType, int] = field(default_factory=dict)
    reserved: HybridSnapshotReservation | None = None
    reserved_length: int = 0
    published_full_block_count: int = 0
    started_serial: int = 0  # of the checkpoint that it was restored from
    own_serial: int = 0  # of the record of blocks that it made last

    def held(self) -> list[tuple[ResourceType, int]]:
        """Return everything held, in the order in which a release returns it."""
        return [
            *((BASE, page) for page in reversed(self.base_pages)),
            *((DRAFT, page) for page in reversed(self.draft_pages)),
            *self.restored.items(),
            *self.reserved_slots(),
        ]

    def reserved_slots(self) -> list[tuple[ResourceType, int]]:
        """Return the slots of the reservation, if there is one."""
        if self.reserved is None:
            return []
        return slots(self.reserved.recurrent_snapshot_slot, self.reserved.partial_kv_snapshot_slot)


@dataclass(eq=False)
class RecordState:
    """One endpoint: the keys of its blocks, the draft pages paired with the first of them, and its snapshots.

    `whole_keys` are the keys of all full blocks within a checkpoint's length, also of those that it does not share.
    """

    serial: int
    keys: Keys
    draft_pages: list[int] = field(default_factory=list)
    checkpoint: HybridCheckpointKey | None = None
    snapshots: dict[ResourceType, int] = field(default_factory=dict)
    whole_keys: Keys = ()


class ReferenceState:
    """Pools, leases by row, records from least to most recently used, and the canonical page of every indexed block."""

    def __init__(self, capacities: dict[ResourceType, int], *, by_block: bool) -> None:
        self.by_block = by_block  # blocks are used and evicted one by one, not with their records
        self.last_use: dict[Hash128, int] = {}  # of every indexed block, where that is so
        self.num_uses = 0
        self.pools = {kind: Pool(capacity) for kind, capacity in capacities.items()}
        self.leases: dict[int, LeaseState] = {}
        self.records: list[RecordState] = []
        self.page_of: dict[Hash128, int] = {}
        self.gone: set[Hash128] = set()  # keys of blocks and checkpoints that were evicted
        self.generations: list[int] = []  # by lease row: how often it was released
        self.free_rows: list[int] = []  # released rows, the last one first to give
        self.last_serial = 0
        self.committed = self.existing = self.refused = self.paired_commits = self.evicted_records = 0
        self.shortened_records = 0
        self.reclaimed = dict.fromkeys(capacities, 0)

    # --- who holds what ------------------------------------------------------------------------------------------------

    def leased(self, kind: ResourceType) -> set[int]:
        """Return the resources of a kind that leases hold."""
        return {held for lease in self.leases.values() for held_kind, held in lease.held() if held_kind is kind}

    def needed(self, kind: ResourceType, records: list[RecordState] | None = None) -> set[int]:
        """Return the resources of a kind that records (by default all) hold."""
        return {
            held
            for record in (self.records if records is None else records)
            for held_kind, held in self.path_of(record)
            if held_kind is kind
        }

    def path_of(self, record: RecordState) -> list[tuple[ResourceType, int]]:
        """Return everything a record holds, in the order in which its eviction lets go."""
        return [
            *((BASE, self.page_of[key]) for key in reversed(record.keys)),
            *((DRAFT, page) for page in reversed(record.draft_pages)),
            *record.snapshots.items(),
        ]

    def parents(self) -> dict[Hash128, Hash128 | None]:
        """Return the key before each indexed key, `None` before a first block's."""
        return {
            key: record.keys[index - 1] if index else None
            for record in self.records
            for index, key in enumerate(record.keys)
        }

    def paired_draft_page(self, key: Hash128, following: Hash128) -> int | None:
        """Return the draft page of a block when it is followed by another one, if some record has it."""
        for record in self.records:
            for index in range(len(record.draft_pages) - 1):
                if record.keys[index : index + 2] == (key, following):
                    return record.draft_pages[index]
        return None

    # --- giving and taking ---------------------------------------------------------------------------------------------

    def feasible(self, demand: Demand, shared: dict[ResourceType, set[int]]) -> bool:
        """Say whether free and cached-but-unleased resources reach a demand, `shared` counting as leased."""
        return all(
            count <= len(self.pools[kind].free) + len(self.needed(kind) - self.leased(kind) - shared.get(kind, set()))
            for kind, count in demand.items()
        )

    def evict_for(self, demand: Demand) -> None:
        """Evict what a feasible demand needs."""
        if self.by_block:
            self._evict_blocks(demand)
        while lacking := [kind for kind, count in demand.items() if count > len(self.pools[kind].free)]:
            self.evict(self._victim(lacking))

    def _victim(self, lacking: list[ResourceType]) -> RecordState:
        held = {kind: self.leased(kind) for kind in lacking}
        for record in self.records:
            others = [other for other in self.records if other is not record]
            if any(self.needed(kind, [record]) - self.needed(kind, others) - held[kind] for kind in lacking):
                return record
        # Evicting any one alone frees nothing that is lacking: their unleased pages are shared among them.
        for record in self.records:
            if any(self.needed(kind, [record]) - held[kind] for kind in lacking):
                return record
        raise InvariantError("a feasible demand found no record to evict")

    def _evict_blocks(self, demand: Demand) -> None:
        shortened: set[RecordState] = set()
        while demand.get(BASE, 0) > len(self.pools[BASE].free):
            record = self._last_block_to_go()
            self._shorten(record)
            shortened.add(record)
        while demand.get(DRAFT, 0) > len(self.pools[DRAFT].free):
            self._drop_draft_page(self._last_draft_page_to_go())
        self.shortened_records += len(shortened & set(self.records))

    def _last_block_to_go(self) -> RecordState:
        """Return the record that ends at the least recently used block that nothing follows and no lease holds."""
        leased, parents = self.leased(BASE), set(self.parents().values())
        last = [record for record in self.records if record.keys[-1] not in parents]
        for record in last:
            if self.page_of[record.keys[-1]] not in leased:
                return record
        # All last blocks are leased; some stand behind blocks that are not.
        return next(record for record in last if any(self.page_of[key] not in leased for key in record.keys))

    def _last_draft_page_to_go(self) -> RecordState:
        leased = self.leased(DRAFT)
        for record in self.records:
            others = [other for other in self.records if other is not record]
            if set(record.draft_pages[-1:]) - self.needed(DRAFT, others) - leased:
                return record
        return next(record for record in self.records if set(record.draft_pages) - leased)

    def _shorten(self, record: RecordState) -> None:
        """Take the last block of a record, which nothing follows, out of the cache."""
        *before, last = record.keys
        if len(record.draft_pages) == len(record.keys):
            self._drop_draft_page(record)
        record.keys = tuple(before)
        page = self.page_of.pop(last)
        del self.last_use[last]
        self.gone.add(last)
        self._reclaim(BASE, page)
        others = [other for other in self.records if other is not record]
        if not before or any(other.keys[: len(before)] == record.keys for other in others):
            self._evict(record)
        self._sort()

    def _drop_draft_page(self, record: RecordState) -> None:
        self._reclaim(DRAFT, record.draft_pages.pop())

    def _evict(self, record: RecordState) -> None:
        self.remove(record)
        self.evicted_records += 1

    def remove(self, record: RecordState) -> None:
        """Take a record out whose blocks, if any are left, others need."""
        self.records.remove(record)
        for page in reversed(record.draft_pages):
            self._reclaim(DRAFT, page)

    def _reclaim(self, kind: ResourceType, held: int) -> None:
        """Return what a record has let go of to its pool, unless something else holds it."""
        if held not in self.leased(kind) | self.needed(kind):
            self.pools[kind].free.append(held)
            self.reclaimed[kind] += 1

    def drop_oldest(self) -> None:
        """Drop the least recently used record, with the blocks that nothing else needs."""
        record = self.records[0]
        if not self.by_block:
            self.evict(record)
        elif record.keys[-1] in self.parents().values():
            self._evict(record)
        else:
            while record in self.records:
                self._shorten(record)

    def use(self, keys: Keys) -> None:
        """Use blocks, all at once."""
        self.num_uses += 1
        self.last_use.update(dict.fromkeys(keys, self.num_uses))
        self._sort()

    def _sort(self) -> None:
        """Order records by the last use of their last blocks; of those used at once, the deeper one is more recent."""
        self.records.sort(key=lambda record: (self.last_use[record.keys[-1]], len(record.keys)))

    def evict(self, record: RecordState) -> None:
        """Drop one record; what neither a record nor a lease holds any more returns to its pool."""
        let_go = self.path_of(record)
        self.records.remove(record)
        if record.checkpoint is not None:
            self.gone.add(record.checkpoint.exact_prefix_digest)
            if not self.pools[BASE].capacity:
                self.gone.update(record.whole_keys[-1:])
        self.evicted_records += 1
        reached = {key for other in self.records for key in other.keys}
        for key in record.keys:
            if key not in reached:
                del self.page_of[key]
                self.gone.add(key)
        for kind, resource in let_go:
            self._reclaim(kind, resource)

    def take(self, kind: ResourceType, count: int) -> list[int]:
        """Take free resources, the one returned last first."""
        return [self.pools[kind].free.pop() for _ in range(count)]

    def give_back(self, held: list[tuple[ResourceType, int]]) -> None:
        """Return what a lease held (and holds no longer) as far as nothing else holds it, in order."""
        for kind, resource in held:
            if resource not in self.leased(kind) | self.needed(kind):
                self.pools[kind].free.append(resource)

    def touch(self, record: RecordState) -> None:
        """Make a record the most recently used."""
        self.records.remove(record)
        self.records.append(record)

    # --- the invariants ------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise `InvariantError` where a resource is held and free, twice free, or lost, or a path is not indexed."""
        for kind, pool in self.pools.items():
            free, held = set(pool.free), self.leased(kind) | self.needed(kind)
            if len(free) != len(pool.free) or free & held or free | held != set(range(pool.capacity)):
                raise InvariantError(f"{kind.name}: free {pool.free}, held {sorted(held)}, capacity {pool.capacity}")
        reached = {key for record in self.records for key in record.keys}
        if reached != set(self.page_of):
            raise InvariantError(f"the index holds {set(self.page_of) ^ reached} against the records")
        if len(set(self.page_of.values())) != len(self.page_of):
            raise InvariantError(f"two blocks share a page: {self.page_of}")


def slots(recurrent: int | None, partial: int | None) -> list[tuple[ResourceType, int]]:
    """Return the snapshot slots that are there."""
    return [(kind, slot) for kind, slot in ((RECURRENT, recurrent), (PARTIAL, partial)) if slot is not None]
