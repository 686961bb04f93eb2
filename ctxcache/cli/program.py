"""Arguments, exit codes, and how errors are told.

Exit status: 0 done; 1 it could not be done, or the doctor found something to mend; 2 wrong arguments. A reader that
closes the pipe early has what it wanted: that is 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxcache import __version__
from ctxcache.cli import faults
from ctxcache.cli.bench.host.bounds import DEFAULT, WORKS
from ctxcache.cli.bench.verdicts import Benchmark, print_run
from ctxcache.cli.diagram import write_diagram
from ctxcache.cli.doctor import diagnose
from ctxcache.cli.report import check_file
from ctxcache.errors import ContextCacheError, ContractError
from ctxcache.fsm import FORMATS, VIEWS, fault_groups
from ctxcache.fsm.export.diagram import Format
from ctxcache.ids import ContextCacheDeploymentKind

DONE = 0
FAILED = 1
WRONG_ARGUMENTS = 2
INTERRUPTED = 130


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: those of the command line when `None`.

    Returns:
        The exit status.
    """
    _stand_in_for_closed_streams()
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except ContractError as error:
        return _complain(error, WRONG_ARGUMENTS)
    except (ContextCacheError, OSError) as error:
        _discard_output()
        return _complain(error, FAILED)
    return status


def _dispatch(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else WRONG_ARGUMENTS
    command = options.command
    if command is None:
        parser.print_help()
        return DONE
    if command == "diagram":
        chosen: Format = "json" if options.json else options.format
        kind = None if options.kind is None else ContextCacheDeploymentKind(options.kind)
        write_diagram(chosen, options.view, kind, options.diff, options.output)
        return DONE
    if command == "faults":
        return _faults(options)
    if command == "simulate":
        from ctxcache.cli.simulate import run_simulation  # noqa: PLC0415 - the other commands do without

        return DONE if run_simulation(options.seed, options.steps, as_json=options.json) else FAILED
    if command == "bench":
        return _bench(options)
    if command == "warmup":
        from ctxcache.cli.warmup import warm_up  # noqa: PLC0415 - the other commands do without Numba

        warm_up(as_json=options.json)
        return DONE
    return FAILED if diagnose(as_json=options.json) else DONE


def _faults(options: argparse.Namespace) -> int:
    kinds = tuple(ContextCacheDeploymentKind) if options.kind is None else (ContextCacheDeploymentKind(options.kind),)
    groups = fault_groups(kinds)
    if options.list:
        faults.list_points(groups, as_json=options.json)
        return DONE
    if options.run is not None:
        if options.kind is not None:
            raise ContractError("--run names a deployment kind already; leave out --kind")
        return DONE if faults.run_again(options.run, as_json=options.json) else FAILED
    clean = faults.run_sweep(groups, pairs=not options.singles, exhaustive=options.exhaustive, as_json=options.json)
    return DONE if clean else FAILED


def _add_kind(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--kind",
        type=str.lower,
        choices=[kind.value for kind in ContextCacheDeploymentKind],
        help="one deployment kind; default: all",
    )


def _add_trials(subparsers: Any) -> None:
    sweep = subparsers.add_parser(
        "faults",
        help="list the fault points, and fail every one of them",
        description="List every device touch that can be made to fail, and where a request goes when it does; then fail "
        "each in every way, alone and in ordered pairs, on small deployments, with the page sanitizer and without, and check "
        "that nothing is lost. Exit status 1 where something was. Takes minutes; --list takes none.",
    )
    _add_kind(sweep)
    extent = sweep.add_mutually_exclusive_group()
    extent.add_argument("--list", action="store_true", help="only list them")
    extent.add_argument("--singles", action="store_true", help="leave the pairs out")
    extent.add_argument("--exhaustive", action="store_true", help="pairs in every way of failing; takes hours")
    extent.add_argument("--run", metavar="NAME", help="only the one run that a sweep called so, exactly as it was")
    sweep.add_argument("--json", action="store_true", help="print JSON")
    simulation = subparsers.add_parser(
        "simulate",
        help="random lives of every deployment kind",
        description="Random requests, steps, faults and evictions on every kind of deployment, against a plain-Python "
        "manager and an oracle of every byte. The same seed gives the same event log. A failure prints a script that "
        "replays it, cut down to what it takes.",
    )
    simulation.add_argument("--seed", type=int, default=1, help="default 1")
    simulation.add_argument(
        "--steps", type=_positive, default=20_000, help="default 20000; each 200 are another deployment kind"
    )
    simulation.add_argument("--json", action="store_true", help="print JSON")


def _bench(options: argparse.Namespace) -> int:
    run = _host_bench(options) if options.part == "host" else _device_bench(options)
    return DONE if print_run(run, as_json=options.json) else FAILED


def _device_bench(options: argparse.Namespace) -> Benchmark:
    from ctxcache.cli.bench.device.measure import Geometry, run  # noqa: PLC0415 - asks for a CUDA target, which may be absent

    geometry = Geometry(options.layers, options.batch, options.state_kib << 10, options.conv_kib << 10)
    return lambda show: run(geometry, options.repeats, show)


def _host_bench(options: argparse.Namespace) -> Benchmark:
    from ctxcache.cli.bench.host.manager_work import QUICK, Sizes  # noqa: PLC0415 - the other commands do without
    from ctxcache.cli.bench.host.measure import run  # noqa: PLC0415

    if options.plot is not None:
        check_file(options.plot)
    sizes = QUICK if options.quick else Sizes(repeats=options.repeats)
    return lambda show: run(options.only or DEFAULT, sizes, show, options.plot)


def _add_bench(subparsers: Any) -> None:
    bench = subparsers.add_parser("bench", help="measure", description="Measure, beside what a runtime would write.")
    parts = bench.add_subparsers(dest="part", required=True, metavar="PART")
    device = parts.add_parser(
        "device",
        help="the device ops on a GPU",
        description="The device ops beside plain copies, PyTorch and CuPy: CUDA events, host time and the wall's clock, "
        "medians, and a verdict for each bound. Exit status 1 where one is not met.",
    )
    device.add_argument("--repeats", type=_positive, default=50, help="of each measurement; default 50")
    device.add_argument("--layers", type=_positive, default=48, help="recurrent layers; default 48")
    device.add_argument("--batch", type=_positive, default=8, help="sequences; default 8")
    device.add_argument("--state-kib", type=_positive, default=1024, help="state of a sequence and layer; default 1024")
    device.add_argument("--conv-kib", type=_positive, default=96, help="convolution state of one; default 96")
    device.add_argument("--json", action="store_true", help="print JSON")
    host = parts.add_parser(
        "host",
        help="the host's work, on no device",
        description="Keys, lookups, insertions, evictions, decode steps and start-up, at block sizes 16 and 128: medians, "
        "spread, and a verdict for each bound. Takes a minute. Exit status 1 where a bound is not met. "
        "scripts/bench-peers in the repository runs it beside other engines.",
    )
    host.add_argument(
        "--only",
        action="append",
        choices=tuple(WORKS),
        metavar="WORK",
        help=f"may be repeated: {', '.join(WORKS)}; default: all but compile",
    )
    host.add_argument("--repeats", type=_positive, default=100, help="of each work, decode steps apart; default 100")
    host.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs; judges no bound")
    host.add_argument("--plot", metavar="FILE", type=Path, help="draw cost against cache size as SVG; a minute more")
    host.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ctxcache",
        description="A context cache coordinator for LLM runtimes.",
        epilog="Exit status: 0 done, 1 failed or something to mend, 2 wrong arguments.",
    )
    parser.add_argument("--version", action="version", version=f"ctxcache {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")

    diagram = subparsers.add_parser(
        "diagram",
        help="export the lifecycle's state machine",
        description="Export the state machine that every request goes through, drawn from its declaration.",
    )
    form = diagram.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        choices=FORMATS,
        default="mermaid",
        help="default: mermaid; svg and png need Graphviz's `dot`; html is a page with everything in it",
    )
    form.add_argument("--json", action="store_true", help="the same as --format json")
    diagram.add_argument(
        "--view",
        choices=VIEWS,
        default="lifecycle",
        help="lifecycle: states, triggers, guards, hooks (default); faults: where each fault point leads",
    )
    _add_kind(diagram)
    diagram.add_argument(
        "--diff",
        metavar="OLD.json",
        type=Path,
        help="mark what was added, removed and changed since --json printed that file; status 0 whatever was",
    )
    diagram.add_argument("--output", metavar="FILE", type=Path, help="write there instead of to standard output")

    _add_trials(subparsers)
    doctor = subparsers.add_parser(
        "doctor",
        help="say what is installed, GPU or simulator, and what to do about it",
        description="Look at everything that the library stands on, and say how to mend what is missing or wrong.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    warm_up = subparsers.add_parser(
        "warmup",
        help="compile everything, for the processes that come",
        description="Compile all code of the host and keep it on disk, where a folder for it can be written: for an image "
        "that is built, or a machine that is set up. The first time takes about a minute on an idle core, longer on a slow or "
        "busy one.",
    )
    warm_up.add_argument("--json", action="store_true", help="print JSON")
    _add_bench(subparsers)
    return parser


def _complain(error: Exception, status: int) -> int:
    sys.stderr.write(f"ctxcache: error: {error}\n")
    return status


def _stand_in_for_closed_streams() -> None:
    """Python leaves `None` where the shell closed a stream."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the end


def _discard_output() -> None:
    """Keep the interpreter from failing again when it flushes what could not be written."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
