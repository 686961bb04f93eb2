"""The driver's own calls, and prepared launches: a compiled kernel's handle, and its arguments packed where the driver reads them.

Numba's dispatch looks up the signature, builds arguments and checks for exceptions at every launch: 15-56 us on an H200.
The driver's own call on the handle of the same compiled kernel takes 4 us. Nothing here imports `numba.cuda`; the driver is
`cuda.bindings.driver`, which numba-cuda stands on, or anything with the same calls.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import DeviceError

_MAX_STREAMS = 1024


class DriverCalls:
    """The few driver calls that enqueue, with what they need kept ready.

    Every call works in the calling thread's current context, and raises `DeviceError` with the driver's code when it fails.

    Args:
        api: `cuda.bindings.driver`, or a stand-in.
    """

    def __init__(self, api: Any) -> None:
        self.api = api
        self._success = api.CUresult.CUDA_SUCCESS
        self._not_ready = api.CUresult.CUDA_ERROR_NOT_READY
        self._streams: dict[int, Any] = {}

    def stream(self, handle: int) -> Any:
        """Return the driver's object for a stream's handle. Making one costs as much as a call."""
        stream = self._streams.get(handle)
        if stream is None:
            if len(self._streams) >= _MAX_STREAMS:
                self._streams.clear()
            stream = self._streams[handle] = self.api.CUstream(handle)
        return stream

    def value(self, result: tuple[Any, Any]) -> Any:
        """Return what a call that succeeded gave."""
        self.check(result)
        return result[1]

    def check(self, result: Any) -> None:
        """Raise for a call that did not succeed."""
        code = result[0] if isinstance(result, tuple) else result
        if code != self._success:
            raise DeviceError(f"the CUDA driver answered {code!r}; see its documentation for this code")

    def copy_to_device(self, target: int, source: int, num_bytes: int, handle: int) -> None:
        """Enqueue a copy from host memory, which must be pinned, and stay as it is until the stream has passed."""
        self.check(self.api.cuMemcpyHtoDAsync(target, source, num_bytes, self.stream(handle)))

    def record(self, event: Any, handle: int) -> None:
        """Enqueue the mark of an event."""
        self.check(self.api.cuEventRecord(event, self.stream(handle)))

    def has_passed(self, event: Any) -> bool:
        """Whether the last mark of an event has been passed."""
        result = self.api.cuEventQuery(event)
        if result[0] == self._not_ready:
            return False
        self.check(result)
        return True


class _Arguments:
    """Memory that the driver reads a launch's parameters from, each through a pointer.

    Attributes:
        values: every parameter, int64.
        words: the last of them, a view.
        address: of the pointers, for the driver.
    """

    __slots__ = ("_pointers", "address", "values", "words")

    def __init__(self, num_arguments: int, num_words: int) -> None:
        count = num_arguments + num_words
        self.values: Any = np.zeros(count, np.int64)
        self.words: NDArray[np.int64] = self.values[num_arguments:]
        first = int(self.values.ctypes.data)
        self._pointers = (ctypes.c_void_p * count)(*(first + 8 * i for i in range(count)))
        self.address = ctypes.addressof(self._pointers)


class PreparedKernel:
    """One compiled kernel whose parameters are all int64.

    Args:
        driver: launches.
        function: the driver's handle of the compiled kernel.
        num_arguments: parameters of the kernel, the words apart.
        num_words: parameters behind them that carry values, see `ctxcache.device.numba.parameter_words`.
        owner: whatever keeps the handle valid.
    """

    __slots__ = ("_driver", "_free", "_function", "_launch", "_num_arguments", "_num_words", "_owner", "_pack")

    def __init__(
        self, driver: DriverCalls, function: int, num_arguments: int, num_words: int = 0, *, owner: Any = None
    ) -> None:
        self._driver = driver
        self._function = driver.api.CUfunction(function)
        self._launch = driver.api.cuLaunchKernel
        self._owner = owner
        self._num_arguments = num_arguments
        self._num_words = num_words
        self._pack = struct.Struct(f"{num_arguments}q").pack_into
        self._free: list[_Arguments] = []

    def launch(
        self,
        blocks: tuple[int, int, int],
        threads: int,
        handle: int,
        arguments: Sequence[int],
        words: NDArray[np.int64] | None = None,
    ) -> None:
        """Enqueue the kernel on the stream with this handle; of its words, the first are given.

        Raises:
            DeviceError: the driver refused; the kernel is not enqueued.
        """
        stream = self._driver.stream(handle)
        # Taken, not shared: a launch meanwhile, in another thread, a finaliser or a signal handler, takes memory of its own.
        try:
            taken = self._free.pop()
        except IndexError:
            taken = _Arguments(self._num_arguments, self._num_words)
        self._pack(taken.values, 0, *arguments)
        if words is not None:
            taken.words[: len(words)] = words
        result = self._launch(self._function, *blocks, threads, 1, 1, 0, stream, taken.address, 0)
        self._free.append(taken)  # the driver copied what it points to before the call returned
        self._driver.check(result)
