"""The usual case: the head is the controller. A clone of the project on it runs site.yml from there."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import nodes, shell
from .plan import Node, Plan

if TYPE_CHECKING:
    from docker.models.containers import Container

# What a person would type on the head; its login user needs no more than that.
_SETUP = "make setup"
_PLAY = ".venv/bin/ansible-playbook --inventory inventory/rehearsal.yml site.yml"
# Stronger than the inventory file's own values: the head reaches itself without an address.
_HOST_VALUES = "---\nansible_connection: local\n"


def project_files(root: Path) -> list[str]:
    """The project as git knows it, uncommitted files too, ignored ones not."""
    listed = shell.run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=root)
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


def world_for(world: dict[str, Any], home: str) -> dict[str, Any]:
    """The world file with paths as the clone on the head has them."""
    state = f"{home}/.rehearsal"
    return {**world, "ssh_key": f"{state}/ssh/id_ed25519", "known_hosts": f"{state}/ssh/known_hosts"}


def archive(plan: Plan, folder: str) -> bytes:
    """A tar of the clone: the project, the world file, the way to the worker, and the locks of this run."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in project_files(plan.root):
            tar.add(plan.root / name, f"sparkpair/{name}", recursive=False)
        for path in (plan.key, plan.known_hosts, *sorted((plan.state / "locks").glob("*.json"))):
            tar.add(path, f"sparkpair/{path.relative_to(plan.root)}")
        world = world_for(json.loads(plan.world_file.read_text()), folder)
        _add(tar, "sparkpair/.rehearsal/world.json", json.dumps(world))
        _add(tar, "sparkpair/inventory/host_vars/spark-a.yml", _HOST_VALUES)
    return packed.getvalue()


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    tar.addfile(entry, io.BytesIO(text.encode()))


def run(plan: Plan, head: Node, container: Container, *, words: str = "") -> int:
    """Bring a clone to the head and run site.yml there as its login user. Returns the play's exit code."""
    home = f"/home/{head.user}"
    folder = f"{home}/sparkpair"
    container.exec_run(["rm", "-rf", folder])
    container.put_archive(home, archive(plan, folder))
    container.exec_run(["chown", "-R", f"{head.user}:{head.user}", folder])
    site = json.loads(plan.world_file.read_text())["site_environment"]
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(site.items()))
    script = f"cd {folder} && export {exports} LANG=C.UTF-8 && {_SETUP} && {_PLAY} {words}"
    return subprocess.run(nodes.ssh_argv(plan, head, [script]), check=False).returncode
