"""What a picture of the lifecycle holds, whatever draws it: places, arrows, and the text on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ctxcache.fsm.export.edges import EDGES, FAULT_EDGES, GROUPS, Edge, FaultEdge, group_of
from ctxcache.fsm.states import PENDING, State
from ctxcache.fsm.table import ALL_KINDS
from ctxcache.ids import ContextCacheDeploymentKind

View = Literal["lifecycle", "faults"]
Style = Literal["pending", "idle", "broken", "gone"]

INK = "#1f2328"
FILLS: dict[Style, tuple[str, str]] = {
    "pending": ("#fdecc8", "#b7791f"),
    "idle": ("#e6f4ea", "#2f7d4f"),
    "broken": ("#fde2e1", "#b42318"),
    "gone": ("#eef0f3", "#6b7280"),
}
"""Colours of a state's inside and of its border."""


@dataclass(frozen=True, slots=True)
class Label:
    """The text of one edge.

    Attributes:
        title: the triggers.
        conditions: when it can be taken, line by line.
        parts: what happens on it, in order: a heading, and the names below it.
        joint: what stands between a heading and a name in one line.
    """

    title: str
    conditions: tuple[str, ...]
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    joint: str = " "


@dataclass(frozen=True, slots=True)
class Arrow:
    """One arrow between two places. Loops at one state share an arrow: no drawing program keeps them apart.

    Attributes:
        source: name of a state, or of a group that it leaves as a whole.
        target: the state it enters.
        labels: one, or for shared loops several.
        fails: whether it is how a failure is accounted for.
    """

    source: str
    target: State
    labels: tuple[Label, ...]
    fails: bool

    @property
    def within(self) -> str:
        """The group that holds both ends; empty when they are apart."""
        group, dot, _ = self.source.partition(".")
        return group if dot and group == group_of(self.target) else ""


def arrows(view: View) -> tuple[Arrow, ...]:
    """Everything that the view draws, in the order of the table."""
    plain = (
        [Arrow(edge.source, edge.target, (_lifecycle_label(edge),), edge.fails) for edge in EDGES]
        if view == "lifecycle"
        else [Arrow(edge.source, edge.target, (_fault_label(edge),), fails=True) for edge in FAULT_EDGES]
    )
    loops: dict[str, list[Arrow]] = {}
    for arrow in plain:
        if arrow.source == arrow.target.value:
            loops.setdefault(arrow.source, []).append(arrow)
    drawn: list[Arrow] = []
    for arrow in plain:
        shared = loops.get(arrow.source, []) if arrow.source == arrow.target.value else [arrow]
        if arrow is shared[0]:
            labels = tuple(label for other in shared for label in other.labels)
            drawn.append(Arrow(arrow.source, arrow.target, labels, all(other.fails for other in shared)))
    return tuple(drawn)


def places(drawn: Iterable[Arrow]) -> dict[str, tuple[State, ...]]:
    """The states that the arrows touch, by group; the group "" holds those on their own."""
    ends = {end for arrow in drawn for end in (arrow.source, arrow.target.value)}
    shown = [state for state in State if state.value in ends or group_of(state) in ends]
    found = {group: tuple(state for state in shown if group_of(state) == group) for group in ("", *GROUPS)}
    return {group: states for group, states in found.items() if states}


def identifier(name: str) -> str:
    """A state's or group's name as Mermaid and Graphviz take it."""
    return name.replace(".", "_")


def short_name(state: State) -> str:
    """The state's name within its group."""
    return state.value.rpartition(".")[2]


def style_of(state: State) -> Style:
    """How a state is drawn: device work pending, none pending, poisoned, or released."""
    if state is State.POISONED:
        return "broken"
    if state is State.RELEASED:
        return "gone"
    return "pending" if state in PENDING else "idle"


def says_itself(heading: str, names: tuple[str, ...]) -> bool:
    """Whether the first name below a heading is the heading's own word, so that the heading adds nothing."""
    return names[0].partition(" ")[0] == heading


def say_kinds(kinds: frozenset[ContextCacheDeploymentKind]) -> str:
    """Deployments in words: `all`, `all but x`, or their names."""
    if kinds == ALL_KINDS:
        return "all"
    if len(ALL_KINDS - kinds) == 1:
        return f"all but {next(iter(ALL_KINDS - kinds)).value}"
    return ", ".join(kind.value for kind in ContextCacheDeploymentKind if kind in kinds)


def _say_states(states: Iterable[State]) -> str:
    return ", ".join(map(short_name, states))


def _lifecycle_label(edge: Edge) -> Label:
    """Triggers, guards, where it is limited, and its hooks in order by what they do."""
    conditions = [guard.name if index == 0 else f"and {guard.name}" for index, guard in enumerate(edge.guards)]
    if conditions:
        conditions[0] = f"[{conditions[0]}"
        conditions[-1] = f"{conditions[-1]}]"
    if edge.not_from:
        conditions.append(f"unless {_say_states(edge.not_from)}")
    if edge.kinds != ALL_KINDS:
        conditions.append(f"only {say_kinds(edge.kinds)}")
    parts: list[tuple[str, list[str]]] = []
    for found in edge.hooks:
        unless = f" unless {_say_states(found.unless)}" if found.unless else ""
        if not parts or parts[-1][0] != found.hook.kind.value:
            parts.append((found.hook.kind.value, []))
        parts[-1][1].append(found.hook.name + unless)
    return Label(", ".join(edge.triggers), tuple(conditions), tuple((kind, tuple(names)) for kind, names in parts))


def _fault_label(edge: FaultEdge) -> Label:
    """The trigger that accounts for the failure, and the points that fail, by operation."""
    return Label(edge.fires or f"stays {edge.target.value}", (), tuple(edge.by_operation.items()), joint=".")
