"""A fault as a person should be told of it: found, needed, do."""

from __future__ import annotations


class Problem(Exception):
    """Something that stops the work, in three parts.

    Args:
        found: what is there, with the value and the place ("config.json has head_dim 512").
        needed: what must be there instead.
        do: the command or step that fixes it.
        code: a stable short name for tests and scripts ("disk-full").
        host: the node it was seen on, where that is not obvious.
        severity: "error" stops, "warning" does not.
    """

    def __init__(
        self,
        found: str,
        needed: str,
        do: str,
        *,
        code: str = "problem",
        host: str | None = None,
        severity: str = "error",
    ) -> None:
        super().__init__(found)
        self.found = found
        self.needed = needed
        self.do = do
        self.code = code
        self.host = host
        self.severity = severity

    def as_dict(self) -> dict[str, str | None]:
        """The finding as `sparkpair doctor --json` and the modules give it."""
        return {
            "code": self.code,
            "severity": self.severity,
            "host": self.host,
            "found": self.found,
            "needed": self.needed,
            "do": self.do,
        }

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"found{where}: {self.found}\nneeded: {self.needed}\ndo: {self.do}"

    def __reduce__(self) -> tuple[object, ...]:  # crosses process pools whole
        return (_rebuild, (self.as_dict(),))


def _rebuild(fields: dict[str, str]) -> Problem:
    return Problem(**fields)


def problem_from(error: OSError) -> Problem:
    """An error of the operating system, with the file that it is about."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return Problem(
        found=what,
        needed="a path that exists and that this user may use",
        do="check the path and its owner (ls -ld), then run the same command again",
        code=type(error).__name__.lower(),
    )
