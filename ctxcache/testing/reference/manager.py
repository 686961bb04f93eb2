"""The manager once more, in plain Python, for obvious correctness: the oracle that the fast one is compared with.

Written from the specification and from the rules in `ctxcache.testing.manager_contract`, not from the fast manager's code. Lists are
scanned, reachability is recomputed at every step, nothing is kept that follows from something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.config import EXECUTION_MODES
from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.ids import ContextCacheExecutionMode as Mode
from ctxcache.ids import PublishStatus
from ctxcache.manager.results import (
    CacheRequestLease,
    HybridCheckpointKey,
    HybridSnapshotReservation,
    MatchResult,
    PageIds,
    PublishResult,
    ReusePlan,
)
from ctxcache.testing.reference.leases import NO_SHARE, ReferenceLeases
from ctxcache.testing.reference.plans import (
    Match,
    Rules,
    find_blocks,
    find_checkpoint,
    keys_of,
    make_plan,
    matched_prefix,
    miss_reason,
    page_ids,
)
from ctxcache.testing.reference.state import DRAFT, PARTIAL, RECURRENT, Keys, LeaseState, RecordState


class ReferenceManager(ReferenceLeases):
    """`ctxcache.testing.manager_contract.CacheManager` in plain Python: the same arguments, results, page ids, order and counters.

    Every operation costs O(cache) or worse. Documented in `CacheManager`; what is said here is only how.
    """

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
        """See `CacheManager.plan`."""
        rules = self._rules(mode)
        exact = tuple(exact_keys)
        cold = bypass or rules.always_cold
        self._check_input(rules, keys, num_tokens, exact, cold=cold)
        if base_extra_tokens < 0 or draft_extra_tokens < 0:
            raise ContractError(f"headroom {base_extra_tokens}, {draft_extra_tokens} is negative; pass at least 0")
        if draft_extra_tokens and not rules.paired:
            raise ContractError(f"mode {mode.name} has no draft pages; pass draft_extra_tokens=0")
        return make_plan(
            self._state,
            rules,
            Match((), None) if cold else self._find(rules, keys, num_tokens, exact),
            tokens_per_page=self._tokens_per_page,
            num_tokens=num_tokens,
            base_extra_tokens=base_extra_tokens,
            draft_extra_tokens=draft_extra_tokens,
            bypass=cold,
            owner=self,
        )

    def candidate_checkpoint_lengths(self, keys: NDArray[np.uint64], num_tokens: int) -> NDArray[np.int32]:
        """See `CacheManager.candidate_checkpoint_lengths`."""
        rules = self._rules(Mode.MTP if self._kind is Kind.HYBRID_MTP else Mode.VANILLA)
        self._check_input(rules, keys, num_tokens, (), cold=False)
        own = keys_of(keys, num_tokens // self._tokens_per_page)
        lengths = {
            record.checkpoint.exact_length
            for record in self._state.records
            if record.checkpoint is not None
            and record.checkpoint.exact_length < num_tokens
            and (record.keys if rules.attention else record.whole_keys)
            == own[: len(record.keys if rules.attention else record.whole_keys)]
        }
        return np.array(sorted(lengths, reverse=True), dtype=np.int32)

    def match(
        self,
        keys: NDArray[np.uint64],
        num_tokens: int,
        *,
        mode: Mode = Mode.VANILLA,
        bypass: bool = False,
        exact_keys: Iterable[HybridCheckpointKey] = (),
    ) -> MatchResult:
        """See `CacheManager.match`. `EVICTED` is judged by a perfect memory, not by one that forgets."""
        exact = tuple(exact_keys)
        plan = self.plan(keys, num_tokens, mode=mode, bypass=bypass, exact_keys=exact)
        own = () if plan.bypass else keys_of(keys, num_tokens // self._tokens_per_page)
        return MatchResult(
            matched_full_blocks=matched_prefix(self._state, own),
            matched_token_length=plan.matched_token_length,
            reused_token_length=plan.reused_token_length,
            kind=plan.kind,
            reason=miss_reason(self._state, self._rules(mode), plan, own, exact, tokens_per_page=self._tokens_per_page),
        )

    def _find(
        self, rules: Rules, keys: NDArray[np.uint64], num_tokens: int, exact_keys: tuple[HybridCheckpointKey, ...]
    ) -> Match:
        own = keys_of(keys, num_tokens // self._tokens_per_page)
        if rules.checkpoints:
            return find_checkpoint(self._state, rules, own, num_tokens, exact_keys, self._tokens_per_page)
        return find_blocks(self._state, own, paired=rules.paired)

    def _rules(self, mode: Mode) -> Rules:
        if mode not in EXECUTION_MODES[self._kind]:
            raise ContractError(f"{self._kind.name} does not serve mode {mode!r}")
        return Rules(self._kind, mode)

    def _check_input(
        self,
        rules: Rules,
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

    def publish(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        resident_state_length: int,
        *,
        draft_state_length: int = 0,
    ) -> PublishResult:
        """See `CacheManager.publish`."""
        state = self._leased(lease)
        if self._kind in {Kind.PURE_RECURRENT, Kind.HYBRID, Kind.HYBRID_MTP}:
            raise ContractError(f"{self._kind.name} publishes checkpoints")
        num_blocks = resident_state_length // self._tokens_per_page
        num_paired = draft_state_length // self._tokens_per_page
        if num_blocks < 1:
            raise ContractError(f"{resident_state_length} tokens hold no full block")
        if not 0 <= draft_state_length <= resident_state_length or (draft_state_length and not state.paired):
            raise ContractError(f"a draft state of {draft_state_length} tokens is not the lease's")
        _check_keys(keys, max(num_blocks, len(state.known_keys)))
        path = self._own_path(
            state, keys, num_blocks, num_paired, attempted=num_blocks > state.published_full_block_count
        )
        record = next((record for record in self._state.records if record.keys == path), None)
        lengthened = record is not None and num_paired > len(record.draft_pages)
        news = record is None or lengthened
        attempted = news or num_blocks > state.published_full_block_count
        if record is None:
            record = self._new_record(state, path)
        self._state.touch(record)
        canonical = page_ids([self._state.page_of[key] for key in path])
        if num_paired > len(record.draft_pages):
            self._pair(state, record, num_paired)
        if attempted:
            self._count(committed=news, paired=news and bool(record.draft_pages))
        self._know(state, path)
        state.published_full_block_count = max(state.published_full_block_count, num_blocks)
        return self._published(state, record, canonical, news=news)

    def _own_path(
        self, state: LeaseState, keys: NDArray[np.uint64], num_blocks: int, num_paired: int, *, attempted: bool
    ) -> Keys:
        """Return the keys to publish. Counts an attempt as refused, and raises, where they are no prefix of the lease."""
        own = keys_of(keys, max(num_blocks, len(state.known_keys)))
        parents = self._state.parents()
        chained = all(
            key not in parents or parents[key] == (own[index - 1] if index else None)
            for index, key in enumerate(own[:num_blocks])
        )
        if num_blocks > len(state.base_pages) or num_paired > len(state.draft_pages):
            problem = f"{num_blocks} blocks ({num_paired} paired) reach beyond the lease's pages"
        elif own[: len(state.known_keys)] != state.known_keys:
            problem = "the keys differ from those that the lease reused or published"
        elif not chained or len(set(own)) != len(own):
            problem = "the keys are no chain"
        else:
            return own[:num_blocks]
        self._refused += attempted
        raise ContractError(problem)

    def _new_record(self, lease: LeaseState, path: Keys) -> RecordState:
        """Record an endpoint; the lease's pages become canonical for the blocks that are new."""
        for index, key in enumerate(path):
            self._state.page_of.setdefault(key, lease.base_pages[index])
        self._last_serial += 1
        record = RecordState(self._last_serial, path)
        self._state.records.append(record)
        return record

    def _pair(self, lease: LeaseState, record: RecordState, num_paired: int) -> None:
        """Give a record the draft path of a lease: shared with other records as far as the following block is known."""
        replaced = list(record.draft_pages)
        path = []
        for index in range(num_paired):
            followed = record.keys[index : index + 2] if index + 1 < num_paired else ()
            shared = self._state.paired_draft_page(*followed) if followed else None
            path.append(lease.draft_pages[index] if shared is None else shared)
        record.draft_pages = path
        self._state.give_back([(DRAFT, page) for page in replaced if page not in path])

    def _know(self, state: LeaseState, path: Keys) -> None:
        if len(path) > len(state.known_keys):
            state.known_keys = path

    def _count(self, *, committed: bool, paired: bool) -> None:
        self._committed += committed
        self._existing += not committed
        self._paired_commits += committed and paired

    def _published(self, state: LeaseState, record: RecordState, canonical: PageIds, *, news: bool) -> PublishResult:
        while len(self._state.records) > self._max_records:
            self._state.evict(self._state.records[0])
        return PublishResult(
            PublishStatus.PUBLISHED if news else PublishStatus.EXISTING_RECORD,
            self._view(record) if record in self._state.records else None,
            canonical,
            state.published_full_block_count,
        )

    def reserve_snapshots(self, lease: CacheRequestLease, exact_length: int) -> HybridSnapshotReservation | None:
        """See `CacheManager.reserve_snapshots`."""
        state = self._leased(lease)
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
        """See `CacheManager.publish_checkpoint`."""
        state = self._leased(lease)
        self._check_reservation(state, reservation)
        if checkpoint.exact_length != state.reserved_length:
            raise ContractError(f"{state.reserved_length} tokens were reserved for, not {checkpoint.exact_length}")
        full_blocks = checkpoint.exact_length // self._tokens_per_page
        _check_keys(keys, max(full_blocks, len(state.known_keys)))
        rules = Rules(self._kind, Mode.MTP if state.paired else Mode.VANILLA)
        num_shared = rules.shared_blocks(checkpoint.exact_length, self._tokens_per_page)
        path = self._own_path(state, keys, num_shared, num_shared if state.paired else 0, attempted=True)
        record = next((record for record in self._state.records if record.checkpoint == checkpoint), None)
        news = record is None
        if news and reservation.recurrent_snapshot_slot in self._state.needed(RECURRENT):
            self._refused += 1
            raise ContractError(f"{reservation!r} holds another checkpoint already; retire it and reserve again")
        if record is None:
            record = self._new_record(state, path)
            record.checkpoint = checkpoint
            record.snapshots = dict(state.reserved_slots())
            record.whole_keys = keys_of(keys, full_blocks)
            if state.paired:
                self._pair(state, record, num_shared)
        self._state.touch(record)
        canonical = page_ids([self._state.page_of[key] for key in path])
        self._count(committed=news, paired=bool(record.draft_pages))
        self._know(state, path)
        state.published_full_block_count = max(state.published_full_block_count, num_shared)
        return self._published(state, record, canonical, news=news)

    def retire_snapshots(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
        """See `CacheManager.retire_snapshots`."""
        state = self._leased(lease)
        self._check_reservation(state, reservation)
        held = state.reserved_slots()
        state.reserved = None
        self._state.give_back(held)

    def release_restored_snapshots(self, lease: CacheRequestLease) -> None:
        """See `CacheManager.release_restored_snapshots`."""
        state = self._leased(lease)
        held = list(state.restored.items())
        state.restored = {}
        self._state.give_back(held)

    def _check_reservation(self, state: LeaseState, reservation: HybridSnapshotReservation) -> None:
        if state.reserved is None or reservation != state.reserved:
            raise ContractError(f"{reservation!r} is not the lease's")

    def clear(self) -> None:
        """See `CacheManager.clear`."""
        if self._state.leases:
            raise ContractError(f"{len(self._state.leases)} leases are out; release them first")
        while self._state.records:
            self._state.evict(self._state.records[0])
        self._state.gone.clear()


def _check_keys(keys: Any, num_blocks: int) -> None:
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64 or keys.ndim != 2 or keys.shape[1] != 2:
        raise ContractError(f"keys are {keys!r}; pass uint64[blocks, 2]")
    if len(keys) < num_blocks:
        raise ContractError(f"{len(keys)} keys for {num_blocks} full blocks; pass one for each")
