"""A comparison marks what was added, removed and changed since an earlier version, and nothing else, in every format."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxcache.errors import ContractError
from ctxcache.fsm import FORMATS, LIFECYCLES, VIEWS, export
from ctxcache.fsm.export.description import read
from ctxcache.fsm.points import faults_of
from ctxcache.ids import ContextCacheDeploymentKind as Kind

REQUEST = LIFECYCLES["request"]
HAVE_GRAPHVIZ = shutil.which("dot") is not None


def row(content: dict[str, Any], trigger: str, source: str) -> dict[str, Any]:
    """The first transition with that trigger from that state."""
    return next(each for each in content["transitions"] if (each["trigger"], each["source"]) == (trigger, source))


def without_state(content: dict[str, Any]) -> None:
    """The earlier version has no drafting state, and no row that touches it."""
    content["states"] = [state for state in content["states"] if state["name"] != "executing.drafting"]
    content["transitions"] = [
        each for each in content["transitions"] if "executing.drafting" not in (each["source"], each["target"])
    ]


def other_state(content: dict[str, Any]) -> None:
    """The earlier version has a state that is gone, with a way in and a way out that prove."""
    state = {"name": "executing.verifying", "group": "executing", "phase": "EXECUTING"}
    content["states"].insert(5, {**state, "device_work_pending": True, "description": "the draft is verified"})
    hook = {"name": "check", "does": "prove", "runs": "", "deployments": ["eagle"], "fault_point": "verify.synchronize"}
    for trigger, source, target in (
        ("verify", "executing.decoding", "executing.verifying"),
        ("verified", "executing.verifying", "executing.settled"),
    ):
        content["transitions"].insert(
            4,
            {"trigger": trigger, "source": source, "target": target, "operation": "verify", "deployments": ["eagle"]}
            | {"guards": [], "unless": [], "hooks": [hook]},
        )


def pending(content: dict[str, Any]) -> None:
    """Settled counted as pending."""
    next(each for each in content["states"] if each["name"] == "executing.settled")["device_work_pending"] = True


def without_row(content: dict[str, Any]) -> None:
    """No compaction could begin."""
    content["transitions"].remove(row(content, "begin_compaction", "executing.settled"))


def without_hook(content: dict[str, Any]) -> None:
    """A compaction was not proven behind the draft's slots."""
    del row(content, "settle_draft", "executing.drafting")["hooks"][0]


def other_hook(content: dict[str, Any]) -> None:
    """A hook is gone from the middle of a row."""
    gone = {
        "name": "clear_all",
        "does": "enqueue",
        "runs": "",
        "deployments": ["eagle"],
        "fault_point": "prepare_prefill.clear",
    }
    row(content, "prepare_prefill", "admitted")["hooks"].insert(2, gone)


def hook_of_fewer(content: dict[str, Any]) -> None:
    """A hook touched the device in fewer deployments."""
    row(content, "begin_compaction", "executing.settled")["hooks"][0]["deployments"] = ["vanilla"]


def other_order(content: dict[str, Any]) -> None:
    """Hooks ran in another order."""
    row(content, "prepare_prefill", "admitted")["hooks"].reverse()


def other_guard(content: dict[str, Any]) -> None:
    """The negated guard was one of its own, as it was before rows knew `unless`."""
    for each in content["transitions"]:
        if each.pop("unless"):
            each["guards"] = [{"name": "negated", "refusal": "no"}]


def other_target(content: dict[str, Any]) -> None:
    """A compaction led elsewhere."""
    row(content, "begin_compaction", "executing.settled")["target"] = "finishing.in_flight"


# What each leads to: states, transitions, hooks, fault points; of each how many were added, removed and changed.
NOTHING = (0, 0, 0)
DRAFTING = [each for each in REQUEST.transitions if "executing.drafting" in (each.source, each.target)]
HOOKS = sum(len(each.hooks) for each in DRAFTING)
CASES: list[tuple[Callable[[dict[str, Any]], None], list[tuple[int, int, int]]]] = [
    (lambda content: None, [NOTHING, NOTHING, NOTHING, NOTHING]),
    (without_state, [(1, 0, 0), (len(DRAFTING), 0, 0), (HOOKS, 0, 0), (HOOKS, 0, 0)]),
    (other_state, [(0, 1, 0), (0, 2, 0), (0, 2, 0), (0, 2, 0)]),
    (pending, [(0, 0, 1), NOTHING, NOTHING, NOTHING]),
    (without_row, [NOTHING, (1, 0, 0), (1, 0, 0), (1, 0, 0)]),
    (without_hook, [NOTHING, (0, 0, 1), (1, 0, 0), (1, 0, 0)]),
    (other_hook, [NOTHING, (0, 0, 1), (0, 1, 0), (0, 1, 0)]),
    (hook_of_fewer, [NOTHING, (0, 0, 1), (0, 0, 1), (0, 0, 1)]),
    (other_order, [NOTHING, (0, 0, 1), NOTHING, NOTHING]),
    (other_guard, [NOTHING, (0, 0, 3), NOTHING, NOTHING]),
    (other_target, [NOTHING, (1, 1, 0), (1, 1, 0), (1, 1, 0)]),
]
WORDS = ("added", "removed", "changed")


@pytest.fixture
def earlier(tmp_path: Path):
    """Writes an earlier version: the present one, made different."""

    def write(differ: Callable[[dict[str, Any]], None], kind: Kind | None = None, view: str = "lifecycle") -> Path:
        content = json.loads(export("json", kind=kind, view=view))  # type: ignore[arg-type]
        differ(content)
        path = tmp_path / "old.json"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("differ", "expected"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_json_marks_exactly_what_differs(differ, expected, view, earlier) -> None:
    """Every piece has its mark, those that were removed stand there too, and the numbers are the marks' own."""
    content = json.loads(export("json", view=view, diff=earlier(differ, view=view)))
    numbers = [tuple(found[word] for word in WORDS) for found in content["changes"].values()]
    assert numbers == expected
    assert list(content["changes"]) == ["states", "transitions", "hooks", "fault points"]
    hooks = [hook for each in content["transitions"] for hook in each["hooks"]]
    for pieces, number in zip((content["states"], content["transitions"], hooks), numbers, strict=False):
        assert tuple(sum(piece["change"] == word for piece in pieces) for word in WORDS) == number
    if view == "faults":
        assert tuple(sum(fault["change"] == word for fault in content["faults"]) for word in WORDS) == numbers[3]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("differ", "expected"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_format_marks_it(differ, expected, form, earlier) -> None:
    """Pictures and the page differ from plain ones, and say the word where there is text to say it."""
    if form in {"svg", "png"} and not HAVE_GRAPHVIZ:
        pytest.skip("Graphviz is not installed")
    content = export(form, diff=earlier(differ))
    if differ is not CASES[0][0]:
        assert content != export(form, diff=earlier(lambda content: None))
    if form in {"png", "json"}:
        return
    marks = {
        "mermaid": r"\({}\)",
        "dot": "<i>{}</i></font>",
        "html": '<span class="mark {0}">{0}</span>',
        "svg": 'font-style="italic"[^>]*>{}</text>',
    }
    for index, word in enumerate(WORDS):
        drawn = any(numbers[index] for numbers in expected[: 4 if form == "html" else 3])
        assert bool(re.search(marks[form].format(word), str(content))) == drawn


def test_what_was_is_said_beside_what_is(earlier) -> None:
    """A changed piece carries the earlier words, and a removed hook stands where it stood."""
    content = json.loads(export("json", diff=earlier(other_guard)))
    assert row(content, "complete_decode", "executing.decoding")["change"] is None
    changed = [each for each in content["transitions"] if each["change"]]
    assert {each["was"][0] for each in changed} == {"guards negated"}
    hooks = row(json.loads(export("json", diff=earlier(other_hook))), "prepare_prefill", "admitted")["hooks"]
    assert [hook["name"] for hook in hooks[1:4]] == ["upload_draft_rows", "clear_all", "zero_recurrent"]
    assert [hook["change"] for hook in hooks[1:4]] == [None, "removed", None]
    text = str(export("mermaid", diff=earlier(pending)))
    assert 'state "settled (changed)" as executing_settled' in text
    assert "class executing_settled changed" in text
    assert "was device work pending" in str(export("dot", diff=earlier(pending)))


def test_what_an_earlier_version_says_cannot_break_the_text(earlier) -> None:
    """Words of the file reach the pictures harmlessly, whatever characters they have."""

    def differ(content: dict[str, Any]) -> None:
        each = row(content, "compact", "executing.compacting")
        each["guards"][0]["refusal"] = '<b>"x"; {y} # z:\n</script>'

    path = earlier(differ)
    label = next(line for line in str(export("mermaid", diff=path)).splitlines() if "(changed)" in line)
    assert not set(label.partition(" : ")[2].replace("<br/>", "")) & set(':;#"{}<>')
    for form in ("dot", "html"):
        assert "<b>&quot;x&quot;" not in str(export(form, diff=path))  # type: ignore[arg-type]
        assert "&lt;b&gt;&quot;x&quot;" in str(export(form, diff=path))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [None, *Kind])
@pytest.mark.parametrize("view", VIEWS)
def test_what_was_written_is_read_as_it_was(view, kind: Kind | None, earlier) -> None:
    """Rows, states and fault points of a file are those that it was written from."""
    expected = REQUEST if kind is None else REQUEST.of_kind(kind)
    found = read(earlier(lambda content: None, kind=kind, view=view), expected)
    assert found.states == expected.states
    assert [state.phase for state in found.states] == [state.phase for state in expected.states]
    assert [(each.trigger, each.source, each.target, each.operation, each.kinds) for each in found.transitions] == [
        (each.trigger, each.source, each.target, each.operation, each.kinds) for each in expected.transitions
    ]
    points = [
        [(fault.name, fault.kinds, fault.fires, fault.leads_to) for fault in faults_of(each, each.transitions)]
        for each in (found, expected)
    ]
    assert points[0] == points[1]


def test_one_kind_is_compared_with_the_same_kind_of_the_whole(earlier) -> None:
    """With `kind` the earlier version is looked at for that kind alone: what others lost is no change."""
    path = earlier(without_state)
    for kind in Kind:
        content = json.loads(export("json", kind=kind, diff=path))
        assert bool(content["changes"]["states"]["added"]) == (kind in {Kind.EAGLE, Kind.SHARED_KV})


BAD = [
    ("", "it is empty"),
    ("{", "is no JSON"),
    ("[" * 100_000, "is no JSON"),
    ("[]", "it holds no object"),
    ("{}", "'states' is missing"),
    ('{"states": 7, "initial": "a", "transitions": []}', "is not what"),
    ('{"states": [], "initial": "a", "transitions": []}', "begins in 'a'"),
]


@pytest.mark.parametrize(("text", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_file_is_named_with_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    """Whatever is no earlier version is the caller's mistake; the message names the file, and nothing is written."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ContractError, match=said) as caught:
        export("mermaid", tmp_path / "out.mmd", diff=path)
    assert str(path) in str(caught.value)
    assert [found.name for found in tmp_path.iterdir()] == ["bad.json"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trigger", None),
        ("trigger", {"a": 1}),
        ("operation", 7),
        ("guards", [{"name": [1], "refusal": 3}]),
        ("hooks", [{"name": None, "does": "prove", "fault_point": "x.y", "deployments": ["vanilla"]}]),
        ("hooks", 5),
        ("deployments", []),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("form", ["mermaid", "html", "json"])
def test_a_field_of_another_type_is_told(field: str, value: Any, form: Any, tmp_path: Path) -> None:
    """An export that was edited by hand is refused in words, whatever draws it, and never a traceback."""
    content = json.loads(export("json"))
    content["transitions"][-1][field] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ContractError, match="is not what"):
        export(form, diff=path)


def test_what_is_listed_twice_is_told(tmp_path: Path) -> None:
    """A state, or a transition."""
    for name in ("states", "transitions"):
        content = json.loads(export("json"))
        content[name].append(content[name][-1])
        path = tmp_path / "bad.json"
        path.write_text(json.dumps(content))
        with pytest.raises(ContractError, match="listed twice"):
            export("mermaid", diff=path)


def _rename(content: dict[str, Any]) -> None:
    content["machine"] = "batch"


def _lose(content: dict[str, Any]) -> None:
    content["transitions"][0]["target"] = "nowhere"


def _phase(content: dict[str, Any]) -> None:
    content["states"][0]["phase"] = "DREAMING"


def _name(content: dict[str, Any]) -> None:
    content["states"][3]["name"] = 'x" ]; y'


def _kind(content: dict[str, Any]) -> None:
    content["transitions"][0]["deployments"] = ["mamba"]


def _compared(content: dict[str, Any]) -> None:
    content["changes"] = {}


@pytest.mark.parametrize(
    ("differ", "said"),
    [
        (_rename, "the machine 'batch', not 'request'"),
        (_lose, "'prepare_prefill' names the state 'nowhere'"),
        (_phase, "'admitted' has the phase 'DREAMING'"),
        (_name, "has no name of a state"),
        (_kind, "mamba"),
        (_compared, "without --diff"),
    ],
)
def test_a_foreign_file_is_named_with_what_is_wrong(differ, said: str, earlier) -> None:
    """A file that looks like one and is not: of another machine, with names that nothing explains, or a comparison."""
    path = earlier(differ)
    with pytest.raises(ContractError, match=said) as caught:
        export("json", diff=path)
    assert str(path) in str(caught.value)


def test_a_file_of_one_kind_serves_no_other(earlier) -> None:
    """What was written for one deployment kind says nothing of the rest."""
    path = earlier(lambda content: None, kind=Kind.EAGLE)
    for kind in (None, Kind.VANILLA):
        with pytest.raises(ContractError, match="written for the deployment kind eagle alone"):
            export("json", kind=kind, diff=path)


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    """A file that cannot be read is a wrong argument like any other."""
    for path, said in ((tmp_path / "absent.json", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ContractError, match=said):
            export("json", diff=path)
