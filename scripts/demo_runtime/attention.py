"""Causal attention with rotary positions, whose keys and values live in a store that somebody else keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from demo_runtime.tiles import TILE_TOKENS, Chunk, Floats, tiles_of


class KvStore(Protocol):
    """Where attention keeps its keys and values; `demo_runtime.paged.PagedKv` keeps them in pages."""

    def write(self, layer: int, slot: int, start: int, keys: Floats, values: Floats) -> None:
        """Store the rows `[n, num_kv_heads, head_dim]` of the positions from `start` on."""

    def read(self, layer: int, slot: int, length: int) -> tuple[Floats, Floats]:
        """Return keys and values of the positions below `length`, followed by zero rows up to a whole page."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Query heads share KV heads in groups of `num_heads // num_kv_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float

    @property
    def projected_width(self) -> int:
        """Elements of queries, keys and values of one token."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Attention:
    """The attention of all layers of a model.

    Args:
        shape: the sizes.
        max_sequence_length: positions for which rotations are prepared.
    """

    def __init__(self, shape: AttentionShape, max_sequence_length: int) -> None:
        self.shape = shape
        frequencies = shape.rope_base ** -(np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim)
        positions = np.arange(-(-max_sequence_length // TILE_TOKENS) * TILE_TOKENS)
        angles = np.outer(positions, frequencies)
        self._cosines = np.cos(angles).astype(np.float32)[:, None, :]
        self._sines = np.sin(angles).astype(np.float32)[:, None, :]
        future = np.triu(np.ones((TILE_TOKENS, TILE_TOKENS), dtype=bool), k=1)
        self._causal_bias = np.where(future, np.float32(-np.inf), np.float32(0))

    def attend(self, layer: int, chunks: Sequence[Chunk], projected: Floats, kv: KvStore) -> Floats:
        """Store the chunks' keys and values, and let their queries look at all positions up to their own.

        Args:
            layer: names the keys and values in `kv`.
            chunks: whose tiles are stacked in `projected`.
            projected: `[tiles, TILE_TOKENS, projected_width]`, queries, keys and values side by side.
            kv: holds all positions before the chunks.

        Returns:
            float32 `[tiles, TILE_TOKENS, num_heads * head_dim]`.
        """
        shape = self.shape
        mixed = np.empty((*projected.shape[:2], shape.num_heads * shape.head_dim), dtype=np.float32)
        for chunk, tiles in zip(chunks, tiles_of(chunks), strict=True):
            rows = projected[tiles].reshape(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
            turned = self._rotate(rows[:, : -shape.num_kv_heads], chunk.positions)
            queries, keys = np.split(turned, [shape.num_heads], axis=1)
            values = rows[:, -shape.num_kv_heads :]
            kv.write(layer, chunk.slot, chunk.start, keys[chunk.rows], values[chunk.rows])
            all_keys, all_values = kv.read(layer, chunk.slot, chunk.end)
            mixed[tiles] = self._attend_tiles(chunk, queries * np.float32(shape.head_dim**-0.5), all_keys, all_values)
        return mixed

    def _attend_tiles(self, chunk: Chunk, queries: Floats, keys: Floats, values: Floats) -> Floats:
        """Tile by tile: a tile sees the keys up to its own end, a number that no way of chunking changes."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        by_head = queries.reshape(chunk.num_tiles, TILE_TOKENS, shape.num_kv_heads, group, shape.head_dim)
        mixed = np.empty((chunk.num_tiles, TILE_TOKENS, shape.num_heads * shape.head_dim), dtype=np.float32)
        for tile in range(chunk.num_tiles):
            seen = (chunk.first_tile + tile + 1) * TILE_TOKENS
            query = by_head[tile].transpose(1, 2, 0, 3).reshape(shape.num_kv_heads, group * TILE_TOKENS, shape.head_dim)
            scores = np.matmul(query, keys[:seen].transpose(1, 2, 0))
            scores.reshape(shape.num_kv_heads, group, TILE_TOKENS, seen)[..., -TILE_TOKENS:] += self._causal_bias
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            read = np.matmul(scores, values[:seen].transpose(1, 0, 2))
            read = read.reshape(shape.num_kv_heads, group, TILE_TOKENS, shape.head_dim).transpose(2, 0, 1, 3)
            mixed[tile] = read.reshape(TILE_TOKENS, -1)
        return mixed

    def _rotate(self, rows: Floats, positions: slice) -> Floats:
        """Rotary position embedding on neighbouring pairs, the order in which GGUF stores llama's queries and keys."""
        cosines, sines = self._cosines[positions], self._sines[positions]
        even, odd = rows[..., 0::2], rows[..., 1::2]
        turned = np.empty_like(rows)
        turned[..., 0::2] = even * cosines - odd * sines
        turned[..., 1::2] = even * sines + odd * cosines
        return turned
