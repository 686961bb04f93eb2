"""Whether snapshot jobs are in order: compiled loops over the packed rows, so that the usual case costs a few microseconds.

They say yes or no. What exactly is wrong is found by the slow checks of `snapshots`, which run only after a no.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.descriptors import JOB_BASE_PAGE, JOB_DRAFT_PAGE, JOB_PARTIAL, JOB_RECURRENT, JOB_SLOT, JOB_TOKENS
from ctxcache.jit import njit, njit_part

Int32s = NDArray[np.int32]

ABSENT = -1


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
def _overlap(rows: Int32s, i: int, j: int, to_snapshots: bool, has_draft: bool) -> bool:  # noqa: FBT001 - compiled
    """Whether jobs i and j write the same place."""
    state = rows[i, JOB_RECURRENT] != ABSENT and rows[j, JOB_RECURRENT] != ABSENT
    pages = rows[i, JOB_PARTIAL] != ABSENT and rows[j, JOB_PARTIAL] != ABSENT
    pages = pages and rows[i, JOB_TOKENS] > 0 and rows[j, JOB_TOKENS] > 0
    if to_snapshots:
        if state and rows[i, JOB_RECURRENT] == rows[j, JOB_RECURRENT]:
            return True
        return bool(pages and rows[i, JOB_PARTIAL] == rows[j, JOB_PARTIAL])
    if state and rows[i, JOB_SLOT] == rows[j, JOB_SLOT]:
        return True
    if pages and rows[i, JOB_BASE_PAGE] == rows[j, JOB_BASE_PAGE]:
        return True
    return bool(pages and has_draft and rows[i, JOB_DRAFT_PAGE] == rows[j, JOB_DRAFT_PAGE])


@njit
def are_sound_jobs(rows: Int32s, limits: tuple[int, int, int, int, int, int], to_snapshots: bool) -> bool:  # noqa: FBT001
    """Whether packed jobs name slots and pages that exist, and no two of them write the same place.

    Args:
        rows: `int32[n, JOB_FIELDS]`.
        limits: for each column what its entries must be below, where they are used; 0 draft pages where there is no draft.
        to_snapshots: whether snapshots are the destination.
    """
    has_draft = limits[JOB_DRAFT_PAGE] > 0
    for i in range(len(rows)):
        if rows[i, JOB_RECURRENT] != ABSENT:
            if rows[i, JOB_RECURRENT] < 0 or rows[i, JOB_RECURRENT] >= limits[JOB_RECURRENT]:
                return False
            if rows[i, JOB_SLOT] < 0 or rows[i, JOB_SLOT] >= limits[JOB_SLOT]:
                return False
        if rows[i, JOB_PARTIAL] != ABSENT:
            if rows[i, JOB_PARTIAL] < 0 or rows[i, JOB_PARTIAL] >= limits[JOB_PARTIAL]:
                return False
            if rows[i, JOB_TOKENS] < 0 or rows[i, JOB_TOKENS] >= limits[JOB_TOKENS]:
                return False
            if rows[i, JOB_TOKENS] > 0:
                if rows[i, JOB_BASE_PAGE] < 0 or rows[i, JOB_BASE_PAGE] >= limits[JOB_BASE_PAGE]:
                    return False
                if has_draft and (rows[i, JOB_DRAFT_PAGE] < 0 or rows[i, JOB_DRAFT_PAGE] >= limits[JOB_DRAFT_PAGE]):
                    return False
        for j in range(i):
            if _overlap(rows, i, j, to_snapshots, has_draft):
                return False
    return True
