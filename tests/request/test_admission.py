"""Admission on a vanilla deployment: what is refused, what fits, who shares with whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.harness import T, U, V, small

from ctxcache import (
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheCoordinatorStatus,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdmission,
    ContractError,
    DecodingKvHeadroom,
    Hash128,
    hash_opaque_identity,
)

FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
BYPASS = ContextCacheLookupPolicy.BYPASS


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
    grow = manager.grow_leases

    def refuse_hits(rows: Any, base_targets: Any, draft_targets: Any = None) -> Any:
        (lease,) = manager._leases.live_leases()
        tried.append(lease.base_pages.size)
        return None if lease.base_pages.size else grow(rows, base_targets, draft_targets)

    manager.grow_leases = refuse_hits  # type: ignore[method-assign]
    _request, starts = h.admit(T(40))
    assert starts == [0]
    assert tried == [2, 0]
    manager.grow_leases = grow  # type: ignore[method-assign]
    h.prefill()
    h.finish()
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
