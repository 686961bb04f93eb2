"""`ctxcache warmup`: compile everything, and say how far it is and how long it took."""

from __future__ import annotations

import sys
from dataclasses import asdict

from ctxcache.cli.report import write_json
from ctxcache.warmup import warmup


def warm_up(*, as_json: bool) -> None:
    """Compile everything; the parts are told on standard error as they begin, the outcome on standard output."""
    report = warmup(progress=_tell)
    if as_json:
        write_json(asdict(report))
    else:
        sys.stdout.write(f"{report}\n")


def _tell(part: str, done: int, total: int) -> None:
    sys.stderr.write(f"[{done + 1}/{total}] {part}\n")
    sys.stderr.flush()
