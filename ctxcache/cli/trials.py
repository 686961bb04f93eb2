"""The long commands: the fault sweep and the simulation, with progress on standard error."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from ctxcache.cli.report import write_json
from ctxcache.fsm import FaultGroup
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.testing.simulate import SimulationResult, simulate
from ctxcache.testing.sweep import SweepResult, replay, sweep

_PROGRESS_SECONDS = 5.0


def run_sweep(
    groups: Sequence[FaultGroup],
    *,
    pairs: bool,
    exhaustive: bool,
    as_json: bool,
    listed: dict[str, Any],
) -> bool:
    """Sweep groups of fault points, as many at a time as there are cores; returns whether nothing was wrong.

    Args:
        groups: which.
        pairs: also ordered pairs of points.
        exhaustive: pairs in every way of failing.
        as_json: print one JSON document.
        listed: the fault points of each group, for the document.
    """
    started = time.perf_counter()
    workers = min(len(groups), os.cpu_count() or 1)
    if workers == 1:
        results = [_sweep_one(group, pairs, exhaustive) for group in groups]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(_sweep_one, groups, [pairs] * len(groups), [exhaustive] * len(groups)))
    seconds = time.perf_counter() - started
    violations = sum(len(result.violations) for result in results)
    unfired = sum(len(result.unfired) for result in results)
    runs = sum(sum(result.runs.values()) for result in results)
    if as_json:
        write_json(
            {
                "fault_points": listed,
                "sweeps": [result.as_dict() for result in results],
                "runs": runs,
                "violations": violations,
                "unfired": unfired,
                "seconds": round(seconds, 2),
            }
        )
        return not violations and not unfired
    for result in results:
        sys.stdout.write(_row(result))
        sys.stdout.writelines(f"  violation: {violation}\n" for violation in result.violations[:20])
        sys.stdout.writelines(f"  did not fire: {title}\n" for title in result.unfired[:20])
        again = [*result.failed[:20], *result.unfired[:20]]
        sys.stdout.writelines(f"  run it again: ctxcache faults --run {shlex.quote(title)}\n" for title in again)
    points = sum(len(result.group.points) for result in results)
    sys.stdout.write(
        f"{points} fault points, {runs} runs, {seconds:.0f} seconds, {unfired} single faults that did not fire, "
        f"{violations} violations\n"
    )
    return not violations and not unfired


def run_again(title: str, *, as_json: bool) -> bool:
    """Do one run of a sweep once more; returns whether its faults struck and nothing was wrong."""
    outcome = replay(title)
    if as_json:
        write_json({"run": title, "fired": outcome.fired, "violations": outcome.violations})
    else:
        sys.stdout.writelines(f"violation: {violation}\n" for violation in outcome.violations)
        sys.stdout.write(f"{title}: {outcome.fired} device touches failed, {len(outcome.violations)} violations\n")
    return bool(outcome.fired) and not outcome.violations


def run_simulation(seed: int, steps: int, *, as_json: bool) -> bool:
    """Simulate; returns whether nothing was wrong. The replaying script of a failure goes to standard output."""
    result = simulate(seed, steps, progress=_reporter("simulate", steps))
    if as_json:
        write_json(result.as_dict())
        return not result.violations
    sys.stdout.write(_summary(result))
    if result.violations:
        sys.stdout.writelines(f"violation: {violation}\n" for violation in result.violations)
        sys.stdout.write(f"\n{result.script}")
    return not result.violations


def _sweep_one(group: FaultGroup, pairs: bool, exhaustive: bool) -> SweepResult:  # noqa: FBT001 - mapped
    return sweep(group, pairs=pairs, exhaustive=exhaustive, progress=_reporter(group.name))


def _reporter(name: str, total: int | None = None) -> Callable[[int], None]:
    """Tell now and then, on standard error, how far something has come."""
    last = time.perf_counter()

    def report(done: int) -> None:
        nonlocal last
        if time.perf_counter() - last >= _PROGRESS_SECONDS:
            last = time.perf_counter()
            sys.stderr.write(f"{name}: {done} {'runs' if total is None else f'of {total} steps'}\n")
            sys.stderr.flush()

    return report


def _row(result: SweepResult) -> str:
    return (
        f"{result.group.name}: {len(result.group.points)} points reached {sum(result.occurrences.values())} times, "
        f"{result.runs['singles']} runs with one fault, {result.runs['pairs']} with two, {result.seconds:.0f} seconds, "
        f"{len(result.violations)} violations\n"
    )


def _summary(result: SimulationResult) -> str:
    idle = result.steps - sum(result.actions.values())
    return (
        f"seed {result.seed}: {result.steps} steps in {result.episodes} deployments of "
        f"{min(result.episodes, len(Kind))} kinds, {f'{idle} steps with nothing to do, ' if idle else ''}"
        f"{result.faults} faults, {result.quarantines} quarantines, {result.comparisons} answers compared\n"
        f"event log {result.log_digest}\n"
        f"{result.seconds:.0f} seconds, {len(result.violations)} violations\n"
    )
