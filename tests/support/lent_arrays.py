"""Arrays of other libraries, as far as a protocol can tell, and ops that say or hide where they work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ctxcache.device.numpy_ops import NumpyDeviceOps


class CudaArray:
    """Host memory that says to be a device array, as a PyTorch or CuPy array does, and on which device where there is one."""

    def __init__(self, array: np.ndarray[Any, Any], device: int | None = None, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None if array.flags.c_contiguous else array.strides,
            "version": 3,
            **changes,
        }
        if device is not None:
            self.__dlpack_device__ = lambda: (2, device)


class DLPackArray:
    """An array that speaks DLPack alone, like a JAX array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class OddTensor:
    """A tensor whose dtype neither protocol can say, like PyTorch's fp8."""

    def __init__(self, array: np.ndarray[Any, Any], place: str = "cpu") -> None:
        self.array = array
        self.shape = array.shape
        self.device = type("Device", (), {"type": place, "index": None})()

    @property
    def __cuda_array_interface__(self) -> Any:
        raise TypeError("no such type string")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("float8 types are not supported by dlpack")

    # The three methods by which PyTorch describes any tensor.
    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda array: array,
    "cuda_array_interface": CudaArray,
    "dlpack": DLPackArray,
    "tensor": OddTensor,
}
"""What makes an array that speaks one protocol, by the protocol's name."""


class OpsOfDevice(NumpyDeviceOps):
    """Ops that say which device they work on."""

    def __init__(self, device_ordinal: int) -> None:
        self.device_ordinal = device_ordinal
