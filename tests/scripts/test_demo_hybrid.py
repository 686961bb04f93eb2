"""The demo's second runtime: a model with state-space layers, whose past can be taken up only where a checkpoint stands.

The whole of it is `./scripts/demo hybrid`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the demo's extra is not installed")

from demo_runtime.conversation import StopRule, answer_batch, answer_without_ctxcache
from demo_runtime.harness import Script
from demo_runtime.hybrid_job import SEED, SHAPE, converse, hybrid_runtime, own_memory
from demo_runtime.hybrid_model import HybridMemory, HybridModel
from demo_runtime.report import Report
from demo_runtime.runtime import prefill

from ctxcache import NumpyDeviceOps

SCRIPTS = Path(__file__).parents[2] / "scripts"


NEVER = -1
SCRIPT = Script(
    messages=("once upon a time " * 6, "and then?", "and after that?"),
    last_messages=("the end", "or another one"),
    answer_tokens=8,
    last_answer_tokens=(3, 8),
)


@pytest.fixture(scope="module")
def model() -> HybridModel:
    """The demo's own model: it is small enough."""
    return HybridModel(SHAPE, max_sequence_length=2048, seed=SEED)


def cold_memory() -> HybridMemory:
    """Return the memory of a runtime without a cache, its one slot cold."""
    memory = own_memory(SHAPE)
    memory.start_cold(slot=0)
    return memory


def a_prompt(length: int, seed: int) -> list[int]:
    """Return seeded random bytes."""
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 32, 69])
def test_a_prefill_is_bit_equal_wherever_it_is_cut(model: HybridModel, cut: int) -> None:
    """Logits and states do not depend on how a prompt is cut into chunks."""
    prompt = a_prompt(70, seed=1)
    whole, parts = cold_memory(), cold_memory()
    assert prefill(model, whole, [prompt], [0]).tobytes() == prefill(model, parts, [prompt], [0], cut).tobytes()
    assert whole.state_bytes(slot=0) == parts.state_bytes(slot=0)


def test_states_that_nobody_set_show(model: HybridModel) -> None:
    """Slots start as NaN: a sequence whose state was neither zeroed nor restored gives no plausible answer."""
    with np.errstate(all="ignore"):
        logits = prefill(model, own_memory(SHAPE), [a_prompt(20, seed=2)], [0])
    assert np.isnan(logits).all()


def test_later_turns_continue_from_checkpoints(model: HybridModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Every turn reuses the talk up to its last token, page-aligned or not; tokens, logits and states are bit-equal."""
    report = Report()
    converse(report, model, SCRIPT)
    assert report.failures == []
    table = [line.split() for line in capsys.readouterr().out.split("Turns (")[1].splitlines()[2:5]]
    prompts = [int(row[1]) for row in table]
    assert [int(row[2]) for row in table] == [0, *(tokens + 8 - 1 for tokens in prompts[:-1])]
    assert [row[-3:] for row in table] == [["yes"] * 3] * 3


def test_a_restore_that_does_nothing_fails_the_demo(model: HybridModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a state that was not put back."""
    monkeypatch.setattr(NumpyDeviceOps, "restore", lambda *_: None)
    report = Report()
    with np.errstate(all="ignore"):
        converse(report, model, SCRIPT)
    for what in ("logits with and without the cache", "states after the answer"):
        assert f"turn 2: the {what} are bit-equal" in report.failures
    assert report.exit_status == 1


def test_an_older_checkpoint_serves_a_talk_that_went_back(model: HybridModel) -> None:
    """A conversation that takes back its last turn continues from the checkpoint before it."""
    runtime, stop = hybrid_runtime(model), StopRule(NEVER, 6)
    first = a_prompt(45, seed=3)
    (answer,) = answer_batch(runtime, [first], [stop])
    talk = [*first, *answer.tokens]
    for ending in (a_prompt(30, seed=4), a_prompt(30, seed=5)):
        prompt = [*talk, *ending]
        (answer,) = answer_batch(runtime, [prompt], [stop])
        assert answer.reused_tokens == len(talk) - 1
        cold = answer_without_ctxcache(model, cold_memory(), prompt, stop)
        assert answer.has_same_logits(cold)
        assert answer.has_same_tokens(cold)
    runtime.coordinator.manager.check_invariants()


def test_few_snapshots_mean_less_reuse_and_the_same_answers(model: HybridModel) -> None:
    """With room for two checkpoints, two talks push each other out; no answer changes."""
    runtime, stop = hybrid_runtime(model, num_snapshots=2), StopRule(NEVER, 5)
    talks = [a_prompt(40, seed=6), a_prompt(50, seed=7)]
    for _ in range(3):
        for index, talk in enumerate(talks):
            (answer,) = answer_batch(runtime, [talk], [stop])
            cold = answer_without_ctxcache(model, cold_memory(), talk, stop)
            assert answer.has_same_logits(cold)
            talks[index] = [*talk, *answer.tokens, *a_prompt(9, seed=len(talk))]
            runtime.coordinator.manager.check_invariants()
    assert runtime.coordinator.metrics().reclaimed_recurrent_snapshots > 0


def test_the_command_succeeds(tmp_path: Path) -> None:
    """`python -m demo_runtime hybrid` exits with 0, from any folder."""
    command = [sys.executable, "-m", "demo_runtime", "hybrid"]
    environment = os.environ | {"PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every answer with the cache equals the answer without it." in done.stdout
