"""How much of the suite a run takes: all that is cheap, and of what is marked as expensive a share, everything or nothing.

    @pytest.mark.sampled(keep=0.5)      # half of its cases each day; of a single test, every other day

`pytest` alone draws the share with a seed that is another one each day. Whoever names tests, by path, `-k` or `-m`, gets all of
them. `--thorough` takes everything and fails where a test is skipped that needs no GPU; `--quick` takes nothing that is
marked. What a run leaves out is deselected, and counted in the summary.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

EXAMPLES = {"quick": 20, "default": 100, "thorough": 400}
"""Examples of a test by Hypothesis: its profiles here, one for each extent of a run."""

LEFT_OUT = pytest.StashKey[list[int]]()
"""How many cases each process has left out; every worker leaves out the same."""

for profile, examples in EXAMPLES.items():
    settings.register_profile(profile, max_examples=examples, deadline=None)  # the first call of a kind may compile


def draw(cases: Iterable[str], keep: float, seed: int) -> set[str]:
    """Draw `keep` of the cases of one test; what is left of a whole case is the chance of one more."""
    ordered = sorted(cases)
    rng = random.Random(f"{seed} {ordered[0]}")
    count = math.floor(keep * len(ordered) + rng.random())
    return set(rng.sample(ordered, min(count, len(ordered))))


def extent_of(config: pytest.Config) -> str:
    """Say how much a run takes: "quick", "default" or "thorough"."""
    if config.getoption("--quick"):
        return "quick"
    named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr
    return "thorough" if named or config.getoption("--thorough") else "default"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("sampling")
    group.addoption("--quick", action="store_true", help="leave out everything that is marked as expensive")
    group.addoption(
        "--thorough", action="store_true", help="leave out nothing; a skip without need of a GPU is a failure"
    )
    group.addoption("--sample-seed", type=int, metavar="N", help="draw the sample of another day")


def pytest_configure(config: pytest.Config) -> None:
    """Settle seed and profile, before workers are started that must agree with this process."""
    config.addinivalue_line("markers", "sampled(keep): expensive; a run of everything takes this share of its cases")
    if config.getoption("--quick") and config.getoption("--thorough"):
        raise pytest.UsageError("--quick leaves out what --thorough is for; pass one of them")
    if config.option.sample_seed is None:
        config.option.sample_seed = int(f"{dt.datetime.now(tz=dt.UTC):%Y%m%d}")
    if not config.getoption("--hypothesis-profile"):
        extent = extent_of(config)
        settings.load_profile("default" if extent == "thorough" and not config.getoption("--thorough") else extent)
    config.stash[LEFT_OUT] = []


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to draw the same sample again."""
    extent = extent_of(config)
    sample = f", sampled with --sample-seed {config.option.sample_seed}" if extent == "default" else ""
    return f"extent: {extent}{sample}"


@pytest.fixture(scope="session")
def sample_seed(pytestconfig: pytest.Config) -> int:
    """The seed of this run's sample, for tests that draw from what is too much for any run."""
    seed: int = pytestconfig.option.sample_seed
    return seed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this run leaves out; what is long comes first, so that no worker begins with it when all others end."""
    extent = extent_of(config)
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    left: list[pytest.Item] = []
    for cases in tests.values():
        (mark,) = cases[0].iter_markers("sampled")
        keep = {"quick": 0.0, "default": mark.kwargs["keep"], "thorough": 1.0}[extent]
        chosen = draw((case.nodeid for case in cases), keep, config.option.sample_seed)
        left += [case for case in cases if case.nodeid not in chosen]
    config.stash[LEFT_OUT].append(len(left))
    if left:
        config.hook.pytest_deselected(items=left)
        dropped = set(left)
        items[:] = [item for item in items if item not in dropped]
    items.sort(key=lambda item: item.get_closest_marker("sampled") is None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker tell the process that started it what it has left out."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear that from a worker; one that crashed says nothing."""
    node.config.stash[LEFT_OUT] += getattr(node, "workeroutput", {}).get("left_out", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many cases this run has left out."""
    if max(config.stash[LEFT_OUT], default=0):
        terminalreporter.write_line(f"{max(config.stash[LEFT_OUT])} cases were left for --thorough")


def refuse_skip(config: pytest.Config, report: Any, *, needs_gpu: bool) -> None:
    """In a thorough run a skip is a failure, unless it is for want of a GPU or expected."""
    if config.getoption("--thorough") and report.skipped and not needs_gpu and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"--thorough skips nothing: {report.longrepr[2]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Look at what a test was skipped for."""
    report = yield
    refuse_skip(item.config, report, needs_gpu=item.get_closest_marker("gpu") is not None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Look at what a file was skipped for."""
    report = yield
    refuse_skip(collector.config, report, needs_gpu=False)
    return report
