"""Which engines and schemes make a deployment, and what the refusals of the others say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheDeploymentKind,
    ContextCachePhysicalResources,
    DeploymentConfig,
    DeploymentError,
    EngineConfig,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    NumpyDeviceOps,
    RecurrentStateConfig,
    SpecDecodeConfig,
    SpecDecodeMode,
    validate_context_cache_deployment,
)

ATTENTION, RECURRENT = LayerType.ATTENTION, LayerType.RECURRENT
HEADS = AttentionLayerConfig(1, 4)
STATE = RecurrentStateConfig(1, 2, 2, 2, 2)
PLAIN = EngineConfig((ATTENTION,), (HEADS,), max_sequence_length=64, tokens_per_page=16)
PURE = EngineConfig((RECURRENT,), (), STATE, max_sequence_length=64, tokens_per_page=16)
HYBRID = EngineConfig((RECURRENT, ATTENTION), (HEADS,), STATE, max_sequence_length=64, tokens_per_page=16)
WIDE = replace(HYBRID, hidden_size=8)
SPEC = {mode: SpecDecodeConfig(mode) for mode in SpecDecodeMode}
KINDS = ContextCacheDeploymentKind


@pytest.mark.parametrize(
    ("deployment", "kind"),
    [
        (DeploymentConfig(PLAIN), KINDS.VANILLA),
        (DeploymentConfig(PLAIN, None, SPEC[SpecDecodeMode.NONE]), KINDS.VANILLA),
        (DeploymentConfig(PURE), KINDS.PURE_RECURRENT),
        (DeploymentConfig(HYBRID), KINDS.HYBRID),
        (DeploymentConfig(PLAIN, PLAIN, SPEC[SpecDecodeMode.EAGLE]), KINDS.EAGLE),
        (DeploymentConfig(WIDE, PLAIN, SPEC[SpecDecodeMode.MTP]), KINDS.HYBRID_MTP),
        (DeploymentConfig(PLAIN, None, SPEC[SpecDecodeMode.SHARED_KV]), KINDS.SHARED_KV),
    ],
)
def test_the_six_kinds(deployment: DeploymentConfig, kind: ContextCacheDeploymentKind) -> None:
    """Each combination that the table of kinds has is recognised."""
    assert validate_context_cache_deployment(deployment) is kind


OTHER_PAGES = replace(PLAIN, tokens_per_page=32, num_pages=0)


@pytest.mark.parametrize(
    ("deployment", "says"),
    [
        (DeploymentConfig(PLAIN, PLAIN), "draft engine but no speculative scheme"),
        (DeploymentConfig(PLAIN, PLAIN, SPEC[SpecDecodeMode.NONE]), "draft engine but no speculative scheme"),
        (DeploymentConfig(PLAIN, None, SPEC[SpecDecodeMode.EAGLE]), "EAGLE needs a draft engine"),
        (DeploymentConfig(HYBRID, PLAIN, SPEC[SpecDecodeMode.EAGLE]), "EAGLE needs a base with attention layers only"),
        (DeploymentConfig(PURE, PLAIN, SPEC[SpecDecodeMode.EAGLE]), "EAGLE needs a base with attention layers only"),
        (DeploymentConfig(PLAIN, HYBRID, SPEC[SpecDecodeMode.EAGLE]), "EAGLE draft engine has 1 recurrent"),
        (DeploymentConfig(PLAIN, OTHER_PAGES, SPEC[SpecDecodeMode.EAGLE]), "16 tokens a page and the draft 32"),
        (DeploymentConfig(WIDE, None, SPEC[SpecDecodeMode.MTP]), "MTP needs a draft engine"),
        (DeploymentConfig(PLAIN, PLAIN, SPEC[SpecDecodeMode.MTP]), "MTP needs a base with attention and recurrent"),
        (DeploymentConfig(PURE, PLAIN, SPEC[SpecDecodeMode.MTP]), "MTP needs a base with attention and recurrent"),
        (DeploymentConfig(HYBRID, PLAIN, SPEC[SpecDecodeMode.MTP]), "hidden_size is 0"),
        (DeploymentConfig(PLAIN, PLAIN, SPEC[SpecDecodeMode.SHARED_KV]), "read the base's KV"),
        (DeploymentConfig(HYBRID, None, SPEC[SpecDecodeMode.SHARED_KV]), "SHARED_KV needs a base with attention"),
    ],
)
def test_every_other_combination_is_refused_by_name(deployment: DeploymentConfig, says: str) -> None:
    """The message names the scheme and what does not go with it."""
    with pytest.raises(DeploymentError, match=re.escape(says)):
        validate_context_cache_deployment(deployment)


def build(deployment: DeploymentConfig, kind: ContextCacheDeploymentKind, **changes: object) -> None:
    """Build a coordinator over fitting resources, some of them replaced."""
    ops = NumpyDeviceOps()

    def table(engine: EngineConfig) -> KVPageTable:
        return KVPageTable(engine.max_batch_size, engine.pages_per_sequence, engine.num_pages, device_ops=ops)

    parts: dict[str, object] = {
        "base_cache": HybridCacheManager(deployment.base, None, device_ops=ops),
        "base_page_table": table(deployment.base) if deployment.base.num_attention_layers else None,
    }
    if deployment.draft is not None:
        parts["draft_cache"] = HybridCacheManager(deployment.draft, None, device_ops=ops)
        parts["draft_page_table"] = table(deployment.draft)
    parts |= {name: change(ops) if callable(change) else change for name, change in changes.items()}
    config = ContextCacheConfig(recurrent_snapshot_pool_bytes=1 << 12, partial_kv_snapshot_pool_bytes=1 << 12)
    resources = ContextCachePhysicalResources(**parts)
    assert ContextCacheCoordinator(config, deployment, kind, resources, None, device_ops=ops).shutdown()


EAGLE = DeploymentConfig(PLAIN, replace(PLAIN, max_batch_size=1), SPEC[SpecDecodeMode.EAGLE])


@pytest.mark.parametrize(
    ("deployment", "kind"),
    [
        (DeploymentConfig(PLAIN), KINDS.VANILLA),
        (DeploymentConfig(PURE), KINDS.PURE_RECURRENT),
        (DeploymentConfig(HYBRID), KINDS.HYBRID),
        (EAGLE, KINDS.EAGLE),
        (DeploymentConfig(WIDE, PLAIN, SPEC[SpecDecodeMode.MTP]), KINDS.HYBRID_MTP),
        (DeploymentConfig(PLAIN, None, SPEC[SpecDecodeMode.SHARED_KV]), KINDS.SHARED_KV),
    ],
)
def test_fitting_resources_are_taken_and_another_kind_is_not(
    deployment: DeploymentConfig, kind: ContextCacheDeploymentKind
) -> None:
    """Each kind is built from its own resources; announced as any other kind it is refused, naming both."""
    build(deployment, kind)
    for other in set(KINDS) - {kind}:
        with pytest.raises(DeploymentError, match=rf"{kind.name}.*{other.name}"):
            build(deployment, other)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"draft_cache": None}, "draft_cache"),
        ({"draft_page_table": None}, "draft_page_table"),
        ({"draft_page_table": lambda ops: KVPageTable(1, 4, 5, device_ops=ops)}, "num_pages 5"),
        ({"draft_page_table": lambda ops: KVPageTable(2, 4, 4, device_ops=ops)}, "max_batch 2"),
        ({"draft_page_table": lambda ops: KVPageTable(1, 3, 4, device_ops=ops)}, "max_pages_per_seq 3"),
        (
            {"draft_cache": lambda ops: HybridCacheManager(replace(PLAIN, kv_dtype="int8"), None, device_ops=ops)},
            "int8",
        ),
        ({"base_page_table": None}, "page table"),
        ({"base_page_table": lambda ops: KVPageTable(1, 4, 9, device_ops=ops)}, "num_pages 9"),
    ],
)
def test_draft_resources_that_do_not_fit_are_refused(changes: dict[str, object], says: str) -> None:
    """Missing or differing pools and tables of either side are named."""
    with pytest.raises(DeploymentError, match=says):
        build(EAGLE, KINDS.EAGLE, **changes)


def test_resources_of_a_draft_without_a_draft_are_refused() -> None:
    """A draft cache on a vanilla deployment is a mistake, not an extra."""
    with pytest.raises(DeploymentError, match="draft_cache"):
        build(
            DeploymentConfig(PLAIN),
            KINDS.VANILLA,
            draft_cache=lambda ops: HybridCacheManager(PLAIN, None, device_ops=ops),
        )


def test_base_and_draft_need_resources_of_their_own() -> None:
    """One cache or table for both sides would let a draft overwrite its base."""
    ops = NumpyDeviceOps()
    cache = HybridCacheManager(PLAIN, None, device_ops=ops)
    table = KVPageTable(1, PLAIN.pages_per_sequence, PLAIN.num_pages, device_ops=ops)
    for shared in ({"base_cache": cache, "draft_cache": cache}, {"base_page_table": table, "draft_page_table": table}):
        with pytest.raises(DeploymentError, match="share"):
            build(EAGLE, KINDS.EAGLE, **shared)
