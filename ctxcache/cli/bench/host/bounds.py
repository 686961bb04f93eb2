"""The table of `ctxcache bench host`: every work, what it must cost at most, and how that is judged."""

from __future__ import annotations

from dataclasses import dataclass

from ctxcache.cli.bench.verdicts import Verdict

BLOCKS = (16, 128)


@dataclass(frozen=True, slots=True)
class Bound:
    """What a row must be, at most.

    Attributes:
        limit: in the row's unit; or, where `of_best_peer`, as a share of the best peer's figure.
        of_best_peer: whether it is such a share.
    """

    limit: float
    of_best_peer: bool = False


@dataclass(frozen=True, slots=True)
class WorkKind:
    """One work of the table.

    Attributes:
        title: what is done.
        unit: `us`, `s`, `bytes`, `%` or `x`; less is better in all of them.
        letter: which of the peers' letters does the same; empty where none does.
        bounds: by block size; 0 for works in which it plays no part.
    """

    title: str
    unit: str
    letter: str
    bounds: dict[int, Bound | None]


WORKS: dict[str, WorkKind] = {
    "hash": WorkKind("hash 32k tokens", "us", "a", dict.fromkeys(BLOCKS, Bound(0.5, of_best_peer=True))),
    "hit": WorkKind(
        "full hit of 32k: hash, lookup, pin, pages", "us", "b", dict.fromkeys(BLOCKS, Bound(1.0, of_best_peer=True))
    ),
    "insert": WorkKind("cold insert of 32k, hash included", "us", "c", dict.fromkeys(BLOCKS, Bound(300.0))),
    "decode-64": WorkKind("decode step, 64 sequences", "us", "d", dict.fromkeys(BLOCKS)),
    "decode-256": WorkKind("decode step, 256 sequences", "us", "d", dict.fromkeys(BLOCKS, Bound(100.0))),
    "evict": WorkKind("4k request that evicts, 100k blocks", "us", "e", {16: Bound(300.0), 128: Bound(100.0)}),
    "leaves": WorkKind("evict 64 of 100k one-page leaves", "us", "e", dict.fromkeys(BLOCKS, Bound(20.0))),
    "bytes": WorkKind("bytes a cached block", "bytes", "f", {16: Bound(96.0)}),
    "chat": WorkKind("turn of a chat load at half its memory", "us", "", dict.fromkeys(BLOCKS)),
    "chat-computed": WorkKind("prompt tokens computed in it", "%", "", dict.fromkeys(BLOCKS)),
    "chat-ratio": WorkKind("the same, of block-wise LRU", "x", "", dict.fromkeys(BLOCKS, Bound(1.0))),
    "trigger": WorkKind("lifecycle trigger", "us", "", {0: Bound(20.0)}),
    "import": WorkKind("import ctxcache", "s", "", {0: Bound(1.5)}),
    "warm-up": WorkKind("warmup(), everything cached on disk", "s", "", {0: None}),
    "compile": WorkKind("warmup(), nothing cached", "s", "", {0: None}),
}
"""Titles name the full sizes; `--quick` runs smaller ones."""

DEFAULT = tuple(name for name in WORKS if name != "compile")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a work, its block size (0: plays no part) and what was measured, in `unit`."""

    work: str
    block: int
    unit: str
    median: float
    low: float
    high: float
    count: int


def judge(row: Row, best_peer: float | None) -> Verdict | None:
    """Hold a row against its bound; `None` where it has none, or where the peers that it is a share of are unknown.

    Args:
        row: what was measured.
        best_peer: the least of the peers' figures, in the row's unit.
    """
    bound = WORKS[row.work].bounds[row.block]
    if bound is None or (bound.of_best_peer and best_peer is None):
        return None
    limit = bound.limit * best_peer if bound.of_best_peer and best_peer is not None else bound.limit
    said = f"at most {limit:.4g} {row.unit}" + (f", {bound.limit:g} of the best peer" if bound.of_best_peer else "")
    return Verdict(describe(row), said, f"{row.median:.4g} {row.unit}", row.median <= limit)


def describe(row: Row) -> str:
    """Name a row: its work, and its block size where that matters."""
    return WORKS[row.work].title + (f", block {row.block}" if row.block else "")
