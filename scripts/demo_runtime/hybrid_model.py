"""A small hybrid model: attention layers among state-space layers, as Mamba-2 has them, with seeded random weights.

An attention layer remembers every token, in pages. A state-space layer remembers a state of fixed size, whatever the
length: it exists for the last position only, and reuse is possible exactly where somebody kept a copy. The state of a
sequence lives in the row of its batch slot:

    state of one layer        [max_batch, num_heads, head_dim, state_size]     h <- decay * h + input (x) B
    convolution state         [max_batch, conv_dim, conv_kernel]               the last `conv_kernel` inputs

Tokens are bytes. What the model says is nonsense, but the same nonsense every time, and every bit of its past matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from demo_runtime.attention import Attention, AttentionShape
from demo_runtime.paged import PagedKv
from demo_runtime.tiles import Chunk, Floats, embed, last_rows, normalise, project_out, silu, tiles_of

VOCABULARY: Final = 256
_NORM_EPSILON: Final = 1e-5


@dataclass(frozen=True, slots=True)
class StateSpaceShape:
    """Sizes of a state-space layer. One B and one C of `state_size` elements serve all heads."""

    num_heads: int
    head_dim: int
    state_size: int
    conv_kernel: int

    @property
    def inner_width(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: the inputs of all heads, B and C."""
        return self.inner_width + 2 * self.state_size

    @property
    def projected_width(self) -> int:
        """Elements of gate, convolution channels and time steps of one token."""
        return self.inner_width + self.conv_dim + self.num_heads


@dataclass(frozen=True, slots=True)
class HybridShape:
    """Sizes of the model. `layers` names each layer, "attention" or "state"."""

    layers: tuple[str, ...]
    width: int
    attention: AttentionShape
    state_space: StateSpaceShape


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    """What one state-space layer keeps per slot: float32 arrays, addressed by slot. Borrowed or owned."""

    recurrent: Floats
    conv: Floats


@dataclass(frozen=True, slots=True, eq=False)
class HybridMemory:
    """Pages for the attention layers, slot states for the state-space layers, each in model order."""

    kv: PagedKv
    states: Sequence[SlotState]

    def spoil_states(self) -> None:
        """Fill the state of every slot with NaN. Between requests slots are nobody's: no answer may depend on them."""
        for state in self.states:
            state.recurrent.fill(np.nan)
            state.conv.fill(np.nan)

    def start_cold(self, slot: int) -> None:
        """Forget the slot's past: a runtime without a coordinator does this itself before a prefill."""
        for state in self.states:
            state.recurrent[slot] = 0
            state.conv[slot] = 0

    def state_bytes(self, slot: int) -> bytes:
        """Return every bit of a slot's recurrent and convolution state."""
        return b"".join(state.recurrent[slot].tobytes() + state.conv[slot].tobytes() for state in self.states)


@dataclass(frozen=True, slots=True, eq=False)
class _AttentionLayer:
    query_key_value: Floats
    output: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _StateSpaceLayer:
    projection: Floats
    conv_weight: Floats
    time_step_bias: Floats
    decay_rate: Floats
    skip: Floats
    output: Floats


class HybridModel:
    """The forward pass; weights are drawn from `seed`."""

    def __init__(self, shape: HybridShape, max_sequence_length: int, seed: int) -> None:
        self.shape = shape
        self._attention = Attention(shape.attention, max_sequence_length)
        generator = np.random.default_rng(seed)
        # Small beside what the layers add, or the likeliest next byte would always be the last one.
        self._embedding = generator.standard_normal((VOCABULARY, shape.width), dtype=np.float32) * np.float32(0.1)
        self._layers = [_random_layer(kind, shape, generator) for kind in shape.layers]

    def forward(self, chunks: Sequence[Chunk], memory: HybridMemory) -> Floats:
        """Compute each chunk on top of its slot's past in `memory`, and move that past forward.

        Args:
            chunks: at most one per slot. `memory` holds the pages of all positions below `chunk.start`, and in the slot
                the state after exactly as many tokens.
            memory: read and written.

        Returns:
            float32 `[len(chunks), VOCABULARY]`, the logits after each chunk's last token.
        """
        hidden = embed(self._embedding, chunks)
        num_attention = num_states = 0
        for layer in self._layers:
            normed = self._normalise(hidden)
            if isinstance(layer, _AttentionLayer):
                projected = np.matmul(normed, layer.query_key_value)
                mixed = self._attention.attend(num_attention, chunks, projected, memory.kv)
                num_attention += 1
            else:
                projected = np.matmul(normed, layer.projection)
                mixed = self._scan(layer, chunks, projected, memory.states[num_states])
                num_states += 1
            hidden = hidden + np.matmul(mixed, layer.output)
        return project_out(self._embedding, self._normalise(last_rows(hidden, chunks)))

    def _normalise(self, rows: Floats) -> Floats:
        return normalise(rows, np.ones(rows.shape[-1], dtype=np.float32), _NORM_EPSILON)

    def _scan(self, layer: _StateSpaceLayer, chunks: Sequence[Chunk], projected: Floats, state: SlotState) -> Floats:
        """Run each chunk's tokens through the recurrence, in order; padding rows stay zero."""
        inner = self.shape.state_space.inner_width
        mixed = np.zeros((*projected.shape[:2], inner), dtype=np.float32)
        for chunk, tiles in zip(chunks, tiles_of(chunks), strict=True):
            rows = projected[tiles].reshape(-1, projected.shape[-1])[chunk.rows]
            out = mixed[tiles].reshape(-1, inner)[chunk.rows]
            for token, row in enumerate(rows):
                out[token] = self._step(layer, row, state.recurrent[chunk.slot], state.conv[chunk.slot])
        return self._normalise(mixed)

    def _step(self, layer: _StateSpaceLayer, row: Floats, recurrent: Floats, conv: Floats) -> Floats:
        """Move one layer's state of one slot forward by one token, in place; return the token's output."""
        shape = self.shape.state_space
        gate, time_steps = row[: shape.inner_width], row[-shape.num_heads :]
        conv[:, :-1] = conv[:, 1:]
        conv[:, -1] = row[shape.inner_width : -shape.num_heads]
        mixed = silu((conv * layer.conv_weight).sum(axis=-1))
        inputs, b, c = np.split(mixed, [shape.inner_width, shape.inner_width + shape.state_size])
        heads = inputs.reshape(shape.num_heads, shape.head_dim)
        step = np.logaddexp(np.float32(0), time_steps + layer.time_step_bias)  # softplus
        decay = np.exp(-step * layer.decay_rate)
        recurrent *= decay[:, None, None]
        recurrent += (step[:, None] * heads)[:, :, None] * b
        read = (recurrent * c).sum(axis=-1) + layer.skip[:, None] * heads
        out: Floats = read.reshape(-1) * silu(gate)
        return out


def _random_layer(kind: str, shape: HybridShape, generator: np.random.Generator) -> _AttentionLayer | _StateSpaceLayer:
    def matrix(inputs: int, outputs: int) -> Floats:
        return generator.standard_normal((inputs, outputs), dtype=np.float32) * np.float32(inputs**-0.5)

    if kind == "attention":
        attention = shape.attention
        return _AttentionLayer(
            query_key_value=matrix(shape.width, attention.projected_width),
            output=matrix(attention.num_heads * attention.head_dim, shape.width),
        )
    state_space = shape.state_space
    return _StateSpaceLayer(
        projection=matrix(shape.width, state_space.projected_width),
        conv_weight=matrix(state_space.conv_kernel, state_space.conv_dim).T.copy(),
        time_step_bias=generator.uniform(-3, 0, state_space.num_heads).astype(np.float32),
        decay_rate=generator.uniform(0.05, 1, state_space.num_heads).astype(np.float32),
        skip=np.ones(state_space.num_heads, dtype=np.float32),
        output=matrix(state_space.inner_width, shape.width),
    )
