"""Checks of what callers pass to the manager. Arrays that are right already pass without a copy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import ContractError
from ctxcache.ids import Hash128
from ctxcache.manager.results import HybridCheckpointKey, HybridSnapshotReservation

_LIMIT = 1 << 31
_Member = TypeVar("_Member", bound=Enum)


def as_count(name: str, value: int, *, least: int = 0) -> int:
    """Return a whole number in [least, 2**31)."""
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise ContractError(f"{name} is {value!r}; pass an integer of at least {least}")
        value = int(value)
    if not least <= value < _LIMIT:
        raise ContractError(f"{name} is {value}; it must be at least {least} and below 2**31")
    return value


def as_flag(name: str, value: bool | np.bool_) -> bool:  # noqa: FBT001 - it is the value that is checked
    """Return a truth value as a bool; nothing else is taken for its truth."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise ContractError(f"{name} is {_said(value)}; pass True or False")
    return bool(value)


def check_member(name: str, value: _Member, kind: type[_Member]) -> None:
    """Check that a value is a member of an enumeration, before anything hashes or compares it."""
    if not isinstance(value, kind):
        raise ContractError(f"{name} is {_said(value)}; pass a member of {kind.__name__}")


def as_keys(keys: NDArray[np.uint64], num_blocks: int) -> NDArray[np.uint64]:
    """Return block keys as contiguous, writable `uint64[b, 2]` with at least so many rows."""
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64 or keys.ndim != 2 or keys.shape[1] != 2:
        raise ContractError(f"keys is {_said(keys)}; pass uint64[b, 2] as hash_full_blocks returns it")
    if keys.shape[0] < num_blocks:
        raise ContractError(f"keys has {keys.shape[0]} rows; {num_blocks} are needed, one for each full block")
    return keys if _is_plain(keys) else np.array(keys[:num_blocks], order="C")


def as_rows(name: str, values: NDArray[np.int32], size: int | None = None) -> NDArray[np.int32]:
    """Return a one-dimensional contiguous, writable int32 array, of the given size if there is one."""
    if not isinstance(values, np.ndarray) or values.dtype != np.int32 or values.ndim != 1:
        raise ContractError(f"{name} is {_said(values)}; pass int32[n]")
    if size is not None and values.size != size:
        raise ContractError(f"{name} has {values.size} entries for {size} leases; pass one for each")
    return as_plain(values)


def as_plain(values: NDArray[Any]) -> NDArray[Any]:
    """Return a contiguous, writable array, itself if it can be: every other layout is another type to compiled code."""
    return values if _is_plain(values) else np.array(values, order="C")


def _is_plain(values: NDArray[Any]) -> bool:
    flags = values.flags
    return flags.c_contiguous and flags.writeable and flags.aligned


def check_exact_keys(exact_keys: Iterable[HybridCheckpointKey]) -> tuple[HybridCheckpointKey, ...]:
    """Return checkpoint keys as a tuple, each with a digest and a length of at least 1."""
    try:
        checked = tuple(iter(exact_keys))
    except TypeError:
        raise ContractError(f"exact_keys is {_said(exact_keys)}; pass a run of HybridCheckpointKey") from None
    for key in checked:
        if not isinstance(key, HybridCheckpointKey) or not isinstance(key.exact_prefix_digest, Hash128):
            raise ContractError(f"exact_keys holds {_said(key)}; pass HybridCheckpointKey(Hash128(...), length)")
        as_count("exact_length", key.exact_length, least=1)
    return checked


def check_reservation(reservation: HybridSnapshotReservation) -> None:
    """Check that a reservation names slots by integers, so that it compares."""
    if not isinstance(reservation, HybridSnapshotReservation):
        raise ContractError(f"reservation is {_said(reservation)}; pass what reserve_snapshots returned")
    as_count("recurrent_snapshot_slot", reservation.recurrent_snapshot_slot)
    if reservation.partial_kv_snapshot_slot is not None:
        as_count("partial_kv_snapshot_slot", reservation.partial_kv_snapshot_slot)


def _said(value: Any) -> str:
    """Say what a wrong value is: an array by its layout, anything else as it shows itself."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)
