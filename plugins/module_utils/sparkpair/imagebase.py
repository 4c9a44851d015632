"""The base image on the head: room asked first, then pulled with its bytes shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import image
from .console import Progress
from .dockercli import PASSING, Docker, classify, ending, missing, plain, storage_roots
from .problem import Problem

# The compiler's wheel, unpacked by the build (0.4 GB), the source and what the build makes of them.
CONTEXT_BYTES = 1_000_000_000
_LOG_LINES = 20
_PULL_TRIES = 5


@dataclass(frozen=True)
class Base:
    """The base image, and the room that it and what is built on it take.

    Args:
        reference: `name:tag@sha256:...`.
        platform: "linux/arm64" or "linux/amd64": this machine's.
        free_bytes: what the base and the build take under Docker's root; a base that is there is taken off.
        cache: where the build's context will be.
    """

    reference: str
    platform: str
    free_bytes: int
    cache: Path


def needs(docker: Docker, base: Base) -> list[image.Need]:
    """The bytes that pulling and building will write, each under the folder it really goes to."""
    found = docker.inspect(base.reference)
    there = image.disk_bytes(docker, found) if found else 0
    # Even on a base that is there the build unpacks the compiler under Docker's root.
    left = max(base.free_bytes - there, min(base.free_bytes, CONTEXT_BYTES))
    root = storage_roots(docker.info())[-1]
    return [
        image.Need(root, left, "the engine's image"),
        image.Need(base.cache, min(base.free_bytes, CONTEXT_BYTES), "the build's context"),
    ]


def pull(docker: Docker, base: Base, *, quiet: bool = False) -> dict[str, Any]:
    """Have the base image here. Returns {"changed", "base", "size"}.

    Room is asked first (field report 36); a registry that does not answer is asked again.
    """
    found = docker.inspect(base.reference)
    changed = found is None
    if found is None:
        image.require_room(needs(docker, base))
        _pull_patiently(docker, base, quiet)
        found = docker.inspect(base.reference)
    require_platform(found, base)
    return {"changed": changed, "base": base.reference, "size": int((found or {}).get("Size") or 0)}


def _pull_patiently(docker: Docker, base: Base, quiet: bool) -> None:
    for attempt in range(_PULL_TRIES):
        try:
            return _follow_pull(docker, base, quiet)
        except Problem as problem:
            if problem.code not in PASSING or attempt == _PULL_TRIES - 1:
                raise
            print(f"{problem.found}; trying again", file=sys.stderr, flush=True)
            time.sleep(2**attempt)
    raise AssertionError("the last try returns or raises")


def require_platform(found: Mapping[str, Any] | None, base: Base) -> None:
    """Raise Problem unless the base is here, for this machine's processor."""
    if found is None:
        raise Problem(
            found=f"no base image {base.reference} on this node",
            needed="it, to build on",
            do=f"docker pull --platform {base.platform} {base.reference}",
            code="image-missing",
        )
    has = f"{found.get('Os')}/{found.get('Architecture')}"
    if has != base.platform:
        raise Problem(
            found=f"{base.reference} is for {has}",
            needed=f"the base image for {base.platform}, this machine",
            do=f"docker image rm {base.reference}; pin the digest of the index, or of {base.platform}",
            code="image-platform",
        )


_LAYER = re.compile(
    r"([0-9a-f]{12}): (\w[\w ]*?)(?:\s+(?:\[[=> ]*\]\s+)?([\d.]+[kMG]?B)/([\d.]+[kMG]?B))?\s*$"
)


class LayerBytes:
    """Bytes of a pull, added up from the lines that `docker pull` writes to a terminal.

    The engine tells a layer's size only once it begins, so the total grows in the first seconds.
    """

    def __init__(self) -> None:
        self._done: dict[str, int] = {}
        self._total: dict[str, int] = {}

    def take(self, line: str) -> bool:
        """Read one line; whether it was about a layer."""
        found = _LAYER.match(line)
        if not found:
            return False
        layer, state, now, total = found.groups()
        if state == "Downloading" and total:
            self._total[layer], self._done[layer] = image.size_of(total), image.size_of(now)
        elif state not in {"Pulling fs layer", "Waiting"}:
            self._done[layer] = self._total.get(layer, 0)
        return True

    @property
    def done(self) -> int:
        return sum(self._done.values())

    @property
    def total(self) -> int:
        return sum(self._total.values())


def _follow_pull(docker: Docker, base: Base, quiet: bool) -> None:
    """`docker pull` on a terminal of ours: without one it does not say how far it is."""
    leader, follower = os.openpty()
    layers, progress = LayerBytes(), Progress("pull the base image", 0, quiet=quiet)
    said: deque[str] = deque(maxlen=_LOG_LINES)
    try:
        child = subprocess.Popen(
            docker.argv("pull", "--platform", base.platform, base.reference),
            stdin=subprocess.DEVNULL,
            stdout=follower,
            stderr=follower,
            env={**docker.environment(), "TERM": "dumb", "COLUMNS": "200"},
        )
    except FileNotFoundError:
        os.close(leader)
        raise missing() from None
    finally:
        os.close(follower)
    with ending(child), os.fdopen(leader, "rb", buffering=0) as screen:
        for line in _screen_lines(screen.fileno()):
            if layers.take(line):
                progress.total_bytes = layers.total
                progress.advance(layers.done - progress.done_bytes)
            else:
                said.append(line)
        code = child.wait()
    progress.close()
    if code != 0:
        raise classify("\n".join(said), f"docker pull {base.reference}")


def _screen_lines(fd: int) -> Iterator[str]:
    """Lines from a terminal, control sequences taken out, until its other end is closed."""
    rest = b""
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # how a terminal says that nobody writes any more
            chunk = b""
        if not chunk:
            break
        *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
        for line in lines:
            yield plain(line)
    yield plain(rest)
