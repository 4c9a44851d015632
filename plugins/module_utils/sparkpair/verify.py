"""Whether a folder holds what its lock names, byte for byte, and nothing that would mislead the engine.

Files with a receipt cost a stat; the others are read on all cores and get a receipt when they are right.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import shlex
import stat as stat_bits
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
HEARTBEAT_S = 5.0  # a session of `follow` is never silent for longer
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[A-Za-z0-9]{6}")


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
    that are not right, by path. `unwritten`: why new receipts could not be kept.
    """

    checked: int = 0
    bytes: int = 0
    changed: bool = False
    bad: dict[str, Bad] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    free_bytes: int = 0
    unwritten: str | None = None

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
            "unwritten": self.unwritten,
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
            if bad.state != UNREADABLE:  # it may be as it was: a mode is mended in a moment
                receipts.forget(entry.path)
        elif full or not receipts.holds(entry, follow=follow_links):
            unread.append(entry)
    _read(unread, directory, report, receipts, follow=follow_links, threads=threads, quiet=quiet)
    report.problems = list(_problems(lock, directory, report.bad, lock_file))
    if not only_listed and directory.is_dir():
        report.problems += _misfits(lock, directory)
    if directory.is_dir():
        report.changed, report.unwritten = _kept(receipts)
    return report


def unkept(directory: str, why: str) -> str:
    """What to say of receipts that could not be written."""
    return (
        f"the receipts in {directory} can't be written ({why}): the next verification reads those files again"
    )


def _kept(receipts: Receipts) -> tuple[bool, str | None]:
    """Save. Whether anything was written, and why not where it had to be: no fault of the data."""
    try:
        return receipts.save(), receipts.unwritten
    except (OSError, Problem):
        return False, receipts.unwritten


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
    if not _may(path, os.R_OK):  # also where a receipt spares the reading: the engine will have to
        return Bad(UNREADABLE, entry.size, os.strerror(errno.EACCES))
    return None


def examine(path: Path, entry: LockedFile, *, follow: bool = False) -> Bad | None:
    """What is wrong with the one file `path`, by all of its bytes; None when it is as `entry` says."""
    bad = _fault_by_stat(path, entry, follow)
    if bad:
        return bad
    try:
        return _fault_of(entry, hashing.digest_file(path, entry.algorithm, follow=follow))
    except (Problem, OSError) as fault:
        return _fault_of(entry, fault)


def _may(path: Path, what: int) -> bool:
    return os.access(path, what, effective_ids=os.access in os.supports_effective_ids)


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
    bad = _fault_of(entry, result)
    if bad is None and isinstance(result, hashing.Digest):
        receipts.record(entry, result.stat)
    else:
        receipts.forget(entry.path)
    return bad


def _fault_of(entry: LockedFile, result: hashing.Digest | Problem | OSError) -> Bad | None:
    if isinstance(result, hashing.Digest):
        return None if result.hex == entry.digest else Bad(WRONG_HASH, entry.digest, result.hex)
    if isinstance(result, Problem):
        state = CHANGING if result.code == "file-changed" else NOT_PLAIN
        return Bad(state, "a plain file", result.found)
    if result.errno in (errno.ENOENT, errno.ENOTDIR):
        return Bad(MISSING, entry.size, None)
    return Bad(UNREADABLE, entry.size, result.strerror)


class Follower:
    """Checks files of a folder one by one as they arrive, on all cores, and gives each its receipt.

    What was just written is on the disk, and out of the page cache, before it is vouched for (field
    report 53). `unwritten`: why the last receipt could not be kept.
    """

    def __init__(self, lock: Lock, directory: Path) -> None:
        self._entries = lock.by_path
        self._directory = directory
        self._receipts = Receipts.open(directory)
        self._one = threading.Lock()
        self._stop = threading.Event()
        self.unwritten: str | None = None

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
                result = hashing.digest_file(place, entry.algorithm, evict=True, stop=self._stop)
            except (Problem, OSError) as fault:
                result = fault
            with self._one:
                bad = _judge(entry, result, self._receipts)
                _, self.unwritten = _kept(self._receipts)
        return bad

    def stop(self) -> None:
        """End the checks that are under way, by KeyboardInterrupt in their threads."""
        self._stop.set()


def follow(
    lock: Lock,
    directory: Path,
    names: Iterable[str],
    answer: Callable[[dict[str, Any]], None],
    *,
    tidy: bool = False,
) -> None:
    """Answer with a report on the folder, then with `{"path", "bad", "unwritten"}` for each of `names`.

    Whatever goes wrong with a file is an answer too: the other side waits for one. Between them comes
    `{"alive": N}` every `HEARTBEAT_S`, so that it can tell long work from none.

    Args:
        tidy: first remove what a killed copy left; only when no other copy into the folder runs.
    """
    one_at_a_time = threading.Lock()

    def tell(told: dict[str, Any]) -> None:
        with one_at_a_time:
            answer(told)

    def work(path: str) -> None:
        bad: Bad | None
        try:
            bad = follower.check(path)
        except KeyboardInterrupt:
            return  # it is the session that ends
        except BaseException as fault:
            entry = lock.by_path.get(path)
            bad = Bad(UNREADABLE, entry.size if entry else "a file", str(fault) or type(fault).__name__)
        tell({"path": path, "bad": bad.as_dict() if bad else None, "unwritten": follower.unwritten})

    with _heartbeat(tell):
        if tidy:
            sweep(lock, directory)
        tell(verify(lock, directory, quiet=True).as_dict())
        follower = Follower(lock, directory)
        # More than cores: some wait for the disk.
        with ThreadPoolExecutor(hashing.cores() + 2, thread_name_prefix="check") as pool:
            try:
                running = [pool.submit(work, path) for path in names]
            except BaseException:
                follower.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for done in running:
            done.result()


@contextlib.contextmanager
def _heartbeat(tell: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        count = 0
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more
            while not over.wait(HEARTBEAT_S):
                count += 1
                tell({"alive": count})

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(HEARTBEAT_S)


def sweep(lock: Lock, directory: Path) -> list[str]:
    """Remove the temporary files that killed copies left beside the lock's files. Returns their paths.

    rsync writes a file that replaces another one as `.NAME.` and six letters or digits. Only plain files
    of our own go, and only in folders that no link leads to.
    """
    gone = []
    locked = {entry.path for entry in lock.files}
    for inner in sorted({Path(path).parent for path in locked}):
        folder = directory / inner
        # A leading dot of NAME is not doubled.
        names = {Path(path).name.removeprefix(".") for path in locked if Path(path).parent == inner}
        try:
            if folder.resolve() != directory.resolve() / inner:
                continue
            for found in list(os.scandir(folder)):
                match = _TEMPORARY.fullmatch(found.name)
                path = (inner / found.name).as_posix()
                if not match or match["name"] not in names or path in locked:
                    continue
                if not found.is_file(follow_symlinks=False):
                    continue
                if found.stat(follow_symlinks=False).st_uid == os.geteuid():
                    Path(found.path).unlink()
                    gone.append(path)
        except OSError:  # not there yet, or not ours: the survey says what is the matter
            continue
    return gone


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
    ):
        names = sorted(path for path, fault in bad.items() if fault.state == state)
        if names:
            yield Problem(
                found=f"{len(names)} of {counted(len(lock.files), 'file')} in {directory} {what}: {listed(names)}",
                needed=needed,
                do=do,
                code=state,
            )
    yield from _unreadable(lock, directory, bad)


def _unreadable(lock: Lock, directory: Path, bad: dict[str, Bad]) -> Iterator[Problem]:
    """Files that may not be read, and files that can't be: a mode or an owner, or else the disk."""
    refused = os.strerror(errno.EACCES)
    whys = sorted({str(fault.got) for fault in bad.values() if fault.state == UNREADABLE})
    for why in whys:
        names = sorted(
            path for path, fault in bad.items() if fault.state == UNREADABLE and str(fault.got) == why
        )
        what = "not readable" if why == refused else f"not readable ({why})"
        yield Problem(
            found=f"{len(names)} of {counted(len(lock.files), 'file')} in {directory} {what}: {listed(names)}",
            needed=f"files that {_name(os.geteuid())} may read"
            if why == refused
            else "a disk that gives them back",
            do=_opened(directory, names)
            if why == refused
            else "look for errors of the disk (journalctl -k -b), then verify again",
            code=UNREADABLE,
        )


def _opened(directory: Path, names: Sequence[str]) -> str:
    """The command that makes `names` readable: by mode where the owner is right, else by owner, or by both."""
    owner = expected_owner(directory)
    wanted = os.geteuid() if owner is None else owner
    foreign = closed = False
    for name in names:
        # From the top: below a folder that may not be entered nothing can be seen.
        above = [directory / part for part in reversed(Path(name).parents)]
        for path in (*above, directory / name):
            try:
                found = path.stat()
            except OSError:
                break
            folder = stat_bits.S_ISDIR(found.st_mode)
            needed = 0o500 if folder else 0o400
            if not _may(path, os.R_OK | os.X_OK if folder else os.R_OK):
                foreign |= found.st_uid != wanted
                closed |= found.st_mode & needed != needed
    if not foreign and not closed:
        return f"see which part of the path refuses it: namei -l {directory / names[0]}"
    mode = f"sudo chmod -R u+rX,go+rX {directory}"
    if not foreign:
        return mode
    return f"{_repair(directory, owner)} && {mode}" if closed else _repair(directory, owner)


def _misfits(lock: Lock, directory: Path) -> Iterator[Problem]:
    """What is in the folder and should not be: stray shards, links and special files, others' files."""
    named = {entry.path for entry in lock.files}
    strays, links, foreign = [], [], []
    hidden_away: list[str] = []
    owner = expected_owner(directory)
    if directory.stat().st_uid != owner:
        foreign.append(".")
    for name, found in walk(directory, hidden_away):
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
    if hidden_away:
        yield Problem(
            found=f"{counted(len(hidden_away), 'path')} in {directory} can't be looked at: {listed(hidden_away)}",
            needed=f"folders that {_name(os.geteuid())} may look into",
            do=_opened(directory, [name.rpartition(" (")[0] for name in hidden_away]),
            code=UNREADABLE,
        )
    if foreign and owner is not None:
        yield Problem(
            found=f"{counted(len(foreign), 'path')} in {directory} of another user: {listed(foreign)}",
            needed=f"all of it owned by {_name(owner)}",
            do=_repair(directory, owner),
            code="foreign-owner",
        )


def walk(directory: Path, unseen: list[str] | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """Every path below `directory`, relative, with its own stat (a link's, not its target's), sorted.

    `unseen` gets those that the kernel didn't let us look at, with its words.
    """

    def refused(error: OSError) -> None:
        if unseen is not None and error.errno != errno.ENOENT:  # a temporary file of another process
            name = os.path.relpath(error.filename or directory, directory)
            unseen.append(f"{name} ({error.strerror})")

    for folder, folders, names in os.walk(directory, onerror=refused):
        folders.sort()
        for name in sorted(folders + names):
            path = Path(folder) / name
            try:
                found = path.lstat()
            except OSError as error:
                refused(error)
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
