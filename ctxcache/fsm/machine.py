"""The machine of a lifecycle, built from its table, and the one door through which a request changes its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import transitions

from ctxcache.errors import ContractError, DeviceError, InvariantError
from ctxcache.fsm.declaration import Guard, Hook, HookKind, Lifecycle, Transition
from ctxcache.fsm.table import REQUEST


class LifecycleModel(Protocol):
    """What the machine moves: its state, and a method for every hook and guard that the table names.

    A hook method takes nothing and returns `None`; a proving one may also return a CUDA error code, 0 for success. All are
    called through `touch_device`.
    A guard method takes nothing and returns a `bool`.
    """

    _state: str

    def touch_device(self, hook: str) -> int | None:
        """Run the hook method of this name and return what it returns."""
        ...


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
        model: Any = event.model
        try:
            code = model.touch_device(name)
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


class Machine:
    """One lifecycle, run. All its models share this one machine: one for each would cost them hundreds of microseconds."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        rows = (*lifecycle.transitions, *lifecycle.added)
        self._lifecycle = lifecycle
        self._operations = {row.trigger: row.operation for row in lifecycle.transitions}
        self._rows: dict[tuple[str, str], tuple[Transition, ...]] = {}
        for row in rows:
            key = (row.trigger, row.source.value)
            self._rows[key] = (*self._rows.get(key, ()), row)
        self._machine = transitions.Machine(
            model=None,
            states=[state.value for state in lifecycle.states],
            initial=lifecycle.initial.value,
            auto_transitions=False,
            send_event=True,
            model_attribute="_state",
        )
        for row in rows:
            hooks: Any = [_run_hook(hook) for hook in row.hooks]
            self._machine.add_transition(
                row.trigger,
                row.source.value,
                row.target.value,
                conditions=[_ask_guard(guard) for guard in row.guards],
                unless=[_ask_guard(guard) for guard in row.unless],
                before=hooks if row.proves else None,
                after=None if row.proves else hooks,
            )

    def is_declared(self, model: LifecycleModel, trigger: str) -> bool:
        """Whether the table has a row for this trigger in the model's state, whatever its guards say."""
        return (trigger, model._state) in self._rows  # noqa: SLF001 - the machine's own attribute

    def require_declared(self, model: LifecycleModel, trigger: str) -> None:
        """Refuse a trigger that the table does not have in the model's state.

        Raises:
            ContractError: names the state and the operations that are possible in it.
        """
        if self.is_declared(model, trigger):
            return
        state = model._state  # noqa: SLF001 - the machine's own attribute
        possible = dict.fromkeys(
            operation for name, operation in self._operations.items() if operation and (name, state) in self._rows
        )
        raise ContractError(
            f"{self._operations.get(trigger) or trigger} is not possible in state {state!r}; "
            f"possible there: {', '.join(possible) or 'nothing'}"
        )

    def fire(self, model: LifecycleModel, trigger: str) -> None:
        """Run one transition, whole. Returns only if it happened.

        Raises:
            ContractError: the table has no such row here, or a guard refused. Nothing has changed.
            DeviceError: an enqueue hook raised; `device_failed` has fired. A `BaseException` that is no `Exception` is
                re-raised as it came instead.
            DrainFailed: a prove hook failed; `drain_failed` has fired where the table has it for this state.
            InvariantError: something else raised inside the transition; `device_failed` has fired.
        """
        self.require_declared(model, trigger)
        state = model._state  # noqa: SLF001 - the machine's own attribute
        try:
            moved = self._trigger(model, trigger)
        except _HookFailed as failure:
            self._account_for(model, *failure.take())
        except BaseException as cause:
            if self.is_declared(model, self._lifecycle.enqueue_failed):
                self._trigger(model, self._lifecycle.enqueue_failed)
            if isinstance(cause, Exception):
                raise InvariantError(f"{trigger} in state {state!r} raised {cause!r}; please report this") from cause
            raise
        else:
            if not moved:
                reason = next(_refusals(model, self._rows[trigger, state]))
                raise ContractError(f"{trigger} is refused in state {state!r}: {reason}")

    def _account_for(self, model: LifecycleModel, hook: Hook, cause: BaseException | int) -> None:
        """Move on after a failed hook, once its trigger has unwound, and tell the caller."""
        try:
            if hook.kind is HookKind.PROVE:
                if self.is_declared(model, self._lifecycle.drain_failed):
                    self._trigger(model, self._lifecycle.drain_failed)
                raise DrainFailed(cause) from (cause if isinstance(cause, BaseException) else None)
            self._trigger(model, self._lifecycle.enqueue_failed)
            if isinstance(cause, BaseException) and not isinstance(cause, Exception):
                raise cause
            message = f"{hook.name} failed while it was enqueued: {cause!r}; finish or abandon the request"
            raise DeviceError(message) from (cause if isinstance(cause, BaseException) else None)
        finally:
            del cause  # its traceback holds this frame

    def _trigger(self, model: LifecycleModel, trigger: str) -> Any:
        return self._machine.events[trigger].trigger(model)


def _refusals(model: LifecycleModel, rows: tuple[Transition, ...]) -> Iterator[str]:
    """What the guards of the rows have against them, in order."""
    for row in rows:
        yield from (guard.refusal for guard in row.guards if not getattr(model, guard.name)())
        yield from (guard.refusal_unless for guard in row.unless if getattr(model, guard.name)())


_REQUESTS = Machine(REQUEST)

fire = _REQUESTS.fire
is_declared = _REQUESTS.is_declared
require_declared = _REQUESTS.require_declared
