"""A draft model in the shape of EAGLE: it reads the base's thoughts, and so needs a cache of its own.

    position t of the draft takes    h(t)   what the base made of tokens 0 .. t
                             and     token t + 1, its successor
    and gives                        an estimate of h(t + 1), from which the base's own head reads token t + 2

So the draft's keys and values at a position depend on the token that *follows* it. When two texts part right behind a
page, the base's page is the same for both and the draft's is not.

Both inputs go through one projection to the base's last layer, used once more, with keys and values in the draft's own
pages. The projection is fitted in closed form: ridge regression from the inputs at `t` to what the last layer was given
at `t + 1`, over the positions of one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from demo_runtime.attention import KvStore
from demo_runtime.model import LlamaModel, apply_layer
from demo_runtime.tiles import Chunk, Floats, embed

EMBEDDING_SCALE: Final = np.float32(30)
"""Embeddings are small, about 0.1. Scaled up they weigh more than the hidden state, and the ridge shrinks them less."""

RIDGE: Final = 0.1
"""Penalty on the squared weights, as a share of the inputs' mean variance."""


class EagleDraft:
    """The draft model; it has one layer, number 0 of the memory that it is given.

    Args:
        base: lends its last layer, its embedding and its head.
        projection: float32 `[2 * width, width]`, from a normalised hidden state and an embedding side by side.
        offset: float32 `[width]`, added to it.
    """

    def __init__(self, base: LlamaModel, projection: Floats, offset: Floats) -> None:
        self._base = base
        self._projection = projection
        self._offset = offset

    def forward(self, start: int, residuals: Floats, successors: Sequence[int], kv: KvStore) -> Floats:
        """Compute consecutive positions of slot 0, and add their keys and values to `kv`.

        Args:
            start: the first position; `kv` holds the draft's state of all positions below.
            residuals: float32 `[n, width]`, the base's last residual stream at these positions, or estimates of it.
            successors: the token behind each position.
            kv: read and written through the draft's page table.

        Returns:
            float32 `[n, width]`: an estimate of the base's last residual stream at each *next* position.
        """
        rows = draft_inputs(self._base, residuals, successors)
        chunk = Chunk(0, start, np.arange(len(rows), dtype=np.int32))
        # As with the base, tiles make a row's bits independent of what else is computed beside it.
        projected = np.matmul(embed(rows, [chunk]), self._projection) + self._offset
        estimates = apply_layer(self._base.weights.layers[-1], 0, self._base, [chunk], projected, kv)
        return rows_of(estimates, chunk)

    def most_likely(self, estimate: Floats) -> int:
        """Read the most likely token off one estimate, float32 `[width]`."""
        return int(np.argmax(self._base.logits(estimate[None])[0]))


def draft_inputs(base: LlamaModel, residuals: Floats, successors: Sequence[int]) -> Floats:
    """Return hidden states and embeddings side by side, float32 `[n, 2 * width]`."""
    embeddings = base.weights.embedding[np.asarray(successors, dtype=np.int32)] * EMBEDDING_SCALE
    return np.concatenate([base.normed(residuals), embeddings], axis=1)


def rows_of(tiles: Floats, chunk: Chunk) -> Floats:
    """Return the rows of one chunk's tokens, `[n, width]`, of the tiles that hold them."""
    return tiles.reshape(-1, tiles.shape[-1])[chunk.rows]


def fit_draft(base: LlamaModel, text: Sequence[int], kv: KvStore) -> EagleDraft:
    """Fit the projection on one text.

    Args:
        base: computes the text once.
        text: token ids, three at least.
        kv: memory for them that nobody else needs.
    """
    chunk = Chunk(0, 0, np.asarray(text, dtype=np.int32))
    before_last_layer, after = (rows_of(tiles, chunk) for tiles in base.residuals([chunk], kv, keep=2))
    # The first position is left out: its state is far larger than any other's and would outweigh them.
    inputs = draft_inputs(base, after[1:-1], text[2:]).astype(np.float64)
    targets = before_last_layer[2:].astype(np.float64)
    mean_input, mean_target = inputs.mean(axis=0), targets.mean(axis=0)
    centred = inputs - mean_input
    gram = centred.T @ centred
    penalty = RIDGE * np.trace(gram) / len(gram)
    projection = np.linalg.solve(gram + penalty * np.eye(len(gram)), centred.T @ (targets - mean_target))
    offset = mean_target - mean_input @ projection
    return EagleDraft(base, projection.astype(np.float32), offset.astype(np.float32))
