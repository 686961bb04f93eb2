"""A runtime without a model: it drives a coordinator and fills KV pages with bytes that tell where they belong.

The bytes at a position derive from all tokens up to it (and a seed for the identity), so a page that is stale, foreign,
early or misplaced is a mismatch that names slot and position. Everything goes through the page table's device view, as
an attention kernel would.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentKind,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DeploymentConfig,
    EngineConfig,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    NumpyDeviceOps,
    RequestHandle,
    ResourceType,
)

OK = ContextCacheCoordinatorStatus.OK
HASH_KEY = bytes(range(16))
NUM_LAYERS = 2
PAGE = 128
"""Tokens a page, as in the scenarios."""


def shown(value: object) -> str:
    """What a test is called by a value: its repr without addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def T(n: int) -> list[int]:  # noqa: N802 - the scenarios' own name
    """Tokens 1..n."""
    return list(range(1, n + 1))


def U(n: int) -> list[int]:  # noqa: N802
    """Another run of n tokens, without a shared prefix."""
    return [100_000 + i for i in range(n)]


def V(n: int) -> list[int]:  # noqa: N802
    """A third run of n tokens."""
    return [200_000 + i for i in range(n)]


def expected_bytes(tokens: Sequence[int], length: int, identity: int = 0) -> np.ndarray:
    """The 8 bytes of every position below `length`, `uint64[length]`."""
    digest = hashlib.blake2b(identity.to_bytes(8, "little"), digest_size=8)
    out = np.empty(length, np.uint64)
    for position, token in enumerate(tokens[:length]):
        digest.update(int(token).to_bytes(4, "little", signed=True))
        out[position] = int.from_bytes(digest.digest(), "little")
    return out


@dataclass
class Script:
    """A synchroniser that does as it is told: outcomes in order, then success; counts its calls."""

    outcomes: list[Any] = field(default_factory=list)
    calls: int = 0
    log: list[str] = field(default_factory=list)

    def __call__(self, stream: Any) -> int | None:
        del stream
        self.calls += 1
        outcome = self.outcomes.pop(0) if self.outcomes else None
        self.log.append("sync" if not outcome else "sync failed")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class Harness:
    """A vanilla deployment on the host, and the steps of a runtime."""

    kind = ContextCacheDeploymentKind.VANILLA

    def make_engine(self, **sizes: int) -> EngineConfig:
        """The engine of the deployment."""
        return EngineConfig(
            layers=(LayerType.ATTENTION,) * NUM_LAYERS,
            attention=(AttentionLayerConfig(num_kv_heads=1, head_dim=4),) * NUM_LAYERS,
            **sizes,
        )

    def make_config(self, **options: Any) -> ContextCacheConfig:
        """The cache's configuration."""
        return ContextCacheConfig(**options)

    def make_deployment(self) -> DeploymentConfig:
        """The deployment over the harness's engine."""
        return DeploymentConfig(self.engine)

    def make_resources(self, inner: Any) -> ContextCachePhysicalResources:
        """Caches and page tables; `inner` are the ops that allocate."""
        del inner
        return ContextCachePhysicalResources(self.cache, self.table)

    def __init__(
        self,
        *,
        max_batch: int = 1,
        max_tokens: int = 512,
        num_pages: int = 0,
        page: int = PAGE,
        max_records: int = 1024,
        enabled: bool = True,
        synchronizer: Any = None,
        ops: Any = None,
        stream: Any = None,
    ) -> None:
        self.engine = self.make_engine(
            max_batch_size=max_batch, max_sequence_length=max_tokens, num_pages=num_pages, tokens_per_page=page
        )
        self.page = page
        self.stream = stream
        self.ops = NumpyDeviceOps() if ops is None else ops
        inner = getattr(self.ops, "inner", self.ops)
        self.cache = HybridCacheManager(self.engine, stream, device_ops=inner)
        self.table = (
            KVPageTable(max_batch, self.engine.pages_per_sequence, self.engine.num_pages, device_ops=inner)
            if self.engine.num_attention_layers
            else None
        )
        self.sync = Script() if synchronizer is None else synchronizer
        self.resources = self.make_resources(inner)
        self.config = self.make_config(enabled=enabled, max_records=max_records, hash_key=HASH_KEY)
        self.coordinator = self.build()
        self.mapping = inner.allocate((max_batch,), "int32")
        self.tokens: list[list[int]] = []
        self.identity = 0

    def build(self) -> ContextCacheCoordinator:
        """Build a coordinator over the harness's resources."""
        return ContextCacheCoordinator(
            self.config,
            self.make_deployment(),
            self.kind,
            self.resources,
            self.stream,
            self.sync,
            device_ops=self.ops,
        )

    # What a runtime does

    def begin(self, *sequences: Sequence[int], **options: Any) -> Any:
        """Admit sequences; returns the whole result."""
        extras = options.pop("extras", None)
        media = options.pop("media", None)
        headroom = options.pop("headroom", None)
        admissions = [
            ContextCacheSequenceAdmission(
                tokens,
                **({"key_extras": extras} if extras is not None else {}),
                per_position_media_hash=media,
            )
            for tokens in sequences
        ]
        result = self.coordinator.begin_request(
            ContextCacheBatchAdmission(admissions, **options), self.stream, headroom=headroom
        )
        if result.status is OK:
            self.tokens = [list(tokens) for tokens in sequences]
        return result

    def admit(self, *sequences: Sequence[int], **options: Any) -> tuple[RequestHandle, list[int]]:
        """Admit sequences that must fit; returns the handle and where prefill starts."""
        result = self.begin(*sequences, **options)
        assert result.status is OK, result.status
        assert all(
            start < len(tokens) for start, tokens in zip(result.admission.prefill_starts, sequences, strict=True)
        )
        return result.admission.request, result.admission.prefill_starts

    def prefill(self, request: RequestHandle, *, check: bool = True) -> None:
        """Prepare, write the KV of everything not reused, check the KV of everything, and finalise."""
        assert self.coordinator.prepare_prefill(request) is OK
        starts = [sequence.reuse_token_length for sequence in request.inspect().sequences]
        for slot, start in enumerate(starts):
            self.before_prefill(slot, start)
            self.write(slot, start, len(self.tokens[slot]))
            if check:
                self.check(slot, len(self.tokens[slot]))
        assert self.coordinator.enqueue_prefill_captures(request) is OK
        advances = [ContextCacheSequenceAdvance([7], len(tokens)) for tokens in self.tokens]
        assert self.coordinator.finalize_prefill_publication(request, advances) is OK
        for tokens in self.tokens:
            tokens.append(7)

    def decode(self, request: RequestHandle, *, next_token: int = 7, completed: Iterable[int] = ()) -> None:
        """One decode step: every sequence's lookahead is computed, and one more token sampled."""
        assert self.coordinator.prepare_decode_step(request) is OK
        advances = []
        for slot, tokens in enumerate(self.tokens):
            self.before_step(slot)
            self.write(slot, len(tokens) - 1, len(tokens))
            self.check(slot, len(tokens))
            advances.append(ContextCacheSequenceAdvance([next_token], len(tokens)))
        assert self.coordinator.complete_decode_step(request, advances, tuple(completed)) is OK
        for tokens in self.tokens:
            tokens.append(next_token)

    def before_prefill(self, slot: int, start: int) -> None:
        """Hook for models that keep more than KV."""

    def before_step(self, slot: int) -> None:
        """The same before a decode step."""

    def compact(self, request: RequestHandle, old_to_new: Sequence[int]) -> ContextCacheCoordinatorStatus:
        """Both halves of a compaction."""
        survivors = [slot for slot in old_to_new if slot >= 0]
        assert self.coordinator.begin_batch_compaction(request, old_to_new, len(survivors), self.mapping) is OK
        status = self.coordinator.compact_batch(request)
        if status is OK:
            self.tokens = [self.tokens[old] for old, new in enumerate(old_to_new) if new >= 0]
        return status

    def run(self, *sequences: Sequence[int], decode: int = 0, **options: Any) -> list[int]:
        """A whole request: admit, prefill, some decode steps, finish. Returns where prefill started."""
        request, starts = self.admit(*sequences, **options)
        self.prefill(request)
        for step in range(decode):
            self.decode(request, completed=range(len(sequences)) if step == decode - 1 else ())
        assert self.coordinator.finish(request) is OK
        return starts

    # The pages, as a kernel sees them

    @property
    def attention_layers(self) -> list[int]:
        """Absolute indices of the attention layers."""
        return list(range(NUM_LAYERS))

    def pages_of(self, slot: int) -> list[int]:
        """K-page ids of a slot's row in the device view."""
        view = np.asarray(self.table.device_ops.to_host(self.table.kernel_view))
        k, v = view[slot]
        live = k >= 0
        assert (v[live] == k[live] + self.engine.num_pages).all()
        assert (v[~live] == -1).all()
        return list(k[live].tolist())

    def words(self, layer: int) -> np.ndarray:
        """The pool of one layer as one word a token, `uint64[2, pages, page]`."""
        pool = np.asarray(self.cache.kv_pool(layer))
        return pool.view(np.uint64)[..., 0, 0]

    def write(self, slot: int, start: int, stop: int) -> None:
        """Write K and V of positions [start, stop) of a slot, in every layer."""
        content = expected_bytes(self.tokens[slot], stop, self.identity)
        pages = self.pages_of(slot)
        for layer in self.attention_layers:
            words = self.words(layer)
            for position in range(start, stop):
                page, offset = pages[position // self.page], position % self.page
                words[0, page, offset] = content[position] + np.uint64(layer)
                words[1, page, offset] = ~content[position]

    def check(self, slot: int, stop: int) -> None:
        """Check K and V of positions [0, stop) of a slot."""
        content = expected_bytes(self.tokens[slot], stop, self.identity)
        pages = np.array(self.pages_of(slot))
        positions = np.arange(stop)
        for layer in self.attention_layers:
            words = self.words(layer)
            found = words[:, pages[positions // self.page], positions % self.page]
            for half, want in enumerate((content + np.uint64(layer), ~content)):
                wrong = np.flatnonzero(found[half] != want)
                assert wrong.size == 0, (
                    f"slot {slot}, layer {layer}, {'KV'[half]}: wrong bytes first at position {wrong[0]} of {stop} "
                    f"(page {pages[wrong[0] // self.page]})"
                )

    # What can be seen

    @property
    def free(self) -> int:
        """Free base pages."""
        return self.coordinator.manager.pool(ResourceType.BASE_KV_PAGE).free

    @property
    def records(self) -> int:
        """Published endpoints."""
        return len(self.coordinator.manager.records)

    @property
    def metrics(self) -> Any:
        """The coordinator's metrics."""
        return self.coordinator.metrics()

    def cached_pages(self) -> set[int]:
        """Pages of all records."""
        return {int(page) for record in self.coordinator.manager.records for page in record.base_page_path}

    def observe(self, request: RequestHandle | None = None) -> Any:
        """Everything observable, for "nothing has changed": pools, records, counters, the page table, the request."""
        manager = self.coordinator.manager
        metrics = self.metrics
        view = None if self.table is None else np.asarray(self.ops.to_host(self.table.kernel_view)).tolist()
        seen: list[Any] = [
            self.free,
            [(record.serial, record.base_page_path.tolist()) for record in manager.records],
            manager.counters(),
            {name: getattr(metrics, name) for name in metrics.__dataclass_fields__ if name != "planning_nanoseconds"},
            view,
            self.sync.calls,
            self.coordinator.poisoned,
        ]
        if request is not None:
            state = request.inspect()
            seen += [
                request.valid,
                request.phase,
                request.batch_size,
                state.state,
                state.device_work_pending,
                state.pending_compaction_mapping,
                [
                    (
                        s.token_ids.tolist(),
                        s.committed_state_length,
                        s.published_full_block_count,
                        s.lease.base_pages.tolist(),
                    )
                    for s in state.sequences
                ],
            ]
        return seen
