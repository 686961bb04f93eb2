"""The logical page table of one model: host rows that are the truth, and the device view that follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import INT32_LIMIT, Int32s, as_int32s, as_integer
from ctxcache.device import page_rows
from ctxcache.device.arrays import view_array
from ctxcache.device.defaults import ops_or_default
from ctxcache.device.ops import RuntimeDeviceOps
from ctxcache.device.ownership import Ownership
from ctxcache.errors import ContractError, DeploymentError, InvariantError


class PageTableUpload:
    """The changes of a page table, taken at one moment: what `upload_rows` moves when it runs later.

    Stands in for the table in `DeviceOps.upload_rows`. It never looks at the table's host rows again.

    Attributes:
        kernel_view: the table's device view.
        view_address: where the view lies.
        max_pages_per_seq: columns of a row.
        num_pages: the distance between a K page id and its V page id.
        role: the table's role.
    """

    def __init__(self, table: KVPageTable, entries: Int32s) -> None:
        self._table = table
        self._entries = entries
        self.kernel_view = table.kernel_view
        self.view_address = table.view_address
        self.max_pages_per_seq = table.max_pages_per_seq
        self.num_pages = table.num_pages
        self.role = table.role

    def count_changes(self) -> int:
        """How many entries `write_changes` will write."""
        return len(self._entries)

    @property
    def has_changes(self) -> bool:
        """Whether there is an entry to move."""
        return len(self._entries) > 0

    def take_changes(self, out: Int32s) -> int:
        """Count the entries, and write them to `out` if all of them fit there."""
        count = len(self._entries)
        if count <= len(out):
            self.write_changes(out)
        return count

    def write_changes(self, out: Int32s) -> None:
        """Write the entries, `(row * max_pages_per_seq + column, page id)`, to `out int32[m, 2]`, `m >= n`, once."""
        out[: len(self._entries)] = self._entries
        self._entries = self._entries[:0]

    def forget_device_rows(self) -> None:
        """Say that the upload failed: the table's next upload moves everything."""
        self._table.forget_device_rows()


class KVPageTable(Ownership):
    """One logical page table: which physical page holds each run of `tokens_per_page` tokens of each slot.

    The host rows are the truth, int32 K-page ids `[max_batch, max_pages_per_seq]` with -1 behind the live ones. The
    device view follows at the next upload; it is read by the runtime's attention kernels.

    Attributes:
        max_batch: rows.
        max_pages_per_seq: columns of a row.
        num_pages: pages of the pool; page ids are in `[0, num_pages)`.
        kernel_view: device array `int32[max_batch, 2, max_pages_per_seq]`, K half first, V half second, with
            `v = k + num_pages` and -1 where there is no page. Owned by the table, allocated once; its address
            does not change. All -1 until the first upload.
        view_address: where the view lies.
        device_ops: the ops that allocated the view; used by `upload`.
        role: "base" or "draft"; names the table's fault points.
    """

    def __init__(
        self, max_batch: int, max_pages_per_seq: int, num_pages: int, *, device_ops: RuntimeDeviceOps | None = None
    ) -> None:
        max_batch = as_integer("KVPageTable max_batch", max_batch, 1, error=DeploymentError)
        max_pages_per_seq = as_integer("KVPageTable max_pages_per_seq", max_pages_per_seq, 1, error=DeploymentError)
        if max_batch * max_pages_per_seq >= INT32_LIMIT:
            raise DeploymentError(
                f"KVPageTable has {max_batch} rows of {max_pages_per_seq} pages; keep the product below 2**31"
            )
        # V ids are int32 too, and lie behind the K ids.
        num_pages = as_integer("KVPageTable num_pages", num_pages, 1, INT32_LIMIT // 2 + 1, error=DeploymentError)
        self.max_batch = max_batch
        self.max_pages_per_seq = max_pages_per_seq
        self.num_pages = num_pages
        self.device_ops = ops_or_default(device_ops)
        self.role = "base"
        self._rows = np.full((max_batch, max_pages_per_seq), page_rows.UNUSED, np.int32)
        self._lengths = np.zeros(max_batch, np.int32)
        self._mirror = self._rows.copy()
        self._dirty = np.zeros((max_batch, 2), np.int32)
        self._table = (self._rows, self._lengths, self._dirty)
        self._has_changes = False
        self._is_view_unknown = False
        self._is_identity = False
        view_shape = (max_batch, 2, max_pages_per_seq)
        self.kernel_view = self.device_ops.allocate(view_shape, "int32")
        self.view_address = view_array(self.kernel_view).address
        self.device_ops.to_device(self.kernel_view, np.full(view_shape, page_rows.UNUSED, np.int32))

    @property
    def is_identity(self) -> bool:
        """Whether the rows were last set by `set_identity`, and by nothing since; `False` after an interrupted change."""
        return self._is_identity

    @property
    def has_changes(self) -> bool:
        """Whether rows were touched since the last upload, or the device's may be wrong; an upload may yet find no difference."""
        return self._has_changes or self._is_view_unknown

    def host_row(self, slot: int) -> Int32s:
        """Return a copy of one row, `int32[max_pages_per_seq]`, -1 behind the live pages.

        Raises:
            ContractError: no such slot.
        """
        row: Int32s = self._rows[self._as_slot(slot)].copy()
        return row

    def row_lengths(self) -> Int32s:
        """Return a copy of the numbers of live pages, `int32[max_batch]`."""
        return self._lengths.copy()

    def set_identity(self) -> None:
        """Give every slot its own run of pages: row `i` is `i * W .. i * W + W - 1`, `W` being `max_pages_per_seq`.

        Raises:
            ContractError: the pool has fewer than `max_batch * W` pages.
        """
        needed = self.max_batch * self.max_pages_per_seq
        if needed > self.num_pages:
            raise ContractError(
                f"an identity table of {self.max_batch} rows needs {needed} pages and the pool has {self.num_pages}; "
                "set the rows one by one"
            )
        rows = np.arange(needed, dtype=np.int32).reshape(self._rows.shape)
        self._begin_change()
        page_rows.replace_table(self._table, rows, np.full(self.max_batch, self.max_pages_per_seq, np.int32))
        self._is_identity = True

    def set_row(self, slot: int, page_ids: Sequence[int] | NDArray[Any]) -> None:
        """Make `page_ids` the pages of one slot and clear the rest of its row.

        Args:
            slot: the row, `0 .. max_batch-1`.
            page_ids: K-page ids; a trailing run of -1 (as in a row from `host_row`) counts as no pages.

        Raises:
            ContractError: no such slot, too many pages, or an id out of range. Nothing has changed.
        """
        slot = self._as_slot(slot)
        ids = as_int32s("page_ids", page_ids)
        live = np.flatnonzero(ids != page_rows.UNUSED)
        ids = ids[: live[-1] + 1] if live.size else ids[:0]
        self.set_rows(np.array([slot], np.int32), np.array([len(ids)], np.int32), ids)

    def set_rows(self, slots: Any, page_counts: Any, page_ids: Any) -> None:
        """Set several rows at once; row `slots[i]` gets the next `page_counts[i]` of `page_ids`.

        Args:
            slots: `int32[n]` rows.
            page_counts: `int32[n]` pages of each.
            page_ids: int32, the pages of all rows one after the other.

        Raises:
            ContractError: as for `set_row`. No row has changed.
        """
        rows = as_int32s("slots", slots)
        counts = _as_many("page_counts", page_counts, rows)
        ids = as_int32s("page_ids", page_ids)
        before = self._begin_change()
        code, at = page_rows.replace_rows(self._table, rows, counts, ids, self.num_pages)
        if code != page_rows.OK:
            self._has_changes, self._is_identity = before
            raise self._refusal(code, at, rows, ids)

    def extend_rows(self, slots: Any, first_page_indices: Any, page_counts: Any, page_ids: Any) -> None:
        """Append pages to several rows: what a decode step does. One compiled call, whatever the number of rows.

        Args:
            slots: `int32[g]` rows to grow, each once.
            first_page_indices: `int32[g]`, where the new pages begin: the present length of each row.
            page_counts: `int32[g]` pages to append to each.
            page_ids: int32, the pages of all rows one after the other.

        Raises:
            ContractError: a slot or page id out of range, a row that is named twice, does not end where the new pages
                begin, or would overflow. No row has changed.
        """
        rows = as_int32s("slots", slots)
        firsts = _as_many("first_page_indices", first_page_indices, rows)
        counts = _as_many("page_counts", page_counts, rows)
        ids = as_int32s("page_ids", page_ids)
        before = self._begin_change()
        code, at = page_rows.append_pages(self._table, rows, firsts, counts, ids, self.num_pages)
        if code != page_rows.OK:
            self._has_changes, self._is_identity = before
            raise self._refusal(code, at, rows, ids)

    def compact_rows(self, old_to_new: Sequence[int] | NDArray[Any], new_batch: int) -> None:
        """Move rows to their new slots and clear all rows from `new_batch` on. No page is copied or renumbered.

        Args:
            old_to_new: the new slot of each old slot `0 .. n-1`, or -1 for one that retires.
            new_batch: slots afterwards.

        Raises:
            ContractError: not every slot of `0 .. new_batch-1` is a destination exactly once, or there are more
                entries than rows. Nothing has changed.
        """
        new_batch = as_integer("new_batch", new_batch, 0, self.max_batch + 1)
        mapping = as_int32s("old_to_new", old_to_new)
        if len(mapping) > self.max_batch:
            raise ContractError(f"old_to_new has {len(mapping)} entries; the table has {self.max_batch} rows")
        sources = np.flatnonzero(mapping != page_rows.UNUSED)
        destinations = mapping[sources]
        if not np.array_equal(np.sort(destinations), np.arange(new_batch)):
            raise ContractError(
                f"old_to_new sends slots to {destinations.tolist()}; each of 0 .. {new_batch - 1} must be a "
                "destination exactly once, and -1 retires a row"
            )
        rows, lengths = np.full_like(self._rows, page_rows.UNUSED), np.zeros_like(self._lengths)
        rows[destinations], lengths[destinations] = self._rows[sources], self._lengths[sources]
        self._begin_change()
        page_rows.replace_table(self._table, rows, lengths)

    def check_invariants(self) -> None:
        """Check the whole table: ids in `[0, num_pages)`, and no live id behind a -1.

        Raises:
            InvariantError: with the row and the column of the first offence.
        """
        everything = np.tile(np.array([0, self.max_pages_per_seq], np.int32), (self.max_batch, 1))
        self._judge(*page_rows.count_changes(self._rows, self._mirror, everything, self.num_pages))
        if not np.array_equal((self._rows != page_rows.UNUSED).sum(axis=1), self._lengths):
            raise InvariantError("a page-table row has another number of live pages than its recorded length")

    def upload(self, stream: Any) -> None:
        """Enqueue the changed entries to the device view, with the table's own ops. See `DeviceOps.upload_rows`."""
        self.device_ops.upload_rows(self, stream)

    def freeze_upload(self) -> PageTableUpload:
        """Take the present changes out of the table, for ops that run an upload later than it was enqueued.

        The table counts them as uploaded; the caller passes the result to `upload_rows`.

        Raises:
            InvariantError: as for an upload; nothing was taken.
        """
        entries = np.empty((self.count_changes(), 2), np.int32)
        try:
            self.write_changes(entries)
            return PageTableUpload(self, entries)
        except BaseException:
            self.forget_device_rows()
            raise

    def count_changes(self) -> int:
        """Check the changed parts of the rows and return how many entries an upload has to move. For device ops.

        Raises:
            InvariantError: an id out of range or a live id behind a -1.
        """
        self._expect_nothing_of_unknown_rows()
        if not self._has_changes:
            return 0
        count = self._judge(*page_rows.count_changes(self._rows, self._mirror, self._dirty, self.num_pages))
        if count == 0:
            self._dirty.fill(0)
            self._has_changes = False
        return count

    def take_changes(self, out: Int32s) -> int:
        """Check, count, and write the changed entries to `out` if all of them fit there, in one call. For device ops.

        Args:
            out: C-contiguous `int32[m, 2]`, as for `write_changes`.

        Returns:
            How many entries an upload has to move. Where that is more than `m`, nothing was written.

        Raises:
            InvariantError: as `count_changes`.
        """
        self._expect_nothing_of_unknown_rows()
        if not self._has_changes:
            return 0
        count = self._judge(*page_rows.take_changes(self._rows, self._mirror, self._dirty, self.num_pages, out))
        if count == 0:
            self._dirty.fill(0)
        if count <= len(out):
            self._has_changes = False
        return count

    def write_changes(self, out: Int32s) -> None:
        """Write the changed entries to `out int32[m, 2]` and count them as uploaded. For device ops.

        Args:
            out: C-contiguous, at least as long as `count_changes` just said; entries are
                `(row * max_pages_per_seq + column, page id)`.
        """
        page_rows.write_changes(self._rows, self._mirror, self._dirty, out)
        self._has_changes = False

    def forget_device_rows(self) -> None:
        """Say that the device view may hold anything: the next upload moves every entry. For a failed upload."""
        self._is_view_unknown = True

    def _expect_nothing_of_unknown_rows(self) -> None:
        """Mark everything after `forget_device_rows`; what an interrupt leaves undone is done by the next call."""
        if self._is_view_unknown:
            self._has_changes = True
            self._dirty[:] = (0, self.max_pages_per_seq)
            self._mirror.fill(page_rows.UNKNOWN)
            self._is_view_unknown = False

    def _begin_change(self) -> tuple[bool, bool]:
        """Say that the rows change, before they do; returns what a refused change puts back."""
        before = self._has_changes, self._is_identity
        self._has_changes, self._is_identity = True, False
        return before

    def _as_slot(self, slot: int) -> int:
        return as_integer("slot", slot, 0, self.max_batch, rule="the table has slots")

    def _judge(self, count: int, row: int, column: int) -> int:
        if count == page_rows.BAD_ROW_PAGE:
            raise InvariantError(
                f"page-table row {row} holds page {self._rows[row, column]} at column {column}; "
                f"ids are in [0, {self.num_pages})"
            )
        if count == page_rows.HOLE_IN_ROW:
            raise InvariantError(f"page-table row {row} has a live page at column {column} behind a -1")
        return count

    def _refusal(self, code: int, at: int, slots: Int32s, page_ids: Int32s) -> ContractError:
        if code == page_rows.BAD_SLOT:
            return ContractError(f"slot is {slots[at]}; the table has slots 0 .. {self.max_batch - 1}")
        if code == page_rows.BAD_PAGE:
            return ContractError(f"page id is {page_ids[at]}; the pool has pages 0 .. {self.num_pages - 1}")
        if code == page_rows.ROW_FULL:
            return ContractError(
                f"row {slots[at]} would hold more than {self.max_pages_per_seq} pages; "
                "a table with more pages a sequence is needed for longer sequences"
            )
        if code == page_rows.NOT_AT_END:
            return ContractError(
                f"row {slots[at]} does not end at the first new page, or is named twice; "
                f"it holds {self._lengths[slots[at]]} pages and grows at its end, once"
            )
        return ContractError(f"page counts do not add up to the {len(page_ids)} page ids, or one is negative")


def _as_many(name: str, values: Any, slots: Int32s) -> Int32s:
    array = as_int32s(name, values)
    if len(array) != len(slots):
        raise ContractError(f"{name} has {len(array)} entries for {len(slots)} slots; give one for each")
    return array
