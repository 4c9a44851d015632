"""What the controller has to move and to hold while 3 GB of weights go through the whole play (field report 74).

Run from the project's folder, with no rehearsed pair up: .venv/bin/python benchmarks/controller.py
It brings up a pair of its own, whose hub serves a checkpoint of 3 GB, and runs site.yml from bare nodes to an
answer. Counted is every byte of the play's SSH connections, by a relay; held is the peak of its largest process.
Budgets: < 50 MB over SSH; 512 MiB, which a small machine has.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.relay import counted
from benchmarks.report import tell

PROJECT = Path(__file__).resolve().parents[1]
BYTES = 3_000_000_000
RANK_CACHE_ROOM = 2_000_000_000  # what one rank's cache of such a checkpoint takes, with a margin
SENT, HELD_MIB = 50_000_000, 512


def run(*words: str, **variables: str) -> str:
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
        env={**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), **variables},
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return done.stdout


def rehearsal(*words: str) -> None:
    run(sys.executable, "-m", "rehearsal", *words)


def rows() -> list[dict[str, Any]]:
    """All rows: {"name", "value", "budget", "ok"}. Leaves the pair up and serving."""
    rehearsal("up")
    run(sys.executable, "-m", "rehearsal.checkpoint", ".rehearsal/hub", "--scale", str(BYTES))
    play = str(Path(sys.executable).with_name("ansible-playbook"))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        relay = f"{sys.executable} {PROJECT}/benchmarks/relay.py %h %p {name}"
        run(
            *(play, "--inventory", "inventory/rehearsal.yml", "site.yml"),
            *("--extra-vars", f"rank_cache_room_bytes={RANK_CACHE_ROOM}"),
            ANSIBLE_SSH_EXTRA_ARGS=f"-o ProxyCommand='{relay}'",
            ANSIBLE_SSH_CONTROL_PATH_DIR=name,  # no connection that was there before goes uncounted
        )
        took, moved = time.monotonic() - begun, counted(Path(name))
    held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    rehearsal("ask")
    return [
        {
            "name": "controller: bytes over SSH while 3 GB go through the play",
            "value": moved,
            "budget": f"< {SENT}",
            "ok": 0 < moved < SENT,
        },
        {
            "name": "controller: peak memory of its largest process (MiB)",
            "value": round(held),
            "budget": f"<= {HELD_MIB}",
            "ok": held <= HELD_MIB,
        },
        {
            "name": "site.yml from bare nodes to an answer, 3 GB (s)",
            "value": round(took),
            "budget": None,
            "ok": True,
        },
    ]


def main() -> int:
    """Print the rows; exit code 1 when one is over its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    if (PROJECT / ".rehearsal/world.json").exists():
        raise SystemExit(
            "found: a rehearsed pair is up\nneeded: none, this makes its own\ndo: make rehearse-down"
        )
    found = rows()
    return tell(found, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
