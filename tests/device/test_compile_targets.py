"""Every kernel compiles for the GPUs we name, without a GPU, and the copying ones use 128-bit accesses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

INSTALL = (
    "numba-cuda and NVIDIA's compiler are needed to compile the kernels, with or without a GPU: "
    "pip install '.[gpu]' in the repository, or pip install 'numba-cuda[cu13]>=0.30' 'cuda-toolkit<13.1' 'numpy<2.5'"
)

ROOT = Path(__file__).parents[2]

SCRIPT = """
import inspect, json, sys
from ctxcache.device.numba import context
from ctxcache.device.numba import kernels
from ctxcache.device.numba.parameter_words import INLINE_WORDS
from numba import cuda, types

assert not context.SIMULATED
report = {}
for name, kernel in vars(kernels).items():
    if getattr(kernel, "py_func", None) is None or kernel.targetoptions.get("device"):
        continue
    parameters = inspect.signature(kernel.py_func).parameters
    words = types.UniTuple(types.int64, INLINE_WORDS)
    signature = types.void(*[words if name == "words" else types.int64 for name in parameters])
    for major in (8, 9, 10):
        ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=(major, 0))
        report.setdefault(name, {})[f"sm_{major}0"] = ptx
json.dump(report, sys.stdout)
"""

KERNELS = {
    "add_ints",
    "compact_slots",
    "copy_run",
    "move_snapshots",
    "scatter_page_ids",
    "sum_pages",
    "write_ints",
    "zero_slots",
}
TARGETS = ("sm_80", "sm_90", "sm_100")

pytestmark = pytest.mark.sampled(keep=1)


@pytest.fixture(scope="module")
def compiled() -> Any:
    """PTX by kernel and target, compiled in a process of its own: this one may run the simulator."""
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.fail(INSTALL)
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    if result.returncode:
        pytest.fail(f"{result.stderr}\n{INSTALL}")
    return json.loads(result.stdout)


def test_every_kernel_compiles_for_every_target(compiled: Any) -> None:
    """No kernel is missing, each is for the target it was compiled for, and none spills to local memory."""
    assert set(compiled) == KERNELS
    for name, targets in compiled.items():
        assert tuple(targets) == TARGETS
        for target, ptx in targets.items():
            assert f".target {target}" in ptx, f"{name} for {target}"
            assert ".visible .entry" in ptx, f"{name} for {target}"
            assert ".local" not in ptx, f"{name} for {target} uses local memory"


@pytest.mark.parametrize(
    ("name", "loads"), [("copy_run", 5), ("move_snapshots", 5), ("compact_slots", 1), ("zero_slots", 0)]
)
def test_copies_are_wide(compiled: Any, name: str, loads: int) -> None:
    """Loads and stores of 16 bytes in global memory: four in flight and one for the rest where a run is copied."""
    for target, ptx in compiled[name].items():
        assert ptx.count("ld.global.v2.u64") >= loads, f"{name} for {target}"
        assert ptx.count("st.global.v2.u64") >= max(loads, 1), f"{name} for {target}"


@pytest.mark.parametrize("name", ["copy_run", "move_snapshots"])
def test_four_loads_are_in_flight_before_the_first_store(compiled: Any, name: str) -> None:
    """The compiler keeps the order that hides the memory's latency: four loads, then four stores."""
    for target, ptx in compiled[name].items():
        accesses = [line.split()[0][:2] for line in ptx.splitlines() if "global.v2.u64" in line]
        assert "ldldldldstststst" in "".join(accesses), f"{name} for {target}"


def test_kernels_take_integers_alone(compiled: Any) -> None:
    """Every parameter of every kernel is a 64-bit integer: what a prepared launch packs once."""
    for name, targets in compiled.items():
        for target, ptx in targets.items():
            head = ptx[ptx.index(".visible .entry") : ptx.index("{", ptx.index(".visible .entry"))]
            assert head.count(".param") == head.count(".param .u64"), f"{name} for {target}"
