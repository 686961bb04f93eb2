"""Progress and compaction of a vanilla request: reports, growth, and who moves where."""

from __future__ import annotations

import numpy as np
import pytest
from support.harness import OK, RequestEnded, T, U, V, small

from ctxcache import (
    ContextCacheBatchAdvance,
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdvance,
    ContractError,
    DecodingKvHeadroom,
    NumpyDeviceOps,
    Phase,
)
from ctxcache.testing import FaultInjector

FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED


# Progress


def test_generated_state_is_published_where_a_sequence_is_reported_complete() -> None:
    """Only reported slots publish; reporting ends nothing, and may be repeated."""
    h = small(max_batch=2)
    request, _ = h.admit(T(20), U(20))
    h.prefill()
    for step in range(14):
        h.decode(completed=[1] if step in (11, 12, 13) else [])
    published = [sequence.published_full_block_count for sequence in request.inspect().sequences]
    assert published == [1, 2]
    attempts = h.metrics.publication_attempts
    assert attempts == 3
    h.coordinator.finish(request)


def test_advances_as_arrays_are_the_same_as_objects() -> None:
    """ContextCacheBatchAdvance moves a batch exactly as one object a sequence does."""
    states = []
    for as_arrays in (False, True):
        h = small(max_batch=3)
        request, _ = h.admit(T(20), U(10), V(30))
        h.coordinator.prepare_prefill(request)
        lengths = [20, 10, 30]
        for step in range(5):
            tokens = [100 + step, 200 + step, 300 + step]
            if as_arrays:
                advances = ContextCacheBatchAdvance(
                    np.array(tokens, np.int32)[:, None], np.ones(3, np.int32), np.array(lengths, np.int32)
                )
            else:
                advances = [
                    ContextCacheSequenceAdvance([token], length) for token, length in zip(tokens, lengths, strict=True)
                ]
            if step == 0:
                h.coordinator.finalize_prefill_publication(request, advances)
            else:
                h.coordinator.prepare_decode_step(request)
                h.coordinator.complete_decode_step(request, advances, [0])
            lengths = [length + 1 for length in lengths]
        states.append(
            [(s.token_ids.tolist(), s.committed_state_length) for s in request.inspect().sequences] + [h.records]
        )
        h.coordinator.finish(request)
    assert states[0] == states[1]


def test_bad_decode_reports_change_nothing() -> None:
    """Counts, lengths, slots, common lengths, arrays: every wrong report is refused, then the right one works."""
    h = small(max_batch=2)
    advance, arrays = ContextCacheSequenceAdvance, ContextCacheBatchAdvance
    request, _ = h.admit(T(20), U(31))
    h.prefill()
    h.coordinator.prepare_decode_step(request)
    right = [advance([7], 21), advance([7], 32)]
    one, two = np.ones(2, np.int32), np.array([21, 32], np.int32)
    bad_advances = [
        [],
        right[:1],
        [*right, right[0]],
        [advance([7], 20), advance([7], 32)],
        [advance([7], 22), advance([7], 32)],
        [advance([7, 7], 22), advance([7], 32)],
        [advance([7], None), advance([7], 32)],
        [advance([7], 21.0), advance([7], 32)],
        [advance("a", 21), advance([7], 32)],
        None,
        "advances",
        arrays(np.zeros((2, 1), np.int64), one, two),
        arrays(np.zeros((3, 1), np.int32), one, two),
        arrays(np.zeros(2, np.int32), one, two),
        arrays(np.zeros((2, 1), np.int32), one * 2, two),
        arrays(np.zeros((2, 1), np.int32), one * 0, two - 1),
        arrays(np.zeros((2, 1), np.int32), -one, two),
        arrays(np.zeros((2, 1), np.int32), one[:1], two),
        arrays(np.zeros((2, 1), np.int32), one, two + 1),
        arrays(None, None, None),
    ]
    seen = h.observe(request)
    for advances in bad_advances:
        with pytest.raises(ContractError):
            h.coordinator.complete_decode_step(request, advances)
        assert h.observe(request) == seen, advances
    for slots in ([2], [-1], [0, 0], [0.0], [True], None, 0, "0", [None]):
        with pytest.raises(ContractError):
            h.coordinator.complete_decode_step(request, right, slots)
        assert h.observe(request) == seen, slots
    with pytest.raises(ContractError, match="common"):
        h.coordinator.complete_decode_step(request, right, (), [21, 32])
    assert h.observe(request) == seen
    assert h.coordinator.complete_decode_step(request, right, [1, 0]) is OK
    h.coordinator.finish(request)


def test_a_step_may_not_commit_beyond_what_it_was_prepared_for() -> None:
    """A committed length outside the prepared pages is refused."""
    h = small()
    request, _ = h.admit(T(31), headroom=DecodingKvHeadroom(0))
    h.prefill()
    h.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(1))
    h.compute_step()
    assert h.coordinator.complete_decode_step(request, [ContextCacheSequenceAdvance([7], 32)]) is OK
    h.coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(0))
    seen = h.observe(request)
    with pytest.raises(ContractError, match=r"committed 33, beyond the 32"):
        h.coordinator.complete_decode_step(request, [ContextCacheSequenceAdvance([7], 33)])
    assert h.observe(request) == seen
    h.coordinator.finish(request)


def test_growth_is_all_or_nothing_and_can_be_asked_beforehand() -> None:
    """When not every sequence can grow none does; the answer names, in slot order, which could."""
    h = small(max_batch=3, num_pages=4, max_records=0)
    request, _ = h.admit(T(15), U(15), V(15))
    h.prefill()
    h.decode()
    assert h.free == 1
    assert h.coordinator.can_prepare_decode_step(request).tolist() == [True, False, False]
    seen = h.observe(request)
    assert h.coordinator.can_prepare_decode_step(request, headroom=DecodingKvHeadroom(200)).tolist() == [False] * 3
    assert h.observe(request) == seen
    h.keep(0)
    assert h.coordinator.can_prepare_decode_step(request).tolist() == [True]
    h.decode()
    h.coordinator.finish(request)
    request, _ = h.admit(T(15), U(15), V(15))
    h.prefill()
    h.decode()
    pages = [sequence.lease.base_pages.tolist() for sequence in request.inspect().sequences]
    assert h.coordinator.prepare_decode_step(request) is FAILED
    assert [sequence.lease.base_pages.tolist() for sequence in request.inspect().sequences] == pages
    assert request.phase is Phase.FINISHING
    assert not request.inspect().device_work_pending
    calls = h.sync.calls
    assert h.coordinator.finish(request) is OK
    assert h.sync.calls == calls


def test_growth_evicts_before_it_fails() -> None:
    """Decode steps take pages from records when the pool is empty."""
    h = small(num_pages=4)
    h.run(T(48))
    request, _ = h.admit(U(15))
    h.prefill()
    for _ in range(40):
        h.decode()
    assert h.metrics.evicted_records > 0
    h.coordinator.finish(request)


def test_a_step_that_grows_nothing_touches_no_device() -> None:
    """No op at all is called on a decode step without growth, and no step synchronises."""
    h = small(ops=FaultInjector(NumpyDeviceOps()))
    request, _ = h.admit(T(17))
    h.prefill()
    h.ops.log.clear()
    for _ in range(15):
        h.decode()
    assert h.ops.log == []
    h.decode()
    assert h.ops.log == ["prepare_decode_step.upload_rows"]
    assert h.sync.calls == 0
    h.coordinator.finish(request)


# Compaction


def test_compaction_keeps_survivors_and_releases_the_retired_after_one_synchronisation() -> None:
    """Rows, tokens and lengths follow the mapping; retired pages return; decode goes on with right bytes."""
    h = small(max_batch=4)
    request, _ = h.admit(T(20), U(20), V(20), T(10))
    h.prefill()
    h.decode()
    free, calls = h.free, h.sync.calls
    pages = [h.pages_of(slot) for slot in range(4)]
    h.keep(1, 3)
    assert h.sync.calls == calls + 1
    assert request.batch_size == 2
    assert [h.pages_of(slot) for slot in range(4)] == [pages[1], pages[3], [], []]
    assert h.free == free + 4 - len(h.cached_pages() & set(pages[0] + pages[2]))
    lengths = np.asarray(h.resources.base_cache.kv_lengths)
    assert lengths[:2].tolist() == [21, 11]
    for _ in range(5):
        h.decode()
    h.coordinator.finish(request)
    h.coordinator.manager.check_invariants()


def test_a_failed_compaction_drain_quarantines_the_whole_old_batch() -> None:
    """Retired sequences stay held with the rest until a later drain succeeds."""
    h = small(max_batch=2)
    request, _ = h.admit(T(20), U(20))
    h.prefill()
    held = h.coordinator.manager.num_leases
    h.sync.outcomes = [1]
    with pytest.raises(RequestEnded, match="POISONED"):
        h.keep(0)
    assert h.coordinator.manager.num_leases == held == 2
    assert request.phase is Phase.POISONED
    assert h.coordinator.shutdown() is OK
    assert h.coordinator.manager.num_leases == 0


@pytest.mark.parametrize(
    "mapping", [None, np.zeros(1, np.int32), np.zeros(2, np.int64), np.zeros((2, 2), np.int32), [0, 0]]
)
def test_a_device_mapping_that_cannot_hold_the_batch_is_refused(mapping: object) -> None:
    """The caller's device array is one-dimensional int32 and at least the batch long."""
    h = small(max_batch=2)
    request, _ = h.admit(T(20), U(20))
    h.prefill()
    seen = h.observe(request)
    with pytest.raises(ContractError, match="device_batch_mapping"):
        h.coordinator.begin_batch_compaction(request, [0, -1], 1, mapping)
    assert h.observe(request) == seen
    h.coordinator.finish(request)
