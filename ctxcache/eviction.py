"""What must go so that a demand fits: the least recently used records that free something lacking, and no more."""

from __future__ import annotations

import numpy as np

from ctxcache.core import (
    ACTIVE,
    BASE,
    CACHED,
    DRAFT,
    ENDPOINT,
    EVICTED,
    EXTENDED_RECORDS,
    FIRST_CHILD,
    FREE,
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
    RECURRENT,
    RECURRENT_SLOT,
    Core,
    Int64s,
)
from ctxcache.index import forget_newest, note_ghost, remove, unlink
from ctxcache.jit import njit_in_place
from ctxcache.pairs import detach_pairs, last_paired_block
from ctxcache.pools import let_go, reclaim_if_idle
from ctxcache.records import drop_record, leave_endpoint, leave_queue, oldest_ripe, record_of, refresh


@njit_in_place
def evict_record(core: Core, gone: int) -> None:
    """Take a record out, and let go of what nothing else needs: see `CacheManager` for the order."""
    state, node, resource, record = core.state, core.node, core.resource, core.record
    state[EVICTED] += 1
    for kind in range(core.queue.shape[0]):
        leave_queue(state, core.queue, record, kind, gone)
    block = record[ENDPOINT, gone]
    forget_newest(node, block, gone)
    if state[EXTENDED_RECORDS]:
        if record[NUM_PAIRED_BLOCKS, gone] > 0:
            detach_pairs(core, gone)
        if state[HAS_CHECKPOINTS]:
            _drop_checkpoint(core, gone)
    leave_endpoint(state, resource, record, gone)
    drop_record(state, record, core.serial, gone)
    while block >= 0 and node[FIRST_CHILD, block] < 0 and resource[OWNER, block] < 0:
        unlink(state, node, block)
        note_ghost(core.ghost, core.key[block, 1])
        remove(core.key, core.slot, block)
        resource[CACHED, block] = 0
        reclaim_if_idle(state, resource, BASE, block)
        block = node[PARENT, block]
    if block >= 0 and resource[OWNER, block] >= 0:
        refresh(core, BASE, resource[OWNER, block])


@njit_in_place
def _drop_checkpoint(core: Core, gone: int) -> None:
    note_ghost(core.ghost, core.exact_key[gone, 1])
    remove(core.exact_key, core.exact_slot, gone)
    for kind in (RECURRENT, PARTIAL):
        row = RECURRENT_SLOT if kind == RECURRENT else PARTIAL_SLOT
        slot = core.record[row, gone]
        if slot >= 0:
            core.record[row, gone] = -1
            core.resource[OWNER, core.state[OFFSET + kind] + slot] = -1
            let_go(core, kind, slot)


@njit_in_place
def is_feasible(state: Int64s, need: tuple[int, int, int, int]) -> bool:
    """Whether so many of each kind could be free at once."""
    for kind in range(NUM_RESOURCE_KINDS):  # noqa: SIM110 - compiled code has no generators
        if need[kind] > state[FREE + kind] + state[IDLE + kind]:
            return False
    return True


@njit_in_place
def make_room(core: Core, need: tuple[int, int, int, int]) -> None:
    """Evict until so many of each kind are free. The demand must be feasible."""
    state = core.state
    while True:
        lacking = False
        oldest = -1
        for kind in range(NUM_RESOURCE_KINDS):
            if need[kind] <= state[FREE + kind]:
                continue
            lacking = True
            entry = oldest_ripe(state, core.queue, kind)
            if entry >= 0 and (oldest < 0 or entry < oldest):
                oldest = entry
        if not lacking:
            return
        evict_record(core, record_of(oldest) if oldest >= 0 else _oldest_in_the_way(core, need))


@njit_in_place
def _oldest_in_the_way(core: Core, need: tuple[int, int, int, int]) -> int:
    """Return the least recently used record that holds an unleased page of a lacking kind together with others."""
    record = core.state[OLDEST_RECORD]
    while record >= 0:
        if need[BASE] > core.state[FREE + BASE]:
            block = core.record[ENDPOINT, record]
            while block >= 0:
                if core.resource[ACTIVE, block] == 0:
                    return int(record)
                block = core.node[PARENT, block]
        if need[DRAFT] > core.state[FREE + DRAFT] and core.record[NUM_PAIRED_BLOCKS, record] > 0:
            offset = core.state[OFFSET + DRAFT]
            page = core.record[LAST_DRAFT_PAGE, record]
            block = last_paired_block(core.node, core.record, record)
            while page >= 0:
                if core.resource[ACTIVE, offset + page] == 0:
                    return int(record)
                page = core.node[PAIR_PAGE, block]
                block = core.node[PARENT, block]
        record = core.record[NEWER, record]
    return int(record)


@njit_in_place
def enforce_record_limit(core: Core) -> None:
    """Evict the least recently used records beyond the limit, whoever leases their pages."""
    while core.state[NUM_RECORDS] > core.state[MAX_RECORDS]:
        evict_record(core, core.state[OLDEST_RECORD])


@njit_in_place
def evict_everything(core: Core) -> None:
    """Evict every record, the least recently used first, and forget lately evicted keys."""
    while core.state[NUM_RECORDS] > 0:
        evict_record(core, core.state[OLDEST_RECORD])
    for i in range(core.ghost.size):
        core.ghost[i] = np.uint64(0)
