"""A Docker engine to hold the nodes: one that answers, or a private one that we start and end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkpair.problem import Problem

from . import leftovers, shell
from .plan import Plan

if TYPE_CHECKING:
    import docker

DEFAULT_SOCKET = Path("/var/run/docker.sock")
_START_S = 40.0


@dataclass(frozen=True)
class Engine:
    """Where the engine listens, and whether it is ours to stop."""

    host: str
    private: bool


class PrivateEngine:
    """The files of a private dockerd.

    Its sockets lie in a short folder under /run, since a socket's path may have 107 characters and a
    clone may lie deep; images and containers lie under `.rehearsal/docker`. No bridge and no firewall
    rules of its own: the rehearsal makes what it needs and can take away exactly that.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run = Path(f"/run/sparkpair-{plan.id}")
        self.data = plan.state / "docker"
        self.pid_file = self.run / "dockerd.pid"
        self.socket = self.run / "docker.sock"
        self.log = plan.logs / "dockerd.log"

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    @property
    def cgroup(self) -> str:
        return f"sparkpair-{self.plan.id}"

    def pid(self) -> int | None:
        return shell.pid_of(self.pid_file, "dockerd", str(self.run))

    def argv(self) -> list[str]:
        return [
            "dockerd",
            f"--host={self.host}",
            f"--data-root={self.data}",
            f"--exec-root={self.run}/exec",
            f"--pidfile={self.pid_file}",
            f"--cgroup-parent=/{self.cgroup}",
            "--log-level=warn",
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
        ]

    def start(self) -> None:
        """Start it and wait until it answers; a Problem holds the last lines of its log."""
        leftovers.clear_dead_engine(self.plan)
        self.run.mkdir(mode=0o711, exist_ok=True)
        self.data.mkdir(parents=True, exist_ok=True)
        self.pid_file.unlink(missing_ok=True)
        pid = shell.start(self.argv(), self.log)
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            if answers(self.host):
                return
            if not shell.alive(pid):
                break
            time.sleep(0.2)
        lines = self.log.read_text(errors="replace").strip().splitlines()
        raise Problem(
            found=f"the private Docker engine did not come up: {(lines or ['it wrote nothing'])[-1][-300:]}",
            needed="dockerd to answer within 40 s",
            do=f"read {self.log}; a full disk and a kernel without overlayfs are the usual causes",
            code="engine-start",
        )

    def stop(self) -> None:
        """End it and remove its data: mounts, sockets, control groups and files."""
        pid = self.pid()
        if pid:
            shell.stop(pid, wait_s=20.0)
        leftovers.clear_dead_engine(self.plan)
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.rmtree(self.data, ignore_errors=True)


def answers(host: str) -> bool:
    """True if a Docker engine answers at `host` within 5 s."""
    import docker

    with contextlib.suppress(Exception):
        client = docker.DockerClient(base_url=host, timeout=5)
        try:
            return bool(client.ping())
        finally:
            client.close()
    return False


def find(plan: Plan) -> Engine | None:
    """The engine that this world uses or would use, if one answers; starts nothing.

    SPARKPAIR_ENGINE=private passes over the machine's own engine.
    """
    private = PrivateEngine(plan)
    if private.pid() and answers(private.host):
        return Engine(private.host, private=True)
    if os.environ.get("SPARKPAIR_ENGINE") == "private":
        return None
    named = os.environ.get("DOCKER_HOST")
    if named:
        if answers(named):
            return Engine(named, private=False)
        raise Problem(
            found=f"DOCKER_HOST is {named} and no Docker engine answers there",
            needed="a Docker engine that answers, or no DOCKER_HOST",
            do="start that engine, or `unset DOCKER_HOST` to let the rehearsal find or start one",
            code="docker-host",
        )
    if DEFAULT_SOCKET.is_socket() and answers(f"unix://{DEFAULT_SOCKET}"):
        return Engine(f"unix://{DEFAULT_SOCKET}", private=False)
    return None


def ensure(plan: Plan) -> tuple[Engine, str]:
    """An engine that answers, and a word on where it came from. A Problem says why there can be none."""
    engine = find(plan)
    if engine:
        return engine, "private, running" if engine.private else "the one of this machine"
    if os.geteuid() != 0:
        raise Problem(
            found=f"no Docker engine answers at {DEFAULT_SOCKET}, and this user is not root",
            needed="a Docker engine that this user may use, or the right to start one",
            do="start Docker and join its group (sudo usermod -aG docker $USER, then log in again), or run as root",
            code="no-engine",
        )
    if not shell.may_install() and shutil.which("dockerd") is None:
        raise Problem(
            found="no Docker engine answers, dockerd is not installed and this is not Debian or Ubuntu",
            needed="a Docker engine",
            do="install and start Docker, then run the same command again",
            code="no-engine",
        )
    installed = shell.ensure_programs("dockerd", "iptables", "ip")
    PrivateEngine(plan).start()
    word = "private, started" + (f" after installing {', '.join(installed)}" if installed else "")
    return Engine(PrivateEngine(plan).host, private=True), word


def connect(engine: Engine) -> docker.DockerClient:
    import docker

    return docker.DockerClient(base_url=engine.host, timeout=120)


def remember(plan: Plan, engine: Engine) -> None:
    """Keep which engine holds this world, so that `down` asks the same one."""
    path = plan.state / "engine.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"host": engine.host, "private": engine.private}))


def remembered(plan: Plan) -> Engine | None:
    """The engine of the last `up`, whether it still answers or not."""
    try:
        said = json.loads((plan.state / "engine.json").read_text())
        return Engine(str(said["host"]), bool(said["private"]))
    except (OSError, ValueError, KeyError):
        return None
