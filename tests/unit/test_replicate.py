"""Replicate: what the peer lacks, once, verified there, whatever breaks on the way.

The peer is a folder of this machine and the transport a copy with faults; `tests/integration` has the
real one (sshd, rsync).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sparkpair import cli, hashing, locks, peer, replicate, sshpeer, verify
from sparkpair.locks import Lock, LockedFile
from sparkpair.peer import Connection, Login
from sparkpair.problem import Problem
from sparkpair.receipts import NAME
from sparkpair.replicate import Parcel, Stalled, Way

CONTENT = {
    "config.json": b"{}",
    "model-00001.safetensors": b"\1" * 4000,
    "model-00002.safetensors": b"\2" * 5000,
    "model-00003.safetensors": b"\3" * 6000,
    "inner/notes": b"notes",
}


def entry_of(path: str, data: bytes) -> LockedFile:
    return LockedFile(path, len(data), sha256=hashlib.sha256(data).hexdigest())


LOCK = Lock("owner/name", "0" * 40, tuple(sorted(entry_of(path, data) for path, data in CONTENT.items())))


@dataclass
class FolderPeer:
    """A peer that is a folder here. `faults` maps a path to what happens to it at each try."""

    folder: Path
    faults: dict[str, list[str]] = field(default_factory=dict)
    name: str = "spark-b"
    sent: list[tuple[str, Way]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    free_bytes: int = 10**12
    delay_s: float = 0.0

    def survey(self, lock: Lock) -> dict[str, Any]:
        self.follower = verify.Follower(lock, self.folder)
        return {**verify.verify(lock, self.folder, quiet=True).as_dict(), "free_bytes": self.free_bytes}

    def check(self, entry: LockedFile, stop: threading.Event) -> dict[str, Any] | None:
        self.events.append(f"check {entry.path}")
        bad = self.follower.check(entry.path)
        return bad.as_dict() if bad else None

    def send(
        self,
        stream: int,
        source: Path,
        parcel: Parcel,
        on_bytes: Callable[[int], None],
        stop: threading.Event,
    ) -> int:
        for entry in parcel.files:
            self.sent.append((entry.path, parcel.way))
            self.events.append(f"send {entry.path}")
            fault = (self.faults.get(entry.path) or [""]).pop(0)
            data = (source / entry.path).read_bytes()
            place = self.folder / entry.path
            place.parent.mkdir(parents=True, exist_ok=True)
            there = place.read_bytes() if parcel.way is Way.RESUME and place.exists() else b""
            if fault == "stall":
                place.write_bytes(data[: len(data) // 2])
                raise Stalled("no byte moved", len(data) // 2)
            if fault == "full":
                raise Problem("the disk is full", "room", "free some", code="disk-full")
            if fault == "vanish":
                (source / entry.path).unlink()
                raise Problem("rsync ended with 23", "a copy that ends well", "look", code="copy-failed")
            if fault == "shrink":
                (source / entry.path).write_bytes(data[:1])
                raise Stalled("rsync ended with 12", 1)
            if fault == "unreadable here":
                raise Problem("rsync: [sender] read errors", "a copy", "look", code="copy-failed")
            if fault == "refused":
                raise Problem("rsync ended with 23", "a copy that ends well", "look", code="copy-failed")
            if fault == "rewrite":
                data = b"\7" * len(data)
                (source / entry.path).write_bytes(data)
            if fault == "rot":
                data = data[:-1] + b"\7"
                (source / entry.path).write_bytes(data)
            if fault == "flip":
                data = data[:-1] + bytes([data[-1] ^ 1])
            time.sleep(self.delay_s)
            place.write_bytes(there + data[len(there) :])
        on_bytes(parcel.size)
        return parcel.size


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for path, data in CONTENT.items():
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / path).write_bytes(data)
    return tmp_path / "source"


@pytest.fixture
def there(tmp_path: Path) -> FolderPeer:
    return FolderPeer(tmp_path / "there")


@pytest.fixture(autouse=True)
def each_shard_travels_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replicate, "_BATCH_BYTES", 1000)
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("stream", "verifier"))]


def copy(source: Path, there: FolderPeer, streams: int = 2) -> replicate.Result:
    return replicate.replicate(LOCK, source, there, streams=streams, quiet=True)


def refused(source: Path, there: FolderPeer) -> Problem:
    with pytest.raises(Problem) as caught:
        copy(source, there)
    return caught.value


def assert_whole(there: FolderPeer) -> None:
    assert {path: (there.folder / path).read_bytes() for path in CONTENT} == CONTENT


def test_a_fresh_peer_gets_every_file_the_largest_first_and_verified(source: Path, there: FolderPeer) -> None:
    result = copy(source, there, streams=1)
    assert_whole(there)
    assert (result.files, result.bytes, result.kept_files, result.retries) == (5, LOCK.total_bytes, 0, 0)
    assert [path for path, _ in there.sent][:3] == [f"model-0000{number}.safetensors" for number in (3, 2, 1)]
    assert {way for _, way in there.sent} == {Way.FRESH}


def test_a_second_copy_sends_nothing(source: Path, there: FolderPeer) -> None:
    copy(source, there)
    there.sent.clear()
    again = copy(source, there)
    assert not there.sent
    assert (again.files, again.kept_files, again.as_dict()["changed"]) == (0, 5, False)


def test_a_file_is_verified_while_the_next_ones_travel(source: Path, there: FolderPeer) -> None:
    there.delay_s = 0.1
    copy(source, there, streams=1)
    first_check = there.events.index("check model-00003.safetensors")
    assert first_check < there.events.index("send config.json")
    assert sum(event.startswith("check") for event in there.events) == 5


def test_only_what_is_missing_is_sent_and_half_a_file_is_resumed_field_report_50(
    source: Path, there: FolderPeer
) -> None:
    copy(source, there)
    there.sent.clear()
    (there.folder / "model-00001.safetensors").unlink()
    (there.folder / "model-00002.safetensors").write_bytes(b"\2" * 2500)
    (there.folder / "model-00003.safetensors").write_bytes(b"\3" * 5999 + b"\4")
    result = copy(source, there)
    assert_whole(there)
    assert dict(there.sent) == {
        "model-00001.safetensors": Way.FRESH,
        "model-00002.safetensors": Way.RESUME,
        "model-00003.safetensors": Way.REPLACE,
    }
    assert (result.files, result.kept_files) == (3, 2)


def test_a_resumed_file_with_a_wrong_beginning_is_sent_whole(source: Path, there: FolderPeer) -> None:
    there.folder.mkdir()
    (there.folder / "model-00002.safetensors").write_bytes(b"\7" * 100)
    result = copy(source, there)
    assert_whole(there)
    ways = [way for path, way in there.sent if path == "model-00002.safetensors"]
    assert ways == [Way.RESUME, Way.REPLACE]
    assert result.retries == 1


def test_a_file_that_arrives_flipped_is_sent_once_more(source: Path, there: FolderPeer) -> None:
    there.faults["model-00003.safetensors"] = ["flip"]
    result = copy(source, there)
    assert_whole(there)
    assert result.retries == 1
    assert ("model-00003.safetensors", Way.REPLACE) in there.sent


def test_a_file_that_arrives_flipped_twice_stops_the_copy_and_is_named(
    source: Path, there: FolderPeer
) -> None:
    there.faults["model-00003.safetensors"] = ["flip", "flip"]
    problem = refused(source, there)
    assert problem.code == "copy-corrupt"
    assert "model-00003.safetensors" in problem.found
    assert LOCK.by_path["model-00003.safetensors"].digest in problem.found
    assert problem.host == "spark-b"


@pytest.mark.parametrize(
    ("fault", "state", "tries"),
    [("rewrite", "wrong-hash", 1), ("vanish", "missing", 1), ("shrink", "wrong-size", 4)],
)
def test_a_source_that_changed_after_its_verification_is_not_blamed_on_the_worker(
    source: Path, there: FolderPeer, fault: str, state: str, tries: int
) -> None:
    shard, lock_file = "model-00003.safetensors", source.parent / "the lock.json"
    there.faults[shard] = [fault] * 9
    with pytest.raises(Problem) as caught:
        replicate.replicate(LOCK, source, there, streams=1, quiet=True, lock_file=lock_file)
    problem = caught.value
    assert problem.code == "source-changed"
    assert f"{source / shard} changed here" in problem.found
    assert state in problem.found
    assert problem.host is None
    assert f"sparkpair verify --lock '{lock_file}' --dir {source} --full" in problem.do
    assert [path for path, _ in there.sent].count(shard) == tries


def test_a_source_whose_stat_tells_nothing_is_read_before_the_worker_is_blamed(
    source: Path, there: FolderPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = "model-00003.safetensors"
    there.faults[shard] = ["rot", "rot"]
    monkeypatch.setattr(replicate._Source, "_stamp", lambda *_: (1,))
    problem = refused(source, there)
    assert (problem.code, problem.host) == ("source-changed", None)


def test_a_source_that_its_disk_no_longer_gives_back_is_named(
    source: Path, there: FolderPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, *_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error", str(path))

    there.faults["model-00003.safetensors"] = ["unreadable here"]
    verify.verify(LOCK, source, quiet=True)  # by receipts from here on
    monkeypatch.setattr(hashing, "digest_file", broken)
    problem = refused(source, there)
    assert (problem.code, problem.host) == ("source-changed", None)
    assert "unreadable" in problem.found and "Input/output error" in problem.found


def test_receipts_of_the_source_that_can_not_be_written_are_a_note(source: Path, there: FolderPeer) -> None:
    (source / NAME).mkdir()
    result = copy(source, there)
    assert_whole(there)
    assert len(result.as_dict()["notes"]) == 1
    assert str(source) in result.notes[0]


def test_a_copy_that_fails_from_a_whole_source_keeps_its_words(source: Path, there: FolderPeer) -> None:
    there.faults["model-00003.safetensors"] = ["refused"]
    assert refused(source, there).code == "copy-failed"


def test_a_touched_source_with_the_right_bytes_is_not_blamed(
    source: Path, there: FolderPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = iter(range(10**6))
    monkeypatch.setattr(replicate._Source, "_stamp", lambda *_: (next(stamps),))
    there.faults["model-00003.safetensors"] = ["flip"]
    assert copy(source, there).retries == 1
    assert_whole(there)


def test_a_stalled_flow_is_resumed_where_it_stopped(source: Path, there: FolderPeer) -> None:
    there.faults["model-00003.safetensors"] = ["stall", "stall"]
    result = copy(source, there)
    assert_whole(there)
    ways = [way for path, way in there.sent if path == "model-00003.safetensors"]
    assert ways == [Way.FRESH, Way.RESUME, Way.RESUME]
    assert result.retries == 2


def test_a_flow_that_stalls_again_and_again_is_given_up(source: Path, there: FolderPeer) -> None:
    there.faults["model-00003.safetensors"] = ["stall"] * 9
    problem = refused(source, there)
    assert problem.code == "copy-stalled"
    assert "model-00003.safetensors" in problem.found
    assert [path for path, _ in there.sent].count("model-00003.safetensors") == 4


def test_a_bad_source_is_refused_before_anything_is_sent_field_report_37(
    source: Path, there: FolderPeer
) -> None:
    (source / "model-00001.safetensors").write_bytes(b"\1" * 3999 + b"\2")
    problem = refused(source, there)
    assert problem.code == "source-wrong-hash"
    assert "model-00001.safetensors" in problem.found
    assert not there.sent
    assert not there.folder.exists()


def test_links_at_the_source_are_sent_as_what_they_lead_to(source: Path, there: FolderPeer) -> None:
    blob = source.parent / "blob"
    (source / "model-00001.safetensors").rename(blob)
    (source / "model-00001.safetensors").symlink_to(blob)
    copy(source, there)
    assert_whole(there)


def test_a_stray_shard_on_the_peer_stops_the_copy_before_it_begins(source: Path, there: FolderPeer) -> None:
    there.folder.mkdir()
    (there.folder / "zz.safetensors").write_bytes(b"")
    problem = refused(source, there)
    assert problem.code == "stray-file"
    assert not there.sent


def test_too_little_room_on_the_peer_is_told_before_the_first_byte(source: Path, there: FolderPeer) -> None:
    there.free_bytes = 1000
    problem = refused(source, there)
    assert (problem.code, problem.host) == ("disk-full", "spark-b")
    assert "1000 bytes" in problem.found
    assert not there.sent


def test_a_disk_that_fills_up_on_the_way_ends_the_copy(source: Path, there: FolderPeer) -> None:
    there.faults["model-00002.safetensors"] = ["full"]
    assert refused(source, there).code == "disk-full"


def test_a_fault_of_our_own_is_not_swallowed(
    source: Path, there: FolderPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(there, "send", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        copy(source, there)


def test_small_files_travel_together_and_ways_apart() -> None:
    def file(path: str, size: int) -> LockedFile:
        return LockedFile(path, size, sha256="0" * 64)

    plan = {
        file("big", 5000): Way.FRESH,
        file("bigger", 6000): Way.REPLACE,
        **{file(f"small{number}", 300): Way.FRESH for number in range(5)},
        file("half", 10): Way.RESUME,
    }
    found = replicate.parcels(plan)
    assert [parcel.size for parcel in found] == [6000, 5000, 900, 600, 10]
    assert sorted(entry for parcel in found for entry in parcel.files) == sorted(plan)
    assert all(plan[entry] is parcel.way for parcel in found for entry in parcel.files)


def test_rsync_copies_whole_plain_files_without_delta_or_compression_field_report_50(tmp_path: Path) -> None:
    connection = Connection("10.20.0.2", Login("sparkpair"), tmp_path, "c0", None)
    fresh = sshpeer.rsync_words(Path("/w"), connection, "/var/lib/x", Way.FRESH, 60)
    assert {"--whole-file", "--copy-links", "--inplace", "--checksum-choice=none", "--timeout=60"} <= set(
        fresh
    )
    assert not {"-z", "--compress", "--links", "-a"} & set(fresh)
    assert fresh[-2:] == ["/w/", "sparkpair@10.20.0.2:/var/lib/x/"]
    resume = sshpeer.rsync_words(Path("/w"), connection, "/var/lib/x", Way.RESUME, 60)
    assert "--append" in resume and "--whole-file" not in resume
    again = sshpeer.rsync_words(Path("/w"), connection, "/var/lib/x", Way.REPLACE, 0.1)
    assert {"--whole-file", "--ignore-times", "--timeout=1"} <= set(again)
    assert "--inplace" not in again  # what another folder links to must not change with it


@pytest.mark.parametrize("name", ["w:1", "-w", "w w"])
def test_rsync_gets_the_source_from_the_root_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`w:1` is another host to rsync and `-w` an option."""
    monkeypatch.chdir(tmp_path)
    connection = Connection("10.20.0.2", Login("sparkpair"), tmp_path, "c0", None)
    words = sshpeer.rsync_words(Path(name), connection, "/var/lib/x", Way.FRESH, 60)
    assert words[-2] == f"{tmp_path}/{name}/"


def test_an_ipv6_address_gets_its_brackets_back_for_rsync(tmp_path: Path) -> None:
    connection = Connection("fe80::2%eth1", Login("sparkpair"), tmp_path, "c0", None)
    assert connection.rsync_host == "sparkpair@[fe80::2%eth1]"
    assert connection.host == "sparkpair@fe80::2%eth1"


def test_bytes_on_the_wire_come_from_rsyncs_own_count() -> None:
    assert sshpeer.wire_bytes("x\nTotal bytes sent: 402,752,113\nTotal bytes received: 35\n") == 402752113
    assert sshpeer.wire_bytes("") == 0


@pytest.mark.parametrize(
    ("addresses", "folder"),
    [
        (["10.20.0.2"], "/c/p6"),
        (["10.20.0.2"], "/c/p6/"),
        (["10.20.0.2"], "//c/./p6//"),
        (["10.21.0.2", "10.20.0.2"], "/c/p6"),  # the other rail of the same peer
    ],
)
def test_two_copies_into_one_folder_are_refused_however_it_is_written(
    addresses: list[str], folder: str
) -> None:
    with replicate.single_flight(["10.20.0.2", "10.21.0.2"], "/c/p6"):
        with pytest.raises(Problem) as caught, replicate.single_flight(addresses, folder):
            pytest.fail("two at once")
        assert caught.value.code == "already-running"
        for others in (["10.20.0.3"], "/c/p6"), (["10.20.0.2"], "/c/p"):
            with replicate.single_flight(*others):
                pass
    with replicate.single_flight(addresses, folder):
        pass


def test_names_and_ipv6_addresses_count_in_any_spelling() -> None:
    for one, other in ("Spark-B", "spark-b"), ("FE80:0::2%eth1", "fe80::2%eth1"):
        with (
            replicate.single_flight([one], "/c"),
            pytest.raises(Problem),
            replicate.single_flight([other], "/c"),
        ):
            pytest.fail("two at once")


def test_the_command_takes_the_flight_without_source_user_or_spelling(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text(locks.dump(LOCK))
    monkeypatch.setattr(peer, "known_pair", lambda: None)
    monkeypatch.setattr(peer, "route_to", lambda _: peer.Route("192.0.2.12", "lo", "192.0.2.12"))
    monkeypatch.setattr(Connection, "open", lambda _: pytest.fail("logged in"))
    words = [
        "replicate",
        "--lock",
        str(lock),
        "--dir",
        str(source),
        "--to",
        "ada@spark-b://x/./p6/",
        "--json",
    ]
    with replicate.single_flight(["192.0.2.12"], "/x/p6"):
        assert cli.main(words) == 1
    assert '"already-running"' in capsys.readouterr().out


def test_the_command_refuses_the_lan_before_it_logs_in(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text(locks.dump(LOCK))
    monkeypatch.setattr(peer, "route_to", lambda _: peer.Route("192.0.2.12", "wlp9s0", "192.0.2.11"))
    monkeypatch.setattr(peer, "known_pair", lambda: None)
    monkeypatch.setattr(Connection, "open", lambda _: pytest.fail("logged in"))
    words = ["replicate", "--lock", str(lock), "--dir", str(source), "--to", "bo@192.0.2.12:/x", "--json"]
    assert cli.main([*words, "--link-subnet", "10.20.0.0/24", "--root", str(tmp_path)]) == 1
    assert '"link-unreachable"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--port", "99999"],
        ["--port", "0"],
        ["--port", "-1"],
        ["--link-subnet", "zz"],
        ["--link-subnet", "10.20.0.0/40"],
        ["--root", "/no/such/folder"],
        ["--stall", "0"],
        ["--stall", "nan"],
    ],
)
def test_a_wrong_option_is_a_usage_error(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["replicate", "--lock", "lock.json", "--dir", ".", "--to", "a@b:/c", *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "more", "code"),
    [
        ("bo@h:relative", [], "target-bad"),
        ("bo@h:/x y", [], "target-bad"),
        ("bo@h:/x/../y", [], "target-bad"),
        ("bo@h:/x", ["--identity", "/no/key"], "identity-missing"),
        ("bo@h:/x", ["--known-hosts", "/no/file"], "known-hosts-missing"),
    ],
)
def test_a_wrong_target_or_key_is_refused_before_the_route_is_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    to: str,
    more: list[str],
    code: str,
) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text(locks.dump(LOCK))
    monkeypatch.setattr(peer, "route_to", lambda _: pytest.fail("looked"))
    words = ["replicate", "--lock", str(lock), "--dir", str(tmp_path), "--to", to, "--json", *more]
    assert cli.main(words) == 1
    assert f'"{code}"' in capsys.readouterr().out
