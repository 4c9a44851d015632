"""runc, minus one limit that a node may not raise.

`docker run --ulimit memlock=-1` needs CAP_SYS_RESOURCE. Where this machine withholds it from the nodes,
the limit is dropped from the container's configuration, and runc gets everything else unchanged: so the
ranks' docker commands stay the ones of a Spark. With the capability nothing is changed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUNC = "/usr/sbin/runc"
_SYS_RESOURCE = 24
_LIMIT = "RLIMIT_MEMLOCK"


def drop_limit(process: dict[str, Any], allowed: int) -> bool:
    """Remove the memlock limit of an OCI process if it is above `allowed` bytes. True if it was."""
    limits = process.get("rlimits") or []
    kept = [limit for limit in limits if limit.get("type") != _LIMIT or limit.get("hard", 0) <= allowed]
    if len(kept) == len(limits):
        return False
    process["rlimits"] = kept
    return True


def file_to_change(words: Sequence[str]) -> tuple[Path, bool] | None:
    """The JSON file that a runc command reads a process from, and whether that process is all of it.

    create and run read config.json of the bundle (--bundle or the working directory), exec a file of its own.
    """
    options = dict(_options(words))
    if "create" in words or "run" in words:
        return Path(options.get("--bundle") or options.get("-b") or ".") / "config.json", False
    if "exec" in words and ("--process" in options or "-p" in options):
        return Path(options.get("--process") or options["-p"]), True
    return None


def _options(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for at, word in enumerate(words):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            pairs.append((name, value if equals else (words[at + 1] if at + 1 < len(words) else "")))
    return pairs


def may_raise_limits(status: str) -> bool:
    """True if a /proc/PID/status text shows CAP_SYS_RESOURCE in effect."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _SYS_RESOURCE & 1)
    return False


def main() -> None:
    words = sys.argv[1:]
    target = file_to_change(words)
    if target and not may_raise_limits(Path("/proc/self/status").read_text()):
        import resource

        path, whole = target
        config = json.loads(path.read_text())
        allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        limit = (1 << 64) - 1 if allowed == resource.RLIM_INFINITY else allowed
        if drop_limit(config if whole else config.get("process", {}), limit):
            path.write_text(json.dumps(config))
    os.execv(RUNC, [RUNC, *words])  # noqa: S606 - becomes runc, so that signals and exit codes are runc's


if __name__ == "__main__":
    main()
