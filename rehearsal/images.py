"""The two root file systems: the nodes' and the engine image's base. Made once, kept by content."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import bootstrap
from .plan import Plan

if TYPE_CHECKING:
    import docker

HERE = Path(__file__).parent
NODE_LIB = "usr/local/lib/rehearsal"
BASE_NAME_KEY = "sparkpair.rehearsal.base"

NODE_PACKAGES = (
    "adduser", "apt", "ca-certificates", "curl", "dbus", "docker.io", "ethtool", "git", "hostname", "iproute2",
    "iptables", "iputils-ping", "kmod", "less", "libpam-systemd", "lsof", "netbase", "netplan.io", "nftables",
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
        # A coldplug in a container would raise events for the devices of the whole machine.
        Extra("etc/systemd/system/systemd-udev-trigger.service", link="/dev/null"),
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


def rootfs(
    cache: Path, name: str, packages: Sequence[str], remove: Sequence[str], extras: Sequence[Extra]
) -> Path:
    """The tar file of a root file system with our files in it, from the cache or made now."""
    root_key = bootstrap.root_key(packages, remove)
    whole = cache / f"{name}-{key_of(root_key, extras)}.tar"
    if whole.exists():
        return whole
    root = cache / f"debian-{root_key}.tar"
    if not root.exists():
        bootstrap.make(root, packages, remove)
    handle, partial = tempfile.mkstemp(prefix=f".{name}-", suffix=".partial", dir=cache)
    os.close(handle)
    try:
        shutil.copyfile(root, partial)
        append(Path(partial), extras)
        Path(partial).replace(whole)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    for old in cache.glob(f"{name}-*.tar"):
        if old != whole and old.stat().st_nlink == 1 and _superseded(old):
            old.unlink()
    return whole


def _superseded(entry: Path) -> bool:
    """True for an entry that nobody made or used for a day: another clone may still be at an older one."""
    import time

    return time.time() - max(entry.stat().st_atime, entry.stat().st_mtime) > 86400


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
    tag = f"sparkpair-rehearsal-node:{key_of(bootstrap.root_key(NODE_PACKAGES, _NODE_REMOVE), extras)}"
    try:
        client.images.get(tag)
        return tag, "there"
    except docker.errors.ImageNotFound:
        pass
    archive = rootfs(cache_dir(plan), "node", NODE_PACKAGES, _NODE_REMOVE, extras)
    repository, _, version = tag.partition(":")
    with archive.open("rb") as handle:
        client.api.import_image_from_stream(
            iter(
                lambda: handle.read(1 << 20), b""
            ),  # a generator: a file's own length would spoil the chunking
            repository=repository,
            tag=version,
            changes=[_BOOT, f"LABEL sparkpair.rehearsal.image={version}"],
        )
    return tag, f"from {archive}"


def base_archive(plan: Plan) -> Path:
    """The engine image's base as a tar file, and its content key in the name."""
    return rootfs(cache_dir(plan), "base", BASE_PACKAGES, (), base_extras())
