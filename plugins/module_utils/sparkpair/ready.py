"""Waiting until the pair answers, and giving up early when a rank has died."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict
from typing import Any

from . import agent, api, ranks, systemd
from .console import duration
from .problem import Problem

_PAUSE_S = 2.0
# One try's own limit: a prompt this short that takes longer shows a pair that generates nothing, or is full.
TRY_S = 60.0


def rank_report(rank: int) -> dict[str, Any]:
    """How a rank's unit stands on this node, with its last lines when it does not run."""
    unit = f"{ranks.name_of(rank)}.service"
    state = systemd.state(unit)
    return {
        "unit": unit,
        **asdict(state),
        "runs": state.runs,
        "log": [] if state.runs else systemd.last_lines(unit),
    }


def wait(
    endpoint: api.Endpoint,
    model: str,
    limit_s: float,
    reports: Callable[[], list[dict[str, Any]]],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Until a real completion comes back, ours or others': {"seconds", "tries", "busy"}.

    Raises Problem as soon as a rank's unit has ended, when a peer couldn't be asked twice in a row, or at
    the limit with the last thing seen.

    Args:
        reports: gives `rank_report` of every rank, the other nodes' too; with `"asked": False` for a rank
            whose node gave no answer.
    """
    begun = time.monotonic()
    tries = 0
    silent: set[str] = set()
    while True:
        tries += 1
        standing = api.standing(endpoint, model, TRY_S, sleep=sleep)
        if standing.lives:
            return {"seconds": round(time.monotonic() - begun, 1), "tries": tries, "busy": standing.busy}
        silent = _require_running(reports(), silent)
        if time.monotonic() - begun > limit_s:
            raise Problem(
                found=f"no right answer after {duration(limit_s)}; the last try: {standing.wrong}",
                needed=f"a completion of {model}",
                do="journalctl -u 'sparkpair-rank*' on both; then ansible-playbook stop.yml and site.yml",
                code="not-ready",
            )
        sleep(_PAUSE_S)


def _require_running(reports: Sequence[dict[str, Any]], silent: Set[str]) -> set[str]:
    """The units whose node gave no answer now. Raises Problem for a rank that ended, or stays silent.

    One lost question is no dead rank: a link that carries the weights at full speed may drop a login.

    Args:
        silent: the units whose node gave no answer the last time.
    """
    unasked = [report for report in reports if not report.get("asked", True)]
    for report in reports:
        if report.get("asked", True) and not report["runs"]:
            raise _died(report)
    for report in unasked:
        if report["unit"] in silent:
            raise _unreachable(report)
    return {str(report["unit"]) for report in unasked}


def _unreachable(report: dict[str, Any]) -> Problem:
    tried = "\n".join(report["log"])
    return Problem(
        found=f"how {report['unit']} stands can't be asked, twice in a row:\n{tried}",
        needed="both ranks running, and the link between them up",
        do="see that the node is on and the rails are up (sparkpair link), then ansible-playbook site.yml again",
        code="rank-unreachable",
        host=report.get("host"),
    )


def _died(report: dict[str, Any]) -> Problem:
    log = "\n".join(report["log"][-15:])
    return Problem(
        found=f"{report['unit']} ended ({report['result']}, exit status {report['status']}). Its last lines:\n{log}",
        needed="both ranks running",
        do="correct what the last lines say, then ansible-playbook site.yml again",
        code="rank-died",
        host=report.get("host"),
    )


def _agent_verb(words: Sequence[str]) -> int:
    """`sparkpair agent rank-report RANK`: one JSON object on stdout."""
    if len(words) != 1 or not re.fullmatch(r"\d{1,2}", words[0]):
        print("rank-report takes one rank")
        return 2
    print(json.dumps(rank_report(int(words[0]))))
    return 0


agent.VERBS["rank-report"] = _agent_verb
