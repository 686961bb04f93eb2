"""The questions that the simulated runtime asks by the way: each of them objects to a library that answers wrongly."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ctxcache import ContextCacheCoordinator, ContextCacheSequenceAdmission, NumpyDeviceOps
from ctxcache.fsm import State
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ResourceType
from ctxcache.request.custody import Custody
from ctxcache.request.handle import RequestHandle
from ctxcache.request.page_sanitizer import PageSanitizer
from ctxcache.request.quarantine import Quarantine
from ctxcache.testing import DeferredDeviceOps, Use
from ctxcache.testing.runtime.identities import ADAPTER, MEDIA, NOBODY, TENANT, extras_of, media_behind, media_of
from ctxcache.testing.runtime.probes import probe_active, probe_poisoned, probe_sanitizer
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.runtime.scripts import LONG, SHORT, quiet_log
from ctxcache.testing.runtime.steps import RequestEnded
from ctxcache.testing.simulate import Episode, World, draw_episode, replay, simulate
from ctxcache.testing.sweep import aftermath

SHORT_ADMISSION = ContextCacheSequenceAdmission(SHORT)


def active() -> FakeRuntime:
    """A runtime with work in flight."""
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([SHORT])
    runtime.prepare()
    runtime.compute_prompts()
    return runtime


def poisoned() -> FakeRuntime:
    """A runtime whose drain has failed."""
    runtime = active()
    runtime.sync.outcomes = [700]
    with quiet_log(), pytest.raises(RequestEnded, match="POISONED"):
        runtime.abandon()
    return runtime


def test_right_answers_are_no_violation() -> None:
    """Asked of an active request, of a quarantine, and after the shutdown that ended it."""
    runtime = active()
    probe_active(runtime)
    runtime.abandon()
    runtime = poisoned()
    probe_poisoned(runtime)
    assert runtime.coordinator.shutdown() is Status.OK
    probe_poisoned(runtime)
    runtime.coordinator.recover()
    assert runtime.violations == []
    assert aftermath(runtime) == []


@pytest.mark.parametrize(
    ("name", "answer", "violation"),
    [
        ("shutdown", lambda self: Status.OK, "shutdown while active gave OK; it must be REQUEST_FAILED"),
        ("clear", lambda self: None, "clear while active gave None; it must be ContractError"),
        ("recover", lambda self: Status.OK, "recover while active gave OK; it must be ContractError"),
        ("clear", lambda self: self.manager.release_all(), "a refusal changed the active request"),
    ],
)
def test_wrong_answers_beside_an_active_request_are_named(
    name: str, answer: Any, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that is not refused, and one that touches the request."""
    runtime = active()
    monkeypatch.setattr(ContextCacheCoordinator, name, answer)
    probe_active(runtime)
    assert violation in runtime.violations


def test_a_second_admission_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an active request, and beside a quarantine."""
    monkeypatch.setattr(Custody, "refusal", lambda self: None)
    runtime = active()
    probe_active(runtime)
    assert "begin_request while active gave OK; it must be REQUEST_FAILED" in runtime.violations
    runtime = poisoned()
    probe_poisoned(runtime)
    assert "begin_request while poisoned gave OK; it must be POISONED" in runtime.violations


def test_a_quarantine_that_holds_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that were released though the device may still write, a handle in another phase, a poisoning that is over."""
    runtime = poisoned()
    runtime.coordinator.manager.release_all()
    monkeypatch.setattr(RequestHandle, "phase", None)
    monkeypatch.setattr(Quarantine, "require_recoverable", lambda self: None)
    probe_poisoned(runtime)
    for violation in (
        "a request is quarantined, and holds no lease",
        "the handle of a quarantined request is in phase None",
        "a refusal changed the quarantine",
    ):
        assert violation in runtime.violations


def test_wrong_forecasts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was foretold to fit and did not, the other way round, and an explanation of something else."""
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([LONG])
    runtime.prefill()
    with monkeypatch.context() as patch:
        patch.setattr(ContextCacheCoordinator, "can_prepare_decode_step", lambda *_, **__: np.array([False]))
        runtime.decode()
    assert runtime.violations == ["a step that could not be prepared gave OK"]
    with monkeypatch.context() as patch:
        patch.setattr(ContextCacheCoordinator, "can_prepare_decode_step", lambda *_, **__: np.array([True]))
        with pytest.raises(RequestEnded):
            runtime.grow(runtime.roomy_headroom(10_000))
    assert runtime.violations[1:] == ["a step that could be prepared gave REQUEST_FAILED"]
    runtime.finish()
    before = runtime.coordinator.explain
    monkeypatch.setattr(runtime.coordinator, "explain", lambda admission: before(type(admission)([SHORT_ADMISSION])))
    runtime.begin([[*LONG, 1]])
    assert runtime.violations[2:] == ["explain said 4, reused are 8"]
    runtime.abandon()


def test_rows_that_name_other_pages_are_named() -> None:
    """A device row with one page too many, and a row behind the batch that still names pages."""
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([SHORT])
    runtime.prepare()
    runtime.wait()
    view = np.asarray(runtime.resources.base_page_table.kernel_view)
    view[0, 0, 7] = view[2, 0, 0] = 5
    runtime.compute_prompts()
    runtime.wait()
    assert any("the device row of slot 0" in violation and "must be" in violation for violation in runtime.violations)
    assert "prefill: a device row behind a batch of 1 still names pages" in runtime.violations
    runtime.abandon()


def test_identities_never_share() -> None:
    """Equal tokens of a nobody, a tenant, an adapter and over a picture, in one batch and in the next: no wrong hit."""
    runtime = FakeRuntime(Kind.VANILLA)
    for owners in ((NOBODY, TENANT, ADAPTER), (MEDIA, NOBODY, TENANT)):
        starts = runtime.begin([LONG, LONG, LONG], identities=owners)
        runtime.prefill()
        runtime.decode([0, 1, 2])
        runtime.finish()
    assert starts == [0, 8, 8]
    assert runtime.violations == []
    assert len({extras_of(owner) for owner in (NOBODY, TENANT, ADAPTER)}) == 3
    assert media_of(TENANT, [1, 2, 0]) is None
    assert media_behind(None, 3) is None
    assert media_behind(media_of(MEDIA, [2, 0]), 3).tolist() == [[1, 3], [2, 1], [0, 0]]
    assert media_behind(media_of(MEDIA, [2, 0]), 1).tolist() == [[1, 3]]


def test_lost_work_never_runs_and_proves_nothing() -> None:
    """What waits is gone; what it would have touched stays unproven until the stream is synchronised."""
    ops = DeferredDeviceOps(NumpyDeviceOps(), random.Random(0))
    ran: list[int] = []
    use = Use(ResourceType.BASE_KV_PAGE, 3, writes=True, work="a step")
    ops.enqueue(lambda: ran.append(1), uses=[use])
    waiting = ops.num_waiting
    ops.lose_waiting()
    assert (waiting, ops.num_waiting, ops.unproven) == (1, 0, [use])
    assert ops.synchronize(None, None) is None
    assert (ran, ops.unproven) == ([], [])


def test_half_of_the_episodes_end_with_the_coordinator() -> None:
    """It abandons what is active, drains, and is shut; a release that overtakes the drain is seen there too."""
    drawn = draw_episode(1, 0, [Kind.VANILLA])
    for seed in (2, 3):
        world = World(Episode(drawn.kind, drawn.sizes, seed))
        world.do(("begin", (((1, 2, 0, 1),), None, (), False, False), 2), 1)
        world.do(("prefill", ((), True, False), 7), 2)
        handle = world.runtime.request
        world.end()
        assert world.violations == []
        assert handle.inspect().state is State.RELEASED
        assert world.runtime.coordinator.shutdown() is Status.OK


def test_a_coordinator_that_is_left_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its way out releases without a drain."""
    monkeypatch.setattr("ctxcache.coordinator.close", lambda custody, resources: custody.release(custody.active))
    drawn = draw_episode(1, 0, [Kind.VANILLA])
    world = World(Episode(drawn.kind, drawn.sizes, 3))
    world.do(("begin", (((1, 2, 0, 1),), None, (), False, False), 2), 1)
    world.do(("prefill", ((), True, False), 7), 2)
    world.end()
    assert any("was released while the device may still write it" in violation for violation in world.violations)


def test_the_simulation_asks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that admits a second request is found by random lives."""
    refusal = Custody.refusal
    monkeypatch.setattr(Custody, "refusal", lambda self: None if self.active else refusal(self))
    assert "begin_request while active" in simulate(1, 2000, kinds=[Kind.VANILLA], cut=False).violations[0]


def test_a_stray_write_that_is_not_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found while the sanitizer works, and nothing is left of it; named when it compares nothing."""
    runtime = FakeRuntime(Kind.VANILLA, page_sanitizer=True)
    for planted in (False, True):
        runtime.begin([LONG])
        runtime.prefill()
        runtime.finish()
        runtime.begin([LONG])
        if planted:
            monkeypatch.setattr(PageSanitizer, "_compare", lambda *_: None)
        probe_sanitizer(runtime, 1, 12345)
        runtime.abandon()
        assert runtime.violations == ["a stray write into a shared page was not found"] * planted
    runtime.begin([[2, 2]])
    probe_sanitizer(runtime, 1, 12345)  # nothing is shared: nothing to write into
    assert runtime.request.inspect().state is State.ADMITTED
    runtime.abandon()


def test_random_lives_write_into_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sanitizer on they do, and miss it when nothing is compared."""
    drawn = draw_episode(1, 0, [Kind.VANILLA])
    actions = [
        ("begin", (((1, 2, 0, 1, 2, 0, 1, 2),), None, (), False, False), 2),
        ("prefill", ((), True, True), 7),
        ("finish", None, 5),
        ("stray", (1, 12345), 6),
    ]
    assert replay(Episode(drawn.kind, drawn.sizes, 2, page_sanitizer=True), actions) == []
    monkeypatch.setattr(PageSanitizer, "_compare", lambda *_: None)
    assert replay(Episode(drawn.kind, drawn.sizes, 2), actions) == []
    found = replay(Episode(drawn.kind, drawn.sizes, 2, page_sanitizer=True), actions)
    assert found == ["a stray write into a shared page was not found"]
