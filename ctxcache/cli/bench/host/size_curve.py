"""Cost against cache size, from a thousand blocks to a million: what is claimed is that the lines are flat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import numpy as np

from ctxcache.cli.bench.host import manager_work
from ctxcache.cli.bench.host.manager_work import QUICK, Sizes

_BLOCK = 16
_SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_QUICK_SIZES = (600, 1_200)
_SEED = 7

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 780, 420, 64, 210, 54, 54
_GRID = 5
_NAME_HEIGHT = 15
_COLOURS = ("#0969da", "#1a7f37", "#bc4c00")


@dataclass(frozen=True, slots=True)
class Curve:
    """One operation's medians.

    Attributes:
        name: of the operation.
        blocks: cached blocks.
        microseconds: the median at each.
    """

    name: str
    blocks: list[int]
    microseconds: list[float]


def measure_curves(sizes: Sizes, show: Callable[[str], object]) -> list[Curve]:
    """Time hits, insertions that evict, and evictions of leaves, in caches of one-page records that are full.

    Args:
        sizes: of the requests; `QUICK` also makes small caches.
        show: takes a line at a time.
    """
    points = _QUICK_SIZES if sizes is QUICK else _SIZES
    tokens, leaves = sizes.request_tokens, sizes.leaves
    curves = [
        Curve(name, [], [])
        for name in (f"{tokens} tokens that evict", f"full hit of {tokens} tokens", f"evict {leaves} leaves")
    ]
    for blocks in points:
        each = _median_costs(blocks, sizes)
        for curve, cost in zip(curves, each, strict=True):
            curve.blocks.append(blocks)
            curve.microseconds.append(cost)
        show(f"{blocks:>9} blocks  " + "  ".join(f"{curve.name}: {curve.microseconds[-1]:.1f} us" for curve in curves))
    return curves


def _median_costs(blocks: int, sizes: Sizes) -> tuple[float, float, float]:
    tokens = sizes.request_tokens
    prompts, leaves = (manager_work.make_manager(_BLOCK, blocks) for _ in range(2))
    manager_work.fill(prompts, blocks, tokens // _BLOCK, np.random.default_rng(_SEED))
    manager_work.fill(leaves, blocks, 1, np.random.default_rng(_SEED))
    works = (
        manager_work.evict_in(prompts, tokens),
        manager_work.hit_in(prompts, tokens),
        manager_work.evict_leaves_in(leaves, sizes.leaves),
    )
    evicting, hit, leaf = (manager_work.time_work(work, sizes.repeats).median for work in works)
    return evicting, hit, leaf


def draw(curves: list[Curve]) -> str:
    """Return the curves as SVG: cached blocks from left to right on a logarithmic scale, microseconds upwards from 0."""
    blocks = curves[0].blocks
    top = _round_up(max(max(curve.microseconds) for curve in curves))
    left, right = math.log10(blocks[0]), math.log10(blocks[-1])

    def across(count: float) -> float:
        return _LEFT + (math.log10(count) - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def up(microseconds: float) -> float:
        return _HEIGHT - _BOTTOM - microseconds / top * (_HEIGHT - _BOTTOM - _TOP)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">Cost against cache size</text>',
        f'<text x="{_LEFT}" y="42" fill="#57606a">median of one operation, microseconds; blocks of {_BLOCK} tokens</text>',
    ]
    for step in range(_GRID + 1):
        value = top * step / _GRID
        lines.append(_line(_LEFT, up(value), _WIDTH - _RIGHT, up(value), "#d0d7de"))
        lines.append(_text(_LEFT - 8, up(value) + 4, f"{value:g}", "end"))
    for count in blocks:
        lines.append(_line(across(count), up(0), across(count), up(0) + 5, "#57606a"))
        lines.append(_text(across(count), up(0) + 20, _short(count), "middle"))
    lines.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "cached blocks", "middle"))
    heights = _apart([up(curve.microseconds[-1]) for curve in curves])
    for curve, colour, height in zip(curves, _COLOURS, heights, strict=False):
        points = [(across(count), up(cost)) for count, cost in zip(curve.blocks, curve.microseconds, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
        lines.append(_text(points[-1][0] + 10, height + 4, curve.name, "start", colour))
    return "\n".join([*lines, "</svg>", ""])


def _apart(heights: list[float]) -> list[float]:
    """Move names down so that each is a line below the one above it."""
    moved = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for above, below in itertools.pairwise(order):
        moved[below] = max(moved[below], moved[above] + _NAME_HEIGHT)
    return moved


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#57606a") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _short(count: int) -> str:
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:g}{unit}"
    return str(count)


def _round_up(value: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)
