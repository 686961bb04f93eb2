"""The pages say what is: examples run and print what they claim, links lead somewhere, generated pages are fresh."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
EXAMPLES = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")


def load_generator():
    """Import scripts/gen_docs.py anew."""
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts" / "gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "least"), [("README.md", 2), ("docs/guide.md", 9)])
def test_examples_run_and_print_what_the_page_shows(page: str, least: int) -> None:
    """Every Python block of the page runs, in order, and prints exactly the text block behind it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    examples = list(EXAMPLES.finditer(text))
    assert len(examples) == text.count("```python") >= least
    names: dict[str, object] = {"__name__": "example"}
    for example in examples:
        line = text.count("\n", 0, example.start("code")) + 1
        code = compile("\n" * (line - 1) + example["code"], str(ROOT / page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)  # noqa: S102 - the page's own example
        assert printed.getvalue() == (example["output"] or ""), f"{page}, line {line}"


def test_generated_pages_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    """`scripts/gen_docs.py --check` finds nothing to write: every generated page is what the code says now."""
    status = load_generator().main(["--check"])
    assert (status, capsys.readouterr().err) == (0, "")


def test_a_stale_page_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page that differs from the code, or is missing, is status 1 with its name, and `--check` writes nothing."""
    generator = load_generator()
    generator.ROOT = tmp_path
    generator.PAGES = {"fresh.md": lambda: "a\n", "stale.md": lambda: "b\n", "missing.md": lambda: "c\n"}
    (tmp_path / "fresh.md").write_text("a\n")
    (tmp_path / "stale.md").write_text("old\n")
    assert generator.main(["--check"]) == 1
    assert "stale.md, missing.md" in capsys.readouterr().err
    assert (tmp_path / "stale.md").read_text() == "old\n"
    assert not (tmp_path / "missing.md").exists()
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of every page names a file of the repository, and its anchor a heading there."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_the_changelog_begins_with_this_version() -> None:
    """The newest heading of the changelog is the version that pyproject.toml declares."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0].split()[0] == version


def imports_at_start(path: Path) -> Iterator[str]:
    """Full names of what a module imports when it is imported itself: not inside functions, not for type checking."""
    pending: list[ast.AST] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names
            if not all(name in MODULES for name in names):
                yield str(node.module)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def module_name(path: Path) -> str:
    """Name a file of the package as an import statement does."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in (ROOT / "ctxcache").rglob("*.py")}


def test_only_the_device_imports_cuda_and_only_the_lifecycle_imports_transitions() -> None:
    """`numba.cuda` is imported under ctxcache/device alone, `transitions` under ctxcache/fsm alone; anywhere in a file."""
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {
            imported
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for imported in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [f"{node.module}.{alias.name}" for alias in node.names]
            )
        }
        if any(imported.startswith("numba.cuda") for imported in found):
            assert name.startswith("ctxcache.device"), name
        if any(imported.split(".")[0] == "transitions" for imported in found):
            assert name.startswith("ctxcache.fsm"), name


def test_imports_point_down_only() -> None:
    """No module imports, directly or through others, a module that imports it."""
    below = {
        name: {imported for imported in imports_at_start(path) if imported in MODULES} - {name}
        for name, path in MODULES.items()
    }
    finished: set[str] = set()

    def descend(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name in finished:
            return
        for imported in sorted(below[name]):
            descend(imported, (*above, name))
        finished.add(name)

    for name in sorted(below):
        descend(name, ())
