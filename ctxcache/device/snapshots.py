"""Snapshot slots: recurrent state and partly filled pages, saved at exact lengths."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any, TypedDict

from ctxcache.arguments import as_integer, describe
from ctxcache.config import DTYPE_BYTES, DeploymentConfig, EngineConfig
from ctxcache.device.arrays import ArrayView, Location, view_array
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.ops import DeviceOps, PagePart, StatePart, location_of
from ctxcache.device.ownership import Ownership
from ctxcache.errors import DeploymentError
from ctxcache.ids import SpecDecodeMode

_BUDGET_LIMIT = 1 << 63
"""Budgets are below this many bytes."""


def recurrent_bytes_per_slot(config: EngineConfig | DeploymentConfig) -> int:
    """Bytes of one recurrent snapshot: state and convolution state of every recurrent layer.

    For a whole deployment with MTP also one boundary hidden row of the base. 0 where nothing is recurrent.
    """
    base, draft = _engines(config)
    hidden_bytes = 0 if draft is None else base.hidden_size * DTYPE_BYTES[base.hidden_dtype]
    return sum(_state_bytes(base)) * base.num_recurrent_layers + hidden_bytes


def partial_kv_bytes_per_slot(config: EngineConfig | DeploymentConfig) -> int:
    """Bytes of one partial-KV snapshot: a page of K and V of every attention layer.

    For a whole deployment with MTP of base and draft. 0 where there is no attention.
    """
    return sum(
        2 * engine.tokens_per_page * token_bytes
        for engine in _engines(config)
        if engine is not None
        for token_bytes in _token_bytes(engine)
    )


class SnapshotBudgets(TypedDict):
    """Two fields of `ContextCacheConfig`, in bytes."""

    recurrent_snapshot_pool_bytes: int
    partial_kv_snapshot_pool_bytes: int


def checkpoint_slots(max_batch_size: int, conversations: int) -> int:
    """How many checkpoints let so many live conversations go on, each from the end of its last answer.

    A turn uses the checkpoint that it starts from and makes two, at the ends of its prompt and of its answer: three, until
    every other conversation has had its turn. Beside them one a running sequence, which is captured before anything is let
    go, and one for a prompt that all share.
    """
    return max_batch_size + 1 + 3 * conversations


def snapshot_pool_bytes(config: EngineConfig | DeploymentConfig, num_slots: int) -> SnapshotBudgets:
    """The budgets that pay for exactly so many checkpoints, as arguments of `ContextCacheConfig`; 0 where nothing is recurrent.

    How many conversations need: `checkpoint_slots`.

    Raises:
        DeploymentError: no configuration, or no number of slots.
    """
    num_slots = as_integer("num_slots", num_slots, error=DeploymentError)
    recurrent = recurrent_bytes_per_slot(config)
    return {
        "recurrent_snapshot_pool_bytes": num_slots * recurrent,
        "partial_kv_snapshot_pool_bytes": num_slots * partial_kv_bytes_per_slot(config) if recurrent else 0,
    }


def _engines(config: EngineConfig | DeploymentConfig) -> tuple[EngineConfig, EngineConfig | None]:
    """The base, and the draft where snapshots hold something of it."""
    if isinstance(config, EngineConfig):
        return config, None
    if not isinstance(config, DeploymentConfig):
        raise DeploymentError(f"config is {describe(config)}; give an EngineConfig or a DeploymentConfig")
    return config.base, config.draft if config.spec_mode is SpecDecodeMode.MTP else None


def _state_bytes(engine: EngineConfig) -> tuple[int, int]:
    """Bytes of the state and of the convolution state of one slot of one recurrent layer."""
    layer = engine.recurrent
    if layer is None:
        return 0, 0
    return (
        layer.num_heads * layer.head_dim * layer.state_size * DTYPE_BYTES[layer.dtype],
        layer.conv_dim * layer.conv_kernel * DTYPE_BYTES[layer.conv_dtype],
    )


def _token_bytes(engine: EngineConfig) -> list[int]:
    """Bytes of the keys (and as many of the values) of one token, for each attention layer."""
    return [layer.num_kv_heads * layer.head_dim * DTYPE_BYTES[engine.kv_dtype] for layer in engine.attention]


class HybridSnapshotStorage(Ownership):
    """Preallocated snapshot slots between a model's live state and the records that keep it.

    Slots are counted from byte budgets; whatever a slot allocates is charged to its budget, without padding.

    Attributes:
        base_cache: the base's pools. Borrowed.
        draft_cache: the draft's pools where snapshots hold draft pages (MTP), else `None`. Borrowed.
        num_recurrent_slots: recurrent snapshots, each every recurrent layer's state (and with MTP a hidden row).
        num_partial_kv_slots: partial-KV snapshots; 0 for a model without attention.
        state_parts: state and convolution state of each recurrent layer.
        page_parts: each attention layer of the base, then of the draft.
        job_limits: what the entries of each field of `SnapshotJobs` must be below.
        hidden_rows: device `uint8[num_recurrent_slots, bytes of a hidden row]` with MTP, else `None`.
        device_ops: the ops that allocated the slots.
    """

    def __init__(
        self,
        config: EngineConfig | DeploymentConfig,
        base_cache: HybridCacheManager,
        draft_cache: HybridCacheManager | None = None,
        *,
        recurrent_snapshot_pool_bytes: int,
        partial_kv_snapshot_pool_bytes: int = 0,
        enabled: bool = True,
        device_ops: DeviceOps | None = None,
    ) -> None:
        """Allocate as many slots as the budgets pay for.

        Args:
            config: an engine, or a whole deployment.
            base_cache: pools of the base engine.
            draft_cache: pools of the draft engine; needed with MTP.
            recurrent_snapshot_pool_bytes: budget of the recurrent slots.
            partial_kv_snapshot_pool_bytes: budget of the partial-KV slots; unused without attention.
            enabled: whether anything is cached; there is no slot otherwise, whatever the budgets.
            device_ops: who allocates; the base cache's ops when `None`.

        Raises:
            DeploymentError: a model without recurrent layers, a missing draft cache, or a budget below one slot.
        """
        base, draft = _engines(config)
        if not base.num_recurrent_layers:
            raise DeploymentError("snapshots serve models with recurrent layers; this engine has attention alone")
        if draft is not None and draft_cache is None:
            raise DeploymentError("MTP snapshots hold draft pages; pass the draft cache")
        self.base_cache = base_cache
        self.draft_cache = draft_cache if draft is not None else None
        self.device_ops: DeviceOps = base_cache.device_ops if device_ops is None else device_ops
        self.tokens_per_page = base.tokens_per_page
        self.num_recurrent_slots = _count_slots(
            "recurrent_snapshot_pool_bytes",
            recurrent_snapshot_pool_bytes,
            recurrent_bytes_per_slot(config),
            enabled=enabled,
        )
        self.num_partial_kv_slots = _count_slots(
            "partial_kv_snapshot_pool_bytes",
            partial_kv_snapshot_pool_bytes,
            partial_kv_bytes_per_slot(config),
            enabled=enabled,
        )
        slot_bytes = _state_bytes(base) * base.num_recurrent_layers
        self.state_parts = tuple(
            StatePart(live, self._allocate(self.num_recurrent_slots, num_bytes), num_bytes)
            for live, num_bytes in zip(base_cache.slot_arrays, slot_bytes, strict=True)
        )
        self.page_parts = tuple(
            self._page_part(engine, cache, i)
            for engine, cache in ((base, base_cache), (draft, self.draft_cache))
            if engine is not None and cache is not None
            for i in range(engine.num_attention_layers)
        )
        self.job_limits = (
            base_cache.max_batch,
            self.num_recurrent_slots,
            self.num_partial_kv_slots,
            base_cache.num_pages,
            0 if self.draft_cache is None else self.draft_cache.num_pages,
            self.tokens_per_page + 1,
        )
        self.hidden_rows: Any = None
        self.hidden_shape = (base.hidden_size, DTYPE_BYTES[base.hidden_dtype])
        if draft is not None:
            self.hidden_rows = self._allocate(self.num_recurrent_slots, prod(self.hidden_shape))

    @cached_property
    def hidden_rows_view(self) -> ArrayView:
        """Where `hidden_rows` lie."""
        return view_array(self.hidden_rows)

    @cached_property
    def location(self) -> Location:
        """Where the ops that allocated the slots work."""
        return location_of(self.device_ops, self.base_cache)

    def _page_part(self, engine: EngineConfig, cache: HybridCacheManager, index: int) -> PagePart:
        token_bytes = _token_bytes(engine)[index]
        page_bytes = engine.tokens_per_page * token_bytes
        saved = self._allocate(self.num_partial_kv_slots, 2, page_bytes)
        is_draft = cache is not self.base_cache
        return PagePart(cache.kv_pools[index], saved, cache.num_pages, page_bytes, token_bytes, is_draft)

    def _allocate(self, *shape: int) -> Any:
        return self.device_ops.allocate(shape, "uint8")


def _count_slots(name: str, budget_bytes: int, slot_bytes: int, *, enabled: bool) -> int:
    budget_bytes = as_integer(name, budget_bytes, 0, _BUDGET_LIMIT, error=DeploymentError)
    if slot_bytes == 0 or not enabled:
        return 0
    if budget_bytes < slot_bytes:
        raise DeploymentError(
            f"{name} is {budget_bytes} and one slot needs {slot_bytes} bytes; "
            f"give a multiple of {slot_bytes}, one for each checkpoint to keep"
        )
    return budget_bytes // slot_bytes
