"""Admissions and uploads that break off halfway: nothing is held, and nothing is taken for done."""

from __future__ import annotations

from typing import Any

import pytest
from support.harness import OK, EagleHarness, Harness, HybridHarness, MtpHarness, T, V

from ctxcache import (
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DeviceError,
    NumpyDeviceOps,
)


def raising_at(names: set[str], error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let each of these names of the coordinator's module raise instead of being called."""
    import ctxcache.coordinator as module

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    for name in names:
        monkeypatch.setattr(module, name, fail)
    return monkeypatch


@pytest.mark.parametrize("name", ["Batch", "choose_publication", "Request", "RequestHandle", "AdmissionResult"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_an_admission_that_breaks_off_holds_nothing(name, error, monkeypatch):
    """Whatever raises between the leases and the handle: no lease is left, and the next admission works."""
    harness = Harness(max_batch=2, max_tokens=64, page=8)
    harness.run(T(20))
    free, manager = harness.free, harness.coordinator.manager
    with monkeypatch.context() as patch:
        raising_at({name}, error, patch)
        with pytest.raises(type(error)):
            harness.attempt(T(20), V(9))
    assert (manager.num_leases, harness.free) == (0, free)
    manager.check_invariants()
    harness.coordinator.clear()
    harness.run(T(21), V(9))


def test_a_second_acquisition_that_raises_gives_back_the_first(monkeypatch):
    """The same where the second sequence's acquisition raises: the first sequence's lease is not lost."""
    harness = Harness(max_batch=2, max_tokens=64, page=8)
    manager = harness.coordinator.manager
    acquire, calls = manager.acquire, []

    def interrupted(plan: Any, **options: Any) -> Any:
        calls.append(plan)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return acquire(plan, **options)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "acquire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            harness.attempt(T(20), V(9))
    assert manager.num_leases == 0
    harness.run(T(21), V(9))


class HalfwayOps:
    """Ops whose uploads do, when told to, all the host's work and then fail before the device has anything."""

    def __init__(self, error: BaseException) -> None:
        self.inner = NumpyDeviceOps()
        self.error = error
        self.countdown = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def upload_rows(self, table: Any, stream: Any) -> None:
        """Fail at the upload that the countdown reaches: the table believes that its rows have left."""
        self.countdown -= 1
        before = self.inner.to_host(table.kernel_view)
        self.inner.upload_rows(table, stream)
        if self.countdown == 0:
            self.inner.to_device(table.kernel_view, before)
            raise self.error


@pytest.mark.parametrize("harness_type", [Harness, HybridHarness, EagleHarness, MtpHarness])
@pytest.mark.parametrize(
    "error", [RuntimeError("out of staging memory"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
@pytest.mark.parametrize("upload", [1, 2, 3, 4])
def test_rows_of_an_upload_that_broke_off_are_uploaded_again(harness_type, error, upload):
    """After an upload that failed halfway the next request's device rows are its own, whichever upload it was."""
    ops = HalfwayOps(error)
    harness = harness_type(max_batch=2, max_tokens=64, page=8, ops=ops)
    harness.run(V(9))
    ops.countdown = upload
    request, _ = harness.admit(T(20))
    failed = False
    try:
        assert harness.coordinator.prepare_prefill(request) is OK
        advances = [ContextCacheSequenceAdvance([7], 20)]
        common = [20] if harness_type is EagleHarness else None
        assert harness.coordinator.finalize_prefill_publication(request, advances, common) is OK
        assert harness.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(12, 12)) is OK
    except (DeviceError, KeyboardInterrupt):
        failed = True
    assert failed or ops.countdown > 0
    pages = request.inspect().sequences[0].lease.base_pages.tolist()
    assert harness.coordinator.abandon(request) is OK
    ops.countdown = -1
    # The same leases as the failed request had: only what is noted as uploaded tells the two apart.
    request, _ = harness.admit(T(20))
    assert harness.coordinator.prepare_prefill(request) is OK
    lease = request.inspect().sequences[0].lease
    assert lease.base_pages.tolist() == pages[: len(lease.base_pages)]
    assert harness.pages_of(0) == lease.base_pages.tolist()
    if harness.deployment.draft is not None:
        assert harness.pages_of(0, harness.resources.draft_page_table) == lease.draft_pages.tolist()
    assert harness.coordinator.abandon(request) is OK
