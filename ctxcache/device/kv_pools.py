"""The pools of one model: paged keys and values, and the state and lengths that are addressed by slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import NOT_ITERABLE, as_int32s, as_integer, check_mapping, describe, is_integer
from ctxcache.config import DTYPE_BYTES, EngineConfig
from ctxcache.device.arrays import ArrayView, view_array, whereabouts
from ctxcache.device.defaults import ops_or_default
from ctxcache.device.op_checks import check_batches
from ctxcache.device.ops import RuntimeDeviceOps, location_of
from ctxcache.device.ownership import Ownership
from ctxcache.errors import ContractError, DeploymentError
from ctxcache.ids import LayerType


def kv_pool_shape(config: EngineConfig, attention_index: int) -> tuple[int, int, int, int, int]:
    """Shape of the pool of one attention layer: `[2, num_pages, tokens_per_page, num_kv_heads, head_dim]`, K then V."""
    layer = config.attention[attention_index]
    return (2, config.num_pages, config.tokens_per_page, layer.num_kv_heads, layer.head_dim)


def state_shapes(config: EngineConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a recurrent layer's state `[max_batch, num_heads, head_dim, state_size]` and convolution state.

    The convolution state is `[max_batch, conv_dim, conv_kernel]`. Both are empty for a model without recurrent layers.
    """
    layer = config.recurrent
    if layer is None:
        return (), ()
    batch = config.max_batch_size
    return (batch, layer.num_heads, layer.head_dim, layer.state_size), (batch, layer.conv_dim, layer.conv_kernel)


def _layouts(config: EngineConfig) -> tuple[tuple[str, str, list[tuple[int, ...]]], ...]:
    """By argument of `from_arrays`: the dtype of its arrays, and the shape of each."""
    pools: list[tuple[int, ...]] = [kv_pool_shape(config, i) for i in range(config.num_attention_layers)]
    state_shape, conv_shape = state_shapes(config)
    layer, count = config.recurrent, config.num_recurrent_layers
    state_dtype, conv_dtype = ("", "") if layer is None else (layer.dtype, layer.conv_dtype)
    return (
        ("kv_pools", config.kv_dtype, pools),
        ("recurrent", state_dtype, [state_shape] * count),
        ("conv", conv_dtype, [conv_shape] * count),
    )


class HybridCacheManager(Ownership):
    """The device memory of one model's context: KV pools per attention layer, state per recurrent layer, lengths.

    Attributes:
        config: the engine's geometry.
        stream: the stream that it was built for. Borrowed.
        device_ops: the ops that allocated it; used by the convenience methods.
        kv_lengths: device `int32[max_batch]`, tokens of each slot. The runtime advances them; the coordinator
            only resets and compacts them.
        active_batch_size: slots in use; host state, set by `reset_lengths` and `compact_slot_state`.
        role: "base" or "draft"; names the cache's fault points.
        kv_pools: the pools of the attention layers, in model order; a borrowed one is the very object that was lent.
        num_pages: pages of each of them; 0 for a model without attention layers.
        max_batch: slots.
    """

    def __init__(self, config: EngineConfig, stream: Any, *, device_ops: RuntimeDeviceOps | None = None) -> None:
        _check_engine(config)
        ops = ops_or_default(device_ops)
        pools, states, convs = (
            [ops.allocate(shape, dtype) for shape in shapes] for _, dtype, shapes in _layouts(config)
        )
        self._set_up(config, stream, ops, (pools, states, convs))

    @classmethod
    def from_arrays(
        cls,
        config: EngineConfig,
        *,
        kv_pools: Sequence[Any] = (),
        recurrent: Sequence[Any] = (),
        conv: Sequence[Any] = (),
        stream: Any = None,
        device_ops: RuntimeDeviceOps | None = None,
    ) -> Self:
        """Borrow the arrays that a runtime owns. They are kept alive, never copied and never freed.

        Args:
            config: the engine's geometry, which the arrays must have.
            kv_pools: one array per attention layer, in model order, of `kv_pool_shape`.
            recurrent: one state array per recurrent layer, in model order, of `state_shapes`.
            conv: one convolution state array per recurrent layer.
            stream: the stream that the cache is used on.
            device_ops: ops for the lengths and the convenience methods; `NumpyDeviceOps()` for host arrays.

        Raises:
            DeploymentError: no engine, a wrong number of arrays, or one of another shape, element size or device, one
                that has gaps, or one that is read-only.
        """
        _check_engine(config)
        arrays = (_as_list("kv_pools", kv_pools), _as_list("recurrent", recurrent), _as_list("conv", conv))
        ops = ops_or_default(device_ops)
        cache = cls.__new__(cls)
        cache._set_up(config, stream, ops, arrays)  # noqa: SLF001 - its own
        cache._check_borrowed()  # noqa: SLF001 - its own
        return cache

    def _set_up(
        self,
        config: EngineConfig,
        stream: Any,
        ops: RuntimeDeviceOps,
        arrays: tuple[list[Any], list[Any], list[Any]],
    ) -> None:
        self.config = config
        self.stream = stream
        self.device_ops = ops
        self.role = "base"
        self.active_batch_size = 0
        pools, self._states, self._convs = arrays
        self.kv_pools = tuple(pools)
        self.num_pages = config.num_pages if pools else 0
        self.max_batch = config.max_batch_size
        of_type = {kind: [i for i, layer in enumerate(config.layers) if layer is kind] for kind in LayerType}
        self._attention_index = {layer: i for i, layer in enumerate(of_type[LayerType.ATTENTION])}
        self._recurrent_index = {layer: i for i, layer in enumerate(of_type[LayerType.RECURRENT])}
        self.kv_lengths = ops.allocate((config.max_batch_size,), "int32")

    @cached_property
    def lengths_view(self) -> ArrayView:
        """Where `kv_lengths` lies."""
        return view_array(self.kv_lengths)

    @property
    def slot_arrays(self) -> tuple[Any, ...]:
        """What the recurrent layers keep per slot: state and convolution state of each layer, in model order."""
        return tuple(array for pair in zip(self._states, self._convs, strict=True) for array in pair)

    def kv_pool(self, layer: int) -> Any:
        """Return the pool of attention layer `layer` (absolute index), `[2, pages, P, heads, dim]`, K half first.

        Raises:
            ContractError: no attention layer stands there.
        """
        return self.kv_pools[self._index_of(layer, self._attention_index, "an attention")]

    def recurrent_state(self, layer: int) -> Any:
        """Return the state of recurrent layer `layer` (absolute index), `[max_batch, heads, dim, state]`, by slot.

        Raises:
            ContractError: no recurrent layer stands there.
        """
        return self._states[self._index_of(layer, self._recurrent_index, "a recurrent")]

    def conv_state(self, layer: int) -> Any:
        """Return the convolution state of recurrent layer `layer`, `[max_batch, conv_dim, conv_kernel]`, by slot.

        Raises:
            ContractError: no recurrent layer stands there.
        """
        return self._convs[self._index_of(layer, self._recurrent_index, "a recurrent")]

    def reset_for_new_sequences(self, reuse_lengths: Sequence[int] | NDArray[Any], stream: Any) -> None:
        """Enqueue new lengths, one per sequence of the new batch. See `DeviceOps.reset_lengths`."""
        self.device_ops.reset_lengths(self, as_int32s("reuse_lengths", reuse_lengths), stream)

    def commit_sequence_length(self, increment: Any, stream: Any) -> None:
        """Enqueue an advance of the active slots' lengths: for the runtime, after a step.

        Args:
            increment: tokens; one integer, at least 0, for all slots, or a device int32 array with one per active slot.
            stream: where to enqueue.

        Raises:
            ContractError: a number that is no increment, or an array that is too short or not int32.
        """
        if isinstance(increment, (int, np.integer)):
            increment = as_integer("increment", increment)
        self.device_ops.advance_lengths(self, increment, stream)

    def compact_batch_slot_state(self, mapping: Any, old_batch: int, new_batch: int, stream: Any) -> None:
        """Enqueue the move of all slot state to new slots. See `DeviceOps.compact_slot_state`.

        Args:
            mapping: old-to-new slots: a device int32 array of at least `old_batch` entries, or a host list or NumPy
                array, which is checked and uploaded.
            old_batch: slots before.
            new_batch: slots after.
            stream: where to enqueue.

        Raises:
            ContractError: batch sizes or a host mapping that no compaction can have.
        """
        old_batch, new_batch = check_batches(self, old_batch, new_batch)
        if isinstance(mapping, (np.ndarray, list, tuple)):
            entries = as_int32s("mapping", mapping)
            if isinstance(mapping, np.ndarray):
                entries = entries[:old_batch]
            checked = check_mapping("mapping", entries, old_batch, new_batch)
            # Kept until the next call: the array must outlive the enqueued move.
            self._own_mapping = self.device_ops.allocate((max(old_batch, 1),), "int32")
            mapping = self._own_mapping
            self.device_ops.upload_mapping(checked, mapping, stream)
        self.device_ops.compact_slot_state(self, mapping, old_batch, new_batch, stream)

    @staticmethod
    def _index_of(layer: int, index: dict[int, int], what: str) -> int:
        # A bool equals a layer's number, and what does not hash cannot be looked up.
        if not is_integer(layer) or layer not in index:
            raise ContractError(f"layer {layer!r} is not {what} layer; those are {sorted(index)}")
        return index[layer]

    def _check_borrowed(self) -> None:
        location = location_of(self.device_ops, self)
        lent = (self.kv_pools, self._states, self._convs)
        for (name, dtype, shapes), arrays in zip(_layouts(self.config), lent, strict=True):
            if len(arrays) != len(shapes):
                raise DeploymentError(f"{name} has {len(arrays)} arrays for {len(shapes)} layers; lend one per layer")
            for i, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
                try:
                    view = view_array(array)
                except ContractError as error:
                    raise DeploymentError(f"{name}[{i}]: {error}") from error
                _check_lent(f"{name}[{i}]", view, shape, dtype)
                where = whereabouts(array, view, location)
                if where is not None:
                    raise DeploymentError(
                        f"{name}[{i}] {where}; lend an array of that device, or pass the device_ops of its place "
                        "(NumpyDeviceOps() for host arrays)"
                    )


def _check_engine(config: EngineConfig) -> None:
    if not isinstance(config, EngineConfig):
        raise DeploymentError(f"config is {describe(config)}; give an EngineConfig")


def _as_list(name: str, values: Iterable[Any]) -> list[Any]:
    try:
        return list(iter(values))
    except NOT_ITERABLE:
        raise DeploymentError(f"{name} is {describe(values)}; lend a run with one array a layer") from None


def _check_lent(name: str, array: ArrayView, shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape:
        raise DeploymentError(f"{name} has shape {array.shape}; the engine's is {shape}")
    if array.itemsize != DTYPE_BYTES[dtype]:
        raise DeploymentError(
            f"{name} has elements of {array.itemsize} bytes; {dtype} has {DTYPE_BYTES[dtype]}, as the engine says"
        )
    if not array.is_contiguous:
        raise DeploymentError(f"{name} has strides {array.strides}; lend a C-contiguous array without gaps")
    if array.readonly:
        raise DeploymentError(f"{name} is read-only; lend an array that may be written")
