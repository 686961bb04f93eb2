"""The CUDA-free manager: plan, acquire, grow, publish, release. The contract stands on its methods, the work in the modules below.

No Python object exists per block, record or batch row: compiled code works on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import as_flag, as_integer, check_member
from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheDeploymentKind, ContextCacheExecutionMode, ResourceType
from ctxcache.manager import growth, reservations
from ctxcache.manager import layout as c
from ctxcache.manager.acquire import acquire_plan
from ctxcache.manager.eviction import evict_beyond
from ctxcache.manager.invariants import check_invariants
from ctxcache.manager.layout import allocate_cache
from ctxcache.manager.lease_table import LeaseTable, drop_slots, release_lease
from ctxcache.manager.planning import (
    PlanRequest,
    candidate_lengths,
    longest_checkpoint,
    make_plan,
    match_input,
    read_request,
)
from ctxcache.manager.publish import publish_blocks
from ctxcache.manager.record_views import RecordViews
from ctxcache.manager.results import (
    AcquireResult,
    CacheRequestLease,
    HybridCheckpointKey,
    HybridSnapshotReservation,
    LeaseGrowth,
    ManagerCounters,
    MatchResult,
    PublishResult,
    ReusePlan,
)
from ctxcache.manager.traits import DeploymentTraits
from ctxcache.metrics import PoolOccupancy

_VANILLA = ContextCacheExecutionMode.VANILLA


class ContextCacheManager:
    """Owns pools, block index, records and leases of one cache. Single writer: no thread, no lock.

    Rules that page ids, LRU order and counters depend on:

    - A fresh pool gives its lowest id first; what was returned last is given first. A lease's release returns its last
      page first, base before draft, then its restored slots, then its reserved slots.
    - A hit is a use of every block that matched, a publication of every block up to its end. A record is as recent as its
      end block; of records last used at once, the deeper one is the more recent.
    - Without checkpoints, blocks go one by one, as many as base pages are lacking: of the blocks without children that no
      lease pins, the least recently used one. The record that ended there ends at the block before; it is gone where
      another one ends there, where other blocks follow that one, and where there is none. Where no block can go so, the
      least recently used block without children that stands behind an unleased one leaves the index; its page stays its
      leases'. A block takes along its record's draft page. Where draft pages alone are lacking, they go alone: the last one
      of the least recently used record whose last one nothing else holds; where there is none, of the least recently used
      record with an unleased one. A record that goes beyond `max_records` goes with its blocks down to the next record's end
      or fork, and with none of them where other blocks stand on its end.
    - With checkpoints, records go whole: the least recently used one whose eviction alone would free a resource of a lacking
      kind at once; where there is none, the least recently used one whose base or draft path holds, in a lacking kind, a
      page that no lease holds. It lets go of its base path from the endpoint upwards, as far as nothing else needs the
      blocks (a block is needed while it has a child or a record ends at it); then of its draft path, last page first; then
      of its recurrent and its partial-KV slot. What no lease holds returns to its pool in that order.
    - A demand is feasible when in every kind free plus cached-and-unleased resources reach it (those that the plan itself
      will share do not count as unleased); an infeasible one evicts nothing.
    - Draft KV at the end of a block depends on the token that follows. So a draft page belongs to a block *and* the block
      that follows it: two records that share blocks 0..i+1 share the draft pages of 0..i; the draft page of a record's
      last paired block is the record's own choice (its publisher's page).

    A refused call (`ContractError`) changes nothing but the counter of refusals. An `InvariantError` says which of the
    manager's own rules was found broken; nothing that it holds can be trusted then.

    Args:
        tokens_per_page: tokens in a page, P.
        num_base_pages: base KV pages; 0 for `PURE_RECURRENT`.
        num_draft_pages: draft KV pages; only for `EAGLE` and `HYBRID_MTP`.
        num_recurrent_snapshots: recurrent snapshot slots; only for kinds with recurrent layers.
        num_partial_kv_snapshots: partial-KV snapshot slots; only for `HYBRID` and `HYBRID_MTP`.
        max_records: records kept at most; 0 keeps nothing.
        kind: the deployment, which decides what a plan may reuse.

    Raises:
        ContractError: a negative number, no token a page, a kind that is no `ContextCacheDeploymentKind`, or a pool that
            the kind has no use for.
    """

    def __init__(
        self,
        *,
        tokens_per_page: int,
        num_base_pages: int,
        num_draft_pages: int = 0,
        num_recurrent_snapshots: int = 0,
        num_partial_kv_snapshots: int = 0,
        max_records: int = 1024,
        kind: ContextCacheDeploymentKind = ContextCacheDeploymentKind.VANILLA,
    ) -> None:
        check_member("kind", kind, ContextCacheDeploymentKind)
        self._traits = traits = DeploymentTraits.of(kind, as_integer("tokens_per_page", tokens_per_page, 1))
        has_partial = traits.has_checkpoints and traits.has_pages
        capacities = (
            self._pool_size("num_base_pages", num_base_pages, useful=traits.has_pages),
            self._pool_size("num_draft_pages", num_draft_pages, useful=traits.has_pairs),
            self._pool_size("num_recurrent_snapshots", num_recurrent_snapshots, useful=traits.has_checkpoints),
            self._pool_size("num_partial_kv_snapshots", num_partial_kv_snapshots, useful=has_partial),
        )
        self._cache = allocate_cache(traits, capacities, as_integer("max_records", max_records))
        self._state = self._cache.state
        self._leases = LeaseTable(self._cache, traits)
        self._records = RecordViews(self._cache)

    def _pool_size(self, name: str, size: int, *, useful: bool) -> int:
        size = as_integer(name, size)
        if size and not useful:
            raise ContractError(f"{name} is {size}, but a {self.kind.name} deployment has no such pool; leave it 0")
        return size

    @property
    def tokens_per_page(self) -> int:
        """Tokens in a page."""
        return self._traits.tokens_per_page

    @property
    def kind(self) -> ContextCacheDeploymentKind:
        """The deployment."""
        return self._traits.kind

    # Planning: reads only.

    def plan(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: ContextCacheExecutionMode = _VANILLA,
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
        request = read_request(
            self._traits,
            keys,
            num_tokens,
            mode=mode,
            base_extra_tokens=base_extra_tokens,
            draft_extra_tokens=draft_extra_tokens,
            bypass=bypass,
            exact_keys=exact_keys,
        )
        return make_plan(self._cache, request, self)

    def candidate_checkpoint_lengths(self, keys: NDArray[np.uint64], num_tokens: int) -> NDArray[np.int32]:
        """Name the exact lengths worth hashing for this input: `int32[c]`, distinct, falling, each in (0, num_tokens).

        There is a checkpoint of each length whose full blocks are those of `keys`; whether its tail matches only the
        exact key tells. Reads only; costs the matched blocks plus the checkpoints that end on them.

        Raises:
            ContractError: as `plan`; a kind without recurrent layers.
        """
        return candidate_lengths(self._cache, self._checkpoint_request(keys, num_tokens))

    def longest_checkpoint(
        self, keys: NDArray[np.uint64], num_tokens: int, exact_keys_behind: Callable[[int], NDArray[np.uint64]]
    ) -> HybridCheckpointKey | None:
        """Return the exact key of the longest checkpoint that this input can start from, for `plan`; `None`: there is none.

        Reads only. Costs the matched blocks (without pages, all blocks), and a probe for each length behind a block where
        some checkpoint ends, whoever's it is: however many end there, and however many others are cached.

        Args:
            keys: as in `plan`.
            num_tokens: as in `plan`.
            exact_keys_behind: called with a number of full blocks, returns `uint64[k, 2]`, the exact keys of the input's
                first `blocks * P + i` tokens in row i, up to `P` or the input's end.

        Raises:
            ContractError: as `plan`; a kind without recurrent layers.
        """
        return longest_checkpoint(self._cache, self._checkpoint_request(keys, num_tokens), exact_keys_behind)

    def _checkpoint_request(self, keys: NDArray[np.uint64], num_tokens: int) -> PlanRequest:
        if not self._traits.has_checkpoints:
            raise ContractError(f"a {self.kind.name} deployment has no checkpoints; plan without exact_keys")
        return read_request(self._traits, keys, num_tokens, mode=self._traits.modes[-1])

    def match(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: ContextCacheExecutionMode = _VANILLA,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> MatchResult:
        """Say how far an input matches and what stopped it. Reads only; arguments and errors as of `plan`."""
        request = read_request(self._traits, keys, num_tokens, mode=mode, bypass=bypass, exact_keys=exact_keys)
        return match_input(self._cache, request)

    # Leases.

    def acquire(self, plan: ReusePlan, *, shares_only: bool = False) -> AcquireResult:
        """Turn a plan into a lease: pin what it reuses, evict what it must, allocate the rest. Whole or not at all.

        `STALE_PLAN`: what matched is no longer all there on the same pages (a longer match does not make a plan stale), or
        the checkpoint to restore was evicted, whether published anew or not.
        `INSUFFICIENT_CAPACITY`: also eviction of everything unleased would not do. In both cases nothing has changed.
        What was hit becomes most recently used: the checkpoint that is restored, else every block that matched, and not what
        stands behind them. For EAGLE "matched" means paired.

        Args:
            plan: what `plan` returned, lately.
            shares_only: lease what the plan reuses and no private page; `grow_leases` adds these, for many leases at once.

        Returns:
            The plan and the status; with `ACQUIRED` the lease, whose base pages (`int32[ceil((n + headroom) / P)]`, in
            logical order) are the plan's `reused_base_pages` and behind them `base_page_demand` private ones.

        Raises:
            ContractError: the plan is another manager's.
        """
        if not isinstance(plan, ReusePlan) or plan._owner is not self:  # noqa: SLF001 - the plan's maker
            raise ContractError(f"{plan!r} is no plan of this manager; pass one that its plan() returned")
        if as_flag("shares_only", shares_only):
            plan = replace(plan, base_page_demand=0, draft_page_demand=0)
        return acquire_plan(self._leases, plan)

    def release(self, lease: CacheRequestLease) -> None:
        """Return every hold of the lease: shared pages, private pages, restored and reserved slots.

        Raises:
            ContractError: released before, or another manager's.
        """
        release_lease(self._cache, self._leases.arrays, self._leases.row_of(lease))

    def release_all(self) -> None:
        """Release every lease that is out, those too whose handle an interrupt kept from its caller."""
        for lease in self._leases.live_leases():
            self.release(lease)

    def grow(self, lease: CacheRequestLease, base_pages: int = 0, draft_pages: int = 0) -> bool:
        """Append so many private pages, evicting as `acquire` does; `False`: not enough, nothing has changed.

        Raises:
            ContractError: a negative number, draft pages for a lease without a paired draft, a released or foreign lease.
        """
        return growth.grow(self._leases, lease, base_pages, draft_pages)

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
        return growth.grow_leases(self._leases, lease_rows, base_page_targets, draft_page_targets)

    def can_grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]:
        """Tell for each lease (`bool[n]`), greedily in order, whether it could grow with those before it that could.

        Reads only; arguments and errors as of `grow_leases`.
        """
        return growth.can_grow_leases(self._leases, lease_rows, base_page_targets, draft_page_targets)

    # Publication.

    def publish(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        resident_state_length: int,
        *,
        draft_state_length: int = 0,
        moves_own_record: bool = False,
    ) -> PublishResult:
        """Make the full blocks within `resident_state_length` tokens reusable. Whole or not at all.

        Blocks that are indexed already keep their canonical page; the lease's own page stays private to it. Can be called
        again as the sequence grows, at the cost of the blocks that are new since.

        Args:
            lease: a lease of this manager, of an attention-only kind.
            keys: `uint64[b, 2]` of the sequence from its first block, with a row for every published block and for every
                block that the lease reused or published before. Extra rows are ignored. Of the blocks known before, only
                the last one's key is compared: it is chained over the others.
            resident_state_length: leading tokens whose state is materialised and complete in the lease's base pages.
            draft_state_length: the same in the lease's draft pages, at most `resident_state_length`; only for EAGLE leases.
            moves_own_record: publishing further than before, leave one record of this sequence: the one that the lease
                itself made last goes, uncounted. One that it found stays.

        Raises:
            ContractError: no full block; more blocks than pages; keys that differ from those the lease reused or
                published; keys that are no chain; a released or foreign lease; a kind that publishes checkpoints.
        """
        return publish_blocks(
            self._leases,
            self._records,
            lease,
            keys,
            resident_state_length,
            draft_state_length,
            moves_own_record=moves_own_record,
        )

    def reserve_snapshots(self, lease: CacheRequestLease, exact_length: int) -> HybridSnapshotReservation | None:
        """Take the slots for one capture at `exact_length` tokens, evicting as `acquire` does.

        One recurrent slot; one partial-KV slot too where the deployment has attention and the length is not page-aligned,
        with MTP always. `None` is pressure: nothing has changed, skip this checkpoint.

        Raises:
            ContractError: the lease has a reservation already; a length below 1 or beyond the lease's pages; a kind
                without recurrent layers; a lease that may not publish checkpoints (MTP deployments in mode VANILLA).
        """
        return reservations.reserve_snapshots(self._leases, lease, exact_length)

    def publish_checkpoint(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        checkpoint: HybridCheckpointKey,
        reservation: HybridSnapshotReservation,
    ) -> PublishResult:
        """Make the captured state at `checkpoint.exact_length` reusable, with the full blocks that it shares.

        The checkpoint that the lease was restored from becomes most recently used with it, right behind it: what many start
        from outlives each of them. A checkpoint already recorded is touched; the reservation then stays the lease's. Otherwise the record holds the
        reserved slots too. Either way `retire_snapshots` ends the lease's own hold.

        Args:
            lease: the lease whose slots these are.
            keys: as in `publish`, with a row for every full block within the exact length.
            checkpoint: key and length of the state.
            reservation: what `reserve_snapshots` gave for this very length.

        Raises:
            ContractError: as `publish`; a reservation that is not the lease's, or was made for another length.
        """
        return reservations.publish_checkpoint(self._leases, self._records, lease, keys, checkpoint, reservation)

    def retire_snapshots(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
        """End the lease's hold on its reserved slots: a record keeps them, or they return to their pools.

        Raises:
            ContractError: a reservation that is not the lease's.
        """
        reservations.retire_snapshots(self._leases, lease, reservation)

    def release_restored_snapshots(self, lease: CacheRequestLease) -> None:
        """End the lease's hold on the slots that it was restored from, once that is proven. Twice is harmless.

        Raises:
            ContractError: a released or foreign lease.
        """
        drop_slots(self._cache, self._leases.arrays.fields, self._leases.row_of(lease), c.RESTORED)

    # The whole cache.

    def clear(self) -> None:
        """Evict every record, least recently used first, and forget lately evicted keys.

        Raises:
            ContractError: a lease is out.
        """
        if self.num_leases:
            raise ContractError(f"{self.num_leases} leases are out; release them before clear()")
        evict_beyond(self._cache, 0)
        self._cache.ghost[:] = 0

    def pool(self, resource_type: ResourceType) -> PoolOccupancy:
        """Return free and capacity of one pool."""
        check_member("resource_type", resource_type, ResourceType)
        kind = c.RESOURCE_KIND[resource_type]
        return PoolOccupancy(int(self._state[c.FREE + kind]), int(self._state[c.CAPACITY + kind]))

    def num_available(self, resource_type: ResourceType) -> int:
        """Return how many of one pool no lease holds: the free ones, and those that eviction could free."""
        check_member("resource_type", resource_type, ResourceType)
        kind = c.RESOURCE_KIND[resource_type]
        return int(self._state[c.FREE + kind] + self._state[c.IDLE + kind])

    @property
    def records(self) -> RecordViews:
        """The records from least to most recently used."""
        return self._records

    @property
    def num_leases(self) -> int:
        """How many leases are out."""
        return len(self._leases)

    @property
    def num_indexed_blocks(self) -> int:
        """How many blocks the index holds: those that a lookup can reach."""
        return int(self._state[c.NUM_NODES])

    @property
    def cache_bytes(self) -> int:
        """Bytes of index, tree, pools, records and LRU order: what the cache costs apart from the leases that are out."""
        return sum(array.nbytes for array in self._cache)

    def counters(self) -> ManagerCounters:
        """Return the totals."""
        entries = (c.COMMITTED, c.EXISTING, c.REFUSED, c.PAIRED_COMMITS, c.EVICTED, c.SHORTENED)
        committed, existing, refused, paired, evicted, shortened = (int(self._state[entry]) for entry in entries)
        base, draft, recurrent, partial = (int(count) for count in self._state[c.RECLAIMED : c.RECLAIMED + 4])
        return ManagerCounters(
            publication_attempts=committed + existing + refused,
            committed_publications=committed,
            existing_publications=existing,
            refused_publications=refused,
            spec_pair_publications=paired,
            evicted_records=evicted,
            shortened_records=shortened,
            reclaimed_base_kv_pages=base,
            reclaimed_draft_kv_pages=draft,
            reclaimed_recurrent_snapshots=recurrent,
            reclaimed_partial_kv_snapshots=partial,
        )

    def check_invariants(self) -> None:
        """Check the five invariants in full; `InvariantError` names the first that does not hold. Costs O(cache)."""
        check_invariants(self._cache, self._leases.arrays)
