"""Where a checkpoint's boundary lies in a sequence's pages, and the device jobs that move it there and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ctxcache.device.ops import ABSENT, SnapshotJobs
from ctxcache.manager.results import CacheRequestLease


@dataclass(frozen=True, slots=True)
class SnapshotSlots:
    """One checkpoint on its way: the sequence's slot and lease, the exact length, and the snapshot slots."""

    slot: int
    lease: CacheRequestLease
    exact_length: int
    recurrent_snapshot_slot: int | None
    partial_kv_snapshot_slot: int | None


def boundary_page_index(exact_length: int, tokens_per_page: int, *, paired: bool) -> int:
    """Return the logical page that holds the boundary of a checkpoint.

    With a paired draft (MTP) the boundary token always lives in a private page, so that a page-aligned length has a whole
    page as its partial snapshot.
    """
    return (exact_length - 1) // tokens_per_page if paired else exact_length // tokens_per_page


def snapshot_jobs(checkpoints: list[SnapshotSlots], tokens_per_page: int, *, paired: bool) -> SnapshotJobs | None:
    """Describe the copies of some checkpoints, in either direction; `None` when there are none."""
    if not checkpoints:
        return None
    rows = [_row(checkpoint, tokens_per_page, paired=paired) for checkpoint in checkpoints]
    slots, recurrent, partial, base, draft, tokens = np.array(rows, np.int32).T.copy()
    return SnapshotJobs(slots, recurrent, partial, base, draft, tokens)


def _row(checkpoint: SnapshotSlots, tokens_per_page: int, *, paired: bool) -> tuple[int, int, int, int, int, int]:
    recurrent = ABSENT if checkpoint.recurrent_snapshot_slot is None else checkpoint.recurrent_snapshot_slot
    if checkpoint.partial_kv_snapshot_slot is None:
        return checkpoint.slot, recurrent, ABSENT, ABSENT, ABSENT, 0
    index = boundary_page_index(checkpoint.exact_length, tokens_per_page, paired=paired)
    return (
        checkpoint.slot,
        recurrent,
        checkpoint.partial_kv_snapshot_slot,
        int(checkpoint.lease.base_pages[index]),
        int(checkpoint.lease.draft_pages[index]) if paired else ABSENT,
        checkpoint.exact_length - index * tokens_per_page,
    )
