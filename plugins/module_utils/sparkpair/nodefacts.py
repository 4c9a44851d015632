"""One node's facts for the plan of the link: ports, addresses, routes, netplan, sessions. Read-only."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import link, netplan, pairfile, sysfs
from .problem import Problem


def collect(
    host: str,
    *,
    root: Path = Path("/"),
    rails: int = 2,
    mtu: int = link.WANTED_MTU,
    netdevs: Sequence[str] = (),
    pair_file: Path = pairfile.FILE,
) -> dict[str, Any]:
    """Everything that `linkplan.make` needs of this node, as JSON.

    `root` stands in for / where device facts are read; netplan, addresses and routes are the machine's own.
    `settled` is True where the pair's file is there and every rail of it is ready; `named` repeats `netdevs`.
    """
    tree = sysfs.read_tree(root)
    pair = _pair(pair_file, host)
    report = link.judge(tree, root=root, rails=rails, mtu=mtu, netdevs=netdevs)
    files = netplan.list_files()
    own = files.get(str(netplan.OWN_FILE))
    addresses = sysfs.ip_json("addr")
    live = {item["ifname"]: _addresses(item) for item in addresses if item.get("ifname")}
    cages = report.cages
    macs = {half.name: half.mac for cage in cages for half in cage.netdevs}
    configs = netplan.port_configs(files, macs)
    ours = netplan.own_addresses(own)
    settled = pair is not None and _is_settled(tree, root, pair, rails, netdevs)
    return {
        "host": host,
        "machine_id": sysfs.read_text(Path("/etc/machine-id")) or "",
        "renderer": netplan.renderer(
            {path: text for path, text in files.items() if path != str(netplan.OWN_FILE)},
            network_manager_active=Path("/run/NetworkManager").is_dir(),
        ),
        "own": own,
        "ports": [
            _port(
                half,
                configs[half.name],
                rdma=link.rdma_of(tree, half.name),
                cage=cage.port,
                own=ours.get(half.name, []),
                live=live.get(half.name, []),
            )
            for cage in cages
            for half in cage.netdevs
        ],
        "addresses": [
            {"netdev": item.get("ifname", ""), "address": text}
            for item in addresses
            for text, _ in _addresses(item)
        ],
        "routes": [
            {"dst": str(item.get("dst", "default")), "dev": str(item.get("dev", ""))}
            for item in sysfs.ip_json("-4", "route")
        ],
        "problems": [problem.as_dict() for problem in report.problems],
        "ssh_address": session_address(),
        "firewall": firewall(),
        "settled": settled,
        "pair": pair.as_dict() if pair else None,
        "named": list(netdevs),
        "cabled": any(cage.cabled for cage in cages),
    }


def _is_settled(
    tree: sysfs.Tree, root: Path, pair: pairfile.Pair, rails: int, netdevs: Sequence[str]
) -> bool:
    """Whether the pair's file still says what is asked for, and all of it is ready."""
    devices = [rail.netdev for rail in pair.me.rails]
    if len(devices) != rails or (netdevs and list(netdevs[:rails]) != devices):
        return False
    return not link.judge(tree, root=root, pair=pair, rails=rails).errors


def _pair(path: Path, host: str) -> pairfile.Pair | None:
    """The pair's file if it is there, sound and about this host: else it is planned anew."""
    try:
        pair = pairfile.load(path)
    except Problem:
        return None
    return pair if pair.me.host == host else None


def _addresses(item: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """("a.b.c.d/p", dynamic) of one entry of `ip -j addr`."""
    return [
        (f"{entry['local']}/{entry['prefixlen']}", bool(entry.get("dynamic")))
        for entry in item.get("addr_info", [])
        if entry.get("family") == "inet"
    ]


def _port(
    half: sysfs.Netdev,
    config: netplan.PortConfig,
    *,
    rdma: sysfs.RdmaPort | None,
    cage: str,
    own: Sequence[str],
    live: Sequence[tuple[str, bool]],
) -> dict[str, Any]:
    """One port with its addresses by where they stand: the user's netplan files, our own, only live.

    A dynamic address is left out: it is no plan.
    """
    return {
        "netdev": half.name,
        "cage": cage,
        "rdma": rdma.device if rdma else None,
        "mac": half.mac,
        "carrier": bool(half.carrier),
        "admin_up": half.admin_up,
        "mtu": half.mtu,
        "netplan": config.static,
        "own": list(own),
        "configured_mtu": config.mtu,
        "competing": netplan.competing(config, half.name),
        "files": config.files,
        "live": [
            text
            for text, dynamic in live
            if not dynamic and text not in [*config.static, *own] and netplan.is_static(text)
        ],
    }


def session_address(start: int | None = None, proc: Path = Path("/proc")) -> str | None:
    """The local address of the SSH session that this process belongs to, None for a local one.

    sudo drops SSH_CONNECTION, so the processes above are asked too, up to the first that has it.
    """
    pid = start or os.getpid()
    for _ in range(32):
        try:
            raw = (proc / str(pid) / "environ").read_bytes()
            status = (proc / str(pid) / "status").read_text(errors="replace")
        except OSError:
            return None
        for variable in raw.split(b"\0"):
            name, _, value = variable.partition(b"=")
            words = value.decode(errors="replace").split()
            if name == b"SSH_CONNECTION" and len(words) == 4:
                return words[2].removeprefix("::ffff:")
        match = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
        if not match or int(match[1]) <= 1:
            return None
        pid = int(match[1])
    return None


def firewall(root: Path = Path("/")) -> str:
    """Which host firewall could stand in the way: "ufw", "nftables" (a chain that drops) or "" for none seen."""
    settings = sysfs.read_text(root / "etc/ufw/ufw.conf") or ""
    if re.search(r"^\s*ENABLED\s*=\s*yes", settings, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    try:
        done = subprocess.run(
            ["nft", "list", "ruleset"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "nftables" if drops_input(done.stdout) else ""


def drops_input(ruleset: str) -> bool:
    """Whether an nftables ruleset holds an input chain that drops or rejects something."""
    for chain in re.findall(r"chain [^{]*\{(.*?)\n\t?\}", ruleset, re.DOTALL):
        if "hook input" in chain and re.search(r"policy drop|\bdrop\b|\breject\b", chain):
            return True
    return False
