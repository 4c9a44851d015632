"""Overlay and earlier checkpoint through the play: back and forth without fetching or writing anything again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from pair import play, run

MODEL = "DeepSeek-V4.1-Flash-1017"
READER = "hf_rehearsalReader"
NEWCOMER = "hf_rehearsalNewcomer"
CACHES = "ls -i /var/lib/sparkpair/rank-cache/*/rank*.bin"


@pytest.fixture(scope="module", autouse=True)
def back_to_stock() -> Iterator[None]:
    yield
    assert play("site.yml").code == 0


def fingerprint(client: OpenAI) -> str:
    """Which pair of caches answered; only both ranks together can tell."""
    messages: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=50)
    assert "42" in (reply.choices[0].message.content or reply.choices[0].message.reasoning_content)  # type: ignore[union-attr]
    return str(reply.system_fingerprint)


def test_terms_that_were_not_accepted_are_told_with_their_page() -> None:
    """Field report 40."""
    done = play("site.yml", "-e", "ablit=true", HF_TOKEN=NEWCOMER)
    assert done.code != 0
    assert "terms" in done.output and "drowzeys/" in done.output


def test_the_overlay_is_served_and_the_way_back_costs_nothing(client: OpenAI, head: Any, worker: Any) -> None:
    stock = fingerprint(client)
    done = play("site.yml", "-e", "ablit=true", HF_TOKEN=READER)
    assert done.code == 0, done.output
    assert fingerprint(client) != stock
    assert "--no-thinking" in run(head, "ps -eo args | grep [t]ensorfold-native")
    before = run(head, CACHES) + run(worker, CACHES)
    back = play("site.yml")
    assert back.code == 0, back.output
    assert fingerprint(client) == stock
    assert run(head, CACHES) + run(worker, CACHES) == before
    assert "sparkpair-job-" not in back.output


def test_the_earlier_checkpoint_is_served_too(client: OpenAI, head: Any) -> None:
    """Its routing bias comes from the original repository by ranges, not with the checkpoint."""
    done = play("site.yml", "-e", "model=dsv41")
    assert done.code == 0, done.output
    assert fingerprint(client)
    assert "weights/dsv41 " in run(head, "ps -eo args | grep [t]ensorfold-native")


def test_a_worker_with_the_whole_checkpoint_writes_its_own_cache(client: OpenAI, worker: Any) -> None:
    """`worker_weights: full`, and back to the slice: what lies there is no hindrance."""
    assert play("site.yml").code == 0  # the test before this one left another checkpoint serving
    sliced = fingerprint(client)
    run(worker, "rm /var/lib/sparkpair/rank-cache/dsv41-1017-*/rank1of2-*.bin")
    done = play("site.yml", "-e", "worker_weights=full")
    assert done.code == 0, done.output
    assert run(worker, "ls /var/lib/sparkpair/weights/dsv41-1017 | grep -c safetensors$") == "39"
    assert "[spark-b] sparkpair-job-rank-cache-1.service runs" in done.output
    assert fingerprint(client) == sliced
    back = play("site.yml")
    assert back.code == 0, back.output
    assert fingerprint(client) == sliced
