"""Arrays of any library, reduced to what the device ops need: address, shape, element size, place."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import ContractError

HOST = "host"
CUDA = "cuda"
SIMULATOR = "simulator"

_DLPACK_CUDA = 2
_DLPACK_PLACES = {1: HOST, _DLPACK_CUDA: CUDA, 3: HOST, 13: CUDA}
"""Device types of DLPack: CPU, CUDA, pinned host memory, managed memory."""

_DLPACK_LETTERS = {0: "i", 1: "u", 2: "f"}
"""Type codes of DLPack that NumPy has: signed, unsigned, IEEE float. bfloat16 and fp8 are codes of their own."""


class ArrayView(NamedTuple):
    """Where an array lies. It does not keep the array alive; whoever holds the view holds the array too.

    Attributes:
        address: of the first element.
        shape: elements along each axis.
        strides: bytes from one element to the next along each axis.
        dtype: of the elements, where NumPy has it; else unsigned integers of their size.
        place: `HOST`, `CUDA`, or `SIMULATOR` (host memory that Numba's simulator calls a device array).
        device: ordinal of the CUDA device; -1 where nobody asked, see `device_of`.
        readonly: whether NumPy forbids writing.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    place: str
    device: int = -1
    readonly: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.itemsize * prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        return self.is_contiguous_from(0)

    def is_contiguous_from(self, axis: int) -> bool:
        """Whether the elements of the axes from `axis` on lie in C order without gaps."""
        expected = self.itemsize
        for length, stride in zip(reversed(self.shape[axis:]), reversed(self.strides[axis:]), strict=True):
            if length > 1 and stride != expected:
                return False
            expected *= length
        return True


class Location(NamedTuple):
    """Where device ops work: what an array must lie in, for the ops to reach it.

    Attributes:
        place: `HOST`, `CUDA`, or `SIMULATOR`, whose kernels reach whatever the process does.
        device: ordinal of the device; -1 where nobody says it.
    """

    place: str
    device: int = -1


ANYWHERE = Location(SIMULATOR)


def view_array(array: Any) -> ArrayView:
    """Describe an array without copying it.

    Args:
        array: a NumPy array, or anything with `__cuda_array_interface__` (Numba, CuPy, PyTorch, JAX) or DLPack; a
            PyTorch tensor whose dtype neither of them can say (fp8) is read by its own attributes.

    Raises:
        ContractError: none of these.
    """
    if isinstance(array, np.ndarray):
        return _view_numpy(array, HOST)
    if "simulator" in type(array).__module__ and isinstance(getattr(array, "_ary", None), np.ndarray):
        return _view_numpy(array._ary, SIMULATOR)  # noqa: SLF001 - the simulator offers no other way
    for view in (_view_cuda_interface, _view_dlpack, _view_tensor):
        found = view(array)
        if found is not None:
            return found
    raise ContractError(
        f"a {type(array).__name__} is no array; pass one with __cuda_array_interface__ or __dlpack__, or a NumPy array"
    )


def device_of(array: Any, view: ArrayView) -> int:
    """Return the ordinal of the device that an array lies on; -1 where neither its view nor DLPack says it."""
    if view.device >= 0:
        return view.device
    place = _dlpack_device(array)
    return -1 if place is None else place[1]


def host_array(array: Any) -> NDArray[Any]:
    """Return a writable NumPy array over the memory of any host (or simulated) array, without a copy.

    NumPy arrays are returned themselves; others as `ArrayView.dtype` says. The array must outlive the result.

    Raises:
        ContractError: the array is not in host memory.
    """
    if isinstance(array, np.ndarray):
        return array
    view = view_array(array)
    if view.place == CUDA:
        raise ContractError(f"a {type(array).__name__} is in device memory; NumpyDeviceOps works on host arrays")
    span = view.itemsize + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True))
    buffer: Any = (ctypes.c_uint8 * max(span, 0)).from_address(view.address)
    return np.ndarray(view.shape, view.dtype, buffer, strides=view.strides)


def check_same_layout(target: NDArray[Any] | ArrayView, source: NDArray[Any]) -> None:
    """Check that a host array can overwrite a device array: equal shape and element size, or `ContractError`."""
    if target.shape != source.shape or target.itemsize != source.itemsize:
        raise ContractError(
            f"the host array has shape {source.shape} and elements of {source.itemsize} bytes; "
            f"the device array has {target.shape} and {target.itemsize}"
        )


def whereabouts(array: Any, view: ArrayView, location: Location) -> str | None:
    """Say where an array lies that ops cannot reach from where they work, and where that is; `None` for one they can."""
    if location.place == SIMULATOR:
        return None
    place = HOST if view.place == SIMULATOR else view.place
    device = device_of(array, view)
    if place == location.place and (device < 0 or location.device < 0 or device == location.device):
        return None
    return (
        f"lies on {view.place} {max(device, 0)} and the device ops work on {location.place} {max(location.device, 0)}"
    )


def check_reachable(name: str, array: Any, view: ArrayView, location: Location) -> None:
    """Check that ops reach an array from where they work, or raise `ContractError`."""
    where = whereabouts(array, view, location)
    if where is not None:
        raise ContractError(f"{name} {where}; pass an array of that device")


def check_writable(name: str, view: ArrayView) -> None:
    """Refuse an array that says that it must not be written: what is enqueued would write it, or fail on it."""
    if view.readonly:
        raise ContractError(f"{name} is read-only; pass an array that may be written")


def check_int32_array(name: str, array: Any, least: int, location: Location = ANYWHERE) -> ArrayView:
    """Describe a device array of the caller's that must hold `least` int32 values at least.

    Args:
        name: what the array is.
        array: it.
        least: entries that it needs.
        location: where the ops work that use it.

    Raises:
        ContractError: no array, not one-dimensional, of another dtype, with gaps, too short, at an address that is no
            multiple of 4, or out of the ops' reach.
    """
    try:
        view = view_array(array)
    except ContractError as error:
        raise ContractError(f"{name}: {error}") from error
    if len(view.shape) != 1 or view.dtype != np.int32 or not view.is_contiguous:
        raise ContractError(
            f"{name} has dtype {view.dtype}, shape {view.shape} and strides {view.strides}; "
            "pass a contiguous one-dimensional int32 array"
        )
    if view.shape[0] < least:
        raise ContractError(f"{name} has {view.shape[0]} entries and {least} are needed; pass a longer array")
    if view.address % view.itemsize:
        raise ContractError(f"{name} lies at address {view.address}; pass an array at a multiple of {view.itemsize}")
    check_reachable(name, array, view, location)
    return view


def check_int32_target(name: str, array: Any, least: int, location: Location = ANYWHERE) -> ArrayView:
    """Describe a device array of the caller's that is written: `check_int32_array`, and not read-only."""
    view = check_int32_array(name, array, least, location)
    check_writable(name, view)
    return view


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _view_numpy(array: NDArray[Any], place: str) -> ArrayView:
    address, readonly = array.__array_interface__["data"]
    return ArrayView(address, array.shape, array.strides, array.dtype, place, 0, readonly)


def _view_cuda_interface(array: Any) -> ArrayView | None:
    # PyTorch's property raises for dtypes that it cannot spell; DLPack or the tensor itself may know them.
    try:
        interface = array.__cuda_array_interface__
    except (AttributeError, TypeError, RuntimeError, KeyError):
        return None
    shape = tuple(int(length) for length in interface["shape"])
    dtype = np.dtype(interface["typestr"])
    # The read-only flag is passed over: JAX sets it on every array, the ones that it lends to kernels included.
    address, _readonly = interface["data"]
    strides = interface.get("strides") or _c_strides(shape, dtype.itemsize)
    return ArrayView(int(address or 0), shape, tuple(strides), dtype, CUDA)


def _dlpack_device(array: Any) -> tuple[str, int] | None:
    try:
        kind, device = array.__dlpack_device__()
    except (AttributeError, TypeError, RuntimeError, BufferError):
        return None
    # Host, pinned and managed memory belong to no one device: DLPack says 0 for each.
    return _DLPACK_PLACES.get(int(kind), f"DLPack device {int(kind)}"), int(device) if kind == _DLPACK_CUDA else -1


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _view_dlpack(array: Any) -> ArrayView | None:
    place = _dlpack_device(array)
    if place is None:
        return None
    # -1 asks a CUDA producer for no synchronisation: nothing is read here but the description. JAX does not know it.
    capsule = None
    for options in ({"stream": -1}, {}) if place[0] == CUDA else ({},):
        try:
            capsule = array.__dlpack__(**options)
            break
        except (AttributeError, TypeError, RuntimeError, BufferError):
            continue
    if capsule is None:
        return None
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    # The capsule keeps its own reference to the data and drops it when it is collected, unconsumed, below.
    tensor = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    itemsize = tensor.dtype_bits * tensor.dtype_lanes // 8
    letter = _DLPACK_LETTERS.get(tensor.dtype_code, "u") if itemsize > 1 or tensor.dtype_code == 0 else "u"
    strides = (
        tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])
        if tensor.strides
        else _c_strides(shape, itemsize)
    )
    address = (tensor.data or 0) + tensor.byte_offset
    return ArrayView(address, shape, strides, np.dtype(f"{letter}{itemsize}"), *place)


def _view_tensor(array: Any) -> ArrayView | None:
    try:
        shape, itemsize = tuple(array.shape), int(array.element_size())
        strides = tuple(stride * itemsize for stride in array.stride())
        place, index = str(array.device.type), array.device.index
        address = int(array.data_ptr())
    except (AttributeError, TypeError, RuntimeError):
        return None
    return ArrayView(address, shape, strides, np.dtype(f"u{itemsize}"), HOST if place == "cpu" else place, index or 0)
