"""Wrong arguments of the public test doubles are refused in words: a double that hears nothing passes every test."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ctxcache import ContractError, NumpyDeviceOps
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.testing import (
    DeferredDeviceOps,
    Fault,
    FaultInjector,
    FaultPlan,
    OwnershipLedger,
    Transcript,
    fault_points,
)
from ctxcache.testing.runtime.runtime import FakeRuntime
from ctxcache.testing.simulate import simulate


def lazy() -> DeferredDeviceOps:
    """A lazy stream that is nobody's."""
    return DeferredDeviceOps(NumpyDeviceOps(), random.Random(0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Fault(5), r"Fault\.point is 5"),
        (lambda: Fault("finish.synchronize", occurrence="x"), r"Fault\.occurrence is 'x'"),
        (lambda: Fault("finish.synchronize", occurrence=1.5), r"Fault\.occurrence is 1\.5"),
        (lambda: Fault("finish.synchronize", occurrence=True), r"Fault\.occurrence is True"),
        (lambda: Fault("finish.synchronize", persistent="no"), r"Fault\.persistent is 'no'"),
        (lambda: Fault("finish.synchronize", exception=ValueError("x")), r"Fault\.exception is ValueError"),
        (lambda: Fault("finish.synchronize", code=None), r"Fault\.code is None"),
        (lambda: DeferredDeviceOps(NumpyDeviceOps(), 5), "rng is 5"),
        (lambda: lazy().reschedule(None), "rng is None"),
        (lambda: lazy().enqueue(None), "enqueue got None"),
        (lambda: lazy().enqueue(print, uses=[5]), "the use 5"),
        (lambda: OwnershipLedger(FakeRuntime(Kind.VANILLA).coordinator, NumpyDeviceOps()), "ops is a NumpyDeviceOps"),
        (
            lambda: OwnershipLedger(FakeRuntime(Kind.VANILLA).coordinator, lazy()),
            "not what the coordinator's device work",
        ),
        (lambda: simulate("x", 10), "seed is 'x'"),
        (lambda: simulate(1, 0), "steps 0"),
        (lambda: simulate(1, 10, kinds=()), r"kinds are \(\)"),
        (lambda: simulate(1, 10, kinds=["vanilla"]), "kinds are"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], said: str) -> None:
    """Where they are passed, not where they would have been used."""
    with pytest.raises(ContractError, match=said):
        make()


@pytest.mark.parametrize(
    "point", ["finish.upload_rows", "finish.synchronize.draft", "*.syncronize", "prepare_*.capture", "", "finish"]
)
def test_a_point_that_no_deployment_has_is_refused(point: str) -> None:
    """Also where operation and op are both spelt right, and where a pattern fits nothing."""
    with pytest.raises(ContractError, match="no device touch is called"):
        FaultInjector(NumpyDeviceOps(), FaultPlan(Fault(point)))


def test_every_point_and_its_repetitions_are_accepted() -> None:
    """What `fault_points` names, what the sanitizer adds, the runtime's own touches, and patterns of them."""
    names = {name for kind in Kind for name in fault_points(kind, page_sanitizer=True)}
    for point in (*names, "outside.synchronize", "outside.upload_rows.draft", "*", "*.2", "*.upload_rows*", "finish.*"):
        for number in ("", ".2", ".17"):
            FaultInjector(NumpyDeviceOps(), FaultPlan(Fault(point + number if "*" not in point else point)))


def test_a_transcript_takes_whole_numbers_alone() -> None:
    """A float would be another token than the one that the library refuses."""
    with pytest.raises(TypeError, match="float"):
        Transcript([1.5])


def test_the_doubles_import_no_cuda() -> None:
    """A test on NumPy arrays pays for no compiler of GPU code."""
    program = "import sys, ctxcache.testing; sys.exit('numba.cuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
