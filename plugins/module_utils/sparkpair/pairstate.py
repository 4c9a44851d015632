"""How every rank of the pair stands, asked from the head: its own unit, and the peers' over the link."""

from __future__ import annotations

import json
from typing import Any

from . import pairfile, paths, peer, ready
from .problem import Problem

IDENTITY = paths.ETC / "peer_ed25519"
KNOWN_HOSTS = paths.ETC / "peer_known_hosts"


def reports() -> list[dict[str, Any]]:
    """`ready.rank_report` of every rank, this node's first. A peer that can't be asked counts as not running."""
    pair = pairfile.load()
    found = [{**ready.rank_report(pair.rank), "host": pair.me.host}]
    for other in pair.peers:
        found.append({**_ask(other), "host": other.host})
    return found


def _ask(rank: pairfile.PairRank) -> dict[str, Any]:
    login = peer.Login(paths.SERVICE_USER, IDENTITY, KNOWN_HOSTS, rank.ssh_port)
    words = ["sparkpair", "agent", "rank-report", str(rank.rank)]
    try:
        with (
            peer.private_folder() as folder,
            peer.Connection(rank.rails[0].address, login, folder, "peer", None) as connection,
        ):
            done = connection.run(words)
            answer: dict[str, Any] = json.loads(done.stdout)
            return answer
    except (Problem, ValueError) as error:
        unit = f"rank {rank.rank}"
        return {"unit": unit, "runs": False, "result": "no answer", "status": "?", "log": [str(error)]}
