"""Snapshot slots of recurrent deployments: pins, pressure, and what a failure leaves of them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from support.harness import OK, HybridHarness, PureRecurrentHarness, RequestEnded, Script, T, U, V

from ctxcache import (
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdmission,
    DeploymentConfig,
    DeploymentError,
    DeviceError,
    NumpyDeviceOps,
    RequestHandle,
    ReusePlanKind,
    partial_kv_bytes_per_slot,
    recurrent_bytes_per_slot,
)
from ctxcache.testing import Fault, FaultInjector, FaultMode, FaultPlan

POISONED = ContextCacheCoordinatorStatus.POISONED
KINDS = pytest.mark.parametrize("harness", [HybridHarness, PureRecurrentHarness], ids=["hybrid", "recurrent"])


def published(request: RequestHandle) -> list[int]:
    """Exact lengths that the sequences have published."""
    return [sequence.published_exact_length for sequence in request.inspect().sequences]


@KINDS
def test_h19_a_pinned_snapshot_is_no_victim(harness: type[HybridHarness]) -> None:
    """The capture takes the slot of the unpinned record; the pinned one stays, its bytes intact."""
    h = harness(snapshots=2, num_pages=0)
    h.run(T(130))
    h.run(U(130))
    assert h.run(T(131)) == [130]
    assert h.begin_only(U(131)) == [0]
    assert h.begin_only(T(132)) == [131]
    request, starts = h.admit(T(131))
    assert starts == [130]
    h.prefill()
    h.coordinator.finish(request)
    assert h.metrics.hybrid_snapshot_pressure_skips == 0


@KINDS
def test_h19_no_slot_means_a_skip_not_a_failure(harness: type[HybridHarness]) -> None:
    """With the only slot pinned the checkpoint is skipped, the request ends well, and the old one still serves."""
    h = harness(snapshots=1)
    h.run(T(130))
    assert h.run(T(131)) == [130]
    assert h.metrics.hybrid_snapshot_pressure_skips == 1
    assert h.begin_only(T(131)) == [130]
    assert h.free_slots()[0] == 0
    h.coordinator.clear()
    assert h.free_slots()[0] == 1


@KINDS
def test_h20_a_slot_reused_between_attempts_never_serves_the_old_binding(harness: type[HybridHarness]) -> None:
    """After a request that was dropped before its restore, and eviction of its checkpoint, the next one starts cold."""
    h = harness(snapshots=2)
    h.run(T(130))
    request, starts = h.admit(T(131))
    assert starts == [130]
    request.close()
    h.run(U(130))
    h.run(V(130))
    h.spoil_states()
    assert h.run(T(131)) == [0]


@KINDS
@pytest.mark.parametrize("mode", list(FaultMode), ids=lambda mode: mode.value)
def test_h20_a_failed_restore_harms_no_record(harness: type[HybridHarness], mode: FaultMode) -> None:
    """The request drains, every slot is back, and a retry restores the exact bytes."""
    h = harness(snapshots=2, ops=FaultInjector(NumpyDeviceOps()))
    h.run(T(130))
    h.ops.plan = FaultPlan(Fault("prepare_prefill.restore", mode))
    request, _ = h.admit(T(131))
    if mode in (FaultMode.RAISE_BEFORE, FaultMode.RAISE_AFTER):
        with pytest.raises(DeviceError):
            h.coordinator.prepare_prefill(request)
        assert h.coordinator.finish(request) is OK
    else:
        assert h.coordinator.prepare_prefill(request) is OK
        assert h.coordinator.finish(request) is POISONED
        assert h.coordinator.shutdown() is OK
        h.coordinator.recover()
    assert h.ops.fired
    h.coordinator.manager.check_invariants()
    assert h.coordinator.manager.num_leases == 0
    h.spoil_states()
    assert h.run(T(131)) == [130]


@KINDS
@pytest.mark.parametrize(
    "point", ["enqueue_prefill_captures.capture", "complete_decode_step.capture", "complete_decode_step.synchronize"]
)
@pytest.mark.parametrize("mode", list(FaultMode), ids=lambda mode: mode.value)
def test_a_failed_capture_publishes_nothing_and_loses_no_slot(
    harness: type[HybridHarness], point: str, mode: FaultMode
) -> None:
    """Whatever fails around a capture: no record of it, no slot lost, the old checkpoint still right."""
    h = harness(snapshots=3, ops=FaultInjector(NumpyDeviceOps()))
    h.run(T(130))
    h.ops.plan = FaultPlan(Fault(point, mode))
    request, _ = h.admit(T(200))
    with suppress(DeviceError, RequestEnded):
        h.prefill()
        h.decode()
        h.decode(completed=[0])
        pytest.fail("the fault reached nobody")
    assert h.ops.fired
    if request.valid:
        h.coordinator.finish(request)
    if h.coordinator.poisoned:
        assert h.coordinator.shutdown() is OK
        h.coordinator.recover()
    h.coordinator.manager.check_invariants()
    assert h.coordinator.manager.num_leases == 0
    # A fault that shows at the decode step leaves the prompt's own checkpoint, which was proven before.
    prompt_is_kept = "decode" in point or mode in (FaultMode.FAIL_SYNCHRONIZE, FaultMode.ERROR_CODE)
    lengths = [record.exact_checkpoint_length for record in h.coordinator.manager.records]
    assert sorted(lengths) == ([130, 200] if prompt_is_kept else [130])
    assert h.free_slots()[0] == 3 - h.records
    h.spoil_states()
    assert h.run(T(131)) == [130]


@KINDS
def test_pressure_at_the_end_of_sequences_skips_what_has_no_slot(harness: type[HybridHarness]) -> None:
    """Two sequences end and one slot is left: one checkpoint is captured with one wait, the other skip is counted."""
    h = harness(max_batch=2, snapshots=1)
    request, _ = h.admit(T(20), U(20))
    h.prefill()
    assert h.metrics.hybrid_snapshot_pressure_skips == 1
    assert published(request) == [20, 0]
    h.decode(completed=[0, 1])
    assert h.sync.calls == 1
    assert h.metrics.hybrid_snapshot_pressure_skips == 2
    assert published(request) == [21, 0]
    h.coordinator.finish(request)


def test_a_budget_below_one_slot_is_refused_with_its_price() -> None:
    """The error says how many bytes one slot needs, for each pool."""
    h = HybridHarness(snapshots=1)
    recurrent, partial = recurrent_bytes_per_slot(h.deployment.base), partial_kv_bytes_per_slot(h.deployment.base)
    assert h.coordinator.shutdown() is OK
    for budgets, price in (
        ((recurrent - 1, partial), recurrent),
        ((recurrent, partial - 1), partial),
        ((0, 0), recurrent),
    ):
        config = ContextCacheConfig(recurrent_snapshot_pool_bytes=budgets[0], partial_kv_snapshot_pool_bytes=budgets[1])
        with pytest.raises(DeploymentError, match=str(price)):
            ContextCacheCoordinator(
                config, DeploymentConfig(h.deployment.base), h.kind, h.resources, None, device_ops=h.ops
            )
    pure = PureRecurrentHarness(snapshots=1, partial_snapshots=0)
    assert pure.run(T(20)) == [0]
    assert pure.run(T(21)) == [20]


def test_capturing_twice_captures_once() -> None:
    """A second capture call in the same prefill finds everything staged."""
    h = HybridHarness(snapshots=4, ops=FaultInjector(NumpyDeviceOps()))
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    h.coordinator.enqueue_prefill_captures(request)
    staged = request.inspect().sequences[0].staged_hybrid_publication
    assert staged.checkpoint.exact_length == 20
    h.ops.log.clear()
    assert h.coordinator.enqueue_prefill_captures(request) is OK
    assert h.ops.log == []
    assert h.coordinator.finish(request) is OK
    assert h.records == 0
    assert h.free_slots() == (4, 4)


def test_a_failed_drain_keeps_snapshots_quarantined() -> None:
    """Reserved and restored slots stay held with the pages until the device is proven idle."""
    h = HybridHarness(snapshots=2, synchronizer=Script([]))
    h.run(T(130))
    request, _ = h.admit(T(140))
    h.coordinator.prepare_prefill(request)
    h.coordinator.enqueue_prefill_captures(request)
    assert h.free_slots()[0] == 0
    h.sync.outcomes = [1]
    assert request.close() is POISONED
    assert h.free_slots()[0] == 0
    assert h.coordinator.shutdown() is OK
    assert h.free_slots()[0] == 1
    assert h.metrics.current_records == 1
    plan = h.coordinator.explain(ContextCacheBatchAdmission([ContextCacheSequenceAdmission(T(131))]))[0]
    assert plan.plan_kind is ReusePlanKind.STANDARD
