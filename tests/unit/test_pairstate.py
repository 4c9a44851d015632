"""How the ranks stand, asked from the head: each of the peer's rails is tried before it counts as silent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
from sparkpair import pairfile, pairstate, peer, ready
from sparkpair.problem import Problem

REPORT: dict[str, Any] = {
    "unit": "sparkpair-rank1.service",
    "active": "active",
    "result": "success",
    "status": "0",
    "runs": True,
    "log": [],
}
OWN = {**REPORT, "unit": "sparkpair-rank0.service"}


def a_rank(number: int) -> pairfile.PairRank:
    rails = tuple(
        pairfile.PairRail(rail, f"net{rail}", f"rdma{rail}", 1, f"10.2{rail}.0.{number + 1}", 24)
        for rail in (0, 1)
    )
    return pairfile.PairRank(number, f"spark-{'ab'[number]}", 22, rails)


PAIR = pairfile.Pair(0, 9000, "10.20.0.1", 29620, ("10.20.0.0/24", "10.21.0.0/24"), (a_rank(0), a_rank(1)))


class Peer:
    """What each of the peer's addresses says; an address without words has no sshd."""

    def __init__(self, said: dict[str, str]) -> None:
        self.said = said
        self.tried: list[str] = []

    def __call__(self, address: str, *_: Any) -> Peer:
        self.tried.append(address)
        return self

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert words == ["sparkpair", "agent", "rank-report", "1"]
        if self.tried[-1] not in self.said:
            raise Problem(f"no SSH to {self.tried[-1]}", "an sshd", "look", code="link-unreachable")
        return subprocess.CompletedProcess(list(words), 0, self.said[self.tried[-1]], "")


def reports(monkeypatch: pytest.MonkeyPatch, there: Peer) -> list[dict[str, Any]]:
    monkeypatch.setattr(pairfile, "load", lambda: PAIR)
    monkeypatch.setattr(ready, "rank_report", lambda rank: dict(OWN))
    monkeypatch.setattr(peer, "Connection", there)
    return pairstate.reports()


def test_the_first_rail_that_answers_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Peer({"10.20.0.2": json.dumps(REPORT), "10.21.0.2": json.dumps(REPORT)})
    assert reports(monkeypatch, there) == [{**OWN, "host": "spark-a"}, {**REPORT, "host": "spark-b"}]
    assert there.tried == ["10.20.0.2"]


def test_a_rail_that_is_down_leaves_the_other_to_ask_over(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Peer({"10.21.0.2": json.dumps(REPORT)})
    assert reports(monkeypatch, there)[1] == {**REPORT, "host": "spark-b"}
    assert there.tried == ["10.20.0.2", "10.21.0.2"]


@pytest.mark.parametrize("said", ["", "{}", "[]", "rank-report takes one rank"])
def test_words_that_are_no_report_are_no_answer(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    there = Peer({"10.20.0.2": said, "10.21.0.2": json.dumps(REPORT)})
    assert reports(monkeypatch, there)[1]["runs"] is True


def test_a_peer_that_no_rail_leads_to_is_told_as_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reports(monkeypatch, Peer({}))[1]
    assert (found["runs"], found["asked"], found["host"]) == (False, False, "spark-b")
    assert found["unit"] == "sparkpair-rank1.service"
    assert ["10.20.0.2" in found["log"][0], "10.21.0.2" in found["log"][1]] == [True, True]
