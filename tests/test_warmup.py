"""After `warmup()` nothing is compiled any more, whatever is done; and it works where nothing can be written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ctxcache
from ctxcache import NumbaDeviceOps, WarmupReport, warmup
from ctxcache.cli import main
from ctxcache.jit import machine_code

PACKAGE = Path(ctxcache.__file__).parent

SCRIPT = """
import json, sys
from numba.core import event
import ctxcache
from ctxcache.jit import _DISPATCHERS, machine_code

first, again = ctxcache.warmup(), ctxcache.warmup()
known = {id(dispatcher): set(dispatcher.overloads) for dispatcher in _DISPATCHERS}

import numpy as np
from ctxcache.testing.simulate import simulate
from ctxcache.cli import main

with event.install_recorder("numba:compile") as compiled:
    result = simulate(11, 900)
    tokens = np.arange(50, dtype=np.int32)
    tokens.flags.writeable = False
    ctxcache.hash_full_blocks(tokens, 16)
    ctxcache.hash_exact_prefix(list(range(50)), 16)
    sys.stdout, out = sys.stderr, sys.stdout
    main(["bench", "host", "--quick", "--only", "evict", "--only", "leaves", "--only", "decode-64"])
    sys.stdout = out
new = [d.py_func.__name__ for d in _DISPATCHERS if set(d.overloads) - known[id(d)]]
never = [
    d.py_func.__name__ for d in _DISPATCHERS if not d.overloads and not d.targetoptions.get("no_cpython_wrapper")
]
print(json.dumps({
    "first": [first.seconds, first.compiled, first.loaded],
    "again": [again.compiled, again.loaded],
    "events": len(compiled.buffer),
    "new": new,
    "never": never,
    "violations": result.violations,
    }))
"""


def run_script(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run the script in a process of its own, with the package of `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**environment, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_n05_a_report_explains_its_counts() -> None:
    """What was loaded is said first, so that nothing compiled reads like the gain that it is."""
    assert (
        str(WarmupReport(1.25, 0, 41))
        == "41 functions loaded from the cache on disk, all ready before, 0 compiled, 1.2 s"
    )
    assert str(WarmupReport(30.0, 12, 3)) == "3 functions loaded from the cache on disk, 12 compiled, 30.0 s"


def test_n05_each_part_is_told_before_it_begins() -> None:
    """Names, how many are done, how many there are."""
    told: list[tuple[str, int, int]] = []
    warmup(progress=lambda *part: told.append(part))
    assert [done for _name, done, _total in told] == list(range(len(told)))
    assert {total for _name, _done, total in told} == {len(told)}
    assert len({name for name, _done, _total in told}) == len(told)


def check_nothing_was_left(report: dict[str, Any]) -> None:
    """Neither a compilation nor a load from disk after the warm-up."""
    assert report["again"] == [0, 0]
    assert (report["events"], report["new"]) == (0, [])
    assert report["violations"] == []


@pytest.mark.sampled(keep=1)
def test_nothing_is_compiled_after_a_warm_up() -> None:
    """Random lives of every deployment kind, hashes of arrays and lists, and a benchmark find all code there."""
    report = run_script(PACKAGE.parent, dict(os.environ))
    check_nothing_was_left(report)
    assert report["first"][0] > 0
    assert report["first"][1] + report["first"][2] > 20


@pytest.mark.sampled(keep=1 / 4)
def test_a_warm_up_needs_no_place_to_write(tmp_path: Path) -> None:
    """Neither in the package's folder nor at home: everything is compiled in memory, once.

    A file stands where each folder would be, since whoever may write everywhere minds no permissions.
    """
    shutil.copytree(PACKAGE, tmp_path / "ctxcache", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (tmp_path / "ctxcache").rglob("*"):
        if folder.is_dir():
            (folder / "__pycache__").touch()
    (tmp_path / "ctxcache" / "__pycache__").touch()
    home = tmp_path / "home"
    home.touch()
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    report = run_script(tmp_path, environment)
    check_nothing_was_left(report)
    assert report["first"][1] > 50
    assert report["first"][2] == 0
    assert report["never"] == []  # on disk, callers hold the code of those that they call
    assert not list(tmp_path.rglob("*.nbi"))


@pytest.mark.filterwarnings("ignore")
def test_a_warm_up_loads_the_kernels_of_given_ops() -> None:
    """Each kernel is launched once, on the given stream; what is there already is not compiled again."""
    warmup()
    before = machine_code()
    ops = NumbaDeviceOps()
    report = warmup(ops, None)
    assert ops.num_launches > 0
    assert (report.compiled, report.loaded) == (0, 0)
    assert machine_code() == before


def test_n05_the_command_says_how_far_it_is_and_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    """The parts as they begin, on standard error; the outcome in words that explain themselves, and as JSON."""
    warmup()
    assert main(["warmup"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("0 functions loaded from the cache on disk, all ready before, 0 compiled, ")
    lines = said.err.splitlines()
    assert [line.split()[0] for line in lines] == [f"[{i + 1}/{len(lines)}]" for i in range(len(lines))]
    assert len(lines) > 5
    assert main(["warmup", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"seconds", "compiled", "loaded"}
