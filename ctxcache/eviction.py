"""What must go so that a demand fits: the least recently used records that free something lacking, and no more."""

from __future__ import annotations

import numpy as np

from ctxcache.core import (
    ACTIVE,
    BASE,
    DRAFT,
    ENDPOINT,
    EVICTED,
    EXACT_LENGTH,
    EXTENDED_RECORDS,
    FIRST_CHILD,
    FREE,
    GHOSTS,
    HAS_CHECKPOINTS,
    IDLE,
    LAST_DRAFT_PAGE,
    MAX_RECORDS,
    NEWER,
    NUM_PAIRED_BLOCKS,
    NUM_RECORDS,
    NUM_RESOURCE_KINDS,
    OFFSET,
    OLDEST_RECORD,
    OWNER,
    PAIR_PAGE,
    PARENT,
    PARTIAL,
    PARTIAL_SLOT,
    QUEUE_SIZE,
    RECURRENT,
    RECURRENT_SLOT,
    USED,
    Core,
)
from ctxcache.index import forget_newest, remove, unlink
from ctxcache.jit import njit
from ctxcache.pairs import detach_pairs, last_paired_block
from ctxcache.pools import let_go
from ctxcache.records import drop_record, leave_endpoint, leave_queue, refresh

_GHOST_MASK = np.uint64(GHOSTS - 1)


@njit
def evict_record(core: Core, gone: int) -> None:
    """Take a record out, and let go of what nothing else needs: see `CacheManager` for the order."""
    core.state[EVICTED] += 1
    for kind in range(core.queue.shape[0] // 2):
        leave_queue(core, kind, gone)
    forget_newest(core, gone)
    block = core.record[ENDPOINT, gone]
    if core.state[EXTENDED_RECORDS]:
        if core.record[NUM_PAIRED_BLOCKS, gone] > 0:
            detach_pairs(core, gone)
        if core.state[HAS_CHECKPOINTS]:
            _drop_checkpoint(core, gone)
    leave_endpoint(core, gone)
    drop_record(core, gone)
    while block >= 0 and core.node[FIRST_CHILD, block] < 0 and core.resource[OWNER, block] < 0:
        parent = core.node[PARENT, block]
        unlink(core, block)
        let_go(core, BASE, block)
        block = parent
    if block >= 0 and core.resource[OWNER, block] >= 0:
        refresh(core, BASE, core.resource[OWNER, block])


@njit
def _drop_checkpoint(core: Core, gone: int) -> None:
    low = core.exact_key[gone, 1]
    core.ghost[low & _GHOST_MASK] = low
    remove(core.exact_key, core.exact_slot, gone)
    core.record[EXACT_LENGTH, gone] = 0
    for kind in (RECURRENT, PARTIAL):
        row = RECURRENT_SLOT if kind == RECURRENT else PARTIAL_SLOT
        slot = core.record[row, gone]
        if slot >= 0:
            core.record[row, gone] = -1
            core.resource[OWNER, core.state[OFFSET + kind] + slot] = -1
            let_go(core, kind, slot)


@njit
def is_feasible(core: Core, need: tuple[int, int, int, int]) -> bool:
    """Whether so many of each kind could be free at once."""
    for kind in range(NUM_RESOURCE_KINDS):  # noqa: SIM110 - compiled code has no generators
        if need[kind] > core.state[FREE + kind] + core.state[IDLE + kind]:
            return False
    return True


@njit
def make_room(core: Core, need: tuple[int, int, int, int]) -> None:
    """Evict until so many of each kind are free. The demand must be feasible."""
    state = core.state
    while True:
        lacking = False
        victim = -1
        for kind in range(NUM_RESOURCE_KINDS):
            if need[kind] <= state[FREE + kind]:
                continue
            lacking = True
            if state[QUEUE_SIZE + kind] > 0:
                oldest = core.queue[2 * kind, 0]
                if victim < 0 or core.stamp[USED, oldest] < core.stamp[USED, victim]:
                    victim = oldest
        if not lacking:
            return
        if victim < 0:
            victim = _oldest_in_the_way(core, need)
        evict_record(core, victim)


@njit
def _oldest_in_the_way(core: Core, need: tuple[int, int, int, int]) -> int:
    """Return the least recently used record that holds an unleased page of a lacking kind together with others."""
    record = core.state[OLDEST_RECORD]
    while record >= 0:
        if need[BASE] > core.state[FREE + BASE]:
            block = core.record[ENDPOINT, record]
            while block >= 0:
                if core.resource[ACTIVE, block] == 0:
                    return record
                block = core.node[PARENT, block]
        if need[DRAFT] > core.state[FREE + DRAFT] and core.record[NUM_PAIRED_BLOCKS, record] > 0:
            offset = core.state[OFFSET + DRAFT]
            page = core.record[LAST_DRAFT_PAGE, record]
            block = last_paired_block(core, record)
            while page >= 0:
                if core.resource[ACTIVE, offset + page] == 0:
                    return record
                page = core.node[PAIR_PAGE, block]
                block = core.node[PARENT, block]
        record = core.record[NEWER, record]
    return record


@njit
def enforce_record_limit(core: Core) -> None:
    """Evict the least recently used records beyond the limit, whoever leases their pages."""
    while core.state[NUM_RECORDS] > core.state[MAX_RECORDS]:
        evict_record(core, core.state[OLDEST_RECORD])


@njit
def evict_everything(core: Core) -> None:
    """Evict every record, the least recently used first, and forget lately evicted keys."""
    while core.state[NUM_RECORDS] > 0:
        evict_record(core, core.state[OLDEST_RECORD])
    core.ghost[:] = np.uint64(0)
