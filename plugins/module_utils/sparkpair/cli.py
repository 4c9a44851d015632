"""The command `sparkpair`: one subcommand a file in `commands/`, faults told in three parts.

Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Sequence

from . import __version__
from .problem import Problem, problem_from


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Each module of `commands` adds itself by `add_to(subparsers)`."""
    parser = argparse.ArgumentParser(prog="sparkpair", description="Two DGX Sparks as one server.")
    parser.add_argument("--version", action="version", version=f"sparkpair {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = importlib.import_module(f"{__package__}.commands")
    for found in sorted(pkgutil.iter_modules(commands.__path__), key=lambda entry: entry.name):
        importlib.import_module(f"{commands.__name__}.{found.name}").add_to(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except Problem as problem:
        return _tell(problem, getattr(arguments, "json", False))
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _tell(problem_from(error), getattr(arguments, "json", False))
    except Exception as error:
        if os.environ.get("SPARKPAIR_DEBUG"):
            raise
        bug = Problem(
            found=f"{type(error).__name__}: {error}",
            needed="this case to be handled; it is a fault of sparkpair",
            do="run it again with SPARKPAIR_DEBUG=1 and report the output",
            code="bug",
        )
        return _tell(bug, getattr(arguments, "json", False))


def _tell(problem: Problem, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"ok": False, "problems": [problem.as_dict()]}))
    print(problem, file=sys.stderr)
    return 1
