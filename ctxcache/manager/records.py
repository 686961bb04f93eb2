"""The records as callers see them: an ordered, sized view whose paths are computed on demand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ctxcache.errors import ContractError
from ctxcache.jit import njit_in_place
from ctxcache.manager.draft_pages import write_draft_path
from ctxcache.manager.layout import (
    ENDPOINT,
    EXACT_LENGTH,
    EXTENDED_RECORDS,
    NEWER,
    NUM_PAIRED_BLOCKS,
    NUM_RECORDS,
    OLDEST_RECORD,
    PARENT,
    PARTIAL_SLOT,
    RECURRENT_SLOT,
    Core,
)
from ctxcache.manager.results import CacheRecord, PageIds


class RecordList:
    """All records of a manager, from least to most recently used: `len()`, iteration, and the views' data."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._extended = bool(core.state[EXTENDED_RECORDS])

    def __len__(self) -> int:
        return int(self._core.state[NUM_RECORDS])

    def __iter__(self) -> Iterator[CacheRecord]:
        record = int(self._core.state[OLDEST_RECORD])
        while record >= 0:
            yield self.view(record)
            record = int(self._core.record[NEWER, record])

    def view(self, record: int) -> CacheRecord:
        """Return the view of the record that is now at this place."""
        return CacheRecord(self, record, int(self._core.serial[record]))

    def record_is_cached(self, record: CacheRecord) -> bool:
        """Whether the record is still there."""
        return int(self._core.serial[record._index]) == record.serial  # noqa: SLF001 - its owner

    def record_base_page_path(self, record: CacheRecord) -> PageIds:
        """See `CacheRecord.base_page_path`."""
        endpoint = self._core.record[ENDPOINT, self._place(record)]
        path = np.empty(_count_ancestors(self._core, endpoint), np.int32)
        for i in range(path.size - 1, -1, -1):
            path[i] = endpoint
            endpoint = self._core.node[PARENT, endpoint]
        return path

    def record_draft_page_path(self, record: CacheRecord) -> PageIds:
        """See `CacheRecord.draft_page_path`."""
        place = self._place(record)
        path = np.empty(int(self._core.record[NUM_PAIRED_BLOCKS, place]) if self._extended else 0, np.int32)
        if path.size:
            write_draft_path(self._core, place, path)
        return path

    def record_snapshot_slots(self, record: CacheRecord) -> tuple[int | None, int | None]:
        """Return the recurrent and the partial-KV slot, `None` where absent."""
        place = self._place(record)
        if not self._extended:
            return None, None
        recurrent, partial = (int(slot) for slot in self._core.record[[RECURRENT_SLOT, PARTIAL_SLOT], place])
        return recurrent if recurrent >= 0 else None, partial if partial >= 0 else None

    def record_exact_checkpoint_length(self, record: CacheRecord) -> int:
        """See `CacheRecord.exact_checkpoint_length`."""
        place = self._place(record)
        return int(self._core.record[EXACT_LENGTH, place]) if self._extended else 0

    def _place(self, record: CacheRecord) -> int:
        if not self.record_is_cached(record):
            raise ContractError(f"record {record.serial} was evicted; look at manager.records again")
        return record._index  # noqa: SLF001 - its owner


@njit_in_place
def _count_ancestors(core: Core, block: int) -> int:
    count = 0
    while block >= 0:
        count += 1
        block = core.node[PARENT, block]
    return count
