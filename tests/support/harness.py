"""The library's own runtime on eager ops, in the short words of the tests; a test owns the handle of its request."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ctxcache import (
    ContextCacheBatchAdmission,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentKind,
    ContextCacheSequenceAdmission,
    KVPageTable,
    NumpyDeviceOps,
    RequestHandle,
    ResourceType,
)
from ctxcache.testing.deferred import Use
from ctxcache.testing.oracle import Transcript
from ctxcache.testing.runtime.deployments import HASH_KEY, Sizes
from ctxcache.testing.runtime.steps import RequestEnded, Runtime
from ctxcache.testing.runtime.synchronizer import ScriptedSynchronizer as Script

__all__ = ["HASH_KEY", "OK", "Harness", "RequestEnded", "Script", "T", "U", "V", "small"]

OK = ContextCacheCoordinatorStatus.OK


def T(n: int) -> list[int]:  # noqa: N802 - the scenarios' own name
    """Tokens 1..n."""
    return list(range(1, n + 1))


def U(n: int) -> list[int]:  # noqa: N802
    """Another run of n tokens, without a shared prefix."""
    return [100_000 + i for i in range(n)]


def V(n: int) -> list[int]:  # noqa: N802
    """A third run of n tokens."""
    return [200_000 + i for i in range(n)]


class Harness(Runtime):
    """A runtime whose every wrong byte fails the test at once, and whose model always says 7.

    Pages of 128 tokens and at most 512 tokens a sequence, as in the scenarios, where no other sizes are given.
    """

    kind = ContextCacheDeploymentKind.VANILLA
    layer_groups = 1

    def __init__(
        self, *, ops: Any = None, stream: Any = None, synchronizer: Any = None, enabled: bool = True, **sizes: Any
    ) -> None:
        usual = {"tokens_per_page": sizes.pop("page", 128), "max_tokens": 512, "max_batch": 1, "snapshots": 2}
        super().__init__(
            self.kind,
            Sizes(layer_groups=self.layer_groups, **{**usual, **sizes}),
            NumpyDeviceOps() if ops is None else ops,  # the GPU's where the tests run on one
            stream=stream,
            synchronizer=synchronizer,
            enabled=enabled,
        )
        self.identity = 0
        self.endpoints: Sequence[int] = ()

    def sample(self, transcript: Transcript) -> int:
        """Always the same."""
        return 7

    def enqueue(self, work: Any, uses: Sequence[Use]) -> None:
        """Work at once, and fail where that finds something wrong."""
        super().enqueue(work, uses)
        assert self.violations == [], self.violations

    @property
    def request(self) -> RequestHandle:
        """The present request's handle, as long as the test keeps it."""
        return self._request()

    def follow(self, handle: RequestHandle, *arguments: Any, **options: Any) -> None:
        """Run an admitted request without keeping it alive."""
        super().follow(handle, *arguments, **options)
        self.handle, self._request = None, weakref.ref(handle)

    def attempt(
        self, *prompts: Any, extras: Any = None, media: Any = None, headroom: Any = None, **options: Any
    ) -> Any:
        """Admit sequences in the deployment's own mode unless another is named; returns the whole result."""
        given = {} if extras is None else {"key_extras": extras}
        sequences = [
            ContextCacheSequenceAdmission(prompt, per_position_media_hash=media, **given) for prompt in prompts
        ]
        options = {"execution_mode": self.native_mode, **options}
        return self.try_begin(
            ContextCacheBatchAdmission(sequences, **options), headroom, [self.identity] * len(prompts)
        )

    def admit(self, *prompts: Sequence[int], **options: Any) -> tuple[RequestHandle, list[int]]:
        """Admit sequences that must fit; returns the handle and where prefill starts."""
        result = self.attempt(*prompts, **options)
        assert result.status is OK, result.status
        starts = result.admission.prefill_starts
        assert all(start < len(tokens) for start, tokens in zip(starts, prompts, strict=True))
        return result.admission.request, starts

    def prefill(self, endpoints: Iterable[int] = ()) -> None:
        """A whole prefill; MTP endpoints are the harness's unless others are named."""
        super().prefill(endpoints or self.endpoints)

    def decode(self, completed: Iterable[int] = (), accepted: Sequence[int] = (2,), lags: Sequence[int] = ()) -> None:
        """A whole step; in speculative modes two tokens are accepted unless others are named."""
        super().decode(tuple(completed), accepted, lags)

    def keep(self, *slots: int) -> None:
        """Both halves of a compaction that lets every other slot go."""
        self.begin_compaction(slots)
        self.compact()

    def run(self, *prompts: Sequence[int], decode: int = 0, **options: Any) -> list[int]:
        """A whole request: admit, prefill, some decode steps, finish. Returns where prefill started."""
        _handle, starts = self.admit(*prompts, **options)
        self.prefill()
        for step in range(decode):
            self.decode(range(len(prompts)) if step == decode - 1 else ())
        self.finish()
        return starts

    def begin_only(self, *prompts: Sequence[int]) -> list[int]:
        """Admit and finish at once; returns where prefill would have started."""
        _handle, starts = self.admit(*prompts)
        self.finish()
        return starts

    def check(self) -> None:
        """Let the model look at all that is computed, and compute nothing."""
        for slot, running in enumerate(self.running):
            self._compute(slot, running, running.committed, "check")

    # What can be seen

    @property
    def metrics(self) -> Any:
        """The coordinator's metrics."""
        return self.coordinator.metrics()

    @property
    def records(self) -> int:
        """Published endpoints."""
        return len(self.coordinator.manager.records)

    def free_of(self, resource: ResourceType) -> int:
        """What is free of one pool."""
        return self.coordinator.manager.pool(resource).free

    @property
    def free(self) -> int:
        """Free base pages."""
        return self.free_of(ResourceType.BASE_KV_PAGE)

    @property
    def free_draft(self) -> int:
        """Free draft pages."""
        return self.free_of(ResourceType.DRAFT_KV_PAGE)

    def free_slots(self) -> tuple[int, int]:
        """Free recurrent and partial-KV snapshot slots."""
        return self.free_of(ResourceType.RECURRENT_SNAPSHOT), self.free_of(ResourceType.PARTIAL_KV_SNAPSHOT)

    def cached_pages(self, path: str = "base_page_path") -> set[int]:
        """Pages of all records."""
        return {int(page) for record in self.coordinator.manager.records for page in getattr(record, path)}

    def words(self, layer: int) -> np.ndarray:
        """The base's pool of one layer as one word a token, `uint64[2, pages, page]`."""
        return np.asarray(self.resources.base_cache.kv_pool(layer)).view(np.uint64)[..., 0, 0]

    def pages_of(self, slot: int, table: KVPageTable | None = None) -> list[int]:
        """K-page ids of a slot's row in the device view of the base's table, or of another one."""
        table = self.resources.base_page_table if table is None else table
        keys, values = table.device_ops.to_host(table.kernel_view)[slot].tolist()
        assert values == [-1 if page < 0 else page + table.num_pages for page in keys]
        return [page for page in keys if page >= 0]

    def observe(self, request: RequestHandle | None = None) -> list[Any]:
        """Everything observable, for "nothing has changed": pools, records, counters, the page table, the request."""
        manager, table = self.coordinator.manager, self.resources.base_page_table
        seen = [
            self.free,
            [(record.serial, record.base_page_path.tolist()) for record in manager.records],
            manager.counters(),
            replace(self.metrics, planning_nanoseconds=0),
            None if table is None else self.ops.to_host(table.kernel_view).tolist(),
            self.sync.calls,
            self.coordinator.poisoned,
        ]
        if request is not None:
            state = request.inspect()
            seen += [request.valid, request.phase, request.batch_size, state.state, state.device_work_pending]
            seen.append(state.pending_compaction_mapping)
            for s in state.sequences:
                seen += [s.token_ids.tolist(), s.committed_state_length, s.published_full_block_count]
                seen.append(s.lease.base_pages.tolist())
        return seen


def small(**options: object) -> Harness:
    """A harness with pages of 16 tokens and rows of 4 pages."""
    return Harness(**{"page": 16, "max_tokens": 64, **options})


class PureRecurrentHarness(Harness):
    """Recurrent layers alone: no page at all."""

    kind = ContextCacheDeploymentKind.PURE_RECURRENT


class HybridHarness(Harness):
    """Two recurrent layers and two of attention, in turns."""

    kind = ContextCacheDeploymentKind.HYBRID
    layer_groups = 2


class SharedKvHarness(Harness):
    """A draft that reads the base's KV."""

    kind = ContextCacheDeploymentKind.SHARED_KV


class EagleHarness(Harness):
    """A draft with pages and a table of its own."""

    kind = ContextCacheDeploymentKind.EAGLE


class MtpHarness(Harness):
    """A hybrid base with an attention draft."""

    kind = ContextCacheDeploymentKind.HYBRID_MTP
    layer_groups = 2
