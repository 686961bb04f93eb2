"""Every fault point failed, in every way, alone and in ordered pairs; and after each run, nothing is lost.

The points are found, not listed: a run without faults says which device touches there are, and how often. Then each of
them fails in turn, the whole script runs on behind it as a careful runtime would, and the cache is looked over.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ctxcache.errors import ContextCacheError, ContractError
from ctxcache.fsm import FaultGroup, State, fault_groups
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ResourceType
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.testing.fault_runs import Chain, FaultRun, survey
from ctxcache.testing.faults import FaultPlan
from ctxcache.testing.runtime.runtime import FakeRuntime, WaitFailed
from ctxcache.testing.runtime.scripts import ENDPOINTS, PROMPTS, quiet_log, run_script
from ctxcache.testing.runtime.steps import RequestEnded


@dataclass(slots=True)
class SweepResult:
    """What a sweep of one group of fault points came to.

    Attributes:
        group: which.
        occurrences: how often a script without faults makes each of the group's touches.
        runs: single faults, then pairs, that were run.
        unfired: runs of single faults in which nothing failed, as `replay` takes them.
        incomplete: pairs whose second fault found nothing left to strike.
        violations: what was wrong after which run.
        failed: the runs after which something was wrong, as `replay` takes them.
        seconds: wall time.
    """

    group: FaultGroup
    occurrences: dict[str, int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=lambda: {"singles": 0, "pairs": 0})
    unfired: list[str] = field(default_factory=list)
    incomplete: int = 0
    violations: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return it as plain values."""
        return {
            "kind": self.group.kind.value,
            "page_sanitizer": self.group.page_sanitizer,
            "points": len(self.group.points),
            "occurrences": sum(self.occurrences.values()),
            "runs": dict(self.runs),
            "unfired": list(self.unfired),
            "incomplete_pairs": self.incomplete,
            "violations": list(self.violations),
            "failed": list(self.failed),
            "seconds": round(self.seconds, 2),
        }


class RunOutcome(NamedTuple):
    """What one run came to: how many points failed, whether all its faults struck, and what was wrong afterwards."""

    fired: int
    complete: bool
    violations: list[str]


def sweep(
    group: FaultGroup, *, pairs: bool = True, exhaustive: bool = False, progress: Callable[[int], None] = lambda _: None
) -> SweepResult:
    """Fail every point of one group.

    Args:
        group: the points; the deployment is theirs.
        pairs: also every ordered pair of points.
        exhaustive: pairs in every way of failing, instead of raising before the effect and failing the synchronise.
        progress: called with the runs so far.
    """
    started = time.perf_counter()
    touches = survey(group)
    result = SweepResult(group, {point: len(times) for point, times in touches.occurrences.items()})
    points = group.points
    result.violations += [f"no script reaches {point}" for point in points if point not in touches.occurrences] + [
        f"{point} is reached and not declared" for point in touches.occurrences if point not in points
    ]
    for run in touches.singles():
        outcome = _run_into(result, run, "singles")
        if not outcome.fired:
            result.unfired.append(_title(group, run))
        progress(sum(result.runs.values()))
    if pairs:
        for run in touches.pairs(exhaustive=exhaustive):
            result.incomplete += not _run_into(result, run, "pairs").complete
            progress(sum(result.runs.values()))
    result.seconds = time.perf_counter() - started
    return result


def replay(title: str) -> RunOutcome:
    """Do one run of a sweep again, exactly: the same faults, on the same schedule.

    Args:
        title: what a sweep called it: the group's name, a colon, the faults in words.

    Raises:
        ContractError: no sweep has such a run.
    """
    for group in fault_groups(Kind):
        if title.startswith(f"{group.name}: "):
            touches = survey(group)
            for run in (*touches.singles(), *touches.pairs(exhaustive=True)):
                if _title(group, run) == title:
                    return run_with(group, run)
    raise ContractError(f"no sweep has a run called {title!r}; copy one from what `ctxcache faults` printed")


def run_with(group: FaultGroup, run: FaultRun) -> RunOutcome:
    """Run the script with faults, on a schedule that follows from what they are called, and look everything over."""
    plan, seed = run.plan(), zlib.crc32(f"{group.name} {run.name}".encode())
    runtime = FakeRuntime(group.kind, seed=seed, plan=plan, page_sanitizer=group.page_sanitizer)
    try:
        with quiet_log():
            heard = run_script(runtime)
            fired = len(runtime.ops.fired)
            violations = aftermath(runtime)
    except Exception as error:  # noqa: BLE001 - whatever escapes is a finding
        fired, violations = len(runtime.ops.fired), [f"{type(error).__name__} escaped: {error}"]
    else:
        if fired and not heard:
            violations.append("a device failure reached nobody")
    complete = not isinstance(plan, Chain) or plan.complete
    return RunOutcome(fired, complete, [f"{_title(group, run)}: {violation}" for violation in violations])


def _title(group: FaultGroup, run: FaultRun) -> str:
    return f"{group.name}: {run.name}"


def _run_into(result: SweepResult, run: FaultRun, count: str) -> RunOutcome:
    outcome = run_with(result.group, run)
    result.runs[count] += 1
    result.violations += outcome.violations
    if outcome.violations:
        result.failed.append(_title(result.group, run))
    return outcome


def aftermath(runtime: FakeRuntime) -> list[str]:
    """End what is left, with a healthy device, and say everything that is wrong then; empty when nothing is lost.

    The request is released, or quarantined until shutdown proves the device idle; every page and slot is free or cached,
    once; no owner changed too early; and fresh requests, cold and hit, find right bytes.
    """
    violations: list[str] = []
    runtime.ops.plan = FaultPlan()
    runtime.sync.outcomes = []
    try:
        if not runtime.settle():
            violations.append("a healthy device did not end the poisoning")
        _check_handle(runtime, violations)
        check_balance(runtime.coordinator.manager, violations)
        for prompt in PROMPTS:
            runtime.spoil_states()
            runtime.begin([[*prompt, 1], prompt])
            runtime.prefill(ENDPOINTS)
            runtime.decode([0, 1], accepted=[2])
            runtime.finish()
        runtime.verify_pages()
        check_balance(runtime.coordinator.manager, violations)
    except (ContextCacheError, RequestEnded, WaitFailed) as failure:
        violations.append(f"a healthy device, and yet: {failure!r}")
    return violations + runtime.violations + runtime.ledger.violations + runtime.guard.violations


def _check_handle(runtime: FakeRuntime, violations: list[str]) -> None:
    handle = runtime.handle
    if handle is None:
        return
    state = handle.inspect().state
    if handle.valid or state is not State.RELEASED:
        violations.append(
            f"the request did not end: its handle is {'full' if handle.valid else 'empty'} and it is {state}"
        )


def check_balance(manager: ContextCacheManager, violations: list[str]) -> None:
    """Without a request, every page and slot is free or cached, exactly once, and the invariants hold."""
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
