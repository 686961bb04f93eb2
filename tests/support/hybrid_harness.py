"""The harness for models with recurrent layers: the state of a slot tells how many, and which, tokens it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheConfig,
    ContextCacheDeploymentKind,
    EngineConfig,
    LayerType,
    RecurrentStateConfig,
    RequestHandle,
    ResourceType,
    partial_kv_bytes_per_slot,
    recurrent_bytes_per_slot,
)
from support.harness import Harness, expected_bytes

RECURRENT = RecurrentStateConfig(num_heads=1, head_dim=3, state_size=2, conv_dim=2, conv_kernel=4, conv_dtype="float16")
"""State of 24 bytes and convolution state of 16 bytes a layer: whole words, so that content can be spelled out."""


class HybridHarness(Harness):
    """Attention at layers 0 and 2, recurrent state at layers 1 and 3; `PureRecurrentHarness` leaves attention out."""

    kind = ContextCacheDeploymentKind.HYBRID
    layers = (LayerType.ATTENTION, LayerType.RECURRENT, LayerType.ATTENTION, LayerType.RECURRENT)

    def __init__(self, *, snapshots: int = 2, partial_snapshots: int | None = None, **options: Any) -> None:
        self.snapshots = snapshots
        self.partial_snapshots = snapshots if partial_snapshots is None else partial_snapshots
        super().__init__(**options)

    def make_engine(self, **sizes: int) -> EngineConfig:
        """The engine of the deployment."""
        attention = self.layers.count(LayerType.ATTENTION)
        return EngineConfig(
            layers=self.layers,
            attention=(AttentionLayerConfig(num_kv_heads=1, head_dim=4),) * attention,
            recurrent=RECURRENT,
            **sizes,
        )

    def make_config(self, **options: Any) -> ContextCacheConfig:
        """Budgets that pay for exactly the wanted slots."""
        return ContextCacheConfig(
            recurrent_snapshot_pool_bytes=self.snapshots * recurrent_bytes_per_slot(self.engine),
            partial_kv_snapshot_pool_bytes=self.partial_snapshots * partial_kv_bytes_per_slot(self.engine),
            **options,
        )

    @property
    def attention_layers(self) -> list[int]:
        """Absolute indices of the attention layers."""
        return [i for i, layer in enumerate(self.layers) if layer is LayerType.ATTENTION]

    @property
    def recurrent_layers(self) -> list[int]:
        """Absolute indices of the recurrent layers."""
        return [i for i, layer in enumerate(self.layers) if layer is LayerType.RECURRENT]

    def state_words(self, layer: int, slot: int) -> list[np.ndarray]:
        """State and convolution state of a slot as words, writable."""
        return [
            np.asarray(array)[slot].reshape(-1).view(np.uint64)
            for array in (self.cache.recurrent_state(layer), self.cache.conv_state(layer))
        ]

    def expected_state(self, tokens: Sequence[int], layer: int) -> np.uint64:
        """The word that every word of a slot's state is, after these tokens; 0 after none."""
        return expected_bytes(tokens, len(tokens), self.identity + 1)[-1] + np.uint64(layer) if tokens else np.uint64(0)

    def check_state(self, slot: int, length: int) -> None:
        """Check that a slot's state, in every layer, has seen exactly the first `length` tokens."""
        for layer in self.recurrent_layers:
            want = self.expected_state(self.tokens[slot][:length], layer)
            for name, words in zip(("state", "convolution state"), self.state_words(layer, slot), strict=True):
                assert (words == want).all(), f"slot {slot}, layer {layer}: {name} is not that of {length} tokens"

    def write_state(self, slot: int, length: int) -> None:
        """Let a slot's state have seen the first `length` tokens."""
        for layer in self.recurrent_layers:
            for words in self.state_words(layer, slot):
                words[:] = self.expected_state(self.tokens[slot][:length], layer)

    def fill_state(self, byte: int) -> None:
        """Fill the state of every slot with a byte, as another request would leave it."""
        for layer in self.recurrent_layers:
            for array in (self.cache.recurrent_state(layer), self.cache.conv_state(layer)):
                np.asarray(array).view(np.uint8)[:] = byte

    def before_prefill(self, slot: int, start: int) -> None:
        """The state that a prefill starts from is that of what it does not compute."""
        self.check_state(slot, start)
        self.write_state(slot, len(self.tokens[slot]))

    def before_step(self, slot: int) -> None:
        """The same before a decode step, which adds the lookahead."""
        self.check_state(slot, len(self.tokens[slot]) - 1)
        self.write_state(slot, len(self.tokens[slot]))

    def begin_only(self, *sequences: Sequence[int]) -> list[int]:
        """Admit and finish at once; returns where prefill would have started."""
        request, starts = self.admit(*sequences)
        self.coordinator.finish(request)
        return starts

    def free_slots(self) -> tuple[int, int]:
        """Free recurrent and partial-KV snapshot slots."""
        manager = self.coordinator.manager
        return manager.pool(ResourceType.RECURRENT_SNAPSHOT).free, manager.pool(ResourceType.PARTIAL_KV_SNAPSHOT).free

    def write(self, slot: int, start: int, stop: int) -> None:
        """Write KV where there is attention."""
        if self.attention_layers:
            super().write(slot, start, stop)

    def check(self, slot: int, stop: int) -> None:
        """Check KV where there is attention."""
        if self.attention_layers:
            super().check(slot, stop)

    def request_lengths(self, request: RequestHandle) -> list[int]:
        """Exact lengths that the sequences have published."""
        return [sequence.published_exact_length for sequence in request.inspect().sequences]


class PureRecurrentHarness(HybridHarness):
    """Recurrent layers alone: no page at all."""

    kind = ContextCacheDeploymentKind.PURE_RECURRENT
    layers = (LayerType.RECURRENT, LayerType.RECURRENT)
