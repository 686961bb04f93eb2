"""The ring of staging buffers: nothing is overwritten before the device has read it (H23, H25)."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.slow_buffers import SlowBuffer, kept

from ctxcache.device.numba.staging_ring import ChangeArena, StagingRing


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


class YieldingBuffer(SlowBuffer):
    """A buffer that lets other threads run while it is asked."""

    def is_idle(self) -> bool:
        """Whether the reader is through."""
        idle = not self.reading
        time.sleep(0)
        return idle


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
