"""ibdev2netdev, show_gids and ibv_devinfo, answered from the node's fact tree."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/run/spark-tree")
_ENUM = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}


def read(path: Path) -> str:
    """A file's text without its line end, "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def devices(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband").iterdir())


def netdev_of(device: Path) -> str:
    return next((entry.name for entry in sorted((device / "device/net").glob("*"))), "")


def ibdev2netdev(root: Path) -> str:
    """One line a device: which netdev, up or down."""
    lines = []
    for device in devices(root):
        up = read(device / "ports/1/state").endswith("ACTIVE")
        lines.append(f"{device.name} port 1 ==> {netdev_of(device)} ({'Up' if up else 'Down'})\n")
    return "".join(lines)


def _groups(gid: ipaddress.IPv6Address) -> str:
    """Eight groups of four digits; from Python 3.13 on `exploded` ends a mapped address in dotted form."""
    digits = gid.packed.hex()
    return ":".join(digits[at : at + 4] for at in range(0, 32, 4))


def show_gids(root: Path) -> str:
    """Every GID that is set, with its address and version."""
    lines = [
        "DEV\tPORT\tINDEX\tGID\t\t\t\t\tIPv4  \t\tVER\tDEV",
        "---\t----\t-----\t---\t\t\t\t\t------------  \t---\t---",
    ]
    count = 0
    for device in devices(root):
        port = device / "ports/1"
        for index in sorted(int(entry.name) for entry in (port / "gids").iterdir()):
            gid = ipaddress.IPv6Address(read(port / f"gids/{index}"))
            if int(gid) == 0:
                continue
            count += 1
            version = "v2" if "v2" in read(port / f"gid_attrs/types/{index}") else "v1"
            address = f"{gid.ipv4_mapped}  " if gid.ipv4_mapped else "\t"
            netdev = read(port / f"gid_attrs/ndevs/{index}")
            lines.append(f"{device.name}\t1\t{index}\t{_groups(gid)}\t{address}\t{version}\t{netdev}")
    return "\n".join([*lines, f"n_gids_found={count}", ""])


def ibv_devinfo(root: Path, only: str | None) -> str:
    """What checks of the link read of ibv_devinfo: state and MTUs."""
    blocks = []
    for device in devices(root):
        if only not in (None, device.name):
            continue
        port = device / "ports/1"
        active = int(read(port / "active_mtu") or 1024)
        state = "PORT_ACTIVE (4)" if read(port / "state").endswith("ACTIVE") else "PORT_DOWN (1)"
        blocks.append(
            f"hca_id:\t{device.name}\n"
            f"\ttransport:\t\t\tInfiniBand (0)\n"
            f"\tfw_ver:\t\t\t\t{read(device / 'fw_ver')}\n"
            f"\tnode_guid:\t\t\t{read(device / 'node_guid')}\n"
            f"\tsys_image_guid:\t\t\t{read(device / 'sys_image_guid')}\n"
            f"\tvendor_id:\t\t\t0x02c9\n"
            f"\tvendor_part_id:\t\t\t4129\n"
            f"\tphys_port_cnt:\t\t\t1\n"
            f"\t\tport:\t1\n"
            f"\t\t\tstate:\t\t\t{state}\n"
            f"\t\t\tmax_mtu:\t\t4096 (5)\n"
            f"\t\t\tactive_mtu:\t\t{active} ({_ENUM[active]})\n"
            f"\t\t\tsm_lid:\t\t\t0\n"
            f"\t\t\tport_lid:\t\t0\n"
            f"\t\t\tport_lmc:\t\t0x00\n"
            f"\t\t\tlink_layer:\t\tEthernet\n"
        )
    return "\n".join(blocks)


def answer(words: Sequence[str], root: Path) -> str:
    """The output of `TOOL [-d DEVICE]`."""
    tool, rest = words[0], list(words[1:])
    if tool == "ibdev2netdev":
        return ibdev2netdev(root)
    if tool == "show_gids":
        return show_gids(root)
    return ibv_devinfo(root, rest[rest.index("-d") + 1] if "-d" in rest[:-1] else None)


def main() -> None:
    sys.stdout.write(answer(sys.argv[1:], ROOT))


if __name__ == "__main__":
    main()
