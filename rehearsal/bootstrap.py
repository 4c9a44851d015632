"""A Debian root file system as a tar file: by mmdebstrap for root, else in a container of the engine."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
# Mounts of the engine in each container; a root file system written out from one holds them empty.
_MOUNTED = ("etc/hostname", "etc/hosts", "etc/resolv.conf")
_INSTALLING = threading.Lock()


def root_key(packages: Sequence[str], remove: Sequence[str]) -> str:
    """The content key of a bootstrap: suite, architecture, packages and recipe; 12 hex digits."""
    said = "\0".join((_RECIPE, SUITE, os.uname().machine, *sorted(packages), "-", *sorted(remove)))
    return hashlib.sha256(said.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Recipe:
    """How one root file system is made."""

    name: str
    packages: Sequence[str]
    remove: Sequence[str] = ()

    @property
    def root_key(self) -> str:
        return root_key(self.packages, self.remove)


def make(target: Path, recipe: Recipe, client: docker.DockerClient, labels: Mapping[str, str]) -> None:
    """Write the tar `target` in one step. `labels` mark a container that is needed for it."""
    with tempfile.TemporaryDirectory(prefix=".bootstrap-", dir=target.parent) as folder:
        partial = Path(folder) / "root.tar"
        if os.geteuid() == 0 and shell.may_install():
            with _INSTALLING:  # two root file systems are made side by side
                shell.ensure_programs("mmdebstrap", shell.DEBIAN_KEYRING)
            env = {"SOURCE_DATE_EPOCH": "1767225600", "TMPDIR": folder}
            shell.run(*mmdebstrap_words(partial, recipe.packages, recipe.remove), env=env)
        else:
            _in_container(partial, recipe, client, labels)
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
            *(f"rm -f /{pattern}" for pattern in remove if pattern not in _MOUNTED),
        )
    )


def _in_container(
    target: Path, recipe: Recipe, client: docker.DockerClient, labels: Mapping[str, str]
) -> None:
    """Install into a container of Debian's image, and write its file system out."""
    script = install_script(recipe.packages, recipe.remove)
    _pull(client)
    container = client.containers.create(STARTING_IMAGE, ["sh", "-c", script], labels=dict(labels))
    try:
        container.start()
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


def _pull(client: docker.DockerClient) -> None:
    """Have Debian's own image in the engine."""
    import docker.errors

    try:
        client.images.get(STARTING_IMAGE)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull("debian", f"{SUITE}-slim")
        except docker.errors.APIError as error:
            raise Problem(
                found=f"this user is not root, and {STARTING_IMAGE} can't be pulled: {error.explanation}",
                needed="either to make the nodes' root file system: mmdebstrap as root, or that image",
                do=f"docker pull {STARTING_IMAGE}, or run the same command once as root",
                code="no-root-filesystem",
            ) from None
