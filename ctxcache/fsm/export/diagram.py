"""Exports of the lifecycle: text that needs nothing, and pictures that Graphviz draws. All from the table."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from ctxcache.errors import ContractError
from ctxcache.fsm.export.description import describe
from ctxcache.fsm.export.dot import dot, render
from ctxcache.fsm.export.mermaid import mermaid
from ctxcache.fsm.export.picture import View

Format: TypeAlias = Literal["mermaid", "dot", "json", "svg", "png"]

FORMATS: tuple[Format, ...] = ("mermaid", "dot", "json", "svg", "png")
VIEWS: tuple[View, ...] = ("lifecycle", "faults")
_PICTURE_SUFFIXES = {".svg": "svg", ".png": "png"}


def export(format: Format, path: str | Path | None = None, *, view: View = "lifecycle") -> str | bytes:  # noqa: A002
    """Draw the lifecycle, or where its fault points lead.

    Args:
        format: `mermaid`, `dot` and `json` are text and need no extra program; `svg` (text) and `png` (bytes) need
            Graphviz's program `dot`.
        path: a file to write as well; an existing one is replaced.
        view: `lifecycle` shows states, triggers, guards and hooks; `faults` shows for every transition the fault
            points on it and the state that each leads to when it fails.

    Returns:
        What was, or would be, written: `bytes` for `png`, `str` otherwise.

    Raises:
        ContractError: an unknown format or view, or a path that ends in another picture's suffix. Nothing is written.
        GraphvizError: Graphviz is absent or failed. Nothing is written.
        OSError: the file cannot be written.
    """
    if format not in FORMATS:
        raise ContractError(f"there is no format {format!r}; choose one of {', '.join(FORMATS)}")
    if view not in VIEWS:
        raise ContractError(f"there is no view {view!r}; choose one of {', '.join(VIEWS)}")
    if path is not None and _PICTURE_SUFFIXES.get(Path(path).suffix.lower(), format) != format:
        raise ContractError(f"{path} would hold {format}; give it another suffix, or ask for that format")
    content = _draw(format, view)
    if path is not None:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    return content


def _draw(format: Format, view: View) -> str | bytes:  # noqa: A002
    if format == "mermaid":
        return mermaid(view)
    if format == "dot":
        return dot(view)
    if format == "json":
        return describe(view)
    picture = render(dot(view), format)
    return picture.decode() if format == "svg" else picture
