"""Clocks for device work: what the GPU takes, what the host takes, and what both take together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctxcache.device.numba.context import SIMULATED, cuda
from ctxcache.device.numba.launch import Launcher
from ctxcache.device.streams import stream_handle
from ctxcache.errors import DeviceError

_GATE_MS = 12
_NAP_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians in microseconds.

    Attributes:
        device: between two CUDA events around the work, enqueued behind something else so that the GPU never waits for
            the host; under the simulator, which has no clock, the host's time.
        host: until the calls have returned.
        wall: from the first call on an idle stream until the stream is idle again.

    For host and wall the stream is waited for by asking again and again, as a runtime does that has the next step ready: a
    processor that sleeps in between adds tens of microseconds to whatever it does next.
    """

    device: float
    host: float
    wall: float


class Clock:
    """Times work on one stream.

    Args:
        stream: where the work goes.
        repeats: of each measurement; the median counts.
    """

    def __init__(self, stream: Any, repeats: int) -> None:
        self.repeats = repeats
        self._launcher = Launcher()
        self._numba_stream = self._launcher.numba_stream(stream)

        def nap(count: int) -> None:
            for _ in range(count):
                cuda.nanosleep(_NAP_NS)

        self._nap = None if SIMULATED else cuda.jit(nap)
        self._stream = stream
        self._driver: Any = None
        if not SIMULATED:
            from cuda.bindings import driver  # noqa: PLC0415 - is not there under the simulator

            self._driver = driver
            self._driver_stream = driver.CUstream(stream_handle(stream))

    def time(self, work: Callable[[], object]) -> Timing:
        """Return medians of a piece of work, after two runs that do not count."""
        for _ in range(2):
            work()
        self.wait()
        host, wall = [], []
        for _ in range(self.repeats):
            started = time.perf_counter()
            work()
            host.append(time.perf_counter() - started)
            self._ask_until_idle()
            wall.append(time.perf_counter() - started)
        device = [self._behind_a_gate(work) for _ in range(self.repeats)]
        return Timing(*(1e6 * statistics.median(values) for values in (device, host, wall)))

    def wait(self) -> None:
        """Wait until the stream is idle."""
        self._numba_stream.synchronize()

    def _ask_until_idle(self) -> None:
        if self._driver is None:
            return
        while True:
            (code,) = self._driver.cuStreamQuery(self._driver_stream)
            if code == self._driver.CUresult.CUDA_SUCCESS:
                return
            if code != self._driver.CUresult.CUDA_ERROR_NOT_READY:
                raise DeviceError(f"the CUDA driver answered {code!r} while a benchmark waited")

    def _behind_a_gate(self, work: Callable[[], object]) -> float:
        if self._nap is None:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        before, after = cuda.event(), cuda.event()
        self._launcher.launch(self._nap, (1, 1, 1), self._stream, _GATE_MS)
        before.record(self._numba_stream)
        work()
        after.record(self._numba_stream)
        self.wait()
        return float(before.elapsed_time(after)) / 1e3
