"""`sparkpair verify`: what is wrong is found and named, what was read once is not read again."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparkpair import cli, hashing, locks, pagecache, verify
from sparkpair.locks import Lock, LockedFile
from sparkpair.receipts import NAME, Receipts

CONTENT = {
    "config.json": b'{"model_type": "deepseek_v41"}',
    "model-00001-of-00002.safetensors": b"\1" * 5000,
    "model-00002-of-00002.safetensors": b"\2" * 300_000,
    "inner/notes.txt": b"notes",
    "empty": b"",
}


def lock_of(content: dict[str, bytes]) -> Lock:
    """Small files by Git's id, shards by sha256, as the Hub has it."""
    files = [
        LockedFile(path, len(data), sha256=hashlib.sha256(data).hexdigest())
        if path.endswith(".safetensors")
        else LockedFile(path, len(data), git_blob_sha1=blob(data))
        for path, data in content.items()
    ]
    return Lock("owner/name", "0" * 40, tuple(sorted(files)))


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 (Git's own)


def fill(directory: Path, content: dict[str, bytes] = CONTENT) -> Path:
    for path, data in content.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "weights")


LOCK = lock_of(CONTENT)
SHARD = "model-00002-of-00002.safetensors"


def check(folder: Path, **options: Any) -> verify.Report:
    return verify.verify(LOCK, folder, quiet=True, **options)


def codes(report: verify.Report) -> list[str]:
    return [problem.code for problem in report.problems]


def test_a_whole_folder_is_read_once_and_then_vouched_for_by_receipts(folder: Path) -> None:
    first = check(folder)
    assert (first.ok, first.changed, first.checked) == (True, True, 5)
    assert first.bytes == LOCK.total_bytes
    second = check(folder)
    assert (second.ok, second.changed, second.bytes) == (True, False, 0)


def test_full_reads_every_byte_again(folder: Path) -> None:
    check(folder)
    again = check(folder, full=True)
    assert (again.bytes, again.changed) == (LOCK.total_bytes, False)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_of_any_file_is_found_and_named_field_report_37(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = fill(tmp_path_factory.mktemp("weights"))
    check(folder)
    path = data.draw(st.sampled_from([path for path, content in CONTENT.items() if content]))
    place = data.draw(st.integers(0, len(CONTENT[path]) - 1))
    bit = data.draw(st.integers(0, 7))
    keep_stat = data.draw(st.booleans())
    stamp = (folder / path).stat()
    with (folder / path).open("r+b") as handle:
        handle.seek(place)
        handle.write(bytes([CONTENT[path][place] ^ 1 << bit]))
    os.utime(folder / path, ns=(0, stamp.st_mtime_ns if keep_stat else stamp.st_mtime_ns + 1))
    report = check(folder, full=keep_stat)
    assert list(report.bad) == [path]
    bad = report.bad[path]
    got = hashing.digest_file(folder / path, LOCK.by_path[path].algorithm).hex
    assert (bad.state, bad.expected, bad.got) == ("wrong-hash", LOCK.by_path[path].digest, got)
    assert codes(report) == ["wrong-hash"]
    assert path in report.problems[0].found
    assert str(got) in report.problems[0].found
    assert LOCK.by_path[path].digest in report.problems[0].needed
    assert not Receipts.open(folder).holds(LOCK.by_path[path])


def test_a_missing_and_a_short_file_are_found_without_reading(folder: Path) -> None:
    check(folder)
    (folder / "config.json").unlink()
    (folder / SHARD).write_bytes(b"\2" * 1000)
    report = check(folder)
    assert report.bytes == 0
    assert report.bad["config.json"].as_dict() == {"state": "missing", "expected": 30, "got": None}
    assert report.bad[SHARD].as_dict() == {"state": "wrong-size", "expected": 300_000, "got": 1000}


def test_the_command_that_mends_names_the_lock_and_the_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").unlink()
    lock = tmp_path / "the lock.json"
    lock.write_text(locks.dump(LOCK))
    assert cli.main(["verify", "--lock", str(lock), "--dir", str(folder), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["do"].endswith(f"sparkpair fetch --lock '{lock}' --to {folder}")
    assert LOCK.repo in check(folder).problems[0].do  # read from stdin: which lock, at least


def test_forty_missing_files_are_one_problem_with_the_first_few_names(tmp_path: Path) -> None:
    report = verify.verify(LOCK, tmp_path / "nowhere", quiet=True)
    assert codes(report) == ["missing"]
    assert "5 of 5 files" in report.problems[0].found
    assert "config.json" in report.problems[0].found
    assert not (tmp_path / "nowhere").exists()


def test_one_file_is_a_file(tmp_path: Path) -> None:
    report = verify.verify(lock_of({"config.json": b"{}"}), tmp_path, quiet=True)
    assert "1 of 1 file in" in report.problems[0].found


def test_a_stray_shard_is_refused_by_name_since_the_engine_reads_every_one(folder: Path) -> None:
    (folder / "zz_extra.safetensors").write_bytes(b"")
    report = check(folder)
    assert codes(report) == ["stray-file"]
    assert "zz_extra.safetensors" in report.problems[0].found
    assert check(folder, only_listed=True).ok


def test_what_the_fetcher_keeps_for_itself_is_no_stray(folder: Path) -> None:
    fill(folder, {".sparkpair-partial/quarantine/model.safetensors": b"bad", "README.md": b"more"})
    assert check(folder).ok


def test_links_and_special_files_are_refused(folder: Path) -> None:
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")
    (folder / "other").symlink_to("config.json")
    os.mkfifo(folder / "pipe")
    report = check(folder)
    assert report.bad[SHARD].as_dict() == {"state": "not-plain", "expected": "a plain file", "got": "link"}
    assert codes(report) == ["not-plain", "not-plain"]
    assert "other (link), pipe (named pipe)" in report.problems[1].found


def test_a_link_is_taken_for_its_file_where_that_is_wanted(folder: Path) -> None:
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")
    report = check(folder, follow_links=True, only_listed=True)
    assert report.ok
    assert check(folder, follow_links=True, only_listed=True).bytes == 0


def test_another_users_file_is_named_with_the_repair_action_field_report_33(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "expected_owner", lambda _: os.geteuid() + 1)
    report = check(folder)
    assert codes(report) == ["foreign-owner"]
    problem = report.problems[0]
    assert problem.found.startswith("8 paths")  # the folder, five files, one folder and the receipts
    assert "config.json" in problem.found
    assert problem.do.startswith("sudo chown -hR ")
    assert problem.do.endswith(str(folder))


def test_an_unreadable_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith("config.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    report = check(folder)
    assert codes(report) == ["unreadable"]
    assert "config.json" in report.problems[0].found
    assert "chown" in report.problems[0].do


def test_the_command_answers_with_one_json_object_and_exit_code_1_for_a_problem(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text(locks.dump(LOCK))
    words = ["verify", "--lock", str(lock), "--dir", str(folder), "--json"]
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["changed"] and told["checked"] == 5 and told["files"] == {}
    (folder / "config.json").write_bytes(b'{"model_type": "deepseek_v42"}')
    assert cli.main(words) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert told["files"]["config.json"]["state"] == "wrong-hash"
    assert {"code", "severity", "host", "found", "needed", "do"} == set(told["problems"][0])


def test_the_command_reads_a_lock_from_stdin(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(locks.dump(LOCK)))
    assert cli.main(["verify", "--lock", "-", "--dir", str(folder)]) == 0
    assert "as the lock says" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("{}x"))
    assert cli.main(["verify", "--lock", "-", "--dir", str(folder)]) == 1
    assert "no lock" in capsys.readouterr().err


def test_receipts_for_45_files_lie_beside_the_data(tmp_path: Path) -> None:
    content = {f"model-{number:05}-of-00045.safetensors": bytes([number]) for number in range(45)}
    folder = fill(tmp_path / "many", content)
    assert verify.verify(lock_of(content), folder, quiet=True).bytes == 45
    assert verify.verify(lock_of(content), folder, quiet=True).bytes == 0
    assert (folder / NAME).is_file()


def test_following_answers_for_each_file_as_it_arrives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / SHARD).unlink()
    (folder / "config.json").write_bytes(b'{"model_type": "deepseek_v42"}')

    def asked() -> Iterator[str]:
        yield json.dumps(json.loads(locks.dump(LOCK))) + "\n"
        (folder / SHARD).write_bytes(CONTENT[SHARD])
        for path in (SHARD, "config.json", "../secret"):
            yield json.dumps(path) + "\n"

    lines = asked()

    class Stdin:
        def readline(self) -> str:
            return next(lines)

        def __iter__(self) -> Iterator[str]:
            return lines

    monkeypatch.setattr("sys.stdin", Stdin())
    words = ["verify", "--lock", "-", "--dir", str(folder), "--json", "--quiet", "--follow"]
    assert cli.main(words) == 0
    report, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(report["files"]) == {SHARD, "config.json"}
    told = {answer["path"]: answer["bad"] for answer in answers}
    assert told[SHARD] is None
    assert told["config.json"]["state"] == "wrong-hash"
    assert told["../secret"]["state"] == "not-plain"
    assert Receipts.open(folder).holds(LOCK.by_path[SHARD])
    assert pagecache.resident_bytes(folder / SHARD) == 0
