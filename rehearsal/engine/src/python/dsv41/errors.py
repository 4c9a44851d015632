"""The engine's own error names, with the exit code that each start ends with."""

from __future__ import annotations

USAGE = 2
FAILED = 1


class EngineError(Exception):
    """A refusal by name, as the engine prints it.

    Args:
        name: the engine's name for it ("NoRankCache").
        words: what a person can do about it; may be empty.
        code: exit code, 2 for a wrong command line, 1 for everything else.
    """

    def __init__(self, name: str, words: str = "", *, code: int = FAILED) -> None:
        super().__init__(f"{name}: {words}" if words else name)
        self.name = name
        self.words = words
        self.code = code


def bad_argument(words: str) -> EngineError:
    return EngineError("BadArgument", words, code=USAGE)
