"""Building: pinned inputs, a log that is understood, and nothing left of a build that fails (field report 75)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docker_stub import Stub
from sparkpair import disk, dockercli, image, imagebase, imagebuild, zigwheel
from sparkpair.problem import Problem

PROJECT = Path(__file__).resolve().parents[2]
ENGINE = PROJECT / "files/engine"
CAPTURES = PROJECT / "tests/captures/image"
NONE = "Error: No such image: x"
PLATFORM = image.platform_of(os.uname().machine)
OTHER = "linux/arm64" if PLATFORM == "linux/amd64" else "linux/amd64"


def rule(words: str, **more: object) -> dict[str, object]:
    return {"words": words, **more}


# How far it is


def test_docker_20s_own_builder_tells_its_steps() -> None:
    steps = imagebuild.StepCounter()
    assert not steps.take(" ---> Running in 0ea4cf2a5dc0")
    assert steps.take("Step 10/20 : RUN set -e;     zig build")
    assert (steps.done, steps.total) == (9, 20)
    assert steps.text.startswith("RUN set -e")


def test_buildkit_tells_its_steps_by_stage() -> None:
    steps = imagebuild.StepCounter()
    for line in ("#5 [build 2/4] COPY . /build/", "#7 [build 4/4] RUN x", "#8 [final 2/2] COPY --from=build"):
        assert steps.take(line)
    assert (steps.done, steps.total) == (4, 6)
    assert not steps.take("#1 [internal] load build definition from Dockerfile")
    assert not steps.take("#7 14.47 debug: x")


def test_a_pull_on_a_terminal_tells_its_bytes() -> None:
    layers = imagebase.LayerBytes()
    screen = (
        b"26.07-py3: Pulling from nvidia/pytorch\r\n"
        b"\x1b[1A\x1b[2K\r0a1b2c3d4e5f: Pulling fs layer \x1b[1B\r"
        b"0a1b2c3d4e5f: Downloading [=====>        ]  12.5MB/100MB\x1b[1B\r"
        b"aaaaaaaaaaaa: Downloading [>             ]  1.5kB/2.5GB\r"
        b"0a1b2c3d4e5f: Download complete \r"
        b"aaaaaaaaaaaa: Downloading [==>           ]  1.25GB/2.5GB\r"
        b"0a1b2c3d4e5f: Extracting  [==>           ]  5MB/100MB\r"
    )
    taken = [layers.take(dockercli.plain(line)) for line in screen.replace(b"\r\n", b"\r").split(b"\r")]
    assert taken[0] is False and all(taken[2:7])
    assert layers.total == 2_600_000_000
    assert layers.done == 1_350_000_000


def test_a_recorded_pull_adds_up_to_its_whole_size() -> None:
    layers = imagebase.LayerBytes()
    done: list[int] = []
    for line in (CAPTURES / "docker-pull-terminal.txt").read_bytes().replace(b"\n", b"\r").split(b"\r"):
        if layers.take(dockercli.plain(line)):
            done.append(layers.done)
    # Two layers of 12 and 30.01 MB; the lines' rounding is the terminal's.
    assert layers.total == layers.done == 42_010_000
    assert done == sorted(done) and len(set(done)) > 40


# The compiler


def wheel(folder: Path, machine: str = "x86_64", content: str = "zig") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"ziglang-0.17.0-py3-none-manylinux_2_17_{machine}.manylinux2014_{machine}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ziglang/zig", content)
        archive.writestr(
            "ziglang-0.17.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ziglang\nVersion: 0.17.0\n"
        )
        archive.writestr("ziglang-0.17.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("ziglang-0.17.0.dist-info/RECORD", "")
    return path


def lock_for(*wheels: Path) -> bytes:
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels]
    return ("ziglang==0.17.0 \\\n" + " \\\n".join(f"    --hash=sha256:{h}" for h in hashes) + "\n").encode()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_compiler_is_fetched_once_and_its_hash_is_looked_at_each_time(
    index: Path, tmp_path: Path
) -> None:
    lock = lock_for(wheel(index), wheel(index, "aarch64", "other"))
    found = zigwheel.obtain(lock, "0.17.0", "linux/arm64", tmp_path)
    assert "aarch64" in found.name
    for path in index.iterdir():
        path.unlink()
    assert zigwheel.obtain(lock, "0.17.0", "linux/arm64", tmp_path) == found
    found.write_bytes(found.read_bytes()[:-1])
    with pytest.raises(Problem) as caught:
        zigwheel.obtain(lock, "0.17.0", "linux/arm64", tmp_path)
    assert caught.value.code == "zig-unreachable"
    assert not found.exists()


def test_a_compiler_with_another_hash_is_refused(index: Path, tmp_path: Path) -> None:
    lock = lock_for(wheel(index))
    wheel(index, content="tampered")
    with pytest.raises(Problem) as caught:
        zigwheel.obtain(lock, "0.17.0", "linux/amd64", tmp_path)
    assert caught.value.code == "zig-hash"


def test_a_version_that_the_lock_does_not_name_is_refused(tmp_path: Path) -> None:
    for version in ("0.17.1", "0.17"):
        with pytest.raises(Problem) as caught:
            zigwheel.obtain((ENGINE / "zig.lock").read_bytes(), version, "linux/arm64", tmp_path)
        assert caught.value.code == "zig-pin"


def test_the_shipped_lock_has_a_wheel_for_a_spark_and_one_for_the_rehearsal() -> None:
    text = (ENGINE / "zig.lock").read_text()
    assert "ziglang==0.17.0 " in text
    assert text.count("--hash=sha256:") == 2


# The build


@pytest.fixture
def order(index: Path, tmp_path: Path) -> imagebuild.Order:
    """All that a build needs, in small: a repository, a compiler in the index, the project's own inputs."""
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / ".zig-version").write_text("0.17.0\n")
    (origin / "build.zig").write_text("// nothing\n")
    for words in (["init", "-q", "-b", "zig"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        command = ["git", "-C", str(origin), "-c", "user.name=t", "-c", "user.email=t@example.org", *words]
        subprocess.run(command, check=True)
    commit = subprocess.run(
        ["git", "-C", str(origin), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for name in image.INPUTS:
        (inputs / name).write_bytes((ENGINE / name).read_bytes())
    (inputs / "zig.lock").write_bytes(lock_for(wheel(index, os.uname().machine)))
    pins = image.Pins("base:1", f"file://{origin}", commit, "zig", platform=PLATFORM)
    return imagebuild.Order(inputs, pins, tmp_path / "cache", 1_000_000)


def tag_of(order: imagebuild.Order) -> str:
    return image.tag_for(image.content_key(image.read_inputs(order.inputs), order.pins))


def inspected(**more: Any) -> str:
    found = {
        "Id": "sha256:1",
        "Os": "linux",
        "Architecture": PLATFORM.split("/")[1],
        "Size": 10,
        "Config": {},
        **more,
    }
    return json.dumps([found])


def labelled(order: imagebuild.Order) -> str:
    return inspected(Config={"Labels": {"sparkpair.key": image.key_of_tag(tag_of(order))}})


def engine(order: imagebuild.Order, *rules: dict[str, object], folder: Path) -> Stub:
    stub = Stub(folder / "bin")
    stub.play(
        *rules,
        rule("image inspect base:1", out=inspected()),
        rule("image inspect tensorfold", out="[]", err=NONE, code=1),
        rule("^info", out=json.dumps({"DockerRootDir": str(folder), "Driver": "overlay2"})),
        rule("image prune"),
    )
    return stub


def test_an_image_with_its_key_is_neither_built_nor_changed(order: imagebuild.Order, tmp_path: Path) -> None:
    stub = engine(order, rule("image inspect tensorfold", out=labelled(order)), folder=tmp_path)
    result = imagebuild.build(stub.docker, order, quiet=True)
    assert result["changed"] is False and result["tag"] == tag_of(order)
    assert len(stub.log) == 1
    assert not order.cache.exists()


def test_a_strangers_image_under_our_tag_is_built_anew(order: imagebuild.Order, tmp_path: Path) -> None:
    stub = engine(
        order, rule("image inspect tensorfold", out=inspected()), rule("^build", code=1), folder=tmp_path
    )
    with pytest.raises(Problem):
        imagebuild.build(stub.docker, order, quiet=True)
    assert any(line.startswith("build ") for line in stub.log)


def test_a_build_that_fails_shows_its_last_lines_and_leaves_nothing(
    order: imagebuild.Order, tmp_path: Path
) -> None:
    log = "Step 1/20 : ARG BASE\n ---> Running in 1\nfound: no GPU kernels in /opt/x\nreturned a non-zero code: 1\n"
    stub = engine(order, rule("^build", out=log, code=1), folder=tmp_path)
    with pytest.raises(Problem) as caught:
        imagebuild.build(stub.docker, order, quiet=True)
    assert caught.value.code == "image-build"
    assert "no GPU kernels" in caught.value.found and "--->" not in caught.value.found
    key = image.key_of_tag(tag_of(order))
    assert stub.log[-1] == f"image prune --force --filter label=sparkpair.key={key}"
    assert not [path for path in order.cache.iterdir() if path.name.startswith("context-")]


def test_a_build_that_is_stopped_ends_its_docker_command_and_leaves_nothing(
    order: imagebuild.Order, tmp_path: Path
) -> None:
    stub = engine(order, rule("^build", out="Step 1/20 : ARG BASE\n", sleeps=60), folder=tmp_path)
    pins = order.pins
    words = [
        "image",
        "build",
        "--inputs",
        str(order.inputs),
        "--base",
        pins.base,
        "--repository",
        pins.repository,
    ]
    words += ["--commit", pins.commit, "--cache", str(order.cache), "--free-bytes", "1", "--json"]
    running = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from sparkpair import cli; sys.exit(cli.main(sys.argv[1:]))",
            *words,
        ],
        env={**os.environ, "PATH": f"{stub.folder}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stderr and "Step 1/20" in running.stderr.readline()
        running.terminate()
        assert running.wait(timeout=30) == 130
    finally:
        running.kill()
        running.communicate()
    assert stub.log[-1].startswith("image prune --force --filter label=sparkpair.key=")
    assert not [path for path in order.cache.iterdir() if path.name.startswith("context-")]


def test_a_full_disk_during_the_build_is_told_as_such(order: imagebuild.Order, tmp_path: Path) -> None:
    log = "Step 5/20 : COPY . /build/\nwrite /build/x: no space left on device\n"
    stub = engine(order, rule("^build", out=log, code=1), folder=tmp_path)
    with pytest.raises(Problem) as caught:
        imagebuild.build(stub.docker, order, quiet=True)
    assert caught.value.code == "disk-full"


def test_too_little_room_is_told_before_anything_is_fetched(
    order: imagebuild.Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = engine(order, folder=tmp_path)
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1)
    with pytest.raises(Problem) as caught:
        imagebuild.build(stub.docker, order, quiet=True)
    assert caught.value.code == "disk-full"
    assert {path.name for path in order.cache.iterdir()} == {".lock"}
    assert not any(line.startswith("build ") for line in stub.log)


def test_a_base_that_is_not_there_or_for_another_processor_stops_the_build(
    order: imagebuild.Order, tmp_path: Path
) -> None:
    absent = engine(order, rule("inspect base:1", out="[]", err=NONE, code=1), folder=tmp_path)
    with pytest.raises(Problem) as caught:
        imagebuild.build(absent.docker, order, quiet=True)
    assert caught.value.code == "image-missing" and "docker pull" in caught.value.do
    other = engine(
        order, rule("inspect base:1", out=inspected(Architecture=OTHER.split("/")[1])), folder=tmp_path
    )
    with pytest.raises(Problem) as caught:
        imagebuild.build(other.docker, order, quiet=True)
    assert caught.value.code == "image-platform" and OTHER in caught.value.found


def test_a_commit_with_another_tree_than_the_pinned_one_is_not_built(
    order: imagebuild.Order, tmp_path: Path
) -> None:
    changed = image.Pins(**{**vars(order.pins), "tree": "0" * 40})
    stub = engine(order, folder=tmp_path)
    with pytest.raises(Problem) as caught:
        imagebuild.build(stub.docker, imagebuild.Order(order.inputs, changed, order.cache, 1), quiet=True)
    assert caught.value.code == "source-tree"
    assert not any(line.startswith("build ") for line in stub.log)


def test_a_source_for_another_compiler_is_not_built(order: imagebuild.Order, tmp_path: Path) -> None:
    origin = Path(order.pins.repository.removeprefix("file://"))
    (origin / ".zig-version").write_text("0.18.0\n")
    command = ["git", "-C", str(origin), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*command, "commit", "-q", "-am", "y"], check=True)
    head = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    changed = image.Pins(**{**vars(order.pins), "commit": head.stdout.strip()})
    with pytest.raises(Problem) as caught:
        imagebuild.build(
            engine(order, folder=tmp_path).docker,
            imagebuild.Order(order.inputs, changed, order.cache, 1),
            quiet=True,
        )
    assert caught.value.code == "zig-version" and "0.18.0" in caught.value.found


def test_the_build_is_offline_and_its_words_suit_both_builders(
    order: imagebuild.Order, tmp_path: Path
) -> None:
    stub = engine(order, rule("^build", code=1, err="x"), folder=tmp_path)
    with pytest.raises(Problem):
        imagebuild.build(stub.docker, order, quiet=True)
    words = next(line for line in stub.log if line.startswith("build ")).split()
    assert words[1:3] == ["--network", "none"]
    assert f"TARGET={order.pins.target}" in words and "SM=121" in words and "BASE=base:1" in words
    assert f"ENGINE_COMMIT={order.pins.commit}" in words


def test_the_dockerfile_uses_nothing_that_docker_20s_builder_lacks() -> None:
    text = (ENGINE / "Dockerfile").read_text()
    instructions = [line for line in text.splitlines() if line[:1].isupper()]
    assert "--mount" not in text and "<<" not in text and "# syntax" not in text
    assert {line.split()[0] for line in instructions} <= {
        *("ARG", "FROM", "LABEL", "COPY", "WORKDIR", "RUN", "ENTRYPOINT"),
    }
    # The build line of the engine's own README, and an image in which no build tool is left.
    assert "zig build install native" in text and "-Dnvcc=/usr/local/cuda/bin/nvcc" in text
    assert instructions[-1] == 'ENTRYPOINT ["/opt/tensorfold/enter.sh"]'
    assert [line for line in instructions if line.startswith("COPY --from")] == [
        "COPY --from=build /opt/tensorfold/ /opt/tensorfold/"
    ]


# The base


def base(tmp_path: Path, free: int = 1) -> imagebase.Base:
    return imagebase.Base("base:1", PLATFORM, free, tmp_path)


def test_a_base_that_is_there_is_not_pulled(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "bin")
    stub.play(rule("inspect", out=inspected()))
    assert imagebase.pull(stub.docker, base(tmp_path), quiet=True)["changed"] is False
    assert len(stub.log) == 1


def test_field_report_36_room_is_asked_before_a_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tmp_path / "bin")
    stub.play(
        rule("inspect", err=NONE, code=1), rule("info", out=json.dumps({"DockerRootDir": str(tmp_path)}))
    )
    monkeypatch.setattr(disk, "free_bytes", lambda path: 35_500_000_000)
    with pytest.raises(Problem) as caught:
        imagebase.pull(stub.docker, base(tmp_path, 35_000_000_000), quiet=True)
    # Docker's root and the context are on one filesystem here: 35 GB and 1 GB.
    assert caught.value.code == "disk-full" and "36.0 GB" in caught.value.needed
    assert not any(line.startswith("pull") for line in stub.log)


def test_a_base_that_is_there_is_taken_off_the_room_that_is_asked(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "bin")
    there = inspected(Size=25_000_000_000)
    stub.play(rule("inspect", out=there), rule("info", out=json.dumps({"DockerRootDir": str(tmp_path)})))
    needs = imagebase.needs(stub.docker, base(tmp_path, 35_000_000_000))
    assert [need.bytes for need in needs] == [10_000_000_000, 1_000_000_000]


def test_a_network_that_fails_is_tried_again_and_a_refusal_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for text, tries, code in (
        ("dial tcp: lookup nvcr.io: no such host", 5, "registry-unreachable"),
        ("manifest unknown: manifest unknown", 1, "registry-unknown"),
    ):
        stub = Stub(tmp_path / code)
        stub.play(
            rule("inspect", err=NONE, code=1),
            rule("info", out=json.dumps({"DockerRootDir": str(tmp_path)})),
            rule("pull", err=text, code=1),
        )
        with pytest.raises(Problem) as caught:
            imagebase.pull(stub.docker, base(tmp_path), quiet=True)
        assert caught.value.code == code
        assert sum(line.startswith("pull") for line in stub.log) == tries


# What runs inside the build


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_build", ENGINE / "check_build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(path: Path, machine: int = 183, kernels: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little")
    path.write_bytes(header + b"x" * 5000 + (bytes.fromhex("50ed55ba") if kernels else b""))
    path.chmod(0o755)


def built(prefix: Path, checks: ModuleType) -> None:
    for name in checks.WITH_KERNELS:
        program(prefix / name)
    for name in checks.WITHOUT_KERNELS:
        program(prefix / name, kernels=False)


def test_whole_programs_pass(tmp_path: Path, checks: ModuleType) -> None:
    built(tmp_path, checks)
    assert checks.main(["programs", "--prefix", str(tmp_path), "--target", "aarch64-linux-gnu.2.28"]) == 0


@pytest.mark.parametrize("name", ["native/bin/tensorfold-native", "bin/tf-dsv41-lanes"])
def test_a_build_without_kernels_fails_with_one_clear_line(
    tmp_path: Path, checks: ModuleType, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    built(tmp_path, checks)
    program(tmp_path / name, kernels=False)
    assert checks.main(["programs", "--prefix", str(tmp_path), "--target", "aarch64-linux-gnu.2.28"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and name in said[0] and "NoKernelImages" in said[0]


def test_a_program_for_another_processor_or_none_at_all_fails(tmp_path: Path, checks: ModuleType) -> None:
    built(tmp_path, checks)
    program(tmp_path / "bin/tf-dsv41-check", machine=62, kernels=False)
    (tmp_path / "bin/tf-dsv41-rank-cache").unlink()
    faults = checks.check_programs(tmp_path, "aarch64-linux-gnu.2.28")
    assert len(faults) == 2 and "machine 62" in faults[0] and "tf-dsv41-rank-cache" in faults[1]


@pytest.mark.parametrize(("has", "wants", "good"), [("0.17.0", "0.17.0", True), ("0.17.0", "0.16.0", False)])
def test_compiler_pin_and_source_are_one_version(
    tmp_path: Path, checks: ModuleType, has: str, wants: str, good: bool
) -> None:
    zig = tmp_path / "zig"
    zig.write_text(f"#!/bin/sh\necho {has}\n")
    zig.chmod(0o755)
    (tmp_path / ".zig-version").write_text(f"{wants}\n")
    assert (checks.check_source(tmp_path, zig, "0.17.0") == []) is good


def test_the_entry_runs_the_program_it_is_given_and_prints_nothing_of_its_own() -> None:
    entry = str(ENGINE / "enter.sh")
    done = subprocess.run(
        ["/bin/sh", entry, sys.executable, "-c", "print('{}')"], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"{}\n", b"")
    failed = subprocess.run(["/bin/sh", entry, "/bin/sh", "-c", "exit 3"], capture_output=True, check=False)
    assert failed.returncode == 3
    empty = subprocess.run(["/bin/sh", entry], capture_output=True, text=True, check=False)
    assert empty.returncode == 2 and "needed: one by its path" in empty.stderr
