"""Who owns which page and snapshot slot, held against what the device may still be doing to it.

The rule: a page or slot changes its owner only after a successful synchronise that covers every use of it. A lease that
ends, a block that is published, a reservation that becomes a record's are changes of the owner. A report says that a prefill
or a step is complete: whatever its request has enqueued is proven by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.errors import ContractError
from ctxcache.ids import ResourceType
from ctxcache.manager.results import (
    AcquireResult,
    CacheRequestLease,
    HybridCheckpointKey,
    HybridSnapshotReservation,
    LeaseGrowth,
)
from ctxcache.request.handle import BeginRequestResult
from ctxcache.testing.deferred import DeferredDeviceOps, Enqueued
from ctxcache.testing.taps import tap

BASE, DRAFT = ResourceType.BASE_KV_PAGE, ResourceType.DRAFT_KV_PAGE
RECURRENT, PARTIAL = ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT

REPORTS = ("finalize_prefill_publication", "complete_decode_step")
"""Operations by which a runtime says that work is complete. All others prove what they rely on themselves."""

Resources = Iterable[tuple[ResourceType, int]]


class OwnershipLedger:
    """Listens to a coordinator and its manager, and looks at every change of an owner and at every report.

    Attributes:
        violations: what broke the rule, in words; empty while all is well.
        num_changes: changes of an owner that were looked at.
    """

    def __init__(self, coordinator: Any, ops: DeferredDeviceOps, *, strict: bool = False) -> None:
        """Begin to listen.

        Args:
            coordinator: whose manager is listened to.
            ops: the lazy stream that the coordinator's device work goes through, directly or inside wrappers.
            strict: a report with work that is not proven complete raises `AssertionError` as soon as it was accepted.

        Raises:
            ContractError: that is no lazy stream, or not the coordinator's: the ledger would never see a use.
        """
        _check_stream(coordinator, ops)
        self.violations: list[str] = []
        self.num_changes = 0
        self._ops = ops
        self._manager = coordinator.manager
        self._tokens_per_page = int(coordinator.manager.tokens_per_page)
        self._reserved: dict[tuple[int, int], HybridSnapshotReservation] = {}
        self._strict = strict
        self._num_requests = 0
        self._num_enqueued_before = 0
        self._unproven_at_report: list[Enqueued] = []
        tap(coordinator, "begin_request", after=self._begun)
        for report in REPORTS:
            tap(coordinator, report, before=self._reports, after=partial(self._reported, report))
        manager = coordinator.manager
        tap(manager, "acquire", after=self._acquired)
        tap(manager, "grow_leases", after=self._grown)
        tap(manager, "publish", before=self._publishes)
        tap(manager, "reserve_snapshots", after=self._has_reserved)
        tap(manager, "publish_checkpoint", before=self._publishes_checkpoint)
        tap(manager, "retire_snapshots", before=self._retires)
        tap(manager, "release_restored_snapshots", before=self._lets_go_of_restored)
        tap(manager, "release", before=self._releases)

    def check(self) -> None:
        """Raise `AssertionError` with every violation so far, if there is one."""
        if self.violations:
            raise AssertionError("\n".join(self.violations))

    def _begun(self, result: BeginRequestResult, *_: Any, **__: Any) -> None:
        if result.admission is not None:
            self._num_requests += 1
            self._num_enqueued_before = self._ops.num_enqueued

    def _reports(self, *_: Any, **__: Any) -> None:
        own = self._num_enqueued_before
        self._unproven_at_report = [work for work in self._ops.unproven_work if work.number > own]

    def _reported(self, operation: str, *_: Any, **__: Any) -> None:
        """A report that was refused has reported nothing, so it is judged when it was accepted."""
        if not self._unproven_at_report:
            return
        first, others = self._unproven_at_report[0], len(self._unproven_at_report) - 1
        more = f" (and {others} more)" if others else ""
        self.violations.append(
            f"{operation} of request {self._num_requests} reported as complete what was not proven so: {first}{more}; "
            "synchronize the stream, through the coordinator's device ops, before you report"
        )
        if self._strict:
            raise AssertionError(self.violations[-1])

    def _acquired(self, result: AcquireResult, *_: Any, **_options: Any) -> None:
        if result.lease is None:
            return
        plan = result.plan
        pages = _pages(BASE, result.lease.base_pages) | _pages(DRAFT, result.lease.draft_pages)
        shared = _pages(BASE, plan.reused_base_pages) | _pages(DRAFT, plan.reused_draft_pages)
        self._look("was given to a new lease", pages - shared)
        self._look("is shared with a new lease", shared | _restored(result.lease), writes_only=True)

    def _grown(self, growth: LeaseGrowth | None, *_: Any, **__: Any) -> None:
        if growth is not None:
            grown = _pages(BASE, growth.base.page_ids) | _pages(DRAFT, growth.draft.page_ids)
            self._look("was given to a growing lease", grown)

    def _publishes(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        resident_state_length: int,
        *,
        draft_state_length: int = 0,
    ) -> None:
        del keys
        base = lease.base_pages[: resident_state_length // self._tokens_per_page]
        draft = lease.draft_pages[: draft_state_length // self._tokens_per_page]
        published = _pages(BASE, base) | _pages(DRAFT, draft)
        self._look("was published", published, writes_only=True)
        self._look_for_unnamed("were published", published)

    def _has_reserved(self, reservation: HybridSnapshotReservation | None, lease: CacheRequestLease, *_: Any) -> None:
        if reservation is not None:
            self._reserved[_key(lease)] = reservation
            self._look("was reserved for a capture", _slots(reservation))

    def _publishes_checkpoint(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        checkpoint: HybridCheckpointKey,
        reservation: HybridSnapshotReservation,
    ) -> None:
        del keys
        num_blocks = checkpoint.exact_length // self._tokens_per_page
        if lease.draft_pages.size:  # with MTP the boundary token always lives in a private page
            num_blocks = (checkpoint.exact_length - 1) // self._tokens_per_page
        blocks = _pages(BASE, lease.base_pages[:num_blocks]) | _pages(DRAFT, lease.draft_pages[:num_blocks])
        published = blocks | _slots(reservation)
        self._look("was published as a checkpoint", published, writes_only=True)
        self._look_for_unnamed("were published as a checkpoint", published)

    def _retires(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
        self._reserved.pop(_key(lease), None)
        self._look("was retired from its reservation", _slots(reservation), writes_only=True)

    def _lets_go_of_restored(self, lease: CacheRequestLease) -> None:
        self._look("was unpinned after a restore", _restored(lease))

    def _releases(self, lease: CacheRequestLease) -> None:
        held = _pages(BASE, lease.base_pages) | _pages(DRAFT, lease.draft_pages) | _restored(lease)
        reservation = self._reserved.pop(_key(lease), None)
        if reservation is not None:
            held |= _slots(reservation)
        self._look("was released", held)
        self._look_for_unnamed("were released", held)

    def _look(self, change: str, resources: Resources, *, writes_only: bool = False) -> None:
        changed = set(resources)
        self.num_changes += len(changed)
        for use in self._ops.unproven:
            if (use.resource, use.index) in changed and (use.writes or not writes_only):
                self.violations.append(
                    f"{use.resource.value} {use.index} {change} while the device may still "
                    f"{'write' if use.writes else 'read'} it: {use.work} was not proven complete"
                )

    def _look_for_unnamed(self, change: str, resources: Resources) -> None:
        """Work that does not say what it touches may touch anything that its request holds."""
        if self._ops.num_unproven_unnamed and set(resources):
            self.violations.append(
                f"pages {change} while work that the runtime had enqueued was not proven complete; synchronize the stream "
                "before you report, or say with enqueue(work, uses=...) that it touches others"
            )


def _check_stream(coordinator: Any, ops: Any) -> None:
    if not isinstance(ops, DeferredDeviceOps):
        raise ContractError(f"ops is a {type(ops).__name__}; pass the DeferredDeviceOps of the coordinator")
    present: Any = coordinator.device_ops
    while present is not ops:
        if isinstance(present, (NumpyDeviceOps, NumbaDeviceOps)):  # the end of the chain
            raise ContractError(
                "ops is not what the coordinator's device work goes through; replace_device_ops() first"
            )
        present = getattr(present, "inner", ops)  # a wrapper of the runtime's own may not say what it wraps


def _key(lease: CacheRequestLease) -> tuple[int, int]:
    return lease.row, lease.generation


def _pages(resource: ResourceType, ids: NDArray[np.int32]) -> set[tuple[ResourceType, int]]:
    return {(resource, page) for page in ids.tolist()}


def _slots(reservation: HybridSnapshotReservation) -> set[tuple[ResourceType, int]]:
    return _named(reservation.recurrent_snapshot_slot, reservation.partial_kv_snapshot_slot)


def _restored(lease: CacheRequestLease) -> set[tuple[ResourceType, int]]:
    return _named(lease.recurrent_snapshot_slot, lease.partial_kv_snapshot_slot)


def _named(recurrent: int | None, partial: int | None) -> set[tuple[ResourceType, int]]:
    named = ((RECURRENT, recurrent), (PARTIAL, partial))
    return {(resource, slot) for resource, slot in named if slot is not None}
