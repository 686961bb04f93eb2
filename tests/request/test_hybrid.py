"""Hybrid and pure recurrent deployments: checkpoints at exact lengths, from admission to eviction."""

from __future__ import annotations

import numpy as np
import pytest
from support.harness import OK, Harness, HybridHarness, PureRecurrentHarness, T, U, V

from ctxcache import (
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheCoordinatorStatus,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    LayerType,
    MissReason,
    NumpyDeviceOps,
    RequestHandle,
    hash_opaque_identity,
)
from ctxcache.testing import FaultInjector

KINDS = pytest.mark.parametrize("harness", [HybridHarness, PureRecurrentHarness], ids=["hybrid", "recurrent"])


def published(request: RequestHandle) -> list[int]:
    """Exact lengths that the sequences have published."""
    return [sequence.published_exact_length for sequence in request.inspect().sequences]


@KINDS
def test_h17_the_checkpoint_is_picked_by_exact_length(harness: type[HybridHarness]) -> None:
    """A checkpoint serves inputs strictly longer than it, with the state that was captured at that very length."""
    h = harness(snapshots=2)
    assert h.run(T(130)) == [0]
    assert h.run(T(200)) == [130]
    assert [h.begin_only(T(n)) for n in (130, 131, 180, 200, 201)] == [[0], [130], [130], [130], [200]]
    for n in (131, 201):
        request, _ = h.admit(T(n))
        h.prefill()  # checks the restored state and pages
        h.coordinator.abandon(request)


@KINDS
def test_h18_a_cold_sequence_beside_a_hit_starts_from_zero(harness: type[HybridHarness]) -> None:
    """Slots are restored or zeroed in every layer, state and convolution state, whatever the last request left."""
    h = harness(max_batch=2, snapshots=4)
    h.run(T(130))
    h.spoil_states()
    request, starts = h.admit(T(131), U(50))
    assert starts == [130, 0]
    h.coordinator.prepare_prefill(request)
    h.check()
    h.coordinator.finish(request)


@KINDS
def test_decode_end_checkpoints_synchronise_once_for_the_batch(harness: type[HybridHarness]) -> None:
    """One synchronisation for all completed sequences; none when nothing is captured; prefill captures add none."""
    h = harness(max_batch=3, snapshots=12)
    request, _ = h.admit(T(20), U(20), V(20))
    h.prefill()
    h.decode()
    assert h.sync.calls == 0
    h.decode(completed=[0, 2])
    assert h.sync.calls == 1
    assert h.metrics.hybrid_capture_synchronizations == 1
    assert published(request) == [22, 20, 22]
    h.decode(completed=[])
    assert h.sync.calls == 1
    h.coordinator.finish(request)
    assert h.begin_only([*T(20), 7, 7, 7]) == [22]
    assert h.begin_only([*U(20), 7, 7, 7]) == [20]


@KINDS
def test_no_synchronisation_when_nothing_is_captured(harness: type[HybridHarness]) -> None:
    """The end of a bypass captures nothing, so nothing is waited for."""
    h = harness(snapshots=1)
    h.run(T(20))
    request, starts = h.admit(T(21))
    assert starts == [20]
    h.coordinator.prepare_prefill(request)
    h.coordinator.finish(request)
    request, _ = h.admit(T(21), lookup_policy=ContextCacheLookupPolicy.BYPASS)
    h.prefill()
    h.decode(completed=[0])
    assert h.metrics.hybrid_capture_synchronizations == 0
    assert h.records == 1
    h.coordinator.finish(request)


@KINDS
def test_policies(harness: type[HybridHarness]) -> None:
    """Prefill-only keeps no generated state; a bypass keeps nothing and restores nothing."""
    h = harness(snapshots=4)
    h.run(T(20), decode=3, commit_policy=ContextCacheCommitPolicy.PREFILL_STATE_ONLY)
    assert [record.exact_checkpoint_length for record in h.coordinator.manager.records] == [20]
    h.spoil_states()
    assert h.run(T(25), lookup_policy=ContextCacheLookupPolicy.BYPASS) == [0]
    assert h.records == 1
    assert h.run(T(25)) == [20]
    assert h.metrics.hybrid_restores == 1


@KINDS
def test_compaction_moves_state_with_its_sequence(harness: type[HybridHarness]) -> None:
    """After a compaction every survivor's state, pages and later checkpoint are its own."""
    h = harness(max_batch=4, snapshots=12)
    request, _ = h.admit(T(20), U(130), V(40), T(60))
    h.prefill()
    h.decode()
    h.keep(1, 3)
    h.decode()
    h.decode(completed=[0, 1])
    h.coordinator.finish(request)
    assert h.run([*U(130), 7, 7, 7, 7, 7]) == [133]
    assert h.run([*T(60), 7, 7, 7, 7, 7]) == [63]


def test_restoring_touches_only_the_valid_tokens_of_the_partial_page() -> None:
    """K and V of every layer: tokens behind the boundary keep whatever the private page held before."""
    h = HybridHarness(snapshots=2)
    h.run(T(130))
    request, starts = h.admit(T(140))
    assert starts == [130]
    private = int(request.inspect().sequences[0].lease.base_pages[1])
    layers = [index for index, layer in enumerate(h.deployment.base.layers) if layer is LayerType.ATTENTION]
    for layer in layers:
        h.words(layer)[:, private] = 0xA5A5A5A5A5A5A5A5
    shared = int(request.inspect().sequences[0].lease.base_pages[0])
    before = [h.words(layer)[:, shared].copy() for layer in layers]
    h.coordinator.prepare_prefill(request)
    for layer, words in zip(layers, before, strict=True):
        found = h.words(layer)
        assert (found[:, private, 2:] == 0xA5A5A5A5A5A5A5A5).all()
        assert (found[:, private, :2] != 0xA5A5A5A5A5A5A5A5).all()
        np.testing.assert_array_equal(found[:, shared], words)
    h.check()
    h.coordinator.finish(request)


@KINDS
def test_explain_says_why_a_hybrid_misses(harness: type[HybridHarness]) -> None:
    """No checkpoint, one at the wrong length, an evicted one, another identity: each has its own reason."""

    def why(tokens: list[int]) -> tuple[int, MissReason]:
        admission = ContextCacheBatchAdmission([ContextCacheSequenceAdmission(tokens)])
        explanation = h.coordinator.explain(admission)[0]
        return explanation.reused_tokens, explanation.reason

    tenant = BlockKeyExtras(isolation_digest=hash_opaque_identity("another tenant"))
    h = harness(snapshots=2)
    assert why(T(140)) == (0, MissReason.EMPTY_CACHE)
    h.run(T(200))
    seen = h.observe()
    assert why(T(201)) == (200, MissReason.NONE)
    assert why(T(200))[1] is MissReason.WRONG_CHECKPOINT_LENGTH
    assert why(U(200)) == (0, MissReason.NO_MATCH)
    others = ContextCacheBatchAdmission([ContextCacheSequenceAdmission(T(201), tenant)])
    assert h.coordinator.explain(others)[0].reason is MissReason.OTHER_IDENTITY
    assert h.observe() == seen
    h.run(U(50))
    h.run(V(50))
    assert why(T(201)) == (0, MissReason.EVICTED)
    assert (
        h.coordinator.explain(
            ContextCacheBatchAdmission(
                [ContextCacheSequenceAdmission(U(60))], lookup_policy=ContextCacheLookupPolicy.BYPASS
            )
        )[0].reason
        is MissReason.BYPASS
    )


def test_pure_recurrent_needs_no_page_and_no_table() -> None:
    """The base page pool has capacity 0, and sequences are bounded by the row length alone."""
    h = PureRecurrentHarness(snapshots=2, max_tokens=64, page=16)
    assert h.metrics.base_kv_pages.capacity == 0
    request, _ = h.admit(T(60))
    h.prefill()
    for _ in range(4):
        h.decode()
    assert h.coordinator.prepare_decode_step(request) is ContextCacheCoordinatorStatus.REQUEST_FAILED
    h.coordinator.finish(request)
    assert h.begin_only(T(63)) == [60]


@KINDS
def test_sessions_capture_when_told_that_the_prefill_is_enqueued(harness: type[HybridHarness]) -> None:
    """`prefill_enqueued` gives the prompts their checkpoints."""
    h = harness(snapshots=4)
    with h.coordinator.session([T(20)]) as s:
        h.follow(s.handle, [T(20)])
        h.compute_prompts()
        s.prefill_enqueued()
        s.prefilled([7])
    assert h.run(T(25)) == [20]


def test_a_hybrid_conversation_reuses_every_turn() -> None:
    """Each turn starts exactly where the last one's state was captured, with the right bytes."""
    h = HybridHarness(snapshots=3, max_tokens=512, page=16, num_pages=64)
    history = T(50)
    start = 0
    for turn in range(6):
        assert h.run(history, decode=10) == [start]
        start = len(history) + 10
        history = [*history, *[7] * 11, *range(1000 * turn, 1000 * turn + 23)]
    m = h.metrics
    assert m.hit_sequences == 5
    assert m.hybrid_restores == 5
    assert m.standard_plans == 5


def test_a_vanilla_coordinator_takes_the_capture_call_and_does_nothing() -> None:
    """Without recurrent layers `enqueue_prefill_captures` is OK and touches no device."""
    h = Harness(ops=FaultInjector(NumpyDeviceOps()))
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    h.ops.log.clear()
    assert h.coordinator.enqueue_prefill_captures(request) is OK
    assert h.ops.log == []
    h.coordinator.finish(request)


@KINDS
@pytest.mark.parametrize("length", [3, 4, 5])
def test_a_picture_that_ends_beside_a_page_is_published(harness: type[HybridHarness], length: int) -> None:
    """What is generated behind it has no digest; a prompt that fills its page with the sampled token is no other case."""
    h = harness(page=4, max_tokens=32, snapshots=4)
    media = np.arange(1, 2 * length + 1, dtype=np.uint64).reshape(length, 2)
    for _ in range(2):
        request = h.attempt(T(length), media=media).admission.request
        h.prefill()
        h.decode([0], accepted=[1])
        assert h.coordinator.finish(request) is OK
    assert h.records == 2
