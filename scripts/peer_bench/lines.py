"""Reading what the peers' scripts print: a label, a median, and a unit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TIMED = re.compile(r"(?P<label>\([a-f]\) .+?)\s+med\s+(?P<median>[\d.]+)(?P<unit>us|ms) p10 ")
_SIZED = (
    re.compile(r"(?P<label>\(f\) sha256): .* total (?P<median>[\d.]+) B/block"),
    re.compile(r"(?P<label>\(f\) rust page\d+ per page) .*RSS delta (?P<median>[\d.]+) B/page"),
)
_MICROSECONDS = {"us": 1.0, "ms": 1000.0}


@dataclass(frozen=True, slots=True)
class Figure:
    """What one line says: microseconds, or bytes a block."""

    label: str
    value: float


def read_figures(lines: Iterable[str]) -> list[Figure]:
    """Return the figures among what a script printed; other lines are passed over."""
    return [figure for line in lines if (figure := _read_figure(line)) is not None]


def _read_figure(line: str) -> Figure | None:
    timed = _TIMED.match(line)
    if timed is not None:
        return Figure(timed["label"], float(timed["median"]) * _MICROSECONDS[timed["unit"]])
    for pattern in _SIZED:
        sized = pattern.match(line)
        if sized is not None and float(sized["median"]) > 0:  # 0: the process had the memory from before
            return Figure(sized["label"], float(sized["median"]))
    return None
