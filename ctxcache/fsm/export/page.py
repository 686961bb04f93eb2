"""The lifecycle as one HTML page for people who review it: pictures, tables and legends. It asks for nothing else.

Everything is inline, and nothing is fetched or run. The graph is Graphviz's, where its program `dot` is there; the picture in
columns needs no program.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from ctxcache.fsm.export.dot import dot, render
from ctxcache.fsm.export.drawing import Change, Drawing, DrawnHook, DrawnRow, Mark, say_guards, say_kinds
from ctxcache.fsm.export.lanes import lanes
from ctxcache.fsm.export.picture import (
    CHANGES,
    EXIT,
    FAILURE,
    FILLS,
    GROUP,
    HOOKS,
    INK,
    QUIET,
    View,
    style_of,
)

_DARK = {
    INK: "#e6edf3",
    QUIET: "#9da7b3",
    FAILURE: "#ff7b72",
    EXIT: "#9198a1",
    GROUP[0]: "#161b22",
    GROUP[1]: "#6e7681",
    HOOKS["enqueue"]: "#e3b341",
    HOOKS["prove"]: "#56d364",
    FILLS["pending"][0]: "#4a3612",
    FILLS["pending"][1]: "#d29922",
    FILLS["idle"][0]: "#12341f",
    FILLS["idle"][1]: "#3fb950",
    FILLS["broken"][0]: "#4b1f1f",
    FILLS["gone"][0]: "#2d333b",
    CHANGES[Change.ADDED]: "#56d4dd",
    CHANGES[Change.REMOVED]: "#d2a8ff",
    CHANGES[Change.CHANGED]: "#ffa657",
}
"""What each colour of the pictures becomes where the reader's scheme is dark."""

_MEANINGS = {
    "pending": "device work is enqueued and not proven complete",
    "idle": "no device work is pending",
    "broken": "a drain failed: the device may still write",
    "gone": "nothing is left",
}

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: INK; --quiet: QUIET; --rule: #d0d7de; --raised: #f6f8fa;
  --enqueue: ENQUEUE; --prove: PROVE; --added: ADDED; --removed: REMOVED; --changed: CHANGED; }
body { margin: 0 auto; padding: 1rem; max-width: 82rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
.quiet { color: var(--quiet); }
figure { margin: 1rem 0; } figcaption { color: var(--quiet); }
.table { overflow-x: auto; } .picture { overflow-x: auto; border: 1px solid var(--rule); border-radius: 8px; padding: .5rem; }
.graph { max-width: 100%; min-width: 60rem; height: auto; }
.halo { paint-order: stroke; stroke: var(--ground); stroke-width: 4px; stroke-linejoin: round; }
code { font: .87em ui-monospace, monospace; overflow-wrap: break-word; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .5rem; border-bottom: 1px solid var(--rule); }
th { background: var(--raised); } ol, ul { margin: 0; padding-left: 1.2rem; }
.enqueue, .prove, .mark { border: 1px solid; border-radius: 4px; padding: 0 .3em; font-size: .8em; white-space: nowrap; }
.enqueue { color: var(--enqueue); } .prove { color: var(--prove); }
.mark.added, .dot.added { color: var(--added); } .mark.removed, .dot.removed { color: var(--removed); }
.mark.changed, .dot.changed { color: var(--changed); }
tr.added > :first-child { box-shadow: inset 4px 0 var(--added); }
tr.removed > :first-child { box-shadow: inset 4px 0 var(--removed); } .removed > code { text-decoration: line-through; }
tr.changed > :first-child { box-shadow: inset 4px 0 var(--changed); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; list-style: none; }
.dot { display: inline-block; width: .9em; height: .9em; border: 2px solid; border-radius: 4px; vertical-align: -.1em; }
@media (max-width: 44rem) {
  thead { display: none; } tr { display: block; padding: .5rem 0; border-bottom: 2px solid var(--rule); }
  td { display: grid; grid-template-columns: 7rem minmax(0, 1fr); gap: .5rem; border: 0; padding: .15rem .5rem; }
  td::before { content: attr(data-label); color: var(--quiet); }
}
"""

_NOISE = re.compile(r'<title>.*?</title>\s*|<!--.*?-->\s*| (?:id|class)="[^"]*"', re.DOTALL)
"""What Graphviz writes that names pieces; two pictures of one page would give the same names."""


def page(drawing: Drawing, view: View) -> str:
    """Write the page; the pictures of `view` come first."""
    lifecycle = drawing.lifecycle
    title = f"The lifecycle of a {lifecycle.name}"
    views: tuple[View, ...] = (view, "faults" if view == "lifecycle" else "lifecycle")
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_style()}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        (
            f"<p>Deployments: {escape(say_kinds(lifecycle.kinds))}. {len(lifecycle.states)} states, {len(lifecycle.transitions)} "
            f"transitions. It begins in <code>{lifecycle.initial}</code>.</p>"
        ),
        *_changes(drawing),
        *(line for each in views for line in _pictures(drawing, each)),
        "<h2>Legend</h2>",
        *_legend(),
        "<h2>States</h2>",
        *_table(("state", "phase", "device work", "meaning"), _states(drawing)),
        "<h2>Transitions</h2>",
        (
            '<p class="quiet">A transition that proves runs its hooks before it enters its target, one that only enqueues runs '
            "them after. Of several with one trigger and source the first that no guard refuses is taken.</p>"
        ),
        *_table(
            ("trigger", "operation", "from", "to", "guards", "hooks, in order", "deployments"), _transitions(drawing)
        ),
        "<h2>Guards</h2>",
        *_table(("guard", "refused where it does not hold", "refused, under unless, where it holds"), _guards(drawing)),
        "<h2>Fault points</h2>",
        *_table(("fault point", "transition", "from", "does", "fires", "leads to", "deployments"), _faults(drawing)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _style() -> str:
    named = {"INK": INK, "QUIET": QUIET, "ENQUEUE": HOOKS["enqueue"], "PROVE": HOOKS["prove"]}
    named |= {change.upper(): color for change, color in CHANGES.items()}
    light = _STYLE
    for name, color in named.items():
        light = re.sub(rf"\b{name};", f"{color};", light)
    variables = "".join(f" --{name.lower()}: {_DARK[color]};" for name, color in named.items())
    pictures = "\n".join(
        f'[fill="{color}"] {{ fill: {dark}; }} [stroke="{color}"] {{ stroke: {dark}; }}'
        for color, dark in _DARK.items()
    )
    return (
        f"{light}@media (prefers-color-scheme: dark) {{\n:root {{ --ground: #0d1117; --rule: #30363d; --raised: #161b22;"
        f"{variables} }}\n{pictures}\n.graph text:not([fill]) {{ fill: var(--ink); }}\n"
        '.graph [fill="white"] { fill: none; } .graph [stroke="black"] { stroke: var(--ink); }\n'
        '.graph [fill="black"] { fill: var(--ink); }\n}\n'
    )


def _pictures(drawing: Drawing, view: View) -> Iterator[str]:
    """The view's two pictures; the graph only where there is Graphviz."""
    lifecycle = view == "lifecycle"
    yield f"<h2>{'How a life goes' if lifecycle else 'Where each failure leads'}</h2>"
    if shutil.which("dot") is not None:
        graph = render(dot(drawing, view), "svg").decode()
        graph = _NOISE.sub("", graph[graph.index("<svg") :]).replace("<svg", '<svg class="graph"', 1)
        yield f'<figure><div class="picture">{graph}</div></figure>'
    yield f'<figure><div class="picture">{lanes(drawing, view)}</div><figcaption>An arrow leaves the states with a dot on '
    yield "its line, and enters the one at its head. Dashed red: how a failure is accounted for.</figcaption></figure>"


def _changes(drawing: Drawing) -> Iterator[str]:
    """What a comparison found, in numbers."""
    if drawing.earlier is None:
        return
    yield "<h2>Since the earlier version</h2>"
    yield from _table(
        ("", *CHANGES),
        [(Mark(), (name, *(str(numbers[change]) for change in CHANGES))) for name, numbers in drawing.changes.items()],
    )


def _legend() -> Iterator[str]:
    yield '<ul class="legend">'
    for style, (fill, border) in FILLS.items():
        swatch = f'<svg width="16" height="12"><rect x="1" y="1" width="14" height="10" rx="3" fill="{fill}" stroke="{border}"/></svg>'
        yield f"<li>{swatch} {_MEANINGS[style]}</li>"
    yield '<li><span class="enqueue">enqueue</span> puts work on the stream</li>'
    yield '<li><span class="prove">prove</span> drains the stream</li>'
    yield from (f'<li><span class="dot {change}"></span> {change}, in a comparison</li>' for change in CHANGES)
    yield "</ul>"


def _table(header: Sequence[str], rows: Iterable[tuple[Mark, Sequence[str]]]) -> Iterator[str]:
    """A table of cells that are HTML already; each row with its mark in the first cell."""
    heads = "".join(f"<th>{name}</th>" for name in header)
    yield f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>'
    for mark, cells in rows:
        first, *rest = cells
        marked = (f'<div class="{mark.change or "same"}">{first} {_marked(mark)}</div>', *rest)
        inside = "".join(
            f'<td data-label="{name}"><div>{cell}</div></td>' for name, cell in zip(header, marked, strict=True)
        )
        yield f'<tr class="{mark.change}">{inside}</tr>' if mark.change else f"<tr>{inside}</tr>"
    yield "</tbody></table></div>"


def _marked(mark: Mark) -> str:
    if not mark.change:
        return ""
    was = "".join(f'<div class="quiet">was {escape(line)}</div>' for line in mark.was)
    return f'<span class="mark {mark.change}">{mark.change}</span>{was}'


def _code(names: Iterable[str], between: str = "<br>") -> str:
    return between.join(f"<code>{escape(name)}</code>" for name in names)


def _states(drawing: Drawing) -> Iterator[tuple[Mark, Sequence[str]]]:
    for place in drawing.states:
        state = place.state
        work = "unproven" if style_of(state) == "broken" else "pending" if state.pending else "none"
        phase = "none" if state.phase is None else _code([state.phase.name])
        yield place.mark, (_code([state.value]), phase, work, escape(state.description))


def _hook(drawn: DrawnHook, row: DrawnRow) -> str:
    hook = drawn.hook
    kinds = row.row.kinds & hook.kinds
    limit = "" if kinds == row.row.kinds else f' <span class="quiet">{escape(say_kinds(kinds))}</span>'
    mark = _marked(drawn.mark) if drawn.mark.change is not row.mark.change or row.mark.change is Change.CHANGED else ""
    badge = f'<span class="{hook.kind.value}">{hook.kind.value}</span>'
    return f'<li class="{drawn.mark.change or "same"}">{badge} {_code([hook.name])}{limit} {mark}</li>'


def _transitions(drawing: Drawing) -> Iterator[tuple[Mark, Sequence[str]]]:
    for drawn in drawing.rows:
        row = drawn.row
        hooks = "".join(_hook(each, drawn) for each in drawn.hooks)
        yield (
            drawn.mark,
            (
                _code([row.trigger]),
                _code([row.operation]) if row.operation else "the machine itself",
                _code([row.source]),
                _code([row.target]),
                _code(say_guards(row)),
                f"<ol>{hooks}</ol>" if hooks else "none",
                escape(say_kinds(row.kinds)),
            ),
        )


def _guards(drawing: Drawing) -> Iterator[tuple[Mark, Sequence[str]]]:
    found = dict.fromkeys(guard for row in drawing.lifecycle.transitions for guard in (*row.guards, *row.unless))
    for guard in found:
        yield Mark(), (_code([guard.name]), escape(guard.refusal), escape(guard.refusal_unless))


def _faults(drawing: Drawing) -> Iterator[tuple[Mark, Sequence[str]]]:
    for drawn in drawing.faults:
        fault = drawn.fault
        does = fault.hook.kind.value
        yield (
            drawn.mark,
            (
                _code([fault.name]),
                _code([fault.transition.trigger]),
                _code([fault.transition.source]),
                f'<span class="{does}">{does}</span>',
                _code([fault.fires]) if fault.fires else "nothing",
                _code([fault.leads_to]),
                escape(say_kinds(fault.kinds)),
            ),
        )
