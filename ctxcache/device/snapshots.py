"""Snapshot slots: recurrent state and partly filled pages, saved at exact lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ctxcache.arguments import Int32s, as_int32s, as_integer
from ctxcache.config import DTYPE_BYTES, DeploymentConfig, EngineConfig
from ctxcache.device.arrays import ArrayView, Home, check_reachable, view_array
from ctxcache.device.checks import check_engine_or_deployment
from ctxcache.device.compiled_checks import are_distinct_slots, are_sound_jobs, are_within
from ctxcache.device.kv_pools import HybridCacheManager, home_of
from ctxcache.device.ops import ABSENT, DeviceOps, HiddenRow, SnapshotJobs
from ctxcache.device.ownership import Ownership
from ctxcache.errors import ContractError, DeploymentError, InvariantError
from ctxcache.ids import SpecDecodeMode

_BUDGET_LIMIT = (1 << 63) - 1
"""Bytes that a 64-bit address space can hold."""


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


def _engines(config: EngineConfig | DeploymentConfig) -> tuple[EngineConfig, EngineConfig | None]:
    """The base, and the draft where snapshots hold something of it."""
    check_engine_or_deployment("config", config)
    if isinstance(config, EngineConfig):
        return config, None
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


@dataclass(frozen=True, slots=True)
class StatePart:
    """State of one recurrent layer, live and saved.

    Attributes:
        live: array of the cache, addressed by slot.
        saved: device `uint8[num_recurrent_slots, slot_bytes]`.
        slot_bytes: bytes of one slot, the same on both sides.
    """

    live: Any
    saved: Any
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class PagePart:
    """Pages of one attention layer, live and saved.

    Attributes:
        live: pool of the cache, `[2, num_pages, P, heads, dim]`.
        saved: device `uint8[num_partial_kv_slots, 2, page_bytes]`.
        num_pages: pages of the pool.
        page_bytes: bytes of K (and as many of V) of one page.
        token_bytes: bytes of K (and as many of V) of one token.
        is_draft: whether the pool is the draft's.
    """

    live: Any
    saved: Any
    num_pages: int
    page_bytes: int
    token_bytes: int
    is_draft: bool


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
        device_ops: DeviceOps | None = None,
    ) -> None:
        """Allocate as many slots as the budgets pay for.

        Args:
            config: an engine, or a whole deployment.
            base_cache: pools of the base engine.
            draft_cache: pools of the draft engine; needed with MTP.
            recurrent_snapshot_pool_bytes: budget of the recurrent slots.
            partial_kv_snapshot_pool_bytes: budget of the partial-KV slots; unused without attention.
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
            "recurrent_snapshot_pool_bytes", recurrent_snapshot_pool_bytes, recurrent_bytes_per_slot(config)
        )
        self.num_partial_kv_slots = _count_slots(
            "partial_kv_snapshot_pool_bytes", partial_kv_snapshot_pool_bytes, partial_kv_bytes_per_slot(config)
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
    def home(self) -> Home:
        """Where the ops that allocated the slots work."""
        return home_of(self.device_ops, self.base_cache)

    def _page_part(self, engine: EngineConfig, cache: HybridCacheManager, index: int) -> PagePart:
        token_bytes = _token_bytes(engine)[index]
        page_bytes = engine.tokens_per_page * token_bytes
        saved = self._allocate(self.num_partial_kv_slots, 2, page_bytes)
        is_draft = cache is not self.base_cache
        return PagePart(cache.kv_pools[index], saved, cache.num_pages, page_bytes, token_bytes, is_draft)

    def _allocate(self, *shape: int) -> Any:
        return self.device_ops.allocate(shape, "uint8")


def _count_slots(name: str, budget_bytes: int, slot_bytes: int) -> int:
    budget_bytes = as_integer(name, budget_bytes, 0, _BUDGET_LIMIT + 1, error=DeploymentError)
    if slot_bytes == 0:
        return 0
    if budget_bytes < slot_bytes:
        raise DeploymentError(
            f"{name} is {budget_bytes} and one slot needs {slot_bytes} bytes; "
            f"give a multiple of {slot_bytes}, one for each checkpoint to keep"
        )
    return budget_bytes // slot_bytes


def check_jobs(storage: HybridSnapshotStorage, jobs: SnapshotJobs, *, to_snapshots: bool) -> Int32s:
    """Check jobs against the storage and pack them, one row a field: `int32[JOB_FIELDS, n]`, as in `SnapshotJobs`.

    Args:
        storage: whose slots and pages the jobs name.
        jobs: what to move.
        to_snapshots: whether snapshots are the destination (capture) or the source (restore).

    Raises:
        ContractError: fields of different lengths, an index out of range, a page that is missing, or two jobs that
            write the same place. Nothing has been enqueued.
    """
    fields = (
        as_int32s("slots", jobs.slots),
        as_int32s("recurrent_snapshot_slots", jobs.recurrent_snapshot_slots),
        as_int32s("partial_kv_snapshot_slots", jobs.partial_kv_snapshot_slots),
        as_int32s("base_pages", jobs.base_pages),
        as_int32s("draft_pages", jobs.draft_pages),
        as_int32s("num_tokens", jobs.num_tokens),
    )
    lengths = [len(field) for field in fields]
    if lengths.count(lengths[0]) != len(lengths):
        raise ContractError(f"jobs have fields of lengths {lengths}; give one entry per job")
    packed = np.concatenate(fields).reshape(len(fields), -1)
    if not are_sound_jobs(packed, storage.job_limits, to_snapshots):
        _refuse_jobs(packed, storage.job_limits, to_snapshots=to_snapshots)
    return packed


def _refuse_jobs(packed: Int32s, limits: tuple[int, ...], *, to_snapshots: bool) -> None:
    """Find what is wrong with jobs, and raise."""
    slots, recurrent, partial, base_pages, draft_pages, num_tokens = packed
    num_slots, num_recurrent, num_partial, num_base_pages, num_draft_pages, tokens_limit = limits
    moves_state, moves_pages = recurrent != ABSENT, (partial != ABSENT) & (num_tokens > 0)
    _check_range("slots", slots[moves_state], num_slots)
    _check_range("recurrent_snapshot_slots", recurrent[moves_state], num_recurrent)
    _check_range("partial_kv_snapshot_slots", partial[partial != ABSENT], num_partial)
    _check_range("num_tokens", num_tokens[partial != ABSENT], tokens_limit)
    _check_range("base_pages", base_pages[moves_pages], num_base_pages)
    destinations = {
        "recurrent_snapshot_slots": recurrent[moves_state],
        "partial_kv_snapshot_slots": partial[moves_pages],
    }
    if not to_snapshots:
        destinations = {"slots": slots[moves_state], "base_pages": base_pages[moves_pages]}
    if num_draft_pages:
        _check_range("draft_pages", draft_pages[moves_pages], num_draft_pages)
        if not to_snapshots:
            destinations["draft_pages"] = draft_pages[moves_pages]
    for name, written in destinations.items():
        if len(np.unique(written)) != len(written):
            raise ContractError(f"jobs.{name} is {written.tolist()}; two jobs may not write the same place")
    raise InvariantError(f"jobs were taken for wrong, and nothing is wrong with them: {packed.tolist()}")


def check_slots(cache: HybridCacheManager, slots: Int32s) -> None:
    """Check that slots are in range and unique, or raise `ContractError`."""
    if are_distinct_slots(slots, cache.max_batch):
        return
    _check_range("slots", slots, cache.max_batch)
    raise ContractError(f"slots are {slots.tolist()}; name each once")


def check_hidden_row(storage: HybridSnapshotStorage, snapshot_slot: int, row: HiddenRow) -> ArrayView:
    """Check one hidden row and its snapshot slot, and describe the array.

    Raises:
        ContractError: a deployment without MTP, an index out of range, or an array of another width or element size,
            with gaps inside a row, or out of the ops' reach.
    """
    if storage.hidden_rows is None:
        raise ContractError("this deployment saves no hidden rows; only hybrid engines with MTP do")
    as_integer("snapshot_slot", snapshot_slot, 0, storage.num_recurrent_slots, rule="there are recurrent snapshots")
    view = view_array(row.hidden_states)
    hidden_size, itemsize = storage.hidden_shape
    if len(view.shape) != 3 or view.shape[2] != hidden_size or view.itemsize != itemsize:
        raise ContractError(
            f"hidden states have shape {view.shape} and elements of {view.itemsize} bytes; "
            f"the engine's are [batch, rows, {hidden_size}] and {itemsize}"
        )
    if not view.is_contiguous_from(2):
        raise ContractError(f"hidden states have strides {view.strides}; each row must be contiguous")
    as_integer("hidden slot", row.slot, 0, view.shape[0], rule="the array has")
    as_integer("hidden row", row.row, 0, view.shape[1], rule="the array has")
    check_reachable("hidden states", row.hidden_states, view, storage.home)
    return view


def _check_range(name: str, values: Int32s, limit: int) -> None:
    if not are_within(values, limit):
        raise ContractError(f"{name} hold {values.min()} .. {values.max()}; they must be in [0, {limit})")
