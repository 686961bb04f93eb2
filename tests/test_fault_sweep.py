"""Every device touch failed in every way, in every deployment kind, on a lazy stream: nothing is lost.

`ctxcache faults` runs all of it; here every point fails once in every way, and a sample of the ordered pairs.
"""

from __future__ import annotations

import contextlib
import json
from typing import Self

import pytest

from ctxcache.batch import Batch
from ctxcache.cli import main
from ctxcache.custody import Custody
from ctxcache.errors import InvariantError
from ctxcache.fsm import fault_points
from ctxcache.ids import ContextCacheCoordinatorStatus as Status
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.testing import Fault, FaultMode, FaultPlan
from ctxcache.testing.fake_runtime import FakeRuntime, RequestEnded
from ctxcache.testing.scripts import SCRIPT, run_request, run_script
from ctxcache.testing.sweep import (
    Chain,
    SweepResult,
    aftermath,
    describe,
    pair_faults,
    reached_points,
    run_with,
    shuffled,
    single_faults,
    sweep,
)

KINDS = pytest.mark.parametrize("kind", tuple(Kind), ids=lambda kind: kind.value)
PAIRS_A_KIND = 40
WAYS = 14
"""Four modes, three of them with an `Exception` and with a `BaseException`, each once and from then on."""


@KINDS
def test_the_script_reaches_exactly_the_declared_points(kind: Kind) -> None:
    """Every declared touch happens, and none that is not declared."""
    assert set(reached_points(kind)) == set(fault_points(kind))


@KINDS
def test_a_script_without_faults_is_clean(kind: Kind) -> None:
    """Under several schedules: no violation, and nobody hears of a failure but of those that the script plans."""
    for seed in range(3):
        runtime = FakeRuntime(kind, seed=seed)
        heard = run_script(runtime)
        assert [line.split(":")[0] for line in heard] == ["failed_drain"]
        assert aftermath(runtime) == []
        assert runtime.ledger.num_changes > 100


@KINDS
def test_each_point_fails_alone(kind: Kind) -> None:
    """Each once-reached point, in every way: it fires, somebody hears of it, and nothing is lost."""
    points = reached_points(kind)
    faults = list(single_faults(dict.fromkeys(points, 1)))
    assert len(faults) == WAYS * len(points)
    for fault in faults:
        fired, violations = run_with(kind, FaultPlan(fault), describe(fault))
        assert fired >= 1, describe(fault)
        assert violations == []


@KINDS
def test_later_occurrences_fail_too(kind: Kind) -> None:
    """A sample of the later times at which a point is reached, on other transitions than the first."""
    later = [fault for fault in single_faults(reached_points(kind)) if fault.occurrence > 1]
    for fault in shuffled(later, kind.value, 40):
        fired, violations = run_with(kind, FaultPlan(fault), describe(fault))
        assert fired >= 1, describe(fault)
        assert violations == []


@KINDS
def test_pairs_of_points_fail(kind: Kind) -> None:
    """A sample of ordered pairs, the second fault striking on the way out of the first: nothing is lost."""
    complete = 0
    for first, second in shuffled(pair_faults(reached_points(kind), exhaustive=True), kind.value, PAIRS_A_KIND):
        plan = Chain(first, second)
        _, violations = run_with(kind, plan, f"{describe(first)}, then {describe(second)}")
        assert violations == []
        complete += plan.complete
    assert complete > PAIRS_A_KIND / 2


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
    """Every ordered pair, a point with itself included: in two ways each, or in all seven with `exhaustive`."""
    points = ["a", "b", "c"]
    assert len(list(pair_faults(points, exhaustive=False))) == (2 * 3) ** 2
    assert len(list(pair_faults(points, exhaustive=True))) == (7 * 3) ** 2


def test_the_sweep_sees_a_release_that_overtakes_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custody that releases first: the ledger says which page, and the result counts it."""

    def abandon(self: Custody, request: object) -> Status:
        self.release(request)
        return self.fire(request, "abandon")

    monkeypatch.setattr(Custody, "abandon", abandon)
    _, violations = run_with(Kind.VANILLA, FaultPlan(), "no fault")
    assert any("was released while the device may still write it" in violation for violation in violations)


def test_the_sweep_sees_a_lost_lease_and_a_full_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that nobody returns, and a request that does not end, are violations, not crashes."""
    monkeypatch.setattr(Custody, "release", lambda self, request: setattr(self, "active", None))
    violations = run_with(Kind.VANILLA, FaultPlan(), "no fault")[1]
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
    assert run_with(Kind.VANILLA, FaultPlan(), "no fault") == (0, [])
    _, violations = run_with(Kind.VANILLA, FaultPlan(Fault("finish.synchronize")), "deaf")
    assert violations == ["vanilla: deaf: a device failure reached nobody"]


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
    fired, violations = run_with(Kind.VANILLA, FaultPlan(), "escape")
    assert fired == 0
    assert "ZeroDivisionError escaped" in violations[0]


def test_a_runtime_gives_up_on_a_device_that_never_recovers() -> None:
    """A shutdown that fails from now on: the runtime tries a few times, and the script stops."""
    runtime = FakeRuntime(
        Kind.VANILLA, plan=FaultPlan(Fault("shutdown.synchronize", FaultMode.ERROR_CODE, persistent=True))
    )
    heard: list[str] = []

    def poisoned(runtime: FakeRuntime) -> None:
        runtime.begin([[1, 2, 3]])
        runtime.prepare()
        runtime.outcomes = [700]
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
    monkeypatch.setattr("ctxcache.testing.sweep.reached_points", lambda kind: {"finish.synchronize": 1, "made.up": 1})
    monkeypatch.setattr("ctxcache.testing.sweep.run_with", lambda kind, plan, name: (0, []))
    result = sweep(Kind.VANILLA, progress=progress.append)
    assert result.runs == {"singles": 2 * WAYS, "pairs": 16}
    assert len(result.unfired) == 2 * WAYS
    assert result.incomplete == 16
    assert progress == list(range(1, 2 * WAYS + 17))
    assert "made.up is reached and not declared" in result.violations
    assert "no script reaches prepare_prefill.upload_rows" in result.violations
    assert result.as_dict()["points"] == len(fault_points(Kind.VANILLA))


def quick_sweep(kind: Kind, *, pairs: bool, exhaustive: bool, progress: object) -> SweepResult:
    """A sweep's result without the sweep."""
    progress(3)
    violations = ["eagle: a page is lost"] if kind is Kind.EAGLE else []
    return SweepResult(kind, ("a.b",), {"a.b": 2}, {"singles": 5, "pairs": 7 * pairs}, violations=violations)


def test_the_command_prints_points_runs_and_violations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line a kind, the totals last; status 1 where something was wrong; JSON says the same."""
    monkeypatch.setattr("ctxcache.cli.trials.sweep", quick_sweep)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("ctxcache.cli.trials._PROGRESS_SECONDS", 0.0)
    assert main(["faults", "--kind", "vanilla"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("vanilla: 10 fault points")
    assert "1 fault points, 12 runs, 0 seconds, 0 single faults that did not fire, 0 violations" in printed.out
    assert "vanilla: 3 runs" in printed.err
    assert main(["faults", "--kind", "eagle", "--singles"]) == 1
    assert "violation: eagle: a page is lost" in capsys.readouterr().out
    assert main(["faults", "--singles", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["runs"], document["violations"], document["unfired"]) == (30, 1, 0)
    assert set(document["fault_points"]) == {kind.value for kind in Kind}


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
    """One worker a kind as far as there are cores; results in the order of the kinds, whoever is ready first."""
    monkeypatch.setattr("ctxcache.cli.trials.sweep", quick_sweep)
    monkeypatch.setattr("ctxcache.cli.trials.ProcessPoolExecutor", InThisProcess)
    for cores, workers in ((4, 4), (64, len(Kind))):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert main(["faults"]) == 1  # the planted violation of EAGLE
        assert InThisProcess.workers == workers
        printed = capsys.readouterr()
        kinds = [line.split(":")[0] for line in printed.out.splitlines() if " runs with one fault" in line]
        assert kinds == [kind.value for kind in Kind]
        assert printed.err == ""  # far below the time after which progress is told


def test_every_script_says_what_it_is_for() -> None:
    """Each request of the script has a docstring, and names differ."""
    assert all(script.__doc__ for script in SCRIPT)
    assert len({script.__name__ for script in SCRIPT}) == len(SCRIPT)
