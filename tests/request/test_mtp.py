"""Hybrid MTP deployments: endpoints that are published during the prefill, and what they serve."""

from __future__ import annotations

import numpy as np
import pytest
from support.harness import OK, EagleHarness, MtpHarness, T

from ctxcache import (
    ContextCacheCoordinatorStatus,
    ContextCacheExecutionMode,
    ContractError,
    DeviceError,
    NumpyDeviceOps,
)
from ctxcache.fsm import State
from ctxcache.testing import Fault, FaultInjector, FaultMode, FaultPlan

POISONED = ContextCacheCoordinatorStatus.POISONED
VANILLA = ContextCacheExecutionMode.VANILLA


def mtp(**options: object) -> MtpHarness:
    return MtpHarness(
        **{"page": 16, "max_tokens": 128, "num_pages": 32, "num_draft_pages": 32, "snapshots": 4, **options}
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 40])
def test_an_mtp_endpoint_serves_longer_inputs(length: int) -> None:
    """State, paired boundary page and hidden row come back at the exact length, page-aligned or not."""
    h = mtp()
    h.endpoints = [length]
    assert h.run(T(50), decode=2) == [0]
    (record,) = h.coordinator.manager.records
    assert record.exact_checkpoint_length == length
    assert len(record.base_page_path) == len(record.draft_page_path) == (length - 1) // 16
    assert record.partial_kv_snapshot_slot is not None
    calls = h.sync.calls
    h.spoil_states()
    assert h.run([*T(length), 77, 78], decode=3) == [length]
    assert h.run(T(50), decode=1) == [length]
    assert h.begin_only(T(length)) == [0]
    assert h.sync.calls == calls
    h.coordinator.manager.check_invariants()


def test_each_mtp_endpoint_synchronises_once_and_the_prefill_stays_in_flight() -> None:
    """Two endpoints, two synchronisations; an already published length and length 0 add none."""
    h = mtp(snapshots=2)
    request, _ = h.admit(T(50))
    h.coordinator.prepare_prefill(request)
    for length in (20, 30):
        assert h.coordinator.publish_hybrid_mtp_endpoint(request, 0, length, h.hidden, 1) is OK
    assert h.sync.calls == 2
    assert h.records == 2
    assert request.inspect().state is State.PREFILLING
    assert request.inspect().device_work_pending
    for length in (0, 20, 30):
        assert h.coordinator.publish_hybrid_mtp_endpoint(request, 0, length, h.hidden, 1) is OK
    assert h.sync.calls == 2
    assert h.coordinator.finish(request) is OK
    assert h.sync.calls == 3


def test_an_mtp_endpoint_under_pressure_is_skipped_and_waits_for_nothing() -> None:
    """With the only slot pinned by the hit itself no endpoint is captured; the skip is counted and nothing is awaited."""
    h = mtp(snapshots=1)
    h.endpoints = [20]
    h.run(T(50))
    request, starts = h.admit(T(50))
    assert starts == [20]
    h.coordinator.prepare_prefill(request)
    calls = h.sync.calls
    assert h.coordinator.publish_hybrid_mtp_endpoint(request, 0, 30, h.hidden, 1) is OK
    assert h.sync.calls == calls
    assert h.metrics.hybrid_snapshot_pressure_skips == 1
    assert [record.exact_checkpoint_length for record in h.coordinator.manager.records] == [20]
    h.coordinator.finish(request)


def test_mtp_operations_refuse_bad_arguments_and_other_deployments() -> None:
    """Slots, lengths, rows, arrays, phases, kinds: nothing changes."""
    h = mtp()
    request, _ = h.admit(T(50))
    c = h.coordinator
    with pytest.raises(ContractError, match="publish_hybrid_mtp_endpoint"):
        c.publish_hybrid_mtp_endpoint(request, 0, 20, h.hidden, 1)
    c.prepare_prefill(request)
    seen = h.observe(request)
    other = np.zeros((1, 3, 5), np.float16)
    for slot, length, hidden, row in (
        (1, 20, h.hidden, 1),
        (-1, 20, h.hidden, 1),
        (0.0, 20, h.hidden, 1),
        (0, 51, h.hidden, 1),
        (0, -1, h.hidden, 1),
        (0, "20", h.hidden, 1),
        (0, 20, h.hidden, 3),
        (0, 20, h.hidden, -1),
        (0, 20, other, 1),
        (0, 20, h.hidden[0], 1),
        (0, 20, None, 1),
    ):
        with pytest.raises(ContractError):
            c.publish_hybrid_mtp_endpoint(request, slot, length, hidden, row)
        assert h.observe(request) == seen
    with pytest.raises(ContractError, match="cold"):
        c.restore_hybrid_mtp_boundary_hidden(request, 0, h.hidden, 1)
    assert h.observe(request) == seen
    c.finish(request)
    e = EagleHarness()
    request, _ = e.admit(T(50))
    e.coordinator.prepare_prefill(request)
    for call in (
        lambda: e.coordinator.publish_hybrid_mtp_endpoint(request, 0, 20, h.hidden, 1),
        lambda: e.coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, h.hidden, 1),
    ):
        with pytest.raises(ContractError, match="HYBRID_MTP"):
            call()
    e.coordinator.finish(request)


def test_vanilla_requests_on_an_mtp_deployment_run_cold_and_publish_nothing() -> None:
    """They neither meet nor make checkpoints."""
    h = mtp()
    h.endpoints = [32]
    h.run(T(50))
    records = h.records
    assert h.run(T(50), decode=2, execution_mode=VANILLA) == [0]
    assert h.records == records
    assert h.metrics.lookup_bypass_sequences == 1


def test_eviction_returns_both_sides_of_an_mtp_record() -> None:
    """After clear() every page of both pools and every snapshot slot is free."""
    h = mtp()
    h.endpoints = [20, 40]
    h.run(T(50), decode=2)
    assert h.records == 2
    h.coordinator.clear()
    assert (h.free, h.free_draft, h.free_slots()) == (32, 32, (4, 4))


@pytest.mark.parametrize("mode", list(FaultMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("op", ["capture", "capture_boundary_hidden", "synchronize"])
def test_a_failed_mtp_endpoint_is_not_published(op: str, mode: FaultMode) -> None:
    """No record, no slot lost, and the next request is right."""
    h = mtp(ops=FaultInjector(NumpyDeviceOps(), FaultPlan(Fault(f"publish_hybrid_mtp_endpoint.{op}", mode))))
    request, _ = h.admit(T(50))
    h.coordinator.prepare_prefill(request)
    try:
        assert h.coordinator.publish_hybrid_mtp_endpoint(request, 0, 20, h.hidden, 1) is POISONED
    except DeviceError:
        assert h.coordinator.finish(request) is OK
    assert h.ops.fired
    assert h.records == 0
    if h.coordinator.poisoned:
        assert h.coordinator.shutdown() is OK
        h.coordinator.recover()
    assert (h.free, h.free_draft, h.free_slots()) == (32, 32, (4, 4))
    h.endpoints = [20]
    h.run(T(50), decode=2)
    assert h.run(T(40), decode=2) == [20]
