"""What `ctxcache bench host` times of starting: each in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from ctxcache.errors import ContextCacheError

_TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"

STARTS = {
    "import": _TIMED.format("import ctxcache"),
    "warm-up": "import ctxcache; print(ctxcache.warmup().seconds)",
    "compile": "import ctxcache; print(ctxcache.warmup().seconds)",
}
"""By work: what a fresh process runs; it prints seconds."""


def seconds_of(name: str, repeats: int) -> list[float]:
    """Return the seconds that each of so many fresh processes took, after one that fills the cache on disk.

    `compile` gets an empty cache each time instead.
    """
    if name == "compile":
        times = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as empty:
                times.append(_run(name, {**os.environ, "NUMBA_CACHE_DIR": empty}))
        return times
    return [_run(name, dict(os.environ)) for _ in range(repeats + 1)][1:]


def _run(name: str, environment: dict[str, str]) -> float:
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", STARTS[name]], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ContextCacheError(f"a fresh process could not time {name}: {done.stderr.strip()}")
    return float(done.stdout)
