"""From a plan to proven rails on one node, and the file that the pair settles on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sparkpair import linkplan, netapply, nodefacts, pairfile, probe, railprobe, sysfs
from sparkpair.problem import Problem
from systree import RAIL0, SysTree, gid_rows, healthy, pair_dict, put

F0 = ("enp1s0f0np0", "enP2p1s0f0np0")


def plan() -> dict[str, Any]:
    """The default plan, as the module hands it on."""
    pair = pairfile.parse(pair_dict())
    rails = [
        [
            {
                "host": rank.host,
                "netdev": rank.rails[rail].netdev,
                "rdma": rank.rails[rail].rdma,
                "address": rank.rails[rail].address,
                "prefix": 24,
                "mtu": 9000,
                "source": "plan",
            }
            for rank in pair.ranks
        ]
        for rail in range(2)
    ]
    return linkplan.Plan(mtu=9000, rails=rails, files={"spark-a": None, "spark-b": None}).as_dict()


@pytest.fixture
def pinged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    asked: list[tuple[str, str, int]] = []

    def answer(netdev: str, peer: str, mtu: int, _wait: float) -> dict[str, bool]:
        asked.append((netdev, peer, mtu))
        return {"large": True, "small": True}

    monkeypatch.setattr(probe, "ping_rail", answer)
    monkeypatch.setattr(nodefacts, "firewall", lambda: "ufw")
    return asked


def test_each_rail_is_asked_by_its_own_port(tmp_path: Path, pinged: list[tuple[str, str, int]]) -> None:
    """Field report 4: from each rail's own port to the matching one of the peer, at full size."""
    healthy(tmp_path)
    found = railprobe.run(plan(), "spark-a", root=tmp_path, wait=0)
    assert pinged == [(F0[0], "10.20.0.2", 9000), (F0[1], "10.21.0.2", 9000)]
    assert [(rail["state"], rail["problem"], rail["mtu"]) for rail in found["rails"]] == [
        ("ready", None, 9000)
    ] * 2
    assert found["firewall"] == "ufw"


def test_a_rail_that_is_not_as_planned_tells_its_own_finding(
    tmp_path: Path, pinged: list[tuple[str, str, int]]
) -> None:
    tree = healthy(tmp_path)
    tree.half(F0[1], up=True, mtu=1500, addresses=["10.21.0.1/24"])
    tree.half(F0[0], up=False)
    found = railprobe.run(plan(), "spark-a", root=tmp_path, wait=0)
    assert [rail["state"] for rail in found["rails"]] == ["no-carrier", "wrong-mtu"]
    assert [rail["problem"]["code"] for rail in found["rails"]] == ["link-no-carrier", "link-mtu"]
    assert pinged == [(F0[1], "10.21.0.2", 9000)]
    with pytest.raises(Problem, match="0 of 2 rails serve"):
        probe.verdict(plan(), {"spark-a": found}, 1)


def test_rows_that_come_late_are_waited_for(
    tmp_path: Path, pinged: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GID table follows a new address after a moment."""
    tree = healthy(tmp_path)
    tree.gids("rocep1s0f0", gid_rows(F0[0], []))
    monkeypatch.setattr(
        railprobe.time, "sleep", lambda _: tree.gids("rocep1s0f0", gid_rows(F0[0], ["10.20.0.1"]))
    )
    found = railprobe.run(plan(), "spark-a", root=tmp_path, wait=5)
    assert [rail["state"] for rail in found["rails"]] == ["ready", "ready"]
    assert pinged


def test_a_dry_run_before_the_addresses_exist_sends_nothing(
    tmp_path: Path, pinged: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netapply, "live_ports", dict)
    SysTree(tmp_path).cable()
    found = railprobe.run(plan(), "spark-a", root=tmp_path, patient=False)
    assert (found["rails"], pinged) == ([], [])
    assert "not set yet" in found["not_probed"]


def test_the_pair_s_file_is_written_once_and_tells_the_node_s_rails(tmp_path: Path) -> None:
    healthy(tmp_path)
    path = tmp_path / "pair.json"
    options: dict[str, Any] = {
        "rank": 0,
        "ssh_ports": [22, 22],
        "required": 2,
        "root": tmp_path,
        "path": path,
    }
    first = railprobe.settle(plan(), {}, **options)
    assert first["changed"] is True
    assert pairfile.load(path) == pairfile.parse(pair_dict())
    assert [(rail["netdev"], rail["gid_index"], rail["state"]) for rail in first["rails"]] == [
        (F0[0], 3, "ready"),
        (F0[1], 3, "ready"),
    ]
    assert railprobe.settle(plan(), {}, **options)["changed"] is False


def test_a_dry_run_predicts_the_file_and_the_planned_rails(tmp_path: Path) -> None:
    SysTree(tmp_path).cable()
    path = tmp_path / "absent/pair.json"
    options: dict[str, Any] = {
        "rank": 1,
        "ssh_ports": [22, 2222],
        "required": 2,
        "root": tmp_path,
        "path": path,
    }
    told = railprobe.settle(plan(), {}, check_mode=True, **options)
    assert (told["changed"], path.exists()) == (True, False)
    assert [(rail["address"], rail["state"], rail["mtu"]) for rail in told["rails"]] == [
        ("10.20.0.2", "planned", 9000),
        ("10.21.0.2", "planned", 9000),
    ]
    assert json.loads(told["diff"]["after"])["ranks"][1]["ssh_port"] == 2222
    with pytest.raises(Problem, match="no folder"):
        railprobe.settle(plan(), {}, **options)


def test_a_dropped_rail_is_in_no_node_s_file(tmp_path: Path) -> None:
    """The ring wants the same number of devices on every rank."""
    healthy(tmp_path)
    bad = {"rail": 1, "state": "ready", "mtu": 9000, "problem": None, "tcp": []}
    good = {**bad, "rail": 0, "pings": {"spark-a": {"large": True, "small": True}}}
    lost = {**bad, "pings": {"spark-a": {"large": False, "small": False}}}
    probes = {"spark-b": {"rails": [good, lost], "firewall": ""}}
    for rank in (0, 1):
        path = tmp_path / f"pair{rank}.json"
        told = railprobe.settle(
            plan(), probes, rank=rank, ssh_ports=[22, 22], required=1, root=tmp_path, path=path
        )
        assert [len(entry.rails) for entry in pairfile.load(path).ranks] == [1, 1]
        assert "no packet from spark-b" in told["told"][0]


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own addresses, netplan and firewall play no part."""
    monkeypatch.setattr(sysfs, "ip_json", lambda *_: [])
    monkeypatch.setattr(nodefacts.netplan, "list_files", dict)
    monkeypatch.setattr(nodefacts, "firewall", lambda: "")


@pytest.mark.usefixtures("quiet_machine")
def test_a_node_is_settled_while_its_file_holds(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    path = tmp_path / "pair.json"
    put(path, json.dumps(pair_dict()))

    def settled(host: str = "spark-a", **options: Any) -> bool:
        return bool(nodefacts.collect(host, root=tmp_path, pair_file=path, **options)["settled"])

    assert settled()
    assert settled(netdevs=list(F0))
    assert not settled("spark-b"), "the file of another host is not this one's"
    assert not settled(rails=1)
    assert not settled(netdevs=["enp1s0f1np1", "enP2p1s0f1np1"])
    tree.net(F0[0], mtu=1500)
    assert not settled()
    path.write_text("{")
    assert not settled()


@pytest.mark.usefixtures("quiet_machine")
def test_facts_of_a_bare_node_hold_what_the_plan_reads(tmp_path: Path) -> None:
    SysTree(tmp_path).cable(addresses=(RAIL0, ()))
    facts = [nodefacts.collect(host, root=tmp_path) for host in ("spark-a", "spark-b")]
    facts[1]["machine_id"] = "another"
    assert facts[0]["cabled"] is True
    assert [port["netdev"] for port in facts[0]["ports"] if port["carrier"]] == list(F0)
    assert [problem["code"] for problem in facts[0]["problems"]] == ["link-twin-no-address"]
    assert len(linkplan.make(facts, None).rails) == 2


def test_rulesets_that_drop_input_are_recognised() -> None:
    chain = (
        "table inet t {\n\tchain input {\n\t\ttype filter hook input priority filter; policy %s;\n%s\t}\n}\n"
    )
    assert nodefacts.drops_input(chain % ("drop", ""))
    assert nodefacts.drops_input(chain % ("accept", "\t\ttcp dport 45123 drop\n"))
    assert not nodefacts.drops_input(chain % ("accept", "\t\ttcp dport 22 accept\n"))
    assert not nodefacts.drops_input((chain % ("drop", "")).replace("hook input", "hook forward"))
    assert not nodefacts.drops_input("")


def test_ufw_is_told_by_its_own_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nft(*_: object, **__: object) -> None:
        raise FileNotFoundError("nft")

    monkeypatch.setattr(nodefacts.subprocess, "run", no_nft)
    put(tmp_path / "etc/ufw/ufw.conf", "# ENABLED=yes\nENABLED=no")
    assert nodefacts.firewall(tmp_path) == ""
    put(tmp_path / "etc/ufw/ufw.conf", "ENABLED=yes")
    assert nodefacts.firewall(tmp_path) == "ufw"
