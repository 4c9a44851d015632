"""From a plan to proven rails: what one node sees of them, and what the pair settles on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import atomic, link, linkplan, netapply, nodefacts, pairfile, probe
from .problem import Problem

_NO_PORTS = (22, 22, 22, 22)


def _end(ends: Sequence[Mapping[str, Any]], host: str) -> Mapping[str, Any]:
    return next(end for end in ends if end["host"] == host)


def run(
    plan: Mapping[str, Any],
    host: str,
    *,
    root: Path = Path("/"),
    wait: float = 20.0,
    tcp: tuple[int, str] | None = None,
    patient: bool = True,
) -> dict[str, Any]:
    """Look at every planned rail from `host`.

    Args:
        wait: seconds for addresses and GID rows to come up, and for the peer to answer.
        tcp: (random high port, run's word) to try TCP too, with all hosts at once.
        patient: False for a dry run: nothing is waited for, and nothing sent where addresses are not live.
    Returns {"rails", "firewall", "not_probed"}; see `probe.verdict` for the form of a rail.
    """
    if not patient and _not_live(plan, host):
        return {"rails": [], "firewall": "", "not_probed": "the planned addresses are not set yet"}
    report = _wait_ready(plan, host, root, wait if patient else 0.0)
    rails = []
    for number, ends in enumerate(plan["rails"]):
        mine = _end(ends, host)
        rail = report.rails[number]
        pings = {
            end["host"]: probe.ping_rail(
                mine["netdev"], end["address"], plan["mtu"], wait if patient else 0.0
            )
            for end in ends
            if end["host"] != host and rail.state not in ("no-device", "down", "no-carrier", "wrong-address")
        }
        rails.append(
            {
                "rail": number,
                "state": rail.state,
                "mtu": rail.mtu,
                "problem": _problem(report, rail),
                "pings": pings,
                "tcp": [],
            }
        )
    if tcp:
        for item in _try_tcp(plan, host, rails, tcp, wait):
            rails[item["rail"]]["tcp"].append(item)
    return {"rails": rails, "firewall": nodefacts.firewall(), "not_probed": ""}


def _not_live(plan: Mapping[str, Any], host: str) -> list[str]:
    wanted = [
        netapply.WantedPort(end["netdev"], f"{end['address']}/{end['prefix']}", plan["mtu"])
        for end in (_end(ends, host) for ends in plan["rails"])
    ]
    return netapply.differences(wanted, netapply.live_ports())


def _wait_ready(plan: Mapping[str, Any], host: str, root: Path, wait: float) -> link.Report:
    """The node's rails as planned; asked again until all are ready or time is up."""
    everything = list(range(len(plan["rails"])))
    rank = [end["host"] for end in plan["rails"][0]].index(host)
    pair = linkplan.pair_of(plan, rank, everything, _NO_PORTS)
    deadline = time.monotonic() + wait
    while True:
        report = link.read_link(root, rails=len(everything), pair=pair)
        if not report.errors or time.monotonic() >= deadline:
            return report
        time.sleep(0.5)


def _problem(report: link.Report, rail: link.Rail) -> dict[str, Any] | None:
    """The finding that is about this rail; the first of all where none names it."""
    if rail.state == "ready":
        return None
    names = [name for name in (rail.netdev, rail.rdma) if name]
    about = [item for item in report.errors if any(name in item.found for name in names)]
    found = about or report.errors
    return found[0].as_dict() if found else None


def _try_tcp(
    plan: Mapping[str, Any], host: str, rails: Sequence[Mapping[str, Any]], tcp: tuple[int, str], wait: float
) -> list[dict[str, Any]]:
    """TCP over the rails whose peers answered at all: a dead one is told by its ping."""
    paths = [
        probe.Path(rail["rail"], _end(ends, host)["address"], peer, _end(ends, peer)["address"])
        for rail, ends in zip(rails, plan["rails"], strict=True)
        for peer, passed in rail["pings"].items()
        if passed["small"]
    ]
    free_port, word = tcp
    return probe.tcp_exchange(paths, free_port, pairfile.MASTER_PORT, word, wait) if paths else []


def settle(
    plan: Mapping[str, Any],
    probes: Mapping[str, Mapping[str, Any]],
    *,
    rank: int,
    ssh_ports: Sequence[int],
    required: int,
    root: Path = Path("/"),
    path: Path = pairfile.FILE,
    check_mode: bool = False,
) -> dict[str, Any]:
    """Keep the rails that serve on every node and write the pair's file.

    Returns {"changed", "diff", "rails", "told", "pair"}. Raises Problem where too few serve.
    """
    keep, dropped = probe.verdict(plan, probes, required)
    pair = linkplan.pair_of(plan, rank, keep, ssh_ports)
    text = pair.text()
    before = path.read_text() if path.is_file() else ""
    if before != text and not check_mode:
        if not path.parent.is_dir():
            raise Problem(
                found=f"there is no folder {path.parent}",
                needed="the folders that role host makes",
                do="ansible-playbook site.yml --tags host,link",
                code="pair-folder",
            )
        atomic.write_text(path, text)
    report = link.read_link(root, rails=len(keep), pair=pair)
    planned = {rail.netdev: rail for rail in pair.me.rails}
    rails = [
        rail
        if rail.state == "ready"
        else link.Rail(
            **{
                **asdict(rail),
                "address": planned[rail.netdev].address,
                "prefix": planned[rail.netdev].prefix,
                "rdma": planned[rail.netdev].rdma,
                "mtu": pair.mtu,
                "state": "planned",
            }
        )
        for rail in report.rails
    ]
    return {
        "changed": before != text,
        "diff": {"before_header": str(path), "after_header": str(path), "before": before, "after": text},
        "rails": [asdict(rail) for rail in rails],
        "told": [str(problem) for problem in dropped],
        "pair": pair.as_dict(),
    }
