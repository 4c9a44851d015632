"""What of a file sits in the page cache, and how to leave it out.

On a GB10 the page cache counts against the GPU (field report 53): CUDA allocates from MemFree. So
whatever reads or copies weights has to leave the cache as it found it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from pathlib import Path

_PAGE = mmap.PAGESIZE
_PROT_NONE, _MAP_SHARED = 0, 1
_LOW_BIT = bytes(byte & 1 for byte in range(256))
_ABSENT = re.compile(rb"\0+")
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
_libc.syscall.restype = ctypes.c_long
_CACHESTAT = 451  # the same number on x86-64 and aarch64; Linux 6.5 and newer
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_MAP_FAILED = ctypes.c_void_p(-1).value


def residency(fd: int, offset: int, length: int) -> bytes:
    """One byte a page of `[offset, offset + length)`: 1 where the page is in the page cache, else 0.

    `offset` must be a multiple of the page size. Raises OSError where the file can't be mapped.
    See `is_told_truth`: to others every page looks resident.
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
        return pages.raw.translate(_LOW_BIT)
    finally:
        _libc.munmap(address, length)


def cached_pages(fd: int, offset: int, length: int) -> int | None:
    """How many pages of the range are in the page cache, by `cachestat`; None where the kernel lacks it."""
    window = (ctypes.c_uint64 * 2)(offset, length)
    counts = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, recently evicted
    if _libc.syscall(_CACHESTAT, fd, window, counts, 0) != 0:
        return None
    return int(counts[0])


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Whether every page of the range is in the page cache."""
    count = cached_pages(fd, offset, length)
    if count is None:
        return not absent_ranges(fd, offset, length)
    return count >= -(-length // _PAGE)


def is_told_truth(fd: int) -> bool:
    """Whether the kernel tells this process what of the file is cached: its owner, root, or a writer."""
    if os.geteuid() in (0, os.fstat(fd).st_uid):
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK)


def resident_bytes(path: Path) -> int:
    """How many bytes of the file `path` are in the page cache, in whole pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        return sum(
            _PAGE * sum(residency(fd, offset, min(_WINDOW, size - offset)))
            for offset in range(0, size, _WINDOW)
        )
    finally:
        os.close(fd)


def absent_ranges(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """The `(offset, length)` ranges of a window that are not in the page cache now.

    The whole window where that can't be told.
    """
    try:
        pages = residency(fd, offset, length)
    except OSError:
        return [(offset, length)]
    end = offset + length
    ranges = []
    for run in _ABSENT.finditer(pages):
        first = offset + run.start() * _PAGE
        ranges.append((first, min((run.end() - run.start()) * _PAGE, end - first)))
    return ranges


def drop(fd: int, offset: int = 0, length: int = 0) -> None:
    """Let go of the clean cached pages of a range (length 0: to the end). Dirty pages stay."""
    try:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    except OSError as error:  # a pipe or a filesystem without a page cache
        if error.errno not in (errno.ESPIPE, errno.EINVAL, errno.ENOSYS):
            raise


def start_writeback(fd: int) -> None:
    """Ask for the file's dirty pages to be written, without waiting for it."""
    _libc.sync_file_range(fd, 0, 0, 2)  # SYNC_FILE_RANGE_WRITE; where it fails, fsync does the work
