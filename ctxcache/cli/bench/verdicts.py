"""What the benchmarks have in common: verdicts as they come in, their report, and what is said of many timings of one thing."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ctxcache.cli.report import write_json

Benchmark: TypeAlias = Callable[[Callable[[str], object]], dict[str, Any]]
"""Measures: takes what shows a line, and returns the report as plain values."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bound, what was measured, and whether it is met. Ratios are of device times unless the claim says otherwise."""

    claim: str
    bound: str
    measured: str
    met: bool


class Verdicts:
    """Verdicts as they come in; each is printed at once.

    Args:
        show: takes a line at a time.
    """

    def __init__(self, show: Callable[[str], object]) -> None:
        self.verdicts: list[Verdict] = []
        self._show = show

    def verdict(self, claim: str, bound: str, measured: str, *, met: bool) -> None:
        """Take a verdict."""
        self.verdicts.append(Verdict(claim, bound, measured, met))
        self._show(f"  {'met' if met else 'NOT MET':<8} {claim}: {measured} (bound {bound})")


def print_run(run: Benchmark, *, as_json: bool) -> bool:
    """Run a benchmark and print its lines as they come; returns whether every bound was met that could be judged.

    With JSON the lines go to standard error, and the report to standard output.
    """
    output = sys.stderr if as_json else sys.stdout
    report = run(lambda line: print(line, file=output, flush=True))
    if as_json:
        write_json(report)
    return all(verdict["met"] for verdict in report["verdicts"])


@dataclass(frozen=True, slots=True)
class Spread:
    """Many values of one thing.

    Attributes:
        median: what counts.
        low: a tenth of the values are below.
        high: a tenth of the values are above.
        count: how many values there are.
    """

    median: float
    low: float
    high: float
    count: int


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return Spread(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the first column to the left and the others to the right, each as wide as it must be."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *rows)
    ]
