"""The page sanitizer: stray writes into shared pages are found and named, and nothing is paid where it is off."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ctxcache import ContractError, DeviceError, PageCorruptionError, ResourceType
from ctxcache.fsm import FaultGroup, fault_points
from ctxcache.fsm.table import SANITIZER_TRANSITIONS
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.testing import Fault, FaultMode, FaultPlan
from ctxcache.testing.fault_runs import FaultRun, faults_at, survey
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.simulate import Episode, draw_episode, simulate
from ctxcache.testing.sweep import aftermath, run_with

PAGED = [kind for kind in Kind if kind is not Kind.PURE_RECURRENT]
KINDS = pytest.mark.parametrize("kind", PAGED, ids=lambda kind: kind.value)
PROMPT = [1, 2, 0, 1, 2, 2, 0, 1, 1, 0, 2, 1, 1]


def publish(runtime: FakeRuntime) -> None:
    """One request whose prompt is reusable afterwards."""
    runtime.begin([PROMPT])
    runtime.prefill([9, len(PROMPT)])
    runtime.decode([0], accepted=[2])
    runtime.finish()


def reuse(runtime: FakeRuntime) -> int:
    """A request that reuses the prompt, up to the point where its shared pages have been looked at."""
    start = runtime.begin([[*PROMPT, 2]])[0]
    runtime.prepare()
    return start


@KINDS
def test_a_stray_write_is_found_and_named(kind: Kind) -> None:
    """One byte of a shared page: the error names page, layer, record, and the operations between which it was written."""
    runtime = FakeRuntime(kind, page_sanitizer=True)
    publish(runtime)
    assert reuse(runtime) > 0
    runtime.abandon()
    record = next(record for record in runtime.coordinator.manager.records if record.base_page_path.size)
    page = int(record.base_page_path[0])
    layer = [i for i, name in enumerate(runtime.deployment.base.layers) if name.value == "attention"][-1]
    np.asarray(runtime.resources.base_cache.kv_pool(layer)).view(np.uint8)[1, page, 2, 0, 3] ^= 1
    with pytest.raises(PageCorruptionError) as found:
        reuse(runtime)
    text = str(found.value)
    assert f"base page {page}, layer {layer}, of record " in text
    assert "written after prepare_prefill of request 2 and before prepare_prefill of request 3" in text
    assert "of request 1" in text
    assert runtime.request.inspect().state == "finishing.in_flight"
    runtime.abandon()
    runtime.coordinator.clear()
    assert runtime.begin([PROMPT]) == [0]
    runtime.prefill()
    runtime.finish()
    assert aftermath(runtime) == []


@pytest.mark.parametrize("kind", [Kind.EAGLE, Kind.HYBRID_MTP], ids=lambda kind: kind.value)
def test_draft_pages_are_watched_too(kind: Kind) -> None:
    """A write into a shared draft page is found, and said to be the draft's."""
    runtime = FakeRuntime(kind, page_sanitizer=True)
    publish(runtime)
    record = next(record for record in runtime.coordinator.manager.records if record.draft_page_path.size)
    page = int(record.draft_page_path[0])
    np.asarray(runtime.resources.draft_cache.kv_pool(0)).view(np.uint8)[0, page, 0, 0, 0] ^= 0x80
    with pytest.raises(PageCorruptionError, match=f"draft page {page}, layer 0, of record"):
        reuse(runtime)
    runtime.abandon()


@KINDS
def test_it_costs_nothing_when_off(kind: Kind) -> None:
    """Not one device touch or drain more than before; switched on, one drain at publication and one at reuse."""
    touched, drains = [], []
    for page_sanitizer in (False, True):
        runtime = FakeRuntime(kind, page_sanitizer=page_sanitizer)
        for _ in range(2):
            runtime.begin([PROMPT])
            runtime.prefill([9])
            runtime.decode()
            runtime.finish()
        touched.append([point for point in runtime.ops.log if "sum_pages" in point])
        drains.append(runtime.coordinator.metrics().drains)
    assert touched[0] == []
    assert touched[1]
    assert drains[1] > drains[0]
    assert {point.rstrip(".0123456789") for point in touched[1]} <= set(fault_points(kind, page_sanitizer=True))


@KINDS
def test_no_write_of_a_right_runtime_is_reported(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lives with the sanitizer on, evictions, faults and page reuse included: no false alarm."""

    def watched(*arguments: object) -> Episode:
        return dataclasses.replace(draw_episode(*arguments), page_sanitizer=True)

    monkeypatch.setattr("ctxcache.testing.simulate.draw_episode", watched)
    result = simulate(17, 600, kinds=[kind])
    assert result.violations == []
    assert result.faults > 2


@pytest.mark.sampled(keep=1 / 3)
@KINDS
def test_its_own_touches_can_fail(kind: Kind) -> None:
    """Every point that it adds is reached and declared, and failing it, in every way, loses nothing."""
    group = FaultGroup(kind, page_sanitizer=True)
    own = survey(group).occurrences
    assert any("sum_pages" in point for point in own)
    assert set(own) == set(group.points) <= set(fault_points(kind, page_sanitizer=True))
    for fault in (fault for point, times in own.items() for fault in faults_at(point, times[0])):
        outcome = run_with(group, FaultRun((fault,)))
        assert outcome.fired >= 1
        assert outcome.violations == []


def test_a_failed_check_poisons_like_any_drain() -> None:
    """The synchronisation of a check that fails quarantines the request."""
    runtime = FakeRuntime(Kind.VANILLA, page_sanitizer=True)
    publish(runtime)
    runtime.ops.plan = FaultPlan(Fault("prepare_prefill.synchronize", FaultMode.ERROR_CODE))
    with pytest.raises(Exception, match="POISONED"):
        reuse(runtime)
    assert runtime.coordinator.manager.pool(ResourceType.BASE_KV_PAGE).free < 24
    quarantined = runtime.coordinator._custody.quarantine.request
    assert quarantined is not None
    assert quarantined.sums is not None  # the kernel may still write them
    runtime.ops.plan = FaultPlan()
    assert runtime.settle()


def test_sums_are_freed_once_they_were_read() -> None:
    """They are as large as a page has lanes, so that a request does not keep them."""
    runtime = FakeRuntime(Kind.VANILLA, page_sanitizer=True)
    publish(runtime)
    runtime.begin([PROMPT])
    runtime.prefill([9])
    assert runtime.coordinator._custody.active.sums is None
    runtime.finish()


@pytest.mark.parametrize("call", ["allocate", "to_host"])
@pytest.mark.parametrize("operation", ["prepare_prefill", "finalize_prefill", "finish"])
def test_a_device_without_room_for_sums_ends_the_request(
    call: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be checked does not run on, and what cannot be summed is not published; nothing is lost."""
    runtime = FakeRuntime(Kind.EAGLE if operation == "finish" else Kind.VANILLA, page_sanitizer=True)
    publish(runtime)
    records = len(list(runtime.coordinator.manager.records))
    runtime.begin([[*PROMPT, 2, 0, 1, 2, 2, 0, 1, 0]])
    if operation != "prepare_prefill":
        runtime.prepare()
        runtime.compute_prompts()
        runtime.wait()
    if operation == "finish":
        runtime.finalize()

    def refuse(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as full:
        full.setattr(runtime.ops, call, refuse)
        with pytest.raises(DeviceError, match="no room"):
            {"prepare_prefill": runtime.prepare, "finalize_prefill": runtime.finalize, "finish": runtime.finish}[
                operation
            ]()
    assert runtime.request.inspect().state.value.startswith("finishing")
    with pytest.raises(ContractError):
        runtime.coordinator.prepare_decode_step(runtime.request)
    assert runtime.coordinator.finish(runtime.request) is Status.OK
    assert len(list(runtime.coordinator.manager.records)) == records
    assert aftermath(runtime) == []


def test_a_model_without_pages_has_nothing_to_sum() -> None:
    """Pure recurrent deployments take the switch and touch nothing."""
    runtime = FakeRuntime(Kind.PURE_RECURRENT, page_sanitizer=True)
    publish(runtime)
    assert not [point for point in runtime.ops.log if "sum_pages" in point]


def test_the_table_says_what_it_adds() -> None:
    """It sums within pending states, proves in the same breath, and moves nothing."""
    for row in SANITIZER_TRANSITIONS:
        assert row.source is row.target
        assert row.proves
        assert [hook.op for hook in row.hooks] == ["sum_pages", "sum_pages", "synchronize"]
