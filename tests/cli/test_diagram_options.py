"""`ctxcache diagram` for one kind, as a page, and beside an earlier version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxcache.cli import main
from ctxcache.fsm import VIEWS, export
from ctxcache.ids import ContextCacheDeploymentKind as Kind


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("form", ["mermaid", "dot", "json", "html"])
def test_options_reach_the_export(form, view, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--kind` and `--diff` choose what is printed or written, in every text format of each view; the status is 0."""
    old = tmp_path / "old.json"
    assert main(["diagram", "--json", "--output", str(old)]) == 0
    capsys.readouterr()
    chosen = ["diagram", "--format", form, "--view", view, "--kind", "EAGLE", "--diff", str(old)]
    assert main(chosen) == 0
    expected = export(form, view=view, kind=Kind.EAGLE, diff=old)
    assert capsys.readouterr() == (expected, "")
    path = tmp_path / "new"
    assert main([*chosen, "--output", str(path)]) == 0
    assert path.read_text() == expected


def test_the_status_is_0_whether_or_not_something_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has changed is marked, not judged."""
    content = json.loads(export("json"))
    del content["transitions"][0]
    old = tmp_path / "old.json"
    old.write_text(json.dumps(content))
    assert main(["diagram", "--diff", str(old)]) == 0
    assert "prepare_prefill (added)" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "[]", '{"states": []}'])
def test_a_bad_earlier_version_is_status_2_and_named(
    content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is missing or something else: named on standard error, nothing printed, nothing written."""
    old = tmp_path / "old.json"
    if content is not None:
        old.write_text(content)
    before = list(tmp_path.iterdir())
    assert main(["diagram", "--diff", str(old), "--output", str(tmp_path / "new.mmd")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ctxcache: error: {old} ")
    assert list(tmp_path.iterdir()) == before


def test_a_page_needs_no_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Without Graphviz the page has its own picture; only Graphviz's is missing."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert main(["diagram", "--format", "html"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("<!DOCTYPE html>")
    assert '<svg class="lanes"' in text
    assert '<svg class="graph"' not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "mamba"], "invalid choice: 'mamba'"),
        (["--format", "json", "--output", "x.html"], "another suffix"),
    ],
)
def test_wrong_options_are_status_2(arguments: list[str], said: str, tmp_path, monkeypatch, capsys) -> None:
    """What the caller got wrong is named, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main(["diagram", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_comparison_is_not_written_over_what_it_compares_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--output` and `--diff` of one file are refused, and the file stays."""
    old = tmp_path / "old.json"
    assert main(["diagram", "--json", "--output", str(old)]) == 0
    before = old.read_text()
    assert main(["diagram", "--json", "--diff", str(old), "--output", str(old)]) == 2
    assert "would be lost" in capsys.readouterr().err
    assert old.read_text() == before
