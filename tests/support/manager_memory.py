"""A manager's memory, laid open so that tests can spoil one word of it at a time."""

from __future__ import annotations

from collections.abc import Callable

from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.manager import layout as c
from support.manager import Runtime, keys_of, run_of

Operation = Callable[[], object]
MODES = {Kind.VANILLA: Mode.VANILLA, Kind.EAGLE: Mode.EAGLE, Kind.HYBRID: Mode.VANILLA}


class Memory:
    """A manager with four records on a tree that branches, one live lease, free pages; and its arrays, to spoil."""

    def __init__(self, kind: Kind) -> None:
        options = {
            Kind.VANILLA: {},
            Kind.EAGLE: {"num_draft_pages": 24},
            Kind.HYBRID: {"num_recurrent_snapshots": 6, "num_partial_kv_snapshots": 6},
        }[kind]
        runtime = Runtime(24, kind=kind, mode=MODES[kind], **options)
        for tokens in (run_of("a", 14), [*run_of("a", 4), *run_of("b", 10)], run_of("c", 9), run_of("d", 6)):
            runtime.run(tokens)
        self.lease = runtime.begin(run_of("a", 14))
        self.runtime = runtime
        self.manager = runtime.manager
        self.manager.check_invariants()
        self.cache = self.manager._cache
        self.leases = self.manager._leases.arrays
        self.state, self.node = self.cache.state, self.cache.node
        self.resource, self.record, self.recency = self.cache.resource, self.cache.record, self.cache.recency

    @property
    def order(self) -> list[int]:
        """Record rows, the least recently used first."""
        rows, row = [], int(self.state[c.OLDEST_RECORD])
        while row >= 0:
            if self.cache.serial[row] != c.IS_MARK:
                rows.append(row)
            row = int(self.record[c.NEWER, row])
        return rows

    @property
    def oldest(self) -> int:
        """The least recently used record: its path leaves that of the leased one behind the first block."""
        return self.order[0]

    @property
    def newest(self) -> int:
        """The most recently used record: the leased one."""
        return self.order[-1]

    def path(self, record: int) -> list[int]:
        """Blocks of a record's base path."""
        block, path = int(self.record[c.ENDPOINT, record]), []
        while block >= 0:
            path.insert(0, block)
            block = int(self.node[c.PARENT, block])
        return path

    @property
    def trunk(self) -> int:
        """The block that two paths share."""
        return self.path(self.newest)[0]

    @property
    def leaf(self) -> int:
        """A block without children."""
        return self.path(self.newest)[-1]

    @property
    def free(self) -> int:
        """A page that nobody holds."""
        return int(self.resource[c.FREE_STACK, 0])

    def at(self, kind: int, resource: int) -> int:
        """Column of a resource in `CacheArrays.resource`."""
        return int(self.state[c.OFFSET + kind]) + resource

    # Operations, to be called once something is spoilt

    NEW = run_of("n", 14)

    def clear(self) -> Operation:
        """Evicting everything, once the lease is gone."""
        self.runtime.release(self.lease)
        return self.manager.clear

    def begin(self, tokens: list[int] = NEW) -> Operation:
        """A new lease, planned before anything is spoilt."""
        plan = self.runtime.plan(tokens)
        return lambda: self.manager.acquire(plan)

    def publish(self) -> tuple[Operation, int, list[int]]:
        """The first publication of a new lease; with its row and pages."""
        lease = self.runtime.begin(self.NEW, bypass=True)
        return (
            lambda: self.manager.publish(lease, keys_of(self.NEW), len(self.NEW)),
            lease.row,
            lease.base_pages.tolist(),
        )

    def grow(self, pages: int = 2) -> Operation:
        """Growth of the lease."""
        return lambda: self.manager.grow(self.lease, pages)

    def until_full(self) -> Operation:
        """Growth that must evict."""
        return self.grow(int(self.state[c.FREE + c.BASE]) + 1)
