"""Ctrl-C between two steps of the library's own work: no page is lost, and the coordinator goes on."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import pytest
from support.device import in_another_thread

import ctxcache.fsm.machine
import ctxcache.request.lookup
from ctxcache import ContextCacheBatchAdmission, ContextCacheSequenceAdmission
from ctxcache.fsm import State
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.request.custody import Custody
from ctxcache.request.handle import RequestHandle
from ctxcache.request.lookup import Acquirer
from ctxcache.testing.deferred import DeferredDeviceOps
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.runtime.scripts import LONG, SHORT
from ctxcache.testing.sweep import aftermath, check_balance


def any_operation(runtime: FakeRuntime) -> None:
    """An operation that changes nothing, and looks at its end after what others left behind."""
    runtime.coordinator.explain(ContextCacheBatchAdmission([ContextCacheSequenceAdmission([1])]))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (ctxcache.request.lookup, "AcquiredSequence"),
        (ctxcache.request.lookup, "AcquireSequenceResult"),
        (Acquirer, "_plan"),
    ],
    ids=["noting a lease", "handing a lease on", "planning"],
)
@pytest.mark.parametrize("sequence", [1, 2])
def test_an_interrupted_admission_leaves_no_lease(
    place: Any, name: str, sequence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the interrupt falls between the moment a lease is given and the moment anybody has noted it."""
    runtime = FakeRuntime(Kind.VANILLA)
    step, calls = getattr(place, name), []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == sequence:
            raise KeyboardInterrupt
        return step(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.begin([LONG, SHORT])
    assert runtime.coordinator.manager.num_leases == 0
    assert aftermath(runtime) == []


@pytest.mark.parametrize(
    ("place", "name"),
    [(RequestHandle, "__del__"), (Custody, "drop")],
    ids=["entering the finaliser", "telling the coordinator"],
)
def test_a_finaliser_that_was_interrupted_leaves_no_request(
    place: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator finds out by itself that the handle is gone, drains, and admits the next request."""
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([LONG, SHORT])
    runtime.prepare()
    runtime.compute_prompts()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda unraisable: None)
        patch.setattr(place, name, interrupted)
        runtime.drop()
    assert runtime.coordinator.manager.num_leases == 2
    any_operation(runtime)  # looks after it at its end
    assert runtime.coordinator.metrics().drains == 1
    assert runtime.coordinator.manager.num_leases == 0
    assert aftermath(runtime) == []


@pytest.mark.parametrize("leave", ["finish", "abandon"])
@pytest.mark.parametrize(
    ("place", "name"),
    [(ctxcache.fsm.machine, "DrainFailed"), (Custody, "_quarantine")],
    ids=["telling of the drain", "entering the quarantine"],
)
def test_a_failed_drain_quarantines_though_it_was_interrupted(
    place: Any, name: str, leave: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is poisoned by then: its pages are quarantined all the same, until shutdown proves the device idle."""
    caplog.set_level(logging.CRITICAL, logger="ctxcache")
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([LONG, SHORT])
    runtime.prepare()
    runtime.compute_prompts()
    runtime.sync.outcomes = [700]
    step, calls = getattr(place, name), []

    def interrupted(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(runtime, leave)()
    coordinator = runtime.coordinator
    assert coordinator.poisoned
    assert isinstance(coordinator.poison_cause, RuntimeError)
    assert coordinator.metrics().quarantines == 1
    assert coordinator.manager.num_leases == 2
    assert runtime.settle()
    assert coordinator.manager.num_leases == 0
    assert aftermath(runtime) == []


class Place(NamedTuple):
    """Where an interrupt can fall: Python looks for signals when a call into C returns, and when a function is entered."""

    code: str
    line: int
    event: str
    callee: str


class Interrupts:
    """A profiler that raises where a signal handler could: within an operation, when it first comes to a place."""

    operations = (Custody.run.__code__, Custody.drop.__code__)
    device = DeferredDeviceOps._run_oldest.__code__  # what the GPU does, which no interrupt stops

    def __init__(self, strike: Place | None = None) -> None:
        self.strike = strike
        self.places: list[Place] = []
        self._inside: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """See `sys.setprofile`."""
        if event == "return" and self._inside and frame is self._inside[-1]:
            self._inside.pop()
        if event == "call" and frame.f_code in (*self.operations, self.device):
            self._inside.append(frame)
        if event not in ("call", "c_return") or not self._inside or self._inside[-1].f_code is self.device:
            return
        place = Place(frame.f_code.co_qualname, frame.f_lineno, event, getattr(argument, "__name__", ""))
        self.places.append(place)
        if place == self.strike:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def watch(self, work: Callable[[FakeRuntime], None], runtime: FakeRuntime) -> BaseException | None:
        """Let a runtime do something; returns what it raised.

        Garbage waits meanwhile: an interrupt belongs in the operation, not in the finaliser of something else. There it
        would even crash the process, as Numba calls a profiler that was taken away while it allocated a frame.
        """
        before = sys.getprofile()
        gc.disable()
        sys.setprofile(self)
        try:
            work(runtime)
        except BaseException as error:  # noqa: BLE001 - an interrupt is what is looked for
            return error
        finally:
            sys.setprofile(before)
            gc.enable()
            self._inside.clear()  # frames keep what is in them alive
        return None


def begun(runtime: FakeRuntime) -> None:
    """A request of two sequences."""
    runtime.begin([LONG, SHORT])


def prepared(runtime: FakeRuntime) -> None:
    """The same, prepared."""
    begun(runtime)
    runtime.prepare()


def prefilling(runtime: FakeRuntime) -> None:
    """The same with its prefill enqueued."""
    prepared(runtime)
    runtime.compute_prompts()


def prefilled(runtime: FakeRuntime) -> None:
    """The same, prefilled."""
    begun(runtime)
    runtime.prefill()


def in_step(runtime: FakeRuntime) -> None:
    """The same, with a step computed."""
    prefilled(runtime)
    runtime.grow()
    runtime.compute_step()
    runtime.wait()


def decoded(runtime: FakeRuntime) -> None:
    """The same, after that step."""
    prefilled(runtime)
    runtime.decode([0])


def compacting(runtime: FakeRuntime) -> None:
    """The same, about to lose its first sequence."""
    decoded(runtime)
    runtime.begin_compaction([1])


def waited(runtime: FakeRuntime) -> None:
    """Prefilled, and not yet reported."""
    prefilling(runtime)
    runtime.wait()


def finished(runtime: FakeRuntime) -> None:
    """None any more."""
    prefilled(runtime)
    runtime.finish()


LIFE: dict[str, tuple[Callable[[FakeRuntime], None], Callable[[FakeRuntime], None]]] = {
    "begin": (lambda runtime: None, begun),
    "prepare": (begun, FakeRuntime.prepare),
    "finalize": (waited, FakeRuntime.finalize),
    "grow": (prefilled, FakeRuntime.grow),
    "complete": (in_step, lambda runtime: runtime.complete([0])),
    "begin compaction": (decoded, lambda runtime: runtime.begin_compaction([1])),
    "compact": (compacting, FakeRuntime.compact),
    "finish": (prefilled, FakeRuntime.finish),
    "abandon": (prefilling, FakeRuntime.abandon),
    "drop": (prefilling, FakeRuntime.drop),
    "capture": (prefilling, FakeRuntime.capture),
    "publish and restore": (prepared, lambda runtime: runtime.compute_prompts([9])),
    "explain": (begun, any_operation),
    "clear": (finished, lambda runtime: runtime.coordinator.clear()),
    "shut down": (finished, lambda runtime: runtime.coordinator.shutdown()),
}


OF_OTHER_KINDS = ("capture", "publish and restore")
"""Operations that do something in other kinds alone; of the rest, a kind more is tried where it does most in its own way."""


def state_of(runtime: FakeRuntime) -> State | None:
    """The state of the runtime's request, as long as it has one."""
    return None if runtime.handle is None else runtime.handle.inspect().state


@pytest.mark.sampled(keep=1 / 2)
@pytest.mark.parametrize(
    ("kind", "operation"),
    [(Kind.VANILLA, operation) for operation in LIFE if operation not in OF_OTHER_KINDS]
    + [(Kind.EAGLE, operation) for operation in ("complete", "finish")]
    + [(Kind.HYBRID, operation) for operation in ("capture", "complete")]
    + [(Kind.HYBRID_MTP, operation) for operation in ("prepare", "publish and restore")],
    ids=lambda value: getattr(value, "name", value),
)
def test_an_interrupt_anywhere_leaves_a_coordinator_that_goes_on(
    kind: Kind, operation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At every place of every operation, with the exception kept: no thread waits, the request can be abandoned, no page is lost."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    caplog.set_level(logging.CRITICAL, logger="ctxcache")
    before, work = LIFE[operation]
    wrong: list[tuple[Place, list[str]]] = []
    for turn in range(2):  # the first one also loads what is compiled
        runtime = FakeRuntime(kind)
        before(runtime)
        quiet = Interrupts()
        assert quiet.watch(work, runtime) is None, turn
    places = dict.fromkeys(quiet.places)
    assert len(places) > (15 if before is finished else 40)
    for place in places:
        runtime = FakeRuntime(kind)
        before(runtime)
        interrupts = Interrupts(place)
        kept = interrupts.watch(work, runtime)
        violations = [] if interrupts.places[-1] == place else ["was not interrupted there"]
        in_another_thread(partial(any_operation, runtime))
        if not runtime.settle():
            violations.append("still poisoned")
        check_balance(runtime, violations)
        state = state_of(runtime)
        del kept
        if state_of(runtime) is not state:
            violations.append("the request went on when the exception was forgotten")
        violations += runtime.violations + runtime.ledger.violations
        if violations:
            wrong.append((place, violations))
    assert wrong == []


@pytest.mark.parametrize("kind", [Kind.VANILLA, Kind.EAGLE, Kind.HYBRID], ids=lambda kind: kind.name)
@pytest.mark.parametrize("operation", ["finalize", "complete", "compact"])
def test_an_interrupt_before_the_host_follows_its_device_ends_the_request(
    operation: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transition has happened and lengths or slots of the host are still the old ones: nothing goes on from there."""
    before, work = LIFE[operation]
    runtime = FakeRuntime(kind)
    before(runtime)
    was, committing = state_of(runtime), Custody.committing

    def interrupted(custody: Custody, request: Any) -> Any:
        if request.state is not was:
            raise KeyboardInterrupt
        return committing(custody, request)

    with monkeypatch.context() as patch:
        patch.setattr(Custody, "committing", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work(runtime)
    assert state_of(runtime) in (State.FINISHING_IN_FLIGHT, State.FINISHING_SETTLED)
    assert aftermath(runtime) == []
