"""Publication's Python side: what callers may not do, in words; then one call of compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import as_integer, as_keys, describe
from ctxcache.errors import ContractError, InvariantError
from ctxcache.ids import RECURRENT_KINDS, ContextCacheDeploymentKind, PublishStatus
from ctxcache.manager.acquire import drop_slots, reserve_slots
from ctxcache.manager.commit import BEYOND_PAGES, FOUND, NO_CHAIN, NOT_OWN_PREFIX, SLOT_TAKEN, publish_endpoint
from ctxcache.manager.layout import (
    CHECKPOINTS_ALLOWED,
    KNOWN,
    NUM_BASE,
    PAIRED,
    PUBLISHED,
    RESERVED,
    RESERVED_LENGTH,
    RESTORED,
    Core,
)
from ctxcache.manager.lease_table import LeaseArena
from ctxcache.manager.planning import check_exact_keys
from ctxcache.manager.records import RecordList
from ctxcache.manager.results import CacheRequestLease, HybridCheckpointKey, HybridSnapshotReservation, PublishResult

_REFUSALS = {
    NOT_OWN_PREFIX: "the keys differ from those of blocks that the lease reused or published; pass its own sequence's keys",
    NO_CHAIN: "the keys are not one chain behind what is published; hash the whole sequence in one go",
    BEYOND_PAGES: "that is more than the lease has pages; publish only what lies within them",
    SLOT_TAKEN: "the reserved slots hold a checkpoint published before; retire them and reserve again",
}
_NO_EXACT = np.zeros(4, np.uint64)


def _check_reservation_value(reservation: HybridSnapshotReservation) -> None:
    """Check that a reservation names slots by integers, so that it compares."""
    if not isinstance(reservation, HybridSnapshotReservation):
        raise ContractError(f"reservation is {describe(reservation)}; pass what reserve_snapshots returned")
    as_integer("recurrent_snapshot_slot", reservation.recurrent_snapshot_slot)
    if reservation.partial_kv_snapshot_slot is not None:
        as_integer("partial_kv_snapshot_slot", reservation.partial_kv_snapshot_slot)


class Publisher:
    """Makes leases' ready state reusable: full blocks, or checkpoints with their snapshot slots."""

    def __init__(
        self,
        core: Core,
        arena: LeaseArena,
        records: RecordList,
        kind: ContextCacheDeploymentKind,
        tokens_per_page: int,
    ) -> None:
        self._core = core
        self._arena = arena
        self._records = records
        self._kind = kind
        self._page_tokens = tokens_per_page
        self._has_checkpoints = kind in RECURRENT_KINDS
        self._has_pages = kind is not ContextCacheDeploymentKind.PURE_RECURRENT
        self._mtp = kind is ContextCacheDeploymentKind.HYBRID_MTP

    def publish(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        resident_state_length: int,
        draft_state_length: int,
    ) -> PublishResult:
        """See `CacheManager.publish`."""
        if self._has_checkpoints:
            raise ContractError(f"a {self._kind.name} deployment publishes checkpoints; call publish_checkpoint")
        row = self._arena.row_of(lease)
        resident = as_integer("resident_state_length", resident_state_length)
        draft = as_integer("draft_state_length", draft_state_length)
        if draft and self._arena.arrays.lease[PAIRED, row] != 1:
            raise ContractError(f"draft_state_length is {draft}, but the lease runs no paired draft; leave it 0")
        if draft > resident:
            raise ContractError(
                f"draft_state_length is {draft}, more than the {resident} resident tokens; pass at most these"
            )
        blocks = resident // self._page_tokens
        if blocks == 0:
            raise ContractError(
                f"{resident} resident tokens hold no full block of {self._page_tokens}; publish when there is one"
            )
        return self._publish(row, keys, blocks, draft // self._page_tokens, 0, _NO_EXACT)

    def _publish(
        self,
        row: int,
        keys: NDArray[np.uint64],
        blocks: int,
        draft_blocks: int,
        exact_length: int,
        exact: NDArray[np.uint64],
    ) -> PublishResult:
        fields = self._arena.arrays.lease
        keys = as_keys(keys, max(blocks, int(fields[KNOWN, row])))
        offer = np.array((row, blocks, draft_blocks, exact_length), np.int64)
        path = np.empty(blocks, np.int32)
        answer, record, serial = publish_endpoint(self._core, self._arena.arrays, keys, exact, offer, path)
        if answer < 0:
            if answer not in _REFUSALS:
                raise InvariantError(
                    f"publication of {blocks} blocks by lease row {row} found a page that is not its own"
                )
            raise ContractError(f"publication of {blocks} blocks refused: {_REFUSALS[answer]}")
        kept = self._core.serial[record] == serial
        return PublishResult(
            status=PublishStatus.EXISTING_RECORD if answer == FOUND else PublishStatus.PUBLISHED,
            record=self._records.view(record) if kept else None,
            canonical_base_pages=path,
            published_full_block_count=int(fields[PUBLISHED, row]),
        )

    def reserve_snapshots(self, lease: CacheRequestLease, exact_length: int) -> HybridSnapshotReservation | None:
        """See `CacheManager.reserve_snapshots`."""
        row = self._checkpoint_row(lease)
        fields = self._arena.arrays.lease
        length = as_integer("exact_length", exact_length, 1)
        if fields[RESERVED, row] >= 0:
            raise ContractError("the lease holds a reservation already; publish and retire it first")
        if self._has_pages and length > fields[NUM_BASE, row] * self._page_tokens:
            raise ContractError(f"exact_length is {length}, beyond the lease's {int(fields[NUM_BASE, row])} pages")
        needs_partial = self._has_pages and (self._mtp or length % self._page_tokens != 0)
        if not reserve_slots(self._core, self._arena.arrays, row, length, int(needs_partial)):
            return None
        recurrent, partial = (int(slot) for slot in fields[RESERVED : RESERVED + 2, row])
        return HybridSnapshotReservation(recurrent, partial if needs_partial else None)

    def publish_checkpoint(
        self,
        lease: CacheRequestLease,
        keys: NDArray[np.uint64],
        checkpoint: HybridCheckpointKey,
        reservation: HybridSnapshotReservation,
    ) -> PublishResult:
        """See `CacheManager.publish_checkpoint`."""
        row = self._checkpoint_row(lease)
        self._check_reservation(row, reservation)
        (checkpoint,) = check_exact_keys((checkpoint,))
        length = checkpoint.exact_length
        if length != self._arena.arrays.lease[RESERVED_LENGTH, row]:
            reserved = int(self._arena.arrays.lease[RESERVED_LENGTH, row])
            raise ContractError(
                f"the checkpoint's exact length is {length}, but the slots were reserved for {reserved}"
            )
        full_blocks = length // self._page_tokens
        keys = as_keys(keys, full_blocks)
        digest = checkpoint.exact_prefix_digest
        anchor = keys[full_blocks - 1] if full_blocks else (0, 0)
        exact = np.array((digest.hi, digest.lo, *anchor), np.uint64)
        shared = 0
        if self._has_pages:
            shared = (length - 1) // self._page_tokens if self._mtp else full_blocks
        return self._publish(row, keys, shared, shared if self._mtp else 0, length, exact)

    def retire_snapshots(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
        """See `CacheManager.retire_snapshots`."""
        row = self._arena.row_of(lease)
        self._check_reservation(row, reservation)
        drop_slots(self._core, self._arena.arrays.lease, row, RESERVED)

    def release_restored_snapshots(self, lease: CacheRequestLease) -> None:
        """See `CacheManager.release_restored_snapshots`."""
        drop_slots(self._core, self._arena.arrays.lease, self._arena.row_of(lease), RESTORED)

    def _checkpoint_row(self, lease: CacheRequestLease) -> int:
        row = self._arena.row_of(lease)
        if self._arena.arrays.lease[CHECKPOINTS_ALLOWED, row] != 1:
            raise ContractError(
                f"this lease of a {self._kind.name} deployment makes no checkpoints; its state is not captured"
            )
        return row

    def _check_reservation(self, row: int, reservation: HybridSnapshotReservation) -> None:
        _check_reservation_value(reservation)
        recurrent, partial = (int(slot) for slot in self._arena.arrays.lease[RESERVED : RESERVED + 2, row])
        held = HybridSnapshotReservation(recurrent, partial if partial >= 0 else None) if recurrent >= 0 else None
        if reservation != held or held is None:
            raise ContractError(
                f"{reservation!r} is not what the lease holds ({held!r}); pass its own reservation, once"
            )
