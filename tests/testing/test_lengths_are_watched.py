"""What the testing runtime says of lengths: each of its checks is given a library that breaks the rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ctxcache import ContextCacheCoordinator, DecodingKvHeadroom, RequestHandle
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.request.room import Room
from ctxcache.testing.runtime.deployments import Sizes
from ctxcache.testing.runtime.lengths import LengthRules
from ctxcache.testing.runtime.probes import probe_lengths
from ctxcache.testing.runtime.runtime import USUAL_SIZES, FakeRuntime
from ctxcache.testing.runtime.steps import RequestEnded
from ctxcache.testing.simulate import draw_episode

STEM = [1, 2, 0, 1, 1, 0] * 5


def begun(kind: Kind, length: int) -> FakeRuntime:
    """A runtime with one prompt, prefilled."""
    runtime = FakeRuntime(kind)
    runtime.begin([STEM[:length]])
    runtime.prefill()
    return runtime


def test_the_rules_by_hand() -> None:
    """Rows of 30 tokens in pages of 4, the draft's of 26."""
    rules = LengthRules(USUAL_SIZES, has_pages=True)
    assert rules.targets(Mode.EAGLE, [10, 29, 24], None) == [(13, 14), (30, 26), (27, 26)]
    assert rules.targets(Mode.EAGLE, [10, 30], None) is None
    assert rules.targets(Mode.VANILLA, [29], None) == [(30, 26)]
    assert rules.targets(Mode.VANILLA, [29], DecodingKvHeadroom(2)) is None
    assert rules.targets(Mode.VANILLA, [28], DecodingKvHeadroom(2)) == [(30, 26)]
    lease: Any = dataclasses.make_dataclass("Lease", ["base_pages", "draft_pages"])(np.zeros(8), np.zeros(7))
    assert rules.wrong_capacities(Mode.EAGLE, lease, (30, 26), (30, 26)) == ""
    assert rules.wrong_capacities(Mode.VANILLA, lease, (30, 30), (30, 26)) == ""
    for found in ((32, 26), (30, 28), (29, 26)):
        assert "the pages reach (30, 26)" in rules.wrong_capacities(Mode.EAGLE, lease, found, None)
    lease.base_pages = np.zeros(3)
    assert "a step needs (13, 14)" in rules.wrong_capacities(Mode.EAGLE, lease, (12, 26), (13, 14))


def test_a_runtime_that_is_told_of_more_room_than_there_is_writes_there_and_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Capacities of whole pages: they are wrong, and the model's writes behind the longest are too."""
    aim = Room.aim

    def roomy(self: Room, *arguments: Any, **options: Any) -> Any:
        targets = aim(self, *arguments, **options)
        targets.capacity[:] = np.maximum(targets.capacity, targets.base_pages * 4)
        return targets

    monkeypatch.setattr(Room, "aim", roomy)
    runtime = begun(Kind.SHARED_KV, 28)
    assert "slot 0: the capacities are (32, 32) tokens, and the pages reach (30, 30)" in runtime.violations
    runtime.grow()
    runtime.compute_step([3])
    runtime.wait()
    assert any("step: slot 0 writes up to 31, and its pages end at 30" in said for said in runtime.violations)
    runtime.abandon()


def test_a_step_behind_the_longest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a library that prepares it, and of one that refuses where there is room."""
    runtime = begun(Kind.VANILLA, 29)
    runtime.decode()
    with monkeypatch.context() as patch:
        patch.setattr(ContextCacheCoordinator, "can_prepare_decode_step", lambda *_, **__: np.array([True]))
        patch.setattr(runtime.coordinator, "prepare_decode_step", lambda *_, **__: Status.OK)
        runtime.grow()
    assert runtime.violations == ["a step was prepared that would compute beyond the longest sequence"]
    runtime.abandon()
    runtime = begun(Kind.VANILLA, 28)
    with monkeypatch.context() as patch:
        patch.setattr(ContextCacheCoordinator, "can_prepare_decode_step", lambda *_, **__: np.array([False]))
        patch.setattr(runtime.coordinator, "prepare_decode_step", lambda *_, **__: Status.REQUEST_FAILED)
        with pytest.raises(RequestEnded):
            runtime.grow()
    assert runtime.violations == [
        "a step was refused for which there is room in every row, and pages are free",
    ]
    runtime.abandon()


def test_a_commit_that_is_not_refused_and_capacities_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe asks in speculative modes; what the handle says is held against what its sequences say."""
    runtime = begun(Kind.SHARED_KV, 28)
    runtime.grow()
    runtime.compute_step([1])
    runtime.wait()
    probe_lengths(runtime)
    assert runtime.violations == []
    with monkeypatch.context() as patch:
        patch.setattr(runtime.coordinator, "complete_decode_step", lambda *_, **__: Status.OK)
        probe_lengths(runtime)
    assert runtime.violations == ["a commit beyond the pages while a step is over gave OK; it must be ContractError"]
    monkeypatch.setattr(RequestHandle, "capacities", np.array([7]))
    runtime.check_capacities()
    assert runtime.violations[1:] == ["capacities are [7], and the sequences say otherwise"]
    runtime.abandon()


@pytest.mark.parametrize("kind", [Kind.EAGLE, Kind.HYBRID_MTP, Kind.SHARED_KV, Kind.VANILLA])
def test_the_guard_sees_all_pools_of_every_kind(kind: Kind) -> None:
    """A free page of the base, and one of the draft where it has one; a right step is left in peace."""
    runtime = begun(kind, 10)
    runtime.decode([0])
    assert runtime.guard.violations == []
    caches = [runtime.resources.base_cache, runtime.resources.draft_cache]
    spoiled = [cache for cache in caches if cache is not None]
    for cache in spoiled:
        np.asarray(cache.kv_pools[-1])[1, cache.num_pages - 3, 1] += 1
    runtime.decode([0])
    assert [violation.split(",")[0] for violation in runtime.guard.violations] == [
        f"{role} page {cache.num_pages - 3}" for role, cache in zip(("base", "draft"), spoiled, strict=False)
    ]
    assert all("values of token 1" in said and "it is a free page" in said for said in runtime.guard.violations)
    runtime.finish()


def test_random_lives_go_to_the_end_of_their_rows() -> None:
    """Longest lengths that are no whole number of pages, and drafts that end earlier, are drawn often."""
    sizes = [draw_episode(seed, number).sizes for seed in range(3) for number in range(40)]
    assert sum(size.max_tokens % size.tokens_per_page != 0 for size in sizes) > 40
    assert sum(size.longest_draft < size.max_tokens for size in sizes) > 60
    assert all(size.longest_prompt <= min(size.max_tokens - 1, size.longest_draft) for size in sizes)
    assert Sizes(max_tokens=8).longest_draft == 8
