"""/etc/sparkpair/pair.json: what each node knows of the pair. Written by role link, read by everything else.

The same on every node but for `rank`, which says which of the ranks this node is:

    {"version": 1, "rank": 0, "world": 2, "mtu": 9000,
     "master_address": "10.20.0.1", "master_port": 29620,
     "subnets": ["10.20.0.0/24", "10.21.0.0/24"],
     "ranks": [{"rank": 0, "host": "spark-a", "ssh_port": 22,
                "rails": [{"rail": 0, "netdev": "enp1s0f0np0", "rdma": "rocep1s0f0", "port": 1,
                           "address": "10.20.0.1", "prefix": 24}, ...]}, ...]}
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import paths
from .problem import Problem

VERSION = 1
FILE = paths.ETC / "pair.json"
MASTER_PORT = 29620


@dataclass(frozen=True)
class PairRail:
    """One rail as one rank sees it: its netdev, RDMA device and address."""

    rail: int
    netdev: str
    rdma: str
    port: int
    address: str
    prefix: int

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"{self.address}/{self.prefix}", strict=False)


@dataclass(frozen=True)
class PairRank:
    """One rank: its inventory name, its sshd's port and its rails."""

    rank: int
    host: str
    ssh_port: int
    rails: tuple[PairRail, ...]


@dataclass(frozen=True)
class Pair:
    """The whole file. `me` is this node's rank, `peers` the others."""

    rank: int
    mtu: int
    master_address: str
    master_port: int
    subnets: tuple[str, ...]
    ranks: tuple[PairRank, ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def me(self) -> PairRank:
        return self.ranks[self.rank]

    @property
    def peers(self) -> tuple[PairRank, ...]:
        return tuple(rank for rank in self.ranks if rank.rank != self.rank)

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"version": VERSION, "rank": fields.pop("rank"), "world": self.world, **fields}

    def text(self) -> str:
        return json.dumps(self.as_dict(), indent=2) + "\n"


def _bad(path: Path, what: str) -> Problem:
    return Problem(
        found=f"{path}: {what}",
        needed="the description of the pair that role link writes",
        do="ansible-playbook site.yml --tags link",
        code="pair-file",
    )


def load(path: Path = FILE) -> Pair:
    """Read and check the file. Raises Problem (code pair-file) for a missing or damaged one."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise _bad(path, "there is no such file") from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"not JSON ({error})") from error
    return parse(raw, path)


def parse(raw: Any, path: Path = FILE) -> Pair:
    """Check a parsed file: ranks 0..n-1 in order, the same rails on each, addresses in one subnet a rail."""
    if not isinstance(raw, Mapping) or raw.get("version") != VERSION:
        raise _bad(path, f"no object of version {VERSION}")
    try:
        ranks = tuple(
            PairRank(
                rank=int(entry["rank"]),
                host=str(entry["host"]),
                ssh_port=int(entry["ssh_port"]),
                rails=tuple(_rail(rail) for rail in entry["rails"]),
            )
            for entry in raw["ranks"]
        )
        pair = Pair(
            rank=int(raw["rank"]),
            mtu=int(raw["mtu"]),
            master_address=str(ipaddress.IPv4Address(raw["master_address"])),
            master_port=int(raw["master_port"]),
            subnets=tuple(str(ipaddress.IPv4Network(subnet)) for subnet in raw["subnets"]),
            ranks=ranks,
        )
    except KeyError as error:
        raise _bad(path, f"it has no {error}") from error
    except (TypeError, ValueError) as error:
        raise _bad(path, f"a value of another form ({error})") from error
    _check(pair, path)
    return pair


def _rail(raw: Mapping[str, Any]) -> PairRail:
    return PairRail(
        rail=int(raw["rail"]),
        netdev=str(raw["netdev"]),
        rdma=str(raw["rdma"]),
        port=int(raw["port"]),
        address=str(ipaddress.IPv4Address(raw["address"])),
        prefix=int(raw["prefix"]),
    )


def _check(pair: Pair, path: Path) -> None:
    if [rank.rank for rank in pair.ranks] != list(range(pair.world)) or pair.world < 2:
        raise _bad(path, f"ranks {[rank.rank for rank in pair.ranks]}, not 0 to n-1")
    if not 0 <= pair.rank < pair.world:
        raise _bad(path, f"this node is rank {pair.rank} of {pair.world}")
    rails = [[rail.rail for rail in rank.rails] for rank in pair.ranks]
    if not rails[0] or any(numbers != list(range(len(rails[0]))) for numbers in rails):
        raise _bad(path, f"rails {rails}, not the same on every rank")
    for across in zip(*(rank.rails for rank in pair.ranks), strict=True):
        if len({rail.network for rail in across}) != 1 or len({rail.address for rail in across}) != len(
            across
        ):
            raise _bad(path, f"rail {across[0].rail} has {[rail.address for rail in across]}")
    if pair.master_address not in [rail.address for rail in pair.ranks[0].rails]:
        raise _bad(path, f"master address {pair.master_address} is no link address of rank 0")
