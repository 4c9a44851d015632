"""A Spark's four ConnectX-7 halves: names, PCI places, which one is cabled. Shared with the nodes."""

from __future__ import annotations

from dataclasses import dataclass

MANAGEMENT = "enP7s7"


@dataclass(frozen=True)
class Port:
    """One half of a QSFP cage: a netdev and an RDMA device on one PCI function.

    `rail` is the rail of the pair that it carries (0 or 1), None where no cable is plugged.
    """

    netdev: str
    rdma: str
    pci: str
    port_name: str
    mac_tail: int
    rail: int | None


# Names, PCI places and the order of addresses as on a Spark: cage 0 is cabled, cage 1 is empty.
PORTS = (
    Port("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0", "p0", 0x12, 0),
    Port("enp1s0f1np1", "rocep1s0f1", "0000:01:00.1", "p1", 0x13, None),
    Port("enP2p1s0f0np0", "roceP2p1s0f0", "0002:01:00.0", "p0", 0x16, 1),
    Port("enP2p1s0f1np1", "roceP2p1s0f1", "0002:01:00.1", "p1", 0x17, None),
)
RAILS = tuple(sorted((port for port in PORTS if port.rail is not None), key=lambda port: port.rail or 0))


def mac(rank: int, port: Port) -> str:
    """The port's address: NVIDIA's prefix, the node in the fifth byte."""
    return f"4c:bb:47:00:{0x0A + rank:02x}:{port.mac_tail:02x}"
