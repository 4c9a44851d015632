"""One rank's unit on this node: started with its reasons on failure, stopped with a proof."""

from __future__ import annotations

import subprocess

from . import systemd
from .dockercli import Docker
from .gate import clear_container
from .problem import Problem
from .ranks import name_of


def running(rank: int) -> bool:
    """Whether the unit runs; its container is attached to it, so this is the container's state too."""
    return systemd.state(f"{name_of(rank)}.service").runs


def start(rank: int) -> None:
    """Start the unit. Raises Problem with the unit's last lines (the gate's words among them)."""
    unit = f"{name_of(rank)}.service"
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "reset-failed", unit], check=False, capture_output=True)
    done = subprocess.run(["systemctl", "start", unit], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = "\n".join(systemd.last_lines(unit)) or done.stderr.strip()
        raise Problem(
            found=f"{unit} did not start. Its last lines:\n{lines}",
            needed="a rank that starts",
            do=f"correct what the last lines say (journalctl -u {unit}), then run the playbook again",
            code="rank-not-started",
        )


def stop(rank: int) -> None:
    """Stop the unit and prove that it and its container are gone."""
    subprocess.run(["systemctl", "stop", f"{name_of(rank)}.service"], check=False, capture_output=True)
    require_gone(rank)


def require_gone(rank: int) -> None:
    """Remove a container of ours that is left. Raises Problem if the unit runs, or a stranger has the name."""
    name = name_of(rank)
    if running(rank):
        raise Problem(
            found=f"{name}.service still runs after a stop",
            needed="no unit of the pair active",
            do=f"sudo systemctl kill --signal=KILL {name}.service, then run stop.yml again",
            code="rank-still-runs",
        )
    clear_container(rank, Docker())
