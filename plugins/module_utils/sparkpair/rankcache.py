"""Rank caches: the weights of one rank as the engine loads them, written by the engine's own program.

One file `rank<R>of<W>-<20 hex>.bin` of about 106 GB in a folder of its own per variant (profile, overlay,
engine): the name hangs on the layout alone, so two variants would have the same one. The program runs in
the image without network and as the service user; what it wrote is checked by `tf-dsv41-check`, hashed
once and locked, so that later looks and the way to the worker need no other knowledge.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from . import disk, hashing, locks, made, sealed
from .console import Progress, gib, size
from .dockercli import Docker, classify, missing
from .locks import Lock, LockedFile
from .problem import Problem
from .receipts import Receipts

PROGRAMS = "/opt/tensorfold/bin"
WRITER, CHECKER = "tf-dsv41-rank-cache", "tf-dsv41-check"
LABEL = "sparkpair.job"
# Where caches of other ranks wait below the variant's folder until they are sent.
OUTGOING = "for-worker"
# Left free beside the cache: a full disk stops more than this job.
MARGIN = 2**30
_POLL_S = 0.5
_LAST_LINES = 12
# Docker's own exit code for "the container never started".
_NOT_STARTED = 125


@dataclass(frozen=True)
class Cache:
    """Which cache is meant, and where its lock is.

    Args:
        folder: holds at most one file of this rank.
        inputs: what it is made from (checkpoint's commit, overlay, engine's tag, ...), as texts.
        lock_file: written when the cache is; it may have come from another node.
    """

    folder: Path
    rank: int
    world: int
    inputs: Mapping[str, str]
    lock_file: Path

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise Problem(
                found=f"rank {self.rank} in a world of {self.world}",
                needed=f"a rank from 0 to {self.world - 1}",
                do="check the groups of the inventory",
                code="rank",
            )

    @property
    def stem(self) -> str:
        """What the file's name begins with: `rank0of2`."""
        return f"rank{self.rank}of{self.world}"

    def revision(self, name: str) -> str:
        """The lock's revision: changes with any input and with the layout, which the file's name tells."""
        return sealed.revision_of(f"{made.fingerprint(dict(self.inputs))} {name}")


@dataclass(frozen=True)
class Plan:
    """What the program is going to write: number of tensors, their bytes and those of the index."""

    entries: int
    bytes: int
    index_bytes: int


@dataclass(frozen=True)
class Expected:
    """What the profile says of a rank's cache; 0 where nothing is known."""

    entries: int = 0
    gib: float = 0.0


@dataclass(frozen=True)
class Done:
    """How a program in the image ended."""

    code: int
    output: str
    said: list[str] = field(default_factory=list)


class Runner(Protocol):
    """Runs one of the engine's programs in its image; `writable` is the folder that it may write to."""

    def __call__(
        self,
        program: str,
        words: Sequence[str],
        model: Path,
        folder: Path,
        *,
        writable: bool,
        watch: Callable[[], None],
    ) -> Done: ...


def find(folder: Path, rank: int, world: int) -> Path | None:
    """The rank's file in `folder`. Two of them are a Problem that names both: the engine would refuse."""
    found = sorted(folder.glob(f"rank{rank}of{world}-*.bin"))
    if len(found) > 1:
        raise Problem(
            found=f"{len(found)} caches of rank {rank} in {folder}: {', '.join(path.name for path in found)}",
            needed="one: the engine starts with none of several (SeveralRankCaches)",
            do=f"remove all of them (rm {' '.join(map(str, found))}); the next run writes the right one",
            code="several-rank-caches",
        )
    return found[0] if found else None


def standing(cache: Cache) -> Lock | None:
    """The lock of the cache when it is there, made from these inputs and unchanged; else None. Stats only."""
    there = find(cache.folder, cache.rank, cache.world)
    lock = known_lock(cache)
    if there is None or lock is None or lock.files[0].path != there.name:
        return None
    return lock if Receipts.open(cache.folder).holds(lock.files[0]) else None


def known_lock(cache: Cache) -> Lock | None:
    """The lock of a cache made from these inputs, wherever its file is now; None when there is none."""
    try:
        lock = locks.load(cache.lock_file)
    except Problem:
        return None
    name = lock.files[0].path
    right = len(lock.files) == 1 and re.fullmatch(rf"{cache.stem}-[0-9a-f]+\.bin", name)
    return lock if right and lock.revision == cache.revision(name) else None


def parse_plan(text: str) -> Plan:
    """The program's answer to `--index-only`: the index itself, or a line of JSON with its figures.

    An index is a list of `[key, dtype, shape, offset, bytes]`.
    """
    for candidate in (text, text.strip().rpartition("\n")[2]):
        with contextlib.suppress(ValueError, OverflowError, RecursionError, TypeError, LookupError):
            told = json.loads(candidate)
            if isinstance(told, dict):
                entries, data = int(told["entries"]), int(told["data_bytes"])
                return Plan(entries, data, int(told.get("index_bytes", 200 * entries)))
            return Plan(len(told), sum(int(row[4]) for row in told), len(text.encode()))
    raise Problem(
        found=f"{WRITER} --index-only answered {text[:120]!r}",
        needed="the index of the cache as JSON",
        do="check engine_commit: its rank-cache program speaks another form",
        code="rank-cache-plan",
    )


def compare(plan: Plan, expected: Expected) -> list[str]:
    """Warnings where the plan is not what the profile says; each shows both figures."""
    warnings = []
    if expected.entries and plan.entries != expected.entries:
        warnings.append(f"the plan has {plan.entries} entries, the profile expects {expected.entries}")
    if expected.gib and f"{plan.bytes / 2**30:.1f}" != f"{expected.gib:.1f}":
        warnings.append(f"the plan has {gib(plan.bytes)}, the profile expects {expected.gib:.1f} GiB")
    return warnings


def write(
    cache: Cache,
    model: Path,
    run: Runner,
    *,
    expected: Expected = Expected(),
    check_every: int = 16,
    progress: Callable[[str, int, int], Progress] = Progress,
) -> tuple[Lock, Plan, list[str]]:
    """Plan, write, check, hash and lock a rank's cache. Returns its lock, the plan and the warnings.

    An older cache of this rank gives way once the plan and the room are known to be fine; a `.partial`
    that a crash left is removed. Raises Problem (disk-full, rank-cache-...) with nothing half-made left.
    """
    if not (model / "config.json").is_file():
        raise Problem(
            found=f"no checkpoint in {model}",
            needed="the checkpoint that the cache is made from",
            do="ansible-playbook site.yml --tags weights",
            code="rank-cache-model",
        )
    cache.folder.mkdir(parents=True, exist_ok=True)
    old = find(cache.folder, cache.rank, cache.world)
    plan = _plan(cache, model, run)
    warnings = compare(plan, expected)
    needed = plan.bytes + plan.index_bytes + MARGIN
    reclaimed = sum(path.stat().st_size for path in [*_partials(cache), *([old] if old else [])])
    _require_room(cache, needed - reclaimed)
    _clear(cache)
    try:
        file = _write(cache, model, run, plan, progress)
        _check(cache, model, run, check_every)
        lock = _vouch(cache, file, progress)
    except BaseException:
        _clear(cache)
        raise
    return lock, plan, warnings


def _require_room(cache: Cache, needed: int) -> None:
    try:
        disk.require_room(cache.folder, needed, f"the cache of rank {cache.rank}")
    except Problem as problem:
        others = other_variants(cache.folder)
        if others:
            problem.do += f"; caches of other variants lie in {', '.join(map(str, others))}"
        raise


def other_variants(folder: Path) -> list[Path]:
    """Folders of rank caches beside this variant's, which may be superseded."""
    variant = folder.parent if folder.name == OUTGOING else folder
    found = {path.parent for path in variant.parent.glob("*/rank*of*.bin")}
    return sorted(found - {variant})


def _partials(cache: Cache) -> list[Path]:
    return sorted(cache.folder.glob(f".{cache.stem}*.partial"))


def _clear(cache: Cache) -> None:
    """Remove what is there of this rank: the lock first, so that nothing vouches for half a file."""
    cache.lock_file.unlink(missing_ok=True)
    receipts = Receipts.open(cache.folder)
    for path in [*_partials(cache), *cache.folder.glob(f"{cache.stem}-*.bin")]:
        path.unlink(missing_ok=True)
        receipts.forget(path.name)
    receipts.save()


def _plan(cache: Cache, model: Path, run: Runner) -> Plan:
    words = [str(model), str(cache.folder), str(cache.rank), str(cache.world), "--index-only"]
    done = run(WRITER, words, model, cache.folder, writable=False, watch=_nothing)
    if done.code:
        raise _failed(f"{WRITER} --index-only", done)
    return parse_plan(done.output)


def _nothing() -> None:
    """Nothing to watch in a short run."""


def _write(
    cache: Cache, model: Path, run: Runner, plan: Plan, progress: Callable[[str, int, int], Progress]
) -> Path:
    shown = progress(f"write rank {cache.rank}'s cache", plan.bytes + plan.index_bytes, 1)

    def watch() -> None:
        with contextlib.suppress(FileNotFoundError):
            shown.advance(sum(path.stat().st_size for path in _partials(cache)) - shown.done_bytes)

    words = [str(model), str(cache.folder), str(cache.rank), str(cache.world)]
    done = run(WRITER, words, model, cache.folder, writable=True, watch=watch)
    if done.code:
        raise _failed(WRITER, done)
    file = find(cache.folder, cache.rank, cache.world)
    if file is None:
        raise _failed(f"{WRITER} wrote no {cache.stem}-*.bin and", done)
    shown.advance(file.stat().st_size - shown.done_bytes, files=1)
    shown.close()
    return file


def _check(cache: Cache, model: Path, run: Runner, every: int) -> None:
    words = [str(model), str(cache.folder), str(cache.rank), str(cache.world), "--bytes", str(every)]
    done = run(CHECKER, words, model, cache.folder, writable=False, watch=_nothing)
    told: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError):
        last = json.loads(done.output.strip().rpartition("\n")[2])
        told = last if isinstance(last, dict) else {}
    if done.code or told.get("ok") is not True:
        shown = {key: told[key] for key in told if "mismatch" in key}
        raise _failed(f"{CHECKER} of rank {cache.rank} ({json.dumps(shown)[:300]})", done)


def _vouch(cache: Cache, file: Path, progress: Callable[[str, int, int], Progress]) -> Lock:
    shown = progress(f"hash rank {cache.rank}'s cache", file.stat().st_size, 1)
    digest = hashing.digest_file(file, on_bytes=shown.advance)
    shown.advance(files=1)
    shown.close()
    receipts = Receipts.open(cache.folder)
    receipts.record(LockedFile(file.name, digest.stat.st_size, digest.hex), digest.stat)
    receipts.save()
    files = {file.name: (digest.stat.st_size, digest.hex)}
    return sealed.write_lock(cache.lock_file, "rank-cache", cache.revision(file.name), files)


def _failed(what: str, done: Done) -> Problem:
    said = " | ".join(done.said[-_LAST_LINES:]) or done.output.strip()[-400:] or "no output"
    return Problem(
        found=f"{what} ended with {done.code}: {said}",
        needed="a cache that the engine's own check accepts",
        do="verify the checkpoint (sparkpair verify --full), then run the same again",
        code="rank-cache-failed",
    )


@dataclass(frozen=True)
class InImage:
    """The Runner of real life: `docker run` of the image, no network, no more rights than the files need.

    The image's own entry point is left out: it greets on standard output, where the program's JSON goes.
    """

    image: str
    docker: Docker = field(default_factory=Docker)
    uid: int = field(default_factory=os.geteuid)
    gid: int = field(default_factory=os.getegid)

    def command(
        self, program: str, words: Sequence[str], model: Path, folder: Path, *, writable: bool
    ) -> list[str]:
        """The whole command line of one run."""
        return self.docker.argv(
            "run",
            "--rm",
            "--name",
            self.container(folder),
            "--label",
            f"{LABEL}=rank-cache",
            "--pull",
            "never",
            "--network",
            "none",
            "--user",
            f"{self.uid}:{self.gid}",
            "--volume",
            f"{model}:{model}:ro",
            "--volume",
            f"{folder}:{folder}:{'rw' if writable else 'ro'}",
            "--entrypoint",
            f"{PROGRAMS}/{program}",
            self.image,
            *words,
        )

    def container(self, folder: Path) -> str:
        """One name a folder, so that a second run meets what a killed first one left."""
        return f"sparkpair-rank-cache-{sealed.revision_of(str(folder))[:8]}"

    def __call__(
        self,
        program: str,
        words: Sequence[str],
        model: Path,
        folder: Path,
        *,
        writable: bool,
        watch: Callable[[], None],
    ) -> Done:
        self._remove(folder)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    self.command(program, words, model, folder, writable=writable),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=self.docker.environment(),
                )
            except FileNotFoundError:
                raise missing() from None
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_S)
                        break
                    watch()
            except BaseException:
                process.kill()
                process.wait()
                self._remove(folder)
                raise
            output.seek(0)
            errors.seek(0)
            text, said = output.read().decode(errors="replace"), errors.read().decode(errors="replace")
        if process.returncode == _NOT_STARTED or said.lstrip().startswith("docker: "):
            raise classify(said, f"docker run {self.image}")
        return Done(process.returncode, text, [line for line in said.splitlines() if line.strip()])

    def _remove(self, folder: Path) -> None:
        with contextlib.suppress(Problem):
            self.docker.run("rm", "--force", self.container(folder))


def describe(lock: Lock, plan: Plan | None) -> str:
    """One line for a person."""
    planned = f", {plan.entries} entries, {gib(plan.bytes)}" if plan else ""
    return f"{lock.files[0].path}: {size(lock.total_bytes)}{planned}"
