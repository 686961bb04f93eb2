"""What a page table must hold on both sides, and how much its uploads moved."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.page_table import KVPageTable


class CountingOps(NumpyDeviceOps):
    """NumPy ops that note how many entries each upload moved."""

    def __init__(self) -> None:
        self.moved: list[int] = []

    def upload_rows(self, table: Any, stream: Any) -> None:
        """Note the number of entries, then upload."""
        self.moved.append(table.count_changes())
        super().upload_rows(table, stream)


def view_of(table: KVPageTable) -> NDArray[np.int32]:
    """The device view, as an attention kernel would read it."""
    return table.device_ops.to_host(table.kernel_view)


def agrees(table: KVPageTable, rows: list[list[int]]) -> None:
    """Require the host rows and the device view to hold exactly these pages."""
    keys = np.full((table.max_batch, table.max_pages_per_seq), -1, np.int32)
    for slot, pages in enumerate(rows):
        keys[slot, : len(pages)] = pages
    for slot in range(table.max_batch):
        assert table.host_row(slot).tolist() == keys[slot].tolist()
    view = view_of(table)
    np.testing.assert_array_equal(view[:, 0], keys)
    np.testing.assert_array_equal(view[:, 1], np.where(keys < 0, -1, keys + table.num_pages))
    table.check_invariants()
