"""Streams, a kernel that keeps one busy, and ops that let the coordinator's own tests run on a real GPU.

`pytest --gpu-stream KIND` runs the tests on one kind of stream:

- `numba`: made by Numba, which orders with the legacy default stream;
- `external`: a non-blocking stream of PyTorch's or CuPy's, or where neither is installed of the driver's: it does not, so a
  launch or copy on the default stream is no longer hidden;
- `per-thread`: the per-thread default stream.

The coordinator's tests were written for arrays of the host. `StreamedOps` gives them `NumbaDeviceOps` on the chosen stream,
and arrays in pinned host memory that kernels reach through the bus: the tests look into them after waiting for the stream,
as a runtime does, and everything that the coordinator does runs on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.numba.context import SIMULATED, cuda
from ctxcache.device.numba.launch import Launcher
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.ops import storage_dtype
from ctxcache.device.streams import PER_THREAD_DEFAULT_STREAM, stream_handle

SPIN_MS = 50


def external_stream() -> Any:
    """A non-blocking stream of another library; whoever makes it may be absent."""
    try:
        import torch

        return torch.cuda.Stream()
    except ImportError:
        pass
    try:
        import cupy

        return cupy.cuda.Stream(non_blocking=True)
    except ImportError:
        return driver_stream()


def driver_stream() -> int:
    """The handle of a non-blocking stream that nobody else knows."""
    from cuda.bindings import driver

    cuda.current_context()
    status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    assert status == driver.CUresult.CUDA_SUCCESS
    return int(stream)


STREAMS: dict[str, Callable[[], Any]] = {
    "numba": lambda: cuda.stream(),  # noqa: PLW0108 - the attribute does not exist before a GPU is asked for
    "external": external_stream,
    "per-thread": lambda: PER_THREAD_DEFAULT_STREAM,
}


def make_stream(kind: str) -> Any:
    """A stream of one kind; the simulator has one kind."""
    return cuda.stream() if SIMULATED else STREAMS[kind]()


if SIMULATED:

    def spin(stream: Any, milliseconds: float = SPIN_MS) -> None:
        """Nothing: the simulator finishes a launch before it returns."""

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def _nanoseconds(typing_context: Any) -> Any:
        """The GPU's clock."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(64), [])
            return builder.call(ir.InlineAsm(kind, "mov.u64 $0, %globaltimer;", "=l", side_effect=True), [])

        return types.int64(), emit

    @cuda.jit
    def _spin(nanoseconds: int) -> None:
        end = _nanoseconds() + nanoseconds
        while _nanoseconds() < end:
            cuda.nanosleep(20_000)

    _launcher = Launcher()

    def spin(stream: Any, milliseconds: float = SPIN_MS) -> None:
        """Keep a stream busy, by the wall's clock: several processes may share the GPU."""
        _launcher.launch(_spin, (1, 1, 1), stream, int(milliseconds * 1e6))


def is_busy(stream: Any) -> bool:
    """Whether a stream still has work."""
    from cuda.bindings import driver

    (code,) = driver.cuStreamQuery(stream_handle(stream))
    assert code in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY), code
    return bool(code == driver.CUresult.CUDA_ERROR_NOT_READY)


class MappedArray:
    """An array in pinned host memory that kernels can reach. Looking into it waits for the stream first."""

    def __init__(self, host: NDArray[Any], owner: Any, wait: Callable[[], None]) -> None:
        self.host = host
        self.shape = host.shape
        self.dtype = host.dtype
        self._owner = owner
        self._wait = wait
        self.__cuda_array_interface__ = {
            "shape": host.shape,
            "typestr": host.dtype.str,
            "data": (host.ctypes.data, False),
            "strides": None,
            "version": 3,
        }

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The memory itself, or a copy where one is asked for, once the stream is idle."""
        assert dtype in (None, self.host.dtype)
        self._wait()
        return self.host.copy() if copy else self.host

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        np.asarray(self)[key] = value


class StreamedOps:
    """`NumbaDeviceOps` on one stream, which stands in for `None`; each operation's first device call finds it busy."""

    _ENQUEUE = frozenset({
        "upload_rows",
        "reset_lengths",
        "zero_recurrent",
        "restore",
        "capture",
        "upload_mapping",
        "compact_slot_state",
        "capture_boundary_hidden",
        "restore_boundary_hidden",
        "advance_lengths",
    })  # fmt: skip

    stream: Any = None
    spin_ms: float = SPIN_MS
    num_spins = 0

    def __init__(self) -> None:
        self._ops = NumbaDeviceOps()
        self._announced = False

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ops, name)
        if name not in self._ENQUEUE:
            return attribute

        def enqueue(*arguments: Any) -> Any:
            self._occupy()
            return attribute(*arguments[:-1], self._on(arguments[-1]))

        return enqueue

    def operation(self, name: str) -> None:
        """Let the operation's first device call find the stream busy."""
        self._ops.operation(name)
        self._announced = True

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> MappedArray:
        """Zero-filled pinned memory."""
        kind = storage_dtype(dtype)
        count = max(prod(shape), 1)
        owner = np.zeros(count, kind) if SIMULATED else cuda.mapped_array(count, kind)
        host = np.asarray(owner).view(np.ndarray)[: prod(shape)].reshape(shape)
        host[...] = 0
        return MappedArray(host, owner, self._drain)

    def to_host(self, array: Any) -> NDArray[Any]:
        """A copy, once the stream is idle."""
        self._drain()
        return np.array(self._ops.to_host(array))

    def synchronize(self, stream: Any, synchronizer: Any) -> int | None:
        """Wait for the stream, whatever a scripted synchroniser says about it afterwards."""
        self._occupy()
        self._drain()
        return None if synchronizer is None else synchronizer(stream)

    def _occupy(self) -> None:
        """Put a spin at the head of the stream: whatever the operation enqueues waits behind it."""
        if self._announced and self.spin_ms:
            self._announced = False
            spin(self.stream, self.spin_ms)
            StreamedOps.num_spins += 1

    def _drain(self) -> None:
        self._ops.synchronize(self.stream, None)

    def _on(self, stream: Any) -> Any:
        return self.stream if stream is None else stream
