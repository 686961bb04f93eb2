"""One small deployment of every kind, on host memory: what the fault sweep and the simulation run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctxcache.config import (
    AttentionLayerConfig,
    ContextCacheConfig,
    DeploymentConfig,
    EngineConfig,
    RecurrentStateConfig,
    SpecDecodeConfig,
)
from ctxcache.device.ops import RuntimeDeviceOps
from ctxcache.device.snapshots import partial_kv_bytes_per_slot, snapshot_pool_bytes
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import LayerType, SpecDecodeMode

HASH_KEY = bytes(range(16))

_A, _R = LayerType.ATTENTION, LayerType.RECURRENT

_LAYERS: dict[Kind, tuple[LayerType, ...]] = {
    Kind.VANILLA: (_A, _A),
    Kind.PURE_RECURRENT: (_R, _R),
    Kind.HYBRID: (_R, _A),
    Kind.EAGLE: (_A, _A),
    Kind.HYBRID_MTP: (_A, _R),
    Kind.SHARED_KV: (_A, _A),
}

_SPECS: dict[Kind, SpecDecodeConfig] = {
    Kind.EAGLE: SpecDecodeConfig(SpecDecodeMode.EAGLE, drafting_top_k=2, drafting_step=2, verify_size=3),
    Kind.HYBRID_MTP: SpecDecodeConfig(SpecDecodeMode.MTP, drafting_step=3, verify_size=3),
    Kind.SHARED_KV: SpecDecodeConfig(SpecDecodeMode.SHARED_KV, drafting_step=2),
}

SPECULATIVE_MODES: dict[Kind, Mode] = {
    Kind.EAGLE: Mode.EAGLE,
    Kind.HYBRID_MTP: Mode.MTP,
    Kind.SHARED_KV: Mode.SHARED_KV,
}
"""The mode that a deployment is made for, where it is not `VANILLA`."""

STEP_TOKENS: dict[Mode, tuple[int, int]] = {
    Mode.VANILLA: (1, 0),
    Mode.EAGLE: (3, 4),
    Mode.MTP: (3, 3),
    Mode.SHARED_KV: (3, 0),
}
"""Positions beyond the committed ones that a step of these deployments writes, base and draft: what default headroom is for."""

_ATTENTION = AttentionLayerConfig(num_kv_heads=1, head_dim=4)  # fp16: one 8-byte word a token
_RECURRENT = RecurrentStateConfig(num_heads=1, head_dim=3, state_size=2, conv_dim=2, conv_kernel=4)
_HIDDEN_SIZE = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """How small a deployment is. Pages of 0 take one full row for every sequence of the largest batch.

    Attributes:
        max_tokens: the longest sequence; no whole number of pages, so that a last page is never full.
        max_draft_tokens: the draft's longest, which may be shorter; 0 for the base's.
        layer_groups: how often the base repeats its kind's layers.
        partial_snapshots: partial-KV snapshots; `None` for as many as others.
    """

    tokens_per_page: int = 4
    max_tokens: int = 30
    max_draft_tokens: int = 0
    max_batch: int = 3
    num_pages: int = 0
    num_draft_pages: int = 0
    snapshots: int = 6
    max_records: int = 1024
    layer_groups: int = 1
    partial_snapshots: int | None = None

    @property
    def longest_draft(self) -> int:
        """The draft's longest sequence."""
        return min(self.max_draft_tokens or self.max_tokens, self.max_tokens)

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that every deployment of this size admits."""
        return min(self.max_tokens - 1, self.longest_draft)


def make_deployment(kind: Kind, sizes: Sizes) -> DeploymentConfig:
    """Return a deployment of a kind: one or two layers of each type, one word a token."""
    layers = _LAYERS[kind] * sizes.layer_groups
    base = EngineConfig(
        layers=layers,
        attention=(_ATTENTION,) * layers.count(_A),
        recurrent=_RECURRENT if _R in layers else None,
        max_batch_size=sizes.max_batch,
        max_sequence_length=sizes.max_tokens,
        num_pages=sizes.num_pages if _A in layers else 0,
        tokens_per_page=sizes.tokens_per_page,
        hidden_size=_HIDDEN_SIZE if kind is Kind.HYBRID_MTP else 0,
    )
    draft = None
    if kind in (Kind.EAGLE, Kind.HYBRID_MTP):
        draft = EngineConfig(
            layers=(_A,),
            attention=(_ATTENTION,),
            max_batch_size=sizes.max_batch,
            max_sequence_length=sizes.longest_draft,
            num_pages=sizes.num_draft_pages,
            tokens_per_page=sizes.tokens_per_page,
        )
    return DeploymentConfig(base, draft, _SPECS.get(kind))


def make_config(deployment: DeploymentConfig, sizes: Sizes, **settings: Any) -> ContextCacheConfig:
    """Return a configuration whose budgets pay for exactly the wanted snapshots; `settings` are further ones."""
    budgets = snapshot_pool_bytes(deployment, sizes.snapshots)
    if sizes.partial_snapshots is not None:
        budgets["partial_kv_snapshot_pool_bytes"] = sizes.partial_snapshots * partial_kv_bytes_per_slot(deployment)
    return ContextCacheConfig(max_records=sizes.max_records, **budgets, hash_key=HASH_KEY, **settings)


def make_hidden_states(deployment: DeploymentConfig, ops: RuntimeDeviceOps) -> Any:
    """Allocate the base's hidden rows, `[batch, 2, hidden_size]`; `None` where nothing saves them."""
    base = deployment.base
    return ops.allocate((base.max_batch_size, 2, base.hidden_size), base.hidden_dtype) if base.hidden_size else None
