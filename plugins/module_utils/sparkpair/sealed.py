"""A folder that must hold exactly what its lock names: looked at in milliseconds, at each run and start.

Large files by their receipt (size, time, inode), small ones by their bytes each time, and nothing beside
them. So a file that is edited in place is found even where its time was set back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import atomic, locks
from .locks import OWN_PREFIX, Lock, LockedFile, listed
from .made import SMALL
from .problem import Problem
from .receipts import Receipts

MISSING, CHANGED, EXTRA, NOT_PLAIN = "missing", "changed", "not in the lock", "no plain file"


@dataclass(frozen=True)
class Finding:
    """One file that is not as it should be: its path in the folder and in which way."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path} ({self.what})"


def write_lock(path: Path, name: str, revision: str, files: Mapping[str, tuple[int, str]]) -> Lock:
    """Lock what we made: relative path -> (size in bytes, sha256), under the repository `sparkpair/<name>`."""
    rows = [{"path": file, "size": size, "sha256": sha256} for file, (size, sha256) in files.items()]
    lock = locks.parse({"repo": f"sparkpair/{name}", "revision": revision, "files": rows}, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, locks.dump(lock))
    return lock


def revision_of(text: str) -> str:
    """40 hex digits for a lock of made files, which no commit names."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def as_dict(lock: Lock) -> dict[str, object]:
    """The lock as plain JSON, to hand it to another node."""
    return dict(json.loads(locks.dump(lock)))


def findings(lock: Lock, folder: Path) -> list[Finding]:
    """What is not as the lock says, by path. Reads no file of more than 1 MiB, writes nothing."""
    receipts = Receipts.open(folder)
    found = [Finding(entry.path, what) for entry in lock.files if (what := _fault(entry, folder, receipts))]
    names = {entry.path for entry in lock.files}
    found += [Finding(path, EXTRA) for path in files_below(folder) if path not in names]
    return sorted(found, key=lambda finding: finding.path)


def _fault(entry: LockedFile, folder: Path, receipts: Receipts) -> str | None:
    path = folder / entry.path
    try:
        there = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    if not stat.S_ISREG(there.st_mode):
        return NOT_PLAIN
    if there.st_size != entry.size:
        return CHANGED
    if entry.size >= SMALL:
        return None if receipts.holds(entry) else CHANGED
    return None if _small_hash(path, entry) == entry.digest else CHANGED


def _small_hash(path: Path, entry: LockedFile) -> str:
    data = path.read_bytes()
    if entry.sha256 is not None:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def files_below(folder: Path) -> Iterator[str]:
    """Relative paths of all files (and links) below `folder`, our own notes left out."""
    for directory, folders, names in os.walk(folder):
        linked = [name for name in folders if (Path(directory) / name).is_symlink()]
        for name in names + linked:
            if not name.startswith(OWN_PREFIX):
                yield (Path(directory) / name).relative_to(folder).as_posix()


def require(lock: Lock, folder: Path, do: str) -> None:
    """Raise Problem (code not-vouched) that names what is wrong in `folder`."""
    found = findings(lock, folder)
    if found:
        raise Problem(
            found=f"{folder}: {listed([str(finding) for finding in found])}",
            needed=f"exactly the {len(lock.files)} files that were verified",
            do=do,
            code="not-vouched",
        )


def in_the_way(lock: Lock, folder: Path, *, alone: bool) -> list[Finding]:
    """What keeps `folder` from being completed by sending files that it lacks.

    Small files that were changed (their receipts may still hold), links, and, where nothing else may lie in
    the folder (`alone`), all that the lock does not name. Large files are left to their hash.
    """
    small = {entry.path for entry in lock.files if entry.size < SMALL}
    return [
        found
        for found in findings(lock, folder)
        if found.what == NOT_PLAIN
        or (found.what == EXTRA and alone)
        or (found.what == CHANGED and found.path in small)
    ]


def clear(folder: Path, found: Iterable[Finding]) -> None:
    """Remove what `in_the_way` named, and its receipts."""
    receipts = Receipts.open(folder)
    for item in found:
        path = folder / item.path
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        receipts.forget(item.path)
    receipts.save()
