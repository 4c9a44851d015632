"""Is this node fit to be one half of the pair? Facts first, then a verdict that names every shortfall."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import disk, dockercli, paths
from .console import gib, size
from .problem import Problem

GPU_NAME = "NVIDIA GB10"
GPU_HOOK = "nvidia-container-runtime-hook"
# Where the engine itself looks for the hook: systemd's PATH for services, not that of our login.
_ENGINE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"


@dataclass(frozen=True)
class Needs:
    """What the deployment asks of one node.

    Args:
        architecture: as `uname -m` says it.
        memory_bytes: MemTotal at least; siblings of the Spark differ by 2 GiB.
        disk_bytes: all that will lie under /var/lib/sparkpair.
        ports: TCP ports that must be free, or held by our own rank.
    """

    architecture: str
    memory_bytes: int
    disk_bytes: int
    ports: Sequence[int]


@dataclass(frozen=True)
class Facts:
    """What one node is. Sizes in bytes; `listeners` maps a port to who holds it.

    `docker` is the engine's version, empty where none answers; `runtimes` are those it has registered, and
    `programs` those of the NVIDIA toolkit that it would find.
    """

    machine: str
    machine_id: str
    memory_bytes: int
    disk_free_bytes: int
    disk_ours_bytes: int
    gpus: Sequence[str]
    docker: str
    runtimes: Sequence[str]
    programs: Sequence[str]
    python: str
    listeners: Mapping[int, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def gather(root: Path, ports: Sequence[int]) -> Facts:
    """Read the node. `root` stands in for / where a recorded or rehearsed tree has the memory facts."""
    state = paths.STATE
    existing = next(folder for folder in (state, *state.parents) if folder.is_dir())
    engine = _docker_info()
    return Facts(
        machine=platform.machine(),
        machine_id=_first_line(Path("/etc/machine-id")),
        memory_bytes=meminfo(root).get("MemTotal", 0),
        disk_free_bytes=shutil.disk_usage(existing).free,
        disk_ours_bytes=disk.tree_bytes(state),
        gpus=_lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        docker=str(engine.get("ServerVersion") or ""),
        runtimes=sorted(dockercli.runtimes(engine)),
        programs=[GPU_HOOK] if shutil.which(GPU_HOOK, path=_ENGINE_PATH) else [],
        python=platform.python_version(),
        listeners=listeners(ports),
    )


def judge(facts: Facts, needs: Needs, host: str) -> list[Problem]:
    """Every shortfall of one node, in the order in which a person would look at it."""
    problems = []
    if facts.machine != needs.architecture:
        problems.append(
            Problem(
                found=f"a machine of architecture {facts.machine}",
                needed=f"{needs.architecture}: a DGX Spark or a GB10 sibling",
                do="check the address of this host in the inventory",
                code="architecture",
                host=host,
            )
        )
    if not any(GPU_NAME in name for name in facts.gpus):
        listed = ", ".join(facts.gpus) or "no GPU (nvidia-smi gave none)"
        problems.append(
            Problem(
                found=listed,
                needed=f"one {GPU_NAME}",
                do="run nvidia-smi there; after a driver update reboot (drivers are never changed from here)",
                code="gpu",
                host=host,
            )
        )
    if facts.memory_bytes < needs.memory_bytes:
        problems.append(
            Problem(
                found=f"{gib(facts.memory_bytes)} of memory",
                needed=f"at least {gib(needs.memory_bytes)}: one rank's weights take 98.9 GiB",
                do="use a machine with 128 GB of unified memory",
                code="memory-total",
                host=host,
            )
        )
    missing = needs.disk_bytes - facts.disk_ours_bytes - facts.disk_free_bytes
    if missing > 0:
        problems.append(
            Problem(
                found=f"{size(facts.disk_free_bytes)} free, {size(facts.disk_ours_bytes)} in {paths.STATE}",
                needed=f"{size(needs.disk_bytes)} in all: {size(missing)} more",
                do=f"free space, or mount a larger disk at {paths.STATE}",
                code="disk-total",
                host=host,
            )
        )
    return problems + _judge_software(facts, host)


def _judge_software(facts: Facts, host: str) -> list[Problem]:
    problems = []
    if not facts.docker:
        problems.append(
            Problem(
                found="no Docker engine that answers",
                needed="the Docker engine that DGX OS brings, running",
                do="sudo systemctl enable --now docker; where it is missing: sudo apt-get install docker.io",
                code="docker",
                host=host,
            )
        )
    elif blind := dockercli.gpu_problem({"Runtimes": dict.fromkeys(facts.runtimes)}, facts.programs):
        blind.host = host
        problems.append(blind)
    for port, holder in facts.listeners.items():
        problems.append(
            Problem(
                found=f"port {port} is taken by {holder}",
                needed="a free port",
                do=f"stop {holder}, or choose another api_port" if port != 29620 else f"stop {holder}",
                code="port-taken",
                host=host,
            )
        )
    return problems


def meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes, by name. Empty where it can't be read."""
    values = {}
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def listeners(ports: Sequence[int]) -> dict[int, str]:
    """Which of `ports` a process other than our own ranks listens on, and its name (needs root for that)."""
    wanted = set(ports)
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _file_lines(Path(table))[1:]:
            words = line.split()
            port = int(words[1].rsplit(":", 1)[1], 16)
            if words[3] == "0A" and port in wanted:
                inodes[words[9]] = port
    held = dict.fromkeys(inodes.values(), "an unknown process")
    for process in Path("/proc").glob("[0-9]*"):
        for inode in _socket_inodes(process) & inodes.keys():
            command = _file_lines(process / "cmdline")
            words = command[0].split("\0") if command else ["?"]
            ours = any(Path(word).name in {"tensorfold-native", "tf-dsv41-lanes"} for word in words)
            held[inodes[inode]] = "" if ours else f"{Path(words[0]).name} (pid {process.name})"
    return {port: holder for port, holder in sorted(held.items()) if holder}


def _socket_inodes(process: Path) -> set[str]:
    found = set()
    try:
        for entry in (process / "fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass  # it ended meanwhile, or it is a kernel thread
    return found


def _first_line(path: Path) -> str:
    lines = _file_lines(path)
    return lines[0].strip() if lines else ""


def _file_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _docker_info() -> dict[str, Any]:
    """`docker info`; empty where no engine answers."""
    try:
        return dockercli.Docker().info()
    except (Problem, OSError, ValueError):
        return {}


def _lines(*command: str) -> list[str]:
    """The output lines of a program; none where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
