"""Plant one fault after another, and ask the sweep and the simulation whether they see it.

    python -m mutation              all of them; exit status 1 when one is missed that has no excuse
    python -m mutation --only TEXT  those whose name has TEXT in it
    python -m mutation --list       their names

A fault is planted in memory: the files stay as they are, and so does what is compiled from them and kept on disk, unless
the fault is in compiled code.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType
from typing import Any

from mutation.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "ctxcache"
MOST_MISSED = 1
SEEDS = (1, 2, 3)
STEPS = 4000
CHILD_SECONDS = 900


class _FaultyLoader(importlib.machinery.SourceFileLoader):
    """Loads one module of the package with its fault in it."""

    def __init__(self, name: str, mutant: Mutant) -> None:
        super().__init__(name, str(PACKAGE / mutant.module))
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        """Compile the changed source; what Python kept of the module would be the old one."""
        return compile(plant(self._mutant), self.get_filename(fullname), "exec")


class _Planter(importlib.abc.MetaPathFinder):
    """Takes the one module from the usual finder."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = "ctxcache." + mutant.module.removesuffix(".py").replace("/", ".")
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        """Name the loader of the one module."""
        del path, target
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, _FaultyLoader(fullname, self._mutant))


def plant(mutant: Mutant) -> str:
    """Return the module's source with the fault; `ValueError` where the text does not stand there exactly once."""
    source = (PACKAGE / mutant.module).read_text(encoding="utf-8")
    if source.count(mutant.before) != 1:
        raise ValueError(f"{mutant.module} has {mutant.before!r} {source.count(mutant.before)} times; it must be once")
    return source.replace(mutant.before, mutant.after)


def hunt(number: int) -> str:
    """Plant a fault in this process and look for it; returns who saw it, or nothing."""
    sys.meta_path.insert(0, _Planter(MUTANTS[number]))
    try:
        from ctxcache.fsm import FaultGroup  # noqa: PLC0415
        from ctxcache.ids import ContextCacheDeploymentKind  # noqa: PLC0415 - the fault must be planted first
        from ctxcache.testing.fault_runs import FaultRun, faults_at, survey  # noqa: PLC0415
        from ctxcache.testing.kind_sweep import run_with  # noqa: PLC0415
        from ctxcache.testing.simulate import simulate  # noqa: PLC0415
    except Exception as error:  # noqa: BLE001 - it does not even import
        return f"the import: {error!r}"
    for seed in SEEDS:
        result = simulate(seed, STEPS, cut=False)
        if result.violations:
            return f"simulate --seed {seed}: {result.violations[0]}"
    for kind in ContextCacheDeploymentKind:
        group = FaultGroup(kind)
        for fault in (fault for point in survey(group).points for fault in faults_at(point, 1)):
            violations = run_with(group, FaultRun((fault,))).violations
            if violations:
                return f"sweep: {violations[0]}"
    return ""


def _try_one(number: int) -> tuple[str, float]:
    mutant = MUTANTS[number]
    started = time.perf_counter()
    environment = {
        **os.environ,
        "NUMBA_ENABLE_CUDASIM": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts"))),
    }
    with tempfile.TemporaryDirectory() as cache:
        if mutant.compiled:
            environment["NUMBA_CACHE_DIR"] = cache
        command = [sys.executable, "-m", "mutation", "--hunt", str(number)]
        try:
            done = subprocess.run(  # noqa: S603 - this very program
                command, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
            )
            seen = done.stdout.strip() if done.returncode == 0 else f"a crash: {done.stderr.strip()[-200:]}"
        except subprocess.TimeoutExpired:
            seen = f"the clock: it hung for {CHILD_SECONDS} seconds"
    return seen, time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="mutants", description="Plant faults and see whether they are caught.")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="faults whose name has TEXT in it; given again: these too"
    )
    parser.add_argument("--list", action="store_true", help="their names")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--hunt", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.hunt is not None:
        print(hunt(options.hunt))
        return 0
    texts = options.only or [""]
    for text in texts:
        if not any(text in mutant.name for mutant in MUTANTS):
            parser.error(f"no planted fault has {text!r} in its name; --list prints the names")
    chosen = [number for number, mutant in enumerate(MUTANTS) if any(text in mutant.name for text in texts)]
    if options.list:
        print("\n".join(MUTANTS[number].name for number in chosen))
        return 0
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(_try_one, number): number for number in chosen}
        for done in as_completed(running):
            mutant, (seen, seconds) = MUTANTS[running[done]], done.result()
            results.append(
                {"name": mutant.name, "caught_by": seen, "seconds": round(seconds, 1), "excuse": mutant.excuse}
            )
            if not options.json:
                print(
                    f"{'caught' if seen else 'MISSED'}  {mutant.name}  ({seconds:.0f} s; {seen[:150] or mutant.excuse})"
                )
                sys.stdout.flush()
    missed = [result for result in results if not result["caught_by"]]
    if options.json:
        print(json.dumps({"mutants": results, "caught": len(results) - len(missed), "missed": len(missed)}, indent=2))
    else:
        print(f"{len(results) - len(missed)} of {len(results)} planted faults caught")
    return int(len(missed) > MOST_MISSED or any(not result["excuse"] for result in missed))


if __name__ == "__main__":
    sys.exit(main())
