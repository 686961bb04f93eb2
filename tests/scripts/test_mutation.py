"""The catalogue of planted faults fits the library as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation.__main__ import main
from mutation.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_changes_one_place(mutant: Mutant) -> None:
    """What it replaces stands once in its file: otherwise the hunt plants nothing, or something else."""
    text = (ROOT / "ctxcache" / mutant.module).read_text()
    assert text.count(mutant.before) == 1
    assert mutant.after != mutant.before


def test_faults_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Given more than once, all that any of the texts names; a text that names none is refused, not passed over."""
    assert main(["--list", "--only", "rows are trusted", "--only", "rows of retired"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rows are trusted after a failed drain",
        "rows of retired sequences go on naming pages",
    ]
    with pytest.raises(SystemExit) as refused:
        main(["--only", "drain", "--only", "no such fault"])
    assert refused.value.code == 2
    assert "'no such fault'" in capsys.readouterr().err
