"""`python -m demo_runtime`: what `./scripts/demo` runs."""

from __future__ import annotations

import argparse
import sys

from demo_runtime import hybrid_job, main_job, speculative_job


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
    arguments = parser.parse_args(sys.argv[1:] or ["conversation"])
    match arguments.job:
        case "hybrid":
            return hybrid_job.run()
        case "speculative":
            return speculative_job.run(arguments.turns)
        case _:
            return main_job.run(arguments.turns)


if __name__ == "__main__":
    sys.exit(main())
