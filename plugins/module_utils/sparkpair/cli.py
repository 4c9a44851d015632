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
from typing import NoReturn

from . import __version__
from .problem import Problem, problem_from


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The command line. Each module of `commands` adds itself by `add_to(subparsers)`.

    With the name of a `command` it has that one alone: a copy between nodes starts many of these, and
    importing all of the library takes longer than a verification by receipts.
    """
    parser = _Parser(prog="sparkpair", description="Two DGX Sparks as one server.")
    parser.add_argument("--version", action="version", version=f"sparkpair {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = importlib.import_module(f"{__package__}.commands")
    modules = {found.name.replace("_", "-"): found.name for found in pkgutil.iter_modules(commands.__path__)}
    for name in [command] if command in modules else sorted(modules):
        importlib.import_module(f"{commands.__name__}.{modules[name]}").add_to(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    try:
        arguments = build_parser(words[0] if words else None).parse_args(words)
        return int(arguments.run(arguments))
    except Problem as problem:
        return _tell(problem, as_json)
    except KeyboardInterrupt:
        _tell(_INTERRUPTED, as_json)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _tell(problem_from(error), as_json)
    except Exception as error:
        if os.environ.get("SPARKPAIR_DEBUG"):
            raise
        bug = Problem(
            found=f"{type(error).__name__}: {error}",
            needed="this case to be handled; it is a fault of sparkpair",
            do="run it again with SPARKPAIR_DEBUG=1 and report the output",
            code="bug",
        )
        return _tell(bug, as_json)


_INTERRUPTED = Problem(
    found="interrupted",
    needed="the command's end",
    do="run the same command again to go on",
    code="interrupted",
)


class _Parser(argparse.ArgumentParser):
    """Wrong usage is told as JSON too, where JSON was asked for."""

    def error(self, message: str) -> NoReturn:
        if "--json" in sys.argv[1:]:
            usage = Problem(message, self.format_usage().strip(), f"{self.prog} --help", code="usage")
            print(json.dumps({"ok": False, "problems": [usage.as_dict()]}))
        super().error(message)


def _tell(problem: Problem, as_json: bool) -> int:
    """Say it on stderr, and as one JSON object on stdout where that was asked for. Returns 1."""
    print(problem, file=sys.stderr)
    if as_json:
        try:
            print(json.dumps({"ok": False, "problems": [problem.as_dict()]}), flush=True)
        except OSError as error:  # stdout itself is what does not work
            print(problem_from(error), file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
