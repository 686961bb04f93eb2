"""What only hybrid models with MTP do during a prefill: publish an endpoint, and bring back its hidden row.

The draft's input at a boundary folds in the base's hidden state there, so a checkpoint keeps that one row too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ctxcache.arguments import as_integer
from ctxcache.device.op_checks import check_hidden_row
from ctxcache.device.ops import HiddenRow
from ctxcache.errors import ContractError
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.request.handle import RequestHandle
from ctxcache.request.owner import serialised
from ctxcache.request.request import BoundaryCopy, Request
from ctxcache.request.validation import require_writable
from ctxcache.service import CoordinatorService


class HybridMtpOperations(CoordinatorService):
    """The two operations of a `HYBRID_MTP` deployment; every other kind refuses them."""

    @serialised
    def publish_hybrid_mtp_endpoint(
        self,
        request: RequestHandle,
        slot: int,
        resident_state_length: int,
        base_hidden_states: Any,
        boundary_hidden_row: int,
    ) -> Status:
        """Capture and publish the state that a running prefill has reached in one sequence. Synchronises once.

        Captures recurrent state, the paired boundary pages and the hidden row. The prefill stays in flight. Nothing
        happens for a bypass, an empty prefix (length 0), a length that this sequence has published, or under pressure.

        Args:
            request: a request whose prefill is under way, in mode `MTP`.
            slot: the sequence.
            resident_state_length: leading tokens of it whose state has been enqueued, at most the prompt.
            base_hidden_states: device array `[batch, rows, hidden_size]` of the base's `hidden_dtype`. Borrowed for the
                call.
            boundary_hidden_row: its row (axis 1) for the last of those tokens.

        Returns:
            `OK`; `POISONED` when the synchronisation failed.

        Raises:
            ContractError: another deployment kind or phase, an index out of range, an array of another shape. Nothing
                has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "publish_boundary")
        row = self._hidden_row(live, slot, base_hidden_states, boundary_hidden_row)
        batch = live.batch
        length = as_integer("resident_state_length", resident_state_length, 0, int(batch.num_tokens[slot]) + 1)
        if length == 0:
            return Status.OK
        status = self._sanitizer.sum_slots(live, "sum_boundary", (slot,), np.full(batch.size, length, np.int32))
        if status is not Status.OK:
            return status
        with self._custody.committing(live):
            live.captures = live.publication.stage_boundary(batch, slot, length)
        if live.captures is None:
            return Status.OK
        live.boundary = BoundaryCopy(int(live.captures.recurrent_snapshot_slots[0]), row)
        status = self._custody.fire(live, "publish_boundary")
        live.captures = live.boundary = None
        if status is Status.OK:
            with self._custody.committing(live):
                live.publication.publish_boundary(batch, slot)
        return status

    @serialised
    def restore_hybrid_mtp_boundary_hidden(
        self, request: RequestHandle, slot: int, base_hidden_states: Any, destination_row: int
    ) -> Status:
        """Copy the hidden row of the checkpoint that a sequence was restored from to where the runtime folds it in.

        Enqueues only; no synchronisation.

        Args:
            request: a request whose prefill is under way, in mode `MTP`.
            slot: a sequence that hit a checkpoint.
            base_hidden_states: device array `[batch, rows, hidden_size]` of the base's `hidden_dtype`. Borrowed until the
                next synchronisation.
            destination_row: the row (axis 1) to write.

        Raises:
            ContractError: another deployment kind or phase, an index out of range, an array of another shape, or a
                sequence that started cold. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "restore_boundary")
        row = self._hidden_row(live, slot, base_hidden_states, destination_row)
        require_writable("base_hidden_states", base_hidden_states)
        snapshot_slot = live.batch.leases[slot].recurrent_snapshot_slot
        if snapshot_slot is None:
            raise ContractError(f"slot {slot} started cold, so no hidden row was saved for it; compute it instead")
        live.boundary = BoundaryCopy(snapshot_slot, row)
        status = self._custody.fire(live, "restore_boundary")
        live.boundary = None
        return status

    def _hidden_row(self, live: Request, slot: int, hidden_states: Any, row: int) -> HiddenRow:
        storage = self._binding.link.storage
        if storage is None or storage.hidden_rows is None:
            raise ContractError(f"a {self._kind.name} deployment saves no hidden rows; only HYBRID_MTP does")
        slot = as_integer("slot", slot, 0, live.batch.size)
        rows = check_hidden_row(storage, 0, HiddenRow(hidden_states, slot, 0)).shape[1]
        return HiddenRow(hidden_states, slot, as_integer("the hidden row", row, 0, rows))
