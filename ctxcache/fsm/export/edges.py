"""What the exporters draw: rows of the table that say the same are one edge, and no row is left out.

`finish`, `abandon`, `device_failed` and `drain_failed` leave nearly every state. Rows that leave several states of one
group for one target outside it become a single edge that leaves the group; triggers that then differ in nothing but
their name share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ctxcache.fsm.points import FAULTS, FaultPoint
from ctxcache.fsm.states import State
from ctxcache.fsm.table import TRANSITIONS, Guard, Hook, Transition
from ctxcache.ids import ContextCacheDeploymentKind


def group_of(state: State) -> str:
    """The group that the state's dotted name puts it in; empty for a state on its own."""
    group, dot, _ = state.value.partition(".")
    return group if dot else ""


GROUPS: dict[str, tuple[State, ...]] = {
    group: tuple(state for state in State if group_of(state) == group)
    for group in dict.fromkeys(map(group_of, State))
    if group
}
"""Each group's states, in the order of a request's life."""


@dataclass(frozen=True, slots=True)
class EdgeHook:
    """A hook on an edge, and the sources of the edge whose rows do not have it."""

    hook: Hook
    unless: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """One arrow of the picture.

    Attributes:
        source: name of a state, or of a group that the edge leaves as a whole.
        target: the state it enters.
        triggers: the triggers that take it.
        rows: the rows of the table that it stands for.
    """

    source: str
    target: State
    triggers: tuple[str, ...]
    rows: tuple[Transition, ...]

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Conditions, the same for every row."""
        return self.rows[0].guards

    @property
    def sources(self) -> tuple[State, ...]:
        """States that it leaves, each once."""
        return tuple(dict.fromkeys(row.source for row in self.rows))

    @property
    def not_from(self) -> tuple[State, ...]:
        """States of the source group in which no row has its triggers."""
        return tuple(state for state in GROUPS.get(self.source, ()) if state not in self.sources)

    @property
    def hooks(self) -> tuple[EdgeHook, ...]:
        """Hooks of all rows in order, each once."""
        hooks = dict.fromkeys(hook for row in self.rows for hook in row.hooks)
        return tuple(
            EdgeHook(hook, tuple(dict.fromkeys(row.source for row in self.rows if hook not in row.hooks)))
            for hook in hooks
        )

    @property
    def kinds(self) -> frozenset[ContextCacheDeploymentKind]:
        """Deployments in which at least one of its rows can happen."""
        return frozenset().union(*(row.kinds for row in self.rows))

    @property
    def fails(self) -> bool:
        """Whether it is how the machine accounts for a failure."""
        return not any(row.operation for row in self.rows)


def _gathered(rows: Iterable[Transition], key: Callable[[Transition], object]) -> list[tuple[Transition, ...]]:
    gathered: dict[object, list[Transition]] = {}
    for row in rows:
        gathered.setdefault(key(row), []).append(row)
    return [tuple(found) for found in gathered.values()]


def _departure(rows: Iterable[Transition]) -> dict[Transition, str]:
    """Where the arrow of each row starts: at its state, or at the group that it leaves together with others."""
    names: dict[Transition, str] = {}
    for together in _gathered(rows, lambda row: (row.trigger, row.target, row.guards, group_of(row.source))):
        group = group_of(together[0].source)
        leaves_group = len(together) > 1 and group not in {"", group_of(together[0].target)}
        names.update((row, group if leaves_group else row.source.value) for row in together)
    return names


def _lifecycle_edges() -> tuple[Edge, ...]:
    names = _departure(TRANSITIONS)
    shape: dict[Transition, object] = {
        row: (names[row], row.target, row.guards, tuple((other.source, other.hooks, other.kinds) for other in rows))
        for rows in _gathered(TRANSITIONS, lambda row: (names[row], row.target, row.trigger, row.guards))
        for row in rows
    }
    return tuple(
        Edge(names[rows[0]], rows[0].target, tuple(dict.fromkeys(row.trigger for row in rows)), rows)
        for rows in _gathered(TRANSITIONS, shape.__getitem__)
    )


EDGES: tuple[Edge, ...] = _lifecycle_edges()
"""The lifecycle as it is drawn. Every row of the table is in exactly one edge."""


@dataclass(frozen=True, slots=True)
class FaultEdge:
    """One arrow of the fault view: points of one operation that lead from one place to one state.

    Attributes:
        source: name of the state that the failing transition leaves, or of a group.
        target: the state of the request after the failure.
        fires: the trigger that accounts for it; empty where none is declared.
        faults: what it stands for.
    """

    source: str
    target: State
    fires: str
    faults: tuple[FaultPoint, ...]

    @property
    def points(self) -> tuple[str, ...]:
        """Names of its fault points, each once."""
        return tuple(dict.fromkeys(fault.name for fault in self.faults))

    @property
    def by_operation(self) -> dict[str, tuple[str, ...]]:
        """Its fault points by operation, without the operation's name."""
        pairs = [point.partition(".")[::2] for point in self.points]
        return {name: tuple(op for operation, op in pairs if operation == name) for name, _ in pairs}


def _fault_edges() -> tuple[FaultEdge, ...]:
    names = _departure(dict.fromkeys(fault.transition for fault in FAULTS))
    gathered: dict[tuple[str, State, str], list[FaultPoint]] = {}
    for fault in FAULTS:
        gathered.setdefault((names[fault.transition], fault.leads_to, fault.fires), []).append(fault)
    return tuple(
        FaultEdge(source, target, fires, tuple(faults)) for (source, target, fires), faults in gathered.items()
    )


FAULT_EDGES: tuple[FaultEdge, ...] = _fault_edges()
"""The fault view as it is drawn. Every fault point of every row is in exactly one edge."""
