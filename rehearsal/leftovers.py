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
    done = [
        *_end_shims(private.run),
        *_unmount(private.run, private.data),
        *_remove_bridge(plan),
        *clear_rules(plan),
        *_remove_cgroups(private.cgroup),
    ]
    if private.pid_file.exists():
        private.pid_file.unlink()
        done.append("a stale pid file")
    return done


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
    found = [path for path in (CGROUPS / name, *CGROUPS.glob(f"*/{name}")) if path.is_dir()]
    for top in found:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
    return [f"{len(found)} control groups"] if found else []
