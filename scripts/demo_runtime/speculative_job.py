"""SmolLM2-135M-Instruct with an EAGLE-shaped draft, then with n-gram drafts: the base alone says the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ctxcache import (
    ContextCacheConfig,
    ContextCacheCoordinator,
    ContextCacheExecutionMode,
    ContextCachePhysicalResources,
    DeploymentConfig,
    SpecDecodeConfig,
    SpecDecodeMode,
    validate_context_cache_deployment,
)
from demo_runtime import paged
from demo_runtime.attention import AttentionShape
from demo_runtime.conversation import Answer, StopRule, answer_without_ctxcache
from demo_runtime.drafters import EagleDrafter, NgramDrafter
from demo_runtime.eagle import EagleDraft, fit_draft
from demo_runtime.engine import EngineSizes, lend_pages
from demo_runtime.main_job import DOCUMENT, opening, read_model
from demo_runtime.model import LlamaModel, LlamaShape, random_llama
from demo_runtime.paged import PagedKv
from demo_runtime.report import Report
from demo_runtime.speculative import SpeculativeRuntime, answer_speculatively
from demo_runtime.speculative_harness import Exchange, SpeculativeHarness

SIZES: Final = EngineSizes(max_batch_size=1, max_sequence_length=1056, tokens_per_page=32, num_pages=80)
PARAGRAPHS: Final = 4
"""The conversation is about the document's beginning, to be quick; the draft is fitted on the whole of it."""

EAGLE_STEP: Final = 2
"""Tokens drafted in a step. The draft was never fitted to its own estimates: its third guess is seldom right."""

NGRAM_STEP: Final = 3
ANSWER_TOKENS: Final = 20
QUESTIONS: Final = (
    Exchange("In which year was the mill built?"),
    Exchange("Why was the bell rung?"),
    Exchange("Who built harbour walls?", at_page_edge=True),
    Exchange("What did he know?"),
    Exchange("How many acres was the bay?", behind=1),
)
"""The third parts from the second at a page's edge, the fourth goes on from there, the fifth goes back."""

NGRAM_TURNS: Final = 3


def run(turns: int = len(QUESTIONS)) -> int:
    """Hold the conversation with both drafters, the first `turns` questions of it; return the exit status."""
    report = Report()
    loaded = read_model(report, SIZES.max_sequence_length)
    if loaded is None:
        return 1
    _, chat, model = loaded
    report.step("Warming up: the coordinator's inner loops are compiled once and kept on disk")
    warm_up()
    document = DOCUMENT.read_text(encoding="utf-8").strip()
    text = chat.open(opening(document, QUESTIONS[0].message))
    report.step(f"Fitting the draft on the document: {len(text)} tokens, with the chat's words around it")
    draft = fit_draft(model, text, own_pages(model))
    beginning = "\n\n".join(document.split("\n\n")[:PARAGRAPHS])
    exchanges = [Exchange(opening(beginning, QUESTIONS[0].message)), *QUESTIONS[1:turns]]
    greedy = base_alone(model)
    harness = SpeculativeHarness(report, chat, eagle_runtime(model, draft), SIZES.tokens_per_page, greedy)
    harness.run("EAGLE", exchanges, ANSWER_TOKENS)
    harness = SpeculativeHarness(report, chat, ngram_runtime(model), SIZES.tokens_per_page, greedy)
    harness.run("n-grams over shared KV", exchanges[:NGRAM_TURNS], ANSWER_TOKENS)
    report.verdict()
    return report.exit_status


def own_pages(model: LlamaModel) -> PagedKv:
    """Return the pages of a runtime without a cache, of this job's sizes."""
    return paged.own_pages(
        model.shape.num_layers, SIZES.max_sequence_length, SIZES.tokens_per_page, model.shape.attention
    )


def base_alone(model: LlamaModel) -> Callable[[Sequence[int], StopRule], Answer]:
    """Return what answers with the base alone, without ctxcache; a prompt that it has answered it does not do again."""
    answers: dict[tuple[int, ...], Answer] = {}
    pages = own_pages(model)

    def answer(prompt: Sequence[int], stop: StopRule) -> Answer:
        key = tuple(prompt)
        if key not in answers:
            answers[key] = answer_without_ctxcache(model, pages, prompt, stop)
        return answers[key]

    return answer


def eagle_runtime(
    model: LlamaModel, draft: EagleDraft, sizes: EngineSizes = SIZES, drafting_step: int = EAGLE_STEP
) -> SpeculativeRuntime:
    """Lend a coordinator two engines: the base's pages and table, and the draft's, which has one layer."""
    base = lend_pages(model.shape.num_layers, model.shape.attention, sizes)
    drafts = lend_pages(1, model.shape.attention, sizes)
    # A chain: one candidate a position. A verification computes the lookahead and all drafts.
    scheme = SpecDecodeConfig(
        SpecDecodeMode.EAGLE, drafting_top_k=1, drafting_step=drafting_step, verify_size=drafting_step + 1
    )
    coordinator = coordinate(
        DeploymentConfig(base.cache.config, drafts.cache.config, scheme),
        ContextCachePhysicalResources(base.cache, base.table, drafts.cache, drafts.table),
    )
    drafter = EagleDrafter(draft, drafts)
    return SpeculativeRuntime(model, base, drafter, coordinator, ContextCacheExecutionMode.EAGLE, drafting_step)


def ngram_runtime(model: LlamaModel, sizes: EngineSizes = SIZES, drafting_step: int = NGRAM_STEP) -> SpeculativeRuntime:
    """Lend a coordinator the base's pages: whoever drafts has no others."""
    base = lend_pages(model.shape.num_layers, model.shape.attention, sizes)
    scheme = SpecDecodeConfig(SpecDecodeMode.SHARED_KV, drafting_step=drafting_step, verify_size=drafting_step + 1)
    coordinator = coordinate(
        DeploymentConfig(base.cache.config, None, scheme), ContextCachePhysicalResources(base.cache, base.table)
    )
    mode = ContextCacheExecutionMode.SHARED_KV
    return SpeculativeRuntime(model, base, NgramDrafter(), coordinator, mode, drafting_step)


def coordinate(deployment: DeploymentConfig, resources: ContextCachePhysicalResources) -> ContextCacheCoordinator:
    """Return a coordinator on the host, without a stream."""
    kind = validate_context_cache_deployment(deployment)
    return ContextCacheCoordinator(ContextCacheConfig(), deployment, kind, resources, None)


def warm_up() -> None:
    """Answer a prompt twice with a tiny model and both drafters, so that nothing is compiled in the middle."""
    attention = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16, rope_base=1e4)
    shape = LlamaShape(1, 32, attention, feed_forward=32, vocabulary=128, norm_epsilon=1e-5)
    model = random_llama(shape, max_sequence_length=SIZES.max_sequence_length, seed=1)
    draft = fit_draft(model, range(40), own_pages(model))
    for runtime in (eagle_runtime(model, draft), ngram_runtime(model)):
        with runtime.coordinator:
            for _ in range(2):
                answer_speculatively(runtime, range(70), StopRule(end_token=-1, max_tokens=40))
