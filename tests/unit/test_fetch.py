"""The fetch against the stand-in hub: each way a download goes wrong (field reports 33, 37 to 42, 47)."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sparkpair import disk, fetch, hub, locks, staging
from sparkpair.console import Progress
from sparkpair.fetch import Options, Outcome
from sparkpair.locks import Lock, LockedFile
from sparkpair.problem import Problem
from sparkpair.receipts import Receipts

from rehearsal.hub import READER_TOKEN, Hub, make_repo, publish

REPO, GATED = "acme/model", "acme/gated"
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
RANDOM = random.Random(11)  # noqa: S311
DATA = {shard: RANDOM.randbytes(400_000 + number) for number, shard in enumerate(SHARDS)}
INDEX = json.dumps({"weight_map": {f"t{number}": shard for number, shard in enumerate(SHARDS)}}).encode()
FILES = {"config.json": b"{}", "docs/empty.txt": b"", "model.safetensors.index.json": INDEX, **DATA}
QUICK = Options(workers=2, stall_s=0.5, floor_bytes=0, tries=4, pause_s=0.01)
COMMAND = "from sparkpair.cli import main; raise SystemExit(main())"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Hub]:
    root = tmp_path / "hub"
    make_repo(root, REPO, FILES)
    make_repo(root, GATED, {"overlay.safetensors": DATA[SHARDS[0]]}, gated=True)
    with Hub(root) as running:
        yield running


@pytest.fixture
def lock(site: Hub) -> Lock:
    return hub.resolve(REPO, endpoint=site.url)


@pytest.fixture
def bring(site: Hub, lock: Lock, tmp_path: Path) -> Callable[..., Outcome]:
    """One run into tmp_path/weights, silent; keyword arguments override the quick options."""

    def run(locked: Lock = lock, token: str | None = None, **changes: Any) -> Outcome:
        return fetch.fetch(
            locked,
            tmp_path / "weights",
            options=Options(**{**vars(QUICK), **changes}),
            token=token,
            endpoint=site.url,
            progress=lambda label, total, files: Progress(label, total, files, quiet=True),
            say=lambda text: None,
        )

    return run


Bring = Callable[..., Outcome]


def stopped(run: Callable[[], Any]) -> Problem:
    with pytest.raises(Problem) as caught:
        run()
    return caught.value


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".sparkpair" not in str(path.relative_to(folder))
    }


def ranges(site: Hub, file: str) -> list[str]:
    return [request["range"] for request in site.requests(file=file, method="GET") if request["range"]]


def test_every_file_lands_as_a_plain_verified_file(bring: Bring, lock: Lock, tmp_path: Path) -> None:
    outcome = bring()
    folder = tmp_path / "weights"
    assert content(folder) == FILES
    assert (outcome.fetched_files, outcome.fetched_bytes) == (len(FILES), lock.total_bytes)
    assert all(Receipts.open(folder).holds(entry) for entry in lock.files)
    assert {(folder / name).stat().st_mode & 0o777 for name in FILES} == {0o644}
    assert not (folder / staging.PARTIAL).exists()


def test_a_second_run_asks_the_hub_for_nothing(site: Hub, bring: Bring) -> None:
    """Field report 46: complete weights need no tool, no token and no network."""
    bring()
    since = len(site.requests())
    outcome = bring()
    assert site.requests(since=since) == []
    assert outcome.as_dict()["changed"] is False


def test_each_file_is_transferred_once(site: Hub, bring: Bring) -> None:
    bring()
    assert site.bytes_sent() == sum(map(len, FILES.values()))


def test_a_flipped_byte_is_found_quarantined_and_that_file_alone_fetched_once_more(
    site: Hub, bring: Bring, tmp_path: Path
) -> None:
    """Field report 37 and R1: the right size with one byte flipped."""
    site.mode("flip", path=SHARDS[1], times=1)
    outcome = bring()
    assert content(tmp_path / "weights") == FILES
    assert site.bytes_sent(SHARDS[1]) == 2 * len(DATA[SHARDS[1]])
    assert site.bytes_sent(SHARDS[0]) == len(DATA[SHARDS[0]])
    wanted = hashlib.sha256(DATA[SHARDS[1]]).hexdigest()
    assert [text for text in outcome.incidents if SHARDS[1] in text and wanted in text]


def test_a_file_that_comes_wrong_twice_stops_the_run_and_is_named(
    site: Hub, bring: Bring, tmp_path: Path
) -> None:
    """Field report 37: file, expected, got, size."""
    site.mode("flip", path=SHARDS[1], offset=5)
    problem = stopped(bring)
    assert problem.code == "hash-differs"
    assert SHARDS[1] in problem.found
    assert any(hash_with(5, value) in problem.found for value in range(256))
    assert hashlib.sha256(DATA[SHARDS[1]]).hexdigest() in problem.needed
    assert f"{len(DATA[SHARDS[1]])} bytes" in problem.found
    assert not (tmp_path / "weights" / SHARDS[1]).exists()
    assert site.bytes_sent(SHARDS[1]) <= 2 * len(DATA[SHARDS[1]])
    site.mode("ok")
    bring()
    assert content(tmp_path / "weights") == FILES


def hash_with(offset: int, value: int) -> str:
    changed = bytearray(DATA[SHARDS[1]])
    changed[offset] = value
    return hashlib.sha256(changed).hexdigest()


def test_an_answer_cut_short_is_taken_up_where_it_ended(site: Hub, bring: Bring, tmp_path: Path) -> None:
    """R2, field report 38."""
    site.mode("short", path=SHARDS[0], times=2)
    bring()
    assert content(tmp_path / "weights") == FILES
    assert len(ranges(site, SHARDS[0])) >= 2
    assert site.bytes_sent(SHARDS[0]) == len(DATA[SHARDS[0]])


def test_a_stall_is_broken_off_retried_then_fetched_in_pieces(
    site: Hub, bring: Bring, tmp_path: Path
) -> None:
    """Field report 39: the log shows the three steps."""
    site.mode("stall", path=SHARDS[0], times=2, after=100_000)
    begun = time.monotonic()
    outcome = bring()
    told = [text for text in outcome.incidents if SHARDS[0] in text]
    assert len(told) == 2
    assert "nothing moved for 0.5 s" in told[0]
    assert "in pieces" not in told[0]
    assert "in pieces" in told[1]
    assert content(tmp_path / "weights") == FILES
    assert 1.0 <= time.monotonic() - begun < 5
    assert site.bytes_sent(SHARDS[0]) < 2 * len(DATA[SHARDS[0]])


def test_a_stall_that_lasts_ends_in_words(site: Hub, bring: Bring) -> None:
    site.mode("stall", path=SHARDS[0], after=0)
    problem = stopped(lambda: bring(stall_s=0.2, tries=2))
    assert problem.code == "stalled"
    assert SHARDS[0] in problem.found


def test_a_slow_but_moving_transfer_is_not_broken_off(site: Hub, bring: Bring) -> None:
    """Field report 39: by bytes, not by total time."""
    site.mode("slow", path=SHARDS[0], rate=300_000)
    begun = time.monotonic()
    outcome = bring(stall_s=0.3)
    assert time.monotonic() - begun > 1.0
    assert outcome.incidents == []


@pytest.mark.parametrize(
    ("mode", "code"), [("401", "token-missing"), ("403", "token-missing"), ("404", "repo-unknown")]
)
def test_a_refusal_ends_the_run_after_one_request(site: Hub, bring: Bring, mode: str, code: str) -> None:
    """Field report 40: 401, 403 and 404 are never retried."""
    since = len(site.requests())
    site.mode(mode)
    begun = time.monotonic()
    assert stopped(bring).code == code
    assert len(site.requests(since=since)) == 1
    assert time.monotonic() - begun < 2


def test_a_refusal_is_one_however_the_hub_s_address_is_written(site: Hub, lock: Lock, tmp_path: Path) -> None:
    site.mode("401")
    address = site.url.replace("127.0.0.1", "LOCALHOST")
    since = len(site.requests())
    problem = stopped(lambda: fetch.fetch(lock, tmp_path / "weights", options=QUICK, endpoint=address))
    assert problem.code == "token-missing"
    assert len(site.requests(since=since)) == 1


def test_a_rate_limit_is_waited_out_as_long_as_the_hub_says(site: Hub, bring: Bring, tmp_path: Path) -> None:
    """Field report 41."""
    site.mode("429", path=SHARDS[0], times=2, retry_after=1)
    begun = time.monotonic()
    bring()
    assert time.monotonic() - begun >= 2
    assert content(tmp_path / "weights") == FILES


def test_a_hub_that_fails_for_a_while_is_asked_again(site: Hub, bring: Bring, tmp_path: Path) -> None:
    site.mode("503", times=3, retry_after=None)
    bring()
    assert content(tmp_path / "weights") == FILES


def test_a_hub_that_keeps_failing_ends_in_words(site: Hub, bring: Bring) -> None:
    site.mode("503", retry_after=0)
    assert stopped(bring).code == "hub-busy"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_a_hub_that_can_not_be_reached_is_told_at_once(lock: Lock, tmp_path: Path, address: str) -> None:
    """With the options of a real run, whose tries would take minutes."""
    begun = time.monotonic()
    problem = stopped(lambda: fetch.fetch(lock, tmp_path / "weights", endpoint=address, say=pytest.fail))
    assert problem.code == "hub-unreachable"
    assert address in problem.found
    assert time.monotonic() - begun < 5


def closed_after_the_offer(site: Hub, monkeypatch: pytest.MonkeyPatch, tries: int) -> list[str]:
    """From its first offer on the hub refuses that many connections; returns the list that counts them."""
    import httpx2
    from huggingface_hub import utils

    refused: list[str] = []
    session = utils.get_session()

    class Session:
        def stream(self, method: str, address: str, **more: Any) -> Any:
            if len(refused) < tries:
                refused.append(address)
                raise httpx2.ConnectError("[Errno 111] Connection refused")
            return session.stream(method, address, **more)

    monkeypatch.setattr(utils, "get_session", Session)
    return refused


def test_a_hub_that_goes_away_later_is_asked_again(
    site: Hub, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = closed_after_the_offer(site, monkeypatch, 3)
    outcome = bring()
    assert content(tmp_path / "weights") == FILES
    assert len(refused) == 3
    assert len([text for text in outcome.incidents if "ConnectError" in text]) == 3


def test_a_hub_that_stays_away_ends_in_words(
    site: Hub, bring: Bring, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = closed_after_the_offer(site, monkeypatch, 1000)
    problem = stopped(lambda: bring(tries=3))
    assert problem.code == "hub-unreachable"
    assert "3 tries in a row" in problem.found
    assert "run the same command again" in problem.do
    assert len(refused) >= 3


# Killed and started again


def command(site: Hub, lock_file: Path, folder: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
    words = [
        "fetch",
        "--lock",
        str(lock_file),
        "--to",
        str(folder),
        "--workers",
        "2",
        "--floor",
        "0",
        "--json",
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        env={**os.environ, "HF_ENDPOINT": site.url, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def under_way(
    site: Hub, lock: Lock, folder: Path, share: float, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """The command, caught when `share` of the bytes are on disk; the hub's pace leaves time for that."""
    (folder.parent / "lock.json").write_text(locks.dump(lock))
    running = command(site, folder.parent / "lock.json", folder, **variables)
    try:
        until = time.monotonic() + 20
        while on_disk(folder) < share * lock.total_bytes:
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        yield running
    finally:
        running.kill()
        running.communicate()


def on_disk(folder: Path) -> int:
    return disk.tree_bytes(folder)


def test_a_killed_fetch_goes_on_inside_its_file(site: Hub, lock: Lock, bring: Bring, tmp_path: Path) -> None:
    """Field report 38: killed at 60 %, at most 45 % are transferred again."""
    one = lock.subset([SHARDS[0]])
    site.mode("slow", path=SHARDS[0], rate=100_000)
    with under_way(site, one, tmp_path / "weights", 0.6) as running:
        running.send_signal(signal.SIGKILL)
        running.wait()
    site.mode("ok")
    settle(site)
    since = len(site.requests())
    outcome = bring(one)
    assert content(tmp_path / "weights") == {SHARDS[0]: DATA[SHARDS[0]]}
    assert outcome.resumed_bytes >= 0.55 * one.total_bytes
    assert [request["range"] for request in site.requests(since=since, status=206)]
    assert site.bytes_sent(since=since) <= 0.45 * one.total_bytes
    assert outcome.fetched_bytes == site.bytes_sent(since=since)


def settle(site: Hub) -> None:
    """Wait until the hub has noticed and logged the transfers that were cut off."""
    until = time.monotonic() + 10
    while len(site.requests(status=302, method="GET")) > sum(
        request["host"] == "storage" for request in site.requests(method="GET")
    ):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_130_and_keeps_what_is_there(
    site: Hub, lock: Lock, bring: Bring, tmp_path: Path, how: signal.Signals
) -> None:
    one = lock.subset([SHARDS[0]])
    site.mode("slow", path=SHARDS[0], rate=100_000)
    with under_way(site, one, tmp_path / "weights", 0.3) as running:
        running.send_signal(how)
        running.communicate(timeout=10)
        assert running.returncode == 130
    site.mode("ok")
    assert bring(one).resumed_bytes >= 0.25 * one.total_bytes
    assert content(tmp_path / "weights") == {SHARDS[0]: DATA[SHARDS[0]]}


def attached_to(first: subprocess.Popen[str], site: Hub, folder: Path) -> subprocess.Popen[str]:
    """A second run of the command into the same folder, when it has said that there is one already."""
    watcher = command(site, folder.parent / "lock.json", folder)
    assert watcher.stderr
    assert f"already running, pid {first.pid}" in watcher.stderr.readline()
    return watcher


def test_a_second_fetch_attaches_to_the_first_and_shows_how_far_it_is(
    site: Hub, lock: Lock, tmp_path: Path
) -> None:
    """Field report 38: two runs at once."""
    site.mode("slow", path="*.safetensors", rate=200_000)
    with under_way(site, lock, tmp_path / "weights", 0.1) as first:
        watcher = attached_to(first, site, tmp_path / "weights")
        site.mode("ok")
        told = first.communicate(timeout=30)[0]
        seen, shown = watcher.communicate(timeout=30)
        assert (first.returncode, watcher.returncode) == (0, 0)
    assert json.loads(told)["fetched_files"] > 0
    assert json.loads(seen)["fetched_bytes"] == 0
    assert f"(pid {first.pid}): " in shown
    assert content(tmp_path / "weights") == FILES
    assert site.bytes_sent() == lock.total_bytes
    assert not (tmp_path / "weights" / staging.PARTIAL).exists()


def test_a_watcher_goes_on_where_the_first_was_killed(site: Hub, lock: Lock, tmp_path: Path) -> None:
    site.mode("slow", path="*.safetensors", rate=200_000)
    with under_way(site, lock, tmp_path / "weights", 0.5) as first:
        watcher = attached_to(first, site, tmp_path / "weights")
        site.mode("ok")
        first.kill()
        told = json.loads(watcher.communicate(timeout=30)[0])
    assert told["resumed_bytes"] >= 0.3 * lock.total_bytes
    assert content(tmp_path / "weights") == FILES


def test_ctrl_c_ends_the_watching_and_not_the_fetch(site: Hub, lock: Lock, tmp_path: Path) -> None:
    site.mode("slow", path="*.safetensors", rate=100_000)
    with under_way(site, lock, tmp_path / "weights", 0.1) as first:
        watcher = attached_to(first, site, tmp_path / "weights")
        watcher.send_signal(signal.SIGINT)
        watcher.communicate(timeout=10)
        assert watcher.returncode == 130
        assert first.poll() is None


def leave_partial(lock: Lock, folder: Path, path: str, data: bytes) -> staging.Partials:
    """What a killed run leaves of one file."""
    partials = staging.Partials(folder)
    partials.folder.mkdir(parents=True, exist_ok=True)
    entry = lock.by_path[path]
    partials.part(entry).write_bytes(data)
    partials.write_journal(entry, 1000)
    return partials


def test_a_partial_whose_lock_entry_changed_is_not_built_on(
    site: Hub, lock: Lock, bring: Bring, tmp_path: Path
) -> None:
    leave_partial(lock, tmp_path / "weights", SHARDS[0], DATA[SHARDS[0]][:200_000])
    publish(tmp_path / "hub", REPO, {SHARDS[0]: DATA[SHARDS[0]][::-1]})
    newer = hub.resolve(REPO, endpoint=site.url)
    assert bring(newer).resumed_bytes == 0
    assert (tmp_path / "weights" / SHARDS[0]).read_bytes() == DATA[SHARDS[0]][::-1]


def test_a_partial_is_built_on_under_another_commit_with_the_same_content(
    site: Hub, lock: Lock, bring: Bring, tmp_path: Path
) -> None:
    leave_partial(lock, tmp_path / "weights", SHARDS[0], DATA[SHARDS[0]][:200_000])
    publish(tmp_path / "hub", REPO, {"config.json": b"[]"})
    assert bring(hub.resolve(REPO, endpoint=site.url)).resumed_bytes == 200_000


def test_a_hub_that_may_not_be_asked_is_told_as_such(site: Hub, lock: Lock, tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text(locks.dump(lock))
    done = command(site, tmp_path / "lock.json", tmp_path / "weights", HF_HUB_OFFLINE="1")
    out, _ = done.communicate(timeout=20)
    assert json.loads(out)["problems"][0]["code"] == "hub-offline"


def test_after_a_power_cut_only_synced_bytes_are_built_on(
    site: Hub, lock: Lock, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = DATA[SHARDS[0]][:1000] + bytes(199_000)  # the length reached the disk, the content did not
    leave_partial(lock, tmp_path / "weights", SHARDS[0], damaged)
    monkeypatch.setattr(staging, "boot_id", lambda: "another boot")
    outcome = bring()
    assert outcome.resumed_bytes == 1000
    assert outcome.incidents == []
    assert ranges(site, SHARDS[0])[0] == "bytes=1000-"
    assert content(tmp_path / "weights") == FILES


def test_a_partial_with_wrong_bytes_is_found_by_its_hash_and_fetched_whole(
    lock: Lock, bring: Bring, tmp_path: Path
) -> None:
    leave_partial(lock, tmp_path / "weights", SHARDS[0], bytes(200_000))
    outcome = bring()
    assert content(tmp_path / "weights") == FILES
    assert any("expected sha256" in text for text in outcome.incidents)


def test_a_complete_partial_is_only_hashed_and_put_in_place(
    site: Hub, lock: Lock, bring: Bring, tmp_path: Path
) -> None:
    leave_partial(lock, tmp_path / "weights", SHARDS[0], DATA[SHARDS[0]])
    bring()
    assert site.bytes_sent(SHARDS[0]) == 0
    assert content(tmp_path / "weights") == FILES


def refreshed(site: Hub, tmp_path: Path) -> Lock:
    """The lock of a newer commit, whose shards have the same sizes and other bytes."""
    publish(tmp_path / "hub", REPO, {shard: DATA[shard][::-1] for shard in SHARDS})
    return hub.resolve(REPO, endpoint=site.url)


@pytest.mark.parametrize(
    ("mode", "code"), [("401", "token-missing"), ("503", "hub-busy"), ("flip", "hash-differs")]
)
def test_weights_that_serve_stay_until_better_ones_are_here(
    site: Hub, bring: Bring, tmp_path: Path, mode: str, code: str
) -> None:
    """A refreshed lock and an expired token must not cost the checkpoint that is there."""
    bring()
    newer = refreshed(site, tmp_path)
    site.mode(mode, **({"path": "*.safetensors"} if mode == "flip" else {}))
    for _ in range(2):
        assert stopped(lambda: bring(newer)).code == code
        assert content(tmp_path / "weights") == FILES
    site.mode("ok")
    assert bring(newer).fetched_files == len(SHARDS)
    assert content(tmp_path / "weights")[SHARDS[0]] == DATA[SHARDS[0]][::-1]


def test_a_wrong_lock_does_not_cost_the_partials_of_the_right_one(
    site: Hub, lock: Lock, bring: Bring, tmp_path: Path
) -> None:
    leave_partial(lock, tmp_path / "weights", SHARDS[0], DATA[SHARDS[0]][:200_000])
    site.mode("401")
    other = replace(lock, repo=GATED, files=(replace(lock.by_path[SHARDS[1]], path="other.safetensors"),))
    assert stopped(lambda: bring(other)).code == "token-missing"
    site.mode("ok")
    assert bring().resumed_bytes == 200_000


def test_a_folder_in_a_files_place_is_told_before_the_first_byte(
    site: Hub, bring: Bring, tmp_path: Path
) -> None:
    (tmp_path / "weights" / SHARDS[0]).mkdir(parents=True)
    problem = stopped(bring)
    assert problem.code == "blocked"
    assert SHARDS[0] in problem.found
    assert site.bytes_sent() == 0


def test_a_file_in_a_folders_place_is_told_too(bring: Bring, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "docs").write_text("")
    assert stopped(bring).code == "blocked"


def test_bad_copies_make_room_before_the_disk_stops_the_run(
    site: Hub, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring()
    newer = refreshed(site, tmp_path)
    capacity = int(1.2 * newer.total_bytes)
    monkeypatch.setattr(disk, "free_bytes", lambda path: capacity - disk.tree_bytes(tmp_path / "weights"))
    assert bring(newer).fetched_files == len(SHARDS)


def test_a_rate_limit_without_end_is_told_as_such(site: Hub, bring: Bring) -> None:
    """Field report 41."""
    site.mode("429", retry_after=None)
    problem = stopped(bring)
    assert problem.code == "rate-limited"
    assert "HF_TOKEN" in problem.do


def test_who_waits_may_take_the_folder_while_the_first_clears_it(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    first, second = staging.Partials(folder), staging.Partials(folder)

    class Slow(type(folder)):  # type: ignore[misc]
        def rmdir(self) -> None:
            with second.single_flight(lambda pid: None):
                super().rmdir()

    first.folder = Slow(first.folder)
    with first.single_flight(lambda pid: None):
        first.clear()


def test_orphaned_partials_are_swept(lock: Lock, bring: Bring, tmp_path: Path) -> None:
    """Field report 38: the disk shrinks with each try."""
    other = LockedFile("gone.safetensors", 10, "0" * 64)
    partials = staging.Partials(tmp_path / "weights")
    (partials.folder / "quarantine").mkdir(parents=True)
    partials.part(other).write_bytes(b"old")
    (partials.folder / "quarantine" / "x.bad").write_bytes(b"old")
    stale = partials.part(lock.by_path[SHARDS[0]])
    stale.write_bytes(b"no journal")
    bring(lock.subset(["config.json"]))
    assert not partials.folder.exists()


def test_a_journal_of_another_form_is_no_journal(lock: Lock, tmp_path: Path) -> None:
    partials = leave_partial(lock, tmp_path / "weights", SHARDS[0], b"x" * 2000)
    entry = lock.by_path[SHARDS[0]]
    assert partials.usable_bytes(entry) == 2000
    good = json.loads(partials.journal(entry).read_text())
    for text in (
        "",
        "[]",
        "{",
        json.dumps({**good, "of": {}}),
        json.dumps({**good, "boot": 1, "durable": "many"}),
    ):
        partials.journal(entry).write_text(text)
        assert partials.usable_bytes(entry) == 0
    partials.write_journal(entry, 0)
    partials.part(entry).write_bytes(b"x" * (entry.size + 1))
    assert partials.usable_bytes(entry) == 0


# What lies in the folder already


def test_files_brought_by_hand_are_hashed_not_fetched(
    site: Hub, lock: Lock, bring: Bring, tmp_path: Path
) -> None:
    for shard in SHARDS:
        (tmp_path / "weights").mkdir(exist_ok=True)
        (tmp_path / "weights" / shard).write_bytes(DATA[shard])
    outcome = bring()
    assert (outcome.checked_files, site.bytes_sent("*.safetensors")) == (3, 0)
    assert all(Receipts.open(tmp_path / "weights").holds(entry) for entry in lock.files)


@pytest.mark.parametrize("damage", [lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1]])
def test_a_damaged_file_is_found_and_only_that_one_fetched_again(
    site: Hub, bring: Bring, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    bring()
    target = tmp_path / "weights" / SHARDS[2]
    target.write_bytes(damage(target.read_bytes()))
    since = len(site.requests())
    outcome = bring()
    assert {request["file"] for request in site.requests(since=since)} == {SHARDS[2]}
    assert outcome.fetched_files == 1
    assert content(tmp_path / "weights") == FILES


def test_a_stray_shard_is_refused_by_name(site: Hub, bring: Bring, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "zz-overlay.safetensors").write_bytes(b"x")
    since = len(site.requests())
    problem = stopped(bring)
    assert problem.code == "stray-file"
    assert problem.found.startswith("1 shard in ")
    assert "zz-overlay.safetensors" in problem.found
    assert site.requests(since=since) == []


def test_a_link_is_refused_by_name(bring: Bring, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / SHARDS[0]).symlink_to("/etc/hostname")
    problem = stopped(bring)
    assert problem.code == "link"
    assert problem.found.startswith("1 link in ")
    assert SHARDS[0] in problem.found
    assert "cp --remove-destination" in problem.do


def test_another_users_file_in_our_folder_is_named_with_the_repair(lock: Lock, tmp_path: Path) -> None:
    """Field report 33."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "left.lock").write_text("")
    problem = stopped(lambda: staging.require_fit(lock, folder, owner=os.geteuid() + 1))
    assert problem.code == "foreign-owner"
    assert "left.lock" in problem.found
    assert problem.found.startswith("2 files in ")
    assert problem.do.startswith("sudo chown -R ")
    assert problem.do.endswith(f": {folder}")
    staging.require_fit(lock, folder, owner=os.geteuid())


def test_an_index_that_names_another_shard_stops_the_run(site: Hub, bring: Bring, tmp_path: Path) -> None:
    more = {"weight_map": {"t": "model-00004-of-00003.safetensors", **json.loads(INDEX)["weight_map"]}}
    publish(tmp_path / "hub", REPO, {"model.safetensors.index.json": json.dumps(more).encode()})
    newer = hub.resolve(REPO, endpoint=site.url)
    problem = stopped(lambda: bring(newer))
    assert problem.code == "index-differs"
    assert "model-00004-of-00003.safetensors" in problem.found


# The disk


def test_a_disk_too_small_is_refused_before_the_first_byte(
    site: Hub, lock: Lock, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 42: both numbers, what is to come and what is free."""
    monkeypatch.setattr(disk, "free_bytes", lambda path: lock.total_bytes + 999)
    since = len(site.requests())
    problem = stopped(lambda: bring(floor_bytes=600, reserve_bytes=400))
    assert problem.code == "disk-full"
    assert str(lock.total_bytes + 999) in problem.found
    assert str(lock.total_bytes + 1000) in problem.needed
    assert site.requests(since=since) == []
    bring(floor_bytes=0, reserve_bytes=400)


def test_a_partial_counts_for_the_room_that_is_needed(
    lock: Lock, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_partial(lock, tmp_path / "weights", SHARDS[0], DATA[SHARDS[0]][:200_000])
    monkeypatch.setattr(disk, "free_bytes", lambda path: lock.total_bytes - 200_000)
    assert bring().resumed_bytes == 200_000


def test_a_disk_that_fills_up_meanwhile_stops_the_run_and_keeps_the_partials(
    site: Hub, bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 42: a filler grows during the download."""
    site.mode("slow", path=SHARDS[0], rate=400_000)
    left = iter([10**12] * 2)
    monkeypatch.setattr(disk, "free_bytes", lambda path: next(left, 4999))
    problem = stopped(lambda: bring(floor_bytes=5000, workers=1))
    assert problem.code == "disk"
    assert "4999" in problem.found
    assert list((tmp_path / "weights" / staging.PARTIAL).glob("*.part"))
    monkeypatch.undo()
    site.mode("ok")
    assert bring().resumed_bytes > 0
    assert content(tmp_path / "weights") == FILES


# The token


def test_the_token_is_seen_by_the_hub_alone(site: Hub, tmp_path: Path) -> None:
    """Field report 47: not in argv, not in any file, not in any output; and the storage host never gets it."""
    canary = "hf_CANARY123"
    site.grant(canary)
    site.mode("slow", path="*.safetensors", rate=150_000)
    locked = hub.resolve(GATED, endpoint=site.url, token=canary)
    folder = tmp_path / "weights"
    with under_way(site, locked, folder, 0.2, HF_TOKEN=canary) as running:
        assert canary.encode() not in Path(f"/proc/{running.pid}/cmdline").read_bytes()
        out, err = running.communicate(timeout=20)
        assert running.returncode == 0
    assert canary not in out + err
    assert not [path for path in folder.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    asked = site.requests(file="overlay.safetensors")
    assert {request["token"] for request in asked if request["host"] == "site"} == {True}
    assert {request["token"] for request in asked if request["host"] == "storage"} == {False}


def test_a_gated_repository_needs_its_token(site: Hub, bring: Bring, tmp_path: Path) -> None:
    gated = hub.resolve(GATED, endpoint=site.url)
    assert stopped(lambda: bring(gated)).code == "token-missing"
    assert bring(gated, token=READER_TOKEN).fetched_files == 1


def test_a_token_with_a_newline_never_leaves(site: Hub, bring: Bring) -> None:
    since = len(site.requests())
    assert stopped(lambda: bring(token="hf_x\n")).code == "token-form"
    assert site.requests(since=since) == []


def test_the_command_tells_its_end_as_one_json_object(site: Hub, lock: Lock, tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text(locks.dump(lock))
    done = command(site, tmp_path / "lock.json", tmp_path / "weights")
    out, _ = done.communicate(timeout=20)
    said = json.loads(out)
    assert (done.returncode, said["ok"], said["changed"], said["fetched_files"]) == (
        0,
        True,
        True,
        len(FILES),
    )
    refused = command(site, tmp_path / "lock.json", tmp_path / "weights", HF_TOKEN="a b")
    out, _ = refused.communicate(timeout=20)
    said = json.loads(out)
    assert (refused.returncode, said["ok"], said["problems"][0]["code"]) == (1, False, "token-form")


# Servers that do not keep to the rules


class Unruly(http.server.BaseHTTPRequestHandler):
    """Serves BODY with the right headers on HEAD; `how` decides what a GET gets."""

    protocol_version = "HTTP/1.1"
    body = RANDOM.randbytes(50_000)
    how = "ignores ranges"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.start(200, len(self.body))

    def start(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", f'"{hashlib.sha256(self.body).hexdigest()}"')
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        if self.how == "loops":
            self.start(302, 0, Location=self.path)
            return
        if asked and self.how == "another range":
            self.server.how_often += 1  # type: ignore[attr-defined]
            if self.server.how_often < 3:  # type: ignore[attr-defined]
                self.start(206, 10, Content_Range=f"bytes 0-9/{len(self.body)}")
                self.wfile.write(self.body[:10])
                return
        if asked and self.how == "416":
            self.start(416, 0, Content_Range="bytes */7")
            return
        if self.how == "too much":
            self.start(200, len(self.body) + 1)
            self.wfile.write(self.body + b"x")
            return
        if asked and self.how != "ignores ranges":
            first = int(asked[6:].split("-")[0])
            rest = self.body[first:]
            self.start(206, len(rest), Content_Range=f"bytes {first}-{len(self.body) - 1}/{len(self.body)}")
            self.wfile.write(rest)
            return
        self.start(200, len(self.body))
        self.wfile.write(self.body)


@pytest.fixture
def unruly() -> Iterator[Callable[[str], str]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Unruly,), {}))
    server.how_often = 0  # type: ignore[attr-defined]
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def serve(how: str) -> str:
        server.RequestHandlerClass.how = how  # type: ignore[attr-defined]
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    server.shutdown()
    server.server_close()


UNRULY_LOCK = Lock(
    "a/b", "1" * 40, (LockedFile("x.bin", len(Unruly.body), hashlib.sha256(Unruly.body).hexdigest()),)
)


def take(endpoint: str, folder: Path) -> Outcome:
    return fetch.fetch(
        UNRULY_LOCK,
        folder,
        options=QUICK,
        endpoint=endpoint,
        progress=lambda label, total, files: Progress(label, total, files, quiet=True),
        say=lambda text: None,
    )


@pytest.mark.parametrize("how", ["ignores ranges", "another range"])
def test_a_server_that_answers_another_range_spoils_nothing(
    unruly: Callable[[str], str], tmp_path: Path, how: str
) -> None:
    leave_partial(UNRULY_LOCK, tmp_path / "weights", "x.bin", Unruly.body[:20_000])
    outcome = take(unruly(how), tmp_path / "weights")
    assert (tmp_path / "weights" / "x.bin").read_bytes() == Unruly.body
    assert not any("expected" in text for text in outcome.incidents)


@pytest.mark.parametrize("how", ["too much", "416"])
def test_a_server_with_another_length_ends_in_words(
    unruly: Callable[[str], str], tmp_path: Path, how: str
) -> None:
    leave_partial(UNRULY_LOCK, tmp_path / "weights", "x.bin", Unruly.body[:20_000])
    assert stopped(lambda: take(unruly(how), tmp_path / "weights")).code == "hub-busy"
    assert not (tmp_path / "weights" / "x.bin").exists()


def test_a_redirect_without_end_is_told_at_once(unruly: Callable[[str], str], tmp_path: Path) -> None:
    problem = stopped(lambda: take(unruly("loops"), tmp_path / "weights"))
    assert problem.code == "hub-answer"
    assert "redirect" in problem.found.lower()
