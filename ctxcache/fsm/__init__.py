"""The lifecycle of a request, declared as data and run by one shared `transitions` machine."""

from ctxcache.fsm.export.diagram import FORMATS, VIEWS, export
from ctxcache.fsm.export.dot import GraphvizError
from ctxcache.fsm.machine import DrainFailed, LifecycleModel, fire, is_declared, require_declared
from ctxcache.fsm.points import FAULTS, FaultGroup, FaultPoint, fault_groups, fault_points
from ctxcache.fsm.states import DESCRIPTIONS, INITIAL, LIVE, PENDING, PHASES, State
from ctxcache.fsm.table import TRANSITIONS, TRIGGERS, Guard, Hook, HookKind, Transition

__all__ = [
    "DESCRIPTIONS",
    "FAULTS",
    "FORMATS",
    "INITIAL",
    "LIVE",
    "PENDING",
    "PHASES",
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
    "LifecycleModel",
    "State",
    "Transition",
    "export",
    "fault_groups",
    "fault_points",
    "fire",
    "is_declared",
    "require_declared",
]
