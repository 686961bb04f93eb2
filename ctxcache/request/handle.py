"""What a caller holds: the handle of a request, and read-only views of what stands behind it."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s
from ctxcache.errors import ContractError
from ctxcache.fsm import State
from ctxcache.ids import (
    ContextCacheCommitPolicy,
    ContextCacheCoordinatorStatus,
    ContextCacheExecutionMode,
    ContextCacheLookupPolicy,
    Phase,
)
from ctxcache.keys.identity import BlockKeyExtras
from ctxcache.manager.results import CacheRequestLease
from ctxcache.request.batch import NOT_FROZEN, Batch, StagedHybridPublication
from ctxcache.request.custody import Custody
from ctxcache.request.request import Request


class RequestOwner(Protocol):
    """Who admitted a request and ends it: the coordinator, as its handle sees it."""

    def finish(self, request: RequestHandle) -> ContextCacheCoordinatorStatus:
        """End a request, and publish what it has ready."""
        ...

    def abandon(self, request: RequestHandle) -> ContextCacheCoordinatorStatus:
        """End a request, and publish nothing."""
        ...


@dataclass(frozen=True, slots=True)
class RequestSlotToken:
    """Stands for the coordinator's one admission slot. The slot is free again once every lease is released."""

    owner: RequestOwner


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """One sequence as it stood when `inspect()` was called. Arrays are copies.

    Attributes:
        lease: its hold on pages and snapshot slots.
        token_ids: `int32[n]`, the sampled one included.
        key_extras: identity of its blocks.
        per_position_media_hash: `uint64[n, 2]`, or `None` for text.
        reuse_token_length: tokens that the prefill did not compute.
        lookup_policy, commit_policy: as admitted.
        committed_state_length: leading tokens whose state is materialised.
        capacity, draft_capacity: how far the prepared base and draft pages reach, in tokens: the runtime must not write at or
            beyond them, and a commit beyond them is refused.
        published_full_block_count: full blocks that this sequence has published.
        published_exact_length: longest exact length that it has published.
        common_state_length: leading tokens on which base and draft state agree.
        frozen_spec_prefill_length: prefill boundary that awaits the first verification, or `None`.
        staged_hybrid_publication: checkpoint captured or reserved and not yet published, or `None`.
    """

    lease: CacheRequestLease
    token_ids: NDArray[np.int32]
    key_extras: BlockKeyExtras
    per_position_media_hash: NDArray[np.uint64] | None
    reuse_token_length: int
    lookup_policy: ContextCacheLookupPolicy
    commit_policy: ContextCacheCommitPolicy
    committed_state_length: int
    capacity: int
    draft_capacity: int
    published_full_block_count: int
    published_exact_length: int
    common_state_length: int
    frozen_spec_prefill_length: int | None
    staged_hybrid_publication: StagedHybridPublication | None


@dataclass(frozen=True, slots=True, eq=False)
class RequestState:
    """A request as it stood when `inspect()` was called.

    Attributes:
        owner: the coordinator that admitted it.
        request_slot: its hold on the admission slot; `None` once every lease is released.
        stream: the coordinator's stream.
        execution_mode: as admitted.
        phase, state: where it is in its lifecycle.
        device_work_pending: whether work was enqueued and not proven complete; read off the state.
        spec_awaiting_first_completion: whether the first verification is still to prove the draft's initialisation.
        pending_compaction_mapping: the new slot of each slot, -1 for those that leave; empty when none is under way.
        pending_compaction_batch_size: how many survive it; -1 when none is under way.
        sequences: one a slot; none of a handle that is empty.
    """

    owner: RequestOwner
    request_slot: RequestSlotToken | None
    stream: Any
    execution_mode: ContextCacheExecutionMode
    phase: Phase | None
    state: State
    device_work_pending: bool
    spec_awaiting_first_completion: bool
    pending_compaction_mapping: tuple[int, ...]
    pending_compaction_batch_size: int
    sequences: tuple[SequenceState, ...]


class RequestHandle:
    """The caller's one hold on a request.

    Leaving its `with` block finishes the request, or abandons it when an exception passes through. A handle that is
    dropped without either is abandoned with a `ResourceWarning`. It cannot be copied or pickled.
    """

    __slots__ = ("__weakref__", "_custody", "_owner", "_request")

    def __init__(self, owner: RequestOwner, custody: Custody, request: Request) -> None:
        self._owner = owner
        self._custody = custody
        self._request = request
        request.handle = weakref.ref(self)

    @property
    def valid(self) -> bool:
        """Whether the request is still the caller's: neither released nor quarantined."""
        return self._request.held

    @property
    def phase(self) -> Phase | None:
        """The request's phase; `None` once released, `POISONED` while its leases are quarantined."""
        return self._request.phase

    @property
    def batch_size(self) -> int:
        """Sequences in the batch; 0 for an empty handle."""
        return self._custody.ask(self._size)

    def _size(self) -> int:
        return self._request.batch.size if self.valid else 0

    @property
    def capacities(self) -> Int32s:
        """How far each sequence's prepared base pages reach, in tokens, `int32[batch]`; see `SequenceState.capacity`."""
        return self._custody.ask(self._capacities)

    def _capacities(self) -> Int32s:
        return self._request.batch.capacity[: self._size()].copy()

    def inspect(self) -> RequestState:
        """Return a read-only view of the request; of an empty handle, one without sequences.

        It says what was true at one moment. It never waits for the device, and may be called from anywhere, also in hooks.
        """
        return self._custody.ask(self._inspect)

    def _inspect(self) -> RequestState:
        request = self._request
        batch = request.batch
        compaction = request.compaction
        sequences = tuple(_view(batch, slot) for slot in range(batch.size)) if self.valid else ()
        return RequestState(
            owner=self._owner,
            request_slot=RequestSlotToken(self._owner) if self._custody.holds(request) else None,
            stream=request.link.stream,
            execution_mode=batch.execution_mode,
            phase=request.phase,
            state=request.state,
            device_work_pending=request.pending,
            spec_awaiting_first_completion=request.state is State.DRAFTING or bool((batch.frozen != NOT_FROZEN).any()),
            pending_compaction_mapping=tuple(compaction.mapping.tolist()) if compaction else (),
            pending_compaction_batch_size=compaction.new_batch_size if compaction else -1,
            sequences=sequences,
        )

    def close(self) -> ContextCacheCoordinatorStatus:
        """Abandon the request: drain what is pending, release everything, publish nothing. Idempotent."""
        return self._owner.abandon(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._custody.in_forked_child:
            return
        if kind is None:
            self._owner.finish(self)
        else:
            self._owner.abandon(self)

    def request_of(self, owner: object, *, may_be_empty: bool) -> Request:
        """Return the request to its own coordinator; refuse others, and empty handles where those mean nothing."""
        if owner is not self._owner:
            raise ContractError("the request belongs to another coordinator; pass it to the one that admitted it")
        if not (may_be_empty or self.valid):
            raise ContractError(f"the handle is empty (its request is {self._request.state}); begin another request")
        return self._request

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is None or not request.held or self._custody.in_forked_child:
            return
        state = request.state
        try:
            self._custody.drop(request)
        finally:  # last: where warnings are errors this raises
            warnings.warn(
                f"a RequestHandle was dropped in state {state.value!r}; finish() or close() it",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __copy__(self) -> NoReturn:
        raise TypeError("a RequestHandle cannot be copied; it is released once")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RequestHandle cannot be pickled; it stands for device memory of this process")


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionResult:
    """An admitted request.

    Attributes:
        request: its handle.
        prefill_starts: for each slot the logical token offset at which prefill begins.
    """

    request: RequestHandle
    prefill_starts: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class BeginRequestResult:
    """What became of an admission; `admission` is there exactly when `status` is `OK`."""

    status: ContextCacheCoordinatorStatus
    admission: AdmissionResult | None = None


def _view(batch: Batch, slot: int) -> SequenceState:
    length = int(batch.num_tokens[slot])
    media = batch.media[slot]
    frozen = int(batch.frozen[slot])
    return SequenceState(
        lease=batch.leases[slot],
        token_ids=batch.tokens[slot, :length].copy(),
        key_extras=batch.extras[slot],
        per_position_media_hash=None if media is None else media[:length].copy(),
        reuse_token_length=int(batch.reuse_lengths[slot]),
        lookup_policy=batch.lookup_policy,
        commit_policy=batch.commit_policy,
        committed_state_length=int(batch.committed[slot]),
        capacity=int(batch.capacity[slot]),
        draft_capacity=int(batch.draft_capacity[slot]),
        published_full_block_count=int(batch.published_blocks[slot]),
        published_exact_length=int(batch.published_exact[slot]),
        common_state_length=int(batch.common[slot]),
        frozen_spec_prefill_length=None if frozen == NOT_FROZEN else frozen,
        staged_hybrid_publication=batch.staged[slot],
    )
