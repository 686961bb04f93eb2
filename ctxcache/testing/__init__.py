"""Test doubles for runtimes that use the library: devices that fail or run late, an ownership ledger, a plain manager.

Behind them what the library tests itself with: `runtime`, which drives a coordinator; `kind_sweep`, which lets every device touch
fail; `simulate`, which lives random lives; `reference`, the manager in plain Python.

May import `arguments`, `config`, `coordinator`, `device`, `errors`, `fsm`, `ids`, `keys`, `manager`, `metrics`, `request`.
"""

from ctxcache.fsm.points import fault_points
from ctxcache.testing.deferred import DeferredDeviceOps, RandomSource, Use
from ctxcache.testing.faults import Fault, FaultInjector, FaultMode, FaultPlan, InjectedFaultError
from ctxcache.testing.ledger import OwnershipLedger
from ctxcache.testing.oracle import Part, Transcript
from ctxcache.testing.page_guard import PageGuard
from ctxcache.testing.reference.manager import ReferenceManager
from ctxcache.testing.workload_sweep import WorkloadSweep, sweep

__all__ = [
    "DeferredDeviceOps",
    "Fault",
    "FaultInjector",
    "FaultMode",
    "FaultPlan",
    "InjectedFaultError",
    "OwnershipLedger",
    "PageGuard",
    "Part",
    "RandomSource",
    "ReferenceManager",
    "Transcript",
    "Use",
    "WorkloadSweep",
    "fault_points",
    "sweep",
]
