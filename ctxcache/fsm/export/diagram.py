"""Exports of a lifecycle: text that needs nothing, and pictures that Graphviz draws. All from the table."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from ctxcache.errors import ContractError
from ctxcache.fsm.export.description import describe, read
from ctxcache.fsm.export.dot import dot, render
from ctxcache.fsm.export.drawing import Drawing, draw
from ctxcache.fsm.export.mermaid import mermaid
from ctxcache.fsm.export.page import page
from ctxcache.fsm.export.picture import View
from ctxcache.fsm.table import LIFECYCLES
from ctxcache.ids import ContextCacheDeploymentKind

Format: TypeAlias = Literal["mermaid", "dot", "json", "html", "svg", "png"]

FORMATS: tuple[Format, ...] = ("mermaid", "dot", "json", "html", "svg", "png")
VIEWS: tuple[View, ...] = ("lifecycle", "faults")
_SUFFIXES = {".svg": "svg", ".png": "png", ".html": "html", ".htm": "html"}


def export(
    format: Format,  # noqa: A002 - the plain word
    path: str | Path | None = None,
    *,
    view: View = "lifecycle",
    kind: ContextCacheDeploymentKind | None = None,
    diff: str | Path | None = None,
    machine: str = "request",
) -> str | bytes:
    """Draw the lifecycle, or where its fault points lead.

    Args:
        format: `mermaid`, `dot`, `json` and `html` are text and need no extra program; `svg` (text) and `png` (bytes) need
            Graphviz's program `dot`. `html` is one page with everything in it, for people who review.
        path: a file to write as well; an existing one is replaced.
        view: `lifecycle` shows states, triggers, guards and hooks; `faults` shows for every transition the fault
            points on it and the state that each leads to when it fails. The page shows both, this one first.
        kind: only what deployments of this kind can do; `None` for all kinds together.
        diff: a file that holds what `json` gave before, of either view; what has changed since is marked.
        machine: which lifecycle, one of `LIFECYCLES`.

    Returns:
        What was, or would be, written: `bytes` for `png`, `str` otherwise.

    Raises:
        ContractError: an unknown format, view, kind or machine, a path that ends in another format's suffix, or a file to
            compare with that cannot be read or is something else. Nothing is written.
        GraphvizError: Graphviz is absent or failed. Nothing is written.
        OSError: the file cannot be written.
    """
    for what, chosen, choices in (("format", format, FORMATS), ("view", view, VIEWS), ("machine", machine, LIFECYCLES)):
        if chosen not in choices:
            raise ContractError(f"there is no {what} {chosen!r}; choose one of {', '.join(choices)}")
    if path is not None and _SUFFIXES.get(Path(path).suffix.lower(), format) != format:
        raise ContractError(f"{path} would hold {format}; give it another suffix, or ask for that format")
    if not isinstance(kind, ContextCacheDeploymentKind | None):
        raise ContractError(f"export got the kind {kind!r}; pass a ContextCacheDeploymentKind member")
    lifecycle = LIFECYCLES[machine] if kind is None else LIFECYCLES[machine].of_kind(kind)
    drawing = draw(lifecycle, None if diff is None else read(diff, lifecycle))
    content = _drawn(format, drawing, view)
    if path is not None:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    return content


def _drawn(format: Format, drawing: Drawing, view: View) -> str | bytes:  # noqa: A002 - as in `export`
    if format in {"svg", "png"}:
        picture = render(dot(drawing, view), format)
        return picture.decode() if format == "svg" else picture
    text = {"mermaid": mermaid, "dot": dot, "json": describe, "html": page}
    return text[format](drawing, view)
