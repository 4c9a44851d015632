"""The play's end of a job: few questions, a line when there is news, patience with the network (field report 73)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure

PROJECT = Path(__file__).resolve().parents[2]
STARTED = {"unit": "sparkpair-job-fetch.service", "started": True}


class Clock:
    """Time that passes only where somebody waits."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def action(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = PROJECT / "plugins" / "action" / "sparkpair_job.py"
    spec = importlib.util.spec_from_file_location("sparkpair_job_action", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "time", Clock())
    return module


def running(done: int = 0, total: int = 0) -> dict[str, Any]:
    progress = {"bytes_done": done, "bytes_total": total, "line": f"fetch: {done} of {total}"}
    return {"active": True, "progress": progress if total else None, "exit": None, "result": None, "log": []}


def ended(result: dict[str, Any] | None, how: str = "success exited 0") -> dict[str, Any]:
    return {"active": False, "progress": None, "exit": how.split(), "result": result, "log": ["last words"]}


def follow(
    action: ModuleType, answer: Callable[[int, float], dict[str, Any]], **limits: int
) -> tuple[dict[str, Any], list[int]]:
    """Follow a job on a node that waits as it is asked; `answer(number, seconds)` is how the job stands."""
    waits: list[int] = []
    begun = action.time.now

    def call(question: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        assert question["state"] == "queried"
        waits.append(question["wait_seconds"])
        action.time.sleep(question["wait_seconds"])
        return answer(len(waits), action.time.now - begun)

    follower = action.ActionModule.__new__(action.ActionModule)
    follower._call = call
    return follower._follow({"name": "fetch", **limits}, {}, "spark-a"), waits


def test_hours_of_work_cost_the_controller_few_questions(action: ModuleType) -> None:
    """Field report 74: the controller stays out of the way; a question carries some 180 kB of module."""
    state, waits = follow(
        action, lambda number, at: running(int(at), 7200) if at < 7200 else ended({"ok": True})
    )
    assert state["result"] == {"ok": True}
    assert len(waits) < 250
    assert max(waits) <= 30


def test_a_play_that_follows_for_three_seconds_leaves_the_job_running(action: ModuleType) -> None:
    state, waits = follow(action, lambda number, at: running(), follow_seconds=3)
    assert sum(waits) <= 5
    verdict = action._verdict(state, STARTED)
    assert verdict["failed"]
    assert "still running" in verdict["msg"]
    assert "run the same playbook again" in verdict["msg"]


def test_work_that_stands_still_is_no_longer_followed(action: ModuleType) -> None:
    state, waits = follow(action, lambda number, at: running(min(int(at), 100), 1000), stall_seconds=60)
    assert state["active"]
    assert 150 <= sum(waits) <= 200


def test_slow_work_that_moves_is_followed_to_its_end(action: ModuleType) -> None:
    state, _ = follow(
        action,
        lambda number, at: running(number, 100) if number < 40 else ended({"ok": True}),
        stall_seconds=60,
    )
    assert not state["active"]


def test_a_short_break_of_contact_is_borne_and_a_long_one_is_told(action: ModuleType) -> None:
    def breaks(seconds: float) -> Callable[[int, float], dict[str, Any]]:
        def answer(number: int, at: float) -> dict[str, Any]:
            if at < seconds:
                raise AnsibleConnectionFailure("gone")
            return ended({"ok": True})

        return answer

    state, _ = follow(action, breaks(90))
    assert state["result"] == {"ok": True}
    with pytest.raises(AnsibleConnectionFailure):
        follow(action, breaks(600))


@pytest.mark.parametrize(("terminal", "most"), [(False, 21), (True, 400)])
def test_progress_is_a_line_at_times_on_a_terminal_and_every_five_percent_elsewhere(
    action: ModuleType, monkeypatch: pytest.MonkeyPatch, terminal: bool, most: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(action, "_ON_TERMINAL", terminal)
    monkeypatch.setattr(action.display, "display", said.append)
    follow(action, lambda number, at: running(int(at), 9000) if at < 9000 else ended({"ok": True}))
    assert 18 <= len(said) <= most
    assert said[0].startswith("[spark-a] fetch: ")


def test_a_job_that_ends_badly_tells_its_problems_or_its_last_words(action: ModuleType) -> None:
    problem = {"found": "x is short", "needed": "y", "do": "z"}
    told = action._verdict(ended({"ok": False, "problems": [problem]}, "exit-code exited 1"), STARTED)
    assert told["msg"] == "found: x is short\nneeded: y\ndo: z"
    silent = action._verdict(ended(None, "signal killed KILL"), STARTED)
    assert "signal killed KILL" in silent["msg"]
    assert "last words" in silent["msg"]


def test_success_without_a_result_is_no_success(action: ModuleType) -> None:
    assert action._verdict(ended(None), STARTED)["failed"]
