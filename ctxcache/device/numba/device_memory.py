"""Memory of a CUDA device, and host memory that its kernels read: allocated, copied and marked."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.arrays import ArrayView
from ctxcache.device.numba.context import SIMULATED, CudaDevice, cuda
from ctxcache.device.streams import stream_handle


class DeviceMemory:
    """Allocates and copies memory of one device, waiting for each copy, on a stream of its own."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream: Any = None

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a zero-filled Numba device array."""
        if SIMULATED:
            return cuda.to_device(np.zeros(shape, dtype))
        with self._device.current():
            array = cuda.device_array(shape, dtype)
            if array.nbytes:
                address = array.device_ctypes_pointer.value
                self._wait(lambda api, stream: api.cuMemsetD8Async(address, 0, array.nbytes, stream))
        return array

    def read(self, view: ArrayView) -> NDArray[Any]:
        """Return a host copy of a contiguous device array."""
        host = np.empty(view.shape, view.dtype)
        if SIMULATED:
            ctypes.memmove(host.ctypes.data, view.address, host.nbytes)
        elif host.nbytes:
            self._wait(lambda api, stream: api.cuMemcpyDtoHAsync(host.ctypes.data, view.address, host.nbytes, stream))
        return host

    def write(self, view: ArrayView, host: NDArray[Any]) -> None:
        """Copy a C-contiguous host array of as many bytes over a contiguous device array."""
        if SIMULATED:
            ctypes.memmove(view.address, host.ctypes.data, host.nbytes)
        elif host.nbytes:
            self._wait(lambda api, stream: api.cuMemcpyHtoDAsync(view.address, host.ctypes.data, host.nbytes, stream))

    def _wait(self, enqueue: Any) -> None:
        with self._device.current() as driver:
            stream = self._stream  # another thread may be setting it
            if stream is None:
                stream = self._stream = cuda.stream()
            driver.check(enqueue(driver.api, driver.stream(stream_handle(stream))))
            stream.synchronize()


class StagingBuffer:
    """Pinned host memory that kernels of a device can read, and memory of the device of the same size beside it.

    Attributes:
        capacity: bytes.
        host: `uint8[capacity]`, the host's side.
        pairs: `int32[capacity / 8, 2]`, the same memory.
        address: where kernels find it.
    """

    def __init__(self, capacity: int, device: CudaDevice) -> None:
        self.capacity = capacity
        self._device = device
        if SIMULATED:
            self.host = np.zeros(capacity, np.uint8)
            self.address = self.host.ctypes.data
        else:
            with device.current() as driver:
                mapped = cuda.mapped_array(capacity, np.uint8)
                self._event = cuda.event(timing=False)
                self._mark = driver.api.CUevent(int(self._event.handle))
            self.host = np.asarray(mapped).view(np.ndarray)
            self.address = int(mapped.device_ctypes_pointer.value)
            self._mapped = mapped
        self.pairs = self.host.view(np.int32).reshape(-1, 2)
        self._host_address = int(self.host.ctypes.data)
        self._beside: Any = None
        self._beside_address = 0

    def copy_to_device(self, num_bytes: int, stream: Any) -> int:
        """Enqueue a copy of the first bytes to the device memory beside, and return its address."""
        if SIMULATED:
            if self._beside is None:
                self._beside = np.zeros(self.capacity, np.uint8)
                self._beside_address = int(self._beside.ctypes.data)
            ctypes.memmove(self._beside_address, self._host_address, num_bytes)
            return self._beside_address
        with self._device.current() as driver:
            if self._beside is None:
                self._beside = cuda.device_array(self.capacity, np.uint8)
                self._beside_address = int(self._beside.device_ctypes_pointer.value)
            driver.copy_to_device(self._beside_address, self._host_address, num_bytes, stream_handle(stream))
        return self._beside_address

    def mark_used(self, stream: Any) -> None:
        """Enqueue the mark behind which nothing reads this buffer any more."""
        if not SIMULATED:
            with self._device.current() as driver:
                driver.record(self._mark, stream_handle(stream))

    def is_idle(self) -> bool:
        """Whether the mark has been passed. The simulator has always passed it."""
        if SIMULATED:
            return True
        with self._device.current() as driver:
            return driver.has_passed(self._mark)

    def wait(self) -> None:
        """Wait until the mark has been passed."""
        if not SIMULATED:
            with self._device.current():
                self._event.synchronize()
