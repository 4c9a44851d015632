"""What goes wrong on a pair that served: told, repaired by site.yml, and never called healthy meanwhile."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI
from pair import hub_call, play, rehearsal, run

MODEL = "DeepSeek-V4.1-Flash-1017"
STATE = "/var/lib/sparkpair"


def answer(client: OpenAI) -> str:
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is 17 + 25?"}], max_tokens=100
    )
    return reply.choices[0].message.content or ""


@pytest.fixture(autouse=True)
def a_serving_pair(client: OpenAI) -> Iterator[None]:
    yield
    rehearsal("fault", "memory", "ok")
    done = play("site.yml")
    assert done.code == 0, done.output
    assert "42" in answer(client)


def test_a_reply_needs_both_ranks(client: OpenAI) -> None:
    """Field reports 60 and 63: half a pair is none, and nobody says otherwise."""
    rehearsal("fault", "kill-rank", "1")
    with pytest.raises(APIError):
        answer(client.with_options(timeout=20))
    told = play("status.yml")
    assert told.code != 0
    assert "rank 1 does not run on spark-b" in told.output


def test_a_kit_file_changed_on_disk_is_put_right_by_the_next_run(head: Any, worker: Any) -> None:
    before = run(worker, f"sha256sum {STATE}/kit/engram.json")
    run(worker, f"printf x >> {STATE}/kit/engram.json")
    done = play("site.yml")
    assert done.code == 0, done.output
    assert done.changed > 0
    assert run(worker, f"sha256sum {STATE}/kit/engram.json") == before


def test_a_changed_file_is_found_at_the_start_itself(worker: Any) -> None:
    """Field report 44: refused by name, before the container starts."""
    assert play("stop.yml").code == 0
    run(worker, f"printf x >> {STATE}/kit/engram.json")
    assert worker.run("systemctl start sparkpair-rank1").rc != 0
    journal = run(worker, "journalctl -u sparkpair-rank1 -n 20 -o cat")
    assert "engram.json" in journal and "site.yml brings back" in journal
    assert run(worker, "docker ps -aq") == ""


def test_a_strangers_container_of_our_name_is_left_alone(worker: Any) -> None:
    """Field report 66."""
    assert play("stop.yml").code == 0
    image = run(worker, "docker image ls -q | head -1")
    run(worker, f"docker create --name sparkpair-rank1 {image} true")
    try:
        done = play("site.yml", "--tags", "ranks")
    finally:
        run(worker, "docker rm sparkpair-rank1")
    assert done.code != 0
    assert "not ours" in done.output


def test_too_little_memory_stops_the_start_with_the_numbers(head: Any) -> None:
    """Field report 53."""
    assert play("stop.yml").code == 0
    rehearsal("fault", "memory", "60", "--node", "spark-a")
    done = play("site.yml", "--tags", "ranks")
    assert done.code != 0
    assert "MemAvailable 60.0 GiB" in done.output
    assert "spark-a" in done.output


def test_a_pulled_cable_is_told_before_anything_is_started() -> None:
    """Field reports 3 and 14."""
    rehearsal("fault", "rail-down", "1")
    done = play("site.yml", "--tags", "link")
    rehearsal("fault", "rail-up", "1")
    assert done.code != 0
    assert "1 of 2 rails: ports with a carrier are spark-a: enp1s0f0np0" in done.output
    assert "do: seat the cable" in done.output


def test_a_changed_setting_restarts_the_pair_once_and_is_what_runs(
    head: Any, worker: Any, client: OpenAI
) -> None:
    started = run(head, "docker inspect -f '{{.State.StartedAt}}' sparkpair-rank0")
    done = play("site.yml", "-e", "context=524288")
    assert done.code == 0, done.output
    assert run(head, "docker inspect -f '{{.State.StartedAt}}' sparkpair-rank0") != started
    assert "--context 524288" in run(head, "ps -eo args | grep [t]ensorfold-native")
    assert "--pool 524288" in run(worker, "ps -eo args | grep [t]f-dsv41-lanes")
    assert "42" in answer(client)


def test_a_pair_full_of_long_requests_is_left_alone(client: OpenAI, head: Any, worker: Any) -> None:
    """Field report 62: never kill a busy long prompt. No answer comes for a minute, but the counters move."""

    def containers() -> list[str]:
        return [run(node, "docker ps --no-trunc --quiet") for node in (head, worker)]

    def long(_: int) -> str | None:
        reply = client.with_options(timeout=600).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count."}],
            max_tokens=3000,
            extra_body={"ignore_eos": True},
        )
        return reply.choices[0].finish_reason

    before = containers()
    run(head, "echo token_s=1 > /run/spark-tree/faults")
    with ThreadPoolExecutor(4) as crowd:
        replies = crowd.map(long, range(4))
        try:
            time.sleep(2)
            again = play("site.yml", "--tags", "ranks")
            status = play("status.yml")
        finally:
            run(head, "rm /run/spark-tree/faults")
        assert again.code == 0, again.output
        assert again.changed == 0
        assert status.code == 0, status.output
        assert "busy with the requests of others" in " ".join(status.output.split())
        assert containers() == before
        assert list(replies) == ["length"] * 4


def test_stop_leaves_nothing_and_says_so(head: Any, worker: Any) -> None:
    done = play("stop.yml")
    assert done.code == 0, done.output
    assert "no container is left" in done.output and "GiB are available" in done.output
    for node in (head, worker):
        assert run(node, "docker ps -aq") == ""
        assert run(node, "systemctl list-units --plain --no-legend --state=active 'sparkpair-rank*'") == ""
        assert run(node, f"ls {STATE}/logs | grep -c rank") != "0"
    again = play("stop.yml")
    assert again.code == 0 and again.changed == 0


def test_the_addresses_come_back_after_a_reboot(worker: Any) -> None:
    """Field report 11."""
    assert play("stop.yml").code == 0
    rehearsal("fault", "reboot", "spark-b")
    deadline = time.monotonic() + 60
    shown = ""
    while time.monotonic() < deadline and not ("10.20.0.2" in shown and "10.21.0.2" in shown):
        time.sleep(1)
        shown = worker.run("ip -brief address").stdout
    assert "10.20.0.2" in shown and "10.21.0.2" in shown
    assert "mtu 9000" in run(worker, "ip link show enp1s0f0np0")
    assert play("site.yml", "--tags", "link").changed == 0


class Watch(threading.Thread):
    """Looks for a secret, again and again, where it would only be seen while the work goes on."""

    def __init__(self, node: Any, secret: str) -> None:
        super().__init__(daemon=True)
        self._node, self._secret = node, secret
        self._over = threading.Event()
        self.looks: list[str] = []
        self.hits: list[str] = []

    def run(self) -> None:
        while not self._over.is_set():
            shown = self._node.run(
                "ps -eo args; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; "
                "systemctl show 'sparkpair-*'; systemctl cat 'sparkpair-*' 2>/dev/null"
            ).stdout
            self.looks.append(shown)
            self.hits += [line for line in shown.splitlines() if self._secret in line]
            kept = Path("~/.ansible/tmp").expanduser().rglob("*")
            self.hits += [
                str(path) for path in kept if path.is_file() and self._secret.encode() in _content(path)
            ]

    def end(self) -> None:
        self._over.set()
        self.join(30)


def _content(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def test_the_token_is_nowhere_but_where_it_is_used(head: Any, worker: Any, world: dict[str, Any]) -> None:
    """Field report 47: a canary over every output, unit, journal, process list and container."""
    canary = f"hf_CANARY{secrets.token_hex(8)}"
    hub_call(world, "token", token=canary)
    since = hub_call(world, "log")["next"]
    run(head, f"rm {STATE}/weights/dsv41-1017/model-00009-of-00039.safetensors")
    rehearsal("fault", "hub", "slow", "--path", "model-00009*", "--rate", "100000")
    watch = Watch(head, canary)
    watch.start()
    try:
        done = play("site.yml", "-vvv", "--diff", HF_TOKEN=canary)
    finally:
        watch.end()
        rehearsal("fault", "hub", "ok")
    assert done.code == 0
    assert canary not in done.output
    assert any("sparkpair fetch --lock" in look for look in watch.looks), "nobody looked while it fetched"
    assert watch.hits == []
    asked = hub_call(world, f"log?since={since}")["requests"]
    assert any(entry["token"] and "model-00009" in entry["path"] for entry in asked)
    for node in (head, worker):
        found = node.run(
            f"grep -rls --binary-files=text {canary} /etc /run /var/lib/sparkpair /opt/sparkpair /home /root /var/log; "
            f"journalctl -o cat | grep -c {canary}; ps -eo args | grep {canary} | grep -v grep; "
            f"docker ps -aq | xargs -r docker inspect | grep {canary}"
        )
        assert str(found.stdout).strip() == "0", found.stdout
