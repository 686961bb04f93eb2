"""What an export shows: a lifecycle with its fault points, and beside each piece what a comparison says of it.

Without an earlier version nothing has changed. With one, whatever was removed since is put back where it stood, and marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar

from ctxcache.fsm.declaration import ALL_KINDS, Hook, Lifecycle, LifecycleState, Transition
from ctxcache.fsm.points import FaultPoint, faults_of
from ctxcache.ids import ContextCacheDeploymentKind

T = TypeVar("T")

Pair: TypeAlias = tuple[T | None, T | None]
"""A piece before and now; `None` where it is not there."""


class Change(StrEnum):
    """What became of a piece of the lifecycle since the earlier version."""

    NONE = ""
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Mark:
    """A change, and what is no longer so: lines of the earlier version, empty where nothing has to be said."""

    change: Change = Change.NONE
    was: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnState:
    """A state, and what became of it."""

    state: LifecycleState
    mark: Mark


@dataclass(frozen=True, slots=True)
class DrawnHook:
    """A hook of one row, and what became of it there."""

    hook: Hook
    mark: Mark


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """A row, its hooks with the removed ones among them, and what became of it."""

    row: Transition
    hooks: tuple[DrawnHook, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class DrawnFault:
    """A fault point on its row, and what became of it."""

    fault: FaultPoint
    mark: Mark


@dataclass(frozen=True, slots=True)
class Drawing:
    """Everything that an export may show, in the order of the table.

    Attributes:
        lifecycle: as it is now.
        earlier: what it is compared with, or `None`.
    """

    lifecycle: Lifecycle
    earlier: Lifecycle | None
    states: tuple[DrawnState, ...]
    rows: tuple[DrawnRow, ...]
    faults: tuple[DrawnFault, ...]

    def version(self, change: Change) -> Lifecycle:
        """The lifecycle in which a piece so marked stands."""
        return self.earlier if change is Change.REMOVED and self.earlier is not None else self.lifecycle

    @property
    def changes(self) -> dict[str, dict[Change, int]]:
        """How many states, transitions, hooks and fault points were added, removed and changed."""
        pieces: dict[str, Sequence[DrawnState | DrawnRow | DrawnHook | DrawnFault]] = {
            "states": self.states,
            "transitions": self.rows,
            "hooks": [hook for row in self.rows for hook in row.hooks],
            "fault points": self.faults,
        }
        return {
            name: {change: sum(piece.mark.change is change for piece in found) for change in Change if change}
            for name, found in pieces.items()
        }


def draw(lifecycle: Lifecycle, earlier: Lifecycle | None = None) -> Drawing:
    """Put a lifecycle and what has changed in it together."""
    old = lifecycle if earlier is None else earlier
    states = _merged(old.states, lifecycle.states, str)
    faults = _merged(faults_of(old, old.transitions), faults_of(lifecycle, lifecycle.transitions), _fault_identity)
    return Drawing(
        lifecycle,
        earlier,
        tuple(DrawnState(*_marked(pair, _say_state)) for pair in states),
        tuple(_drawn_row(pair) for pair in _merged_rows(old.transitions, lifecycle.transitions)),
        tuple(DrawnFault(*_marked(pair, _say_fault)) for pair in faults),
    )


def say_kinds(kinds: frozenset[ContextCacheDeploymentKind]) -> str:
    """Deployments in words: `all`, `all but x`, or their names."""
    if kinds == ALL_KINDS:
        return "all"
    if len(ALL_KINDS - kinds) == 1:
        return f"all but {next(iter(ALL_KINDS - kinds)).value}"
    return ", ".join(kind.value for kind in ContextCacheDeploymentKind if kind in kinds)


def say_guards(row: Transition) -> tuple[str, ...]:
    """What has to hold for a row, and `unless` before what must not."""
    return (*(guard.name for guard in row.guards), *(f"unless {guard.name}" for guard in row.unless))


def say_moment(row: Transition) -> str:
    """When the hooks of a row run."""
    return "before the target is entered" if row.proves else "after the target is entered"


def _merged(old: Sequence[T], new: Sequence[T], identity: Callable[[T], Hashable]) -> list[Pair[T]]:
    """Pair what has the same identity, in the order of the new; what was removed follows what it followed."""
    before, now = _identified(old, identity), _identified(new, identity)
    pairs: list[Pair[T]] = [(before.get(name), piece) for name, piece in now.items()]
    place = 0
    for name, piece in before.items():
        if name in now:
            place = 1 + next(index for index, pair in enumerate(pairs) if pair[0] is piece)
        else:
            pairs.insert(place, (piece, None))
            place += 1
    return pairs


def _identified(pieces: Sequence[T], identity: Callable[[T], Hashable]) -> dict[Hashable, T]:
    """Pieces by identity; several with the same one are told apart by their order."""
    seen: Counter[Hashable] = Counter()
    found: dict[Hashable, T] = {}
    for piece in pieces:
        name = identity(piece)
        found[name, seen[name]] = piece
        seen[name] += 1
    return found


def _merged_rows(old: Sequence[Transition], new: Sequence[Transition]) -> list[Pair[Transition]]:
    """Pair rows with the same guards; then those left between the same states, whose guards have changed."""

    def ends(row: Transition) -> Hashable:
        return row.trigger, row.source, row.target

    before, now = ({row: (ends(row), say_guards(row)) for row in rows} for rows in (old, new))
    left = [row for row in old if before[row] not in now.values()]
    renamed: dict[Hashable, Hashable] = {}
    for row, name in now.items():
        same = next((other for other in left if ends(other) == ends(row)), None)
        if name not in before.values() and same is not None:
            left.remove(same)
            renamed[name] = before[same]
    return _merged(old, new, lambda row: renamed.get(name := (ends(row), say_guards(row)), name))


def _marked(pair: Pair[T], say: Callable[[T], dict[str, str]]) -> tuple[T, Mark]:
    """The piece as it is now, or was last, and its mark."""
    old, new = pair
    if new is None:
        assert old is not None  # noqa: S101 - a pair holds at least one
        return old, Mark(Change.REMOVED)
    if old is None:
        return new, Mark(Change.ADDED)
    now = say(new)
    was = tuple(f"{name} {text or 'none'}" for name, text in say(old).items() if text != now[name])
    return new, Mark(Change.CHANGED, was) if was else Mark()


def _drawn_row(pair: Pair[Transition]) -> DrawnRow:
    old, new = pair
    row, mark = _marked(pair, _say_row)
    if old is None or new is None:
        return DrawnRow(row, tuple(DrawnHook(hook, mark) for hook in row.hooks), mark)
    found = _merged([(old, hook) for hook in old.hooks], [(new, hook) for hook in new.hooks], lambda at: at[1].name)
    hooks = []
    for each in found:
        (_, hook), change = _marked(each, _say_hook)
        hooks.append(DrawnHook(hook, change))
    before, now = ([hook.name for hook in each.hooks] for each in (old, new))
    was = mark.was
    if [name for name in before if name in now] != [name for name in now if name in before]:
        was = (*was, f"order {', '.join(before)}")
    changed = bool(was) or any(hook.mark.change for hook in hooks)
    return DrawnRow(row, tuple(hooks), Mark(Change.CHANGED, was) if changed else mark)


def _say_state(state: LifecycleState) -> dict[str, str]:
    return {
        "phase": "" if state.phase is None else state.phase.name,
        "device work": "pending" if state.pending else "",
        "meaning": state.description,
    }


def _say_row(row: Transition) -> dict[str, str]:
    refusals = (*(guard.refusal for guard in row.guards), *(guard.refusal_unless for guard in row.unless))
    return {
        "operation": row.operation,
        "guards": ", ".join(say_guards(row)),
        "refusal": "; ".join(refusals),
        "deployments": say_kinds(row.kinds),
    }


def _say_hook(at: tuple[Transition, Hook]) -> dict[str, str]:
    row, hook = at
    return {
        "does": hook.kind.value,
        "runs": say_moment(row),
        "fault point": hook.fault_point(row.operation),
        "deployments": say_kinds(row.kinds & hook.kinds),
    }


def _fault_identity(fault: FaultPoint) -> Hashable:
    row = fault.transition
    return fault.name, row.trigger, row.source, row.target, fault.hook.name, fault.fires, fault.leads_to


def _say_fault(fault: FaultPoint) -> dict[str, str]:
    return {"does": fault.hook.kind.value, "deployments": say_kinds(fault.kinds)}
