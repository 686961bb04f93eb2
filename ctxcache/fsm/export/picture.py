"""What a picture of the lifecycle holds, whatever draws it: places, arrows, and the text on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ctxcache.fsm.declaration import LifecycleState
from ctxcache.fsm.export.drawing import Change, Drawing, DrawnState, Mark, say_guards, say_kinds
from ctxcache.fsm.export.edges import Edge, FaultEdge, edges, fault_edges
from ctxcache.ids import Phase

View = Literal["lifecycle", "faults"]
Style = Literal["pending", "idle", "broken", "gone"]

INK = "#1f2328"
QUIET = "#57606a"
FAILURE = "#b42318"
EXIT = "#6b7280"
GROUP = ("#f6f8fa", "#8c959f")
HOOKS = {"enqueue": "#9a6700", "prove": "#1a7f37"}
FILLS: dict[Style, tuple[str, str]] = {
    "pending": ("#fdecc8", "#b7791f"),
    "idle": ("#e6f4ea", "#2f7d4f"),
    "broken": ("#fde2e1", "#b42318"),
    "gone": ("#eef0f3", "#6b7280"),
}
"""Colours of a state's inside and of its border."""

CHANGES: dict[Change, str] = {Change.ADDED: "#0a7ea4", Change.REMOVED: "#8250df", Change.CHANGED: "#bc4c00"}
"""Colours of what a comparison marks; the word stands beside them."""


@dataclass(frozen=True, slots=True)
class Text:
    """A name on an arrow, and what became of what it names."""

    name: str
    change: Change = Change.NONE

    def __str__(self) -> str:
        return f"{self.name} ({self.change})" if self.change else self.name


@dataclass(frozen=True, slots=True)
class Part:
    """A heading on an arrow and the names below it; `joint` stands between the two in one line."""

    heading: str
    names: tuple[Text, ...]
    joint: str = " "

    @property
    def says_itself(self) -> bool:
        """Whether the first name is the heading's own word, so that the heading adds nothing."""
        return self.names[0].name.partition(" ")[0] == self.heading


@dataclass(frozen=True, slots=True)
class Label:
    """The text of one edge.

    Attributes:
        title: the triggers.
        conditions: when it can be taken, line by line.
        parts: what happens on it, in order.
        was: what was so in the earlier version, line by line.
    """

    title: Text
    conditions: tuple[str, ...]
    parts: tuple[Part, ...]
    was: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrow:
    """One arrow between two places. Loops at one state share an arrow: not every drawing program keeps them apart.

    Attributes:
        source: name of a state, or of a group that it leaves as a whole.
        sources: the states that it leaves.
        target: the state it enters.
        labels: one, or for shared loops several.
        fails: whether it is how a failure is accounted for.
    """

    source: str
    sources: tuple[LifecycleState, ...]
    target: LifecycleState
    labels: tuple[Label, ...]
    fails: bool

    @property
    def loops(self) -> bool:
        """Whether it enters the state that it leaves."""
        return self.source == self.target.value

    @property
    def within(self) -> str:
        """The group that holds both ends; empty when they are apart."""
        group = self.source.rpartition(".")[0]
        return group if group == self.target.group else ""

    @property
    def color(self) -> str:
        """The colour of what is not marked."""
        return FAILURE if self.fails else EXIT if style_of(self.target) == "gone" else INK


def arrows(drawing: Drawing, view: View) -> tuple[Arrow, ...]:
    """Everything that the view draws, in the order of the table."""
    plain = (
        [
            Arrow(edge.source, edge.sources, edge.target, (_lifecycle_label(edge, drawing),), edge.fails)
            for edge in edges(drawing)
        ]
        if view == "lifecycle"
        else [
            Arrow(edge.source, edge.sources, edge.target, (_fault_label(edge),), fails=True)
            for edge in fault_edges(drawing)
        ]
    )
    drawn: dict[object, Arrow] = {}
    for index, arrow in enumerate(plain):
        key = arrow.source if arrow.loops else index
        shared = drawn.get(key)
        labels = arrow.labels if shared is None else (*shared.labels, *arrow.labels)
        drawn[key] = replace(arrow, labels=labels, fails=arrow.fails and (shared is None or shared.fails))
    return tuple(drawn.values())


def places(drawing: Drawing, drawn: Iterable[Arrow]) -> dict[str, tuple[DrawnState, ...]]:
    """The states that the arrows touch, by group; the group "" holds those on their own."""
    ends = {end for arrow in drawn for end in (arrow.source, arrow.target.value)}
    shown = [place for place in drawing.states if place.state.value in ends or place.state.group in ends]
    groups = dict.fromkeys(("", *(place.state.group for place in shown)))
    found = {group: tuple(place for place in shown if place.state.group == group) for group in groups}
    return {group: states for group, states in found.items() if states}


def identifier(name: str) -> str:
    """A state's or group's name as Mermaid and Graphviz take it."""
    return name.replace(".", "_")


def style_of(state: LifecycleState) -> Style:
    """How a state is drawn: device work pending, none pending, poisoned, or released."""
    if state.phase is Phase.POISONED:
        return "broken"
    if state.phase is None:
        return "gone"
    return "pending" if state.pending else "idle"


def _say_states(states: Iterable[LifecycleState]) -> str:
    return ", ".join(state.short_name for state in states)


def _say_mark(mark: Mark) -> tuple[str, ...]:
    return tuple(f"was {line}" for line in mark.was)


def _lifecycle_label(edge: Edge, drawing: Drawing) -> Label:
    """Triggers, guards, where it is limited, and its hooks in order by what they do."""
    first = edge.rows[0].row
    conditions = [name if index == 0 else f"and {name}" for index, name in enumerate(say_guards(first))]
    if conditions:
        conditions[0] = f"[{conditions[0]}"
        conditions[-1] = f"{conditions[-1]}]"
    if edge.not_from:
        conditions.append(f"not from {_say_states(edge.not_from)}")
    if edge.kinds != drawing.lifecycle.kinds:
        conditions.append(f"only {say_kinds(edge.kinds)}")
    parts: list[tuple[str, list[Text]]] = []
    for found in edge.hooks:
        hook, mark = found.drawn.hook, found.drawn.mark
        limit = f" not from {_say_states(found.not_from)}" if found.not_from else ""
        if not parts or parts[-1][0] != hook.kind.value:
            parts.append((hook.kind.value, []))
        change = Change.NONE if mark.change is edge.mark.change is not Change.CHANGED else mark.change
        parts[-1][1].append(Text(hook.name + limit, change))
        parts[-1][1].extend(Text(line) for line in _say_mark(mark))
    return Label(
        Text(", ".join(edge.triggers), edge.mark.change),
        tuple(conditions),
        tuple(Part(kind, tuple(names)) for kind, names in parts),
        _say_mark(edge.mark),
    )


def _fault_label(edge: FaultEdge) -> Label:
    """The trigger that accounts for the failure, and the points that fail, by operation."""
    operations: dict[str, list[Text]] = {}
    for point, mark in edge.points.items():
        operation, _, op = point.partition(".")
        operations.setdefault(operation, []).append(Text(op, mark.change))
    conditions = (f"not from {_say_states(edge.not_from)}",) if edge.not_from else ()
    changes = {mark.change for mark in edge.points.values()}
    return Label(
        Text(edge.fires or f"stays {edge.target.value}", changes.pop() if len(changes) == 1 else Change.NONE),
        conditions,
        tuple(Part(operation, tuple(names), joint=".") for operation, names in operations.items()),
    )
