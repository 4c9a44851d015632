"""Receipts: which files were verified, by the stat they had then. A second verification is a stat.

They lie beside the data in `.sparkpair-receipts.json`:
`{"version": 1, "files": {PATH: {"size", "mtime_ns", "inode", "sha256" or "git_blob_sha1"}}}`.
The device number is left out on purpose: it may change at a reboot, and 400 GB would be read again.
A receipt that can't be read is no receipt.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat as stat_bits
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import atomic
from .locks import OWN_PREFIX, LockedFile
from .problem import Problem

NAME = f"{OWN_PREFIX}-receipts.json"
_VERSION = 1
# A folder of others, a disk without room, a process that stands still with the receipts in its hand: the
# data is none the worse, so the work goes on and the next verification just reads again.
_NO_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT)
_LOCK_WAIT_S = 30.0
_LOCK_POLL_S = 0.02


class Receipts:
    """The receipts of one directory. Not shared between threads; several processes may `save`."""

    def __init__(self, directory: Path, files: dict[str, dict[str, Any]]) -> None:
        self.directory = directory
        self._files = files
        self._recorded: dict[str, dict[str, Any]] = {}
        self._forgotten: set[str] = set()
        self.unwritten: str | None = None  # why the last `save` could not write, in the kernel's words

    @classmethod
    def open(cls, directory: Path) -> Receipts:
        """The receipts beside the data in `directory`; none where there is no readable receipt."""
        return cls(directory, _read(directory / NAME))

    def holds(self, entry: LockedFile, *, follow: bool = False) -> bool:
        """Whether `entry` was verified with the hash it names and its file has the same stat since."""
        noted = self._files.get(entry.path)
        if noted is None or noted.get(entry.algorithm) != entry.digest:
            return False
        try:
            found = (self.directory / entry.path).stat(follow_symlinks=follow)
        except OSError:
            return False
        return (
            stat_bits.S_ISREG(found.st_mode)
            and found.st_size == entry.size
            and _stamp(found) == {key: noted.get(key) for key in ("size", "mtime_ns", "inode")}
        )

    def record(self, entry: LockedFile, stat: os.stat_result) -> None:
        """Note that the file with `stat` has the hash of `entry`."""
        self._note(entry.path, {**_stamp(stat), entry.algorithm: entry.digest})

    def forget(self, path: str) -> None:
        """Drop the receipt of `path`, if there is one."""
        if self._files.pop(path, None) is not None or path in self._recorded:
            self._recorded.pop(path, None)
            self._forgotten.add(path)

    def noted(self, path: str) -> dict[str, Any] | None:
        """What is recorded of `path`: size, mtime_ns, inode and the hash; None without a receipt."""
        found = self._files.get(path)
        return dict(found) if found else None

    def save(self) -> bool:
        """Write what was recorded and forgotten, merged with what others wrote meanwhile.

        The file is owned like its directory. Returns False when there is nothing new to write or the
        directory can't be written to or has no room: `unwritten` says why, and the next `save` tries again.

        Raises OSError or Problem where it is the disk, or what lies in the place of the receipts.
        """
        self.unwritten = None
        if not self._recorded and not self._forgotten:
            return False
        try:
            with _locked(self.directory):
                files = _read(self.directory / NAME)
                merged = {path: row for path, row in files.items() if path not in self._forgotten}
                merged.update(self._recorded)
                if merged == files:
                    written = False
                else:
                    _write(self.directory, merged)
                    written = True
        except (OSError, Problem) as error:
            self.unwritten = (error.strerror if isinstance(error, OSError) else None) or str(error.args[0])
            self._withdraw_all()
            if isinstance(error, OSError) and error.errno in _NO_WRITE:
                return False
            raise
        self._files = merged
        self._recorded.clear()
        self._forgotten.clear()
        return written

    def _withdraw_all(self) -> None:
        """Where the receipt of a bad file can't be taken out of the list, the list goes: that needs no room."""
        if self._forgotten & _read(self.directory / NAME).keys():
            with contextlib.suppress(OSError):
                (self.directory / NAME).unlink()

    def _note(self, path: str, row: dict[str, Any]) -> None:
        self._forgotten.discard(path)
        if self._files.get(path) != row:
            self._files[path] = row
            self._recorded[path] = row


def _stamp(stat: os.stat_result) -> dict[str, int]:
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        if not path.is_file():  # a named pipe would hold the reading for ever
            return {}
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    files = data.get("files") if isinstance(data, dict) and data.get("version") == _VERSION else None
    if not isinstance(files, dict):
        return {}
    return {name: row for name, row in files.items() if isinstance(row, dict)}


def _write(directory: Path, files: dict[str, dict[str, Any]]) -> None:
    text = json.dumps({"version": _VERSION, "files": dict(sorted(files.items()))}, indent=1) + "\n"
    owner = directory.stat()
    with atomic.replacing(directory / NAME) as handle:
        if os.geteuid() == 0:  # root verifies too; the folder's owner must be able to go on
            os.fchown(handle.fileno(), owner.st_uid, owner.st_gid)
        handle.write(text.encode())


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _claim(fd)
        yield
    finally:
        os.close(fd)


def _claim(fd: int) -> None:
    """Lock, but not for ever: whoever holds it may have been stopped. Raises TimeoutError."""
    limit = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                raise TimeoutError(errno.ETIMEDOUT, f"another process holds {NAME}") from None
            time.sleep(_LOCK_POLL_S)
