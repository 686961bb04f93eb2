"""Checks of what callers pass: numbers, flags, enumerations, arrays of integers, compaction mappings. Their one home.

Each returns the value in the one form that the rest of the package works with (a NumPy scalar becomes an `int`, so that no
arithmetic happens in its width; an array becomes one of the one layout that compiled code is compiled for), or raises with
the value, the limit and the remedy. What is right already passes without a copy.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import ContextCacheError, ContractError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

INT32_LIMIT = 1 << 31
"""Sizes, counts and ids stay below this: pages, tokens and slots are numbered by int32."""

RETIRED = -1
"""The new slot, in a compaction mapping, of a sequence that leaves the batch."""

_INT32 = np.dtype(np.int32)
"""NumPy makes one object of it, so that the usual array is told by identity; an equal one is checked more closely."""

NOT_ITERABLE = (TypeError, NotImplementedError)
"""What iterating over a value raises that is no run; the latter is a memoryview's, of a format or shape that it cannot take apart."""

_Member = TypeVar("_Member", bound=Enum)


def describe(value: Any) -> str:
    """Say what a wrong value is: an array by its layout, anything else as it shows itself."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number of Python or NumPy; a truth value is none."""
    return type(value) is int or _is_integral(type(value))


def _is_integral(kind: type) -> bool:
    """Whether values of a type are whole numbers. NumPy derives lengths of time from its integers."""
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, (bool, np.timedelta64))


def as_integer(
    name: str,
    value: Any,
    least: int = 0,
    limit: int = INT32_LIMIT,
    *,
    rule: str = "it must be in",
    error: type[ContextCacheError] = ContractError,
) -> int:
    """Return a whole number in [least, limit) as an `int`.

    Args:
        name: what the number is.
        value: it.
        least: its smallest value.
        limit: what it must be below.
        rule: the refusal's words before the range.
        error: what a refusal raises.
    """
    if type(value) is not int:
        if not is_integer(value):
            raise error(f"{name} is {describe(value)}; pass an integer, {rule} {least} .. {limit - 1}")
        value = int(value)
    if not least <= value < limit:
        raise error(f"{name} is {value}; {rule} {least} .. {limit - 1}")
    checked: int = value
    return checked


def as_flag(name: str, value: Any) -> bool:
    """Return a truth value as a bool; nothing else is taken for its truth."""
    if value is True or value is False:
        return bool(value)
    if not isinstance(value, np.bool_):
        raise ContractError(f"{name} is {describe(value)}; pass True or False")
    return bool(value)


def check_member(name: str, value: Any, kind: type[_Member]) -> None:
    """Check that a value is a member of an enumeration, before anything hashes or compares it."""
    if not isinstance(value, kind):
        raise ContractError(f"{name} is {describe(value)}; pass a member of {kind.__name__}")


def as_list(name: str, values: Any, wanted: str = "a list or a tuple") -> list[Any]:
    """Return what a list, a tuple or their like yields, which text is not. Read once: it may answer otherwise next time."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray, memoryview)):
        raise ContractError(f"{name} is a {type(values).__name__}; pass {wanted}")
    return [each for each in values]  # noqa: C416 - list() would ask for its length, which need not be true


def as_rows_of(name: str, values: Any, wanted: str) -> list[Any]:
    """Return the entries of a list, or of an array of any library along its first axis."""
    if isinstance(values, Sequence) or not hasattr(values, "__array__"):
        return as_list(name, values, wanted)
    array = as_numpy(name, values)
    if not array.ndim:
        raise ContractError(f"{name} is {describe(array)}; pass {wanted}")
    return list(array)


# Runs of integers


def as_int32s(name: str, values: Any, one: str = "") -> Int32s:
    """Return a one-dimensional run of integers as a C-contiguous `int32[n]`; such an array is returned itself.

    Args:
        name: what the run is.
        values: a sequence of integers, or an array of any library that NumPy can read.
        one: what one of them is, for the refusal of that one.

    Raises:
        ContractError: not a one-dimensional run of integers in int32 range. Floats and bools are refused, also one among
            integers.
    """
    if type(values) is np.ndarray:
        if values.dtype is _INT32 and values.ndim == 1 and values.flags.c_contiguous and values.flags.aligned:
            return values
        return _int32s_of_array(name, values, one)
    if hasattr(values, "__array__"):  # a tensor of another library, or a subclass
        return _int32s_of_array(name, as_numpy(name, values), one)
    return _int32s_of_sequence(name, values, one)


def as_plain(values: NDArray[Any]) -> NDArray[Any]:
    """Return a contiguous, writable array, itself if it can be: every other layout is another type to compiled code."""
    return values if _is_plain(values) else np.array(values, order="C")


def as_lengths(name: str, values: Any, size: int) -> Int32s:
    """Return one integer a sequence as a contiguous, writable `int32[size]`, itself if it can be."""
    checked = as_int32s(name, values)
    if checked.size != size:
        raise ContractError(f"{name} has {checked.size} entries for {size} sequences; give one a sequence")
    return checked if checked.flags.writeable else checked.copy()


def as_token_rows(name: str, values: Any, size: int) -> Int32s:
    """Return a row of tokens a sequence as a contiguous, writable `int32[size, k]`, itself if it can be."""
    rows = as_numpy(name, values)
    if rows.ndim != 2 or rows.shape[0] != size or rows.dtype != _INT32:
        raise ContractError(f"{name} is {describe(rows)}; pass int32[{size}, k]")
    return as_plain(rows)


def as_keys(keys: NDArray[np.uint64], num_blocks: int) -> NDArray[np.uint64]:
    """Return block keys as contiguous, writable `uint64[b, 2]` with at least so many rows."""
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64 or keys.ndim != 2 or keys.shape[1] != 2:
        raise ContractError(f"keys is {describe(keys)}; pass uint64[b, 2] as hash_full_blocks returns it")
    if keys.shape[0] < num_blocks:
        raise ContractError(f"keys has {keys.shape[0]} rows; {num_blocks} are needed, one for each full block")
    return keys if _is_plain(keys) else np.array(keys[:num_blocks], order="C")


def as_rows(name: str, values: NDArray[np.int32], size: int | None = None) -> Int32s:
    """Return a one-dimensional contiguous, writable int32 array, of the given size if there is one."""
    if not isinstance(values, np.ndarray) or values.dtype != np.int32 or values.ndim != 1:
        raise ContractError(f"{name} is {describe(values)}; pass int32[n]")
    if size is not None and values.size != size:
        raise ContractError(f"{name} has {values.size} entries for {size} leases; pass one for each")
    return as_plain(values)


def check_mapping(name: str, old_to_new: Any, old_batch: int, new_batch: int) -> Int32s:
    """Return an order-preserving compaction as `int32[old_batch]`: the new slot of each old slot, `RETIRED` for one that leaves.

    Raises:
        ContractError: a wrong number of entries, or survivors that do not keep their order and fill `[0, new_batch)`.
    """
    mapping = as_int32s(name, old_to_new)
    if mapping.size != old_batch:
        raise ContractError(f"{name} has {mapping.size} entries for {old_batch} slots; give one a slot")
    survivors = mapping[mapping != RETIRED]
    if not np.array_equal(survivors, np.arange(new_batch)):
        raise ContractError(
            f"{name} is {mapping.tolist()}; survivors keep their order and fill 0 .. {new_batch - 1}, "
            f"a sequence that leaves is {RETIRED}"
        )
    return mapping


def _is_plain(values: NDArray[Any]) -> bool:
    flags = values.flags
    return flags.c_contiguous and flags.writeable and flags.aligned


def as_numpy(name: str, values: Any) -> NDArray[Any]:
    """Return an array of any library that lies on the host as NumPy's; `ContractError` for a masked or unreadable one."""
    if isinstance(values, np.ma.MaskedArray):
        raise ContractError(f"{name} is a masked array; pass its values without the masked ones, as a plain array")
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # an array of a device, for one
        raise ContractError(f"{name} is a {type(values).__name__} that NumPy cannot read: {error}") from error


def _int32s_of_array(name: str, values: NDArray[Any], one: str) -> Int32s:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ContractError(f"{name} is {describe(values)}; pass a one-dimensional run of integers")
    if values.dtype == _INT32:  # of this machine's byte order
        return values if values.flags.c_contiguous and values.flags.aligned else np.array(values, order="C")
    outside = (values < -INT32_LIMIT) | (values >= INT32_LIMIT)
    if outside.any():
        index = int(outside.argmax())
        raise _out_of_range(name, one, index, int(values[index]))
    return values.astype(np.int32)


def _int32s_of_sequence(name: str, values: Any, one: str) -> Int32s:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ContractError(f"{name} is a {type(values).__name__}; pass a sequence of integers, or an array")
    if isinstance(values, memoryview):  # of whatever format and shape
        return _int32s_of_array(name, as_numpy(name, values), one)
    # array.array() takes bytes for raw memory; and list() would ask a sequence for its length, which need not be true.
    items = values if type(values) in (list, tuple) else [each for each in values]  # noqa: C416
    if not items:
        return np.empty(0, np.int32)
    strangers = {kind for kind in set(map(type, items)) if not _is_integral(kind)}
    if strangers:
        index = next(index for index, item in enumerate(items) if type(item) in strangers)
        raise ContractError(
            f"{one or name + ' entry'} {index} is {describe(items[index])}; pass a one-dimensional run of integers"
        )
    try:
        return np.frombuffer(array.array("i", items), dtype=np.int32)
    except OverflowError:
        index = next(index for index, item in enumerate(items) if not -INT32_LIMIT <= item < INT32_LIMIT)
        raise _out_of_range(name, one, index, items[index]) from None


def _out_of_range(name: str, one: str, index: int, value: int) -> ContractError:
    return ContractError(
        f"{one or name + ' entry'} {index} is {value}; it must lie in int32 range, [{-INT32_LIMIT}, {INT32_LIMIT - 1}]"
    )
