"""Staging buffers: nothing is overwritten before the device has read it (H23, H25)."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.device import hybrid_engine, in_another_thread, ints

from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numba.context import CudaDevice
from ctxcache.device.numba.device_memory import StagingBuffer
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numba.parameter_words import INLINE_INTS
from ctxcache.device.numba.staging_ring import ChangeArena, StagingRing
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.streams import PER_THREAD_DEFAULT_STREAM
from ctxcache.errors import InvariantError


class SlowBuffer(StagingBuffer):
    """A buffer whose reader is still running until the test says otherwise."""

    made: list[SlowBuffer] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, CudaDevice())
        self.reading = False
        self.waits = 0
        self.made.append(self)

    def mark_used(self, numba_stream: Any) -> None:
        """The reader has been enqueued."""
        super().mark_used(numba_stream)
        self.reading = True

    def is_idle(self) -> bool:
        """Whether the reader is through."""
        return not self.reading

    def wait(self) -> None:
        """Let the reader finish."""
        self.waits += 1
        self.reading = False


def ops_on_slow_buffers() -> NumbaDeviceOps:
    """Ops whose staging buffers are read when the test says so."""
    ops = NumbaDeviceOps()
    ops._ring = StagingRing(SlowBuffer)
    return ops


def kept(ring: StagingRing) -> list[Any]:
    """The buffers that were taken and not given back, which the ring keeps alive."""
    return [buffer for buffer in ring._alive.values() if buffer not in ring._buffers]


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


def test_a_buffer_is_written_again_only_when_its_reader_is_through(made: list[SlowBuffer]) -> None:
    """While uploads are outstanding the ring grows; afterwards it turns round its buffers and allocates nothing."""
    ring = StagingRing(SlowBuffer)
    for _ in range(3):
        ring.give_back(ring.take(100), 0)
    assert len(made) == 3
    made[0].reading = False
    assert ring.take(100) is made[0]
    ring.give_back(made[0], 0)
    made[1].reading = made[2].reading = made[0].reading = False
    for turn in range(9):
        buffer = ring.take(100)
        assert buffer is made[(turn + 1) % 3]
        ring.give_back(buffer, 0)
        made[(turn + 1) % 3].reading = False
    assert len(made) == len(ring) == 3


def test_the_oldest_reader_is_waited_for_when_the_ring_is_full(made: list[SlowBuffer]) -> None:
    """A stream far behind does not make the ring grow for ever: at 64 buffers the oldest is waited for."""
    ring = StagingRing(SlowBuffer)
    for _ in range(70):
        ring.give_back(ring.take(10), 0)
    assert len(made) == len(ring) == 64
    assert [buffer.waits for buffer in made] == [1] * 6 + [0] * 58


def test_a_stalled_stream_does_not_hold_up_the_others(made: list[SlowBuffer]) -> None:
    """Where the ring is full, an idle buffer behind a busy one is taken, and nothing is waited for."""
    ring = StagingRing(SlowBuffer)
    for _ in range(64):
        ring.give_back(ring.take(10), 0)
    for buffer in made[5:]:
        buffer.reading = False
    assert ring.take(10) is made[5]
    assert (len(ring), sum(buffer.waits for buffer in made)) == (63, 0)


def test_small_buffers_make_room_for_large_ones(made: list[SlowBuffer]) -> None:
    """A buffer that is too small is replaced, not added to; capacities are powers of two."""
    ring = StagingRing(SlowBuffer)
    ring.give_back(ring.take(100), 0)
    made[0].reading = False
    large = ring.take(100_000)
    assert large.capacity == 1 << 17
    ring.give_back(large, 0)
    assert len(ring) == 1


def test_a_lost_buffer_is_kept_and_never_used_again(made: list[SlowBuffer]) -> None:
    """After a failed launch nobody knows whether a reader was enqueued: what is not given back stays alive and untouched."""
    ring = StagingRing(SlowBuffer)
    lost = ring.take(10)
    other = ring.take(10)
    assert other is not lost
    ring.give_back(other, 0)
    other.reading = False
    assert ring.take(10) is other
    gc.collect()
    assert kept(ring) == [lost, other]


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


def test_an_arena_marks_a_buffer_once_it_is_full(made: list[SlowBuffer]) -> None:
    """Parts follow each other; a full buffer is marked, and the next one is another while its readers are running."""
    arena = ChangeArena(StagingRing(SlowBuffer))
    addresses = []
    for _ in range(3):
        pairs = arena.room(0, 3000)
        assert len(pairs) >= 3000
        addresses.append(arena.address())
        pairs[:3000] = len(addresses)
        arena.use(3000)
    assert len(made) == 2
    assert addresses[:2] == [made[0].address, made[0].address + 8 * 3000]
    assert (made[0].reading, made[1].reading) == (True, False)
    assert [int(value) for value in made[0].pairs[[0, 2999, 3000, 5999], 0]] == [1, 1, 2, 2]
    arena.retire(0)
    assert made[1].reading
    assert len(arena.room(0)) == len(made[2].pairs)


def test_a_full_buffer_that_cannot_be_marked_is_lost(made: list[SlowBuffer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its mark nobody knows when its readers are through: it is put away, and the next part is elsewhere."""
    ring = StagingRing(SlowBuffer)
    arena = ChangeArena(ring)
    arena.use(len(arena.room(0)))

    def refuse(buffer: SlowBuffer, stream: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as failing:
        failing.setattr(SlowBuffer, "mark_used", refuse)
        with pytest.raises(KeyboardInterrupt):
            arena.room(0)
    assert (kept(ring), len(ring)) == (made[:1], 0)
    arena.retire(0)  # there is no buffer any more
    arena.room(0)
    assert arena.address() == made[1].address
    assert kept(ring) == made


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


def test_threads_share_no_buffer_of_a_ring() -> None:
    """A buffer is one thread's between taking and giving back, and never one whose reader is running."""
    ring = StagingRing(YieldingBuffer)
    taken: set[int] = set()
    clashes: list[str] = []

    def work() -> None:
        for turn in range(400):
            buffer = ring.take(100)
            if id(buffer) in taken or buffer.reading:
                clashes.append("shared" if id(buffer) in taken else "still read")
            taken.add(id(buffer))
            time.sleep(0)
            taken.discard(id(buffer))
            ring.give_back(buffer, 1)
            buffer.reading = turn % 3 == 0

    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(work) for _ in range(4)]:
            result.result()
    assert clashes == []


@pytest.mark.parametrize("full", [False, True], ids=["growing", "full"])
@pytest.mark.parametrize("call", ["is_idle", "mark_used"])
def test_a_ring_is_used_inside_its_own_calls(
    made: list[SlowBuffer], monkeypatch: pytest.MonkeyPatch, call: str, full: bool
) -> None:
    """A finaliser or signal handler may upload at any moment of an upload: nobody waits, and no buffer has two users."""
    ring = StagingRing(SlowBuffer)
    for _ in range(64 if full else 2):
        ring.give_back(ring.take(10), 0)
    made[1].reading = False
    original = getattr(SlowBuffer, call)
    inner: list[Any] = []

    def interrupted(buffer: SlowBuffer, *arguments: Any) -> Any:
        monkeypatch.setattr(SlowBuffer, call, original)
        inner.append(ring.take(10))
        answer = original(buffer, *arguments)
        ring.give_back(inner[0], 0)
        return answer

    outer = ring.take(10)
    monkeypatch.setattr(SlowBuffer, call, interrupted)
    if call == "is_idle":
        outer = ring.take(10)
    ring.give_back(outer, 0)
    assert len(inner) == 1
    assert inner[0] is not outer
    assert len(set(map(id, ring._buffers))) == len(ring)
    assert kept(ring) == [] if call == "mark_used" else len(kept(ring)) == 1


class YieldingBuffer(SlowBuffer):
    """A buffer that lets other threads run while it is asked."""

    def is_idle(self) -> bool:
        """Whether the reader is through."""
        idle = not self.reading
        time.sleep(0)
        return idle


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
