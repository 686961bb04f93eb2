"""A lazy stream: enqueued work runs at a random later moment, as a GPU's does, and no earlier than it must.

Eager ops hide every use before completion. Here a page that is read, published or given away before its write was
proven complete holds old bytes, and tests see them.

    ops = DeferredDeviceOps(NumpyDeviceOps(), random.Random(seed))
    coordinator = ContextCacheCoordinator(..., device_ops=ops)
    ops.enqueue(lambda: model.prefill(...))        # the runtime's own work joins the stream
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s
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
    HiddenRow,
    RuntimeDeviceOps,
    SnapshotJobs,
    StreamSynchronizer,
    device_ordinal_of,
)
from ctxcache.errors import ContractError
from ctxcache.ids import ResourceType

_CHANCE_TO_RUN = 0.3
"""How likely the oldest piece of work runs, each time the stream is touched; and then the next one, likewise."""


class RandomSource(Protocol):
    """What schedules: `random.Random` and `numpy.random.Generator` both do."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class Use:
    """That enqueued work touches one page or snapshot slot.

    Attributes:
        resource: the pool.
        index: the page id, or the slot.
        writes: whether it is written, or only read.
        work: what touches it, for messages.
    """

    resource: ResourceType
    index: int
    writes: bool
    work: str


@dataclass(frozen=True, slots=True)
class Enqueued:
    """One piece of work on a lazy stream.

    Attributes:
        number: how many were enqueued up to it, itself included.
        operation: the coordinator's operation in which it was enqueued, or behind which.
        work: which device op it is, or the line that enqueued it.
    """

    number: int
    operation: str
    work: str

    def __str__(self) -> str:
        return f"enqueue {self.number}, {self.work}, in or behind {self.operation}"


class DeferredDeviceOps:
    """Device ops whose stream is lazy; they delegate to eager ones (`NumpyDeviceOps`).

    Work runs in the order in which it was enqueued. Each touch of the stream may run some of the oldest work; a successful
    `synchronize` runs all that is left. A failed one leaves it unrun, and later it may still run. Arguments are checked, and
    host arguments are copied, when the work is enqueued. An exception inside enqueued work is raised by the next
    `synchronize`, once, as a kernel's fault shows.

    Attributes:
        inner: the ops that do the work.
        unproven_work: what was enqueued since the last successful `synchronize`, in order; without what touches no page.
        unproven: what the work uses that was enqueued since the last successful `synchronize`, whether it has run or not.
        num_enqueued: pieces of work that were ever enqueued.
        num_unproven_unnamed: pieces of the runtime's work, enqueued since then, of which nobody said what they use.
    """

    def __init__(self, inner: RuntimeDeviceOps, rng: RandomSource) -> None:
        _check_source(rng)
        self.inner = inner
        self.unproven_work: list[Enqueued] = []
        self.unproven: list[Use] = []
        self.num_enqueued = 0
        self.num_unproven_unnamed = 0
        self._rng = rng
        self._queue: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._operation = "outside"

    @property
    def device_ordinal(self) -> int | None:
        """The inner ops' device."""
        return device_ordinal_of(self.inner)

    @property
    def num_waiting(self) -> int:
        """Pieces of work that have not run yet."""
        return len(self._queue)

    def reschedule(self, rng: RandomSource) -> None:
        """Decide by another source from now on."""
        _check_source(rng)
        self._rng = rng

    def lose_waiting(self) -> None:
        """Let what has not run yet never run, as on a device that failed. It is not proven complete by that."""
        self._queue.clear()

    def enqueue(self, work: Callable[[], None], *, uses: Iterable[Use] | None = None) -> None:
        """Enqueue the runtime's own work, a model's step for example.

        Args:
            work: runs later, in stream order.
            uses: pages and snapshot slots that it touches. Left out, it may touch all that its request holds, so that an
                `OwnershipLedger` objects when anything is published or released before it was proven complete.

        Raises:
            ContractError: something that cannot be called, or is no `Use`. Nothing has changed.
        """
        touched = [] if uses is None else list(uses)
        wrong = next((use for use in touched if not isinstance(use, Use)), None)
        if wrong is not None or not callable(work):
            raise ContractError(f"enqueue got {work!r} and the use {wrong!r}; pass a function, and Use values")
        caller = sys._getframe(1)  # noqa: SLF001 - `inspect` would read the source of the whole stack
        place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} in {caller.f_code.co_name}"
        self._put(f"{touched[0].work} at {place}" if touched else f"work at {place}", work, touched)
        self.num_unproven_unnamed += uses is None
        if uses is not None and not touched:
            self.unproven_work.pop()

    def operation(self, name: str) -> None:
        """Delegate."""
        self._operation = name
        self._let_run()
        self.inner.operation(name)

    def allocate(self, shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> Any:
        """Delegate."""
        return self.inner.allocate(shape, dtype)

    def to_host(self, array: Any) -> NDArray[Any]:
        """Delegate: what has run by now is what is seen."""
        return self.inner.to_host(array)

    def to_device(self, array: Any, host: NDArray[Any]) -> None:
        """Delegate."""
        self.inner.to_device(array, host)

    def upload_rows(self, table: Any, stream: Any) -> None:
        """Enqueue the changes that the table has now."""
        upload = table.freeze_upload() if hasattr(table, "freeze_upload") else table
        try:
            self._put("upload_rows", lambda: self.inner.upload_rows(upload, stream))
        except BaseException:
            table.forget_device_rows()
            raise

    def reset_lengths(self, cache: Any, reuse_lengths: Int32s, stream: Any) -> None:
        """Enqueue."""
        lengths = check_lengths(cache, reuse_lengths).copy()
        cache.active_batch_size = len(lengths)
        self._put(
            "reset_lengths", lambda: _keeping_batch(cache, lambda: self.inner.reset_lengths(cache, lengths, stream))
        )

    def advance_lengths(self, cache: Any, increment: Any, stream: Any) -> None:
        """Enqueue an advance of the slots that are active now."""
        check_increment(cache, increment)
        active = cache.active_batch_size

        def advance() -> None:
            cache.active_batch_size = active
            self.inner.advance_lengths(cache, increment, stream)

        self._put("advance_lengths", lambda: _keeping_batch(cache, advance))

    def zero_recurrent(self, cache: Any, slots: Int32s, stream: Any) -> None:
        """Enqueue."""
        cold = check_slots(cache, slots).copy()
        self._put("zero_recurrent", lambda: self.inner.zero_recurrent(cache, cold, stream))

    def restore(self, storage: Any, jobs: SnapshotJobs, stream: Any) -> None:
        """Enqueue."""
        check_jobs(storage, jobs, to_snapshots=False)
        frozen = _copy_jobs(jobs)
        self._put(
            "restore",
            lambda: self.inner.restore(storage, frozen, stream),
            self._uses_of_jobs(storage, frozen, restores=True),
        )

    def capture(self, storage: Any, jobs: SnapshotJobs, stream: Any) -> None:
        """Enqueue."""
        check_jobs(storage, jobs, to_snapshots=True)
        frozen = _copy_jobs(jobs)
        self._put(
            "capture",
            lambda: self.inner.capture(storage, frozen, stream),
            self._uses_of_jobs(storage, frozen, restores=False),
        )

    def upload_mapping(self, mapping: Int32s, device_mapping: Any, stream: Any) -> None:
        """Enqueue."""
        entries = check_mapping_upload(mapping, device_mapping)[0].copy()
        self._put("upload_mapping", lambda: self.inner.upload_mapping(entries, device_mapping, stream))

    def compact_slot_state(self, cache: Any, mapping: Any, old_batch: int, new_batch: int, stream: Any) -> None:
        """Enqueue."""
        old_batch, new_batch, _ = check_compaction(cache, mapping, old_batch, new_batch)
        cache.active_batch_size = new_batch

        def compact() -> None:
            self.inner.compact_slot_state(cache, mapping, old_batch, new_batch, stream)

        self._put("compact_slot_state", lambda: _keeping_batch(cache, compact))

    def capture_boundary_hidden(self, storage: Any, snapshot_slot: int, source: HiddenRow, stream: Any) -> None:
        """Enqueue."""
        check_hidden_row(storage, snapshot_slot, source)
        self._put(
            "capture_boundary_hidden",
            lambda: self.inner.capture_boundary_hidden(storage, snapshot_slot, source, stream),
            [self._use(ResourceType.RECURRENT_SNAPSHOT, snapshot_slot, writes=True)],
        )

    def restore_boundary_hidden(self, storage: Any, snapshot_slot: int, destination: HiddenRow, stream: Any) -> None:
        """Enqueue."""
        check_hidden_row(storage, snapshot_slot, destination, is_written=True)
        self._put(
            "restore_boundary_hidden",
            lambda: self.inner.restore_boundary_hidden(storage, snapshot_slot, destination, stream),
            [self._use(ResourceType.RECURRENT_SNAPSHOT, snapshot_slot, writes=False)],
        )

    def sum_pages(self, cache: Any, page_ids: Int32s, sums: Any, stream: Any) -> None:
        """Enqueue."""
        checked, _ = check_pages(cache, page_ids, sums)
        pages = checked.copy()
        resource = ResourceType.DRAFT_KV_PAGE if cache.role == "draft" else ResourceType.BASE_KV_PAGE
        self._put(
            "sum_pages",
            lambda: self.inner.sum_pages(cache, pages, sums, stream),
            [self._use(resource, page, writes=False) for page in pages.tolist()],
        )

    def synchronize(self, stream: Any, synchronizer: StreamSynchronizer | None) -> int | None:
        """Wait, by the synchroniser's word: where it says that the stream is idle, everything has run."""
        self._let_run()
        code = self.inner.synchronize(stream, synchronizer)
        if code is None or code == 0:
            while self._queue:
                self._run_oldest()
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame
            self.unproven_work.clear()
            self.unproven.clear()
            self.num_unproven_unnamed = 0
        return code

    def _put(self, name: str, work: Callable[[], None], uses: Iterable[Use] = ()) -> None:
        self._let_run()
        self.num_enqueued += 1
        self.unproven_work.append(Enqueued(self.num_enqueued, self._operation, name))
        self.unproven.extend(uses)
        self._queue.append(work)

    def _let_run(self) -> None:
        while self._queue and self._rng.random() < _CHANCE_TO_RUN:
            self._run_oldest()

    def _run_oldest(self) -> None:
        work = self._queue.popleft()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it belongs to the stream; whoever synchronises next hears of it
            self._error = self._error or error

    def _use(self, resource: ResourceType, index: int, *, writes: bool) -> Use:
        return Use(resource, index, writes, self._operation)

    def _uses_of_jobs(self, storage: Any, jobs: SnapshotJobs, *, restores: bool) -> list[Use]:
        uses: list[Use] = []
        columns = [
            (ResourceType.RECURRENT_SNAPSHOT, jobs.recurrent_snapshot_slots, not restores),
            (ResourceType.PARTIAL_KV_SNAPSHOT, jobs.partial_kv_snapshot_slots, not restores),
            (ResourceType.BASE_KV_PAGE, jobs.base_pages, restores),
        ]
        if storage.draft_cache is not None:
            columns.append((ResourceType.DRAFT_KV_PAGE, jobs.draft_pages, restores))
        for resource, indices, writes in columns:
            uses += [self._use(resource, index, writes=writes) for index in indices.tolist() if index != ABSENT]
        return uses


def _check_source(rng: RandomSource) -> None:
    if not callable(getattr(rng, "random", None)):
        raise ContractError(f"rng is {rng!r}; pass a source of random numbers, for example random.Random(seed)")


def _keeping_batch(cache: Any, work: Callable[[], None]) -> None:
    """Run work that sets the cache's batch size: host state, which has moved on since the work was enqueued."""
    active = cache.active_batch_size
    try:
        work()
    finally:
        cache.active_batch_size = active


def _copy_jobs(jobs: SnapshotJobs) -> SnapshotJobs:
    return SnapshotJobs(*(np.array(getattr(jobs, name), np.int32) for name in SnapshotJobs.__slots__))
