"""Leases of the plain-Python manager: how pages are given out and taken back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxcache.errors import ContractError
from ctxcache.manager.results import NO_GROWTH, LeaseGrowth, PageGrowth, ReusePlan
from ctxcache.testing.reference.plans import Proof, Rules, hit_record, page_ids
from ctxcache.testing.reference.state import (
    BASE,
    DRAFT,
    NO_SHARE,
    Demand,
    LeaseState,
    RecordState,
    ReferenceState,
    slots,
)


def record_behind(state: ReferenceState, rules: Rules, plan: ReusePlan) -> RecordState | None:
    """Return the record that a plan hits, as the cache is now."""
    proof: Proof = plan._proof  # noqa: SLF001 - this manager made it
    if plan.exact_checkpoint_length:
        return next((record for record in state.records if record.serial == proof.serial), None)
    return hit_record(state, proof.keys, paired=rules.paired)


def still_there(state: ReferenceState, plan: ReusePlan, record: RecordState | None) -> bool:
    """Say whether what a plan matched is all there on the same pages, given the record that it hits now."""
    proof: Proof = plan._proof  # noqa: SLF001
    if [state.page_of.get(key) for key in proof.keys] != plan.matched_base_pages.tolist():
        return False
    if record is None:
        return plan.matched_token_length == 0
    if record.draft_pages[: plan.reused_draft_pages.size] != plan.reused_draft_pages.tolist():
        return False
    snapshots = dict(slots(plan.recurrent_snapshot_slot, plan.partial_kv_snapshot_slot))
    return not plan.exact_checkpoint_length or record.snapshots == snapshots


def open_lease(state: ReferenceState, rules: Rules, plan: ReusePlan) -> int:
    """Give a plan that holds a lease, with all its pages; return its row. The demand has to be feasible."""
    row = state.free_rows.pop() if state.free_rows else len(state.generations)
    if row == len(state.generations):
        state.generations.append(0)
    proof: Proof = plan._proof  # noqa: SLF001
    lease = LeaseState(
        generation=state.generations[row],
        paired=rules.paired,
        may_publish_checkpoints=rules.checkpoints and not rules.always_cold,
        base_pages=plan.reused_base_pages.tolist(),
        draft_pages=plan.reused_draft_pages.tolist(),
        known_keys=proof.keys[: plan.reused_base_pages.size],
        started_serial=proof.serial,
        restored=dict(slots(plan.recurrent_snapshot_slot, plan.partial_kv_snapshot_slot)),
    )
    state.leases[row] = lease
    append(state, lease, {BASE: plan.base_page_demand, DRAFT: plan.draft_page_demand})
    return row


def close_lease(state: ReferenceState, row: int) -> None:
    """Take a row's lease back, with everything that it holds."""
    lease = state.leases.pop(row)
    state.generations[row] += 1
    state.free_rows.append(row)
    state.give_back(lease.held())


def append(state: ReferenceState, lease: LeaseState, demand: Demand) -> None:
    """Append private pages to a lease; the demand has to be feasible."""
    state.evict_for(demand)
    lease.base_pages += state.take(BASE, demand.get(BASE, 0))
    lease.draft_pages += state.take(DRAFT, demand.get(DRAFT, 0))


def missing_pages(
    state: ReferenceState,
    lease_rows: NDArray[np.int32],
    base_page_targets: NDArray[np.int32],
    draft_page_targets: NDArray[np.int32] | None,
) -> list[tuple[LeaseState, Demand]]:
    """Return the leases of these rows, and what each lacks to its targets."""
    draft_targets = np.zeros_like(lease_rows) if draft_page_targets is None else draft_page_targets
    if not len(lease_rows) == len(base_page_targets) == len(draft_targets):
        raise ContractError("lease rows and page targets differ in length; pass one target a lease")
    wanted = []
    for row, base, draft in zip(lease_rows.tolist(), base_page_targets.tolist(), draft_targets.tolist(), strict=True):
        if row not in state.leases:
            raise ContractError(f"row {row} is no live lease's")
        lease = state.leases[row]
        if draft > len(lease.draft_pages) and not lease.paired:
            raise ContractError(f"the lease of row {row} runs no paired draft; pass a draft target of 0")
        wanted.append(
            (lease, {BASE: max(0, base - len(lease.base_pages)), DRAFT: max(0, draft - len(lease.draft_pages))})
        )
    return wanted


def grow_all(state: ReferenceState, wanted: list[tuple[LeaseState, Demand]]) -> LeaseGrowth | None:
    """Give each lease what it lacks, or none of them anything (`None`)."""
    total = {kind: sum(demand[kind] for _, demand in wanted) for kind in (BASE, DRAFT)}
    if not any(total.values()):
        return NO_GROWTH
    if not state.feasible(total, NO_SHARE):
        return None
    state.evict_for(total)
    before = [(len(lease.base_pages), len(lease.draft_pages)) for lease, _ in wanted]
    for lease, demand in wanted:
        append(state, lease, demand)
    return LeaseGrowth(
        _growth([(first[0], lease.base_pages) for first, (lease, _) in zip(before, wanted, strict=True)]),
        _growth([(first[1], lease.draft_pages) for first, (lease, _) in zip(before, wanted, strict=True)]),
    )


def _growth(leases: list[tuple[int, list[int]]]) -> PageGrowth:
    """Say what was appended to each lease, given how many pages it had before."""
    grown = [(index, first, pages[first:]) for index, (first, pages) in enumerate(leases) if len(pages) > first]
    return PageGrowth(
        page_ids([index for index, _, _ in grown]),
        page_ids([first for _, first, _ in grown]),
        page_ids([len(pages) for _, _, pages in grown]),
        page_ids([page for _, _, pages in grown for page in pages]),
    )
