"""Ops keep to the device that they were made on, whatever is current: in this thread, in a thread without a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.device import build_rig, even_engine, hybrid_engine, in_another_thread, ints, jobs, mtp_deployment

from ctxcache import ContextCacheConfig, ContextCacheCoordinator, ContractError, DeploymentError
from ctxcache.config import AttentionLayerConfig, DeploymentConfig, EngineConfig
from ctxcache.device.arrays import view_array
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numba.context import SIMULATED, CudaDevice, cuda
from ctxcache.device.numba.launch import Launcher
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.ops import HiddenRow
from ctxcache.device.page_sums import allocate_sums
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.resources import ContextCachePhysicalResources
from ctxcache.ids import ContextCacheDeploymentKind, LayerType

pytestmark = pytest.mark.gpu

SPIN_MS = 300


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    """Skip on a machine with one."""
    if SIMULATED or len(cuda.gpus) < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture
def ops() -> Iterator[NumbaDeviceOps]:
    """Ops of the second GPU; the first is current again."""
    first = CudaDevice()
    with cuda.gpus[1]:
        made = NumbaDeviceOps()
    assert (first.ordinal, made.device_ordinal) == (0, 1)
    first.enter()
    assert current_device() == 0
    yield made
    assert current_device() == 0


def current_device() -> int:
    """The device whose context is this thread's; -1 for none."""
    from cuda.bindings import driver

    status, device = driver.cuCtxGetDevice()
    return int(device) if status == driver.CUresult.CUDA_SUCCESS else -1


def context_of(address: int) -> int:
    """The context that memory was allocated in; asked for its device, cuda.bindings 13.3 answers 0 for any."""
    from cuda.bindings import driver

    status, context = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT, address)
    assert status == driver.CUresult.CUDA_SUCCESS
    return int(context)


def in_a_thread_without_context(work: Callable[[], Any]) -> Any:
    """Run something where no device is current."""

    def run() -> Any:
        assert current_device() == -1
        return work()

    return in_another_thread(run)


def result_of_a_run(ops: Any) -> list[np.ndarray]:
    """Every op once, on the default stream; returns every byte of the arena, a page table, and the sums of pages."""
    rig = build_rig(ops, mtp_deployment(even_engine(max_batch_size=100)), num_bytes=1 << 20, num_snapshots=5)
    mapping = ops.allocate((100,), "int32")
    hidden = rig.ops.allocate((2, 2, 64), "float16")
    sums = allocate_sums(ops, rig.base, 2)
    rig.ops.fill(5)
    table = KVPageTable(4, 4, 16, device_ops=ops)
    table.set_row(1, [3, 5])
    table.upload(None)
    rig.ops.capture(rig.storage, jobs((0, 1, 1, 2, 3, 3), (1, 0, 0, 3, 2, 7)), None)
    rig.ops.restore(rig.storage, jobs((2, 1, 1, 4, 5, 3)), None)
    rig.ops.capture_boundary_hidden(rig.storage, 2, HiddenRow(hidden, 0, 1), None)
    rig.ops.restore_boundary_hidden(rig.storage, 3, HiddenRow(hidden, 1, 0), None)
    rig.ops.zero_recurrent(rig.base, np.arange(3, 100), None)  # too many to travel with the launch
    rig.ops.reset_lengths(rig.base, ints(4, 5, 6), None)
    rig.ops.upload_mapping(ints(-1, 0, 1), mapping, None)
    rig.ops.compact_slot_state(rig.base, mapping, 3, 2, None)
    rig.ops.advance_lengths(rig.base, 3, None)
    rig.ops.sum_pages(rig.base, ints(1, 4), sums, None)
    ops.synchronize(None, None)
    image = rig.ops.image()
    for array in (rig.base.kv_lengths, *rig.base.slot_arrays):
        rig.ops.of(image, array)[2:3] = 0  # undefined behind the batch
    return [image, ops.to_host(table.kernel_view), ops.to_host(sums)]


def test_a_mapping_on_another_device_is_refused(ops: NumbaDeviceOps) -> None:
    """PyTorch's arrays say where they lie: one of the first device is not written by kernels of the second."""
    torch = pytest.importorskip("torch")
    stranger, own = (torch.full((4,), 7, dtype=torch.int32, device=f"cuda:{device}") for device in (0, 1))
    torch.cuda.synchronize(1)
    with pytest.raises(ContractError, match="device_mapping lies on cuda 0 and the device ops work on cuda 1"):
        ops.upload_mapping(ints(0, -1, 1), stranger, None)
    ops.upload_mapping(ints(0, -1, 1), own, None)
    ops.synchronize(None, None)
    assert (stranger.tolist(), own.tolist()) == ([7] * 4, [0, -1, 1, 7])


def test_every_op_works_on_its_own_device(ops: NumbaDeviceOps) -> None:
    """Allocations lie there and results are NumPy's, where another device is current and where none is."""
    expected = result_of_a_run(NumpyDeviceOps())
    with cuda.gpus[1]:
        plain = NumbaDeviceOps(prepared_launches=False)
    CudaDevice().enter()
    for some in (ops, plain, NumbaDeviceOps()):
        some.load_kernels(None)
        for found in (result_of_a_run(some), in_a_thread_without_context(lambda some=some: result_of_a_run(some))):
            for bytes_found, bytes_expected in zip(found, expected, strict=True):
                np.testing.assert_array_equal(bytes_found, bytes_expected)
    with cuda.gpus[1]:
        there = cuda.device_array(3)
    contexts = [context_of(view_array(array).address) for array in (there, ops.allocate((3,), "int32"))]
    assert contexts[0] == contexts[1] != context_of(view_array(cuda.device_array(3)).address)


@pytest.mark.alone
@pytest.mark.parametrize("where", ["here", "in a thread without a context"])
@pytest.mark.parametrize("way", ["the ops' own", "a synchroniser of the runtime's"])
def test_a_drain_waits_for_the_default_stream_of_its_own_device(ops: NumbaDeviceOps, where: str, way: str) -> None:
    """Its handle is 0 on every device: a wait in the wrong context would prove nothing, and pages would be given away."""
    from cuda.bindings import driver
    from support.gpu import _spin

    with cuda.gpus[1]:
        launcher, mark = Launcher(CudaDevice()), cuda.event(timing=False)
        launcher.launch(_spin, (1, 1, 1), None, 0)
    ops.synchronize(None, None)
    launcher.launch(_spin, (1, 1, 1), None, SPIN_MS * 1_000_000)
    with cuda.gpus[1]:
        mark.record(launcher.numba_stream(None))
        assert not mark.query()

    def wait_for_whatever_is_current(stream: None) -> int:
        (code,) = driver.cuCtxSynchronize()
        return int(code)

    def drain() -> None:
        assert not ops.synchronize(None, None if way == "the ops' own" else wait_for_whatever_is_current)

    if where == "here":
        drain()
    else:
        in_a_thread_without_context(drain)
    with cuda.gpus[1]:
        assert mark.query()


def test_arrays_of_another_device_are_refused(ops: NumbaDeviceOps) -> None:
    """A pool on the first GPU is no pool for ops of the second: no kernel there could read it."""
    torch = pytest.importorskip("torch")
    config = hybrid_engine()

    def lend(device: str) -> HybridCacheManager:
        own = HybridCacheManager(config, None, device_ops=NumpyDeviceOps())
        arrays = [
            [torch.zeros(array.shape, dtype=getattr(torch, str(array.dtype)), device=device) for array in group]
            for group in (own.kv_pools, own.slot_arrays[::2], own.slot_arrays[1::2])
        ]
        pools, states, convs = arrays
        return HybridCacheManager.from_arrays(
            config, kv_pools=pools, recurrent=states, conv=convs, stream=None, device_ops=ops
        )

    assert lend("cuda:1").device_ops is ops
    with pytest.raises(DeploymentError, match="lies on cuda 0 and the device ops work on cuda 1"):
        lend("cuda:0")


def test_a_coordinator_takes_no_resources_of_another_device(ops: NumbaDeviceOps) -> None:
    """Caches of one device and ops of another are refused before anything is bound."""
    engine = EngineConfig(
        (LayerType.ATTENTION,), (AttentionLayerConfig(1, 4),), max_sequence_length=64, tokens_per_page=16, num_pages=8
    )
    cache = HybridCacheManager(engine, None, device_ops=ops)
    table = KVPageTable(engine.max_batch_size, engine.pages_per_sequence, engine.num_pages, device_ops=ops)
    with pytest.raises(
        DeploymentError, match=r"base_cache lies on device 1 and the coordinator's device ops .* device 0"
    ):
        ContextCacheCoordinator(
            ContextCacheConfig(),
            DeploymentConfig(engine),
            ContextCacheDeploymentKind.VANILLA,
            ContextCachePhysicalResources(cache, table),
            None,
            device_ops=NumbaDeviceOps(),
        )
