"""The NVIDIA driver, asked through its own library. No CUDA context is made."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_COMPUTE_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_COMPUTE_MINOR = 76
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_NAME_BYTES = 256
_GIB = 1 << 30
_SHOWS_NONE = "a driver that shows no GPU; look at CUDA_VISIBLE_DEVICES"


class _NoDeviceError(Exception):
    """The driver works, and has no device for this process."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: its name, compute capability, and memory in GiB."""

    name: str
    major: int
    minor: int
    memory_gib: float


@dataclass(frozen=True, slots=True)
class InstalledDriver:
    """What the driver says.

    Attributes:
        version: newest CUDA version that it serves, (major, minor); (0, 0) without a driver.
        gpus: the devices that it shows to this process.
        problem: why no GPU can be used; empty when one can.
    """

    version: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""

    @property
    def usable(self) -> bool:
        """Whether there is a GPU to run on."""
        return not self.problem

    @property
    def major(self) -> int:
        """Major CUDA version that the driver serves."""
        return self.version[0]

    @property
    def minor(self) -> int:
        """Minor CUDA version that the driver serves."""
        return self.version[1]


def look_for_driver(load: Callable[[str], Any] = ctypes.CDLL) -> InstalledDriver:
    """Ask the driver; whatever fails becomes `problem`.

    Args:
        load: opens the driver's library by name, and raises `OSError` when there is none.
    """
    try:
        library = load(_LIBRARY)
    except OSError:
        return InstalledDriver(problem=f"no NVIDIA driver: {_LIBRARY} cannot be loaded")
    version = (0, 0)
    try:
        number = ctypes.c_int()
        _ask(library, "cuDriverGetVersion", ctypes.byref(number))
        version = (number.value // 1000, number.value % 1000 // 10)
        _ask(library, "cuInit", 0)
        count = ctypes.c_int()
        _ask(library, "cuDeviceGetCount", ctypes.byref(count))
        gpus = tuple(_gpu(library, index) for index in range(count.value))
    except _NoDeviceError:
        return InstalledDriver(version, problem=_SHOWS_NONE)
    except (OSError, AttributeError) as cause:
        return InstalledDriver(version, problem=f"a driver for CUDA {version[0]}.{version[1]}, but {cause}")
    return InstalledDriver(version, gpus, "" if gpus else _SHOWS_NONE)


def _gpu(library: Any, index: int) -> Gpu:
    device = ctypes.c_int()
    _ask(library, "cuDeviceGet", ctypes.byref(device), index)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _ask(library, "cuDeviceGetName", name, _NAME_BYTES, device)
    memory = ctypes.c_size_t()
    _ask(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    numbers = (ctypes.c_int(), ctypes.c_int())
    for number, attribute in zip(numbers, (_COMPUTE_MAJOR, _COMPUTE_MINOR), strict=True):
        _ask(library, "cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
    return Gpu(name.value.decode(errors="replace"), numbers[0].value, numbers[1].value, memory.value / _GIB)


def _ask(library: Any, function: str, *arguments: Any) -> None:
    code = getattr(library, function)(*arguments)
    if code == _NO_DEVICE:
        raise _NoDeviceError
    if code:
        raise OSError(f"{function} returned {code}")
