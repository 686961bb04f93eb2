"""Whether values and snapshot jobs are in order: compiled loops, so that the usual case costs a few microseconds.

They say yes or no. What exactly is wrong is found by slow checks, which run only after a no.
"""

from __future__ import annotations

import numpy as np

from ctxcache.arguments import Int32s
from ctxcache.device.ops import (
    ABSENT,
    JOB_BASE_PAGE,
    JOB_DRAFT_PAGE,
    JOB_PARTIAL,
    JOB_RECURRENT,
    JOB_SLOT,
    JOB_TOKENS,
)
from ctxcache.jit import njit, njit_part


@njit
def are_within(values: Int32s, limit: int) -> bool:
    """Whether every value is in `[0, limit)`."""
    for value in values:  # noqa: SIM110 - compiled code has no generators to fold
        if value < 0 or value >= limit:
            return False
    return True


@njit
def are_distinct_slots(slots: Int32s, num_slots: int) -> bool:
    """Whether every slot is in `[0, num_slots)` and none is named twice."""
    seen = np.zeros(num_slots, np.bool_)
    for slot in slots:
        if slot < 0 or slot >= num_slots or seen[slot]:
            return False
        seen[slot] = True
    return True


@njit_part
def _overlap(table: Int32s, i: int, j: int, to_snapshots: bool, has_draft: bool) -> bool:  # noqa: FBT001 - compiled
    """Whether jobs i and j write the same place."""
    state = table[JOB_RECURRENT, i] != ABSENT and table[JOB_RECURRENT, j] != ABSENT
    pages = table[JOB_PARTIAL, i] != ABSENT and table[JOB_PARTIAL, j] != ABSENT
    pages = pages and table[JOB_TOKENS, i] > 0 and table[JOB_TOKENS, j] > 0
    if to_snapshots:
        if state and table[JOB_RECURRENT, i] == table[JOB_RECURRENT, j]:
            return True
        return bool(pages and table[JOB_PARTIAL, i] == table[JOB_PARTIAL, j])
    if state and table[JOB_SLOT, i] == table[JOB_SLOT, j]:
        return True
    if pages and table[JOB_BASE_PAGE, i] == table[JOB_BASE_PAGE, j]:
        return True
    return bool(pages and has_draft and table[JOB_DRAFT_PAGE, i] == table[JOB_DRAFT_PAGE, j])


@njit
def are_sound_jobs(table: Int32s, limits: tuple[int, int, int, int, int, int], to_snapshots: bool) -> bool:  # noqa: FBT001
    """Whether packed jobs name slots and pages that exist, and no two of them write the same place.

    Args:
        table: `int32[JOB_FIELDS, n]`.
        limits: for each field what its entries must be below, where they are used; 0 draft pages where there is no draft.
        to_snapshots: whether snapshots are the destination.
    """
    has_draft = limits[JOB_DRAFT_PAGE] > 0
    for i in range(table.shape[1]):
        if table[JOB_RECURRENT, i] != ABSENT:
            if table[JOB_RECURRENT, i] < 0 or table[JOB_RECURRENT, i] >= limits[JOB_RECURRENT]:
                return False
            if table[JOB_SLOT, i] < 0 or table[JOB_SLOT, i] >= limits[JOB_SLOT]:
                return False
        if table[JOB_PARTIAL, i] != ABSENT:
            if table[JOB_PARTIAL, i] < 0 or table[JOB_PARTIAL, i] >= limits[JOB_PARTIAL]:
                return False
            if table[JOB_TOKENS, i] < 0 or table[JOB_TOKENS, i] >= limits[JOB_TOKENS]:
                return False
            if table[JOB_TOKENS, i] > 0:
                if table[JOB_BASE_PAGE, i] < 0 or table[JOB_BASE_PAGE, i] >= limits[JOB_BASE_PAGE]:
                    return False
                if has_draft and (table[JOB_DRAFT_PAGE, i] < 0 or table[JOB_DRAFT_PAGE, i] >= limits[JOB_DRAFT_PAGE]):
                    return False
        for j in range(i):
            if _overlap(table, i, j, to_snapshots, has_draft):
                return False
    return True
