"""Every fault point of a vanilla deployment, failed in every way: nothing is lost, and the cache still answers right."""

from __future__ import annotations

import contextlib
import gc
import random

import numpy as np
import pytest
from support.harness import OK, Harness, RequestEnded, T, U

from ctxcache import (
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentKind,
    ContractError,
    DeviceError,
    InvariantError,
    NumpyDeviceOps,
    Phase,
)
from ctxcache.fsm import State
from ctxcache.testing import (
    DeferredDeviceOps,
    Fault,
    FaultInjector,
    FaultMode,
    FaultPlan,
    InjectedFaultError,
    fault_points,
)

POINTS = fault_points(ContextCacheDeploymentKind.VANILLA)
MODES = tuple(FaultMode)
POISONED = ContextCacheCoordinatorStatus.POISONED


def scripted_run(h: Harness) -> None:
    """Two requests that reach every transition of a vanilla request, the first one's way out being finish."""
    h.handle, _ = h.admit(T(20), U(31))
    h.prepare()
    h.compute_prompts()
    h.finalize()
    h.decode([0])
    h.decode([0])
    h.keep(1)
    h.grow()
    h.finish()
    h.handle, _ = h.admit(T(24))
    h.prepare()
    h.abandon()


def faulty_harness(*faults: Fault) -> Harness:
    return Harness(max_batch=2, max_tokens=64, page=16, ops=FaultInjector(NumpyDeviceOps(), FaultPlan(*faults)))


def watch_releases(h: Harness) -> list[str]:
    """A log of drains that succeeded, ops that were enqueued, and releases, in order."""
    events: list[str] = []
    inner = h.ops.inner
    manager = h.coordinator.manager
    release, synchronize = manager.release, inner.synchronize

    def recorded_synchronize(stream: object, synchronizer: object) -> int | None:
        code = synchronize(stream, synchronizer)
        events.append("proven" if not code else "failed")
        return code

    manager.release = lambda lease: (events.append("release"), release(lease))  # type: ignore[method-assign]
    inner.synchronize = recorded_synchronize
    for name in ("upload_rows", "reset_lengths", "upload_mapping", "compact_slot_state"):
        enqueue = getattr(inner, name)
        setattr(inner, name, lambda *args, run=enqueue: (events.append("enqueue"), run(*args)))
    return events


def nothing_is_lost(h: Harness, events: list[str]) -> None:
    """Whatever happened: pages balance, no release overtook enqueued work, and a fresh request gets right bytes."""
    manager = h.coordinator.manager
    manager.check_invariants()
    pending = False
    for event in events:
        if event == "enqueue":
            pending = True
        elif event == "proven":
            pending = False
        elif event == "release":
            assert not pending, f"a lease was released while device work was pending: {events}"
    h.ops.plan = FaultPlan()
    if h.handle is not None and h.handle.valid:
        assert h.coordinator.abandon(h.handle) is OK
    if h.coordinator.poisoned:
        assert manager.num_leases > 0
        assert h.coordinator.shutdown() is OK
        h.coordinator.recover()
    assert manager.num_leases == 0
    manager.check_invariants()
    assert h.free + len(h.cached_pages()) == h.deployment.base.num_pages
    h.run(T(20), U(31), decode=2)
    h.run(T(40))


def test_the_script_reaches_every_declared_point() -> None:
    """The points seen while everything works are the ones that the lifecycle declares for a vanilla deployment."""
    h = faulty_harness()
    scripted_run(h)
    h.handle, _ = h.admit(T(30))
    h.prefill()
    assert h.coordinator.prepare_decode_step(h.handle) is OK
    h.handle.close()
    # Draining points of `finish` and `abandon` exist in every pending state; a vanilla request has no settled draft.
    assert set(h.ops.counts) - {"outside.synchronize"} >= set(POINTS) - {"shutdown.synchronize"}
    assert set(h.ops.counts) <= set(POINTS) | {"outside.synchronize"}


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("error", [InjectedFaultError, KeyboardInterrupt], ids=["error", "interrupt"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("point", POINTS)
def test_each_point_fails(point: str, mode: FaultMode, error: type[BaseException], persistent: bool) -> None:
    """The request ends released or quarantined, the caller hears of it, and the pages are as good as before."""
    h = faulty_harness(Fault(point, mode, persistent=persistent, exception=error))
    events = watch_releases(h)
    heard: BaseException | str | None = None
    try:
        scripted_run(h)
    except DeviceError as failure:
        heard = failure
        assert type(failure.__cause__) is InjectedFaultError  # noqa: PT017 - several outcomes are right here
        assert h.handle.phase is Phase.FINISHING
        assert h.handle.inspect().device_work_pending
        with pytest.raises(ContractError):
            h.coordinator.prepare_decode_step(h.handle)
    except KeyboardInterrupt as interrupt:
        assert error is KeyboardInterrupt
        heard = interrupt
    except RequestEnded:
        heard = "status"
        assert h.coordinator.poisoned
        assert not h.handle.valid
    if h.ops.fired:
        assert heard is not None, "a device failure reached nobody"
    else:
        assert point == "shutdown.synchronize"
    nothing_is_lost(h, events)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_failing_shutdown_keeps_the_quarantine(mode: FaultMode) -> None:
    """Each failing shutdown returns POISONED and counts a failed drain, not another quarantine."""
    h = faulty_harness(Fault("abandon.synchronize", FaultMode.ERROR_CODE), Fault("shutdown.synchronize", mode))
    events = watch_releases(h)
    h.handle, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(h.handle)
    assert h.coordinator.abandon(h.handle) is POISONED
    assert h.coordinator.shutdown() is POISONED
    assert h.handle.phase is Phase.POISONED
    metrics = h.metrics
    assert (metrics.failed_drains, metrics.quarantines) == (2, 1)
    assert "release" not in events
    with pytest.raises(ContractError, match="recover"):
        h.coordinator.recover()
    nothing_is_lost(h, events)


def test_an_interrupted_drain_is_a_failed_drain() -> None:
    """An interrupt inside the drain quarantines, and then reaches the caller."""
    h = faulty_harness(Fault("finish.synchronize", exception=KeyboardInterrupt))
    h.handle, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(h.handle)
    with pytest.raises(KeyboardInterrupt):
        h.coordinator.finish(h.handle)
    assert h.coordinator.poisoned
    assert isinstance(h.coordinator.poison_cause, KeyboardInterrupt)
    assert h.handle.phase is Phase.POISONED
    nothing_is_lost(h, [])


def test_an_interrupted_drain_of_a_dropped_handle_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    """From the collector nothing escapes; the quarantine is there all the same."""
    h = faulty_harness(Fault("abandon.synchronize", exception=KeyboardInterrupt))
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    with pytest.warns(ResourceWarning, match="dropped"):
        del request
    assert h.coordinator.poisoned
    assert "quarantined" in caplog.text
    assert h.attempt(T(5)).status is POISONED


@pytest.mark.parametrize("error", [InjectedFaultError, KeyboardInterrupt], ids=["error", "interrupt"])
@pytest.mark.parametrize("mode", [FaultMode.RAISE_BEFORE, FaultMode.RAISE_AFTER], ids=lambda mode: mode.value)
def test_a_failed_operation_does_not_keep_its_handle_alive(mode: FaultMode, error: type[BaseException]) -> None:
    """Once the exception is gone, a dropped handle dies at once: no cycle of frames waits for the collector."""
    h = faulty_harness(Fault("prepare_prefill.upload_rows", mode, exception=error))
    request, _ = h.admit(T(20))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(DeviceError, KeyboardInterrupt):
            h.coordinator.prepare_prefill(request)
        with pytest.warns(ResourceWarning, match="dropped"):
            del request
        assert h.coordinator.manager.num_leases == 0
    finally:
        gc.enable()


def test_rows_are_uploaded_anew_after_a_drain_that_lost_them() -> None:
    """What a failed drain left unrun may never run. The next request has the same rows, and its uploads bring them all."""
    ops = DeferredDeviceOps(NumpyDeviceOps(), random.Random(1))
    h = Harness(max_batch=2, max_tokens=64, page=16, ops=ops)
    request, _ = h.admit(T(20), U(31))
    h.coordinator.prepare_prefill(request)
    h.sync.outcomes = [700]
    assert request.close() is POISONED
    ops._queue.clear()
    h.resources.base_page_table.device_ops.to_device(
        h.resources.base_page_table.kernel_view, np.full((2, 2, 4), -1, np.int32)
    )
    assert h.coordinator.shutdown() is OK
    h.coordinator.recover()
    request, _ = h.admit(T(20), U(31))
    h.coordinator.prepare_prefill(request)
    assert ops.synchronize(None, None) is None
    rows = [sequence.lease.base_pages.tolist() for sequence in request.inspect().sequences]
    assert [h.pages_of(slot) for slot in range(2)] == rows
    request.close()


def test_a_bug_while_host_state_moves_is_reported_and_contained() -> None:
    """A host-side exception is an InvariantError; the request can only be ended, and ending it drains."""
    h = faulty_harness()
    events = watch_releases(h)
    h.handle, _ = h.admit(T(20))
    h.prepare()
    h.compute_prompts()
    publish = h.coordinator.manager.publish
    h.coordinator.manager.publish = None  # type: ignore[assignment,method-assign]
    with pytest.raises(InvariantError, match="report"):
        h.finalize()
    h.coordinator.manager.publish = publish  # type: ignore[method-assign]
    assert h.handle.inspect().state is State.FINISHING_IN_FLIGHT
    assert h.records == 0
    calls = h.sync.calls
    assert h.coordinator.finish(h.handle) is OK
    assert h.sync.calls == calls + 1
    nothing_is_lost(h, events)


@pytest.mark.parametrize("operation", ["clear", "abandon", "shutdown", "begin"])
def test_calls_from_inside_a_hook_are_refused(operation: str) -> None:
    """A synchroniser that calls its own coordinator gets a ContractError, never a deadlock."""
    refusals: list[ContractError] = []

    def synchronize(stream: object) -> None:
        calls = {
            "clear": h.coordinator.clear,
            "abandon": lambda: h.coordinator.abandon(request),
            "shutdown": h.coordinator.shutdown,
            "begin": lambda: h.attempt(T(3)),
        }
        with pytest.raises(ContractError, match="from inside") as refused:
            calls[operation]()
        refusals.append(refused.value)

    h = Harness(synchronizer=synchronize)
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    assert h.coordinator.finish(request) is OK
    assert len(refusals) == 1
