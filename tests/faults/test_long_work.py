"""Long work outlives the play (field report 73), and only what was hurt is done again (field report 37)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pair import PROJECT, play, rehearsal, run

from rehearsal.hub import READER_TOKEN

SHARD = "/var/lib/sparkpair/weights/dsv41-1017/model-00007-of-00039.safetensors"
UNIT = "sparkpair-job-fetch-checkpoint.service"


@pytest.fixture(autouse=True)
def a_hub_that_works_again() -> Iterator[None]:
    yield
    rehearsal("fault", "hub", "ok")


def test_a_play_that_is_interrupted_leaves_the_fetch_running_and_the_next_one_attaches(head: Any) -> None:
    run(head, f"rm {SHARD}")
    rehearsal("fault", "hub", "slow", "--path", "model-00007*", "--rate", "40000")
    cut = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("--inventory", "inventory/rehearsal.yml", "site.yml", "--tags", "weights"),
        ],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")},
    )
    deadline = time.monotonic() + 90
    while head.run(f"systemctl is-active {UNIT}").stdout.strip() != "active":
        assert time.monotonic() < deadline, "the fetch never began"
        time.sleep(0.5)
    time.sleep(3)  # a person looks at it for a moment
    os.killpg(cut.pid, signal.SIGINT)
    said, _ = cut.communicate(timeout=60)
    assert "Ctrl-C ends this play, not the work" in said
    assert "re-attach: run the same playbook again" in said
    assert run(head, f"systemctl is-active {UNIT}") == "active"
    # Whoever comes next, with another token too, is after the same files.
    done = play("site.yml", "--tags", "weights", HF_TOKEN=READER_TOKEN)
    assert done.code == 0, done.output
    assert "was running already: attached" in done.output
    run(head, f"test -f {SHARD}")


def test_a_flipped_byte_is_named_and_only_that_file_is_fetched_again(head: Any) -> None:
    """Field report 37: twice wrong stops, nothing is served from it."""
    run(head, f"rm {SHARD}")
    rehearsal("fault", "hub", "flip", "--path", "model-00007*")
    done = play("site.yml", "--tags", "weights")
    assert done.code != 0
    assert "model-00007-of-00039.safetensors" in done.output and "do:" in done.output
    assert head.run(f"test -e {SHARD}").rc != 0
    rehearsal("fault", "hub", "ok")
    again = play("site.yml", "--tags", "weights")
    assert again.code == 0, again.output
    run(head, f"test -f {SHARD}")


def test_a_shard_that_changed_on_disk_is_fetched_again_and_no_other(head: Any) -> None:
    digest = run(head, f"sha256sum {SHARD}")
    run(head, f"printf x | dd of={SHARD} bs=1 seek=100000 conv=notrunc status=none")
    done = play("site.yml", "--tags", "weights")
    assert done.code == 0, done.output
    assert run(head, f"sha256sum {SHARD}") == digest
