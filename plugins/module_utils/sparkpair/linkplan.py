"""The plan for the whole pair: which ports meet, which addresses they get, what changes on which node.

Pure: facts of every node in (as `nodefacts.collect` gives them), a plan out. Ranks are the places in
the list of facts.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import netplan
from .pairfile import MASTER_PORT, Pair, PairRail, PairRank
from .problem import Problem

# What one node heard on the wire: (own netdev, other host, its netdev).
Heard = tuple[str, str, str]
Twins = tuple[str, ...]


@dataclass(frozen=True)
class Meeting:
    """Cages that meet: the usable ports of each rank, in the order of the rails."""

    twins: tuple[Twins, ...]
    fixed: tuple[bool, ...]


@dataclass
class Plan:
    """What role link carries out.

    `rails`: for each rail its ends by rank, {"host", "netdev", "rdma", "address", "prefix", "mtu", "source"}
    where source is "netplan" (kept from the user's files), "own" (of an earlier run), "live" (kept, made
    persistent) or "plan".
    `files`: host -> text of our netplan file, None = there is none.
    """

    mtu: int
    rails: list[list[dict[str, Any]]] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    warnings: list[Problem] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "mtu": self.mtu,
            "rails": self.rails,
            "files": self.files,
            "warnings": [problem.as_dict() for problem in self.warnings],
            "subnets": [_network(ends[0]) for ends in self.rails],
            "master_address": self.rails[0][0]["address"],
            "lines": [self._line(number, ends) for number, ends in enumerate(self.rails)],
        }

    def _line(self, number: int, ends: Sequence[Mapping[str, Any]]) -> str:
        told = [
            f"{end['host']} {end['netdev']} ({end['rdma']}) {end['address']}/{end['prefix']}" for end in ends
        ]
        return f"rail {number}: {' <-> '.join(told)}, MTU {self.mtu}"


def _network(end: Mapping[str, Any]) -> str:
    return str(ipaddress.IPv4Network(f"{end['address']}/{end['prefix']}", strict=False))


def make(
    hosts: Sequence[Mapping[str, Any]],
    heard: Mapping[str, Iterable[Heard]] | None,
    *,
    rails: int = 2,
    required: int | None = None,
    mtu: int = 9000,
    subnets: Sequence[str] = netplan.DEFAULT_SUBNETS,
) -> Plan:
    """Plan the link of all `hosts` (rank 0 first).

    Args:
        rails, required: how many rails are wanted; fewer than `required` (default: all) are an error.
        heard: what each host heard on the wire; None where nobody listened: a dry run, or all is settled.
    Raises Problem where the cable leads nowhere, the choice is not clear, or addresses clash.
    """
    check_hosts(hosts)
    named = {facts["host"]: list(facts["named"]) for facts in hosts if facts.get("named")}
    if heard is None and all(facts["settled"] for facts in hosts):
        named = {facts["host"]: _settled_devices(facts) for facts in hosts}
    netplan.check_subnets(subnets, rails, len(hosts))
    plan = Plan(mtu=mtu)
    meeting = _meet(hosts, heard, rails, named, plan.warnings)
    lists = _choose_twins(hosts, meeting, heard, rails, subnets)
    if not lists or len(lists[0]) < rails:
        problem = _too_few(hosts, lists, meeting, rails)
        if not lists or len(lists[0]) < (rails if required is None else required):
            raise problem
        problem.severity = "warning"
        plan.warnings.append(problem)
    _check_devices(hosts, lists)
    plan.mtu = _settle_mtu(hosts, lists, mtu, plan.warnings)
    plan.rails = _addresses(hosts, lists, subnets, plan)
    for facts in hosts:
        plan.files[facts["host"]] = _file(facts, plan)
    _warn(hosts, plan)
    return plan


def _settled_devices(facts: Mapping[str, Any]) -> list[str]:
    pair = facts["pair"]
    return [rail["netdev"] for rail in pair["ranks"][pair["rank"]]["rails"]]


def check_hosts(hosts: Sequence[Mapping[str, Any]]) -> None:
    """Two names of one machine are no pair (field report 16)."""
    seen: dict[str, str] = {}
    for facts in hosts:
        machine = facts.get("machine_id") or facts["host"]
        if machine in seen:
            raise Problem(
                found=f"{seen[machine]} and {facts['host']} have the same /etc/machine-id ({machine[:8]}...)",
                needed="two machines, each with an id of its own",
                do="correct ansible_host in the inventory; if the disks were cloned, give one of them a new id: "
                "sudo rm /etc/machine-id && sudo systemd-machine-id-setup, then reboot it",
                code="link-same-machine",
            )
        seen[machine] = facts["host"]


def _check_devices(hosts: Sequence[Mapping[str, Any]], lists: Sequence[Twins]) -> None:
    """Faults of a node that no address would cure: no RDMA device, memory that can't be pinned."""
    for facts, twins in zip(hosts, lists, strict=True):
        for raw in facts.get("problems") or []:
            if raw["code"] == "rdma-kho":
                raise _from_dict(raw, facts["host"])
        for netdev in twins:
            if not _port(facts, netdev)["rdma"]:
                raise Problem(
                    found=f"{netdev} has no RDMA device",
                    needed="its twin in /sys/class/infiniband, like rocep1s0f0",
                    do="sudo modprobe mlx5_ib; if that does not help, reboot that Spark",
                    code="link-no-rdma",
                    host=facts["host"],
                )


def _cages(facts: Mapping[str, Any], *, cabled: bool = True) -> dict[str, list[str]]:
    """Cage label -> its netdevs with a carrier (or all), in the board's order."""
    found: dict[str, list[str]] = {}
    for port in facts["ports"]:
        if port["carrier"] or not cabled:
            found.setdefault(port["cage"], []).append(port["netdev"])
    return found


def _meet(
    hosts: Sequence[Mapping[str, Any]],
    heard: Mapping[str, Iterable[Heard]] | None,
    rails: int,
    named: Mapping[str, Sequence[str]],
    warnings: list[Problem],
) -> Meeting:
    """The cage of each rank that leads to the others; refuses what is not clear."""
    options: list[dict[str, Twins]] = []
    for facts in hosts:
        host = facts["host"]
        if host in named:
            options.append({"as named": tuple(_check_named(facts, named[host], rails))})
            continue
        cages = _cages(facts)
        if not cages:
            errors = [raw for raw in facts.get("problems") or [] if raw.get("severity") != "warning"]
            raise _from_dict(errors[0], host) if errors else _no_cable(host)
        options.append({label: tuple(twins) for label, twins in cages.items()})
    combinations = [
        choice
        for choice in itertools.product(*(option.items() for option in options))
        if heard is None or _all_reach([twins for _, twins in choice], hosts, heard)
    ]
    if not combinations:
        raise _leads_nowhere(hosts, heard or {})
    if len(combinations) > 1:
        problem = _ambiguous(hosts, combinations, rails, listened=heard is not None)
        if heard is not None:
            raise problem
        warnings.append(problem)
    chosen = combinations[0]
    return Meeting(tuple(twins for _, twins in chosen), tuple(facts["host"] in named for facts in hosts))


def _check_named(facts: Mapping[str, Any], devices: Sequence[str], rails: int) -> Sequence[str]:
    known = {port["netdev"]: port for port in facts["ports"]}
    for device in devices[:rails]:
        if device not in known or not known[device]["carrier"]:
            what = "no such device there" if device not in known else "no carrier on it"
            raise Problem(
                found=f"link_netdevs names {device}, and there is {what}",
                needed=f"devices of this host with a cable: {', '.join(_flat(_cages(facts))) or 'it has none'}",
                do="correct link_netdevs of this host, or remove it",
                code="link-named-device",
                host=facts["host"],
            )
    if len(devices) < rails:
        raise Problem(
            found=f"link_netdevs names {len(devices)} devices for {rails} rails",
            needed="one device a rail, in the same order on both hosts",
            do="name the twin too, or say -e rails=1",
            code="link-named-device",
            host=facts["host"],
        )
    return devices[:rails]


def _flat(cages: Mapping[str, Sequence[str]]) -> list[str]:
    return [netdev for twins in cages.values() for netdev in twins]


def _edges(
    hosts: Sequence[Mapping[str, Any]], heard: Mapping[str, Iterable[Heard]]
) -> set[frozenset[tuple[str, str]]]:
    """Port pairs that hear each other both ways."""
    one_way = {
        ((host, own), (other, theirs)) for host, items in heard.items() for own, other, theirs in items
    }
    return {frozenset(pair) for pair in one_way if (pair[1], pair[0]) in one_way}


def _all_reach(
    twins: Sequence[Twins], hosts: Sequence[Mapping[str, Any]], heard: Mapping[str, Iterable[Heard]]
) -> bool:
    """True if some port of each rank's cage meets one of every other rank's."""
    edges = _edges(hosts, heard)
    names = [facts["host"] for facts in hosts]
    return all(
        any(frozenset({(names[a], one), (names[b], two)}) in edges for one in twins[a] for two in twins[b])
        for a, b in itertools.combinations(range(len(hosts)), 2)
    )


def _choose_twins(
    hosts: Sequence[Mapping[str, Any]],
    meeting: Meeting,
    heard: Mapping[str, Iterable[Heard]] | None,
    rails: int,
    subnets: Sequence[str],
) -> list[Twins]:
    """Each rank's ports in the order of the rails, so that those of one rail meet on the wire. May be too few.

    Inside a cage every half may hear every other one; then the order that keeps the most addresses in
    place wins, and the board's order where nothing speaks for another.
    """
    orders = [
        [twins[:rails]] if fixed else list(itertools.permutations(twins, min(rails, len(twins))))
        for twins, fixed in zip(meeting.twins, meeting.fixed, strict=True)
    ]
    edges = None if heard is None else _edges(hosts, heard)
    names = [facts["host"] for facts in hosts]
    best: tuple[tuple[int, int, int], list[Twins]] | None = None
    for place, orderings in enumerate(itertools.product(*orders)):
        across = list(zip(*orderings, strict=False))
        good = [ends for ends in across if edges is None or _meets(names, ends, edges)]
        kept = sum(bool(_kept(hosts, ends, subnets)) for ends in good)
        score = (len(good), kept, -place)
        if best is None or score > best[0]:
            best = (score, [tuple(ends[rank] for ends in good) for rank in range(len(hosts))])
    return best[1] if best and best[1][0] else []


def _meets(names: Sequence[str], ends: Sequence[str], edges: set[frozenset[tuple[str, str]]]) -> bool:
    return all(
        frozenset({(names[a], ends[a]), (names[b], ends[b])}) in edges
        for a, b in itertools.combinations(range(len(ends)), 2)
    )


def _port(facts: Mapping[str, Any], netdev: str) -> Mapping[str, Any]:
    return next(port for port in facts["ports"] if port["netdev"] == netdev)


def _kept(
    hosts: Sequence[Mapping[str, Any]], ends: Sequence[str], subnets: Sequence[str]
) -> tuple[str, list[ipaddress.IPv4Interface]] | None:
    """Addresses that this rail has on every rank already, in one subnet, and where they stand.

    The user's netplan files come first. Ours of an earlier run and live ones are kept as long as no
    other subnets are asked for.
    """
    ports = [_port(facts, netdev) for facts, netdev in zip(hosts, ends, strict=True)]
    sources = ["netplan"]
    if list(subnets) == list(netplan.DEFAULT_SUBNETS):
        sources += ["own", "live"]
    for source in sources:
        for candidates in itertools.product(*(port[source] for port in ports)):
            interfaces = [ipaddress.IPv4Interface(text) for text in candidates]
            same = len({interface.network for interface in interfaces}) == 1
            if same and len({interface.ip for interface in interfaces}) == len(interfaces):
                return source, interfaces
    return None


def _settle_mtu(
    hosts: Sequence[Mapping[str, Any]], lists: Sequence[Twins], wanted: int, warnings: list[Problem]
) -> int:
    """The MTU of the pair: what the user's own files say where they say it, else what is wanted."""
    said = {
        f"{facts['host']}: {netdev} {_port(facts, netdev)['configured_mtu']} "
        f"({', '.join(_port(facts, netdev)['files'])})": _port(facts, netdev)["configured_mtu"]
        for facts, twins in zip(hosts, lists, strict=True)
        for netdev in twins
        if _port(facts, netdev)["configured_mtu"]
    }
    values = set(said.values())
    if len(values) > 1:
        raise Problem(
            found=f"different MTUs in netplan files: {'; '.join(said)}",
            needed=f"one MTU on both ends of every rail ({wanted}): larger packets vanish without an error",
            do="make them equal, or remove the mtu lines (sparkpair adds its own)",
            code="link-mtu-files",
        )
    mtu: int = values.pop() if values else wanted
    if mtu != wanted:
        warnings.append(
            Problem(
                found=f"netplan files set MTU {mtu}: {'; '.join(said)}",
                needed=f"{wanted} for the full rate" if mtu < wanted else f"the MTU asked for, {wanted}",
                do=f"remove those mtu lines, or say -e mtu={mtu} to confirm",
                code="link-mtu-files",
                severity="warning",
            )
        )
    return mtu


def _addresses(
    hosts: Sequence[Mapping[str, Any]], lists: Sequence[Twins], subnets: Sequence[str], plan: Plan
) -> list[list[dict[str, Any]]]:
    """Each rail's ends with their addresses: kept ones, else from the rail's subnet, host part rank + 1."""
    rails, fresh = [], []
    for number, ends in enumerate(zip(*lists, strict=True)):
        kept = _kept(hosts, ends, subnets)
        if kept:
            source, interfaces = kept
            if source == "own":
                fresh.append(interfaces[0].network)
        else:
            network = ipaddress.IPv4Network(str(subnets[number]))
            fresh.append(network)
            source = "plan"
            interfaces = [
                ipaddress.IPv4Interface(f"{network[rank + 1]}/{network.prefixlen}")
                for rank in range(len(hosts))
            ]
        rails.append(
            [
                {
                    "host": facts["host"],
                    "netdev": netdev,
                    "rdma": _port(facts, netdev)["rdma"],
                    "address": str(interface.ip),
                    "prefix": interface.network.prefixlen,
                    "mtu": plan.mtu,
                    "source": source,
                }
                for facts, netdev, interface in zip(hosts, ends, interfaces, strict=True)
            ]
        )
    taken = [use for facts in hosts for use in _taken(facts, rails)]
    taken += [
        netplan.Taken(
            end["host"], ipaddress.IPv4Network(_network(end)), f"{end['address']} on {end['netdev']}"
        )
        for ends in rails
        for end in ends
        if end["source"] not in ("plan", "own")
    ]
    netplan.check_free(fresh, taken)
    return rails


def _taken(facts: Mapping[str, Any], rails: Iterable[Sequence[Mapping[str, Any]]]) -> list[netplan.Taken]:
    """What this host uses besides the rails' own ports and those of an earlier plan of ours.

    Other ports count: the other cage may lead to other machines.
    """
    ours = [end["netdev"] for ends in rails for end in ends if end["host"] == facts["host"]]
    ours += [port["netdev"] for port in facts["ports"] if port["own"] and not port["netplan"]]
    return netplan.taken_networks(facts["host"], facts["addresses"], facts["routes"], ours)


def _file(facts: Mapping[str, Any], plan: Plan) -> str | None:
    """Our netplan file for one host: only what its other files do not say."""
    ports: dict[str, dict[str, Any]] = {}
    for ends in plan.rails:
        end = next(end for end in ends if end["host"] == facts["host"])
        port = _port(facts, end["netdev"])
        address = f"{end['address']}/{end['prefix']}"
        ports[end["netdev"]] = {
            "address": None if address in port["netplan"] else address,
            "mtu": None if port["configured_mtu"] else plan.mtu,
        }
        if port["competing"]:
            raise Problem(
                found=f"{end['netdev']} is claimed by {', '.join(port['competing'])} "
                f"({', '.join(port['files'])}) as well",
                needed="one definition for a port of the link: of several only one becomes active",
                do=_give_up(port["competing"][0], end["netdev"]),
                code="link-competing",
                host=facts["host"],
            )
    return netplan.render(ports, facts["renderer"])


def _give_up(definition: str, netdev: str) -> str:
    """How to take a port out of another definition; NetworkManager's own ones are named NM-UUID."""
    if definition.startswith("NM-"):
        return f"sudo nmcli connection delete {definition.removeprefix('NM-')}"
    return f"narrow the match of {definition} in that file so that it leaves {netdev} out, or remove it"


def _warn(hosts: Sequence[Mapping[str, Any]], plan: Plan) -> None:
    """Findings that do not stop: different cages, addresses that would not survive a reboot, one subnet."""
    labels = {
        facts["host"]: _port(facts, plan.rails[0][rank]["netdev"])["cage"] for rank, facts in enumerate(hosts)
    }
    if len(set(labels.values())) > 1:
        plan.warnings.append(
            Problem(
                found="the cable is in different ports: "
                + ", ".join(f"{label} on {host}" for host, label in labels.items()),
                needed="the same port on both Sparks, as NVIDIA advises; it works, names differ",
                do="nothing, or move one end of the cable and run again",
                code="link-other-cage",
                severity="warning",
            )
        )
    for end in (end for ends in plan.rails for end in ends if end["source"] == "live"):
        plan.warnings.append(
            Problem(
                found=f"{end['address']} on {end['netdev']} is live but in no netplan file: gone after a reboot",
                needed="an address that is on disk",
                do=f"nothing: the playbook writes it to {netplan.OWN_FILE}",
                code="link-not-persistent",
                host=end["host"],
                severity="warning",
            )
        )
    networks = [_network(ends[0]) for ends in plan.rails]
    if len(set(networks)) < len(networks):
        plan.warnings.append(
            Problem(
                found=f"both rails are in {networks[0]}",
                needed="one subnet a rail: in a shared one all traffic may take the same half",
                do="give the second twin an address of another subnet in your netplan file, on both Sparks",
                code="link-same-subnet",
                severity="warning",
            )
        )


def pair_of(plan: Mapping[str, Any], rank: int, keep: Sequence[int], ssh_ports: Sequence[int]) -> Pair:
    """The pair's file for one rank, with the rails of `keep` numbered anew from 0."""
    chosen = [plan["rails"][number] for number in keep]
    ranks = tuple(
        PairRank(
            rank=number,
            host=chosen[0][number]["host"],
            ssh_port=ssh_ports[number],
            rails=tuple(
                PairRail(
                    rail=rail,
                    netdev=ends[number]["netdev"],
                    rdma=ends[number]["rdma"],
                    port=1,
                    address=ends[number]["address"],
                    prefix=ends[number]["prefix"],
                )
                for rail, ends in enumerate(chosen)
            ),
        )
        for number in range(len(chosen[0]))
    )
    return Pair(
        rank=rank,
        mtu=plan["mtu"],
        master_address=chosen[0][0]["address"],
        master_port=MASTER_PORT,
        subnets=tuple(_network(ends[0]) for ends in chosen),
        ranks=ranks,
    )


def _from_dict(raw: Mapping[str, Any], host: str) -> Problem:
    return Problem(raw["found"], raw["needed"], raw["do"], code=raw["code"], host=host)


def _no_cable(host: str) -> Problem:
    return Problem(
        found="no port with a carrier",
        needed="a cable between the Sparks",
        do="seat the QSFP cable at both ends",
        code="link-no-carrier",
        host=host,
    )


def _leads_nowhere(hosts: Sequence[Mapping[str, Any]], heard: Mapping[str, Iterable[Heard]]) -> Problem:
    cabled = "; ".join(f"{facts['host']}: {', '.join(_flat(_cages(facts)))}" for facts in hosts)
    one_way = [f"{host} heard {other} on {own}" for host, items in heard.items() for own, other, _ in items]
    return Problem(
        found=f"ports with a cable ({cabled}), and none of them leads to the other Spark"
        + (f" both ways ({'; '.join(one_way)})" if one_way else ""),
        needed="a cable from one Spark to the other (or a switch between them in one VLAN)",
        do="check where each end of the cable is; see sparkpair link on both",
        code="link-leads-nowhere",
    )


def _ambiguous(
    hosts: Sequence[Mapping[str, Any]],
    combinations: Sequence[Sequence[tuple[str, Twins]]],
    rails: int,
    *,
    listened: bool,
) -> Problem:
    listed = "; ".join(
        " <-> ".join(
            f"{facts['host']} {', '.join(twins)}" for facts, (_, twins) in zip(hosts, choice, strict=True)
        )
        for choice in combinations
    )
    example = "; ".join(
        f"{facts['host']}: [{', '.join(twins[:rails])}]"
        for facts, (_, twins) in zip(hosts, combinations[0], strict=True)
    )
    return Problem(
        found=(
            "more than one cable leads to the other Spark: " if listened else "more than one way to join: "
        )
        + listed,
        needed="one cage of each Spark: both halves of one cable carry its full rate",
        do=f"say which in the host variables, e.g. link_netdevs of {example}"
        if listened
        else "nothing yet: the real run asks the wire which of them meet",
        code="link-ambiguous",
        severity="error" if listened else "warning",
    )


def _too_few(
    hosts: Sequence[Mapping[str, Any]], lists: Sequence[Twins], meeting: Meeting, rails: int
) -> Problem:
    met = len(lists[0]) if lists else 0
    ports = "; ".join(
        f"{facts['host']}: {', '.join(twins)}" for facts, twins in zip(hosts, meeting.twins, strict=True)
    )
    return Problem(
        found=f"{met} of {rails} rails: ports with a carrier are {ports}",
        needed=f"{rails} halves of the cable that meet, each with one of the other Spark",
        do="seat the cable (after plugging it while running, reboot both Sparks); or go on with one half of "
        "the rate: -e rails=1",
        code="link-too-few-rails",
    )
