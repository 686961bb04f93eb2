"""The coordinator: the life of a request, told in order.

Every operation reads the same way. Decide: check the arguments against the batch, in a state that the lifecycle allows.
Act and confirm: fire one transition, whose hooks touch the device. Commit: move host state, once the device confirmed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ctxcache.acquisition import Acquirer, check_working_set, effective_lookup_policy
from ctxcache.admission import (
    ContextCacheBatchAdmission,
    ContextCacheBatchAdvance,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.batch import Batch
from ctxcache.binding import DeviceBinding, bind_device
from ctxcache.config import EXECUTION_MODES, ContextCacheConfig, DeploymentConfig
from ctxcache.custody import Custody
from ctxcache.device.ops import DeviceOps, StreamSynchronizer
from ctxcache.device.resources import ContextCachePhysicalResources
from ctxcache.device.streams import same_stream
from ctxcache.errors import ContractError
from ctxcache.explain import MatchExplanation, explain_match
from ctxcache.fsm import is_declared, require_declared
from ctxcache.handle import AdmissionResult, BeginRequestResult, RequestHandle
from ctxcache.hashing import KeyHasher
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind, ContextCacheLookupPolicy
from ctxcache.intake import (
    SequenceIntake,
    check_device_mapping,
    read_admission,
    read_advances,
    read_common_lengths,
    read_headroom,
    read_mapping,
    read_slots,
)
from ctxcache.lifetime import close, end_of_life
from ctxcache.manager import ContextCacheManager
from ctxcache.metrics import ContextCacheMetrics, CoordinatorCounters, snapshot
from ctxcache.modes import default_headroom
from ctxcache.publication import choose_publication
from ctxcache.request import PendingCompaction, Request
from ctxcache.session import CoordinatorSession


class ContextCacheCoordinator:
    """Owns the host and device lifecycle of one request at a time around the manager. Has no thread of its own.

    Operations are serialised: a second thread waits. A call from inside a hook, a synchroniser or a callback of the same
    coordinator is refused. As a context manager it abandons an active request and shuts down at the end.

    Args:
        config: how the cache behaves.
        deployment: what is deployed.
        deployment_kind: what `validate_context_cache_deployment` says of it.
        resources: caches and page tables; borrowed, and bound to this coordinator until it is shut down.
        stream: the one stream that all device work is enqueued on; see `ctxcache.device.streams`.
        synchronizer: proves that stream idle: `None` or 0 is success, anything else a failed drain. The default waits
            for the stream.
        device_ops: all device work goes through these; the default is the base cache's own.

    Raises:
        DeploymentError: deployment, kind, configuration and resources do not agree.
        ContractError: a resource belongs to another live coordinator.
    """

    def __init__(
        self,
        config: ContextCacheConfig,
        deployment: DeploymentConfig,
        deployment_kind: ContextCacheDeploymentKind,
        resources: ContextCachePhysicalResources,
        stream: Any,
        synchronizer: StreamSynchronizer | None = None,
        *,
        device_ops: DeviceOps | None = None,
    ) -> None:
        self._config = config
        self._deployment = deployment
        self._kind = deployment_kind
        self._counters = CoordinatorCounters()
        binding = bind_device(
            config, deployment, deployment_kind, resources, stream, synchronizer, device_ops, self._counters
        )
        self._binding: DeviceBinding = binding
        self._manager = ContextCacheManager(
            tokens_per_page=deployment.base.tokens_per_page,
            num_base_pages=binding.num_base_pages,
            num_draft_pages=binding.num_draft_pages,
            num_recurrent_snapshots=binding.num_recurrent_snapshots,
            num_partial_kv_snapshots=binding.num_partial_kv_snapshots,
            max_records=config.max_records,
            kind=deployment_kind,
        )
        self._acquirer = Acquirer(
            self._manager,
            KeyHasher(deployment.base.tokens_per_page, config.hash_key),
            self._counters,
            has_checkpoints=binding.link.storage is not None,
        )
        self._custody = Custody(self._manager, binding.link)
        binding.bind(self._custody)
        self._lifetime = weakref.finalize(self, end_of_life, self._custody, resources)

    # The operations, in the order of a request's life

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
        with self._custody.serialised("begin_request"):
            self._require_own_stream(stream)
            intakes = read_admission(admission, self._binding.max_batch_size, EXECUTION_MODES[self._kind])
            extra = read_headroom(headroom, default_headroom(self._deployment, admission.execution_mode))
            check_working_set(
                intakes,
                extra,
                self._tokens_per_page,
                self._binding.row_pages,
                self._binding.draft_row_pages,
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
        acquisition = self._acquirer.acquire(admission, intakes, headroom, lookup_policy)
        if acquisition is None:
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
        request = Request(batch, policy(self._manager, self._tokens_per_page, self._counters), self._binding.link)
        handle = RequestHandle(self, request)
        self._custody.active = request
        self._acquirer.count(acquisition, lookup_policy)
        return BeginRequestResult(Status.OK, AdmissionResult(handle, batch.reuse_lengths.tolist()))

    def prepare_prefill(self, request: RequestHandle) -> Status:
        """Bind every row: page tables, device lengths, and the state that is restored or zeroed. Enqueues only.

        Raises:
            ContractError: not in phase `ADMITTED`. Nothing has changed.
            DeviceError: an op failed while it was enqueued; the request can only be finished or abandoned.
        """
        with self._custody.serialised("prepare_prefill"):
            live = self._live(request, "prepare_prefill")
            with self._custody.committing(live):
                self._binding.bind_rows(live.batch)
                live.restores = self._binding.restore_jobs(live.batch)
            status = self._custody.fire(live, "prepare_prefill")
            if live.restores is not None:
                self._counters.hybrid_restores += len(live.restores)
            return status

    def enqueue_prefill_captures(self, request: RequestHandle) -> Status:
        """Reserve and enqueue checkpoints at the end of every prompt, before the runtime's prefill synchronisation.

        Without recurrent layers nothing happens. A sequence is skipped, which is no error, when it bypasses the cache,
        when its length is published already, and when no snapshot slot can be had.

        Raises:
            ContractError: no prefill is under way. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        with self._custody.serialised("enqueue_prefill_captures"):
            live = self._live(request, "enqueue_captures")
            with self._custody.committing(live):
                live.captures = live.publication.stage_prefill(live.batch)
            if live.captures is None:
                return Status.OK
            status = self._custody.fire(live, "enqueue_captures")
            live.captures = None
            return status

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
        with self._custody.serialised("finalize_prefill_publication"):
            live = self._live(request, "finalize_prefill")
            batch = live.batch
            checked = read_advances(advances, batch.size)
            batch.check_prefill(checked)
            common = read_common_lengths(common_state_lengths, batch.rules.common_lengths, checked.committed)
            batch.check_prefill_common(common)
            status = self._custody.fire(live, "finalize_prefill")
            with self._custody.committing(live):
                batch.advance(checked, common)
                live.publication.publish_prefill(batch)
            return status

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
        with self._custody.serialised("prepare_decode_step"):
            live = self._live(request, "prepare_decode")
            batch = live.batch
            extra = read_headroom(headroom, default_headroom(self._deployment, batch.execution_mode))
            targets = self._binding.page_targets(batch, extra)
            with self._custody.committing(live):
                growth = self._manager.grow_leases(batch.lease_rows, *targets.pages) if targets.fit.all() else None
                if growth is not None:
                    self._binding.extend_rows(growth)
                    batch.reserve_tokens(targets.capacity)
            if growth is None:
                self._custody.fire(live, "capacity_exhausted")
                return Status.REQUEST_FAILED
            return self._custody.fire(live, "prepare_decode")

    def can_prepare_decode_step(
        self, request: RequestHandle, *, headroom: DecodingKvHeadroom | None = None
    ) -> NDArray[np.bool_]:
        """Tell which sequences could grow for the next step, `bool[batch]`, without any effect.

        Sequences are judged in slot order, each beside those before it that could. A runtime compacts the others away
        and then prepares the step.

        Raises:
            ContractError: as for `prepare_decode_step`.
        """
        with self._custody.serialised("can_prepare_decode_step"):
            batch = self._live(request, "prepare_decode").batch
            extra = read_headroom(headroom, default_headroom(self._deployment, batch.execution_mode))
            targets = self._binding.page_targets(batch, extra)
            return self._manager.can_grow_leases(batch.lease_rows, *targets.pages) & targets.fit

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
        with self._custody.serialised("complete_decode_step"):
            live = self._live(request, "complete_decode")
            batch = live.batch
            checked = read_advances(advances, batch.size)
            batch.check_decode(checked)
            common = read_common_lengths(common_state_lengths, batch.rules.common_lengths, checked.committed)
            batch.check_common(common, checked.committed)
            completed = read_slots("publishable_completed_slots", publishable_completed_slots, batch.size)
            keeps = completed.size > 0 and batch.publishes_generated
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
        with self._custody.serialised("begin_batch_compaction"):
            live = self._of(request)
            unsettled = is_declared(live, "settle_draft")
            if not unsettled:
                require_declared(live, "begin_compaction")
            mapping = read_mapping(old_to_new, new_batch_size, live.batch.size)
            check_device_mapping(device_batch_mapping, live.batch.size)
            if unsettled:
                status = self._custody.fire(live, "settle_draft")
                if status is not Status.OK:
                    return status
                with self._custody.committing(live):
                    live.publication.publish_frozen(live.batch)
            live.compaction = PendingCompaction(mapping, int(new_batch_size), device_batch_mapping)
            return self._custody.fire(live, "begin_compaction")

    def compact_batch(self, request: RequestHandle) -> Status:
        """Move rows, lengths and slot state to the new slots, synchronise once, then let the retired sequences go.

        Returns:
            `OK`; the request is finishing when no sequence survives. `POISONED` when the synchronisation failed: then the
            whole old batch is quarantined.

        Raises:
            ContractError: no compaction was begun. Nothing has changed.
            DeviceError: as for `prepare_prefill`.
        """
        with self._custody.serialised("compact_batch"):
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

    # The ways out

    def finish(self, request: RequestHandle) -> Status:
        """End a request: drain what is pending, publish what was frozen, release everything. Idempotent.

        Returns:
            `OK`, also for an empty handle; `POISONED` when the drain failed and the request is quarantined.

        Raises:
            ContractError: the handle is another coordinator's.
        """
        with self._custody.serialised("finish"):
            live = self._of(request, may_be_empty=True)
            if not live.held:
                return Status.OK
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

    def abandon(self, request: RequestHandle) -> Status:
        """End a request without publishing: drain what is pending, release everything. Idempotent.

        Returns and raises as `finish`.
        """
        with self._custody.serialised("abandon"):
            live = self._of(request, may_be_empty=True)
            return self._custody.abandon(live) if live.held else Status.OK

    def shutdown(self) -> Status:
        """Stop admitting, and end a quarantine by proving the device idle. Idempotent; published records stay.

        Returns:
            `OK`; `POISONED` when the drain failed again and the quarantine is kept; `REQUEST_FAILED` while a request is
            active.
        """
        with self._custody.serialised("shutdown"):
            status = self._custody.shutdown()
            if status is Status.OK:
                self._binding.unbind(self._custody)
            return status

    def recover(self) -> None:
        """Reopen admission after a poisoning that `shutdown()` has ended with `OK`.

        The caller states with this call that the CUDA context is healthy; after a sticky error it is not.

        Raises:
            ContractError: there was no poisoning, `shutdown()` has not returned `OK` since, or a resource has been bound to
                another coordinator meanwhile.
            InvariantError: the manager's state is damaged; the coordinator stays shut.
        """
        with self._custody.serialised("recover"):
            self._custody.require_recoverable()
            self._binding.bind(self._custody)
            self._custody.recover()

    def clear(self) -> None:
        """Evict every record and forget every key: weights were reloaded, an adapter replaced under its name.

        Raises:
            ContractError: a request is active or quarantined. Nothing has changed.
        """
        with self._custody.serialised("clear"):
            if self._custody.active is not None or self._custody.quarantined is not None:
                raise ContractError("clear() is refused while a request is active or quarantined; finish it first")
            self._manager.clear()

    # What can be asked

    def explain(self, admission: ContextCacheBatchAdmission) -> list[MatchExplanation]:
        """Say for each sequence what it would reuse now, and why not more. Changes nothing.

        Raises:
            ContractError: as for `begin_request`.
        """
        with self._custody.serialised("explain"):
            intakes = read_admission(admission, self._binding.max_batch_size, EXECUTION_MODES[self._kind])
            policy = self._lookup_policy(admission, intakes)
            return [
                explain_match(
                    index,
                    intake.tokens.size,
                    self._acquirer.match(admission, intake, policy),
                    self._tokens_per_page,
                )
                for index, intake in enumerate(intakes)
            ]

    def metrics(self) -> ContextCacheMetrics:
        """Return a snapshot of all counters and of the present occupancy."""
        with self._custody.serialised("metrics"):
            return snapshot(self._counters, self._manager)

    @property
    def manager(self) -> ContextCacheManager:
        """The manager: read it, do not mutate it."""
        return self._manager

    @property
    def poisoned(self) -> bool:
        """Whether a drain has failed, and `recover()` has not been called since."""
        return self._custody.poisoned

    @property
    def poison_cause(self) -> BaseException | int | None:
        """The exception or the code that failed the drain, or `None`."""
        return self._custody.poison_cause

    @property
    def stream(self) -> Any:
        """The coordinator's one stream."""
        return self._binding.link.stream

    @property
    def device_ops(self) -> DeviceOps:
        """The ops that all device work goes through."""
        return self._binding.link.ops

    def session(self, token_lists: Sequence[Any], **admission_options: Any) -> CoordinatorSession:
        """Return a session over one request, for `with`: see `ctxcache.session.CoordinatorSession`."""
        return CoordinatorSession(self, token_lists, **admission_options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close(self._custody, self._binding.link.resources)
        if self._custody.shut:
            self._binding.unbind(self._custody)

    @property
    def _tokens_per_page(self) -> int:
        return self._deployment.base.tokens_per_page

    def _lookup_policy(
        self, admission: ContextCacheBatchAdmission, intakes: list[SequenceIntake]
    ) -> ContextCacheLookupPolicy:
        if not self._config.enabled:
            return ContextCacheLookupPolicy.BYPASS
        return effective_lookup_policy(admission, intakes, self._kind)

    def _require_own_stream(self, stream: Any) -> None:
        if not same_stream(stream, self.stream):
            raise ContractError(f"the request is on stream {stream!r}; this coordinator was built for {self.stream!r}")

    def _of(self, handle: RequestHandle, *, may_be_empty: bool = False) -> Request:
        """Return the request of one of this coordinator's handles."""
        if not isinstance(handle, RequestHandle):
            raise ContractError(f"request is a {type(handle).__name__}; pass the RequestHandle of an admission")
        return handle._request_of(self, may_be_empty=may_be_empty)  # noqa: SLF001 - two halves of one owner

    def _live(self, handle: RequestHandle, trigger: str) -> Request:
        """Return the request of a handle, in a state from which the lifecycle has the trigger."""
        request = self._of(handle)
        require_declared(request, trigger)
        return request
