"""Tables that tell a kernel where bytes lie: built once per cache or storage, kept on the device.

A *slot table* has one row per array that is addressed by slot: `SLOT_FIELDS` int64. A *move table* has one row per run
of bytes that a snapshot saves: `MOVE_FIELDS` int64. Jobs are `JOB_FIELDS` rows of int32 with an
entry a job, as `check_jobs` packs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.arrays import view_array

if TYPE_CHECKING:
    from ctxcache.device.caches import HybridCacheManager
    from ctxcache.device.snapshots import HybridSnapshotStorage

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

JOB_SLOT, JOB_RECURRENT, JOB_PARTIAL, JOB_BASE_PAGE, JOB_DRAFT_PAGE, JOB_TOKENS, JOB_FIELDS = range(7)
"""Rows of packed jobs: the fields of `SnapshotJobs` in order."""


def slot_table(cache: HybridCacheManager) -> NDArray[np.int64]:
    """Return the slot table of a cache, `int64[n, SLOT_FIELDS]`: the lengths first, then state and convolution state."""
    views = [view_array(array) for array in (cache.kv_lengths, *cache.slot_arrays)]
    return np.array([(view.address, view.nbytes // view.shape[0]) for view in views], np.int64)


def move_table(storage: HybridSnapshotStorage) -> NDArray[np.int64]:
    """Return the move table of a storage, `int64[n, MOVE_FIELDS]`: state, convolution state, then K and V of pages."""
    rows: list[tuple[int, ...]] = []
    for state in storage.state_parts:
        live, saved = view_array(state.live).address, view_array(state.saved).address
        size = state.slot_bytes
        rows.append((live, size, JOB_SLOT, saved, size, JOB_RECURRENT, size, 0))
    for pages in storage.page_parts:
        live, saved = view_array(pages.live).address, view_array(pages.saved).address
        size, field = pages.page_bytes, JOB_DRAFT_PAGE if pages.is_draft else JOB_BASE_PAGE
        for half in (0, 1):
            live_half, saved_half = live + half * pages.num_pages * size, saved + half * size
            rows.append((live_half, size, field, saved_half, 2 * size, JOB_PARTIAL, 0, pages.token_bytes))
    return np.array(rows, np.int64).reshape(-1, MOVE_FIELDS)


def longest_run(table: NDArray[np.int64], tokens_per_page: int) -> int:
    """Return the bytes of the longest run that a move table can name."""
    return int((table[:, MOVE_FIXED_BYTES] + tokens_per_page * table[:, MOVE_TOKEN_BYTES]).max())
