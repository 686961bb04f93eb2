"""What device ops are told, checked before anything is enqueued: the same rules for every implementation of an op.

`location` is where the ops work, which the arrays that a caller lends for one op have to lie in; `ANYWHERE` asks nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ctxcache.arguments import INT32_LIMIT, Int32s, as_int32s, as_integer
from ctxcache.device.arrays import (
    ANYWHERE,
    ArrayView,
    Location,
    check_int32_array,
    check_int32_target,
    check_reachable,
    check_writable,
    view_array,
)
from ctxcache.device.compiled_checks import are_distinct_slots, are_sound_jobs, are_within
from ctxcache.device.ops import ABSENT, CacheArrays, HiddenRow, SnapshotArrays, SnapshotJobs
from ctxcache.device.page_sums import SUM_LANES
from ctxcache.errors import ContractError, InvariantError


def check_lengths(cache: CacheArrays, reuse_lengths: Any) -> Int32s:
    """Check the lengths of a new batch and return them as `int32[n]`; `ContractError` if too many or negative."""
    lengths = as_int32s("reuse_lengths", reuse_lengths)
    if len(lengths) > cache.max_batch:
        raise ContractError(f"there are {len(lengths)} reuse lengths; the cache has {cache.max_batch} slots")
    if not are_within(lengths, INT32_LIMIT):
        raise ContractError(f"reuse_lengths hold {lengths.min()}; a length is at least 0")
    return lengths


def check_increment(cache: CacheArrays, increment: Any, location: Location = ANYWHERE) -> int | ArrayView:
    """Return the one increment of all active slots, or where the array lies that has one for each; or `ContractError`."""
    if isinstance(increment, (int, np.integer)):
        return as_integer("increment", increment)
    return check_int32_array("increment", increment, cache.active_batch_size, location)


def check_slots(cache: CacheArrays, slots: Any) -> Int32s:
    """Return slots as `int32[n]`; `ContractError` unless they are in range and unique."""
    checked = as_int32s("slots", slots)
    if not are_distinct_slots(checked, cache.max_batch):
        _check_range("slots", checked, cache.max_batch)
        raise ContractError(f"slots are {checked.tolist()}; name each once")
    return checked


def check_jobs(storage: SnapshotArrays, jobs: SnapshotJobs, *, to_snapshots: bool) -> Int32s:
    """Check jobs against the storage and pack them, one row a field: `int32[JOB_FIELDS, n]`, as in `SnapshotJobs`.

    Args:
        storage: whose slots and pages the jobs name.
        jobs: what to move.
        to_snapshots: whether snapshots are the destination (capture) or the source (restore).

    Raises:
        ContractError: fields of different lengths, an index out of range, a page that is missing, or two jobs that
            write the same place. Nothing has been enqueued.
    """
    fields = [as_int32s(name, getattr(jobs, name)) for name in SnapshotJobs.__slots__]
    lengths = [len(field) for field in fields]
    if lengths.count(lengths[0]) != len(lengths):
        raise ContractError(f"jobs have fields of lengths {lengths}; give one entry per job")
    packed = np.concatenate(fields).reshape(len(fields), -1)
    if not are_sound_jobs(packed, storage.job_limits, to_snapshots):
        _refuse_jobs(packed, storage.job_limits, to_snapshots=to_snapshots)
    return packed


def _refuse_jobs(packed: Int32s, limits: tuple[int, ...], *, to_snapshots: bool) -> None:
    """Find what is wrong with jobs, and raise."""
    slots, recurrent, partial, base_pages, draft_pages, num_tokens = packed
    num_slots, num_recurrent, num_partial, num_base_pages, num_draft_pages, tokens_limit = limits
    moves_state, moves_pages = recurrent != ABSENT, (partial != ABSENT) & (num_tokens > 0)
    _check_range("slots", slots[moves_state], num_slots)
    _check_range("recurrent_snapshot_slots", recurrent[moves_state], num_recurrent)
    _check_range("partial_kv_snapshot_slots", partial[partial != ABSENT], num_partial)
    _check_range("num_tokens", num_tokens[partial != ABSENT], tokens_limit)
    _check_range("base_pages", base_pages[moves_pages], num_base_pages)
    destinations = {
        "recurrent_snapshot_slots": recurrent[moves_state],
        "partial_kv_snapshot_slots": partial[moves_pages],
    }
    if not to_snapshots:
        destinations = {"slots": slots[moves_state], "base_pages": base_pages[moves_pages]}
    if num_draft_pages:
        _check_range("draft_pages", draft_pages[moves_pages], num_draft_pages)
        if not to_snapshots:
            destinations["draft_pages"] = draft_pages[moves_pages]
    for name, written in destinations.items():
        if len(np.unique(written)) != len(written):
            raise ContractError(f"jobs.{name} is {written.tolist()}; two jobs may not write the same place")
    raise InvariantError(f"jobs were taken for wrong, and nothing is wrong with them: {packed.tolist()}")


def check_mapping_upload(mapping: Any, device_mapping: Any, location: Location = ANYWHERE) -> tuple[Int32s, ArrayView]:
    """Return the mapping as `int32[n]` and where the caller's array lies that takes it; `ContractError` if it cannot."""
    entries = as_int32s("mapping", mapping)
    return entries, check_int32_target("device_mapping", device_mapping, len(entries), location)


def check_batches(cache: CacheArrays, old_batch: int, new_batch: int) -> tuple[int, int]:
    """Return the batch sizes of a compaction: `0 <= new_batch <= old_batch <= max_batch`, or `ContractError`."""
    rule = "sizes obey 0 <= new <= old, both in"
    old_batch = as_integer("old_batch", old_batch, 0, cache.max_batch + 1, rule=rule)
    new_batch = as_integer("new_batch", new_batch, 0, cache.max_batch + 1, rule=rule)
    if new_batch > old_batch:
        raise ContractError(
            f"compaction from {old_batch} to {new_batch} slots; sizes obey 0 <= new <= old <= {cache.max_batch}"
        )
    return old_batch, new_batch


def check_compaction(
    cache: CacheArrays, mapping: Any, old_batch: int, new_batch: int, location: Location = ANYWHERE
) -> tuple[int, int, ArrayView]:
    """Return the batch sizes of a compaction, and where its mapping lies on the device; `ContractError` for wrong ones."""
    old_batch, new_batch = check_batches(cache, old_batch, new_batch)
    return old_batch, new_batch, check_int32_array("mapping", mapping, old_batch, location)


def check_hidden_row(
    storage: SnapshotArrays, snapshot_slot: int, row: HiddenRow, *, is_written: bool = False
) -> ArrayView:
    """Check one hidden row and its snapshot slot, and describe the array.

    Raises:
        ContractError: a deployment without MTP, an index out of range, or an array of another width or element size,
            with gaps inside a row, out of the ops' reach, or read-only where the row is written.
    """
    view = check_hidden_states(storage, row, is_written=is_written)
    as_integer("snapshot_slot", snapshot_slot, 0, storage.num_recurrent_slots, rule="there are recurrent snapshots")
    return view


def check_hidden_states(storage: SnapshotArrays, row: HiddenRow, *, is_written: bool = False) -> ArrayView:
    """Check one hidden row of a runtime's array, and describe the array. Raises as `check_hidden_row`."""
    if storage.hidden_rows is None:
        raise ContractError("this deployment saves no hidden rows; only hybrid engines with MTP do")
    view = view_array(row.hidden_states)
    hidden_size, itemsize = storage.hidden_shape
    if len(view.shape) != 3 or view.shape[2] != hidden_size or view.itemsize != itemsize:
        raise ContractError(
            f"hidden states have shape {view.shape} and elements of {view.itemsize} bytes; "
            f"the engine's are [batch, rows, {hidden_size}] and {itemsize}"
        )
    if not view.is_contiguous_from(2):
        raise ContractError(f"hidden states have strides {view.strides}; each row must be contiguous")
    as_integer("hidden slot", row.slot, 0, view.shape[0], rule="the array has")
    as_integer("hidden row", row.row, 0, view.shape[1], rule="the array has")
    check_reachable("hidden states", row.hidden_states, view, storage.location)
    if is_written:
        check_writable("hidden states", view)
    return view


def check_pages(cache: CacheArrays, page_ids: Any, sums: Any) -> tuple[Int32s, ArrayView]:
    """Check the arguments of `sum_pages`; return the ids as `int32[n]` and where the sums lie. `ContractError` for wrong ones."""
    pages = as_int32s("page_ids", page_ids)
    if not are_within(pages, cache.num_pages):
        raise ContractError(
            f"page_ids hold {pages.min()} .. {pages.max()}; the pool has pages 0 .. {cache.num_pages - 1}"
        )
    view = view_array(sums)
    shape = view.shape
    wanted = (len(cache.kv_pools), SUM_LANES, 2)
    if len(shape) != 4 or tuple(shape[1:]) != wanted or shape[0] < len(pages) or view.itemsize != 8:
        raise ContractError(f"sums have shape {shape}; {len(pages)} pages need int64 [{len(pages)} or more, *{wanted}]")
    if not view.is_contiguous:
        raise ContractError(f"sums have strides {view.strides}; pass a C-contiguous array, as allocate_sums makes it")
    return pages, view


def _check_range(name: str, values: Int32s, limit: int) -> None:
    if not are_within(values, limit):
        raise ContractError(f"{name} hold {values.min()} .. {values.max()}; they must be in [0, {limit})")
