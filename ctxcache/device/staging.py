"""Host buffers that kernels read later: a ring in which nothing is overwritten before it has been read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.ops import Int32s

_MIN_BYTES = 1 << 16
_MAX_BUFFERS = 64
_LEAST_PAIRS = 512


class Buffer(Protocol):
    """What the ring needs of a buffer; `buffers.StagingBuffer` is one."""

    capacity: int
    host: NDArray[np.uint8]
    pairs: Int32s
    address: int

    def copy_to_device(self, num_bytes: int, stream: Any) -> int:
        """Enqueue a copy of the first bytes to device memory beside, and return its address."""

    def mark_used(self, stream: Any) -> None:
        """Enqueue the mark behind which nothing reads the buffer any more."""

    def is_idle(self) -> bool:
        """Whether the mark has been passed."""

    def wait(self) -> None:
        """Wait until the mark has been passed."""


class StagingRing:
    """Buffers in the order of their last use. Only one whose mark the device has passed is written again. For any thread.

    While earlier uploads are outstanding the ring grows instead of waiting, up to `_MAX_BUFFERS` buffers; a stream that
    is further behind than that is waited for.
    """

    def __init__(self, make_buffer: Callable[[int], Buffer]) -> None:
        self._make_buffer = make_buffer
        self._lock = threading.Lock()
        self._buffers: deque[Buffer] = deque()
        self._lost: list[Buffer] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self, num_bytes: int) -> Buffer:
        """Return a buffer of at least `num_bytes` that nothing reads. Follow with `give_back` or `lose`."""
        with self._lock:
            if self._buffers and self._oldest_is_free():
                oldest = self._buffers.popleft()
                if oldest.capacity >= num_bytes:
                    return oldest
        return self._make_buffer(max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length()))

    def give_back(self, buffer: Buffer, stream: Any) -> None:
        """Return a buffer whose reader has been enqueued on `stream`."""
        buffer.mark_used(stream)
        with self._lock:
            self._buffers.append(buffer)

    def lose(self, buffer: Buffer) -> None:
        """Put away a buffer whose reader may or may not have been enqueued: kept alive, never written again."""
        self._lost.append(buffer)

    def _oldest_is_free(self) -> bool:
        oldest = self._buffers[0]
        if oldest.is_idle():
            return True
        if len(self._buffers) < _MAX_BUFFERS:
            return False
        oldest.wait()
        return True


class ChangeArena:
    """Room for the page-table changes of one stream: consecutive parts of one staging buffer.

    No part is written again before the mark behind all of them has been passed. So most uploads set no mark and ask for
    none, which are two driver calls of the three that an upload would take.
    """

    def __init__(self, ring: StagingRing) -> None:
        self._ring = ring
        self._buffer: Buffer | None = None
        self._num_used = 0

    def room(self, stream: Any, least: int = _LEAST_PAIRS) -> Int32s:
        """Return unused pairs, `int32[n, 2]` with `n >= least`. A buffer that is full is marked on the stream."""
        if self._buffer is not None and self._num_used + least > len(self._buffer.pairs):
            self.retire(stream)
        if self._buffer is None:
            self._buffer = self._ring.take(8 * least)
            self._num_used = 0
        return self._buffer.pairs[self._num_used :]

    def address(self) -> int:
        """Return where kernels find the unused pairs."""
        return 0 if self._buffer is None else self._buffer.address + 8 * self._num_used

    def use(self, num_pairs: int) -> None:
        """Take the first of the unused pairs: their reader has been enqueued."""
        self._num_used += num_pairs

    def retire(self, stream: Any) -> None:
        """Mark the buffer on the stream behind its readers, and give it back."""
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        try:
            self._ring.give_back(buffer, stream)
        except BaseException:
            self._ring.lose(buffer)
            raise

    def lose(self) -> None:
        """Put the buffer away: a reader may or may not have been enqueued."""
        if self._buffer is not None:
            self._ring.lose(self._buffer)
            self._buffer = None
