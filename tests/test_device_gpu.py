"""What only a real GPU can show: streams that run late and do not order with the default stream, and other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_support import hybrid_engine, ints

from ctxcache.device.caches import HybridCacheManager
from ctxcache.device.launch import SIMULATED, cuda
from ctxcache.device.numba_ops import NumbaDeviceOps
from ctxcache.device.page_table import KVPageTable

pytestmark = pytest.mark.gpu

PER_THREAD_DEFAULT_STREAM = 2
SPIN_NAPS = 50
"""Naps of a millisecond, the longest that the hardware takes."""


@pytest.fixture(scope="module")
def spin() -> Callable[[Any], None]:
    """Something that keeps a stream busy for about 50 ms."""

    @cuda.jit
    def nap(count: int) -> None:
        for _ in range(count):
            cuda.nanosleep(1_000_000)

    launcher = NumbaDeviceOps()._launcher
    return lambda stream: launcher.launch(nap, (1, 1, 1), stream, SPIN_NAPS)


def non_blocking_stream() -> Any:
    """A stream of another library, which does not order with the default stream."""
    from cuda.bindings import driver

    cuda.current_context()
    status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    assert status == driver.CUresult.CUDA_SUCCESS
    return int(stream)


STREAMS: dict[str, Callable[[], Any]] = {
    "numba": lambda: cuda.stream(),  # noqa: PLW0108 - the attribute does not exist before a GPU is asked for
    "non-blocking": non_blocking_stream,
    "per-thread default": lambda: PER_THREAD_DEFAULT_STREAM,
}


@pytest.mark.parametrize("make_stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize(("rows", "width"), [(8, 64), (128, 256), (512, 1024)])
def test_an_upload_behind_a_busy_stream_carries_the_rows_of_its_moment(
    spin: Callable[[Any], None], make_stream: Callable[[], Any], rows: int, width: int
) -> None:
    """H25: tables of 4 KiB to 4 MiB, uploaded behind a spin and overwritten on the host at once, arrive unharmed."""
    ops, stream = NumbaDeviceOps(), make_stream()
    table = KVPageTable(rows, width, rows * width, device_ops=ops)
    slots, counts = np.arange(rows), np.full(rows, width)
    snapshot = cuda.device_array((rows, 2, width), np.int32)
    for turn in range(5):
        pages = np.random.default_rng(turn).integers(0, rows * width, (rows, width))
        spin(stream)
        table.set_rows(slots, counts, pages.ravel())
        table.upload(stream)
        snapshot.copy_to_device(table.kernel_view, stream=ops._launcher.numba_stream(stream))
        table.set_rows(slots, counts * 0, [])
        table.upload(stream)
        assert ops.synchronize(stream, None) is None
        np.testing.assert_array_equal(snapshot.copy_to_host()[:, 0], pages)
        assert (ops.to_host(table.kernel_view) == -1).all()


@pytest.mark.parametrize("make_stream", STREAMS.values(), ids=STREAMS)
def test_ops_keep_their_order_on_a_busy_stream(spin: Callable[[Any], None], make_stream: Callable[[], Any]) -> None:
    """Lengths, mapping and compaction enqueued behind a spin take effect in order, and not before the drain is over."""
    ops, stream = NumbaDeviceOps(), make_stream()
    cache = HybridCacheManager(hybrid_engine(), stream, device_ops=ops)
    mapping = ops.allocate((3,), "int32")
    for turn in range(5):
        spin(stream)
        lengths = ints(10 + turn, 20 + turn, 30 + turn)
        ops.reset_lengths(cache, lengths, stream)
        ops.upload_mapping(ints(-1, 0, 1), mapping, stream)
        lengths[:] = 0
        ops.compact_slot_state(cache, mapping, 3, 2, stream)
        assert ops.synchronize(stream, None) is None
        assert ops.to_host(cache.kv_lengths)[:2].tolist() == [20 + turn, 30 + turn]


def test_ops_work_in_a_thread_that_has_no_context_yet() -> None:
    """An asyncio runtime drains in a worker thread: ops that were used in one thread work in another."""
    ops, stream = NumbaDeviceOps(), non_blocking_stream()
    cache = HybridCacheManager(hybrid_engine(), stream, device_ops=ops)
    ops.reset_lengths(cache, ints(1, 2), stream)
    answers: list[Any] = []

    def work() -> None:
        answers.append(ops.synchronize(stream, None))
        ops.reset_lengths(cache, ints(5, 6, 7), stream)
        ops.synchronize(stream, None)
        answers.append(ops.to_host(cache.kv_lengths).tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [None, [5, 6, 7]]
    assert not SIMULATED
