"""Arguments of a coordinator that were once misread, each as the whole kind that it belonged to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.harness import OK, EagleHarness, Harness, HybridHarness, MtpHarness, T, U, V
from support.values import Hostile, shown

from ctxcache import (
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheCoordinator,
    ContextCacheCoordinatorStatus,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    ContractError,
    DecodingKvHeadroom,
    DeploymentError,
    NumpyDeviceOps,
)


@pytest.mark.parametrize(
    "extras",
    ["lora", None, (), {"adapter": None}, Hostile(), BlockKeyExtras],
    ids=shown,
)
def test_extras_are_checked_before_anything_happens(extras):
    """Bad extras of the last sequence are an argument's fault: nothing is evicted, also while a request is active."""
    harness = Harness(max_batch=2, num_pages=8, max_tokens=64, page=8)
    harness.run(T(63))
    before = harness.observe()
    admission = ContextCacheBatchAdmission(
        [ContextCacheSequenceAdmission(U(40)), ContextCacheSequenceAdmission(V(5), extras)]
    )
    with pytest.raises(ContractError, match="pass"):
        harness.coordinator.begin_request(admission, None)
    assert harness.observe() == before
    request, _ = harness.admit(T(5))
    with pytest.raises(ContractError, match="pass"):
        harness.coordinator.begin_request(admission, None)
    harness.coordinator.finish(request)


def test_a_common_length_beyond_the_draft_pages_is_refused():
    """A caller who prepared too few draft pages for what it reports is told so; nothing has changed."""
    harness = EagleHarness(max_tokens=64, page=4)
    request, _ = harness.admit(T(12))
    harness.prefill()
    coordinator = harness.coordinator
    assert coordinator.prepare_decode_step(request, headroom=DecodingKvHeadroom(8, 0)) is OK
    assert len(request.inspect().sequences[0].lease.draft_pages) == 4  # 12 and the default headroom of 4
    before = harness.observe(request)
    advances = [ContextCacheSequenceAdvance([7] * 8, 20)]
    for common in (17, 20):
        with pytest.raises(ContractError, match="larger draft headroom"):
            coordinator.complete_decode_step(request, advances, [0], [common])
        assert harness.observe(request) == before
    assert coordinator.complete_decode_step(request, advances, [0], [16]) is OK
    assert coordinator.finish(request) is OK
    assert harness.metrics.refused_publications == 0
    coordinator.manager.check_invariants()


@pytest.mark.parametrize(
    "row", [None, "1", b"1", 1.0, True, float("nan"), [1], np.float32(1), Hostile(), 2**70], ids=shown
)
def test_a_hidden_row_is_an_integer(row):
    """An index of another kind is refused before anything is enqueued: the request lives on, nothing has changed."""
    harness = MtpHarness(max_tokens=64, page=8)
    harness.endpoints = (9,)
    harness.run(T(12))
    request, starts = harness.admit(T(20))
    assert starts == [9]
    coordinator = harness.coordinator
    assert coordinator.prepare_prefill(request) is OK
    before = harness.observe(request)
    with pytest.raises(ContractError, match="hidden row"):
        coordinator.publish_hybrid_mtp_endpoint(request, 0, 12, harness.hidden, row)
    with pytest.raises(ContractError, match="hidden row"):
        coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, harness.hidden, row)
    assert harness.observe(request) == before
    assert coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, harness.hidden, np.int64(1)) is OK
    assert coordinator.abandon(request) is OK


def test_what_is_written_must_be_writable():
    """A read-only mapping or hidden array is the caller's mistake, not a device failure that ends the request."""
    harness = MtpHarness(max_batch=2, max_tokens=64, page=8)
    harness.endpoints = (9,)
    harness.run(T(12))
    request, _ = harness.admit(T(20), V(5))
    coordinator = harness.coordinator
    assert coordinator.prepare_prefill(request) is OK
    frozen = harness.hidden.copy()
    frozen.flags.writeable = False
    with pytest.raises(ContractError, match="read-only"):
        coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, frozen, 1)
    harness.compute_prompts()
    harness.finalize()
    mapping = np.zeros(2, np.int32)
    mapping.flags.writeable = False
    before = harness.observe(request)
    with pytest.raises(ContractError, match="read-only"):
        coordinator.begin_batch_compaction(request, [0, -1], 1, mapping)
    assert harness.observe(request) == before
    harness.keep(0)
    assert coordinator.finish(request) is OK


class BareOps:
    """Ops with exactly the methods that the device page names, and nothing else."""

    def __init__(self, inner: Any) -> None:
        for name in (
            "allocate",
            "to_host",
            "to_device",
            "upload_rows",
            "reset_lengths",
            "zero_recurrent",
            "restore",
            "capture",
            "upload_mapping",
            "compact_slot_state",
            "capture_boundary_hidden",
            "restore_boundary_hidden",
            "synchronize",
        ):
            setattr(self, name, getattr(inner, name))


@pytest.mark.parametrize("harness_type", [Harness, HybridHarness, EagleHarness, MtpHarness])
def test_ops_of_the_caller_need_the_ops_and_nothing_else(harness_type):
    """Duck-typed ops work through every operation without the hook by which wrappers name fault points."""
    harness = harness_type(max_batch=2, max_tokens=64, page=8, ops=BareOps(NumpyDeviceOps()))
    request, _ = harness.admit(T(20), V(9))
    harness.prefill()
    harness.decode()
    harness.keep(1)
    harness.decode(completed=[0])
    assert harness.coordinator.finish(request) is OK
    assert harness.coordinator.shutdown() is OK


@pytest.mark.parametrize(
    "code",
    [719, True, "", "ok", [], np.array([0, 0]), np.array([]), Hostile(), (0,), MemoryError(), StopIteration()],
    ids=shown,
)
def test_a_synchroniser_that_answers_oddly_is_one_failed_drain(code):
    """Anything but `None` and 0 fails the drain, counts once, and quarantines; also what cannot be compared with 0."""
    harness = Harness(max_tokens=64, page=8)
    outcomes = [code]

    def synchronise(stream: Any) -> Any:
        del stream
        outcome = outcomes.pop() if outcomes else 0
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    harness = Harness(max_tokens=64, page=8, synchronizer=synchronise)
    coordinator = harness.coordinator
    request, _ = harness.admit(T(20))
    assert coordinator.prepare_prefill(request) is OK
    assert coordinator.abandon(request) is ContextCacheCoordinatorStatus.POISONED
    metrics = coordinator.metrics()
    assert (metrics.drains, metrics.failed_drains, metrics.quarantines) == (1, 1, 1)
    assert coordinator.manager.num_leases == 1
    assert coordinator.shutdown() is OK
    coordinator.recover()
    assert coordinator.manager.num_leases == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"token_lists": None},
        {"token_lists": 5},
        {"token_lists": "text"},
        {"token_lists": ([token] for token in (1, 2))},
        {"token_lists": []},
        {"key_extras": 5},
        {"key_extras": "x"},
        {"key_extras": ["x"]},
        {"key_extras": iter([])},
        {"per_position_media_hash": 5},
        {"per_position_media_hash": [5]},
        {"headroom": 5},
        {"execution_mode": "vanilla"},
    ],
    ids=shown,
)
def test_a_session_refuses_what_the_coordinator_would(arguments):
    """Bad arguments of a session are `ContractError` too, and hold nothing."""
    harness = Harness(max_batch=2, max_tokens=64, page=8)
    before = harness.observe()
    with pytest.raises(ContractError), harness.coordinator.session(**{"token_lists": [[1, 2]], **arguments}):
        pass
    assert harness.observe() == before


@pytest.mark.parametrize("tokens", [None, 5, [None], ["x"], [1.5], [True], [[1, 2]], [], [1, 2]], ids=shown)
def test_a_session_refuses_bad_progress_and_lives_on(tokens):
    """Bad tokens and flags change nothing; the right ones work afterwards."""
    harness = Harness(max_tokens=64, page=8)
    with harness.coordinator.session([T(5)]) as session:
        with pytest.raises(ContractError):
            session.prefilled(tokens)
        session.prefilled([7])
        session.before_decode()
        with pytest.raises(ContractError):
            session.decoded(tokens)
        for finished in (5, "x", ["no"], [0.5], [None], [[True]], [[True], [True, False]], [True, False], []):
            with pytest.raises(ContractError, match=r"finished|entries"):
                session.decoded([7], finished=finished)
        assert session.active == [0]
        assert session.decoded([7], finished=[True]) == [-1]
        assert session.active == []


@pytest.mark.parametrize("value", [None, "x", 5, [], np.zeros(2), object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", ["config", "deployment", "kind", "resources", "base_cache", "base_page_table"])
def test_a_coordinator_checks_what_it_is_built_from(place, value):
    """Each argument of another type is a `DeploymentError` at construction, and the resources stay free for another."""
    harness = Harness(max_tokens=64, page=8)
    assert harness.coordinator.shutdown() is OK
    resources = {"base_cache": harness.resources.base_cache, "base_page_table": harness.resources.base_page_table}
    arguments = {
        "config": harness.config,
        "deployment": harness.deployment,
        "kind": harness.kind,
        "resources": ContextCachePhysicalResources(**resources),
    }
    if place in resources:
        arguments["resources"] = ContextCachePhysicalResources(**{**resources, place: value})
    else:
        arguments[place] = value
    with pytest.raises(DeploymentError):
        ContextCacheCoordinator(*arguments.values(), None)
    with pytest.raises(DeploymentError, match="synchronizer"):
        ContextCacheCoordinator(harness.config, harness.deployment, harness.kind, harness.resources, None, 5)
    harness.coordinator = harness.build()
    harness.run(T(20))
