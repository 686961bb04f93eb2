"""A plan becomes a lease: look again, pin what is shared, evict what must go, take the rest."""

from __future__ import annotations

from typing import NamedTuple

from ctxcache.arguments import Int32s, Words
from ctxcache.errors import InvariantError
from ctxcache.ids import AcquireStatus
from ctxcache.jit import njit_in_place, njit_part
from ctxcache.manager import layout as c
from ctxcache.manager.draft_pages import count_paired
from ctxcache.manager.eviction import make_room
from ctxcache.manager.layout import CacheArrays, LeaseArrays
from ctxcache.manager.lease_table import LeaseTable, open_row
from ctxcache.manager.lru import keep_apart, touch, use_path_to
from ctxcache.manager.planning import PlanProof
from ctxcache.manager.pools import copy_pages, pin, take
from ctxcache.manager.results import AcquireResult, ReusePlan
from ctxcache.manager.traits import PAIRED_MODES

STALE, INSUFFICIENT = -2, -3


class LeaseTerms(NamedTuple):
    """What a lease is given. Compiled code gets it as a plain tuple, which it takes in faster, and names it again.

    Attributes:
        num_reused: leading matched blocks that it shares.
        num_paired: matched blocks that have to be paired still; 0 where drafts do not matter.
        base_demand: private base pages.
        draft_demand: private draft pages.
        record: row of the checkpoint to restore, or -1.
        serial: its serial.
        paired: 1 when it runs a paired draft.
        checkpoints: 1 when it may make checkpoints.
    """

    num_reused: int
    num_paired: int
    base_demand: int
    draft_demand: int
    record: int
    serial: int
    paired: int
    checkpoints: int


def acquire_plan(table: LeaseTable, plan: ReusePlan) -> AcquireResult:
    """Turn a plan of this manager into a lease, whole or not at all."""
    proof: PlanProof = plan._proof  # noqa: SLF001 - its maker
    matched, drafts, mode = proof.matched, proof.drafts, plan.execution_mode
    terms = LeaseTerms(
        plan.reused_base_pages.size,
        proof.num_paired,
        plan.base_page_demand,
        plan.draft_page_demand,
        proof.record,
        proof.serial,
        1 if mode in PAIRED_MODES else 0,
        1 if mode in table.traits.checkpoint_modes else 0,
    )
    table.ensure_room(terms.num_reused + terms.base_demand, drafts.size + terms.draft_demand, new_row=True)
    lease = table.next_handle()
    try:
        row = acquire_lease(table.cache, table.arrays, matched, proof.last_key, drafts, tuple(terms))
        if row >= 0:
            return AcquireResult(lease, AcquireStatus.ACQUIRED, plan)
    except BaseException:  # an interrupt, or a broken rule: the caller gets no handle, so nobody else could release it
        table.take_back(lease)
        raise
    status = AcquireStatus.STALE_PLAN if row == STALE else AcquireStatus.INSUFFICIENT_CAPACITY
    return AcquireResult(None, status, plan)


@njit_in_place
def acquire_lease(
    cache: CacheArrays, leases: LeaseArrays, matched: Int32s, last_key: Words, drafts: Int32s, given: tuple[int, ...]
) -> int:
    """Lease what a plan names; return the row, or `STALE` or `INSUFFICIENT` with nothing changed.

    `matched`, `last_key` and `drafts` are the plan's proof; `given` are `LeaseTerms`.
    """
    terms = LeaseTerms(*given)
    checkpoint = terms.record
    if checkpoint >= 0:
        if cache.serial[checkpoint] != terms.serial:
            return STALE
    elif not _still_matches(cache, matched, last_key, drafts, terms.num_paired):
        return STALE
    shared = matched[: terms.num_reused]
    if not (_fits(cache, c.BASE, shared, terms.base_demand) and _fits(cache, c.DRAFT, drafts, terms.draft_demand)):
        return INSUFFICIENT

    # Pages of the lease: base  [0, shared) the cache's, pinned  | [shared, num_base) private
    #                     draft [0, drafts) the cache's, pinned  | [drafts, num_draft) private
    num_base, num_draft = shared.size + terms.base_demand, drafts.size + terms.draft_demand
    if num_base > leases.base_pages.shape[1] or num_draft > leases.draft_pages.shape[1]:
        raise InvariantError("a lease is opened without room for its pages")
    row = open_row(cache.state, leases.fields)
    fields = leases.fields
    pin(cache, c.BASE, shared)
    copy_pages(shared, leases.base_pages[row])
    fields[c.NUM_BASE, row] = shared.size
    pin(cache, c.DRAFT, drafts)
    copy_pages(drafts, leases.draft_pages[row])
    fields[c.NUM_DRAFT, row] = drafts.size
    if checkpoint >= 0:
        fields[c.STARTED_FROM, row] = checkpoint
        fields[c.STARTED_SERIAL, row] = terms.serial % c.MODULUS
        for i in range(2):
            slot = cache.record[c.RECURRENT_SLOT + i, checkpoint]
            fields[c.RESTORED + i, row] = slot
            if slot >= 0:
                pin(cache, c.RECURRENT + i, fields[c.RESTORED + i, row : row + 1])
        touch(cache, checkpoint)
    elif matched.size > 0:
        last = matched[matched.size - 1]
        keep_apart(cache, last)
        use_path_to(cache, cache.resource[c.FIRST_RECORD, last])

    # What matched is pinned: now eviction may take whatever else is least recently used.
    if not make_room(cache, leases, (terms.base_demand, terms.draft_demand, 0, 0)):
        raise InvariantError("a demand that fits turns out not to")
    take(cache.state, cache.resource, c.BASE, leases.base_pages[row, shared.size : num_base])
    fields[c.NUM_BASE, row] = num_base
    take(cache.state, cache.resource, c.DRAFT, leases.draft_pages[row, drafts.size : num_draft])
    fields[c.NUM_DRAFT, row] = num_draft
    fields[c.PAIRED, row] = terms.paired
    fields[c.CHECKPOINTS_ALLOWED, row] = terms.checkpoints
    fields[c.KNOWN, row] = shared.size
    return row


@njit_part
def _still_matches(cache: CacheArrays, matched: Int32s, last_key: Words, drafts: Int32s, num_paired: int) -> bool:
    if matched.size == 0:
        return True
    node, last = cache.node, matched[matched.size - 1]
    if (
        cache.resource[c.CACHE_REFS, last] == 0
        or cache.key[last, 0] != last_key[0]
        or cache.key[last, 1] != last_key[1]
    ):
        return False
    # The key names the whole prefix; what may differ is which pages are canonical for it now.
    for i in range(matched.size - 1, 0, -1):
        if node[c.PARENT, matched[i]] != matched[i - 1]:
            return False
    if node[c.PARENT, matched[0]] >= 0:
        return False
    if num_paired > 0:
        if count_paired(node, matched) < num_paired:
            return False
        for i in range(drafts.size):
            if node[c.PAIR_PAGE, matched[i + 1]] != drafts[i]:
                return False
    return True


@njit_part
def _fits(cache: CacheArrays, kind: int, shared: Int32s, demand: int) -> bool:
    """Whether a demand is feasible once the shared pages cannot be evicted."""
    spare = cache.state[c.FREE + kind] + cache.state[c.IDLE + kind] - demand
    if spare >= shared.size:
        return True
    offset, resource = cache.state[c.OFFSET + kind], cache.resource
    for page in shared:
        if resource[c.LEASE_REFS, offset + page] == 0:
            spare -= 1
    return bool(spare >= 0)
