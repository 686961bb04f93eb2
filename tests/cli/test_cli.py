"""The command line, as a shell sees it: output, exit status, closed pipes, broken dependencies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctxcache.cli import main
from ctxcache.fsm import export, fault_groups, fault_points
from ctxcache.ids import ContextCacheDeploymentKind as Kind

ROOT = Path(__file__).resolve().parents[2]


COMMAND = [sys.executable, "-m", "ctxcache"]


def ctxcache(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run the command in a process of its own."""
    return shell([*COMMAND, *arguments], **options)


def shell(command: list[str], **options) -> subprocess.CompletedProcess:
    """Run a command and keep what it prints."""
    chosen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run(command, timeout=120, check=False, **chosen)


def test_diagram_prints_mermaid_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """`ctxcache diagram` prints what `export("mermaid")` returns, and nothing else."""
    assert main(["diagram"]) == 0
    assert capsys.readouterr() == (export("mermaid"), "")


@pytest.mark.parametrize("view", ["lifecycle", "faults"])
@pytest.mark.parametrize("form", ["mermaid", "dot", "json"])
def test_diagram_prints_each_text_format_of_each_view(form, view, capsys: pytest.CaptureFixture[str]) -> None:
    """`--format` and `--view` choose what is printed."""
    assert main(["diagram", "--format", form, "--view", view]) == 0
    assert capsys.readouterr().out == export(form, view=view)


def test_every_command_has_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` of every command prints one JSON document."""
    assert main(["diagram", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["initial"] == "admitted"
    assert main(["faults", "--list", "--kind", "eagle", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [point["fault_point"] for point in listed["eagle"]] == list(fault_points(Kind.EAGLE))
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["broken"] == bool(status)
    assert {finding["name"] for finding in report["findings"]} >= {"numpy", "numba", "driver", "device", "numba cache"}


def test_diagram_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--output` writes the file and says so, with its size."""
    path = tmp_path / "machine.dot"
    assert main(["diagram", "--format", "dot", "--output", str(path)]) == 0
    assert path.read_text() == export("dot")
    assert capsys.readouterr().out == f"wrote {path} (dot, {path.stat().st_size} bytes)\n"


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_png_goes_to_a_pipe_as_bytes() -> None:
    """Without `--output` a picture's bytes reach standard output untouched."""
    done = ctxcache("diagram", "--format", "png", text=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"\x89PNG\r\n\x1a\n")


def test_png_is_not_written_to_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of a picture would garble a terminal: refused with the remedy, status 2."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["diagram", "--format", "png"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--output FILE" in captured.err


def test_faults_lists_every_kind_or_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Without `--kind` all six kinds are listed; with it one, every point with where it leads."""
    assert main(["faults", "--list"]) == 0
    every = capsys.readouterr().out
    for group in fault_groups(Kind):
        assert f"{group.name}: {len(group.points)} fault points\n" in every
    assert main(["faults", "--list", "--kind", "VANILLA"]) == 0
    lines, added = (block.splitlines() for block in capsys.readouterr().out.split("\n\n"))
    assert [line.split()[0] for line in lines[1:]] == list(fault_points(Kind.VANILLA))
    assert {line.split()[0] for line in (*lines[1:], *added[1:])} == set(
        fault_points(Kind.VANILLA, page_sanitizer=True)
    )
    assert lines[1].split()[1:] == ["enqueue", "leads", "to", "finishing.in_flight"]
    assert lines[-1].split()[1:] == ["prove", "leads", "to", "poisoned"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["drive"], "invalid choice: 'drive'"),
        (["diagram", "--format", "gif"], "invalid choice: 'gif'"),
        (["diagram", "--json", "--format", "dot"], "not allowed with"),
        (["faults", "--kind", "mamba"], "invalid choice: 'mamba'"),
        (["faults", "--sweep"], "unrecognized arguments"),
        (["diagram", "--format", "dot", "--output", "x.svg"], "another suffix"),
    ],
)
def test_wrong_arguments_are_status_2_with_a_reason(arguments, said, capsys, tmp_path, monkeypatch) -> None:
    """What the caller got wrong is named on standard error, nothing is printed or written, the status is 2."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_status_1(tmp_path: Path, monkeypatch, capsys) -> None:
    """No folder, a folder for a file, no permission: told on standard error with the remedy; the status is 1."""
    file = tmp_path / "x.mmd"
    for output, said in ((tmp_path / "absent" / "x.mmd", "make it first"), (tmp_path, "name a file in it")):
        assert main(["diagram", "--output", str(output)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("ctxcache: error: ")
        assert str(output) in captured.err
        assert said in captured.err
    monkeypatch.setattr("os.access", lambda path, mode: False)  # whoever runs the tests may be allowed everything
    assert main(["diagram", "--output", str(file)]) == 1
    assert "permission is lacking" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_graphviz_is_status_1_with_the_remedy(tmp_path: Path, monkeypatch, capsys) -> None:
    """Without `dot` a picture is status 1, the message says what to install, and no file appears."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["diagram", "--format", "svg", "--output", str(tmp_path / "x.svg")]) == 1
    assert "install it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [["diagram"], ["faults", "--list"], ["doctor"], ["faults", "--list", "--json"], ["--help"]]
)
def test_a_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    """A reader that has gone away is no error: nothing on standard error, status 0."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = ctxcache(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell closes the stream")
def test_closed_standard_streams_do_no_harm() -> None:
    """With standard output or error closed by the shell, commands still end with their status."""
    script = f'"{sys.executable}" -m ctxcache diagram >&- 2>&- && "{sys.executable}" -m ctxcache faults --list >&-'
    done = shell(["/bin/sh", "-c", script])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_status_1() -> None:
    """Output that cannot be written is an error with a reason, told once."""
    with Path("/dev/full").open("w") as full:
        done = ctxcache("diagram", stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("ctxcache: error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["alone", "--help"])
def test_help_lists_every_command_and_is_status_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`ctxcache` alone is a question, not a mistake: as with `--help`, each command is named on standard output."""
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for command in ("diagram", "faults", "simulate", "bench", "doctor", "warmup"):
        assert f"\n    {command} " in captured.out


def test_the_version_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints one."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ctxcache ")


@pytest.mark.parametrize("simulator", ["0", "1"])
def test_doctor_never_fails_on_a_machine_without_a_gpu(simulator: str) -> None:
    """Whatever the simulator's variable says, the doctor prints findings and a verdict, without a traceback."""
    done = ctxcache("doctor", env={**os.environ, "NUMBA_ENABLE_CUDASIM": simulator})
    assert done.returncode in {0, 1}
    assert done.stderr == ""
    assert "numpy" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(".")


@pytest.mark.parametrize("package", ["numba", "numpy", "transitions"])
@pytest.mark.parametrize("command", ["doctor", "diagram"])
def test_a_dependency_that_does_not_import_is_named_without_a_traceback(
    package: str, command: str, tmp_path: Path
) -> None:
    """The doctor says which dependency is broken and why; a command that needs it says the same and fails."""
    (tmp_path / f"{package}.py").write_text("raise ImportError('made for another planet')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = ctxcache(command, env={**os.environ, "PYTHONPATH": path})
    assert "Traceback" not in done.stderr
    if command == "diagram" and package != "transitions":
        assert (done.returncode, done.stderr) == (0, "")  # drawing needs neither
        return
    assert done.returncode == 1
    assert f"To mend: {package}" in done.stdout.splitlines()[-1] or package == "numpy"
    assert "does not import: made for another planet" in done.stdout


def test_a_name_that_cannot_be_imported_says_where_to_look(tmp_path: Path) -> None:
    """Importing the package works without numba; a public name then says why not, and names the doctor."""
    (tmp_path / "numba.py").write_text("raise ImportError('made for another planet')\n")
    code = "import ctxcache; print(hasattr(ctxcache, 'nonsense')); from ctxcache import KVPageTable"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = shell([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    assert (done.returncode, done.stdout) == (1, "False\n")
    last = done.stderr.splitlines()[-1]
    assert "KVPageTable cannot be imported (made for another planet)" in last
    assert "ctxcache doctor" in last
