"""The page sanitizer: has anybody written into a shared page? A debugging mode; without it nothing here costs anything.

Before pages are published they are summed on the device, layer by layer, and the sums are kept. When a request reuses a
page it is summed again, before the runtime reads it. Each of both takes one synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.page_sums import allocate_sums, fold
from ctxcache.errors import DeviceError, PageCorruptionError
from ctxcache.fsm import SANITIZER_TRANSITIONS
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import LayerType
from ctxcache.interrupts import run_outside
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.request.batch import NOT_FROZEN, Batch
from ctxcache.request.custody import Custody
from ctxcache.request.request import DeviceLink, PageSums, Request

_Blocks = tuple[int, int, int]
"""A slot, and its blocks `[first, last)`."""


class NoSanitizer:
    """Sums nothing and checks nothing: the page sanitizer switched off."""

    def check_reused(self, live: Request) -> Status:
        """Check the pages that a prepared request shares."""
        del live
        return Status.OK

    def sum_slots(self, live: Request, trigger: str, slots: Iterable[int], lengths: Int32s) -> Status:
        """Sum the full pages of some slots up to so many tokens, which are about to be published."""
        del live, trigger, slots, lengths
        return Status.OK

    def sum_step(self, live: Request, completed: Int32s, committed: Int32s) -> Status:
        """Sum what a step is about to publish: of completed slots, and of prompts that waited for it."""
        del live, completed, committed
        return Status.OK

    def sum_frozen(self, live: Request, trigger: str) -> Status:
        """Sum what the prompts that wait for their first verification are about to publish."""
        del live, trigger
        return Status.OK


@dataclass(frozen=True, slots=True)
class _Witness:
    """A page as it was seen last: its sums, `int64[layers, 2]`, who published it, and who found it whole since."""

    sums: NDArray[np.int64]
    published_by: str
    seen_by: str


class PageSanitizer(NoSanitizer):
    """Keeps the sums of published pages, and compares them whenever a page is reused."""

    def __init__(self, custody: Custody, manager: ContextCacheManager, link: DeviceLink, tokens_per_page: int) -> None:
        self._custody = custody
        self._manager = manager
        self._link = link
        self._tokens_per_page = tokens_per_page
        self._witnesses: dict[str, dict[int, _Witness]] = {"base": {}, "draft": {}}
        self._num_requests = 0

    def check_reused(self, live: Request) -> Status:
        """Sum the pages that the request shares once more, and compare.

        Raises:
            PageCorruptionError: one has changed; the request can only be finished or abandoned.
        """
        self._num_requests += 1
        batch = live.batch
        status = self._sum(
            live, "check_pages", [(slot, 0, self._num_shared(batch, slot)) for slot in range(batch.size)]
        )
        if status is Status.OK and live.sums is not None:
            with self._custody.condemning(live):
                for role, pages, sums in self._read(live, live.sums):
                    self._compare(role, pages, sums)
        return self._let_go(live, status)

    def sum_slots(self, live: Request, trigger: str, slots: Iterable[int], lengths: Int32s) -> Status:
        """Sum what these slots have not published yet, and keep the sums."""
        batch = live.batch
        if not batch.publishes:
            return Status.OK
        blocks = [
            (
                slot,
                max(self._num_shared(batch, slot), int(batch.published_blocks[slot])),
                int(lengths[slot]) // self._tokens_per_page,
            )
            for slot in slots
        ]
        status = self._sum(live, trigger, blocks)
        if status is Status.OK and live.sums is not None:
            label = self._label(trigger)
            with self._custody.condemning(live):
                for role, pages, sums in self._read(live, live.sums):
                    witnesses = zip(pages.tolist(), sums, strict=True)
                    self._witnesses[role].update({page: _Witness(each, label, label) for page, each in witnesses})
        return self._let_go(live, status)

    def sum_step(self, live: Request, completed: Int32s, committed: Int32s) -> Status:
        """Sum what a step publishes, up to the new committed lengths."""
        frozen = np.flatnonzero(live.batch.frozen != NOT_FROZEN)
        return self.sum_slots(live, "sum_step", np.union1d(frozen, completed).tolist(), committed)

    def sum_frozen(self, live: Request, trigger: str) -> Status:
        """Sum the frozen prompts, where there is one and nothing has made it worthless."""
        slots = np.flatnonzero(live.batch.frozen != NOT_FROZEN).tolist()
        if live.discards_unpublished or not slots:
            return Status.OK
        return self.sum_slots(live, trigger, slots, live.batch.committed)

    def _sum(self, live: Request, trigger: str, blocks: list[_Blocks]) -> Status:
        """Sum blocks on the device and prove it; the sums lie in `live.sums` then, unless there were none."""
        leases = live.batch.leases
        base = _gather([leases[slot].base_pages[first:last] for slot, first, last in blocks])
        draft = _gather([leases[slot].draft_pages[first:last] for slot, first, last in blocks])
        if not base.size and not draft.size:
            return Status.OK
        resources = self._link.resources
        cache = resources.draft_cache
        with self._custody.condemning(live, _device_failed):
            base_sums = self._allocate(resources.base_cache, base.size)
            draft_sums = self._allocate(cache, draft.size)
        live.sums = PageSums(base, base_sums, draft, draft_sums)
        return self._custody.fire(live, trigger)

    def _allocate(self, cache: HybridCacheManager | None, num_pages: int) -> Any:
        if cache is None or not num_pages:
            return None
        return run_outside(self._link.state, allocate_sums, self._link.ops, cache, num_pages)

    def _let_go(self, live: Request, status: Status) -> Status:
        """Free the arrays of sums. After a failed drain the kernel may still write them: they stay with the request."""
        if status is Status.OK:
            live.sums = None
        return status

    def _read(self, live: Request, sums: PageSums) -> list[tuple[str, Int32s, NDArray[np.int64]]]:
        sides = (("base", sums.base_pages, sums.base_sums), ("draft", sums.draft_pages, sums.draft_sums))
        read = []
        for role, pages, array in sides:
            if array is not None:
                with self._custody.condemning(live, _device_failed):
                    host = run_outside(self._link.state, self._link.ops.to_host, array)
                read.append((role, pages, fold(host)))
        return read

    def _compare(self, role: str, pages: Int32s, sums: NDArray[np.int64]) -> None:
        known = self._witnesses[role]
        label = self._label("check_pages")
        for page, found in zip(pages.tolist(), sums, strict=True):
            witness = known[page]
            wrong = np.flatnonzero((found != witness.sums).any(axis=1))
            if wrong.size:
                raise PageCorruptionError(
                    f"{role} page {page}, layer {self._layer(role, int(wrong[0]))}, of record {self._record(role, page)}: "
                    f"written after {witness.seen_by} and before {label}; it was published by {witness.published_by}. "
                    "Some kernel of the runtime writes into a shared page. Finish or abandon the request, then clear()"
                )
            known[page] = _Witness(witness.sums, witness.published_by, label)

    def _num_shared(self, batch: Batch, slot: int) -> int:
        length = int(batch.reuse_lengths[slot])
        if batch.rules.paired and self._link.storage is not None:  # MTP: the boundary token lives in a private page
            length -= 1
        return max(length, 0) // self._tokens_per_page

    def _label(self, trigger: str) -> str:
        return f"{_OPERATIONS[trigger]} of request {self._num_requests}"

    def _layer(self, role: str, index: int) -> int:
        cache: Any = self._link.resources.base_cache if role == "base" else self._link.resources.draft_cache
        return [i for i, layer in enumerate(cache.config.layers) if layer is LayerType.ATTENTION][index]

    def _record(self, role: str, page: int) -> int | None:
        for record in self._manager.records:
            path = record.base_page_path if role == "base" else record.draft_page_path
            if page in path:
                return record.serial
        return None


def _device_failed(error: Exception) -> DeviceError:
    return DeviceError(f"the device ops raised {error!r} at page sums; finish or abandon the request")


_OPERATIONS = {row.trigger: row.operation for row in SANITIZER_TRANSITIONS}
"""The operation within which each trigger fires."""


def _gather(runs: list[Int32s]) -> Int32s:
    """Put page ids together, each once: sequences of one batch may share pages."""
    return np.unique(np.concatenate(runs)).astype(np.int32) if runs else np.empty(0, np.int32)
