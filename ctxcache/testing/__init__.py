"""Test doubles for runtimes that use the library: devices that fail or run late, an ownership ledger, a plain manager."""

from ctxcache.fsm.points import fault_points
from ctxcache.testing.deferred import DeferredDeviceOps, RandomSource, Use
from ctxcache.testing.faults import Fault, FaultInjector, FaultMode, FaultPlan, InjectedFaultError
from ctxcache.testing.ledger import OwnershipLedger
from ctxcache.testing.oracle import Part, Transcript
from ctxcache.testing.reference.manager import ReferenceManager

__all__ = [
    "DeferredDeviceOps",
    "Fault",
    "FaultInjector",
    "FaultMode",
    "FaultPlan",
    "InjectedFaultError",
    "OwnershipLedger",
    "Part",
    "RandomSource",
    "ReferenceManager",
    "Transcript",
    "Use",
    "fault_points",
]
