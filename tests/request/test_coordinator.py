"""A coordinator as a whole: what it is built from, what it answers, how it ends."""

from __future__ import annotations

import gc
import logging
import os
import weakref

import pytest
from support.harness import HASH_KEY, OK, Script, T, U, small

from ctxcache import (
    AdapterKey,
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentKind,
    ContextCacheLookupPolicy,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContractError,
    DeploymentConfig,
    DeploymentError,
    HybridCacheManager,
    KVPageTable,
    MissReason,
    ReusePlanKind,
    hash_opaque_identity,
)

FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
POISONED = ContextCacheCoordinatorStatus.POISONED
BYPASS = ContextCacheLookupPolicy.BYPASS


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
