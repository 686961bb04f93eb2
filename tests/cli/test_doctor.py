"""The doctor's findings, one by one, and what the driver's own library is asked."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ctxcache.cli import doctor, main
from ctxcache.cli.doctor import Finding, Status, examine
from ctxcache.cli.installed_driver import Gpu, InstalledDriver, look_for_driver

NO_GPU = InstalledDriver(problem="no NVIDIA driver")


H200 = InstalledDriver((13, 0), (Gpu("NVIDIA H200", 9, 0, 139.8),))


def finding(name: str, findings: tuple[Finding, ...]) -> Finding:
    """The one finding of that name."""
    (found,) = [each for each in findings if each.name == name]
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine to examine: its driver, packages (name to version, `None` for absent), and environment."""

    def build(
        driver: InstalledDriver = NO_GPU, packages: dict[str, str | None] | None = None, simulator: str | None = None
    ) -> tuple:
        chosen = packages or {}
        real = metadata.version

        def version(name: str) -> str:
            if name not in chosen:
                return real(name)
            if chosen[name] is None:
                raise metadata.PackageNotFoundError(name)
            return str(chosen[name])

        monkeypatch.setattr(doctor.metadata, "version", version)
        monkeypatch.setattr(doctor, "look_for_driver", lambda: driver)
        monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
        if simulator is not None:
            monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", simulator)
        return examine()

    return build


WHEELS = {"numba-cuda": "0.30.4", "cuda-toolkit": "13.0.2", "nvidia-nvvm": "13.0.88", "nvidia-cuda-nvrtc": "13.0.88"}


def test_doctor_finds_a_gpu_ready(machine) -> None:
    """Driver, GPU, numba-cuda and compiler wheels that fit: nothing to mend, kernels run on the GPU."""
    findings = machine(H200, WHEELS)
    assert finding("driver", findings).found == "CUDA 13.0; NVIDIA H200 (compute 9.0, 140 GiB)"
    device = finding("device", findings)
    assert (device.status, device.verdict) == (Status.OK, "Kernels run on the GPU.")
    assert finding("cuda wheels", findings).status is Status.OK


def test_doctor_finds_compiler_wheels_newer_than_the_driver(machine) -> None:
    """A toolkit that is newer than the driver is named with both versions and the pin that mends it."""
    found = finding("cuda wheels", machine(H200, {**WHEELS, "cuda-toolkit": "13.5.0", "nvidia-nvvm": "13.5.1"}))
    assert found.status is Status.BROKEN
    assert "cuda-toolkit 13.5.0, nvidia-nvvm 13.5.1" in found.found
    assert "nvrtc" not in found.found
    assert "pip install 'cuda-toolkit==13.0.*'" in found.advice[0]


@pytest.mark.parametrize("packages", [WHEELS, {**dict.fromkeys(WHEELS), "numba-cuda": None}])
def test_doctor_does_not_send_an_old_driver_to_the_extra(machine, packages) -> None:
    """The extra is CUDA 13's: a driver of CUDA 12 is told what is for it, whether the extra is there already or not."""
    old = InstalledDriver((12, 4), (Gpu("NVIDIA A100", 8, 0, 79.2),))
    advice = [line for found in machine(old, packages) for line in found.advice]
    assert any("'numba-cuda[cu12]>=0.30' 'cuda-toolkit==12.4.*'" in line for line in advice)
    assert not any(".[gpu]" in line for line in advice)


def test_doctor_says_how_to_use_a_gpu_without_numba_cuda(machine) -> None:
    """A GPU without numba-cuda is to be mended with the `gpu` extra; without a GPU the same absence is none."""
    absent = dict.fromkeys((*WHEELS, "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvrtc-cu12"))
    findings = machine(H200, absent)
    assert finding("numba-cuda", findings).status is Status.BROKEN
    assert finding("numba-cuda", findings).advice == ("pip install '.[gpu]' in ctxcache's repository",)
    assert "CUDA_HOME" in finding("cuda wheels", findings).advice[1]
    findings = machine(NO_GPU, absent)
    assert finding("numba-cuda", findings).status is Status.ABSENT
    assert finding("cuda wheels", findings).status is Status.ABSENT


@pytest.mark.parametrize(
    ("numba_cuda", "remedy", "not_said"),
    [(None, "pip install '.[gpu]'", "nvidia-smi"), ("0.30.4", "nvidia-smi", "pip")],
)
def test_doctor_says_what_helps_where_there_is_neither_gpu_nor_simulator(
    machine, numba_cuda: str | None, remedy: str, not_said: str
) -> None:
    """Without both: the simulator's variable, the `gpu` extra or, where it is there, the driver; the host's own device ops."""
    device = finding("device", machine(NO_GPU, {"numba-cuda": numba_cuda}))
    assert device.status is Status.NOTE
    assert "export NUMBA_ENABLE_CUDASIM=1" in device.advice[0]
    assert remedy in device.advice[1]
    assert not_said not in device.advice[1]
    assert "NumpyDeviceOps" in device.advice[2]
    assert device.verdict == "Ready for the host only."


def test_doctor_sees_the_simulator_and_that_it_hides_a_gpu(machine) -> None:
    """With the variable set kernels run in the simulator; where there is a GPU the doctor says how to get it back."""
    assert finding("device", machine(NO_GPU, simulator="1")).status is Status.OK
    hidden = finding("device", machine(H200, WHEELS, simulator="1"))
    assert hidden.status is Status.NOTE
    assert hidden.advice == ("unset NUMBA_ENABLE_CUDASIM to use it",)
    assert finding("device", machine(H200, WHEELS, simulator="0")).found == "GPU: NVIDIA H200"


@pytest.mark.parametrize("value", ["yes", "", "1.0"])
def test_doctor_says_what_is_wrong_with_the_simulators_variable(machine, value: str) -> None:
    """Numba reads a number there and ignores anything else: the doctor says so instead of guessing."""
    device = finding("device", machine(NO_GPU, simulator=value))
    assert device.status is Status.BROKEN
    assert repr(value) in device.found
    assert device.advice == ("set NUMBA_ENABLE_CUDASIM to 1 for the simulator, or unset it",)


@pytest.mark.parametrize("version", ["2.5", "2.5.0rc1", "2.10.1", "3.0"])
def test_doctor_refuses_a_numpy_that_numba_cuda_cannot_use(machine, version: str) -> None:
    """NumPy 2.5 and later is to be mended, with the pin."""
    found = finding("numpy", machine(packages={"numpy": version}))
    assert found.status is Status.BROKEN
    assert found.advice == ("pip install 'numpy<2.5'",)


@pytest.mark.parametrize("version", ["2.4.6", "1.26.4"])
def test_doctor_takes_a_numpy_below_the_bound(machine, version: str) -> None:
    """Anything below 2.5 is fine."""
    assert finding("numpy", machine(packages={"numpy": version})).status is Status.OK


@pytest.mark.parametrize("package", ["numpy", "numba", "transitions"])
def test_doctor_names_a_missing_dependency(machine, package: str) -> None:
    """A dependency that is not installed is to be mended with pip."""
    found = finding(package, machine(packages={package: None}))
    assert (found.status, found.found) == (Status.BROKEN, "not installed")
    assert found.advice[0].startswith("pip install")
    assert package in found.advice[0]


@pytest.mark.parametrize("package", ["numpy", "numba", "transitions"])
def test_doctor_names_a_dependency_that_does_not_import(machine, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there and does not import: the reason, and how to install it anew. Numba's cache is unknown then."""
    real = doctor.importlib.import_module

    def import_module(name: str):
        if name == package:
            raise ImportError("made for another planet")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    monkeypatch.setitem(sys.modules, "numba.core.caching", None)
    findings = machine()
    found = finding(package, findings)
    assert found.status is Status.BROKEN
    assert found.found.endswith("does not import: made for another planet")
    assert "pip install" in found.advice[0]
    assert finding("numba cache", findings).found == "unknown while numba does not import"


def test_doctor_says_that_the_package_is_not_installed(machine) -> None:
    """Imported from its folder it works; the advice says what installing adds."""
    found = finding("ctxcache", machine(packages={"ctxcache": None}))
    assert found.status is Status.NOTE
    assert "pip install -e ." in found.advice[0]


def test_doctor_finds_graphviz(machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that `dot -V` prints, on whichever stream, and where the program is."""
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho 'dot - graphviz version 2.43.0' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = finding("graphviz", machine())
    assert (found.status, found.found) == (Status.OK, f"dot - graphviz version 2.43.0, {program}")


def test_doctor_turns_whatever_a_look_raises_into_a_finding(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that fails is a finding itself, and the others still happen."""
    monkeypatch.setattr(doctor, "simulated", lambda: 1 / 0)
    findings = machine()
    device = finding("device", findings)
    assert device.status is Status.BROKEN
    assert "ZeroDivisionError" in device.found
    assert finding("graphviz", findings).found


def test_doctor_says_that_compiled_code_has_no_place(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numba finds no writable folder the remedy is NUMBA_CACHE_DIR, and nothing is broken."""
    from numba.core import caching

    def nowhere(function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(caching, "FunctionCache", nowhere)
    found = finding("numba cache", machine())
    assert found.status is Status.NOTE
    assert "NUMBA_CACHE_DIR" in found.advice[0]


def test_a_broken_part_makes_the_status_1(machine, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The doctor's status is 1 exactly when something is to be mended, and its last line says what."""
    monkeypatch.setattr(doctor, "look_for_driver", lambda: NO_GPU)
    machine(NO_GPU, {"numpy": "2.5.0"})
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "To mend: numpy."
    machine(NO_GPU, {"numpy": "2.4.6"}, simulator="1")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Kernels run in the simulator."


class FakeLibrary:
    """The driver's library: two GPUs, unless told to fail a function."""

    def __init__(self, failing: str = "", code: int = 100, gpus: int = 2) -> None:
        self.failing, self.code, self.gpus = failing, code, gpus

    def __getattr__(self, name: str):
        values = {"cuDriverGetVersion": 13000, "cuDeviceGetCount": self.gpus}

        def call(first, *others) -> int:
            if name == self.failing:
                return self.code
            if name in values:
                first._obj.value = values[name]
            elif name == "cuDeviceGetName":
                first.value = b"NVIDIA H200"
            elif name == "cuDeviceTotalMem_v2":
                first._obj.value = 140 << 30
            elif name == "cuDeviceGetAttribute":
                first._obj.value = {75: 9, 76: 0}[others[0]]
            return 0

        return call


def test_the_driver_is_asked_for_its_version_and_devices() -> None:
    """Version, names, compute capability and memory are read from the driver's own library."""
    driver = look_for_driver(lambda name: FakeLibrary())
    assert driver.usable
    assert driver.version == (13, 0)
    assert driver.gpus == (Gpu("NVIDIA H200", 9, 0, 140.0),) * 2


def test_a_driver_without_a_usable_gpu_is_told_apart_from_none() -> None:
    """No library, a library that fails, and one that shows no device each say so; none raises."""

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    assert "no NVIDIA driver" in look_for_driver(absent).problem
    broken = look_for_driver(lambda name: FakeLibrary("cuInit", 803))
    assert not broken.usable
    assert "CUDA 13.0" in broken.problem
    assert "cuInit returned 803" in broken.problem
    for none_shown in (FakeLibrary(gpus=0), FakeLibrary("cuInit", 100)):
        assert "CUDA_VISIBLE_DEVICES" in look_for_driver(lambda name, library=none_shown: library).problem
    assert not look_for_driver(lambda name: object()).usable
