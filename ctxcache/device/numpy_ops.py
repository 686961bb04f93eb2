"""Device ops on host arrays: the oracle for the kernels, and the quick backend for tests without a device."""

# ruff: noqa: ARG002 - the host has no streams; the protocol's stream arguments stay unused

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s
from ctxcache.device.arrays import HOST, Location, check_same_layout
from ctxcache.device.arrays import host_array as _on_host
from ctxcache.device.op_checks import (
    check_compaction,
    check_hidden_row,
    check_increment,
    check_jobs,
    check_lengths,
    check_mapping_upload,
    check_pages,
    check_slots,
)
from ctxcache.device.ops import (
    ABSENT,
    CacheArrays,
    HiddenRow,
    SnapshotArrays,
    SnapshotJobs,
    StreamSynchronizer,
    TableChanges,
    storage_dtype,
)
from ctxcache.device.page_rows import UNUSED
from ctxcache.device.page_sums import sum_on_host

_LOCATION = Location(HOST)


class NumpyDeviceOps:
    """`DeviceOps` whose device is the host: every op has run when it returns, and a stream may be anything."""

    def operation(self, name: str) -> None:
        """Do nothing; see `DeviceOps.operation`."""

    def allocate(self, shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> NDArray[Any]:
        """Return a zero-filled NumPy array."""
        return np.zeros(shape, storage_dtype(dtype))

    def to_host(self, array: Any) -> NDArray[Any]:
        """Return a copy."""
        return _on_host(array).copy()

    def to_device(self, array: Any, host: NDArray[Any]) -> None:
        """Copy `host` into `array`; `ContractError` for another shape or element size."""
        target, source = _on_host(array), np.asarray(host)
        check_same_layout(target, source)
        target[...] = source.view(target.dtype)

    def upload_rows(self, table: TableChanges, stream: Any) -> None:
        """See `DeviceOps.upload_rows`."""
        count = table.count_changes()
        if count == 0:
            return
        entries = np.empty((count, 2), np.int32)
        try:
            table.write_changes(entries)
            rows, columns = np.divmod(entries[:, 0], table.max_pages_per_seq)
            ids = entries[:, 1]
            view = _on_host(table.kernel_view).view(np.int32)
            view[rows, 0, columns] = ids
            view[rows, 1, columns] = np.where(ids == UNUSED, UNUSED, ids + table.num_pages)
        except BaseException:
            table.forget_device_rows()
            raise

    def reset_lengths(self, cache: CacheArrays, reuse_lengths: Int32s, stream: Any) -> None:
        """See `DeviceOps.reset_lengths`."""
        lengths = check_lengths(cache, reuse_lengths)
        device = _on_host(cache.kv_lengths)
        device[: len(lengths)] = lengths
        device[len(lengths) :] = 0
        cache.active_batch_size = len(lengths)

    def advance_lengths(self, cache: CacheArrays, increment: Any, stream: Any) -> None:
        """See `RuntimeDeviceOps.advance_lengths`."""
        checked, active = check_increment(cache, increment, _LOCATION), cache.active_batch_size
        _on_host(cache.kv_lengths)[:active] += checked if isinstance(checked, int) else _on_host(increment)[:active]

    def zero_recurrent(self, cache: CacheArrays, slots: Int32s, stream: Any) -> None:
        """See `DeviceOps.zero_recurrent`."""
        cold = check_slots(cache, slots)
        for array in cache.slot_arrays:
            _on_host(array)[cold] = 0

    def restore(self, storage: SnapshotArrays, jobs: SnapshotJobs, stream: Any) -> None:
        """See `DeviceOps.restore`."""
        for live, saved in _pieces(storage, check_jobs(storage, jobs, to_snapshots=False)):
            live[...] = saved

    def capture(self, storage: SnapshotArrays, jobs: SnapshotJobs, stream: Any) -> None:
        """See `DeviceOps.capture`."""
        for live, saved in _pieces(storage, check_jobs(storage, jobs, to_snapshots=True)):
            saved[...] = live

    def upload_mapping(self, mapping: Int32s, device_mapping: Any, stream: Any) -> None:
        """See `DeviceOps.upload_mapping`."""
        entries, _ = check_mapping_upload(mapping, device_mapping, _LOCATION)
        _on_host(device_mapping)[: len(entries)] = entries

    def compact_slot_state(self, cache: CacheArrays, mapping: Any, old_batch: int, new_batch: int, stream: Any) -> None:
        """See `DeviceOps.compact_slot_state`."""
        old_batch, new_batch, _ = check_compaction(cache, mapping, old_batch, new_batch, _LOCATION)
        arrays = [_on_host(array) for array in (cache.kv_lengths, *cache.slot_arrays)]
        for old, new in enumerate(_on_host(mapping)[:old_batch].tolist()):
            if 0 <= new < old:
                for array in arrays:
                    array[new] = array[old]
        cache.active_batch_size = new_batch

    def capture_boundary_hidden(
        self, storage: SnapshotArrays, snapshot_slot: int, source: HiddenRow, stream: Any
    ) -> None:
        """See `DeviceOps.capture_boundary_hidden`."""
        check_hidden_row(storage, snapshot_slot, source)
        row = _on_host(source.hidden_states)[source.slot, source.row]
        _on_host(storage.hidden_rows)[snapshot_slot] = row.view(np.uint8)

    def restore_boundary_hidden(
        self, storage: SnapshotArrays, snapshot_slot: int, destination: HiddenRow, stream: Any
    ) -> None:
        """See `DeviceOps.restore_boundary_hidden`."""
        check_hidden_row(storage, snapshot_slot, destination, is_written=True)
        row = _on_host(destination.hidden_states)[destination.slot, destination.row]
        row.view(np.uint8)[...] = _on_host(storage.hidden_rows)[snapshot_slot]

    def sum_pages(self, cache: CacheArrays, page_ids: Int32s, sums: Any, stream: Any) -> None:
        """See `DeviceOps.sum_pages`."""
        pages, _ = check_pages(cache, page_ids, sums)
        target = _on_host(sums)
        pools = [_on_host(pool) for pool in cache.kv_pools]
        for i, page in enumerate(pages.tolist()):
            for layer, pool in enumerate(pools):
                target[i, layer] = sum_on_host([_bytes_of(pool[half, page]) for half in (0, 1)])

    def synchronize(self, stream: Any, synchronizer: StreamSynchronizer | None) -> int | None:
        """See `DeviceOps.synchronize`. There is never anything to wait for."""
        return None if synchronizer is None else synchronizer(stream)


def _pieces(storage: SnapshotArrays, jobs: Int32s) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield the bytes that belong together, live and saved, piece by piece."""
    for slot, recurrent, partial, base_page, draft_page, num_tokens in jobs.T.tolist():
        if recurrent != ABSENT:
            for state in storage.state_parts:
                yield _bytes_of(_on_host(state.live)[slot]), _on_host(state.saved)[recurrent]
        if partial != ABSENT and num_tokens > 0:
            for pages in storage.page_parts:
                page = draft_page if pages.is_draft else base_page
                for half in (0, 1):
                    live = _on_host(pages.live)[half, page, :num_tokens]
                    saved = _on_host(pages.saved)[partial, half, : num_tokens * pages.token_bytes]
                    yield _bytes_of(live), saved


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
