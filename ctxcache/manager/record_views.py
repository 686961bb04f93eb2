"""The records as callers see them: an ordered, sized view whose paths are computed on demand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ctxcache.errors import ContractError
from ctxcache.jit import njit_in_place
from ctxcache.manager import layout as c
from ctxcache.manager.draft_pages import write_draft_path
from ctxcache.manager.layout import CacheArrays
from ctxcache.manager.results import CacheRecord, PageIds


class RecordViews:
    """All records of a manager, from least to most recently used: `len()`, iteration, and the views' data."""

    def __init__(self, cache: CacheArrays) -> None:
        self._cache = cache
        self._extended = bool(cache.state[c.EXTENDED_RECORDS])

    def __len__(self) -> int:
        return int(self._cache.state[c.NUM_RECORDS])

    def __iter__(self) -> Iterator[CacheRecord]:
        record = int(self._cache.state[c.OLDEST_RECORD])
        while record >= 0:
            if self._cache.serial[record] != c.IS_MARK:
                yield self.view(record)
            record = int(self._cache.record[c.NEWER, record])

    def view(self, record: int) -> CacheRecord:
        """Return the view of the record that is now at this place."""
        return CacheRecord(self, record, int(self._cache.serial[record]))

    def record_is_cached(self, record: CacheRecord) -> bool:
        """Whether the record is still there."""
        return int(self._cache.serial[record._index]) == record.serial  # noqa: SLF001 - its owner

    def record_base_page_path(self, record: CacheRecord) -> PageIds:
        """Return its canonical base pages, first block first."""
        endpoint = self._cache.record[c.ENDPOINT, self._place(record)]
        path = np.empty(_count_ancestors(self._cache, endpoint), np.int32)
        for i in range(path.size - 1, -1, -1):
            path[i] = endpoint
            endpoint = self._cache.node[c.PARENT, endpoint]
        return path

    def record_draft_page_path(self, record: CacheRecord) -> PageIds:
        """Return the draft pages paired with the first of them."""
        place = self._place(record)
        path = np.empty(int(self._cache.record[c.NUM_PAIRED_BLOCKS, place]) if self._extended else 0, np.int32)
        if path.size:
            write_draft_path(self._cache, place, path)
        return path

    def record_snapshot_slots(self, record: CacheRecord) -> tuple[int | None, int | None]:
        """Return the recurrent and the partial-KV slot, `None` where absent."""
        place = self._place(record)
        if not self._extended:
            return None, None
        recurrent, partial = (int(slot) for slot in self._cache.record[[c.RECURRENT_SLOT, c.PARTIAL_SLOT], place])
        return recurrent if recurrent >= 0 else None, partial if partial >= 0 else None

    def record_exact_checkpoint_length(self, record: CacheRecord) -> int:
        """Return a checkpoint's exact length in tokens, else 0."""
        place = self._place(record)
        return int(self._cache.record[c.EXACT_LENGTH, place]) if self._extended else 0

    def _place(self, record: CacheRecord) -> int:
        if not self.record_is_cached(record):
            raise ContractError(f"record {record.serial} was evicted; look at manager.records again")
        return record._index  # noqa: SLF001 - its owner


@njit_in_place
def _count_ancestors(cache: CacheArrays, block: int) -> int:
    count = 0
    while block >= 0:
        count += 1
        block = cache.node[c.PARENT, block]
    return count
