"""site.yml on a converged rehearsed pair, against a playbook of 30 `stat` tasks on the same two nodes, in turns.

Run from the project's folder, with a pair that `make rehearse` brought up: .venv/bin/python benchmarks/converged.py
Budget: <= 3 x the 30 tasks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import tell

PROJECT = Path(__file__).resolve().parents[1]
INVENTORY = PROJECT / "inventory/rehearsal.yml"
BUDGET = 3.0
TASKS = 30
ROUNDS = 3


def stat_playbook(folder: Path) -> Path:
    """30 tasks, each a connection, a module and nothing else."""
    tasks = "".join(f"    - ansible.builtin.stat: {{path: /etc/hostname}} # {n}\n" for n in range(TASKS))
    path = folder / "stats.yml"
    path.write_text(f"---\n- hosts: pair\n  gather_facts: false\n  tasks:\n{tasks}")
    return path


def seconds(playbook: Path) -> float:
    """One run's wall time; it must succeed and change nothing."""
    program = Path(sys.executable).with_name("ansible-playbook")
    environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")}
    begun = time.monotonic()
    done = subprocess.run(
        [str(program), "--inventory", str(INVENTORY), str(playbook)],
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
        env=environment,
    )
    took = time.monotonic() - begun
    if done.returncode != 0 or any(f"changed={n}" in done.stdout for n in range(1, 10)):
        raise SystemExit(
            f"{playbook.name} is not converged; run `make rehearse` first:\n{done.stdout[-2000:]}"
        )
    return took


def row() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        stats = stat_playbook(Path(folder))
        pairs = [(seconds(PROJECT / "site.yml"), seconds(stats)) for _ in range(ROUNDS)]
    site, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = round(site / plain, 2)
    return {
        "name": "site.yml on a converged pair against 30 stat tasks",
        "value": ratio,
        "budget": f"<= {BUDGET}",
        "ok": ratio <= BUDGET,
        "seconds": {"site.yml": round(site, 1), f"{TASKS} tasks": round(plain, 1)},
    }


def main() -> int:
    """Print the row; exit code 1 when it is over its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    return tell([row()], as_json=arguments.json, details=("seconds",))


if __name__ == "__main__":
    raise SystemExit(main())
