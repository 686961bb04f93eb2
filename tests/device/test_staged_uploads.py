"""Ops that stage host values: what a launch reads later stays as it was (H23, H25)."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.device import hybrid_engine, in_another_thread, ints
from support.slow_buffers import SlowBuffer, kept

from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numba.parameter_words import INLINE_INTS
from ctxcache.device.numba.staging_ring import StagingRing
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.streams import PER_THREAD_DEFAULT_STREAM
from ctxcache.errors import InvariantError


def ops_on_slow_buffers() -> NumbaDeviceOps:
    """Ops whose staging buffers are read when the test says so."""
    ops = NumbaDeviceOps()
    ops._ring = StagingRing(SlowBuffer)
    return ops


MANY = INLINE_INTS + 4
"""Slots of an engine whose runs of lengths, slots and mappings are too long to travel with a launch."""


def run_of(*first: int) -> np.ndarray:
    """A run of `MANY` int32 values that begins with these and goes on with `MANY - 1` down."""
    return np.array([*first, *range(MANY - 1, len(first) - 1, -1)], np.int32)


@pytest.fixture
def made() -> list[SlowBuffer]:
    """The buffers made so far."""
    SlowBuffer.made.clear()
    return SlowBuffer.made


def test_uploads_behind_a_slow_stream_leave_earlier_buffers_alone(made: list[SlowBuffer]) -> None:
    """Every op that stages host values takes a new buffer while the stream has not read the earlier ones."""
    ops = ops_on_slow_buffers()
    table = KVPageTable(2, 4, 9, device_ops=ops)
    cache = HybridCacheManager(hybrid_engine(max_batch_size=MANY), None, device_ops=ops)
    mapping = ops.allocate((MANY,), "int32")
    for page in range(3):
        table.set_row(0, [page, page + 1])
        table.upload(None)
    ops.reset_lengths(cache, run_of(4, 5), None)
    ops.upload_mapping(run_of(0, -1), mapping, None)
    ops.zero_recurrent(cache, np.arange(MANY, dtype=np.int32)[::-1], None)
    # Uploads take parts of one buffer, one behind the other; everything else a buffer of its own.
    assert len(made) == 4
    uploaded = [pairs.tolist() for pairs in made[0].pairs[:4]]
    assert uploaded == [[0, 0], [1, 1], [0, 1], [1, 2]]
    assert made[0].pairs[4:6].tolist() == [[0, 2], [1, 3]]
    heads = [buffer.host[:8].view(np.int32).tolist() for buffer in made[1:]]
    assert heads == [[4, 5], [0, -1], [MANY - 1, MANY - 2]]


def test_short_runs_travel_with_their_launch(made: list[SlowBuffer]) -> None:
    """Lengths, mapping and slots of a usual batch need no buffer, so that nothing has to be kept until they are read."""
    ops = ops_on_slow_buffers()
    cache = HybridCacheManager(hybrid_engine(), None, device_ops=ops)
    mapping = ops.allocate((3,), "int32")
    ops.reset_lengths(cache, ints(4, 5), None)
    ops.upload_mapping(ints(0, -1, 1), mapping, None)
    ops.zero_recurrent(cache, ints(1), None)
    assert made == []
    assert ops.to_host(cache.kv_lengths).tolist() == [4, 5, 0]
    assert ops.to_host(mapping).tolist() == [0, -1, 1]


def test_uploads_on_many_streams_keep_a_bounded_number_of_arenas(made: list[SlowBuffer]) -> None:
    """With a new stream for each request the oldest arena is put away; its buffer may still be read, and stays alive."""
    ops = ops_on_slow_buffers()
    table = KVPageTable(1, 2, 200, device_ops=ops)
    for turn in range(100):
        table.set_row(0, [turn])
        table.upload(turn + 0x100)
    assert len(ops._arenas) == 64
    assert kept(ops._ring) == made
    assert ops.to_host(table.kernel_view)[0, 0].tolist() == [99, -1]


def test_uploads_on_the_per_thread_default_stream_share_no_buffer(made: list[SlowBuffer]) -> None:
    """Its handle is another stream in every thread: each upload has a buffer of its own, with a mark behind its reader."""
    ops = ops_on_slow_buffers()
    tables = [KVPageTable(1, 4, 100, device_ops=ops) for _ in range(3)]

    def upload(table: KVPageTable, page: int) -> None:
        table.set_row(0, [page])
        table.upload(PER_THREAD_DEFAULT_STREAM)

    for page, table in enumerate(tables):
        in_another_thread(lambda table=table, page=page: upload(table, page))
    assert [buffer.pairs[0].tolist() for buffer in made] == [[0, 0], [0, 1], [0, 2]]
    assert all(buffer.reading for buffer in made)
    assert ops._arenas == {}
    made[1].reading = made[0].reading = False
    upload(tables[0], 7)
    assert (len(made), made[0].pairs[0].tolist(), made[1].pairs[0].tolist()) == (3, [0, 7], [0, 1])
    tables[0].set_row(0, [7])  # nothing changes
    tables[0].upload(PER_THREAD_DEFAULT_STREAM)
    assert len(made) == len(ops._ring) == 3


def test_an_upload_inside_an_upload_has_a_buffer_of_its_own(made: list[SlowBuffer]) -> None:
    """A finaliser or signal handler that uploads while an upload on the same stream is under way disturbs nothing."""
    ops = ops_on_slow_buffers()
    outer, inner = (KVPageTable(1, 4, 100, device_ops=ops) for _ in range(2))
    inner.set_row(0, [7, 8])
    outer.set_row(0, [1, 2, 3])
    launch_kernel = ops._launcher.launch

    def interrupted(*arguments: Any, **options: Any) -> None:
        ops._launcher.launch = launch_kernel
        inner.upload(77)
        launch_kernel(*arguments, **options)

    ops._launcher.launch = interrupted
    outer.upload(77)
    assert ops.to_host(outer.kernel_view)[0, 0].tolist() == [1, 2, 3, -1]
    assert ops.to_host(inner.kernel_view)[0, 0].tolist() == [7, 8, -1, -1]
    assert (len(made), len(ops._arenas), [buffer.reading for buffer in made]) == (2, 1, [True, False])


def test_a_broken_row_costs_no_buffer(made: list[SlowBuffer]) -> None:
    """What is refused before anything is enqueued leaves the stream its buffer."""
    ops = ops_on_slow_buffers()
    table = KVPageTable(1, 4, 100, device_ops=ops)
    for turn in range(4):
        table.set_row(0, [turn])
        table.upload(77)
        table.set_row(0, [turn + 1])
        table._rows[0, 0] = 100
        with pytest.raises(InvariantError, match="holds page 100"):
            table.upload(77)
    assert len(made) == 1


def test_threads_do_not_share_a_part_of_a_buffer() -> None:
    """Two threads that upload tables of their own on one stream: what each launch reads later is its own."""
    ops = NumbaDeviceOps()
    wrong: list[list[int]] = []
    together = threading.Barrier(2)

    def read_later(_kernel: Any, _blocks: Any, _stream: Any, _view: int, address: int, count: int, *_rest: int) -> None:
        before = np.ctypeslib.as_array((ctypes.c_int32 * (2 * count)).from_address(address)).copy()
        time.sleep(1e-3)  # lets the other thread run, as the driver's call does
        after = np.ctypeslib.as_array((ctypes.c_int32 * (2 * count)).from_address(address))
        if not np.array_equal(before, after):
            wrong.append(after.tolist())

    def work(number: int) -> None:
        table = KVPageTable(1, 64, 1 << 20, device_ops=ops)
        for turn in range(30):
            table.set_row(0, np.arange(64) + 1000 * turn + 500 * number)
            together.wait()
            table.upload(77)

    ops._launcher.launch = read_later
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(work, number) for number in (0, 1)]:
            result.result()
    assert wrong == []


def test_more_changes_than_an_arena_has_room_for_get_a_larger_buffer(made: list[SlowBuffer]) -> None:
    """A table of 40,000 entries goes up in one launch, and right."""
    ops = ops_on_slow_buffers()
    table = KVPageTable(8, 5000, 40_000, device_ops=ops)
    table.set_row(0, [1, 2])
    table.upload(None)
    rows = np.random.default_rng(3).integers(0, 40_000, (8, 5000))
    table.set_rows(np.arange(8), np.full(8, 5000), rows.ravel())
    launches = ops.num_launches
    table.upload(None)
    assert ops.num_launches == launches + 1
    np.testing.assert_array_equal(ops.to_host(table.kernel_view)[:, 0], rows)
    assert [buffer.capacity for buffer in made] == [1 << 16, 1 << 19]


def test_loading_the_kernels_changes_nothing() -> None:
    """Every kernel is launched once, none of them with work."""
    ops = NumbaDeviceOps()
    cache = HybridCacheManager(hybrid_engine(), None, device_ops=ops)
    ops.reset_lengths(cache, ints(4, 5), None)
    launches = ops.num_launches
    ops.load_kernels(None)
    assert ops.num_launches >= launches + 7
    assert ops.to_host(cache.kv_lengths).tolist() == [4, 5, 0]


def test_a_launch_that_fails_loses_its_buffer(made: list[SlowBuffer]) -> None:
    """The error reaches the caller, the buffer is put away, and the next op works."""
    ops = ops_on_slow_buffers()
    cache = HybridCacheManager(hybrid_engine(max_batch_size=MANY), None, device_ops=ops)
    launch_kernel = ops._launcher.launch

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    ops._launcher.launch = fail
    with pytest.raises(KeyboardInterrupt):
        ops.reset_lengths(cache, run_of(4, 5), None)
    ops._launcher.launch = launch_kernel
    assert kept(ops._ring) == made
    assert len(made) == 1
    assert cache.active_batch_size == 0
    ops.reset_lengths(cache, run_of(4, 5), None)
    assert ops.to_host(cache.kv_lengths).tolist() == run_of(4, 5).tolist()
