"""The signatures that the manager and its plain-Python twin share. The contract stands on `ContextCacheManager`.

`ctxcache.manager.manager.ContextCacheManager` is the fast one, `ctxcache.testing.ReferenceManager` its twin.
"""

# ruff: noqa: D102 - what each method promises is said there, once

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctxcache.ids import ContextCacheExecutionMode, ResourceType
from ctxcache.manager.results import (
    AcquireResult,
    CacheRecord,
    CacheRequestLease,
    HybridCheckpointKey,
    HybridSnapshotReservation,
    LeaseGrowth,
    ManagerCounters,
    MatchResult,
    PublishResult,
    ReusePlan,
)
from ctxcache.metrics import PoolOccupancy


class RecordsView(Protocol):
    """The records from least to most recently used; `len()` counts them. A live view; do not mutate while iterating."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[CacheRecord]: ...


class CacheManager(Protocol):
    """What both managers can be asked; `ContextCacheManager` says what each answer means."""

    def plan(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: ContextCacheExecutionMode = ContextCacheExecutionMode.VANILLA,
        base_extra_tokens: int = 1,
        draft_extra_tokens: int = 0,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> ReusePlan: ...
    def candidate_checkpoint_lengths(self, keys: NDArray[np.uint64], num_tokens: int) -> NDArray[np.int32]: ...
    def longest_checkpoint(
        self, keys: NDArray[np.uint64], num_tokens: int, exact_keys_behind: Callable[[int], NDArray[np.uint64]]
    ) -> HybridCheckpointKey | None: ...
    def match(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: ContextCacheExecutionMode = ContextCacheExecutionMode.VANILLA,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> MatchResult: ...
    def acquire(self, plan: ReusePlan, *, shares_only: bool = False) -> AcquireResult: ...
    def grow(self, lease: CacheRequestLease, base_pages: int = 0, draft_pages: int = 0) -> bool: ...
    def grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> LeaseGrowth | None: ...
    def can_grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]: ...
    def publish(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        resident_state_length: int,
        *,
        draft_state_length: int = 0,
        moves_own_record: bool = False,
    ) -> PublishResult: ...
    def reserve_snapshots(self, lease: CacheRequestLease, exact_length: int) -> HybridSnapshotReservation | None: ...
    def publish_checkpoint(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        checkpoint: HybridCheckpointKey,
        reservation: HybridSnapshotReservation,
    ) -> PublishResult: ...
    def retire_snapshots(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None: ...
    def release_restored_snapshots(self, lease: CacheRequestLease) -> None: ...
    def release(self, lease: CacheRequestLease) -> None: ...
    def clear(self) -> None: ...
    def pool(self, resource_type: ResourceType) -> PoolOccupancy: ...
    @property
    def records(self) -> RecordsView: ...
    @property
    def num_leases(self) -> int: ...
    @property
    def num_indexed_blocks(self) -> int: ...
    def counters(self) -> ManagerCounters: ...
    def check_invariants(self) -> None: ...
