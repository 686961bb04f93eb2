"""The page for reviewers holds the whole table, needs nothing from elsewhere, and is sound HTML; and views of one kind."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.lifecycle_subject import row_id

from ctxcache.errors import ContractError
from ctxcache.fsm import FAULTS, LIFECYCLES, TRANSITIONS, VIEWS, State, export, fault_points
from ctxcache.fsm.export import page
from ctxcache.fsm.export.drawing import draw
from ctxcache.fsm.export.edges import edges, fault_edges
from ctxcache.ids import ContextCacheDeploymentKind as Kind

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Reads the page: whether its tags close, what it asks for, and the cells of its tables by heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.asks: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.heading = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in {"src", "href", "xlink:href", "data", "action"} or name.startswith("on"):
                self.asks.append(f"{name}={value}")
        if tag == "h2":
            self.heading = ""
        if tag == "tr":
            self.tables.setdefault(self.heading, []).append([])
        if tag == "td":
            self.tables[self.heading][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "h2" in self.open:
            self.heading += data
        if "td" in self.open:
            self.tables[self.heading][-1][-1] += f"{data} "

    def rows(self, heading: str) -> list[list[str]]:
        """The body of a table: cells with single blanks."""
        return [[" ".join(cell.split()) for cell in row] for row in self.tables[heading] if row]


@pytest.fixture(params=[True, False], ids=["as it is", "without Graphviz"])
def graphviz(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """Whether the program `dot` may be there."""
    if not request.param:
        monkeypatch.setenv("PATH", str(tmp_path))
    return bool(request.param)


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_is_whole_and_asks_for_nothing(view, graphviz: bool) -> None:
    """Every tag closes, nothing is fetched or run, no name stands twice, and it says how wide a phone is."""
    text = str(export("html", view=view))
    reader = Reader(text)
    assert reader.open == []
    assert (reader.asks, reader.ids) == ([], [])
    for word in ("<script", "<link", "url(", "@import", "javascript:"):
        assert word not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert '<meta name="viewport" content="width=device-width' in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert text.index("How a life goes") < text.index("Where each failure leads") or view == "faults"


def test_its_tables_are_the_table(graphviz: bool) -> None:
    """States, transitions with their hooks in order, guards in both senses, and fault points, each as declared."""
    reader = Reader(str(export("html")))
    assert [row[0] for row in reader.rows("States")] == [state.value for state in State]
    assert [row[3] for row in reader.rows("States")] == [state.description for state in State]
    rows = reader.rows("Transitions")
    for cells, row in zip(rows, TRANSITIONS, strict=True):
        assert cells[:4] == [row.trigger, row.operation or "the machine itself", row.source, row.target], row_id(row)
        asked = [guard.name for guard in row.guards] + [f"unless {guard.name}" for guard in row.unless]
        assert cells[4] == " ".join(asked)
        assert re.findall(r"(enqueue|prove) (\w+)", cells[5]) == [(hook.kind.value, hook.name) for hook in row.hooks]
    guards = {guard for row in TRANSITIONS for guard in (*row.guards, *row.unless)}
    assert {tuple(cells) for cells in reader.rows("Guards")} == {
        (guard.name, guard.refusal, guard.refusal_unless) for guard in guards
    }
    assert [(cells[0], cells[2], cells[3], cells[5]) for cells in reader.rows("Fault points")] == [
        (fault.name, fault.transition.source, fault.hook.kind.value, fault.leads_to) for fault in FAULTS
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_its_own_picture_has_a_line_for_every_edge(view, monkeypatch, tmp_path: Path) -> None:
    """A dot on every state that an edge leaves, a head at the one that it enters, and the triggers above."""
    monkeypatch.setenv("PATH", str(tmp_path))
    text = str(export("html", view=view)).partition("Legend</h2>")[0]
    picture = text[text.index('<svg class="lanes"') : text.index("</svg>")]
    request = draw(LIFECYCLES["request"])
    drawn = edges(request) if view == "lifecycle" else fault_edges(request)
    assert picture.count("<g>") == len(drawn)
    assert picture.count("<circle") == sum(len(edge.sources) for edge in drawn)
    for trigger in {row.trigger for row in TRANSITIONS} if view == "lifecycle" else {"device_failed", "drain_failed"}:
        assert re.search(rf">[^<]*\b{trigger}\b", picture)


def test_every_colour_has_one_for_a_dark_scheme(graphviz: bool) -> None:
    """Whatever colour a picture uses, the page says what it becomes in the dark."""
    text = str(export("html"))
    used = set(re.findall(r'(?:fill|stroke)="(#\w+|\w+)"', text.partition("</style>")[2]))
    assert used - {"none", "transparent", "white", "black"} <= set(page._DARK)
    assert not re.search(r"\b[A-Z]{3,};", text.partition("</style>")[0])


@pytest.mark.parametrize("kind", Kind)
def test_a_view_of_one_kind_shows_what_that_kind_can_do(kind: Kind) -> None:
    """Rows, hooks, states and fault points of other kinds are in no format; its own are, unlimited."""
    rows = [row for row in TRANSITIONS if kind in row.kinds]
    hooks = {hook.name for row in rows for hook in row.hooks if kind in hook.kinds}
    foreign = {hook.name for row in TRANSITIONS for hook in row.hooks} - hooks
    content = json.loads(export("json", kind=kind))
    assert [(row["trigger"], row["source"], row["target"]) for row in content["transitions"]] == [
        (row.trigger, row.source, row.target) for row in rows
    ]
    assert {hook["name"] for row in content["transitions"] for hook in row["hooks"]} == hooks
    assert content["deployments"] == [kind.value]
    faults = json.loads(export("json", kind=kind, view="faults"))
    assert faults["fault_points"] == {kind.value: list(fault_points(kind))}
    for form in ("mermaid", "dot", "html"):
        for view in VIEWS:
            text = str(export(form, kind=kind, view=view))  # type: ignore[arg-type]
            words = set(re.findall(r"\w+", text))
            assert not words & foreign
            assert not {each.value for each in Kind if each is not kind} & (words - {"hybrid"})
            assert ("drafting" in words) == (kind in {Kind.EAGLE, Kind.SHARED_KV})
        assert hooks <= set(re.findall(r"\w+", str(export(form, kind=kind))))  # type: ignore[arg-type]


def test_what_is_no_kind_or_machine_is_refused() -> None:
    """A name instead of a kind, or a machine that is not declared, is the caller's mistake."""
    for options in ({"kind": "eagle"}, {"machine": "batch"}):
        with pytest.raises(ContractError, match=r"ContextCacheDeploymentKind|there is no machine 'batch'"):
            export("json", **options)  # type: ignore[arg-type]
