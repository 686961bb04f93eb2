"""SmolLM2 on a GPU, in pages of PyTorch's: time to first token with reuse and without, for contexts of 1k to 8k tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ctxcache import ContextCacheLookupPolicy
from demo_runtime.attention import AttentionShape
from demo_runtime.conversation import Answer, StopRule, answer_batch
from demo_runtime.gguf_file import GgufFile, model_path
from demo_runtime.model import LlamaModel, LlamaShape, random_llama
from demo_runtime.report import Report, yes_or_no
from demo_runtime.torch_model import TorchLlama, TorchRuntime, torch_runtime

ROOT: Final = Path(__file__).parents[2]
CONTEXTS: Final = (1024, 2048, 4096, 7936)
"""Tokens that the prompts of a row share. The model's context is 8192; a question and an answer have to fit behind."""
TOKENS_PER_PAGE: Final = 128
MAX_SEQUENCE_LENGTH: Final = 8192
NUM_PAGES: Final = 3 * MAX_SEQUENCE_LENGTH // TOKENS_PER_PAGE
MAX_BATCH_SIZE: Final = 2
ANSWER_TOKENS: Final = 8
REPEATS: Final = 5
SMOLLM2: Final = LlamaShape(30, 576, AttentionShape(9, 3, 64, 1e5), 1536, 49152, 1e-5)
QUESTIONS: Final = (
    "What is this text about?",
    "Which names does it mention?",
    "Say it in one sentence.",
    "What should a reader do next?",
    "Who is it written for?",
    "What is missing from it?",
)


@dataclass(frozen=True, slots=True)
class ContextResult:
    """One context: medians of the repeats, each with another question behind it."""

    prompt_tokens: int
    reused_tokens: int
    cold_seconds: float
    warm_seconds: float
    tokens_equal: bool
    bits_equal: bool
    largest_difference: float


def run(*, random_weights: bool = False) -> int:
    """Measure with pieces of one page, where bits must be equal, and with pieces of 1024 tokens; return the exit status."""
    report = Report()
    if not torch.cuda.is_available():
        report.step("There is no GPU that PyTorch can use")
        return 1
    model, tokens, questions = _read(report, random_weights=random_weights)
    report.step(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, float32, pages of {TOKENS_PER_PAGE} tokens"
    )
    stream = torch.cuda.Stream()
    for chunk_tokens in (TOKENS_PER_PAGE, 1024):
        llama = TorchLlama(model.shape, model.weights, MAX_SEQUENCE_LENGTH, stream, chunk_tokens)
        runtime = torch_runtime(
            llama,
            stream,
            max_batch_size=MAX_BATCH_SIZE,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            tokens_per_page=TOKENS_PER_PAGE,
            num_pages=NUM_PAGES,
        )
        with runtime.coordinator:
            _ask(runtime, tokens[:300], use_cache=True)
            results = []
            for context in CONTEXTS:
                report.step(f"Pieces of {chunk_tokens}: a context of {context} tokens")
                results.append(_measure(runtime, tokens[:context], questions))
            _answer_a_batch(report, runtime, tokens[:1000], questions)
        _show(report, results, chunk_tokens, bits=chunk_tokens == TOKENS_PER_PAGE)
    report.verdict()
    return report.exit_status


def _read(report: Report, *, random_weights: bool) -> tuple[LlamaModel, list[int], list[list[int]]]:
    """Return the model, enough tokens of real text, and the questions."""
    path = model_path()
    if path is None or random_weights:
        report.step("Seeded random weights in SmolLM2's sizes: time is the model's, answers are nonsense")
        rng = np.random.default_rng(7)
        words = [rng.integers(0, SMOLLM2.vocabulary, 8).tolist() for _ in QUESTIONS]
        return random_llama(SMOLLM2, TOKENS_PER_PAGE, 7), rng.integers(0, SMOLLM2.vocabulary, 8192).tolist(), words
    report.step(f"Reading {path.name}")
    file = GgufFile(path)
    tokenizer = file.tokenizer()
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    questions = [tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:") for question in QUESTIONS]
    return file.model(TOKENS_PER_PAGE), tokenizer.encode(text), questions


def _ask(runtime: TorchRuntime, prompt: Sequence[int], *, use_cache: bool) -> Answer:
    policy = ContextCacheLookupPolicy.USE_CACHE if use_cache else ContextCacheLookupPolicy.BYPASS
    return answer_batch(runtime, [prompt], [StopRule(-1, ANSWER_TOKENS)], lookup_policy=policy)[0]


def _measure(runtime: TorchRuntime, context: list[int], questions: Sequence[Sequence[int]]) -> ContextResult:
    """Ask once so that the context is known; then every question without the cache and with it."""
    runtime.coordinator.clear()
    _ask(runtime, [*context, *questions[0]], use_cache=True)
    pairs = []
    for question in questions[1 : 1 + REPEATS]:
        prompt = [*context, *question]
        pairs.append((_ask(runtime, prompt, use_cache=False), _ask(runtime, prompt, use_cache=True)))
    differences = [
        float(np.abs(mine - other).max())
        for cold, warm in pairs
        for mine, other in zip(cold.logits, warm.logits, strict=True)
    ]
    return ContextResult(
        len(context) + len(questions[-1]),
        min(warm.reused_tokens for _, warm in pairs),
        statistics.median(cold.prefill_seconds for cold, _ in pairs),
        statistics.median(warm.prefill_seconds for _, warm in pairs),
        all(cold.has_same_tokens(warm) for cold, warm in pairs),
        all(cold.has_same_logits(warm) for cold, warm in pairs),
        max(differences),
    )


def _answer_a_batch(
    report: Report, runtime: TorchRuntime, context: list[int], questions: Sequence[Sequence[int]]
) -> None:
    """Two sequences of different length in one request: one leaves, the other is compacted into its slot."""
    prompts = [[*context, *question] for question in questions[:2]]
    stops = [StopRule(-1, ANSWER_TOKENS // 2), StopRule(-1, ANSWER_TOKENS)]
    together = answer_batch(runtime, prompts, stops)
    alone = [
        answer_batch(runtime, [prompt], [stop], lookup_policy=ContextCacheLookupPolicy.BYPASS)[0]
        for prompt, stop in zip(prompts, stops, strict=True)
    ]
    same = all(mine.has_same_tokens(other) for mine, other in zip(together, alone, strict=True))
    report.check("a batch of two with a compaction answers as each sequence alone", holds=same)


def _show(report: Report, results: Sequence[ContextResult], chunk_tokens: int, *, bits: bool) -> None:
    cells = []
    for result in results:
        name = f"{result.prompt_tokens} tokens in pieces of {chunk_tokens}"
        report.check(f"{name}: the same tokens with reuse and without", holds=result.tokens_equal)
        report.check(f"{name}: the same bits", holds=result.bits_equal or not bits)
        speedup = f"{result.cold_seconds / result.warm_seconds:.1f}"
        seconds = (f"{1e3 * result.cold_seconds:.1f} ms", f"{1e3 * result.warm_seconds:.1f} ms")
        equal = (yes_or_no(result.tokens_equal), f"{result.largest_difference:.1e}")
        cells.append([str(result.prompt_tokens), str(result.reused_tokens), *seconds, speedup, *equal])
    head = ["prompt", "reused", "without", "with reuse", "times faster", "tokens equal", "logits differ by"]
    report.table(f"Time to first token, prefill in pieces of {chunk_tokens} tokens; medians of {REPEATS}", head, cells)
