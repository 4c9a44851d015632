"""The link between the Sparks as one node sees it: cages, twins, rails, and what is wrong with them.

A QSFP cage shows up as two network devices and two RDMA devices (the twins), on two PCI domains. They
are told apart from the other cage by `phys_switch_id` and `phys_port_name`, never by PCI address
(field reports 3 and 8). A rail is one twin of the cabled cage.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import gid, sysfs
from .inputs import report as combine
from .pairfile import Pair
from .problem import Problem
from .sysfs import Netdev, RdmaPort, Tree

WANTED_MTU = 9000
_AGAIN = "ansible-playbook site.yml --tags link"


@dataclass(frozen=True)
class Cage:
    """One QSFP cage: its port label ("p0") and its netdevs, twins in the board's order."""

    port: str
    switch_id: str
    netdevs: tuple[Netdev, ...]

    @property
    def cabled(self) -> bool:
        return any(netdev.carrier for netdev in self.netdevs)

    def __str__(self) -> str:
        return f"{self.port} ({', '.join(netdev.name for netdev in self.netdevs)})"


@dataclass(frozen=True)
class Rail:
    """One half of the link. Unknown values are None (JSON null), `mtu` values are bytes.

    `state`: ready, no-device, down, no-carrier, no-rdma, rdma-down, no-address, link-local,
    wrong-address, wrong-mtu, no-gid, gid-unequal or ambiguous.
    """

    rail: int
    netdev: str
    rdma: str | None = None
    port: int = 1
    address: str | None = None
    prefix: int | None = None
    mtu: int | None = None
    active_mtu: int | None = None
    gid_index: int | None = None
    state: str = "ready"
    cage: str = ""


@dataclass
class Report:
    """What `sparkpair link` tells. `ok` means: no problem but warnings."""

    rails: list[Rail] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    cages: list[Cage] = field(default_factory=list)
    choices: list[gid.Choice] = field(default_factory=list)

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": not self.errors,
            "rails": [asdict(rail) for rail in self.rails],
            "problems": [problem.as_dict() for problem in self.problems],
            "cages": [
                {
                    "port": cage.port,
                    "cabled": cage.cabled,
                    "netdevs": [netdev.name for netdev in cage.netdevs],
                }
                for cage in self.cages
            ],
            "rejected_gids": {
                choice.device: [asdict(row) for row in choice.rejected] for choice in self.choices
            },
        }


def rdma_of(tree: Tree, netdev: str) -> RdmaPort | None:
    """The RDMA device of a netdev: by what /sys says, else by the name rule enX -> roceX."""
    for port in tree.rdma.values():
        if netdev in port.netdevs:
            return port
    stem = re.sub(r"np\d+\Z", "", netdev).removeprefix("en")
    named = tree.rdma.get(f"roce{stem}")
    return named if named and not named.netdevs else None


def _card(netdev: Netdev) -> str:
    """The card that a port belongs to: the 8 bytes of its system image GUID.

    Newer kernels append a byte to the switch id that counts the card's PCI links, which the twins differ in.
    """
    return netdev.switch_id[:16]


def find_cages(tree: Tree) -> list[Cage]:
    """The ConnectX-7 cages of a node, sorted by port label. Other network devices are left out."""
    found = [
        netdev
        for netdev in tree.netdevs.values()
        if sysfs.is_candidate(netdev, rdma_of(tree, netdev.name) is not None)
    ]
    switches = {_card(netdev) for netdev in found if netdev.switch_id}
    # A half that does not tell its switch belongs to the only one there is.
    default = switches.pop() if len(switches) == 1 else ""
    groups: dict[tuple[str, str], list[Netdev]] = {}
    for netdev in found:
        groups.setdefault((_card(netdev) or default, netdev.port), []).append(netdev)
    return [
        Cage(port, switch, tuple(sorted(members, key=lambda netdev: netdev.order)))
        for (switch, port), members in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0]))
    ]


def static_address(netdev: Netdev, wanted: str | None = None) -> tuple[str | None, int | None]:
    """The address (and prefix) that a rail uses: `wanted` if it is there, else the first that stays.

    A 169.254 address is given back only where there is no other one.
    """
    split = []
    for text in netdev.addresses:
        address, _, prefix = text.partition("/")
        split.append((address, int(prefix) if prefix else None))
    if wanted:
        return next((item for item in split if item[0] == wanted), (None, None))
    split.sort(key=lambda item: ipaddress.IPv4Address(item[0]).is_link_local)
    return split[0] if split else (None, None)


def read_link(
    root: Path = Path("/"),
    *,
    rails: int = 2,
    mtu: int = WANTED_MTU,
    netdevs: Sequence[str] = (),
    pair: Pair | None = None,
) -> Report:
    """Find the link of the node whose root directory is `root`, and everything wrong with it.

    Args:
        rails: how many twins are to serve, 1 or 2.
        mtu: the MTU in bytes that is wanted; less is a warning, with `pair` another one is an error.
        netdevs: the devices to use, in the order of the rails, where the user has said so.
        pair: the settled plan of this node; its devices and addresses are then required.
    """
    return judge(sysfs.read_tree(root), root=root, rails=rails, mtu=mtu, netdevs=netdevs, pair=pair)


def judge(
    tree: Tree,
    *,
    root: Path = Path("/"),
    rails: int = 2,
    mtu: int = WANTED_MTU,
    netdevs: Sequence[str] = (),
    pair: Pair | None = None,
) -> Report:
    """`read_link` on a tree that is read already."""
    report = Report(cages=find_cages(tree))
    if kho := kho_problem(root):
        report.problems.append(kho)
    planned = {rail.netdev: rail.address for rail in pair.me.rails} if pair else {}
    chosen = _choose(tree, report, rails, netdevs or list(planned))
    for number, (cage, netdev) in enumerate(chosen):
        rail, choice = _read_rail(tree, number, cage, netdev, planned.get(netdev.name))
        report.rails.append(rail)
        if choice:
            report.choices.append(choice)
    if any(problem.code == "link-ambiguous" for problem in report.problems):
        report.rails = [_with_state(rail, "ambiguous") for rail in report.rails]
        return report
    _judge_states(report, rails, planned)
    _judge_mtu(report, pair.mtu if pair else mtu, strict=pair is not None)
    _judge_subnets(report)
    _judge_gids(report)
    return report


def _with_state(rail: Rail, state: str) -> Rail:
    return Rail(**{**asdict(rail), "state": state})


def _choose(tree: Tree, report: Report, rails: int, named: Sequence[str]) -> list[tuple[str, Netdev]]:
    """The (cage label, netdev) of each rail, in order; tells the states that end the search."""
    if not report.cages and not named:
        report.problems.append(
            Problem(
                found="no ConnectX-7 network device (none named like enp1s0f0np0)",
                needed="the four ports of the network card, as DGX OS names them",
                do="plug the QSFP cable into both Sparks and reboot both: without a cable DGX OS takes the "
                "card off the bus; then check with lspci | grep -i mellanox",
                code="link-no-device",
            )
        )
        return []
    if named:
        labels = {netdev.name: cage.port for cage in report.cages for netdev in cage.netdevs}
        return [
            (labels.get(name, ""), tree.netdevs.get(name, Netdev(name, operstate="absent")))
            for name in named[:rails]
        ]
    cabled = [cage for cage in report.cages if cage.cabled]
    if not cabled:
        report.problems.append(_no_carrier(report.cages))
        return [(cage.port, netdev) for cage in report.cages[:1] for netdev in _best_twins(tree, cage, rails)]
    if len(cabled) > 1:
        listed = "; ".join(map(str, cabled))
        example = ", ".join(netdev.name for netdev in cabled[0].netdevs[:rails])
        report.problems.append(
            Problem(
                found=f"more than one cage with a cable: {listed}",
                needed="to know which of them leads to the other Spark",
                do="run ansible-playbook site.yml --tags link, which asks the wire; if both lead there, "
                f"say which: host variable link_netdevs: [{example}]",
                code="link-ambiguous",
            )
        )
        return [(cage.port, netdev) for cage in cabled for netdev in cage.netdevs]
    return [(cabled[0].port, netdev) for netdev in _best_twins(tree, cabled[0], rails)]


def _best_twins(tree: Tree, cage: Cage, rails: int) -> list[Netdev]:
    """As many twins as rails are wanted; with one rail the twin that can serve comes first."""
    if len(cage.netdevs) <= rails:
        return list(cage.netdevs)
    serving = [
        netdev for netdev in cage.netdevs if netdev.carrier and _read_rail(tree, 0, "", netdev)[0].gid_index
    ]
    rest = [netdev for netdev in cage.netdevs if netdev not in serving]
    return (serving + rest)[:rails]


def _no_carrier(cages: Sequence[Cage]) -> Problem:
    off = [netdev.name for cage in cages for netdev in cage.netdevs if netdev.admin_up is False]
    hint = f" (switched off: {', '.join(off)}: ip link set {off[0]} up)" if off else ""
    return Problem(
        found=f"no carrier on any cage: {'; '.join(map(str, cages))}{hint}",
        needed="a cable between the same port of both Sparks, and both powered on",
        do="seat the QSFP cable at both ends; if it was plugged while running, reboot both Sparks",
        code="link-no-carrier",
    )


def _read_rail(
    tree: Tree, number: int, cage: str, netdev: Netdev, planned: str | None = None
) -> tuple[Rail, gid.Choice | None]:
    """One rail with the state that stops it, checked from the cable upwards."""
    port = rdma_of(tree, netdev.name)
    address, prefix = static_address(netdev, planned)
    choice = gid.choose(port, netdev.name, address or "") if port else None
    active = port.active_mtu if port else None
    if active is None and port and netdev.mtu:
        active = sysfs.roce_mtu(netdev.mtu)
    rail = Rail(
        rail=number,
        netdev=netdev.name,
        rdma=port.device if port else None,
        port=port.port if port else 1,
        address=address,
        prefix=prefix,
        mtu=netdev.mtu,
        active_mtu=active,
        gid_index=choice.index if choice else None,
        state=_state(netdev, port, address, planned, choice),
        cage=cage,
    )
    return rail, choice


def _state(
    netdev: Netdev, port: RdmaPort | None, address: str | None, planned: str | None, choice: gid.Choice | None
) -> str:
    """The first thing that is wrong, from the cable upwards; "ready" if nothing is."""
    checks = (
        (netdev.operstate == "absent", "no-device"),
        (not netdev.carrier, "down" if netdev.admin_up is False else "no-carrier"),
        (port is None, "no-rdma"),
        (address is None, "wrong-address" if planned and netdev.addresses else "no-address"),
        (bool(address) and ipaddress.IPv4Address(address).is_link_local, "link-local"),
        (port is not None and port.state not in ("", "ACTIVE"), "rdma-down"),
        (choice is None or choice.index is None, "no-gid"),
    )
    return next((state for wrong, state in checks if wrong), "ready")


def _judge_states(report: Report, rails: int, planned: dict[str, str]) -> None:
    """One finding for what all rails share, else one for each rail that fails."""
    states = {rail.state for rail in report.rails}
    if len(report.rails) < rails and report.rails:
        report.problems.append(
            Problem(
                found=f"one network device in the cabled cage: {report.rails[0].netdev}",
                needed="its twin on the other PCI domain too: one alone carries half of the cable's rate",
                do="reboot this Spark; or serve over one rail on both Sparks: -e rails=1",
                code="link-no-twin",
            )
        )
    if states == {"no-address"}:
        names = " and ".join(rail.netdev for rail in report.rails)
        report.problems.append(
            Problem(
                found=f"carrier but no IPv4 address on {names}",
                needed="a static address on each twin, one subnet a rail",
                do=_AGAIN,
                code="link-no-address",
            )
        )
        return
    told_no_carrier = any(problem.code == "link-no-carrier" for problem in report.problems)
    for rail in report.rails:
        if rail.state == "ready" or (told_no_carrier and rail.state in ("no-carrier", "down")):
            continue
        choice = next((item for item in report.choices if item.netdev == rail.netdev), None)
        report.problems.append(_rail_problem(rail, choice, planned.get(rail.netdev)))
    if rails == 1 and len(report.cages) and report.rails:
        report.problems.append(
            Problem(
                found=f"one rail is asked for: {report.rails[0].netdev}",
                needed="both twins for the full rate: one carries about half of it",
                do="leave rails at 2 where both twins work",
                code="link-one-rail",
                severity="warning",
            )
        )


def _rail_problem(rail: Rail, choice: gid.Choice | None, planned: str | None) -> Problem:
    if rail.state == "no-gid" and choice:
        return gid.missing(choice)
    words = {
        "no-device": (
            f"{rail.netdev} is named for this node, and there is no such device",
            "the name of a network device of this node: names differ from Spark to Spark",
            "see ip -br link; put the right names into this host's link_netdevs",
        ),
        "down": (
            f"{rail.netdev} is switched off",
            "both twins of the cabled cage up",
            f"ip link set {rail.netdev} up; then {_AGAIN}",
        ),
        "no-carrier": (
            f"{rail.netdev} has no carrier",
            "a carrier on each half of the cabled cage",
            "seat the cable; if it was plugged while running, reboot both Sparks with it in place",
        ),
        "no-rdma": (
            f"{rail.netdev} has no RDMA device",
            "its twin in /sys/class/infiniband, like rocep1s0f0",
            "modprobe mlx5_ib; if that does not help, reboot",
        ),
        "rdma-down": (
            f"{rail.rdma} is not ACTIVE although {rail.netdev} has a carrier",
            "an ACTIVE RDMA port (rdma link)",
            "seat the cable and reboot both Sparks",
        ),
        "no-address": (
            f"{rail.netdev} has no IPv4 address"
            + (f"; the pair needs {planned} there" if planned else "; its twin has one"),
            "an address on both twins of the cabled cage, one subnet a rail",
            f"{_AGAIN}; or serve over one rail: -e rails=1",
        ),
        "wrong-address": (
            f"{rail.netdev} lacks the address {planned}",
            f"{planned}, which the other Spark expects there",
            f"netplan apply; or plan anew: {_AGAIN}",
        ),
        "link-local": (
            f"{rail.netdev} has only {rail.address}",
            "a static address: 169.254 addresses are drawn anew each time the link comes up",
            _AGAIN,
        ),
    }
    found, needed, do = words[rail.state]
    code = "link-twin-no-address" if rail.state == "no-address" and not planned else f"link-{rail.state}"
    return Problem(found, needed, do, code=code)


def _judge_mtu(report: Report, wanted: int, *, strict: bool) -> None:
    """Low MTUs as a warning, a MTU that is not the pair's as an error; the RDMA MTU follows the netdev's."""
    for at, rail in enumerate(report.rails):
        if rail.mtu is None or rail.state in ("no-device", "down", "no-carrier"):
            continue
        if rail.mtu == wanted or (rail.mtu > wanted and not strict):
            continue
        rdma = rail.active_mtu or sysfs.roce_mtu(rail.mtu)
        report.problems.append(
            Problem(
                found=f"{rail.netdev} has MTU {rail.mtu} (RDMA {rdma})",
                needed=f"{wanted} (RDMA {sysfs.roce_mtu(wanted)}) on both twins of both Sparks: "
                + ("a larger packet of the peer would vanish without an error" if strict else "1500 is slow"),
                do=_AGAIN,
                code="link-mtu",
                severity="error" if strict else "warning",
            )
        )
        if strict and rail.state == "ready":
            report.rails[at] = _with_state(rail, "wrong-mtu")
    for rail in report.rails:
        follows = sysfs.roce_mtu(rail.mtu) if rail.mtu else None
        if rail.state == "ready" and rail.active_mtu and follows and rail.active_mtu < follows:
            report.problems.append(
                Problem(
                    found=f"{rail.rdma} has an active RDMA MTU of {rail.active_mtu} at MTU {rail.mtu}",
                    needed=f"{follows}, which that MTU allows",
                    do=f"ip link set {rail.netdev} down, then up, and netplan apply",
                    code="link-rdma-mtu",
                    severity="warning",
                )
            )


def _judge_subnets(report: Report) -> None:
    """Twins in one subnet work, but routing may put all traffic on one of them."""
    seen: dict[ipaddress.IPv4Network, Rail] = {}
    for rail in report.rails:
        if rail.address is None or rail.state == "link-local":
            continue
        network = ipaddress.IPv4Network(f"{rail.address}/{rail.prefix or 24}", strict=False)
        if network in seen:
            report.problems.append(
                Problem(
                    found=f"{seen[network].netdev} ({seen[network].address}) and {rail.netdev} "
                    f"({rail.address}) are both in {network}",
                    needed="one subnet a rail: in a shared one all traffic may take the same half",
                    do="give the second twin an address of another subnet on both Sparks",
                    code="link-same-subnet",
                    severity="warning",
                )
            )
        seen.setdefault(network, rail)


def _judge_gids(report: Report) -> None:
    """All rails of a rank share one GID index; without one the ring can't use them together."""
    ready = {rail.netdev for rail in report.rails if rail.gid_index is not None}
    choices = [choice for choice in report.choices if choice.netdev in ready]
    if len(choices) < 2:
        return
    shared = gid.shared_index(choices)
    for at, rail in enumerate(report.rails):
        if rail.netdev not in ready:
            continue
        if shared is not None:
            report.rails[at] = Rail(**{**asdict(rail), "gid_index": shared})
        elif rail.state == "ready":
            report.rails[at] = _with_state(rail, "gid-unequal")
    if shared is None:
        report.problems.append(gid.unequal(choices))


def kho_problem(root: Path = Path("/")) -> Problem | None:
    """A kernel that keeps memory for kexec handover, which RDMA can't pin (field report 20)."""
    release = sysfs.kernel_release(root)
    major = re.match(r"\d+", release)
    if "kho=off" in sysfs.kernel_words(root) or (major and int(major[0]) < 7):
        return None
    memory = sysfs.meminfo(root)
    free, total = memory.get("CmaFree", 0), memory.get("CmaTotal", 0)
    # More free than there is: the handover areas are counted as free and can not be pinned.
    if free <= total + 64 * 2**20:
        return None
    return Problem(
        found=f"kernel {release or 'of unknown release'} keeps {free / 2**30:.1f} GiB for kexec handover "
        f"(CmaFree {free // 1024} kB, CmaTotal {total // 1024} kB)",
        needed="memory that RDMA can pin: with it ibv_reg_mr fails while the ranks start",
        do="boot an installed 6.17 kernel, or add kho=off to GRUB_CMDLINE_LINUX_DEFAULT and run update-grub; "
        "either needs a reboot",
        code="rdma-kho",
    )


def environment(report: Report) -> dict[str, str]:
    """The ranks' variables for the rails of a sound report. No value is ever empty (field report 9).

    Raises Problem if anything but a warning was found.
    """
    trouble = combine(report.errors)
    if trouble:
        raise trouble
    devices = [rail.rdma for rail in report.rails if rail.rdma]
    index = report.rails[0].gid_index if report.rails else None
    if not devices or len(devices) != len(report.rails) or index is None:
        raise Problem(
            found="no rail that could serve",
            needed="at least one rail with an RDMA device and a GID",
            do="sparkpair link",
            code="link-no-rail",
        )
    return {
        "TF_RDMA_DEVICES": ",".join(devices),
        "TF_RDMA_GID_INDEX": str(index),
        "NCCL_IB_HCA": ",".join(devices),
        "NCCL_IB_GID_INDEX": str(index),
        "NCCL_SOCKET_IFNAME": report.rails[0].netdev,
    }


def environment_text(variables: dict[str, str]) -> str:
    """NAME=value lines that systemd's EnvironmentFile and docker's --env-file read alike: no quotes."""
    empty = [name for name, value in variables.items() if not value or re.search(r"[\s\"'\\#$]", value)]
    if empty:
        raise Problem(
            found=f"{', '.join(empty)} would be empty or need quotes",
            needed="plain values: an empty GID index is read as 0, the link-local row",
            do="sparkpair link --json; report it",
            code="link-env",
        )
    return "".join(f"{name}={value}\n" for name, value in variables.items())
