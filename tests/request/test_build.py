"""`ContextCacheCoordinator.build`: one call for the usual case, and how many checkpoints conversations need."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheDeploymentKind,
    DeploymentConfig,
    DeploymentError,
    EngineConfig,
    LayerType,
    NumpyDeviceOps,
    RecurrentStateConfig,
    ResourceType,
    checkpoint_slots,
    partial_kv_bytes_per_slot,
    recurrent_bytes_per_slot,
    snapshot_pool_bytes,
)
from ctxcache.testing.runtime.deployments import Sizes, make_deployment

A, R = LayerType.ATTENTION, LayerType.RECURRENT
RECURRENT = RecurrentStateConfig(num_heads=1, head_dim=2, state_size=3, conv_dim=2, conv_kernel=2)


def engine(*layers: LayerType, batch: int = 2) -> EngineConfig:
    """A small model."""
    return EngineConfig(
        layers=layers,
        attention=(AttentionLayerConfig(1, 4),) * layers.count(A),
        recurrent=RECURRENT if R in layers else None,
        max_batch_size=batch,
        max_sequence_length=512,
        num_pages=1024 if A in layers else 0,
        tokens_per_page=16,
    )


def build(of: Any, **options: Any) -> ContextCacheCoordinator:
    return ContextCacheCoordinator.build(of, device_ops=NumpyDeviceOps(), **options)


@pytest.mark.parametrize("kind", ContextCacheDeploymentKind, ids=lambda kind: kind.value)
def test_one_call_builds_every_kind_of_deployment(kind: ContextCacheDeploymentKind) -> None:
    """A deployment, or its one engine, is enough: a request runs, and its prompt is reusable where the kind keeps prompts."""
    deployment = make_deployment(kind, Sizes())
    for said in (deployment, deployment.base) if deployment.spec is None else (deployment,):
        coordinator = build(said, max_records=7)
        assert coordinator.manager.kind is kind
        for _ in range(2):
            with coordinator.session([[1, 2, 3, 4, 5]]) as session:
                session.prefill_enqueued()
                session.prefilled([6])
        resources = coordinator.resources
        assert resources.base_cache.config == deployment.base
        assert (resources.draft_cache is None) == (deployment.draft is None)
        assert coordinator.shutdown().name == "OK"


def test_what_is_lent_is_borrowed() -> None:
    """Pools and states of the runtime's own are used themselves; a number of them that is wrong is refused."""
    hybrid = engine(R, A)
    pool = np.zeros((2, 1024, 16, 1, 4), np.float16)
    state, conv = np.zeros((2, 1, 2, 3), np.float32), np.zeros((2, 2, 2), np.float16)
    coordinator = build(hybrid, kv_pools=[pool], recurrent=[state], conv=[conv])
    cache = coordinator.resources.base_cache
    assert cache.kv_pool(1) is pool
    assert cache.recurrent_state(0) is state
    assert cache.conv_state(0) is conv
    with pytest.raises(DeploymentError, match="recurrent"):
        build(hybrid, kv_pools=[pool])
    with pytest.raises(DeploymentError, match="EngineConfig"):
        build(7)


@pytest.mark.parametrize("layers", [(R, A), (R,)], ids=["hybrid", "recurrent"])
def test_budgets_are_given_in_slots_or_bytes_or_by_the_rule(layers: tuple[LayerType, ...]) -> None:
    """Slots are counted for both budgets alike; bytes win; without either the sizing rule counts for a batch of conversations."""
    small = engine(*layers)
    slots = [ResourceType.RECURRENT_SNAPSHOT] + [ResourceType.PARTIAL_KV_SNAPSHOT] * (A in layers)

    def capacities(**options: Any) -> list[int]:
        return [build(small, **options).manager.pool(resource).capacity for resource in slots]

    assert capacities(snapshots=5) == [5] * len(slots)
    assert capacities() == [checkpoint_slots(2, 2)] * len(slots)
    budget = 3 * recurrent_bytes_per_slot(small)
    assert capacities(snapshots=5, recurrent_snapshot_pool_bytes=budget) == [3, 5][: len(slots)]
    for wrong in (-1, 0, 2.5, "2"):
        with pytest.raises(DeploymentError):
            build(small, snapshots=wrong)


def test_bytes_of_so_many_slots() -> None:
    """The budgets pay for exactly so many slots, and for none where nothing is recurrent."""
    hybrid = engine(R, A)
    assert snapshot_pool_bytes(hybrid, 4) == {
        "recurrent_snapshot_pool_bytes": 4 * recurrent_bytes_per_slot(hybrid),
        "partial_kv_snapshot_pool_bytes": 4 * partial_kv_bytes_per_slot(hybrid),
    }
    assert set(snapshot_pool_bytes(DeploymentConfig(engine(A)), 4).values()) == {0}
    assert ContextCacheConfig(**snapshot_pool_bytes(engine(R), 2)).partial_kv_snapshot_pool_bytes == 0


class Chats:
    """Conversations over one system prompt, in turns, on a hybrid model."""

    def __init__(self, batch: int, conversations: int, slots: int) -> None:
        self.batch = batch
        self.coordinator = build(engine(R, A, batch=batch), snapshots=slots)
        self.system = list(range(1000, 1021))
        self.ask([self.system])
        self.histories = [[*self.system, 2000 + i, 2000 + i] for i in range(conversations)]
        self.ends = [0] * conversations

    def ask(self, prompts: list[list[int]]) -> list[int]:
        """Answer each with three tokens; returns where the prefills began."""
        with self.coordinator.session(prompts) as session:
            starts = session.prefill_starts
            session.prefill_enqueued()
            session.prefilled([7] * len(prompts))
            for step in range(2):
                session.before_decode()
                session.decoded([8] * len(prompts), finished=[step == 1] * len(prompts))
        return starts

    def lose(self) -> int:
        """Every conversation has a turn; returns how many of them did not begin at the end of their last answer."""
        lost = 0
        for first in range(0, len(self.histories), self.batch):
            group = range(first, min(first + self.batch, len(self.histories)))
            starts = self.ask([self.histories[i] for i in group])
            for i, start in zip(group, starts, strict=True):
                lost += start != self.ends[i]
                self.ends[i] = len(self.histories[i]) + 2  # the answer's last token has no state yet
                self.histories[i] += [7, 8, 8, 3000 + i, 5]
        return lost


@pytest.mark.parametrize(("batch", "conversations"), [(1, 1), (1, 5), (2, 4), (2, 7), (3, 6), (4, 4)])
def test_the_sizing_rule_lets_every_conversation_go_on(batch: int, conversations: int) -> None:
    """With as many slots as the rule says every turn starts at the end of the last answer, and nothing is skipped."""
    chats = Chats(batch, conversations, checkpoint_slots(batch, conversations))
    chats.lose()
    assert [chats.lose() for _ in range(5)] == [0] * 5
    assert chats.coordinator.metrics().hybrid_snapshot_pressure_skips == 0


def test_far_fewer_slots_lose_checkpoints() -> None:
    """The rule is not idle: with a slot a conversation some turns begin elsewhere."""
    chats = Chats(1, 5, 5)
    chats.lose()
    assert chats.lose() > 0


@pytest.mark.parametrize("layers", [(R, A), (R,)], ids=["hybrid", "recurrent"])
def test_pressure_is_told_at_powers_of_two(layers: tuple[LayerType, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Skips 1, 2, 4 and 8 are logged, each with the budget that is short and the slots that would do; others are not."""
    coordinator = build(engine(*layers, batch=3), snapshots=2)
    with caplog.at_level(logging.WARNING, logger="ctxcache"):
        for turn in range(9):
            with coordinator.session([[i + 10 * turn] * 5 for i in range(1, 4)]) as session:
                session.prefill_enqueued()
                session.prefilled([7] * 3)
    assert coordinator.metrics().hybrid_snapshot_pressure_skips == 9
    said = [record.getMessage() for record in caplog.records]
    budgets = ["recurrent_snapshot_pool_bytes", "partial_kv_snapshot_pool_bytes"][: len(layers)]
    assert len(said) == 4 * len(budgets)
    assert [int(re.findall(r"\((\d+) so far\)", line)[0]) for line in said[:: len(budgets)]] == [1, 2, 4, 8]
    for line, budget in zip(said, budgets * 4, strict=True):
        assert budget in line
        assert "5 tokens" in line
        assert "3 in all" in line
