"""The one machine, built from the table, and the one door through which a request changes its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import transitions

from ctxcache.errors import ContractError, DeviceError, InvariantError
from ctxcache.fsm.states import INITIAL, State
from ctxcache.fsm.table import (
    SANITIZER_TRANSITIONS,
    TRANSITIONS,
    TRIGGERS,
    Guard,
    Hook,
    HookKind,
    Transition,
)

_ALL_TRANSITIONS = (*TRANSITIONS, *SANITIZER_TRANSITIONS)


class LifecycleModel(Protocol):
    """What the machine moves: its state, and a method for every hook and guard that the table names.

    A hook method takes nothing and returns `None`; a proving one may also return a CUDA error code, 0 for success.
    A guard method takes nothing and returns a `bool`.
    """

    _state: str


class DrainFailed(Exception):  # noqa: N818 - an outcome that the coordinator turns into a status
    """A prove hook raised, or returned a non-zero code. The request is poisoned; its owner quarantines it.

    Attributes:
        cause: the exception, or the code.
    """

    def __init__(self, cause: BaseException | int) -> None:
        super().__init__(f"the stream could not be proven idle: {cause!r}")
        self.cause = cause

    @property
    def interrupt(self) -> BaseException | None:
        """The cause where it is no `Exception`: a status does not stand for an interrupt, which is raised again."""
        return self.cause if isinstance(self.cause, BaseException) and not isinstance(self.cause, Exception) else None


class _HookFailed(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, hook: Hook, cause: BaseException | int, event: transitions.EventData) -> None:
        super().__init__(hook.name)
        self._hook = hook
        self._reason: BaseException | int = cause
        self._event = event

    def take(self) -> tuple[Hook, BaseException | int]:
        """Return the hook and what it failed with, and let go of both.

        The machine's event keeps this error, whose frames keep the event; and the reason, raised again, would have this
        error for its context. Either cycle would keep the frames of every caller, and a dropped handle, until a collection.
        """
        reason, self._reason, self._event.error = self._reason, 0, None
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self._hook, reason


def _run_hook(hook: Hook) -> Callable[[transitions.EventData], None]:
    name = hook.name

    def run(event: transitions.EventData) -> None:
        try:
            code = getattr(event.model, name)()
            succeeded = code is None or bool(code == 0)
        except BaseException as cause:
            raise _HookFailed(hook, cause, event) from cause
        if not succeeded:
            raise _HookFailed(hook, code, event)

    return run


def _ask_guard(guard: Guard) -> Callable[[transitions.EventData], bool]:
    name = guard.name

    def ask(event: transitions.EventData) -> bool:
        return bool(getattr(event.model, name)())

    return ask


def _build() -> transitions.Machine:
    machine = transitions.Machine(
        model=None,
        states=[state.value for state in State],
        initial=INITIAL.value,
        auto_transitions=False,
        send_event=True,
        model_attribute="_state",
    )
    for row in _ALL_TRANSITIONS:
        hooks: Any = [_run_hook(hook) for hook in row.hooks]
        machine.add_transition(
            row.trigger,
            row.source.value,
            row.target.value,
            conditions=[_ask_guard(guard) for guard in row.guards],
            before=hooks if row.proves else None,
            after=None if row.proves else hooks,
        )
    return machine


_MACHINE = _build()

_ROWS: dict[tuple[str, str], tuple[Transition, ...]] = {
    (trigger, state.value): rows
    for trigger in dict.fromkeys(row.trigger for row in _ALL_TRANSITIONS)
    for state in State
    if (rows := tuple(row for row in _ALL_TRANSITIONS if (row.trigger, row.source) == (trigger, state)))
}

_OPERATIONS = {row.trigger: row.operation for row in TRANSITIONS}
"""What a caller calls to fire each trigger; empty for those that only `fire` itself uses."""


def is_declared(model: LifecycleModel, trigger: str) -> bool:
    """Whether the table has a row for this trigger in the model's state, whatever its guards say."""
    return (trigger, model._state) in _ROWS  # noqa: SLF001 - the machine's own attribute


def require_declared(model: LifecycleModel, trigger: str) -> None:
    """Refuse a trigger that the table does not have in the model's state.

    Raises:
        ContractError: names the state and the operations that are possible in it.
    """
    if is_declared(model, trigger):
        return
    state = model._state  # noqa: SLF001 - the machine's own attribute
    operations = (_OPERATIONS[name] for name in TRIGGERS if (name, state) in _ROWS)
    possible = dict.fromkeys(name for name in operations if name)
    raise ContractError(
        f"{_OPERATIONS.get(trigger) or trigger} is not possible in state {state!r}; "
        f"possible there: {', '.join(possible) or 'nothing'}"
    )


def fire(model: LifecycleModel, trigger: str) -> None:
    """Run one transition, whole. Returns only if it happened.

    Raises:
        ContractError: the table has no such row here, or a guard refused. Nothing has changed.
        DeviceError: an enqueue hook raised; `device_failed` has fired. A `BaseException` that is no `Exception` is
            re-raised as it came instead.
        DrainFailed: a prove hook failed; `drain_failed` has fired where the table has it for this state.
        InvariantError: something else raised inside the transition; `device_failed` has fired.
    """
    require_declared(model, trigger)
    state = model._state  # noqa: SLF001 - the machine's own attribute
    try:
        moved = _trigger(model, trigger)
    except _HookFailed as failure:
        _account_for(model, *failure.take())
    except BaseException as cause:
        if is_declared(model, "device_failed"):
            _trigger(model, "device_failed")
        if isinstance(cause, Exception):
            raise InvariantError(f"{trigger} in state {state!r} raised {cause!r}; please report this") from cause
        raise
    else:
        if not moved:
            reasons = [
                guard.refusal
                for row in _ROWS[trigger, state]
                for guard in row.guards
                if not getattr(model, guard.name)()
            ]
            raise ContractError(f"{trigger} is refused in state {state!r}: {reasons[0]}")


def _account_for(model: LifecycleModel, hook: Hook, cause: BaseException | int) -> None:
    """Move on after a failed hook, once its trigger has unwound, and tell the caller."""
    try:
        if hook.kind is HookKind.PROVE:
            if is_declared(model, "drain_failed"):
                _trigger(model, "drain_failed")
            raise DrainFailed(cause) from (cause if isinstance(cause, BaseException) else None)
        _trigger(model, "device_failed")
        if isinstance(cause, BaseException) and not isinstance(cause, Exception):
            raise cause
        raise DeviceError(f"{hook.name} failed while it was enqueued: {cause!r}; finish or abandon the request") from (
            cause if isinstance(cause, BaseException) else None
        )
    finally:
        del cause  # its traceback holds this frame


def _trigger(model: LifecycleModel, trigger: str) -> Any:
    return _MACHINE.events[trigger].trigger(model)
