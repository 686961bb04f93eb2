"""Making the device fail on purpose, at a named point, in a chosen way.

ops = FaultInjector(NumpyDeviceOps(), FaultPlan(Fault("prepare_prefill.upload_rows")))
coordinator = ContextCacheCoordinator(..., device_ops=ops)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.ops import DeviceOps, HiddenRow, SnapshotJobs, StreamSynchronizer, device_ordinal_of
from ctxcache.errors import ContractError
from ctxcache.fsm.points import FAULTS, SANITIZER_FAULTS

SYNCHRONIZE = "synchronize"
OUTSIDE = "outside"
"""Stands for the operation of a device op that no coordinator operation has announced."""

LAUNCH_FAILURE = 719
"""CUDA's code for a kernel that failed while it ran; later calls of the process fail too."""


_OPS = {fault.hook.op for fault in (*FAULTS, *SANITIZER_FAULTS)}
_POINTS = {fault.name for fault in (*FAULTS, *SANITIZER_FAULTS)} | {
    f"{OUTSIDE}.{op}{role}" for op in _OPS for role in ("", ".draft")
}
_POINTS |= {f"verify_pages.{op}" for op in ("sum_pages", "sum_pages.draft", SYNCHRONIZE)}  # of no request
_MOST_REPETITIONS = 20


def _may_exist(point: str) -> bool:
    """Whether a point, or one that a pattern fits, is there under any deployment. A misspelt fault would never strike."""
    name, _, repetition = point.rpartition(".")
    if point in _POINTS or (name in _POINTS and repetition.isdecimal()):
        return True
    numbers = ("", *(f".{number}" for number in range(2, _MOST_REPETITIONS)))
    return any(fnmatchcase(known + number, point) for number in numbers for known in _POINTS)


class InjectedFaultError(RuntimeError):
    """What an injected fault raises unless its plan says otherwise."""


class FaultMode(Enum):
    """How a point fails.

    Members:
        RAISE_BEFORE: the op raises and has no effect.
        RAISE_AFTER: the op has its effect, then raises.
        FAIL_SYNCHRONIZE: the op works; the next synchronise (this one, at a synchronise) raises instead of waiting.
        ERROR_CODE: as `FAIL_SYNCHRONIZE`, but the synchronise returns an error code.
    """

    RAISE_BEFORE = "raise_before"
    RAISE_AFTER = "raise_after"
    FAIL_SYNCHRONIZE = "fail_synchronize"
    ERROR_CODE = "error_code"


@dataclass(frozen=True, slots=True)
class Fault:
    """One point that fails.

    Attributes:
        point: name of the fault point, or a shell-style pattern of names (`*.upload_rows*`).
        mode: how it fails.
        occurrence: which time the point is reached under its plan, from 1.
        persistent: whether it fails from then on, or just once.
        exception: makes what is raised; may be a `BaseException` such as `KeyboardInterrupt`.
        code: what `ERROR_CODE` returns; not 0.
    """

    point: str
    mode: FaultMode = FaultMode.RAISE_BEFORE
    occurrence: int = 1
    persistent: bool = False
    exception: Callable[[], BaseException] = InjectedFaultError
    code: int = LAUNCH_FAILURE

    def __post_init__(self) -> None:
        if not isinstance(self.point, str):
            raise ContractError(f"Fault.point is {self.point!r}; pass the name of a fault point, or a pattern of names")
        if not isinstance(self.mode, FaultMode):
            raise ContractError(f"Fault.mode is {self.mode!r}; pass a FaultMode member")
        if type(self.occurrence) is not int or self.occurrence < 1:
            raise ContractError(f"Fault.occurrence is {self.occurrence!r}; pass a whole number, the first time is 1")
        if type(self.persistent) is not bool:
            raise ContractError(f"Fault.persistent is {self.persistent!r}; pass True or False")
        if not callable(self.exception):
            raise ContractError(f"Fault.exception is {self.exception!r}; pass what makes it, for example its class")
        if type(self.code) is not int or self.code == 0:
            raise ContractError(
                f"Fault.code is {self.code!r}; 0 is what a synchroniser returns on success; choose another code, a whole number"
            )

    def strikes(self, point: str, times_reached: int) -> bool:
        """Say whether this fault fires when `point` is reached for the `times_reached`-th time."""
        on_time = times_reached >= self.occurrence if self.persistent else times_reached == self.occurrence
        return on_time and fnmatchcase(point, self.point)


class FaultPlan:
    """The faults of one run. The first one that strikes is taken."""

    def __init__(self, *faults: Fault) -> None:
        for fault in faults:
            if not isinstance(fault, Fault):
                raise ContractError(f"a FaultPlan got {fault!r}; pass Fault values, one an argument")
        self.faults = faults

    def strike(self, point: str, times_reached: int) -> Fault | None:
        """Return the fault that fires now, if any."""
        return next((fault for fault in self.faults if fault.strikes(point, times_reached)), None)


class FaultInjector:
    """Device ops that fail where a plan says, and delegate everything else.

    Points are named `<operation>.<op>`, `.draft` behind ops on the draft's resources, and `.2`, `.3` ... behind a repetition
    within one operation. `allocate`, `to_host`, `to_device` and `operation` are no fault points.

    Attributes:
        inner: the ops that do the work.
        plan: what fails; replacing it, between operations, starts the occurrences from 1 and forgets what was to strike.
        counts: how often each point was reached.
        log: every point reached, in order.
        fired: every point at which a fault struck, in order; what has failed by then depends on its `FaultMode`.
    """

    def __init__(self, inner: DeviceOps, plan: FaultPlan | None = None) -> None:
        self.inner = inner
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.fired: list[str] = []
        self._operation = OUTSIDE
        self._in_operation: Counter[str] = Counter()
        self._under_plan: Counter[str] = Counter()
        self._doomed: Fault | None = None
        self.plan = FaultPlan() if plan is None else plan

    @property
    def plan(self) -> FaultPlan:
        """What fails."""
        return self._plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        if not isinstance(plan, FaultPlan):
            raise ContractError(
                f"the plan is {plan!r}; pass a FaultPlan, for example FaultPlan(Fault('finish.synchronize'))"
            )
        for fault in plan.faults:
            if not _may_exist(fault.point):
                raise ContractError(
                    f"no device touch is called {fault.point!r}; `ctxcache faults --list` and fault_points(kind) name them"
                )
        self._plan = plan
        self._under_plan.clear()
        self._doomed = None

    @property
    def device_ordinal(self) -> int | None:
        """The inner ops' device."""
        return device_ordinal_of(self.inner)

    def operation(self, name: str) -> None:
        """Begin a coordinator operation: repetitions are counted from here."""
        self._operation = name
        self._in_operation.clear()
        self.inner.operation(name)

    def allocate(self, shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> Any:
        """Delegate."""
        return self.inner.allocate(shape, dtype)

    def to_host(self, array: Any) -> NDArray[Any]:
        """Delegate."""
        return self.inner.to_host(array)

    def to_device(self, array: Any, host: NDArray[Any]) -> None:
        """Delegate."""
        self.inner.to_device(array, host)

    def upload_rows(self, table: Any, stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue("upload_rows", table.role, lambda: self.inner.upload_rows(table, stream))

    def reset_lengths(self, cache: Any, reuse_lengths: NDArray[np.int32], stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue("reset_lengths", cache.role, lambda: self.inner.reset_lengths(cache, reuse_lengths, stream))

    def zero_recurrent(self, cache: Any, slots: NDArray[np.int32], stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue("zero_recurrent", cache.role, lambda: self.inner.zero_recurrent(cache, slots, stream))

    def restore(self, storage: Any, jobs: SnapshotJobs, stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue("restore", "base", lambda: self.inner.restore(storage, jobs, stream))

    def capture(self, storage: Any, jobs: SnapshotJobs, stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue("capture", "base", lambda: self.inner.capture(storage, jobs, stream))

    def upload_mapping(self, mapping: NDArray[np.int32], device_mapping: Any, stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue("upload_mapping", "base", lambda: self.inner.upload_mapping(mapping, device_mapping, stream))

    def compact_slot_state(self, cache: Any, mapping: Any, old_batch: int, new_batch: int, stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue(
            "compact_slot_state",
            cache.role,
            lambda: self.inner.compact_slot_state(cache, mapping, old_batch, new_batch, stream),
        )

    def capture_boundary_hidden(self, storage: Any, snapshot_slot: int, source: HiddenRow, stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue(
            "capture_boundary_hidden",
            "base",
            lambda: self.inner.capture_boundary_hidden(storage, snapshot_slot, source, stream),
        )

    def restore_boundary_hidden(self, storage: Any, snapshot_slot: int, destination: HiddenRow, stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue(
            "restore_boundary_hidden",
            "base",
            lambda: self.inner.restore_boundary_hidden(storage, snapshot_slot, destination, stream),
        )

    def sum_pages(self, cache: Any, page_ids: NDArray[np.int32], sums: Any, stream: Any) -> None:
        """Fail or delegate."""
        self._enqueue("sum_pages", cache.role, lambda: self.inner.sum_pages(cache, page_ids, sums, stream))

    def synchronize(self, stream: Any, synchronizer: StreamSynchronizer | None) -> int | None:
        """Fail or delegate; a fault that waited for a synchronise strikes here."""
        point, fault = self._reach(SYNCHRONIZE, "base")
        if fault is None:
            fault, self._doomed = self._doomed, None
        if fault is None:
            return self.inner.synchronize(stream, synchronizer)
        self.fired.append(point)
        if fault.mode is FaultMode.ERROR_CODE:
            return fault.code
        if fault.mode is FaultMode.RAISE_AFTER:
            self.inner.synchronize(stream, synchronizer)
        raise fault.exception()

    def _enqueue(self, op: str, role: str, work: Callable[[], None]) -> None:
        point, fault = self._reach(op, role)
        if fault is not None:
            self.fired.append(point)
            if fault.mode is FaultMode.RAISE_BEFORE:
                raise fault.exception()
        work()
        if fault is None:
            return
        if fault.mode is FaultMode.RAISE_AFTER:
            raise fault.exception()
        self._doomed = fault

    def _reach(self, op: str, role: str) -> tuple[str, Fault | None]:
        name = ".".join((self._operation, op) if role == "base" else (self._operation, op, role))
        self._in_operation[name] += 1
        repetition = self._in_operation[name]
        point = name if repetition == 1 else f"{name}.{repetition}"
        self.counts[point] += 1
        self._under_plan[point] += 1
        self.log.append(point)
        return point, self._plan.strike(point, self._under_plan[point])
