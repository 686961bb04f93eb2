"""`ctxcache doctor`: what the library stands on here, and what to do about each part that is missing or wrong.

Nothing here needs a GPU, starts a CUDA context, or imports the CUDA target: the driver is asked through its own
library, packages through their metadata. Whatever goes wrong in a look becomes a finding.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import Any

from ctxcache.cli.installed_driver import InstalledDriver, look_for_driver
from ctxcache.cli.report import write_json

_NUMPY_BELOW = (2, 5)
_SIMULATOR_VARIABLE = "NUMBA_ENABLE_CUDASIM"
_COMPILER_WHEELS = (
    "cuda-toolkit",
    "nvidia-nvvm",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvrtc-cu12",
)
"""What emits PTX; a driver refuses PTX of a newer minor version than its own."""
_INSTALL_GPU = "pip install '.[gpu]' in ctxcache's repository"
_MEND_DRIVER = (
    "install or mend its driver until nvidia-smi lists it, and see that CUDA_VISIBLE_DEVICES does not hide it"
)
_EXTRA_FROM = (13, 0)
"""The oldest CUDA of a driver that the extra's compiler wheels are for."""
_USE_SIMULATOR = f"export {_SIMULATOR_VARIABLE}=1 before Python starts: kernels then run in Numba's simulator, slowly"


class Status(Enum):
    """How a finding stands: fine; absent but optional; worth knowing; in the way."""

    OK = "ok"
    ABSENT = "absent"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        status: how it stands.
        found: what was found, with versions.
        advice: what to do about it, one remedy a line; empty where nothing has to be done.
        verdict: a sentence for the end, from the finding that decides what work can run here.
    """

    name: str
    status: Status
    found: str
    advice: tuple[str, ...] = ()
    verdict: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values, for JSON."""
        return {
            "name": self.name,
            "status": self.status.value,
            "found": self.found,
            "advice": list(self.advice),
        }


def diagnose(*, as_json: bool) -> bool:
    """Print what was found; returns whether something must be mended."""
    findings = examine()
    broken = [finding for finding in findings if finding.status is Status.BROKEN]
    if as_json:
        write_json({"broken": bool(broken), "findings": [finding.as_dict() for finding in findings]})
        return bool(broken)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        sys.stdout.write(f"{finding.status.value:<6}  {finding.name:<{width}}  {finding.found}\n")
        for line in finding.advice:
            sys.stdout.write(f"{'':<6}  {'':<{width}}  -> {line}\n")
    sys.stdout.write(f"\n{_verdict(findings, broken)}\n")
    return bool(broken)


def _verdict(findings: tuple[Finding, ...], broken: list[Finding]) -> str:
    if broken:
        return f"To mend: {', '.join(finding.name for finding in broken)}."
    return next(finding.verdict for finding in findings if finding.verdict)


def examine() -> tuple[Finding, ...]:
    """Look at everything, in the order in which a reader would mend it."""
    driver = look_for_driver()
    looks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("python", _python),
        ("ctxcache", _ctxcache),
        ("numpy", _numpy),
        ("numba", _numba),
        ("transitions", lambda: _needed("transitions")),
        ("numba cache", _numba_cache),
        ("driver", lambda: _driver(driver)),
        ("numba-cuda", lambda: _numba_cuda(driver)),
        ("cuda wheels", lambda: _cuda_wheels(driver)),
        ("device", lambda: _device(driver)),
        ("graphviz", _graphviz),
    )
    return tuple(_looked(name, look) for name, look in looks)


def _looked(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as cause:  # noqa: BLE001 - a doctor that dies of what it finds is none
        return Finding(name, Status.BROKEN, f"looking at it raised {cause!r}", ("reinstall it, and look again",))


def version_of(package: str) -> str | None:
    """The installed version, or `None`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def leading_numbers(version: str) -> tuple[int, int]:
    """Major and minor of a version; what is not a number counts as 0."""
    parts = [int(part) if part.isdigit() else 0 for part in version.split(".")[:2]]
    return parts[0], parts[1] if len(parts) > 1 else 0


def simulated() -> bool:
    """Whether the environment asks Numba for its CUDA simulator, read as Numba reads it: a number.

    Raises:
        ValueError: it is none, and Numba ignores it.
    """
    return bool(int(os.environ.get(_SIMULATOR_VARIABLE, "0")))


def _needed(package: str, remedy: str = "") -> Finding:
    """Look at a dependency: installed, and importable."""
    version = version_of(package)
    if version is None:
        return Finding(package, Status.BROKEN, "not installed", (remedy or f"pip install {package}",))
    try:
        importlib.import_module(package)
    except Exception as cause:  # noqa: BLE001 - whatever it is, it is the finding
        advice = remedy or f"pip install --force-reinstall {package}"
        return Finding(package, Status.BROKEN, f"{version} does not import: {cause}", (advice,))
    return Finding(package, Status.OK, version)


def _python() -> Finding:
    return Finding("python", Status.OK, f"{platform.python_version()} on {platform.platform()}, {sys.executable}")


def _ctxcache() -> Finding:
    version = version_of("ctxcache")
    if version is None:
        advice = "pip install -e . in the repository puts the command on the PATH and the dependencies beside it"
        return Finding("ctxcache", Status.NOTE, "imported from a folder, not installed", (advice,))
    return Finding("ctxcache", Status.OK, version)


def _numpy() -> Finding:
    finding = _needed("numpy", "pip install 'numpy<2.5'")
    if finding.status is Status.OK and leading_numbers(finding.found) >= _NUMPY_BELOW:
        why = "2.5 removed row_stack, which numba-cuda calls when it first compiles"
        return Finding("numpy", Status.BROKEN, f"{finding.found}; {why}", ("pip install 'numpy<2.5'",))
    return finding


def _numba() -> Finding:
    finding = _needed("numba", "pip install --upgrade numba 'numpy<2.5'")
    if finding.status is not Status.OK:
        return finding
    return Finding("numba", Status.OK, f"{finding.found}, llvmlite {version_of('llvmlite') or 'unknown'}")


def _numba_cache() -> Finding:
    try:
        from numba.core.caching import FunctionCache  # noqa: PLC0415 - numba may be absent
    except Exception:  # noqa: BLE001 - the finding about numba says why
        return Finding("numba cache", Status.ABSENT, "unknown while numba does not import")
    from ctxcache.config import validate_context_cache_deployment  # noqa: PLC0415 - any function of the package will do

    try:
        place = FunctionCache(validate_context_cache_deployment)._cache_path  # type: ignore[no-untyped-call,unused-ignore]  # noqa: SLF001
    except RuntimeError:
        advice = (
            "set NUMBA_CACHE_DIR to a folder that can be written; without one each process compiles anew, about a minute on an "
            "idle core"
        )
        return Finding("numba cache", Status.NOTE, "no writable place for compiled code", (advice,))
    return Finding("numba cache", Status.OK, str(place))


def _driver(driver: InstalledDriver) -> Finding:
    if driver.problem:
        return Finding("driver", Status.ABSENT, driver.problem)
    names = ", ".join(f"{gpu.name} (compute {gpu.major}.{gpu.minor}, {gpu.memory_gib:.0f} GiB)" for gpu in driver.gpus)
    return Finding("driver", Status.OK, f"CUDA {driver.major}.{driver.minor}; {names}")


def _install_for(driver: InstalledDriver) -> str:
    """Name what a driver can use: the extra's compiler is that of CUDA 13."""
    if driver.version >= _EXTRA_FROM:
        return _INSTALL_GPU
    return (
        f"for a driver of CUDA {driver.major}, beside ctxcache in a new environment: pip install "
        f"'numba-cuda[cu{driver.major}]>=0.30' 'cuda-toolkit=={driver.major}.{driver.minor}.*'"
    )


def _numba_cuda(driver: InstalledDriver) -> Finding:
    version = version_of("numba-cuda")
    if version is not None:
        return Finding("numba-cuda", Status.OK, version)
    if driver.usable:
        return Finding("numba-cuda", Status.BROKEN, "not installed, and there is a GPU", (_install_for(driver),))
    return Finding("numba-cuda", Status.ABSENT, "not installed; only a GPU needs it")


def _cuda_wheels(driver: InstalledDriver) -> Finding:
    wheels = {name: version for name in _COMPILER_WHEELS if (version := version_of(name)) is not None}
    said = ", ".join(f"{name} {version}" for name, version in wheels.items())
    if not wheels:
        if driver.usable:
            advice = (_install_for(driver), "or point CUDA_HOME at a CUDA toolkit of the system")
            return Finding("cuda wheels", Status.NOTE, "no CUDA compiler from wheels", advice)
        return Finding("cuda wheels", Status.ABSENT, "not installed; only compiling for a GPU needs them")
    newer = {name: version for name, version in wheels.items() if leading_numbers(version) > driver.version}
    if driver.usable and newer:
        limit = f"{driver.major}.{driver.minor}"
        found = f"{', '.join(f'{name} {version}' for name, version in newer.items())}: newer than the driver's {limit}"
        remedy = f"pip install 'cuda-toolkit=={limit}.*'" if driver.version >= _EXTRA_FROM else _install_for(driver)
        why = f"the driver refuses what they compile: {remedy}, or update the driver"
        return Finding("cuda wheels", Status.BROKEN, found, (why,))
    return Finding("cuda wheels", Status.OK, said)


def _device(driver: InstalledDriver) -> Finding:
    try:
        simulator = simulated()
    except ValueError:
        found = f"{_SIMULATOR_VARIABLE} is {os.environ[_SIMULATOR_VARIABLE]!r}, which is no number: numba ignores it"
        return Finding(
            "device", Status.BROKEN, found, (f"set {_SIMULATOR_VARIABLE} to 1 for the simulator, or unset it",)
        )
    if simulator:
        found = f"Numba's CUDA simulator ({_SIMULATOR_VARIABLE}={os.environ[_SIMULATOR_VARIABLE]})"
        verdict = "Kernels run in the simulator."
        if driver.usable:
            return Finding(
                "device",
                Status.NOTE,
                f"{found}; it hides the GPU",
                (f"unset {_SIMULATOR_VARIABLE} to use it",),
                verdict,
            )
        return Finding("device", Status.OK, found, (), verdict)
    if driver.usable:
        return Finding("device", Status.OK, f"GPU: {driver.gpus[0].name}", (), "Kernels run on the GPU.")
    advice = (
        _USE_SIMULATOR,
        f"on a machine with an NVIDIA GPU: {_INSTALL_GPU if version_of('numba-cuda') is None else _MEND_DRIVER}",
        "with device_ops=NumpyDeviceOps() everything lives on the host and needs neither",
    )
    return Finding("device", Status.NOTE, "neither a GPU nor the simulator", advice, "Ready for the host only.")


def _graphviz() -> Finding:
    program = shutil.which("dot")
    if program is None:
        advice = "apt-get install graphviz, brew install graphviz or conda install graphviz"
        return Finding(
            "graphviz", Status.ABSENT, "no program dot; only diagram --format svg and png need it", (advice,)
        )
    done = subprocess.run([program, "-V"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
    return Finding("graphviz", Status.OK, f"{(done.stderr or done.stdout).strip()}, {program}")
