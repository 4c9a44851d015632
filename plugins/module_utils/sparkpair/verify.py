"""Whether a folder holds what its lock names, byte for byte, and nothing that would mislead the engine.

Files with a receipt cost a stat; the others are read on all cores and get a receipt when they are right.
"""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import stat as stat_bits
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import disk, hashing
from .console import Progress, counted
from .locks import Lock, LockedFile, listed
from .problem import Problem
from .receipts import Receipts
from .staging import expected_owner

# What can be wrong with one file.
MISSING, WRONG_SIZE, WRONG_HASH = "missing", "wrong-size", "wrong-hash"
NOT_PLAIN, UNREADABLE, CHANGING = "not-plain", "unreadable", "changing"


@dataclass(frozen=True)
class Bad:
    """A file that is not as its lock says: the kind of fault, what was expected and what is there."""

    state: str
    expected: str | int
    got: str | int | None

    def as_dict(self) -> dict[str, str | int | None]:
        return {"state": self.state, "expected": self.expected, "got": self.got}


@dataclass
class Report:
    """What `verify` found.

    `checked` counts the lock's files, `bytes` what was read of them now (0 when all had receipts).
    `changed`: receipts were written. `free_bytes` are left on the folder's filesystem. `bad` has the files
    that are not right, by path.
    """

    checked: int = 0
    bytes: int = 0
    changed: bool = False
    bad: dict[str, Bad] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    free_bytes: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "changed": self.changed,
            "checked": self.checked,
            "bytes": self.bytes,
            "free_bytes": self.free_bytes,
            "problems": [problem.as_dict() for problem in self.problems],
            "files": {path: bad.as_dict() for path, bad in sorted(self.bad.items())},
        }


def verify(
    lock: Lock,
    directory: Path,
    *,
    full: bool = False,
    only_listed: bool = False,
    follow_links: bool = False,
    threads: int | None = None,
    quiet: bool = False,
    lock_file: Path | None = None,
) -> Report:
    """Compare `directory` with `lock`. Faults are in the report; nothing of the data is changed.

    Args:
        full: read every byte again, whatever the receipts say.
        only_listed: look at the lock's files alone, not for strays and other people's files.
        follow_links: take a link for the file that it leads to.
        threads: files hashed at a time; one a core by default.
        quiet: show no progress.
        lock_file: where `lock` was read from, for the command that mends what is wrong.
    """
    report = Report(checked=len(lock.files), free_bytes=disk.free_bytes(directory))
    receipts = Receipts.open(directory)
    unread = []
    for entry in lock.files:
        bad = _fault_by_stat(directory / entry.path, entry, follow_links)
        if bad:
            report.bad[entry.path] = bad
            receipts.forget(entry.path)
        elif full or not receipts.holds(entry, follow=follow_links):
            unread.append(entry)
    _read(unread, directory, report, receipts, follow=follow_links, threads=threads, quiet=quiet)
    report.changed = receipts.save() if directory.is_dir() else False
    report.problems = list(_problems(lock, directory, report.bad, lock_file))
    if not only_listed and directory.is_dir():
        report.problems += _misfits(lock, directory)
    return report


def _fault_by_stat(path: Path, entry: LockedFile, follow: bool) -> Bad | None:
    try:
        found = path.stat(follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return Bad(MISSING, entry.size, None)
        return Bad(UNREADABLE, entry.size, error.strerror)
    if not stat_bits.S_ISREG(found.st_mode):
        return Bad(NOT_PLAIN, "a plain file", _kind(found.st_mode))
    if found.st_size != entry.size:
        return Bad(WRONG_SIZE, entry.size, found.st_size)
    return None


def _read(
    unread: list[LockedFile],
    directory: Path,
    report: Report,
    receipts: Receipts,
    *,
    follow: bool,
    threads: int | None,
    quiet: bool,
) -> None:
    """Hash `unread`; fill in the report's bad files and bytes, and the receipts."""
    if not unread:
        return
    entries = {entry.path: entry for entry in unread}
    jobs = [
        hashing.Job(entry.path, directory / entry.path, entry.size, entry.algorithm, follow)
        for entry in unread
    ]
    progress = Progress("verify", sum(entry.size for entry in unread), len(unread), quiet=quiet)
    for job, result in hashing.digest_files(jobs, threads=threads, on_bytes=progress.advance):
        entry = entries[job.name]
        progress.advance(files=1)
        if isinstance(result, hashing.Digest):
            report.bytes += result.stat.st_size
        bad = _judge(entry, result, receipts)
        if bad:
            report.bad[entry.path] = bad
    progress.close()


def _judge(entry: LockedFile, result: hashing.Digest | Problem | OSError, receipts: Receipts) -> Bad | None:
    """What is wrong with a file that was read; its receipt is written or withdrawn accordingly."""
    if isinstance(result, hashing.Digest) and result.hex == entry.digest:
        receipts.record(entry, result.stat)
        return None
    receipts.forget(entry.path)
    if isinstance(result, hashing.Digest):
        return Bad(WRONG_HASH, entry.digest, result.hex)
    if isinstance(result, Problem):
        state = CHANGING if result.code == "file-changed" else NOT_PLAIN
        return Bad(state, "a plain file", result.found)
    if result.errno in (errno.ENOENT, errno.ENOTDIR):
        return Bad(MISSING, entry.size, None)
    return Bad(UNREADABLE, entry.size, result.strerror)


class Follower:
    """Checks files of a folder one by one as they arrive, on all cores, and gives each its receipt.

    What was just written is on the disk, and out of the page cache, before it is vouched for (field
    report 53).
    """

    def __init__(self, lock: Lock, directory: Path) -> None:
        self._entries = lock.by_path
        self._directory = directory
        self._receipts = Receipts.open(directory)
        self._one = threading.Lock()

    def check(self, path: str) -> Bad | None:
        """What is wrong with `path`, None when it is right. May be called from several threads."""
        entry = self._entries.get(path)
        if entry is None:
            return Bad(NOT_PLAIN, "a file of the lock", None)
        place = self._directory / path
        bad = _fault_by_stat(place, entry, follow=False)
        if bad is None:
            result: hashing.Digest | Problem | OSError
            try:
                result = hashing.digest_file(place, entry.algorithm, evict=True)
            except (Problem, OSError) as fault:
                result = fault
            with self._one:
                bad = _judge(entry, result, self._receipts)
                self._receipts.save()
        return bad


def follow(
    lock: Lock, directory: Path, names: Iterable[str], answer: Callable[[dict[str, Any]], None]
) -> None:
    """Answer with a report on the folder, then with `{"path", "bad"}` for each of `names` as they come."""
    answer(verify(lock, directory, quiet=True).as_dict())
    follower = Follower(lock, directory)
    one_at_a_time = threading.Lock()

    def work(path: str) -> None:
        bad = follower.check(path)
        with one_at_a_time:
            answer({"path": path, "bad": bad.as_dict() if bad else None})

    # More than cores: some wait for the disk.
    with ThreadPoolExecutor(hashing.cores() + 2, thread_name_prefix="check") as pool:
        running = [pool.submit(work, path) for path in names]
    for done in running:
        done.result()


def _problems(lock: Lock, directory: Path, bad: dict[str, Bad], lock_file: Path | None) -> Iterator[Problem]:
    """One problem for each file with other bytes, one for each other kind of fault."""
    command = shlex.join(["sparkpair", "fetch", "--lock", str(lock_file or "LOCK"), "--to", str(directory)])
    which = "" if lock_file else f" (LOCK: the lock of {lock.repo})"
    again = f"fetch the bad files again: {command}{which}"
    entries = lock.by_path
    for path, fault in sorted(bad.items()):
        if fault.state == WRONG_HASH:
            algorithm = entries[path].algorithm
            yield Problem(
                found=f"{directory / path} has {algorithm} {fault.got}",
                needed=f"{algorithm} {fault.expected}, as {lock.repo} @ {lock.revision[:12]} has it",
                do=again,
                code=WRONG_HASH,
            )
        elif fault.state == WRONG_SIZE:
            yield Problem(
                found=f"{directory / path} has {fault.got} bytes",
                needed=f"{fault.expected} bytes",
                do=again,
                code=WRONG_SIZE,
            )
    for state, what, needed, do in (
        (MISSING, "not there", "all of them", again),
        (NOT_PLAIN, "no plain files", "plain files: a link does not reach into a container", again),
        (
            CHANGING,
            "being written to",
            "files that nothing writes to",
            "let the fetch or copy end, then verify again",
        ),
        (
            UNREADABLE,
            "not readable",
            f"files that {_name(os.geteuid())} may read",
            _repair(directory, expected_owner(directory)),
        ),
    ):
        names = sorted(path for path, fault in bad.items() if fault.state == state)
        if names:
            yield Problem(
                found=f"{len(names)} of {counted(len(lock.files), 'file')} in {directory} {what}: {listed(names)}",
                needed=needed,
                do=do,
                code=state,
            )


def _misfits(lock: Lock, directory: Path) -> Iterator[Problem]:
    """What is in the folder and should not be: stray shards, links and special files, others' files."""
    named = {entry.path for entry in lock.files}
    strays, links, foreign = [], [], []
    owner = expected_owner(directory)
    if directory.stat().st_uid != owner:
        foreign.append(".")
    for name, found in walk(directory):
        hidden = any(part.startswith(".") for part in name.split("/")[:-1])
        if found.st_uid != owner:
            foreign.append(name)
        if not (stat_bits.S_ISREG(found.st_mode) or stat_bits.S_ISDIR(found.st_mode)):
            if name not in named:
                links.append(f"{name} ({_kind(found.st_mode)})")
        elif name.endswith(".safetensors") and name not in named and not hidden:
            strays.append(name)
    if strays:
        yield Problem(
            found=f"stray safetensors in {directory}: {listed(strays)}",
            needed=f"only the files of {lock.repo}: the engine reads every *.safetensors that it finds",
            do=f"move them away: mv {directory / strays[0]} ANOTHER_FOLDER/",
            code="stray-file",
        )
    if links:
        yield Problem(
            found=f"links or special files in {directory}: {listed(links)}",
            needed="plain files and folders",
            do=f"remove them: rm {directory / links[0].rpartition(' (')[0]}",
            code=NOT_PLAIN,
        )
    if foreign and owner is not None:
        yield Problem(
            found=f"{counted(len(foreign), 'path')} in {directory} of another user: {listed(foreign)}",
            needed=f"all of it owned by {_name(owner)}",
            do=_repair(directory, owner),
            code="foreign-owner",
        )


def walk(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every path below `directory`, relative, with its own stat (a link's, not its target's), sorted."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(folders + names):
            path = Path(folder) / name
            try:
                found = path.lstat()
            except FileNotFoundError:  # a temporary file of another process
                continue
            yield path.relative_to(directory).as_posix(), found


def _kind(mode: int) -> str:
    kinds = (
        (stat_bits.S_ISLNK, "link"),
        (stat_bits.S_ISDIR, "folder"),
        (stat_bits.S_ISFIFO, "named pipe"),
        (stat_bits.S_ISSOCK, "socket"),
    )
    return next((name for test, name in kinds if test(mode)), "device")


def _repair(directory: Path, owner: int | None) -> str:
    who = _name(os.geteuid() if owner is None else owner)
    return f"sudo chown -hR {who}: {directory}"


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
