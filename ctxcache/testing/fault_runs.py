"""The runs of a fault sweep: which touches there are to fail, alone and in ordered pairs, and what each run is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ctxcache.fsm.points import FaultGroup
from ctxcache.testing.faults import OUTSIDE, SYNCHRONIZE, Fault, FaultMode, FaultPlan, InjectedFaultError
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.runtime.scripts import InjectedInterrupt, quiet_log, run_script

_RAISES = (FaultMode.RAISE_BEFORE, FaultMode.RAISE_AFTER, FaultMode.FAIL_SYNCHRONIZE)
_ERRORS: tuple[type[BaseException], ...] = (InjectedFaultError, InjectedInterrupt)

_PAIR_MODES = (FaultMode.RAISE_BEFORE, FaultMode.FAIL_SYNCHRONIZE)

_SUM = ".sum_pages"
_MOST_SUMS = 3
"""Occurrences of a touch of the page sanitizer that fail alone."""


class Chain(FaultPlan):
    """Two faults in order: the second is looked for only once the first has struck."""

    def __init__(self, first: Fault, second: Fault) -> None:
        super().__init__(first, second)
        self._left = [first, second]
        self._reached: Counter[str] = Counter()

    @property
    def complete(self) -> bool:
        """Whether both have struck."""
        return not self._left

    def strike(self, point: str, times_reached: int) -> Fault | None:
        """See `FaultPlan.strike`; each fault's occurrences are counted from where it is looked for."""
        del times_reached
        self._reached[point] += 1
        if not self._left or not self._left[0].strikes(point, self._reached[point]):
            return None
        self._reached.clear()
        return self._left.pop(0)


@dataclass(frozen=True, slots=True)
class FaultRun:
    """One run of the script: no fault, one, or two in order."""

    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        """The faults in words; no two runs of a group have the same."""
        return ", then ".join(describe(fault) for fault in self.faults) or "no fault"

    def plan(self) -> FaultPlan:
        """Return a new plan of it."""
        return Chain(*self.faults) if len(self.faults) > 1 else FaultPlan(*self.faults)


@dataclass(frozen=True, slots=True)
class Touches:
    """What a script without faults does to the device.

    Attributes:
        group: whose touches are to fail.
        occurrences: for each of them by name, which times of its name are the group's, from 1.
        points: the names of everything that can fail, the group's own included.
    """

    group: FaultGroup
    occurrences: dict[str, list[int]]
    points: tuple[str, ...]

    def singles(self) -> Iterator[FaultRun]:
        """Every occurrence in every way; of the page sanitizer's, which are many and alike, the first, last and a middle."""
        for point, times in self.occurrences.items():
            chosen = times
            if self.group.page_sanitizer and len(times) > _MOST_SUMS:
                chosen = [times[0], times[len(times) // 2], times[-1]]
            for occurrence in chosen:
                yield from (FaultRun((fault,)) for fault in faults_at(point, occurrence))

    def pairs(self, *, exhaustive: bool) -> Iterator[FaultRun]:
        """Every ordered pair of points; for the page sanitizer those in which it sums.

        Its drain needs no name of its own there: it is what fails when a sum fails at the next synchronise.
        """
        for pair in pair_faults(self.points, exhaustive=exhaustive):
            if not self.group.page_sanitizer or any(_SUM in fault.point for fault in pair):
                yield FaultRun(pair)


def survey(group: FaultGroup) -> Touches:
    """Run the script without a fault and see what there is to fail; the runtime's own waits are left out."""
    counts: Counter[str] = Counter()
    occurrences: dict[str, list[int]] = {}
    previous = ""
    runtime = FakeRuntime(group.kind, page_sanitizer=group.page_sanitizer)
    with quiet_log():
        run_script(runtime)
    for point in runtime.ops.log:
        if point.startswith(f"{OUTSIDE}."):
            continue
        counts[point] += 1
        sums = _SUM in point or (_SUM in previous and SYNCHRONIZE in point)
        if sums or not group.page_sanitizer:
            occurrences.setdefault(point, []).append(counts[point])
        previous = point
    return Touches(group, dict(sorted(occurrences.items())), tuple(sorted(counts)))


def faults_at(point: str, occurrence: int) -> Iterator[Fault]:
    """One occurrence of one point, in every way, once and from then on."""
    for persistent in (False, True):
        yield Fault(point, FaultMode.ERROR_CODE, occurrence, persistent)
        for mode in _RAISES:
            for error in _ERRORS:
                yield Fault(point, mode, occurrence, persistent, error)


def pair_faults(points: Iterable[str], *, exhaustive: bool) -> Iterator[tuple[Fault, Fault]]:
    """Every ordered pair of points, a point with itself included, in two ways each or in all.

    At a synchronise there is one way less: raising before it and failing it are the same.
    """
    ways = []
    for point in points:
        same = {FaultMode.FAIL_SYNCHRONIZE} if f".{SYNCHRONIZE}" in point else set()
        ways += [Fault(point, mode) for mode in (FaultMode if exhaustive else _PAIR_MODES) if mode not in same]
        if exhaustive:
            ways += [Fault(point, mode, exception=InjectedInterrupt) for mode in _RAISES if mode not in same]
    for first in ways:
        for second in ways:
            yield first, second


def describe(fault: Fault) -> str:
    """Say one fault in words."""
    words = [fault.point, fault.mode.value]
    if fault.occurrence > 1:
        words.append(f"at occurrence {fault.occurrence}")
    if fault.persistent:
        words.append("from then on")
    if fault.exception is InjectedInterrupt:
        words.append("as BaseException")
    return " ".join(words)
