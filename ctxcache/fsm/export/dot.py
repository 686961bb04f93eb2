"""The lifecycle as a Graphviz graph, and as the pictures that Graphviz makes of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from textwrap import wrap
from typing import Literal

from ctxcache.errors import ContextCacheError
from ctxcache.fsm.export.drawing import Change, Drawing, DrawnState
from ctxcache.fsm.export.picture import (
    CHANGES,
    FILLS,
    GROUP,
    HOOKS,
    INK,
    QUIET,
    Arrow,
    Label,
    Text,
    View,
    arrows,
    identifier,
    places,
    style_of,
)

_HEADERS = {"svg": b"<svg", "png": b"\x89PNG\r\n\x1a\n"}
_HEADER_WITHIN = {"svg": 1024, "png": 8}
_TIMEOUT_SECONDS = 60
_WIDTH = 34  # characters of a line

_LEGEND = (
    "amber: device work is enqueued and not proven complete&nbsp;&nbsp;&nbsp;green: none is pending&nbsp;&nbsp;&nbsp;"
    "dashed red: how a failure is accounted for"
)
_LEGEND_OF_CHANGES = "&nbsp;&nbsp;&nbsp;".join(
    f'<font color="{color}"><b>{change}</b></font>' for change, color in CHANGES.items()
)


class GraphvizError(ContextCacheError, RuntimeError):
    """The program `dot` is absent, failed, or wrote something else than it was asked for."""


def render(text: str, picture: Literal["svg", "png"]) -> bytes:
    """Have Graphviz draw a graph.

    Raises:
        GraphvizError: `dot` is not installed (the message says how to install it), failed, or its output does not
            begin as the format does.
    """
    program = shutil.which("dot")
    if program is None:
        raise GraphvizError(
            f"{picture} needs Graphviz, and there is no program `dot` on the PATH; install it (apt-get install "
            "graphviz, brew install graphviz, conda install graphviz), or choose mermaid, dot, json or html, which need nothing"
        )
    try:
        done = subprocess.run(  # noqa: S603 - a resolved path, no shell
            [program, f"-T{picture}"], input=text.encode(), capture_output=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise GraphvizError(f"{program} could not draw {picture}: {cause}") from cause
    if done.returncode or _HEADERS[picture] not in done.stdout[: _HEADER_WITHIN[picture]]:
        said = done.stderr.decode(errors="replace").strip() or "nothing"
        raise GraphvizError(
            f"{program} did not write {picture}: exit status {done.returncode}, {len(done.stdout)} bytes; it said: {said}"
        )
    return done.stdout


def dot(drawing: Drawing, view: View) -> str:
    """Draw one view of the lifecycle as Graphviz text.

    A label is a node half-way: Graphviz leads an edge round nodes, but through the labels of other edges.
    """
    drawn = tuple(enumerate(arrows(drawing, view)))
    legend = _LEGEND if drawing.earlier is None else f"{_LEGEND}<br/>since the earlier version: {_LEGEND_OF_CHANGES}"
    legend = f'<br/><font point-size="10" color="{QUIET}">{legend}</font>'
    lines = [
        f"digraph {view} {{",
        f"  graph [compound=true, rankdir={'TB' if view == 'lifecycle' else 'LR'}, nodesep=0.3, ranksep=0.3, pad=0.3]",
        f'  graph [fontname="Helvetica", label=<{legend}>]',
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=13, margin="0.18,0.09"]',
        "  edge [arrowsize=0.7]",
        f'  start [shape=circle, style=filled, fillcolor="{INK}", label="", width=0.16]',
    ]
    shown = places(drawing, (arrow for _, arrow in drawn))
    for group, found in shown.items():
        labels = (node for number, arrow in drawn if arrow.within == group for node in _labels(number, arrow))
        inside = [f"  {node}" for node in (*map(_node, found), *labels)]
        if group:
            head = f'label=<<b>{group}</b>>; labeljust=l; style=rounded; color="{GROUP[1]}"; bgcolor="{GROUP[0]}"; margin=18'
            inside = [f"  subgraph cluster_{group} {{", f"    {head}", *(f"  {line}" for line in inside), "  }"]
        lines.extend(inside)
    lines.append(f"  start -> {identifier(drawing.lifecycle.initial.value)}")
    # Graphviz ends edges at nodes and clips them at the cluster: the group's last state is nearest to what follows.
    last = {group: found[-1].state.value for group, found in shown.items() if group}
    lines.extend(f"  {edge}" for number, arrow in drawn for edge in _edges(number, arrow, last.get(arrow.source, "")))
    return "\n".join((*lines, "}")) + "\n"


def _node(place: DrawnState) -> str:
    state, change = place.state, place.mark.change
    fill, line = FILLS[style_of(state)]
    lines = (state.description, *(f"was {was}" for was in place.mark.was))
    text = _styled(Text(state.short_name, change), INK, bold=True) + "".join(
        f'<br/><font point-size="9" color="{QUIET}">{escape(part)}</font>'
        for said in lines
        for part in wrap(said, _WIDTH)
    )
    border = f'color="{CHANGES[change]}", penwidth=3' if change else f'color="{line}"'
    return f'{identifier(state.value)} [label=<{text}>, fillcolor="{fill}", {border}]'


def _labels(number: int, arrow: Arrow) -> Iterator[str]:
    for index, label in enumerate(arrow.labels):
        cells = "".join(f'<tr><td align="left">&nbsp;{row}</td></tr>' for row in _rows(label, arrow.color))
        table = f'<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{cells}</table>'
        yield f'label_{number}_{index} [shape=plain, style="", fontsize=10, label=<{table}>]'


def _edges(number: int, arrow: Arrow, last_of_group: str) -> Iterator[str]:
    for index, label in enumerate(arrow.labels):
        change = label.title.change
        attributes = f'color="{CHANGES.get(change) or arrow.color}"'
        if change:
            attributes += ", penwidth=2.5"
        if arrow.fails or change is Change.REMOVED:
            attributes += f", style={'dotted' if change is Change.REMOVED else 'dashed'}"
        from_group = f", ltail=cluster_{arrow.source}" if last_of_group else ""
        middle = f"label_{number}_{index}"
        yield f"{identifier(last_of_group or arrow.source)} -> {middle} [{attributes}, arrowhead=none{from_group}]"
        yield f"{middle} -> {identifier(arrow.target.value)} [{attributes}]"


def _styled(text: Text, color: str, *, bold: bool = False) -> str:
    """A name, with the word and colour of what became of it; what was removed is struck out."""
    name = f"<b>{escape(text.name)}</b>" if bold else escape(text.name)
    if not text.change:
        return f'<font color="{color}">{name}</font>'
    name = f"<s>{name}</s>" if text.change is Change.REMOVED else name
    return f'<font color="{CHANGES[text.change]}">{name} <i>{text.change}</i></font>'


def _rows(label: Label, color: str) -> Iterator[str]:
    yield _styled(label.title, color, bold=True)
    for line in (*label.conditions, *(part for was in label.was for part in wrap(was, _WIDTH))):
        yield f'<font color="{QUIET}"><i>{escape(line)}</i></font>'
    for part in label.parts:
        heading = HOOKS.get(part.heading, QUIET)
        if part.says_itself:
            yield from (_styled(name, heading) for name in part.names)
        elif len(part.names) > 1:
            yield _styled(Text(part.heading), heading)
            yield from (f"&nbsp;&nbsp;{_styled(name, INK)}" for name in part.names)
        elif part.joint == ".":  # one word is one piece: who draws an SVG may have letters of another width
            yield _styled(replace(part.names[0], name=f"{part.heading}.{part.names[0].name}"), INK)
        else:
            yield _styled(Text(part.heading + part.joint), heading) + _styled(part.names[0], INK)
