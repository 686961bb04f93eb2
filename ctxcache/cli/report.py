"""What the doctor prints. Needs nothing but Python: it has to work where every dependency is broken."""

from __future__ import annotations

import json
import sys

from ctxcache.cli.doctor import Finding, Status, examine


def report(*, as_json: bool) -> bool:
    """Print what was found; returns whether something must be mended."""
    findings = examine()
    broken = [finding for finding in findings if finding.status is Status.BROKEN]
    if as_json:
        write_json({"broken": bool(broken), "findings": [finding.as_dict() for finding in findings]})
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


def write_json(content: object) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
