"""What only a real GPU can show: streams that run late and do not order with the default stream, and other threads.

Each test works on the stream that `--gpu-stream` chose, a non-blocking one unless it did.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from support.device import even_engine, hybrid_engine, ints, jobs, stream_of_run
from support.gpu import driver_stream, is_busy, spin

from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numba.context import SIMULATED, cuda
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.snapshots import HybridSnapshotStorage, partial_kv_bytes_per_slot, recurrent_bytes_per_slot
from ctxcache.device.streams import stream_handle

pytestmark = pytest.mark.gpu

NUM_UPLOADS = 200
"""Of a copy from pageable memory, 146 in 200 raced elsewhere (H25)."""


@pytest.fixture
def stream() -> Any:
    """The stream of the run."""
    return driver_stream() if stream_of_run() is None else stream_of_run()


@pytest.mark.parametrize(("rows", "width"), [(8, 64), (128, 256), (512, 1024)])
def test_h25_an_upload_behind_a_busy_stream_carries_the_rows_of_its_moment(stream: Any, rows: int, width: int) -> None:
    """Tables of 4 KiB to 4 MiB, uploaded behind a spin and overwritten on the host at once, arrive unharmed."""
    ops = NumbaDeviceOps()
    table = KVPageTable(rows, width, rows * width, device_ops=ops)
    slots, counts = np.arange(rows), np.full(rows, width)
    snapshot = cuda.device_array((rows, 2, width), np.int32)
    for turn in range(NUM_UPLOADS):
        pages = np.random.default_rng(turn).integers(0, rows * width, (rows, width))
        spin(stream)
        table.set_rows(slots, counts, pages.ravel())
        table.upload(stream)
        snapshot.copy_to_device(table.kernel_view, stream=ops._launcher.numba_stream(stream))
        pages_then = pages.copy()
        pages[:] = 0
        table.set_rows(slots, counts * 0, [])
        table.upload(stream)
        assert ops.synchronize(stream, None) is None
        np.testing.assert_array_equal(ops.to_host(snapshot)[:, 0], pages_then, err_msg=f"upload {turn}")
        assert (ops.to_host(table.kernel_view) == -1).all()


def test_ops_keep_their_order_on_a_busy_stream(stream: Any) -> None:
    """Lengths, mapping and compaction enqueued behind a spin take effect in order, and not before the drain is over."""
    ops = NumbaDeviceOps()
    cache = HybridCacheManager(hybrid_engine(), stream, device_ops=ops)
    mapping = ops.allocate((3,), "int32")
    for turn in range(20):
        spin(stream)
        lengths = ints(10 + turn, 20 + turn, 30 + turn)
        ops.reset_lengths(cache, lengths, stream)
        ops.upload_mapping(ints(-1, 0, 1), mapping, stream)
        lengths[:] = 0
        ops.compact_slot_state(cache, mapping, 3, 2, stream)
        assert ops.synchronize(stream, None) is None
        assert ops.to_host(cache.kv_lengths)[:2].tolist() == [20 + turn, 30 + turn]


@pytest.mark.alone
def test_no_op_waits_for_the_stream(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a spin, every op returns while the spin still runs: no hidden wait, no pageable copy, no allocation."""
    ops, config = NumbaDeviceOps(), even_engine()
    cache = HybridCacheManager(config, stream, device_ops=ops)
    budget = {
        "recurrent_snapshot_pool_bytes": 4 * recurrent_bytes_per_slot(config),
        "partial_kv_snapshot_pool_bytes": 4 * partial_kv_bytes_per_slot(config),
    }
    storage = HybridSnapshotStorage(config, cache, **budget)
    table = KVPageTable(64, 64, 4096, device_ops=ops)
    mapping = ops.allocate((3,), "int32")
    rows = jobs((0, 1, 1, 2, -1, 3), (1, 0, 0, 3, -1, 7))
    calls = {
        "upload_rows": lambda: (table.set_row(3, np.arange(20)), table.upload(stream)),
        "reset_lengths": lambda: ops.reset_lengths(cache, ints(4, 5), stream),
        "advance_lengths": lambda: ops.advance_lengths(cache, 1, stream),
        "zero_recurrent": lambda: ops.zero_recurrent(cache, ints(0, 2), stream),
        "capture": lambda: ops.capture(storage, rows, stream),
        "restore": lambda: ops.restore(storage, rows, stream),
        "upload_mapping": lambda: ops.upload_mapping(ints(-1, 0, 1), mapping, stream),
        "compact_slot_state": lambda: ops.compact_slot_state(cache, mapping, 3, 2, stream),
    }

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("an op allocated")

    for turn in range(3):  # kernels are loaded, and buffers made, the first time
        if turn == 2:
            for name in ("device_array", "mapped_array", "pinned_array", "event", "stream", "to_device"):
                monkeypatch.setattr(cuda, name, refuse)
        for name, call in calls.items():
            table.set_row(3, [turn])
            table.upload(stream)
            ops.synchronize(stream, None)
            spin(stream)
            started = time.perf_counter()
            call()
            seconds = time.perf_counter() - started
            assert turn == 0 or is_busy(stream), f"{name} waited for the stream, {seconds * 1e3:.1f} ms"
            ops.synchronize(stream, None)


@pytest.mark.alone
def test_work_does_not_wait_for_a_busy_default_stream() -> None:
    """Ops on a non-blocking stream are through while the legacy default stream still spins: nothing of them is on it."""
    ops, config, stream = NumbaDeviceOps(), even_engine(), driver_stream()
    cache = HybridCacheManager(config, stream, device_ops=ops)
    table = KVPageTable(64, 64, 4096, device_ops=ops)
    mapping = ops.allocate((3,), "int32")
    for turn in range(3):
        if turn:
            spin(None, 300)
        started = time.perf_counter()
        table.set_row(3, np.arange(20) + turn)
        table.upload(stream)
        ops.zero_recurrent(cache, ints(0, 2), stream)
        ops.reset_lengths(cache, ints(1 + turn, 2, 3), stream)
        ops.upload_mapping(ints(-1, 0, 1), mapping, stream)
        ops.compact_slot_state(cache, mapping, 3, 2, stream)
        ops.synchronize(stream, None)
        seconds = time.perf_counter() - started
        assert turn == 0 or (is_busy(None) and seconds < 0.2), f"turn {turn}: {seconds * 1e3:.1f} ms"
        assert ops.to_host(cache.kv_lengths)[:2].tolist() == [2, 3]
    cuda.default_stream().synchronize()


def test_ops_work_in_a_thread_that_has_no_context_yet(stream: Any) -> None:
    """An asyncio runtime drains in a worker thread: ops that were used in one thread work in another."""
    if stream_handle(stream) == 2:
        pytest.skip("the per-thread default stream of another thread is another stream")
    ops = NumbaDeviceOps()
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
