"""`ctxcache bench host`: what the library costs the host, row by row; the works and their bounds are in `bounds`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ctxcache.cli.bench.host import chat_work, coordinator_work, manager_work, start_up
from ctxcache.cli.bench.host.bounds import WORKS, Row, describe, judge
from ctxcache.cli.bench.host.manager_work import QUICK, Sizes, Work
from ctxcache.cli.bench.host.size_curve import draw, measure_curves
from ctxcache.cli.bench.verdicts import Spread, Verdicts, spread_of
from ctxcache.cli.doctor import version_of

_PACKAGES = ("ctxcache", "numba", "numpy", "transitions")


def environment() -> dict[str, Any]:
    """Machine and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "pinned_to": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": time.strftime("%Y-%m-%d"),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def measure(chosen: Sequence[str], sizes: Sizes) -> Iterator[Row]:
    """Run the chosen works in the table's order; yields each row as soon as it is measured."""
    for name, kind in WORKS.items():
        if name not in chosen:
            continue
        for block in kind.bounds:
            spread = _measure_one(name, block, sizes)
            yield Row(name, block, kind.unit, spread.median, spread.low, spread.high, spread.count)


def _measure_one(name: str, block: int, sizes: Sizes) -> Spread:
    if name == "bytes":
        return spread_of([manager_work.bytes_a_block(block, sizes)])
    if name.startswith("chat"):
        return chat_work.chat_spread(name, block, 2 * sizes.repeats)
    if name in start_up.STARTS:
        return spread_of(start_up.seconds_of(name, 1 if name == "compile" else min(sizes.repeats, 5)))
    if name.startswith("decode-"):
        batch = sizes.batches[0 if name == "decode-64" else -1]
        return manager_work.time_work(coordinator_work.decode_step(block, batch, sizes), sizes.steps)
    if name == "trigger":
        return manager_work.time_work(coordinator_work.lifecycle_trigger(), sizes.steps)
    makers: dict[str, Callable[[int, Sizes], Work]] = {
        "hash": manager_work.hash_prompt,
        "hit": manager_work.full_hit,
        "insert": manager_work.cold_insert,
        "evict": manager_work.evicting_request,
        "leaves": manager_work.evict_leaves,
    }
    return manager_work.time_work(makers[name](block, sizes), sizes.repeats)


def show_row(row: Row, sizes: Sizes) -> str:
    """Return a row as one line."""
    rate = f"{sizes.prompt_tokens / row.median:7.0f} Mtok/s" if row.work == "hash" else ""
    return (
        f"{describe(row):<56} {row.median:10.4g} {row.unit:<5}  {row.low:10.4g} .. {row.high:<10.4g} n={row.count} {rate}"
    ).rstrip()


def run(chosen: Sequence[str], sizes: Sizes, show: Callable[[str], object], plot: Path | None = None) -> dict[str, Any]:
    """Measure the chosen works; returns the report as plain values.

    Args:
        chosen: names of `WORKS`.
        sizes: of the workloads.
        show: takes a line at a time.
        plot: where to draw cost against cache size; `None` for nowhere.
    """
    where = environment()
    show(
        f"{where['cpu']}, {where['cores']} cores, on {where['pinned_to']}; Python {where['python']}, {where['packages']}"
    )
    show("medians; in between lie eight tenths of the runs")
    full = sizes != QUICK
    if not full:
        show("tiny sizes, and not those that the lines name: whether everything runs, not how fast; no bound is judged")
    rows, verdicts = [], Verdicts(show)
    for row in measure(chosen, sizes):
        rows.append(row)
        show(show_row(row, sizes))
        verdict = judge(row, None) if full else None
        if verdict is not None:
            verdicts.verdict(verdict.claim, verdict.bound, verdict.measured, met=verdict.met)
    report = {
        "environment": where,
        "sizes": asdict(sizes),
        "rows": [asdict(row) for row in rows],
        "verdicts": [asdict(verdict) for verdict in verdicts.verdicts],
    }
    if plot is not None:
        curves = measure_curves(sizes, show)
        plot.write_text(draw(curves), encoding="utf-8")
        report["curves"] = [asdict(curve) for curve in curves]
    return report
