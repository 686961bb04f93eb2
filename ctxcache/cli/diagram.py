"""`ctxcache diagram`: export the lifecycle's state machine."""

from __future__ import annotations

import sys
from pathlib import Path

from ctxcache.cli.report import check_file
from ctxcache.errors import ContractError
from ctxcache.fsm import export
from ctxcache.fsm.export.diagram import Format
from ctxcache.fsm.export.picture import View
from ctxcache.ids import ContextCacheDeploymentKind


def write_diagram(
    chosen: Format, view: View, kind: ContextCacheDeploymentKind | None, diff: Path | None, output: Path | None
) -> None:
    """Write the diagram to the file, or to standard output."""
    if output is not None:
        check_file(output)
        if diff is not None and output.exists() and diff.exists() and output.samefile(diff):
            raise ContractError(f"--output and --diff both name {diff}, which would be lost; write to another file")
        content = export(chosen, output, view=view, kind=kind, diff=diff)
        size = len(content.encode() if isinstance(content, str) else content)
        sys.stdout.write(f"wrote {output} ({chosen}, {size} bytes)\n")
        return
    if chosen == "png" and sys.stdout.isatty():
        raise ContractError("png is no text for a terminal; give --output FILE")
    content = export(chosen, view=view, kind=kind, diff=diff)
    if isinstance(content, str):
        sys.stdout.write(content)
    else:
        sys.stdout.buffer.write(content)
