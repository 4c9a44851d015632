"""Is a node fit? Every shortfall is told at once, with the number."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sparkpair import preflight

GIB = 2**30
NEEDS = preflight.Needs("aarch64", 118 * GIB, 700 * 10**9, [8888, 29620])
SPARK = preflight.Facts(
    machine="aarch64",
    machine_id="0123",
    memory_bytes=125441420 * 1024,  # a Spark of 119.6 GiB exists
    disk_free_bytes=3 * 10**12,
    disk_ours_bytes=0,
    gpus=["NVIDIA GB10"],
    docker="28.3.3",
    python="3.12.3",
    listeners={},
)


def codes(facts: preflight.Facts) -> list[str]:
    return [problem.code for problem in preflight.judge(facts, NEEDS, "spark-a")]


def test_the_smaller_sparks_are_sparks() -> None:
    assert codes(SPARK) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"machine": "x86_64"}, "architecture"),
        ({"gpus": []}, "gpu"),
        ({"gpus": ["NVIDIA A100"]}, "gpu"),
        ({"memory_bytes": 64 * GIB}, "memory-total"),
        ({"disk_free_bytes": 10**9}, "disk-total"),
        ({"docker": ""}, "docker"),
        ({"listeners": {8888: "nginx (pid 1)"}}, "port-taken"),
    ],
)
def test_a_shortfall_is_named(change: dict[str, object], code: str) -> None:
    assert codes(dataclasses.replace(SPARK, **change)) == [code]  # type: ignore[arg-type]


def test_what_lies_there_already_counts_as_room() -> None:
    facts = dataclasses.replace(SPARK, disk_free_bytes=50 * 10**9, disk_ours_bytes=690 * 10**9)
    assert codes(facts) == []


def test_all_shortfalls_are_told_together() -> None:
    facts = dataclasses.replace(SPARK, machine="x86_64", docker="", gpus=[])
    assert codes(facts) == ["architecture", "gpu", "docker"]


def test_meminfo_is_read_in_bytes_from_the_given_root(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  127600748 kB\nHugePages_Total:  0\nodd line\n")
    assert preflight.meminfo(tmp_path) == {"MemTotal": 127600748 * 1024, "HugePages_Total": 0}
    assert preflight.meminfo(tmp_path / "nowhere") == {}
