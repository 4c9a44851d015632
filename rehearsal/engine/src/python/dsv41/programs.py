"""One file is every program: the name it was started under says which."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from .errors import EngineError

PROGRAMS = {
    "tensorfold-native": "native",
    "tf-dsv41-lanes": "lanes",
    "tf-dsv41-rank-cache": "rankcache",
    "tf-dsv41-check": "checks",
}


def named(argv: list[str]) -> tuple[str, list[str]]:
    """The program's name and its arguments. From a source tree the name is the first argument."""
    name = Path(argv[0]).name
    if name in PROGRAMS:
        return name, argv[1:]
    if len(argv) > 1 and argv[1] in PROGRAMS:
        return argv[1], argv[2:]
    raise EngineError("NoProgram", f"{name} is none of {', '.join(PROGRAMS)}", code=2)


def run() -> None:
    """Run the program and leave with its exit code; an error by name, never a traceback."""
    try:
        name, words = named(sys.argv)
        main: Callable[[list[str]], int] = importlib.import_module(f"dsv41.{PROGRAMS[name]}").main
        code = main(words)
    except EngineError as error:
        # the server speaks as "tensorfold:", the tools as a Zig program whose main returned an error
        speaker = "tensorfold" if PROGRAMS.get(Path(sys.argv[0]).name) == "native" else "error"
        if error.words and speaker == "error":
            print(error.words, file=sys.stderr)
        print(f"{speaker}: {error if speaker == 'tensorfold' else error.name}", file=sys.stderr)
        code = error.code
    except OSError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that hang on a lost peer don't hold the exit
