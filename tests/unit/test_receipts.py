"""Receipts: a second verification is a stat, and any sign of a change makes it a reading."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparkpair import atomic, receipts
from sparkpair.locks import LockedFile
from sparkpair.receipts import NAME, Receipts


@pytest.fixture
def entry(tmp_path: Path) -> LockedFile:
    (tmp_path / "shard").write_bytes(b"data")
    return LockedFile("shard", 4, sha256=hashlib.sha256(b"data").hexdigest())


def recorded(directory: Path, entry: LockedFile) -> Receipts:
    book = Receipts.open(directory)
    book.record(entry, (directory / entry.path).stat())
    assert book.save()
    return Receipts.open(directory)


def test_a_recorded_file_is_vouched_for_in_the_next_process(tmp_path: Path, entry: LockedFile) -> None:
    assert not Receipts.open(tmp_path).holds(entry)
    assert recorded(tmp_path, entry).holds(entry)


def test_a_receipt_holds_size_mtime_inode_and_hash(tmp_path: Path, entry: LockedFile) -> None:
    recorded(tmp_path, entry)
    found = (tmp_path / "shard").stat()
    assert json.loads((tmp_path / NAME).read_text()) == {
        "version": 1,
        "files": {
            "shard": {
                "size": 4,
                "mtime_ns": found.st_mtime_ns,
                "inode": found.st_ino,
                "sha256": entry.sha256,
            }
        },
    }


def touched(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def replaced_by_a_twin(path: Path) -> None:
    stamp = path.stat().st_mtime_ns
    twin = path.with_name("twin")
    twin.write_bytes(b"DATA")
    os.utime(twin, ns=(stamp, stamp))
    twin.replace(path)


def longer(path: Path) -> None:
    stamp = path.stat().st_mtime_ns
    path.write_bytes(b"data+")
    os.utime(path, ns=(stamp, stamp))


def removed(path: Path) -> None:
    path.unlink()


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [touched, replaced_by_a_twin, longer, removed, linked])
def test_a_changed_stat_voids_the_receipt(tmp_path: Path, entry: LockedFile, change: Any) -> None:
    book = recorded(tmp_path, entry)
    change(tmp_path / "shard")
    assert not book.holds(entry)
    assert not Receipts.open(tmp_path).holds(entry)


def test_a_lock_with_another_hash_or_another_kind_of_hash_is_not_vouched_for(
    tmp_path: Path, entry: LockedFile
) -> None:
    book = recorded(tmp_path, entry)
    assert not book.holds(LockedFile("shard", 4, sha256="0" * 64))
    assert not book.holds(LockedFile("shard", 4, git_blob_sha1="0" * 40))


def test_a_moved_folder_keeps_its_receipts_and_a_copied_one_does_not(
    tmp_path: Path, entry: LockedFile
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "shard").rename(inner / "shard")
    recorded(inner, entry)
    moved = inner.rename(tmp_path / "moved")
    assert Receipts.open(moved).holds(entry)
    copied = tmp_path / "copied"
    copied.mkdir()
    for name in ("shard", NAME):
        (copied / name).write_bytes((moved / name).read_bytes())
    assert not Receipts.open(copied).holds(entry)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"version": 2, "files": {}}',
        b'{"version": 1, "files": []}',
        b'{"version": 1, "files": {"shard": 1}}',
        b'{"version": 1, "files": {"shard": {"size": "4"}}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_receipt_is_no_receipt_and_is_written_anew(
    tmp_path: Path, entry: LockedFile, text: bytes
) -> None:
    (tmp_path / NAME).write_bytes(text)
    assert not Receipts.open(tmp_path).holds(entry)
    assert recorded(tmp_path, entry).holds(entry)


@given(text=st.binary(max_size=200))
def test_no_bytes_make_the_reader_fail(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    directory = tmp_path_factory.mktemp("receipts")
    (directory / NAME).write_bytes(text)
    assert not Receipts.open(directory).holds(LockedFile("shard", 4, sha256="0" * 64))


def test_a_forgotten_file_is_read_again(tmp_path: Path, entry: LockedFile) -> None:
    book = recorded(tmp_path, entry)
    book.forget("shard")
    assert not book.holds(entry)
    assert book.save()
    assert not Receipts.open(tmp_path).holds(entry)


def test_nothing_new_is_not_written(tmp_path: Path, entry: LockedFile) -> None:
    book = recorded(tmp_path, entry)
    stamp = (tmp_path / NAME).stat().st_mtime_ns
    book.record(entry, (tmp_path / "shard").stat())
    book.forget("never seen")
    assert not book.save()
    assert (tmp_path / NAME).stat().st_mtime_ns == stamp


def test_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    names = [f"file{number}" for number in range(16)]
    for name in names:
        (tmp_path / name).write_bytes(b"data")
    digest = hashlib.sha256(b"data").hexdigest()
    books = {name: Receipts.open(tmp_path) for name in names}  # all opened before any is saved

    def save(name: str) -> None:
        books[name].record(LockedFile(name, 4, sha256=digest), (tmp_path / name).stat())
        books[name].save()

    threads = [threading.Thread(target=save, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = Receipts.open(tmp_path)
    assert all(together.holds(LockedFile(name, 4, sha256=digest)) for name in names)


def test_a_folder_that_may_not_be_written_to_is_just_read_again_next_time(
    tmp_path: Path, entry: LockedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    book = Receipts.open(tmp_path)
    book.record(entry, (tmp_path / "shard").stat())
    monkeypatch.setattr(atomic, "replacing", refused)
    assert not book.save()
    assert not (tmp_path / NAME).exists()


def failing(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_only_costs_the_receipt_and_is_told(
    tmp_path: Path, entry: LockedFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    book = Receipts.open(tmp_path)
    book.record(entry, (tmp_path / "shard").stat())
    with monkeypatch.context() as full:
        full.setattr(atomic, "replacing", failing(number))
        assert not book.save()
    assert book.unwritten == os.strerror(number)
    assert book.save()  # with room again, nothing is lost
    assert book.unwritten is None
    assert Receipts.open(tmp_path).holds(entry)


def test_a_broken_disk_is_an_error(
    tmp_path: Path, entry: LockedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Receipts.open(tmp_path)
    book.record(entry, (tmp_path / "shard").stat())
    monkeypatch.setattr(atomic, "replacing", failing(errno.EIO))
    with pytest.raises(OSError, match=r"Input/output error"):
        book.save()
    assert book.unwritten == "Input/output error"


def test_a_bad_file_is_not_vouched_for_even_if_the_disk_is_full_field_report_37(
    tmp_path: Path, entry: LockedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = recorded(tmp_path, entry)
    book.forget("shard")
    monkeypatch.setattr(atomic, "replacing", failing(errno.ENOSPC))
    assert not book.save()
    assert not Receipts.open(tmp_path).holds(entry)


def test_receipts_that_another_process_never_lets_go_of_are_not_waited_for_for_ever(
    tmp_path: Path, entry: LockedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "_LOCK_WAIT_S", 0.1)
    book = Receipts.open(tmp_path)
    book.record(entry, (tmp_path / "shard").stat())
    with receipts._locked(tmp_path):
        assert not book.save()
        assert "another process" in str(book.unwritten)
    assert book.save()


def test_roots_receipt_belongs_to_the_folders_owner_field_report_33(
    tmp_path: Path, entry: LockedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[tuple[int, int]] = []
    monkeypatch.setattr(receipts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(receipts.os, "fchown", lambda _, uid, gid: owners.append((uid, gid)))
    recorded(tmp_path, entry)
    assert owners == [(tmp_path.stat().st_uid, tmp_path.stat().st_gid)]
