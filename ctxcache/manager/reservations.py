"""Snapshot slots that leases hold: reserved for a capture, published with it, retired; and those they were restored from."""

from __future__ import annotations

import numpy as np

from ctxcache.arguments import Words, as_integer, as_keys, describe
from ctxcache.errors import ContractError, InvariantError
from ctxcache.jit import njit_in_place
from ctxcache.manager import layout as c
from ctxcache.manager.checkpoints import check_exact_keys
from ctxcache.manager.eviction import make_room
from ctxcache.manager.layout import CacheArrays, LeaseArrays
from ctxcache.manager.lease_table import LeaseTable, check_row, drop_slots
from ctxcache.manager.pools import take
from ctxcache.manager.publish import Offer, publish_offer
from ctxcache.manager.record_views import RecordViews
from ctxcache.manager.results import CacheRequestLease, HybridCheckpointKey, HybridSnapshotReservation, PublishResult


def reserve_snapshots(
    table: LeaseTable, lease: CacheRequestLease, exact_length: int
) -> HybridSnapshotReservation | None:
    """Take the slots for one capture at so many tokens; `None` under pressure."""
    row, fields, traits = _checkpoint_row(table, lease), table.arrays.fields, table.traits
    length = as_integer("exact_length", exact_length, 1)
    if fields[c.RESERVED, row] >= 0:
        raise ContractError("the lease holds a reservation already; publish and retire it first")
    if traits.has_pages and length > fields[c.NUM_BASE, row] * traits.tokens_per_page:
        raise ContractError(f"exact_length is {length}, beyond the lease's {int(fields[c.NUM_BASE, row])} pages")
    # A partial page is copied: the last page where the length ends within it, and the boundary page of MTP always.
    needs_partial = traits.has_pages and (traits.is_mtp or length % traits.tokens_per_page != 0)
    if not reserve_slots(table.cache, table.arrays, row, length, int(needs_partial)):
        return None
    return _held_by(table, row)


@njit_in_place
def reserve_slots(cache: CacheArrays, leases: LeaseArrays, row: int, exact_length: int, num_partial: int) -> bool:
    """Take a recurrent slot and `num_partial` (0 or 1) partial-KV slots; `False` and nothing changed when it cannot be."""
    check_row(leases, row)
    fields = leases.fields
    if fields[c.RESERVED, row] >= 0 or fields[c.RESERVED + 1, row] >= 0:
        raise InvariantError("slots are reserved for a lease that has reserved some")
    if not make_room(cache, leases, (0, 0, 1, num_partial)):
        return False
    take(cache.state, cache.resource, c.RECURRENT, fields[c.RESERVED, row : row + 1])
    take(cache.state, cache.resource, c.PARTIAL, fields[c.RESERVED + 1, row : row + num_partial])
    fields[c.RESERVED_LENGTH, row] = exact_length
    return True


def publish_checkpoint(
    table: LeaseTable,
    records: RecordViews,
    lease: CacheRequestLease,
    keys: Words,
    checkpoint: HybridCheckpointKey,
    reservation: HybridSnapshotReservation,
) -> PublishResult:
    """Publish the state in the reserved slots, with the full blocks that it shares."""
    row, traits = _checkpoint_row(table, lease), table.traits
    _check_reservation(table, row, reservation)
    (checkpoint,) = check_exact_keys((checkpoint,))
    length, reserved = checkpoint.exact_length, int(table.arrays.fields[c.RESERVED_LENGTH, row])
    if length != reserved:
        raise ContractError(f"the checkpoint's exact length is {length}, but the slots were reserved for {reserved}")
    full_blocks = length // traits.tokens_per_page
    keys = as_keys(keys, full_blocks)
    digest = checkpoint.exact_prefix_digest
    anchor = keys[full_blocks - 1] if full_blocks else (0, 0)
    exact = np.array((digest.hi, digest.lo, *anchor), np.uint64)
    # Tokens of the state: [0, shared blocks) in pages that all may share | the rest in the partial snapshot, if any.
    # With MTP the token at the boundary is always in the rest.
    shared = 0
    if traits.has_pages:
        shared = (length - 1) // traits.tokens_per_page if traits.is_mtp else full_blocks
    return publish_offer(table, records, keys, Offer(row, shared, shared if traits.is_mtp else 0, length, 0), exact)


def retire_snapshots(table: LeaseTable, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None:
    """End the lease's hold on its reserved slots."""
    row = table.row_of(lease)
    _check_reservation(table, row, reservation)
    drop_slots(table.cache, table.arrays.fields, row, c.RESERVED)


def _checkpoint_row(table: LeaseTable, lease: CacheRequestLease) -> int:
    row = table.row_of(lease)
    if table.arrays.fields[c.CHECKPOINTS_ALLOWED, row] != 1:
        raise ContractError(
            f"this lease of a {table.traits.kind.name} deployment makes no checkpoints; its state is not captured"
        )
    return row


def _held_by(table: LeaseTable, row: int) -> HybridSnapshotReservation | None:
    recurrent, partial = (int(slot) for slot in table.arrays.fields[c.RESERVED : c.RESERVED + 2, row])
    return HybridSnapshotReservation(recurrent, partial if partial >= 0 else None) if recurrent >= 0 else None


def _check_reservation(table: LeaseTable, row: int, reservation: HybridSnapshotReservation) -> None:
    """Check that a reservation is the lease's; slots are named by integers, so that it compares."""
    if not isinstance(reservation, HybridSnapshotReservation):
        raise ContractError(f"reservation is {describe(reservation)}; pass what reserve_snapshots returned")
    as_integer("recurrent_snapshot_slot", reservation.recurrent_snapshot_slot)
    if reservation.partial_kv_snapshot_slot is not None:
        as_integer("partial_kv_snapshot_slot", reservation.partial_kv_snapshot_slot)
    held = _held_by(table, row)
    if reservation != held:
        raise ContractError(f"{reservation!r} is not what the lease holds ({held!r}); pass its own reservation, once")
