"""The node's first program: set up what a Spark's firmware and installer would have, then become systemd.

It reads /etc/rehearsal/node.json: name, user, password, authorized_key, gateway, route_out.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from rehearsal.ports import MANAGEMENT

INIT = "/lib/systemd/systemd"
UVERBS = 4


def main() -> None:
    given = json.loads(Path("/etc/rehearsal/node.json").read_text())
    make_writable()
    share_mounts()
    make_rdma_devices()
    name_management(given["gateway"], given["route_out"])
    make_host_keys()
    make_user(given)
    os.execv(INIT, [INIT])  # noqa: S606 - no shell wanted: this process becomes PID 1's systemd


def make_writable() -> None:
    """Undo the engine's read-only /sys: netplan and an inner engine write there. The cgroup tree is ours alone."""
    call("mount", "-o", "remount,rw", "/sys")
    top = Path("/sys/fs/cgroup")
    call("mount", "-o", "remount,rw", str(top))
    for hierarchy in top.iterdir():
        if hierarchy.is_dir() and hierarchy.is_mount():
            call("mount", "-o", "remount,rw,bind", str(hierarchy))


def share_mounts() -> None:
    """As systemd does on a machine, not in a container: else a unit's credentials, mounted aside, never appear."""
    call("mount", "--make-rshared", "/")


def make_rdma_devices() -> None:
    """Four uverbs devices that open and say nothing: `--device /dev/infiniband` finds what it asks for."""
    folder = Path("/dev/infiniband")
    folder.mkdir(exist_ok=True)
    for number in range(UVERBS):
        with contextlib.suppress(FileExistsError):
            os.mknod(folder / f"uverbs{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def name_management(gateway: str, route_out: bool) -> None:
    """Give the engine's eth0 a Spark's name; without a way out the node keeps no default route."""
    if Path("/sys/class/net/eth0").exists():
        call("ip", "link", "set", "eth0", "down")
        call("ip", "link", "set", "eth0", "name", MANAGEMENT)
        call("ip", "link", "set", MANAGEMENT, "up")
    if route_out:
        call("ip", "route", "replace", "default", "via", gateway)
        return
    subprocess.run(["ip", "route", "del", "default"], check=False, capture_output=True)
    # The engine's resolver can't reach its servers from here and lets each question wait for 10 s.
    Path("/etc/resolv.conf").write_text("# no way out, so no name server: questions fail at once\n")


def make_host_keys() -> None:
    """Keys of its own for each node: an image's would be the same in both."""
    call("ssh-keygen", "-A")


def make_user(given: dict[str, Any]) -> None:
    """A login user with a key, and sudo by password."""
    user = given["user"]
    home = Path("/home") / user
    if not home.exists():
        call("useradd", "--create-home", "--shell", "/bin/bash", "--groups", "sudo", user)
        subprocess.run(["chpasswd"], input=f"{user}:{given['password']}\n", text=True, check=True)
    folder = home / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    keys = folder / "authorized_keys"
    keys.write_text(given["authorized_key"])
    keys.chmod(0o600)
    call("chown", "-R", f"{user}:{user}", str(folder))


def call(*argv: str) -> None:
    subprocess.run(argv, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
