"""Run `ctxcache bench host` and the peers' scripts in turns on one core, letter by letter, and judge each run.

    python -m peer_bench DIR                  three runs; exit status 1 when a bound was missed in one of them
    python -m peer_bench DIR --runs 1 --letters be --json FILE

DIR is what the peers' `setup DIR` made. The peers' scripts (`setup`, `run`) are looked for in --peers, in $PEERS, and in
../shared/peers beside the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxcache.cli.bench.host.bounds import DEFAULT, WORKS, Row
from ctxcache.cli.bench.host.measure import environment
from peer_bench.lines import Figure, read_figures
from peer_bench.table import Compared, all_met, compare, show_peers, summarise

ROOT = Path(__file__).resolve().parent.parent.parent
LETTERS = "abcdef"
_LEAVES_SCRIPT = Path(__file__).with_name("sgl_leaves.py")
_SGLANG_STUBS = "IPython torchvision compressed_tensors gguf"  # as the peers' own `run` has them


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; returns the exit status."""
    options = _parser().parse_args(arguments)
    problems = missing(options.dir, options.peers)
    if problems:
        sys.stderr.writelines(f"error: {problem}\n" for problem in problems)
        return 2
    runs: list[list[Compared]] = []
    for number in range(1, options.runs + 1):
        _say(f"run {number} of {options.runs}")
        runs.append(_run_once(options.dir.resolve(), options.peers.resolve(), options.letters, options.core))
        sys.stdout.writelines(f"{line}\n" for line in [*show_peers(runs[-1]), ""])
    table = summarise(runs)
    sys.stdout.writelines(f"{line}\n" for line in table)
    if options.json is not None:
        report = {
            "environment": environment(),
            "runs": [[each.as_dict() for each in run] for run in runs],
            "table": table,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all_met(runs) else 1


def missing(directory: Path, peers: Path) -> list[str]:
    """Say what the peers' side lacks, each with what to do; empty when nothing does."""
    problems = [
        f"there is no {peers / name}; say where the peers' scripts are with --peers or $PEERS"
        for name in ("run", "setup", "benchlib.py")
        if not (peers / name).is_file()
    ]
    if not problems:
        problems = [
            f"there is no {directory / name}; make it with `{peers / 'setup'} {directory}` (minutes, 3 GB)"
            for name in ("venv/bin/python", "vllm_src", "sglang_src")
            if not (directory / name).exists()
        ]
    return problems


def _run_once(directory: Path, peers: Path, letters: str, core: int) -> list[Compared]:
    rows: list[Row] = []
    figures: list[Figure] = []
    rows += _ours([name for name in DEFAULT if not WORKS[name].letter], core)
    for letter in letters:
        rows += _ours([name for name in DEFAULT if WORKS[name].letter == letter], core)
        for command, environment_of in _peer_commands(directory, peers, letter):
            figures += _theirs(command, environment_of, core)
    return compare(sorted(rows, key=lambda row: list(WORKS).index(row.work)), figures)


def _ours(works: Sequence[str], core: int) -> list[Row]:
    chosen = [word for work in works for word in ("--only", work)]
    command = [*_pinned(core), sys.executable, "-m", "ctxcache", "bench", "host", "--json", *chosen]
    environment_of = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment_of, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if done.returncode not in (0, 1):  # 1: a bound was missed, which is judged here
        raise SystemExit(f"error: {' '.join(command)} ended with status {done.returncode}")
    return [Row(**row) for row in json.loads(done.stdout)["rows"]]


def _peer_commands(directory: Path, peers: Path, letter: str) -> list[tuple[list[str], dict[str, str]]]:
    run = str(peers / "run")
    commands: list[tuple[list[str], dict[str, str]]] = [
        (["bash", run, str(directory), "vllm", letter], {}),
        (["bash", run, str(directory), "sgl", "rust", letter], {}),
    ]
    if letter == "e":
        path = os.pathsep.join([str(peers), str(directory / "sglang_src")])
        python = str(directory / "venv/bin/python")
        commands.append(([python, str(_LEAVES_SCRIPT)], {"STUBS": _SGLANG_STUBS, "PYTHONPATH": path}))
    return commands


def _theirs(command: list[str], more: dict[str, str], core: int) -> list[Figure]:
    done = subprocess.run(  # noqa: S603 - the peers' own scripts
        [*_pinned(core), *command],
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("(")]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()
    if done.returncode or not lines:
        _say(f"{' '.join(command)} ended with status {done.returncode} after {len(lines)} figures")
    return read_figures(lines)


def _pinned(core: int) -> list[str]:
    return ["taskset", "-c", str(core)]


def _say(text: str) -> None:
    sys.stdout.write(f"==> {text}\n")
    sys.stdout.flush()


def _parser() -> Any:
    parser = argparse.ArgumentParser(prog="bench-peers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dir", metavar="DIR", type=Path, help="what the peers' `setup DIR` made")
    default = Path(os.environ.get("PEERS", ROOT.parent / "shared" / "peers"))
    parser.add_argument("--peers", type=Path, default=default, help=f"the peers' scripts; default $PEERS, or {default}")
    parser.add_argument("--runs", type=int, default=3, help="default 3")
    parser.add_argument("--letters", default=LETTERS, help="a hash, b hit, c insert, d decode, e evict, f memory")
    parser.add_argument(
        "--core", type=int, default=0, help="both sides run on this one; default 0, as the peers' `run` has"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
