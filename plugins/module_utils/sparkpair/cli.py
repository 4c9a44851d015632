"""The command `sparkpair`: one subcommand a file in `commands/`, faults told in three parts.

Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, 130 interrupted.

Almost nothing is imported up here: what is imported inside `main` may be interrupted in words.
"""

from __future__ import annotations

import os
import sys

from .problem import Problem, problem_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path


def build_parser(command: str | None = None, *, as_json: bool = False) -> argparse.ArgumentParser:
    """The command line. Each module of `commands` adds itself by `add_to(subparsers)`.

    With the name of a `command` it has that one alone: a copy between nodes starts many of these, and
    importing all of the library takes longer than a verification by receipts. Wrong usage is told as
    JSON too, where it is to be `as_json`.
    """
    import importlib
    import pkgutil

    from . import __version__

    parser = _parser_class(as_json)(prog="sparkpair", description="Two DGX Sparks as one server.")
    parser.add_argument("--version", action="version", version=f"sparkpair {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = importlib.import_module(f"{__package__}.commands")
    modules = {found.name.replace("_", "-"): found.name for found in pkgutil.iter_modules(commands.__path__)}
    for name in [command] if command in modules else sorted(modules):
        importlib.import_module(f"{commands.__name__}.{modules[name]}").add_to(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code."""
    as_json = False
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        as_json = "--json" in words
        from . import console

        with console.forgiving_stderr():
            return _run(words, as_json)
    except KeyboardInterrupt:
        _tell(_INTERRUPTED, as_json)
        return 130


def _run(words: list[str], as_json: bool) -> int:
    try:
        parser = build_parser(words[0] if words else None, as_json=as_json)
        arguments = parser.parse_args(words)
        return int(arguments.run(arguments))
    except Problem as problem:
        return _tell(problem, as_json)
    except KeyboardInterrupt:
        _tell(_INTERRUPTED, as_json)
        return 130
    except BrokenPipeError:
        _drop_stdout()
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


def _parser_class(as_json: bool) -> type[argparse.ArgumentParser]:
    """Parsers that take no abbreviated option and no empty path, and tell wrong usage as JSON too."""
    import argparse
    from pathlib import Path
    from typing import Any, NoReturn

    class Parser(argparse.ArgumentParser):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"allow_abbrev": False, **options})
            self.register("type", Path, _path)

        def error(self, message: str) -> NoReturn:
            if as_json:
                _put(Problem(message, self.format_usage().strip(), f"{self.prog} --help", code="usage"))
            super().error(message)

    return Parser


def _path(value: str) -> Path:
    """A path that was said: `Path("")` would be the current folder, which nobody asked for."""
    import argparse
    from pathlib import Path

    if not value.strip():
        raise argparse.ArgumentTypeError("the path is empty (an unset variable?); the current folder is .")
    return Path(value)


def _tell(problem: Problem, as_json: bool) -> int:
    """Say it on stderr, and as one JSON object on stdout where that was asked for. Returns 1."""
    _remark(problem)
    if as_json:
        _put(problem)
    return 1


def _put(problem: Problem) -> None:
    import json

    try:
        print(json.dumps({"ok": False, "problems": [problem.as_dict()]}), flush=True)
    except OSError as error:  # stdout itself is what does not work
        _remark(problem_from(error))
        _drop_stdout()


def _remark(problem: Problem) -> None:
    if sys.stderr is not None:  # None means stdout to print()
        print(problem, file=sys.stderr)


def _drop_stdout() -> None:
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
