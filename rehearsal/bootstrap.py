"""A Debian root file system as a tar file, by mmdebstrap."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from . import shell

# Debian 12: its systemd runs on both versions of control groups, so one node image fits all hosts.
SUITE = "bookworm"
_RECIPE = "1"  # raise it when what follows changes the result

_INSTALLING = threading.Lock()


def root_key(packages: Sequence[str], remove: Sequence[str]) -> str:
    """The content key of a bootstrap: suite, architecture, packages and recipe; 12 hex digits."""
    said = "\0".join((_RECIPE, SUITE, os.uname().machine, *sorted(packages), "-", *sorted(remove)))
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def make(target: Path, packages: Sequence[str], remove: Sequence[str]) -> None:
    """Write the tar `target` in one step."""
    with _INSTALLING:  # two root file systems are made side by side
        shell.ensure_programs("mmdebstrap")
    with tempfile.TemporaryDirectory(prefix=".bootstrap-", dir=target.parent) as folder:
        partial = Path(folder) / "root.tar"
        shell.run(*argv(partial, packages, remove), env={"SOURCE_DATE_EPOCH": "1767225600", "TMPDIR": folder})
        partial.replace(target)


def argv(target: Path, packages: Sequence[str], remove: Sequence[str]) -> list[str]:
    """The bootstrap's command line. Recommended packages stay out; documentation does too."""
    hooks = [f'--customize-hook=rm -f "$1"/{pattern}' for pattern in remove]
    return [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--include={','.join(packages)}",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        *hooks,
        SUITE,
        str(target),
    ]
