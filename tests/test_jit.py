"""The on-disk cache of compiled code is never stale: a callee edited in another folder is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ctxcache

PACKAGE = Path(ctxcache.__file__).parent

CALLEE = "from ctxcache.jit import njit\n\n\n@njit\ndef answer():\n    return {}\n"
CALLER = (
    "from ctxcache.jit import njit\nfrom ctxcache.{callee} import answer\n\n\n@njit\ndef ask():\n    return answer()\n"
)


def ask(home: Path, module: str) -> tuple[int, int, int]:
    """Call `ask` in a process of its own; return its answer, and how many functions were compiled and loaded."""
    script = f"from ctxcache.{module} import ask; from ctxcache.jit import machine_code; print(ask(), *machine_code())"
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "PYTHONPATH": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer, compiled, loaded = map(int, done.stdout.split())
    return answer, compiled, loaded


LOGGED = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from ctxcache.caller import ask
print("called")
ask(), ask()
from ctxcache.other import ask
ask()
"""


@pytest.mark.parametrize("writable", [True, False], ids=["cached", "in memory"])
def test_n05_compiling_is_told_once_before_it_begins(tmp_path: Path, writable: bool) -> None:
    """A process that compiles says so in one line at its first call; one that finds all code on disk says nothing."""
    home = a_package(tmp_path)
    for name in ("caller", "other"):
        (home / "ctxcache" / f"{name}.py").write_text(CALLER.format(callee=f"{name}_callee"))
        (home / "ctxcache" / f"{name}_callee.py").write_text(CALLEE.format(1))
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    if not writable:  # files where the folders would be: whoever may write everywhere minds no permissions
        for name in ("ctxcache/__pycache__", "home"):
            (home / name).touch()
        environment |= {"HOME": str(home / "home"), "XDG_CACHE_HOME": str(home / "home" / "cache")}
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", LOGGED],
            env={**environment, "PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=home,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        outputs.append(done.stdout.splitlines())
    assert outputs[0][0] == "called"
    (line,) = outputs[0][1:]
    assert "Numba compiles, for about a minute" in line
    assert "ctxcache warmup" in line
    assert outputs[1] == (["called"] if writable else outputs[0])


def a_package(home: Path) -> Path:
    """Make a package of the library's name that holds its `njit` and nothing else."""
    (home / "ctxcache").mkdir()
    shutil.copy(PACKAGE / "jit.py", home / "ctxcache" / "jit.py")
    (home / "ctxcache" / "__init__.py").write_text("")
    return home


@pytest.mark.parametrize(
    ("caller", "callee"),
    [("one.caller", "two.callee"), ("caller", "two.deep.callee"), ("one.deep.caller", "callee")],
)
def test_a_callee_edited_in_another_folder_is_compiled_anew(tmp_path: Path, caller: str, callee: str) -> None:
    """What was cached on disk serves as long as nothing changed, and not a moment longer, wherever the callee lies."""
    home = a_package(tmp_path)
    paths = {}
    for name, text in ((caller, CALLER.format(callee=callee)), (callee, CALLEE.format(1))):
        paths[name] = home / "ctxcache" / f"{name.replace('.', '/')}.py"
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        paths[name].write_text(text)
    assert ask(home, caller)[0] == 1
    assert ask(home, caller) == (1, 0, 1)
    paths[callee].write_text(CALLEE.format(22))
    answer, compiled, loaded = ask(home, caller)
    assert (answer, loaded) == (22, 0)
    assert compiled > 0


TYPED = """
from typing import NamedTuple
from ctxcache.jit import njit


class {name}(NamedTuple):
    value: int


@njit
def first(pair):
    return pair.value


def ask():
    return first({name}(7))
"""


def test_what_an_older_version_cached_is_passed_over(tmp_path: Path) -> None:
    """The index of an older version names a type that is gone; it is not even read."""
    home = a_package(tmp_path)
    module = home / "ctxcache" / "typed.py"
    module.write_text(TYPED.format(name="Old"))
    assert ask(home, "typed")[0] == 7
    assert ask(home, "typed") == (7, 0, 1)
    module.write_text(TYPED.format(name="Renamed"))
    answer, compiled, loaded = ask(home, "typed")
    assert (answer, compiled, loaded) == (7, 1, 0)
