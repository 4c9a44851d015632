"""Docker's errors told apart, one remedy each: field reports 23, 30, 31 and 36. The texts are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from docker_stub import Stub
from sparkpair import dockercli
from sparkpair.dockercli import Docker, classify
from sparkpair.problem import Problem

NO_RUNTIME = """Server:
 Server Version: 29.2.1
 Runtimes: io.containerd.runc.v2 runc
 Default Runtime: runc
"""
ERRORS = {
    "docker-down": [
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
        "failed to connect to the docker API at unix:///var/run/docker.sock; check if the path is correct",
        "error during connect: Get http://x/v1.24/info: EOF",
    ],
    "docker-permission": [
        "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: "
        'Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.50/info": dial unix /var/run/docker.sock: permission denied',
        "Got permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock",
        "permission denied while trying to connect to the docker API at unix:///var/run/docker.sock",
    ],
    "nvidia-runtime": [
        "docker: Error response from daemon: unknown or invalid runtime name: nvidia",
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
    ],
    "nvidia-cdi": [
        "failed to inject CDI devices: unresolvable CDI devices management.nvidia.com/gpu=GPU-0a1b2c3d",
    ],
    "nvidia-device": [
        "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
    "image-missing": [
        "Error: No such image: foo:bar",
        "Error response from daemon: reference does not exist",
        "Unable to find image 'foo@sha256:2140' locally",
    ],
    "image-incomplete": [
        "failed to load: blob sha256:f8629c643ffe expected at /x/blobs/sha256/f8629c643ffe: blob not found: not found",
        "Error response from daemon: content digest sha256:aa: not found",
        "blob sha256:bb does not exist",
    ],
    "image-in-use": [
        "Error response from daemon: conflict: unable to remove repository reference \"x\" (must force) - "
        "image is being used by stopped container 4c01db0b339c",
        "conflict: unable to delete 91a67020cf64 (cannot be forced) - image has dependent child images",
        "image is referenced in multiple repositories",
    ],
    "container-name": [
        'docker: Error response from daemon: Conflict. The container name "/sparkpair-rank0" is already in use by '
        'container "4c01". You have to remove (or rename) that container to be able to reuse that name.'
    ],
    "disk-full": [
        "write /var/lib/docker/tmp/GetImageBlob1: no space left on device",
        "failed to register layer: Error processing tar file(exit status 1): write /x: no space left on device",
    ],
    "registry-unknown": [
        "Error response from daemon: manifest for nvcr.io/nvidia/pytorch:26.70-py3 not found: manifest unknown",
        "no matching manifest for linux/arm64/v8 in the manifest list entries",
    ],
    "registry-denied": [
        "Error response from daemon: pull access denied for x, repository does not exist or may require 'docker login'",
        "toomanyrequests: You have reached your pull rate limit.",
    ],
    "registry-certificate": ['Get "https://nvcr.io/v2/": x509: certificate signed by unknown authority'],
    "registry-unreachable": [
        'Error response from daemon: Get "https://nvcr.io/v2/": dial tcp: lookup nvcr.io on 10.0.0.53:53: no such host',
        'Get "https://nvcr.io/v2/": net/http: TLS handshake timeout',
        "unexpected EOF",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "text"), [(code, text) for code, texts in ERRORS.items() for text in texts], ids=str
)
def test_a_recorded_error_is_told_as_what_it_is(code: str, text: str) -> None:
    problem = classify(f"WARNING: something else\n{text}\n", "docker x")
    assert problem.code == code
    assert text.strip() in problem.found


def test_each_kind_has_a_remedy_of_its_own() -> None:
    told = [classify(texts[0], "docker x") for texts in ERRORS.values()]
    assert len({problem.do for problem in told}) == len(told)
    assert len({problem.needed for problem in told}) == len(told)


def test_an_error_nobody_recorded_is_shown_with_its_last_lines() -> None:
    problem = classify("\n".join(f"line {n}" for n in range(40)), "docker run")
    assert problem.code == "docker-failed"
    assert "line 39" in problem.found and "line 10 " not in problem.found


def test_field_report_23_down_denied_and_without_a_runtime_are_three_messages(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    said = []
    for text in (ERRORS["docker-down"][0], ERRORS["docker-permission"][0]):
        stub.play({"words": "info", "err": text, "code": 1})
        with pytest.raises(Problem) as caught:
            stub.docker.info()
        said.append(caught.value)
    missing = dockercli.gpu_problem(NO_RUNTIME, [])
    assert missing is not None
    said.append(missing)
    assert [problem.code for problem in said] == ["docker-down", "docker-permission", "nvidia-runtime"]
    assert "systemctl enable --now docker" in said[0].do
    assert "log out and in" in said[1].do  # field report 31
    assert "nvidia-ctk runtime configure" in said[2].do


def test_a_gpu_is_found_by_a_registered_runtime_or_by_the_hook() -> None:
    registered = "Runtimes: io.containerd.runc.v2 nvidia runc"
    assert dockercli.runtimes(registered) == {"io.containerd.runc.v2", "nvidia", "runc"}
    assert dockercli.gpu_problem(registered, []) is None
    assert dockercli.gpu_problem({"Runtimes": {"runc": {}, "nvidia": {}}}, []) is None
    assert dockercli.gpu_problem(NO_RUNTIME, ["nvidia-container-runtime-hook"]) is None


def test_info_that_comes_without_an_engine_is_a_fault_all_the_same(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    stub.play({"words": "info", "out": json.dumps({"ServerErrors": [ERRORS["docker-down"][0]]})})
    with pytest.raises(Problem) as caught:
        stub.docker.info()
    assert caught.value.code == "docker-down"


def test_no_docker_command_at_all_names_the_package() -> None:
    with pytest.raises(Problem) as caught:
        Docker(program="/nonexistent/docker").info()
    assert caught.value.code == "docker-missing"
    assert "docker.io" in caught.value.do


def test_an_absent_image_is_no_fault_but_a_dead_engine_is(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    stub.play({"words": "inspect", "err": ERRORS["image-missing"][0], "code": 1, "out": "[]\n"})
    assert stub.docker.inspect("foo:bar") is None
    stub.play({"words": "inspect", "err": ERRORS["docker-down"][0], "code": 1})
    with pytest.raises(Problem):
        stub.docker.inspect("foo:bar")


def test_an_engine_that_hangs_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    with pytest.raises(Problem) as caught:
        Docker(program=str(program)).run("info", timeout=0.2)
    assert caught.value.code == "docker-hangs"


OVERLAY2: dict[str, Any] = {
    "DockerRootDir": "/data/docker",
    "DriverStatus": [["Backing Filesystem", "extfs"]],
}
CONTAINERD: dict[str, Any] = {
    "DockerRootDir": "/data/docker",
    "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
}


def test_field_report_36_room_is_asked_where_the_images_really_are(tmp_path: Path) -> None:
    system = tmp_path / "containerd"
    assert dockercli.storage_roots(OVERLAY2, system) == [Path("/data/docker")]
    assert dockercli.storage_roots(CONTAINERD, system) == [Path("/data/docker")]
    system.mkdir()
    assert dockercli.storage_roots(CONTAINERD, system) == [Path("/data/docker"), system]
    assert dockercli.storage_roots(OVERLAY2, system) == [Path("/data/docker")]


@pytest.mark.parametrize(
    ("client", "server", "can"), [("1.52", "1.48", True), ("1.41", "1.48", False), ("1.52", "1.41", False)]
)
def test_field_report_30_one_platform_is_saved_where_both_sides_know_how(
    tmp_path: Path, client: str, server: str, can: bool
) -> None:
    stub = Stub(tmp_path)
    told = {"Client": {"ApiVersion": client}, "Server": {"ApiVersion": server}}
    stub.play({"words": "version", "out": json.dumps(told)})
    assert stub.docker.can_save_one_platform() is can


def test_attestations_are_off_since_they_would_make_an_index() -> None:
    assert Docker().environment()["BUILDX_NO_DEFAULT_ATTESTATIONS"] == "1"
