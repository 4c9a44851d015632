"""The two root file systems: the nodes' and the engine image's base. Made once, kept by content."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import bootstrap
from .bootstrap import Recipe
from .docker_engine import Engine, connect
from .plan import Plan

if TYPE_CHECKING:
    import docker

HERE = Path(__file__).parent
NODE_REPOSITORY = "sparkpair-rehearsal-node"
NODE_LIB = "usr/local/lib/rehearsal"
BASE_NAME_KEY = "sparkpair.rehearsal.base"

NODE_PACKAGES = (
    "adduser", "apt", "ca-certificates", "curl", "dbus", "docker.io", "ethtool", "git", "hostname", "iproute2",
    "iptables", "iputils-ping", "kmod", "less", "libpam-systemd", "lsof", "make", "netbase", "netplan.io", "nftables",
    "openssh-client", "openssh-server", "pciutils", "procps", "psmisc", "python3", "python3-apt", "python3-venv",
    "rsync", "sudo", "systemd", "systemd-sysv", "tzdata", "udev",
)  # fmt: skip
BASE_PACKAGES = ("ca-certificates", "iproute2", "python3", "python3-pil")

_BOOT = (
    f'CMD ["/usr/bin/env", "PYTHONPATH=/{NODE_LIB}", "/usr/bin/python3", "-B", "-m", "rehearsal.node.boot"]'
)

# What must differ between two nodes, or is made at a boot, and so can't come from one image.
_NODE_REMOVE = (
    "etc/ssh/ssh_host_*",
    "etc/machine-id",
    "var/lib/dbus/machine-id",
    "etc/resolv.conf",
    "etc/hostname",
)


@dataclass(frozen=True)
class Extra:
    """One file, folder or link laid over a bootstrapped root file system."""

    path: str  # without the leading slash
    data: bytes = b""
    mode: int = 0o644
    link: str = ""


def node_extras() -> list[Extra]:
    """Our files in a node: boot, the fact tree, the NVIDIA and RDMA stand-ins, units."""
    node = HERE / "node"
    library = [HERE / "__init__.py", HERE / "ports.py", HERE / "tree.py", *sorted(node.glob("*.py"))]
    extras = [Extra(f"{NODE_LIB}/rehearsal/{path.relative_to(HERE)}", path.read_bytes()) for path in library]
    for path in sorted((node / "bin").iterdir()):
        extras.append(Extra(f"usr/local/bin/{path.name}", path.read_bytes(), 0o755))
    for path in sorted((node / "sbin").iterdir()):
        extras.append(Extra(f"usr/local/sbin/{path.name}", path.read_bytes(), 0o755))
    for path in sorted((node / "etc").rglob("*")):
        if path.is_file():
            extras.append(Extra(f"etc/{path.relative_to(node / 'etc')}", path.read_bytes()))
    wants = "etc/systemd/system/multi-user.target.wants"
    networkd = "lib/systemd/system/systemd-networkd.service"
    return [
        *extras,
        Extra(f"{wants}/spark-tree.service", link="/etc/systemd/system/spark-tree.service"),
        Extra(f"{wants}/systemd-networkd.service", link=f"/{networkd}"),
        # Nothing is configured before the first netplan: waiting for it would hold each boot for 2 minutes.
        Extra("etc/systemd/system/systemd-networkd-wait-online.service", link="/dev/null"),
    ]


def base_extras() -> list[Extra]:
    """Our files in the base image: the stand-in compiler, and the start-up script that the real one has."""
    base = HERE / "base"
    return [
        Extra("usr/local/cuda/bin/nvcc", (base / "nvcc").read_bytes(), 0o755),
        Extra("opt/nvidia/nvidia_entrypoint.sh", (base / "nvidia_entrypoint.sh").read_bytes(), 0o755),
        Extra("etc/rehearsal-base", b"stand-in for the base image of the engine\n"),
    ]


def key_of(root_key: str, extras: Iterable[Extra]) -> str:
    """The content key of a bootstrapped root with files laid over it: 12 hex digits."""
    digest = hashlib.sha256(root_key.encode())
    for extra in sorted(extras, key=lambda extra: extra.path):
        digest.update(f"\0{extra.path}\0{extra.mode:o}\0{extra.link}\0".encode())
        digest.update(hashlib.sha256(extra.data).digest())
    return digest.hexdigest()[:12]


def cache_dir(plan: Plan) -> Path:
    """Where root file systems are kept: SPARKPAIR_CACHE, ~/.cache/sparkpair if it exists, else the clone's.

    Shared between clones on purpose: an entry's name is the hash of all that went into it, it takes its
    name only when it is whole, and nothing ever changes it afterwards.
    """
    named = os.environ.get("SPARKPAIR_CACHE")
    shared = Path(named) if named else Path.home() / ".cache" / "sparkpair"
    if named or shared.is_dir():
        shared.mkdir(parents=True, exist_ok=True)
        return shared
    own = plan.state / "cache"
    own.mkdir(parents=True, exist_ok=True)
    return own


NODE = Recipe("node", NODE_PACKAGES, _NODE_REMOVE)
BASE = Recipe("base", BASE_PACKAGES)


def bootstrapped(plan: Plan, recipe: Recipe, client: docker.DockerClient) -> Path:
    """The tar file of a bare root file system, from the cache or made now."""
    root = cache_dir(plan) / f"debian-{recipe.root_key}.tar"
    if root.exists():
        root.touch()
    else:
        bootstrap.make(root, recipe, client, plan.labels)
    return root


@contextlib.contextmanager
def with_extras(root: Path, extras: Sequence[Extra], folder: Path) -> Iterator[Path]:
    """A copy of a root file system with our files in it, in `folder`; removed unless it was moved away."""
    handle, name = tempfile.mkstemp(prefix=".rootfs-", suffix=".partial", dir=folder)
    os.close(handle)
    copy = Path(name)
    try:
        shutil.copyfile(root, copy)
        append(copy, extras)
        copy.chmod(0o644)  # a cache may serve several users
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def drop_superseded(cache: Path, name: str, kept: Path) -> None:
    """Remove a recipe's older results."""
    for old in cache.glob(f"{name}-*.tar"):
        if old != kept and _superseded(old):
            old.unlink(missing_ok=True)


def _superseded(entry: Path) -> bool:
    """True for an entry that no `up` used for a day: another clone may still be at an older one."""
    return time.time() - entry.stat().st_mtime > 86400


def append(archive: Path, extras: Iterable[Extra]) -> None:
    """Add files to an uncompressed tar, owned by root, with no time of its own: same content, same bytes."""
    with tarfile.open(archive, "a") as tar:
        for extra in sorted(extras, key=lambda extra: extra.path):
            entry = tarfile.TarInfo(extra.path)
            entry.mode = extra.mode
            if extra.link:
                entry.type, entry.linkname = tarfile.SYMTYPE, extra.link
            else:
                entry.size = len(extra.data)
            tar.addfile(entry, io.BytesIO(extra.data))


def node_image(plan: Plan, client: docker.DockerClient) -> tuple[str, str]:
    """The nodes' image in this engine. Returns its name and a word on where it came from."""
    import docker.errors

    extras = node_extras()
    version = key_of(NODE.root_key, extras)
    tag = f"{NODE_REPOSITORY}:{version}"
    try:
        client.images.get(tag)
        return tag, "there"
    except docker.errors.ImageNotFound:
        pass
    root = bootstrapped(plan, NODE, client)
    with with_extras(root, extras, plan.state) as archive, archive.open("rb") as handle:
        client.api.import_image_from_stream(
            iter(lambda: handle.read(1 << 20), b""),  # a generator: a file's own length spoils the chunking
            repository=NODE_REPOSITORY,
            tag=version,
            changes=[_BOOT, f"LABEL sparkpair.rehearsal.image={version}"],
        )
    return tag, f"made from {root.name}"


def base_archive(plan: Plan, engine: Engine) -> Path:
    """The engine image's base as a tar file, its content key in the name, in the cache."""
    cache, extras = cache_dir(plan), base_extras()
    whole = cache / f"{BASE.name}-{key_of(BASE.root_key, extras)}.tar"
    if not whole.exists():
        client = connect(engine)  # its own: a client is not for two threads
        try:
            root = bootstrapped(plan, BASE, client)
        finally:
            client.close()
        with with_extras(root, extras, cache) as archive:
            archive.replace(whole)
    whole.touch()
    drop_superseded(cache, BASE.name, whole)
    return whole
