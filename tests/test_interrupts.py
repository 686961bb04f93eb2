"""Ctrl-C between two steps of the library's own work: no page is lost, and the coordinator goes on."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

import ctxcache.acquisition
import ctxcache.fsm.machine
from ctxcache.acquisition import Acquirer
from ctxcache.custody import Custody
from ctxcache.handle import RequestHandle
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.testing.fake_runtime import FakeRuntime
from ctxcache.testing.scripts import LONG, SHORT
from ctxcache.testing.sweep import aftermath


@pytest.mark.parametrize(
    ("place", "name"),
    [(ctxcache.acquisition, "AcquiredSequence"), (ctxcache.acquisition, "AcquireSequenceResult"), (Acquirer, "_plan")],
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
    runtime.coordinator.metrics()  # any operation looks after it at its end
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
    runtime.outcomes = [700]
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
