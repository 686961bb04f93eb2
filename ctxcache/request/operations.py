"""The operations of a request as those see them who call them for a caller: a handle's ends, and the session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxcache.arguments import Int32s
from ctxcache.device.ops import DeviceOps
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.request.admission import (
    ContextCacheBatchAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
)
from ctxcache.request.handle import BeginRequestResult, RequestHandle, RequestOwner


class RequestOperations(RequestOwner, Protocol):
    """What `ContextCacheCoordinator` does with requests; its methods say what each promises."""

    @property
    def stream(self) -> Any: ...
    @property
    def device_ops(self) -> DeviceOps: ...
    @property
    def idle(self) -> bool: ...

    def begin_request(
        self, admission: ContextCacheBatchAdmission, stream: Any, *, headroom: DecodingKvHeadroom | None = None
    ) -> BeginRequestResult: ...
    def prepare_prefill(self, request: RequestHandle) -> Status: ...
    def enqueue_prefill_captures(self, request: RequestHandle) -> Status: ...
    def finalize_prefill_publication(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None = None,
    ) -> Status: ...
    def prepare_decode_step(self, request: RequestHandle, *, headroom: DecodingKvHeadroom | None = None) -> Status: ...
    def can_prepare_decode_step(
        self, request: RequestHandle, *, headroom: DecodingKvHeadroom | None = None
    ) -> NDArray[np.bool_]: ...
    def complete_decode_step(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Int32s = ...,
        common_state_lengths: Sequence[int] | None = None,
    ) -> Status: ...
    def begin_batch_compaction(
        self, request: RequestHandle, old_to_new: Int32s, new_batch_size: int, device_batch_mapping: Any
    ) -> Status: ...
    def compact_batch(self, request: RequestHandle) -> Status: ...
