"""Requests that once failed, leaked or lied: each with its kin, and with what is right."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from support.harness import OK, Harness, HybridHarness, MtpHarness, PureRecurrentHarness, T, U, small

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheBatchAdmission,
    ContextCacheCoordinator,
    ContextCacheExecutionMode,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractError,
    DecodingKvHeadroom,
    DeploymentConfig,
    DeploymentError,
    DeviceError,
    EngineConfig,
    LayerType,
    NumpyDeviceOps,
    PoisonedError,
    RecurrentStateConfig,
    RequestFailedError,
    SpecDecodeConfig,
    SpecDecodeMode,
)
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.testing import Fault, FaultInjector, FaultMode, FaultPlan


def test_f04_a_session_whose_last_sequence_has_left_holds_nothing() -> None:
    """It refuses steps, says that nobody can step, and has freed its pages; nothing is evicted for ghosts."""
    h = small(max_batch=2, num_pages=8)
    with h.coordinator.session([T(20), U(20)]) as session:
        session.prefilled([1, 2])
        session.before_decode()
        assert session.decoded([3, 4], finished=[True, True]) == [-1, -1]
        assert session.active == []
        assert h.coordinator.manager.num_leases == 0
        before = h.observe()
        for act in (session.before_decode, lambda: session.decoded([]), lambda: session.retire([True, True])):
            with pytest.raises(ContractError):
                act()
        assert session.can_decode().shape == (0,)
        assert h.observe() == before
    assert h.begin_only([*T(20), 5]) == [16]


def test_f04_retiring_the_last_ones_ends_the_request() -> None:
    """By `retire` as by `finished`, and one by one as at once."""
    h = small(max_batch=2)
    with h.coordinator.session([T(20), U(20)]) as session:
        session.prefilled([1, 2])
        assert session.retire([True, False]) == [-1, 0]
        assert session.retire([True]) == [-1]
        assert h.coordinator.idle
        with pytest.raises(ContractError):
            session.retire([True])
        assert session.retire([]) is None


def engine(max_tokens: int, page: int, batch: int, layer: LayerType, num_pages: int = 0) -> EngineConfig:
    """One layer of as few bytes a token as there can be."""
    return EngineConfig(
        layers=(layer,),
        attention=(AttentionLayerConfig(1, 1),) * (layer is LayerType.ATTENTION),
        recurrent=RecurrentStateConfig(1, 1, 1, 1, 1) if layer is LayerType.RECURRENT else None,
        kv_dtype="float8_e4m3fn",
        max_batch_size=batch,
        max_sequence_length=max_tokens,
        num_pages=num_pages,
        tokens_per_page=page,
    )


@pytest.mark.parametrize(
    ("layer", "page"), [(LayerType.RECURRENT, 128), (LayerType.ATTENTION, 1 << 16)], ids=["recurrent", "attention"]
)
@pytest.mark.parametrize("media", [False, True], ids=["text", "media"])
def test_f08_host_memory_follows_the_tokens_that_live(layer: LayerType, page: int, media: bool) -> None:
    """Batches of 256 with ten tokens each take little, however long a sequence may become; media digests too."""
    config = engine(2**31 - 1, page, 256, layer, num_pages=0 if layer is LayerType.RECURRENT else 1 << 15)
    coordinator = ContextCacheCoordinator.build(config, device_ops=NumpyDeviceOps(), snapshots=1)
    digests = np.ones((10, 2), np.uint64) if media else None
    admission = ContextCacheBatchAdmission(
        [ContextCacheSequenceAdmission([i] * 10, per_position_media_hash=digests) for i in range(256)]
    )

    def live(headroom: DecodingKvHeadroom | None = None) -> None:
        begun = coordinator.begin_request(admission, None, headroom=headroom)
        begun.status.raise_for_status()
        request = begun.admission.request
        coordinator.prepare_prefill(request).raise_for_status()
        first = [ContextCacheSequenceAdvance([1], 10)] * 256
        coordinator.finalize_prefill_publication(request, first).raise_for_status()
        coordinator.prepare_decode_step(request, headroom=headroom).raise_for_status()
        second = [ContextCacheSequenceAdvance([2], 11)] * 256
        coordinator.complete_decode_step(request, second, [0, 1]).raise_for_status()
        coordinator.finish(request).raise_for_status()

    live()  # what compiles here is not counted
    tracemalloc.start()
    try:
        live()
        live(DecodingKvHeadroom(2**31 - 12 if layer is LayerType.RECURRENT else page))
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert coordinator.shutdown() is OK


@pytest.mark.parametrize("num_pages", [2047, 2048, 2049])
def test_f09_a_pool_of_two_to_the_31_tokens(num_pages: int) -> None:
    """Tokens of a pool are counted in 64 bits: at, just below and just beyond 2**31."""
    page = 1 << 20
    config = engine(1 << 22, page, 2, LayerType.ATTENTION, num_pages=num_pages)
    coordinator = ContextCacheCoordinator.build(config, device_ops=NumpyDeviceOps())
    with coordinator.session([T(page + 5), T(7)]) as session:
        session.prefilled([1, 2])
        session.before_decode()
        session.decoded([3, 4], finished=[True, False])
    with coordinator.session([T(page + 9)]) as session:
        assert session.prefill_starts == [page]
        session.prefilled([1])
    coordinator.manager.check_invariants()
    whole = DecodingKvHeadroom((1 << 22) - 9)
    with coordinator.session([T(9)], headroom=whole) as session:
        assert session.capacities.tolist() == [1 << 22]


@pytest.mark.parametrize("mode", [FaultMode.RAISE_BEFORE, FaultMode.RAISE_AFTER], ids=lambda mode: mode.value)
@pytest.mark.parametrize("harness_type", [HybridHarness, PureRecurrentHarness])
def test_f11_counters_count_what_happened(harness_type: type[Harness], mode: FaultMode) -> None:
    """A capture that failed while it was enqueued was no synchronisation, and a restore that failed was none; others were."""
    h = harness_type(ops=FaultInjector(NumpyDeviceOps()), snapshots=6)
    h.run(T(20), decode=1)
    assert h.metrics.hybrid_capture_synchronizations == 1
    request, _ = h.admit(T(30))
    h.prefill()
    assert h.coordinator.prepare_decode_step(request) is OK
    h.ops.plan = FaultPlan(Fault("complete_decode_step.capture", mode))
    with pytest.raises(DeviceError):
        h.coordinator.complete_decode_step(request, [ContextCacheSequenceAdvance([8], 31)], [0])
    assert h.coordinator.abandon(request) is OK
    assert h.metrics.hybrid_capture_synchronizations == 1
    h.ops.plan = FaultPlan(Fault("prepare_prefill.restore", mode))
    restores = h.metrics.hybrid_restores
    request, _ = h.admit([*T(20), 7, 5])
    with pytest.raises(DeviceError):
        h.coordinator.prepare_prefill(request)
    assert h.coordinator.abandon(request) is OK
    assert h.metrics.hybrid_restores == restores


def in_a_child(act: Callable[[], object]) -> int:
    """Fork, let the child act, and return its exit code: what `act` returns."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = int(act() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # a worker of xdist has a thread more
@pytest.mark.parametrize("block", ["request", "coordinator", "session"])
@pytest.mark.parametrize("fails", [False, True], ids=["normally", "by an exception"])
def test_f12_leaving_a_block_in_a_forked_child_does_nothing(block: str, fails: bool) -> None:
    """No drain, no synchroniser, no warning of its own there; the parent's request goes on and ends as ever."""
    h = small()
    session = h.coordinator.session([T(20)])
    session.__enter__()
    request = session.handle
    calls = h.sync.calls
    error = ValueError("in the child") if fails else None
    leaving = {"request": request, "coordinator": h.coordinator, "session": session}

    def leave() -> int:
        leaving[block].__exit__(type(error) if error else None, error, None)
        return (h.sync.calls - calls) + 10 * (not request.valid)

    assert in_a_child(leave) == 0
    assert h.sync.calls == calls
    session.prefilled([7])
    session.__exit__(None, None, None)
    assert h.begin_only([*T(20), 1]) == [16]


@pytest.mark.parametrize("length", [64, 65, 4000])
def test_f13_explain_refuses_what_can_never_be_admitted(length: int) -> None:
    """By the same rule and in the same words as `begin_request`."""
    h = small()
    admission = ContextCacheBatchAdmission([ContextCacheSequenceAdmission(T(length))])
    said = []
    for act in (h.coordinator.explain, lambda it: h.coordinator.begin_request(it, None)):
        before = h.observe()
        with pytest.raises(ContractError, match="max_sequence_length") as caught:
            act(admission)
        assert h.observe() == before
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert h.coordinator.explain(ContextCacheBatchAdmission([ContextCacheSequenceAdmission(T(63))]))


@pytest.mark.parametrize("harness_type", [HybridHarness, PureRecurrentHarness, MtpHarness])
def test_f13_a_disabled_cache_needs_no_budgets(harness_type: type[Harness]) -> None:
    """Recurrent models run cold without a byte for snapshots, whole requests through, from zeroed state."""
    h = harness_type(enabled=False, snapshots=0, max_batch=2, max_tokens=64, page=8)
    assert h.free_slots() == (0, 0)
    for _ in range(2):
        request, starts = h.admit(T(20), U(9))
        assert starts == [0, 0]
        h.prefill()
        h.decode([0])
        h.keep(1)
        h.decode([0])
        assert h.coordinator.finish(request) is OK
    metrics = h.metrics
    assert (metrics.current_records, metrics.hybrid_snapshot_pressure_skips, metrics.reused_tokens) == (0, 0, 0)
    h.coordinator.manager.check_invariants()


def test_f13_an_enabled_cache_still_needs_them() -> None:
    """A budget below one slot is refused where the cache is on, as ever."""
    with pytest.raises(DeploymentError, match="snapshot_pool_bytes"):
        HybridHarness(snapshots=0)


def eagle(draft_batch: int) -> ContextCacheCoordinator:
    """A base for four sequences whose draft serves fewer."""

    def side(batch: int) -> EngineConfig:
        return EngineConfig(
            layers=(LayerType.ATTENTION,),
            attention=(AttentionLayerConfig(1, 4),),
            max_batch_size=batch,
            max_sequence_length=64,
            tokens_per_page=8,
        )

    spec = SpecDecodeConfig(SpecDecodeMode.EAGLE, drafting_step=2, verify_size=3)
    return ContextCacheCoordinator.build(
        DeploymentConfig(side(4), side(draft_batch), spec), device_ops=NumpyDeviceOps()
    )


@pytest.mark.parametrize("size", [3, 4])
def test_f13_a_plain_batch_needs_no_draft_slots(size: int) -> None:
    """It may be as large as the base serves, decodes, and shrinks; a drafting batch may be as large as both serve."""
    coordinator = eagle(2)
    prompts = [[i] * 20 for i in range(1, size + 1)]
    with coordinator.session(prompts) as session:
        session.prefilled([7] * size)
        session.before_decode()
        session.decoded([8] * size, finished=[True] + [False] * (size - 1))
        session.before_decode()
        session.decoded([9] * (size - 1), finished=[True] * (size - 1))
    mode = ContextCacheExecutionMode.EAGLE
    with pytest.raises(ContractError, match="admit 1 to 2"):
        coordinator.session(prompts, execution_mode=mode).__enter__()
    with coordinator.session(prompts[:2], execution_mode=mode) as session:
        session.prefilled([7, 7], common_lengths=[20, 20])
    with pytest.raises(ContractError, match="admit 1 to 4"):
        coordinator.session([[1]] * 5).__enter__()


def test_n02_the_sequence_at_its_longest_is_named() -> None:
    """One of two cannot go on: the error says which, why, and what to do, and so does the log."""
    h = small(max_batch=2)
    with h.coordinator.session([T(10), T(63)]) as session:
        session.prefilled([1, 2])
        session.before_decode()
        session.decoded([3, 4])
        assert session.can_decode().tolist() == [True, False]
        with pytest.raises(RequestFailedError) as caught:
            session.before_decode()
    for word in ("sequence 1", "64 tokens", "max_sequence_length 64", "retire()", "can_decode()"):
        assert word in str(caught.value)


def test_n02_the_sequence_without_a_page_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Pages that are lacking are named with whom they are lacking for, at a step and at an admission."""
    h = small(max_batch=2, num_pages=4)
    caplog.set_level("INFO", logger="ctxcache")
    with h.coordinator.session([T(31), U(31)]) as session:
        session.prefilled([1, 2])
        session.before_decode()
        session.decoded([3, 4])
        with pytest.raises(RequestFailedError) as caught:
            session.before_decode()
    for word in ("sequence 0", "needs 3 base pages and has 2", "0 base pages are free", "num_pages"):
        assert word in str(caught.value)
    assert h.coordinator.failure in caplog.text
    with pytest.raises(RequestFailedError, match=r"sequence 1 of the batch.*needs 3 base pages.*num_pages"):
        h.coordinator.session([T(40), U(40)]).__enter__()
    with h.coordinator.session([T(5)]), pytest.raises(RequestFailedError, match="another request is active"):
        h.coordinator.session([T(5)]).__enter__()


@pytest.mark.parametrize("failures", [1, 3])
def test_n04_the_refusal_after_a_failed_drain_names_both_steps(failures: int) -> None:
    """`shutdown()` until it returns `OK`, then `recover()`: also when the first has been done; and it is true."""
    h = small()
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    h.sync.outcomes = [719] * failures
    assert h.coordinator.abandon(request) is Status.POISONED
    for answer in [Status.POISONED] * (failures - 1) + [OK, OK]:
        said = pytest.raises(PoisonedError, match=r"shutdown\(\) until it returns OK, then recover\(\)")
        with said:
            h.attempt(T(5)).status.raise_for_status()
        with said:
            h.coordinator.session([T(5)]).__enter__()
        assert h.coordinator.shutdown() is answer
    assert h.coordinator.recover() is OK
    assert h.run(T(20)) == [0]


def test_n04_a_healthy_shutdown_says_to_build_another() -> None:
    """`recover()` would be refused there, so it is not named."""
    h = small()
    assert h.coordinator.shutdown() is OK
    with pytest.raises(ContractError, match="build another one") as caught:
        h.attempt(T(5))
    assert "recover" not in str(caught.value)
    with pytest.raises(ContractError):
        h.coordinator.recover()
