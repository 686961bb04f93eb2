"""Staging buffers whose readers are through when a test says so."""

from __future__ import annotations

from typing import Any

from ctxcache.device.numba.context import CudaDevice
from ctxcache.device.numba.device_memory import StagingBuffer
from ctxcache.device.numba.staging_ring import StagingRing


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


def kept(ring: StagingRing) -> list[Any]:
    """The buffers that were taken and not given back, which the ring keeps alive."""
    return [buffer for buffer in ring._alive.values() if buffer not in ring._buffers]
