"""What of a file sits in the page cache, and how to leave it out.

On a GB10 the page cache counts against the GPU (field report 53): CUDA allocates from MemFree. So
whatever reads or copies weights has to leave the cache as it found it.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_PAGE = mmap.PAGESIZE
_PROT_NONE, _MAP_SHARED = 0, 1
_WINDOW = 1 << 30  # bytes of a file that are mapped at a time, only to be asked about

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


def residency(fd: int, offset: int, length: int) -> bytes:
    """One byte a page of `[offset, offset + length)`: odd where the page is in the page cache.

    `offset` must be a multiple of the page size. Raises OSError where the file can't be mapped.
    The kernel tells the truth only to who owns the file or may write to it; to others all is resident.
    """
    if length <= 0:
        return b""
    address = _libc.mmap(None, length, _PROT_NONE, _MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "the file can't be mapped")
    try:
        pages = ctypes.create_string_buffer((length + _PAGE - 1) // _PAGE)
        if _libc.mincore(address, length, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return pages.raw
    finally:
        _libc.munmap(address, length)


def resident_bytes(path: Path) -> int:
    """How many bytes of the file `path` are in the page cache, in whole pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        return sum(
            _PAGE * sum(page & 1 for page in residency(fd, offset, min(_WINDOW, size - offset)))
            for offset in range(0, size, _WINDOW)
        )
    finally:
        os.close(fd)


def absent_ranges(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """The `(offset, length)` ranges of a window that are not in the page cache now.

    Empty where that can't be told: then nothing of that window is dropped later.
    """
    try:
        pages = residency(fd, offset, length)
    except OSError:
        return []
    return list(_runs(pages, offset, offset + length))


def _runs(pages: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    position = start
    for resident, group in itertools.groupby(pages, key=lambda page: page & 1):
        count = sum(1 for _ in group) * _PAGE
        if not resident:
            yield position, min(count, end - position)
        position += count


def drop(fd: int, offset: int = 0, length: int = 0) -> None:
    """Let go of the clean cached pages of a range (length 0: to the end). Dirty pages stay."""
    try:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    except OSError as error:  # a pipe or a filesystem without a page cache
        if error.errno not in (errno.ESPIPE, errno.EINVAL, errno.ENOSYS):
            raise


def drop_file(path: Path, *, sync: bool = False) -> None:
    """Let go of all cached pages of `path`; with `sync`, write the dirty ones to disk first."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if sync:
            os.fsync(fd)
        drop(fd)
    finally:
        os.close(fd)
