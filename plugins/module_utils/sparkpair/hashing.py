"""Hashes of big files: all cores, reading and hashing at the same time, the page cache left as it was.

What is not in the page cache is read with O_DIRECT, past it (see `pagecache`). Where a filesystem doesn't
offer that, each block is read the ordinary way and those of its pages that weren't cached before are dropped.
`hashlib` and `preadv` both release the GIL, so threads are enough. One sha256 can't be split, so the
largest file is begun first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import stat as stat_bits
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import pagecache
from .problem import Problem

if TYPE_CHECKING:
    from hashlib import _Hash

_BLOCK = 2 << 20  # bytes of one read
_PIECE = 256 << 10  # bytes of one read out of the page cache
_DEPTH = 4  # blocks in flight for one file
_READERS = 2  # reads of one file at the same time
_ALIGNMENT = 4096
# Two writes within one tick of the kernel's clock can leave the same mtime (git's "racy" files).
_CLOCK_TICK_NS = 20_000_000

SHA256 = "sha256"
GIT_BLOB_SHA1 = "git_blob_sha1"


@dataclass(frozen=True)
class Digest:
    """The hash of a file, in hex, and the stat of the file that was hashed."""

    hex: str
    stat: os.stat_result


@dataclass(frozen=True)
class Job:
    """One file to hash. `size` (bytes) only sets the order; `follow` takes a link for its target."""

    name: str
    path: Path
    size: int
    algorithm: str = SHA256
    follow: bool = False


def new_hash(algorithm: str, size: int) -> _Hash:
    """A hash to feed with a file's content. `size` (bytes) is part of Git's blob id.

    Raises ValueError for an algorithm other than "sha256" and "git_blob_sha1".
    """
    if algorithm == SHA256:
        return hashlib.sha256()
    if algorithm == GIT_BLOB_SHA1:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    raise ValueError(f"unknown hash {algorithm!r}")


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def digest_file(
    path: Path,
    algorithm: str = SHA256,
    *,
    follow: bool = False,
    direct: bool = True,
    evict: bool = False,
    on_bytes: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> Digest:
    """Hash the plain file `path`; what of it was not on the disk yet is there when this returns.

    Args:
        path: the file; a symbolic link is refused unless `follow`.
        algorithm: "sha256" or "git_blob_sha1".
        direct: False reads through the page cache and drops what it brought in.
        evict: let the page cache go of the whole file afterwards (it was just written).
        on_bytes: called with the number of bytes hashed since the last call.
        stop: when set, the work ends with KeyboardInterrupt at the next block.

    Raises:
        Problem: not a plain file, or it was written to while being read.
        OSError: the file is absent or can't be read.
    """
    fd = _open_plain(path, follow)
    try:
        pagecache.start_writeback(fd)
        before = _settled_stat(fd)
        digest = new_hash(algorithm, before.st_size)
        for block in _blocks(fd, before.st_size, direct):
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            digest.update(block)
            if on_bytes:
                on_bytes(len(block))
        os.fsync(fd)  # else a receipt could outlive, over a power cut, the bytes that it vouches for
        if evict:
            pagecache.drop(fd)
        after = os.fstat(fd)
    finally:
        os.close(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _changed(path)
    return Digest(digest.hexdigest(), before)


def digest_files(
    jobs: Iterable[Job],
    *,
    threads: int | None = None,
    direct: bool = True,
    evict: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[tuple[Job, Digest | Problem | OSError]]:
    """Hash many files on all cores, the largest first. Yields each as it is done, a fault in its place."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(threads or cores(), thread_name_prefix="hash")
    try:
        running = {
            pool.submit(
                digest_file,
                job.path,
                job.algorithm,
                follow=job.follow,
                direct=direct,
                evict=evict,
                on_bytes=on_bytes,
                stop=stop,
            ): job
            for job in sorted(jobs, key=lambda job: -job.size)
        }
        for done in as_completed(running):
            yield running[done], _result(done)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _result(done: Future[Digest]) -> Digest | Problem | OSError:
    try:
        return done.result()
    except (Problem, OSError) as fault:
        return fault


def _open_plain(path: Path, follow: bool) -> int:
    # O_NONBLOCK: a named pipe without a writer would hold the open for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise _not_plain(path) from None
        raise
    if not stat_bits.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_plain(path)
    return fd


def _settled_stat(fd: int) -> os.stat_result:
    """The file's stat, taken when any later write is sure to change its mtime."""
    found = os.fstat(fd)
    while 0 <= time.time_ns() - found.st_mtime_ns < _CLOCK_TICK_NS:
        time.sleep(_CLOCK_TICK_NS / 1e9)
        found = os.fstat(fd)
    return found


def _blocks(fd: int, size: int, direct: bool) -> Iterator[memoryview]:
    """The file's content in order. A piece is good until the next one is asked for."""
    with contextlib.ExitStack() as stack:
        source = _Source(fd, size, direct)
        stack.callback(source.close)
        # Memory maps are aligned as O_DIRECT needs it. They are freed when the last view of them is gone.
        depth = max(1, min(_DEPTH, -(-size // _BLOCK)))
        views = [memoryview(mmap.mmap(-1, _BLOCK)) for _ in range(depth)]
        pool = ThreadPoolExecutor(min(_READERS, depth), thread_name_prefix="read")
        stack.callback(pool.shutdown, cancel_futures=True)
        offsets = iter(range(0, size, _BLOCK))
        flying: deque[tuple[int, memoryview, Future[int] | None]] = deque()

        def send(view: memoryview) -> None:
            offset = next(offsets, None)
            if offset is not None:
                cached = source.is_cached(offset)
                flying.append((offset, view, None if cached else pool.submit(source.read, view, offset)))

        for view in views:
            send(view)
        while flying:
            offset, view, reading = flying.popleft()
            if reading is None:
                yield from source.cached_pieces(view, offset)
            else:
                yield view[: reading.result()]
            send(view)


class _Source:
    """Reads blocks of one file, from several threads, and leaves the page cache as it was.

    What is in the page cache already is taken from there, in pieces that stay in the processor's own
    cache; the rest comes past it.
    """

    def __init__(self, fd: int, size: int, direct: bool) -> None:
        self._fd = fd
        self._size = size
        self._knows_cache = pagecache.is_told_truth(fd)
        self._direct_fd: int | None = None
        if direct:
            with contextlib.suppress(OSError):  # not every filesystem has O_DIRECT
                self._direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        # No read-ahead: it would bring in pages beyond the block that we look at.
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def is_cached(self, offset: int) -> bool:
        """Whether the whole block at `offset` is in the page cache."""
        return self._knows_cache and pagecache.is_cached(self._fd, offset, self._length(offset))

    def cached_pieces(self, view: memoryview, offset: int) -> Iterator[memoryview]:
        """The block at `offset`, from the page cache, in small pieces."""
        end = offset + self._length(offset)
        while offset < end:
            count = os.preadv(self._fd, [view[: min(_PIECE, end - offset)]], offset)
            _expect(count)
            yield view[:count]
            offset += count

    def read(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the block at `offset`. Returns the number of bytes."""
        want = self._length(offset)
        got = 0
        while got < want:
            count = self._read_some(view, offset, got, want)
            _expect(count)
            got = min(got + count, want)
        return got

    def _length(self, offset: int) -> int:
        return min(_BLOCK, self._size - offset)

    def _read_some(self, view: memoryview, offset: int, got: int, want: int) -> int:
        if self._direct_fd is not None and got % _ALIGNMENT == 0:
            try:
                return os.preadv(self._direct_fd, [view[got:]], offset + got)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        start = (offset + got) // mmap.PAGESIZE * mmap.PAGESIZE
        length = offset + want - start
        brought_in = (
            pagecache.absent_ranges(self._fd, start, length) if self._knows_cache else [(start, length)]
        )
        count = os.preadv(self._fd, [view[got:want]], offset + got)
        for first, extent in brought_in:
            pagecache.drop(self._fd, first, extent)
        return count


def _expect(count: int) -> None:
    if count == 0:
        raise OSError(errno.EIO, "the file became shorter while it was read")


def _not_plain(path: Path) -> Problem:
    return Problem(
        found=f"{path} is a link or a special file",
        needed="a plain file",
        do=f"remove it (rm {path}) and fetch the file again",
        code="not-plain",
    )


def _changed(path: Path) -> Problem:
    return Problem(
        found=f"{path} was written to while it was read",
        needed="a file that nothing writes to",
        do="let the fetch or copy end, then run the same command again",
        code="file-changed",
    )
