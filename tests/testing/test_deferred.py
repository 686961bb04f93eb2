"""The lazy stream: order, lateness, what a synchronise proves, and the ledger that watches owners change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ctxcache import (
    ContextCacheCoordinator,
    ContextCacheDeploymentKind,
    ContractError,
    HybridCacheManager,
    KVPageTable,
    NumpyDeviceOps,
    ResourceType,
)
from ctxcache.ids import ContextCacheCoordinatorStatus
from ctxcache.testing import DeferredDeviceOps, OwnershipLedger, Part, Transcript, Use
from ctxcache.testing.runtime.deployments import Sizes, make_deployment
from ctxcache.testing.runtime.runtime import FakeRuntime

KINDS = tuple(ContextCacheDeploymentKind)


class Scheduler:
    """A schedule: run a piece of work at each touch of the stream, or none until it is told."""

    def __init__(self, *, eager: bool = False) -> None:
        self.eager = eager

    def random(self) -> float:
        return 0.0 if self.eager else 1.0


def lazy() -> DeferredDeviceOps:
    return DeferredDeviceOps(NumpyDeviceOps(), Scheduler())


def test_work_runs_in_order_and_at_the_latest_when_synchronised() -> None:
    """Nothing is lost, nothing overtakes, and a synchronise leaves nothing waiting, under any schedule."""
    for seed in range(50):
        ops = DeferredDeviceOps(NumpyDeviceOps(), random.Random(seed))
        seen: list[int] = []
        for number in range(20):
            ops.enqueue(lambda number=number, seen=seen: seen.append(number))
            assert seen == list(range(len(seen)))
        ops.synchronize(None, None)
        assert seen == list(range(20))
        assert ops.num_waiting == 0


def test_schedules_differ_by_seed_and_repeat_by_seed() -> None:
    """The same seed runs work at the same moments; over seeds, work is seen to run early, late and last."""

    def trace(rng: Any) -> list[int]:
        ops = DeferredDeviceOps(NumpyDeviceOps(), rng)
        return [ops.enqueue(lambda: None) or ops.num_waiting for _ in range(30)]

    assert trace(random.Random(5)) == trace(random.Random(5))
    assert trace(np.random.default_rng(5)) == trace(np.random.default_rng(5))
    assert len({tuple(trace(random.Random(seed))) for seed in range(20)}) > 10


@pytest.mark.parametrize("outcome", [1, 719, RuntimeError("lost")])
def test_a_failed_synchronise_leaves_work_unrun_and_later_it_runs(outcome: Any) -> None:
    """Neither a code nor an exception of the synchroniser proves anything; the next success does."""
    ops = lazy()
    seen: list[str] = []
    ops.enqueue(lambda: seen.append("ran"), uses=[Use(ResourceType.BASE_KV_PAGE, 3, writes=True, work="write")])

    def fail(stream: object) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    if isinstance(outcome, BaseException):
        with pytest.raises(RuntimeError, match="lost"):
            ops.synchronize(None, fail)
    else:
        assert ops.synchronize(None, fail) == outcome
    assert seen == []
    assert [use.index for use in ops.unproven] == [3]
    ops.reschedule(Scheduler(eager=True))
    ops.operation("later")
    assert seen == ["ran"]
    assert [use.index for use in ops.unproven] == [3], "that it has run is not proven"
    assert ops.synchronize(None, None) is None
    assert ops.unproven == []


def test_a_fault_inside_enqueued_work_shows_at_the_next_synchronise() -> None:
    """Once; the work behind it runs, and nothing counts as proven."""
    ops = lazy()
    seen: list[str] = []

    def fault() -> None:
        raise ZeroDivisionError("kernel")

    ops.enqueue(fault, uses=[Use(ResourceType.BASE_KV_PAGE, 0, writes=True, work="write")])
    ops.enqueue(lambda: seen.append("behind"))
    with pytest.raises(ZeroDivisionError, match="kernel"):
        ops.synchronize(None, None)
    assert seen == ["behind"]
    assert len(ops.unproven) == 1
    assert ops.synchronize(None, None) is None
    assert ops.unproven == []


def test_uploads_and_lengths_are_frozen_when_they_are_enqueued() -> None:
    """The caller may change its arrays and the table at once; what was enqueued stays what it was."""
    ops = lazy()
    table = KVPageTable(2, 4, 8, device_ops=ops.inner)
    engine = make_deployment(ContextCacheDeploymentKind.VANILLA, Sizes()).base
    cache = HybridCacheManager(engine, None, device_ops=ops.inner)
    table.set_row(0, [5, 6])
    ops.upload_rows(table, None)
    table.set_row(0, [1])
    lengths = np.array([3, 4], np.int32)
    ops.reset_lengths(cache, lengths, None)
    assert cache.active_batch_size == 2
    lengths[:] = 99
    assert (np.asarray(table.kernel_view) == -1).all()
    ops.synchronize(None, None)
    assert np.asarray(table.kernel_view)[0].tolist() == [[5, 6, -1, -1], [13, 14, -1, -1]]
    assert np.asarray(cache.kv_lengths).tolist() == [3, 4, 0]
    ops.upload_rows(table, None)
    ops.synchronize(None, None)
    assert np.asarray(table.kernel_view)[0, 0].tolist() == [1, -1, -1, -1]


def test_the_batch_size_is_the_hosts_and_never_runs_late() -> None:
    """`active_batch_size` follows what was enqueued; an advance moves the slots that were active then."""
    ops = lazy()
    engine = make_deployment(ContextCacheDeploymentKind.VANILLA, Sizes()).base
    cache = HybridCacheManager(engine, None, device_ops=ops.inner)
    mapping = ops.allocate((3,), "int32")
    ops.reset_lengths(cache, np.array([1, 2, 3], np.int32), None)
    ops.advance_lengths(cache, 10, None)
    moves = np.array([-1, 0, -1], np.int32)
    ops.upload_mapping(moves, mapping, None)
    moves[:] = 0
    ops.compact_slot_state(cache, mapping, 3, 1, None)
    assert cache.active_batch_size == 1
    ops.synchronize(None, None)
    assert cache.active_batch_size == 1
    assert np.asarray(cache.kv_lengths)[0] == 12


def test_wrong_arguments_are_refused_at_once() -> None:
    """Checks happen when work is enqueued; nothing is in the stream then."""
    ops = lazy()
    engine = make_deployment(ContextCacheDeploymentKind.HYBRID, Sizes()).base
    cache = HybridCacheManager(engine, None, device_ops=ops.inner)
    refused = [
        lambda: ops.reset_lengths(cache, np.array([-1], np.int32), None),
        lambda: ops.zero_recurrent(cache, np.array([7], np.int32), None),
        lambda: ops.upload_mapping(np.array([0, 1], np.int32), np.zeros(1, np.int32), None),
        lambda: ops.compact_slot_state(cache, np.zeros(3, np.int32), 2, 3, None),
    ]
    for call in refused:
        with pytest.raises(ContractError):
            call()
    assert ops.num_waiting == 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_a_runtime_on_a_lazy_stream_computes_what_it_would_on_an_eager_one(
    kind: ContextCacheDeploymentKind,
) -> None:
    """The coordinator's own order of work suffices, whatever the schedule: right bytes, no early change of an owner."""
    for seed in range(8):
        runtime = FakeRuntime(kind, seed=seed)
        for _ in range(2):
            runtime.spoil_states()
            runtime.begin([[1, 2, 3] * 3, [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1]])
            runtime.prefill([5, 8])
            runtime.decode([0], accepted=[2, 3], lags=[0, 1])
            runtime.begin_compaction([1])
            runtime.compact()
            runtime.decode([0])
            runtime.finish()
        assert runtime.violations == []
        runtime.ledger.check()
        assert runtime.ledger.num_changes > 20


def test_the_ledger_sees_a_release_that_nothing_proved() -> None:
    """A drain that only pretends to wait: every page of the lease is named, with the work that may still write it."""
    runtime = FakeRuntime(ContextCacheDeploymentKind.VANILLA)
    runtime.begin([[1, 2, 3, 1, 2, 3]])
    runtime.prepare()
    runtime.compute_prompts()
    runtime.deferred.synchronize = lambda stream, synchronizer: None  # type: ignore[method-assign]
    runtime.finish()
    assert len(runtime.ledger.violations) == 2
    assert "base_kv_page 0 was released while the device may still write it: prefill" in runtime.ledger.violations[0]
    with pytest.raises(AssertionError, match="base_kv_page 1 was released"):
        runtime.ledger.check()


def test_the_ledger_sees_an_early_publication() -> None:
    """A runtime that reports its prefill complete without waiting publishes pages that are not written: both are told."""
    runtime = FakeRuntime(ContextCacheDeploymentKind.VANILLA, seed=2)
    runtime.begin([[1, 2, 3, 1, 2, 3]])
    runtime.prepare()
    runtime.compute_prompts()
    runtime.finalize()
    published, reported = runtime.ledger.violations
    assert "was published" in published
    assert reported.startswith(
        "finalize_prefill_publication of request 1 reported as complete what was not proven so: "
    )


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (ContextCacheDeploymentKind.VANILLA, "were published"),
        (ContextCacheDeploymentKind.HYBRID, "were published as a checkpoint"),
    ],
)
def test_the_ledger_takes_work_that_names_nothing_to_touch_everything(
    kind: ContextCacheDeploymentKind, change: str
) -> None:
    """Publishing and releasing before it was proven breaks the rule; `uses=()`, or a synchronise, makes it well."""

    def run(*, proven: bool, **uses: Any) -> list[str]:
        runtime = FakeRuntime(kind)
        runtime.begin([[1, 2, 3, 1, 2, 3]])
        runtime.prepare()
        runtime.compute_prompts()
        runtime.capture()
        runtime.wait()
        runtime.deferred.enqueue(lambda: None, **uses)
        if proven:
            runtime.deferred.synchronize(None, None)
        runtime.finalize()
        runtime.finish()
        return list(runtime.ledger.violations)

    assert run(proven=True) == []
    assert run(proven=False, uses=()) == []
    violations = run(proven=False)
    assert violations[0].startswith(f"pages {change} while work that the runtime had enqueued was not proven complete")
    assert violations[-1].startswith("pages were released while work")


@pytest.mark.parametrize(
    "kind", [kind for kind in ContextCacheDeploymentKind if kind is not ContextCacheDeploymentKind.PURE_RECURRENT]
)
def test_a_step_in_the_middle_that_was_not_waited_for_is_told(kind: ContextCacheDeploymentKind) -> None:
    """No page changes its owner there. The report is told with its request and its enqueue; a refused one reports nothing."""
    runtime = FakeRuntime(kind)
    for _ in range(2):
        runtime.begin([[1, 2, 3, 1, 2, 3]])
        runtime.prefill()
        runtime.decode()
        runtime.grow()
        runtime.compute_step()
        with pytest.raises(ContractError):
            runtime.coordinator.complete_decode_step(runtime.request, [])
        runtime.complete()
        runtime.finish()
    told = [violation for violation in runtime.ledger.violations if "reported as complete" in violation]
    assert [violation.split(" reported")[0] for violation in told] == [
        "complete_decode_step of request 1",
        "complete_decode_step of request 2",
    ]
    assert all(
        "step at runtime.py:" in violation and "in or behind prepare_decode_step" in violation for violation in told
    )


def test_a_strict_ledger_raises_at_the_report() -> None:
    """And keeps what it said; work from before the request, and work that touches no page, is not the request's."""
    runtime = FakeRuntime(ContextCacheDeploymentKind.VANILLA)
    ledger = OwnershipLedger(runtime.coordinator, runtime.deferred, strict=True)
    runtime.deferred.enqueue(lambda: None)
    assert [work.number for work in runtime.deferred.unproven_work] == [1]
    runtime.begin([[1, 2, 3, 1, 2, 3]])
    runtime.prepare()
    runtime.compute_prompts()
    with pytest.raises(
        AssertionError, match=r"^finalize_prefill_publication of request 1 reported .* upload_rows.*and 2 more"
    ):
        runtime.finalize()
    assert "reported as complete" in ledger.violations[-1]
    runtime.wait()
    assert runtime.deferred.unproven_work == []
    runtime.abandon()


def test_the_ledger_hears_a_runtime_of_the_users_own() -> None:
    """It needs a coordinator and the lazy stream, nothing of the fake runtime."""
    runtime = FakeRuntime(ContextCacheDeploymentKind.HYBRID)
    ops = lazy()
    assert runtime.coordinator.shutdown() is ContextCacheCoordinatorStatus.OK
    other = ContextCacheCoordinator(
        runtime.config, runtime.deployment, runtime.kind, runtime.resources, None, device_ops=ops
    )
    ledger = OwnershipLedger(other, ops)
    runtime.coordinator, runtime.ops, runtime.deferred = other, ops, ops
    runtime.begin([[1, 2, 3]])
    runtime.prefill()
    runtime.finish()
    ledger.check()
    assert ledger.num_changes > 0


def test_transcripts_tell_every_position_part_and_layer_apart() -> None:
    """No two words are equal across parts, layers, identities and positions; equal prefixes give equal words."""
    words = [
        int(word)
        for identity in (0, 1)
        for part in Part
        for layer in (0, 1)
        for word in Transcript([1, 2, 1, 2, 1], identity).words(part, layer, 0, 4)
    ]
    distinct = {Part.DRAFT_KEY, Part.DRAFT_VALUE}
    assert len(set(words)) == len(words)
    short, long = Transcript([1, 2, 3]), Transcript([1, 2, 3, 9])
    for part in set(Part) - distinct:
        assert short.words(part, 0, 0, 3).tolist() == long.words(part, 0, 0, 3).tolist()


def test_a_drafts_word_depends_on_the_token_that_follows() -> None:
    """The last position needs a successor, and another successor is another word."""
    one, other = Transcript([1, 2, 3]), Transcript([1, 2, 4])
    assert one.words(Part.DRAFT_KEY, 0, 0, 1).tolist() == other.words(Part.DRAFT_KEY, 0, 0, 1).tolist()
    assert one.words(Part.DRAFT_KEY, 0, 1, 2).tolist() != other.words(Part.DRAFT_KEY, 0, 1, 2).tolist()
    with pytest.raises(ValueError, match="needs 4 tokens"):
        one.words(Part.DRAFT_KEY, 0, 2, 3)
