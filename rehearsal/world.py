"""The whole world: brought up in steps, looked at, taken down without a trace."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkpair import atomic
from sparkpair.problem import Problem

from . import docker_engine, images, leftovers, network, nodes, rails, services, shell, sources
from .docker_engine import Engine
from .plan import GIT_PORT, HUB_PORT, LABEL, NODES, Node, Plan, site_environment, world_json

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

Result = TypeVar("Result")
HERE = Path(__file__).parent


@contextlib.contextmanager
def locked(plan: Plan) -> Iterator[None]:
    """One `up`, `down` or `fault` at a time; a second one waits."""
    plan.state.mkdir(exist_ok=True)
    with (plan.state / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another rehearsal command is at work here; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Steps:
    """Prints a line per step, with what came of it and the seconds it took."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, name: str, work: Callable[[], Result], word: Callable[[Result], str] = str) -> Result:
        begun = time.monotonic()
        result = work()
        took = time.monotonic() - begun
        with self._lock:
            print(f"{name:<18} {word(result)}  ({took:.1f} s)", flush=True)
        return result

    def seconds(self) -> float:
        return time.monotonic() - self.begun


@dataclass
class Aside:
    """Work done beside the steps; its failure is raised when it is awaited."""

    work: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def wait(self) -> Any:
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.result


def up(root: Path) -> dict[str, Any]:
    """Bring the world up, or bring what is missing of it. Returns the contents of world.json."""
    plan = Plan(root)
    step = Steps()
    with locked(plan):
        engine, _ = step("docker engine", partial(docker_engine.ensure, plan), itemgetter(1))
        docker_engine.remember(plan, engine)
        client = docker_engine.connect(engine)
        plan = network.with_subnet(plan, client)
        shell.ensure_programs("git", "ssh", "ssh-keygen", "ip")
        content, base = Aside(partial(_host_content, plan)), Aside(partial(images.base_archive, plan, engine))
        image, _ = step("node image", partial(images.node_image, plan, client), itemgetter(1))
        step("network", partial(network.ensure, plan, client, engine))
        found = _start_nodes(plan, client, step, image)
        archive = step("base archive", base.wait)
        step("base image", partial(nodes.ensure_base_image, found["spark-a"], archive))
        commits = step("hub, git content", content.wait, _shorten)
        for service in services.all_of(plan):
            step(service.name, partial(services.ensure, plan, service, services.code_key(HERE / "hub")))
        step("reachable", partial(_check_reachable, plan, found))
        world = world_json(plan, engine.host, commits, site_environment(os.environ, plan.subnet))
        atomic.write_text(plan.world_file, json.dumps(world, indent=2) + "\n")
        client.close()
    print(f"the rehearsal is up after {step.seconds():.1f} s: {plan.world_file}", flush=True)
    return world


# What the integration tests start themselves, and what `up` needs.
PROGRAMS = (
    *("dockerd", "git", "ip", "iptables", "mmdebstrap", "nft", "ping"),
    *("rsync", "ssh", "ssh-keygen", "sshd"),
)


def provide() -> list[str]:
    """Install the host's programs where they are missing. Returns the packages that were installed."""
    return shell.ensure_programs(*PROGRAMS)


def _start_nodes(plan: Plan, client: docker.DockerClient, step: Steps, image: str) -> dict[str, Container]:
    """Nodes, cables and a finished boot."""
    public_key = nodes.ensure_key(plan)
    for node in NODES:
        step(node.name, partial(nodes.ensure, plan, client, node, image, public_key))
    found = containers(plan, client)
    cable = rails.ensure_cable(plan, client, image)
    step("cables", partial(rails.attach, cable, found), lambda made: f"{len(made)} ports made")
    for name, container in found.items():
        step(f"{name} boot", partial(nodes.wait_until_up, container), lambda _: "its base units are active")
    nodes.write_known_hosts(plan, found)
    return found


def _shorten(commits: dict[str, str]) -> str:
    return ", ".join(f"{name} at {commit[:12]}" for name, commit in commits.items())


def _host_content(plan: Plan) -> dict[str, str]:
    """What hub and git server hold; each part does nothing when it is there."""
    shell.run(sys.executable, "-m", "rehearsal.checkpoint", plan.state / "hub", cwd=plan.root)
    return sources.publish_all(plan)


def containers(plan: Plan, client: docker.DockerClient) -> dict[str, Container]:
    """The nodes' containers by node name; a Problem when one is missing."""
    import docker.errors

    found = {}
    for node in NODES:
        try:
            found[node.name] = client.containers.get(plan.container(node))
        except docker.errors.NotFound:
            raise Problem(
                found=f"no container {plan.container(node)}",
                needed="a rehearsal that is up",
                do="python -m rehearsal up",
                code="not-up",
            ) from None
    return found


def _check_reachable(plan: Plan, found: dict[str, Container]) -> str:
    """The ways that the playbooks go, tried once: a firewall in between shows here and not in a play."""
    for node in NODES:
        _wait_for_ssh(plan, node)
        for port in (HUB_PORT, GIT_PORT):
            probe = f"exec 3<>/dev/tcp/{plan.gateway}/{port}"
            code, output = nodes.execute(found[node.name], "timeout", "5", "bash", "-c", probe)
            if code:
                raise Problem(
                    found=f"{node.name} can't reach {plan.gateway} port {port} of this machine: {output.strip()[-99:]}",
                    needed="hub and git server in reach of the nodes",
                    do=f"let the bridge in, e.g. sudo ufw allow in on {plan.bridge}; then run the same command again",
                    code="host-firewall",
                )
    return "each node by ssh; hub and git server from each node"


def _wait_for_ssh(plan: Plan, node: Node) -> None:
    until = time.monotonic() + 20
    while True:
        done = subprocess.run(
            nodes.ssh_argv(plan, node, ["true"]),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode == 0:
            return
        if time.monotonic() > until:
            raise Problem(
                found=f"ssh {node.user}@{plan.address(node)}: {done.stderr.strip()}",
                needed="a login by key on each node",
                do=f"python -m rehearsal exec {node.name} journalctl -u ssh",
                code="node-ssh",
            )
        time.sleep(0.2)


def current(root: Path) -> tuple[Plan, docker.DockerClient]:
    """The plan and the engine of a world that is up; a Problem otherwise."""
    plan = Plan(root)
    engine = docker_engine.remembered(plan)
    if engine is None or not docker_engine.answers(engine.host):
        raise Problem(
            found="no rehearsal is up here"
            if engine is None
            else f"the engine at {engine.host} does not answer",
            needed="a rehearsal that is up",
            do="python -m rehearsal up",
            code="not-up",
        )
    client = docker_engine.connect(engine)
    containers(plan, client)
    return network.with_subnet(plan, client), client


def status(root: Path) -> dict[str, Any]:
    """What is there and how it is, as one JSON object. Never fails because something is not up."""
    plan = Plan(root)
    engine = docker_engine.remembered(plan)
    answer: dict[str, Any] = {"id": plan.id, "engine": None, "nodes": {}, "rails": {}, "services": {}}
    if engine is None:
        return answer
    answer["engine"] = {
        "host": engine.host,
        "private": engine.private,
        "answers": docker_engine.answers(engine.host),
    }
    if not answer["engine"]["answers"]:
        return answer
    client = docker_engine.connect(engine)
    plan = network.with_subnet(plan, client)
    answer["subnet"] = str(plan.subnet)
    for container in client.containers.list(all=True, filters={"label": f"{LABEL}={plan.id}"}):
        for node in NODES:
            if container.name == plan.container(node):
                answer["nodes"][node.name] = _node_status(plan, node, container)
        if container.name == plan.cable and container.status == "running":
            answer["rails"] = {
                str(rail): "plugged" if on else "pulled" for rail, on in rails.state(container).items()
            }
    answer["services"] = {service.name: services.running(service) for service in services.all_of(plan)}
    client.close()
    return answer


def _node_status(plan: Plan, node: Node, container: Container) -> dict[str, Any]:
    shown: dict[str, Any] = {"address": plan.address(node), "user": node.user, "container": container.status}
    if container.status != "running":
        return shown
    shown["systemd"] = nodes.execute(container, "systemctl", "is-system-running")[1].strip()
    shown["links"] = nodes.read(container, "ip", "-brief", "address").splitlines()
    form = "{{.Names}} {{.Image}} {{.Status}}"
    shown["inner_containers"] = nodes.read(container, "docker", "ps", "--format", form).splitlines()
    return shown


def down(root: Path, *, purge: bool = False) -> list[str]:
    """Remove all that the world is made of and verify it. Returns what is left (nothing, or a Problem)."""
    plan = Plan(root)
    step = Steps()
    with locked(plan):
        engine = docker_engine.remembered(plan)
        step("services", lambda: services.stop_all(plan), lambda ended: ", ".join(ended) or "none ran")
        if engine is not None and docker_engine.answers(engine.host):
            step("nodes", partial(_remove_objects, plan, engine), lambda gone: ", ".join(gone) or "none")
        private = docker_engine.PrivateEngine(plan)
        if os.geteuid() == 0 and (private.run.exists() or private.data.exists()):
            step("docker engine", private.stop, lambda _: "the private one ended, its data removed")
        for name in ("engine.json", "world.json", "hub.code", "git.code", "api-key"):
            (plan.state / name).unlink(missing_ok=True)
        for name in ("hub", "git", "ssh", "locks"):
            shutil.rmtree(plan.state / name, ignore_errors=True)
        if purge:
            step(
                "cache",
                lambda: shutil.rmtree(images.cache_dir(plan), ignore_errors=True),
                lambda _: "removed",
            )
        left = left_behind(plan, engine)
    if left:
        raise Problem(
            found=f"still there: {'; '.join(left)}",
            needed="nothing of the rehearsal left",
            do="python -m rehearsal down, once more; then remove them by hand",
            code="left-behind",
        )
    print(
        f"nothing is left of the rehearsal but its cache ({images.cache_dir(plan)})"
        if not purge
        else "nothing is left"
    )
    return left


def _ours(plan: Plan) -> dict[str, str | list[str] | bool]:
    return {"label": f"{LABEL}={plan.id}"}


def _remove_objects(plan: Plan, engine: Engine) -> list[str]:
    """Containers, network and volumes with this world's label."""
    client = docker_engine.connect(engine)
    gone = []
    for container in client.containers.list(all=True, filters=_ours(plan)):
        container.remove(force=True, v=True)
        gone.append(str(container.name))
    for net in client.networks.list(filters=_ours(plan)):
        net.remove()
        gone.append(f"network {net.name}")
    for volume in client.volumes.list(filters=_ours(plan)):
        volume.remove(force=True)
        gone.append(f"volume {volume.name}")
    client.close()
    if engine.private:
        leftovers.clear_rules(plan)
    return gone


def left_behind(plan: Plan, engine: Engine | None) -> list[str]:
    """What of this world can still be found on the machine, in words."""
    private = docker_engine.PrivateEngine(plan)
    seen = list(shell.processes())
    left = [f"process {pid}" for pid in services.strays(plan, seen)]
    left += [f"process {pid} ({Path(words[0]).name})" for pid, words in seen if _belongs(words, private.run)]
    for link in Path("/sys/class/net").iterdir():
        if link.name == plan.bridge:
            left.append(f"interface {link.name}")
    places = [private.run, private.data]
    left += [
        f"mount {point}" for point in leftovers.mounts_below(Path("/proc/self/mountinfo").read_text(), places)
    ]
    left += [f"folder {place}" for place in places if place.exists()]
    left += [f"control group {path}" for path in leftovers.CGROUPS.glob(f"*/{private.cgroup}")]
    if engine is not None and not engine.private and docker_engine.answers(engine.host):
        client = docker_engine.connect(engine)
        found = (
            client.containers.list(all=True, filters=_ours(plan)),
            client.networks.list(filters=_ours(plan)),
        )
        left += [f"{thing.name}" for things in found for thing in things]
        left += [f"volume {volume.name}" for volume in client.volumes.list(filters=_ours(plan))]
        client.close()
    return left


def _belongs(words: list[str], run_dir: Path) -> bool:
    """True for a process of the private engine: the engine, containerd, a shim, a proxy."""
    return any(f"{run_dir}/" in word for word in words)
