"""What the nodes find on the host: the hub and the git server, bound to the gateway's address only."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpair.problem import Problem

from . import shell
from .plan import GIT_PORT, HUB_PORT, Plan

_ANSWER_S = 20.0


@dataclass(frozen=True)
class Service:
    """One program on the host. `mark` is part of its command line and of no other's."""

    name: str
    argv: tuple[str, ...]
    ports: tuple[int, ...]
    mark: str
    pid_file: Path
    log: Path


def all_of(plan: Plan) -> tuple[Service, Service]:
    """Hub and git server of this world."""
    hub_root, git_root = plan.state / "hub", plan.state / "git"
    hub = (sys.executable, "-m", "rehearsal.hub", f"--root={hub_root}", f"--bind={plan.gateway}")
    git = ("git", "daemon", f"--base-path={git_root}", f"--listen={plan.gateway}", f"--port={GIT_PORT}")
    return (
        Service(
            "hub",
            (*hub, f"--port={HUB_PORT}", f"--log={plan.logs / 'hub-requests.jsonl'}"),
            (HUB_PORT, HUB_PORT + 1),
            f"--root={hub_root}",
            plan.state / "hub.pid",
            plan.logs / "hub.log",
        ),
        Service(
            "git",
            (*git, "--export-all", "--reuseaddr", "--informative-errors", str(git_root)),
            (GIT_PORT,),
            f"--base-path={git_root}",
            plan.state / "git.pid",
            plan.logs / "git.log",
        ),
    )


def code_key(*places: Path) -> str:
    """A hash over source files: a service that runs older code is started anew."""
    digest = hashlib.sha256()
    for place in places:
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            digest.update(f"{file.relative_to(place.parent)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def running(service: Service) -> int | None:
    """The service's pid, if it runs and is ours."""
    return shell.pid_of(service.pid_file, service.mark)


def ensure(plan: Plan, service: Service, code: str) -> str:
    """Start the service unless it runs with this code, and wait for its ports. Returns a word on it."""
    stamp = service.pid_file.with_suffix(".code")
    wanted = f"{code} {' '.join(service.argv)}"
    pid = running(service)
    if (
        pid
        and stamp.exists()
        and stamp.read_text() == wanted
        and all(_open(plan.gateway, p) for p in service.ports)
    ):
        return "running"
    if pid:
        shell.stop(pid)
    for port in service.ports:
        if _open(plan.gateway, port):
            raise Problem(
                found=f"something else listens on {plan.gateway} port {port}",
                needed=f"the port for the rehearsal's {service.name}",
                do=f"stop it (ss -ltnp 'sport = :{port}'), then run the same command again",
                code="port-taken",
            )
    pid = shell.start(service.argv, service.log, cwd=plan.root, env={"GIT_CONFIG_COUNT": "1", **_SAFE})
    service.pid_file.write_text(str(pid))
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until and shell.alive(pid):
        if all(_open(plan.gateway, port) for port in service.ports):
            stamp.write_text(wanted)
            return "started"
        time.sleep(0.1)
    tail = " / ".join(service.log.read_text(errors="replace").strip().splitlines()[-4:])
    raise Problem(
        found=f"the {service.name} does not answer on {plan.gateway}: {tail or 'it wrote nothing'}",
        needed=f"ports {', '.join(map(str, service.ports))} open within {_ANSWER_S:.0f} s",
        do=f"read {service.log}, then run the same command again",
        code="service-start",
    )


# A git daemon refuses repositories of another owner, as after `sudo` in a user's clone.
_SAFE = {"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


def _open(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def stop_all(plan: Plan) -> list[str]:
    """End the services. Returns the names of those that ran."""
    ended = []
    for service in all_of(plan):
        pid = running(service)
        if pid:
            shell.stop(pid)
            ended.append(service.name)
        service.pid_file.unlink(missing_ok=True)
    return ended


def strays(plan: Plan, seen: Sequence[tuple[int, list[str]]]) -> list[int]:
    """Processes of this world's services, whether a pid file knows them or not."""
    marks = [service.mark for service in all_of(plan)]
    return [pid for pid, words in seen if any(mark in words for mark in marks)]
