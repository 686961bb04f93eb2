"""One run's rows beside the peers' figures, and several runs in one table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ctxcache.cli.bench.host.bounds import WORKS, Row, describe, judge
from ctxcache.cli.bench.verdicts import Verdict, format_table
from peer_bench.catalogue import LINES
from peer_bench.lines import Figure

MET, NOT_MET, UNJUDGED = "met", "NOT MET", "-"


@dataclass(frozen=True, slots=True)
class Compared:
    """One row of one run.

    Attributes:
        row: ours.
        peers: the peers' figures by name, in the row's unit; those that do only a part of the work included.
        best: name of the best peer among those that do all of it; empty where none ran.
        verdict: `None` where there is no bound, or no peer to judge by.
    """

    row: Row
    peers: dict[str, float]
    best: str
    verdict: Verdict | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        ratios = {name: value / self.row.median for name, value in self.peers.items()}
        return {**asdict(self), "times_ours": ratios}


def compare(rows: Sequence[Row], figures: Sequence[Figure]) -> list[Compared]:
    """Put each row of a run beside the figures of the same run."""
    values = {figure.label: figure.value for figure in figures}
    return [_compare_one(row, values) for row in rows]


def _compare_one(row: Row, values: dict[str, float]) -> Compared:
    found = [
        (line, values[label])
        for line in LINES
        if line.work == row.work and (label := line.label.format(block=row.block)) in values
    ]
    whole = [(value, line.name) for line, value in found if line.counts]
    value, best = min(whole, default=(None, ""))
    return Compared(row, {line.name: each for line, each in found}, best, judge(row, value))


def summarise(runs: Sequence[Sequence[Compared]]) -> list[str]:
    """Return the table of all runs: medians of medians, and in how many runs each bound was met."""
    lines = [_summarise_one(rows) for rows in zip(*runs, strict=True)]
    return format_table(("work", "ours", "spread", "best peer", "", "peer / ours", "bound", "verdict"), lines)


def _summarise_one(rows: Sequence[Compared]) -> tuple[str, ...]:
    row, medians = rows[0].row, [each.row.median for each in rows]
    ours = statistics.median(medians)
    best_names = [each.best for each in rows if each.best]
    best = statistics.mode(best_names) if best_names else ""
    peer = statistics.median([each.peers[best] for each in rows if best in each.peers]) if best else None
    return (
        describe(row),
        f"{ours:.4g} {row.unit}",
        f"{min(each.row.low for each in rows):.4g} .. {max(each.row.high for each in rows):.4g}",
        "" if peer is None else f"{peer:.4g} {row.unit}",
        best,
        "" if peer is None else f"{peer / ours:.1f}",
        _bound_of(row),
        _verdict_of(rows),
    )


def _bound_of(row: Row) -> str:
    bound = WORKS[row.work].bounds[row.block]
    if bound is None:
        return UNJUDGED
    return f"{bound.limit:g} of the best" if bound.of_best_peer else f"{bound.limit:g} {row.unit}"


def _verdict_of(rows: Sequence[Compared]) -> str:
    verdicts = [each.verdict for each in rows if each.verdict is not None]
    if not verdicts:
        return UNJUDGED
    met = sum(verdict.met for verdict in verdicts)
    return f"{MET if met == len(verdicts) else NOT_MET} ({met} of {len(verdicts)})"


def all_met(runs: Sequence[Sequence[Compared]]) -> bool:
    """Whether every bound that could be judged was met in every run."""
    return all(each.verdict.met for run in runs for each in run if each.verdict is not None)


def show_peers(compared: Sequence[Compared]) -> list[str]:
    """Return one run's ratios to each peer."""
    rows = [
        (
            describe(each.row),
            f"{each.row.median:.4g} {each.row.unit}",
            name,
            f"{value:.4g}",
            f"{value / each.row.median:.1f}",
        )
        for each in compared
        for name, value in each.peers.items()
    ]
    return format_table(("work", "ours", "peer", "peer's", "peer / ours"), rows)
