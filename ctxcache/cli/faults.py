"""`ctxcache faults`: list the fault points, and fail every one of them, with progress on standard error."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from ctxcache.cli.report import progress, write_json
from ctxcache.fsm import FaultGroup

if TYPE_CHECKING:
    from ctxcache.testing.kind_sweep import SweepResult


def list_points(groups: Sequence[FaultGroup], *, as_json: bool) -> None:
    """Print the fault points of each group."""
    listed = _listed(groups)
    if as_json:
        write_json(listed)
        return
    width = max(len(point["fault_point"]) for points in listed.values() for point in points)
    blocks = []
    for name, points in listed.items():
        lines = [f"{name}: {len(points)} fault points"]
        lines.extend(
            f"  {point['fault_point']:<{width}}  {point['does']:<7}  leads to {' or '.join(point['leads_to'])}"
            for point in points
        )
        blocks.append("\n".join(lines))
    sys.stdout.write("\n\n".join(blocks) + "\n")


def run_sweep(groups: Sequence[FaultGroup], *, pairs: bool, exhaustive: bool, as_json: bool) -> bool:
    """Sweep groups of fault points, as many at a time as there are cores; returns whether nothing was wrong.

    Args:
        groups: which.
        pairs: also ordered pairs of points.
        exhaustive: pairs in every way of failing.
        as_json: print one JSON document. Otherwise the list comes first.
    """
    if not as_json:
        list_points(groups, as_json=False)
        sys.stdout.write("\n")
        sys.stdout.flush()
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
                "fault_points": _listed(groups),
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
    from ctxcache.testing.kind_sweep import replay  # noqa: PLC0415 - the list does without Numba

    outcome = replay(title)
    if as_json:
        write_json({"run": title, "fired": outcome.fired, "violations": outcome.violations})
    else:
        sys.stdout.writelines(f"violation: {violation}\n" for violation in outcome.violations)
        sys.stdout.write(f"{title}: {outcome.fired} device touches failed, {len(outcome.violations)} violations\n")
    return bool(outcome.fired) and not outcome.violations


def _sweep_one(group: FaultGroup, pairs: bool, exhaustive: bool) -> SweepResult:  # noqa: FBT001 - mapped
    from ctxcache.testing.kind_sweep import sweep  # noqa: PLC0415 - the list does without Numba

    return sweep(group, pairs=pairs, exhaustive=exhaustive, progress=progress(group.name))


def _row(result: SweepResult) -> str:
    return (
        f"{result.group.name}: {len(result.group.points)} points reached {sum(result.occurrences.values())} times, "
        f"{result.runs['singles']} runs with one fault, {result.runs['pairs']} with two, {result.seconds:.0f} seconds, "
        f"{len(result.violations)} violations\n"
    )


def _listed(groups: Sequence[FaultGroup]) -> dict[str, list[dict[str, Any]]]:
    """Return the fault points of each group, by its name: what each point does and where it leads."""
    return {group.name: _points(group) for group in groups}


def _points(group: FaultGroup) -> list[dict[str, Any]]:
    return [
        {
            "fault_point": name,
            "does": next(fault.hook.kind.value for fault in group.faults if fault.name == name),
            "leads_to": list(dict.fromkeys(fault.leads_to.value for fault in group.faults if fault.name == name)),
        }
        for name in group.points
    ]
