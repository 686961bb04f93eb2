"""`scripts/bench-peers`: reading the peers' lines, standing them beside our rows, and the verdicts of several runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer_bench.__main__ import LETTERS, main, missing
from peer_bench.catalogue import LINES
from peer_bench.lines import Figure, read_figures
from peer_bench.table import all_met, compare, show_peers, summarise

from ctxcache.cli.bench.host.bounds import WORKS, Row

SCRIPTS = Path(__file__).parents[2] / "scripts"


PRINTED = """\
vllm 0.33.0 python 3.11.7 torch 2.13.0+cpu
(a) hash sha256 bs16 n32768                                    med      12.36ms p10      12.33 p90      14.35 mean      13.04 n=15      2.65 Mtok/s
(a) hash sha256 bs16 n131072                                   med      16.62ms p10      16.54 p90      40.69 mean      22.45 n=7      7.89 Mtok/s
(a) native C++ sha256 page-hash page16 n32768                  med       0.29ms p10       0.29 p90       0.30 mean       0.30 n=15    112.65 Mtok/s
(b) full-hit hash+lookup sha256 bs16 n32768                    med    5441.45us p10    5382.63 p90   13630.23 mean    7644.07 n=15
(b) rust full-hit match (1 node) page16 n32768                med      29.47us p10      29.13 p90      33.13 mean      51.76 n=200
(b) rust full-hit match+lock+gather indices+unlock page16 n32768 med      46.91us p10      46.10 p90      52.82 mean     131.13 n=100
(c) cold admit+hash(sha256)+alloc+publish 32k bs16             med      10.31ms p10       7.43 p90      23.68 mean      14.89 n=15      3.18 Mtok/s
(d) decode step B256 bs16 sha256 (alloc_slots+append+hash/publish) med    1354.90us p10    1310.29 p90    1463.65 mean    1504.68 n=256
(e) same, hashes ready bs16                                    med     745.02us p10     692.00 p90     853.33 mean    1160.27 n=200
(f) sha256: pool objects 136.0 B/block; +cached index 151.5 B/block; total 287.2 B/block
(f) rust page16 per page (4k-token nodes, 390 nodes): RSS delta 273.5 B/page, py-tracemalloc 0.0; (caller-held key+value arrays 256 B/page may be shared/copied)
cyc err <class 'AttributeError'> no such thing
"""
FIGURES = read_figures(PRINTED.splitlines())


def row_of(work: str, median: float, block: int = 16) -> Row:
    """A measurement that was never taken."""
    return Row(work, block, WORKS[work].unit, median, median, median, 1)


def test_figures_are_read_from_real_lines() -> None:
    """Labels as printed, microseconds whatever the unit, bytes where there are some; other lines are passed over."""
    values = {figure.label: figure.value for figure in FIGURES}
    assert len(values) == len(FIGURES) == 11
    assert values["(a) hash sha256 bs16 n32768"] == pytest.approx(12_360.0)
    assert values["(b) rust full-hit match+lock+gather indices+unlock page16 n32768"] == 46.91
    assert (values["(f) sha256"], values["(f) rust page16 per page"]) == (287.2, 273.5)


def test_each_row_stands_beside_its_own_lines() -> None:
    """Of the same work, block size and prompt length; what does only a part of the work is shown and never the best."""
    rows = [row_of("hash", 50.0), row_of("hit", 40.0), row_of("hash", 20.0, block=128), row_of("trigger", 9.0, block=0)]
    hashed, hit, wide, trigger = compare(rows, FIGURES)
    assert hashed.peers == {"SGLang native SHA-256": 290.0, "vLLM SHA-256": pytest.approx(12_360.0)}
    assert hashed.best == "SGLang native SHA-256"
    assert hit.peers["SGLang Rust tree, match alone"] == 29.47
    assert hit.best == "SGLang Rust tree"
    assert not wide.peers
    assert not trigger.peers


def test_a_row_is_judged_by_the_best_peer_of_its_run() -> None:
    """Hash: half the best's time; a hit: no more than the best's; without the peers' figures no verdict is given."""
    met = compare([row_of("hash", 145.0), row_of("hit", 46.9)], FIGURES)
    missed = compare([row_of("hash", 145.1), row_of("hit", 47.0)], FIGURES)
    assert [each.verdict.met for each in met if each.verdict] == [True, True]
    assert [each.verdict.met for each in missed if each.verdict] == [False, False]
    assert [each.verdict for each in compare([row_of("hit", 1.0)], [])] == [None]


def test_one_run_that_misses_is_seen_in_the_table() -> None:
    """Three runs, one above the bound: 2 of 3, not met, though the median of the medians is below."""
    runs = [compare([row_of("hit", median), row_of("bytes", 91.0)], FIGURES) for median in (40.0, 41.0, 99.0)]
    table = summarise(runs)
    assert "NOT MET (2 of 3)" in table[1]
    assert "41 us" in table[1]
    assert "46.91 us" in table[1]
    assert "met (3 of 3)" in table[2]
    assert not all_met(runs)
    assert all_met(runs[:2])


def test_ratios_are_given_for_every_peer() -> None:
    """How many times ours each peer's figure is."""
    lines = show_peers(compare([row_of("hash", 29.0)], FIGURES))
    assert any("SGLang native SHA-256" in line and line.endswith("10.0") for line in lines)


def test_the_catalogue_names_works_of_the_table() -> None:
    """Every line belongs to a work, every letter to a line, and no label stands for two."""
    assert {line.work for line in LINES} <= set(WORKS)
    assert {WORKS[line.work].letter for line in LINES} == set(LETTERS)
    assert all(line.label.startswith(f"({WORKS[line.work].letter})") for line in LINES)
    assert len({line.label for line in LINES}) == len(LINES)


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First the peers' scripts, then their environment; exit status 2."""
    peers, made = tmp_path / "peers", tmp_path / "made"
    assert main([str(made), "--peers", str(peers)]) == 2
    assert "--peers or $PEERS" in capsys.readouterr().err
    peers.mkdir()
    for name in ("run", "setup", "benchlib.py"):
        (peers / name).touch()
    assert main([str(made), "--peers", str(peers)]) == 2
    assert f"{peers / 'setup'} {made}" in capsys.readouterr().err
    for name in ("venv/bin/python", "vllm_src", "sglang_src"):
        (made / name).mkdir(parents=True)
    assert missing(made, peers) == []


def test_what_is_no_figure_is_passed_over() -> None:
    """A line that does not look like the others; a growth of 0 bytes, where a process had the memory from before."""
    grown = "(f) rust page16 per page (nodes): RSS delta {} B/page, py-tracemalloc 0.0"
    assert read_figures(["(a) hash med nothing", "(z) else med 1.0us p10 1.0", "", grown.format("0.0")]) == []
    assert read_figures([grown.format("2.5")]) == [Figure("(f) rust page16 per page", 2.5)]
