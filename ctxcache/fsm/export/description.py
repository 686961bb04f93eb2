"""The lifecycle as JSON, for programs: every state, every row of the table and every fault point, nothing merged."""

from __future__ import annotations

import json
from typing import Any

from ctxcache.fsm.export.edges import group_of
from ctxcache.fsm.export.picture import View
from ctxcache.fsm.points import FAULTS, fault_points
from ctxcache.fsm.states import DESCRIPTIONS, INITIAL, PENDING, PHASES, State
from ctxcache.fsm.table import TRANSITIONS, Hook, Transition
from ctxcache.ids import ContextCacheDeploymentKind


def describe(view: View) -> str:
    """Write one view of the lifecycle as indented JSON, with a newline at the end."""
    content = _lifecycle() if view == "lifecycle" else _faults()
    return json.dumps(content, indent=2) + "\n"


def _lifecycle() -> dict[str, Any]:
    return {
        "initial": INITIAL.value,
        "states": [_state(state) for state in State],
        "transitions": [_transition(row) for row in TRANSITIONS],
    }


def _state(state: State) -> dict[str, Any]:
    phase = PHASES[state]
    return {
        "name": state.value,
        "group": group_of(state) or None,
        "phase": None if phase is None else phase.name,
        "device_work_pending": state in PENDING,
        "description": DESCRIPTIONS[state],
    }


def _transition(row: Transition) -> dict[str, Any]:
    return {
        "trigger": row.trigger,
        "source": row.source.value,
        "target": row.target.value,
        "operation": row.operation or None,
        "deployments": _names(row.kinds),
        "guards": [{"name": guard.name, "refusal": guard.refusal} for guard in row.guards],
        "hooks": [_hook(row, hook) for hook in row.hooks],
    }


def _hook(row: Transition, hook: Hook) -> dict[str, Any]:
    return {
        "name": hook.name,
        "does": hook.kind.value,
        "runs": "before the target is entered" if row.proves else "after the target is entered",
        "deployments": _names(row.kinds & hook.kinds),
        "fault_point": hook.fault_point(row.operation),
    }


def _faults() -> dict[str, Any]:
    return {
        "fault_points": {kind.value: list(fault_points(kind)) for kind in ContextCacheDeploymentKind},
        "faults": [
            {
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
            for fault in FAULTS
        ],
    }


def _names(kinds: frozenset[ContextCacheDeploymentKind]) -> list[str]:
    return [kind.value for kind in ContextCacheDeploymentKind if kind in kinds]
