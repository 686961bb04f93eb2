"""What the command line does where the process around it goes wrong: closed streams, interrupts, broken imports."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import runpy
import sys
from pathlib import Path

import pytest

import ctxcache
from ctxcache.cli import main
from ctxcache.fsm import export


def test_the_package_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m ctxcache` takes the arguments of the process and ends with the command's status."""
    for arguments, status in ((["faults", "--list", "--kind", "vanilla"], 0), (["faults", "--kind", "mamba"], 2)):
        monkeypatch.setattr(sys, "argv", ["ctxcache", *arguments])
        with pytest.raises(SystemExit) as end:
            # By its path: where the package is installed pytest loads it by a hook that `runpy` cannot ask for a module.
            runpy.run_path(str(Path(ctxcache.__file__).with_name("__main__.py")), run_name="__main__")
        assert end.value.code == status
    assert capsys.readouterr().out.startswith("vanilla: ")


@pytest.mark.parametrize("command", [["doctor", "--json"], ["faults", "--list", "--json"]])
def test_a_broken_dependency_turns_every_command_into_the_doctor(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Findings on standard output, status 1; a command that was not the doctor says first why it did not run."""
    monkeypatch.setitem(sys.modules, "ctxcache.cli.program", None)
    monkeypatch.setattr(sys, "argv", ["ctxcache", *command])
    assert main() == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"]
    if command[0] == "doctor":
        assert captured.err == ""
    else:
        assert captured.err.startswith("ctxcache: error: a dependency does not import: ")


def test_without_numba_a_public_name_says_why_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package imports; its own names raise `ImportError` with the cause and the doctor, others `AttributeError`."""
    monkeypatch.setitem(sys.modules, "ctxcache.coordinator", None)
    spec = importlib.util.spec_from_file_location("ctxcache_without_numba", ctxcache.__file__)
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    assert package.__version__ == ctxcache.__version__
    with pytest.raises(ImportError, match=r"KVPageTable cannot be imported \(.*ctxcache.coordinator.*ctxcache doctor"):
        _ = package.KVPageTable
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = package.nonsense


def test_a_reader_that_has_gone_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `| head` does: status 0, nothing on standard error, and nothing left that fails at exit."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["diagram"]) == 0
        stream.write("goes nowhere")
        stream.flush()
    assert capsys.readouterr().err == ""


def test_a_disk_that_is_full_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is told, also where standard output has no descriptor."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["diagram"]) == 1
    assert capsys.readouterr().err == "ctxcache: error: [Errno 28] No space left on device\n"


def test_closed_streams_are_stood_in_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python leaves `None` where the shell closed a stream; commands work all the same."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    path = tmp_path / "machine.mmd"
    assert main(["diagram"]) == 0
    assert main(["diagram", "--output", str(path)]) == 0
    sys.stdout.close()
    sys.stderr.close()
    assert path.read_text() == export("mermaid")


def test_an_interrupt_ends_a_long_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is the shell's for an interrupt."""

    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ctxcache.cli.simulate.simulate", interrupted)
    assert main(["simulate", "--steps", "10"]) == 130
    assert capsys.readouterr() == ("", "")
