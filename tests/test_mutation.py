"""The catalogue of planted faults fits the library as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from mutation.catalogue import MUTANTS, Mutant  # noqa: E402


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_changes_one_place(mutant: Mutant) -> None:
    """What it replaces stands once in its file: otherwise the hunt plants nothing, or something else."""
    text = (ROOT / "ctxcache" / mutant.module).read_text()
    assert text.count(mutant.before) == 1
    assert mutant.after != mutant.before
