"""Every device touch of a user's own runtime and workload failed, in every way, and what is left looked over.

def make_runtime():
return Runtime(...)                 # a new one each time; it has its coordinator in `.coordinator`

def workload(runtime):
runtime.answer(PROMPT)              # ends its requests, and lets failures out

print(result := sweep(make_runtime, workload))
result.check()
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from ctxcache.coordinator import ContextCacheCoordinator
from ctxcache.errors import ContractError, InvariantError
from ctxcache.fsm.points import fault_points
from ctxcache.testing.deferred import DeferredDeviceOps
from ctxcache.testing.fault_runs import describe, faults_at
from ctxcache.testing.faults import OUTSIDE, SYNCHRONIZE, Fault, FaultInjector, FaultMode, FaultPlan
from ctxcache.testing.kind_sweep import check_balance
from ctxcache.testing.ledger import OwnershipLedger
from ctxcache.testing.runtime.scripts import InjectedInterrupt, quiet_log

R = TypeVar("R")

_OPERATIONS = tuple(
    name for name, member in vars(ContextCacheCoordinator).items() if hasattr(member, "__wrapped__") and name[0] != "_"
)
"""The coordinator's operations: a device touch behind one of them is the runtime's own."""


@dataclass(slots=True)
class WorkloadSweep:
    """What a sweep of a workload came to; `str()` says it in a few lines.

    Attributes:
        occurrences: how often the workload makes each device touch when nothing fails; `outside` are the runtime's own waits.
        unreached: points of this kind of deployment that the workload never reached, so that nothing is known of them.
        runs: faults that were tried, each in a new runtime.
        unfired: runs whose fault found nothing to strike.
        violations: what was wrong after which run.
        seconds: wall time.
    """

    occurrences: dict[str, int] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    runs: int = 0
    unfired: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self) -> None:
        """Raise `AssertionError` with every violation, if there is one. Points that were not reached are no violation."""
        if self.violations:
            raise AssertionError("\n".join(self.violations))

    def __str__(self) -> str:
        totals = (
            f"{len(self.occurrences)} device touches reached {sum(self.occurrences.values())} times, {self.runs} runs, "
            f"{len(self.unfired)} that did not fire, {len(self.violations)} violations"
        )
        return "\n".join((totals, *(f"never reached: {point}" for point in self.unreached), *self.violations))


def sweep(
    make_runtime: Callable[[], R],
    workload: Callable[[R], object],
    *,
    check: Callable[[R], object] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
) -> WorkloadSweep:
    """Fail each device touch of a workload, in every `FaultMode`, once and from then on, also with a `BaseException`.

    After each run the device is well again. Then a poisoned coordinator must recover, no request may be left active, every
    page and slot must be free or cached exactly once, and the workload must run through. Where the stream of the runtime is a
    `DeferredDeviceOps`, an `OwnershipLedger` looks on.

    Args:
        make_runtime: builds a runtime, the same each time; it is the coordinator or has it as `coordinator`.
        workload: runs requests on it and ends them, whatever happens, and does the same each time. It lets out what failed:
            raises, or returns something true; an `AssertionError` is a finding.
        check: looks the runtime over at the end of each run, and raises where something is wrong.
        progress: called with the runs so far.

    Raises:
        ContractError: the runtime has no coordinator.
    """
    started = time.perf_counter()
    result = WorkloadSweep()
    with quiet_log():
        healthy = _Trial(make_runtime())
        counts = healthy.survey(workload, check)
        result.violations += [f"no fault: {violation}" for violation in healthy.violations]
        result.occurrences = dict(sorted(counts.items()))
        result.unreached = [point for point in healthy.points if point not in counts]
        if result.violations:
            return result
        faults = [
            fault
            for point, times in result.occurrences.items()
            for occurrence in range(1, times + 1)
            for fault in faults_at(point, occurrence)
        ]
        for fault in faults:
            trial = _Trial(make_runtime())
            fired = trial.run(workload, check, fault)
            result.runs += 1
            if not fired:
                result.unfired.append(describe(fault))
            result.violations += [f"{describe(fault)}: {violation}" for violation in trial.violations]
            progress(result.runs)
    result.seconds = time.perf_counter() - started
    return result


class _Trial:
    """One runtime, with faults around its device, and what is wrong with it in the end."""

    def __init__(self, runtime: Any) -> None:
        coordinator = getattr(runtime, "coordinator", runtime)
        if not isinstance(coordinator, ContextCacheCoordinator):
            raise ContractError(
                f"make_runtime returned a {type(runtime).__name__}; return the ContextCacheCoordinator, or what has it as .coordinator"
            )
        self.violations: list[str] = []
        self._runtime = runtime
        self._coordinator: Any = coordinator
        self._faults = FaultInjector(coordinator.device_ops)
        lazy: Any = coordinator.device_ops
        coordinator.replace_device_ops(self._faults)
        while not isinstance(lazy, DeferredDeviceOps) and hasattr(lazy, "inner"):
            lazy = lazy.inner
        self._ledger = OwnershipLedger(coordinator, lazy) if isinstance(lazy, DeferredDeviceOps) else None
        for name in _OPERATIONS:
            setattr(coordinator, name, self._leaving(getattr(coordinator, name)))

    @property
    def points(self) -> tuple[str, ...]:
        """Every point that a deployment of this kind and configuration declares."""
        # Whether pages are summed shows in what was reached: nothing else sums.
        summed = any(".sum_pages" in point for point in self._faults.counts)
        return fault_points(self._coordinator.manager.kind, page_sanitizer=summed)

    def survey(self, workload: Callable[[Any], object], check: Callable[[Any], object]) -> Counter[str]:
        """Run without a fault; returns how often each point was reached. Whatever escapes is wrong."""
        self._run_well(workload, "without a fault")
        counts = Counter(self._faults.counts)
        self._look_over(check)
        return counts

    def run(self, workload: Callable[[Any], object], check: Callable[[Any], object], fault: Fault) -> bool:
        """Run with a fault, look everything over, and run once more without; returns whether the fault struck."""
        self._faults.plan = FaultPlan(fault)
        heard: object = None
        try:
            heard = workload(self._runtime)
        except (AssertionError, InvariantError) as error:
            self._note(error)
        except (Exception, InjectedInterrupt) as error:  # noqa: BLE001 - however a runtime tells of it
            heard = repr(error)
        fired = list(self._faults.fired)
        failed = any(f".{SYNCHRONIZE}" in point for point in fired) or (
            bool(fired) and fault.mode in (FaultMode.RAISE_BEFORE, FaultMode.RAISE_AFTER)
        )
        if failed and not (heard or self._coordinator.poisoned or self.violations):
            self.violations.append("a device failure reached nobody: the workload ended as if nothing had failed")
        self._faults.plan = FaultPlan()
        self._settle()
        self._look_over(check)
        if not self.violations:
            self._run_well(workload, "on a device that is well again")
            self._look_over(check)
        return bool(fired)

    def _settle(self) -> None:
        """Do what is to be done once the device is well again."""
        if not self._coordinator.idle:
            gc.collect()  # a handle that a traceback held is not the runtime's any more
        try:
            self._coordinator.metrics()  # looks after what was dropped
            if self._coordinator.poisoned:
                if self._coordinator.shutdown().name != "OK":
                    self.violations.append("a healthy device did not end the poisoning")
                    return
                self._coordinator.recover()
        except Exception as error:  # noqa: BLE001 - a finding
            self._note(error)

    def _look_over(self, check: Callable[[Any], object]) -> None:
        if not self._coordinator.idle:
            self.violations.append("the workload left its request active; end it whatever happens, with a `with` block")
            return
        check_balance(self._coordinator.manager, self.violations)
        if self._ledger is not None:
            self.violations += self._ledger.violations
            self._ledger.violations.clear()
        try:
            check(self._runtime)
        except Exception as error:  # noqa: BLE001 - a finding
            self._note(error)

    def _run_well(self, workload: Callable[[Any], object], when: str) -> None:
        try:
            told = workload(self._runtime)
        except Exception as error:  # noqa: BLE001 - a finding
            self.violations.append(f"{when} the workload raised {error!r}")
        else:
            if told:
                self.violations.append(f"{when} the workload told of {told!r}")

    def _note(self, error: BaseException) -> None:
        self.violations.append(f"{type(error).__name__}: {error}")

    def _leaving(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return operation(*arguments, **options)
            finally:
                self._faults.operation(OUTSIDE)

        return call
