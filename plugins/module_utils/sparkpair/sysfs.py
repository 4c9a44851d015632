"""Network, RDMA and memory facts from /sys and /proc, or from a recorded tree that stands in for `/`.

Every reader copes with what a real /sys does: `carrier` of a port that is switched off and the
attributes of an empty GID row answer EINVAL, `phys_switch_id` answers EOPNOTSUPP, a recorded tree
lacks files. Such a value is None or empty, never an exception.
"""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# enp1s0f0np0, enP2p1s0f1np1: PCI domain, bus, slot, function; the rest names the port.
_PCI_NAME = re.compile(r"en(?:P(?P<domain>\d+))?p(?P<bus>\d+)s(?P<slot>\d+)f(?P<function>\d+)(?:np\d+)?\Z")
_NEVER = re.compile(r"(lo|enx.*|docker\d*|br-.*|veth.*|virbr.*|wl.*|ww.*|tun.*|tap.*|bond.*|tailscale.*)\Z")
# What RoCE v2 adds to a payload, as the kernel counts it: GRH 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4.
_ROCE_OVERHEAD = 96
_IFF_UP = 1


@dataclass(frozen=True)
class Netdev:
    """One network device. `carrier` None = unknown or switched off; addresses as "a.b.c.d/prefix"."""

    name: str
    carrier: bool | None = None
    admin_up: bool | None = None
    mtu: int | None = None
    operstate: str = ""
    port_name: str = ""
    switch_id: str = ""
    mac: str = ""
    addresses: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()

    @property
    def port(self) -> str:
        """The physical port: phys_port_name ("p0"), else what the name says, else ""."""
        match = _PCI_NAME.match(self.name)
        return self.port_name or (f"p{match['function']}" if match else "")

    @property
    def order(self) -> tuple[int, int, int, int, str]:
        """Sorts twins as the board numbers them: PCI domain first, never by the order of a listing."""
        match = _PCI_NAME.match(self.name)
        if not match:
            return (1 << 16, 0, 0, 0, self.name)
        numbers = (int(match[key] or 0) for key in ("domain", "bus", "slot", "function"))
        return (*numbers, self.name)  # type: ignore[return-value]


@dataclass(frozen=True)
class GidRow:
    """One row of a port's GID table. `kind` is "v1", "v2" or "" (unknown), `netdev` "" where unknown."""

    index: int
    gid: ipaddress.IPv6Address
    kind: str
    netdev: str

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        return self.gid.ipv4_mapped


@dataclass(frozen=True)
class RdmaPort:
    """One RDMA device's port (Sparks have one each). `state` is the word: "ACTIVE", "DOWN", "" unknown."""

    device: str
    port: int = 1
    state: str = ""
    rate: str = ""
    active_mtu: int | None = None
    netdevs: tuple[str, ...] = ()
    gids: tuple[GidRow, ...] = ()


@dataclass(frozen=True)
class Tree:
    """All that a root directory tells about the link."""

    netdevs: Mapping[str, Netdev] = field(default_factory=dict)
    rdma: Mapping[str, RdmaPort] = field(default_factory=dict)


def read_text(path: Path) -> str | None:
    """A small file's text without its line end; None where the kernel or the tree has nothing to say."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []


def is_candidate(netdev: Netdev, has_rdma: bool) -> bool:
    """True for a ConnectX-7 half: named by PCI function, or an RDMA device's port of another name."""
    if _NEVER.match(netdev.name):
        return False
    return bool(_PCI_NAME.match(netdev.name)) or (has_rdma and bool(netdev.port_name))


def read_tree(root: Path = Path("/")) -> Tree:
    """Netdevs and RDMA ports below `root`. Only the real root is also asked by `ip` and `ibv_devinfo`."""
    live = root.resolve() == Path("/")
    rdma = {name: _read_rdma(root, name, live) for name in _names(root / "sys/class/infiniband")}
    found = (_read_netdev(root, name) for name in _names(root / "sys/class/net"))
    netdevs = {netdev.name: netdev for netdev in found if netdev}
    prefixes = connected_prefixes(read_text(root / "proc/net/route") or "")
    addresses = _gid_addresses(rdma.values(), prefixes)
    for name, netdev in netdevs.items():
        netdevs[name] = replace(netdev, addresses=tuple(addresses.get(name, ())))
    if live:
        _add_live_addresses(netdevs)
    return Tree(netdevs, rdma)


def _read_netdev(root: Path, name: str) -> Netdev | None:
    base = root / "sys/class/net" / name
    if not base.is_dir():  # /sys/class/net/bonding_masters is a file
        return None
    flags = _number(read_text(base / "flags"))
    carrier = read_text(base / "carrier")
    operstate = read_text(base / "operstate") or ""
    return Netdev(
        name=name,
        carrier=carrier == "1" if carrier else ({"up": True, "down": False}.get(operstate)),
        admin_up=None if flags is None else bool(flags & _IFF_UP),
        mtu=_number(read_text(base / "mtu")),
        operstate=operstate,
        port_name=read_text(base / "phys_port_name") or "",
        switch_id=read_text(base / "phys_switch_id") or "",
        mac=(read_text(base / "address") or "").lower(),
    )


def _read_rdma(root: Path, device: str, live: bool) -> RdmaPort:
    base = root / "sys/class/infiniband" / device
    port = base / "ports/1"
    rows = [_read_gid(port, name) for name in _names(port / "gids")]
    gids = tuple(sorted((row for row in rows if row), key=lambda row: row.index))
    netdevs = _names(base / "device/net") or list(dict.fromkeys(row.netdev for row in gids if row.netdev))
    active = _number(read_text(port / "active_mtu"))
    if active is None and live:
        active = _devinfo_active_mtu(device)
    return RdmaPort(
        device=device,
        state=(read_text(port / "state") or "").rpartition(":")[2].strip().upper(),
        rate=read_text(port / "rate") or "",
        active_mtu=active,
        netdevs=tuple(netdevs),
        gids=gids,
    )


def _read_gid(port: Path, name: str) -> GidRow | None:
    """One row, None for an empty or unreadable one."""
    text = read_text(port / "gids" / name)
    if not name.isdigit() or not text:
        return None
    try:
        gid = ipaddress.IPv6Address(text)
    except ValueError:
        return None
    if not int(gid):
        return None
    kind = (read_text(port / "gid_attrs/types" / name) or "").lower()
    netdev = read_text(port / "gid_attrs/ndevs" / name) or ""
    return GidRow(
        int(name), gid, "v2" if "v2" in kind else ("v1" if "v1" in kind or "ib" in kind else ""), netdev
    )


def _gid_addresses(
    ports: Iterable[RdmaPort], prefixes: Mapping[str, list[ipaddress.IPv4Network]]
) -> dict[str, list[str]]:
    """IPv4 addresses that the GID tables show, by netdev; the prefix where a connected route tells it."""
    found: dict[str, list[str]] = {}
    for port in ports:
        for row in port.gids:
            netdev = row.netdev or (port.netdevs[0] if len(port.netdevs) == 1 else "")
            if row.ipv4 is None or not netdev:
                continue
            inside = [net for net in prefixes.get(netdev, []) if row.ipv4 in net]
            text = f"{row.ipv4}/{max(net.prefixlen for net in inside)}" if inside else str(row.ipv4)
            if text not in found.setdefault(netdev, []):
                found[netdev].append(text)
    return found


def connected_prefixes(table: str) -> dict[str, list[ipaddress.IPv4Network]]:
    """Directly connected IPv4 networks of each device, from the text of /proc/net/route."""
    found: dict[str, list[ipaddress.IPv4Network]] = {}
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or words[2] != "00000000" or words[7] == "00000000":
            continue
        try:
            destination, mask = (
                ipaddress.IPv4Address(int(words[at], 16).to_bytes(4, "little")) for at in (1, 7)
            )
            network = ipaddress.IPv4Network((destination, str(mask)))
        except (ValueError, OverflowError):
            continue
        found.setdefault(words[0], []).append(network)
    return found


def _add_live_addresses(netdevs: dict[str, Netdev]) -> None:
    """Replace what the GID tables say by the kernel's own list, which holds prefixes and lifetimes."""
    for entry in ip_json("addr"):
        name = str(entry.get("ifname", ""))
        if name not in netdevs:
            continue
        found = [item for item in entry.get("addr_info", []) if item.get("family") == "inet"]
        netdevs[name] = replace(
            netdevs[name],
            addresses=tuple(f"{item['local']}/{item['prefixlen']}" for item in found),
            dynamic=tuple(f"{item['local']}/{item['prefixlen']}" for item in found if item.get("dynamic")),
        )


def ip_json(*words: str) -> list[dict[str, Any]]:
    """`ip -j WORDS` as parsed JSON; empty where `ip` is absent or refuses.

    Not with -4 for `addr`: that leaves out devices without an IPv4 address.
    """
    try:
        done = subprocess.run(["ip", "-j", *words], capture_output=True, text=True, timeout=10, check=False)
        parsed = json.loads(done.stdout or "[]")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return [entry for entry in parsed if isinstance(entry, dict)] if isinstance(parsed, list) else []


def _devinfo_active_mtu(device: str) -> int | None:
    """Active MTU in bytes as `ibv_devinfo` tells it; None where the tool is absent."""
    try:
        done = subprocess.run(
            ["ibv_devinfo", "-d", device], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return devinfo_active_mtu(done.stdout)


def devinfo_active_mtu(text: str) -> int | None:
    """The first `active_mtu:` of an `ibv_devinfo` output, in bytes: "4096 (5)" -> 4096."""
    match = re.search(r"^\s*active_mtu:\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def roce_mtu(mtu: int) -> int:
    """The RDMA MTU that a netdev MTU allows, in bytes (256 to 4096): 1500 -> 1024, 9000 -> 4096."""
    fits = [step for step in (256, 512, 1024, 2048, 4096) if step <= mtu - _ROCE_OVERHEAD]
    return max(fits, default=256)


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """/proc/meminfo in bytes, by field name. Lines that are no `Name: N kB` are left out."""
    found = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        match = re.match(r"\s*([A-Za-z_()0-9]+):\s*(\d+)(?:\s*kB)?\s*\Z", line)
        if match:
            found[match[1]] = int(match[2]) * (1024 if line.rstrip().endswith("kB") else 1)
    return found


def kernel_release(root: Path = Path("/")) -> str:
    """The running kernel's release ("6.17.0-1014-nvidia"), "" where the tree does not tell."""
    text = read_text(root / "proc/sys/kernel/osrelease")
    if text:
        return text
    match = re.match(r"Linux version (\S+)", read_text(root / "proc/version") or "")
    return match[1] if match else ""


def kernel_words(root: Path = Path("/")) -> list[str]:
    """The words of the kernel's command line."""
    return (read_text(root / "proc/cmdline") or "").split()
