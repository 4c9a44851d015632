"""What must hold right before a rank starts (field reports 9, 44, 53, 66)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from sparkpair import gate, locks, receipts
from sparkpair.problem import Problem

GIB = 2**30
LARGE = b"x" * (1 << 21)  # too large to be read at each start: its receipt counts


def an_order(tmp_path: Path, **more: Any) -> gate.Order:
    values = {"rank": 1, "vouched": (), "memory_bytes": 108 * GIB, "root": tmp_path, **more}
    return gate.Order(**values)


def meminfo(root: Path, free: float, available: float) -> None:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(
        f"MemFree: {int(free * 2**20)} kB\nMemAvailable: {int(available * 2**20)} kB\n"
    )


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "proc/sys/vm/drop_caches"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(gate, "_WAIT_FOR_DROP_S", 0.0)
    monkeypatch.setattr(gate, "_WAIT_FOR_RETURN_S", 0.0)
    return path


def test_room_enough_needs_no_drop(tmp_path: Path, drop: Path) -> None:
    meminfo(tmp_path, 110, 115)
    gate.require_memory(an_order(tmp_path))
    assert not drop.exists()


def test_page_cache_in_the_way_is_dropped(
    tmp_path: Path, drop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU of a GB10 gets MemFree, not MemAvailable."""
    meminfo(tmp_path, 20, 115)
    monkeypatch.setattr(gate, "_WAIT_FOR_DROP_S", 60.0)
    gate.require_memory(an_order(tmp_path), sleep=lambda _: meminfo(tmp_path, 110, 115))
    assert drop.read_text() == "3\n"


def test_memory_that_does_not_come_free_stops_the_start_with_both_numbers(tmp_path: Path, drop: Path) -> None:
    meminfo(tmp_path, 20, 115)
    with pytest.raises(Problem, match=r"MemFree 20.0 GiB, MemAvailable 115.0 GiB") as caught:
        gate.require_memory(an_order(tmp_path), sleep=lambda _: None)
    assert caught.value.code == "memory-short"
    assert drop.exists()


def test_memory_that_is_in_use_is_not_dropped_for(tmp_path: Path, drop: Path) -> None:
    meminfo(tmp_path, 20, 60)
    with pytest.raises(Problem) as caught:
        gate.require_memory(an_order(tmp_path))
    assert "48.0 GiB more" in caught.value.needed
    assert not drop.exists()


def test_memory_of_a_rank_that_just_stopped_is_waited_for(
    tmp_path: Path, drop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo(tmp_path, 6, 7)
    monkeypatch.setattr(gate, "_WAIT_FOR_RETURN_S", 60.0)
    gate.require_memory(an_order(tmp_path), sleep=lambda _: meminfo(tmp_path, 112, 118))
    assert not drop.exists()


def test_who_holds_the_memory_is_named(tmp_path: Path, drop: Path) -> None:
    meminfo(tmp_path, 6, 7)
    with pytest.raises(Problem) as caught:
        gate.require_memory(an_order(tmp_path))
    assert "pid " in caught.value.do


def a_locked_folder(tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_bytes(LARGE)
    digest = hashlib.sha256(LARGE).hexdigest()
    lock = tmp_path / "lock.json"
    lock.write_text(
        json.dumps(
            {
                "repo": "a/b",
                "revision": "0" * 40,
                "files": [{"path": "config.json", "size": len(LARGE), "sha256": digest}],
            }
        )
    )
    return lock, folder


def test_a_file_without_a_receipt_is_not_served(tmp_path: Path) -> None:
    lock, folder = a_locked_folder(tmp_path)
    order = an_order(tmp_path, vouched=(gate.Vouched(lock, folder, alone=True),))
    with pytest.raises(Problem, match=r"config\.json") as caught:
        gate.require_vouched(order)
    assert caught.value.code == "not-vouched"


def test_a_file_changed_after_it_was_verified_is_found_at_the_next_start(tmp_path: Path) -> None:
    lock, folder = a_locked_folder(tmp_path)
    order = an_order(tmp_path, vouched=(gate.Vouched(lock, folder, alone=True),))
    noted = receipts.Receipts.open(folder)
    noted.record(locks.load(lock).files[0], (folder / "config.json").stat())
    noted.save()
    gate.require_vouched(order)
    (folder / "config.json").write_bytes(LARGE)
    with pytest.raises(Problem):
        gate.require_vouched(order)
    (folder / "config.json").unlink()
    with pytest.raises(Problem):
        gate.require_vouched(order)


def test_a_strangers_weights_file_is_not_loaded(tmp_path: Path) -> None:
    lock, folder = a_locked_folder(tmp_path)
    noted = receipts.Receipts.open(folder)
    noted.record(locks.load(lock).files[0], (folder / "config.json").stat())
    noted.save()
    (folder / "notes.txt").write_text("mine")
    gate.require_vouched(an_order(tmp_path, vouched=(gate.Vouched(lock, folder, alone=True),)))
    (folder / "zz.safetensors").write_text("")
    with pytest.raises(Problem, match=r"zz\.safetensors"):
        gate.require_vouched(an_order(tmp_path, vouched=(gate.Vouched(lock, folder, alone=True),)))


class FakeDocker:
    """The docker command with one container of the name."""

    def __init__(self, labels: str) -> None:
        self.labels = labels
        self.removed: list[str] = []

    def run(self, *words: str) -> str:
        if words[0] == "ps":
            row = {"ID": "abc", "Labels": self.labels, "Image": "nginx", "Status": "Up 1 hour"}
            return json.dumps(row) + "\n"
        assert words[:2] == ("rm", "--force")
        self.removed.append(words[2])
        return ""


def test_our_own_left_over_is_removed() -> None:
    docker = FakeDocker("sparkpair.rank=1,other=2")
    gate.clear_container(1, docker)  # type: ignore[arg-type]
    assert docker.removed == ["abc"]


@pytest.mark.parametrize("labels", ["", "sparkpair.rank=0", "x=sparkpair.rank=1"])
def test_a_strangers_container_is_refused_and_left_alone(labels: str) -> None:
    """Field report 66."""
    docker = FakeDocker(labels)
    with pytest.raises(Problem) as caught:
        gate.clear_container(1, docker)  # type: ignore[arg-type]
    assert caught.value.code == "foreign-container"
    assert docker.removed == []


@pytest.mark.parametrize("text", ["", "{}", '{"rank": "x"}', "[]"])
def test_a_broken_order_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank.json"
    path.write_text(text)
    with pytest.raises(Problem) as caught:
        gate.Order.load(path)
    assert caught.value.code == "rank-order"


def test_what_is_wrong_with_an_order_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "rank.json"

    def told() -> str:
        with pytest.raises(Problem) as caught:
            gate.Order.load(path)
        return caught.value.found

    assert told() == f"{path}: there is no such file"
    path.write_text("{}")
    assert told() == f"{path}: has no 'rank'"
    path.write_text('{"rank": 0, "vouched": [{"lock": "/l"}], "memory_bytes": 1, "root": "/"}')
    assert told() == f"{path}: has no 'folder'"
    path.write_text('{"rank"')
    assert told().startswith(f"{path}: not JSON (")
    path.unlink()
    path.mkdir()
    assert told() == f"{path}: Is a directory"
