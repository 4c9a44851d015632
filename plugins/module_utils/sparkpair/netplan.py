"""Netplan: who owns a link port, what its files say, and the one file of ours.

The user's own plan wins: where both Sparks have static addresses in a shared subnet already, they are
kept, and our file only adds what is missing (field reports 11 and 14). Our file is
/etc/netplan/60-sparkpair-link.yaml, mode 0600, and names nothing but the link's ports.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .problem import Problem

OWN_FILE = Path("/etc/netplan/60-sparkpair-link.yaml")
DEFAULT_SUBNETS = ("10.20.0.0/24", "10.21.0.0/24")
RENDERERS = ("networkd", "NetworkManager")
_FOLDERS = ("lib/netplan", "etc/netplan", "run/netplan")
_HEADER = "# Written by sparkpair (role link): the link between the Sparks. Hand edits are overwritten.\n"


@dataclass
class PortConfig:
    """What netplan says of one port, our own file left out. Addresses as "a.b.c.d/prefix"."""

    addresses: list[str] = field(default_factory=list)
    mtu: int | None = None
    dhcp4: bool = False
    definitions: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def static(self) -> list[str]:
        """Its IPv4 addresses that stay: no 169.254, no loopback."""
        return [text for text in self.addresses if is_static(text)]


def is_static(text: str) -> bool:
    """True for an IPv4 address (with or without prefix) that stays: no 169.254, no loopback."""
    try:
        address = ipaddress.IPv4Interface(text).ip
    except ValueError:
        return False
    return not (address.is_link_local or address.is_loopback or address.is_unspecified)


def list_files(root: Path = Path("/")) -> dict[str, str]:
    """Netplan's files in the order in which it reads them: path -> text.

    Sorted by name over the three folders; a file of the same name in /run hides the one in /etc, and
    that the one in /lib.
    """
    found: dict[str, Path] = {}
    for folder in _FOLDERS:
        try:
            entries = sorted((root / folder).glob("*.yaml"))
        except OSError:
            entries = []
        found.update({path.name: path for path in entries if path.is_file()})
    return {
        f"/{path.relative_to(root)}": path.read_text(errors="replace") for _, path in sorted(found.items())
    }


def load_yaml(path: str, text: str) -> Mapping[str, Any]:
    """One netplan file as a mapping. Raises Problem (code netplan-file) if it is none."""
    try:
        import yaml
    except ImportError:
        raise Problem(
            found="the system's Python has no yaml, so netplan's files can't be read",
            needed="python3-yaml, which netplan.io itself needs",
            do="sudo apt-get install python3-yaml",
            code="netplan-yaml",
        ) from None
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = str(error).replace("\n", " ")
        raise Problem(
            found=f"{path} is not YAML: {where}",
            needed="netplan files that netplan can read: with this one no change of ours would take effect",
            do=f"correct {path} (sudo netplan generate shows the line), then run again",
            code="netplan-file",
        ) from error
    network = parsed.get("network") if isinstance(parsed, Mapping) else None
    return network if isinstance(network, Mapping) else {}


def renderer(files: Mapping[str, str], *, network_manager_active: bool = False) -> str:
    """Who carries out netplan's plans here: the last global `renderer`, else NetworkManager if it runs
    and no file has said otherwise, else networkd (netplan's own default)."""
    said = [load_yaml(path, text).get("renderer") for path, text in files.items()]
    known = [word for word in said if word in RENDERERS]
    if known:
        return str(known[-1])
    return "NetworkManager" if network_manager_active and not any(files.values()) else "networkd"


def _matches(name: str, definition: Mapping[str, Any], netdev: str, mac: str) -> bool:
    """Whether an `ethernets` entry applies to `netdev`."""
    match = definition.get("match")
    if not isinstance(match, Mapping):
        return name == netdev
    tests = []
    if match.get("name"):
        tests.append(fnmatch.fnmatchcase(netdev, str(match["name"])))
    if match.get("macaddress"):
        tests.append(str(match["macaddress"]).lower() == mac.lower())
    if match.get("driver"):
        drivers = match["driver"] if isinstance(match["driver"], list) else [match["driver"]]
        tests.append(any(fnmatch.fnmatchcase("mlx5_core", str(driver)) for driver in drivers))
    return all(tests)  # an empty match is netplan's "every device"


def port_configs(
    files: Mapping[str, str], ports: Mapping[str, str], own: str = str(OWN_FILE)
) -> dict[str, PortConfig]:
    """What the files other than `own` say of each port.

    Args:
        ports: netdev -> MAC address.
    """
    found = {netdev: PortConfig() for netdev in ports}
    matches: dict[str, Mapping[str, Any]] = {}
    for path, text in files.items():
        if path == own:
            continue
        ethernets = load_yaml(path, text).get("ethernets")
        for name, definition in (ethernets if isinstance(ethernets, Mapping) else {}).items():
            if not isinstance(definition, Mapping):
                continue
            # `match` may stand in an earlier file than the settings: netplan merges by the entry's name.
            matches[name] = {"match": definition.get("match", matches.get(name, {}).get("match"))}
            for netdev, mac in ports.items():
                if _matches(str(name), matches[name], netdev, mac):
                    _merge(found[netdev], str(name), path, definition)
    return found


def _merge(config: PortConfig, name: str, path: str, definition: Mapping[str, Any]) -> None:
    """Add one definition as netplan merges files: lists grow, single values are replaced."""
    for entry in definition.get("addresses") or []:
        text = next(iter(entry)) if isinstance(entry, Mapping) and entry else entry
        if isinstance(text, str) and text not in config.addresses:
            config.addresses.append(text)
    if isinstance(definition.get("mtu"), int):
        config.mtu = definition["mtu"]
    if "dhcp4" in definition:
        config.dhcp4 = definition["dhcp4"] in (True, "yes", "true", "on")
    if name not in config.definitions:
        config.definitions.append(name)
    if path not in config.files:
        config.files.append(path)


def competing(config: PortConfig, netdev: str) -> list[str]:
    """Definitions of other names that claim the port as well: only one of them would become active."""
    return [name for name in config.definitions if name != netdev]


def render(ports: Mapping[str, Mapping[str, Any]], by: str) -> str | None:
    """Our file's text; None where no port needs anything.

    Args:
        ports: netdev -> {"address": "a.b.c.d/p" or None, "mtu": bytes or None}.
        by: the node's renderer. It is set port by port: a global one would change every other device.
    """
    lines = [_HEADER + "network:", "  version: 2", "  ethernets:"]
    used = False
    for netdev, wanted in ports.items():
        address, mtu = wanted.get("address"), wanted.get("mtu")
        if not address and not mtu:
            continue
        used = True
        lines.append(f"    {netdev}:")
        if address:
            lines += [
                f"      renderer: {by}",
                f"      addresses: [{address}]",
                "      dhcp4: false",
                "      dhcp6: false",
                "      accept-ra: false",
                "      link-local: []",
                "      optional: true",
            ]
        if mtu:
            lines.append(f"      mtu: {mtu}")
    return "\n".join(lines) + "\n" if used else None


def own_addresses(text: str | None) -> dict[str, list[str]]:
    """The addresses that a text of our file gives, by netdev."""
    if not text:
        return {}
    ethernets = load_yaml(str(OWN_FILE), text).get("ethernets") or {}
    return {str(netdev): list(definition.get("addresses") or []) for netdev, definition in ethernets.items()}


@dataclass(frozen=True)
class Taken:
    """A network that is in use somewhere: on which host, by what."""

    host: str
    network: ipaddress.IPv4Network
    by: str


def taken_networks(
    host: str,
    addresses: Iterable[Mapping[str, str]],
    routes: Iterable[Mapping[str, str]],
    link: Iterable[str],
) -> list[Taken]:
    """What a host uses apart from its link ports; the default route takes nothing.

    Args:
        addresses: {"netdev", "address"} with address as "a.b.c.d/p".
        routes: {"dst", "dev"} as `ip -j route` gives them.
        link: the netdevs of the link.
    """
    ours, found = set(link), []
    for item in addresses:
        if item["netdev"] not in ours:
            network = ipaddress.IPv4Interface(item["address"]).network
            found.append(Taken(host, network, f"{item['address']} on {item['netdev']}"))
    for item in routes:
        if item.get("dev", "") in ours or item["dst"] == "default":
            continue
        try:
            network = ipaddress.IPv4Network(item["dst"], strict=False)
        except ValueError:
            continue
        if network.prefixlen:
            found.append(Taken(host, network, f"the route {item['dst']} by {item.get('dev', '?')}"))
    return found


def check_subnets(subnets: Sequence[str], rails: int, world: int = 2) -> list[ipaddress.IPv4Network]:
    """The rails' subnets, checked without a look at any host.

    Raises Problem (code link-subnets) for one that is no network, too small, 169.254, a loopback or one
    that overlaps another (field reports 15 and 16).
    """
    example = f"link_subnets: [{', '.join(DEFAULT_SUBNETS)}]"

    def bad(found: str, needed: str) -> Problem:
        return Problem(
            found, needed, f"set {example} (the default), or others like them", code="link-subnets"
        )

    if len(subnets) < rails:
        raise bad(f"{len(subnets)} link_subnets for {rails} rails", "one subnet a rail")
    networks: list[ipaddress.IPv4Network] = []
    for text in subnets[:rails]:
        try:
            network = ipaddress.IPv4Network(str(text))
        except ValueError as error:
            raise bad(f"link_subnets: {text!r} ({error})", "an IPv4 network like 10.20.0.0/24") from error
        if network.is_link_local:
            raise bad(f"link_subnets: {text}", "static addresses: those of 169.254 change at each link-up")
        if network.is_loopback or network.is_multicast or network.is_unspecified:
            raise bad(f"link_subnets: {text}", "a network that two machines can share")
        if network.num_addresses - 2 < world:
            raise bad(f"link_subnets: {text} has no room for {world} hosts", "a prefix of 30 or less")
        if any(network.overlaps(other) for other in networks):
            raise bad(f"link_subnets: {text} overlaps another rail's", "a subnet of its own for each rail")
        networks.append(network)
    return networks


def conflicts(networks: Iterable[ipaddress.IPv4Network], taken: Iterable[Taken]) -> list[Taken]:
    """Every use of an address of `networks` by something else."""
    wanted = list(networks)
    return [use for use in taken if any(use.network.overlaps(network) for network in wanted)]


def propose(taken: Iterable[Taken], count: int) -> list[str]:
    """`count` neighbouring private /24 networks that nobody uses."""
    uses = list(taken)
    bases = [*range(20, 250, 2)]
    for prefix in ("10.{}.0.0/24", "172.31.{}.0/24", "192.168.{}.0/24"):
        for base in bases:
            chosen = [ipaddress.IPv4Network(prefix.format(base + at)) for at in range(count)]
            if not conflicts(chosen, uses):
                return [str(network) for network in chosen]
    return []


def check_free(networks: Sequence[ipaddress.IPv4Network], taken: Sequence[Taken]) -> None:
    """Raise Problem (code link-subnet-taken), with networks that are free, if one is in use elsewhere."""
    found = conflicts(networks, taken)
    if not found:
        return
    listed = "; ".join(dict.fromkeys(f"{use.by} of {use.host}" for use in found))
    free = propose(taken, len(networks))
    say = f"-e '{json.dumps({'link_subnets': free})}'" if free else "set link_subnets"
    raise Problem(
        found=f"the link's subnets {', '.join(map(str, networks))} overlap {listed}",
        needed="subnets that neither Spark uses elsewhere",
        do=f"use others: {say}",
        code="link-subnet-taken",
    )
