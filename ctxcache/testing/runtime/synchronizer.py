"""A synchroniser that does as it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScriptedSynchronizer:
    """Answers what it is told to, in order, and then success.

    Attributes:
        outcomes: what is returned, or raised, next.
        calls: how often it was asked.
        log: a line a call.
    """

    outcomes: list[Any] = field(default_factory=list)
    calls: int = 0
    log: list[str] = field(default_factory=list)

    def __call__(self, stream: Any) -> int | None:
        """Answer."""
        del stream
        self.calls += 1
        outcome = self.outcomes.pop(0) if self.outcomes else None
        self.log.append("sync failed" if outcome else "sync")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome
