"""Tables that tell a kernel where bytes lie: built once per cache or storage, kept on the device.

A *slot table* has one row per array that is addressed by slot: `SLOT_FIELDS` int64. A *move table* has one row per run
of bytes that a snapshot saves: `MOVE_FIELDS` int64. A *pool table* has one row per attention layer: `POOL_FIELDS` int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.arrays import view_array
from ctxcache.device.ops import (
    JOB_BASE_PAGE,
    JOB_DRAFT_PAGE,
    JOB_PARTIAL,
    JOB_RECURRENT,
    JOB_SLOT,
    CacheArrays,
    SnapshotArrays,
)

if TYPE_CHECKING:
    from ctxcache.device.numba.device_memory import DeviceMemory  # needs a CUDA target

SLOT_ADDRESS, SLOT_BYTES, SLOT_FIELDS = range(3)
"""Fields of a slot table: where slot 0 lies, and the bytes of a slot, which is also the distance to the next."""

(
    MOVE_LIVE_ADDRESS,
    MOVE_LIVE_STRIDE,
    MOVE_LIVE_FIELD,
    MOVE_SAVED_ADDRESS,
    MOVE_SAVED_STRIDE,
    MOVE_SAVED_FIELD,
    MOVE_FIXED_BYTES,
    MOVE_TOKEN_BYTES,
    MOVE_FIELDS,
) = range(9)
"""Fields of a move table. A side's bytes begin at its address + its stride x the job's entry in its field; their number
is the fixed bytes + the token bytes x the job's tokens."""

POOL_ADDRESS, POOL_HALF_BYTES, POOL_PAGE_BYTES, POOL_FIELDS = range(4)
"""Fields of a pool table: where the pool lies, bytes of its K half, bytes of K of one page."""


class Descriptors(NamedTuple):
    """A table on the host: `rows`, int64, and the bytes of the longest run that they name, 0 where no grid depends on it."""

    rows: NDArray[np.int64]
    longest_run: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """A table on the device, which owns its memory."""

    array: Any
    address: int
    num_rows: int
    longest_run: int


class DeviceTables:
    """Tables of one kind, each made at its owner's first use and kept on the device as long as that lives.

    Args:
        describe: makes the table of a cache or storage.
        memory: of the device.
    """

    def __init__(self, describe: Callable[[Any], Descriptors], memory: DeviceMemory) -> None:
        self._describe = describe
        self._memory = memory
        self._tables: WeakKeyDictionary[Any, DeviceTable] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, owner: CacheArrays | SnapshotArrays) -> DeviceTable:
        """Return the table of an owner. Where two threads make it at once, one is kept and used by both."""
        table = self._tables.get(owner)
        if table is None:
            rows, longest_run = self._describe(owner)
            array = self._memory.allocate(rows.shape, rows.dtype)
            view = view_array(array)
            self._memory.write(view, rows)
            table = self._tables.setdefault(owner, DeviceTable(array, view.address, len(rows), longest_run))
        return table


def describe_slots(cache: CacheArrays) -> Descriptors:
    """Return the slot table of a cache, `int64[n, SLOT_FIELDS]`: the lengths first, then state and convolution state."""
    views = [view_array(array) for array in (cache.kv_lengths, *cache.slot_arrays)]
    rows = np.array([(view.address, view.nbytes // view.shape[0]) for view in views], np.int64)
    return Descriptors(rows, int(rows[:, SLOT_BYTES].max()))


def describe_moves(storage: SnapshotArrays) -> Descriptors:
    """Return the move table of a storage, `int64[n, MOVE_FIELDS]`: state, convolution state, then K and V of pages."""
    entries: list[tuple[int, ...]] = []
    for state in storage.state_parts:
        live, saved = view_array(state.live).address, view_array(state.saved).address
        size = state.slot_bytes
        entries.append((live, size, JOB_SLOT, saved, size, JOB_RECURRENT, size, 0))
    for pages in storage.page_parts:
        live, saved = view_array(pages.live).address, view_array(pages.saved).address
        size, field = pages.page_bytes, JOB_DRAFT_PAGE if pages.is_draft else JOB_BASE_PAGE
        for half in (0, 1):
            live_half, saved_half = live + half * pages.num_pages * size, saved + half * size
            entries.append((live_half, size, field, saved_half, 2 * size, JOB_PARTIAL, 0, pages.token_bytes))
    rows = np.array(entries, np.int64).reshape(-1, MOVE_FIELDS)
    runs = rows[:, MOVE_FIXED_BYTES] + storage.tokens_per_page * rows[:, MOVE_TOKEN_BYTES]
    return Descriptors(rows, int(runs.max()))


def describe_pools(cache: CacheArrays) -> Descriptors:
    """Return the pool table of a cache, `int64[layers, POOL_FIELDS]`."""
    views = [view_array(pool) for pool in cache.kv_pools]
    rows = [(view.address, view.nbytes // 2, view.nbytes // 2 // cache.num_pages) for view in views]
    return Descriptors(np.array(rows, np.int64).reshape(-1, POOL_FIELDS))
