"""The lifecycle as JSON, for programs: every state, every row of the table and every fault point, nothing merged.

What is written is read again, to be compared with a later version.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ctxcache.errors import ContractError
from ctxcache.fsm.declaration import Guard, Hook, HookKind, Lifecycle, LifecycleState, Transition
from ctxcache.fsm.export.drawing import Drawing, DrawnFault, DrawnHook, DrawnRow, DrawnState, Mark, say_moment
from ctxcache.fsm.export.picture import View
from ctxcache.fsm.points import faults_of
from ctxcache.ids import ContextCacheDeploymentKind, Phase


def describe(drawing: Drawing, view: View) -> str:
    """Write one view of the lifecycle as indented JSON, with a newline at the end. The view of faults holds both."""
    lifecycle, compared = drawing.lifecycle, drawing.earlier is not None
    content: dict[str, Any] = {
        "machine": lifecycle.name,
        "deployments": _names(lifecycle.kinds),
        "initial": lifecycle.initial.value,
        "states": [_state(drawn) | _mark(drawn.mark, compared) for drawn in drawing.states],
        "transitions": [_transition(drawn, compared) | _mark(drawn.mark, compared) for drawn in drawing.rows],
    }
    if view == "faults":
        faults = faults_of(lifecycle, lifecycle.transitions)
        content["fault_points"] = {
            kind.value: list(dict.fromkeys(fault.name for fault in faults if kind in fault.kinds))
            for kind in ContextCacheDeploymentKind
            if kind in lifecycle.kinds
        }
        content["faults"] = [_fault(drawn) | _mark(drawn.mark, compared) for drawn in drawing.faults]
    if compared:
        content["changes"] = drawing.changes
    return json.dumps(content, indent=2) + "\n"


def _mark(mark: Mark, compared: bool) -> dict[str, Any]:  # noqa: FBT001 - of this module alone
    return {"change": mark.change.value or None, "was": list(mark.was)} if compared else {}


def _state(drawn: DrawnState) -> dict[str, Any]:
    state = drawn.state
    return {
        "name": state.value,
        "group": state.group or None,
        "phase": None if state.phase is None else state.phase.name,
        "device_work_pending": state.pending,
        "description": state.description,
    }


def _transition(drawn: DrawnRow, compared: bool) -> dict[str, Any]:  # noqa: FBT001 - of this module alone
    row = drawn.row
    return {
        "trigger": row.trigger,
        "source": row.source.value,
        "target": row.target.value,
        "operation": row.operation or None,
        "deployments": _names(row.kinds),
        "guards": [{"name": guard.name, "refusal": guard.refusal} for guard in row.guards],
        "unless": [{"name": guard.name, "refusal": guard.refusal_unless} for guard in row.unless],
        "hooks": [_hook(row, each) | _mark(each.mark, compared) for each in drawn.hooks],
    }


def _hook(row: Transition, drawn: DrawnHook) -> dict[str, Any]:
    hook = drawn.hook
    return {
        "name": hook.name,
        "does": hook.kind.value,
        "runs": say_moment(row),
        "deployments": _names(row.kinds & hook.kinds),
        "fault_point": hook.fault_point(row.operation),
    }


def _fault(drawn: DrawnFault) -> dict[str, Any]:
    fault = drawn.fault
    return {
        "fault_point": fault.name,
        "trigger": fault.transition.trigger,
        "source": fault.transition.source.value,
        "target": fault.transition.target.value,
        "hook": fault.hook.name,
        "does": fault.hook.kind.value,
        "deployments": _names(fault.kinds),
        "fires": fault.fires or None,
        "leads_to": fault.leads_to.value,
    }


def _names(kinds: frozenset[ContextCacheDeploymentKind]) -> list[str]:
    return [kind.value for kind in ContextCacheDeploymentKind if kind in kinds]


def read(path: str | Path, lifecycle: Lifecycle) -> Lifecycle:
    """Read an earlier version of a lifecycle, of which `describe` wrote either view.

    A file from before the view of faults held the whole does not do. What is asked for may be one deployment kind of what
    was written, not the other way round.

    Raises:
        ContractError: the file cannot be read, is something else, or is of another machine or kind. It is named.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text) if text.strip() else None
    except OSError as cause:
        raise ContractError(f"{path} cannot be read: {cause.strerror or cause}") from cause
    except (ValueError, RecursionError) as cause:
        raise ContractError(f"{path} is no JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise _foreign(path, "it holds no object" if text.strip() else "it is empty")
    try:
        earlier = _lifecycle(content)
    except KeyError as cause:
        raise _foreign(path, f"{cause} is missing") from cause
    except ValueError as cause:
        raise _foreign(path, str(cause)) from cause
    if earlier.name != lifecycle.name:
        raise ContractError(f"{path} holds the machine {earlier.name!r}, not {lifecycle.name!r}")
    if not earlier.kinds >= lifecycle.kinds:
        kinds = ", ".join(_names(earlier.kinds))
        raise ContractError(f"{path} was written for the deployment kind {kinds} alone; ask for the same one")
    return earlier.of_kind(*lifecycle.kinds) if len(lifecycle.kinds) == 1 else earlier


def _foreign(path: str | Path, reason: str) -> ContractError:
    return ContractError(f"{path} is not what `ctxcache diagram --format json` prints: {reason}")


def _field(said: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of an object, of the type that it was written with."""
    if not isinstance(said, dict):
        raise ValueError(f"{said!r} stands where an object should")  # noqa: TRY004 - told as what the file holds
    value = said[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}")  # noqa: TRY004 - likewise
    return value


def _texts(said: Any, name: str) -> list[str]:
    values: list[str] = _field(said, name, list)
    if not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} is {values!r}")
    return values


def _lifecycle(content: dict[str, Any]) -> Lifecycle:
    if "changes" in content:
        raise ValueError("it holds a comparison; take what was printed without --diff")
    states = _states(_field(content, "states", list))
    initial = _field(content, "initial", str)
    if next(iter(states), None) != initial:
        raise ValueError(f"it begins in {initial!r}, which is not the first of its states")
    rows = tuple(_row(each, states) for each in _field(content, "transitions", list))
    if len(set(rows)) < len(rows):
        raise ValueError("a transition is listed twice")
    kinds = _kinds(content) if "deployments" in content else frozenset(ContextCacheDeploymentKind)
    return Lifecycle(content.get("machine", "request"), tuple(states.values()), rows, kinds=kinds)


def _states(listed: list[Any]) -> dict[str, LifecycleState]:
    declare: Any = LifecycleState  # with the rows of its members it makes a class
    phases = {phase.name: phase for phase in Phase}
    rows: list[tuple[str, Phase | None, bool, str]] = []
    for state in listed:
        name, phase = _field(state, "name", str), _field(state, "phase", (str, type(None)))
        if re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)?", name, re.ASCII) is None:  # the pictures write it as it is
            raise ValueError(f"the state {name!r} has no name of a state")
        if phase not in {None, *phases}:
            raise ValueError(f"the state {name!r} has the phase {phase!r}")
        if any(name == known for known, *_ in rows):
            raise ValueError(f"the state {name!r} is listed twice")
        pending, description = _field(state, "device_work_pending", bool), _field(state, "description", str)
        rows.append((name, phases.get(phase), pending, description))
    return {state.value: state for state in declare("EarlierState", [(f"S{i}", row) for i, row in enumerate(rows)])}


def _row(said: Any, states: dict[str, LifecycleState]) -> Transition:
    trigger, operation = _field(said, "trigger", str), _field(said, "operation", (str, type(None))) or ""
    ends = [_field(said, end, str) for end in ("source", "target")]
    for end in ends:
        if end not in states:
            raise ValueError(f"the transition {trigger!r} names the state {end!r}, which is not listed")
    hooks = []
    for hook in _field(said, "hooks", list):
        op, _, role = _field(hook, "fault_point", str).removeprefix(f"{operation}.").partition(".")
        does = HookKind(_field(hook, "does", str))
        hooks.append(Hook(_field(hook, "name", str), does, op, _kinds(hook), role))
    guards = [(_field(guard, "name", str), _field(guard, "refusal", str)) for guard in _field(said, "guards", list)]
    unless = _field(said, "unless", list) if "unless" in said else []
    denials = [(_field(guard, "name", str), _field(guard, "refusal", str)) for guard in unless]
    return Transition(
        trigger,
        operation,
        states[ends[0]],
        states[ends[1]],
        tuple(hooks),
        tuple(Guard(name, refusal) for name, refusal in guards),
        tuple(Guard(name, "", refusal) for name, refusal in denials),
        _kinds(said),
    )


def _kinds(said: Any) -> frozenset[ContextCacheDeploymentKind]:
    return frozenset(map(ContextCacheDeploymentKind, _texts(said, "deployments")))
