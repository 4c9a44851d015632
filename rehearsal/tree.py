"""The facts of a Spark as files: what its /sys, /proc and /etc would say, from a node's real links.

`/sys/class/infiniband` can't be faked in place, so the library reads a root directory instead of `/`;
each node keeps one at /run/spark-tree. RDMA devices, GPU memory and release files are stand-ins;
carrier, MTU, addresses and routes are those of the node's real interfaces. Pure: paths and texts only.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .ports import PORTS, Port

KERNEL = "6.17.0-1032-nvidia"
DRIVER = "580.173.02"
GID_ROWS = 256
ZERO_GID = ":".join(["0000"] * 8)
MEM_TOTAL_KB = 127600748
IDLE_AVAILABLE_GIB = 119.0
IDLE_CACHE_GIB = 0.8
# A rank holds its weights, its pool and its buffers: about 7 GiB are left of a Spark (5 on the head).
RANK_GIB = 112.0
_KB_PER_GIB = 1 << 20
_ROCE_OVERHEAD = 96
_MTU_STEPS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Symlink:
    """A symbolic link of the tree, relative as the kernel's are."""

    target: str


Files = dict[str, "str | Symlink"]


@dataclass(frozen=True)
class Link:
    """A real interface of the node. `carrier` is None while it is switched off, as in /sys."""

    name: str
    index: int
    mac: str
    mtu: int
    flags: str  # as in /sys: "0x1003"
    operstate: str
    carrier: bool | None
    addresses: tuple[str, ...] = ()  # IPv4, without the prefix length


@dataclass(frozen=True)
class Memory:
    """What /proc/meminfo shows, in GiB. `cache_gib` is reclaimable page cache, which MemFree lacks."""

    available_gib: float = IDLE_AVAILABLE_GIB
    cache_gib: float = IDLE_CACHE_GIB

    @property
    def free_gib(self) -> float:
        return max(self.available_gib - self.cache_gib, 0.1)


@dataclass
class GidTable:
    """A port's GID table as the kernel keeps it: rows 0 and 1 are the port's own, the rest first free.

    A row keeps its place while its address lives; one that goes leaves a hole, which the next new
    address takes. So an address that is taken away and given again may move (field report 9).
    """

    rows: dict[int, tuple[str, str]] = field(default_factory=dict)  # index -> (gid, type)

    def follow(self, mac: str, addresses: Iterable[str]) -> None:
        """Bring the table in line with the addresses that are set now."""
        own = link_local_gid(mac)
        self.rows = {index: row for index, row in self.rows.items() if index > 1}
        wanted = list(dict.fromkeys(mapped_gid(address) for address in addresses))
        self.rows = {index: row for index, row in self.rows.items() if row[0] in wanted}
        self.rows[0], self.rows[1] = (own, "IB/RoCE v1"), (own, "RoCE v2")
        held = {gid for gid, _ in self.rows.values()}
        for gid in wanted:
            if gid not in held:
                for kind in ("IB/RoCE v1", "RoCE v2"):
                    self.rows[self._first_free()] = (gid, kind)

    def _first_free(self) -> int:
        return next(index for index in range(2, GID_ROWS) if index not in self.rows)


def link_local_gid(mac: str) -> str:
    """The port's own GID: fe80:: and the EUI-64 of its MAC, written in full as /sys does."""
    octets = [int(part, 16) for part in mac.split(":")]
    octets[0] ^= 2
    eui = [*octets[:3], 0xFF, 0xFE, *octets[3:]]
    tail = ":".join(f"{eui[at]:02x}{eui[at + 1]:02x}" for at in range(0, 8, 2))
    return f"fe80:0000:0000:0000:{tail}"


def mapped_gid(address: str) -> str:
    """The GID of an IPv4 address: 10.20.0.1 -> 0000:0000:0000:0000:0000:ffff:0a14:0001."""
    number = int(ipaddress.IPv4Address(address))
    return f"0000:0000:0000:0000:0000:ffff:{number >> 16:04x}:{number & 0xFFFF:04x}"


def active_mtu(mtu: int) -> int:
    """The RoCE MTU that a netdev MTU leaves room for: 1500 -> 1024, 9000 -> 4096."""
    return max((step for step in _MTU_STEPS if step <= mtu - _ROCE_OVERHEAD), default=256)


def port_of(name: str) -> Port | None:
    return next((port for port in PORTS if port.netdev == name), None)


def device_dir(port: Port) -> str:
    """The PCI function's place below sys/devices."""
    domain = port.pci[:4]
    return f"sys/devices/pci{domain}:00/{domain}:00:00.0/{port.pci}"


def netdev_files(link: Link) -> Files:
    """One network device; a ConnectX-7 half lies below its PCI function and is linked from class/net."""
    port = port_of(link.name)
    files: Files = {
        "address": f"{link.mac}\n",
        "addr_len": "6\n",
        "flags": f"{link.flags}\n",
        "ifindex": f"{link.index}\n",
        "mtu": f"{link.mtu}\n",
        "operstate": f"{link.operstate}\n",
        "type": "772\n" if link.name == "lo" else "1\n",
    }
    if link.carrier is not None:  # the kernel answers EINVAL for a device that is switched off
        files["carrier"] = f"{int(link.carrier)}\n"
        files["speed"] = f"{200000 if link.carrier and port else (1000 if link.carrier else -1)}\n"
    if port is None:
        return {f"sys/class/net/{link.name}/{name}": text for name, text in files.items()}
    place = f"{device_dir(port)}/net/{link.name}"
    files["phys_port_name"] = f"{port.port_name}\n"
    files["phys_switch_id"] = f"{_switch_id(link.mac)}\n"
    files["device"] = Symlink(f"../../../{port.pci}")
    found: Files = {f"{place}/{name}": text for name, text in files.items()}
    found[f"sys/class/net/{link.name}"] = Symlink(f"../../{place.removeprefix('sys/')}")
    return found


def _switch_id(mac: str) -> str:
    """One number for all four halves of a card, made of what their addresses share."""
    return f"{mac[:14].replace(':', '')}10"


def rdma_files(port: Port, link: Link | None, table: GidTable) -> Files:
    """One RDMA device with its single port. Without a link it is down, with an empty table."""
    active = bool(link and link.carrier)
    place = f"{device_dir(port)}/infiniband/{port.rdma}"
    mac = link.mac if link else "00:00:00:00:00:00"
    guid = link_local_gid(mac).split(":", 4)[4]
    here: Files = {
        "node_type": "1: CA\n",
        "hca_type": "MT4129\n",
        "fw_ver": "28.45.4028\n",
        "hw_rev": "0\n",
        "node_desc": f"{port.rdma}\n",
        "node_guid": f"{guid}\n",
        "sys_image_guid": f"{guid[:-2]}10\n",
        "device": Symlink(f"../../../{port.pci}"),
        "ports/1/state": "4: ACTIVE\n" if active else "1: DOWN\n",
        "ports/1/phys_state": "5: LinkUp\n" if active else "3: Disabled\n",
        "ports/1/rate": "200 Gb/sec (4X HDR)\n" if active else "40 Gb/sec (4X QDR)\n",
        "ports/1/link_layer": "Ethernet\n",
        "ports/1/lid": "0x0\n",
        # Not in the kernel's own tree (ibv_devinfo asks the device): here for readers of recorded trees.
        "ports/1/active_mtu": f"{active_mtu(link.mtu if link else 1500)}\n",
    }
    for index in range(GID_ROWS):
        gid, kind = table.rows.get(index, (ZERO_GID, ""))
        here[f"ports/1/gids/{index}"] = f"{gid}\n"
        if kind:  # the kernel answers EINVAL for the attributes of an empty row
            here[f"ports/1/gid_attrs/types/{index}"] = f"{kind}\n"
            here[f"ports/1/gid_attrs/ndevs/{index}"] = f"{port.netdev}\n"
    found: Files = {f"{place}/{name}": text for name, text in here.items()}
    found[f"sys/class/infiniband/{port.rdma}"] = Symlink(f"../../{place.removeprefix('sys/')}")
    return found


def pci_files(port: Port) -> Files:
    """The PCI function: a ConnectX-7 on four lanes of the fifth generation."""
    place = device_dir(port)
    return {
        f"{place}/vendor": "0x15b3\n",
        f"{place}/device": "0x1021\n",
        f"{place}/class": "0x020000\n",
        f"{place}/current_link_speed": "32.0 GT/s PCIe\n",
        f"{place}/current_link_width": "4\n",
    }


def meminfo(memory: Memory) -> str:
    """/proc/meminfo of a Spark, in kB."""
    free = int(memory.free_gib * _KB_PER_GIB)
    available = int(memory.available_gib * _KB_PER_GIB)
    cached = int(memory.cache_gib * _KB_PER_GIB)
    rows = {
        "MemTotal": MEM_TOTAL_KB,
        "MemFree": free,
        "MemAvailable": available,
        "Buffers": 13252,
        "Cached": cached,
        "SwapCached": 0,
        "AnonPages": 512244,
        "Shmem": 3028,
        "KReclaimable": 177572,
        "SUnreclaim": 320360,
        "SwapTotal": 16777212,
        "SwapFree": 16777212,
        "CmaTotal": 131072,
        "CmaFree": 69320,
    }
    lines = [f"{f'{name}:':<16}{value:>9} kB" for name, value in rows.items()]
    return "\n".join([*lines, "HugePages_Total:       0", "Hugepagesize:       2048 kB"]) + "\n"


def kernel_files(host: str, routes: str) -> Files:
    """Kernel, driver and release facts, as a Spark on DGX OS 7 gives them."""
    build = "#32-Ubuntu SMP PREEMPT_DYNAMIC Tue Sep 15 09:12:44 UTC 2026"
    return {
        "proc/cmdline": f"BOOT_IMAGE=/boot/vmlinuz-{KERNEL} root=UUID=5a0e0d6c-0a0b-4c0d-8e0f-5a0e0d6c0a0b ro quiet\n",
        "proc/version": f"Linux version {KERNEL} (builder@arm64-001) (aarch64-linux-gnu-gcc-13) {build}\n",
        "proc/net/route": routes,
        "proc/sys/kernel/arch": "aarch64\n",
        "proc/sys/kernel/hostname": f"{host}\n",
        "proc/sys/kernel/osrelease": f"{KERNEL}\n",
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {DRIVER}\n",
        "sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n",
        "sys/class/dmi/id/sys_vendor": "NVIDIA\n",
        "etc/os-release": OS_RELEASE,
        "etc/dgx-release": DGX_RELEASE,
    }


OS_RELEASE = """\
PRETTY_NAME="Ubuntu 24.04.4 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04.4 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
"""
DGX_RELEASE = """\
DGX_NAME="DGX Spark"
DGX_PRETTY_NAME="NVIDIA DGX Spark"
DGX_SWBUILD_DATE="2025-09-10-13-50-03"
DGX_SWBUILD_VERSION="7.2.3"
DGX_COMMIT_ID="833b4a7"
DGX_PLATFORM="DGX Spark"
DGX_SERIAL_NUMBER="REHEARSAL0001"

DGX_OTA_VERSION="7.6.0"
DGX_OTA_DATE="Wed Sep 16 17:08:05 UTC 2026"
"""


def render(
    links: Sequence[Link], tables: Mapping[str, GidTable], memory: Memory, host: str, routes: str
) -> Files:
    """The whole tree: path below the root -> text or link. `tables` goes by the name of the RDMA device."""
    by_name = {link.name: link for link in links}
    files: Files = {"proc/meminfo": meminfo(memory), **kernel_files(host, routes)}
    for link in links:
        files |= netdev_files(link)
    for port in PORTS:
        files |= pci_files(port)
        files |= rdma_files(port, by_name.get(port.netdev), tables.get(port.rdma, GidTable()))
    return files


def memory_of(ordered: Mapping[str, float], engines: int, caches_dropped: bool) -> Memory:
    """The memory to show: what a fault ordered, else a Spark's with `engines` ranks on it.

    `ordered` may hold "available_gib" and "cache_gib".
    """
    left = IDLE_AVAILABLE_GIB - min(engines, 1) * RANK_GIB
    available = ordered.get("available_gib", left)
    cache = IDLE_CACHE_GIB if caches_dropped else ordered.get("cache_gib", IDLE_CACHE_GIB)
    return Memory(available, min(cache, max(available - 0.1, 0.0)))


_ENGINE_NAMES = ("tensorfold-native", "tf-dsv41-lanes")


def engine_name(words: Sequence[str]) -> str | None:
    """The engine's program that a process runs, None for another process.

    Programs that only name it (docker, its shims, an init) do not count; an interpreter does.
    """
    if not words:
        return None
    first = words[0].rpartition("/")[2]
    candidates = words[:1]
    if re.fullmatch(r"python[0-9.]*", first):
        candidates = [word for word in words[1:] if not word.startswith("-")][:1]
    for word in candidates:
        name = word.rpartition("/")[2]
        if name in _ENGINE_NAMES:
            return name
    return None
