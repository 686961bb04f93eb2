"""The coordinator's operations on a vanilla deployment, each rule as a claim."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import threading
import warnings
import weakref

import numpy as np
import pytest
from support.harness import HASH_KEY, OK, Harness, RequestEnded, Script, T, U, V

from ctxcache import (
    AcquireResult,
    AcquireStatus,
    AdapterKey,
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentKind,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractError,
    DecodingKvHeadroom,
    DeploymentConfig,
    DeploymentError,
    DeviceError,
    Hash128,
    HybridCacheManager,
    KVPageTable,
    MissReason,
    NumpyDeviceOps,
    Phase,
    ReusePlan,
    ReusePlanKind,
    hash_opaque_identity,
)
from ctxcache.fsm import State
from ctxcache.testing import Fault, FaultInjector, FaultPlan

FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
POISONED = ContextCacheCoordinatorStatus.POISONED
BYPASS = ContextCacheLookupPolicy.BYPASS


def small(**options: object) -> Harness:
    """A harness with pages of 16 tokens and rows of 4 pages."""
    return Harness(**{"page": 16, "max_tokens": 64, **options})


# Admission


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([], "no token"),
        ([1.0, 2.0], "integers"),
        ([True, False], "id 0 is True"),
        ([1, True], "id 1 is True"),
        ([[1, 2]], "id 0 is [1, 2]"),
        ([2**31], "int32"),
        ([-(2**31) - 1], "int32"),
        ("abc", "integers"),
        (None, "integers"),
        (7, "sequence of integers"),
        (np.array([1.5]), "integers"),
        (np.array([True]), "bool"),
        ([None], "integers"),
    ],
)
def test_bad_tokens_are_refused_and_change_nothing(tokens: object, why: str) -> None:
    """Whatever is not a one-dimensional run of int32 integers is a ContractError, and the slot stays free."""
    h = small()
    seen = h.observe()
    with pytest.raises(ContractError) as refused:
        h.attempt(tokens)
    assert why in str(refused.value)
    assert h.observe() == seen
    assert h.run(T(5)) == [0]


def test_bad_admissions_are_refused_and_change_nothing() -> None:
    """Batch size, modes, policies, media, headroom, streams, rows: each refusal leaves everything as it was."""
    h = small(max_batch=2)
    sequence = ContextCacheSequenceAdmission([1, 2, 3])
    batch = ContextCacheBatchAdmission
    bad = {
        "no sequence": batch([]),
        "too many": batch([sequence] * 3),
        "no batch": None,
        "a string": "tokens",
        "no sequence admission": batch([[1, 2, 3]]),
        "a generator": batch(x for x in [sequence]),
        "other mode": batch([sequence], execution_mode=ContextCacheExecutionMode.EAGLE),
        "unknown mode": batch([sequence], execution_mode="vanilla"),
        "unknown lookup policy": batch([sequence], lookup_policy="bypass"),
        "unknown commit policy": batch([sequence], commit_policy=None),
        "media too short": batch([ContextCacheSequenceAdmission([1, 2, 3], per_position_media_hash=[Hash128(1, 1)])]),
        "media of no digests": batch([ContextCacheSequenceAdmission([1], per_position_media_hash=["x"])]),
        "extras of another type": batch([ContextCacheSequenceAdmission([1], key_extras=None)]),
        "too long": batch([ContextCacheSequenceAdmission(T(64))]),
    }
    seen = h.observe()
    for what, admission in bad.items():
        with pytest.raises(ContractError):
            h.coordinator.begin_request(admission, None)
        assert h.observe() == seen, what
    for headroom in (
        DecodingKvHeadroom(-1),
        DecodingKvHeadroom(1.5),
        DecodingKvHeadroom(2**40),
        3,
        DecodingKvHeadroom(True),
    ):
        with pytest.raises(ContractError):
            h.coordinator.begin_request(batch([sequence]), None, headroom=headroom)
        assert h.observe() == seen, headroom
    with pytest.raises(ContractError, match="stream"):
        h.coordinator.begin_request(batch([sequence]), 12345)
    with pytest.raises(ContractError, match="stream"):
        h.coordinator.begin_request(batch([sequence]), "stream")
    assert h.observe() == seen


def test_arguments_are_checked_before_the_coordinator_is_asked_for_room() -> None:
    """A bad argument is a ContractError also while a request is active; a good one then gets REQUEST_FAILED."""
    h = small()
    request, _ = h.admit(T(5))
    with pytest.raises(ContractError):
        h.attempt([])
    result = h.attempt(U(5))
    assert result.status is FAILED
    assert result.admission is None
    assert request.valid
    h.coordinator.finish(request)


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda x: np.array(x, np.int64), lambda x: np.array(x, np.uint8)]
)
def test_tokens_may_be_any_run_of_integers(kind: object) -> None:
    """Lists, tuples and integer arrays of any width name the same prefix."""
    h = small()
    h.run(T(40))
    assert h.run(kind(T(40))) == [32]


def test_a_batch_that_does_not_fit_holds_nothing() -> None:
    """One sequence without room fails the request, frees the slot, and moves no admission counter."""
    h = small(max_batch=3, num_pages=4)
    before = h.metrics
    assert h.attempt(T(30), U(30), V(30)).status is FAILED
    after = h.metrics
    assert (after.admitted_sequences, after.no_reusable_prefix_plans) == (
        before.admitted_sequences,
        before.no_reusable_prefix_plans,
    )
    assert h.free == 4
    assert h.run(T(30), U(30)) == [0, 0]


def test_bypass_uses_private_pages_and_publishes_nothing() -> None:
    """A bypass neither looks up nor publishes, and counts as a bypass."""
    h = small(num_pages=8)
    h.run(T(40))
    records = h.records
    assert h.run(T(40), decode=10, lookup_policy=BYPASS) == [0]
    assert h.records == records
    assert h.metrics.lookup_bypass_sequences == 1
    assert h.metrics.publication_attempts == 1
    assert h.run(T(40)) == [32]


def test_a_disabled_cache_runs_every_request_as_a_bypass() -> None:
    """With `enabled=False` nothing is ever reused or published."""
    h = small(enabled=False)
    assert h.run(T(40)) == [0]
    assert h.run(T(40)) == [0]
    assert h.records == 0
    assert h.metrics.lookup_bypass_sequences == 2


def test_a_hit_that_takes_the_last_page_is_held() -> None:
    """Reused and free pages together are exactly enough, and nothing is evicted."""
    h = small(num_pages=4)
    h.run(T(33))
    assert h.free == 2
    # 62 tokens and their lookahead need all 4 pages: 2 reused and 2 free.
    assert h.run(T(32) + U(30)) == [32]
    assert h.metrics.forced_cold_sequences == 0
    assert h.metrics.evicted_records == 0


def test_a_hit_that_cannot_be_held_is_tried_once_more_cold() -> None:
    """Where the manager refuses a hit for want of room, one cold plan follows; the sequence counts as forced cold."""
    h = small(num_pages=8)
    h.run(T(40))
    manager, tried = h.coordinator.manager, []
    acquire = manager.acquire

    def refuse_hits(plan: ReusePlan) -> AcquireResult:
        tried.append(plan.reused_token_length)
        if plan.reused_token_length:
            return AcquireResult(None, AcquireStatus.INSUFFICIENT_CAPACITY, plan)
        return acquire(plan)

    manager.acquire = refuse_hits  # type: ignore[method-assign]
    assert h.run(T(40)) == [0]
    assert tried == [32, 0]
    m = h.metrics
    assert (m.forced_cold_sequences, m.hit_sequences, m.no_reusable_prefix_plans) == (1, 0, 2)


def test_prefill_only_commits_do_not_publish_generated_tokens() -> None:
    """Under PREFILL_STATE_ONLY the prompt is reusable and the answer is not."""
    h = small()
    policy = ContextCacheCommitPolicy.PREFILL_STATE_ONLY
    h.run(T(20), decode=20, commit_policy=policy)
    assert h.run([*T(20), *[7] * 20]) == [16]
    h.coordinator.clear()
    h.run(T(20), decode=20)
    assert h.run([*T(20), *[7] * 20]) == [32]


def test_tenants_do_not_share() -> None:
    """Another isolation digest is another cache."""
    h = small()
    h.run(T(40), extras=BlockKeyExtras(isolation_digest=hash_opaque_identity("tenant a")))
    h.identity = 1
    assert h.run(T(40), extras=BlockKeyExtras(isolation_digest=hash_opaque_identity("tenant b"))) == [0]


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


# The lifecycle, as a caller meets it


def operations(h: Harness, request: object) -> dict[str, object]:
    """Every operation on a request, with arguments that are right for two sequences of 20 tokens after their prefill."""
    prompt = [ContextCacheSequenceAdvance([7], 20)] * 2
    step = [ContextCacheSequenceAdvance([7], 21)] * 2
    c = h.coordinator
    return {
        "prepare_prefill": lambda: c.prepare_prefill(request),
        "enqueue_prefill_captures": lambda: c.enqueue_prefill_captures(request),
        "finalize_prefill_publication": lambda: c.finalize_prefill_publication(request, prompt),
        "prepare_decode_step": lambda: c.prepare_decode_step(request),
        "can_prepare_decode_step": lambda: c.can_prepare_decode_step(request),
        "complete_decode_step": lambda: c.complete_decode_step(request, step),
        "begin_batch_compaction": lambda: c.begin_batch_compaction(request, [0, -1], 1, h.mapping),
        "compact_batch": lambda: c.compact_batch(request),
    }


LEGAL = {
    State.ADMITTED: {"prepare_prefill"},
    State.PREFILLING: {"enqueue_prefill_captures", "finalize_prefill_publication"},
    State.SETTLED: {"prepare_decode_step", "can_prepare_decode_step", "begin_batch_compaction"},
    State.DECODING: {"complete_decode_step"},
    State.COMPACTING: {"compact_batch"},
    State.FINISHING_SETTLED: set(),
    State.FINISHING_IN_FLIGHT: set(),
    State.POISONED: set(),
    State.RELEASED: set(),
}


def request_in(h: Harness, state: State) -> object:
    """A request of two sequences of 20 tokens, brought to a state."""
    request, _ = h.admit(T(20), U(20))
    if state is State.ADMITTED:
        return request
    if state is State.FINISHING_IN_FLIGHT:
        h.ops.plan = FaultPlan(Fault("prepare_prefill.upload_rows"))
        with pytest.raises(DeviceError):
            h.coordinator.prepare_prefill(request)
        return request
    h.coordinator.prepare_prefill(request)
    if state is State.PREFILLING:
        return request
    if state in (State.RELEASED, State.POISONED):
        h.sync.outcomes = [9] if state is State.POISONED else []
        request.close()
        return request
    h.coordinator.finalize_prefill_publication(request, [ContextCacheSequenceAdvance([7], 20)] * 2)
    if state is State.DECODING:
        h.coordinator.prepare_decode_step(request)
    if state is State.COMPACTING:
        h.coordinator.begin_batch_compaction(request, [0, -1], 1, h.mapping)
    if state is State.FINISHING_SETTLED:
        h.keep()
    return request


@pytest.mark.parametrize("state", list(LEGAL), ids=lambda state: state.value)
def test_h27_every_operation_in_every_state(state: State) -> None:
    """What the lifecycle does not have is refused and changes nothing; what it has is accepted."""

    def fresh() -> tuple[Harness, object]:
        h = small(max_batch=2, ops=FaultInjector(NumpyDeviceOps()))
        return h, request_in(h, state)

    h, request = fresh()
    assert request.inspect().state is state
    for name, call in operations(h, request).items():
        if name in LEGAL[state]:
            continue
        seen = h.observe(request)
        with pytest.raises(ContractError):
            call()
        assert h.observe(request) == seen, name
    for name in sorted(LEGAL[state]):
        h, request = fresh()
        outcome = operations(h, request)[name]()
        assert outcome is OK or outcome.tolist() == [True, True], name
    for way_out in ("finish", "abandon"):
        h, request = fresh()
        assert getattr(h.coordinator, way_out)(request) is OK
        assert not request.valid


def test_h27_no_back_door_changes_a_state() -> None:
    """Neither handle nor request offers a generated transition method, and a view cannot be written."""
    h = small()
    request, _ = h.admit(T(5))
    for thing in (request, request._request):
        assert [name for name in dir(thing) if name.startswith(("to_", "may_", "is_", "trigger"))] == []
    with pytest.raises(AttributeError):
        request.phase = Phase.FINISHING
    with pytest.raises(AttributeError):
        request._request.state = State.RELEASED
    with pytest.raises(AttributeError):
        request.inspect().state = State.RELEASED
    h.coordinator.finish(request)


def test_handles_are_not_copied_and_belong_to_one_coordinator() -> None:
    """Copy, deepcopy and pickle fail; another coordinator refuses the handle, live or empty."""
    h, other = small(), small()
    request, _ = h.admit(T(5))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            duplicate(request)
    for call in operations(other, request).values():
        with pytest.raises(ContractError, match="another coordinator"):
            call()
    for way_out in (other.coordinator.finish, other.coordinator.abandon):
        with pytest.raises(ContractError, match="another coordinator"):
            way_out(request)
    for way_out in (h.coordinator.finish, h.coordinator.abandon, h.coordinator.prepare_prefill):
        with pytest.raises(ContractError, match="RequestHandle"):
            way_out(None)
    assert request.valid
    h.coordinator.finish(request)


def test_the_with_block_finishes_or_abandons() -> None:
    """Leaving normally finishes; the published prompt is then reusable; nothing is left live."""
    h = small()
    request, _ = h.admit(T(40))
    with request as entered:
        assert entered is request
        h.prefill()
    assert not request.valid
    assert h.run(T(40)) == [32]


def test_a_dropped_handle_is_released_also_where_warnings_are_errors() -> None:
    """The warning is the last thing that happens, so that raising it costs nothing."""
    h = small()
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del request
    assert h.sync.calls == 1
    assert h.free == 4


def test_an_orphan_inside_an_operation_is_released_by_it() -> None:
    """A handle collected while an operation runs is marked, and the operation itself abandons the request."""
    h = small()
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    box = [request]
    del request

    class DropsTheHandle:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            box.clear()
            gc.collect()
            return np.array([1, 2, 3], np.int32)

    h.sync.calls = 0
    with pytest.warns(ResourceWarning, match="dropped"):
        h.coordinator.explain(ContextCacheBatchAdmission([ContextCacheSequenceAdmission(DropsTheHandle())]))
    assert h.sync.calls == 1
    assert h.free == 4
    assert h.attempt(T(5)).status is OK


def test_a_second_thread_waits() -> None:
    """Operations of one coordinator are serialised: a call from another thread runs when the first has returned."""
    inside, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def synchronize(stream: object) -> None:
        inside.set()
        assert leave.wait(10)
        order.append("drained")

    h = small(synchronizer=synchronize)
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    first = threading.Thread(target=lambda: h.coordinator.finish(request))
    second = threading.Thread(target=lambda: (h.coordinator.metrics(), order.append("metrics")))
    first.start()
    assert inside.wait(10)
    second.start()
    second.join(0.2)
    assert order == []
    leave.set()
    first.join(10)
    second.join(10)
    assert order == ["drained", "metrics"]


# The end of a coordinator


def test_shutdown_is_idempotent_and_refuses_new_requests() -> None:
    """Shut in health: OK each time, then begin_request is a ContractError, recover too; records stay readable."""
    h = small()
    h.run(T(40))
    request, _ = h.admit(T(40))
    assert h.coordinator.shutdown() is FAILED
    h.coordinator.finish(request)
    assert h.coordinator.shutdown() is OK
    assert h.coordinator.shutdown() is OK
    with pytest.raises(ContractError, match="shut down"):
        h.attempt(T(5))
    with pytest.raises(ContractError, match="recover"):
        h.coordinator.recover()
    assert h.records == 1


def test_recover_checks_and_reopens() -> None:
    """After a poisoning and an OK shutdown, recover reopens admission and the records still serve."""
    h = small()
    h.run(T(40))
    with pytest.raises(ContractError, match="recover"):
        h.coordinator.recover()
    request, _ = h.admit(T(40))
    h.coordinator.prepare_prefill(request)
    h.sync.outcomes = [700]
    assert request.close() is POISONED
    with pytest.raises(ContractError, match="recover"):
        h.coordinator.recover()
    with pytest.raises(ContractError, match="clear"):
        h.coordinator.clear()
    assert h.coordinator.shutdown() is OK
    assert h.coordinator.recover() is OK
    assert h.coordinator.poison_cause is None
    assert h.run(T(40)) == [32]


def test_clear_forgets_everything() -> None:
    """After clear() the same prompt is cold; with an active request it is refused."""
    h = small()
    h.run(T(40))
    request, _ = h.admit(T(40))
    seen = h.observe(request)
    with pytest.raises(ContractError, match="active"):
        h.coordinator.clear()
    assert h.observe(request) == seen
    h.coordinator.finish(request)
    h.coordinator.clear()
    assert h.records == 0
    assert h.free == 4
    assert h.run(T(40)) == [0]


def test_the_coordinator_as_a_context_manager() -> None:
    """Leaving abandons the active request, shuts down, and lets the resources be bound again."""
    h = small()
    with pytest.raises(ContractError, match="belongs to"):
        h.build()
    with h.coordinator as entered:
        assert entered is h.coordinator
        request, _ = h.admit(T(20))
        h.coordinator.prepare_prefill(request)
    assert not request.valid
    assert h.sync.calls == 1
    h.coordinator = h.build()
    assert h.run(T(20)) == [0]


def test_leaving_without_a_proof_keeps_the_resources(caplog: pytest.LogCaptureFixture) -> None:
    """A shutdown that could not prove quiescence is logged as an error and never frees the pools."""
    h = small(synchronizer=Script([1, 1, 1, 1]))
    with caplog.at_level(logging.ERROR), h.coordinator:
        request, _ = h.admit(T(20))
        h.coordinator.prepare_prefill(request)
    assert "never freed" in caplog.text
    cache = weakref.ref(h.resources.base_cache)
    with pytest.raises(ContractError, match="belongs to"):
        h.build()
    del h, request
    gc.collect()
    assert cache() is not None


def test_a_dropped_coordinator_lets_go_of_its_resources() -> None:
    """Without shutdown, collecting the coordinator ends it and frees its resources for another one."""
    h = small()
    h.coordinator = None
    gc.collect()
    h.coordinator = h.build()
    assert h.run(T(20)) == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # a worker of xdist has a thread more
def test_finalisers_of_a_forked_child_do_nothing() -> None:
    """A child that drops the handle neither drains nor warns."""
    h = small()
    request, _ = h.admit(T(20))
    h.coordinator.prepare_prefill(request)
    box = [request]
    del request
    child = os.fork()
    if child == 0:
        box.clear()
        gc.collect()
        os._exit(h.sync.calls)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert h.coordinator.finish(box[0]) is OK


# Questions


def test_explain_says_what_and_why_and_changes_nothing() -> None:
    """Each sequence's match, where it diverged, and the reason."""
    h = small(max_batch=4)

    def explain(*sequences: list[int], **options: object) -> list[object]:
        admission = ContextCacheBatchAdmission(
            [ContextCacheSequenceAdmission(tokens) for tokens in sequences], **options
        )
        return h.coordinator.explain(admission)

    assert explain(T(40))[0].reason is MissReason.EMPTY_CACHE
    h.run(T(40))
    seen = h.observe()
    same, aligned, diverged, other = explain(T(40), T(32), T(16) + U(20), U(40))
    assert h.observe() == seen
    assert (same.matched_tokens, same.reused_tokens, same.diverged_at_token) == (32, 32, None)
    assert same.reason is MissReason.PARTIAL_BLOCK
    assert (aligned.matched_tokens, aligned.reused_tokens) == (32, 16)
    assert aligned.plan_kind is ReusePlanKind.FULL_INPUT_REWIND
    assert aligned.reason is MissReason.REWIND
    assert (diverged.reused_tokens, diverged.diverged_at_token) == (16, 16)
    assert diverged.reason is MissReason.DIVERGED
    assert (other.reused_tokens, other.diverged_at_token, other.sequence) == (0, 0, 3)
    assert other.reason is MissReason.NO_MATCH
    assert explain(T(40), lookup_policy=BYPASS)[0].reason is MissReason.BYPASS
    adapter = BlockKeyExtras(adapter=AdapterKey(hash_opaque_identity("adapter")))
    others = ContextCacheBatchAdmission([ContextCacheSequenceAdmission(T(40), adapter)])
    assert h.coordinator.explain(others)[0].reason is MissReason.OTHER_IDENTITY
    h.coordinator.clear()
    assert h.coordinator.explain(others)[0].reason is MissReason.EMPTY_CACHE
    with pytest.raises(ContractError):
        explain([])


def test_metrics_balance() -> None:
    """Attempts are published plus existing plus refused; endpoints are the first two; hits and tokens add up."""
    h = small(max_batch=2)
    h.run(T(40), T(40))
    h.run(T(40), U(20), decode=15)
    m = h.metrics
    assert m.publication_attempts == m.committed_publications + m.existing_publications + m.refused_publications
    assert m.published_endpoints == m.committed_publications + m.existing_publications
    assert m.admitted_sequences == 4
    assert m.hit_sequences == 1
    assert (m.matched_tokens, m.reused_tokens) == (32, 32)
    assert m.standard_plans + m.no_reusable_prefix_plans + m.full_input_rewind_plans == 4
    assert m.current_records == h.records
    assert m.base_kv_pages.free == h.free
    assert m.planning_nanoseconds > 0
    with pytest.raises(AttributeError):
        m.drains = 3


# Construction


def test_a_deployment_that_does_not_agree_is_refused_at_construction() -> None:
    """Kind, pages, batch and rows must agree; the message names both sides."""
    h = small(max_batch=2)
    config = ContextCacheConfig(hash_key=HASH_KEY)

    def build(kind: object = ContextCacheDeploymentKind.VANILLA, **resources: object) -> None:
        parts = {"base_cache": h.resources.base_cache, "base_page_table": h.resources.base_page_table, **resources}
        ContextCacheCoordinator(
            config,
            DeploymentConfig(h.deployment.base),
            kind,
            ContextCachePhysicalResources(**parts),
            None,
            device_ops=h.ops,
        )

    with pytest.raises(DeploymentError, match="EAGLE"):
        build(ContextCacheDeploymentKind.EAGLE)
    for sizes in ((1, 4, 8), (2, 3, 8), (2, 4, 7)):
        with pytest.raises(DeploymentError):
            build(base_page_table=KVPageTable(*sizes, device_ops=h.ops))
    with pytest.raises(DeploymentError):
        build(base_page_table=None)
    with pytest.raises(DeploymentError):
        build(draft_cache=HybridCacheManager(h.deployment.base, None, device_ops=h.ops))
    with pytest.raises(ContractError, match="belongs to"):
        build()


@pytest.mark.parametrize(
    "keys", [{"max_records": -1}, {"hash_key": b"short"}, {"max_records": 1.5}, {"max_records": True}]
)
def test_a_bad_configuration_is_refused(keys: dict[str, object]) -> None:
    """ContextCacheConfig checks itself."""
    with pytest.raises(DeploymentError):
        ContextCacheConfig(**keys)
