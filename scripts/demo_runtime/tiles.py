"""Tiles: why the same token gets the same bits, however its sequence was cut into chunks.

Dense layers work on *tiles*: `TILE_TOKENS` rows that start at a multiple of `TILE_TOKENS` in the sequence. A tile is
always computed whole, whether one row of it is new (a decode step) or all (a prefill), so that every matrix product of
a token has the same shape and the token the same row in it. BLAS adds numbers up in an order that depends on shapes
alone; so a cached key equals the key that a cold run computes, bit for bit, and so do the logits. With free shapes they
would differ in the last bits.

    chunk [s, e) of a sequence      s            e
    tiles          |       16      |       16      |      s // 16 .. (e - 1) // 16
    rows in use             [------------)               the others are padding: computed, never read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

TILE_TOKENS: Final = 16
"""Rows of one tile. A page must hold whole tiles. 16 keeps a decode step (one tile) cheap and a prefill efficient."""

Floats: TypeAlias = "NDArray[np.float32]"


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive tokens of the sequence in batch slot `slot`; the first one is at position `start`."""

    slot: int
    start: int
    tokens: NDArray[np.int32]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def first_tile(self) -> int:
        """Index of the tile that holds the first token."""
        return self.start // TILE_TOKENS

    @property
    def num_tiles(self) -> int:
        """How many tiles the chunk touches."""
        return -(-self.end // TILE_TOKENS) - self.first_tile

    @property
    def positions(self) -> slice:
        """Positions of all rows of its tiles, padding included."""
        return slice(self.first_tile * TILE_TOKENS, (self.first_tile + self.num_tiles) * TILE_TOKENS)

    @property
    def rows(self) -> slice:
        """Which rows of its tiles are its tokens."""
        return slice(self.start - self.positions.start, self.end - self.positions.start)


def tiles_of(chunks: Sequence[Chunk]) -> list[slice]:
    """Return where each chunk's tiles lie when the tiles of all chunks are stacked."""
    stops = np.cumsum([chunk.num_tiles for chunk in chunks]).tolist()
    return [slice(stop - chunk.num_tiles, stop) for chunk, stop in zip(chunks, stops, strict=True)]


def embed(embedding: Floats, chunks: Sequence[Chunk]) -> Floats:
    """Return `[tiles, TILE_TOKENS, width]` with every chunk's tokens in their rows and zeros elsewhere."""
    tiles = np.zeros((sum(chunk.num_tiles for chunk in chunks), TILE_TOKENS, embedding.shape[1]), dtype=np.float32)
    for chunk, where in zip(chunks, tiles_of(chunks), strict=True):
        tiles[where].reshape(-1, embedding.shape[1])[chunk.rows] = embedding[chunk.tokens]
    return tiles


def last_rows(tiles: Floats, chunks: Sequence[Chunk]) -> Floats:
    """Return the row of every chunk's last token, `[len(chunks), width]`."""
    width = tiles.shape[-1]
    stacked = zip(chunks, tiles_of(chunks), strict=True)
    return np.stack([tiles[where].reshape(-1, width)[chunk.rows.stop - 1] for chunk, where in stacked])


def normalise(rows: Floats, weight: Floats, epsilon: float) -> Floats:
    """RMSNorm over the last axis."""
    mean_square = np.mean(rows * rows, axis=-1, keepdims=True)
    normed: Floats = rows / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return normed


def silu(values: Floats) -> Floats:
    """Return `x * sigmoid(x)`."""
    return np.divide(values, np.float32(1) + np.exp(-values), dtype=np.float32)


def project_out(embedding: Floats, rows: Floats) -> Floats:
    """Return the logits `[rows, vocabulary]`, one product a row, so that a batch gives the bits of its rows alone."""
    return np.stack([embedding @ row for row in rows])
