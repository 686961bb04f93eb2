"""What a run leaves out is drawn, counted and repeatable; whoever names tests gets them; `--thorough` skips nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sampling import draw

ROOT = Path(__file__).resolve().parents[1]
CASES = [f"test_it[{index}]" for index in range(10)]
FILE = """
import pytest

@pytest.mark.sampled(keep=0.3)
@pytest.mark.parametrize("case", range(10))
def test_long(case):
    pass

def test_short():
    pass
"""
SKIPPING = """
import pytest

def test_without_program():
    pytest.skip("no such program")

@pytest.mark.gpu
def test_without_gpu():
    pytest.skip("no GPU")
"""


def run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder that holds these test files, with the plugin and no configuration of ours."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "support.sampling", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_share_is_drawn_and_a_remainder_is_a_chance() -> None:
    """As many cases as the share says; of a single test, that share of the days; each case has its days."""
    days = [draw(CASES, 0.3, seed) for seed in range(200)]
    assert {len(chosen) for chosen in days} == {3}
    assert set().union(*days) == set(CASES)
    assert {len(draw(CASES, 0.25, seed)) for seed in range(200)} == {2, 3}
    assert 20 < sum(len(draw(CASES[:1], 0.25, seed)) for seed in range(200)) < 80
    assert draw(CASES, 1, 1) == set(CASES)
    assert draw(CASES, 0, 1) == set()


def test_one_seed_draws_the_same_in_any_order() -> None:
    """The sample follows from the seed and the names alone."""
    assert draw(CASES, 0.5, 7) == draw(reversed(CASES), 0.5, 7)
    assert len({frozenset(draw(CASES, 0.5, seed)) for seed in range(20)}) > 10


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(
    ("options", "passed", "left"),
    [
        ([], 4, 7),
        (["-n", "2"], 4, 7),
        (["--quick"], 1, 10),
        (["--quick", "test_file.py", "-n", "2"], 1, 10),
        (["--thorough"], 11, 0),
        (["-k", "long"], 10, 0),
        (["test_file.py"], 11, 0),
    ],
    ids=str,
)
def test_a_run_takes_what_it_says(tmp_path: Path, options: list[str], passed: int, left: int) -> None:
    """A share of everything, nothing, all, or what was named; what is left out is counted, also by workers."""
    done = run(tmp_path, *options, test_file=FILE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout
    assert (f"{left} cases were left for --thorough" in done.stdout) == (left > 0)
    assert ("sampled with --sample-seed 2" in done.stdout) == (options in ([], ["-n", "2"]))


@pytest.mark.sampled(keep=1)
def test_a_thorough_run_skips_nothing_that_needs_no_gpu(tmp_path: Path) -> None:
    """A test, or a whole file, that is skipped for want of anything else has failed, with the reason."""
    lacking = "import pytest\n\npytest.importorskip('nonsense')\n"
    assert run(tmp_path, test_skipping=SKIPPING, test_lacking=lacking).returncode == 0
    done = run(tmp_path, "--thorough")
    assert done.returncode != 0
    assert "--thorough skips nothing: Skipped: could not import 'nonsense'" in done.stdout
    done = run(tmp_path, "--thorough", "test_skipping.py")
    assert "--thorough skips nothing: Skipped: no such program" in done.stdout
    assert "1 failed, 1 skipped" in done.stdout


def test_two_extents_are_none(tmp_path: Path) -> None:
    """They contradict each other."""
    done = run(tmp_path, "--quick", "--thorough")
    assert done.returncode != 0
    assert "pass one of them" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick", "--thorough"], "--thorough after --quick"),
        (["--thorough", "--thorough"], "a run has one extent"),
        (["--sample-seed"], "--sample-seed is ''"),
        (["--sample-seed=monday"], "--sample-seed is 'monday'; pass the number"),
    ],
    ids=str,
)
def test_the_script_refuses_wrong_options_before_it_sets_anything_up(arguments: list[str], said: str) -> None:
    """In words, with status 1."""
    done = subprocess.run(
        [ROOT / "scripts" / "test", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
