"""`ctxcache bench device` measures the ops that it names, and judges by the bounds that it prints."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ctxcache.cli import main
from ctxcache.cli.bench.device.measure import COMPACTION, Geometry, Report
from ctxcache.cli.bench.device.rivals import compaction_copies, copies_of
from ctxcache.device.snapshots import recurrent_bytes_per_slot

SMALL = ["--repeats", "1", "--layers", "2", "--batch", "8", "--state-kib", "1", "--conv-kib", "1"]


@pytest.mark.filterwarnings("ignore")
def test_the_report_holds_every_op_and_every_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON on standard output and nothing else; a bound that is not met is exit status 1, and it is said which."""
    status = main(["bench", "device", "--json", *SMALL])
    report = json.loads(capsys.readouterr().out)
    assert {row["work"] for row in report["rows"]} >= {
        "capture",
        "restore",
        "compaction 8 to 5",
        "zero",
        "sum 4 pages",
        "grow 64 of 256 rows",
        "grow nothing",
    }
    assert all(row["device_us"] > 0 and row["wall_us"] > 0 for row in report["rows"])
    verdicts = {verdict["claim"]: verdict["met"] for verdict in report["verdicts"]}
    assert verdicts["grow nothing: device calls"]
    assert status == (0 if all(verdicts.values()) else 1)
    assert report["environment"]["packages"]["numba"]


@pytest.mark.parametrize("bad", [["--repeats", "0"], ["--layers", "-1"], ["--batch", "x"]])
def test_wrong_sizes_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A size that is no positive number is exit status 2."""
    assert main(["bench", "device", *bad]) == 2
    assert capsys.readouterr().err


def test_the_default_geometry_is_the_one_of_the_bounds() -> None:
    """48 layers x 8 sequences x (1 MiB + 96 KiB)."""
    geometry = Geometry()
    assert recurrent_bytes_per_slot(geometry.engine()) == 48 * ((1 << 20) + (96 << 10))
    assert geometry.batch == len(COMPACTION) == 8


def test_the_rivals_move_the_same_bytes() -> None:
    """One copy per array and sequence moves what capture moves; the compaction's copies give what compaction gives."""
    rng = np.random.default_rng(1)
    live, saved = rng.integers(0, 256, (2, 3, 8), dtype=np.uint8), np.zeros((2, 4, 8), np.uint8)
    pairs = list(zip(live, saved, strict=True))
    copies = copies_of(pairs, [(0, 3), (2, 1)], restoring=False)
    assert len(copies) == 4
    assert sum(num_bytes for _, _, num_bytes in copies) == 4 * 8
    assert {
        (live[i].ctypes.data + 8 * a, saved[i].ctypes.data + 8 * b) for i in (0, 1) for a, b in ((0, 3), (2, 1))
    } == {(source, target) for target, source, _ in copies}
    assert {(s, t) for t, s, _ in copies_of(pairs, [(0, 3)], restoring=True)} == {
        (saved[i].ctypes.data + 24, live[i].ctypes.data) for i in (0, 1)
    }
    state = rng.integers(0, 256, (8, 4), dtype=np.uint8)
    moves = [
        ((t - state.ctypes.data) // 4, (s - state.ctypes.data) // 4)
        for t, s, _ in compaction_copies([state], COMPACTION)
    ]
    assert moves == [(0, 1), (1, 2), (2, 4), (3, 5), (4, 7)]


def test_a_verdict_says_what_was_asked_and_what_was_found() -> None:
    """Each line names claim, measurement and bound."""
    lines: list[str] = []
    report = Report(lines.append)
    report.verdict("capture / copy", "at most 1.12", "1.200", met=False)
    assert lines == ["  NOT MET  capture / copy: 1.200 (bound at most 1.12)"]
    assert not report.verdicts[0].met
