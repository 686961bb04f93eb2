"""What commands print with: JSON, files, progress. Needs nothing but Python: the doctor works where every dependency is broken."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PROGRESS_SECONDS = 5.0


def write_json(content: object) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def check_file(path: Path) -> None:
    """Look whether a file can be written, before anything long is done for it.

    Raises:
        OSError: it cannot, with a word about the remedy.
    """
    folder = path.parent
    if path.is_dir():
        raise OSError(f"{path} is a folder; name a file in it")
    if not folder.is_dir():
        raise OSError(f"cannot write {path}: there is no folder {folder}; make it first, or name another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OSError(f"cannot write {path}: permission is lacking; name a file in a folder that can be written")


def progress(name: str, total: int | None = None) -> Callable[[int], None]:
    """Tell now and then, on standard error, how far something has come: so many runs, or of so many steps."""
    last = time.perf_counter()

    def tell(done: int) -> None:
        nonlocal last
        if time.perf_counter() - last >= _PROGRESS_SECONDS:
            last = time.perf_counter()
            sys.stderr.write(f"{name}: {done} {'runs' if total is None else f'of {total} steps'}\n")
            sys.stderr.flush()

    return tell
