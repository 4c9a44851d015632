"""How every rank of the pair stands, asked from the head: its own unit, and the peers' over the link."""

from __future__ import annotations

import json
from typing import Any

from . import pairfile, paths, peer, ranks, ready
from .problem import Problem

IDENTITY = paths.ETC / "peer_ed25519"
KNOWN_HOSTS = paths.ETC / "peer_known_hosts"


def reports() -> list[dict[str, Any]]:
    """`ready.rank_report` of every rank, this node's first.

    A peer that no rail leads to is told as not running and `"asked": False`: nobody knows how it stands.
    """
    pair = pairfile.load()
    found = [{**ready.rank_report(pair.rank), "host": pair.me.host}]
    for other in pair.peers:
        found.append({**_ask(other), "host": other.host})
    return found


def _ask(rank: pairfile.PairRank) -> dict[str, Any]:
    """The peer's own report, over the first of its rails that brings one."""
    login = peer.Login(paths.SERVICE_USER, IDENTITY, KNOWN_HOSTS, rank.ssh_port)
    errors = []
    for rail in rank.rails:
        try:
            return _ask_at(rail.address, login, rank.rank)
        except (Problem, ValueError) as error:
            errors.append(f"{rail.address}: {error}")
    unit = f"{ranks.name_of(rank.rank)}.service"
    return {
        "unit": unit,
        "runs": False,
        "asked": False,
        "result": "no answer",
        "status": "?",
        "log": errors,
    }


def _ask_at(address: str, login: peer.Login, rank: int) -> dict[str, Any]:
    with (
        peer.private_folder() as folder,
        peer.Connection(address, login, folder, "peer", None) as connection,
    ):
        done = connection.run(["sparkpair", "agent", "rank-report", str(rank)])
    answer = json.loads(done.stdout)
    if not isinstance(answer, dict) or not {"unit", "runs", "result", "status", "log"} <= answer.keys():
        raise ValueError(f"no report of a rank: {done.stdout[:200]}")
    return answer
