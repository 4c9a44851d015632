"""What systemd says of a unit, and its last words."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitState:
    """`systemctl show` in short: active is "active", "failed", "inactive", ..."""

    active: str
    result: str
    status: str

    @property
    def runs(self) -> bool:
        return self.active in {"active", "activating", "reloading"}


def state(unit: str) -> UnitState:
    """A unit's state; an unknown unit is "inactive"."""
    shown = subprocess.run(
        ["systemctl", "show", "--property=ActiveState,Result,ExecMainStatus", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    values = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
    return UnitState(
        values.get("ActiveState", "inactive"), values.get("Result", ""), values.get("ExecMainStatus", "")
    )


def last_lines(unit: str, count: int = 25) -> list[str]:
    """The end of a unit's journal, messages only."""
    shown = subprocess.run(
        ["journalctl", "--no-pager", "--output=cat", f"--lines={count}", "--unit", unit],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    return shown.stdout.splitlines()


def journal_of(run: str, most: int) -> list[str]:
    """The journal of one run of a unit, by its invocation id, with times; at most its last `most` lines."""
    said = subprocess.run(
        [
            "journalctl",
            "--no-pager",
            "--output=short-iso",
            f"--lines={most}",
            f"_SYSTEMD_INVOCATION_ID={run}",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    return [line for line in said.stdout.splitlines() if not line.startswith("-- ")]
