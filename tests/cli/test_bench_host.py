"""`ctxcache bench host` runs every work, judges by the table's bounds, and draws a plot that can be read."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from ctxcache.cli import main
from ctxcache.cli.bench.host.bounds import DEFAULT, WORKS, Row, describe, judge
from ctxcache.cli.bench.host.chat_work import chat_load, half_of_what_it_needs, serve, serve_block_wise
from ctxcache.cli.bench.host.coordinator_work import decode_step, lifecycle_trigger
from ctxcache.cli.bench.host.manager_work import (
    QUICK,
    Work,
    evict_leaves_in,
    evicting_request,
    fill,
    full_hit,
    make_manager,
    time_work,
)
from ctxcache.cli.bench.host.size_curve import Curve, draw
from ctxcache.cli.bench.verdicts import Spread, Verdicts, format_table, spread_of

STARTS = ("import", "warm-up", "compile")
QUICKLY = [word for work in DEFAULT if work not in STARTS for word in ("--only", work)]


def row_of(work: str, block: int, median: float) -> Row:
    """A measurement that was never taken."""
    return Row(work, block, WORKS[work].unit, median, median, median, 1)


@pytest.mark.parametrize("full", [False, True])
def test_every_work_has_its_rows_and_its_verdicts(
    full: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON on standard output and nothing else: a row for each work and block size, a verdict for each absolute bound.

    With `--quick` no bound is judged: they are those of the full sizes.
    """
    if full:  # as full sizes are treated, without their time
        monkeypatch.setattr("ctxcache.cli.bench.host.measure.QUICK", None)
    status = main(["bench", "host", "--quick", "--json", *QUICKLY])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    expected = [(work, block) for work in DEFAULT if work not in STARTS for block in WORKS[work].bounds]
    assert [(row["work"], row["block"]) for row in report["rows"]] == expected
    for row in report["rows"]:
        assert set(row) == {"work", "block", "unit", "median", "low", "high", "count"}
        assert 0 < row["low"] <= row["median"] <= row["high"]
    judged = [(work, block) for work, block in expected if (b := WORKS[work].bounds[block]) and not b.of_best_peer]
    assert len(report["verdicts"]) == (len(judged) if full else 0)
    assert ("no bound is judged" in printed.err) is not full
    assert status == (0 if all(verdict["met"] for verdict in report["verdicts"]) else 1)
    assert {"cpu", "python", "packages", "date"} <= set(report["environment"])
    assert all(describe(row_of(work, block, 1.0)) in printed.err for work, block in expected)


def test_import_is_timed_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The row is in seconds, and there are as many runs as asked for."""
    assert main(["bench", "host", "--quick", "--only", "import", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["unit"], row["count"]) == ("s", QUICK.repeats)
    assert row["median"] > 0.01


@pytest.mark.parametrize("bad", [["--repeats", "0"], ["--only", "nothing"]])
def test_wrong_arguments_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and a word about it."""
    assert main(["bench", "host", *bad]) == 2
    assert capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_refused_before_the_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, and no line of the table."""
    assert main(["bench", "host", "--plot", str(tmp_path / "absent" / "x.svg")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "make it first" in printed.err


def test_a_bound_is_met_up_to_itself() -> None:
    """An absolute bound needs no peer; what is above it is not met."""
    at, above = judge(row_of("insert", 16, 300.0), None), judge(row_of("insert", 16, 300.1), None)
    assert at is not None
    assert above is not None
    assert (at.met, above.met) == (True, False)
    assert "300" in at.bound


def test_a_bound_beside_the_best_peer_needs_one() -> None:
    """Twice as fast as the best is half its time; without a peer there is no verdict, nor where there is no bound."""
    assert judge(row_of("hash", 16, 50.0), None) is None
    assert judge(row_of("decode-64", 16, 50.0), 1.0) is None
    met, missed = judge(row_of("hash", 16, 50.0), 100.0), judge(row_of("hash", 16, 50.0), 99.0)
    assert met is not None
    assert missed is not None
    assert (met.met, missed.met) == (True, False)


def test_a_spread_is_the_median_and_eight_tenths() -> None:
    """Of any order; a single value is its own spread."""
    assert spread_of([float(value) for value in reversed(range(101))]) == Spread(50.0, 10.0, 90.0, 101)
    assert spread_of([3.0]) == Spread(3.0, 3.0, 3.0, 1)


def test_only_the_act_is_timed_and_its_result_settled() -> None:
    """Each run takes what was prepared for it, and what it returned is settled before the next."""
    events: list[str] = []

    def note(name: str) -> str:
        events.append(name)
        return name

    work = Work(lambda got: note(f"act {got}"), lambda: note("prepare"), lambda got: note(f"settle {got}"))
    assert time_work(work, 1).count == 1
    assert events[:3] == ["prepare", "act prepare", "settle act prepare"]
    assert len(events) % 3 == 0


def test_the_works_do_what_they_say() -> None:
    """A hit finds all full blocks; a request evicts as many as it takes; leaves go one by one; a step publishes."""
    hit = full_hit(16, QUICK)
    assert hit.act(None) == QUICK.prompt_tokens // 16 + 1
    evicting = evicting_request(16, QUICK)
    assert evicting.act(evicting.prepare()) is None
    manager = make_manager(16, 100)
    fill(manager, 100, 1, np.random.default_rng(0))
    leaves = evict_leaves_in(manager, 8)
    before = manager.counters().evicted_records
    leaves.act(leaves.prepare())
    assert manager.counters().evicted_records == before + 1 + 8
    decode_step(16, 2, QUICK).act(None)
    trigger = lifecycle_trigger()
    subject = trigger.prepare()
    trigger.act(subject)
    assert subject._state == "executing.decoding"


def test_the_plot_names_its_axes_and_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Well-formed SVG with a line and a name for each operation, a tick for each size, all within the picture."""
    file = tmp_path / "curve.svg"
    assert main(["bench", "host", "--quick", "--only", "trigger", "--plot", str(file)]) == 0
    assert "blocks" in capsys.readouterr().out
    root = ET.fromstring(file.read_text(encoding="utf-8"))  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    lines = root.findall(f"{space}polyline")
    assert len(lines) == 3
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = (float(value) for value in point.split(","))
            assert 0 < x < width
            assert 0 < y < height
    words = [text.text or "" for text in root.findall(f"{space}text")]
    assert {"cached blocks", "600", "1.2k"} <= set(words)
    assert any("microseconds" in word for word in words)


def test_a_flat_curve_is_drawn_flat() -> None:
    """Equal costs lie at one height, higher costs above; equal factors of size are equally far apart."""
    svg = draw([Curve("low", [1000, 10_000, 100_000], [10.0] * 3), Curve("high", [1000, 10_000, 100_000], [30.0] * 3)])
    root = ET.fromstring(svg)  # noqa: S314 - our own
    lines = [line.attrib["points"].split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    low, high = ([tuple(map(float, point.split(","))) for point in line] for line in lines)
    assert len({y for _, y in low}) == 1
    assert high[0][1] < low[0][1]
    assert low[1][0] - low[0][0] == pytest.approx(low[2][0] - low[1][0], abs=0.2)


def test_a_table_lines_up() -> None:
    """The first column begins at the left, the others end at the right."""
    assert format_table(("work", "us"), [("a", "1.5"), ("longer", "10")]) == [
        "work     us",
        "a       1.5",
        "longer   10",
    ]


def test_a_verdict_is_printed_as_it_comes() -> None:
    """With claim, measurement and bound."""
    lines: list[str] = []
    Verdicts(lines.append).verdict("insert", "at most 300 us", "400 us", met=False)
    assert lines == ["  NOT MET  insert: 400 us (bound at most 300 us)"]


@pytest.mark.parametrize("block", [16, 128])
def test_a_chat_load_at_half_its_memory_computes_no_more_than_block_wise_lru_would(block: int) -> None:
    """The same load, the same pages: evicting from the tail and refreshing what was hit loses nothing against it."""
    turns = chat_load(60)
    num_pages = half_of_what_it_needs(turns, block)
    ours, theirs = serve(turns, block, num_pages).computed_percent, serve_block_wise(turns, block, num_pages)
    assert 0 < ours <= theirs < 50
    assert serve(turns, block, 2 * num_pages).computed_percent < ours
