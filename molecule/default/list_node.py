"""What a dry run must leave alone: files with owner, mode and content, users, units, addresses, containers."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

FOLDERS = (
    "/etc",
    "/opt",
    "/usr/local",
    "/var/lib/sparkpair",
    "/home",
    "/root",
    "/run/sparkpair",
    "/var/lib/docker/image",
)
# Written by the login that runs this very list, or by the passing of time.
PASSING = (".ansible", ".bash_history", ".cache", "/etc/mtab", ".viminfo")
COMMANDS = (
    ("ip", "-brief", "address"),
    ("ip", "-brief", "link"),
    ("ip", "route"),
    ("systemctl", "list-units", "--all", "--plain", "--no-legend", "sparkpair*"),
    ("docker", "image", "ls", "--all", "--quiet"),
    ("docker", "ps", "--all", "--quiet"),
)


def describe(path: Path) -> str:
    found = path.lstat()
    content = ""
    if path.is_symlink():
        content = str(path.readlink())
    elif path.is_file():
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path} {found.st_uid}:{found.st_gid} {found.st_mode:o} {content}"


for folder in FOLDERS:
    for directory, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if name not in PASSING)
        for name in sorted([*names, *files]):
            path = Path(directory) / name
            if not any(word in str(path) for word in PASSING):
                print(describe(path))
for command in COMMANDS:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        print(" ".join(command[:2]), line.strip())
