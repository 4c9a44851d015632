"""`sparkpair verify`: what is wrong is found and named, what was read once is not read again."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparkpair import atomic, cli, hashing, locks, pagecache, verify
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
    assert problem.found.startswith("7 paths")  # the folder, five files and one folder
    assert "config.json" in problem.found
    assert problem.do.startswith("sudo chown -hR ")
    assert problem.do.endswith(str(folder))


class Closed:
    """Makes files unreadable by their mode, also for root, who runs the tests in a container."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self._access = os.open, os.access
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(verify, "_may", self.may)

    def may(self, path: Path, what: int) -> bool:
        needed = (0o400 if what & os.R_OK else 0) | (0o100 if what & os.X_OK else 0)
        return path.stat().st_mode & needed == needed

    def open(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).startswith("/") and Path(path).is_file() and not self.may(Path(path), os.R_OK):
            raise PermissionError(13, "Permission denied", str(path))
        return self._open(path, flags, *rest, **named)


@pytest.mark.parametrize("receipts", [True, False])
def test_an_unreadable_file_is_named_also_where_a_receipt_spares_the_reading(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, receipts: bool
) -> None:
    Closed(monkeypatch)
    if receipts:
        assert check(folder).ok
    (folder / "config.json").chmod(0)
    report = check(folder)
    assert codes(report) == ["unreadable"]
    assert "config.json" in report.problems[0].found
    assert report.problems[0].do == f"sudo chmod -R u+rX,go+rX {folder}"
    (folder / "config.json").chmod(0o644)
    again = check(folder)
    assert again.ok
    assert again.bytes == (0 if receipts else len(CONTENT["config.json"]))  # the receipt was kept


@pytest.mark.parametrize(("mode", "words"), [(0o600, ["chown"]), (0o000, ["chown", "chmod"])])
def test_an_unreadable_file_of_another_user_is_mended_by_its_owner_field_report_33(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: int, words: list[str]
) -> None:
    (folder / "config.json").chmod(mode)
    monkeypatch.setattr(verify, "expected_owner", lambda _: os.geteuid() + 1)
    monkeypatch.setattr(verify, "_may", lambda path, _: path.name != "config.json")
    problem = check(folder, only_listed=True).problems[0]
    assert problem.code == "unreadable"
    assert [word for word in ("chown", "chmod") if word in problem.do] == words


def test_a_file_that_the_disk_does_not_give_back_is_no_matter_of_modes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(hashing, "digest_file", broken)
    (problem,) = check(folder).problems
    assert problem.code == "unreadable"
    assert "Input/output error" in problem.found
    assert "chmod" not in problem.do and "chown" not in problem.do


def test_a_folder_that_may_not_be_looked_into_does_not_cost_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.lstat

    def refusing(path: Path) -> os.stat_result:
        if path.name == "other":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    (folder / "other").write_bytes(b"")
    (folder / SHARD).write_bytes(b"\3" * 300_000)
    monkeypatch.setattr(Path, "lstat", refusing)
    report = check(folder)
    assert codes(report) == ["wrong-hash", "unreadable"]
    assert "other (Permission denied)" in report.problems[1].found


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EISDIR])
def test_receipts_that_can_not_be_written_never_cost_the_report_field_report_37(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    (folder / SHARD).write_bytes(b"\3" * 300_000)
    monkeypatch.setattr(atomic, "replacing", failing)
    report = check(folder)
    assert codes(report) == ["wrong-hash"]
    assert SHARD in report.problems[0].found
    assert (report.changed, report.unwritten) == (False, os.strerror(number))
    assert report.as_dict()["unwritten"] == os.strerror(number)
    lock = tmp_path / "lock.json"
    lock.write_text(locks.dump(LOCK))
    assert cli.main(["verify", "--lock", str(lock), "--dir", str(folder), "--quiet"]) == 1
    said = capsys.readouterr().err
    assert f"can't be written ({os.strerror(number)})" in said
    assert SHARD in said


def test_the_command_ends_by_sigterm_as_by_ctrl_c_and_says_so_as_json(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text(locks.dump(LOCK))
    script = (
        "import sys, os, signal; from sparkpair import cli, hashing\n"
        "def digest(*_, **__): os.kill(os.getpid(), signal.SIGTERM); return iter(())\n"
        "hashing.digest_files = digest\n"
        f"sys.exit(cli.main(['verify', '--lock', {str(tmp_path / 'lock.json')!r}, "
        f"'--dir', {str(folder)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout)["problems"][0]["code"] == "interrupted"


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


def given_to(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_the_command_reads_a_lock_from_stdin(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given_to(monkeypatch, locks.dump(LOCK).encode())
    assert cli.main(["verify", "--lock", "-", "--dir", str(folder)]) == 0
    assert "as the lock says" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", "it is not JSON"),
        (b"{}x", "it is not JSON"),
        (locks.dump(LOCK).replace('"repo"', '"repo": "other/name", "repo"').encode(), "twice in one object"),
        (locks.dump(LOCK).replace("owner", "\u00f6wner").encode("latin-1"), "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"repo": ' + b"9" * 5000 + b"}", "can't be read"),
        (b"{}", "has no"),
    ],
)
def test_a_lock_on_stdin_is_read_as_strictly_as_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: bytes, found: str
) -> None:
    given_to(monkeypatch, text)
    assert cli.main(["verify", "--lock", "-", "--dir", str(folder), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == "lock-bad"
    assert found in problem["found"] and "on stdin" in problem["found"]
    assert problem["do"] == "sparkpair verify --lock - --dir DIR < LOCK"


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

    leftover = folder / f".{SHARD}.a1B2c3"
    leftover.write_bytes(b"half")

    def asked() -> Iterator[str]:
        yield json.dumps(json.loads(locks.dump(LOCK))) + "\n"
        assert not leftover.exists()
        (folder / SHARD).write_bytes(CONTENT[SHARD])
        for path in (SHARD, "config.json", "../secret"):
            yield json.dumps(path) + "\n"

    lines = asked()

    class Stdin:
        def readline(self) -> bytes:
            return next(lines).encode()

        def __iter__(self) -> Iterator[bytes]:
            return (line.encode() for line in lines)

        @property
        def buffer(self) -> Stdin:
            return self

    monkeypatch.setattr("sys.stdin", Stdin())
    words = ["verify", "--lock", "-", "--dir", str(folder), "--json", "--quiet", "--follow", "--tidy"]
    assert cli.main(words) == 0
    report, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(report["files"]) == {SHARD, "config.json"}
    told = {answer["path"]: answer["bad"] for answer in answers}
    assert told[SHARD] is None
    assert told["config.json"]["state"] == "wrong-hash"
    assert told["../secret"]["state"] == "not-plain"
    assert Receipts.open(folder).holds(LOCK.by_path[SHARD])
    assert pagecache.resident_bytes(folder / SHARD) == 0


def followed(folder: Path, paths: Iterable[str], **options: Any) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    verify.follow(LOCK, folder, paths, told.append, **options)
    return told


@pytest.mark.parametrize(
    "fault", [OSError(errno.EIO, "Input/output error"), RuntimeError("a bug"), MemoryError()]
)
def test_whatever_goes_wrong_with_a_file_is_an_answer_field_report_50(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    """The other side waits for one: an exception in a thread of the pool left it waiting for ever."""

    def broken(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(verify.Follower, "check", broken)
    _, answer = followed(folder, [SHARD])
    assert answer["path"] == SHARD
    assert answer["bad"]["state"] == "unreadable"
    assert answer["bad"]["got"] == (str(fault) or type(fault).__name__)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EISDIR, errno.EACCES])
def test_a_receipt_that_can_not_be_written_makes_no_file_bad_and_is_told_field_report_50(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic, "replacing", failing)
    report, *answers = followed(folder, [SHARD, "config.json"])
    assert report["ok"] and report["unwritten"] == os.strerror(number)
    assert {answer["path"]: answer["bad"] for answer in answers} == {SHARD: None, "config.json": None}
    assert {answer["unwritten"] for answer in answers} == {os.strerror(number)}


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_in_the_place_of_the_receipts_is_told_not_waited_for(
    folder: Path, make: Callable[[Path], None]
) -> None:
    make(folder / NAME)
    report, answer = followed(folder, [SHARD])
    assert NAME in report["unwritten"] or "directory" in report["unwritten"]
    assert (answer["bad"], answer["unwritten"]) == (None, report["unwritten"])


def test_long_work_gives_a_sign_of_life_also_during_the_first_survey_field_report_50(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "HEARTBEAT_S", 0.02)
    real = hashing.digest_file

    def slow(*arguments: Any, **options: Any) -> hashing.Digest:
        time.sleep(0.2)
        return real(*arguments, **options)

    monkeypatch.setattr(hashing, "digest_file", slow)
    told = followed(folder, [SHARD])
    beats = ["alive" in answer for answer in told]
    report, answer = [told.index(line) for line in told if "alive" not in line]
    assert sum(beats[:report]) >= 3
    assert sum(beats[report:answer]) >= 3
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_an_interrupted_session_ends_its_checks_and_calls_no_file_bad(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def endless(*_: Any, stop: threading.Event | None = None, **__: Any) -> Any:
        begun.set()
        assert stop is not None and stop.wait(10)
        raise KeyboardInterrupt

    def asked() -> Iterator[str]:
        monkeypatch.setattr(hashing, "digest_file", endless)
        yield SHARD
        assert begun.wait(10)
        raise KeyboardInterrupt

    told: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        verify.follow(LOCK, folder, asked(), told.append)
    assert [set(line) & {"path"} for line in told] == [set()]


def test_only_what_a_killed_copy_left_of_locked_files_is_swept_field_report_50(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"model.safetensors": b"1", "inner/notes": b"2", ".gitattributes": b"3", ".inner.abcdef": b"4"}
    content |= {".model.safetensors.locked": b"5"}
    folder = fill(tmp_path / "weights", content)
    halves = {".model.safetensors.a1B2c3", "inner/.notes.Zz9Zz9", ".gitattributes.aaaaaa"}
    others = {
        ".model.safetensors.a1B2c",
        ".model.safetensors.a1-2c3",
        "model.safetensors.a1B2c3",
        ".other.a1B2c3",
    }
    others |= {"inner/.model.safetensors.a1B2c3"}
    fill(folder, dict.fromkeys(halves | others, b"half"))
    (folder / ".model.safetensors.ffffff").mkdir()
    (folder / ".model.safetensors.llllll").symlink_to("model.safetensors")
    lock = lock_of(content)
    assert set(verify.sweep(lock, folder)) == halves
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert left == set(content) | others | {".model.safetensors.llllll"}
    fill(folder, dict.fromkeys(halves, b"half"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert verify.sweep(lock, folder) == []
    assert verify.sweep(lock, tmp_path / "nowhere") == []


def test_nothing_is_swept_where_a_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", {".notes.aaaaaa": b"mine"})
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/inner").symlink_to(outside)
    assert verify.sweep(lock_of({"inner/notes": b"2"}), tmp_path / "weights") == []


def test_a_session_that_does_not_tidy_leaves_the_files_of_running_copies(folder: Path) -> None:
    """A session is begun again in the middle of a copy; what lies there then is being written."""
    half = folder / f".{SHARD}.a1B2c3"
    half.write_bytes(b"half")
    followed(folder, [])
    assert half.exists()
    followed(folder, [], tidy=True)
    assert not half.exists()
