"""What the pictures draw: rows of the table that say the same are one edge, and no row is left out.

`finish`, `abandon`, `device_failed` and `drain_failed` leave nearly every state. Rows that leave most states of one group
for one target outside it become a single edge that leaves the group, and says which of its states it does not leave;
triggers that then differ in nothing but their name share it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ctxcache.fsm.declaration import LifecycleState
from ctxcache.fsm.export.drawing import Drawing, DrawnFault, DrawnHook, DrawnRow, Mark
from ctxcache.ids import ContextCacheDeploymentKind

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EdgeHook:
    """A hook on an edge, and the sources of the edge whose rows do not have it."""

    drawn: DrawnHook
    not_from: tuple[LifecycleState, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """One arrow of the picture.

    Attributes:
        source: name of a state, or of a group that the edge leaves as a whole.
        not_from: states of the source group in which no row has its triggers.
        target: the state it enters.
        rows: the rows of the table that it stands for. Guards, operations and marks are the same for every one.
    """

    source: str
    not_from: tuple[LifecycleState, ...]
    target: LifecycleState
    rows: tuple[DrawnRow, ...]

    @property
    def triggers(self) -> tuple[str, ...]:
        """The triggers that take it."""
        return tuple(dict.fromkeys(drawn.row.trigger for drawn in self.rows))

    @property
    def mark(self) -> Mark:
        """What became of it."""
        return self.rows[0].mark

    @property
    def sources(self) -> tuple[LifecycleState, ...]:
        """States that it leaves, each once."""
        return tuple(dict.fromkeys(drawn.row.source for drawn in self.rows))

    @property
    def hooks(self) -> tuple[EdgeHook, ...]:
        """Hooks of all rows in order, each once."""
        found = dict.fromkeys(hook for drawn in self.rows for hook in drawn.hooks)
        return tuple(
            EdgeHook(hook, tuple(dict.fromkeys(drawn.row.source for drawn in self.rows if hook not in drawn.hooks)))
            for hook in found
        )

    @property
    def kinds(self) -> frozenset[ContextCacheDeploymentKind]:
        """Deployments in which at least one of its rows can happen."""
        return frozenset().union(*(drawn.row.kinds for drawn in self.rows))

    @property
    def fails(self) -> bool:
        """Whether it is how the machine accounts for a failure."""
        return not any(drawn.row.operation for drawn in self.rows)


@dataclass(frozen=True, slots=True)
class FaultEdge:
    """One arrow of the fault view: points that lead from one place to one state.

    Attributes:
        source: name of the state that the failing transition leaves, or of a group.
        not_from: states of the source group in which none of the points fails.
        target: the state of the request after the failure.
        fires: the trigger that accounts for it; empty where none is declared.
        faults: what it stands for.
    """

    source: str
    not_from: tuple[LifecycleState, ...]
    target: LifecycleState
    fires: str
    faults: tuple[DrawnFault, ...]

    @property
    def sources(self) -> tuple[LifecycleState, ...]:
        """States that it leaves, each once."""
        return tuple(dict.fromkeys(drawn.fault.transition.source for drawn in self.faults))

    @property
    def points(self) -> dict[str, Mark]:
        """Names of its fault points, each once, and what became of each."""
        found: dict[str, Mark] = {}
        for drawn in self.faults:
            found.setdefault(drawn.fault.name, drawn.mark)
        return found


def _gathered(pieces: Iterable[T], key: Callable[[T], Hashable]) -> dict[Hashable, tuple[T, ...]]:
    gathered: dict[Hashable, list[T]] = {}
    for piece in pieces:
        gathered.setdefault(key(piece), []).append(piece)
    return {name: tuple(found) for name, found in gathered.items()}


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What may leave a group together: what its like have in common, both ends, and what became of it."""

    common: Hashable
    source: LifecycleState
    target: LifecycleState
    mark: Mark

    @property
    def like(self) -> Hashable:
        return self.common, self.source.group, self.target, self.mark


@dataclass(frozen=True, slots=True)
class _Departure:
    """Where an arrow starts: the name of a state or group, and the states of the group that it does not leave."""

    source: str
    not_from: tuple[LifecycleState, ...] = ()


def _departures(drawing: Drawing, pieces: Mapping[T, _Leaving]) -> dict[T, _Departure]:
    """Where the arrow of each piece starts: at its state, or at the group that it leaves together with its like."""
    found: dict[T, _Departure] = {}
    for like in _gathered(pieces, lambda piece: pieces[piece].like).values():
        first, sources = pieces[like[0]], {pieces[piece].source for piece in like}
        group = drawing.version(first.mark.change).groups.get(first.source.group, ())
        if group and first.source.group != first.target.group and 1 < len(sources) > len(group) / 2:
            departure = _Departure(first.source.group, tuple(state for state in group if state not in sources))
            found.update(dict.fromkeys(like, departure))
        else:
            found.update({piece: _Departure(pieces[piece].source.value) for piece in like})
    return found


def edges(drawing: Drawing) -> tuple[Edge, ...]:
    """The lifecycle as it is drawn. Every row of the table is in exactly one edge."""
    leaving: dict[DrawnRow, _Leaving] = {}
    for drawn in drawing.rows:
        row = drawn.row
        leaving[drawn] = _Leaving((row.trigger, row.guards, row.unless), row.source, row.target, drawn.mark)
    starts = _departures(drawing, leaving)

    def arrow(drawn: DrawnRow) -> Hashable:
        return starts[drawn], drawn.row.target, drawn.row.guards, drawn.row.unless, drawn.mark

    whole: dict[DrawnRow, Hashable] = {
        drawn: (arrow(drawn), tuple((other.row.source, other.hooks, other.row.kinds) for other in rows))
        for rows in _gathered(drawing.rows, lambda drawn: (arrow(drawn), drawn.row.trigger)).values()
        for drawn in rows
    }
    return tuple(
        Edge(starts[rows[0]].source, starts[rows[0]].not_from, rows[0].row.target, rows)
        for rows in _gathered(drawing.rows, whole.__getitem__).values()
    )


def fault_edges(drawing: Drawing) -> tuple[FaultEdge, ...]:
    """The fault view as it is drawn. Every fault point of every row is in exactly one edge."""
    leaving: dict[DrawnFault, _Leaving] = {}
    for drawn in drawing.faults:
        fault = drawn.fault
        leaving[drawn] = _Leaving((fault.name, fault.fires), fault.transition.source, fault.leads_to, drawn.mark)
    starts = _departures(drawing, leaving)
    gathered = _gathered(drawing.faults, lambda drawn: (starts[drawn], drawn.fault.leads_to, drawn.fault.fires))
    return tuple(
        FaultEdge(starts[faults[0]].source, starts[faults[0]].not_from, first.leads_to, first.fires, faults)
        for faults in gathered.values()
        for first in [faults[0].fault]
    )
