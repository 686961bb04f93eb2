"""Odd values, and what each means in plain Python, if anything: what a caller may pass by mistake, or from another library."""

from __future__ import annotations

import array
import enum
from collections import OrderedDict, UserList, deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

MEANINGLESS = object()
"""What a value means that no run of integers, and no integer, is meant by."""


class Tensor:
    """An array of another library: on the host, read through `__array__`, and no `Sequence`."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return map(Tensor, self._values)

    def __repr__(self) -> str:
        return f"tensor({self._values.tolist()})"


class Lying(Sequence[Any]):
    """A sequence that says another length than it has."""

    def __init__(self, items: Sequence[Any], said: int) -> None:
        self._items, self._said = items, said

    def __len__(self) -> int:
        return self._said

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __repr__(self) -> str:
        return f"lying({self._items}, {self._said})"


class Int(int):
    """An integer with a class of its own."""


class Text(str):
    """A text with a class of its own."""

    __slots__ = ()


class Ints(list):  # type: ignore[type-arg]
    """A list with a class of its own."""


class Own(np.ndarray):
    """An array with a class of its own."""


class Number(enum.IntEnum):
    """An integer with a name."""

    ONE = 1


def _read_only(*values: int) -> np.ndarray:
    made = np.array(values, np.int32)
    made.flags.writeable = False
    return made


_WIDTHS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")

_MAKERS: list[Callable[[], Any]] = [
    *((lambda width=width: np.dtype(width).type(1)) for width in _WIDTHS),
    *((lambda width=width: np.iinfo(width).max) for width in _WIDTHS),
    *((lambda width=width: np.dtype(width).type(np.iinfo(width).max)) for width in _WIDTHS),
    *((lambda width=width: np.array([1], width)) for width in _WIDTHS),
    *((lambda width=width: np.array([1, 0], f">{width}")) for width in _WIDTHS[1:4]),
    *(
        (lambda made=made: made)
        for made in (0, 1, 2, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, 10**30, -(10**30))
    ),
    *(
        (lambda made=made: made)
        for made in (None, True, False, ..., NotImplemented, 1.0, 0.5, float("nan"), float("inf"), 1j)
    ),
    *(
        (lambda made=made: made)
        for made in (Decimal(1), Fraction(1), "", "1", "ab", b"", b"\x01", Text("1"), Number.ONE, Int(1))
    ),
    *((lambda made=made: made) for made in (int, len, object, enum.Enum, np.int32, np.float64)),
    *(
        (lambda made=made: made)
        for made in (np.float16(1), np.float32(1), np.float64("nan"), np.bool_(1), np.complex64(1))
    ),
    *(
        (lambda made=made: made)
        for made in (np.str_("1"), np.bytes_(b"1"), np.datetime64(1, "s"), np.timedelta64(1, "s"))
    ),
    object,
    dict,
    set,
    list,
    tuple,
    bytearray,
    lambda: {0: 1},
    lambda: {1, 2},
    lambda: frozenset([1]),
    lambda: OrderedDict({1: 1}),
    {1: 1}.keys,
    {1: 1}.values,
    lambda: (each for each in (1, 2)),
    lambda: iter([1]),
    lambda: map(int, "12"),
    lambda: zip([1], [2], strict=True),
    lambda: range(2),
    lambda: range(1, 2),
    lambda: deque([1]),
    lambda: UserList([1, 0]),
    lambda: Ints([1]),
    lambda: array.array("i", [1]),
    lambda: array.array("d", [1]),
    lambda: array.array("Q", [2**64 - 1]),
    lambda: memoryview(b"\x01\x00"),
    lambda: memoryview(np.ones((2, 2))),
    lambda: memoryview(np.array([1], ">i4")),
    lambda: memoryview(np.array([1], "i4")),
    lambda: bytearray(b"\x01"),
    lambda: [1],
    lambda: (1,),
    lambda: [[1]],
    lambda: [[1], [2, 3]],
    lambda: [1, None],
    lambda: [1.5],
    lambda: [True],
    lambda: ["1"],
    lambda: [10**30],
    lambda: [float("nan")],
    lambda: [np.int8(1), np.uint64(0)],
    lambda: [Tensor(1)],
    lambda: [np.array(1)],
    lambda: Tensor([1]),
    lambda: Tensor(1),
    lambda: Tensor([1.5]),
    lambda: Tensor([[1]]),
    lambda: Lying([1], 0),
    lambda: Lying([1], 2),
    lambda: Lying([1, 0], 1),
    lambda: Lying([1], 10**6),
    lambda: np.array(1),
    lambda: np.array(1.5),
    lambda: np.array(None),
    lambda: np.array("1"),
    lambda: np.array([], np.int32),
    lambda: np.array([], np.float64),
    lambda: np.array([1, 0], object),
    lambda: np.array([1.0]),
    lambda: np.array([np.nan]),
    lambda: np.array([True, False]),
    lambda: np.array(["1"]),
    lambda: np.array([1], "M8[s]"),
    lambda: np.array([(1, 2)], "i4,i4"),
    lambda: np.array([2**64 - 1], np.uint64),
    lambda: np.array([2**31], np.int64),
    lambda: np.arange(4, dtype=np.int32)[::2],
    lambda: np.arange(2, dtype=np.int32)[::-1],
    lambda: np.broadcast_to(np.int32(1), (2,)),
    lambda: np.zeros((2, 2), np.int32),
    lambda: np.zeros((2, 2), np.int32, order="F"),
    lambda: np.zeros((1, 0), np.int32),
    lambda: np.zeros((2, 2), np.uint64),
    lambda: np.zeros((2, 2), np.uint64).T,
    lambda: np.ma.MaskedArray([1, 0]),
    lambda: np.ma.MaskedArray([1, 0], mask=[True, False]),
    lambda: np.ma.masked,
    lambda: np.array([1, 0], np.int32).view(Own),
    lambda: np.frombuffer(b"\0\1\0\0\0\0", np.uint8)[1:5].view(np.int32),
    lambda: np.rec.fromarrays([[1]], names="a"),
    lambda: _read_only(1),
    lambda: _read_only(1, 0),
]


def draw_odd(rng: Any) -> Callable[[], tuple[Any, Any]]:
    """Draw one odd value; what is returned makes it anew, with what it means: an `int`, a list of them, or `MEANINGLESS`."""
    make = rng.choice(_MAKERS)

    def made() -> tuple[Any, Any]:
        return make(), plain(make())

    return made


def plain(value: Any) -> Any:
    """Say in plain Python what integers a value is; `MEANINGLESS` where it is none and no run of them."""
    if isinstance(value, (bool, np.bool_, np.timedelta64, str, np.ma.MaskedArray)) or value is np.ma.masked:
        return MEANINGLESS
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (np.ndarray, Tensor)):
        held = np.asarray(value)
        if held.dtype.kind == "O" and held.ndim:
            return plain(held.tolist())
        return held.tolist() if held.dtype.kind in "iu" else MEANINGLESS
    if isinstance(value, memoryview):
        return plain(np.asarray(value))
    if isinstance(value, Sequence):
        items = [plain(each) for each in iter(value)]
        return MEANINGLESS if any(each is MEANINGLESS for each in items) else items
    return MEANINGLESS
