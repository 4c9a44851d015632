"""Builds directories that stand in for / of a Spark: the four halves of two cages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

CAPTURES = Path(__file__).parents[1] / "captures"
# netdev -> (RDMA device, physical port, PCI address)
HALVES = {
    "enp1s0f0np0": ("rocep1s0f0", "p0", "0000:01:00.0"),
    "enp1s0f1np1": ("rocep1s0f1", "p1", "0000:01:00.1"),
    "enP2p1s0f0np0": ("roceP2p1s0f0", "p0", "0002:01:00.0"),
    "enP2p1s0f1np1": ("roceP2p1s0f1", "p1", "0002:01:00.1"),
}
SWITCH = "4cbb47000a10"


def capture(name: str) -> str:
    """A recorded output without its source line."""
    first, _, rest = (CAPTURES / name).read_text().partition("\n")
    assert first.startswith("# source: ")
    return rest


def put(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def mapped(address: str) -> str:
    """An IPv4 address as /sys shows it in a GID table."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def gid_rows(netdev: str, addresses: Iterable[str]) -> list[tuple[int, str, str, str]]:
    """The usual table: link-local v1 and v2, then each address as v1 and v2."""
    gids = ["fe80:0000:0000:0000:4ebb:47ff:fe00:0a12", *map(mapped, addresses)]
    kinds = ("IB/RoCE v1", "RoCE v2")
    return [
        (2 * at + step, gid, kind, netdev) for at, gid in enumerate(gids) for step, kind in enumerate(kinds)
    ]


class SysTree:
    """A Spark's tree below `root`; without arguments all four halves exist and no cable is plugged."""

    def __init__(self, root: Path, halves: Iterable[str] = tuple(HALVES)) -> None:
        self.root = root
        for netdev in (
            "lo",
            "enP7s7",
            "wlP9s9",
            "docker0",
            "enx001122334455",
            "veth514f127",
            "br-bdc9f2b0839b",
        ):
            self.net(netdev, carrier=1, operstate="up")
        put(root / "sys/class/net/bonding_masters", "")
        for netdev in halves:
            self.half(netdev)

    def net(self, name: str, **files: str | int) -> None:
        for file, value in {"mtu": 1500, "flags": "0x1003", **files}.items():
            put(self.root / "sys/class/net" / name / file, value)

    def half(self, netdev: str, *, up: bool = False, mtu: int = 9000, addresses: Iterable[str] = ()) -> None:
        """One half with its RDMA device; addresses as "a.b.c.d/prefix"."""
        device, port, _ = HALVES[netdev]
        words = {"carrier": int(up), "operstate": "up" if up else "down", "mtu": mtu}
        self.net(netdev, phys_port_name=port, phys_switch_id=SWITCH, **words)
        self.route(netdev, addresses)
        self.rdma(device, netdev, state="4: ACTIVE" if up else "1: DOWN")
        self.gids(device, gid_rows(netdev, [address.partition("/")[0] for address in addresses]))

    def cable(
        self, port: str = "p0", *, mtu: int = 9000, addresses: Iterable[Iterable[str]] = ((), ())
    ) -> None:
        """Plug the cable into a cage; one list of addresses for each twin."""
        twins = [netdev for netdev, (_, label, _) in HALVES.items() if label == port]
        for netdev, given in zip(twins, addresses, strict=True):
            self.half(netdev, up=True, mtu=mtu, addresses=given)

    def rdma(self, device: str, netdev: str | None, state: str) -> None:
        base = self.root / "sys/class/infiniband" / device
        put(base / "ports/1/state", state)
        put(base / "ports/1/rate", "200 Gb/sec (4X HDR)")
        if netdev:
            (base / "device/net" / netdev).mkdir(parents=True, exist_ok=True)

    def gids(self, device: str, rows: Iterable[tuple[int, str, str, str]]) -> None:
        """Replace a device's GID table; the other rows up to 15 are empty as the kernel shows them."""
        port = self.root / "sys/class/infiniband" / device / "ports/1"
        given = {row[0]: row[1:] for row in rows}
        for index in range(16):
            gid, kind, netdev = given.get(index, ("0000:" * 7 + "0000", "", ""))
            put(port / "gids" / str(index), gid)
            for folder, value in (("types", kind), ("ndevs", netdev)):
                file = port / "gid_attrs" / folder / str(index)
                if value:
                    put(file, value)
                else:
                    file.unlink(missing_ok=True)

    def route(self, netdev: str, addresses: Iterable[str]) -> None:
        """Connected routes in /proc/net/route, which tell the prefix."""
        path = self.root / "proc/net/route"
        lines = path.read_text().splitlines() if path.exists() else ["Iface\tDestination\tGateway\tFlags"]
        lines = [line for line in lines if not line.startswith(f"{netdev}\t")]
        for text in addresses:
            address, _, prefix = text.partition("/")
            mask = ((1 << 32) - 1) ^ ((1 << (32 - int(prefix))) - 1)
            number = int.from_bytes(bytes(int(part) for part in address.split(".")), "big") & mask
            fields = [number.to_bytes(4, "big")[::-1].hex().upper(), "00000000", "0001", "0", "0", "0"]
            fields += [mask.to_bytes(4, "big")[::-1].hex().upper(), "0", "0", "0"]
            lines.append("\t".join([netdev, *fields]))
        put(path, "\n".join(lines))

    def memory(self, *, total: int, free: int, kernel: str = "", words: str = "quiet") -> None:
        """CmaTotal and CmaFree in kB, the kernel's release and command line."""
        put(self.root / "proc/meminfo", f"MemTotal: 127600816 kB\nCmaTotal: {total} kB\nCmaFree: {free} kB")
        put(self.root / "proc/cmdline", words)
        if kernel:
            put(self.root / "proc/sys/kernel/osrelease", kernel)


RAIL0, RAIL1 = ["10.20.0.1/24"], ["10.21.0.1/24"]


def healthy(root: Path, port: str = "p0") -> SysTree:
    """A Spark with one cable and the default plan of the head."""
    tree = SysTree(root)
    tree.cable(port, addresses=(RAIL0, RAIL1))
    return tree


def pair_dict(rank: int = 0, rails: int = 2, mtu: int = 9000) -> dict[str, object]:
    """A pair.json of the default plan, both nodes cabled on f0."""
    twins = [("enp1s0f0np0", "rocep1s0f0"), ("enP2p1s0f0np0", "roceP2p1s0f0")][:rails]
    return {
        "version": 1,
        "rank": rank,
        "world": 2,
        "mtu": mtu,
        "master_address": "10.20.0.1",
        "master_port": 29620,
        "subnets": ["10.20.0.0/24", "10.21.0.0/24"][:rails],
        "ranks": [
            {
                "rank": number,
                "host": host,
                "ssh_port": 22,
                "rails": [
                    {
                        "rail": at,
                        "netdev": netdev,
                        "rdma": rdma,
                        "port": 1,
                        "address": f"10.{20 + at}.0.{number + 1}",
                        "prefix": 24,
                    }
                    for at, (netdev, rdma) in enumerate(twins)
                ],
            }
            for number, host in enumerate(("spark-a", "spark-b"))
        ],
    }
