"""A small model of attention and state-space layers talks in bytes; later turns continue from checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheConfig,
    ContextCachePhysicalResources,
    EngineConfig,
    HybridCacheManager,
    KVPageTable,
    LayerType,
    NumpyDeviceOps,
    RecurrentStateConfig,
    partial_kv_bytes_per_slot,
    recurrent_bytes_per_slot,
)
from demo_runtime.attention import AttentionShape
from demo_runtime.conversation import StopRule, answer_batch
from demo_runtime.harness import Harness, Script
from demo_runtime.hybrid_model import HybridMemory, HybridModel, HybridShape, SlotState, StateSpaceShape
from demo_runtime.paged import PagedKv, allocate_pools, own_pages
from demo_runtime.report import Report
from demo_runtime.runtime import Runtime

DOCUMENT: Final = Path(__file__).with_name("document.txt")
SHAPE: Final = HybridShape(
    layers=("state", "state", "attention", "state", "state", "attention"),
    width=64,
    attention=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, rope_base=1e4),
    state_space=StateSpaceShape(num_heads=4, head_dim=16, state_size=16, conv_kernel=4),
)
SEED: Final = 1783
MAX_SEQUENCE_LENGTH: Final = 2048
TOKENS_PER_PAGE: Final = 32
MAX_BATCH_SIZE: Final = 2
SNAPSHOTS: Final = 16
"""Checkpoints that can be kept at a time: two a turn, at the ends of its prompt and of its answer."""

MESSAGES: Final = ("What is this about?", "And then?", "Say that again.", "Who was it?", "Is that all?")
LAST_MESSAGES: Final = ("What happened at midnight?", "Start over.")


class ByteChat:
    """Messages as bytes. Nothing ends an answer but its limit: every byte is an ordinary token."""

    end_of_message = -1

    def open(self, first_message: str) -> list[int]:
        """Return the prompt of a first turn."""
        return list(f"> {first_message}\n".encode())

    def extend(self, talk: Sequence[int], next_message: str) -> list[int]:
        """Return the prompt of a later turn."""
        return [*talk, *f"\n> {next_message}\n".encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the bytes of an answer, printable."""
        return repr(bytes(ids))[2:-1]


def run() -> int:
    """Hold the conversation; return the exit status."""
    report = Report()
    model = HybridModel(SHAPE, MAX_SEQUENCE_LENGTH, SEED)
    report.step(f"A model with random weights: {', '.join(SHAPE.layers)} layers. What it says is nonsense.")
    report.step("Warming up: the coordinator's inner loops are compiled once and kept on disk")
    warm_up(model)
    text = DOCUMENT.read_text(encoding="utf-8").split("\n\n")[1]
    first, *others = MESSAGES
    converse(report, model, Script((f"{text}\n{first}", *others), LAST_MESSAGES, 20, (7, 20)))
    report.verdict()
    return report.exit_status


def converse(report: Report, model: HybridModel, script: Script) -> None:
    """Hold the conversation twice, with a context cache and with memory of its own."""

    def least_reuse(talk_tokens: int, _prompt_tokens: int) -> int:
        return talk_tokens - 1  # the checkpoint at the end of the last answer; its last token was a lookahead

    def past_equal(memory: HybridMemory, other: HybridMemory) -> bool:
        return memory.state_bytes(slot=0) == other.state_bytes(slot=0)

    own = own_memory(model.shape)

    def cold_memory() -> HybridMemory:
        own.start_cold(slot=0)
        return own

    runtime = hybrid_runtime(model)
    spoil = runtime.memory.spoil_states
    Harness(report, ByteChat(), model, runtime, cold_memory, least_reuse, past_equal, spoil).run(script)


def hybrid_runtime(model: HybridModel, *, num_snapshots: int = SNAPSHOTS) -> Runtime[HybridMemory]:
    """Give the model its pages and slot states, and lend them to a coordinator that keeps checkpoints.

    Args:
        model: any hybrid model.
        num_snapshots: checkpoints that the budgets pay for.
    """
    shape = model.shape
    config = engine_config(shape)
    ops = NumpyDeviceOps()
    pools = allocate_pools(config.num_attention_layers, config.num_pages, TOKENS_PER_PAGE, shape.attention)
    states = allocate_states(shape, MAX_BATCH_SIZE)
    cache = HybridCacheManager.from_arrays(
        config,
        kv_pools=pools,
        recurrent=[state.recurrent for state in states],
        conv=[state.conv for state in states],
        stream=None,
        device_ops=ops,
    )
    table = KVPageTable(MAX_BATCH_SIZE, config.pages_per_sequence, config.num_pages, device_ops=ops)
    budgets = ContextCacheConfig(
        recurrent_snapshot_pool_bytes=num_snapshots * recurrent_bytes_per_slot(config),
        partial_kv_snapshot_pool_bytes=num_snapshots * partial_kv_bytes_per_slot(config),
    )
    memory = HybridMemory(PagedKv(pools, table.kernel_view), states)
    return Runtime(model, memory, ContextCachePhysicalResources(cache, table), budgets)


def engine_config(shape: HybridShape) -> EngineConfig:
    """Say how big the model's cache is, in the words of `ctxcache`."""
    attention, state = shape.attention, shape.state_space
    return EngineConfig(
        layers=tuple(LayerType.ATTENTION if kind == "attention" else LayerType.RECURRENT for kind in shape.layers),
        attention=(AttentionLayerConfig(attention.num_kv_heads, attention.head_dim),) * shape.layers.count("attention"),
        recurrent=RecurrentStateConfig(
            num_heads=state.num_heads,
            head_dim=state.head_dim,
            state_size=state.state_size,
            conv_dim=state.conv_dim,
            conv_kernel=state.conv_kernel,
            conv_dtype="float32",
        ),
        kv_dtype="float32",
        max_batch_size=MAX_BATCH_SIZE,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        num_pages=2 * MAX_BATCH_SIZE * MAX_SEQUENCE_LENGTH // TOKENS_PER_PAGE,
        tokens_per_page=TOKENS_PER_PAGE,
    )


def allocate_states(shape: HybridShape, num_slots: int) -> list[SlotState]:
    """Return the slot states of every state-space layer, NaN until somebody restores or zeroes a slot."""
    state = shape.state_space
    return [
        SlotState(
            recurrent=np.full((num_slots, state.num_heads, state.head_dim, state.state_size), np.nan, dtype=np.float32),
            conv=np.full((num_slots, state.conv_dim, state.conv_kernel), np.nan, dtype=np.float32),
        )
        for _ in range(shape.layers.count("state"))
    ]


def own_memory(shape: HybridShape) -> HybridMemory:
    """Return the memory of a runtime without a cache: pages and states of one slot."""
    pages = own_pages(shape.layers.count("attention"), MAX_SEQUENCE_LENGTH, TOKENS_PER_PAGE, shape.attention)
    return HybridMemory(pages, allocate_states(shape, num_slots=1))


def warm_up(model: HybridModel) -> None:
    """Answer two short prompts twice, so that no compilation is timed as a prefill."""
    runtime = hybrid_runtime(model)
    stops = [StopRule(end_token=-1, max_tokens=count) for count in (3, 5)]
    with runtime.coordinator:
        for _ in range(2):
            answer_batch(runtime, [range(20), range(40)], stops)
