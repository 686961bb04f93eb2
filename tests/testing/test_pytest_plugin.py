"""The pytest fixtures, as a runtime's own tests use them: in a process of their own, from the page that shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ctxcache import ContextCacheDeploymentKind as Kind
from ctxcache import ContractError, DeviceError
from ctxcache.testing import Fault
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache_pytest import judge

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "testing.md"
HEAVY = ("numba", "ctxcache", "transitions", "numpy")


def run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder that holds these test files, with the plugin and no configuration of ours."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ctxcache_pytest", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    """Neither Numba nor the library: pytest imports the plugin in every project that has the package installed."""
    program = f"import sys, ctxcache_pytest; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_plugin_is_an_entry_point() -> None:
    """Pytest finds it by itself, under the module's own name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"ctxcache_pytest": "ctxcache_pytest"}


def test_a_run_that_uses_no_fixture_imports_nothing_heavy(tmp_path: Path) -> None:
    """Collection and a test that asks for none leave Numba alone."""
    test = f"import sys\n\ndef test_light():\n    assert not [name for name in {HEAVY!r} if name in sys.modules]\n"
    done = run(tmp_path, test_light=test)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("seed", [2, 3])
def test_the_page_shows_tests_that_pass(tmp_path: Path, seed: int) -> None:
    """What docs/testing.md shows is a runtime and its tests, run here as they stand, whatever the schedule is.

    With 2 a page-table row arrives after a model that was not enqueued would have read it; with 3 before.
    """
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    done = run(tmp_path, "-s", "--ctxcache-seed", str(seed), test_page="\n\n".join(blocks))
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 12
    (message,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert message in done.stdout


CARELESS = """
import pytest
from ctxcache import ContextCacheDeploymentKind as Kind
from ctxcache.testing import Fault
from ctxcache.testing.runtime.runtime import FakeRuntime


def started():
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.coordinator.replace_device_ops(runtime.deferred.inner)
    return runtime


def test_a_report_fails_at_the_call(ctxcache_watch, ctxcache_deferred):
    runtime = started()
    ctxcache_watch(runtime.coordinator)
    runtime.deferred = runtime.ops = ctxcache_deferred(runtime.coordinator)
    for prompt in ([2, 2, 2], [1, 2, 3, 1, 2, 3]):
        runtime.begin([prompt])
        runtime.prefill()
        runtime.decode()
        if len(prompt) == 3:
            runtime.finish()
    runtime.grow()
    runtime.compute_step()
    runtime.complete()
    runtime.never_reached()


def test_reports_before_it_waits(ctxcache_watch, ctxcache_deferred):
    runtime = started()
    ctxcache_watch(runtime.coordinator, strict=False)
    runtime.deferred = ctxcache_deferred(runtime.coordinator)
    runtime.begin([[1, 2, 3, 1, 2, 3]])
    runtime.prepare()
    runtime.compute_prompts()
    runtime.finalize()
    runtime.finish()


def test_reports_before_it_waits_and_says_nothing_of_pages(ctxcache_watch, ctxcache_deferred):
    coordinator = started().coordinator
    ctxcache_watch(coordinator, strict=False)
    enqueue = ctxcache_deferred(coordinator).enqueue
    with coordinator.session([[1, 2, 3, 1, 2, 3]]) as session:
        enqueue(lambda: None)
        session.prefilled([4])


def test_releases_behind_the_coordinators_back(ctxcache_watch):
    runtime = started()
    ctxcache_watch(runtime.coordinator)
    runtime.begin([[1, 2, 3]])
    runtime.coordinator._custody.release = lambda request: setattr(runtime.coordinator._custody, "active", None)
    runtime.abandon()


def test_is_refused_while_a_request_is_active(ctxcache_faults):
    runtime = started()
    runtime.begin([[1, 2, 3]])
    ops = runtime.coordinator.device_ops
    with pytest.raises(ValueError, match="between requests"):
        ctxcache_faults(runtime.coordinator)
    assert runtime.coordinator.device_ops is ops
    runtime.abandon()


def test_a_fault_that_could_never_strike_is_refused(ctxcache_faults):
    runtime = started()
    ops = runtime.coordinator.device_ops
    for wrong in ("finish.synchronize", Fault("finish.sync"), Fault("prepare_prefil.upload_rows")):
        with pytest.raises(ValueError, match=r"FaultPlan got|no device touch is called"):
            ctxcache_faults(runtime.coordinator, wrong)
    assert runtime.coordinator.device_ops is ops
    ctxcache_faults(runtime.coordinator, Fault("*.upload_rows*"), Fault("compact_batch.upload_rows.draft.2"))


def test_what_is_no_coordinator_is_refused(ctxcache_faults, ctxcache_watch, ctxcache_deferred):
    runtime = started()
    for wrap in (ctxcache_faults, ctxcache_watch, ctxcache_deferred):
        with pytest.raises(ValueError, match="got a FakeRuntime; pass the ContextCacheCoordinator"):
            wrap(runtime)


def test_wraps_in_any_order(ctxcache_faults, ctxcache_deferred):
    runtime = started()
    inner = runtime.coordinator.device_ops
    faults = ctxcache_faults(runtime.coordinator)
    deferred = ctxcache_deferred(runtime.coordinator)
    assert runtime.coordinator.device_ops is faults
    assert faults.inner is deferred
    assert deferred.inner is inner
    assert ctxcache_deferred(runtime.coordinator) is deferred


def test_seed(ctxcache_seed, request):
    assert ctxcache_seed == 11
"""


@pytest.mark.sampled(keep=1)
def test_the_watch_fails_a_careless_runtime(tmp_path: Path) -> None:
    """An early report fails at the call, or without `strict` at the end, as a lost lease does; the rest passes, in any order."""
    done = run(tmp_path, "--ctxcache-seed", "11", test_careless=CARELESS)
    assert "base_kv_page 0 was published while the device may still write it" in done.stdout
    assert "1 leases are out, and no request holds them" in done.stdout
    assert "pages were published while work that the runtime had enqueued was not proven complete" in done.stdout
    assert "complete_decode_step of request 2 reported as complete what was not proven so: enqueue" in done.stdout
    assert ", step at runtime.py:" in done.stdout
    assert ", in or behind prepare_decode_step; synchronize the stream" in done.stdout
    assert "never_reached'" not in done.stdout
    assert "1 failed, 8 passed, 4 errors" in done.stdout, done.stdout


@pytest.mark.sampled(keep=1)
def test_each_test_has_a_seed_of_its_own_that_repeats(tmp_path: Path) -> None:
    """Without the option the seed follows from the test's name, and from nothing else."""
    test = "def test_a(ctxcache_seed):\n    print('seed', ctxcache_seed)\n\ntest_b = test_a\n"
    seeds = [re.findall(r"seed (\d+)", run(tmp_path, "-s", test_seed=test).stdout) for _ in range(2)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


def test_the_fixtures_wrap_a_coordinator_in_any_order(ctxcache_faults, ctxcache_deferred, ctxcache_watch) -> None:
    """In this very process: faults outside, the lazy stream inside, one stream for all, and a ledger that hears."""
    for first in ("faults", "deferred"):
        runtime = FakeRuntime(Kind.VANILLA)
        runtime.coordinator.replace_device_ops(runtime.deferred.inner)
        if first == "faults":
            faults = ctxcache_faults(runtime.coordinator, Fault("prepare_prefill.upload_rows"))
            deferred = ctxcache_deferred(runtime.coordinator)
        else:
            deferred = ctxcache_deferred(runtime.coordinator)
            faults = ctxcache_faults(runtime.coordinator, Fault("prepare_prefill.upload_rows"))
        assert faults.inner is deferred
        ledger = ctxcache_watch(runtime.coordinator)
        assert ctxcache_deferred(runtime.coordinator) is deferred
        runtime.deferred, runtime.ops = deferred, faults
        runtime.begin([[1, 2, 3, 1, 2, 3]])
        with pytest.raises(DeviceError):
            runtime.prepare()
        runtime.abandon()
        runtime.begin([[1, 2, 3, 1, 2, 3]])
        runtime.prefill()
        runtime.finish()
        assert ledger.num_changes > 0
        judge(runtime.coordinator, ledger)


def test_a_lost_lease_fails_the_test() -> None:
    """What the watch does at a test's end, on a coordinator that lost a lease."""
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([[1, 2, 3]])
    judge(runtime.coordinator, runtime.ledger)
    runtime.coordinator._custody.active = None
    with pytest.raises(pytest.fail.Exception, match="1 leases are out"):
        judge(runtime.coordinator, runtime.ledger)
    runtime.coordinator._custody.active = runtime.request._request
    runtime.abandon()


def test_device_ops_are_replaced_between_requests_alone() -> None:
    """While a request is active they stay; the refusal changes nothing."""
    runtime = FakeRuntime(Kind.VANILLA)
    runtime.begin([[1, 2, 3]])
    with pytest.raises(ContractError, match="between requests"):
        runtime.coordinator.replace_device_ops(runtime.deferred)
    assert runtime.coordinator.device_ops is runtime.ops
    runtime.abandon()
