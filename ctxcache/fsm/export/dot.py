"""The lifecycle as a Graphviz graph, and as the pictures that Graphviz makes of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from html import escape
from textwrap import wrap
from typing import Literal

from ctxcache.errors import ContextCacheError
from ctxcache.fsm.export.edges import GROUPS
from ctxcache.fsm.export.picture import (
    FILLS,
    INK,
    Arrow,
    Label,
    View,
    arrows,
    identifier,
    places,
    says_itself,
    short_name,
    style_of,
)
from ctxcache.fsm.states import DESCRIPTIONS, INITIAL, State

_HEADERS = {"svg": b"<svg", "png": b"\x89PNG\r\n\x1a\n"}
_HEADER_WITHIN = {"svg": 1024, "png": 8}
_TIMEOUT_SECONDS = 60

_QUIET = "#57606a"
_FAILURE = "#b42318"
_EXIT = "#6b7280"
_HOOK_COLORS = {"enqueue": "#9a6700", "prove": "#1a7f37"}
_LEGEND = (
    f'<br/><font point-size="10" color="{_QUIET}">amber: device work is enqueued and not proven complete&nbsp;&nbsp;&nbsp;'
    "green: none is pending&nbsp;&nbsp;&nbsp;dashed red: how a failure is accounted for</font>"
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
            "graphviz, brew install graphviz, conda install graphviz), or choose mermaid, dot or json, which need nothing"
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


def dot(view: View) -> str:
    """Draw one view of the lifecycle as Graphviz text."""
    drawn = arrows(view)
    lines = [
        f"digraph {view} {{",
        f'  graph [compound=true, rankdir=TB, nodesep=0.45, ranksep=0.55, pad=0.3, fontname="Helvetica", label=<{_LEGEND}>]',
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=13, margin="0.18,0.09"]',
        '  edge [fontname="Helvetica", fontsize=10, arrowsize=0.7]',
        *(f"  {line}" for line in _nodes(places(drawn))),
        *(f"  {_arrow(arrow)}" for arrow in drawn),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _nodes(shown: dict[str, tuple[State, ...]]) -> Iterator[str]:
    yield f'start [shape=circle, style=filled, fillcolor="{INK}", label="", width=0.16]'
    for group, states in shown.items():
        if not group:
            yield from map(_node, states)
            continue
        yield f"subgraph cluster_{group} {{"
        yield f'  label=<<b>{group}</b>>; labeljust=l; style=rounded; color="#8c959f"; bgcolor="#f6f8fa"; margin=18'
        yield from (f"  {_node(state)}" for state in states)
        yield "}"
    yield f"start -> {identifier(INITIAL.value)}"


def _node(state: State) -> str:
    fill, line = FILLS[style_of(state)]
    text = f"<b>{short_name(state)}</b>" + "".join(
        f'<br/><font point-size="9" color="{_QUIET}">{escape(part)}</font>' for part in wrap(DESCRIPTIONS[state], 34)
    )
    return f'{identifier(state.value)} [label=<{text}>, fillcolor="{fill}", color="{line}"]'


def _arrow(arrow: Arrow) -> str:
    # Graphviz ends edges at nodes and clips them at the cluster: the group's last state is nearest to what follows.
    tail = GROUPS[arrow.source][-1].value if arrow.source in GROUPS else arrow.source
    color = _FAILURE if arrow.fails else _EXIT if arrow.target is State.RELEASED else INK
    attributes = [f"label=<{_table(arrow.labels)}>", f'color="{color}"', f'fontcolor="{color}"']
    if arrow.source in GROUPS:
        attributes.append(f"ltail=cluster_{arrow.source}")
    if arrow.fails:
        attributes.append("style=dashed")
    return f"{identifier(tail)} -> {identifier(arrow.target.value)} [{', '.join(attributes)}]"


def _table(labels: tuple[Label, ...]) -> str:
    rows = list(_rows(labels[0]))
    for label in labels[1:]:
        rows.extend(("", *_rows(label)))
    cells = "".join(f'<tr><td align="left">&nbsp;{row}</td></tr>' for row in rows)
    return f'<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{cells}</table>'


def _rows(label: Label) -> Iterator[str]:
    yield f"<b>{escape(label.title)}</b>"
    for line in label.conditions:
        yield f'<font color="{_QUIET}"><i>{escape(line)}</i></font>'
    for heading, names in label.parts:
        color = _HOOK_COLORS.get(heading, INK)
        if says_itself(heading, names):
            yield from (f'<font color="{color}">{escape(name)}</font>' for name in names)
            continue
        if len(names) == 1:
            yield f'<font color="{color}">{escape(heading + label.joint)}</font>{escape(names[0])}'
            continue
        yield f'<font color="{color}">{escape(heading)}</font>'
        yield from (f"&nbsp;&nbsp;{escape(name)}" for name in names)
