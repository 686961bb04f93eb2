"""What coverage leaves out is compiled code, all of it and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

import ctxcache
from ctxcache import jit

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ctxcache"
RULES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["report"]["exclude_also"]
(COMPILED,) = [rule for rule in RULES if "njit" in rule]


def test_exactly_the_compiled_functions_are_left_out() -> None:
    """The decorators that the rule finds are those of the functions that Numba compiles for the package."""
    for module in pkgutil.walk_packages(ctxcache.__path__, "ctxcache."):
        if module.name != "ctxcache.__main__":
            importlib.import_module(module.name)
    found = {
        (path, path.read_text()[: match.end()].count("\n") + 1)
        for path in PACKAGE.rglob("*.py")
        for match in re.finditer(COMPILED, path.read_text(), re.MULTILINE)
    }
    code = [dispatcher.py_func.__code__ for dispatcher in jit._DISPATCHERS]
    compiled = {(Path(each.co_filename), each.co_firstlineno) for each in code}
    assert found == {place for place in compiled if PACKAGE in place[0].parents}
    assert len(found) > 50
