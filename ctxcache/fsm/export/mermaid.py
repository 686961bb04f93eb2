"""The lifecycle as a Mermaid state diagram. Text only; no extra program."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ctxcache.fsm.export.drawing import Change, Drawing
from ctxcache.fsm.export.picture import (
    CHANGES,
    FILLS,
    INK,
    Arrow,
    Label,
    View,
    arrows,
    identifier,
    places,
    style_of,
)

_BREAK = "<br/>"
_SAFE = re.compile(r"[:;#\"{}<>\s]+")  # what an earlier version says may hold any of these
_ONE_LINE = 24  # characters; Mermaid wraps what is much longer
_STYLES = tuple(f"classDef {style} fill:{fill},stroke:{line},color:{INK}" for style, (fill, line) in FILLS.items())


def mermaid(drawing: Drawing, view: View) -> str:
    """Draw one view of the lifecycle."""
    return "\n".join(("stateDiagram-v2", *(f"    {line}" for line in _body(drawing, arrows(drawing, view))))) + "\n"


def _body(drawing: Drawing, drawn: tuple[Arrow, ...]) -> Iterator[str]:
    shown = places(drawing, drawn)
    yield f"[*] --> {identifier(drawing.lifecycle.initial.value)}"
    for group, found in shown.items():
        named = [
            f'state "{place.state.short_name}{f" ({place.mark.change})" if place.mark.change else ""}"'
            f" as {identifier(place.state.value)}"
            for place in found
        ]
        if not group:
            yield from named
            continue
        within = [line for arrow in drawn if arrow.within == group for line in _arrow(arrow)]
        yield f"state {group} {{"
        yield from (f"    {line}" for line in (*named, *within))
        yield "}"
    for arrow in drawn:
        if not arrow.within:
            yield from _arrow(arrow)
    every = [place for found in shown.values() for place in found]
    for place in every:
        if style_of(place.state) == "gone":
            yield f"{identifier(place.state.value)} --> [*]"
    yield from _STYLES
    for style in dict.fromkeys(style_of(place.state) for place in every):
        names = ",".join(identifier(place.state.value) for place in every if style_of(place.state) == style)
        yield f"class {names} {style}"
    for change, color in CHANGES.items():
        names = ",".join(identifier(place.state.value) for place in every if place.mark.change is change)
        if names:
            dashes = ",stroke-dasharray:6 4" if change is Change.REMOVED else ""
            yield f"classDef {change} stroke:{color},stroke-width:4px{dashes}"
            yield f"class {names} {change}"


def _arrow(arrow: Arrow) -> Iterator[str]:
    """An arrow with its text; a loop of several labels keeps their titles, and a note holds the rest.

    Mermaid leaves no room in its layout for the text of a loop.
    """
    source, target = identifier(arrow.source), identifier(arrow.target.value)
    if len(arrow.labels) == 1:
        yield f"{source} --> {target} : {_text(arrow.labels[0])}"
        return
    yield f"{source} --> {target} : {_BREAK.join(str(label.title) for label in arrow.labels)}"
    yield f"note left of {target}"
    yield f"    {(_BREAK + _BREAK).join(map(_text, arrow.labels))}"
    yield "end note"


def _text(label: Label) -> str:
    """The label's lines. No colon, list mark or quote: one release or another of Mermaid trips over each of them."""
    lines = [str(label.title), *label.conditions, *label.was]
    for part in label.parts:
        names = [str(name) for name in part.names]
        if part.says_itself:
            lines.extend(names)
        elif len(names) == 1 and len(part.heading) + len(names[0]) < _ONE_LINE:
            lines.append(f"{part.heading}{part.joint}{names[0]}")
        else:
            lines.extend((f"{part.heading}{part.joint}".strip(), *names))
    return _BREAK.join(_SAFE.sub(" ", line) for line in lines)
