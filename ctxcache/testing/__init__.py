"""Test doubles for runtimes that use the library: devices that fail on purpose, and the manager's plain twin."""

from ctxcache.fsm.points import fault_points
from ctxcache.testing.faults import Fault, FaultInjector, FaultMode, FaultPlan, InjectedFaultError
from ctxcache.testing.reference import ReferenceManager

__all__ = [
    "Fault",
    "FaultInjector",
    "FaultMode",
    "FaultPlan",
    "InjectedFaultError",
    "ReferenceManager",
    "fault_points",
]
