"""What a runtime would write instead of the device ops: one copy per array and sequence, PyTorch, CuPy.

All of them work on the same memory as the ops, borrowed without a copy, and on the same stream.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ctxcache.device.arrays import view_array
from ctxcache.device.numba.context import SIMULATED
from ctxcache.device.streams import stream_handle

Copy = tuple[int, int, int]
"""Target, source, bytes."""

PairOfArrays = tuple[Any, Any]
"""Live `[slots, ...]` and saved `uint8[slots, bytes]` array of one kind of state of one layer."""


def library(name: str) -> Any:
    """An installed library that can use this GPU, or `None`."""
    if SIMULATED or importlib.util.find_spec(name) is None:
        return None
    module = importlib.import_module(name)
    return module if module.cuda.is_available() else None


def copies_of(pairs: Sequence[PairOfArrays], slots: Sequence[tuple[int, int]], *, restoring: bool) -> list[Copy]:
    """One copy per array and sequence; `slots` are `(live, saved)` indices."""
    copies = []
    for live, saved in pairs:
        live_view, saved_view = view_array(live), view_array(saved)
        size = saved_view.strides[0]
        for live_slot, saved_slot in slots:
            here, there = live_view.address + live_slot * size, saved_view.address + saved_slot * size
            copies.append((here, there, size) if restoring else (there, here, size))
    return copies


def compaction_copies(arrays: Sequence[Any], mapping: Sequence[int]) -> list[Copy]:
    """One copy per array and slot that moves, in the order that keeps them apart."""
    copies = []
    for array in arrays:
        view = view_array(array)
        size = view.strides[0]
        moves = [(old, new) for old, new in enumerate(mapping) if 0 <= new < old]
        copies += [(view.address + new * size, view.address + old * size, size) for old, new in moves]
    return copies


class MemcpyRival:
    """One asynchronous copy of the CUDA API for each copy."""

    def __init__(self, stream: Any) -> None:
        from cuda.bindings import driver, runtime  # noqa: PLC0415 - are not there under the simulator

        self._driver = driver
        self._runtime = runtime
        self._stream = driver.CUstream(stream_handle(stream))
        self._runtime_stream = runtime.cudaStream_t(stream_handle(stream))

    def copy_all(self, copies: Sequence[Copy]) -> Callable[[], None]:
        """Return the work of making these copies with the driver's `cuMemcpyDtoDAsync`: the least that Python can pay."""
        copy, stream = self._driver.cuMemcpyDtoDAsync, self._stream

        def work() -> None:
            for target, source, num_bytes in copies:
                copy(target, source, num_bytes, stream)

        return work

    def copy_all_by_runtime(self, copies: Sequence[Copy]) -> Callable[[], None]:
        """Return the same with `cudaMemcpyAsync`."""
        copy, stream = self._runtime.cudaMemcpyAsync, self._runtime_stream
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice

        def work() -> None:
            for target, source, num_bytes in copies:
                copy(target, source, num_bytes, kind, stream)

        return work

    def fill(self, address: int, num_bytes: int) -> Callable[[], None]:
        """Return the work of filling memory with zeros."""
        return lambda: self._driver.cuMemsetD32Async(address, 0, num_bytes // 4, self._stream)


class IndexingRival:
    """Advanced indexing of PyTorch or CuPy, one statement per array."""

    def __init__(self, name: str, module: Any, stream: Any) -> None:
        self.name = name
        self._module = module
        self._handle = stream_handle(stream)

    def _borrow(self, array: Any, width: int) -> Any:
        """The same memory as `[slots, bytes / 4]` int32."""
        view = view_array(array)
        shape = (view.shape[0], width // 4)
        interface = {"shape": shape, "typestr": "<i4", "data": (view.address, False), "strides": None, "version": 3}
        lent = type("Lent", (), {"__cuda_array_interface__": interface})()
        if self.name == "torch":
            return self._module.as_tensor(lent, device="cuda")
        return self._module.asarray(lent)

    def _indices(self, values: Sequence[int]) -> Any:
        if self.name == "torch":
            return self._module.tensor(list(values), device="cuda")
        return self._module.asarray(np.array(values))

    def on_stream(self) -> AbstractContextManager[Any]:
        """Make the stream the library's current one."""
        if self.name == "torch":
            context: AbstractContextManager[Any] = self._module.cuda.stream(
                self._module.cuda.ExternalStream(self._handle)
            )
        else:
            context = self._module.cuda.ExternalStream(self._handle)
        return context

    def move(
        self, pairs: Sequence[PairOfArrays], slots: Sequence[tuple[int, int]], *, restoring: bool
    ) -> Callable[[], None]:
        """Return the work of `saved[there] = live[here]`, or the other way round, for every array."""
        arrays = [
            tuple(self._borrow(each, view_array(saved).strides[0]) for each in (live, saved)) for live, saved in pairs
        ]
        here, there = self._indices([live for live, _ in slots]), self._indices([saved for _, saved in slots])

        def work() -> None:
            with self.on_stream():
                for live, saved in arrays:
                    if restoring:
                        live[here] = saved[there]
                    else:
                        saved[there] = live[here]

        return work

    def compact(self, arrays: Sequence[Any], mapping: Sequence[int]) -> Callable[[], None]:
        """Return the work of `state[:n] = state[survivors]` for every array."""
        survivors = self._indices([old for old, new in enumerate(mapping) if new >= 0])
        lent = [self._borrow(array, view_array(array).nbytes // view_array(array).shape[0]) for array in arrays]
        count = sum(new >= 0 for new in mapping)

        def work() -> None:
            with self.on_stream():
                for state in lent:
                    state[:count] = state[survivors]

        return work


def indexing_rivals(stream: Any) -> Iterator[IndexingRival]:
    """PyTorch and CuPy, where they are installed."""
    for name in ("torch", "cupy"):
        module = library(name)
        if module is not None:
            yield IndexingRival(name, module, stream)
