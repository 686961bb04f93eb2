"""The coordinator as something that is built, asked and shut down. What it does with a request is told elsewhere."""

from __future__ import annotations

import weakref
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from ctxcache.config import EXECUTION_MODES, ContextCacheConfig, DeploymentConfig
from ctxcache.device.ops import DeviceOps, StreamSynchronizer
from ctxcache.device.resources import ContextCachePhysicalResources, check_devices, check_successor
from ctxcache.device.streams import same_stream
from ctxcache.errors import ContractError
from ctxcache.fsm import require_declared
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind, ContextCacheLookupPolicy, ResourceType
from ctxcache.keys.chain import KeyHasher
from ctxcache.manager.manager import ContextCacheManager
from ctxcache.metrics import ContextCacheMetrics, CoordinatorCounters
from ctxcache.request.admission import ContextCacheBatchAdmission
from ctxcache.request.device_binding import bind_device
from ctxcache.request.explain import MatchExplanation, explain_match
from ctxcache.request.handle import RequestHandle
from ctxcache.request.identity_memory import IdentityMemory
from ctxcache.request.lifetime import close, end_of_life
from ctxcache.request.lookup import Acquirer, effective_lookup_policy
from ctxcache.request.owner import Custody, serialised
from ctxcache.request.page_sanitizer import NoSanitizer, PageSanitizer
from ctxcache.request.request import Request
from ctxcache.request.validation import SequenceIntake, read_admission


class CoordinatorService:
    """The life of a coordinator, around the life of its requests: construction, questions, shutdown, recovery."""

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
        self._binding = binding
        self._manager = ContextCacheManager(
            tokens_per_page=deployment.base.tokens_per_page,
            num_base_pages=binding.num_base_pages,
            num_draft_pages=binding.num_draft_pages,
            num_recurrent_snapshots=binding.num_recurrent_snapshots,
            num_partial_kv_snapshots=binding.num_partial_kv_snapshots,
            max_records=config.max_records,
            kind=deployment_kind,
        )
        hasher = KeyHasher(deployment.base.tokens_per_page, config.hash_key)
        self._identities = IdentityMemory(hasher, deployment.base.tokens_per_page)
        self._acquirer = Acquirer(
            self._manager, hasher, self._counters, has_checkpoints=binding.link.storage is not None
        )
        self._custody = Custody(self._manager, binding.link)
        self._sanitizer = NoSanitizer()
        if config.page_sanitizer and binding.num_base_pages:
            self._sanitizer = PageSanitizer(self._custody, self._manager, binding.link, deployment.base.tokens_per_page)
        binding.bind(self._custody)
        weakref.finalize(self, end_of_life, self._custody, resources)

    @serialised
    def shutdown(self) -> Status:
        """Stop admitting, and end a quarantine by proving the device idle. Idempotent; published records stay.

        Returns:
            `OK`; `POISONED` when the drain failed again and the quarantine is kept; `REQUEST_FAILED` while a request is
            active.
        """
        status = self._custody.shutdown()
        if status is Status.OK:
            self._binding.unbind(self._custody)
        return status

    @serialised
    def recover(self) -> Status:
        """Reopen admission after a poisoning that `shutdown()` has ended with `OK`.

        The caller states with this call that the CUDA context is healthy; after a sticky error it is not.

        Returns:
            `OK`; there is no other outcome than that and an exception.

        Raises:
            ContractError: there was no poisoning, `shutdown()` has not returned `OK` since, or a resource has been bound to
                another coordinator meanwhile.
            InvariantError: the manager's state is damaged; the coordinator stays shut.
        """
        self._custody.require_recoverable()
        self._binding.bind(self._custody)
        self._binding.distrust_device_rows()
        self._custody.recover()
        return Status.OK

    @serialised
    def clear(self) -> None:
        """Evict every record and forget every key: weights were reloaded, an adapter replaced under its name.

        Raises:
            ContractError: a request is active or quarantined. Nothing has changed.
        """
        if not self.idle:
            raise ContractError("clear() is refused while a request is active or quarantined; finish it first")
        self._manager.clear()
        self._identities.clear()

    @serialised
    def explain(self, admission: ContextCacheBatchAdmission) -> list[MatchExplanation]:
        """Say for each sequence what it would reuse now, and why not more. Changes nothing.

        Raises:
            ContractError: as for `begin_request`.
        """
        intakes = read_admission(admission, self._binding.max_batch_size, EXECUTION_MODES[self._kind])
        policy = self._lookup_policy(admission, intakes)
        return [self._explain_one(admission, index, intake, policy) for index, intake in enumerate(intakes)]

    def _explain_one(
        self,
        admission: ContextCacheBatchAdmission,
        index: int,
        intake: SequenceIntake,
        policy: ContextCacheLookupPolicy,
    ) -> MatchExplanation:
        match = self._acquirer.match(admission, intake, policy)
        return explain_match(
            index,
            intake.tokens.size,
            match,
            self._tokens_per_page,
            other_identity=self._identities.knows_another(intake.tokens, intake.media, intake.extras),
        )

    @serialised
    def metrics(self) -> ContextCacheMetrics:
        """Return a snapshot of all counters and of the present occupancy."""
        return _snapshot(self._counters, self._manager)

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

    @property
    def idle(self) -> bool:
        """Whether no request is active or quarantined."""
        return self._custody.active is None and self._custody.quarantined is None

    @serialised
    def replace_device_ops(self, device_ops: DeviceOps) -> None:
        """Let all later device work go through other ops: wrappers of the present ones, for tests.

        Raises:
            ContractError: a request is active or quarantined. Nothing has changed.
            DeploymentError: they work on another device than the present ones. Nothing has changed.
        """
        if not self.idle:
            raise ContractError("device ops are replaced between requests; finish the present one first")
        check_devices(device_ops, self._kind, self._binding.link.resources)
        check_successor(device_ops, self._binding.link.ops)
        self._binding.link.ops = device_ops

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


def _snapshot(counters: CoordinatorCounters, manager: ContextCacheManager) -> ContextCacheMetrics:
    """Put the coordinator's counters, the manager's, and the present occupancy together."""
    managed = asdict(manager.counters())
    return ContextCacheMetrics(
        **asdict(counters),
        **managed,
        published_endpoints=managed["committed_publications"] + managed["existing_publications"],
        current_records=len(manager.records),
        base_kv_pages=manager.pool(ResourceType.BASE_KV_PAGE),
        draft_kv_pages=manager.pool(ResourceType.DRAFT_KV_PAGE),
        recurrent_snapshots=manager.pool(ResourceType.RECURRENT_SNAPSHOT),
        partial_kv_snapshots=manager.pool(ResourceType.PARTIAL_KV_SNAPSHOT),
    )
