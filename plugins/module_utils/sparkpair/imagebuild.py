"""Building the engine's image on the head: pinned inputs gathered and proven, then one `docker build`.

Nothing is tagged unless the whole build went well; what a failed one leaves is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gitsource, image, imagebase, zigwheel
from .console import Progress
from .dockercli import Docker, classify, ending, missing, plain
from .problem import Problem

_LOG_LINES = 20
_STEP_WIDTH = 60
_CLASSIC_STEP = re.compile(r"Step (\d+)/(\d+) : (.*)")
# What the builders say between the lines that matter.
_CHATTER = re.compile(
    r"---> |Removing intermediate container |Sending build context |#\d+ (sha256:|DONE|transferring)"
)
_BUILDKIT_STEP = re.compile(r"#\d+ \[(?:(\S+) )?(\d+)/(\d+)\] (.*)")


@dataclass(frozen=True)
class Order:
    """One image to build.

    Args:
        inputs: folder with the project's files/engine.
        pins: what else it is made of.
        cache: folder of ours for the source, the compiler and the build's context.
        free_bytes: what the base and the build take under Docker's root; a base that is there is taken off.
    """

    inputs: Path
    pins: image.Pins
    cache: Path
    free_bytes: int


def build(docker: Docker, order: Order, *, quiet: bool = False) -> dict[str, Any]:
    """Build the image unless it is here under its key.

    Returns {"changed", "tag", "key", "identity", "commit", "tree", "seconds"}. Raises Problem with the
    last lines of the log when the build fails; then nothing is tagged and nothing is left.
    """
    inputs = image.read_inputs(order.inputs)
    key = image.content_key(inputs, order.pins)
    tag = image.tag_for(key)
    found = docker.inspect(tag)
    if found and image.label(found, image.KEY_LABEL) == key:
        return _result(False, tag, found, 0.0)
    begun = time.monotonic()
    order.cache.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(order.cache):
        base = imagebase.Base(order.pins.base, order.pins.platform, order.free_bytes, order.cache)
        imagebase.require_platform(docker.inspect(base.reference), base)
        image.require_room(imagebase.needs(docker, base))
        with _context(order, inputs) as (folder, source):
            _docker_build(docker, key, build_words(order.pins, key, folder, source), quiet)
    found = docker.inspect(tag)
    if found is None or image.label(found, image.KEY_LABEL) != key:
        raise Problem(
            found=f"docker build ended well, and {tag} is not there with its label",
            needed="the image that was built",
            do="docker image ls; docker buildx ls: the engine's own builder (default) must be in use",
            code="image-missing",
        )
    return _result(True, tag, found, time.monotonic() - begun)


def _result(changed: bool, tag: str, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "changed": changed,
        "tag": tag,
        "key": image.key_of_tag(tag),
        "identity": image.identity(found),
        "commit": image.label(found, "sparkpair.engine.commit"),
        "tree": image.label(found, "sparkpair.engine.tree"),
        "seconds": round(seconds, 1),
    }


@contextlib.contextmanager
def _one_at_a_time(cache: Path) -> Iterator[None]:
    """One build in this cache; a second one waits for the first and then finds its image."""
    with (cache / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _context(order: Order, inputs: dict[str, bytes]) -> Iterator[tuple[Path, gitsource.Source]]:
    """The folder that `docker build` is given: our files, the proven source, the hash-checked compiler."""
    for stale in order.cache.glob("context-*"):
        shutil.rmtree(stale)  # of a build that was killed
    pins = order.pins
    wheel = zigwheel.obtain(inputs["zig.lock"], pins.zig, pins.platform, order.cache)
    source = gitsource.obtain(pins.repository, pins.commit, pins.branch, order.cache / "engine.git")
    if pins.tree and pins.tree != source.tree:
        raise Problem(
            found=f"commit {source.commit} has the tree {source.tree}",
            needed=f"the pinned tree {pins.tree}",
            do="correct engine_tree or engine_commit; if both are right, do not use this repository",
            code="source-tree",
        )
    with tempfile.TemporaryDirectory(prefix="context-", dir=order.cache) as name:
        folder = Path(name)
        for file, data in inputs.items():
            (folder / file).write_bytes(data)
        (folder / "zig").mkdir()
        os.link(wheel, folder / "zig" / wheel.name)
        gitsource.export(source, folder / "engine")
        _require_zig_version(folder / "engine", pins.zig)
        yield folder, source


def _require_zig_version(source: Path, pinned: str) -> None:
    stated = source / ".zig-version"
    wants = stated.read_text().strip() if stated.is_file() else "no .zig-version file"
    if wants != pinned:
        raise Problem(
            found=f"the engine's source wants Zig {wants}",
            needed=f"Zig {pinned}, the pinned compiler",
            do="pin a commit that fits, or set image_zig and files/engine/zig.lock to that version",
            code="zig-version",
        )


def build_words(pins: image.Pins, key: str, folder: Path, source: gitsource.Source) -> list[str]:
    """The words after `docker`: the same for Docker 20.10's builder and BuildKit."""
    arguments = {
        "BASE": pins.base,
        "KEY": key,
        "ZIG_VERSION": pins.zig,
        "TARGET": pins.target,
        "SM": pins.sm,
        "ENGINE_SOURCE": image.redacted(pins.repository),
        "ENGINE_COMMIT": source.commit,
        "ENGINE_TREE": source.tree,
    }
    return [
        *("build", "--network", "none", "--force-rm", "--tag", image.tag_for(key)),
        *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")),
        str(folder),
    ]


def _docker_build(docker: Docker, key: str, words: list[str], quiet: bool) -> None:
    try:
        said, code = _follow_build(docker, words, quiet)
    finally:
        # Failed, cut off or done: what has the key and no name is a left-over (the first stage is one).
        leftovers = f"label={image.KEY_LABEL}={key}"
        docker.run("image", "prune", "--force", "--filter", leftovers, timeout=600)
    if code != 0:
        raise build_failure(said)


def _follow_build(docker: Docker, words: list[str], quiet: bool) -> tuple[list[str], int]:
    """Run the build, its log on stderr (so in the job's journal). Returns its last lines and exit code."""
    steps = StepCounter()
    progress = Progress("build the engine's image", 0, quiet=True)
    said: deque[str] = deque(maxlen=_LOG_LINES)
    try:
        child = subprocess.Popen(
            docker.argv(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=docker.environment(),
        )
    except FileNotFoundError:
        raise missing() from None
    with ending(child):
        for line in child.stdout or ():
            text = plain(line.encode())
            if not text:
                continue
            if not quiet:
                print(text, file=sys.stderr, flush=True)
            if not _CHATTER.match(text):
                said.append(text)
            if steps.take(text):
                progress.total_files = steps.total
                progress.advance(files=steps.done - progress.done_files, note=steps.text)
        code = child.wait()
    progress.close()
    return list(said), code


class StepCounter:
    """How far a build is, by its log: Docker 20.10's `Step 3/18 : ...`, BuildKit's `#7 [build 3/9] ...`."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self.text = ""
        self._stages: dict[str, tuple[int, int]] = {}

    def take(self, line: str) -> bool:
        """Read one line; whether it began a step."""
        if found := _CLASSIC_STEP.match(line):
            self.done, self.total, self.text = int(found[1]) - 1, int(found[2]), found[3][:_STEP_WIDTH]
        elif found := _BUILDKIT_STEP.match(line):
            self._stages[found[1] or ""] = (int(found[2]), int(found[3]))
            self.done = sum(step - 1 for step, _ in self._stages.values())
            self.total = sum(steps for _, steps in self._stages.values())
            self.text = found[4][:_STEP_WIDTH]
        else:
            return False
        return True


def build_failure(said: list[str]) -> Problem:
    """The Problem of a failed build, with the log's last lines; an engine's own fault is told as such."""
    log = "\n".join(said)
    known = classify(log, "docker build")
    if known.code in {"docker-permission", "docker-down", "disk-full"}:
        return known
    return Problem(
        found=f"the image's build failed; the end of its log:\n{log}",
        needed="a build that goes through",
        do="correct what the log says (files/engine, the pinned engine_commit or base_image), run it again",
        code="image-build",
    )
