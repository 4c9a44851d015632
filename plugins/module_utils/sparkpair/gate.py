"""What must hold on a node right before its rank starts. Run by the unit at each start, not once by a play.

Files by receipt (nothing is served that no lock vouches for), the kit, memory, the link as it is now, and
the container's name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import atomic, link, locks, pairfile, paths, sealed
from .console import gib
from .dockercli import Docker
from .inputs import report
from .preflight import meminfo
from .problem import Problem
from .ranks import RANK_LABEL, name_of

_DROP_CACHES = Path("proc/sys/vm/drop_caches")
_WAIT_FOR_DROP_S = 60.0
_WAIT_FOR_RETURN_S = 20.0
# What the engine loads by its ending alone.
_LOADED = (".safetensors", ".bin")


@dataclass(frozen=True)
class Vouched:
    """A folder and the lock that vouches for it. `alone`: no other weights may lie there."""

    lock: Path
    folder: Path
    alone: bool = False


@dataclass(frozen=True)
class Order:
    """/etc/sparkpair/rank.json: what this node's rank needs.

    Args:
        vouched: what must be there as verified.
        memory_bytes: what the rank will take; MemFree and MemAvailable must hold it.
        root: stands in for / where a rehearsed tree has the device and memory facts.
    """

    rank: int
    vouched: tuple[Vouched, ...]
    memory_bytes: int
    root: Path

    @classmethod
    def load(cls, path: Path) -> Order:
        try:
            raw = json.loads(path.read_text())
            return cls(
                int(raw["rank"]),
                tuple(
                    Vouched(Path(row["lock"]), Path(row["folder"]), bool(row["alone"]))
                    for row in raw["vouched"]
                ),
                int(raw["memory_bytes"]),
                Path(raw["root"]),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise Problem(
                found=f"{path}: {_unreadable(error)}",
                needed="the order that role ranks writes",
                do="ansible-playbook site.yml --tags ranks",
                code="rank-order",
            ) from error


def _unreadable(error: Exception) -> str:
    """Why the order can't be taken, without its path."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error})"
    return f"has no {error}" if isinstance(error, KeyError) else str(error)


def open_for(order: Order, docker: Docker | None = None) -> list[str]:
    """Check everything, clear a stale container, write the link's variables. Returns what was looked at.

    Raises Problem with all that stands in the way.
    """
    engine = docker or Docker()
    steps: list[tuple[str, Callable[[], None]]] = [
        ("files", lambda: require_vouched(order)),
        ("memory", lambda: require_memory(order)),
        ("link", lambda: write_link(order)),
        ("container", lambda: clear_container(order.rank, engine)),
    ]
    problems = []
    for _, step in steps:
        try:
            step()
        except Problem as problem:
            problems.append(problem)
    combined = report(problems)
    if combined:
        raise combined
    return [name for name, _ in steps]


def require_vouched(order: Order) -> None:
    """Every file that a lock names is there as verified: large ones by receipt, small ones by their bytes.

    A stranger's weights file is refused too: the engine takes the later of two that hold the same tensor.
    """
    problems = []
    for entry in order.vouched:
        wrong = [
            str(finding)
            for finding in sealed.findings(locks.load(entry.lock), entry.folder)
            if finding.what != sealed.EXTRA or (entry.alone and finding.path.endswith(_LOADED))
        ]
        if wrong:
            problems.append(
                Problem(
                    found=f"{entry.folder}: {locks.listed(wrong)}",
                    needed=f"the files of {entry.lock.name}, as verified"
                    + (", and no other weights" if entry.alone else ""),
                    do="ansible-playbook site.yml brings back what is missing or changed; move away what is extra",
                    code="not-vouched",
                )
            )
    combined = report(problems)
    if combined:
        raise combined


def require_memory(order: Order, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Room for the rank: MemAvailable says whether it can be had, MemFree whether the GPU gets it now.

    A rank that was just stopped gives its memory back only after a moment, so a lack is waited out briefly.
    The driver of a GB10 allocates from MemFree and does not push the page cache out (field report 53), so
    the cache is dropped here, only here, and only where that helps.
    """
    available = _wait_for("MemAvailable", order, _WAIT_FOR_RETURN_S, sleep)
    if available.get("MemAvailable", 0) < order.memory_bytes:
        users = ", ".join(largest_processes()) or "none to name"
        raise _short(order, available, f"stop what uses it (largest: {users}; nvidia-smi shows the GPU's)")
    if available.get("MemFree", 0) >= order.memory_bytes:
        return
    os.sync()
    (order.root / _DROP_CACHES).write_text("3\n")
    free = _wait_for("MemFree", order, _WAIT_FOR_DROP_S, sleep)
    if free.get("MemFree", 0) < order.memory_bytes:
        raise _short(order, free, "the page cache was dropped and memory stays taken: reboot this node")


def _wait_for(what: str, order: Order, limit_s: float, sleep: Callable[[float], None]) -> dict[str, int]:
    """/proc/meminfo once `what` holds the rank, or at the limit."""
    deadline = time.monotonic() + limit_s
    values = meminfo(order.root)
    while values.get(what, 0) < order.memory_bytes and time.monotonic() < deadline:
        sleep(1.0)
        values = meminfo(order.root)
    return values


def largest_processes(count: int = 3) -> list[str]:
    """The processes with the most resident memory: "name (pid 1, 2.0 GiB)"."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            rows = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            resident = int(rows["VmRSS"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            continue  # it ended meanwhile, or it is a kernel thread
        found.append((resident, rows["Name"].strip(), status.parent.name))
    return [
        f"{name} (pid {pid}, {gib(resident)})" for resident, name, pid in sorted(found, reverse=True)[:count]
    ]


def _short(order: Order, values: dict[str, int], do: str) -> Problem:
    free, available = values.get("MemFree", 0), values.get("MemAvailable", 0)
    lacking = gib(max(order.memory_bytes - available, 0))
    return Problem(
        found=f"MemFree {gib(free)}, MemAvailable {gib(available)} before rank {order.rank} starts",
        needed=f"{gib(order.memory_bytes)} of each: {lacking} more available",
        do=do,
        code="memory-short",
    )


def write_link(order: Order) -> None:
    """The rank's link variables from the devices as they are at this start (field report 9)."""
    pair = pairfile.load()
    found = link.read_link(order.root, rails=len(pair.me.rails), pair=pair)
    text = link.environment_text(link.environment(found))
    atomic.write_text(paths.RUN / f"rank{order.rank}.env", text)


def clear_container(rank: int, docker: Docker) -> None:
    """Remove what a killed start left of our rank; a stranger's container of that name is an error."""
    name = name_of(rank)
    listed = docker.run("ps", "--all", "--no-trunc", "--filter", f"name=^/{name}$", "--format", "{{json .}}")
    for line in listed.splitlines():
        entry: dict[str, Any] = json.loads(line)
        if f"{RANK_LABEL}={rank}" not in entry["Labels"].split(","):
            raise Problem(
                found=f"a container {name} that is not ours (image {entry['Image']}, {entry['Status']})",
                needed=f"the name {name} free",
                do=f"look at it: docker inspect {name}; if it may go: docker rm -f {name}",
                code="foreign-container",
            )
        docker.run("rm", "--force", str(entry["ID"]))
