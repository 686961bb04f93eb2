"""The command line: `ctxcache`, also `python -m ctxcache`.

One module a command, and `bench/` with one folder a benchmark; `program` reads the arguments, `report` is what all print
with. `doctor`, `installed_driver` and `report` import no
dependency, and what is slow to import, or may be missing, is imported by the command that needs it.

May import `config`, `errors`, `fsm`, `ids`, `testing`, `warmup`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; where a dependency does not import, say instead what has to be mended.

    Args:
        arguments: those of the command line when `None`.

    Returns:
        The exit status: 0 done; 1 it could not be done, or something has to be mended; 2 wrong arguments.
    """
    try:
        from ctxcache.cli.program import run  # noqa: PLC0415 - it may fail, and then this still has to work
    except ImportError as cause:
        from ctxcache.cli.doctor import diagnose  # noqa: PLC0415 - needs nothing but Python

        chosen = sys.argv[1:] if arguments is None else arguments
        if "doctor" not in chosen:
            sys.stderr.write(f"ctxcache: error: a dependency does not import: {cause}\n")
        diagnose(as_json="--json" in chosen)
        return 1
    return run(arguments)


__all__ = ["main"]
