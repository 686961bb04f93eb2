"""One request as the lifecycle sees it: its state, its batch, and the method behind every hook and guard.

A hook method touches the device through the ops and nothing else. Host state of the batch moves in the coordinator, after
the transition has happened.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np

from ctxcache.arguments import Int32s
from ctxcache.device.ops import DeviceOps, HiddenRow, SnapshotJobs, StreamSynchronizer
from ctxcache.device.resources import ContextCachePhysicalResources
from ctxcache.device.snapshots import HybridSnapshotStorage
from ctxcache.fsm import INITIAL, PENDING, PHASES, State
from ctxcache.ids import Phase
from ctxcache.interrupts import run_outside
from ctxcache.metrics import CoordinatorCounters
from ctxcache.request.batch import Batch
from ctxcache.request.publication_policy import PublicationPolicy


@dataclass(slots=True, eq=False)
class DeviceLink:
    """What the hooks touch: the ops, the stream they enqueue on, how it is proven idle, and the resources.

    Attributes:
        ops: every device touch goes through these; replaced between requests alone.
        stream: the coordinator's one stream.
        synchronizer: proves the stream idle; `None` waits for it.
        resources: caches and page tables.
        storage: snapshot slots, where the deployment has recurrent layers.
        counters: drains are counted where they happen.
        state: guards what the host knows, so that it can be asked at any time: an operation holds it but for the time of its
            device touches, whose hooks move nothing that can be asked.
    """

    ops: DeviceOps
    stream: Any
    synchronizer: StreamSynchronizer | None
    resources: ContextCachePhysicalResources
    storage: HybridSnapshotStorage | None
    counters: CoordinatorCounters
    state: RLock = field(default_factory=RLock)

    def announce(self, operation: str) -> None:
        """Tell the ops which operation the following calls belong to, where they want to know."""
        hear = getattr(self.ops, "operation", None)
        if hear is not None:
            hear(operation)

    def distrust_device_rows(self) -> None:
        """Take no page-table row for uploaded: the device views may hold anything after a failure. Host work only."""
        for table in (self.resources.base_page_table, self.resources.draft_page_table):
            if table is not None:
                table.forget_device_rows()

    def prove(self) -> int | None:
        """Drain the stream once; returns the synchroniser's code."""
        self.counters.drains += 1
        code: int | None = None
        proven = False
        try:
            code = self.ops.synchronize(self.stream, self.synchronizer)
            proven = code is None or bool(code == 0)
        finally:
            if not proven:
                self.counters.failed_drains += 1
        return code


@dataclass(slots=True, eq=False)
class PendingCompaction:
    """A mapping between its upload and the compaction: the host's own copy, and the device array kept alive."""

    mapping: Int32s
    new_batch_size: int
    device_mapping: Any


@dataclass(slots=True, eq=False)
class BoundaryCopy:
    """The hidden row of an MTP boundary, and the snapshot slot at its other end."""

    snapshot_slot: int
    row: HiddenRow


@dataclass(frozen=True, slots=True, eq=False)
class PageSums:
    """Pages that the sanitizer sums, `int32[n]` for each model, and the device arrays for their sums, `None` for none."""

    base_pages: Int32s
    base_sums: Any
    draft_pages: Int32s
    draft_sums: Any


class Request:
    """A live, quarantined or released request. Its state changes through the lifecycle's one door alone.

    Attributes:
        batch: the sequences; their leases are this request's hold on the cache.
        publication: what becomes reusable when.
        compaction: the mapping under way, or `None`.
        restores: the checkpoints that the prefill starts from, or `None`.
        captures: what the next capture hook moves, or `None`.
        boundary: what the next boundary hook copies, or `None`.
        sums: what the page sanitizer's hooks sum, or `None`.
        discards_unpublished: set once a device failure made staged and frozen state worthless.
        dropped: the handle's finaliser has told that it is gone.
        handle: the caller's handle, weakly; `None` before there is one.
    """

    __slots__ = (
        "__weakref__",
        "_state",
        "batch",
        "boundary",
        "captures",
        "compaction",
        "discards_unpublished",
        "dropped",
        "handle",
        "link",
        "publication",
        "restores",
        "sums",
    )

    def __init__(self, batch: Batch, publication: PublicationPolicy, link: DeviceLink) -> None:
        self._state: str = INITIAL.value
        self.batch = batch
        self.publication = publication
        self.link = link
        self.compaction: PendingCompaction | None = None
        self.restores: SnapshotJobs | None = None
        self.captures: SnapshotJobs | None = None
        self.boundary: BoundaryCopy | None = None
        self.sums: PageSums | None = None
        self.discards_unpublished = False
        self.dropped = False
        self.handle: weakref.ref[Any] | None = None

    @property
    def state(self) -> State:
        """Where the request is in its lifecycle."""
        return State(self._state)

    @property
    def phase(self) -> Phase | None:
        """What a caller sees of the state."""
        return PHASES[self.state]

    @property
    def pending(self) -> bool:
        """Whether device work was enqueued and not proven complete."""
        return self.state in PENDING

    @property
    def held(self) -> bool:
        """Whether a caller's handle still stands for this request."""
        return self.state not in (State.POISONED, State.RELEASED)

    @property
    def orphaned(self) -> bool:
        """Whether the handle is gone: the coordinator abandons the request at the next chance.

        An interrupt can keep a finaliser from telling. So the handle itself is asked too.
        """
        return self.dropped or (self.handle is not None and self.handle() is None)

    def touch_device(self, hook: str) -> int | None:
        """Run a hook. What the host knows can be asked meanwhile, in other threads and in whatever the hook calls."""
        code: int | None = run_outside(self.link.state, getattr(self, hook))
        return code

    # The guards

    def awaits_first_verification(self) -> bool:
        """Whether a draft model initialises after the prefill."""
        return self.batch.rules.drafts

    def has_captures(self) -> bool:
        """Whether the step has checkpoints to capture."""
        return self.captures is not None

    def publications_settled(self) -> bool:
        """Whether nothing is staged or frozen."""
        return not self.batch.has_unpublished

    def has_survivors(self) -> bool:
        """Whether the compaction under way keeps a sequence."""
        return self.compaction is not None and self.compaction.new_batch_size > 0

    # The hooks of the prefill

    def upload_base_rows(self) -> None:
        """Bring the device view of the base's page table up to date."""
        self._upload(self.link.resources.base_page_table)

    def upload_draft_rows(self) -> None:
        """The same for the draft's, where the request uses draft pages."""
        if self.batch.rules.paired:
            self._upload(self.link.resources.draft_page_table)

    def zero_recurrent(self) -> None:
        """Start the cold sequences from zero state: their slots still hold another request's."""
        cold = np.flatnonzero(self.batch.reuse_lengths == 0).astype(np.int32)
        if self.link.storage is not None and cold.size:
            self.link.ops.zero_recurrent(self.link.resources.base_cache, cold, self.link.stream)

    def restore_snapshots(self) -> None:
        """Restore the checkpoints that sequences start from, with the valid part of their boundary pages."""
        if self.link.storage is not None and self.restores is not None:
            self.link.ops.restore(self.link.storage, self.restores, self.link.stream)

    def reset_base_lengths(self) -> None:
        """Set the base's device lengths to what is reused."""
        self.link.ops.reset_lengths(self.link.resources.base_cache, self.batch.reuse_lengths, self.link.stream)

    def reset_draft_lengths(self) -> None:
        """The same for the draft's, where the request uses draft pages."""
        cache = self.link.resources.draft_cache
        if self.batch.rules.paired and cache is not None:
            self.link.ops.reset_lengths(cache, self.batch.reuse_lengths, self.link.stream)

    # The hooks of checkpoints

    def capture_snapshots(self) -> None:
        """Capture the staged checkpoints, all sequences together."""
        if self.link.storage is not None and self.captures is not None:
            self.link.ops.capture(self.link.storage, self.captures, self.link.stream)

    def capture_boundary(self) -> None:
        """Capture the state and the paired partial pages of one MTP boundary."""
        self.capture_snapshots()

    def capture_boundary_hidden(self) -> None:
        """Capture the base's hidden row of an MTP boundary."""
        storage, boundary = self.link.storage, self.boundary
        if storage is not None and boundary is not None:
            self.link.ops.capture_boundary_hidden(storage, boundary.snapshot_slot, boundary.row, self.link.stream)

    def restore_boundary_hidden(self) -> None:
        """Copy a hit's saved hidden row to where the runtime folds it in."""
        storage, boundary = self.link.storage, self.boundary
        if storage is not None and boundary is not None:
            self.link.ops.restore_boundary_hidden(storage, boundary.snapshot_slot, boundary.row, self.link.stream)

    # The hooks of compaction

    def upload_mapping(self) -> None:
        """Upload the mapping of the compaction to the caller's device array."""
        move = self._move()
        self.link.ops.upload_mapping(move.mapping, move.device_mapping, self.link.stream)

    def compact_base_rows(self) -> None:
        """Move the base's page-table rows to the new slots."""
        self._compact_rows(self.link.resources.base_page_table)

    def compact_draft_rows(self) -> None:
        """The same for the draft's, where the request uses draft pages."""
        if self.batch.rules.paired:
            self._compact_rows(self.link.resources.draft_page_table)

    def compact_base_slots(self) -> None:
        """Move the base's lengths, recurrent and convolution state to the new slots."""
        self._compact_slots(self.link.resources.base_cache)

    def compact_draft_slots(self) -> None:
        """The same for the draft's, where the request uses draft pages."""
        if self.batch.rules.paired:
            self._compact_slots(self.link.resources.draft_cache)

    # The hooks of the page sanitizer

    def sum_base_pages(self) -> None:
        """Sum pages of the base."""
        sums, link = self.sums, self.link
        if sums is not None and sums.base_sums is not None:
            link.ops.sum_pages(link.resources.base_cache, sums.base_pages, sums.base_sums, link.stream)

    def sum_draft_pages(self) -> None:
        """The same for the draft's, where the request uses draft pages."""
        sums, link, cache = self.sums, self.link, self.link.resources.draft_cache
        if sums is not None and sums.draft_sums is not None and cache is not None:
            link.ops.sum_pages(cache, sums.draft_pages, sums.draft_sums, link.stream)

    def prove(self) -> int | None:
        """Drain the stream: everything enqueued so far is complete when this returns `None` or 0."""
        return self.link.prove()

    def _upload(self, table: Any) -> None:
        if table is not None and table.has_changes:
            self.link.ops.upload_rows(table, self.link.stream)

    def _compact_rows(self, table: Any) -> None:
        if table is not None:
            move = self._move()
            table.compact_rows(move.mapping, move.new_batch_size)
            self._upload(table)

    def _compact_slots(self, cache: Any) -> None:
        if cache is not None:
            move = self._move()
            self.link.ops.compact_slot_state(
                cache, move.device_mapping, self.batch.size, move.new_batch_size, self.link.stream
            )

    def _move(self) -> PendingCompaction:
        assert self.compaction is not None  # noqa: S101 - the lifecycle compacts only behind a mapping
        return self.compaction
