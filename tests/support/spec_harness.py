"""Harnesses for speculative deployments: draft KV whose bytes depend on the token that follows, and rejected tokens.

Draft KV at position `p` is a function of tokens `0 .. p+1`. So a draft page that is reused behind another successor is a
byte mismatch. Every verification also writes junk where rejected draft tokens would lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheConfig,
    ContextCacheDeploymentKind,
    ContextCacheExecutionMode,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdvance,
    DeploymentConfig,
    EngineConfig,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    RequestHandle,
    ResourceType,
    SpecDecodeConfig,
    SpecDecodeMode,
    partial_kv_bytes_per_slot,
    recurrent_bytes_per_slot,
)
from support.harness import OK, Harness, expected_bytes
from support.hybrid_harness import HybridHarness

JUNK = np.uint64(0xBAD0BAD0BAD0BAD0)
DRAFT_SALT = np.uint64(1) << np.uint64(40)


class SharedKvHarness(Harness):
    """A draft that reads the base's KV: no draft engine, pages or table."""

    kind = ContextCacheDeploymentKind.SHARED_KV
    mode = ContextCacheExecutionMode.SHARED_KV
    spec = SpecDecodeConfig(SpecDecodeMode.SHARED_KV, drafting_step=3)
    paired = False

    def make_deployment(self) -> DeploymentConfig:
        """The deployment over the harness's engine."""
        return DeploymentConfig(self.engine, None, self.spec)

    def begin(self, *sequences: Sequence[int], **options: Any) -> Any:
        """Admit in the harness's speculative mode unless another is named."""
        options.setdefault("execution_mode", self.mode)
        self.speculative = options["execution_mode"] is self.mode
        result = super().begin(*sequences, **options)
        if result.status is OK:
            self.common = [0] * len(sequences)
        return result

    def prefill(self, request: RequestHandle, *, check: bool = True) -> None:
        """Prefill; in speculative mode the draft initialises behind it, up to the prompt's last token."""
        if not self.speculative:
            super().prefill(request, check=check)
            return
        assert self.coordinator.prepare_prefill(request) is OK
        starts = [sequence.reuse_token_length for sequence in request.inspect().sequences]
        for slot, start in enumerate(starts):
            self.before_prefill(slot, start)
            self.write(slot, start, len(self.tokens[slot]))
            self.check(slot, len(self.tokens[slot]))
        self.finalize(request)
        for slot, start in enumerate(starts):
            self.initialise_draft(slot, start)

    def finalize(self, request: RequestHandle) -> None:
        """Report the prompts complete, base and draft agreeing on the whole of them."""
        advances = [ContextCacheSequenceAdvance([7], len(tokens)) for tokens in self.tokens]
        self.common = [len(tokens) for tokens in self.tokens]
        assert self.coordinator.finalize_prefill_publication(request, advances, self.given_common()) is OK
        for tokens in self.tokens:
            tokens.append(7)

    def given_common(self) -> list[int] | None:
        """Common lengths as the mode wants them."""
        return list(self.common)

    def initialise_draft(self, slot: int, start: int) -> None:
        """Compute what the draft keeps for the prompt."""

    def decode(
        self,
        request: RequestHandle,
        *,
        next_token: int = 7,
        completed: Iterable[int] = (),
        accepted: int = 2,
        lag: int = 0,
    ) -> None:
        """One verification that accepts some tokens; the draft's state may lag behind the committed one."""
        if not self.speculative:
            super().decode(request, next_token=next_token, completed=completed)
            return
        assert self.coordinator.prepare_decode_step(request) is OK
        advances = []
        for slot, tokens in enumerate(self.tokens):
            committed = len(tokens) - 1
            tokens.extend([next_token] * accepted)
            new = committed + accepted
            self.before_step(slot)
            self.write(slot, committed, new)
            self.write_junk(slot, new)
            self.check(slot, new)
            before, self.common[slot] = self.common[slot], max(self.common[slot], new - lag)
            self.step_draft(slot, before)
            advances.append(ContextCacheSequenceAdvance([next_token] * accepted, new))
        status = self.coordinator.complete_decode_step(request, advances, tuple(completed), self.given_common())
        assert status is OK, status

    def step_draft(self, slot: int, before: int) -> None:
        """Compute what the draft keeps for the accepted tokens."""

    def write_junk(self, slot: int, start: int) -> None:
        """Write where the rejected draft tokens of a verification would lie."""
        pages = self.pages_of(slot)
        for position in range(start, min(start + 2, len(pages) * self.page)):
            for layer in self.attention_layers:
                self.words(layer)[:, pages[position // self.page], position % self.page] = JUNK


class EagleHarness(SharedKvHarness):
    """A draft with one attention layer, pages and a table of its own."""

    kind = ContextCacheDeploymentKind.EAGLE
    mode = ContextCacheExecutionMode.EAGLE
    spec = SpecDecodeConfig(SpecDecodeMode.EAGLE, drafting_top_k=1, drafting_step=3, verify_size=4)
    paired = True

    def __init__(self, *, num_draft_pages: int = 0, **options: Any) -> None:
        self.num_draft_pages = num_draft_pages
        super().__init__(**options)

    def make_draft(self) -> EngineConfig:
        """The draft engine."""
        return EngineConfig(
            layers=(LayerType.ATTENTION,),
            attention=(AttentionLayerConfig(num_kv_heads=1, head_dim=4),),
            max_batch_size=self.engine.max_batch_size,
            max_sequence_length=self.engine.max_sequence_length,
            num_pages=self.num_draft_pages,
            tokens_per_page=self.engine.tokens_per_page,
        )

    def make_deployment(self) -> DeploymentConfig:
        """Base, draft and scheme."""
        return DeploymentConfig(self.engine, self.make_draft(), self.spec)

    def make_resources(self, inner: Any) -> ContextCachePhysicalResources:
        """The base's resources and the draft's."""
        draft = self.make_draft()
        self.draft_cache = HybridCacheManager(draft, self.stream, device_ops=inner)
        self.draft_table = KVPageTable(
            draft.max_batch_size, draft.pages_per_sequence, draft.num_pages, device_ops=inner
        )
        return ContextCachePhysicalResources(self.cache, self.table, self.draft_cache, self.draft_table)

    def draft_pages_of(self, slot: int) -> list[int]:
        """K-page ids of a slot's draft row in the device view."""
        view = np.asarray(self.draft_table.device_ops.to_host(self.draft_table.kernel_view))
        return [int(page) for page in view[slot, 0] if page >= 0]

    def draft_words(self) -> np.ndarray:
        """The draft's pool as one word a token, `uint64[2, pages, page]`."""
        return np.asarray(self.draft_cache.kv_pool(0)).view(np.uint64)[..., 0, 0]

    def expected_draft(self, slot: int, stop: int) -> np.ndarray:
        """Draft words of positions below `stop`: each depends on the token that follows it."""
        tokens = self.tokens[slot]
        assert len(tokens) > stop
        return expected_bytes(tokens, stop + 1, self.identity)[1:] + DRAFT_SALT

    def write_draft(self, slot: int, start: int, stop: int) -> None:
        """Write draft KV of positions [start, stop)."""
        content, pages, words = self.expected_draft(slot, stop), self.draft_pages_of(slot), self.draft_words()
        for position in range(start, stop):
            words[0, pages[position // self.page], position % self.page] = content[position]
            words[1, pages[position // self.page], position % self.page] = ~content[position]

    def check_draft(self, slot: int, stop: int) -> None:
        """Check draft KV of positions [0, stop)."""
        content, pages = self.expected_draft(slot, stop), np.array(self.draft_pages_of(slot))
        positions = np.arange(stop)
        found = self.draft_words()[:, pages[positions // self.page], positions % self.page]
        for half, want in enumerate((content, ~content)):
            wrong = np.flatnonzero(found[half] != want)
            assert wrong.size == 0, (
                f"slot {slot}, draft {'KV'[half]}: wrong bytes first at position {wrong[0]} of {stop}"
            )

    def initialise_draft(self, slot: int, start: int) -> None:
        """Draft KV of the prompt, its last position with the lookahead as successor."""
        self.write_draft(slot, start, self.common[slot])
        self.check_draft(slot, self.common[slot])

    def step_draft(self, slot: int, before: int) -> None:
        """Draft KV of what is common now, and junk behind it."""
        self.write_draft(slot, before, self.common[slot])
        self.check_draft(slot, self.common[slot])
        pages = self.draft_pages_of(slot)
        for position in range(self.common[slot], min(self.common[slot] + 2, len(pages) * self.page)):
            self.draft_words()[:, pages[position // self.page], position % self.page] = JUNK

    @property
    def free_draft(self) -> int:
        """Free draft pages."""
        return self.coordinator.manager.pool(ResourceType.DRAFT_KV_PAGE).free

    def cached_draft_pages(self) -> set[int]:
        """Draft pages of all records."""
        return {int(page) for record in self.coordinator.manager.records for page in record.draft_page_path}


class MtpHarness(EagleHarness, HybridHarness):
    """A hybrid base with an attention draft: endpoints are published during the prefill, at given lengths."""

    kind = ContextCacheDeploymentKind.HYBRID_MTP
    mode = ContextCacheExecutionMode.MTP
    spec = SpecDecodeConfig(SpecDecodeMode.MTP, drafting_step=2, verify_size=3)
    hidden_size = 4

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        inner = getattr(self.ops, "inner", self.ops)
        self.hidden = inner.allocate((self.engine.max_batch_size, 3, self.hidden_size), "float16")
        self.endpoints: Sequence[int] = ()

    def make_engine(self, **sizes: int) -> EngineConfig:
        """The hybrid engine with a hidden width."""
        return HybridHarness.make_engine(self, hidden_size=self.hidden_size, **sizes)

    def make_config(self, **options: Any) -> ContextCacheConfig:
        """Budgets that pay for exactly the wanted slots of the whole deployment."""
        deployment = self.make_deployment()
        return ContextCacheConfig(
            recurrent_snapshot_pool_bytes=self.snapshots * recurrent_bytes_per_slot(deployment),
            partial_kv_snapshot_pool_bytes=self.partial_snapshots * partial_kv_bytes_per_slot(deployment),
            **options,
        )

    def given_common(self) -> None:
        """MTP has none."""

    def hidden_word(self, slot: int, length: int) -> np.uint64:
        """The hidden row of a slot's token `length - 1`, as one word."""
        return expected_bytes(self.tokens[slot], length, self.identity + 9)[-1]

    def prefill(self, request: RequestHandle, *, check: bool = True) -> None:
        """Prefill in pieces that end at the wanted endpoints; publish each; fold the boundary in after a hit."""
        if not self.speculative:
            HybridHarness.prefill(self, request, check=check)
            return
        assert self.coordinator.prepare_prefill(request) is OK
        starts = [sequence.reuse_token_length for sequence in request.inspect().sequences]
        words = np.asarray(self.hidden).view(np.uint64)[..., 0]
        for slot, start in enumerate(starts):
            length = len(self.tokens[slot])
            self.check_state(slot, start)
            if start:
                words[slot, 2] = 0
                status = self.coordinator.restore_hybrid_mtp_boundary_hidden(request, slot, self.hidden, 2)
                assert status is OK
                # Anew, not through `words`: on a GPU it is looking that waits for the stream.
                seen = np.asarray(self.hidden).view(np.uint64)[slot, 2, 0]
                assert seen == self.hidden_word(slot, start), "another boundary's hidden row"
                self.check_draft(slot, start - 1)
            reached = start
            for end in [*[point for point in self.endpoints if start < point < length], length]:
                self.write(slot, reached, end)
                self.check(slot, end)
                self.write_state(slot, end)
                self.write_draft(slot, max(reached - 1, 0), end - 1)
                words[slot, 1] = self.hidden_word(slot, end)
                reached = end
                if end in self.endpoints:
                    status = self.coordinator.publish_hybrid_mtp_endpoint(request, slot, end, self.hidden, 1)
                    assert status is OK
        self.finalize(request)
        for slot in range(len(starts)):
            self.write_draft(slot, len(self.tokens[slot]) - 2, len(self.tokens[slot]) - 1)

    def before_step(self, slot: int) -> None:
        """The verification leaves the state of what it accepted."""
        if self.speculative:
            self.write_state(slot, len(self.tokens[slot]) - 1)
        else:
            HybridHarness.before_step(self, slot)
