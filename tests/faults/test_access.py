"""Access is asked for before anything large: six refusals, six messages, one request each (field report 40)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pair import PROJECT, hub_call, play, rehearsal, run

from rehearsal.hub import READER_TOKEN

SHARD = "/var/lib/sparkpair/weights/dsv41-1017/model-00007-of-00039.safetensors"
LOCKS = PROJECT / ".rehearsal/locks"
CHECKPOINT = "dsv41-1017-checkpoint.json"


@pytest.fixture(autouse=True)
def one_shard_is_missing(head: Any) -> Iterator[None]:
    run(head, f"rm {SHARD}")
    yield
    rehearsal("fault", "hub", "ok")
    done = play("site.yml", "--tags", "weights")
    assert done.code == 0, done.output
    run(head, f"test -f {SHARD}")


def refused(world: dict[str, Any], *words: str, requests: int = 1, **environment: str) -> str:
    """What the play said when it was refused; it asked the Hub that often, and moved nothing."""
    since = hub_call(world, "log")["next"]
    done = play("site.yml", "--tags", "weights", *words, **environment)
    assert done.code != 0
    assert "Traceback" not in done.output
    asked = hub_call(world, f"log?since={since}")["requests"]
    assert len(asked) == requests, asked
    assert all(part in done.output for part in ("found:", "needed:", "do:"))
    return " ".join(done.output.split())


def with_lock(folder: Path, **changes: str) -> str:
    """The option for a folder of locks where the checkpoint's says something else."""
    for path in LOCKS.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    lock = json.loads((folder / CHECKPOINT).read_text())
    (folder / CHECKPOINT).write_text(json.dumps({**lock, **changes}))
    return f"locks_dir={folder}"


def test_no_token_where_one_is_needed(world: dict[str, Any]) -> None:
    rehearsal("fault", "hub", "401")
    told = refused(world)
    assert "without a token the Hub does not show" in told
    assert "export HF_TOKEN=hf_" in told


def test_a_token_that_the_hub_does_not_know(world: dict[str, Any]) -> None:
    told = refused(world, HF_TOKEN="hf_" + "long" + "gone")
    assert "the Hub refuses the token" in told
    assert "/settings/tokens" in told


def test_terms_that_were_not_accepted_are_told_with_their_page(world: dict[str, Any]) -> None:
    rehearsal("fault", "hub", "403")
    told = refused(world, HF_TOKEN=READER_TOKEN)
    assert "has not been let into" in told
    assert f"open {world['hub_url']}/Mia-AiLab/DeepSeek-V4.1-Flash-1017" in told


def test_a_name_that_is_not_there(world: dict[str, Any], tmp_path: Path) -> None:
    told = refused(world, "-e", with_lock(tmp_path, repo="Mia-AiLab/DeepSeek-V5"), HF_TOKEN=READER_TOKEN)
    assert "there is no repository Mia-AiLab/DeepSeek-V5" in told


def test_a_revision_that_is_not_there(world: dict[str, Any], tmp_path: Path) -> None:
    told = refused(world, "-e", with_lock(tmp_path, revision="0123456789" * 4), HF_TOKEN=READER_TOKEN)
    assert f"has no revision {'0123456789' * 4}" in told


def test_a_hub_out_of_reach(world: dict[str, Any]) -> None:
    told = refused(world, "-e", f"hf_endpoint=http://{world['gateway']}:9", requests=0)
    assert f"http://{world['gateway']}:9 is out of reach" in told
    assert "curl -sSI" in told
