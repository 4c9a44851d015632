"""Rails proven on real Linux links: two hosts as network namespaces, veth pairs named like the twins.

Needs root (namespaces, raw sockets). Nothing outside the namespaces is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sparkpair import linkplan, probe
from sparkpair.problem import Problem

F0 = ("enp1s0f0np0", "enP2p1s0f0np0")
LIBRARY = Path(__file__).parents[2] / "plugins/module_utils"
ADDRESSES = {"head": ("10.20.0.1", "10.21.0.1"), "worker": ("10.20.0.2", "10.21.0.2")}

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("ping"),
    reason="needs root, iproute2 and ping",
)


def sh(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}: {done.stderr}"


class Net:
    """Namespaces by host name; each runs Python of this library, several at once."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.hosts: list[str] = []
        self._links = 0

    def name(self, host: str) -> str:
        return f"spt{self.tag}-{host}"

    def host(self, host: str) -> None:
        sh(f"ip netns add {self.name(host)}")
        self.hosts.append(host)
        self.at(host, "ip link set lo up")

    def at(self, host: str, line: str) -> None:
        sh(f"ip netns exec {self.name(host)} {line}")

    def wire(self, first: tuple[str, str], second: tuple[str, str]) -> None:
        """Join (host, netdev) with (host, netdev)."""
        self._links += 1
        a, b = f"s{self.tag}a{self._links}", f"s{self.tag}b{self._links}"
        sh(f"ip link add {a} type veth peer name {b}")
        for made, (host, netdev) in ((a, first), (b, second)):
            sh(f"ip link set {made} netns {self.name(host)}")
            self.at(host, f"ip link set {made} name {netdev}")
            self.at(host, f"ip link set {netdev} mtu 9000 up")

    def address(self, host: str, rail: int, netdev: str | None = None) -> None:
        self.at(host, f"ip addr add {ADDRESSES[host][rail]}/24 dev {netdev or F0[rail]}")

    def python(self, host: str, code: str) -> Any:
        """Run code there; it ends by print(json.dumps(...)) of the variable `result`."""
        text = f"import json, dataclasses\nfrom sparkpair import probe\n{code}\nprint(json.dumps(result))"
        done = subprocess.run(
            ["ip", "netns", "exec", self.name(host), sys.executable, "-c", text],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(LIBRARY)},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def together(self, codes: dict[str, str]) -> dict[str, Any]:
        with ThreadPoolExecutor() as pool:
            jobs = {host: pool.submit(self.python, host, code) for host, code in codes.items()}
            return {host: job.result() for host, job in jobs.items()}

    def close(self) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", self.name(host)], check=False)


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net(f"{os.getpid() % 10000}")
    try:
        made.host("head")
        made.host("worker")
        yield made
    finally:
        made.close()


@pytest.fixture
def pair(net: Net) -> Net:
    """Both rails wired straight and addressed."""
    for rail, netdev in enumerate(F0):
        net.wire(("head", netdev), ("worker", netdev))
        for host in ("head", "worker"):
            net.address(host, rail)
    return net


def plan() -> dict[str, Any]:
    """The default plan of two rails, as far as the verdict reads it."""
    return {
        "rails": [
            [
                {"host": host, "netdev": F0[rail], "address": ADDRESSES[host][rail], "mtu": 9000}
                for host in ("head", "worker")
            ]
            for rail in range(2)
        ]
    }


def meet(netdevs: dict[str, list[str]], seconds: float = 8.0, word: str = "w") -> dict[str, str]:
    hosts = list(netdevs)
    return {
        host: f"result = [list(item) for item in probe.find_meetings({ports!r}, {host!r}, "
        f"{[other for other in hosts if other != host]!r}, {word!r}, {seconds})]"
        for host, ports in netdevs.items()
    }


def ping_all(net: Net, mtu: int = 9000) -> dict[str, Any]:
    """What each host's probe tells of both rails, in the form that the verdict takes."""

    def one(host: str, peer: str, rail: int) -> dict[str, Any]:
        code = f"result = probe.ping_rail({F0[rail]!r}, {ADDRESSES[peer][rail]!r}, {mtu}, 0)"
        live = net.python(host, _live_mtu(F0[rail]))
        sound = {"rail": rail, "state": "ready", "problem": None, "tcp": []}
        return {**sound, "mtu": live, "pings": {peer: net.python(host, code)}}

    ways = [("head", "worker"), ("worker", "head")]
    with ThreadPoolExecutor() as pool:
        jobs = {host: [pool.submit(one, host, peer, rail) for rail in range(2)] for host, peer in ways}
        return {
            host: {"rails": [job.result() for job in listed], "firewall": ""} for host, listed in jobs.items()
        }


def _live_mtu(netdev: str) -> str:
    """The namespace's own view: /sys may still show another one."""
    return (
        f"import subprocess\nwords = ['ip', '-j', 'link', 'show', {netdev!r}]\n"
        "result = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)[0]['mtu']"
    )


def test_each_port_learns_which_one_it_meets(net: Net) -> None:
    """Field reports 6 and 7: straight, crossed, and into the other cage, learned without any address."""
    net.wire(("head", F0[0]), ("worker", "enP2p1s0f1np1"))
    net.wire(("head", F0[1]), ("worker", "enp1s0f1np1"))
    heard = net.together(meet({"head": list(F0), "worker": ["enp1s0f1np1", "enP2p1s0f1np1"]}))
    assert heard == {
        "head": [["enP2p1s0f0np0", "worker", "enp1s0f1np1"], ["enp1s0f0np0", "worker", "enP2p1s0f1np1"]],
        "worker": [["enP2p1s0f1np1", "head", "enp1s0f0np0"], ["enp1s0f1np1", "head", "enP2p1s0f0np0"]],
    }


def test_a_third_host_on_a_cabled_port_is_not_the_peer(net: Net) -> None:
    """Field report 6: a port with a carrier that leads elsewhere is not heard, nor is another pair's call."""
    net.host("stranger")
    for netdev in F0:
        net.wire(("head", netdev), ("worker", netdev))
    net.wire(("head", "enp1s0f1np1"), ("stranger", "eth9"))
    codes = meet({"head": [*F0, "enp1s0f1np1"], "worker": list(F0)})
    codes["stranger"] = meet({"worker": ["eth9"], "head": []}, 3.0, "another word")["worker"]
    heard = net.together(codes)
    assert heard["stranger"] == []
    assert {item[0] for item in heard["head"]} == set(F0)


def test_the_halves_of_one_cage_hear_all_of_the_other(net: Net) -> None:
    """A real cage is one port of a switch inside the card; a bridge stands in for both cards' switches."""
    net.host("switch")
    net.at("switch", "ip link add br0 type bridge")
    net.at("switch", "ip link set br0 up")
    for at, (host, netdev) in enumerate((host, netdev) for host in ("head", "worker") for netdev in F0):
        net.wire((host, netdev), ("switch", f"port{at}"))
        net.at("switch", f"ip link set port{at} master br0")
    heard = net.together(meet({"head": list(F0), "worker": list(F0)}))
    assert len(heard["head"]) == len(heard["worker"]) == 4
    assert all(item[1] == "worker" for item in heard["head"]), "our own other half must not count as a peer"
    edges = linkplan._edges([], {host: [tuple(item) for item in items] for host, items in heard.items()})
    assert len(edges) == 4


def test_a_silent_cable_ends_with_nothing_heard(net: Net) -> None:
    net.wire(("head", F0[0]), ("worker", F0[0]))
    assert net.python("head", meet({"head": [F0[0]], "worker": []}, 1.0)["head"]) == []


def test_an_address_in_use_is_found_before_it_is_assigned(pair: Net) -> None:
    """R11 and field report 16: an ARP probe with a zero sender; the peer has our address already."""
    pair.at("worker", f"ip addr add 10.20.0.77/24 dev {F0[0]}")
    ask = f"result = probe.find_owner({F0[0]!r}, '10.20.0.%d', [], 1.0)"
    owner = pair.python("head", ask % 77)
    assert owner is not None
    assert owner.count(":") == 5
    assert pair.python("head", ask % 78) is None
    refuse = (
        "from sparkpair.problem import Problem\n"
        f"try:\n    probe.check_free({F0[0]!r}, '10.20.0.77', [])\n    result = None\n"
        "except Problem as problem:\n    result = problem.as_dict()"
    )
    told = pair.python("head", refuse)
    assert told["code"] == "link-duplicate"
    assert owner in told["found"]


def test_our_own_other_half_is_no_duplicate(net: Net) -> None:
    """On one cable the twin may answer for an address that it holds itself."""
    net.wire(("head", F0[0]), ("worker", F0[0]))
    net.at("worker", f"ip addr add 10.20.0.77/24 dev {F0[0]}")
    ask = f"result = probe.find_owner({F0[0]!r}, '10.20.0.77', %r, 0.6)"
    owner = net.python("head", ask % ([],))
    assert net.python("head", ask % ([owner.upper()],)) is None


def test_a_port_that_is_off_is_told_not_guessed(net: Net) -> None:
    net.wire(("head", F0[0]), ("worker", F0[0]))
    net.at("head", f"ip link set {F0[0]} down")
    refuse = (
        "from sparkpair.problem import Problem\n"
        f"try:\n    probe.check_free({F0[0]!r}, '10.20.0.77', [])\n    result = None\n"
        "except Problem as problem:\n    result = problem.code"
    )
    assert net.python("head", refuse) == "link-probe"


def test_full_size_packets_pass_both_ways(pair: Net) -> None:
    """R10: 9000 at both ends passes."""
    assert probe.verdict(plan(), ping_all(pair), 2) == ([0, 1], [])


def test_small_mtus_at_both_ends_pass_at_their_own_size(pair: Net) -> None:
    """R10: 1500 at both ends passes; that it is slow is the link's own warning."""
    for host in ("head", "worker"):
        for netdev in F0:
            pair.at(host, f"ip link set {netdev} mtu 1500")
    assert probe.verdict(plan(), ping_all(pair, 1500), 2) == ([0, 1], [])


def test_a_rail_whose_ends_differ_in_mtu_is_dropped_with_both_values(pair: Net) -> None:
    """R10, field reports 4 and 10: small packets pass, full-size ones vanish without an error."""
    pair.at("worker", f"ip link set {F0[1]} mtu 1500")
    probes = ping_all(pair)
    assert probes["head"]["rails"][1]["pings"]["worker"] == {"large": False, "small": True}
    keep, dropped = probe.verdict(plan(), probes, 1)
    assert keep == [0]
    assert {problem.severity for problem in dropped} == {"warning"}
    assert "MTU 9000" in dropped[0].found
    assert "MTU 1500" in dropped[0].found
    with pytest.raises(Problem) as caught:
        probe.verdict(plan(), probes, 2)
    assert caught.value.code == "link-mtu-path"
    assert "rails=1" in caught.value.do


def test_a_rail_that_nobody_answers_on_is_told_so(pair: Net) -> None:
    pair.at("worker", f"ip addr del {ADDRESSES['worker'][1]}/24 dev {F0[1]}")
    with pytest.raises(Problem) as caught:
        probe.verdict(plan(), ping_all(pair), 2)
    assert caught.value.code == "link-unreachable"


def exchange(host: str, peer: str, seconds: float = 4.0, busy: bool = False) -> str:
    paths = [
        f"probe.Path({rail}, {ADDRESSES[host][rail]!r}, {peer!r}, {ADDRESSES[peer][rail]!r})"
        for rail in range(2)
    ]
    taken = "import socket\nheld = socket.create_server(('0.0.0.0', 29620))\n" if busy else ""
    return f"{taken}result = probe.tcp_exchange([{', '.join(paths)}], 45123, 29620, 'w', {seconds})"


def both(**options: Any) -> dict[str, str]:
    return {"head": exchange("head", "worker", **options), "worker": exchange("worker", "head", **options)}


def test_tcp_is_tried_on_the_master_port_and_a_high_one_over_each_rail(pair: Net) -> None:
    """Field report 19, the good case."""
    found = pair.together(both())
    for host, peer in (("head", "worker"), ("worker", "head")):
        assert [(item["rail"], item["port"], item["peer"], item["ok"]) for item in found[host]] == [
            (rail, port, peer, True) for rail in range(2) for port in (29620, 45123)
        ]


def test_a_master_port_that_a_rank_holds_is_left_alone(pair: Net) -> None:
    """A running rank 0 accepts one peer: a probe that connected to it would take that place."""
    codes = {"head": exchange("head", "worker", busy=True), "worker": exchange("worker", "head")}
    found = pair.together(codes)
    assert {item["port"] for item in found["worker"]} == {45123}
    assert {(item["port"], item["ok"]) for item in found["head"]} == {(29620, True), (45123, True)}


@pytest.mark.skipif(not shutil.which("nft"), reason="needs nftables")
def test_a_firewall_on_the_link_is_named_by_port_and_direction(pair: Net) -> None:
    """Field report 19: ping works, high ports from the head are dropped at the worker."""
    pair.at("worker", "nft add table inet t")
    pair.at("worker", "nft add chain inet t input { type filter hook input priority 0 ; policy accept ; }")
    pair.at("worker", f"nft add rule inet t input iifname {F0[0]} tcp dport > 40000 ct state new drop")
    found = pair.together(both())
    probes = ping_all(pair)
    for host, items in found.items():
        for item in items:
            probes[host]["rails"][item["rail"]]["tcp"].append(item)
    probes["worker"]["firewall"] = "nftables"
    with pytest.raises(Problem) as caught:
        probe.verdict(plan(), probes, 2)
    assert "port 45123 from head to worker blocked" in caught.value.found
    assert "from worker to head" not in caught.value.found
    assert f"iifname {F0[0]}" in caught.value.found
    assert probe.verdict(plan(), probes, 1)[0] == [1]


@pytest.mark.skipif(not shutil.which("nft"), reason="needs nftables")
def test_an_input_chain_that_drops_is_recognised(pair: Net) -> None:
    seen = "from sparkpair import nodefacts\nresult = nodefacts.firewall()"
    assert pair.python("worker", seen) == ""
    pair.at("worker", "nft add table inet t")
    pair.at("worker", "nft add chain inet t input { type filter hook input priority 0 ; policy drop ; }")
    assert pair.python("worker", seen) == "nftables"


def test_a_port_without_an_address_is_still_there(net: Net) -> None:
    """`ip -4` leaves such a port out; the plan would then say that there is no such device."""
    net.wire(("head", F0[0]), ("worker", F0[0]))
    seen = f"from sparkpair import netapply\nresult = dataclasses.asdict(netapply.live_ports()[{F0[0]!r}])"
    live = net.python("head", seen)
    assert (live["addresses"], live["mtu"]) == ([], 9000)
    assert live["mac"].count(":") == 5
