"""A request as the lifecycle's machine sees it: it records what is asked of it, and fails where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ctxcache.fsm import TRANSITIONS, State, Transition

HOOKS = {hook.name: hook for row in TRANSITIONS for hook in row.hooks}
GUARDS = {guard.name for row in TRANSITIONS for guard in (*row.guards, *row.unless)}


class Subject:
    """A model for the machine.

    Attributes:
        ran: the hooks that ran, each with the state that the request was in.
        answers: what guards say.
        outcomes: what a hook raises or returns; hooks that are not named return `None`.
    """

    def __init__(
        self, state: State, *, answers: dict[str, bool] | None = None, outcomes: dict[str, Any] | None = None
    ) -> None:
        self._state = state.value
        self.ran: list[tuple[str, str]] = []
        self.answers = answers or {}
        self.outcomes = outcomes or {}

    def touch_device(self, hook: str) -> Any:
        """Run a hook by its name, as the machine asks for it."""
        return self._run(hook)

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name in HOOKS:
            return lambda: self._run(name)
        if name in GUARDS:
            return lambda: self._answer(name)
        raise AttributeError(name)

    def _run(self, name: str) -> Any:
        self.ran.append((name, self._state))
        outcome = self.outcomes.get(name)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _answer(self, name: str) -> bool:
        answer = self.answers.get(name, True)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def state(self) -> State:
        """Where it is."""
        return State(self._state)

    @property
    def hooks_run(self) -> list[str]:
        """Names of the hooks that ran, in order."""
        return [name for name, _ in self.ran]

    def snapshot(self) -> dict[str, Any]:
        """Copy everything that a refused call could have changed."""
        return {**vars(self), "ran": list(self.ran), "answers": dict(self.answers), "outcomes": dict(self.outcomes)}


def taking(row: Transition, **outcomes: Any) -> Subject:
    """A request in the row's source whose guards choose this row and no sibling of it."""
    own = {guard.name for guard in row.guards}
    return Subject(row.source, answers={name: name in own for name in GUARDS}, outcomes=outcomes)


def row_id(row: Transition) -> str:
    """Name a row in a test's identifier."""
    guards = "".join(f"-{guard.name}" for guard in row.guards) + "".join(
        f"-unless-{guard.name}" for guard in row.unless
    )
    return f"{row.trigger}-from-{row.source.value}{guards}"


def rows_with(hook_kind: Any) -> Iterable[tuple[Transition, str]]:
    """Every row with each of its hooks of that kind."""
    return [(row, hook.name) for row in TRANSITIONS for hook in row.hooks if hook.kind is hook_kind]
