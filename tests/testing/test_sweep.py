"""Every device touch failed in every way, in every deployment kind, on a lazy stream: nothing is lost.

`ctxcache faults` runs all of it; here every point fails once in every way, and a sample of the ordered pairs.
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
from collections.abc import Iterable
from typing import Self

import pytest

from ctxcache.cli import main
from ctxcache.errors import InvariantError
from ctxcache.fsm import FaultGroup, fault_groups, fault_points
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.request.batch import Batch
from ctxcache.request.custody import Custody
from ctxcache.testing import Fault, FaultMode, FaultPlan
from ctxcache.testing.fault_runs import Chain, FaultRun, Touches, faults_at, pair_faults, survey
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.runtime.scripts import SCRIPT, run_request, run_script
from ctxcache.testing.runtime.steps import RequestEnded
from ctxcache.testing.sweep import RunOutcome, SweepResult, aftermath, replay, run_with, sweep

KINDS = pytest.mark.parametrize("kind", tuple(Kind), ids=lambda kind: kind.value)
GROUPS = pytest.mark.parametrize("group", fault_groups(Kind), ids=lambda group: group.name)
NO_FAULT = FaultRun(())
VANILLA = FaultGroup(Kind.VANILLA)
PAIRS_A_KIND = 40
WAYS = 14
"""Four modes, three of them with an `Exception` and with a `BaseException`, each once and from then on."""


def sample(runs: Iterable[FaultRun], seed: int, count: int) -> list[FaultRun]:
    """Some of the runs, other ones each day."""
    chosen = list(runs)
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


@GROUPS
def test_the_script_reaches_exactly_the_declared_points(group: FaultGroup) -> None:
    """Every declared touch happens, and none that is not declared; the page sanitizer's own are told from the kind's."""
    assert set(survey(group).occurrences) == set(group.points)


@KINDS
def test_a_script_without_faults_is_clean(kind: Kind) -> None:
    """Under several schedules: no violation, and nobody hears of a failure but of those that the script plans."""
    for seed in range(3):
        runtime = FakeRuntime(kind, seed=seed)
        heard = run_script(runtime)
        assert [line.split(":")[0] for line in heard] == ["failed_drain"]
        assert aftermath(runtime) == []
        assert runtime.ledger.num_changes > 100


@pytest.mark.sampled(keep=1 / 3)
@KINDS
def test_each_point_fails_alone(kind: Kind) -> None:
    """Each once-reached point, in every way: it fires, somebody hears of it, and nothing is lost."""
    group = FaultGroup(kind)
    points = survey(group).points
    faults = [fault for point in points for fault in faults_at(point, 1)]
    assert len(faults) == WAYS * len(points)
    for fault in faults:
        outcome = run_with(group, FaultRun((fault,)))
        assert outcome.fired >= 1, fault
        assert outcome.violations == []


@pytest.mark.sampled(keep=1 / 3)
@GROUPS
def test_later_occurrences_fail_too(group: FaultGroup, sample_seed: int) -> None:
    """A sample of the later times at which a point is reached, on other transitions than the first."""
    later = [run for run in survey(group).singles() if run.faults[0].occurrence > 1]
    for run in sample(later, sample_seed, 40):
        outcome = run_with(group, run)
        assert outcome.fired >= 1, run.name
        assert outcome.violations == []


@pytest.mark.sampled(keep=1 / 3)
@GROUPS
def test_pairs_of_points_fail(group: FaultGroup, sample_seed: int) -> None:
    """A sample of ordered pairs, the second fault striking on the way out of the first: nothing is lost."""
    pairs = sample(survey(group).pairs(exhaustive=True), sample_seed, PAIRS_A_KIND)
    outcomes = [run_with(group, run) for run in pairs]
    assert [violation for outcome in outcomes for violation in outcome.violations] == []
    assert sum(outcome.complete for outcome in outcomes) > PAIRS_A_KIND / 2


def test_the_page_sanitizer_is_swept_where_it_sums() -> None:
    """Its drain apart from the lifecycle's of the same name; at most three times each alone; in every pair a sum."""
    touches = survey(FaultGroup(Kind.HYBRID, page_sanitizer=True))
    without = survey(FaultGroup(Kind.HYBRID))
    drain = "complete_decode_step.synchronize"
    assert len(touches.occurrences[drain]) == len(touches.occurrences["complete_decode_step.sum_pages"])
    assert touches.occurrences[drain] != list(range(1, len(touches.occurrences[drain]) + 1))
    assert len(without.occurrences[drain]) > len(touches.occurrences[drain])
    singles = {(run.faults[0].point, run.faults[0].occurrence) for run in touches.singles()}
    for point, times in touches.occurrences.items():
        mine = sorted(occurrence for name, occurrence in singles if name == point)
        assert len(mine) == min(len(times), 3)
        assert (mine[0], mine[-1]) == (times[0], times[-1])
    pairs = list(touches.pairs(exhaustive=False))
    assert all(any("sum_pages" in fault.point for fault in run.faults) for run in pairs)
    assert any("sum_pages" not in run.faults[0].point for run in pairs)
    assert any("sum_pages" not in run.faults[1].point for run in pairs)


def test_the_second_fault_of_a_chain_waits_for_the_first() -> None:
    """Occurrences of the second are counted from where the first has struck; a pair of one point is two strikes."""
    plan = Chain(Fault("a", occurrence=2), Fault("a", FaultMode.RAISE_AFTER))
    struck = [plan.strike("a", time) for time in range(1, 5)]
    assert [None if fault is None else fault.mode for fault in struck] == [
        None,
        FaultMode.RAISE_BEFORE,
        FaultMode.RAISE_AFTER,
        None,
    ]
    assert plan.complete


def test_the_pairs_are_all_there() -> None:
    """Every ordered pair, a point with itself included: in two ways each, or in all seven with `exhaustive`.

    Raising before a synchronise and failing it are one way.
    """
    points = ["a", "b", "c.synchronize"]
    assert len(list(pair_faults(points, exhaustive=False))) == (2 * 2 + 1) ** 2
    assert len(list(pair_faults(points, exhaustive=True))) == (7 * 2 + 5) ** 2


def test_the_sweep_sees_a_release_that_overtakes_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custody that releases first: the ledger says which page, and the result counts it."""

    def abandon(self: Custody, request: object) -> Status:
        self.release(request)
        return self.fire(request, "abandon")

    monkeypatch.setattr(Custody, "abandon", abandon)
    violations = run_with(VANILLA, NO_FAULT).violations
    assert any("was released while the device may still write it" in violation for violation in violations)


def test_the_sweep_sees_a_lost_lease_and_a_full_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that nobody returns, and a request that does not end, are violations, not crashes."""
    monkeypatch.setattr(Custody, "release", lambda self, request: setattr(self, "active", None))
    violations = run_with(VANILLA, NO_FAULT).violations
    assert any("leases are still out" in violation for violation in violations)
    assert any("do not make" in violation for violation in violations)
    monkeypatch.undo()
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([[1, 2, 3]])
    handle = runtime.request
    monkeypatch.setattr(runtime, "settle", lambda: False)
    found = aftermath(runtime)
    assert any("did not end the poisoning" in violation for violation in found)
    assert any("the request did not end" in violation for violation in found)
    monkeypatch.undo()
    handle.close()


def test_the_sweep_sees_a_failure_that_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain whose failure is swallowed: what fired and was not heard of is a violation."""

    def deaf(runtime: FakeRuntime) -> list[str]:
        run_script(runtime)
        return []

    monkeypatch.setattr("ctxcache.testing.sweep.run_script", deaf)
    assert run_with(VANILLA, NO_FAULT) == RunOutcome(0, complete=True, violations=[])
    outcome = run_with(VANILLA, FaultRun((Fault("finish.synchronize"),)))
    assert outcome.violations == ["vanilla: finish.synchronize raise_before: a device failure reached nobody"]


@pytest.mark.parametrize(("kind", "kept"), [(Kind.VANILLA, "keys"), (Kind.HYBRID, "keys"), (Kind.VANILLA, "tokens")])
def test_the_runtime_sees_keys_of_other_tokens(kind: Kind, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that leaves keys or tokens in their old slots when sequences move publishes under wrong keys: seen."""
    compact = Batch.compact

    def forgetful(self: Batch, mapping: object) -> None:
        before = list(self.keys), self.tokens.copy()
        compact(self, mapping)
        if kept == "keys":
            self.keys = before[0][: self.size]
        else:
            self.tokens = before[1][: self.size]

    monkeypatch.setattr(Batch, "compact", forgetful)
    runtime = FakeRuntime(kind)
    runtime.begin([[0, 0, 1, 1, 2, 2], [1, 2, 0, 1, 2, 0]])
    runtime.prefill()
    runtime.decode()
    runtime.begin_compaction([1])
    runtime.compact()
    with contextlib.suppress(InvariantError):
        for _ in range(3):
            runtime.decode([0])
    assert any("keys of other tokens" in violation for violation in runtime.violations)


def test_what_escapes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that no runtime expects does not stop the sweep: it is the run's violation."""
    monkeypatch.setattr(FakeRuntime, "prepare", lambda self: 1 / 0)
    outcome = run_with(VANILLA, NO_FAULT)
    assert outcome.fired == 0
    assert "ZeroDivisionError escaped" in outcome.violations[0]


def test_a_runtime_gives_up_on_a_device_that_never_recovers() -> None:
    """A shutdown that fails from now on: the runtime tries a few times, and the script stops."""
    runtime = FakeRuntime(
        Kind.VANILLA, plan=FaultPlan(Fault("shutdown.synchronize", FaultMode.ERROR_CODE, persistent=True))
    )
    heard: list[str] = []

    def poisoned(runtime: FakeRuntime) -> None:
        runtime.begin([[1, 2, 3]])
        runtime.prepare()
        runtime.sync.outcomes = [700]
        runtime.abandon()

    assert not run_request(runtime, poisoned, heard)
    assert heard.count("settle: still poisoned") == 4
    assert aftermath(runtime) == []


def test_the_runtime_refuses_to_go_on_without_a_request() -> None:
    """Steps before any request end at once."""
    with pytest.raises(RequestEnded, match="no request"):
        FakeRuntime(Kind.VANILLA).prepare()


def test_a_sweep_counts_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points, occurrences, runs and violations; unreached and undeclared points are violations."""
    progress: list[int] = []
    touches = Touches(VANILLA, {"finish.synchronize": [1], "made.up": [1]}, ("finish.synchronize", "made.up"))
    monkeypatch.setattr("ctxcache.testing.sweep.survey", lambda group: touches)
    monkeypatch.setattr(
        "ctxcache.testing.sweep.run_with", lambda group, run: RunOutcome(0, complete=False, violations=[])
    )
    result = sweep(VANILLA, progress=progress.append)
    assert result.runs == {"singles": 2 * WAYS, "pairs": 9}
    assert len(result.unfired) == 2 * WAYS
    assert result.incomplete == 9
    assert progress == list(range(1, 2 * WAYS + 10))
    assert "made.up is reached and not declared" in result.violations
    assert "no script reaches prepare_prefill.upload_rows" in result.violations
    assert result.as_dict()["points"] == len(fault_points(Kind.VANILLA))


@pytest.mark.parametrize("group", [VANILLA, FaultGroup(Kind.EAGLE, page_sanitizer=True)], ids=lambda group: group.name)
def test_a_run_is_replayed_exactly(group: FaultGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its name alone: the same deployment, faults and schedule, of a single and of a pair."""
    made: list[tuple[Kind, int, bool, list[str]]] = []

    def noted(kind: Kind, *, seed: int, plan: FaultPlan, page_sanitizer: bool) -> FakeRuntime:
        runtime = FakeRuntime(kind, seed=seed, plan=plan, page_sanitizer=page_sanitizer)
        made.append((kind, seed, page_sanitizer, runtime.ops.log))
        return runtime

    touches = survey(group)
    runs = [*sample(touches.singles(), 1, 1), *sample(touches.pairs(exhaustive=False), 1, 1)]
    monkeypatch.setattr("ctxcache.testing.sweep.FakeRuntime", noted)
    for run in runs:
        outcome = run_with(group, run)
        assert outcome == replay(f"{group.name}: {run.name}")
        assert outcome.fired
        assert made[-1] == made[-2]


def quick_sweep(group: FaultGroup, *, pairs: bool, exhaustive: bool, progress: object) -> SweepResult:
    """A sweep's result without the sweep."""
    progress(3)
    runs = {"singles": 5, "pairs": 7 * pairs}
    if group != FaultGroup(Kind.EAGLE):
        return SweepResult(group, {"a.b": 2}, runs)
    return SweepResult(group, {"a.b": 2}, runs, violations=["eagle: it's: a page is lost"], failed=["eagle: it's"])


def test_the_command_prints_points_runs_and_violations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line a kind, the totals last; status 1 where something was wrong; JSON says the same."""
    monkeypatch.setattr("ctxcache.testing.sweep.sweep", quick_sweep)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("ctxcache.cli.report._PROGRESS_SECONDS", 0.0)
    assert main(["faults", "--kind", "vanilla"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("vanilla: 10 fault points")
    assert "\nvanilla+page_sanitizer: 6 fault points\n" in printed.out
    assert "16 fault points, 24 runs, 0 seconds, 0 single faults that did not fire, 0 violations" in printed.out
    assert "vanilla: 3 runs" in printed.err
    assert main(["faults", "--kind", "eagle", "--singles"]) == 1
    told = capsys.readouterr().out
    assert "violation: eagle: it's: a page is lost" in told
    (again,) = [line.split(": ", 1)[1] for line in told.splitlines() if line.startswith("  run it again: ")]
    assert shlex.split(again) == ["ctxcache", "faults", "--run", "eagle: it's"]
    assert main(["faults", "--singles", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["runs"], document["violations"], document["unfired"]) == (55, 1, 0)
    assert set(document["fault_points"]) == {group.name for group in fault_groups(Kind)}


def test_the_command_does_one_run_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 0 where its fault struck and nothing was wrong, 1 where something was, 2 for a run that there is not."""
    title = "vanilla: finish.synchronize raise_before, then shutdown.synchronize raise_before"
    assert main(["faults", "--run", title]) == 0
    assert capsys.readouterr().out == f"{title}: 2 device touches failed, 0 violations\n"
    monkeypatch.setattr("ctxcache.testing.sweep.aftermath", lambda runtime: ["a page is lost"])
    assert main(["faults", "--run", title]) == 1
    assert f"violation: {title}: a page is lost\n" in capsys.readouterr().out
    assert main(["faults", "--run", title, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["violations"] == [f"{title}: a page is lost"]
    assert main(["faults", "--run", "vanilla: finish.synchronise raise_before"]) == 2
    assert "no sweep has a run called" in capsys.readouterr().err
    assert main(["faults", "--run", title, "--kind", "vanilla"]) == 2
    assert "leave out --kind" in capsys.readouterr().err


class InThisProcess:
    """A process pool without processes; it notes how many workers were asked for."""

    workers: int

    def __init__(self, workers: int, **_options: object) -> None:
        InThisProcess.workers = workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    map = staticmethod(map)


def test_several_kinds_are_swept_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker a group as far as there are cores; results in the order of the groups, whoever is ready first."""
    monkeypatch.setattr("ctxcache.testing.sweep.sweep", quick_sweep)
    monkeypatch.setattr("ctxcache.cli.faults.ProcessPoolExecutor", InThisProcess)
    for cores, workers in ((4, 4), (64, len(fault_groups(Kind)))):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert main(["faults"]) == 1  # the planted violation of EAGLE
        assert InThisProcess.workers == workers
        printed = capsys.readouterr()
        swept = [line.split(":")[0] for line in printed.out.splitlines() if " runs with one fault" in line]
        assert swept == [group.name for group in fault_groups(Kind)]
        assert printed.err == ""  # far below the time after which progress is told


def test_every_script_says_what_it_is_for() -> None:
    """Each request of the script has a docstring, and names differ."""
    assert all(script.__doc__ for script in SCRIPT)
    assert len({script.__name__ for script in SCRIPT}) == len(SCRIPT)
