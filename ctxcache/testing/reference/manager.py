"""The manager once more, in plain Python, for obvious correctness: the oracle that the fast one is compared with.

Written from the specification and from the rules on `ContextCacheManager`, not from the fast manager's code. Lists are
scanned, reachability is recomputed at every step, nothing is kept that follows from something else.
"""

# ruff: noqa: D102 - the contract of each method stands on `ContextCacheManager`

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.config import EXECUTION_MODES
from ctxcache.errors import ContractError
from ctxcache.ids import AcquireStatus, Hash128, PublishStatus, ResourceType
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
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
from ctxcache.testing.reference import leases, plans, publish
from ctxcache.testing.reference.handles import ReferenceHandles
from ctxcache.testing.reference.state import (
    BASE,
    DRAFT,
    NO_SHARE,
    PARTIAL,
    RECURRENT,
    Keys,
    LeaseState,
    RecordState,
    ReferenceState,
)


class ReferenceManager:
    """`ContextCacheManager` in plain Python: the same arguments, results, page ids, order and counters.

    Every operation costs O(cache) or worse. What each promises is said there; `EVICTED` is judged here by a perfect memory,
    not by one that forgets.
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
        kind: Kind = Kind.VANILLA,
    ) -> None:
        self._tokens_per_page = tokens_per_page
        self._max_records = max_records
        self._kind = kind
        self._state = ReferenceState(
            {
                BASE: num_base_pages,
                DRAFT: num_draft_pages,
                RECURRENT: num_recurrent_snapshots,
                PARTIAL: num_partial_kv_snapshots,
            },
            by_block=kind not in {Kind.PURE_RECURRENT, Kind.HYBRID, Kind.HYBRID_MTP},
        )
        self._handles = ReferenceHandles(self._state)

    # Planning

    def plan(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: Mode = Mode.VANILLA,
        base_extra_tokens: int = 1,
        draft_extra_tokens: int = 0,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> ReusePlan:
        rules = self._rules(mode)
        exact = tuple(exact_keys)
        cold = bypass or rules.always_cold
        self._check_input(rules, keys, num_tokens, exact, cold=cold)
        if base_extra_tokens < 0 or draft_extra_tokens < 0:
            raise ContractError(f"headroom {base_extra_tokens}, {draft_extra_tokens} is negative; pass at least 0")
        if draft_extra_tokens and not rules.paired:
            raise ContractError(f"mode {mode.name} has no draft pages; pass draft_extra_tokens=0")
        page = self._tokens_per_page
        own = () if cold else plans.keys_of(keys, num_tokens // page)
        if rules.checkpoints:
            match = plans.find_checkpoint(self._state, rules, own, num_tokens, exact if not cold else (), page)
        else:
            match = plans.find_blocks(self._state, own, paired=rules.paired)
        return plans.make_plan(
            self._state,
            rules,
            match,
            tokens_per_page=self._tokens_per_page,
            num_tokens=num_tokens,
            base_extra_tokens=base_extra_tokens,
            draft_extra_tokens=draft_extra_tokens,
            bypass=cold,
            owner=self,
        )

    def candidate_checkpoint_lengths(self, keys: NDArray[np.uint64], num_tokens: int) -> NDArray[np.int32]:
        rules = self._rules(Mode.MTP if self._kind is Kind.HYBRID_MTP else Mode.VANILLA)
        self._check_input(rules, keys, num_tokens, (), cold=False)
        own = plans.keys_of(keys, num_tokens // self._tokens_per_page)
        lengths = {
            record.checkpoint.exact_length
            for record in self._state.records
            if record.checkpoint is not None
            and record.checkpoint.exact_length < num_tokens
            and (record.keys if rules.attention else record.whole_keys)
            == own[: len(record.keys if rules.attention else record.whole_keys)]
        }
        return plans.page_ids(sorted(lengths, reverse=True))

    def longest_checkpoint(
        self, keys: NDArray[np.uint64], num_tokens: int, exact_keys_behind: Callable[[int], NDArray[np.uint64]]
    ) -> HybridCheckpointKey | None:
        page = self._tokens_per_page
        for length in self.candidate_checkpoint_lengths(keys, num_tokens).tolist():
            blocks, row = divmod(length, page)
            key = HybridCheckpointKey(plans.keys_of(exact_keys_behind(blocks)[row:], 1)[0], length)
            if any(record.checkpoint == key for record in self._state.records):
                return key
        return None

    def match(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: Mode = Mode.VANILLA,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> MatchResult:
        exact = tuple(exact_keys)
        plan = self.plan(keys, num_tokens, mode=mode, bypass=bypass, exact_keys=exact)
        own = () if plan.bypass else plans.keys_of(keys, num_tokens // self._tokens_per_page)
        return MatchResult(
            matched_full_blocks=plans.matched_prefix(self._state, own),
            matched_token_length=plan.matched_token_length,
            reused_token_length=plan.reused_token_length,
            kind=plan.kind,
            reason=plans.miss_reason(
                self._state, self._rules(mode), plan, own, exact, tokens_per_page=self._tokens_per_page
            ),
        )

    def _rules(self, mode: Mode) -> plans.Rules:
        if mode not in EXECUTION_MODES[self._kind]:
            raise ContractError(f"{self._kind.name} does not serve mode {mode!r}")
        return plans.Rules(self._kind, mode)

    def _check_input(
        self,
        rules: plans.Rules,
        keys: NDArray[np.uint64],
        num_tokens: int,
        exact_keys: tuple[HybridCheckpointKey, ...],
        *,
        cold: bool,
    ) -> None:
        if num_tokens < 1:
            raise ContractError(f"the input has {num_tokens} tokens; pass at least 1")
        if not cold:
            _check_keys(keys, num_tokens // self._tokens_per_page)
        if exact_keys and not rules.checkpoints:
            raise ContractError(f"{self._kind.name} has no checkpoints; pass no exact keys")

    # Leases

    def acquire(self, plan: ReusePlan, *, shares_only: bool = False) -> AcquireResult:
        if plan._owner is not self:  # noqa: SLF001 - the plan keeps it for its manager
            raise ContractError("the plan is another manager's; plan again with this one")
        if shares_only:
            plan = replace(plan, base_page_demand=0, draft_page_demand=0)
        rules = plans.Rules(self._kind, plan.execution_mode)
        record = leases.record_behind(self._state, rules, plan)
        if not leases.still_there(self._state, plan, record):
            return AcquireResult(None, AcquireStatus.STALE_PLAN, plan)
        shared = {BASE: set(plan.reused_base_pages.tolist()), DRAFT: set(plan.reused_draft_pages.tolist())}
        if not self._state.feasible({BASE: plan.base_page_demand, DRAFT: plan.draft_page_demand}, shared):
            return AcquireResult(None, AcquireStatus.INSUFFICIENT_CAPACITY, plan)
        if record is not None and rules.checkpoints:
            self._state.touch(record)
        elif record is not None:
            self._state.use(plan._proof.keys)  # noqa: SLF001
        row = leases.open_lease(self._state, rules, plan)
        lease = CacheRequestLease(self._handles, row, self._state.generations[row])
        return AcquireResult(lease, AcquireStatus.ACQUIRED, plan)

    def release(self, lease: CacheRequestLease) -> None:
        self._handles.leased(lease)
        leases.close_lease(self._state, lease.row)

    def grow(self, lease: CacheRequestLease, base_pages: int = 0, draft_pages: int = 0) -> bool:
        state = self._handles.leased(lease)
        if base_pages < 0 or draft_pages < 0:
            raise ContractError(f"cannot grow by {base_pages} base and {draft_pages} draft pages; pass at least 0")
        if draft_pages and not state.paired:
            raise ContractError("the lease runs no paired draft; pass draft_pages=0")
        demand = {BASE: base_pages, DRAFT: draft_pages}
        if not self._state.feasible(demand, NO_SHARE):
            return False
        leases.append(self._state, state, demand)
        return True

    def grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> LeaseGrowth | None:
        return leases.grow_all(
            self._state, leases.missing_pages(self._state, lease_rows, base_page_targets, draft_page_targets)
        )

    def can_grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]:
        granted = {BASE: 0, DRAFT: 0}
        answers = []
        for _, demand in leases.missing_pages(self._state, lease_rows, base_page_targets, draft_page_targets):
            with_this = {kind: granted[kind] + demand[kind] for kind in granted}
            answers.append(self._state.feasible(with_this, NO_SHARE))
            if answers[-1]:
                granted = with_this
        return np.array(answers, dtype=np.bool_)

    # Publication

    def publish(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        resident_state_length: int,
        *,
        draft_state_length: int = 0,
        moves_own_record: bool = False,
    ) -> PublishResult:
        state = self._handles.leased(lease)
        if self._kind in {Kind.PURE_RECURRENT, Kind.HYBRID, Kind.HYBRID_MTP}:
            raise ContractError(f"{self._kind.name} publishes checkpoints")
        num_blocks = resident_state_length // self._tokens_per_page
        num_paired = draft_state_length // self._tokens_per_page
        if num_blocks < 1:
            raise ContractError(f"{resident_state_length} tokens hold no full block")
        if not 0 <= draft_state_length <= resident_state_length or (draft_state_length and not state.paired):
            raise ContractError(f"a draft state of {draft_state_length} tokens is not the lease's")
        _check_keys(keys, max(num_blocks, len(state.known_keys)))
        more = num_blocks > state.published_full_block_count
        path = publish.own_path(self._state, state, keys, num_blocks, num_paired, attempted=more)
        record = next((record for record in self._state.records if record.keys == path), None)
        news = record is None or num_paired > len(record.draft_pages)
        made = record is None
        if record is None:
            record = publish.new_record(self._state, state, path)
        if num_paired > len(record.draft_pages):
            publish.pair(self._state, state, record, num_paired)
        own = next((own for own in self._state.records if own.serial == state.own_serial), None)
        if moves_own_record and more and own is not None and own is not record:
            self._state.remove(own)
        if made:
            state.own_serial = record.serial
        return self._published(state, record, path, news=news, attempted=news or more)

    def reserve_snapshots(self, lease: CacheRequestLease, exact_length: int) -> HybridSnapshotReservation | None:
        state = self._handles.leased(lease)
        if not state.may_publish_checkpoints:
            raise ContractError("the lease publishes no checkpoints")
        if state.reserved is not None:
            raise ContractError("the lease has a reservation already; retire it first")
        has_pages = self._kind is not Kind.PURE_RECURRENT
        if exact_length < 1 or (has_pages and exact_length > len(state.base_pages) * self._tokens_per_page):
            raise ContractError(f"a checkpoint of {exact_length} tokens lies outside the lease's pages")
        partial = has_pages and (self._kind is Kind.HYBRID_MTP or exact_length % self._tokens_per_page > 0)
        demand = {RECURRENT: 1, PARTIAL: int(partial)}
        if not self._state.feasible(demand, NO_SHARE):
            return None
        self._state.evict_for(demand)
        (recurrent_slot,) = self._state.take(RECURRENT, 1)
        partial_slot = self._state.take(PARTIAL, 1)[0] if partial else None
        state.reserved = HybridSnapshotReservation(recurrent_slot, partial_slot)
        state.reserved_length = exact_length
        return state.reserved

    def publish_checkpoint(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        checkpoint: HybridCheckpointKey,
        reservation: HybridSnapshotReservation,
    ) -> PublishResult:
        state = self._reserving(lease, reservation)
        if checkpoint.exact_length != state.reserved_length:
            raise ContractError(f"{state.reserved_length} tokens were reserved for, not {checkpoint.exact_length}")
        full_blocks = checkpoint.exact_length // self._tokens_per_page
        _check_keys(keys, max(full_blocks, len(state.known_keys)))
        rules = plans.Rules(self._kind, Mode.MTP if state.paired else Mode.VANILLA)
        num_shared = rules.shared_blocks(checkpoint.exact_length, self._tokens_per_page)
        path = publish.own_path(self._state, state, keys, num_shared, num_shared if state.paired else 0, attempted=True)
        record = next((record for record in self._state.records if record.checkpoint == checkpoint), None)
        news = record is None
        if news and reservation.recurrent_snapshot_slot in self._state.needed(RECURRENT):
            self._state.refused += 1
            raise ContractError(f"{reservation!r} holds another checkpoint already; retire it and reserve again")
        if record is None:
            record = publish.new_record(self._state, state, path)
            record.checkpoint = checkpoint
            record.snapshots = dict(state.reserved_slots())
            record.whole_keys = plans.keys_of(keys, full_blocks)
            if state.paired:
                publish.pair(self._state, state, record, num_shared)
        return self._published(state, record, path, news=news, attempted=True)

    def _published(
        self, state: LeaseState, record: RecordState, path: Keys, *, news: bool, attempted: bool
    ) -> PublishResult:
        if record.checkpoint is None:
            self._state.use(path)
        else:
            self._state.touch(record)
            for started in [each for each in self._state.records if each.serial == state.started_serial]:
                self._state.touch(started)
        self._state.committed += news
        self._state.paired_commits += news and bool(record.draft_pages)
        self._state.existing += attempted and not news
        if len(path) > len(state.known_keys):
            state.known_keys = path
        state.published_full_block_count = max(state.published_full_block_count, len(path))
        while len(self._state.records) > self._max_records:
            self._state.drop_oldest()
        return PublishResult(
            PublishStatus.PUBLISHED if news else PublishStatus.EXISTING_RECORD,
            self._handles.view(record) if record in self._state.records else None,
            state.published_full_block_count,
        )

    def retire_snapshots(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
        state = self._reserving(lease, reservation)
        held = state.reserved_slots()
        state.reserved = None
        self._state.give_back(held)

    def release_restored_snapshots(self, lease: CacheRequestLease) -> None:
        state = self._handles.leased(lease)
        held = list(state.restored.items())
        state.restored = {}
        self._state.give_back(held)

    def _reserving(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> LeaseState:
        state = self._handles.leased(lease)
        if state.reserved is None or reservation != state.reserved:
            raise ContractError(f"{reservation!r} is not the lease's")
        return state

    # The whole cache

    def clear(self) -> None:
        if self._state.leases:
            raise ContractError(f"{len(self._state.leases)} leases are out; release them first")
        while self._state.records:
            self._state.drop_oldest()
        self._state.gone.clear()

    def pool(self, resource_type: ResourceType) -> PoolOccupancy:
        pool = self._state.pools[resource_type]
        return PoolOccupancy(len(pool.free), pool.capacity)

    @property
    def records(self) -> list[CacheRecord]:
        return [self._handles.view(record) for record in self._state.records]

    @property
    def num_leases(self) -> int:
        return len(self._state.leases)

    @property
    def num_indexed_blocks(self) -> int:
        return len(self._state.page_of)

    def counters(self) -> ManagerCounters:
        state = self._state
        return ManagerCounters(
            publication_attempts=state.committed + state.existing + state.refused,
            committed_publications=state.committed,
            existing_publications=state.existing,
            refused_publications=state.refused,
            spec_pair_publications=state.paired_commits,
            evicted_records=state.evicted_records,
            shortened_records=state.shortened_records,
            reclaimed_base_kv_pages=state.reclaimed[BASE],
            reclaimed_draft_kv_pages=state.reclaimed[DRAFT],
            reclaimed_recurrent_snapshots=state.reclaimed[RECURRENT],
            reclaimed_partial_kv_snapshots=state.reclaimed[PARTIAL],
        )

    def check_invariants(self) -> None:
        self._state.check_invariants()

    # For tests alone

    def lease_known_keys(self, lease: CacheRequestLease) -> Keys:
        """Return the keys of the blocks that a lease reused or published: its own prefix."""
        return self._handles.leased(lease).known_keys

    @property
    def lately_evicted_keys(self) -> frozenset[Hash128]:
        """Keys of blocks and checkpoints that were evicted since the last `clear`."""
        return frozenset(self._state.gone)


def _check_keys(keys: Any, num_blocks: int) -> None:
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64 or keys.ndim != 2 or keys.shape[1] != 2:
        raise ContractError(f"keys are {keys!r}; pass uint64[blocks, 2]")
    if len(keys) < num_blocks:
        raise ContractError(f"{len(keys)} keys for {num_blocks} full blocks; pass one for each")
