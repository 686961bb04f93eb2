"""What each command prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ctxcache.cli.doctor import Finding, Status, examine
from ctxcache.errors import ContractError
from ctxcache.fsm import FAULTS, export, fault_points
from ctxcache.fsm.diagram import Format
from ctxcache.fsm.picture import View
from ctxcache.ids import ContextCacheDeploymentKind


def diagram(chosen: Format, view: View, output: Path | None) -> None:
    """Write the diagram to the file, or to standard output."""
    if output is not None:
        content = export(chosen, output, view=view)
        size = len(content.encode() if isinstance(content, str) else content)
        sys.stdout.write(f"wrote {output} ({chosen}, {size} bytes)\n")
        return
    if chosen == "png" and sys.stdout.isatty():
        raise ContractError("png is no text for a terminal; give --output FILE")
    content = export(chosen, view=view)
    if isinstance(content, str):
        sys.stdout.write(content)
    else:
        sys.stdout.buffer.write(content)


def faults(kind: ContextCacheDeploymentKind | None, *, as_json: bool) -> None:
    """List the fault points of one deployment kind, or of each."""
    kinds = tuple(ContextCacheDeploymentKind) if kind is None else (kind,)
    listed = {each.value: _points(each) for each in kinds}
    if as_json:
        _write_json(listed)
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


def _points(kind: ContextCacheDeploymentKind) -> list[dict[str, Any]]:
    return [
        {
            "fault_point": name,
            "does": next(fault.hook.kind.value for fault in FAULTS if fault.name == name),
            "leads_to": list(
                dict.fromkeys(fault.leads_to.value for fault in FAULTS if fault.name == name and kind in fault.kinds)
            ),
        }
        for name in fault_points(kind)
    ]


def doctor(*, as_json: bool) -> bool:
    """Print what was found; returns whether something must be mended."""
    findings = examine()
    broken = [finding for finding in findings if finding.status is Status.BROKEN]
    if as_json:
        _write_json({"broken": bool(broken), "findings": [finding.as_dict() for finding in findings]})
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


def _write_json(content: object) -> None:
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
