"""Is a node fit? Every shortfall is told at once, with the number."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from docker_stub import Stub
from sparkpair import dockercli, paths, preflight

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
    runtimes=["io.containerd.runc.v2", "nvidia", "runc"],
    programs=["nvidia-container-runtime-hook"],
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
        ({"runtimes": ["runc"], "programs": []}, "nvidia-runtime"),
        ({"listeners": {8888: "nginx (pid 1)"}}, "port-taken"),
    ],
)
def test_a_shortfall_is_named(change: dict[str, object], code: str) -> None:
    assert codes(dataclasses.replace(SPARK, **change)) == [code]  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"runtimes": ["runc"]}, {"programs": []}])
def test_a_registered_runtime_or_the_hook_is_enough(change: dict[str, object]) -> None:
    """Field report 23."""
    assert codes(dataclasses.replace(SPARK, **change)) == []  # type: ignore[arg-type]


def test_an_engine_that_is_down_is_not_blamed_for_its_runtimes_too() -> None:
    """Field report 23: down and without a runtime are two things, with one remedy each."""
    assert codes(dataclasses.replace(SPARK, docker="", runtimes=[], programs=[])) == ["docker"]


def test_the_missing_runtime_is_told_with_its_node() -> None:
    blind = dataclasses.replace(SPARK, runtimes=["runc"], programs=[])
    (problem,) = preflight.judge(blind, NEEDS, "spark-a")
    assert problem.host == "spark-a"
    assert "nvidia-ctk runtime configure" in problem.do


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """An engine of the test's own, and a folder in place of the engine's PATH."""
    stub = Stub(tmp_path / "engine")
    monkeypatch.setattr(dockercli, "Docker", lambda: stub.docker)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(preflight, "_ENGINE_PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(paths, "STATE", tmp_path / "state")
    return stub


def test_the_engine_is_asked_for_its_runtimes_and_the_hook_looked_for(engine: Stub, tmp_path: Path) -> None:
    info = {"ServerVersion": "28.3.3", "Runtimes": {"runc": {}, "nvidia": {"path": "/n"}}}
    engine.play({"words": "^info", "out": json.dumps(info)})
    facts = preflight.gather(tmp_path, [])
    assert (facts.docker, facts.runtimes, facts.programs) == ("28.3.3", ["nvidia", "runc"], [])
    hook = tmp_path / "bin" / preflight.GPU_HOOK
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    assert preflight.gather(tmp_path, []).programs == [preflight.GPU_HOOK]
    assert json.loads(json.dumps(facts.as_dict()))["runtimes"] == ["nvidia", "runc"]


@pytest.mark.parametrize(
    "said",
    [
        {"err": "Cannot connect to the Docker daemon", "code": 1},
        {"out": '{"ServerErrors": ["Cannot connect to the Docker daemon"]}'},
        {"out": "not JSON"},
    ],
)
def test_an_engine_that_does_not_answer_has_no_version(
    engine: Stub, tmp_path: Path, said: dict[str, object]
) -> None:
    engine.play({"words": "^info", **said})
    facts = preflight.gather(tmp_path, [])
    assert (facts.docker, facts.runtimes) == ("", [])


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
