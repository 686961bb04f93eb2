"""The long commands: the fault sweep and the simulation, with progress on standard error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from ctxcache.cli.report import write_json
from ctxcache.ids import ContextCacheDeploymentKind
from ctxcache.testing.simulate import SimulationResult, simulate
from ctxcache.testing.sweep import SweepResult, sweep

_PROGRESS_SECONDS = 5.0


def run_sweep(
    kinds: Sequence[ContextCacheDeploymentKind],
    *,
    pairs: bool,
    exhaustive: bool,
    as_json: bool,
    listed: dict[str, Any],
) -> bool:
    """Sweep deployment kinds, as many at a time as there are cores; returns whether nothing was wrong.

    Args:
        kinds: which.
        pairs: also ordered pairs of points.
        exhaustive: pairs in every way of failing.
        as_json: print one JSON document.
        listed: the fault points of each kind, for the document.
    """
    started = time.perf_counter()
    workers = min(len(kinds), os.cpu_count() or 1)
    if workers == 1:
        results = [_sweep_one(kind, pairs, exhaustive) for kind in kinds]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(_sweep_one, kinds, [pairs] * len(kinds), [exhaustive] * len(kinds)))
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
        sys.stdout.writelines(f"  did not fire: {name}\n" for name in result.unfired[:20])
    points = sum(len(result.points) for result in results)
    sys.stdout.write(
        f"{points} fault points, {runs} runs, {seconds:.0f} seconds, {unfired} single faults that did not fire, "
        f"{violations} violations\n"
    )
    return not violations and not unfired


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


def _sweep_one(kind: ContextCacheDeploymentKind, pairs: bool, exhaustive: bool) -> SweepResult:  # noqa: FBT001 - mapped
    return sweep(kind, pairs=pairs, exhaustive=exhaustive, progress=_reporter(kind.value))


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
        f"{result.kind.value}: {len(result.points)} points reached {sum(result.reached.values())} times, "
        f"{result.runs['singles']} runs with one fault, {result.runs['pairs']} with two, {result.seconds:.0f} seconds, "
        f"{len(result.violations)} violations\n"
    )


def _summary(result: SimulationResult) -> str:
    done = sum(result.actions.values())
    return (
        f"seed {result.seed}: {result.steps} steps in {result.episodes} deployments, {done} of them possible, "
        f"{result.faults} faults, {result.quarantines} quarantines, {result.comparisons} answers compared\n"
        f"event log {result.log_digest}\n"
        f"{result.seconds:.0f} seconds, {len(result.violations)} violations\n"
    )
