"""The two nodes: containers with systemd, sshd, netplan and a Docker engine of their own."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkpair.problem import Problem

from . import shell
from .capabilities import withheld
from .images import BASE_NAME_KEY, Extra, cache_dir
from .plan import BASE_IMAGE, NODES, PASSWORD, Node, Plan

if TYPE_CHECKING:
    import docker
    from docker.models.containers import Container

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/etc/ssl/certs")
CACHE_IN_NODE = "/var/cache/rehearsal"
_BASE_UNITS = (
    *("dbus.service", "docker.service", "spark-tree.service", "ssh.service"),
    *("systemd-networkd.service", "systemd-udevd.service", "systemd-user-sessions.service"),
)
_BOOT_S = 60.0


def ensure_key(plan: Plan) -> str:
    """The key pair for both login users. Returns the public half."""
    if not plan.key.exists():
        plan.key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shell.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rehearsal", "-f", plan.key)
    return plan.key.with_suffix(".pub").read_text()


def node_config(plan: Plan, node: Node, public_key: str) -> dict[str, Any]:
    """What boot.py reads in the node."""
    return {
        "name": node.name,
        "user": node.user,
        "password": PASSWORD,
        "authorized_key": public_key,
        "gateway": plan.gateway,
        "route_out": node.route_out,
    }


def inner_engine(nameservers: list[str]) -> dict[str, Any]:
    """/etc/docker/daemon.json of a node: the nvidia runtime as on DGX OS, name servers that a bridge reaches."""
    config: dict[str, Any] = json.loads((Path(__file__).parent / "node/etc/docker/daemon.json").read_text())
    return config | ({"dns": nameservers} if nameservers else {})


def nameservers(*resolv_confs: str) -> list[str]:
    """Name servers of resolv.conf texts that are not on a loopback, in order."""
    found = []
    for text in resolv_confs:
        for line in text.splitlines():
            words = line.split()
            if (
                words[:1] == ["nameserver"]
                and not words[1].startswith(("127.", "::1"))
                and ":" not in words[1]
            ):
                found.append(words[1])
    return list(dict.fromkeys(found))


def _host_nameservers() -> list[str]:
    texts = []
    for place in ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"):
        with contextlib.suppress(OSError):
            texts.append(Path(place).read_text())
    return nameservers(*texts)


def host_config(plan: Plan, node: Node, client: docker.DockerClient, lacking: list[str]) -> dict[str, Any]:
    """How a node's container runs: all that systemd and an inner engine need, and no `--privileged`.

    The control-group namespace is private on either version of control groups: with the machine's own
    tree bound in, a node's systemd would write mounts and folders into it.
    """
    binds: dict[str, Mapping[str, str]] = {plan.volume(node): {"bind": "/var/lib/docker", "mode": "rw"}}
    if CERTIFICATES.is_dir():
        binds[str(CERTIFICATES)] = {"bind": str(CERTIFICATES), "mode": "ro"}
    if node.role == "head":
        binds[str(cache_dir(plan))] = {"bind": CACHE_IN_NODE, "mode": "ro"}
    config: dict[str, Any] = client.api.create_host_config(
        binds=binds,
        cap_add=["ALL"],
        cap_drop=lacking,
        security_opt=["seccomp=unconfined", "apparmor=unconfined"],
        tmpfs={"/run": "exec,mode=755", "/tmp": "exec,mode=1777"},  # noqa: S108 - the node's, not ours
        network_mode=plan.network,
    )
    return config | {"CgroupnsMode": "private", "MaskedPaths": [], "ReadonlyPaths": []}


def ensure(plan: Plan, client: docker.DockerClient, node: Node, image: str, public_key: str) -> str:
    """The node, made or started as needed. Returns "there", "started" or "made"."""
    import docker.errors

    try:
        container = client.containers.get(plan.container(node))
    except docker.errors.NotFound:
        container = None
    if container is not None and container.labels.get("sparkpair.rehearsal.node") != _key(plan, node, image):
        container.remove(force=True)
        container = None
    if container is not None:
        if container.status == "running":
            return "there"
        container.start()
        return "started"
    container = _create(plan, client, node, image)
    _put_files(container, plan, node, public_key)
    container.start()
    return "made"


def _key(plan: Plan, node: Node, image: str) -> str:
    """What a container must have been made from to be kept."""
    return hashlib.sha256(f"{image} {plan.subnet} {cache_dir(plan)} {node}".encode()).hexdigest()[:12]


def _create(plan: Plan, client: docker.DockerClient, node: Node, image: str) -> Container:
    api = client.api
    name = plan.container(node)
    api.create_volume(plan.volume(node), labels=plan.labels)
    lacking = withheld(Path("/proc/self/status").read_text())
    endpoint = api.create_endpoint_config(ipv4_address=plan.address(node))
    networking = api.create_networking_config({plan.network: endpoint})  # type: ignore[arg-type]
    made = api.create_container(
        image,
        name=name,
        hostname=node.name,
        labels={**plan.labels, "sparkpair.rehearsal.node": _key(plan, node, image)},
        environment={"container": "docker"},
        stop_signal="SIGRTMIN+3",
        host_config=host_config(plan, node, client, lacking),
        networking_config=networking,
    )
    return client.containers.get(made["Id"])


def _put_files(container: Container, plan: Plan, node: Node, public_key: str) -> None:
    """Files that differ between the nodes, laid in before the first boot."""
    machine_id = hashlib.sha256(f"{plan.id} {node.name}".encode()).hexdigest()[:32]
    files = [
        Extra("etc/machine-id", f"{machine_id}\n".encode(), 0o444),
        Extra("etc/docker/daemon.json", _json(inner_engine(_host_nameservers()))),
        Extra("etc/rehearsal/node.json", _json(node_config(plan, node, public_key)), 0o600),
    ]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in files:
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode = len(file.data), file.mode
            tar.addfile(entry, io.BytesIO(file.data))
    container.put_archive("/", buffer.getvalue())


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def execute(container: Container, *argv: str) -> tuple[int, str]:
    """Run a program in a container as root. Returns its exit code and all that it wrote."""
    code, output = container.exec_run(list(argv))
    if not isinstance(code, int) or not isinstance(output, bytes):
        raise TypeError("exec_run without stream gives an exit code and bytes")
    return code, output.decode(errors="replace")


_WHOLE = "rehearsal-output-ends-here"


def read(container: Container, *argv: str) -> str:
    """Run a program that changes nothing, again if need be, and return what it wrote.

    About one exec in 300 of an older engine loses its output when the program ends at once; a last line
    of our own tells. A program that fails is a Problem.
    """
    script = f'"$@" && echo {_WHOLE}'
    for _ in range(5):
        output = must(container, "sh", "-c", script, "sh", *argv)
        if output.endswith(f"{_WHOLE}\n"):
            return output.removesuffix(f"{_WHOLE}\n")
    raise Problem(
        found=f"the engine lost the output of {' '.join(argv)} in {container.name} five times",
        needed="a Docker engine that hands on what a program writes",
        do="python -m rehearsal down, then up",
        code="engine-output",
    )


def must(container: Container, *argv: str) -> str:
    """Run a program in a container; a failure is a Problem with what it wrote."""
    code, output = execute(container, *argv)
    if code:
        tail = " / ".join(output.strip().splitlines()[-6:])
        raise Problem(
            found=f"{' '.join(argv)} in {container.name} ended with {code}: {tail or 'no output'}",
            needed="this step of the rehearsal to work",
            do="mend what the message names, then run the same command again",
            code="node-command",
        )
    return output


def unfit(failed: str) -> list[str]:
    """Failed units that make a node no fit test host (field report 78), from systemctl's plain list.

    The project's own units may fail there, as on a Spark, and so may one that a test started.
    """
    names = [line.split()[0] for line in failed.splitlines() if line.strip()]
    return [name for name in names if not name.startswith(("sparkpair", "run-"))]


def wait_until_up(container: Container) -> float:
    """Wait until a node's base units run and none of the others failed. Returns the seconds it took.

    `systemctl is-system-running` would not do: a start of the pair keeps it at "starting" for minutes,
    and a rank that failed at "degraded" for ever.
    """
    begun = time.monotonic()
    missing, failed = list(_BASE_UNITS), ""
    while time.monotonic() - begun < _BOOT_S:
        container.reload()
        if container.status != "running":
            break
        states = execute(container, "systemctl", "is-active", *_BASE_UNITS)[1].split()
        if len(states) == len(_BASE_UNITS):
            missing = [unit for unit, state in zip(_BASE_UNITS, states, strict=True) if state != "active"]
            failed = execute(container, "systemctl", "--failed", "--plain", "--no-legend")[1]
            if unfit(failed):
                break
            if not missing:
                return time.monotonic() - begun
        time.sleep(0.2)
    log = container.logs(tail=5).decode(errors="replace").strip()
    seen = f"failed: {', '.join(unfit(failed)) or 'none'}; not active: {', '.join(missing) or 'none'}"
    raise Problem(
        found=f"{container.name} is {container.status}; {seen}; its log ends: {log or 'empty'}",
        needed="the node's base units active within a minute, and none failed",
        do=f"docker logs {container.name}; then python -m rehearsal down, and up again",
        code="node-boot",
    )


def write_known_hosts(plan: Plan, containers: dict[str, Container]) -> None:
    """The nodes' host keys, read from the nodes themselves rather than from the network."""
    lines = []
    for node in NODES:
        key = read(containers[node.name], "cat", "/etc/ssh/ssh_host_ed25519_key.pub").split()
        lines.append(f"{node.name},{plan.address(node)} {key[0]} {key[1]}\n")
    plan.known_hosts.write_text("".join(lines))


def ensure_base_image(container: Container, archive: Path) -> str:
    """The engine image's base in the head's own engine. Returns a word on where it came from."""
    key = archive.stem.rpartition("-")[2]
    known = read(
        container, "docker", "image", "ls", "--filter", f"label={BASE_NAME_KEY}={key}", "-q", BASE_IMAGE
    )
    if known.strip():
        return "there"
    changes = (
        f"ENV PATH=/usr/local/cuda/bin:{_SYSTEM_PATH}",
        "ENV CUDA_VERSION=13.3.0 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video",
        "WORKDIR /workspace",
        'ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]',
        f"LABEL {BASE_NAME_KEY}={key}",
    )
    options = [word for change in changes for word in ("--change", change)]
    must(container, "docker", "import", *options, f"{CACHE_IN_NODE}/{archive.name}", BASE_IMAGE)
    return f"imported into {container.name}"


def ssh_argv(plan: Plan, node: Node, words: list[str]) -> list[str]:
    """The ssh command line to a node, as its login user."""
    options = {
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "yes",
        "PasswordAuthentication": "no",
        "UserKnownHostsFile": str(plan.known_hosts),
        "LogLevel": "ERROR",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-F", "none", "-i", str(plan.key), *flags, f"{node.user}@{plan.address(node)}", *words]


def stream(client: docker.DockerClient, container: Container, words: list[str]) -> int:
    """Run a command line in a node as root, output passed on as it comes. Returns its exit code."""
    api = client.api
    argv = words if len(words) > 1 else ["sh", "-c", *words]
    made = api.exec_create(container.id, argv)
    for out, err in api.exec_start(made["Id"], stream=True, demux=True):
        sys.stdout.buffer.write(out or b"")
        sys.stdout.buffer.flush()
        sys.stderr.buffer.write(err or b"")
        sys.stderr.buffer.flush()
    return int(api.exec_inspect(made["Id"])["ExitCode"])
