"""Leases of the plain-Python manager: acquire, grow, release."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import ContractError
from ctxcache.ids import AcquireStatus, Hash128, ResourceType
from ctxcache.manager.results import NO_GROWTH, AcquireResult, CacheRequestLease, LeaseGrowth, PageGrowth, ReusePlan
from ctxcache.testing.reference.plans import Rules, hit_record, page_ids
from ctxcache.testing.reference.state import BASE, DRAFT, Demand, Keys, LeaseState, RecordState, slots
from ctxcache.testing.reference.views import ReferenceViews

NO_SHARE: dict[ResourceType, set[int]] = {}
"""A demand that shares nothing."""


class ReferenceLeases(ReferenceViews):
    """How a `ReferenceManager` gives out pages and takes them back."""

    def acquire(self, plan: ReusePlan) -> AcquireResult:
        """See `CacheManager.acquire`."""
        if plan._owner is not self:  # noqa: SLF001 - the plan keeps it for its manager
            raise ContractError("the plan is another manager's; plan again with this one")
        rules = Rules(self._kind, plan.execution_mode)
        keys = _proof_keys(plan)
        record = self._record_behind(rules, plan, keys)
        if not self._still_there(plan, keys, record):
            return AcquireResult(None, AcquireStatus.STALE_PLAN, plan)
        shared = {
            BASE: set(plan.reused_base_pages.tolist()),
            DRAFT: set(plan.reused_draft_pages.tolist()),
        }
        demand = {BASE: plan.base_page_demand, DRAFT: plan.draft_page_demand}
        if not self._state.feasible(demand, shared):
            return AcquireResult(None, AcquireStatus.INSUFFICIENT_CAPACITY, plan)
        if record is not None:
            self._state.touch(record)
        row = self._free_rows.pop() if self._free_rows else len(self._generations)
        if row == len(self._generations):
            self._generations.append(0)
        state = LeaseState(
            generation=self._generations[row],
            paired=rules.paired,
            may_publish_checkpoints=rules.checkpoints and not rules.always_cold,
            base_pages=plan.reused_base_pages.tolist(),
            draft_pages=plan.reused_draft_pages.tolist(),
            known_keys=keys[: plan.reused_base_pages.size],
            restored=dict(slots(plan.recurrent_snapshot_slot, plan.partial_kv_snapshot_slot)),
        )
        self._state.leases[row] = state
        self._append(state, demand)
        return AcquireResult(CacheRequestLease(self, row, state.generation), AcquireStatus.ACQUIRED, plan)

    def _record_behind(self, rules: Rules, plan: ReusePlan, keys: Keys) -> RecordState | None:
        """Return the record that a plan hits, as the cache is now."""
        if plan.exact_checkpoint_length:
            serial = plan._proof[0]  # noqa: SLF001
            return next((record for record in self._state.records if record.serial == serial), None)
        return hit_record(self._state, keys, paired=rules.paired)

    def _still_there(self, plan: ReusePlan, keys: Keys, record: RecordState | None) -> bool:
        if [self._state.page_of.get(key) for key in keys] != plan.matched_base_pages.tolist():
            return False
        if record is None:
            return plan.matched_token_length == 0
        if record.draft_pages[: plan.reused_draft_pages.size] != plan.reused_draft_pages.tolist():
            return False
        snapshots = dict(slots(plan.recurrent_snapshot_slot, plan.partial_kv_snapshot_slot))
        return not plan.exact_checkpoint_length or record.snapshots == snapshots

    def _append(self, lease: LeaseState, demand: Demand) -> None:
        """Append private pages to a lease; the demand has to be feasible."""
        self._state.evict_for(demand)
        lease.base_pages += self._state.take(BASE, demand.get(BASE, 0))
        lease.draft_pages += self._state.take(DRAFT, demand.get(DRAFT, 0))

    def grow(self, lease: CacheRequestLease, base_pages: int = 0, draft_pages: int = 0) -> bool:
        """See `CacheManager.grow`."""
        state = self._leased(lease)
        if base_pages < 0 or draft_pages < 0:
            raise ContractError(f"cannot grow by {base_pages} base and {draft_pages} draft pages; pass at least 0")
        if draft_pages and not state.paired:
            raise ContractError("the lease runs no paired draft; pass draft_pages=0")
        demand = {BASE: base_pages, DRAFT: draft_pages}
        if not self._state.feasible(demand, NO_SHARE):
            return False
        self._append(state, demand)
        return True

    def grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> LeaseGrowth | None:
        """See `CacheManager.grow_leases`."""
        wanted = self._missing_pages(lease_rows, base_page_targets, draft_page_targets)
        total = {kind: sum(demand[kind] for _, demand in wanted) for kind in (BASE, DRAFT)}
        if not any(total.values()):
            return NO_GROWTH
        if not self._state.feasible(total, NO_SHARE):
            return None
        self._state.evict_for(total)
        before = [(len(state.base_pages), len(state.draft_pages)) for state, _ in wanted]
        for state, demand in wanted:
            self._append(state, demand)
        return LeaseGrowth(
            _growth([(first[0], state.base_pages) for first, (state, _) in zip(before, wanted, strict=True)]),
            _growth([(first[1], state.draft_pages) for first, (state, _) in zip(before, wanted, strict=True)]),
        )

    def can_grow_leases(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]:
        """See `CacheManager.can_grow_leases`."""
        granted = {BASE: 0, DRAFT: 0}
        answers = []
        for _, demand in self._missing_pages(lease_rows, base_page_targets, draft_page_targets):
            with_this = {kind: granted[kind] + demand[kind] for kind in granted}
            answers.append(self._state.feasible(with_this, NO_SHARE))
            if answers[-1]:
                granted = with_this
        return np.array(answers, dtype=np.bool_)

    def _missing_pages(
        self,
        lease_rows: NDArray[np.int32],
        base_page_targets: NDArray[np.int32],
        draft_page_targets: NDArray[np.int32] | None,
    ) -> list[tuple[LeaseState, Demand]]:
        draft_targets = np.zeros_like(lease_rows) if draft_page_targets is None else draft_page_targets
        if not len(lease_rows) == len(base_page_targets) == len(draft_targets):
            raise ContractError("lease rows and page targets differ in length; pass one target a lease")
        wanted = []
        for row, base, draft in zip(
            lease_rows.tolist(), base_page_targets.tolist(), draft_targets.tolist(), strict=True
        ):
            if row not in self._state.leases:
                raise ContractError(f"row {row} is no live lease's")
            state = self._state.leases[row]
            if draft > len(state.draft_pages) and not state.paired:
                raise ContractError(f"the lease of row {row} runs no paired draft; pass a draft target of 0")
            wanted.append(
                (state, {BASE: max(0, base - len(state.base_pages)), DRAFT: max(0, draft - len(state.draft_pages))})
            )
        return wanted

    def release(self, lease: CacheRequestLease) -> None:
        """See `CacheManager.release`."""
        state = self._leased(lease)
        del self._state.leases[lease.row]
        self._generations[lease.row] += 1
        self._free_rows.append(lease.row)
        self._state.give_back(state.held())


def _growth(leases: list[tuple[int, list[int]]]) -> PageGrowth:
    """Say what was appended to each lease, given how many pages it had before."""
    grown = [(index, first, pages[first:]) for index, (first, pages) in enumerate(leases) if len(pages) > first]
    return PageGrowth(
        page_ids([index for index, _, _ in grown]),
        page_ids([first for _, first, _ in grown]),
        page_ids([len(pages) for _, _, pages in grown]),
        page_ids([page for _, _, pages in grown for page in pages]),
    )


def _proof_keys(plan: ReusePlan) -> Keys:
    """Return the keys of the blocks that a plan matched."""
    words = plan._proof[1:]  # noqa: SLF001
    return tuple(Hash128(*words[at : at + 2]) for at in range(0, len(words), 2))
