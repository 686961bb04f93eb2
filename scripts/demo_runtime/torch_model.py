"""The llama on a GPU: PyTorch computes, in pages that it allocated itself and lends to the coordinator without a copy.

The stream is a non-blocking one of PyTorch's. Everything, the coordinator's uploads included, is enqueued on it, so the page
table that attention reads is the one of its step without anybody waiting.

A prompt is computed in pieces that end at multiples of `chunk_tokens`. Where reuse starts at such a multiple, every product of
a token has the same shape with reuse and without, and its logits the same bits; elsewhere they differ in the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ctxcache import (
    AttentionLayerConfig,
    ContextCachePhysicalResources,
    EngineConfig,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    NumbaDeviceOps,
)
from demo_runtime.model import LlamaShape, LlamaWeights
from demo_runtime.runtime import Runtime, prefill
from demo_runtime.tiles import Chunk, Floats


class TorchPages:
    """Pools of PyTorch's, and the device view of the page table.

    Args:
        pools: one per layer, `[2, num_pages, tokens_per_page, num_kv_heads, head_dim]` on the GPU.
        table: int32 `[max_batch, 2, max_pages_per_sequence]` on the GPU, the memory that the coordinator uploads to.
    """

    def __init__(self, pools: Sequence[torch.Tensor], table: torch.Tensor) -> None:
        self.tokens_per_page = pools[0].shape[2]
        self._pages = [pool.flatten(0, 1) for pool in pools]
        self._table = table

    def write(self, layer: int, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows `[n, num_kv_heads, head_dim]` of the positions from `start` on."""
        positions = torch.arange(start, start + len(keys), device=keys.device)
        pages = self._table[slot][:, positions // self.tokens_per_page].long()
        offsets = positions % self.tokens_per_page
        self._pages[layer][pages[0], offsets] = keys
        self._pages[layer][pages[1], offsets] = values

    def read(self, layer: int, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values of the positions below `length`, `[length, num_kv_heads, head_dim]` each."""
        pages = self._table[slot, :, : -(-length // self.tokens_per_page)].long()
        keys, values = (self._pages[layer][half].flatten(0, 1)[:length] for half in pages)
        return keys, values


class TorchLlama:
    """The forward pass in float32.

    Args:
        shape: the sizes.
        weights: on the host; copied to the GPU.
        max_sequence_length: positions for which rotations are prepared.
        stream: where everything is enqueued.
        chunk_tokens: chunks end at its multiples.
    """

    def __init__(
        self,
        shape: LlamaShape,
        weights: LlamaWeights,
        max_sequence_length: int,
        stream: torch.cuda.Stream,
        chunk_tokens: int,
    ) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        self.shape = shape
        self.chunk_tokens = chunk_tokens
        self._stream = stream
        with torch.cuda.stream(stream):
            self._embedding = torch.tensor(weights.embedding, device="cuda")
            self._output_norm = torch.tensor(weights.output_norm, device="cuda")
            names = ("attention_norm", "query_key_value", "attention_output", "feed_forward_norm", "gate_up", "down")
            self._layers = [
                {name: torch.tensor(getattr(layer, name), device="cuda") for name in names} for layer in weights.layers
            ]
            size = shape.attention.head_dim
            frequencies = shape.attention.rope_base ** -(np.arange(0, size, 2, dtype=np.float64) / size)
            angles = np.outer(np.arange(max_sequence_length), frequencies)
            self._cosines = torch.from_numpy(np.cos(angles).astype(np.float32)[:, None, :]).cuda()
            self._sines = torch.from_numpy(np.sin(angles).astype(np.float32)[:, None, :]).cuda()

    def forward(self, chunks: Sequence[Chunk], memory: TorchPages, /) -> Floats:
        """Compute each chunk on top of its pages; return the logits after each, `[chunks, vocabulary]`, on the host."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            last = [self._whole_chunk(chunk, memory) for chunk in chunks]
            normed = torch.stack([self._normalise(row, self._output_norm) for row in last])
            logits = torch.stack([self._embedding @ row for row in normed])
            host: Floats = logits.cpu().numpy()  # waits for the stream: the runtime's own synchronisation
        return host

    def _whole_chunk(self, chunk: Chunk, memory: TorchPages) -> torch.Tensor:
        """Compute a chunk piece by piece; return the hidden row of its last token."""
        start, row = chunk.start, None
        tokens = torch.from_numpy(chunk.tokens.astype(np.int64)).cuda(non_blocking=True)
        while start < chunk.end:
            end = min((start // self.chunk_tokens + 1) * self.chunk_tokens, chunk.end)
            row = self._piece(chunk.slot, start, tokens[start - chunk.start : end - chunk.start], memory)
            start = end
        assert row is not None  # noqa: S101 - a chunk has a token
        return row

    def _piece(self, slot: int, start: int, tokens: torch.Tensor, memory: TorchPages) -> torch.Tensor:
        hidden = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            projected = self._normalise(hidden, layer["attention_norm"]) @ layer["query_key_value"]
            hidden = hidden + self._attend(index, slot, start, projected, memory) @ layer["attention_output"]
            normed = self._normalise(hidden, layer["feed_forward_norm"])
            gate, up = (normed @ layer["gate_up"]).chunk(2, dim=-1)
            hidden = hidden + (functional.silu(gate) * up) @ layer["down"]
        return hidden[-1]

    def _attend(self, layer: int, slot: int, start: int, projected: torch.Tensor, memory: TorchPages) -> torch.Tensor:
        shape = self.shape.attention
        count = len(projected)
        rows = projected.view(count, -1, shape.head_dim)
        queries, keys, values = rows.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        memory.write(layer, slot, start, self._rotate(keys, start), values)
        all_keys, all_values = memory.read(layer, slot, start + count)
        group = shape.num_heads // shape.num_kv_heads
        mixed = functional.scaled_dot_product_attention(
            self._rotate(queries, start).transpose(0, 1)[None],
            all_keys.repeat_interleave(group, dim=1).transpose(0, 1)[None],
            all_values.repeat_interleave(group, dim=1).transpose(0, 1)[None],
            attn_mask=torch.ones(count, start + count, dtype=torch.bool, device="cuda").tril(start),
        )
        return mixed[0].transpose(0, 1).reshape(count, -1)

    def _rotate(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Rotary positions on neighbouring pairs, as GGUF stores llama's queries and keys."""
        cosines, sines = (table[start : start + len(rows)] for table in (self._cosines, self._sines))
        even, odd = rows[..., 0::2], rows[..., 1::2]
        return torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1).flatten(-2)

    def _normalise(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.shape.norm_epsilon) * weight


class TorchRuntime(Runtime[TorchPages]):
    """The same runtime, with its lengths and mappings on the GPU."""

    def prefill(self, prompts: Sequence[Sequence[int]], *, cut_at: int = 0) -> Floats:
        """Compute what is missing of each prompt; see `Runtime.prefill`."""
        starts = self._lengths(len(prompts))
        logits = prefill(self._model, self.memory, prompts, starts.tolist(), cut_at)
        computed = np.array([len(prompt) for prompt in prompts], dtype=np.int32) - starts
        with torch.cuda.stream(self.stream):
            self._cache.commit_sequence_length(torch.from_numpy(computed).cuda(), self.stream)
        return logits

    def new_slot_mapping(self) -> Any:
        """Return a device array that takes an old-to-new slot mapping during a compaction."""
        with torch.cuda.stream(self.stream):
            return torch.zeros(self._cache.max_batch, dtype=torch.int32, device="cuda")

    def _lengths(self, batch_size: int) -> NDArray[np.int32]:
        with torch.cuda.stream(self.stream):
            lengths: NDArray[np.int32] = torch.as_tensor(self._cache.kv_lengths, device="cuda").cpu().numpy()
        return lengths[:batch_size]


def torch_runtime(
    model: TorchLlama,
    stream: torch.cuda.Stream,
    *,
    max_batch_size: int,
    max_sequence_length: int,
    tokens_per_page: int,
    num_pages: int,
) -> TorchRuntime:
    """Allocate pages with PyTorch, and lend them to a coordinator; see `runtime.llama_runtime` for the arguments."""
    shape = model.shape
    attention = shape.attention
    config = EngineConfig(
        layers=(LayerType.ATTENTION,) * shape.num_layers,
        attention=(AttentionLayerConfig(attention.num_kv_heads, attention.head_dim),) * shape.num_layers,
        kv_dtype="float32",
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        num_pages=num_pages,
        tokens_per_page=tokens_per_page,
    )
    pool_shape = (2, num_pages, tokens_per_page, attention.num_kv_heads, attention.head_dim)
    with torch.cuda.stream(stream):
        pools = [torch.full(pool_shape, torch.nan, device="cuda") for _ in range(shape.num_layers)]
    stream.synchronize()
    ops = NumbaDeviceOps()
    ops.load_kernels(stream)
    cache = HybridCacheManager.from_arrays(config, kv_pools=pools, stream=stream, device_ops=ops)
    for layer, pool in enumerate(pools):
        assert cache.kv_pool(layer) is pool  # noqa: S101 - borrowed, not copied
    table = KVPageTable(max_batch_size, config.pages_per_sequence, num_pages, device_ops=ops)
    view = torch.as_tensor(table.kernel_view, device="cuda")
    assert view.data_ptr() == table.view_address  # noqa: S101 - likewise the other way round
    return TorchRuntime(model, TorchPages(pools, view), ContextCachePhysicalResources(cache, table))
