"""A Debian root file system as a tar file: by mmdebstrap for root, else in a container of the engine."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparkpair.problem import Problem

from . import shell

if TYPE_CHECKING:
    import docker

# Debian 12: its systemd runs on both versions of control groups, so one node image fits all hosts.
SUITE = "bookworm"
STARTING_IMAGE = f"debian:{SUITE}-slim"
_RECIPE = "1"  # raise it when what follows changes the result
_PATHS = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
)
_INSTALLING = threading.Lock()


def root_key(packages: Sequence[str], remove: Sequence[str]) -> str:
    """The content key of a bootstrap: suite, architecture, packages and recipe; 12 hex digits."""
    said = "\0".join((_RECIPE, SUITE, os.uname().machine, *sorted(packages), "-", *sorted(remove)))
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def make(target: Path, packages: Sequence[str], remove: Sequence[str], client: docker.DockerClient) -> None:
    """Write the tar `target` in one step."""
    with tempfile.TemporaryDirectory(prefix=".bootstrap-", dir=target.parent) as folder:
        partial = Path(folder) / "root.tar"
        if os.geteuid() == 0 and shell.may_install():
            with _INSTALLING:  # two root file systems are made side by side
                shell.ensure_programs("mmdebstrap")
            env = {"SOURCE_DATE_EPOCH": "1767225600", "TMPDIR": folder}
            shell.run(*mmdebstrap_words(partial, packages, remove), env=env)
        else:
            _in_container(partial, packages, remove, client)
        partial.replace(target)


def mmdebstrap_words(target: Path, packages: Sequence[str], remove: Sequence[str]) -> list[str]:
    """mmdebstrap's command line. Recommended packages stay out, and documentation does."""
    return [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--include={','.join(packages)}",
        *(f"--dpkgopt={path}" for path in _PATHS),
        *(f'--customize-hook=rm -f "$1"/{pattern}' for pattern in remove),
        SUITE,
        str(target),
    ]


def install_script(packages: Sequence[str], remove: Sequence[str]) -> str:
    """The same result from within a container that has apt."""
    options = "\n".join(_PATHS)
    return "\n".join(
        (
            "set -e",
            "export DEBIAN_FRONTEND=noninteractive",
            f"printf '%s\\n' '{options}' >/etc/dpkg/dpkg.cfg.d/rehearsal",
            # As in Debian's own images: a package that is installed must start nothing.
            "printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d",
            "apt-get update -q",
            f"apt-get install -y -q --no-install-recommends {' '.join(packages)}",
            "rm -rf /usr/sbin/policy-rc.d /var/lib/apt/lists/* /var/cache/apt/*.bin",
            "apt-get clean",
            *(f"rm -f /{pattern}" for pattern in remove if not pattern.startswith("etc/resolv.conf")),
        )
    )


def _in_container(
    target: Path, packages: Sequence[str], remove: Sequence[str], client: docker.DockerClient
) -> None:
    """Install into a container of Debian's image, and write its file system out."""
    import docker.errors

    try:
        container = client.containers.run(
            STARTING_IMAGE, ["sh", "-c", install_script(packages, remove)], detach=True
        )
    except docker.errors.ImageNotFound:
        raise Problem(
            found=f"this user is not root, and the image {STARTING_IMAGE} can't be pulled",
            needed="either to make the nodes' root file system: mmdebstrap as root, or that image",
            do=f"docker pull {STARTING_IMAGE}, or run the same command once as root",
            code="no-root-filesystem",
        ) from None
    try:
        if container.wait(timeout=900)["StatusCode"]:
            tail = " / ".join(container.logs(tail=6).decode(errors="replace").splitlines())
            raise Problem(
                found=f"installing the nodes' packages failed: {tail}",
                needed="Debian's packages in reach of a container",
                do="mend what the message names (proxy, name server), then run the same command again",
                code="bootstrap",
            )
        with target.open("wb") as handle:
            chunks: Iterator[bytes] = container.export()  # type: ignore[assignment] # typed as text
            handle.writelines(chunks)
    finally:
        container.remove(force=True)
