"""The source distribution has all that its tests need, and a description whose links are alive on an index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BUILD = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"

NEEDED = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml", "setup.py")
"""Files at the root; of the folders `docs`, `scripts`, `tests` and the packages everything is needed."""

PASSES = ("tests/test_docs.py::test_generated_pages_are_fresh", "tests/test_house.py", "tests/test_coverage_rules.py")
"""Tests that read documents, scripts and sources, to be run from what was unpacked."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of this tree, built by the backend itself, which needs no network, and unpacked."""
    pytest.importorskip("setuptools", "77", reason="the backend that pyproject.toml asks for")
    folder = tmp_path_factory.mktemp("sdist")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=a_copy(folder / "source"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.glob("ctxcache-*/")
    return root


def tracked() -> list[Path]:
    """All files of the tree that are none of a tool's, from its root."""
    skipped = {".git", ".venv", "build", "dist", "__pycache__"}
    return [
        path.relative_to(ROOT)
        for path in sorted(ROOT.rglob("*"))
        if path.is_file()
        and not skipped.intersection(path.parts)
        and not any(part.startswith(".") or part.endswith(".egg-info") for part in path.relative_to(ROOT).parts)
    ]


def a_copy(target: Path) -> Path:
    """Copy the tree: building writes beside the sources."""
    for name in tracked():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((ROOT / name).read_bytes())
        (target / name).chmod((ROOT / name).stat().st_mode)
    return target


def test_n10_nothing_is_missing(unpacked: Path) -> None:
    """Documents, scripts (still executable), changelog, tests and their support: every file of the tree."""
    wanted = [
        name for name in tracked() if name.parts[0] in ("ctxcache", "ctxcache_pytest", "docs", "scripts", "tests")
    ]
    assert len(wanted) > 200
    assert [str(name) for name in (*map(Path, NEEDED), *wanted) if not (unpacked / name).is_file()] == []
    assert os.access(unpacked / "scripts" / "test", os.X_OK)


def test_n10_tests_pass_from_what_was_unpacked(unpacked: Path) -> None:
    """Those that read documents, scripts and sources find them there."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *PASSES],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_n10_no_link_of_the_description_is_dead(unpacked: Path) -> None:
    """On an index there are no files beside the description: each is named instead; addresses stay links."""
    metadata, _, description = (unpacked / "PKG-INFO").read_text(encoding="utf-8").partition("\n\n")
    assert "Description-Content-Type: text/markdown" in metadata
    assert "integrates a runtime step by step" in description
    targets = re.findall(r"\]\(([^)]+)\)", description)
    assert [target for target in targets if "://" not in target] == []
    assert "| `docs/guide.md` | integrating a runtime |" in description
    assert "state machine that is declared as data (`docs/lifecycle.md`)" in description
