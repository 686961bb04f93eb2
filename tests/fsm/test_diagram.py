"""What is drawn is the table, whole; fault points and where they lead are what the machine does."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.lifecycle_subject import row_id, taking

from ctxcache.cli import main
from ctxcache.errors import ContextCacheError, ContractError, DeviceError
from ctxcache.fsm import (
    FAULTS,
    FORMATS,
    LIFECYCLES,
    TRANSITIONS,
    VIEWS,
    DrainFailed,
    GraphvizError,
    HookKind,
    State,
    export,
    fault_points,
    fire,
)
from ctxcache.fsm.export.drawing import draw
from ctxcache.fsm.export.edges import edges, fault_edges
from ctxcache.fsm.export.picture import arrows
from ctxcache.fsm.points import faults_of
from ctxcache.ids import ContextCacheDeploymentKind as Kind

TEXTS = ("mermaid", "dot", "json", "html")
EDGES = edges(draw(LIFECYCLES["request"]))
FAULT_EDGES = fault_edges(draw(LIFECYCLES["request"]))
GROUPS = LIFECYCLES["request"].groups
needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


def test_every_row_is_in_exactly_one_edge_of_the_picture() -> None:
    """Merging hides nothing: the edges partition the table's rows, and each edge tells the truth about its rows."""
    drawn = [each.row for edge in EDGES for each in edge.rows]
    assert sorted(map(row_id, drawn)) == sorted(map(row_id, TRANSITIONS))
    for edge in EDGES:
        assert {each.row.trigger for each in edge.rows} == set(edge.triggers)
        assert {each.row.target for each in edge.rows} == {edge.target}
        assert len({(each.row.guards, each.row.unless) for each in edge.rows}) == 1
        assert {*edge.sources, *edge.not_from} == set(GROUPS.get(edge.source, ()) or [State(edge.source)])
        for each in edge.rows:
            assert each.row.hooks == tuple(
                found.drawn.hook for found in edge.hooks if each.row.source not in found.not_from
            )


def test_the_picture_is_small_enough_to_read() -> None:
    """Ways out and failures, which nearly every state has, leave groups: about half as many edges as rows."""
    assert len(EDGES) <= len(TRANSITIONS) * 0.6
    assert {edge.source for edge in EDGES if "finish" in edge.triggers} == {"admitted", "executing", "finishing"}
    assert {edge.triggers for edge in EDGES if "finish" in edge.triggers} == {("finish", "abandon")}


def test_every_fault_is_in_exactly_one_edge_of_the_fault_view() -> None:
    """The fault view's edges partition the hooks of all rows."""
    drawn = [each.fault for edge in FAULT_EDGES for each in edge.faults]
    assert len(drawn) == len(FAULTS) == sum(len(row.hooks) for row in TRANSITIONS)
    assert set(drawn) == set(FAULTS)


@pytest.mark.parametrize("kind", [None, *Kind])
def test_a_fault_edge_leaves_the_states_in_which_each_of_its_points_fails(kind: Kind | None) -> None:
    """An edge of a group stands for every state of it but those that it names, and its label names them."""
    lifecycle = LIFECYCLES["request"] if kind is None else LIFECYCLES["request"].of_kind(kind)
    text = str(export("mermaid", view="faults", kind=kind))
    for edge in fault_edges(draw(lifecycle)):
        left = {state for state in lifecycle.states if edge.source in (state, state.group)} - set(edge.not_from)
        for point in edge.points:
            failing = {each.fault.transition.source for each in edge.faults if each.fault.name == point}
            assert failing == left
            assert failing <= {
                fault.transition.source
                for fault in faults_of(lifecycle, lifecycle.transitions)
                if (fault.name, fault.leads_to) == (point, edge.target)
            }
        if edge.not_from:
            names = ", ".join(state.short_name for state in edge.not_from)
            assert f"{edge.source} --> {edge.target} : {edge.fires}<br/>not from {names}<br/>" in text
    assert "executing --> poisoned : drain_failed<br/>not from settled<br/>finish.synchronize<br/>abandon.sync" in text


def test_mermaid_draws_groups_states_triggers_guards_and_hooks() -> None:
    """Ids are underscored, groups are composite states, and every name of the table stands in the text."""
    text = export("mermaid")
    assert isinstance(text, str)
    assert text.startswith("stateDiagram-v2\n    [*] --> admitted\n")
    assert "state executing {" in text
    assert 'state "in_flight" as finishing_in_flight' in text
    assert "released --> [*]" in text
    for row in TRANSITIONS:
        assert row.trigger in text
        for named in (*row.guards, *row.unless, *row.hooks):
            assert named.name in text
    assert "prepare_prefill<br/>enqueue<br/>upload_base_rows<br/>upload_draft_rows<br/>zero_recurrent" in text
    assert "settle_draft<br/>only eagle, shared_kv<br/>prove" in text
    assert "executing --> released : finish, abandon<br/>prove not from settled" in text
    assert "complete_decode<br/>[unless has_captures]" in text
    loops = {edge.target for edge in EDGES if edge.source == edge.target.value}
    plain = [edge for edge in EDGES if edge.source != edge.target.value]
    assert text.count(" --> ") == len(plain) + len(loops) + len(("start", "end"))


def test_mermaid_keeps_to_characters_that_its_labels_take() -> None:
    """No colon, semicolon, hash, or quote in a label, balanced braces, plain ASCII: what Mermaid's grammar trips over."""
    for view in VIEWS:
        text = export("mermaid", view=view)
        assert isinstance(text, str)
        assert text.isascii()
        assert text.count("{") == text.count("}") == len(GROUPS)
        labels = [line.partition(" : ")[2] for line in text.splitlines() if " --> " in line]
        assert not any(set(label) & set(':;#"{}') for label in labels)


def test_dot_draws_hooks_in_order_and_marks_them() -> None:
    """An edge's table lists triggers, guards, and hooks in order below what they do."""
    text = export("dot")
    assert isinstance(text, str)
    label = next(line for line in text.splitlines() if "compact<" in line and "unless" not in line)
    name = label.split()[0]
    assert f"executing_compacting -> {name} " in text
    assert f"{name} -> executing_settled " in text
    order = ["compact<", "publications_settled", "has_survivors", "enqueue<", "compact_base_rows", "compact_draft_rows"]
    order += ["compact_base_slots", "compact_draft_slots", "prove<"]
    positions = [label.index(word) for word in order]
    assert positions == sorted(positions)
    assert "subgraph cluster_executing" in text
    assert "ltail=cluster_executing" in text


def test_json_holds_every_row_unmerged() -> None:
    """The JSON view is the table: states with phases, rows with guards, hooks with kind, moment and fault point."""
    content = json.loads(export("json"))
    assert [state["name"] for state in content["states"]] == [state.value for state in State]
    assert len(content["transitions"]) == len(TRANSITIONS)
    compact = next(row for row in content["transitions"] if row["target"] == "finishing.settled" and row["hooks"])
    assert compact["trigger"] == "compact"
    assert [guard["name"] for guard in compact["guards"]] == ["publications_settled"]
    assert compact["unless"] == [{"name": "has_survivors", "refusal": "a sequence survives the compaction"}]
    assert [hook["does"] for hook in compact["hooks"]] == ["enqueue"] * 4 + ["prove"]
    assert compact["hooks"][1]["fault_point"] == "compact_batch.upload_rows.draft"
    assert compact["hooks"][1]["deployments"] == ["eagle", "hybrid_mtp"]
    assert compact["hooks"][1]["runs"] == "before the target is entered"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{row_id(fault.transition)}-{fault.hook.name}")
def test_a_fault_leads_where_the_fault_view_says(fault) -> None:
    """Failing each hook of each row on the machine ends in the state that the derived view names."""
    subject = taking(fault.transition, **{fault.hook.name: RuntimeError("fault")})
    with pytest.raises((DeviceError, DrainFailed)):
        fire(subject, fault.transition.trigger)
    assert subject.state is fault.leads_to
    expected = State.POISONED if fault.hook.kind is HookKind.PROVE else State.FINISHING_IN_FLIGHT
    assert fault.leads_to is expected
    assert bool(fault.fires) == (fault.transition.source is not State.POISONED)


EXPECTED_POINTS = {
    Kind.VANILLA: 10,
    Kind.PURE_RECURRENT: 12,
    Kind.HYBRID: 15,
    Kind.EAGLE: 16,
    Kind.HYBRID_MTP: 21,
    Kind.SHARED_KV: 11,
}


@pytest.mark.parametrize("kind", Kind)
def test_fault_points_of_a_deployment_are_named_once_and_stay(kind: Kind) -> None:
    """Names are unique and as many as each kind of deployment has; they are part of the interface."""
    points = fault_points(kind)
    assert len(points) == len(set(points)) == EXPECTED_POINTS[kind]
    assert {"prepare_prefill.reset_lengths", "compact_batch.synchronize", "finish.synchronize"} <= set(points)
    assert ("prepare_prefill.upload_rows.draft" in points) == (kind in {Kind.EAGLE, Kind.HYBRID_MTP})
    assert ("prepare_prefill.upload_rows" in points) == (kind is not Kind.PURE_RECURRENT)
    assert ("begin_batch_compaction.synchronize" in points) == (kind in {Kind.EAGLE, Kind.SHARED_KV})
    assert ("complete_decode_step.capture" in points) == (kind in {Kind.PURE_RECURRENT, Kind.HYBRID})
    assert any("boundary" in point for point in points) == (kind is Kind.HYBRID_MTP)


def test_fault_points_refuse_what_is_no_kind() -> None:
    """A string or an integer instead of a kind is the caller's mistake."""
    for wrong in ("vanilla", 0, None):
        with pytest.raises(ContractError, match="ContextCacheDeploymentKind"):
            fault_points(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("form", TEXTS)
def test_a_file_holds_what_was_returned(form, view, tmp_path: Path) -> None:
    """With a path the same content is written there, and nothing else is."""
    path = tmp_path / f"picture.{form}"
    content = export(form, path, view=view)
    assert path.read_text() == content == export(form, str(path), view=view)
    assert list(tmp_path.iterdir()) == [path]


def test_wrong_arguments_are_refused_and_write_nothing(tmp_path: Path) -> None:
    """An unknown format or view, or a picture's suffix for something else, is named; no file appears."""
    for form, name, view, said in (
        ("gif", "x.gif", "lifecycle", "mermaid, dot, json, html, svg, png"),
        ("json", "x.json", "hooks", "lifecycle, faults"),
        ("mermaid", "x.svg", "lifecycle", "another suffix"),
        ("svg", "x.PNG", "lifecycle", "another suffix"),
        ("json", "x.html", "lifecycle", "another suffix"),
    ):
        with pytest.raises(ContractError, match=said):
            export(form, tmp_path / name, view=view)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@needs_graphviz
@pytest.mark.parametrize("view", VIEWS)
def test_pictures_are_what_their_suffix_says(view, tmp_path: Path) -> None:
    """SVG is text that begins as SVG, PNG bytes that begin as PNG, and both hold more than an empty page."""
    svg = export("svg", tmp_path / "a.svg", view=view)
    png = export("png", tmp_path / "a.png", view=view)
    assert isinstance(svg, str)
    assert "<svg" in svg[:1024]
    assert "prefilling" in svg
    assert isinstance(png, bytes)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 20_000
    assert (tmp_path / "a.png").read_bytes() == png


@needs_graphviz
@pytest.mark.parametrize("view", VIEWS)
def test_no_edge_runs_through_a_label(view) -> None:
    """As Graphviz lays it out, an edge touches the text of no other one."""
    command = [str(shutil.which("dot")), "-Tplain"]
    plain = subprocess.run(command, input=export("dot", view=view), capture_output=True, text=True, check=True)
    lines = [line.split() for line in plain.stdout.splitlines()]
    boxes = {words[1]: [float(word) for word in words[2:6]] for words in lines if words[0] == "node"}
    labels = {name: box for name, box in boxes.items() if name.startswith("label_")}
    assert len(labels) == sum(len(arrow.labels) for arrow in arrows(draw(LIFECYCLES["request"]), view))
    for words in lines:
        if words[0] != "edge":
            continue
        numbers = np.array(words[4 : 4 + 2 * int(words[3])], float).reshape(-1, 2)
        for start in range(0, len(numbers) - 1, 3):
            t = np.linspace(0, 1, 50)[:, None]
            a, b, c, d = numbers[start : start + 4]
            curve = a * (1 - t) ** 3 + 3 * b * t * (1 - t) ** 2 + 3 * c * t**2 * (1 - t) + d * t**3
            for name, (x, y, width, height) in labels.items():
                inside = (abs(curve[:, 0] - x) < 0.45 * width) & (abs(curve[:, 1] - y) < 0.45 * height)
                assert name in words[1:3] or not inside.any(), (words[1:3], name)


@pytest.fixture
def fake_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A program `dot` that behaves as told, alone on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(script: str) -> None:
        program = folder / "dot"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", str(folder))
    return install


def test_without_graphviz_the_error_names_the_remedy(fake_dot, tmp_path: Path) -> None:
    """Without `dot`, svg and png say what to install and what works instead; text formats still work."""
    for form in ("svg", "png"):
        with pytest.raises(GraphvizError, match="apt-get install") as caught:
            export(form, tmp_path / f"a.{form}")
        assert isinstance(caught.value, ContextCacheError)
        assert not (tmp_path / f"a.{form}").exists()
    for form in TEXTS:
        assert export(form)


def test_what_graphviz_wrote_is_looked_at(fake_dot, tmp_path: Path) -> None:
    """A `dot` that fails, or that succeeds with something else than a picture, is an error; no file appears."""
    for script, said in (
        ("echo broken >&2; exit 3", "exit status 3.*broken"),
        ("echo stateDiagram-v2", "did not write"),
        (":", "0 bytes"),
    ):
        fake_dot(script)
        for form in ("svg", "png"):
            with pytest.raises(GraphvizError, match=said):
                export(form, tmp_path / f"a.{form}")
            assert not (tmp_path / f"a.{form}").exists()


def test_what_graphviz_drew_is_returned(fake_dot, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """SVG comes back as text and PNG as bytes, as `dot` wrote them; the command puts the bytes on standard output."""
    fake_dot("""if [ "$1" = -Tsvg ]; then printf '<svg>drawn</svg>'; else printf '\\211PNG\\r\\n\\032\\ndrawn'; fi""")
    assert export("svg", tmp_path / "a.svg") == "<svg>drawn</svg>"
    drawn = b"\x89PNG\r\n\x1a\ndrawn"
    assert export("png", tmp_path / "a.png") == drawn == (tmp_path / "a.png").read_bytes()
    assert main(["diagram", "--format", "png"]) == 0
    assert capfdbinary.readouterr().out == drawn


def test_a_dot_that_does_not_start_is_an_error(fake_dot, tmp_path: Path) -> None:
    """A broken program is told from a bad picture: the system's own reason is in the message."""
    fake_dot("")
    program = tmp_path / "bin" / "dot"
    program.write_text("#!/no/such/interpreter\n")
    with pytest.raises(GraphvizError, match=r"could not draw svg: .*No such file"):
        export("svg")


def test_formats_and_views_are_listed_for_callers() -> None:
    """`FORMATS` and `VIEWS` name everything that `export` takes."""
    for form in FORMATS:
        for view in VIEWS:
            with suppress(GraphvizError):
                assert export(form, view=view)
