"""`sparkpair rank-log`: what a rank's unit runs when the rank has ended, however it ended."""

from __future__ import annotations

import argparse
import os

from .. import ranklogs, ranks


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "rank-log",
        help="save the log of a rank's run (run by its unit)",
        description="Write the journal of the run that $INVOCATION_ID names to /var/lib/sparkpair/logs.",
    )
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--keep", type=int, default=10, help="logs of this rank that stay (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where the log was saved, else 1."""
    saved = ranklogs.save(ranks.name_of(args.rank), os.environ.get("INVOCATION_ID", ""), args.keep)
    print(f"log saved: {saved}" if saved else "no log was saved; the journal has it")
    return 0 if saved else 1
