"""A disk that is too small, or fills up (field report 42), on a real filesystem of that size."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pair import PROJECT, Play, hub_call, play, rehearsal, run

WEIGHTS = "/var/lib/sparkpair/weights/dsv41-1017"
UNIT = "sparkpair-job-fetch-checkpoint.service"
FLOOR = 10_000_000
# Of the play's other checks none is about this disk; nothing else is short in the rehearsal.
OPTIONS = ("--tags", "weights", "-e", f"weights_floor_bytes={FLOOR}")


@pytest.fixture
def small_disk(head: Any) -> Iterator[Any]:
    """Mounts an empty filesystem of so many MB where the checkpoint lies; afterwards that is back, untouched."""

    def mount(megabytes: int) -> None:
        run(head, f"mount -t tmpfs -o size={megabytes}m,mode=755 weights {WEIGHTS}")
        run(head, f"chown sparkpair: {WEIGHTS}")

    yield mount
    rehearsal("fault", "hub", "ok")
    run(head, f"systemctl stop {UNIT} || true; umount {WEIGHTS}")
    after = play("site.yml", "--tags", "weights")
    assert after.code == 0, after.output
    assert after.changed == 0


def used(head: Any) -> int:
    return int(run(head, f"df --output=used -B1 {WEIGHTS}").splitlines()[-1])


def test_a_disk_too_small_is_refused_before_the_first_byte(
    head: Any, world: dict[str, Any], small_disk: Any
) -> None:
    small_disk(20)
    since = hub_call(world, "log")["next"]
    done = play("site.yml", *OPTIONS)
    assert done.code != 0
    told = " ".join(done.output.split())
    assert f"free on {WEIGHTS}" in told
    assert "left free 10.0 MB" in told
    assert not [
        entry for entry in hub_call(world, f"log?since={since}")["requests"] if "safetensors" in entry["path"]
    ]
    assert used(head) < 100_000


def test_a_disk_that_fills_up_stops_the_fetch_which_later_goes_on(head: Any, small_disk: Any) -> None:
    small_disk(60)
    rehearsal("fault", "hub", "slow", "--path", "model-00007*", "--rate", "100000")
    with subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("ansible-playbook")), "--inventory"),
            *("inventory/rehearsal.yml", "site.yml", *OPTIONS),
        ],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        deadline = time.monotonic() + 90
        while used(head) < 20_000_000:
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.3)
        run(head, f"runuser -u sparkpair -- sh -c 'head -c 30000000 /dev/zero > {WEIGHTS}/filler'")
        said, _ = running.communicate(timeout=90)
    done = Play(running.returncode, said)
    assert done.code != 0
    told = " ".join(done.output.split())
    assert f"left on the disk of {WEIGHTS}" in told
    assert "needed: 10.0 MB free while fetching; what is there is kept" in told
    kept = used(head) - 30_000_000
    assert kept > 20_000_000
    rehearsal("fault", "hub", "ok")
    run(head, f"rm {WEIGHTS}/filler")
    again = play("site.yml", *OPTIONS)
    assert again.code == 0, again.output
    assert again.changed == 1
