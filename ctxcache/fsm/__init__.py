"""Lifecycles, declared as data, and run by one shared `transitions` machine each.

Bottom up: `declaration` (what a lifecycle is declared with), `states` and `table` (a request's), `machine` (the one door
through which a state changes; nothing else in the package imports `transitions`), `points` (what can fail, and where that
leads), `export` (pictures and data).

May import `errors`, `ids`.
"""

from ctxcache.fsm.declaration import Guard, Hook, HookKind, Lifecycle, LifecycleState, Transition
from ctxcache.fsm.export.diagram import FORMATS, VIEWS, export
from ctxcache.fsm.export.dot import GraphvizError
from ctxcache.fsm.machine import DrainFailed, LifecycleModel, fire, is_declared, require_declared
from ctxcache.fsm.points import FAULTS, FaultGroup, FaultPoint, fault_groups, fault_points
from ctxcache.fsm.states import DESCRIPTIONS, INITIAL, LIVE, PENDING, PHASES, State
from ctxcache.fsm.table import LIFECYCLES, SANITIZER_TRANSITIONS, TRANSITIONS, TRIGGERS

__all__ = [
    "DESCRIPTIONS",
    "FAULTS",
    "FORMATS",
    "INITIAL",
    "LIFECYCLES",
    "LIVE",
    "PENDING",
    "PHASES",
    "SANITIZER_TRANSITIONS",
    "TRANSITIONS",
    "TRIGGERS",
    "VIEWS",
    "DrainFailed",
    "FaultGroup",
    "FaultPoint",
    "GraphvizError",
    "Guard",
    "Hook",
    "HookKind",
    "Lifecycle",
    "LifecycleModel",
    "LifecycleState",
    "State",
    "Transition",
    "export",
    "fault_groups",
    "fault_points",
    "fire",
    "is_declared",
    "require_declared",
]
