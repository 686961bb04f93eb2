"""Puts a runtime together: a model, its memory, and the coordinator that borrows the memory.

The stream is `None` and the device ops are NumPy's, since everything here lives on the host. A GPU runtime passes its
stream and leaves the ops at their default; the calls stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxcache import (
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCachePhysicalResources,
    DeploymentConfig,
    validate_context_cache_deployment,
)
from demo_runtime.engine import EngineSizes, lend_pages
from demo_runtime.model import LlamaModel
from demo_runtime.paged import PagedKv
from demo_runtime.tiles import Chunk, Floats

Memory = TypeVar("Memory")
_Memory_contra = TypeVar("_Memory_contra", contravariant=True)


class Model(Protocol[_Memory_contra]):
    """What the loops need of a model."""

    def forward(self, chunks: Sequence[Chunk], memory: _Memory_contra, /) -> Floats:
        """Compute the chunks, at most one a slot; return the logits after each, float32 `[chunks, vocabulary]`."""


class Runtime(Generic[Memory]):
    """A model, its memory, and the coordinator over it.

    Args:
        model: the forward pass.
        memory: what it reads and writes: pages and, in a model with recurrent layers, the state of each slot.
        resources: the same memory as the coordinator sees it, with the page table.
        config: how the context cache behaves.

    Attributes:
        coordinator: the context cache. It knows nothing of the model.
        memory: as given.
        stream: where device work goes; `None` on the host.
    """

    def __init__(
        self,
        model: Model[Memory],
        memory: Memory,
        resources: ContextCachePhysicalResources,
        config: ContextCacheConfig | None = None,
    ) -> None:
        self.memory = memory
        self._model = model
        self._cache = resources.base_cache
        self.stream = self._cache.stream
        deployment = DeploymentConfig(base=self._cache.config)
        self.coordinator = ContextCacheCoordinator(
            config or ContextCacheConfig(),
            deployment,
            validate_context_cache_deployment(deployment),
            resources,
            self.stream,
        )

    def prefill(self, prompts: Sequence[Sequence[int]], *, cut_at: int = 0) -> Floats:
        """Compute what is missing of each prompt, from the device lengths that `prepare_prefill` has set.

        Args:
            prompts: one per slot, in slot order.
            cut_at: a position at which the work is cut into two chunks; see `prefill`.

        Returns:
            float32 `[batch, vocabulary]`, the logits after each prompt.
        """
        starts = self._lengths(len(prompts))
        logits = prefill(self._model, self.memory, prompts, starts.tolist(), cut_at)
        ends = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        self._cache.commit_sequence_length(ends - starts, self.stream)
        return logits

    def decode(self, tokens: Sequence[int]) -> Floats:
        """Compute one token of every slot; return the logits after it, float32 `[batch, vocabulary]`."""
        starts = self._lengths(len(tokens)).tolist()
        chunks = [one_token(slot, start, token) for slot, (start, token) in enumerate(zip(starts, tokens, strict=True))]
        logits = self._model.forward(chunks, self.memory)
        self._cache.commit_sequence_length(1, self.stream)
        return logits

    def new_slot_mapping(self) -> NDArray[np.int32]:
        """Return a device array that takes an old-to-new slot mapping during a compaction."""
        return np.zeros(self._cache.max_batch, dtype=np.int32)

    def _lengths(self, batch_size: int) -> NDArray[np.int32]:
        """Read how many positions of each slot are in the cache, as a kernel would: from the device array."""
        lengths: NDArray[np.int32] = np.array(self._cache.kv_lengths[:batch_size])
        return lengths


def prefill(
    model: Model[Memory], memory: Memory, prompts: Sequence[Sequence[int]], starts: Sequence[int], cut_at: int = 0
) -> Floats:
    """Compute `prompts[i][starts[i]:]` in slot i; return the logits after each prompt, float32 `[batch, vocabulary]`.

    Args:
        model: computes.
        memory: holds the state of every position below the starts, and takes the rest.
        prompts: one per slot, in slot order.
        starts: where each slot's work begins, below its prompt's end.
        cut_at: a position below every prompt's end. Work that begins below it is cut there into two chunks.
    """
    middles = [max(start, cut_at) for start in starts]
    heads = [
        Chunk(slot, start, np.array(prompt[start:middle], dtype=np.int32))
        for slot, (prompt, start, middle) in enumerate(zip(prompts, starts, middles, strict=True))
        if start < middle
    ]
    if heads:
        model.forward(heads, memory)
    tails = [
        Chunk(slot, middle, np.array(prompt[middle:], dtype=np.int32))
        for slot, (prompt, middle) in enumerate(zip(prompts, middles, strict=True))
    ]
    return model.forward(tails, memory)


def one_token(slot: int, position: int, token: int) -> Chunk:
    """Return the chunk of a decode step."""
    return Chunk(slot, position, np.array([token], dtype=np.int32))


def llama_runtime(
    model: LlamaModel, *, max_batch_size: int, max_sequence_length: int, tokens_per_page: int, num_pages: int
) -> Runtime[PagedKv]:
    """Give a llama its pages, and lend them to a coordinator.

    Args:
        model: any llama.
        max_batch_size: slots.
        max_sequence_length: tokens of the longest sequence.
        tokens_per_page: a multiple of `TILE_TOKENS`.
        num_pages: pages in the pool of each layer; what running sequences leave free keeps the past.
    """
    sizes = EngineSizes(max_batch_size, max_sequence_length, tokens_per_page, num_pages)
    engine = lend_pages(model.shape.num_layers, model.shape.attention, sizes)
    return Runtime(model, engine.memory, ContextCachePhysicalResources(engine.cache, engine.table))
