"""The lifecycle of a request, declared as data and run by one shared `transitions` machine."""

from ctxcache.fsm.machine import DrainFailed, LifecycleModel, fire, is_declared, require_declared
from ctxcache.fsm.states import DESCRIPTIONS, INITIAL, LIVE, PENDING, PHASES, State
from ctxcache.fsm.table import TRANSITIONS, TRIGGERS, Guard, Hook, HookKind, Transition

__all__ = [
    "DESCRIPTIONS",
    "INITIAL",
    "LIVE",
    "PENDING",
    "PHASES",
    "TRANSITIONS",
    "TRIGGERS",
    "DrainFailed",
    "Guard",
    "Hook",
    "HookKind",
    "LifecycleModel",
    "State",
    "Transition",
    "fire",
    "is_declared",
    "require_declared",
]
