"""A GPU that is not there: `numba.cuda` and `cuda.bindings`, as far as the library uses them, on host memory.

It is lazy, as a GPU is: what is enqueued runs when a stream or an event is waited for, and not before.
"""

# ruff: noqa: N802, N815 - the names are the driver's

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda as simulator

NOT_READY = 600


class FakeDriver:
    """The calls of `cuda.bindings.driver` and `cuda.bindings.runtime` that copy, fill, launch and mark."""

    CONTEXTS = 0xC0
    """The primary context of device 0; those of the others follow."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_READY=NOT_READY)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice=3)
    CUstream = CUfunction = cudaStream_t = int

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.events: dict[int, FakeEvent] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.devices: list[int] = []
        self.num_calls = 0
        self._thread = threading.local()
        self.answer = 0
        self.time = 0.0

    @property
    def context(self) -> int:
        """The calling thread's current context; 0 for none."""
        return getattr(self._thread, "context", 0)

    @context.setter
    def context(self, context: int) -> None:
        self._thread.context = context

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        """Return the calling thread's context."""
        return 0, self.context

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        """Replace the calling thread's context."""
        self.context = context
        return (0,)

    def cuCtxGetDevice(self) -> tuple[int, int]:
        """Return the device of the calling thread's context."""
        return 0, self.context - self.CONTEXTS

    def note(self) -> None:
        """Note in which device's context a call is made."""
        self.devices.append(self.context - self.CONTEXTS)

    def CUevent(self, handle: int) -> FakeEvent:
        """Return the event with this handle."""
        return self.events[handle]

    def run(self) -> None:
        """Let everything happen that was enqueued."""
        while self.queue:
            self.queue.pop(0)()

    def enqueue(self, work: Callable[[], object]) -> tuple[int]:
        """Take work that runs later, and note in whose context; the answer is what the test wants."""
        self.num_calls += 1
        self.note()
        self.queue.append(work)
        return (self.answer,)

    def _copy(self, target: int, source: int, num_bytes: int, *_kind_and_stream: int) -> tuple[int]:
        return self.enqueue(lambda: ctypes.memmove(target, source, num_bytes))

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cudaMemcpyAsync = _copy

    def cuMemsetD8Async(self, target: int, value: int, num_bytes: int, _stream: int) -> tuple[int]:
        """Fill bytes."""
        return self.enqueue(lambda: ctypes.memset(target, value, num_bytes))

    def cuMemsetD32Async(self, target: int, value: int, num_words: int, _stream: int) -> tuple[int]:
        """Fill words with zeros."""
        assert value == 0
        return self.enqueue(lambda: ctypes.memset(target, 0, 4 * num_words))

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:
        """Make a stream that does not order with the default stream."""
        assert flags == self.CUstream_flags.CU_STREAM_NON_BLOCKING
        return 0, 0x5000

    def cuLaunchKernel(self, function: int, *rest: int) -> tuple[int]:
        """Note the handle, the grid and the stream of a launch."""
        self.launches.append((function, rest[:3], rest[7]))
        return self.enqueue(lambda: None)

    def cuStreamQuery(self, _stream: int) -> tuple[int]:
        """Say whether the stream is idle; each question lets one more thing happen."""
        if self.answer or not self.queue:
            return (self.answer,)
        self.queue.pop(0)()
        return (NOT_READY,)

    def cuEventRecord(self, event: FakeEvent, _stream: int) -> tuple[int]:
        """Enqueue the mark of an event."""
        event.passed = False
        return self.enqueue(event.pass_by)

    def cuEventQuery(self, event: FakeEvent) -> tuple[int]:
        """Say whether the mark was passed."""
        self.note()
        return (0 if event.passed else NOT_READY,)


class FakeEvent:
    """An event whose mark is passed when the queue has come that far."""

    def __init__(self, driver: FakeDriver) -> None:
        self.passed = True
        self.handle = 100 + len(driver.events)
        self.time = 0.0
        self._driver = driver
        driver.events[self.handle] = self

    def pass_by(self) -> None:
        """The queue has come to the mark."""
        self.passed = True
        self.time = self._driver.time

    def record(self, stream: FakeStream) -> None:
        """Enqueue the mark."""
        self._driver.cuEventRecord(self, stream.handle)

    def elapsed_time(self, other: FakeEvent) -> float:
        """Milliseconds to another event."""
        return other.time - self.time

    def synchronize(self) -> None:
        """Wait for the mark."""
        self._driver.note()
        self._driver.run()


class FakeStream:
    """A stream of Numba's."""

    def __init__(self, driver: FakeDriver, handle: int) -> None:
        self.handle = handle
        self._driver = driver

    def synchronize(self) -> None:
        """Wait for everything."""
        self._driver.note()
        self._driver.run()


class FakeArray:
    """A Numba device array over host memory, filled with what others left there."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.host = np.full(shape, 0x5A, dtype)
        self.nbytes = self.host.nbytes
        self.device_ctypes_pointer = SimpleNamespace(value=self.host.ctypes.data)

    def __array__(self, *_arguments: Any, **_options: Any) -> np.ndarray:
        return self.host


class FakeCuda:
    """`numba.cuda`."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.num_contexts = 0
        self.available = True
        self.device_array = self.mapped_array = FakeArray

    def is_available(self) -> bool:
        """Whether there is a GPU."""
        return self.available

    def cuda_error(self) -> str:
        """Say why there is none."""
        return "the driver\n is asleep"

    def current_context(self) -> None:
        """Enter the primary context of device 0 where the thread has none."""
        self.num_contexts += 1
        self.driver.context = self.driver.context or self.driver.CONTEXTS

    def stream(self) -> FakeStream:
        """Make a stream."""
        return FakeStream(self.driver, 0x7000)

    def external_stream(self, handle: int) -> FakeStream:
        """Wrap a stream of somebody else's."""
        return FakeStream(self.driver, handle)

    def default_stream(self) -> FakeStream:
        """Return the default stream."""
        return FakeStream(self.driver, 0)

    def event(self, *, timing: bool = True) -> FakeEvent:
        """Make an event."""
        del timing
        return FakeEvent(self.driver)

    def jit(self, function: Callable[..., object]) -> Any:
        """Return a kernel that Numba's simulator runs."""
        return simulator.jit(function)

    def nanosleep(self, nanoseconds: int) -> None:
        """Keep the stream busy."""

        def sleep() -> None:
            self.driver.time += nanoseconds / 1e6

        self.driver.queue.append(sleep)


def _over(given: Any) -> np.ndarray:
    """Return an array over memory that another library lends, or of plain values."""
    interface = getattr(given, "__cuda_array_interface__", None)
    return np.asarray(given if interface is None else SimpleNamespace(__array_interface__=interface))


def fake_array_library(name: str) -> ModuleType:
    """Return what the benchmark uses of PyTorch (`torch`) or CuPy (`cupy`), on host memory."""
    library: Any = ModuleType(name)
    library.__spec__ = ModuleSpec(name, None)
    library.cuda = SimpleNamespace(is_available=lambda: True, ExternalStream=nullcontext, stream=lambda stream: stream)
    if name == "torch":
        library.as_tensor = lambda given, device: _over(given)
        library.tensor = lambda given, device: np.array(given)
    else:
        library.asarray = _over
    return library
