"""Host buffers that kernels read later: a ring in which nothing is overwritten before it has been read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ctxcache.arguments import Int32s

if TYPE_CHECKING:
    from ctxcache.device.numba.device_memory import StagingBuffer  # needs a CUDA target

_MIN_BYTES = 1 << 16
_MAX_BUFFERS = 64
_LEAST_PAIRS = 512


class StagingRing:
    """Buffers in the order of their last use. Only one whose mark the device has passed is written again.

    While earlier uploads are outstanding the ring grows instead of waiting, up to `_MAX_BUFFERS` buffers. Where all of them are
    still to be read, the oldest is waited for.

    For any thread, and for finalisers and signal handlers within a call: there is no lock. Whoever has taken a buffer out of
    the ring has it alone, and only then asks whether it is idle.

    A buffer that was taken and is not given back, because its launch failed or was interrupted, may or may not have a reader:
    it is kept alive, and never written again.
    """

    def __init__(self, make_buffer: Callable[[int], StagingBuffer]) -> None:
        self._make_buffer = make_buffer
        self._buffers: deque[StagingBuffer] = deque()
        self._alive: dict[int, StagingBuffer] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self, num_bytes: int) -> StagingBuffer:
        """Return a buffer of at least `num_bytes` that nothing reads. Follow with `give_back` once its reader is enqueued."""
        buffer = self._take_idle()
        if buffer is not None:
            if buffer.capacity >= num_bytes:
                return buffer
            del self._alive[id(buffer)]
        buffer = self._make_buffer(max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length()))
        self._alive[id(buffer)] = buffer
        return buffer

    def give_back(self, buffer: StagingBuffer, stream: Any) -> None:
        """Return a buffer whose reader has been enqueued on `stream`."""
        buffer.mark_used(stream)
        self._buffers.append(buffer)

    def _take_idle(self) -> StagingBuffer | None:
        """Take a buffer that nothing reads; `None` where a new one is to be made."""
        try:
            oldest = self._buffers.popleft()
        except IndexError:
            return None
        if oldest.is_idle():
            return oldest
        if len(self._buffers) + 1 < _MAX_BUFFERS:
            self._buffers.appendleft(oldest)
            return None
        for buffer in self._buffers.copy():  # those of other streams may be idle behind the oldest
            if buffer.is_idle() and self._remove(buffer):
                self._buffers.appendleft(oldest)
                if buffer.is_idle():  # still: somebody may have used it before it was removed
                    return buffer
                self._buffers.append(buffer)
                return None
        oldest.wait()
        return oldest

    def _remove(self, buffer: StagingBuffer) -> bool:
        """Take one buffer out of the ring; `False` where somebody else has."""
        try:
            self._buffers.remove(buffer)
        except ValueError:
            return False
        return True


class ChangeArena:
    """Room for the page-table changes of one stream: consecutive parts of one staging buffer.

    No part is written again before the mark behind all of them has been passed. So most uploads set no mark and ask for
    none, which are two driver calls of the three that an upload would take.
    """

    def __init__(self, ring: StagingRing) -> None:
        self._ring = ring
        self._buffer: StagingBuffer | None = None
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
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._ring.give_back(buffer, stream)
