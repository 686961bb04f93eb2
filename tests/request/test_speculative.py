"""EAGLE and shared KV deployments: what is published when, and what may be reused."""

from __future__ import annotations

import numpy as np
import pytest
from support.harness import OK, EagleHarness, SharedKvHarness, T, U, V

from ctxcache import (
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheCoordinatorStatus,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractError,
    DecodingKvHeadroom,
    DeviceError,
    MissReason,
    NumpyDeviceOps,
    Phase,
)
from ctxcache.fsm import State
from ctxcache.testing import Fault, FaultInjector, FaultMode, FaultPlan

FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
POISONED = ContextCacheCoordinatorStatus.POISONED
VANILLA = ContextCacheExecutionMode.VANILLA
FROZEN = pytest.mark.parametrize("harness", [EagleHarness, SharedKvHarness], ids=["eagle", "shared kv"])


@FROZEN
def test_h08_a_frozen_prefill_is_published_after_the_first_verification(harness: type[SharedKvHarness]) -> None:
    """Nothing after the prefill, whole blocks after the first completion; every hit gives one block back."""
    h = harness(num_pages=8)
    request, _ = h.admit(T(256))
    h.prefill()
    assert h.records == 0
    assert request.inspect().state is State.DRAFTING
    assert request.inspect().spec_awaiting_first_completion
    assert request.inspect().sequences[0].frozen_spec_prefill_length == 256
    h.decode(accepted=[1])
    assert h.records == 1
    (record,) = h.coordinator.manager.records
    assert len(record.base_page_path) == 2
    assert len(record.draft_page_path) == (2 if h.paired else 0)
    assert not request.inspect().spec_awaiting_first_completion
    cached = h.cached_pages()
    h.coordinator.finish(request)

    for tokens in (T(258), T(256), [*T(256), 99]):
        request, starts = h.admit(tokens)
        assert starts == [128]
        lease = request.inspect().sequences[0].lease
        assert int(lease.base_pages[1]) not in cached
        if h.paired:
            assert int(lease.draft_pages[1]) not in h.cached_pages("draft_page_path")
        h.prefill()
        h.coordinator.abandon(request)
    assert h.metrics.spec_full_page_replays == 3


@FROZEN
def test_h08_finish_before_any_verification_publishes_once_proven(harness: type[SharedKvHarness]) -> None:
    """finish() synchronises once and publishes; dropping synchronises once and publishes nothing."""
    for way_out, records in (("finish", 1), ("abandon", 0)):
        h = harness()
        request, _ = h.admit(T(256))
        h.prefill()
        assert getattr(h.coordinator, way_out)(request) is OK
        assert h.sync.calls == 1
        assert h.records == records


@FROZEN
def test_one_paired_block_is_a_hit_that_reuses_nothing(harness: type[SharedKvHarness]) -> None:
    """With one matched block the replay leaves nothing: matched 128, reused 0, still a hit."""
    h = harness()
    h.run(T(130), decode=1)
    before = h.metrics
    assert h.run(T(140), decode=1) == [0]
    after = h.metrics
    assert after.hit_sequences - before.hit_sequences == 1
    assert after.matched_tokens - before.matched_tokens == 128
    assert after.reused_tokens == before.reused_tokens


@FROZEN
def test_a_lagging_draft_limits_publication_to_the_common_length(harness: type[SharedKvHarness]) -> None:
    """Blocks that base and draft do not both have are not published, at completion or at the end."""
    h = harness(page=16, max_tokens=128, num_pages=32)
    request, _ = h.admit(T(40))
    h.prefill()
    for step in range(6):
        h.decode(accepted=[2], lags=[6], completed=[0] if step == 5 else [])
    assert request.inspect().sequences[0].committed_state_length == 52
    assert request.inspect().sequences[0].common_state_length == 46
    record = list(h.coordinator.manager.records)[-1]
    assert len(record.base_page_path) == 2
    h.decode(accepted=[2], lags=[0], completed=[0])
    assert len(list(h.coordinator.manager.records)[-1].base_page_path) == 3
    h.coordinator.finish(request)


@FROZEN
def test_a_conversation_reuses_with_right_bytes(harness: type[SharedKvHarness]) -> None:
    """Turn after turn the reused pages, base and draft, hold this conversation's bytes; junk never gets in."""
    h = harness(page=16, max_tokens=256, num_pages=48)
    history, expected = T(50), 0
    for turn in range(5):
        assert h.run(history, decode=5) == [expected]
        published = (len(history) + 10) // 16
        expected = max(published - 1, 0) * 16
        history = [*history, *[7] * 11, *range(1000 * (turn + 1), 1000 * (turn + 1) + 19)]
    h.coordinator.manager.check_invariants()


def test_h08_another_successor_never_meets_the_old_draft_page() -> None:
    """Prompts that part right behind a block share what is before it, and nothing whose draft saw the other token."""
    h = EagleHarness(page=16, max_tokens=128, num_pages=32)
    stem = T(48)
    assert h.run([*stem, *U(16)], decode=1) == [0]
    assert h.run([*stem, *V(16)], decode=1) == [32]
    assert h.run([*stem, *U(16), 5, 6], decode=1) == [48]
    assert h.run([*stem, *V(16), 5, 6], decode=1) == [48]
    h.coordinator.manager.check_invariants()


def test_vanilla_requests_on_an_eagle_deployment() -> None:
    """They use and publish base pages alone; what they publish never serves a speculative request until paired."""
    h = EagleHarness(num_pages=16, num_draft_pages=16)
    assert h.run(T(257), execution_mode=VANILLA) == [0]
    assert h.free_draft == 16
    assert h.run(T(300), execution_mode=VANILLA) == [256]
    admission = ContextCacheBatchAdmission(
        [ContextCacheSequenceAdmission(T(300))], execution_mode=ContextCacheExecutionMode.EAGLE
    )
    assert h.coordinator.explain(admission)[0].reason is MissReason.UNPAIRED_DRAFT
    before = h.records
    assert h.run(T(257), decode=1) == [0]
    assert h.records == before, "the record gained its draft path in place"
    assert h.metrics.spec_pair_publications == 1
    assert h.run(T(257), decode=1) == [128]
    assert h.run(T(257), execution_mode=VANILLA) == [256]


@FROZEN
def test_media_makes_the_whole_speculative_batch_bypass(harness: type[SharedKvHarness]) -> None:
    """One sequence with media: nothing is looked up or published for any; a vanilla batch is unaffected."""
    h = harness(max_batch=2)
    h.run(T(257), decode=1)
    media = np.zeros((257, 2), np.uint64)
    media[3] = 9
    records = h.records
    admission = ContextCacheBatchAdmission(
        [ContextCacheSequenceAdmission(T(257), per_position_media_hash=media), ContextCacheSequenceAdmission(T(257))],
        execution_mode=h.native_mode,
    )
    result = h.coordinator.begin_request(admission, None)
    assert result.admission.prefill_starts == [0, 0]
    assert h.metrics.lookup_bypass_sequences == 2
    h.coordinator.finish(result.admission.request)
    assert h.records == records


@FROZEN
def test_wrong_common_lengths_change_nothing(harness: type[SharedKvHarness]) -> None:
    """Missing (EAGLE), too short, too long, shrinking, of another number: refused, then the right one works."""
    h = harness(max_batch=2, page=16, max_tokens=128)
    request, _ = h.admit(T(20), U(30))
    h.coordinator.prepare_prefill(request)
    advances = [ContextCacheSequenceAdvance([7], 20), ContextCacheSequenceAdvance([7], 30)]
    wrong = [[20], [20, 29], [20, 31], [20, 30, 1], ["20", 30], [20.0, 30.0]]
    if h.paired:
        wrong.append(None)
    seen = h.observe(request)
    for common in wrong:
        with pytest.raises(ContractError, match="common_state_lengths"):
            h.coordinator.finalize_prefill_publication(request, advances, common)
        assert h.observe(request) == seen, common
    assert h.coordinator.finalize_prefill_publication(request, advances, [20, 30]) is OK
    h.coordinator.prepare_decode_step(request)
    advances = [ContextCacheSequenceAdvance([7, 8], 22), ContextCacheSequenceAdvance([7], 31)]
    seen = h.observe(request)
    for common in ([23, 31], [19, 31], [22], [22, 32]):
        with pytest.raises(ContractError, match="common_state_lengths"):
            h.coordinator.complete_decode_step(request, advances, (), common)
        assert h.observe(request) == seen, common
    for bad in (
        [ContextCacheSequenceAdvance([], 20), advances[1]],
        [ContextCacheSequenceAdvance([7], 22), advances[1]],
    ):
        with pytest.raises(ContractError):
            h.coordinator.complete_decode_step(request, bad, (), [20, 31])
    assert h.observe(request) == seen
    assert h.coordinator.complete_decode_step(request, advances, (), [21, 31]) is OK
    h.coordinator.finish(request)


def test_shared_kv_takes_the_committed_lengths_for_common_ones() -> None:
    """Without common lengths base and draft agree on everything committed."""
    h = SharedKvHarness(page=16, max_tokens=128)
    h.common_lengths = lambda lengths: None
    assert h.run(T(40), decode=3) == [0]
    assert h.run([*T(40), *[7] * 7, 1, 2]) == [16]


@FROZEN
def test_compaction_settles_the_draft_first(harness: type[SharedKvHarness]) -> None:
    """One synchronisation proves the initialisation and publishes frozen prefills; then slots move."""
    h = harness(max_batch=3, page=16, max_tokens=128)
    request, _ = h.admit(T(40), U(40), V(40))
    h.prefill()
    seen = h.observe(request)
    with pytest.raises(ContractError):
        h.coordinator.begin_batch_compaction(request, [0, 0, -1], 1, h.mapping)
    assert h.observe(request) == seen
    h.begin_compaction([1, 2])
    assert h.sync.calls == 1
    assert h.records == 3
    h.compact()
    assert h.sync.calls == 2
    h.decode()
    h.decode(completed=[0, 1])
    h.coordinator.finish(request)
    assert h.run([*T(40), 1]) == [16]


@FROZEN
def test_a_failed_settling_quarantines_and_publishes_nothing(harness: type[SharedKvHarness]) -> None:
    """The synchronisation that would prove the draft fails: POISONED, no record."""
    h = harness(max_batch=2, page=16, max_tokens=128)
    request, _ = h.admit(T(40), U(40))
    h.prefill()
    h.sync.outcomes = [700]
    assert h.coordinator.begin_batch_compaction(request, [-1, 0], 1, h.mapping) is POISONED
    assert h.records == 0
    assert h.coordinator.manager.num_leases == 2
    assert h.coordinator.shutdown() is OK


@FROZEN
def test_out_of_capacity_while_drafting_still_publishes_the_prompt_at_finish(harness: type[SharedKvHarness]) -> None:
    """Exhausted before the first verification: in flight, one drain at finish, then the frozen prompt is published."""
    h = harness(page=16, max_tokens=64)
    request, _ = h.admit(T(60), headroom=DecodingKvHeadroom(1, 1))
    h.prefill()
    assert h.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(8, 8)) is FAILED
    assert request.phase is Phase.FINISHING
    assert request.inspect().device_work_pending
    assert h.coordinator.finish(request) is OK
    assert h.sync.calls == 1
    assert h.records == 1


@FROZEN
def test_prefill_only_commits_publish_the_frozen_prompt_alone(harness: type[SharedKvHarness]) -> None:
    """The prompt is reusable after its first verification; generated blocks are not."""
    h = harness(page=16, max_tokens=128, num_pages=32)
    policy = ContextCacheCommitPolicy.PREFILL_STATE_ONLY
    h.run(T(33), decode=10, commit_policy=policy)
    assert h.run([*T(33), *[7] * 20, 1], lookup_policy=ContextCacheLookupPolicy.USE_CACHE) == [16]


@pytest.mark.parametrize("fault", ["first upload raises", "second upload raises", "the next synchronise fails"])
def test_h15_faults_while_both_tables_grow(fault: str) -> None:
    """The error reaches the caller and the earlier draft work still counts as pending; a failed drain quarantines."""
    h = EagleHarness(ops=FaultInjector(NumpyDeviceOps()), page=128, max_tokens=512)
    request, _ = h.admit(T(255), headroom=DecodingKvHeadroom(1, 1))
    h.prefill()
    faults = {
        "first upload raises": Fault("prepare_decode_step.upload_rows"),
        "second upload raises": Fault("prepare_decode_step.upload_rows.draft"),
        "the next synchronise fails": Fault("prepare_decode_step.upload_rows.draft", FaultMode.ERROR_CODE),
    }
    h.ops.plan = FaultPlan(faults[fault])
    if fault == "the next synchronise fails":
        assert h.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(4, 2)) is OK
        assert [
            len(request.inspect().sequences[0].lease.base_pages),
            len(h.pages_of(0, h.resources.draft_page_table)),
        ] == [3, 3]
        assert request.close() is POISONED
        assert h.coordinator.manager.num_leases == 1
        assert h.records == 0
        return
    with pytest.raises(DeviceError):
        h.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(4, 2))
    assert h.records == 0
    calls = h.sync.calls
    assert request.close() is OK
    assert h.sync.calls == calls + 1
    assert h.records == 0
    assert h.coordinator.manager.num_leases == 0


def test_paired_growth_is_atomic() -> None:
    """Without room for the draft pages the base does not grow either. At the end of its row the draft takes what there is."""
    h = EagleHarness(page=16, max_tokens=128, num_pages=16, num_draft_pages=8)
    request, _ = h.admit(T(100))
    h.prefill()
    before = (h.free, h.free_draft)
    assert h.coordinator.can_prepare_decode_step(request, headroom=DecodingKvHeadroom(13, 29)).tolist() == [True]
    assert h.coordinator.can_prepare_decode_step(request, headroom=DecodingKvHeadroom(29, 13)).tolist() == [False]
    assert (h.free, h.free_draft) == before
    h.coordinator.finish(request)
    h = EagleHarness(page=16, max_tokens=128, num_pages=16, num_draft_pages=8, max_batch=2)
    request, _ = h.admit(T(50), U(50))
    h.prefill()
    before = (h.free, h.free_draft)
    assert h.coordinator.can_prepare_decode_step(request, headroom=DecodingKvHeadroom(13, 14)).all()
    assert not h.coordinator.can_prepare_decode_step(request, headroom=DecodingKvHeadroom(14, 15)).any()
    assert h.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(20, 20)) is FAILED
    assert (h.free, h.free_draft) == before
    h.coordinator.finish(request)
