"""Pools: shapes by absolute layer, borrowed arrays checked, kept, and refused where the ops do not reach them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.device import A, R, attention_engine, hybrid_engine, ints
from support.lent_arrays import WRAPPERS, CudaArray, DLPackArray, OpsOfDevice

from ctxcache.config import EngineConfig
from ctxcache.device.kv_pools import HybridCacheManager, kv_pool_shape, state_shapes
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.ops import storage_dtype
from ctxcache.errors import ContractError, DeploymentError


def arrays_for(config: EngineConfig, wrap: Callable[[Any], Any] = lambda array: array) -> dict[str, list[Any]]:
    """The arrays that a runtime would own for an engine, by argument of `from_arrays`."""
    state_shape, conv_shape = state_shapes(config)
    recurrent = config.recurrent
    lent: dict[str, list[Any]] = {
        "kv_pools": [
            wrap(np.zeros(kv_pool_shape(config, i), storage_dtype(config.kv_dtype)))
            for i in range(config.num_attention_layers)
        ],
        "recurrent": [],
        "conv": [],
    }
    for _ in range(config.num_recurrent_layers):
        assert recurrent is not None
        lent["recurrent"].append(wrap(np.zeros(state_shape, storage_dtype(recurrent.dtype))))
        lent["conv"].append(wrap(np.zeros(conv_shape, storage_dtype(recurrent.conv_dtype))))
    return lent


@pytest.mark.parametrize("ops", [NumpyDeviceOps, NumbaDeviceOps])
def test_layers_are_found_by_their_absolute_index(ops: Callable[[], Any]) -> None:
    """Each layer has the pool or state of its own heads and head size."""
    config = hybrid_engine("bfloat16")
    cache = HybridCacheManager(config, None, device_ops=ops())
    assert tuple(cache.kv_pool(1).shape) == (2, 7, 7, 1, 5)
    assert tuple(cache.kv_pool(4).shape) == (2, 7, 7, 3, 7)
    assert tuple(cache.recurrent_state(0).shape) == (3, 1, 3, 5)
    assert tuple(cache.conv_state(3).shape) == (3, 5, 3)
    assert cache.recurrent_state(2) is not cache.recurrent_state(3)
    assert cache.kv_pool(1).dtype == np.uint16
    assert cache.recurrent_state(0).dtype == np.float32
    assert (cache.num_pages, cache.max_batch, cache.active_batch_size, cache.role) == (7, 3, 0, "base")


@pytest.mark.parametrize(
    ("ask", "layer", "pattern"),
    [
        (HybridCacheManager.kv_pool, 0, "not an attention layer"),
        (HybridCacheManager.kv_pool, -1, "layer -1"),
        (HybridCacheManager.recurrent_state, 1, "not a recurrent layer"),
        (HybridCacheManager.conv_state, 5, r"those are \[0, 2, 3\]"),
    ],
)
def test_a_layer_of_the_other_kind_is_refused(ask: Callable[..., Any], layer: int, pattern: str) -> None:
    """The refusal names the layer, and those that there are."""
    with pytest.raises(ContractError, match=pattern):
        ask(HybridCacheManager(hybrid_engine(), None, device_ops=NumpyDeviceOps()), layer)


def test_a_pure_recurrent_cache_has_no_pages() -> None:
    """Without attention layers there is no pool and the page count is 0; without recurrent ones there is no state."""
    recurrent = replace(hybrid_engine(), layers=(R,), attention=(), num_pages=0)
    cache = HybridCacheManager(recurrent, None, device_ops=NumpyDeviceOps())
    assert (cache.kv_pools, cache.num_pages, len(cache.slot_arrays)) == ((), 0, 2)
    attention = replace(hybrid_engine(), layers=(A, A), recurrent=None)
    cache = HybridCacheManager(attention, None, device_ops=NumpyDeviceOps())
    assert (len(cache.kv_pools), cache.slot_arrays) == (2, ())


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "int8"])
def test_borrowed_arrays_are_used_in_place(wrap: Callable[[Any], Any], dtype: str) -> None:
    """Whatever protocol an array speaks, the cache hands back the very object and its kernels write its memory."""
    config = hybrid_engine(dtype)
    lent = arrays_for(config, wrap)
    ops = NumbaDeviceOps()
    cache = HybridCacheManager.from_arrays(config, **lent, stream=None, device_ops=ops)
    assert cache.kv_pool(4) is lent["kv_pools"][1]
    assert cache.recurrent_state(3) is lent["recurrent"][2]
    assert cache.conv_state(0) is lent["conv"][0]
    memory = [array if isinstance(array, np.ndarray) else array.array for array in (*lent["recurrent"], *lent["conv"])]
    for array in memory:
        array[...] = 1
    ops.zero_recurrent(cache, ints(1), None)
    for array in memory:
        assert not array[1].any()
        assert array[[0, 2]].all()


def test_host_arrays_of_any_library_serve_numpy_ops() -> None:
    """NumPy ops work in place on host arrays that speak DLPack; device arrays are refused."""
    config = hybrid_engine()
    lent = arrays_for(config, DLPackArray)
    cache = HybridCacheManager.from_arrays(config, **lent, device_ops=NumpyDeviceOps())
    lent["conv"][1].array[...] = 1
    cache.device_ops.zero_recurrent(cache, ints(0), None)
    assert lent["conv"][1].array.sum() == 2 * 5 * 3
    with pytest.raises(DeploymentError, match=r"cuda.*NumpyDeviceOps works on host|lies on cuda"):
        HybridCacheManager.from_arrays(config, **arrays_for(config, CudaArray), device_ops=NumpyDeviceOps())
    with pytest.raises(ContractError, match="device memory"):
        NumpyDeviceOps().to_host(CudaArray(np.zeros(3)))


def test_borrowed_arrays_live_as_long_as_the_cache() -> None:
    """The runtime may drop its references; the cache keeps the arrays, and lets them go with itself."""
    config = hybrid_engine()
    lent = arrays_for(config, CudaArray)
    watch = weakref.ref(lent["kv_pools"][0])
    cache = HybridCacheManager.from_arrays(config, **lent, device_ops=NumbaDeviceOps())
    del lent
    gc.collect()
    assert watch() is not None
    del cache
    gc.collect()
    assert watch() is None


BAD_LOANS: dict[str, tuple[str, Callable[[dict[str, list[Any]]], Any]]] = {
    "a pool too few": ("1 arrays for 2", lambda lent: lent["kv_pools"].pop()),
    "a state too many": ("4 arrays for 3", lambda lent: lent["recurrent"].append(lent["recurrent"][0])),
    "no convolution": ("0 arrays for 3", lambda lent: lent["conv"].clear()),
    "pages": ("shape", lambda lent: lent["kv_pools"].__setitem__(0, np.zeros((2, 6, 7, 1, 5), np.float16))),
    "heads": ("shape", lambda lent: lent["kv_pools"].reverse()),
    "wide elements": ("4 bytes", lambda lent: lent["kv_pools"].__setitem__(0, np.zeros((2, 7, 7, 1, 5), np.float32))),
    "gaps": ("strides", lambda lent: lent["conv"].__setitem__(1, np.zeros((3, 5, 6), np.float16)[:, :, ::2])),
    "order": ("strides", lambda lent: lent["conv"].__setitem__(1, np.zeros((3, 5, 3), np.float16, order="F"))),
    "read-only": ("read-only", lambda lent: lent["conv"][2].setflags(write=False)),
    "no array": ("no array", lambda lent: lent["conv"].__setitem__(2, [1, 2, 3])),
}


@pytest.mark.parametrize("case", BAD_LOANS.values(), ids=BAD_LOANS)
@pytest.mark.parametrize("ops", [NumpyDeviceOps, NumbaDeviceOps])
def test_unfit_loans_are_refused(ops: Callable[[], Any], case: tuple[str, Callable[[Any], Any]]) -> None:
    """A wrong number, shape, element size, layout or a read-only array is a `DeploymentError` that names it."""
    pattern, spoil = case
    config = hybrid_engine()
    lent = arrays_for(config)
    spoil(lent)
    with pytest.raises(DeploymentError, match=pattern):
        HybridCacheManager.from_arrays(config, **lent, device_ops=ops())


def test_pools_of_another_device_are_refused() -> None:
    """An array says where it lies and the ops where they work."""
    engine = attention_engine()
    pools = [np.zeros(kv_pool_shape(engine, i), storage_dtype(engine.kv_dtype)) for i in range(len(engine.attention))]
    home, stranger = OpsOfDevice(0), OpsOfDevice(1)
    assert HybridCacheManager.from_arrays(engine, kv_pools=pools, device_ops=home).device_ops is home
    with pytest.raises(DeploymentError, match=r"kv_pools\[0\] lies on host 0 and the device ops work on host 1"):
        HybridCacheManager.from_arrays(engine, kv_pools=pools, device_ops=stranger)


class OpsOfAnotherLibrary(NumpyDeviceOps):
    """Ops whose arrays lie on device 1; the ops themselves do not say so."""

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate with the other library."""
        return CudaArray(super().allocate(shape, dtype), 1)


def test_ops_that_do_not_say_their_device_are_known_by_their_arrays() -> None:
    """What they allocate says it."""
    engine, ops = attention_engine(), OpsOfAnotherLibrary()
    pools = [np.zeros(kv_pool_shape(engine, i), storage_dtype(engine.kv_dtype)) for i in range(len(engine.attention))]
    here, elsewhere = ([CudaArray(pool, device) for pool in pools] for device in (1, 0))
    assert HybridCacheManager.from_arrays(engine, kv_pools=here, device_ops=ops).device_ops is ops
    with pytest.raises(DeploymentError, match="lies on cuda 0 and the device ops work on cuda 1"):
        HybridCacheManager.from_arrays(engine, kv_pools=elsewhere, device_ops=ops)


def test_a_cache_belongs_to_one_live_owner() -> None:
    """As a table, a cache serves one coordinator."""

    class Owner:
        pass

    cache, owner = HybridCacheManager(hybrid_engine(), None, device_ops=NumpyDeviceOps()), Owner()
    cache.bind(owner)
    with pytest.raises(ContractError, match="HybridCacheManager belongs"):
        cache.bind(Owner())
