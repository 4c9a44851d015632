"""`sparkpair agent`: the forced command behind the head's key on the worker."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .. import agent, paths


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "agent",
        help="serve the head's key (a forced command of sshd)",
        description="Do what SSH_ORIGINAL_COMMAND asks if it is on the allow list; refuse the rest (126).",
    )
    parser.add_argument(
        "--root", type=Path, default=paths.STATE, metavar="DIR", help="the data folders' parent (%(default)s)"
    )
    parser.add_argument("verb", nargs="?", help="run one verb by hand")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="what the verb takes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code of what was run, 126 when it was refused."""
    if args.verb is None:
        return agent.serve(os.environ.get("SSH_ORIGINAL_COMMAND", ""), args.root)
    try:
        verb = agent.find_verb(args.verb)
    except agent.Refusal:
        known = ", ".join(sorted(agent.VERBS)) or "none"
        print(f"sparkpair agent: no verb {args.verb!r}; there are: {known}", file=sys.stderr)
        return agent.REFUSED
    return verb(args.words)
