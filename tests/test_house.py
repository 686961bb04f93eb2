"""The plan of the code: few rooms at the top, no circle of imports of any sort, and folders that import what they say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ctxcache

PACKAGE = Path(ctxcache.__file__).parent
MOST_AT_THE_TOP = 14


def module_name(path: Path) -> str:
    """Name a file of the package as an import statement does."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}
FOLDERS = [name for name, path in MODULES.items() if path.name == "__init__.py" and name != "ctxcache"]


def imports_of(name: str, text: str) -> Iterator[str]:
    """Modules of the package that a module imports anywhere: inside functions and for types alone too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [each if each in MODULES else str(node.module) for each in found]
        else:
            continue
        yield from (each for each in found if each in MODULES)


@cache
def drawn() -> dict[str, set[str]]:
    """Who imports whom. A package's own face is no import of the modules behind it."""
    graph = {}
    for name, path in MODULES.items():
        found = set(imports_of(name, path.read_text(encoding="utf-8"))) - {name}
        graph[name] = {each for each in found if not name.startswith(f"{each}.")}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other: what is left when whoever imports nothing that is left is taken away."""
    left = {name: set(found) for name, found in graph.items()}
    while ground := [name for name, found in left.items() if not found & left.keys()]:
        for name in ground:
            del left[name]
    while roof := [name for name in left if not any(name in found for found in left.values())]:
        for name in roof:
            del left[name]
    return [sorted(left)] if left else []


def test_circles_are_found() -> None:
    """The finder sees a circle of two and of three, and none where there is none."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == [["a", "b"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def test_imports_of_every_sort_are_seen() -> None:
    """At the top, for types alone, inside a function, of a module and of a name in it."""
    text = (
        "import ctxcache.ids\nfrom ctxcache import errors\nif TYPE_CHECKING:\n    from ctxcache.config import EngineConfig\n"
        "def f():\n    from ctxcache.keys.chain import KeyHasher\n"
    )
    assert set(imports_of("x", text)) == {"ctxcache.ids", "ctxcache.errors", "ctxcache.config", "ctxcache.keys.chain"}


def test_no_modules_import_each_other() -> None:
    """Imports point down only, also those inside functions and those for types alone."""
    assert circles(drawn()) == []


def test_few_modules_stand_at_the_top() -> None:
    """The rest lives in folders."""
    top = [path.stem for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    assert len(top) <= MOST_AT_THE_TOP, sorted(top)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_it_says(folder: str) -> None:
    """Its docstring names, behind "May import", the modules and folders of the package that those inside import."""
    text = ast.get_docstring(ast.parse(MODULES[folder].read_text(encoding="utf-8"))) or ""
    _, said, rest = text.partition("May import")
    assert said, f"{folder}/__init__.py does not say what the folder may import"
    allowed = {f"ctxcache.{name}" for name in re.findall(r"`([\w.]+)`", rest)} | {folder}
    for name in MODULES:
        if not name.startswith(f"{folder}.") or any(
            name.startswith(f"{other}.") for other in FOLDERS if other.startswith(f"{folder}.")
        ):
            continue
        for found in drawn()[name]:
            assert any(found == each or found.startswith(f"{each}.") for each in allowed), f"{name} imports {found}"
