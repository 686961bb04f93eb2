"""The coordinator: the life of a request, told in order.

Every operation reads the same way. Decide: check the arguments against the batch, in a state that the lifecycle allows.
Act and confirm: fire one transition, whose hooks touch the device. Commit: move host state, once the device confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxcache.config import EXECUTION_MODES
from ctxcache.fsm import is_declared, require_declared
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.mtp import HybridMtpOperations
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.request.batch import Batch
from ctxcache.request.execution_modes import STEP_RULES, default_headroom
from ctxcache.request.handle import AdmissionResult, BeginRequestResult, RequestHandle
from ctxcache.request.lookup import Acquisition, check_working_set
from ctxcache.request.owner import serialised
from ctxcache.request.publication_policy import choose_publication
from ctxcache.request.request import PendingCompaction, Request
from ctxcache.request.validation import (
    SequenceIntake,
    check_device_mapping,
    read_admission,
    read_advances,
    read_common_lengths,
    read_headroom,
    read_mapping,
    read_slots,
)
from ctxcache.session import CoordinatorSession


class ContextCacheCoordinator(HybridMtpOperations):
    """Owns the host and device lifecycle of one request at a time around the manager. Has no thread of its own.

    Operations are serialised: a second thread waits. A call from inside a hook, a synchroniser or a callback of the same
    coordinator is refused. As a context manager it abandons an active request and shuts down at the end.

    Args:
        config: how the cache behaves.
        deployment: what is deployed.
        deployment_kind: what `validate_context_cache_deployment` says of it.
        resources: caches and page tables; borrowed, and bound to this coordinator until it is shut down.
        stream: the one stream that all device work is enqueued on; see `ctxcache.device.streams`. On the per-thread default
            stream, which is another stream in every thread, operations that may touch the device are refused in any other
            thread than this one.
        synchronizer: proves that stream idle: `None` or 0 is success, anything else a failed drain. The default waits
            for the stream.
        device_ops: all device work goes through these; the default is the base cache's own.

    Raises:
        DeploymentError: deployment, kind, configuration and resources do not agree, or a resource lies on another device
            than the ops work on.
        ContractError: a resource belongs to another live coordinator.
    """

    @serialised
    def begin_request(
        self, admission: ContextCacheBatchAdmission, stream: Any, *, headroom: DecodingKvHeadroom | None = None
    ) -> BeginRequestResult:
        """Admit a batch: find what each sequence can reuse, and lease the pages of its first working set.

        Args:
            admission: the sequences, and how they run.
            stream: the coordinator's stream; another one is refused.
            headroom: tokens beyond the prompt that the first working set covers; the default is the mode's.

        Returns:
            `OK` with a handle in phase `ADMITTED` and the offsets at which prefill begins; `REQUEST_FAILED` when a request
            is active or a sequence does not fit; `POISONED` after a failed drain.

        Raises:
            ContractError: a bad argument, or the coordinator is shut down. Nothing has changed.
        """
        self._require_own_stream(stream)
        intakes = read_admission(admission, self._binding.max_batch_size, EXECUTION_MODES[self._kind])
        extra = read_headroom(headroom, default_headroom(self._deployment, admission.execution_mode))
        check_working_set(
            intakes,
            extra,
            self._tokens_per_page,
            self._binding.row_pages,
            self._binding.draft_row_pages if STEP_RULES[admission.execution_mode].paired else 0,
        )
        self._custody.reap()
        refusal = self._custody.refusal()
        if refusal is not None:
            return BeginRequestResult(refusal)
        return self._admit(admission, intakes, extra)

    def _admit(
        self, admission: ContextCacheBatchAdmission, intakes: list[SequenceIntake], headroom: DecodingKvHeadroom
    ) -> BeginRequestResult:
        lookup_policy = self._lookup_policy(admission, intakes)
        acquisition = Acquisition()
        try:
            if not self._acquirer.acquire(acquisition, admission, intakes, headroom, lookup_policy):
                return BeginRequestResult(Status.REQUEST_FAILED)
            batch = Batch(
                acquisition.sequences,
                execution_mode=admission.execution_mode,
                lookup_policy=lookup_policy,
                commit_policy=admission.commit_policy,
                max_tokens=self._binding.row_pages * self._tokens_per_page,
                headroom=headroom,
                tokens_per_page=self._tokens_per_page,
            )
            policy = choose_publication(self._kind, admission.execution_mode, publishes=batch.publishes)
            request = Request(
                batch,
                policy(self._manager, self._tokens_per_page, self._counters, self._identities),
                self._binding.link,
            )
            result = BeginRequestResult(
                Status.OK, AdmissionResult(RequestHandle(self, request), batch.reuse_lengths.tolist())
            )
            self._acquirer.count(acquisition, lookup_policy)
            self._custody.active = request
        except BaseException:  # out of host memory, or interrupted: nobody holds a handle, so nobody else can release
            self._custody.active = None
            # An interrupt may have fallen between a lease and its note. One request runs at a time, and this one is none
            # yet: whatever lease is out is a part of it.
            self._manager.release_all()
            raise
        return result

    @serialised
    def prepare_prefill(self, request: RequestHandle) -> Status:
        """Bind every row: page tables, device lengths, and the state that is restored or zeroed. Enqueues only.

        Raises:
            ContractError: not in phase `ADMITTED`. Nothing has changed.
            DeviceError: an op failed while it was enqueued; the request can only be finished or abandoned.
        """
        live = self._live(request, "prepare_prefill")
        with self._custody.committing(live):
            self._binding.bind_rows(live.batch)
            live.restores = self._binding.restore_jobs(live.batch)
        self._custody.fire(live, "prepare_prefill")
        if live.restores is not None:
            self._counters.hybrid_restores += len(live.restores)
        return self._sanitizer.check_reused(live)

    @serialised
    def enqueue_prefill_captures(self, request: RequestHandle) -> Status:
        """Reserve and enqueue checkpoints at the end of every prompt, before the runtime's prefill synchronisation.

        Without recurrent layers nothing happens. A sequence is skipped, which is no error, when it bypasses the cache,
        when its length is published already, and when no snapshot slot can be had.

        Raises:
            ContractError: no prefill is under way. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "enqueue_captures")
        with self._custody.committing(live):
            live.captures = live.publication.stage_prefill(live.batch)
        if live.captures is None:
            return Status.OK
        status = self._custody.fire(live, "enqueue_captures")
        live.captures = None
        return status

    @serialised
    def finalize_prefill_publication(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance,
        common_state_lengths: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> Status:
        """Advance every sequence past its prompt and publish what is ready; the runtime has synchronised already.

        Args:
            request: a request whose prefill has been prepared.
            advances: one a sequence: exactly one accepted token, the lookahead, and the whole prompt committed.
            common_state_lengths: one a sequence, equal to the committed length: required for EAGLE, optional for shared
                KV, refused otherwise.

        Raises:
            ContractError: any of that does not hold. Nothing has changed.
        """
        live = self._live(request, "finalize_prefill")
        batch = live.batch
        checked = read_advances(advances, batch.size)
        batch.check_prefill(checked)
        common = read_common_lengths(common_state_lengths, batch.rules.common_lengths, checked.committed)
        batch.check_prefill_common(common)
        if not batch.rules.drafts:
            status = self._sanitizer.sum_slots(live, "sum_prompts", range(batch.size), batch.num_tokens)
            if status is not Status.OK:
                return status
        status = self._custody.fire(live, "finalize_prefill")
        with self._custody.committing(live):
            batch.advance(checked, common)
            live.publication.publish_prefill(batch)
        return status

    @serialised
    def prepare_decode_step(self, request: RequestHandle, *, headroom: DecodingKvHeadroom | None = None) -> Status:
        """Grow every sequence to what the next step may write, all or none, and upload the rows that grew.

        Args:
            request: a request whose prefill is finalised, or whose last step is complete.
            headroom: tokens beyond the committed ones; the default is the mode's.

        Returns:
            `OK`; or `REQUEST_FAILED` when rows or pages run out: no sequence has grown, and the request is finishing.

        Raises:
            ContractError: another phase, or a bad headroom. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "prepare_decode")
        batch = live.batch
        extra = read_headroom(headroom, default_headroom(self._deployment, batch.execution_mode))
        targets = self._binding.page_targets(batch, extra)
        with self._custody.committing(live):
            growth = self._manager.grow_leases(batch.lease_rows, *targets.pages) if targets.all_fit else None
            if growth is not None:
                self._binding.extend_rows(growth)
                batch.reserve_tokens(targets.capacity, targets.draft_capacity)
        if growth is None:
            self._custody.fire(live, "capacity_exhausted")
            return Status.REQUEST_FAILED
        return self._custody.fire(live, "prepare_decode")

    @serialised
    def can_prepare_decode_step(
        self, request: RequestHandle, *, headroom: DecodingKvHeadroom | None = None
    ) -> NDArray[np.bool_]:
        """Tell which sequences could grow for the next step, `bool[batch]`, without any effect.

        Sequences are judged in slot order, each beside those before it that could. A runtime compacts the others away
        and then prepares the step.

        Raises:
            ContractError: as for `prepare_decode_step`.
        """
        batch = self._live(request, "prepare_decode").batch
        extra = read_headroom(headroom, default_headroom(self._deployment, batch.execution_mode))
        targets = self._binding.page_targets(batch, extra)
        return self._manager.can_grow_leases(batch.lease_rows, *targets.pages) & targets.fit

    @serialised
    def complete_decode_step(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance] | ContextCacheBatchAdvance,
        publishable_completed_slots: Sequence[int] | NDArray[np.int32] = (),
        common_state_lengths: Sequence[int] | NDArray[np.int32] | None = None,
    ) -> Status:
        """Advance every sequence past a step, and publish those that have just ended; the runtime has synchronised.

        Args:
            request: a request whose decode step has been prepared.
            advances: one a sequence: one accepted token (speculative modes: at least one), and as many more committed,
                within the pages that the step was prepared with.
            publishable_completed_slots: slots whose generated state may be kept; unique. Naming a slot ends nothing.
            common_state_lengths: how far base and draft state agree, one a sequence: required for EAGLE, optional for
                shared KV, refused otherwise.

        Returns:
            `OK`; `POISONED` when checkpoints were captured and their one synchronisation failed.

        Raises:
            ContractError: any of that does not hold. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "complete_decode")
        batch = live.batch
        checked = read_advances(advances, batch.size)
        batch.check_decode(checked)
        common = read_common_lengths(common_state_lengths, batch.rules.common_lengths, checked.committed)
        batch.check_common(common, checked.committed)
        completed = read_slots("publishable_completed_slots", publishable_completed_slots, batch.size)
        keeps = completed.size > 0 and batch.publishes_generated
        status = self._sanitizer.sum_step(live, completed if keeps else completed[:0], checked.committed)
        if status is not Status.OK:
            return status
        with self._custody.committing(live):
            live.captures = live.publication.stage_decode(batch, completed, checked.committed) if keeps else None
        self._counters.hybrid_capture_synchronizations += live.captures is not None
        status = self._custody.fire(live, "complete_decode")
        live.captures = None
        if status is not Status.OK:
            return status
        with self._custody.committing(live):
            batch.advance(checked, common)
            live.publication.publish_frozen(batch)
            if keeps:
                live.publication.publish_decode(batch, completed)
        return status

    @serialised
    def begin_batch_compaction(
        self,
        request: RequestHandle,
        old_to_new: Sequence[int] | NDArray[np.int32],
        new_batch_size: int,
        device_batch_mapping: Any,
    ) -> Status:
        """Check the one old-to-new mapping and upload it, before any slot moves.

        Args:
            request: a settled request.
            old_to_new: the new slot of each slot, or -1 for a sequence that leaves. Survivors keep their order and fill
                `0 .. new_batch_size-1`. Copied.
            new_batch_size: how many survive.
            device_batch_mapping: the caller's device `int32[m]`, `m >= batch`; receives the mapping, and is kept alive
                until `compact_batch`.

        Returns:
            `OK`; `POISONED` when a pending draft initialisation could not be proven complete.

        Raises:
            ContractError: any of that does not hold. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._of(request)
        unsettled = is_declared(live, "settle_draft")
        if not unsettled:
            require_declared(live, "begin_compaction")
        mapping, survivors = read_mapping(old_to_new, new_batch_size, live.batch.size)
        check_device_mapping(device_batch_mapping, live.batch.size, self._binding.location)
        if unsettled:
            status = self._sanitizer.sum_frozen(live, "sum_settled")
            if status is Status.OK:
                status = self._custody.fire(live, "settle_draft")
            if status is not Status.OK:
                return status
            with self._custody.committing(live):
                live.publication.publish_frozen(live.batch)
        live.compaction = PendingCompaction(mapping, survivors, device_batch_mapping)
        return self._custody.fire(live, "begin_compaction")

    @serialised
    def compact_batch(self, request: RequestHandle) -> Status:
        """Move rows, lengths and slot state to the new slots, synchronise once, then let the retired sequences go.

        Returns:
            `OK`; the request is finishing when no sequence survives. `POISONED` when the synchronisation failed: then the
            whole old batch is quarantined.

        Raises:
            ContractError: no compaction was begun. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        live = self._live(request, "compact")
        status = self._custody.fire(live, "compact")
        compaction = live.compaction
        if status is not Status.OK or compaction is None:
            return status
        with self._custody.committing(live):
            for lease in live.batch.retired_leases(compaction.mapping):
                self._manager.release(lease)
            live.batch.compact(compaction.mapping)
            live.compaction = None
        return status

    @serialised
    def finish(self, request: RequestHandle) -> Status:
        """End a request: drain what is pending, publish what was frozen, release everything. Idempotent.

        Returns:
            `OK`, also for an empty handle; `POISONED` when the drain failed and the request is quarantined.

        Raises:
            ContractError: the handle is another coordinator's.
        """
        live = self._of(request, may_be_empty=True)
        if not live.held:
            return Status.OK
        status = self._sanitizer.sum_frozen(live, "sum_finished") if live.pending else Status.OK
        if status is Status.OK:
            status = self._custody.fire(live, "finish")
        if status is not Status.OK:
            return status
        try:
            if not live.discards_unpublished:
                with self._custody.committing(live):
                    live.publication.publish_frozen(live.batch)
        finally:
            self._custody.release(live)
        return status

    @serialised
    def abandon(self, request: RequestHandle) -> Status:
        """End a request without publishing: drain what is pending, release everything. Idempotent.

        Returns and raises as `finish`.
        """
        live = self._of(request, may_be_empty=True)
        return self._custody.abandon(live) if live.held else Status.OK

    def session(self, token_lists: Sequence[Any], **admission_options: Any) -> CoordinatorSession:
        """Return a session over one request, for `with`: see `ctxcache.session.CoordinatorSession`."""
        return CoordinatorSession(self, token_lists, **admission_options)
