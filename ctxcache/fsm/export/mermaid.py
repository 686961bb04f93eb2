"""The lifecycle as a Mermaid state diagram. Text only; no extra program."""

from __future__ import annotations

from collections.abc import Iterator

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
from ctxcache.fsm.states import INITIAL, State

_BREAK = "<br/>"
_ONE_LINE = 24  # characters; Mermaid wraps what is much longer
_STYLES = tuple(f"classDef {style} fill:{fill},stroke:{line},color:{INK}" for style, (fill, line) in FILLS.items())


def mermaid(view: View) -> str:
    """Draw one view of the lifecycle."""
    return "\n".join(("stateDiagram-v2", *(f"    {line}" for line in _body(arrows(view))))) + "\n"


def _body(drawn: tuple[Arrow, ...]) -> Iterator[str]:
    shown = places(drawn)
    yield f"[*] --> {identifier(INITIAL.value)}"
    for group, states in shown.items():
        named = [f'state "{short_name(state)}" as {identifier(state.value)}' for state in states]
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
    every = [state for states in shown.values() for state in states]
    if State.RELEASED in every:
        yield f"{identifier(State.RELEASED.value)} --> [*]"
    yield from _STYLES
    for style in dict.fromkeys(map(style_of, every)):
        yield f"class {','.join(identifier(state.value) for state in every if style_of(state) == style)} {style}"


def _arrow(arrow: Arrow) -> Iterator[str]:
    """An arrow with its text; a loop of several labels keeps their titles, and a note holds the rest.

    Mermaid leaves no room in its layout for the text of a loop.
    """
    source, target = identifier(arrow.source), identifier(arrow.target.value)
    if len(arrow.labels) == 1:
        yield f"{source} --> {target} : {_text(arrow.labels[0])}"
        return
    yield f"{source} --> {target} : {_BREAK.join(label.title for label in arrow.labels)}"
    yield f"note left of {target}"
    yield f"    {(_BREAK + _BREAK).join(map(_text, arrow.labels))}"
    yield "end note"


def _text(label: Label) -> str:
    """The label's lines. No colon, list mark or quote: one release or another of Mermaid trips over each of them."""
    lines = [label.title, *label.conditions]
    for heading, names in label.parts:
        if says_itself(heading, names):
            lines.extend(names)
        elif len(names) == 1 and len(heading) + len(names[0]) < _ONE_LINE:
            lines.append(f"{heading}{label.joint}{names[0]}")
        else:
            lines.extend((f"{heading}{label.joint}".strip(), *names))
    return _BREAK.join(lines)
