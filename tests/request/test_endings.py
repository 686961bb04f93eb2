"""Scenarios from public bug reports: every way out of a request, wanted or not."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.harness import OK, Harness, Script, T

from ctxcache import (
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdvance,
    ContractError,
    Phase,
)

FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
POISONED = ContextCacheCoordinatorStatus.POISONED


@pytest.mark.parametrize("stage", ["admitted", "prefilled", "decoding", "compacted to nothing"])
def test_h12_finish_twice_and_use_after_finish(stage: str) -> None:
    """The second finish does nothing and succeeds; every other call is refused; nothing is released twice."""
    h = Harness()
    request, _ = h.admit(T(200))
    if stage != "admitted":
        h.prefill()
    if stage == "decoding":
        h.coordinator.prepare_decode_step(request)
    if stage == "compacted to nothing":
        h.keep()
        assert request.phase is Phase.FINISHING
    assert h.coordinator.finish(request) is OK
    assert not request.valid
    assert request.phase is None
    assert request.batch_size == 0
    seen = h.observe()
    assert h.coordinator.finish(request) is OK
    assert h.coordinator.abandon(request) is OK
    assert request.close() is OK
    coordinator, advance = h.coordinator, [ContextCacheSequenceAdvance([7], 201)]
    for call in (
        lambda: coordinator.prepare_prefill(request),
        lambda: coordinator.enqueue_prefill_captures(request),
        lambda: coordinator.finalize_prefill_publication(request, advance),
        lambda: coordinator.prepare_decode_step(request),
        lambda: coordinator.can_prepare_decode_step(request),
        lambda: coordinator.complete_decode_step(request, advance),
        lambda: coordinator.begin_batch_compaction(request, [0], 1, h.mapping),
        lambda: coordinator.compact_batch(request),
    ):
        with pytest.raises(ContractError, match="empty"):
            call()
    assert h.observe() == seen
    request.__del__()
    assert h.observe() == seen
    h.coordinator.manager.check_invariants()


def test_h13_abnormal_exit_drains_once_before_it_releases() -> None:
    """Dropping a prefilling request synchronises, then releases; dropping an admitted one does not synchronise."""
    h = Harness()
    events = h.sync.log
    manager, release = h.coordinator.manager, h.coordinator.manager.release
    manager.release = lambda lease: (events.append("release"), release(lease))  # type: ignore[method-assign]

    request, _ = h.admit(T(300))
    assert h.coordinator.prepare_prefill(request) is OK
    with pytest.warns(ResourceWarning, match="dropped"):
        del request
    assert events == ["sync", "release"]
    assert h.free == 4

    request, _ = h.admit(T(300))
    with pytest.warns(ResourceWarning, match="dropped"):
        del request
    assert events == ["sync", "release", "release"]
    assert h.free == 4


def test_h14_failed_drain_quarantines_until_shutdown_proves_quiet() -> None:
    """Pages of a failed drain stay held through a failed shutdown and return with a successful one."""
    h = Harness(synchronizer=Script([700, RuntimeError("still dead"), None]))
    request, _ = h.admit(T(129))
    h.coordinator.prepare_prefill(request)
    free = h.free
    assert request.close() is POISONED
    assert h.free == free
    assert request.phase is Phase.POISONED
    assert not request.valid
    assert request.inspect().request_slot.owner is h.coordinator
    assert h.coordinator.poisoned
    assert h.coordinator.poison_cause == 700
    assert h.attempt(T(10)).status is POISONED
    assert h.free == free
    assert h.coordinator.shutdown() is POISONED
    assert h.free == free
    assert h.coordinator.shutdown() is OK
    assert h.free == 4
    assert request.phase is None
    assert request.inspect().request_slot is None
    assert h.attempt(T(10)).status is POISONED
    assert h.sync.calls == 3
    metrics = h.metrics
    assert (metrics.drains, metrics.failed_drains, metrics.quarantines) == (3, 2, 1)
    h.coordinator.recover()
    assert not h.coordinator.poisoned
    assert h.run(T(129)) == [0]


def test_h16_a_kept_exception_does_not_keep_the_request() -> None:
    """Leaving the `with` block releases the request although the exception, and so the frame, is kept."""
    h = Harness()
    kept: list[BaseException] = []

    def runtime() -> None:
        request, _ = h.admit(T(200))
        with request:
            h.coordinator.prepare_prefill(request)
            raise RuntimeError("model failed")

    try:
        runtime()
    except RuntimeError as error:
        kept.append(error)
    assert h.sync.calls == 1
    assert h.free == 4
    assert h.run(T(200)) == [0]
    assert kept[0].__traceback__ is not None


def test_h16_without_with_the_second_request_is_refused_until_the_handle_is_closed() -> None:
    """There is never a second live request; close() is idempotent."""
    h = Harness()
    kept: list[BaseException] = []

    def runtime() -> None:
        request, _ = h.admit(T(200))
        h.coordinator.prepare_prefill(request)
        raise RuntimeError("model failed")

    try:
        runtime()
    except RuntimeError as error:
        kept.append(error)
    assert h.attempt(T(10)).status is FAILED
    frame = kept[0].__traceback__.tb_next.tb_frame
    request = frame.f_locals["request"]
    assert request.close() is OK
    assert request.close() is OK
    assert h.sync.calls == 1
    assert h.attempt(T(10)).status is OK


def test_h16_a_reference_cycle_is_released_by_the_collector() -> None:
    """A handle in a cycle is drained and released when the collector finds it."""
    h = Harness()

    class Runtime:
        pass

    runtime = Runtime()
    runtime.itself = runtime  # type: ignore[attr-defined]
    runtime.request, _ = h.admit(T(200))  # type: ignore[attr-defined]
    h.coordinator.prepare_prefill(runtime.request)  # type: ignore[attr-defined]
    del runtime
    with pytest.warns(ResourceWarning, match="dropped"):
        gc.collect()
    assert h.sync.calls == 1
    assert h.attempt(T(10)).status is OK


def test_h16_interpreter_exit_drains_without_a_sound() -> None:
    """A process that ends with a live request drains it once and prints no unraisable error."""
    program = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from support.harness import Harness, T

        def synchronize(stream):
            print("sync", flush=True)

        h = Harness(synchronizer=synchronize)
        request, _ = h.admit(T(200))
        h.coordinator.prepare_prefill(request)
        print("leaving", flush=True)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["leaving", "sync"]
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
