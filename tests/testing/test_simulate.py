"""Random lives of every deployment kind: clean, the same for the same seed, and cut down to a script where they are not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ctxcache import ContextCacheDeploymentKind as Kind
from ctxcache.cli import main
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.request.batch import Batch
from ctxcache.request.custody import Custody
from ctxcache.request.request import Request
from ctxcache.testing import ReferenceManager
from ctxcache.testing.actions import ACTIONS, simplifications
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.shadow import ShadowManager
from ctxcache.testing.simulate import World, draw_episode, minimise, replay, simulate

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", tuple(Kind), ids=lambda kind: kind.value)
def test_random_lives_are_clean(kind: Kind) -> None:
    """Faults strike, drains fail, caches overflow, and there is not one wrong byte, early owner or other answer."""
    result = simulate(12, 800, kinds=[kind])
    assert result.violations == []
    assert result.script == ""
    assert result.episodes == 4
    assert min(result.faults, result.quarantines) > 2
    assert result.comparisons > 300
    assert set(result.actions) >= set(ACTIONS) - {"starve", "clear", "misuse", "explain", "stray"}


def test_the_same_seed_gives_the_same_log_under_another_hash_seed() -> None:
    """Byte for byte, in other processes; and another seed gives another log."""

    def digest(seed: int, hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "NUMBA_ENABLE_CUDASIM": "1"}
        command = [sys.executable, "-m", "ctxcache", "simulate", "--seed", str(seed), "--steps", "400", "--json"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=True
        )
        return json.loads(done.stdout)["log_digest"]

    first = digest(1, "0")
    assert digest(1, "4242") == first
    assert simulate(1, 400).log_digest == first
    assert simulate(2, 400).log_digest != first


def plant_early_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def abandon(self: Custody, request: Request) -> Status:
        self.release(request)
        return self.fire(request, "abandon")

    monkeypatch.setattr(Custody, "abandon", abandon)


def test_a_failure_is_cut_down_to_a_script_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault planted: the script takes few actions, prints the violation, and prints nothing once it is mended."""
    plant_early_release(monkeypatch)
    result = simulate(1, 4000)
    assert "was released while the device may still" in result.violations[0]
    assert result.script.count("\n    (") <= 6

    def printed() -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(result.script, "replay", "exec"), {})  # noqa: S102 - what a user would run
        return out.getvalue()

    assert "was released while the device may still" in printed()
    monkeypatch.undo()
    assert printed() == ""


def test_every_action_of_the_shortest_run_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out any one of them makes the run clean."""
    plant_early_release(monkeypatch)
    episode = draw_episode(3, 0, [Kind.HYBRID])
    prompt = ((1, 2, 0, 1),)
    prefill = ("prefill", ((), True, False), 7)
    actions = [
        ("explain", (1, 2), 1),
        ("begin", (prompt, None, (), False, False), 2),
        ("misuse", 3, 3),
        prefill,
        ("abandon", None, 5),
        ("clear", None, 6),
    ]
    assert replay(episode, actions)
    shortest = minimise(episode, actions)
    assert [name for name, _, _ in shortest] == ["begin", "prefill"], "the end of an episode abandons"
    assert not any(replay(episode, shortest[:i] + shortest[i + 1 :]) for i in range(len(shortest)))


def test_actions_that_do_not_fit_are_skipped() -> None:
    """Any selection of actions is a run: nothing happens to a runtime that none of them fits."""
    episode = draw_episode(1, 0, [Kind.VANILLA])
    world = World(episode)
    for name in ("prefill", "decode", "compact", "starve", "finish", "abandon", "drop"):
        world.do((name, None, 0), 1)
    assert world.log == []
    world.end()
    assert world.violations == []


def test_what_escapes_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the library is found, named and cut down like anything else."""
    monkeypatch.setattr(Batch, "aim", lambda *_: 1 / 0)
    result = simulate(1, 2000, kinds=[Kind.VANILLA])
    assert "ZeroDivisionError" in result.violations[0]
    assert "decode" in result.script


def test_the_shadow_sees_a_manager_that_answers_otherwise() -> None:
    """A reference with fewer pages or records disagrees on pages, and on what is cached."""
    runtime = FakeRuntime(Kind.VANILLA)
    shadow = ShadowManager(
        runtime.coordinator.manager,
        ReferenceManager(tokens_per_page=4, num_base_pages=24, max_records=0, kind=Kind.VANILLA),
    )
    for _ in range(2):
        runtime.begin([[1, 2, 0, 1, 2]])
        runtime.prefill()
        runtime.finish()
    shadow.compare()
    assert any("plan gave" in violation for violation in shadow.violations)
    assert any("records are" in violation for violation in shadow.violations)
    poor = FakeRuntime(Kind.VANILLA)
    shadow = ShadowManager(
        poor.coordinator.manager, ReferenceManager(tokens_per_page=4, num_base_pages=1, kind=Kind.VANILLA)
    )
    poor.begin([[1, 2, 0, 1, 2]])
    assert any("grow_leases gave" in violation and "None" in violation for violation in shadow.violations)


def test_a_finish_after_a_device_failure_may_publish_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custody that forgets what made frozen prompts worthless is seen."""
    monkeypatch.setattr(Request, "discards_unpublished", property(lambda self: False, lambda self, value: None))
    result = simulate(1, 8000, kinds=[Kind.EAGLE, Kind.SHARED_KV], cut=False)
    assert "a finish published what a device failure had made worthless" in result.violations


def test_misuse_that_is_not_refused_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that takes anything is found out."""
    world = World(draw_episode(1, 0, [Kind.VANILLA]))
    monkeypatch.setattr(type(world.runtime.coordinator), "recover", lambda self: Status.OK)
    world.do(("misuse", 4, 0), 1)
    assert world.violations == ["misuse 4 was not refused"]


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals and no violation: status 0. With one: status 1, the violation, and the script."""
    monkeypatch.setattr("ctxcache.cli.report._PROGRESS_SECONDS", 0.0)
    assert main(["simulate", "--seed", "3", "--steps", "300"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("seed 3: 300 steps in 2 deployments of 2 kinds, ")
    assert printed.out.endswith(" 0 violations\n")
    assert "simulate: 300 of 300 steps" in printed.err
    plant_early_release(monkeypatch)
    assert main(["simulate", "--steps", "4000"]) == 1
    printed = capsys.readouterr()
    assert "\nviolation: " in printed.out
    assert "from ctxcache.testing.simulate import Episode, replay" in printed.out
    assert main(["simulate", "--steps", "0"]) == 2


def test_sizes_are_drawn_within_what_a_deployment_can_have() -> None:
    """Every episode that can be drawn can be built, and all kinds and page sizes come up."""
    episodes = [draw_episode(seed, number) for seed in range(5) for number in range(30)]
    for episode in random.Random(0).sample(episodes, 30):
        World(episode).end()
    assert {episode.kind for episode in episodes} == set(Kind)
    assert {episode.sizes.tokens_per_page for episode in episodes} == {1, 2, 3, 4, 5}


def test_simpler_actions_take_the_place_of_others() -> None:
    """Faults that strike at once, fewer prompts, plain steps; what is as simple as it gets has no simpler one."""
    prompts = ((1, 2), (2,))
    assert list(simplifications(("fault", ("*", "raise_before", 3, True, False), 7))) == [
        ("fault", ("*", "raise_before", 1, True, False), 7)
    ]
    assert [action[1][0] for action in simplifications(("begin", (prompts, None, (), False, False), 7))] == [
        ((1, 2),),
        ((2,),),
    ]
    assert list(simplifications(("decode", ((0,), (3,), (7,), True, 4), 7))) == [
        ("decode", ((), (1,), (0,), True, 4), 7)
    ]
    for simple in (
        ("fault", ("*", "raise_before", 1, True, False), 7),
        ("begin", (((1,),), None, (), False, False), 7),
        ("decode", ((), (1,), (0,), True, 4), 7),
        ("finish", None, 7),
    ):
        assert list(simplifications(simple)) == []
