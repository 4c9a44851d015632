"""The daemon that keeps /run/spark-tree: real links, addresses and ranks in, a Spark's fact files out."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path

from rehearsal import tree
from rehearsal.ports import PORTS

ROOT = Path("/run/spark-tree")
ORDERED = Path("/run/rehearsal/memory.json")
DROP_CACHES = "proc/sys/vm/drop_caches"
_TICK_S = 1.0
_SETTLE_S = 0.03


class Keeper:
    """Holds what was written, so that only differences are."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: tree.Files = {}
        self.tables = {port.rdma: tree.GidTable() for port in PORTS}
        self.dropped_at = 0

    def refresh(self) -> None:
        links = read_links()
        by_name = {link.name: link for link in links}
        for port in PORTS:
            link = by_name.get(port.netdev)
            if link is None:
                self.tables[port.rdma] = tree.GidTable()
            else:
                self.tables[port.rdma].follow(link.mac, link.addresses)
        memory = tree.memory_of(read_ordered(), len(running_engines()), self._caches_dropped())
        routes = Path("/proc/net/route").read_text()
        self.write(tree.render(links, self.tables, memory, socket.gethostname(), routes))

    def _caches_dropped(self) -> bool:
        """True once somebody wrote to drop_caches after the last order about memory."""
        with contextlib.suppress(OSError):
            written = (self.root / DROP_CACHES).stat().st_mtime_ns
            ordered = ORDERED.stat().st_mtime_ns if ORDERED.exists() else 0
            return written > max(ordered, self.dropped_at)
        path = self.root / DROP_CACHES
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0\n")
        self.dropped_at = path.stat().st_mtime_ns
        return False

    def write(self, files: tree.Files) -> None:
        """Bring the files in line with `files`: what changed is replaced, what is gone is removed."""
        for name in sorted(set(self.written) - set(files), reverse=True):
            (self.root / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.root / name).parent.rmdir()
        # Files before the links that lead to them: a class entry never dangles.
        for name, content in sorted(files.items(), key=lambda item: isinstance(item[1], tree.Symlink)):
            if self.written.get(name) != content:
                put(self.root / name, content)
        self.written = files


def put(path: Path, content: str | tree.Symlink) -> None:
    """Write one entry in one step: a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    if isinstance(content, tree.Symlink):
        partial.symlink_to(content.target)
    else:
        partial.write_text(content)
    partial.replace(path)


def read_links() -> list[tree.Link]:
    """The node's interfaces, from the kernel."""
    done = subprocess.run(["ip", "-json", "address"], capture_output=True, text=True, check=True)
    found = []
    for entry in json.loads(done.stdout):
        name = entry.get("ifname", "")
        base = Path("/sys/class/net") / name
        if not base.is_dir():
            continue
        with contextlib.suppress(OSError):  # gone between the two looks
            found.append(
                tree.Link(
                    name=name,
                    index=int(entry["ifindex"]),
                    mac=str(entry.get("address", "00:00:00:00:00:00")),
                    mtu=int(entry["mtu"]),
                    flags=(base / "flags").read_text().strip(),
                    operstate=(base / "operstate").read_text().strip(),
                    carrier=_carrier(base),
                    addresses=tuple(
                        item["local"] for item in entry.get("addr_info", []) if item.get("family") == "inet"
                    ),
                )
            )
    return found


def _carrier(base: Path) -> bool | None:
    try:
        return (base / "carrier").read_text().strip() == "1"
    except OSError:
        return None


def running_engines() -> list[tuple[int, str]]:
    """Pid and program of each rank that runs in this node, in a container or not."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            name = tree.engine_name(words)
            if name:
                found.append((int(entry.name), name))
    return found


def read_ordered() -> dict[str, float]:
    """What `fault memory` ordered; nothing when it ordered nothing."""
    try:
        return {str(name): float(value) for name, value in json.loads(ORDERED.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def notify_ready() -> None:
    """Tell systemd that the tree is whole."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect("\0" + address[1:] if address.startswith("@") else address)
            out.send(b"READY=1")


def main() -> None:
    ROOT.mkdir(mode=0o755, exist_ok=True)
    keeper = Keeper(ROOT)
    keeper.refresh()
    notify_ready()
    with subprocess.Popen(
        ["ip", "-oneline", "monitor", "link", "address", "route"], stdout=subprocess.PIPE
    ) as monitor:
        out = monitor.stdout
        if out is None:
            raise SystemExit("ip monitor has no output")
        os.set_blocking(out.fileno(), False)
        while monitor.poll() is None:
            if select.select([out], [], [], _TICK_S)[0]:
                time.sleep(_SETTLE_S)
                out.read()
            keeper.refresh()
    raise SystemExit(f"ip monitor ended with {monitor.returncode}")


if __name__ == "__main__":
    main()
