"""What each command prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ctxcache.cli.report import write_json
from ctxcache.errors import ContractError
from ctxcache.fsm import FaultGroup, export
from ctxcache.fsm.export.diagram import Format
from ctxcache.fsm.export.picture import View
from ctxcache.ids import ContextCacheDeploymentKind


def diagram(
    chosen: Format, view: View, kind: ContextCacheDeploymentKind | None, diff: Path | None, output: Path | None
) -> None:
    """Write the diagram to the file, or to standard output."""
    if output is not None:
        check_file(output)
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


def warm_up(*, as_json: bool) -> None:
    """Compile everything, and say how long it took."""
    from ctxcache.warmup import warmup  # noqa: PLC0415 - the diagram does without Numba

    report = warmup()
    if as_json:
        write_json(asdict(report))
        return
    sys.stdout.write(
        f"{report.compiled} functions compiled, {report.loaded} loaded from the cache on disk, {report.seconds:.1f} s\n"
    )


def listed_points(groups: Sequence[FaultGroup]) -> dict[str, list[dict[str, Any]]]:
    """Return the fault points of each group, by its name: what each point does and where it leads."""
    return {group.name: _points(group) for group in groups}


def faults(groups: Sequence[FaultGroup], *, as_json: bool) -> None:
    """List the fault points of each group."""
    listed = listed_points(groups)
    if as_json:
        write_json(listed)
        return
    width = max(len(point["fault_point"]) for points in listed.values() for point in points)
    blocks = []
    for name, points in listed.items():
        lines = [f"{name}: {len(points)} fault points"]
        lines.extend(
            f"  {point['fault_point']:<{width}}  {point['does']:<7}  leads to {' or '.join(point['leads_to'])}"
            for point in points
        )
        blocks.append("\n".join(lines))
    sys.stdout.write("\n\n".join(blocks) + "\n")


def _points(group: FaultGroup) -> list[dict[str, Any]]:
    return [
        {
            "fault_point": name,
            "does": next(fault.hook.kind.value for fault in group.faults if fault.name == name),
            "leads_to": list(dict.fromkeys(fault.leads_to.value for fault in group.faults if fault.name == name)),
        }
        for name in group.points
    ]
