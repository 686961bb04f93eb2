"""Launching kernels: which grid, on which stream, by which of two ways.

Kernels take integers alone: addresses and counts. Numba builds an argument structure for every array it is passed,
which costs several microseconds each; an integer costs next to nothing and works for arrays of any library.
"""

from __future__ import annotations

import threading
import warnings
from functools import lru_cache
from inspect import signature
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numba import types
from numpy.typing import NDArray

from ctxcache.device.numba.context import SIMULATED, CudaDevice, cuda
from ctxcache.device.numba.driver_calls import DriverCalls, PreparedKernel
from ctxcache.device.numba.parameter_words import INLINE_WORDS, NO_WORDS
from ctxcache.device.ops import StreamSynchronizer
from ctxcache.device.streams import stream_handle

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

_SIMULATOR = threading.RLock()
"""The simulator runs one kernel at a time: it keeps its state in the kernels' module."""


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


def kernels_of(module: ModuleType) -> list[tuple[Any, int, NDArray[np.int64] | None]]:
    """Return the kernels of a module; device functions are left out.

    Returns:
        For each: the kernel, the number of its parameters that are integers, and the words that a launch with nothing to do
        passes, `None` where it takes none.
    """
    found = []
    for value in vars(module).values():
        function = getattr(value, "py_func", None)
        if function is None or function.__module__ != module.__name__:
            continue
        if not (value._device if SIMULATED else value.targetoptions.get("device")):  # noqa: SLF001 - the simulator's way
            words = NO_WORDS if takes_words(value) else None
            found.append((value, len(signature(function).parameters) - (words is not None), words))
    return found


def takes_words(kernel: Any) -> bool:
    """Whether a kernel's last parameter is the words of `ctxcache.device.numba.parameter_words`."""
    return "words" in signature(kernel.py_func).parameters


class Launcher:
    """Enqueues kernels of one device on streams of any library.

    Args:
        device: whose kernels; the current one when `None`.
        prepared: launch through the compiled kernel's handle, see `PreparedKernel`. Otherwise, and wherever Numba does not
            give the handle, through Numba's own dispatch: the same kernel, a few times the host time.

    Attributes:
        num_launches: kernels enqueued so far.
        num_prepared_launches: those among them that went through a handle.
    """

    def __init__(self, device: CudaDevice | None = None, *, prepared: bool = True) -> None:
        self.num_launches = 0
        self.num_prepared_launches = 0
        self._device = CudaDevice() if device is None else device
        self._prepares = prepared and not SIMULATED
        self._streams: dict[int, Any] = {}
        self._configured: dict[tuple[Any, Grid, int], Any] = {}
        self._prepared: dict[Any, PreparedKernel | None] = {}

    def launch(
        self, kernel: Any, blocks: Grid, stream: Any, *arguments: int, words: NDArray[np.int64] | None = None
    ) -> None:
        """Enqueue one kernel.

        Args:
            kernel: a `cuda.jit` kernel whose parameters are all int64, but for a last one named `words`.
            blocks: the grid; blocks have `THREADS` threads.
            stream: any stream that `stream_handle` knows.
            arguments: addresses and counts, below 2**63.
            words: for a kernel that has that parameter: `int64[n]`, n up to `INLINE_WORDS`; the rest are undefined.
        """
        handle = stream_handle(stream)
        if SIMULATED:
            with _SIMULATOR:  # the subscript only sets attributes of the kernel, so there is nothing to keep
                kernel[blocks, THREADS](*arguments, *_as_tuples(words))
        else:
            self._device.call(self._launch, kernel, blocks, handle, arguments, words)
        self.num_launches += 1

    def synchronize(self, stream: Any, synchronizer: StreamSynchronizer | None = None) -> int | None:
        """Wait until a stream of the device is idle, or let a synchroniser do it; returns what that returned.

        The synchroniser finds the device current: one that waits for "the" device waits for this one, in any thread.
        """
        handle = stream_handle(stream)
        if synchronizer is not None:
            return self._device.call(synchronizer, stream)
        if not SIMULATED:
            self._device.call(self._wait, handle)
        return None

    def numba_stream(self, stream: Any) -> Any:
        """Return Numba's object for a stream of any library. Call its `synchronize` only while the device is current."""
        if SIMULATED:
            return cuda.stream()
        with self._device.current():
            return self._numba_stream(stream_handle(stream))

    def _launch(
        self, kernel: Any, blocks: Grid, handle: int, arguments: tuple[int, ...], words: NDArray[np.int64] | None
    ) -> None:
        prepared = None
        if self._prepares:
            prepared = self._prepared.get(kernel) or self._prepare(kernel, len(arguments))
        if prepared is not None:
            prepared.launch(blocks, THREADS, handle, arguments, words)
            self.num_prepared_launches += 1
            return
        key = (kernel, blocks, handle)
        configured = self._configured.get(key) or self._configure(key)
        configured(*arguments, *_as_tuples(words, INLINE_WORDS))

    def _wait(self, handle: int) -> None:
        self._numba_stream(handle).synchronize()

    def _numba_stream(self, handle: int) -> Any:
        if handle not in self._streams:
            self._streams[handle] = cuda.external_stream(handle) if handle else cuda.default_stream()
        return self._streams[handle]

    def _prepare(self, kernel: Any, num_arguments: int) -> PreparedKernel | None:
        if kernel not in self._prepared:
            with self._device.current() as driver:
                self._prepared[kernel] = _prepared_kernel(driver, kernel, num_arguments)
        return self._prepared[kernel]

    def _configure(self, key: tuple[Any, Grid, int]) -> Any:
        kernel, blocks, handle = key
        if len(self._configured) >= _MAX_CACHED_CONFIGURATIONS:
            self._configured.clear()
        with warnings.catch_warnings():
            # Numba warns of small grids; a page-table delta is small by design.
            warnings.simplefilter("ignore")
            configured = self._configured[key] = kernel[blocks, THREADS, self._numba_stream(handle)]
        return configured


def _as_tuples(words: NDArray[np.int64] | None, length: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the last argument of a kernel that takes words, as Numba's own dispatch wants it, or nothing."""
    if words is None:
        return ()
    return ((*words.tolist(), *[0] * (length - len(words))),)


def _prepared_kernel(driver: DriverCalls, kernel: Any, num_arguments: int) -> PreparedKernel | None:
    """Compile a kernel for integers and take its handle; `None` where this release of Numba keeps it elsewhere."""
    num_words = INLINE_WORDS if takes_words(kernel) else 0
    words = (types.UniTuple(types.int64, num_words),) if num_words else ()
    compiled = kernel.compile((types.int64,) * num_arguments + words)
    try:
        function = compiled._codelibrary.get_cufunc()  # noqa: SLF001 - there is no public way to the handle
        handle = int(function.handle)
    except (AttributeError, TypeError, ValueError):
        return None
    return PreparedKernel(driver, handle, num_arguments, num_words, owner=(compiled, function))
