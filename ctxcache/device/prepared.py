"""Prepared launches: a compiled kernel's own handle, and its arguments packed where the driver reads them.

Numba's dispatch looks up the signature, builds arguments and checks for exceptions at every launch: 15-56 us on an H200.
The driver's own call on the handle of the same compiled kernel takes 4 us. Nothing here imports `numba.cuda`; the driver is
`cuda.bindings.driver`, which numba-cuda stands on, or anything with the same calls.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import DeviceError

_MAX_STREAMS = 1024


class Driver:
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


class PreparedKernel:
    """One compiled kernel whose parameters are all int64.

    Args:
        driver: launches.
        function: the driver's handle of the compiled kernel.
        num_arguments: parameters of the kernel, the words apart.
        num_words: parameters behind them that carry values, see `ctxcache.device.inline`.
        owner: whatever keeps the handle valid.
    """

    __slots__ = (
        "_driver", "_function", "_launch", "_lock", "_owner", "_pack", "_parameters", "_pointers", "_values", "_words",
    )  # fmt: skip

    def __init__(
        self, driver: Driver, function: int, num_arguments: int, num_words: int = 0, *, owner: Any = None
    ) -> None:
        self._driver = driver
        self._function = driver.api.CUfunction(function)
        self._launch = driver.api.cuLaunchKernel
        self._owner = owner
        # The driver reads each argument through a pointer, and has copied them all when the call returns.
        num_parameters = num_arguments + num_words
        self._values: Any = np.zeros(num_parameters, np.int64)
        first = int(self._values.ctypes.data)
        self._pointers = (ctypes.c_void_p * num_parameters)(*(first + 8 * i for i in range(num_parameters)))
        self._parameters = ctypes.addressof(self._pointers)
        self._pack = struct.Struct(f"{num_arguments}q").pack_into
        self._words = self._values[num_arguments:]
        self._lock = threading.Lock()

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
        with self._lock:  # the call lets other threads run while it still reads the arguments
            self._pack(self._values, 0, *arguments)
            if words is not None:
                self._words[: len(words)] = words
            result = self._launch(self._function, *blocks, threads, 1, 1, 0, stream, self._parameters, 0)
        self._driver.check(result)
