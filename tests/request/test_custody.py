"""Every way out of a request that goes wrong halfway is gone to its end, by whoever comes next."""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support.device import in_another_thread
from support.harness import OK, Script, T, small

from ctxcache import (
    ContextCacheBatchAdmission,
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractError,
    DeviceError,
    InvariantError,
    NumpyDeviceOps,
)
from ctxcache.device.streams import PER_THREAD_DEFAULT_STREAM
from ctxcache.fsm import State
from ctxcache.request.custody import end_of_life
from ctxcache.testing import Fault, FaultInjector, FaultPlan


def interrupt_next_call(target: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of a method raises, before it does anything; later ones work."""
    original = getattr(target, name)

    def interrupt(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(target, name, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(target, name, interrupt)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()], ids=["bug", "interrupt"])
def test_a_publication_that_fails_behind_the_last_drain_loses_no_page(error: BaseException, monkeypatch) -> None:
    """The request is released by then: the error reaches the caller, the pages the pool, and nothing is drained again."""
    h = small()
    request, _ = h.admit(T(20))
    h.prefill()

    def publish_frozen(*_arguments: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(type(h.coordinator._custody.active.publication), "publish_frozen", publish_frozen)
        with pytest.raises(InvariantError if isinstance(error, RuntimeError) else KeyboardInterrupt):
            h.coordinator.finish(request)
    assert request.inspect().state is State.RELEASED
    assert (h.coordinator.manager.num_leases, h.sync.calls) == (0, 0)
    assert h.coordinator.idle
    assert h.run(T(40)) == [16]


def test_an_interrupt_while_host_state_moves_is_raised_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no bug of the library; the request can only be ended, and ending it drains."""
    h = small()
    request, _ = h.admit(T(20))
    assert h.coordinator.prepare_prefill(request) is OK
    interrupt_next_call(h.coordinator.manager, "publish", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        h.coordinator.finalize_prefill_publication(request, _advance(20))
    assert request.inspect().state is State.FINISHING_IN_FLIGHT
    calls = h.sync.calls
    assert h.coordinator.finish(request) is OK
    assert h.sync.calls == calls + 1
    assert (h.records, h.free, h.coordinator.manager.num_leases) == (0, 4, 0)


def _advance(length: int) -> list[Any]:
    advance = ContextCacheSequenceAdvance([7], length)
    assert advance.accepted_token_count == 1
    return [advance]


@pytest.mark.parametrize("way", ["finish", "abandon"])
def test_a_release_that_was_interrupted_is_gone_through_with(way: str, monkeypatch) -> None:
    """Nothing is pending: the pages are back when the interrupt reaches the caller."""
    h = small()
    request, _ = h.admit(T(20))
    h.prefill()
    interrupt_next_call(h.coordinator.manager, "release", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        getattr(h.coordinator, way)(request)
    assert (h.coordinator.manager.num_leases, h.sync.calls) == (0, 0)
    assert h.coordinator.idle
    assert h.run(T(40)) == [16]


def test_a_shutdown_that_was_interrupted_behind_its_drain_is_repeated_without_one(monkeypatch) -> None:
    """A quarantine that was proven idle is only released the second time."""
    h = small(synchronizer=Script([700]))
    request, _ = h.admit(T(20))
    assert h.coordinator.prepare_prefill(request) is OK
    assert request.close() is not OK
    interrupt_next_call(h.coordinator.manager, "release", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        h.coordinator.shutdown()
    calls = h.sync.calls
    assert h.coordinator.shutdown() is OK
    assert h.sync.calls == calls
    assert h.coordinator.manager.num_leases == 0
    assert h.coordinator.recover() is OK
    assert h.run(T(20)) == [0]


def test_a_transition_that_is_refused_costs_the_request_nothing() -> None:
    """A trigger that does not fit the state is refused: the request is not marked, and goes on to publish."""
    h = small()
    request, _ = h.admit(T(20))
    custody = h.coordinator._custody
    with pytest.raises(ContractError):
        custody.fire(custody.active, "compact")
    assert not custody.active.discards_unpublished
    h.prefill()
    assert h.coordinator.finish(request) is OK
    assert h.records == 1


def test_a_request_whose_rows_could_not_be_uploaded_is_not_entered() -> None:
    """The session's block is not entered, and the request is gone: the next session gets its pages."""
    ops = FaultInjector(NumpyDeviceOps(), FaultPlan(Fault("prepare_prefill.upload_rows")))
    h = small(ops=ops)
    session = h.coordinator.session([T(20)])
    with pytest.raises(DeviceError):
        session.__enter__()
    assert h.coordinator.idle
    assert (h.free, h.coordinator.manager.num_leases) == (4, 0)
    with h.coordinator.session([T(20)]) as again:
        assert again.prefill_starts == [0]


def test_an_interrupt_at_the_end_of_a_dropped_coordinator_does_not_escape(caplog: pytest.LogCaptureFixture) -> None:
    """The finaliser logs it, and keeps what the device may still write for the rest of the process."""
    h = small(synchronizer=Script([KeyboardInterrupt(), KeyboardInterrupt()]))
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    cache = weakref.ref(h.resources.base_cache)
    with caplog.at_level(logging.ERROR):
        end_of_life(h.coordinator._custody, h.resources)
    assert "could not be shut down cleanly" in caplog.text
    request.close()
    del h, request
    gc.collect()
    assert cache() is not None


def test_a_forked_child_does_not_end_its_parents_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of another number the finaliser neither drains nor releases."""
    h = small()
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    number = os.getpid() + 1
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: number)
        end_of_life(h.coordinator._custody, h.resources)
    assert h.sync.calls == 0
    assert h.coordinator.finish(request) is OK


def test_the_per_thread_default_stream_is_used_in_its_own_thread_alone() -> None:
    """Its handle is another stream in another thread: a drain there would prove nothing. Refused, and nothing changed."""
    h = small(stream=PER_THREAD_DEFAULT_STREAM)
    request, _ = h.admit(T(20))
    for operation in (
        lambda: h.attempt(T(8)),
        lambda: h.coordinator.prepare_prefill(request),
        lambda: h.coordinator.finish(request),
        lambda: h.coordinator.abandon(request),
        h.coordinator.shutdown,
    ):
        with pytest.raises(ContractError, match="in a thread other than the one that built this coordinator"):
            in_another_thread(operation)
    assert (request.inspect().state, h.sync.calls) == (State.ADMITTED, 0)
    h.prefill()
    assert h.coordinator.finish(request) is OK
    assert h.coordinator.idle


def test_what_touches_no_device_is_asked_in_any_thread() -> None:
    """A monitoring thread reads counters and explanations, whatever the stream; an orphan there waits for its own thread."""
    h = small(stream=PER_THREAD_DEFAULT_STREAM)
    h.run(T(40))
    question = ContextCacheBatchAdmission([ContextCacheSequenceAdmission(T(40))])
    assert in_another_thread(h.coordinator.metrics).committed_publications > 0
    assert in_another_thread(lambda: h.coordinator.explain(question))[0].reused_tokens == 39 // 16 * 16
    finished, _ = h.admit(T(20))
    assert h.coordinator.finish(finished) is OK
    for end in (h.coordinator.finish, h.coordinator.abandon):
        assert in_another_thread(lambda end=end: end(finished)) is OK
    handles = [h.admit(T(20))[0]]
    assert h.coordinator.prepare_prefill(handles[0]) is OK
    in_another_thread(lambda: (handles.clear(), gc.collect(), h.coordinator.metrics()))
    assert (h.sync.calls, h.coordinator.manager.num_leases) == (0, 1)
    assert h.coordinator.shutdown() is OK
    assert (h.sync.calls, h.coordinator.manager.num_leases) == (1, 0)
    in_another_thread(h.coordinator.clear)
    assert h.records == 0


def test_a_quarantine_ends_in_the_streams_own_thread() -> None:
    """Only there can the drain be tried again; elsewhere it stays."""
    h = small(stream=PER_THREAD_DEFAULT_STREAM, synchronizer=Script([700]))
    request, _ = h.admit(T(20))
    assert h.coordinator.prepare_prefill(request) is OK
    assert h.coordinator.finish(request) is ContextCacheCoordinatorStatus.POISONED
    with pytest.raises(ContractError, match="shutdown was called in a thread other than"):
        in_another_thread(h.coordinator.shutdown)
    assert (h.sync.calls, h.coordinator.manager.num_leases) == (1, 1)
    assert h.coordinator.shutdown() is OK
    assert (h.sync.calls, h.coordinator.manager.num_leases) == (2, 0)


def test_whether_the_stream_is_its_own_is_judged_when_an_operations_turn_has_come() -> None:
    """A shutdown elsewhere that waited while a request was admitted finds that one, and is refused."""
    h = small(stream=PER_THREAD_DEFAULT_STREAM)
    lock = h.coordinator._custody._lock
    with ThreadPoolExecutor(1) as pool:
        with lock:
            waiting = pool.submit(h.coordinator.shutdown)
            while not waiting.running():
                pass
            time.sleep(0.05)
            h.coordinator._custody.active = stranger = SimpleNamespace(state=State.ADMITTED, orphaned=False, held=True)
        with pytest.raises(ContractError, match="shutdown was called in a thread other than"):
            waiting.result()
    assert h.coordinator._custody.active is stranger
    h.coordinator._custody.active = None


def test_a_handle_that_dies_in_another_thread_is_looked_after_in_the_streams_own() -> None:
    """On the per-thread default stream a finaliser elsewhere cannot drain; the next operation does."""
    h = small(stream=PER_THREAD_DEFAULT_STREAM)
    request, _ = h.admit(T(20))
    assert h.coordinator.prepare_prefill(request) is OK
    handles = [request]
    del request

    def drop() -> None:
        handles.clear()
        gc.collect()

    in_another_thread(drop)
    assert (h.sync.calls, h.coordinator.manager.num_leases) == (0, 1)
    assert h.coordinator.shutdown() is OK
    assert (h.sync.calls, h.coordinator.manager.num_leases) == (1, 0)


def test_an_idle_coordinator_ends_in_any_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Where no request is held nothing has to be drained: its end is no error in another thread."""
    h = small(stream=PER_THREAD_DEFAULT_STREAM)
    h.run(T(20))
    in_another_thread(lambda: end_of_life(h.coordinator._custody, h.resources))
    assert h.coordinator._custody.quarantine.shut
    assert caplog.records == []


def test_any_other_stream_is_used_in_any_thread() -> None:
    """A stream of its own is the same stream everywhere."""
    h = small(stream=0x7F00)
    in_another_thread(lambda: h.run(T(20), decode=2))
    assert h.coordinator.idle


def test_a_signal_handler_finds_the_operation_under_way_wherever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the lock and the operation: its call of the same coordinator is refused, and does not wait for itself."""
    h = small(stream=PER_THREAD_DEFAULT_STREAM)
    custody = h.coordinator._custody
    judge, refusals = custody._has_its_stream, []

    def interrupted() -> bool:
        monkeypatch.setattr(custody, "_has_its_stream", judge)
        with pytest.raises(ContractError, match="shutdown was called from inside") as refusal:
            h.coordinator.shutdown()
        refusals.append(refusal)
        return judge()

    monkeypatch.setattr(custody, "_has_its_stream", interrupted)
    assert h.run(T(20)) == [0]
    assert len(refusals) == 1
