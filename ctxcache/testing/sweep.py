"""Every fault point failed, in every way, alone and in ordered pairs; and after each run, nothing is lost.

The points are found, not listed: a run without faults says which device touches there are, and how often. Then each of
them fails in turn, the whole script runs on behind it as a careful runtime would, and the cache is looked over.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from ctxcache.errors import ContextCacheError
from ctxcache.fsm import State
from ctxcache.fsm.points import fault_points
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ResourceType
from ctxcache.testing.fake_runtime import FakeRuntime, RequestEnded, WaitFailed
from ctxcache.testing.faults import Fault, FaultMode, FaultPlan, InjectedFaultError
from ctxcache.testing.scripts import ENDPOINTS, PROMPTS, InjectedInterrupt, quiet_log, run_script

_Item = TypeVar("_Item")

_RAISES = (FaultMode.RAISE_BEFORE, FaultMode.RAISE_AFTER, FaultMode.FAIL_SYNCHRONIZE)
_ERRORS: tuple[type[BaseException], ...] = (InjectedFaultError, InjectedInterrupt)

_PAIR_MODES = (FaultMode.RAISE_BEFORE, FaultMode.FAIL_SYNCHRONIZE)


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


@dataclass(slots=True)
class SweepResult:
    """What a sweep of one deployment kind came to.

    Attributes:
        kind: which.
        points: names of the fault points, as declared.
        reached: how often a script without faults reaches each.
        runs: single faults, then pairs, that were run.
        unfired: runs of single faults in which nothing failed.
        incomplete: pairs whose second fault found nothing left to strike.
        violations: what was wrong after which run.
        seconds: wall time.
    """

    kind: Kind
    points: tuple[str, ...] = ()
    reached: dict[str, int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=lambda: {"singles": 0, "pairs": 0})
    unfired: list[str] = field(default_factory=list)
    incomplete: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return it as plain values."""
        return {
            "kind": self.kind.value,
            "points": len(self.points),
            "occurrences": sum(self.reached.values()),
            "runs": dict(self.runs),
            "unfired": list(self.unfired),
            "incomplete_pairs": self.incomplete,
            "violations": list(self.violations),
            "seconds": round(self.seconds, 2),
        }


def sweep(
    kind: Kind, *, pairs: bool = True, exhaustive: bool = False, progress: Callable[[int], None] = lambda _: None
) -> SweepResult:
    """Fail every point of one deployment kind.

    Args:
        kind: the deployment.
        pairs: also every ordered pair of points.
        exhaustive: pairs in every way of failing, instead of raising before the effect and failing the synchronise.
        progress: called with the runs so far.
    """
    started = time.perf_counter()
    result = SweepResult(kind, fault_points(kind))
    result.reached = reached_points(kind)
    result.violations += [f"no script reaches {point}" for point in result.points if point not in result.reached] + [
        f"{point} is reached and not declared" for point in result.reached if point not in result.points
    ]
    for fault in single_faults(result.reached):
        fired, violations = run_with(kind, FaultPlan(fault), describe(fault))
        result.runs["singles"] += 1
        result.violations += violations
        if not fired:
            result.unfired.append(describe(fault))
        progress(sum(result.runs.values()))
    if pairs:
        for first, second in pair_faults(result.reached, exhaustive=exhaustive):
            plan = Chain(first, second)
            _, violations = run_with(kind, plan, f"{describe(first)}, then {describe(second)}")
            result.runs["pairs"] += 1
            result.incomplete += not plan.complete
            result.violations += violations
            progress(sum(result.runs.values()))
    result.seconds = time.perf_counter() - started
    return result


def reached_points(kind: Kind, *, page_sanitizer: bool = False) -> dict[str, int]:
    """Say which fault points the script reaches without a fault, and how often; the runtime's own waits left out."""
    runtime = FakeRuntime(kind, page_sanitizer=page_sanitizer)
    with quiet_log():
        run_script(runtime)
    counts = Counter(point for point in runtime.ops.log if not point.startswith("outside."))
    return dict(sorted(counts.items()))


def single_faults(reached: dict[str, int]) -> Iterator[Fault]:
    """Every occurrence of every point, in every way, once and from then on."""
    for point, count in reached.items():
        for occurrence in range(1, count + 1):
            for persistent in (False, True):
                yield Fault(point, FaultMode.ERROR_CODE, occurrence, persistent)
                for mode in _RAISES:
                    for error in _ERRORS:
                        yield Fault(point, mode, occurrence, persistent, error)


def pair_faults(points: Iterable[str], *, exhaustive: bool) -> Iterator[tuple[Fault, Fault]]:
    """Every ordered pair of points, a point with itself included."""
    names = list(points)
    ways = [Fault(point, mode) for point in names for mode in (tuple(FaultMode) if exhaustive else _PAIR_MODES)]
    if exhaustive:
        ways += [Fault(point, mode, exception=InjectedInterrupt) for point in names for mode in _RAISES]
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


def run_with(kind: Kind, plan: FaultPlan, name: str, *, page_sanitizer: bool = False) -> tuple[int, list[str]]:
    """Run the script under a plan and look everything over.

    Returns:
        How many points failed, and what was wrong, each with the run's name.
    """
    seed = zlib.crc32(f"{kind.value} {name}".encode())
    runtime = FakeRuntime(kind, seed=seed, plan=plan, page_sanitizer=page_sanitizer)
    try:
        with quiet_log():
            heard = run_script(runtime)
            fired = len(runtime.ops.fired)
            violations = aftermath(runtime)
    except Exception as error:  # noqa: BLE001 - whatever escapes is a finding
        return len(runtime.ops.fired), [f"{kind.value}: {name}: {type(error).__name__} escaped: {error}"]
    if fired and not heard:
        violations.append("a device failure reached nobody")
    return fired, [f"{kind.value}: {name}: {violation}" for violation in violations]


def aftermath(runtime: FakeRuntime) -> list[str]:
    """End what is left, with a healthy device, and say everything that is wrong then; empty when nothing is lost.

    The request is released, or quarantined until shutdown proves the device idle; every page and slot is free or cached,
    once; no owner changed too early; and fresh requests, cold and hit, find right bytes.
    """
    violations: list[str] = []
    runtime.ops.plan = FaultPlan()
    runtime.outcomes = []
    try:
        if not runtime.settle():
            violations.append("a healthy device did not end the poisoning")
        _check_handle(runtime, violations)
        check_balance(runtime, violations)
        for prompt in PROMPTS:
            runtime.spoil_states()
            runtime.begin([[*prompt, 1], prompt])
            runtime.prefill(ENDPOINTS)
            runtime.decode([0, 1], accepted=[2])
            runtime.finish()
        check_balance(runtime, violations)
    except (ContextCacheError, RequestEnded, WaitFailed) as failure:
        violations.append(f"a healthy device, and yet: {failure!r}")
    return violations + runtime.violations + runtime.ledger.violations


def _check_handle(runtime: FakeRuntime, violations: list[str]) -> None:
    handle = runtime.handle
    if handle is None:
        return
    state = handle.inspect().state
    if handle.valid or state is not State.RELEASED:
        violations.append(
            f"the request did not end: its handle is {'full' if handle.valid else 'empty'} and it is {state}"
        )


def check_balance(runtime: FakeRuntime, violations: list[str]) -> None:
    """Without a request, every page and slot is free or cached, exactly once, and the invariants hold."""
    manager = runtime.coordinator.manager
    try:
        manager.check_invariants()
    except ContextCacheError as error:
        violations.append(f"check_invariants: {error}")
    if manager.num_leases:
        violations.append(f"{manager.num_leases} leases are still out")
    cached: dict[ResourceType, set[int]] = {resource: set() for resource in ResourceType}
    for record in manager.records:
        cached[ResourceType.BASE_KV_PAGE].update(record.base_page_path.tolist())
        cached[ResourceType.DRAFT_KV_PAGE].update(record.draft_page_path.tolist())
        for resource, slot in (
            (ResourceType.RECURRENT_SNAPSHOT, record.recurrent_snapshot_slot),
            (ResourceType.PARTIAL_KV_SNAPSHOT, record.partial_kv_snapshot_slot),
        ):
            if slot is not None:
                cached[resource].add(slot)
    for resource, indices in cached.items():
        pool = manager.pool(resource)
        if pool.free + len(indices) != pool.capacity:
            violations.append(
                f"{resource.value}: {pool.free} free and {len(indices)} cached do not make {pool.capacity}"
            )


def shuffled(items: Iterable[_Item], seed: str, count: int) -> list[_Item]:
    """Return a sample of faults, or of pairs of them, that is the same every time."""
    chosen = list(items)
    random.Random(seed).shuffle(chosen)  # noqa: S311 - a sample is no secret
    return chosen[:count]
