"""What a coordinator is bound to: its device resources, their sizes, and how a batch is laid over them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ctxcache.config import ContextCacheConfig, DeploymentConfig
from ctxcache.device.arrays import Location
from ctxcache.device.ops import DeviceOps, SnapshotJobs, StreamSynchronizer, location_of
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.resources import ContextCachePhysicalResources, check_devices, check_resources
from ctxcache.device.snapshots import HybridSnapshotStorage
from ctxcache.device.streams import stream_handle
from ctxcache.errors import ContractError, DeploymentError
from ctxcache.ids import RECURRENT_KINDS
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.manager.results import CacheRequestLease, LeaseGrowth, PageGrowth, PageIds
from ctxcache.metrics import CoordinatorCounters
from ctxcache.request.batch import Batch
from ctxcache.request.request import DeviceLink
from ctxcache.request.room import Room
from ctxcache.request.snapshot_jobs import SnapshotSlots, snapshot_jobs


class DeviceBinding:
    """The resources of one coordinator, checked, with their sizes.

    Attributes:
        link: what the lifecycle's hooks touch.
        num_base_pages, num_draft_pages: pages of the pools; 0 where there are none.
        num_recurrent_snapshots, num_partial_kv_snapshots: snapshot slots that the budgets pay for.
        room: the longest sequences.
    """

    def __init__(self, deployment: DeploymentConfig, kind: Kind, link: DeviceLink) -> None:
        base, draft = deployment.base, deployment.draft
        storage = link.storage
        self.link = link
        self.num_base_pages = 0 if kind is Kind.PURE_RECURRENT else base.num_pages
        self.num_draft_pages = 0 if draft is None else draft.num_pages
        self.num_recurrent_snapshots = 0 if storage is None else storage.num_recurrent_slots
        self.num_partial_kv_snapshots = 0 if storage is None else storage.num_partial_kv_slots
        self.room = Room(
            base.tokens_per_page,
            base.max_sequence_length,
            base.max_sequence_length if draft is None else draft.max_sequence_length,
            has_pages=self.num_base_pages > 0,
        )
        self._tokens_per_page = base.tokens_per_page

    @property
    def location(self) -> Location:
        """Where the coordinator's ops work, so where the arrays that a caller lends for one operation have to lie."""
        return location_of(self.link.ops, self.link.resources.base_cache)

    def bind(self, owner: object) -> None:
        """Claim every resource for one live coordinator, all or none.

        Raises:
            ContractError: one belongs to another live coordinator.
        """
        claimed: list[Any] = []
        try:
            for resource in self._resources():
                resource.bind(owner)
                claimed.append(resource)
        except ContractError:
            for resource in claimed:
                resource.unbind(owner)
            raise

    def unbind(self, owner: object) -> None:
        """Let every resource be claimed again."""
        for resource in self._resources():
            resource.unbind(owner)

    def distrust_device_rows(self) -> None:
        """Take nothing for uploaded: after a failed drain the device views may hold anything."""
        self.link.distrust_device_rows()

    def bind_rows(self, batch: Batch) -> None:
        """Give every slot its lease's pages on the host; rows behind the batch are cleared."""
        resources = self.link.resources
        if self.num_base_pages and resources.base_page_table is not None:
            _set_rows(resources.base_page_table, [lease.base_pages for lease in batch.leases])
        if batch.rules.paired and resources.draft_page_table is not None:
            _set_rows(resources.draft_page_table, [lease.draft_pages for lease in batch.leases])

    def extend_rows(self, growth: LeaseGrowth) -> None:
        """Append grown pages to their rows on the host."""
        _extend_rows(self.link.resources.base_page_table, growth.base)
        _extend_rows(self.link.resources.draft_page_table, growth.draft)

    def restore_jobs(self, batch: Batch) -> SnapshotJobs | None:
        """Describe the checkpoints that the batch starts from; `None` when every sequence is cold."""
        if self.link.storage is None:
            return None
        return snapshot_jobs(
            [
                _restored(slot, lease, int(length))
                for slot, (lease, length) in enumerate(zip(batch.leases, batch.reuse_lengths, strict=True))
                if length > 0
            ],
            self._tokens_per_page,
            paired=batch.rules.paired,
        )

    def _resources(self) -> list[Any]:
        resources = self.link.resources
        candidates = (
            resources.base_cache,
            resources.base_page_table if self.num_base_pages else None,
            resources.draft_cache,
            resources.draft_page_table,
        )
        return [resource for resource in candidates if resource is not None]


def bind_device(
    config: ContextCacheConfig,
    deployment: DeploymentConfig,
    kind: Kind,
    resources: ContextCachePhysicalResources,
    stream: Any,
    synchronizer: StreamSynchronizer | None,
    device_ops: DeviceOps | None,
    counters: CoordinatorCounters,
) -> DeviceBinding:
    """Check resources against deployment and configuration, and allocate the snapshot slots. Claims nothing yet.

    Raises:
        DeploymentError: they do not agree.
        ContractError: the stream is no stream.
    """
    if not isinstance(config, ContextCacheConfig):
        raise DeploymentError(f"config is a {type(config).__name__}; pass a ContextCacheConfig")
    check_resources(deployment, kind, resources)
    if not (synchronizer is None or callable(synchronizer)):
        raise DeploymentError(f"synchronizer is a {type(synchronizer).__name__}; pass a callable, or None to wait")
    stream_handle(stream)
    ops = resources.base_cache.device_ops if device_ops is None else device_ops
    check_devices(ops, kind, resources)
    storage = None
    if kind in RECURRENT_KINDS:
        storage = HybridSnapshotStorage(
            deployment,
            resources.base_cache,
            resources.draft_cache,
            recurrent_snapshot_pool_bytes=config.recurrent_snapshot_pool_bytes,
            partial_kv_snapshot_pool_bytes=config.partial_kv_snapshot_pool_bytes,
            enabled=config.enabled,
            device_ops=ops,
        )
    for resource in (resources.draft_cache, resources.draft_page_table):
        if resource is not None:
            resource.role = "draft"
    return DeviceBinding(deployment, kind, DeviceLink(ops, stream, synchronizer, resources, storage, counters))


def _restored(slot: int, lease: CacheRequestLease, exact_length: int) -> SnapshotSlots:
    return SnapshotSlots(slot, lease, exact_length, lease.recurrent_snapshot_slot, lease.partial_kv_snapshot_slot)


def _set_rows(table: KVPageTable, rows: list[PageIds]) -> None:
    counts = np.zeros(table.max_batch, np.int32)
    counts[: len(rows)] = [row.size for row in rows]
    table.set_rows(np.arange(table.max_batch, dtype=np.int32), counts, np.concatenate(rows))


def _extend_rows(table: KVPageTable | None, growth: PageGrowth) -> None:
    if table is not None and growth.indices.size:
        table.extend_rows(growth.indices, growth.first_page_indices, growth.page_counts, growth.page_ids)
