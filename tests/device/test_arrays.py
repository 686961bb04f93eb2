"""Arrays of any library: where they lie, how they are laid out, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.lent_arrays import WRAPPERS, CudaArray, DLPackArray, OddTensor

from ctxcache.device.arrays import device_of, view_array
from ctxcache.errors import ContractError


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_view_tells_the_layout(wrap: Callable[[Any], Any]) -> None:
    """Address, shape, strides and element size are read from each protocol."""
    array = np.arange(24, dtype=np.float16).reshape(2, 3, 4)[:, 1:]
    view = view_array(wrap(array))
    assert view.address == array.ctypes.data
    assert (view.shape, view.strides, view.itemsize) == (array.shape, array.strides, 2)
    assert not view.is_contiguous
    assert view.is_contiguous_from(1)
    assert view.nbytes == 2 * 2 * 2 * 4


def test_a_view_tells_place_and_dtype() -> None:
    """So does it whether the array may be written, where that is to be believed; strangers are refused."""
    array = np.zeros((2, 2, 4), np.float16)
    assert view_array(CudaArray(array)).place == "cuda"
    assert not view_array(CudaArray(array, data=(array.ctypes.data, True))).readonly  # as JAX says of all its arrays
    array.setflags(write=False)
    assert view_array(array).readonly
    array.setflags(write=True)
    assert view_array(OddTensor(array, "xpu")).place == "xpu"
    assert view_array(DLPackArray(array.astype(np.int8))).dtype == np.int8
    assert view_array(DLPackArray(array)).dtype == np.float16
    with pytest.raises(ContractError, match="no array"):
        view_array([1])


@pytest.mark.parametrize(
    ("name", "device"), [("numpy", 0), ("cuda_array_interface", -1), ("dlpack", -1), ("tensor", 0)]
)
def test_an_array_says_where_it_lies(name: str, device: int) -> None:
    """By DLPack or by itself; -1 stands for one that does not say."""
    wrapped = WRAPPERS[name](np.zeros(3, np.float16))
    assert device_of(wrapped, view_array(wrapped)) == device


@pytest.mark.parametrize(
    ("kind", "device"), [(1, -1), (2, 0), (3, -1), (13, -1)], ids=["host", "cuda", "pinned", "managed"]
)
def test_memory_that_belongs_to_no_device_is_not_said_to(kind: int, device: int) -> None:
    """DLPack numbers the device of host, pinned and managed memory 0, whichever GPU reaches it."""
    lent = CudaArray(np.zeros(3, np.float16))
    lent.__dlpack_device__ = lambda: (kind, 0)
    assert device_of(lent, view_array(lent)) == device


def test_an_array_says_its_device_by_dlpack_where_its_interface_does_not() -> None:
    """`__cuda_array_interface__` has no device; `__dlpack_device__` of the same array has."""
    both = CudaArray(np.zeros(3, np.float16), device=5)
    assert (view_array(both).device, device_of(both, view_array(both))) == (-1, 5)
