"""Host buffers that kernels read later: a ring in which nothing is overwritten before it has been read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.ops import Int32s

_MIN_BYTES = 1 << 14
_MAX_BUFFERS = 64


class Buffer(Protocol):
    """What the ring needs of a buffer; `launch.StagingBuffer` is one."""

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
    """Buffers in the order of their last use. Only one whose mark the device has passed is written again.

    While earlier uploads are outstanding the ring grows instead of waiting, up to `_MAX_BUFFERS` buffers; a stream that
    is further behind than that is waited for.
    """

    def __init__(self, make_buffer: Callable[[int], Buffer]) -> None:
        self._make_buffer = make_buffer
        self._buffers: deque[Buffer] = deque()
        self._lost: list[Buffer] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self, num_bytes: int) -> Buffer:
        """Return a buffer of at least `num_bytes` that nothing reads. Follow with `give_back`, `put_back` or `lose`."""
        if self._buffers and self._oldest_is_free():
            oldest = self._buffers.popleft()
            if oldest.capacity >= num_bytes:
                return oldest
        return self._make_buffer(max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length()))

    def give_back(self, buffer: Buffer, stream: Any) -> None:
        """Return a buffer whose reader has been enqueued on `stream`."""
        buffer.mark_used(stream)
        self._buffers.append(buffer)

    def put_back(self, buffer: Buffer) -> None:
        """Return a buffer that was not used after all: nothing reads it."""
        self._buffers.appendleft(buffer)

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
