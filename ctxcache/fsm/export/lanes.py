"""A picture that needs no program: a column for every state, and below it a line for every arrow, in the table's order."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ctxcache.fsm.export.drawing import Change, Drawing
from ctxcache.fsm.export.picture import (
    CHANGES,
    FILLS,
    GROUP,
    INK,
    QUIET,
    Arrow,
    Label,
    View,
    arrows,
    places,
    style_of,
)

_COLUMN = 104
_LINE = 38
_HEAD = 76
_MARGIN = 12
_ROOM_FOR_TEXT = 150  # to the right of the last column
_HALF_LOOP = 14


def lanes(drawing: Drawing, view: View) -> str:
    """Draw one view as an SVG element: an arrow leaves the dots on its line and enters the state above its head."""
    drawn = arrows(drawing, view)
    touched = {place.state for found in places(drawing, drawn).values() for place in found}
    shown = [place for place in drawing.states if place.state in touched]
    columns = {place.state.value: _MARGIN + _COLUMN * (index + 0.5) for index, place in enumerate(shown)}
    lines = [(arrow, label) for arrow in drawn for label in arrow.labels]
    width, height = _MARGIN + _COLUMN * len(columns) + _ROOM_FOR_TEXT, _HEAD + _LINE * (len(lines) + 1)
    text = [
        (
            f'<svg class="lanes" role="img" aria-label="{view}: an arrow for every transition" xmlns="http://www.w3.org/2000/svg" '
            f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        )
    ]
    for group in dict.fromkeys(place.state.group for place in shown if place.state.group):
        found = [columns[place.state.value] for place in shown if place.state.group == group]
        left, wide = found[0] - _COLUMN / 2 + 3, found[-1] - found[0] + _COLUMN - 6
        text.append(
            f'<rect x="{left:g}" y="4" width="{wide:g}" height="{height - 8}" rx="8" fill="{GROUP[0]}" stroke="{GROUP[1]}"/>'
            f'<text x="{left + 8:g}" y="20" font-size="12" font-weight="bold" fill="{INK}">{escape(group)}</text>'
        )
    for place in shown:
        x, change = columns[place.state.value], place.mark.change
        fill, border = FILLS[style_of(place.state)]
        stroke = f'stroke="{CHANGES[change]}" stroke-width="3"' if change else f'stroke="{border}"'
        text.append(
            f'<path d="M{x:g} {_HEAD - 16}V{height - 12}" stroke="{border}" stroke-dasharray="1 4"/>'
            f'<rect x="{x - 46:g}" y="28" width="92" height="32" rx="6" fill="{fill}" {stroke}/>'
            f'<text x="{x:g}" y="{42 if change else 48}" text-anchor="middle" font-size="12" font-weight="bold" '
            f'fill="{INK}">{escape(place.state.short_name)}</text>'
        )
        if change:
            text.append(
                f'<text x="{x:g}" y="55" text-anchor="middle" font-size="10" fill="{CHANGES[change]}">{change}</text>'
            )
    for index, (arrow, label) in enumerate(lines):
        text.extend(_line(arrow, label, columns, _HEAD + _LINE * (index + 1)))
    return "\n".join((*text, "</svg>"))


def _line(arrow: Arrow, label: Label, columns: dict[str, float], y: float) -> Iterator[str]:
    """One arrow: dots on the states that it leaves, a head at the one that it enters, and its text above."""
    change = label.title.change
    color = CHANGES.get(change) or arrow.color
    sources = [columns[state.value] for state in arrow.sources]
    head = columns[arrow.target.value]
    dashes = ' stroke-dasharray="2 3"' if change is Change.REMOVED else ' stroke-dasharray="6 4"' if arrow.fails else ""
    line = f'stroke="{color}" stroke-width="{2.5 if change else 1.5}" fill="none"{dashes}'
    yield f"<g><title>{escape(say(label))}</title>"
    if arrow.loops:
        right = head + 3 * _HALF_LOOP
        yield f'<path d="M{head:g} {y - 8:g}H{right:g}V{y + 6:g}H{head + 8:g}" {line}/>'
        tip, towards, sources = y + 6, 1, [head]
    else:
        far = max(sources, key=lambda x: abs(x - head))
        towards = 1 if far > head else -1
        yield f'<path d="M{far:g} {y:g}H{head + 8 * towards:g}" {line}/>'
        tip = y
    start = y - 8 if arrow.loops else y
    yield from (f'<circle cx="{x:g}" cy="{start:g}" r="3.5" fill="{color}"/>' for x in sources)
    yield f'<path d="M{head:g} {tip:g}l{9 * towards} -5v10z" fill="{color}"/>'
    yield (
        f'<text class="halo" x="{min((*sources, head)) + 8:g}" y="{start - 6:g}" font-size="11" fill="{color}">'
        f'<tspan font-weight="bold">{escape(label.title.name)}</tspan>'
        f'<tspan fill="{color if change else QUIET}"> {escape(" ".join((*([change] if change else []), *label.conditions)))}</tspan>'
        "</text></g>"
    )


def say(label: Label) -> str:
    """The whole label, line by line."""
    parts = (f"{part.heading}{part.joint}{name}" for part in label.parts for name in part.names)
    return "\n".join((str(label.title), *label.conditions, *label.was, *parts))
