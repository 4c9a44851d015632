"""The link as NCCL and the decode ring see it: devices, GIDs, MTU and the socket interface.

Facts of RDMA devices come from sysfs. Where a machine has none, TF_REHEARSAL_ROOT names a tree that stands in for `/`
(sys/class/infiniband, sys/class/net); addresses of interfaces are always the real ones.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import resource
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import EngineError

DEFAULT_GID_INDEX = 5
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_IPC_LOCK = 14
_MTU_ENUM = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _nccl_error(words: str) -> EngineError:
    return EngineError("NcclError", words)


@dataclass(frozen=True)
class Gid:
    """One row of a port's GID table."""

    device: str
    index: int
    address: ipaddress.IPv4Address | None
    v2: bool
    netdev: str

    @property
    def usable(self) -> bool:
        return self.v2 and self.address is not None

    @property
    def text(self) -> str:
        return f"::ffff:{self.address}" if self.address else "::"


class Devices:
    """RDMA devices by sysfs under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "sys/class/infiniband"

    def names(self) -> list[str]:
        return sorted(p.name for p in self.base.iterdir()) if self.base.is_dir() else []

    def _text(self, device: str, path: str) -> str | None:
        try:
            return (self.base / device / "ports/1" / path).read_text().strip()
        except OSError:
            return None

    def active(self, device: str) -> bool:
        return "ACTIVE" in (self._text(device, "state") or "")

    def gid(self, device: str, index: int) -> Gid:
        raw = self._text(device, f"gids/{index}") or ""
        try:
            address = ipaddress.IPv6Address(raw).ipv4_mapped
        except ValueError:
            address = None
        kind = self._text(device, f"gid_attrs/types/{index}") or ""
        return Gid(device, index, address, "v2" in kind, self._text(device, f"gid_attrs/ndevs/{index}") or "")

    def active_mtu(self, gid: Gid) -> int:
        """The verbs' number for the port's MTU (5 is 4096), which follows the interface's MTU."""
        try:
            ethernet = int((self.root / "sys/class/net" / gid.netdev / "mtu").read_text())
        except (OSError, ValueError):
            ethernet = 1500
        fitting = [n for n in _MTU_ENUM if n + 58 <= ethernet]
        return _MTU_ENUM[max(fitting, default=256)]


def interface(name: str) -> ipaddress.IPv4Interface | None:
    """The IPv4 address and mask of a real interface; None where it has none or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            address = fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]
            mask = fcntl.ioctl(probe, _SIOCGIFNETMASK, request)[20:24]
        except OSError:
            return None
    return ipaddress.IPv4Interface(f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}")


def number(text: str, name: str) -> int:
    """A GID index: decimal, 0 to 255."""
    if not re.fullmatch(r"[0-9]{1,3}", text) or int(text) > 255:
        raise EngineError("InvalidRdmaGidIndex", f"{name}={text!r}: expected a decimal GID index in 0..255")
    return int(text)


class Fabric:
    """What a rank was told of its link, checked against the machine before anything is loaded."""

    def __init__(self, env: Mapping[str, str], ring: tuple[str, ...], master: str, rank: int) -> None:
        self.rank = rank
        self.ring_names = ring
        root = env.get("TF_REHEARSAL_ROOT") or "/"
        self.devices = Devices(Path(root))
        self._delay = float(env.get("TF_REHEARSAL_QP_DELAY_S", "5"))
        self._info = env.get("NCCL_DEBUG", "").upper() in {"INFO", "TRACE"}
        self.ring_index = DEFAULT_GID_INDEX
        if "TF_RDMA_GID_INDEX" in env:
            self.ring_index = number(env["TF_RDMA_GID_INDEX"], "TF_RDMA_GID_INDEX")
        self.nccl_index: int | None = None
        if "NCCL_IB_GID_INDEX" in env:
            # NCCL reads an empty value as 0: a link-local row, which no queue pair of another host reaches
            text = env["NCCL_IB_GID_INDEX"]
            self.nccl_index = number(text, "NCCL_IB_GID_INDEX") if text else 0
        self.socket_names = self._sockets(env.get("NCCL_SOCKET_IFNAME"), master)
        self.nccl_names = self._hcas(env.get("NCCL_IB_HCA"))
        for name in ring:
            self._exists(name, "TF_RDMA_DEVICES")
        if ring or self.nccl_names:
            self._device_access()

    def _sockets(self, text: str | None, master: str) -> list[str]:
        if text is None:
            return []
        names = [n.removeprefix("=") for n in text.split(",")]
        for name in names:
            if not name or name not in {n for _, n in socket.if_nameindex()}:
                raise _nccl_error(f"NCCL_SOCKET_IFNAME={text!r}: no interface {name!r} on this machine")
            found = interface(name)
            if found is None or ipaddress.IPv4Address(master) not in found.network:
                raise _nccl_error(
                    f"NCCL_SOCKET_IFNAME={name} has {found}, rank 0 is at {master}: no common subnet"
                )
        return names

    def _hcas(self, text: str | None) -> list[str]:
        here = self.devices.names()
        if text is None:
            return [n for n in here if self.devices.active(n)]
        if text == "" or text.startswith("^"):
            raise _nccl_error(f"NCCL_IB_HCA={text!r} is not a list of devices")
        exact, chosen = text.startswith("="), []
        for word in text.removeprefix("=").split(","):
            name, _, port = word.partition(":")
            if port not in {"", "1"} or not name:
                raise _nccl_error(f"NCCL_IB_HCA={text!r}: {word!r}")
            fitting = [n for n in here if n == name] or [n for n in here if n.startswith(name) and not exact]
            if not fitting:
                raise _nccl_error(
                    f"NCCL_IB_HCA names {name}, this machine has {', '.join(here) or 'no RDMA device'}"
                )
            for device in fitting:
                if device == name:
                    self._exists(device, "NCCL_IB_HCA")
                if self.devices.active(device) and device not in chosen:
                    chosen.append(device)
        if not chosen:
            raise _nccl_error(f"NCCL_IB_HCA={text}: no port of these is ACTIVE")
        return chosen

    def _exists(self, name: str, where: str) -> None:
        if name not in self.devices.names():
            raise EngineError("NoDevice", f"{where} names {name}, which {self.devices.base} does not have")
        if not self.devices.active(name):
            raise EngineError("PortDown", f"{where}: port 1 of {name} is not ACTIVE")

    def _device_access(self) -> None:
        """What `--device /dev/infiniband`, IPC_LOCK and memlock are for. A tree with its own dev/ stands in for all."""
        if (self.devices.root / "dev/infiniband").is_dir():
            return
        if not list(Path("/dev/infiniband").glob("uverbs*")):
            raise EngineError(
                "VerbsFailed", "/dev/infiniband has no uverbs device: the container was not given it"
            )
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        status = Path("/proc/self/status").read_text()
        caps = int(status.split("CapEff:")[1].split()[0], 16)
        if soft != resource.RLIM_INFINITY and not caps >> _IPC_LOCK & 1:
            raise EngineError("VerbsFailed", "ibv_reg_mr: Cannot allocate memory (memlock, IPC_LOCK)")

    def rails(self) -> list[dict[str, Any]]:
        """What the other rank needs of this one's ring: a row for each device, in order."""
        rows = []
        for name in self.ring_names:
            gid = self.devices.gid(name, self.ring_index)
            rows.append({"device": name, "gid": gid.text, "mtu": self.devices.active_mtu(gid)})
        return rows

    def connect(self, peer: int, rails: list[dict[str, Any]]) -> None:
        """NCCL's queue pairs, then the ring's, towards `peer`, which sent its `rails`.

        Raises:
            EngineError: NcclError, VerbsFailed; after a while, as the hardware takes its time to notice.
        """
        self._nccl()
        for number_, (name, theirs) in enumerate(zip(self.ring_names, rails, strict=True)):
            gid = self.devices.gid(name, self.ring_index)
            self._queue_pair(gid, str(theirs["gid"]), "VerbsFailed")
            mtu = min(self.devices.active_mtu(gid), int(theirs["mtu"]))
            say(
                f"RDMA rank {self.rank} peer {peer} rail {number_}: gid_index={self.ring_index} path_mtu={mtu}"
            )

    def _nccl(self) -> None:
        out_of_band = ""
        if self.socket_names:
            found = interface(self.socket_names[0])
            out_of_band = f"; OOB {self.socket_names[0]}:{found.ip if found else '?'}<0>"
        host = f"{socket.gethostname()}:{os.getpid()}:{os.getpid()} [0] NCCL INFO"
        if not self.nccl_names:
            if self._info:
                say(f"{host} NET/IB : No device found.\n{host} Using network Socket")
            return
        if self._info:
            used = " ".join(f"[{i}]{n}:1/RoCE" for i, n in enumerate(self.nccl_names))
            say(f"{host} NET/IB : Using {used} [RO]{out_of_band}")
            if self.nccl_index is not None:
                say(f"{host} NCCL_IB_GID_INDEX set by environment to {self.nccl_index}.")
        if self.nccl_index is not None:
            for name in self.nccl_names:
                self._queue_pair(self.devices.gid(name, self.nccl_index), None, "NcclError")

    def _queue_pair(self, gid: Gid, remote: str | None, error: str) -> None:
        if not gid.usable:
            time.sleep(self._delay)
            say("Call to ibv_modify_qp failed with 61 No data available")
            raise EngineError(error, f"{gid.device}: GID {gid.index} is no RoCE v2 entry of an IPv4 address")
        if remote is None:
            return
        try:
            theirs = ipaddress.IPv6Address(remote).ipv4_mapped
        except ValueError:
            theirs = None
        found = interface(gid.netdev) if gid.netdev else None
        near = found.network if found else ipaddress.IPv4Network(f"{gid.address}/24", strict=False)
        if theirs is None or theirs not in near:
            time.sleep(self._delay)
            say("Call to ibv_modify_qp failed with 110 Connection timed out")
            say(f"local GID {gid.text}, remote GID {remote}")
            raise EngineError(error, f"{gid.device}: the peer's rail is not on {near}")
