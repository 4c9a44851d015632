"""Saved logs of the ranks, with bounds (field report 34)."""

from __future__ import annotations

from pathlib import Path

import pytest
from sparkpair import ranklogs, systemd


def test_the_last_run_is_saved_and_only_so_many_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "journal_of", lambda run, most: [f"{run} said something"])
    for number in range(4):
        (tmp_path / f"sparkpair-rank1-2026010{number}-000000.log").write_text("old")
    (tmp_path / "sparkpair-rank0-20260101-000000.log").write_text("another rank's")
    saved = ranklogs.save("sparkpair-rank1", "0badc0de", 3, tmp_path)
    assert saved is not None
    assert saved.read_text() == "0badc0de said something\n"
    assert len(list(tmp_path.glob("sparkpair-rank1-*.log"))) == 3
    assert len(list(tmp_path.glob("sparkpair-rank0-*.log"))) == 1


def test_nothing_said_is_nothing_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "journal_of", lambda run, most: [])
    assert ranklogs.save("sparkpair-rank1", "0badc0de", 3, tmp_path) is None
    assert ranklogs.save("sparkpair-rank1", "", 3, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_can_not_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "journal_of", lambda run, most: ["x"])
    (tmp_path / "logs").write_text("a file where the folder should be")
    assert ranklogs.save("sparkpair-rank1", "0badc0de", 3, tmp_path / "logs") is None
