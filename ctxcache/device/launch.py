"""The one module that imports `numba.cuda`: which target there is, memory, events, and launching kernels.

Kernels take integers alone: addresses and counts. Numba builds an argument structure for every array it is passed,
which costs several microseconds each; an integer costs next to nothing and works for arrays of any library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import warnings
from functools import lru_cache
from inspect import signature
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numba import config, cuda, types
from numpy.typing import NDArray

from ctxcache.device.arrays import CUDA, ArrayView
from ctxcache.device.prepared import Driver, PreparedKernel
from ctxcache.device.streams import stream_handle
from ctxcache.errors import ContractError

__all__ = [
    "MAX_BLOCKS",
    "SIMULATED",
    "THREADS",
    "DeviceMemory",
    "Grid",
    "Launcher",
    "StagingBuffer",
    "blocks_for",
    "blocks_for_runs",
    "cuda",
    "device_address",
    "kernels_of",
    "missing_target",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
"""Whether kernels run under Numba's simulator, on host memory."""

THREADS = 4 if SIMULATED else 128
"""Threads of a block. The simulator makes an OS thread of each."""

MAX_BLOCKS = (2, 2, 2) if SIMULATED else (1024, 65535, 65535)
"""Most blocks along each axis; kernels loop over what is left."""

Grid: TypeAlias = tuple[int, int, int]

_ROUND_BYTES = 64
"""What a thread moves in one round of four 16-byte words."""

_MIN_BLOCKS_OF_RUN = 16
_BUSY_BLOCKS = 4096

_MAX_CACHED_CONFIGURATIONS = 1024


def missing_target() -> str | None:
    """Say why kernels cannot run here, or `None` when they can: on a GPU with numba-cuda, or simulated."""
    if SIMULATED:
        return None
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed"
    if not cuda.is_available():
        return " ".join(str(cuda.cuda_error() or "the driver finds no device").split())
    return None


@lru_cache(maxsize=4096)
def blocks_for(items: int, parts: int = 1, jobs: int = 1) -> Grid:
    """Return a grid for `items` pieces of work in each of `parts` x `jobs`, within `MAX_BLOCKS`."""
    wanted = (-(-items // THREADS), parts, jobs)
    x, y, z = (max(1, min(want, limit)) for want, limit in zip(wanted, MAX_BLOCKS, strict=True))
    return x, y, z


@lru_cache(maxsize=4096)
def blocks_for_runs(num_bytes: int, parts: int, jobs: int = 1) -> Grid:
    """Return a grid that copies or clears runs of up to `num_bytes` in each of `parts` x `jobs`.

    A thread moves 64 bytes a round. Where there are runs enough to fill the GPU, blocks stay longer instead of being
    more: on an H200, 48 layers x 8 sequences of 1 MiB took 226 us with 16 blocks a run and 239 us with 64, of 128
    threads; a contiguous copy took 209 us.
    """
    x, y, z = blocks_for(-(-num_bytes // _ROUND_BYTES), parts, jobs)
    return min(x, max(_MIN_BLOCKS_OF_RUN, _BUSY_BLOCKS // (parts * jobs))), y, z


def kernels_of(module: ModuleType) -> list[tuple[Any, int]]:
    """Return the kernels of a module, each with the number of its parameters; device functions are left out."""
    found = []
    for value in vars(module).values():
        function = getattr(value, "py_func", None)
        if function is None or function.__module__ != module.__name__:
            continue
        if not (value._device if SIMULATED else value.targetoptions.get("device")):  # noqa: SLF001 - the simulator's way
            found.append((value, len(signature(function).parameters)))
    return found


class Launcher:
    """Enqueues kernels on streams of any library.

    Args:
        prepared: launch through the compiled kernel's handle, see `PreparedKernel`. Otherwise, and wherever Numba does not
            give the handle, through Numba's own dispatch: the same kernel, a few times the host time.

    Attributes:
        num_launches: kernels enqueued so far.
        num_prepared_launches: those among them that went through a handle.
    """

    def __init__(self, *, prepared: bool = True) -> None:
        self.num_launches = 0
        self.num_prepared_launches = 0
        self._prepares = prepared and not SIMULATED
        self._streams: dict[int, Any] = {}
        self._configured: dict[tuple[Any, Grid, int], Any] = {}
        self._prepared: dict[Any, PreparedKernel | None] = {}

    def launch(self, kernel: Any, blocks: Grid, stream: Any, *arguments: int) -> None:
        """Enqueue one kernel.

        Args:
            kernel: a `cuda.jit` kernel whose parameters are all int64.
            blocks: the grid; blocks have `THREADS` threads.
            stream: any stream that `stream_handle` knows.
            arguments: addresses and counts, below 2**63.
        """
        handle = stream_handle(stream)
        prepared = self._prepared.get(kernel) if self._prepares else None
        if self._prepares and prepared is None:
            prepared = self._prepare(kernel, len(arguments))
        if prepared is not None:
            _enter_context()
            prepared.launch(blocks, THREADS, handle, arguments)
            self.num_prepared_launches += 1
        elif SIMULATED:
            # Its subscript only sets attributes of the kernel, so there is nothing to keep.
            kernel[blocks, THREADS](*arguments)
        else:
            key = (kernel, blocks, handle)
            configured = self._configured.get(key)
            if configured is None:
                configured = self._configure(key)
            configured(*arguments)
        self.num_launches += 1

    def numba_stream(self, stream: Any) -> Any:
        """Return Numba's object for a stream of any library."""
        handle = stream_handle(stream)
        if SIMULATED:
            return cuda.stream()
        _enter_context()
        if handle not in self._streams:
            self._streams[handle] = cuda.external_stream(handle) if handle else cuda.default_stream()
        return self._streams[handle]

    def _prepare(self, kernel: Any, num_arguments: int) -> PreparedKernel | None:
        if kernel not in self._prepared:
            self._prepared[kernel] = _prepared_kernel(_driver(), kernel, num_arguments)
        return self._prepared[kernel]

    def _configure(self, key: tuple[Any, Grid, int]) -> Any:
        kernel, blocks, handle = key
        if len(self._configured) >= _MAX_CACHED_CONFIGURATIONS:
            self._configured.clear()
        with warnings.catch_warnings():
            # Numba warns of small grids; a page-table delta is small by design.
            warnings.simplefilter("ignore")
            self._configured[key] = kernel[blocks, THREADS, self.numba_stream(handle)]
        return self._configured[key]


class DeviceMemory:
    """Allocates and copies device memory, waiting for each copy, on a stream of its own."""

    def __init__(self) -> None:
        self._stream: Any = None

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a zero-filled Numba device array."""
        if SIMULATED:
            return cuda.to_device(np.zeros(shape, dtype))
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
        driver = _driver()
        if self._stream is None:
            self._stream = cuda.stream()
        driver.check(enqueue(driver.api, driver.stream(stream_handle(self._stream))))
        self._stream.synchronize()


class StagingBuffer:
    """Pinned host memory that kernels can read, and device memory of the same size beside it.

    Attributes:
        capacity: bytes.
        host: `uint8[capacity]`, the host's side.
        pairs: `int32[capacity / 8, 2]`, the same memory.
        address: where kernels find it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        if SIMULATED:
            self.host = np.zeros(capacity, np.uint8)
            self.address = self.host.ctypes.data
        else:
            mapped = cuda.mapped_array(capacity, np.uint8)
            self.host = np.asarray(mapped).view(np.ndarray)
            self.address = int(mapped.device_ctypes_pointer.value)
            self._mapped = mapped
            self._event = cuda.event(timing=False)
            self._mark = _driver().api.CUevent(int(self._event.handle))
        self.pairs = self.host.view(np.int32).reshape(-1, 2)
        self._host_address = int(self.host.ctypes.data)
        self._device: Any = None
        self._device_address = 0

    def copy_to_device(self, num_bytes: int, stream: Any) -> int:
        """Enqueue a copy of the first bytes to the device memory beside, and return its address."""
        if self._device is None:
            if SIMULATED:
                self._device = np.zeros(self.capacity, np.uint8)
                self._device_address = int(self._device.ctypes.data)
            else:
                self._device = cuda.device_array(self.capacity, np.uint8)
                self._device_address = int(self._device.device_ctypes_pointer.value)
        if SIMULATED:
            ctypes.memmove(self._device_address, self._host_address, num_bytes)
        else:
            _driver().copy_to_device(self._device_address, self._host_address, num_bytes, stream_handle(stream))
        return self._device_address

    def mark_used(self, stream: Any) -> None:
        """Enqueue the mark behind which nothing reads this buffer any more."""
        if not SIMULATED:
            _driver().record(self._mark, stream_handle(stream))

    def is_idle(self) -> bool:
        """Whether the mark has been passed. The simulator has always passed it."""
        return SIMULATED or _driver().has_passed(self._mark)

    def wait(self) -> None:
        """Wait until the mark has been passed."""
        if not SIMULATED:
            self._event.synchronize()


_entered = threading.local()


def _enter_context() -> None:
    """Give a thread that has no context yet the primary one; asking Numba every time costs as much as a launch."""
    if not getattr(_entered, "done", False):
        cuda.current_context()
        _entered.done = True


@lru_cache(maxsize=1)
def _load_driver() -> Driver:
    from cuda.bindings import driver  # noqa: PLC0415 - comes with numba-cuda, is not there under the simulator

    return Driver(driver)


def _driver() -> Driver:
    """The driver's own calls, in Numba's context."""
    _enter_context()
    return _load_driver()


def _prepared_kernel(driver: Driver, kernel: Any, num_arguments: int) -> PreparedKernel | None:
    """Compile a kernel for integers and take its handle; `None` where this release of Numba keeps it elsewhere."""
    compiled = kernel.compile((types.int64,) * num_arguments)
    try:
        function = compiled._codelibrary.get_cufunc()  # noqa: SLF001 - there is no public way to the handle
        handle = int(function.handle)
    except (AttributeError, TypeError, ValueError):
        return None
    return PreparedKernel(driver, handle, num_arguments, (compiled, function))


def device_address(name: str, view: ArrayView) -> int:
    """Return the address of an array that kernels can reach; `ContractError` for one in host memory."""
    if not SIMULATED and view.place != CUDA:
        raise ContractError(f"{name} lies in {view.place} memory; pass a device array")
    return view.address
