"""Pools: shapes by absolute layer, borrowed arrays checked and kept, resources that must agree with the deployment."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.device import A, R, hybrid_engine, ints, mtp_deployment

from ctxcache import ContextCacheConfig, ContextCacheCoordinator
from ctxcache.config import AttentionLayerConfig, DeploymentConfig, EngineConfig, SpecDecodeConfig
from ctxcache.device.arrays import device_of, view_array
from ctxcache.device.kv_pools import HybridCacheManager, kv_pool_shape, state_shapes
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.ops import device_ordinal_of, storage_dtype
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.resources import ContextCachePhysicalResources, check_devices, check_resources
from ctxcache.device.snapshots import partial_kv_bytes_per_slot, recurrent_bytes_per_slot
from ctxcache.errors import ContractError, DeploymentError
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import SpecDecodeMode
from ctxcache.testing import DeferredDeviceOps, FaultInjector


class CudaArray:
    """Host memory that says to be a device array, as a PyTorch or CuPy array does."""

    def __init__(self, array: np.ndarray[Any, Any], **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None if array.flags.c_contiguous else array.strides,
            "version": 3,
            **changes,
        }


class DLPackArray:
    """An array that speaks DLPack alone, like a JAX array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class OddTensor:
    """A tensor whose dtype neither protocol can say, like PyTorch's fp8."""

    def __init__(self, array: np.ndarray[Any, Any], place: str = "cpu") -> None:
        self.array = array
        self.shape = array.shape
        self.device = type("Device", (), {"type": place, "index": None})()

    @property
    def __cuda_array_interface__(self) -> Any:
        raise TypeError("no such type string")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("float8 types are not supported by dlpack")

    # The three methods by which PyTorch describes any tensor.
    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda array: array,
    "cuda_array_interface": CudaArray,
    "dlpack": DLPackArray,
    "tensor": OddTensor,
}


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
    """Each layer has the pool or state of its own heads and head size; the other kind of layer is refused."""
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
    for ask, pattern in (
        (lambda: cache.kv_pool(0), "not an attention layer"),
        (lambda: cache.recurrent_state(1), "not a recurrent layer"),
        (lambda: cache.conv_state(5), r"those are \[0, 2, 3\]"),
        (lambda: cache.kv_pool(-1), "layer -1"),
    ):
        with pytest.raises(ContractError, match=pattern):
            ask()


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


def test_views_of_arrays_tell_place_and_layout() -> None:
    """Address, shape, strides, element size and place are read from each protocol; strangers are refused."""
    array = np.arange(24, dtype=np.float16).reshape(2, 3, 4)[:, 1:]
    for wrap in WRAPPERS.values():
        view = view_array(wrap(array))
        assert view.address == array.ctypes.data
        assert (view.shape, view.strides, view.itemsize) == (array.shape, array.strides, 2)
        assert not view.is_contiguous
        assert view.is_contiguous_from(1)
        assert view.nbytes == 2 * 2 * 2 * 4
    assert view_array(CudaArray(array)).place == "cuda"
    assert not view_array(CudaArray(array, data=(array.ctypes.data, True))).readonly  # as JAX says of all its arrays
    array.setflags(write=False)
    assert view_array(array).readonly
    array.setflags(write=True)
    assert view_array(OddTensor(array, "xpu")).place == "xpu"
    assert view_array(DLPackArray(array.astype(np.int8))).dtype == np.int8
    assert view_array(DLPackArray(array)).dtype == np.float16
    with pytest.raises(ContractError, match="no array"):
        view_array([1])


def test_a_cache_belongs_to_one_live_owner() -> None:
    """As a table, a cache serves one coordinator."""

    class Owner:
        pass

    cache, owner = HybridCacheManager(hybrid_engine(), None, device_ops=NumpyDeviceOps()), Owner()
    cache.bind(owner)
    with pytest.raises(ContractError, match="HybridCacheManager belongs"):
        cache.bind(Owner())


def attention_engine(**changes: Any) -> EngineConfig:
    """Two attention layers, 4 slots of 3 pages."""
    settings: dict[str, Any] = {
        "layers": (A, A),
        "attention": (AttentionLayerConfig(1, 4),) * 2,
        "max_batch_size": 4,
        "max_sequence_length": 24,
        "tokens_per_page": 8,
    }
    return EngineConfig(**{**settings, **changes})


def cache_of(engine: EngineConfig) -> HybridCacheManager:
    """A cache on the host."""
    return HybridCacheManager(engine, None, device_ops=NumpyDeviceOps())


def table_of(engine: EngineConfig, **changes: int) -> KVPageTable:
    """The table that fits an engine, or one that does not."""
    sizes = {
        "max_batch": engine.max_batch_size,
        "max_pages_per_seq": engine.pages_per_sequence,
        "num_pages": max(engine.num_pages, 1),
    }
    return KVPageTable(**{**sizes, **changes}, device_ops=NumpyDeviceOps())


def deployment_of(kind: Kind) -> tuple[DeploymentConfig, ContextCachePhysicalResources]:
    """A deployment of a kind, and resources that fit."""
    base, draft = attention_engine(), None
    if kind is Kind.HYBRID:
        deployment = DeploymentConfig(hybrid_engine())
    elif kind is Kind.PURE_RECURRENT:
        deployment = DeploymentConfig(replace(hybrid_engine(), layers=(R,), attention=(), num_pages=0))
    elif kind is Kind.HYBRID_MTP:
        deployment = mtp_deployment(hybrid_engine())
    elif kind is Kind.EAGLE:
        draft = attention_engine(layers=(A,), attention=(AttentionLayerConfig(2, 2),), num_pages=9)
        deployment = DeploymentConfig(base, draft, SpecDecodeConfig(SpecDecodeMode.EAGLE))
    elif kind is Kind.SHARED_KV:
        deployment = DeploymentConfig(base, spec=SpecDecodeConfig(SpecDecodeMode.SHARED_KV))
    else:
        deployment = DeploymentConfig(base)
    base, draft = deployment.base, deployment.draft
    return deployment, ContextCachePhysicalResources(
        cache_of(base),
        None if kind is Kind.PURE_RECURRENT else table_of(base),
        None if draft is None else cache_of(draft),
        None if draft is None else table_of(draft),
    )


@pytest.mark.parametrize("kind", Kind)
def test_resources_that_agree_are_taken(kind: Kind) -> None:
    """Each kind takes the resources built from its own engines, a larger pool included."""
    deployment, resources = deployment_of(kind)
    check_resources(deployment, kind, resources)
    assert resources.base_cache.owner is None
    if kind is Kind.VANILLA:
        large = attention_engine(num_pages=50)
        check_resources(DeploymentConfig(large), kind, ContextCachePhysicalResources(cache_of(large), table_of(large)))
    if kind is Kind.PURE_RECURRENT:
        check_resources(deployment, kind, replace(resources, base_page_table=table_of(attention_engine())))


BAD_RESOURCES: dict[str, tuple[Kind, str, Callable[[Any], Any]]] = {
    "wrong kind": (Kind.EAGLE, "EAGLE and the coordinator", lambda r: r),
    "no base table": (Kind.VANILLA, "no page table", lambda r: replace(r, base_page_table=None)),
    "table pages": (
        Kind.VANILLA,
        "num_pages 13",
        lambda r: replace(r, base_page_table=table_of(attention_engine(), num_pages=13)),
    ),
    "table batch": (
        Kind.VANILLA,
        "max_batch 5",
        lambda r: replace(r, base_page_table=table_of(attention_engine(), max_batch=5)),
    ),
    "table width": (
        Kind.VANILLA,
        "max_pages_per_seq 4",
        lambda r: replace(r, base_page_table=table_of(attention_engine(), max_pages_per_seq=4)),
    ),
    "cache pages": (
        Kind.VANILLA,
        "num_pages",
        lambda r: replace(r, base_cache=cache_of(attention_engine(num_pages=13))),
    ),
    "cache dtype": (
        Kind.VANILLA,
        "kv_dtype",
        lambda r: replace(r, base_cache=cache_of(attention_engine(kv_dtype="float32"))),
    ),
    "draft cache of a vanilla deployment": (
        Kind.VANILLA,
        "draft_cache and VANILLA",
        lambda r: replace(r, draft_cache=cache_of(attention_engine())),
    ),
    "draft table of shared KV": (
        Kind.SHARED_KV,
        "draft_page_table and SHARED_KV",
        lambda r: replace(r, draft_page_table=table_of(attention_engine())),
    ),
    "no draft cache": (Kind.EAGLE, "draft_cache is None", lambda r: replace(r, draft_cache=None)),
    "no draft table": (Kind.HYBRID_MTP, "draft_page_table is None", lambda r: replace(r, draft_page_table=None)),
    "draft table pages": (
        Kind.EAGLE,
        "draft page table has num_pages",
        lambda r: replace(r, draft_page_table=table_of(attention_engine())),
    ),
    "draft cache of the base": (Kind.EAGLE, "draft cache was built", lambda r: replace(r, draft_cache=r.base_cache)),
}


@pytest.mark.parametrize("case", BAD_RESOURCES.values(), ids=BAD_RESOURCES)
def test_resources_that_disagree_are_refused(case: tuple[Kind, str, Callable[[Any], Any]]) -> None:
    """Every mismatch is a `DeploymentError` that names both sides."""
    kind, pattern, spoil = case
    deployment, resources = deployment_of(kind)
    claimed = Kind.VANILLA if pattern.startswith("EAGLE and") else kind
    with pytest.raises(DeploymentError, match=pattern):
        check_resources(deployment, claimed, spoil(resources))


def test_base_and_draft_need_their_own_tables() -> None:
    """Equal engines may not share one cache or table."""
    engine = attention_engine()
    deployment = DeploymentConfig(engine, engine, SpecDecodeConfig(SpecDecodeMode.EAGLE))
    cache, table = cache_of(engine), table_of(engine)
    with pytest.raises(DeploymentError, match="share"):
        check_resources(deployment, Kind.EAGLE, ContextCachePhysicalResources(cache, table, cache, table_of(engine)))
    with pytest.raises(DeploymentError, match="share"):
        check_resources(deployment, Kind.EAGLE, ContextCachePhysicalResources(cache, table, cache_of(engine), table))


class OpsOfDevice(NumpyDeviceOps):
    """Ops that say which device they work on."""

    def __init__(self, device_ordinal: int) -> None:
        self.device_ordinal = device_ordinal


def test_resources_of_another_device_are_refused() -> None:
    """Where ops say their device, caches and tables must lie on the coordinator's; ops that do not say are believed."""
    engine = attention_engine()

    def build(cache_ops: Any, table_ops: Any, ops: Any) -> ContextCacheCoordinator:
        resources = ContextCachePhysicalResources(
            HybridCacheManager(engine, None, device_ops=cache_ops),
            KVPageTable(engine.max_batch_size, engine.pages_per_sequence, engine.num_pages, device_ops=table_ops),
        )
        return ContextCacheCoordinator(
            ContextCacheConfig(), DeploymentConfig(engine), Kind.VANILLA, resources, None, device_ops=ops
        )

    one, two, silent = OpsOfDevice(1), OpsOfDevice(2), NumpyDeviceOps()
    for cache_ops, table_ops, ops in (
        (one, one, None),
        (one, OpsOfDevice(1), one),
        (one, silent, one),
        (two, one, silent),
    ):
        assert build(cache_ops, table_ops, ops).idle
    with pytest.raises(DeploymentError, match=r"base_cache lies on device 2 .* ops work on device 1; build both"):
        build(two, one, one)
    with pytest.raises(DeploymentError, match="base_page_table lies on device 2"):
        build(one, two, None)


def test_drafts_on_another_device_are_refused_and_an_unused_table_is_not() -> None:
    """Every resource that the kind uses is looked at, and none that it does not."""
    deployment, resources = deployment_of(Kind.EAGLE)
    one, two = OpsOfDevice(1), OpsOfDevice(2)
    for name in ("base_cache", "base_page_table", "draft_cache", "draft_page_table"):
        for other in ("base_cache", "base_page_table", "draft_cache", "draft_page_table"):
            getattr(resources, other).device_ops = two if other == name else one
        with pytest.raises(DeploymentError, match=f"{name} lies on device 2"):
            ContextCacheCoordinator(ContextCacheConfig(), deployment, Kind.EAGLE, resources, None, device_ops=one)
    deployment, resources = deployment_of(Kind.PURE_RECURRENT)
    resources.base_cache.device_ops = one
    check_devices(one, Kind.PURE_RECURRENT, replace(resources, base_page_table=table_of(attention_engine())))
    table = KVPageTable(2, 2, 4, device_ops=two)
    check_devices(one, Kind.PURE_RECURRENT, replace(resources, base_page_table=table))


def test_wrappers_tell_the_device_of_the_ops_inside() -> None:
    """So that a test double over ops of one device does not hide that resources lie on another."""
    one = OpsOfDevice(1)
    for wrapped in (FaultInjector(one), DeferredDeviceOps(one, random.Random(1)), FaultInjector(FaultInjector(one))):
        assert device_ordinal_of(wrapped) == 1
    assert device_ordinal_of(FaultInjector(NumpyDeviceOps())) is None


@pytest.mark.parametrize(
    ("name", "device"), [("numpy", 0), ("cuda_array_interface", -1), ("dlpack", -1), ("tensor", 0)]
)
def test_pools_of_another_device_are_refused(name: str, device: int) -> None:
    """An array says where it lies, by DLPack or by itself, and the ops where they work; one that does not say is believed."""
    engine = attention_engine()
    pools = [np.zeros(kv_pool_shape(engine, i), storage_dtype(engine.kv_dtype)) for i in range(len(engine.attention))]
    home, stranger = OpsOfDevice(0), OpsOfDevice(1)
    assert HybridCacheManager.from_arrays(engine, kv_pools=pools, device_ops=home).device_ops is home
    with pytest.raises(DeploymentError, match=r"kv_pools\[0\] lies on host 0 and the device ops work on host 1"):
        HybridCacheManager.from_arrays(engine, kv_pools=pools, device_ops=stranger)
    wrapped = WRAPPERS[name](pools[0])
    assert device_of(wrapped, view_array(wrapped)) == device


@pytest.mark.parametrize(
    ("kind", "device"), [(1, -1), (2, 0), (3, -1), (13, -1)], ids=["host", "cuda", "pinned", "managed"]
)
def test_memory_that_belongs_to_no_device_is_not_said_to(kind: int, device: int) -> None:
    """DLPack numbers the device of host, pinned and managed memory 0, whichever GPU reaches it."""

    class Lent(CudaArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, 0

    lent = Lent(np.zeros(3, np.float16))
    assert device_of(lent, view_array(lent)) == device


def test_an_array_says_its_device_by_dlpack_where_its_interface_does_not() -> None:
    """`__cuda_array_interface__` has no device; `__dlpack_device__` of the same array has."""
    array = np.zeros(3, np.float16)

    class Both(CudaArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 5

    assert (view_array(Both(array)).device, device_of(Both(array), view_array(Both(array)))) == (-1, 5)


class LentTo(CudaArray):
    """An array of another library on a device, as a PyTorch or CuPy array says it."""

    def __init__(self, array: np.ndarray[Any, Any], device: int) -> None:
        super().__init__(array)
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device


class OpsOfAnotherLibrary(NumpyDeviceOps):
    """Ops whose arrays lie on device 1; the ops themselves do not say so."""

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate with the other library."""
        return LentTo(super().allocate(shape, dtype), 1)


def test_ops_that_do_not_say_their_device_are_known_by_their_arrays() -> None:
    """What they allocate says it."""
    engine, ops = attention_engine(), OpsOfAnotherLibrary()
    pools = [np.zeros(kv_pool_shape(engine, i), storage_dtype(engine.kv_dtype)) for i in range(len(engine.attention))]
    here, elsewhere = ([LentTo(pool, device) for pool in pools] for device in (1, 0))
    assert HybridCacheManager.from_arrays(engine, kv_pools=here, device_ops=ops).device_ops is ops
    with pytest.raises(DeploymentError, match="lies on cuda 0 and the device ops work on cuda 1"):
        HybridCacheManager.from_arrays(engine, kv_pools=elsewhere, device_ops=ops)


def test_ops_are_not_replaced_by_those_of_another_device() -> None:
    """Wrappers of the present ones are taken; the coordinator goes on with what it had otherwise."""
    engine, one = attention_engine(), OpsOfDevice(1)
    resources = ContextCachePhysicalResources(
        HybridCacheManager(engine, None, device_ops=one),
        KVPageTable(engine.max_batch_size, engine.pages_per_sequence, engine.num_pages, device_ops=one),
    )
    coordinator = ContextCacheCoordinator(
        ContextCacheConfig(), DeploymentConfig(engine), Kind.VANILLA, resources, None, device_ops=one
    )
    wrapped = FaultInjector(one)
    coordinator.replace_device_ops(wrapped)
    with pytest.raises(
        DeploymentError, match="base_cache lies on device 1 and the coordinator's device ops work on device 2"
    ):
        coordinator.replace_device_ops(FaultInjector(OpsOfDevice(2)))
    assert coordinator.device_ops is wrapped


def test_ops_are_not_replaced_by_those_of_another_device_though_the_resources_do_not_say() -> None:
    """The snapshots were allocated by the present ops, and lie where those work."""
    engine = hybrid_engine()
    resources = ContextCachePhysicalResources(cache_of(engine), table_of(engine))
    coordinator = ContextCacheCoordinator(
        ContextCacheConfig(
            recurrent_snapshot_pool_bytes=recurrent_bytes_per_slot(engine),
            partial_kv_snapshot_pool_bytes=partial_kv_bytes_per_slot(engine),
        ),
        DeploymentConfig(engine),
        Kind.HYBRID,
        resources,
        None,
        device_ops=OpsOfDevice(1),
    )
    with pytest.raises(DeploymentError, match="new device ops work on device 0 and the present ones on device 1"):
        coordinator.replace_device_ops(OpsOfDevice(0))
    coordinator.replace_device_ops(FaultInjector(OpsOfDevice(1)))


def test_a_pool_must_hold_one_longest_sequence() -> None:
    """Fewer pages than the longest sequence needs are refused; exactly as many are the user's choice."""
    for num_pages, fits in ((2, False), (3, True)):
        engine = attention_engine(num_pages=num_pages)
        resources = ContextCachePhysicalResources(cache_of(engine), table_of(engine))
        if fits:
            check_resources(DeploymentConfig(engine), Kind.VANILLA, resources)
        else:
            with pytest.raises(DeploymentError, match="2 pages and the longest sequence needs 3"):
                check_resources(DeploymentConfig(engine), Kind.VANILLA, resources)
