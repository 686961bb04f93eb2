"""What a demo prints: progress as it goes, a block for each turn, tables at the end."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from ctxcache import ContextCacheMetrics, PoolOccupancy


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn, answered with the cache and without."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    seconds_with_cache: float
    seconds_without: float
    tokens_equal: bool
    logits_equal: bool
    states_equal: bool | None
    """`None` for a model that keeps nothing but pages."""

    @property
    def reused_share(self) -> float:
        """Reused part of the prompt, 0 to 1."""
        return self.reused_tokens / self.prompt_tokens


class Report:
    """Prints, and remembers what was wrong.

    Attributes:
        failures: one sentence for each check that failed.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._started = time.perf_counter()

    @property
    def exit_status(self) -> int:
        """0 when every check held, else 1."""
        return 1 if self.failures else 0

    def step(self, text: str) -> None:
        """Say what is being done now, and how long the demo has been running."""
        print(f"[{time.perf_counter() - self._started:5.1f} s] {text}", flush=True)

    def line(self, text: str = "") -> None:
        """Print a line below the present step."""
        print(textwrap.indent(text, " " * 10), flush=True)

    def check(self, claim: str, *, holds: bool) -> bool:
        """Remember a claim that does not hold; return whether it does."""
        if not holds:
            self.failures.append(claim)
        return holds

    def note(self, text: str) -> None:
        """Print a line of its own."""
        print(f"\n{text}", flush=True)

    def turn(self, result: TurnResult) -> None:
        """Print how one turn compares."""
        speedup = result.seconds_without / result.seconds_with_cache
        self.line(f"without: prefill {duration(result.seconds_without)}, {speedup:.1f} times as long")
        states = "" if result.states_equal is None else f"; states bit-equal: {yes_or_no(result.states_equal)}"
        self.line(
            f"tokens equal: {yes_or_no(result.tokens_equal)}; logits bit-equal to a cold prefill cut at "
            f"{result.reused_tokens}: {yes_or_no(result.logits_equal)}{states}"
        )

    def summary(self, results: Sequence[TurnResult]) -> None:
        """Print the turns as a table."""
        columns: dict[str, Callable[[TurnResult], str]] = {
            "turn": lambda r: str(r.turn),
            "prompt": lambda r: str(r.prompt_tokens),
            "reused": lambda r: str(r.reused_tokens),
            "share": lambda r: f"{r.reused_share:.0%}",
            "with cache": lambda r: duration(r.seconds_with_cache),
            "without": lambda r: duration(r.seconds_without),
            "tokens equal": lambda r: yes_or_no(r.tokens_equal),
            "logits bit-equal": lambda r: yes_or_no(r.logits_equal),
        }
        if any(result.states_equal is not None for result in results):
            columns["states bit-equal"] = lambda r: yes_or_no(r.states_equal is True)
        cells = [[cell(result) for cell in columns.values()] for result in results]
        self.table("Turns (prompt and reused in tokens; prefill time with the cache and without)", list(columns), cells)

    def table(self, title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        """Print rows of cells under their column's head, aligned to the right."""
        rows = [head, *cells]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        print(f"\n{title}")
        for row in rows:
            print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))

    def metrics(self, metrics: ContextCacheMetrics) -> None:
        """Print what the coordinator counted, zeros left out, and how full its pools are."""
        print("\ncoordinator.metrics(), zeros left out")
        for entry in fields(metrics):
            value = getattr(metrics, entry.name)
            if isinstance(value, PoolOccupancy):
                value = f"{value.free} free of {value.capacity}" if value.capacity else 0
            if value:
                print(f"  {entry.name:<32} {value if isinstance(value, str) else format(value, ',')}")

    def verdict(self) -> None:
        """Print the last lines."""
        print()
        for failure in self.failures:
            print(f"FAILED: {failure}")
        if not self.failures:
            print("Every answer with the cache equals the answer without it.")
        print(f"Done in {time.perf_counter() - self._started:.0f} s.")


def duration(seconds: float) -> str:
    """Return a time with its unit."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def yes_or_no(value: bool) -> str:  # noqa: FBT001 - it is the value to print
    """Return the word for a truth value."""
    return "yes" if value else "NO"
