"""Long work as a unit: it outlives the play, is never doubled, and hands no secret around (field reports 47, 73)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sparkpair import jobs, systemd
from sparkpair.problem import Problem


def a_job(base: Path, **more: Any) -> jobs.Job:
    return jobs.Job("fetch-checkpoint", ["/opt/x", "fetch", "--json"], base=base, **more)


def test_the_unit_shows_everything_but_the_secret(tmp_path: Path) -> None:
    job = a_job(tmp_path, credentials={"hf_token": "CANARY123"}, environment={"HF_ENDPOINT": "http://hub"})
    command = jobs.unit_command(job)
    assert "CANARY123" not in " ".join(command)
    assert f"--property=LoadCredential=hf_token:{tmp_path}/fetch-checkpoint/secrets/hf_token" in command
    assert "--setenv=HF_ENDPOINT=http://hub" in command
    assert command[-4:] == ["--", "/opt/x", "fetch", "--json"]


def test_the_secret_is_removed_when_the_job_ends(tmp_path: Path) -> None:
    stop = next(word for word in jobs.unit_command(a_job(tmp_path)) if "ExecStopPost" in word)
    assert f"rm -rf {tmp_path}/fetch-checkpoint/secrets" in stop


def test_only_the_result_is_on_stdout(tmp_path: Path) -> None:
    """systemd lets stderr follow stdout unless told: progress would spoil the one JSON object."""
    command = jobs.unit_command(a_job(tmp_path))
    assert "--property=StandardError=journal" in command
    assert f"--property=StandardOutput=append:{tmp_path}/fetch-checkpoint/stdout" in command


def test_no_time_limit_ends_a_job(tmp_path: Path) -> None:
    """R9: a fixed limit kills a download that is fine."""
    assert not any("RuntimeMaxSec" in word for word in jobs.unit_command(a_job(tmp_path)))


def test_another_request_is_another_digest_whoever_asks(tmp_path: Path) -> None:
    """A play with a token attaches to the fetch that one without it began, and the other way round."""
    one = a_job(tmp_path, credentials={"hf_token": "a"})
    assert one.digest() == a_job(tmp_path, credentials={"hf_token": "b"}).digest() == a_job(tmp_path).digest()
    assert one.digest() != a_job(tmp_path, user="sparkpair").digest()
    assert one.digest() != a_job(tmp_path, environment={"HF_ENDPOINT": "http://hub"}).digest()


@pytest.mark.parametrize("name", ["", "Fetch", "a b", "../x", "x" * 80, "a;b"])
def test_a_name_that_is_no_unit_name_is_refused(name: str) -> None:
    with pytest.raises(Problem, match="job"):
        jobs.Job(name, ["/bin/true"])


def test_a_command_without_a_path_is_refused() -> None:
    with pytest.raises(Problem):
        jobs.Job("x", ["true"])


def test_a_running_job_with_another_request_is_not_attached_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "state", lambda unit: systemd.UnitState("active", "success", "0"))
    job = a_job(tmp_path)
    job.folder.mkdir()
    (job.folder / "spec.json").write_text(json.dumps({"digest": "other"}))
    with pytest.raises(Problem) as caught:
        jobs.start(job)
    assert caught.value.code == "job-busy"
    (job.folder / "spec.json").write_text(json.dumps({"digest": job.digest()}))
    assert jobs.start(job) is False


def test_an_ended_job_tells_how_and_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "state", lambda unit: systemd.UnitState("inactive", "", ""))
    folder = tmp_path / "fetch-checkpoint"
    (folder / "public").mkdir(parents=True)
    (folder / "exit").write_text("success exited 0")
    (folder / "stdout").write_text('{"ok": true, "changed": true}')
    (folder / "public" / "progress.json").write_text(
        '{"label": "fetch", "bytes_done": 5, "bytes_total": 10, "files_done": 0, "files_total": 0, '
        '"rate": 1, "eta_s": 5, "note": "", "at": 0}'
    )
    state = jobs.query("fetch-checkpoint", tmp_path)
    assert state["exit"] == ["success", "exited", "0"]
    assert state["result"] == {"ok": True, "changed": True}
    assert state["progress"]["line"] == "fetch: 5 B of 10 B (50 %), 1 B/s, 5 s left"


def test_half_written_output_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "state", lambda unit: systemd.UnitState("inactive", "", ""))
    monkeypatch.setattr(systemd, "last_lines", lambda unit: ["killed"])
    folder = tmp_path / "fetch-checkpoint"
    folder.mkdir()
    (folder / "exit").write_text("signal killed KILL")
    (folder / "stdout").write_text('{"ok": tr')
    state = jobs.query("fetch-checkpoint", tmp_path)
    assert state["result"] is None
    assert state["log"] == ["killed"]


def test_the_node_waits_for_the_end_and_tells_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 74: one question that waits, instead of many that cross the network."""
    states = iter(["active"] * 3 + ["inactive"] * 9)
    monkeypatch.setattr(systemd, "state", lambda unit: systemd.UnitState(next(states), "", ""))
    monkeypatch.setattr(systemd, "last_lines", lambda unit: [])
    slept: list[float] = []
    monkeypatch.setattr(jobs.time, "sleep", slept.append)
    assert not jobs.query("fetch-checkpoint", tmp_path, wait_s=600)["active"]
    assert len(slept) == 3


def test_the_node_answers_in_time_about_a_job_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "state", lambda unit: systemd.UnitState("active", "", ""))
    now = iter(range(100))
    monkeypatch.setattr(jobs.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    assert jobs.query("fetch-checkpoint", tmp_path, wait_s=5)["active"]
    assert next(now) <= 8
