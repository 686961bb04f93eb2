"""What keeps an interrupt from losing a page, in one place: the rules, and the means by which they are kept.

An interrupt is a `BaseException` that is no `Exception`: Ctrl-C, or what another signal's handler raises. Python raises it
between two steps of whatever Python code runs then. One call of C code, compiled code included, runs whole.

1. *Nothing is held without somebody who can give it back.* A lease's handle is made before the lease holds anything; who
   takes something for a caller undoes it when the caller cannot hear of it (`Undoing`).
2. *What must move together moves in one call of C code*, or is marked as doubtful before it moves: page-table rows say that
   they have changed before they do, and a device view that an upload may have left half done is not believed.
3. *The lock of operations is taken and given back in C code alone* (`run_alone`): an interrupt leaves it free.
4. *An interrupt inside a drain is a failed drain; inside an enqueue it fails the enqueue.* The lifecycle's one door sees to it
   (`ctxcache.fsm`).
5. *Behind a transition, host state that has not moved never will*: the request is condemned, which means that it publishes
   nothing more and can only be ended (`Custody.run`, `Custody.committing`).
6. *What an interrupt stopped while it was ended is ended by the next operation* (`Custody.reap`), and by the coordinator's
   finaliser.
7. *No generator stands around any of this.* One that an interrupt leaves suspended runs its end when it is collected: at
   any time, in any thread. Guards are classes, or `try` and `finally`.
8. *What a launch may still read is given back by whoever knows that it has been read.* A buffer that an interrupt kept from
   being given back is never written again (`ctxcache.device.numba`).

After all of these the interrupt itself is raised again, but in finalisers, from which nothing escapes.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def run_alone(lock: RLock, wait: bool, work: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R | None:  # noqa: FBT001 - what follows are the work's own
    """Do work under a lock that the calling thread does not hold. Without waiting where another does: then nothing is done."""
    try:
        return work(*arguments, **options) if lock.acquire(wait) else None
    finally:
        # Without asking whether it was taken: an interrupt may have come between that and the note of it.
        try:  # noqa: SIM105 - `suppress` is Python, in which an interrupt could fall
            lock.release()
        except RuntimeError:
            pass


def run_outside(lock: RLock, work: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Do work without a lock that the calling thread holds, and take it again. An interrupt may leave it free: see `is_held`."""
    if not is_held(lock):
        return work(*arguments, **options)
    lock.release()
    try:
        return work(*arguments, **options)
    finally:
        lock.acquire()


def is_held(lock: RLock) -> bool:
    """Whether the calling thread holds a lock."""
    held: bool = lock._is_owned()  # type: ignore[attr-defined] # noqa: SLF001 - `threading.Condition` asks it too
    return held


class Undoing(Generic[T]):
    """A block that undoes something where anything is raised in it, an interrupt too; what was raised goes on.

    An interrupt that comes when the block is through, at its very end, undoes nothing. Where that would lose something, as at
    the end of an admission, `try` and `except` in the same function have no such end.

    Args:
        undo: what is done then.
        what: what it is done to.
        explain: makes of an `Exception`, not of an interrupt, what is raised in its place.
    """

    __slots__ = ("_explain", "_undo", "_what")

    def __init__(
        self, undo: Callable[[T], object], what: T, explain: Callable[[Exception], Exception] | None = None
    ) -> None:
        self._undo = undo
        self._what = what
        self._explain = explain

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        self._undo(self._what)
        if self._explain is not None and isinstance(error, Exception):
            raise self._explain(error) from error
