"""What a private engine leaves when it dies without warning, found by marks that only ours carry.

A killed process tree or a CI run that follows at once leaves a pid file, containerd and its shims with
their containers, mounts, a bridge, control groups and firewall rules. Everything here goes by this
world's id, in a path, a name or a comment: an engine or interface that we did not make is never touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from . import shell
from .plan import Plan

CGROUPS = Path("/sys/fs/cgroup")


def mounts_below(mountinfo: str, places: Iterable[Path]) -> list[str]:
    """Mount points of /proc/self/mountinfo at or under `places`, the deepest first."""
    roots = [str(place) for place in places]
    found = []
    for line in mountinfo.splitlines():
        fields = line.split()
        if len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ")
        if any(point == root or point.startswith(root + "/") for root in roots):
            found.append(point)
    return sorted(found, key=lambda point: (point.count("/"), point), reverse=True)


def shims_of(processes: Iterable[tuple[int, list[str]]], run_dir: Path) -> list[int]:
    """Pids of containerd and its shims that serve the engine whose sockets lie in `run_dir`."""
    found = []
    for pid, words in processes:
        name = Path(words[0]).name
        ours = any(word.startswith(f"{run_dir}/") for word in words[1:])
        if ours and (name == "containerd" or name.startswith("containerd-shim")):
            found.append(pid)
    return found


def children_of(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def our_rules(saved: str, comment: str) -> list[list[str]]:
    """Deletion arguments for each rule of `iptables-save` output that carries our comment."""
    table, rules = "filter", []
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith("-A ") and f"--comment {comment}" in line.replace('"', ""):
            rules.append(["-t", table, "-D", *line.replace('"', "").split()[1:]])
    return rules


def clear_dead_engine(plan: Plan) -> list[str]:
    """Clear what a dead private engine of this world left. Returns what was cleared, in words."""
    from .docker_engine import PrivateEngine

    private = PrivateEngine(plan)
    if os.geteuid() != 0 or private.pid():
        return []
    sockets = shim_sockets(private.run)
    done = [
        *_end_shims(private.run),
        *_end_cgroups(private.cgroup),
        *_unmount(private.run, private.data),
        *_remove_bridge(plan),
        *clear_rules(plan),
        *_remove_cgroups(private.cgroup),
    ]
    for socket in sockets:
        socket.unlink(missing_ok=True)
    # A pid file of a dead containerd makes the next engine wait for it instead of starting one.
    shutil.rmtree(private.run / "exec", ignore_errors=True)
    for stale in (private.pid_file, private.socket):
        if stale.exists():
            stale.unlink()
            done.append(f"a stale {stale.name}")
    return done


def shim_sockets(run_dir: Path) -> list[Path]:
    """The sockets of our shims, which containerd keeps in a folder that all engines share."""
    found = []
    for address in run_dir.glob("exec/containerd/daemon/io.containerd.runtime.v2.task/*/*/address"):
        with contextlib.suppress(OSError):
            path = Path(address.read_text().strip().removeprefix("unix://"))
            if path.is_absolute() and path.is_socket():
                found.append(path)
    return found


def _end_shims(run_dir: Path) -> list[str]:
    pids = shims_of(shell.processes(), run_dir)
    for pid in pids:
        for child in children_of(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    if pids:
        time.sleep(0.3)  # a shim reports its container's end and goes by itself
    for pid in pids:
        shell.stop(pid, wait_s=2.0)
    return [f"{len(pids)} containerd processes"] if pids else []


def _end_cgroups(name: str) -> list[str]:
    """End what still runs in our control groups: containers outlive a killed engine and its shims."""
    ended: set[int] = set()
    for _ in range(3):  # an init that is ended late may have started something
        found = {pid for top in _cgroups(name) for pid in _members(top)}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
        if not found:
            break
        time.sleep(0.2)
    return [f"{len(ended)} processes of containers"] if ended else []


def _members(top: Path) -> list[int]:
    pids = []
    for folder, _, files in os.walk(top):
        if "cgroup.procs" in files:
            with contextlib.suppress(OSError):
                pids += [int(word) for word in (Path(folder) / "cgroup.procs").read_text().split()]
    return pids


def _cgroups(name: str) -> list[Path]:
    return [path for path in (CGROUPS / name, *CGROUPS.glob(f"*/{name}")) if path.is_dir()]


def _unmount(*places: Path) -> list[str]:
    points = mounts_below(Path("/proc/self/mountinfo").read_text(), places)
    for point in points:
        shell.run("umount", "--lazy", point, check=False)
    return [f"{len(points)} mounts"] if points else []


def _remove_bridge(plan: Plan) -> list[str]:
    bridge = Path("/sys/class/net") / plan.bridge
    if not bridge.exists():
        return []
    for port in (bridge / "brif").iterdir():
        shell.run("ip", "link", "del", port.name, check=False)
    shell.run("ip", "link", "del", plan.bridge, check=False)
    return [f"the bridge {plan.bridge}"]


def clear_rules(plan: Plan) -> list[str]:
    """Remove the firewall rules that carry this world's comment."""
    if shutil.which("iptables-save") is None:
        return []
    rules = our_rules(shell.run("iptables-save", check=False), plan.network)
    for rule in rules:
        shell.run("iptables", "-w", *rule, check=False)
    return [f"{len(rules)} firewall rules"] if rules else []


def _remove_cgroups(name: str) -> list[str]:
    found = _cgroups(name)
    for top in found:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
    return [f"{len(found)} control groups"] if found else []
