"""Building and shipping on real Docker engines: one on overlay2, one on vfs, one with hardly any room.

Field reports 29 (equal content, whatever the store), 30 (a part of an image never stays), 36 (a full disk)
and 75 (one build and one shipment for one changed byte, none for a changed time).
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sparkpair import image, imagebuild, imageship
from sparkpair.dockercli import Docker
from sparkpair.problem import Problem

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None,
    reason="starts Docker engines of its own: needs root and dockerd (make integration installs it)",
)

SIZE = 20_000_000
PLATFORM = image.platform_of(os.uname().machine)
DOCKERFILE = """ARG BASE
FROM ${BASE} AS build
ARG KEY
LABEL sparkpair.key="${KEY}"
COPY engine/ /build/
COPY zig/ /build/zig/
FROM ${BASE} AS final
ARG KEY
ARG ENGINE_COMMIT
LABEL sparkpair.key="${KEY}" sparkpair.engine.commit="${ENGINE_COMMIT}"
COPY --from=build /build/build.zig /opt/tensorfold/
ENV ENGINE=1
WORKDIR /opt/tensorfold
ENTRYPOINT ["/opt/tensorfold/enter.sh"]
"""


class Engine:
    """A private dockerd, stopped by its own pid."""

    def __init__(self, folder: Path, driver: str) -> None:
        for name in ("root", "exec"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.address = f"unix://{folder}/docker.sock"
        self.docker = Docker(self.address)
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *("dockerd", "--data-root", str(folder / "root"), "--exec-root", str(folder / "exec")),
                    *("--host", self.address, "--pidfile", str(folder / "pid"), "--storage-driver", driver),
                    *("--bridge", "none", "--iptables=false"),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
            )
        for _ in range(150):
            if (folder / "docker.sock").exists() and self.answers():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise AssertionError(f"dockerd ({driver}) did not come up: {(folder / 'log').read_text()[-2000:]}")

    def answers(self) -> bool:
        try:
            self.docker.info()
        except Problem:
            return False
        return True

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)

    def images(self) -> list[str]:
        """Every image, nameless and intermediate ones too."""
        return self.docker.run("image", "ls", "--all", "--quiet", "--no-trunc").split()

    def nameless(self) -> list[str]:
        return self.docker.run("image", "ls", "--filter", "dangling=true", "--quiet").split()

    def agent(self, words: Sequence[str]) -> list[str]:
        """The peer's forced command, as sshd runs it, with this engine as the machine's own."""
        return [
            *("env", f"DOCKER_HOST={self.address}", f"SSH_ORIGINAL_COMMAND={' '.join(words)}"),
            *(sys.executable, "-c", "import sys; from sparkpair import cli; sys.exit(cli.main(['agent']))"),
        ]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("o"), "overlay2")
    tar = tmp_path_factory.mktemp("base") / "base.tar"
    with tar.open("wb") as handle:
        filler = tar.with_name("filler")
        filler.write_bytes(os.urandom(SIZE))
        subprocess.run(["tar", "-C", str(tar.parent), "-c", "filler"], stdout=handle, check=True)
    engine.docker.run("import", "--change", "ENV A=1", str(tar), "base:1")
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("v"), "vfs")
    yield engine
    engine.stop()


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> imagebuild.Order:
    """A whole order in small: a repository, a compiler in a folder of wheels, a Dockerfile without RUN."""
    origin, index, inputs = tmp_path / "origin", tmp_path / "index", tmp_path / "inputs"
    for folder in (origin, index, inputs):
        folder.mkdir()
    (origin / ".zig-version").write_text("0.17.0\n")
    (origin / "build.zig").write_text("// nothing\n")
    git = ["git", "-C", str(origin), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q", "-b", "zig"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    machine = os.uname().machine
    wheel = index / f"ziglang-0.17.0-py3-none-manylinux_2_17_{machine}.manylinux2014_{machine}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        metadata = "Metadata-Version: 2.1\nName: ziglang\nVersion: 0.17.0\n"
        archive.writestr("ziglang-0.17.0.dist-info/METADATA", metadata)
        archive.writestr("ziglang-0.17.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("ziglang-0.17.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (inputs / "zig.lock").write_text(f"ziglang==0.17.0 \\\n    --hash=sha256:{digest}\n")
    (inputs / "Dockerfile").write_text(DOCKERFILE)
    (inputs / "check_build.py").write_text("")
    (inputs / "enter.sh").write_text("")
    pins = image.Pins("base:1", f"file://{origin}", commit, "zig", platform=PLATFORM)
    return imagebuild.Order(inputs, pins, tmp_path / "cache", 1_000_000)


def change_a_byte(order: imagebuild.Order) -> None:
    with (order.inputs / "enter.sh").open("a") as handle:
        handle.write("#")


def remove_ours(*engines: Engine) -> None:
    for engine in engines:
        for row in image.ours(engine.docker):
            engine.docker.run("image", "rm", str(row["tag"]))


def test_one_image_is_built_once_and_is_equal_in_two_stores(
    head: Engine, worker: Engine, order: imagebuild.Order
) -> None:
    built = imagebuild.build(head.docker, order, quiet=True)
    assert built["changed"] is True and head.nameless() == []
    for path in order.inputs.iterdir():
        os.utime(path, (1, 1))
    assert imagebuild.build(head.docker, order, quiet=True)["changed"] is False

    tag = str(built["tag"])
    sent = imageship.ship(head.docker, tag, "worker", worker.agent, quiet=True)
    assert sent["changed"] is True and sent["bytes"] > SIZE
    there = worker.docker.inspect(tag)
    here = head.docker.inspect(tag)
    assert here and there and image.identity(here) == image.identity(there) == built["identity"]
    assert there["GraphDriver"]["Name"] == "vfs" and here["GraphDriver"]["Name"] == "overlay2"
    assert imageship.ship(head.docker, tag, "worker", worker.agent, quiet=True)["changed"] is False
    remove_ours(head, worker)


def test_one_changed_byte_is_one_build_and_one_shipment_and_the_old_image_stays_until_pruned(
    head: Engine, worker: Engine, order: imagebuild.Order
) -> None:
    first = str(imagebuild.build(head.docker, order, quiet=True)["tag"])
    change_a_byte(order)
    second = imagebuild.build(head.docker, order, quiet=True)
    assert second["changed"] is True and second["tag"] != first
    assert (
        imageship.ship(head.docker, str(second["tag"]), "worker", worker.agent, quiet=True)["changed"] is True
    )
    assert [row["tag"] for row in image.ours(head.docker)] == [second["tag"], first]

    head.docker.run("tag", "base:1", "tensorfold-dsv41:mine")
    head.docker.run("tag", "base:1", image.tag_for("0" * 12))  # our name, not our label
    assert image.prune(head.docker, str(second["tag"]))["removed"] == [first]
    left = head.docker.run("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
    assert {"base:1", "tensorfold-dsv41:mine", image.tag_for("0" * 12), second["tag"]} == set(left)
    head.docker.run("image", "rm", "tensorfold-dsv41:mine", image.tag_for("0" * 12))
    remove_ours(head, worker)


def test_a_build_that_fails_half_way_leaves_no_image_and_shows_why(
    head: Engine, order: imagebuild.Order
) -> None:
    before = head.images()
    (order.inputs / "Dockerfile").write_text(DOCKERFILE.replace("/build/build.zig", "/build/absent.zig"))
    with pytest.raises(Problem) as caught:
        imagebuild.build(head.docker, order, quiet=True)
    assert caught.value.code == "image-build" and "absent.zig" in caught.value.found
    assert head.images() == before
    assert image.ours(head.docker) == []


def cut_after(engine: Engine, count: int) -> imageship.Reach:
    """A connection that breaks after `count` bytes of the image."""

    def command(words: Sequence[str]) -> list[str]:
        whole = engine.agent(words)
        return ["sh", "-c", f'head -c {count} | "$@"', "cut", *whole] if words[0] == "image-load" else whole

    return command


@pytest.mark.parametrize("count", [0, 5_000, SIZE // 2, SIZE])
def test_field_report_30_of_a_shipment_that_breaks_off_nothing_stays(
    head: Engine, worker: Engine, order: imagebuild.Order, count: int
) -> None:
    tag = str(imagebuild.build(head.docker, order, quiet=True)["tag"])
    before = worker.images()
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, tag, "worker", cut_after(worker, count), quiet=True)
    assert caught.value.host == "worker"
    assert worker.images() == before
    assert imageship.ship(head.docker, tag, "worker", worker.agent, quiet=True)["changed"] is True
    remove_ours(head, worker)


@pytest.fixture
def sshd(worker: Engine, tmp_path: Path) -> Iterator[imageship.Peer]:
    """The worker behind an sshd of its own, with a key that may run `sparkpair agent` and nothing else."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "no sshd: apt-get install openssh-server"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("host", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    agent = f"env DOCKER_HOST={worker.address} {Path(sys.executable).with_name('sparkpair')} agent"
    (tmp_path / "authorized").write_text(f'command="{agent}",restrict {(tmp_path / "key.pub").read_text()}')
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {(tmp_path / 'host.pub').read_text()}")
    options = {
        "ListenAddress": "127.0.0.1",
        "Port": port,
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
    }
    (tmp_path / "sshd.conf").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen(
        [program, "-D", "-e", "-f", str(tmp_path / "sshd.conf")], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield imageship.Peer(getpass.getuser(), "127.0.0.1", tmp_path / "key", tmp_path / "known", port)
    finally:
        process.terminate()
        process.wait(timeout=10)


def test_the_image_goes_through_a_key_that_can_do_nothing_else(
    head: Engine, worker: Engine, sshd: imageship.Peer, order: imagebuild.Order
) -> None:
    built = imagebuild.build(head.docker, order, quiet=True)
    with imageship.reached(sshd) as reach:
        sent = imageship.ship(head.docker, str(built["tag"]), "worker", reach, quiet=True)
        assert sent["changed"] is True and sent["identity"] == built["identity"]
        assert imageship.ship(head.docker, str(built["tag"]), "worker", reach, quiet=True)["changed"] is False
        other = subprocess.run(reach(["docker", "ps"]), capture_output=True, text=True, check=False)
        assert other.returncode == 126 and "refused" in other.stderr
    remove_ours(head, worker)


def test_an_archive_of_another_image_is_not_kept(
    head: Engine, worker: Engine, order: imagebuild.Order
) -> None:
    tag = str(imagebuild.build(head.docker, order, quiet=True)["tag"])
    before = worker.images()

    def swapped(words: Sequence[str]) -> list[str]:
        whole = worker.agent(words)
        script = f'cat >/dev/null; docker --host {head.address} save base:1 {tag} | "$@"'
        return ["sh", "-c", script, "swap", *whole] if words[0] == "image-load" else whole

    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, tag, "worker", swapped, quiet=True)
    assert caught.value.code == "image-content" and "base:1" in caught.value.found
    assert worker.images() == before
    remove_ours(head)


@pytest.fixture
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose data root is a filesystem of its own, too small for the image."""
    folder = tmp_path_factory.mktemp("s")
    (folder / "root").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=45m", "tmpfs", str(folder / "root")], check=True)
    try:
        engine = Engine(folder, "vfs")
        try:
            yield engine
        finally:
            if engine.process.poll() is None:
                engine.stop()
    finally:
        subprocess.run(["umount", str(folder / "root")], check=True)


def test_field_report_36_a_full_disk_stops_before_the_first_byte_or_leaves_nothing(
    head: Engine, cramped: Engine, order: imagebuild.Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = str(imagebuild.build(head.docker, order, quiet=True)["tag"])
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, tag, "worker", cramped.agent, quiet=True)
    assert (caught.value.code, caught.value.host) == ("disk-full", "worker")
    assert "free on the filesystem" in caught.value.found

    monkeypatch.setattr(
        image, "short_of_room", lambda needs, free, host=None: None
    )  # someone filled it meanwhile
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, tag, "worker", cramped.agent, quiet=True)
    assert (caught.value.code, caught.value.host) == ("disk-full", "worker")
    assert "no space left" in caught.value.found
    assert cramped.images() == []

    cramped.stop()
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, tag, "worker", cramped.agent, quiet=True)
    assert (caught.value.code, caught.value.host) == ("docker-down", "worker")
    remove_ours(head)


def test_room_for_a_build_is_asked_under_the_engines_real_root(
    cramped: Engine, order: imagebuild.Order
) -> None:
    cramped.docker.run("import", "/dev/null", "base:1")
    wide = imagebuild.Order(order.inputs, order.pins, order.cache, 500_000_000)
    with pytest.raises(Problem) as caught:
        imagebuild.build(cramped.docker, wide, quiet=True)
    assert caught.value.code == "disk-full"
    root = cramped.docker.info()["DockerRootDir"]
    assert root in caught.value.found and str(root) in caught.value.needed
