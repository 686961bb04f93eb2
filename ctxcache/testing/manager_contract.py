"""What a manager does, and every rule that page ids, LRU order and counters depend on.

`ctxcache.manager.manager.ContextCacheManager` is the fast one, `ctxcache.testing.ReferenceManager` its plain-Python twin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """What `ContextCacheManager` and `ReferenceManager` both are, down to page ids, LRU order and counters.

    `ContextCacheManager(*, tokens_per_page, num_base_pages, num_draft_pages=0, num_recurrent_snapshots=0,
    num_partial_kv_snapshots=0, max_records=1024, kind=ContextCacheDeploymentKind.VANILLA)`.

    Rules that page ids and order depend on:

    - A fresh pool gives its lowest id first; what was returned last is given first. A lease's release returns its last
      page first, base before draft, then its restored slots, then its reserved slots.
    - An evicted record lets go of its base path from the endpoint upwards, as far as nothing else needs the blocks (a
      block is needed while it has a child or a record ends at it); then of its draft path, last page first; then of
      its recurrent and its partial-KV slot. What no lease holds returns to its pool in that order.
    - While a demand is lacking something: the least recently used record goes whose eviction alone would free a resource
      of a lacking kind at once; where there is none, the least recently used one whose base or draft path holds, in a
      lacking kind, a page that no lease holds. A demand is feasible when in every kind free plus cached-and-unleased
      resources reach it (those that the plan itself will share do not count as unleased); an infeasible one evicts
      nothing.
    - Draft KV at the end of a block depends on the token that follows. So a draft page belongs to a block *and* the block
      that follows it: two records that share blocks 0..i+1 share the draft pages of 0..i; the draft page of a record's
      last paired block is the record's own choice (its publisher's page).
    """

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
    ) -> ReusePlan:
        """Say what an input of `num_tokens` tokens could reuse now, and what it needs besides. Reads only.

        Args:
            keys: `uint64[b, 2]`, keys of the input's leading full blocks, `b >= num_tokens // P`; extra rows are ignored.
            num_tokens: tokens of the input, n >= 1.
            mode: an execution mode that the deployment kind serves.
            base_extra_tokens: tokens beyond n that base pages must cover, at least 0.
            draft_extra_tokens: the same for draft pages; only where the mode runs a paired draft.
            bypass: look nothing up; `keys` may then be empty.
            exact_keys: keys of checkpoints to look for, for the lengths that `candidate_checkpoint_lengths` named; only
                for kinds with recurrent layers.

        Raises:
            ContractError: any of the above does not hold. `HYBRID_MTP` in mode `VANILLA` plans as a bypass.
        """
        ...

    def candidate_checkpoint_lengths(self, keys: NDArray[np.uint64], num_tokens: int) -> NDArray[np.int32]:
        """Name the exact lengths worth hashing for this input: `int32[c]`, distinct, falling, each in (0, num_tokens).

        There is a checkpoint of each length whose full blocks are those of `keys`; whether its tail matches only the
        exact key tells. Reads only; costs the matched blocks plus the checkpoints that end on them.
        """
        ...

    def match(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: ContextCacheExecutionMode = ContextCacheExecutionMode.VANILLA,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> MatchResult:
        """Say how far an input matches and what stopped it. Reads only; arguments and errors as of `plan`."""
        ...

    def acquire(self, plan: ReusePlan) -> AcquireResult:
        """Turn a plan into a lease: pin what it reuses, evict what it must, allocate the rest. Whole or not at all.

        `STALE_PLAN`: what matched is no longer all there on the same pages (a longer match does not make a plan stale), or
        the checkpoint to restore was evicted, whether published anew or not.
        `INSUFFICIENT_CAPACITY`: also eviction of everything unleased would not do. In both cases nothing has changed.
        The record that was hit becomes most recently used: the checkpoint that is restored; else the record that ends at
        the deepest matched block, else the one made last of those through that block. For EAGLE "matched" means paired.

        Raises:
            ContractError: the plan is another manager's.
        """
        ...

    def grow(self, lease: CacheRequestLease, base_pages: int = 0, draft_pages: int = 0) -> bool:
        """Append so many private pages, evicting as `acquire` does; `False`: not enough, nothing has changed.

        Raises:
            ContractError: a negative number, draft pages for a lease without a paired draft, a released or foreign lease.
        """
        ...

    def grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> LeaseGrowth | None:
        """Grow many leases to so many pages each, all or none; `None`: not enough, nothing has changed.

        Args:
            lease_rows: `int32[n]`, `lease.row` of live leases, each at most once.
            base_page_targets: `int32[n]`, pages that each shall have; at or below the present count nothing grows.
            draft_page_targets: `int32[n]`, the same for draft pages, or `None`.

        Raises:
            ContractError: lengths differ; a row is not a live lease's.
        """
        ...

    def can_grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]:
        """Tell for each lease, greedily in order, whether it could grow with those before it that could. Reads only."""
        ...

    def publish(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        resident_state_length: int,
        *,
        draft_state_length: int = 0,
    ) -> PublishResult:
        """Make the full blocks within `resident_state_length` tokens reusable. Whole or not at all.

        Blocks that are indexed already keep their canonical page; the lease's own page stays private to it. Can be called
        again as the sequence grows.

        Args:
            lease: a lease of this manager, of an attention-only kind.
            keys: `uint64[b, 2]` of the sequence from its first block, with a row for every published block and for every
                block that the lease reused or published before. Extra rows are ignored.
            resident_state_length: leading tokens whose state is materialised and complete in the lease's base pages.
            draft_state_length: the same in the lease's draft pages, at most `resident_state_length`; only for EAGLE leases.

        Raises:
            ContractError: no full block; more blocks than pages; keys that differ from those the lease reused or
                published; keys that are no chain; a released or foreign lease; a kind that publishes checkpoints.
        """
        ...

    def reserve_snapshots(self, lease: CacheRequestLease, exact_length: int) -> HybridSnapshotReservation | None:
        """Take the slots for one capture at `exact_length` tokens, evicting as `acquire` does.

        One recurrent slot; one partial-KV slot too where the deployment has attention and the length is not page-aligned,
        with MTP always. `None` is pressure: nothing has changed, skip this checkpoint.

        Raises:
            ContractError: the lease has a reservation already; a length below 1 or beyond the lease's pages; a kind
                without recurrent layers; a lease that may not publish checkpoints (MTP deployments in mode VANILLA).
        """
        ...

    def publish_checkpoint(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        checkpoint: HybridCheckpointKey,
        reservation: HybridSnapshotReservation,
    ) -> PublishResult:
        """Make the captured state at `checkpoint.exact_length` reusable, with the full blocks that it shares.

        A checkpoint already recorded is touched; the reservation then stays the lease's. Otherwise the record holds the
        reserved slots too. Either way `retire_snapshots` ends the lease's own hold.

        Args:
            lease: the lease whose slots these are.
            keys: as in `publish`, with a row for every full block within the exact length.
            checkpoint: key and length of the state.
            reservation: what `reserve_snapshots` gave for this very length.

        Raises:
            ContractError: as `publish`; a reservation that is not the lease's, or was made for another length.
        """
        ...

    def retire_snapshots(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
        """End the lease's hold on its reserved slots: a record keeps them, or they return to their pools.

        Raises:
            ContractError: a reservation that is not the lease's.
        """
        ...

    def release_restored_snapshots(self, lease: CacheRequestLease) -> None:
        """End the lease's hold on the slots that it was restored from, once that is proven. Twice is harmless."""
        ...

    def release(self, lease: CacheRequestLease) -> None:
        """Return every hold of the lease: shared pages, private pages, restored and reserved slots.

        Raises:
            ContractError: released before, or another manager's.
        """
        ...

    def clear(self) -> None:
        """Evict every record, least recently used first, and forget lately evicted keys.

        Raises:
            ContractError: a lease is out.
        """
        ...

    def pool(self, resource_type: ResourceType) -> PoolOccupancy:
        """Return free and capacity of one pool."""
        ...

    @property
    def records(self) -> RecordsView:
        """The records from least to most recently used."""
        ...

    @property
    def num_leases(self) -> int:
        """How many leases are out."""
        ...

    @property
    def num_indexed_blocks(self) -> int:
        """How many blocks the index holds: those that a lookup can reach."""
        ...

    def counters(self) -> ManagerCounters:
        """Return the totals."""
        ...

    def check_invariants(self) -> None:
        """Check the five invariants in full; `InvariantError` names the first that does not hold. Costs O(cache)."""
        ...
