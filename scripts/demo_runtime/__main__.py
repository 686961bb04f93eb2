"""`python -m demo_runtime`: what `./scripts/demo` runs."""

from __future__ import annotations

import argparse
import sys

from demo_runtime import hybrid_job, main_job, speculative_job

_GPU_JOB = "SmolLM2 on a GPU, in pages of PyTorch's: time to first token with reuse and without."


def main() -> int:
    """Run the job that the command line names; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="A conversation with and without the context cache, compared token by token and bit by bit. "
        "Exit status 1 if anything differs.",
    )
    jobs = parser.add_subparsers(dest="job", metavar="JOB")
    conversation = jobs.add_parser("conversation", help=f"the default: {main_job.__doc__}")
    jobs.add_parser("hybrid", help=hybrid_job.__doc__)
    speculative = jobs.add_parser("speculative", help=speculative_job.__doc__)
    for parsed, most in ((conversation, len(main_job.QUESTIONS)), (speculative, len(speculative_job.QUESTIONS))):
        parsed.add_argument(
            "--turns", type=int, choices=range(2, most + 1), default=most, help="ask only the first questions"
        )
    gpu = jobs.add_parser("gpu", help=_GPU_JOB)
    gpu.add_argument("--random-weights", action="store_true", help="do not look for the model's file")
    arguments = parser.parse_args(sys.argv[1:] or ["conversation"])
    match arguments.job:
        case "hybrid":
            return hybrid_job.run()
        case "speculative":
            return speculative_job.run(arguments.turns)
        case "gpu":
            return _run_on_gpu(random_weights=arguments.random_weights)
        case _:
            return main_job.run(arguments.turns)


def _run_on_gpu(*, random_weights: bool) -> int:
    try:
        from demo_runtime import gpu_job  # noqa: PLC0415 - the other jobs do without PyTorch
    except ModuleNotFoundError as cause:
        if cause.name != "torch":
            raise
        sys.stderr.write(
            f"error: {sys.executable} has no PyTorch, whose tensors this job lends to the coordinator; install it there, "
            "or name a Python that has it: PYTHON=python3 ./scripts/demo gpu\n"
        )
        return 1
    return gpu_job.run(random_weights=random_weights)


if __name__ == "__main__":
    sys.exit(main())
