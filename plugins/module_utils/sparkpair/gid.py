"""Choosing the RoCE v2 GID index of a link port: computed at each start, never remembered.

A GID table is per device. Rows 0 and 1 are usually link-local, 2 and 3 the IPv4 address as v1 and v2,
but the rows move when an address is taken away and given again, so an index of yesterday may name a
link-local or a v1 row today (field report 9).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .problem import Problem
from .sysfs import GidRow, RdmaPort


@dataclass(frozen=True)
class Rejected:
    """A row that does not serve, and why."""

    index: int
    gid: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.index} ({self.gid}): {self.reason}"


@dataclass(frozen=True)
class Choice:
    """What one port's table offers: every index that serves, lowest first, and the rejected rows."""

    device: str
    netdev: str
    address: str
    valid: tuple[int, ...]
    rejected: tuple[Rejected, ...]

    @property
    def index(self) -> int | None:
        return self.valid[0] if self.valid else None


def show(gid: ipaddress.IPv6Address) -> str:
    """A GID as people write it: the IPv4 form where it holds one."""
    return f"::ffff:{gid.ipv4_mapped}" if gid.ipv4_mapped else str(gid)


def _why_not(row: GidRow, port: RdmaPort, netdev: str, address: str) -> str | None:
    """The reason why a row does not serve `netdev` with `address`; None if it does."""
    if row.ipv4 is None:
        return "link-local, not the IPv4 address" if row.gid.is_link_local else "not an IPv4 address"
    if row.kind != "v2":
        return f"RoCE {row.kind}, not v2" if row.kind else "its RoCE version cannot be read"
    if (row.netdev or netdev) != netdev or (not row.netdev and netdev not in port.netdevs):
        return f"belongs to {row.netdev or 'an unknown device'}, not to {netdev}"
    if address and str(row.ipv4) != address:
        return f"the address of another subnet, not {address}"
    if row.ipv4.is_link_local:
        return "a 169.254 address, which changes when the link comes up again"
    return None


def choose(port: RdmaPort, netdev: str, address: str) -> Choice:
    """Judge every row of `port` for the rail of `netdev`.

    Args:
        address: the rail's IPv4 address without prefix; "" takes any static one of the netdev.
    """
    valid, rejected = [], []
    for row in port.gids:
        reason = _why_not(row, port, netdev, address)
        if reason is None:
            valid.append(row.index)
        else:
            rejected.append(Rejected(row.index, show(row.gid), reason))
    return Choice(port.device, netdev, address, tuple(sorted(valid)), tuple(rejected))


def shared_index(choices: Sequence[Choice]) -> int | None:
    """The one index that serves all rails of a rank, None where there is none.

    The engine's ring takes a single TF_RDMA_GID_INDEX for all of its devices.
    """
    common = set(choices[0].valid) if choices else set()
    for choice in choices[1:]:
        common &= set(choice.valid)
    return min(common, default=None)


def missing(choice: Choice) -> Problem:
    """The fault of a port without a usable row, listing why each one was turned down."""
    table = "; ".join(map(str, choice.rejected)) or "its GID table is empty"
    wanted = f"::ffff:{choice.address}" if choice.address else "its static IPv4 address"
    return Problem(
        found=f"{choice.device} has no usable GID: {table}",
        needed=f"a RoCE v2 row that holds {wanted} and belongs to {choice.netdev}",
        do=f"give {choice.netdev} its address again: netplan apply, or ansible-playbook site.yml --tags link",
        code="link-no-gid",
    )


def unequal(choices: Iterable[Choice]) -> Problem:
    """The fault of twins whose only usable rows have different indexes."""
    listed = ", ".join(f"{choice.device} has it at {list(choice.valid)}" for choice in choices)
    return Problem(
        found=f"the RoCE v2 row of the rails' addresses: {listed}",
        needed="one index that serves every rail: the engine's ring takes a single TF_RDMA_GID_INDEX",
        do="re-read both tables: ip link set DEVICE down, then up, on each twin and netplan apply; "
        "or serve over one rail on both Sparks: ansible-playbook site.yml -e rails=1",
        code="link-gid-unequal",
    )
