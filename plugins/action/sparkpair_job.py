"""Action sparkpair_job: start or attach to a job on the node, show its progress, end with its result."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

_LOST_CONTACT_S = 120
_TRY_CONTACT_S = 3
_STEP_PERCENT = 5
_LINE_EVERY_S = 15.0
_LONGEST_WAIT_S = 30
# Asked when the strategy loads this plugin: the forks that run tasks have no terminal to ask.
_ON_TERMINAL = sys.stdout.isatty()


class ActionModule(ActionBase):
    """Runs on the controller, in the fork of one host; everything it knows comes from the module."""

    def run(self, tmp: str | None = None, task_vars: Mapping[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = dict(task_vars or {})
        arguments = dict(self._task.args)
        if arguments.get("state", "followed") != "followed":
            return self._call(arguments, variables)
        started = self._call({**arguments, "state": "started"}, variables)
        if started.get("failed") or self._task.check_mode:
            return {**result, **started}
        host = variables.get("inventory_hostname", "")
        self._say(host, started)
        state = self._follow(arguments, variables, host)
        return {**result, **_verdict(state, started)}

    def _call(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            module_name="sparkpair_job", module_args=arguments, task_vars=variables
        )
        return answer

    def _say(self, host: str, started: dict[str, Any]) -> None:
        """Said before the work, as Ctrl-C leaves a task no time for words."""
        verb = "runs" if started["started"] else "was running already: attached"
        display.display(f"[{host}] {started['unit']} {verb}. Ctrl-C ends this play, not the work:")
        display.display(_goes_on(started["unit"]))

    def _follow(self, arguments: dict[str, Any], variables: dict[str, Any], host: str) -> dict[str, Any]:
        """Ask until the job ends or the time to follow is over. Short breaks of contact are borne."""
        begun = moved_at = heard_at = time.monotonic()
        moved = (-1, -1)
        lines = _Lines(host)
        limit, stall = (int(arguments.get(f"{name}_seconds", 0)) or math.inf for name in ("follow", "stall"))
        for wait in _waits():
            left = min(begun + limit, moved_at + stall) - time.monotonic()
            question = {
                "name": arguments["name"],
                "state": "queried",
                "wait_seconds": max(math.ceil(min(wait, left)), 0),
            }
            try:
                state = self._call(question, variables)
                heard_at = time.monotonic()
            except AnsibleConnectionFailure:
                if time.monotonic() - heard_at > _LOST_CONTACT_S:
                    raise
                time.sleep(_TRY_CONTACT_S)
                continue
            if state.get("failed") or not state["active"]:
                return state
            progress = state["progress"] or {}
            now_done = (progress.get("bytes_done", 0), progress.get("files_done", 0))
            if now_done != moved:
                moved, moved_at = now_done, time.monotonic()
            lines.show(progress)
            if time.monotonic() >= min(begun + limit, moved_at + stall):
                return state
        raise AssertionError("unreachable")


def _waits() -> Iterator[int]:
    """Seconds that the node may wait before it answers: a job's end is told at once in any case."""
    wait = 5.0
    while True:
        yield round(wait)
        wait = min(wait * 1.4, _LONGEST_WAIT_S)


class _Lines:
    """A line every 15 s on a terminal; elsewhere one for every 5 % that were gained."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._shown_at = time.monotonic()
        self._percent = -1

    def show(self, progress: dict[str, Any]) -> None:
        what = "bytes" if progress.get("bytes_total") else "files"
        if not progress.get(f"{what}_total"):
            return
        percent = 100 * progress[f"{what}_done"] // progress[f"{what}_total"]
        now = time.monotonic()
        if _ON_TERMINAL:
            due = now - self._shown_at >= _LINE_EVERY_S
        else:
            due = percent // _STEP_PERCENT > self._percent // _STEP_PERCENT
        if due:
            self._shown_at, self._percent = now, percent
            display.display(f"[{self._host}] {progress['line']}")


def _goes_on(unit: str) -> str:
    return (
        f"  watch:     journalctl -fu {unit}\n"
        "  re-attach: run the same playbook again\n"
        f"  end it:    sudo systemctl stop {unit}"
    )


def _verdict(state: dict[str, Any], started: dict[str, Any]) -> dict[str, Any]:
    """The task's result from the last answer about the job."""
    unit = started["unit"]
    if state.get("failed"):
        return state
    if state["active"]:
        return {"failed": True, "msg": f"found: still running\nneeded: its end\ndo:\n{_goes_on(unit)}"}
    told = isinstance(state["result"], dict)
    result = state["result"] if told else {}
    ended_well = bool(state["exit"]) and state["exit"][0] == "success"
    if ended_well and told and result.get("ok"):
        return {"changed": bool(result.get("changed", True)), "result": result, "unit": unit}
    problems = result.get("problems") or []
    how = " ".join(state["exit"] or ["no trace of its end: was the node restarted?"])
    how += "" if told else ", without a result"
    texts = [f"found: {p['found']}\nneeded: {p['needed']}\ndo: {p['do']}" for p in problems] or [
        f"found: {unit} ended badly ({how})\nneeded: its success\ndo: journalctl -u {unit}",
        *state["log"],
    ]
    return {"failed": True, "msg": "\n".join(texts), "result": result, "unit": unit}
