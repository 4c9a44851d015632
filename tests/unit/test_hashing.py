"""Hashes agree with hashlib and git whatever the size, and the page cache stays as it was (field report 53)."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from pathlib import Path

import pytest
from sparkpair import hashing, pagecache
from sparkpair.hashing import Digest, Job
from sparkpair.problem import Problem

BLOCK = hashing._BLOCK
# Around the edges of pages and blocks, and more blocks than are in flight at a time.
SIZES = [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 12345]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(path: Path, size: int, *, cached: bool = False) -> bytes:
    data = os.urandom(size)
    path.write_bytes(data)
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
        if not cached:
            pagecache.drop(handle.fileno())
    return data


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_has_the_sha256_of_its_bytes_however_it_is_read(
    folder: Path, size: int, direct: bool, cached: bool
) -> None:
    path = folder / "shard"
    data = write(path, size, cached=cached)
    counted: list[int] = []
    digest = hashing.digest_file(path, direct=direct, on_bytes=counted.append)
    assert digest.hex == hashlib.sha256(data).hexdigest()
    assert sum(counted) == size == digest.stat.st_size


def test_a_small_file_has_the_id_that_git_gives_its_content(folder: Path) -> None:
    path = folder / "LICENSE"
    path.write_bytes(b"hello world\n")
    # git hash-object: a recorded value
    assert hashing.digest_file(path, "git_blob_sha1").hex == "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"


def test_an_unknown_hash_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="md5"):
        hashing.new_hash("md5", 0)


@pytest.mark.parametrize("direct", [True, False])
def test_reading_400_gb_leaves_the_page_cache_as_it_was_field_report_53(folder: Path, direct: bool) -> None:
    path = folder / "shard"
    write(path, 16 * BLOCK)
    before = pagecache.resident_bytes(path)
    hashing.digest_file(path, direct=direct)
    assert pagecache.resident_bytes(path) - before <= 0.05 * 16 * BLOCK


@pytest.mark.parametrize("direct", [True, False])
def test_what_was_cached_before_stays_cached(folder: Path, direct: bool) -> None:
    path = folder / "shard"
    write(path, 8 * BLOCK)
    kept = 3 * BLOCK
    with path.open("rb") as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        handle.read(kept)
    if pagecache.resident_bytes(path) < kept:
        pytest.fail("the filesystem of the temporary folder has no page cache to speak of")
    hashing.digest_file(path, direct=direct)
    assert 0.95 * kept <= pagecache.resident_bytes(path) <= 1.05 * kept + BLOCK


def test_a_file_just_written_can_be_put_out_of_the_page_cache(folder: Path) -> None:
    path = folder / "shard"
    write(path, 4 * BLOCK, cached=True)
    hashing.digest_file(path, evict=True)
    assert pagecache.resident_bytes(path) <= 0.05 * 4 * BLOCK


def test_a_filesystem_without_o_direct_is_read_the_ordinary_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "shard"
    data = write(path, 3 * BLOCK + 5)
    real = os.open

    def refusing(name: object, flags: int, *rest: object, **named: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(name, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    assert hashing.digest_file(path).hex == hashlib.sha256(data).hexdigest()


def test_reads_that_o_direct_refuses_midway_go_on_the_ordinary_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "shard"
    data = write(path, 3 * BLOCK + 5)
    real = os.preadv
    direct = {"reads": 0}

    def refusing(fd: int, views: list[memoryview], offset: int) -> int:
        if int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8) & os.O_DIRECT:
            direct["reads"] += 1
            if direct["reads"] > 1:
                raise OSError(22, "Invalid argument")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    assert hashing.digest_file(path).hex == hashlib.sha256(data).hexdigest()


def test_a_file_written_to_while_it_is_read_gets_no_hash(folder: Path) -> None:
    path = folder / "shard"
    write(path, 4 * BLOCK)
    once = threading.Event()

    def scribble(_: int) -> None:
        if not once.is_set():
            once.set()
            with path.open("ab") as handle:
                handle.write(b"more")

    with pytest.raises(Problem) as caught:
        hashing.digest_file(path, on_bytes=scribble)
    assert caught.value.code == "file-changed"


def test_a_link_a_pipe_and_a_socket_are_no_files(folder: Path) -> None:
    (folder / "data").write_bytes(b"x")
    (folder / "link").symlink_to("data")
    os.mkfifo(folder / "pipe")  # opening it must not wait for a writer
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        for name in ("link", "pipe", "socket", "."):
            with pytest.raises(Problem) as caught:
                hashing.digest_file(folder / name)
            assert caught.value.code == "not-plain"
    assert hashing.digest_file(folder / "link", follow=True).hex == hashlib.sha256(b"x").hexdigest()


def test_the_largest_file_is_begun_first_since_one_hash_cannot_be_split(folder: Path) -> None:
    jobs = []
    for number, size in enumerate([10, BLOCK, 3 * BLOCK, 100]):
        write(folder / str(number), size)
        jobs.append(Job(str(number), folder / str(number), size))
    order = [job.name for job, _ in hashing.digest_files(jobs, threads=1)]
    assert order == ["2", "1", "3", "0"]


def test_a_fault_of_one_file_does_not_stop_the_others(folder: Path) -> None:
    write(folder / "good", 100)
    jobs = [Job("good", folder / "good", 100), Job("gone", folder / "gone", 100)]
    found = {job.name: result for job, result in hashing.digest_files(jobs)}
    assert isinstance(found["good"], Digest)
    assert isinstance(found["gone"], FileNotFoundError)


def test_leaving_the_loop_early_stops_the_reading(folder: Path) -> None:
    write(folder / "small", 10)
    write(folder / "big", 40 * BLOCK)
    read: list[int] = []
    jobs = [Job("small", folder / "small", 10), Job("big", folder / "big", 40 * BLOCK)]
    results = hashing.digest_files(jobs, threads=2, on_bytes=read.append)
    assert next(results)[0].name == "small"
    results.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("hash", "read"))]
    assert sum(read) < 40 * BLOCK + 10


def test_residency_is_told_page_by_page(folder: Path) -> None:
    path = folder / "file"
    write(path, 64 * 4096)
    with path.open("rb") as handle:
        fd = handle.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 4096, 10 * 4096)
        pages = pagecache.residency(fd, 0, 64 * 4096)
        assert pages[10] == 1
        absent = pagecache.absent_ranges(fd, 0, 64 * 4096)
        assert sum(length for _, length in absent) == 4096 * pages.count(0)
        assert not any(start <= 10 * 4096 < start + length for start, length in absent)
        assert not pagecache.is_cached(fd, 0, 64 * 4096)
        assert pagecache.is_cached(fd, 10 * 4096, 4096)
        assert pagecache.residency(fd, 0, 0) == b""


def test_without_cachestat_mincore_tells(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "file"
    write(path, 8 * 4096, cached=True)
    monkeypatch.setattr(pagecache, "cached_pages", lambda *_: None)
    with path.open("rb") as handle:
        assert pagecache.is_cached(handle.fileno(), 0, 8 * 4096)
        pagecache.drop(handle.fileno())
        assert not pagecache.is_cached(handle.fileno(), 0, 8 * 4096)


def test_who_may_not_know_the_cache_reads_past_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a stranger the kernel says that every page is cached; believing it would fill the cache."""
    path = folder / "file"
    data = write(path, 5 * BLOCK)
    monkeypatch.setattr(pagecache, "is_told_truth", lambda _: False)
    monkeypatch.setattr(pagecache, "is_cached", lambda *_: pytest.fail("asked all the same"))
    for direct in (True, False):
        assert hashing.digest_file(path, direct=direct).hex == hashlib.sha256(data).hexdigest()
        assert pagecache.resident_bytes(path) <= 0.05 * len(data)
