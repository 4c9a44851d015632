"""Files that are either the old ones or the new ones, never half of each."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .problem import Problem


def fsync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a neighbour of `path` for writing; it takes the name only when the block ends well.

    The temporary file is `.<name>.partial`, removed when the block raises. Raises Problem where `path` is
    no file: a rename would put one in the place of a device, which root may do to /dev/null.
    """
    _require_file_or_none(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "wb") as handle:
            os.fchmod(handle.fileno(), mode)
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
        fsync_directory(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _require_file_or_none(path: Path) -> None:
    try:
        found = path.stat()
    except OSError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise Problem(
            found=f"{path} is a {'folder' if stat.S_ISDIR(found.st_mode) else 'device, pipe or socket'}",
            needed="the name of a file, there or not",
            do="name another one",
            code="not-a-file",
        )


def write_bytes(path: Path, data: bytes, mode: int = 0o644) -> bool:
    """Write `data` to `path` in one step. Returns False when it was there already, byte for byte."""
    if path.is_file() and path.read_bytes() == data and (path.stat().st_mode & 0o7777) == mode:
        return False
    with replacing(path, mode) as handle:
        handle.write(data)
    return True


def write_text(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write UTF-8 `text` to `path` in one step; see `write_bytes`."""
    return write_bytes(path, text.encode(), mode)
