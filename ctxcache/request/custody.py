"""Who holds the coordinator's one request, and how every way out of it ends: released, or quarantined.

Custody serialises the operations, fires transitions for them, turns a failed drain into a quarantine, and looks after
requests whose handle is gone, and at the end after what nobody shut down. `ctxcache.interrupts` has the rules that it keeps.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from ctxcache.device.streams import is_per_thread
from ctxcache.errors import ContractError, InvariantError
from ctxcache.fsm import DrainFailed, State, fire, is_declared
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.interrupts import Undoing, is_held, run_alone
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.request.quarantine import Quarantine, keep_for_ever
from ctxcache.request.request import DeviceLink, Request

_LOG = logging.getLogger("ctxcache")

_ON_HOST_ALONE = frozenset({"can_prepare_decode_step", "clear", "explain", "recover", "replace_device_ops"})
"""Operations that never touch the device."""

_FOR_A_HELD_REQUEST = frozenset({"abandon", "finish", "shutdown"})
"""Operations that touch it only where a request is held."""

P = ParamSpec("P")
T = TypeVar("T")


class HasCustody(Protocol):
    """Whose operations `serialised` serialises."""

    _custody: Custody


S = TypeVar("S", bound=HasCustody)


def serialised(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method an operation of its coordinator, under its own name; see `Custody.run`."""

    @wraps(method)
    def operation(self: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._custody.run(method.__name__, method, self, *arguments, **options)

    return operation


class Custody:
    """The admission slot, and the lock around it.

    Attributes:
        active: the admitted request, or `None`.
        quarantine: the request whose pages the device may still write, and whether anything is admitted.
    """

    def __init__(self, manager: ContextCacheManager, link: DeviceLink) -> None:
        self._manager = manager
        self._link = link
        self._lock = threading.RLock()  # never taken twice: it is one that knows whose it is
        self._home: threading.local | None = None
        if is_per_thread(link.stream):
            self._home = threading.local()  # not the thread's number, which is another thread's after its end
            self._home.is_here = True
        self._pid = os.getpid()
        self.active: Request | None = None
        self.quarantine = Quarantine(link.counters)

    def run(self, operation: str, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run one operation of the coordinator; other threads wait, orphans are looked after at its end.

        Raises:
            ContractError: the operation was called from inside another one of the same thread, or the stream is not the
                coordinator's in this thread.
        """
        if self._is_inside():
            raise ContractError(
                f"{operation} was called from inside a hook, synchroniser or callback of the same coordinator; "
                "call it after the running operation has returned"
            )
        state = self._link.state
        return cast(
            "T", run_alone(self._lock, True, run_alone, state, True, self._operate, operation, work, arguments, options)
        )

    def ask(self, question: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Answer a question about host state as it is at one moment: at once, whatever another thread waits for."""
        return cast("T", run_alone(self._link.state, True, question, *arguments, **options))

    def _operate(
        self, operation: str, work: Callable[..., T], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> T:
        request = self.active
        state = request.state if request is not None else None
        try:
            self._require_its_stream(operation)
            self._link.announce(operation)
            return work(*arguments, **options)
        except Exception:
            raise
        except BaseException:
            if not is_held(self._link.state):
                self._link.state.acquire()
            # An interrupt behind a transition: what the host had still to move for it has not moved.
            if request is not None and request.state is not state:
                self.condemn(request)
            raise
        finally:
            self.reap()

    def fire(self, request: Request, trigger: str) -> Status:
        """Run one transition of a request. A failed drain quarantines it; see `ctxcache.fsm.fire` for what is raised.

        Returns:
            `OK`, or `POISONED` after a failed drain. An interrupt that failed the drain is re-raised instead.
        """
        try:
            fire(request, trigger)
        except ContractError:
            raise
        except DrainFailed as failure:
            self._quarantine(request, failure.cause)
            if failure.interrupt is not None:
                raise failure.interrupt from None
            return Status.POISONED
        except BaseException:
            self._discard(request)
            raise
        return Status.OK

    @property
    def in_forked_child(self) -> bool:
        """Whether this is a child of the process that made the coordinator: the device is its parent's, so nothing ends here."""
        return self._pid != os.getpid()

    def holds(self, request: Request) -> bool:
        """Whether the request takes the admission slot: until every lease of it is released."""
        return request is self.active or request is self.quarantine.request

    def committing(self, request: Request) -> Undoing[Request]:
        """Move host state. What raises in here is our own fault, and leaves the request as a failed enqueue does."""
        return Undoing(self.condemn, request, _our_fault)

    def condemning(self, request: Request, explain: Callable[[Exception], Exception] | None = None) -> Undoing[Request]:
        """Let the request be fit for nothing but its end when something raises in here."""
        return Undoing(self.condemn, request, explain)

    def condemn(self, request: Request) -> None:
        """Let the request be fit for nothing but its end."""
        self._discard(request)
        if is_declared(request, "device_failed"):
            fire(request, "device_failed")

    def abandon_active(self) -> None:
        """Abandon the active request, if there is one."""
        if self.active is not None and self.active.held:
            self.abandon(self.active)

    def abandon(self, request: Request) -> Status:
        """Drain what is pending and release everything, or quarantine."""
        status = self.fire(request, "abandon")
        if status is Status.OK:
            self.release(request)
        return status

    def release(self, request: Request) -> None:
        """Release every lease of a released request, then its admission slot. Goes on where an interrupt stopped it."""
        for lease in request.batch.leases:
            if not lease.released:
                self._manager.release(lease)
        if self.active is request:
            self.active = None
        if self.quarantine.request is request:
            self.quarantine.request = None

    def reap(self) -> None:
        """Look after a request that nobody can finish any more.

        Its handle is gone, or an interrupt stopped its release, or the telling of its failed drain.
        """
        request = self.active
        if request is None or not self._has_its_stream():
            return
        state = request.state
        if state is State.RELEASED:
            self.release(request)
        elif state is State.POISONED:
            self._quarantine(request, RuntimeError("a drain failed, and an interrupt stopped the telling of its cause"))
        elif request.orphaned:
            self._link.announce("abandon")
            self.abandon(request)

    def drop(self, request: Request) -> None:
        """Hear from a garbage-collected handle. Never waits for another operation, and lets nothing escape."""
        request.dropped = True
        if self._is_inside():
            return  # the running operation looks after it
        try:
            # Where another thread runs an operation, that one or the next looks after it.
            run_alone(self._lock, False, run_alone, self._link.state, True, self.reap)
        except BaseException:  # noqa: BLE001 - nothing may escape from a finaliser
            _LOG.exception("a dropped request could not be abandoned cleanly")

    def shutdown(self) -> Status:
        """Stop admitting. A quarantine ends when its drain now succeeds; an active request keeps the coordinator open."""
        self.reap()
        if self.active is not None:
            return Status.REQUEST_FAILED
        if not self.quarantine.prove():
            return Status.POISONED
        if self.quarantine.request is not None:
            self.release(self.quarantine.request)
        self.quarantine.shut = True
        return Status.OK

    def refusal(self) -> Status | None:
        """Say why nothing is admitted now; `None` when something is. `ContractError` after a shutdown in health."""
        refusal = self.quarantine.refusal()
        if refusal is not None:
            return refusal
        return None if self.active is None else Status.REQUEST_FAILED

    def recover(self) -> None:
        """Reopen admission; `InvariantError` when the manager's state is damaged, and then it stays shut."""
        self._manager.check_invariants()
        self.quarantine.reopen()

    def _is_inside(self) -> bool:
        """Whether an operation runs in the calling thread."""
        return is_held(self._lock)

    def _require_its_stream(self, operation: str) -> None:
        """Refuse an operation that may touch the device in a thread in which the stream's handle is another stream."""
        if self._has_its_stream() or operation in _ON_HOST_ALONE:
            return
        if operation in _FOR_A_HELD_REQUEST and self.active is None and self.quarantine.request is None:
            return
        raise ContractError(
            f"{operation} was called in a thread other than the one that built this coordinator, and the per-thread default "
            "stream is another stream there; call it in that thread, or build the coordinator on a stream of its own"
        )

    def _has_its_stream(self) -> bool:
        """Whether the stream's handle means, in the calling thread, the stream that the coordinator was built for."""
        return self._home is None or getattr(self._home, "is_here", False)

    def _discard(self, request: Request) -> None:
        """Publish nothing more of the request, and believe nothing of what its uploads noted."""
        # One that broke off halfway has noted rows as uploaded that are not: the next request would read them.
        self._link.distrust_device_rows()
        request.discards_unpublished = True

    def _quarantine(self, request: Request, cause: BaseException | int) -> None:
        self.quarantine.take(request, cause)
        self.active = None


def _our_fault(error: Exception) -> InvariantError:
    return InvariantError(
        f"moving host state forward raised {error!r}; please report this, then finish or abandon the request"
    )


# The end of a coordinator that nobody shut down: garbage-collected, or still there when the interpreter exits.


def end_of_life(custody: Custody, resources: Any) -> None:
    """Abandon the active request and shut down. Lets nothing escape; does nothing in a forked child.

    Args:
        custody: the coordinator's custody; it outlives the coordinator for this call.
        resources: kept referenced when the device could not be proven idle.
    """
    try:
        close(custody, resources)
    except BaseException:  # noqa: BLE001 - nothing may escape from a finaliser
        _LOG.exception("a coordinator could not be shut down cleanly")
        keep_for_ever(custody, resources)


def close(custody: Custody, resources: Any) -> None:
    """Abandon the active request and shut down; a device that cannot be proven idle keeps its resources."""
    if custody.quarantine.shut or custody.in_forked_child:
        return
    custody.run("abandon", custody.abandon_active)
    custody.run("shutdown", custody.shutdown)
    if not custody.quarantine.shut:
        keep_for_ever(custody, resources)
