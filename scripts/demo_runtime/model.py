"""A llama in NumPy whose keys and values live in pages that it does not own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from demo_runtime.attention import Attention, AttentionShape, KvStore
from demo_runtime.tiles import Chunk, Floats, embed, last_rows, normalise, project_out, silu


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a llama: `width` is the hidden size."""

    num_layers: int
    width: int
    attention: AttentionShape
    feed_forward: int
    vocabulary: int
    norm_epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """Weights of one layer, float32 `[inputs, outputs]`; products that share an input stand side by side."""

    attention_norm: Floats
    query_key_value: Floats
    attention_output: Floats
    feed_forward_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights. The embedding `[vocabulary, width]` is the output head as well."""

    embedding: Floats
    layers: Sequence[LlamaLayer]
    output_norm: Floats


class LlamaModel:
    """The forward pass.

    Args:
        shape: the sizes.
        weights: float32 arrays that agree with them.
        max_sequence_length: positions for which rotations are prepared.
    """

    def __init__(self, shape: LlamaShape, weights: LlamaWeights, max_sequence_length: int) -> None:
        self.shape = shape
        self.weights = weights
        self.attention = Attention(shape.attention, max_sequence_length)

    def forward(self, chunks: Sequence[Chunk], kv: KvStore) -> Floats:
        """Compute each chunk on top of what `kv` holds of its sequence, and add its keys and values to `kv`.

        Args:
            chunks: at most one per slot; the state of all positions below `chunk.start` is in `kv`.
            kv: read and written through the page table.

        Returns:
            float32 `[len(chunks), vocabulary]`, the logits after each chunk's last token.
        """
        return self.logits(last_rows(self.residuals(chunks, kv)[-1], chunks))

    def residuals(self, chunks: Sequence[Chunk], kv: KvStore, keep: int = 1) -> list[Floats]:
        """Do the work of `forward` without its end: return what the last layers made of every position.

        Args:
            chunks: as for `forward`.
            kv: as for `forward`.
            keep: how many results.

        Returns:
            The residual streams after the last `keep` layers, float32 `[tiles, TILE_TOKENS, width]` each, in order.
        """
        kept = [embed(self.weights.embedding, chunks)]
        for index, layer in enumerate(self.weights.layers):
            kept = [*kept[-keep:], apply_layer(layer, index, self, chunks, kept[-1], kv)]
        return kept[-keep:]

    def normed(self, residuals: Floats) -> Floats:
        """Normalise rows of the last residual stream, as the output head wants them."""
        return normalise(residuals, self.weights.output_norm, self.shape.norm_epsilon)

    def logits(self, residuals: Floats) -> Floats:
        """Return the logits `[rows, vocabulary]` of rows `[rows, width]` of the last residual stream."""
        return project_out(self.weights.embedding, self.normed(residuals))


def apply_layer(
    layer: LlamaLayer, index: int, model: LlamaModel, chunks: Sequence[Chunk], hidden: Floats, kv: KvStore
) -> Floats:
    """Return the residual stream after one layer, whose keys and values are layer `index` of `kv`.

    Args:
        layer: the weights; not necessarily those of layer `index` of the model.
        index: names the keys and values in `kv`.
        model: gives the attention and the sizes.
        chunks: whose tiles are stacked in `hidden`.
        hidden: the residual stream before the layer, float32 `[tiles, TILE_TOKENS, width]`.
        kv: holds all positions before the chunks.
    """
    epsilon = model.shape.norm_epsilon
    projected = np.matmul(normalise(hidden, layer.attention_norm, epsilon), layer.query_key_value)
    mixed = model.attention.attend(index, chunks, projected, kv)
    hidden = hidden + np.matmul(mixed, layer.attention_output)
    normed = normalise(hidden, layer.feed_forward_norm, epsilon)
    gate, up = np.split(np.matmul(normed, layer.gate_up), 2, axis=-1)
    result: Floats = hidden + np.matmul(silu(gate) * up, layer.down)
    return result


def random_llama(shape: LlamaShape, max_sequence_length: int, seed: int) -> LlamaModel:
    """Return a model of any size with seeded random weights: nonsense, but the same nonsense every time."""
    generator = np.random.default_rng(seed)

    def matrix(inputs: int, outputs: int) -> Floats:
        return generator.standard_normal((inputs, outputs), dtype=np.float32) * np.float32(inputs**-0.5)

    ones = np.ones(shape.width, dtype=np.float32)
    heads_width = shape.attention.num_heads * shape.attention.head_dim
    layers = [
        LlamaLayer(
            attention_norm=ones,
            query_key_value=matrix(shape.width, shape.attention.projected_width),
            attention_output=matrix(heads_width, shape.width),
            feed_forward_norm=ones,
            gate_up=matrix(shape.width, 2 * shape.feed_forward),
            down=matrix(shape.feed_forward, shape.width),
        )
        for _ in range(shape.num_layers)
    ]
    # Small beside what the layers add, or the likeliest next token would always be the last one.
    embedding = generator.standard_normal((shape.vocabulary, shape.width), dtype=np.float32) * np.float32(0.1)
    return LlamaModel(shape, LlamaWeights(embedding, layers, ones), max_sequence_length)
