"""A folder of weights on disk: what is there of its lock, what is half there, what does not belong.

Finished files are plain files under their own names. What is under way lies in `.sparkpair-partial/`: for
each file a `.part` and a journal beside it, the bad copies in `quarantine/`, and the lock that lets one
fetch at a time into the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import atomic, disk
from .console import counted
from .locks import OWN_PREFIX, Lock, LockedFile, listed
from .problem import Problem
from .receipts import Receipts

PARTIAL = f"{OWN_PREFIX}-partial"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Survey:
    """What a stat tells of a folder against its lock.

    `vouched` files have a receipt. `unread` ones have the right size and wait to be hashed. `missing` ones
    have to be brought; `partial_bytes` of them are here already.
    """

    vouched: tuple[LockedFile, ...]
    unread: tuple[LockedFile, ...]
    missing: tuple[LockedFile, ...]
    partial_bytes: int

    @property
    def missing_bytes(self) -> int:
        """Bytes that still have to come."""
        return sum(entry.size for entry in self.missing) - self.partial_bytes

    @property
    def done_bytes(self) -> int:
        """Bytes that are here: vouched for, or in a partial."""
        return sum(entry.size for entry in self.vouched) + self.partial_bytes

    @property
    def complete(self) -> bool:
        return not self.unread and not self.missing

    def as_dict(self) -> dict[str, Any]:
        files = self.vouched + self.unread + self.missing
        return {
            "files": len(files),
            "bytes": sum(entry.size for entry in files),
            "missing_files": len(self.missing),
            "missing_bytes": self.missing_bytes,
            "partial_bytes": self.partial_bytes,
            "unread_files": len(self.unread),
            "missing": [entry.path for entry in self.missing],
            "complete": self.complete,
        }


def survey(lock: Lock, directory: Path) -> Survey:
    """Look at each file by a stat and its receipt; no file is read. A folder that isn't there misses all."""
    receipts = Receipts.open(directory)
    vouched, unread, missing = [], [], []
    for entry in lock.files:
        if receipts.holds(entry):
            vouched.append(entry)
        elif _plain_size(directory / entry.path) == entry.size:
            unread.append(entry)
        else:
            missing.append(entry)
    partials = Partials(directory)
    return Survey(
        tuple(vouched),
        tuple(unread),
        tuple(missing),
        sum(partials.usable_bytes(entry) for entry in missing),
    )


def _plain_size(path: Path) -> int | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def expected_owner(directory: Path) -> int | None:
    """Whose files belong in `directory`: its owner's when root asks, else our own. None: no folder yet."""
    if not directory.is_dir():
        return None
    return directory.stat().st_uid if os.geteuid() == 0 else os.geteuid()


def require_fit(lock: Lock, directory: Path, owner: int | None = None) -> None:
    """Refuse a folder that holds what must not be there: a link, another user's file, a stray shard.

    Raises Problem that names the first few and the action that puts it right; a folder that does not
    exist yet is fine. `owner` is the uid that all of it must have (default `expected_owner`).
    """
    owner = expected_owner(directory) if owner is None else owner
    if owner is None or not directory.is_dir():
        return
    wanted = {entry.path for entry in lock.files}
    above = {parent.as_posix() for name in wanted for parent in Path(name).parents} - {"."}
    links, foreign, strays, blocked = [], [], [], []
    for path, found in _walk(directory):
        name = path.relative_to(directory).as_posix()
        if stat.S_ISLNK(found.st_mode):
            links.append(name)
        elif found.st_uid != owner:
            foreign.append(name)
        elif (name in wanted and not stat.S_ISREG(found.st_mode)) or (
            name in above and not stat.S_ISDIR(found.st_mode)
        ):
            blocked.append(name)
        elif name.endswith(".safetensors") and name not in wanted and not name.startswith(OWN_PREFIX):
            strays.append(name)
    if directory.stat().st_uid != owner:
        foreign.insert(0, ".")
    if foreign:
        raise _foreign(directory, foreign, owner)
    if links:
        first = directory / links[0]
        raise Problem(
            found=f"{counted(len(links), 'link')} in {directory}: {listed(links)}",
            needed="plain files: a link does not reach into a container",
            do=f"put the file in its place: cp --remove-destination $(readlink -f {first}) {first}"
            " (or remove the link: it is then fetched)",
            code="link",
        )
    if blocked:
        raise Problem(
            found=f"in {directory}, a folder in a file's place or the other way round: {listed(blocked)}",
            needed=f"the files of {lock.repo} in their places",
            do=f"move it away: mv {directory / blocked[0]} ANOTHER_FOLDER/",
            code="blocked",
        )
    if strays:
        raise Problem(
            found=f"{counted(len(strays), 'shard')} in {directory} that its lock does not name: {listed(strays)}",
            needed=f"only the files of {lock.repo}: the engine reads every shard that it finds",
            do=f"move them elsewhere: mv {directory / strays[0]} ANOTHER_FOLDER/",
            code="stray-file",
        )


def _walk(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder, folders, names in os.walk(directory):
        for name in sorted(folders + names):
            path = Path(folder) / name
            with contextlib.suppress(FileNotFoundError):
                yield path, path.lstat()


def _foreign(directory: Path, names: Sequence[str], owner: int) -> Problem:
    import pwd

    try:
        who = pwd.getpwuid(owner).pw_name
    except KeyError:
        who = str(owner)
    return Problem(
        found=f"{counted(len(names), 'file')} in {directory} of another user: {listed(names)}",
        needed=f"all of it owned by {who}",
        do=f"sudo chown -R {who}: {directory}",
        code="foreign-owner",
    )


class Partials:
    """The `.sparkpair-partial` folder of one directory of weights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / PARTIAL
        self.quarantined = self.folder / "quarantine"
        self._heir = _heir(directory)

    def give(self, file: int | Path) -> None:
        """Make what was just made belong to the folder's owner, when it is root that fetches by hand."""
        if self._heir:
            os.chown(file, *self._heir)

    def make(self, folder: Path) -> None:
        """Make a folder, and those above it that are missing."""
        if not folder.is_dir():
            self.make(folder.parent)
            folder.mkdir(exist_ok=True)
            self.give(folder)

    def part(self, entry: LockedFile) -> Path:
        """Where the bytes of `entry` gather. Named by the path's hash: paths may be long or have folders."""
        short = hashlib.sha256(entry.path.encode()).hexdigest()[:12]
        return self.folder / f"{short}-{Path(entry.path).name[-48:]}.part"

    def journal(self, entry: LockedFile) -> Path:
        return self.part(entry).with_suffix(".json")

    def usable_bytes(self, entry: LockedFile) -> int:
        """How many bytes of a partial can be built on: 0 unless its journal is about this very content.

        After a kill all of them: the kernel has them. After a power cut only those that were synced,
        since the file's length may have reached the disk before its content.
        """
        length = _plain_size(self.part(entry))
        note = self._read(entry)
        if length is None or note is None or note.get("of") != entry.as_dict():
            return 0
        durable = note.get("durable")
        if note.get("boot") != boot_id():
            length = min(length, durable if isinstance(durable, int) else 0)
        return length if 0 <= length <= entry.size else 0

    def write_journal(self, entry: LockedFile, durable: int) -> None:
        """Note what the partial is of and how many of its bytes are safely on disk."""
        note = {"of": entry.as_dict(), "durable": durable, "boot": boot_id()}
        atomic.write_text(self.journal(entry), json.dumps(note, indent=1) + "\n")
        self.give(self.journal(entry))

    def _read(self, entry: LockedFile) -> dict[str, Any] | None:
        try:
            note = json.loads(self.journal(entry).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return note if isinstance(note, dict) else None

    def superseded(self, missing: Sequence[LockedFile]) -> list[Path]:
        """What no file of `missing` can build on: orphans, changed entries, old bad copies."""
        kept = {self.folder / _LOCK_NAME}
        for entry in missing:
            if self.usable_bytes(entry):
                kept |= {self.part(entry), self.journal(entry)}
        found = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return [path for path in found if path not in kept]

    def superseded_bytes(self, missing: Sequence[LockedFile]) -> int:
        """What `sweep` would free."""
        return sum(_bytes_of(path) for path in self.superseded(missing))

    def sweep(self, missing: Sequence[LockedFile]) -> None:
        """Remove what is superseded.

        Only under `single_flight`, so no live process holds any of it, and only when the Hub has agreed to
        give the files: a wrong lock must not cost the partials of the right one.
        """
        for path in self.superseded(missing):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def empty_quarantine(self) -> None:
        """Give up the bad copies, kept only to be looked at, where room runs out."""
        shutil.rmtree(self.quarantined, ignore_errors=True)

    def quarantine(self, path: Path, entry: LockedFile) -> Path:
        """Take a bad file out of the way, keeping it to be looked at. Returns its new place."""
        self.make(self.quarantined)
        place = self.quarantined / self.part(entry).with_suffix(".bad").name
        path.replace(place)
        self.journal(entry).unlink(missing_ok=True)
        return place

    def clear(self) -> None:
        """Remove the folder after a complete fetch; the caller holds `single_flight`."""
        self.sweep([])
        (self.folder / _LOCK_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # one that waited has made its lock meanwhile
            self.folder.rmdir()

    @contextlib.contextmanager
    def single_flight(self, meanwhile: Callable[[str], None]) -> Iterator[None]:
        """Be the only fetch into this folder: at once, or when the one that is under way has ended.

        While there is another, `meanwhile` is called over and over with its pid; it takes its time or raises.
        """
        while isinstance(claim := self._claim(), str):
            meanwhile(claim)
        try:
            os.ftruncate(claim, 0)
            os.pwrite(claim, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(claim)

    def _claim(self) -> int | str:
        """The lock's descriptor, or the pid of the fetch that holds it."""
        path = self.folder / _LOCK_NAME
        while True:
            self.make(self.folder)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            except FileNotFoundError:  # the one before us has just cleared the folder
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                return pid
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    self.give(fd)
                    return fd
            os.close(fd)


_LOCK_NAME = "fetch.lock"


def _heir(directory: Path) -> tuple[int, int] | None:
    """Whose root's files become (uid, gid): the owner's of `directory`, or of the nearest folder above it.

    Else `sudo sparkpair fetch` would leave files that stop the next run (field report 33).
    """
    while not directory.exists():
        directory = directory.parent
    found = directory.stat()
    return (found.st_uid, found.st_gid) if os.geteuid() == 0 and found.st_uid != 0 else None


def _bytes_of(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            return disk.tree_bytes(path)
        return path.lstat().st_size
    return 0


def boot_id() -> str:
    """What tells this boot of the machine from another; empty where the kernel does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
