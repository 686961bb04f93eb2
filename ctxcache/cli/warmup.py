"""`ctxcache warmup`: compile everything, and say how long it took."""

from __future__ import annotations

import sys
from dataclasses import asdict

from ctxcache.cli.report import write_json
from ctxcache.warmup import warmup


def warm_up(*, as_json: bool) -> None:
    """Compile everything, and say how long it took."""
    report = warmup()
    if as_json:
        write_json(asdict(report))
        return
    sys.stdout.write(
        f"{report.compiled} functions compiled, {report.loaded} loaded from the cache on disk, {report.seconds:.1f} s\n"
    )
