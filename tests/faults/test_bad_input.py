"""What a user gets wrong: a clear message in seconds, and nothing changed (no node is even asked)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pair import PROJECT, play

HEAD = "head: {hosts: {spark-a: {ansible_host: 192.0.2.1}}}"
WORKER = "worker: {hosts: {spark-b: {ansible_host: 192.0.2.2}}}"


def an_inventory(folder: Path, *groups: str) -> Path:
    path = folder / "hosts.yml"
    lines = "".join(f"        {group}\n" for group in groups)
    path.write_text(f"---\nall:\n  children:\n    pair:\n      children:\n{lines}")
    return path


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            ["head: {hosts: {a: {ansible_host: 192.0.2.1}, b: {ansible_host: 192.0.2.3}}}", WORKER],
            "2 hosts in group head",
        ),
        ([HEAD], "0 hosts in group worker"),
        ([HEAD, WORKER.replace("192.0.2.2", "192.0.2.1")], "both have ansible_host"),
        ([HEAD, WORKER.replace("192.0.2.2", "127.0.0.1")], "127.0.0.1"),
    ],
)
def test_an_inventory_that_is_no_pair(tmp_path: Path, groups: list[str], told: str) -> None:
    """Field report 16."""
    done = play("site.yml", inventory=an_inventory(tmp_path, *groups))
    assert done.code != 0
    assert told in done.output and "do:" in done.output
    assert "(1/8)" not in done.output


def test_the_example_untouched() -> None:
    done = play("site.yml", inventory=PROJECT / "inventory/hosts.example.yml")
    assert done.code != 0
    assert "placeholder" in done.output and "edit inventory/hosts.yml" in done.output
    assert "(1/8)" not in done.output


def test_no_hosts_at_all(tmp_path: Path) -> None:
    empty = tmp_path / "hosts.yml"
    empty.write_text("---\nall: {}\n")
    done = play("site.yml", inventory=empty)
    assert done.code != 0
    assert "0 hosts in group head" in done.output


@pytest.mark.parametrize(
    "knob",
    [
        "context=2000000",
        "context=abc",
        "parallel=9",
        "model=llama",
        "rails=3",
        "api_host=spark-a",
        "ablit=true",
    ],
)
def test_a_wrong_knob(knob: str) -> None:
    begun = time.monotonic()
    done = play("site.yml", "-e", knob)
    assert done.code != 0
    assert knob.split("=", maxsplit=1)[0] in done.output and "needed:" in done.output and "do:" in done.output
    assert "(1/8)" not in done.output
    assert time.monotonic() - begun < 30


def test_a_limit_to_half_of_the_pair() -> None:
    done = play("site.yml", "--limit", "spark-a")
    assert done.code != 0
    assert "--limit leaves spark-b out" in done.output


def test_stop_and_status_check_what_was_typed_too() -> None:
    for playbook in ("stop.yml", "status.yml"):
        half = play(playbook, "--limit", "spark-a")
        assert half.code != 0
        assert "--limit leaves spark-b out" in half.output
        example = play(playbook, inventory=PROJECT / "inventory/hosts.example.yml")
        assert example.code != 0
        assert "placeholder" in example.output


def test_a_limit_where_one_host_is_enough() -> None:
    done = play("site.yml", "--limit", "spark-a", "--tags", "preflight,host")
    assert done.code == 0, done.output


def test_a_wrong_sudo_password_names_both_hosts() -> None:
    """Field report 77."""
    done = play("site.yml", "-e", "ansible_become_password=wrong")
    assert done.code != 0
    for host in ("spark-a", "spark-b"):
        assert f"found: {host}" in done.output
    assert "Incorrect sudo password" in done.output
    assert done.changed == 0


def test_nodes_that_are_not_there(tmp_path: Path) -> None:
    away = [HEAD.replace("192.0.2.1", "10.77.0.250"), WORKER.replace("192.0.2.2", "10.77.0.251")]
    begun = time.monotonic()
    done = play("site.yml", "-e", "ansible_timeout=3", inventory=an_inventory(tmp_path, *away))
    assert done.code != 0
    assert done.output.count("needed: an SSH login") >= 2
    assert done.changed == 0
    assert time.monotonic() - begun < 60
