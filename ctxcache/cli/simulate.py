"""`ctxcache simulate`: random lives of runtimes, with progress on standard error."""

from __future__ import annotations

import sys

from ctxcache.cli.report import progress, write_json
from ctxcache.ids import ContextCacheDeploymentKind as Kind
from ctxcache.testing.simulate import SimulationResult, simulate


def run_simulation(seed: int, steps: int, *, as_json: bool) -> bool:
    """Simulate; returns whether nothing was wrong. The replaying script of a failure goes to standard output."""
    result = simulate(seed, steps, progress=progress("simulate", steps))
    if as_json:
        write_json(result.as_dict())
        return not result.violations
    sys.stdout.write(_summary(result))
    if result.violations:
        sys.stdout.writelines(f"violation: {violation}\n" for violation in result.violations)
        sys.stdout.write(f"\n{result.script}")
    return not result.violations


def _summary(result: SimulationResult) -> str:
    idle = result.steps - sum(result.actions.values())
    return (
        f"seed {result.seed}: {result.steps} steps in {result.episodes} deployments of "
        f"{min(result.episodes, len(Kind))} kinds, {f'{idle} steps with nothing to do, ' if idle else ''}"
        f"{result.faults} faults, {result.quarantines} quarantines, {result.comparisons} answers compared\n"
        f"event log {result.log_digest}\n"
        f"{result.seconds:.0f} seconds, {len(result.violations)} violations\n"
    )
