#!/usr/bin/env python3
"""Writes the pages of docs/ that are made from the code, or checks that they are up to date.

.venv/bin/python scripts/gen_docs.py            write
.venv/bin/python scripts/gen_docs.py --check    exit 1 and name every page that differs
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ctxcache.fsm import (  # noqa: E402 - the repository's own package, installed or not
    FAULTS,
    LIFECYCLES,
    TRANSITIONS,
    FaultPoint,
    HookKind,
    LifecycleState,
    State,
    export,
    fault_points,
)
from ctxcache.fsm.export.drawing import draw, say_guards, say_kinds  # noqa: E402
from ctxcache.fsm.export.edges import Edge, edges  # noqa: E402
from ctxcache.fsm.export.picture import View  # noqa: E402
from ctxcache.ids import ContextCacheDeploymentKind  # noqa: E402

HEAD = """# The lifecycle of a request

<!-- Made by scripts/gen_docs.py from ctxcache/fsm; edit those, not this page. -->

A request is one batch of sequences, from `begin_request` until every lease is released. Its state changes only through
the state machine below, which `ctxcache/fsm/table.py` declares as data. The machine, the pictures, this page and the
list of fault points are all made from that one table. `ctxcache diagram` prints the picture in other formats, of all
deployments or of one kind (`--kind`), with what has changed since an earlier version (`--diff`), and as one page for
reviewers (`--format html`).
"""

HOW_TO_READ = """How to read it:

- Amber states have device work that was enqueued and not proven complete; green ones have none. There is no second flag
  for that: it is read off the state.
- An arrow that leaves a group stands for the same row from each of its states. *not from* names states of the group
  that do not have it, or whose row does not have the hook before it.
- Text in brackets is a guard, *unless* stands before one that must not hold; *only* names the kinds of deployment in
  which a transition can happen.
- *enqueue* lists the hooks that put work on the stream, in order; *prove* is the hook that drains the stream.
- `device_failed` and `drain_failed` are fired by the machine itself, after a hook has failed. Callers never fire them.
- A request that has no more work to do leaves from wherever it is: `finish` and `abandon` drain first where work is
  pending, and release nothing before that drain has succeeded.
"""

HOOKS = """A transition that proves runs its hooks **before** it enters its target, because the target claims that the work is
complete. One that only enqueues runs them **after**, so that whatever was enqueued before a failure is already accounted
for as pending. `publish_boundary` proves its own capture, but the runtime's prefill stays pending. A hook touches the
device only where the deployment has what it moves: the last table says which has what.
"""

FAILURES = """Every hook touches the device, so every hook can fail. The name of its fault point is `<operation>.<op>`, with `.draft`
behind it where the draft model's resources are touched. `ctxcache.testing.fault_points(kind)` returns these names, and
`ctxcache.testing.FaultInjector` makes them fail.

- An **enqueue** hook that raises: `device_failed` fires, and the operation raises `DeviceError` with the cause. The
  request can only be finished or abandoned, and both drain first.
- A **prove** hook that raises, or returns anything but `None` or 0: `drain_failed` fires, the operation returns `POISONED`,
  and the request is quarantined: its pages stay its own, because the GPU may still write them.
- A failing drain in `shutdown` changes nothing. It can be tried again.
- An interrupt (`KeyboardInterrupt` and the like) gets the same care, and is then re-raised.
- A guard that refuses, or a trigger that the state does not have, raises `ContractError`; nothing has changed.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def code(names: Iterable[str], separator: str = ", ") -> str:
    """Write names as code."""
    return separator.join(f"`{name}`" for name in names)


def states() -> str:
    """List every state with its phase."""
    rows = [
        [
            f"`{state.value}`",
            "none" if state.phase is None else f"`{state.phase.name}`",
            "unproven" if state is State.POISONED else "pending" if state.pending else "none",
            state.description,
        ]
        for state in State
    ]
    return table(["state", "`handle.phase`", "device work", "meaning"], rows)


def _hooks(edge: Edge) -> str:
    said = []
    for found in edge.hooks:
        hook = found.drawn.hook
        name = "prove" if hook.kind is HookKind.PROVE else f"enqueue `{hook.name}`"
        if found.not_from:
            name += f" (not from {code(state.value for state in found.not_from)})"
        said.append(name)
    return "; ".join(said) or "none"


def transitions() -> str:
    """List every transition, merged as in the picture."""
    header = ["trigger", "operation", "from", "to", "guards", "hooks, in order", "deployments"]
    rows = []
    for edge in edges(draw(LIFECYCLES["request"])):
        operations = dict.fromkeys(drawn.row.operation for drawn in edge.rows if drawn.row.operation)
        rows.append(
            [
                code(edge.triggers),
                code(operations) or "the machine itself",
                code((state.value for state in edge.sources), "<br>"),
                f"`{edge.target.value}`",
                ", ".join(map(_guard, say_guards(edge.rows[0].row))),
                _hooks(edge),
                say_kinds(edge.kinds),
            ]
        )
    return table(header, rows)


def _guard(said: str) -> str:
    unless, _, name = said.rpartition(" ")
    return f"{unless} `{name}`".strip()


def guards() -> str:
    """List what a refused caller is told, by the guard that refuses."""
    found = dict.fromkeys(guard for row in TRANSITIONS for guard in (*row.guards, *row.unless))
    rows = ([f"`{guard.name}`", guard.refusal, guard.refusal_unless] for guard in found)
    return table(["guard", "refused where it does not hold", "refused under *unless*, where it holds"], rows)


def faults() -> str:
    """List every fault point with where it leads."""
    gathered: dict[tuple[str, str, LifecycleState], list[FaultPoint]] = {}
    for fault in FAULTS:
        gathered.setdefault((fault.name, fault.fires, fault.leads_to), []).append(fault)
    rows = []
    for (name, fires, leads_to), found in gathered.items():
        kinds = frozenset().union(*(fault.kinds for fault in found))
        rows.append(
            [
                f"`{name}`",
                code(dict.fromkeys(fault.transition.trigger for fault in found)),
                code(dict.fromkeys(fault.transition.source.value for fault in found), "<br>"),
                found[0].hook.kind.value,
                f"`{fires}`" if fires else "nothing",
                f"`{leads_to.value}`",
                say_kinds(kinds),
            ]
        )
    return table(["fault point", "transition", "from", "does", "fires", "leads to", "deployments"], rows)


def kinds() -> str:
    """Say which deployment has which fault point."""
    every = tuple(ContextCacheDeploymentKind)
    names = dict.fromkeys(fault.name for fault in FAULTS)
    points = {kind: fault_points(kind) for kind in every}
    rows = [[f"`{name}`", *("x" if name in points[kind] else "" for kind in every)] for name in names]
    rows.append(["number", *(str(len(points[kind])) for kind in every)])
    return table(["fault point", *(f"`{kind.name}`" for kind in every)], rows)


def mermaid(view: View) -> str:
    """Write one view as a fenced block that forges draw."""
    return f"```mermaid\n{export('mermaid', view=view)!s}```\n"


def lifecycle_page() -> str:
    """Make docs/lifecycle.md."""
    parts = [
        HEAD,
        mermaid("lifecycle"),
        HOW_TO_READ,
        "## States\n",
        states(),
        "## Transitions\n",
        HOOKS,
        transitions(),
        "## Guards\n",
        guards(),
        "## When a hook fails\n",
        FAILURES,
        mermaid("faults"),
        faults(),
        "## Fault points of each kind of deployment\n",
        kinds(),
    ]
    return "\n".join(parts)


MODULES_BEGIN = "<!-- modules: "
MODULES_END = "<!-- end of modules -->"


def modules() -> str:
    """List every module of the package by folder, with the first sentence of its docstring."""
    package = ROOT / "ctxcache"
    rows = []
    for folder in sorted({path.parent for path in package.rglob("__init__.py")}):
        for path in sorted(folder.glob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            summary = " ".join(text.partition("\n\n")[0].split())
            rows.append([f"`{path.relative_to(package).as_posix()}`", summary])
    return table(["module", "what it holds"], rows)


def architecture_page() -> str:
    """Make docs/architecture.md: the page as it is, with its table of modules made anew."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    before, begin, rest = text.partition(MODULES_BEGIN)
    hint, _, rest = rest.partition("\n")
    _, end, after = rest.partition(MODULES_END)
    if not (begin and end):
        raise SystemExit(f"docs/architecture.md lacks {MODULES_BEGIN!r} or {MODULES_END!r}")
    return f"{before}{begin}{hint}\n\n{modules()}\n{end}{after}"


SCENARIOS_HEAD = """# Scenarios from public bug reports

<!-- Made by scripts/gen_docs.py from the tests; a test carries its scenario's number in its name. -->

Twenty-seven ways in which prefix caches, page managers, state machines and CUDA programs were reported to fail, and where
this library is held to the right outcome. The rest of each *kind* of fault is what the fault sweep, the simulation and the
model-based tests are for; see [Test your runtime](testing.md).
"""

SCENARIOS = {
    1: "a prompt that is cached whole, and a multiple of the page long",
    2: "growth over a page's edge, and the longest admissible prompt",
    3: "an adapter reloaded under its name",
    4: "equal blocks behind different first images",
    5: "built collisions, the length in the key, one key in several processes",
    6: "two equal prompts in one batch",
    7: "a wrong progress report",
    8: "a draft's state at a block's edge depends on the token that follows",
    9: "an index entry that outlives its page",
    10: "an allocation that fails after hits were pinned",
    11: "one branch is evicted, the shared stem stays",
    12: "finish twice, use after finish",
    13: "an abnormal exit drains before it releases",
    14: "a failed drain, until shutdown proves the device quiet",
    15: "a launch that raises, and one whose error shows at the next synchronise",
    16: "a stored exception, a lost handle, the interpreter's exit",
    17: "a checkpoint is picked by its exact length",
    18: "a cold sequence beside a hit: stale recurrent state",
    19: "a pinned snapshot is no victim; no slot is a skip, not a failure",
    20: "a restore that is left over from another attempt",
    21: "in-place compaction with moves that overlap",
    22: "mappings that no compaction can have",
    23: "a mapping that its caller changes or frees",
    24: "a launch that forgot its stream",
    25: "host memory that a late upload still reads",
    26: "an exception in a callback of the state machine",
    27: "illegal edges, and back doors of the machine",
}

SCENARIO_FILES = {
    21: ("device/test_compaction_maps.py",),
    24: ("device/test_streams.py",),
    25: ("device/test_staging_ring.py", "device/test_staged_uploads.py"),
}
"""Whole files that belong to a scenario beside the tests that carry its number."""

FOUND_HEAD = """## Small inputs that failed

Found in version 0.1.0 by trying to break it (F), in public reports (R), and by using it for the first time (N). Each stands for a
kind of fault, and its tests hold the kind: the input itself, and others like it.
"""

FOUND = {
    "F1": "the keys of a mapping, or a text, taken for tokens",
    "F2": "arithmetic in the width of a caller's scalar",
    "F3": "the secret key in a repr or an error",
    "F4": "a session whose last sequence has left still decodes",
    "F5": "a request looked at while another thread compacts it",
    "F6": "a lookup that hashes for other users' records",
    "F7": "a lookup that walks all records of a recurrent model",
    "F8": "host memory for the longest sequence there could be",
    "F9": "a pool of 2**31 tokens",
    "F10": "masks that are ignored, lengths that lie",
    "F11": "a synchronisation counted that did not happen",
    "F12": "a block left in a forked child",
    "F13": "answers and refusals that contradict each other: what never fits, a disabled cache, a plain batch beside a draft",
    "F14": "invariants of a large cache checked slowly, under the lock",
    "R1": "a sequence longer than the longest",
    "R2": "a checkpoint that all start from is lost for good",
    "R3": "a whole record evicted for one page",
    "R4": "the order of a batch decides what is reused",
    "R5": "drafts end a batch before its sequences are full",
    "R6": "metrics that wait for a device that hangs",
    "N1": "sampled tokens as an array of another library",
    "N2": "a batch fails and nobody says for which sequence",
    "N3": "a wrong identity noticed late and elsewhere",
    "N4": "a refusal that names the step already done",
    "N5": "a minute of compiling without a word",
    "N6": "a picture that says otherwise than the table",
    "N7": "a report without its synchronisation, unseen by the watch",
    "N8": "a stray write that no tool sees",
    "N9": "a fault test that never reaches its point",
    "N10": "a source distribution that lacks what its tests need",
}

FOUND_TEST = re.compile(r"^(?:def|    def) (?P<name>test_(?P<letter>[frn])(?P<number>\d\d)_[a-z0-9_]*)", re.MULTILINE)

SCENARIO_TEST = re.compile(r"^(?:def|    def) (?P<name>test_h(?P<number>\d\d)[a-z0-9_]*)", re.MULTILINE)


def scenarios_page() -> str:
    """Make docs/scenarios.md. A scenario without a test is an error; a small input without one is listed with a dash."""
    tests: dict[int, list[str]] = {number: [] for number in SCENARIOS}
    held: dict[str, list[str]] = {number: [] for number in FOUND}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT / "tests").as_posix()
        for found in SCENARIO_TEST.finditer(text):
            tests[int(found["number"])].append(f"`{name}::{found['name']}`")
        for found in FOUND_TEST.finditer(text):
            held[f"{found['letter'].upper()}{int(found['number'])}"].append(f"`{name}::{found['name']}`")
    for number, names in SCENARIO_FILES.items():
        tests[number] += [f"`{name}` (whole)" for name in names]
    untested = [number for number, names in tests.items() if not names]
    if untested:
        raise SystemExit(f"scenarios without a test: {untested}")
    rows = [[f"H{number:02}", what, "<br>".join(tests[number])] for number, what in SCENARIOS.items()]
    small = [[number, what, "<br>".join(held[number]) or "-"] for number, what in FOUND.items()]
    return "\n".join(
        [
            SCENARIOS_HEAD,
            table(["", "what went wrong elsewhere", "tests, in `tests/`"], rows),
            FOUND_HEAD,
            table(["", "what went wrong here", "tests, in `tests/`"], small),
        ]
    )


PAGES = {
    "docs/architecture.md": architecture_page,
    "docs/lifecycle.md": lifecycle_page,
    "docs/scenarios.md": scenarios_page,
}
"""Every page that is made from the code, in whole or in part, by its path from the repository root."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or check them; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the pages of docs/ that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not up to date")
    options = parser.parse_args(arguments)
    stale = []
    for name, make in PAGES.items():
        path, content = ROOT / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(name)
        if not options.check:
            path.write_text(content, encoding="utf-8")
            print(f"wrote {name}")
    if options.check and stale:
        print(f"not up to date: {', '.join(stale)}; run scripts/gen_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
