"""Replicate over a real sshd and a real rsync, through a link that can be slowed, stalled and counted.

Needs openssh-server and rsync. The sshd is our own: a free port of 127.0.0.1, own host key, own keys.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sparkpair import locks, pagecache
from sparkpair.locks import Lock, LockedFile
from sparkpair.receipts import NAME

SPARKPAIR = str(Path(sys.executable).with_name("sparkpair"))
MB = 1_000_000
SIZES = {"model-1.safetensors": 24 * MB, "model-2.safetensors": 20 * MB, "model-3.safetensors": 16 * MB}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Link:
    """A TCP relay in front of sshd: counts bytes towards it, limits their rate, can hold them back."""

    target: int
    port: int = 0
    rate: float = 0.0  # bytes a second in all, 0: no limit
    stall_after: int = 0  # hold back a connection after so many bytes, once
    passed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    sockets: list[socket.socket] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self.sockets += [near, far]
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted:
                    seen += len(data)
                    with self.lock:
                        self.passed += len(data)
                        hold = 0 < self.stall_after < seen
                        if hold:
                            self.stall_after = 0
                        if self.rate:
                            time.sleep(len(data) / self.rate)
                    if hold:
                        return  # neither closed nor moving: what a dead cable looks like
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@dataclass
class World:
    folder: Path
    link: Link
    port: int

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def root(self) -> Path:
        """Stands in for /var/lib/sparkpair on the worker."""
        return self.folder / "sparkpair"

    @property
    def there(self) -> Path:
        return self.root / "weights/dsv41"

    def words(self, key: str = "plain", *more: str) -> list[str]:
        return [
            *(SPARKPAIR, "replicate", "--lock", str(self.folder / "lock.json"), "--dir", str(self.source)),
            *("--to", f"{getpass.getuser()}@127.0.0.1:{self.there}", "--port", str(self.link.port)),
            *("--identity", str(self.folder / key), "--known-hosts", str(self.folder / "known")),
            *("--json", *more),
        ]

    def replicate(self, key: str = "plain", *more: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            self.words(key, *more), capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, json.loads(done.stdout or "{}") or {"stderr": done.stderr}

    def ssh(self, key: str, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *("ssh", "-F", "none", "-p", str(self.port), "-i", str(self.folder / key)),
                *("-o", f"UserKnownHostsFile={self.folder / 'known'}", "-o", "BatchMode=yes"),
                *("-o", "IdentitiesOnly=yes", f"{getpass.getuser()}@127.0.0.1", *words),
            ],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "no sshd: apt-get install openssh-server"
    folder = tmp_path_factory.mktemp("pair")
    for name in ("host", "plain", "restricted", "chatty"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    agent = f'command="{SPARKPAIR} agent --root {folder}/sparkpair",restrict'
    chatty = """command="echo 'Have a nice day'; eval \\"$SSH_ORIGINAL_COMMAND\\"" """
    (folder / "authorized").write_text(
        f"{(folder / 'plain.pub').read_text()}{agent} {(folder / 'restricted.pub').read_text()}"
        f"{chatty}{(folder / 'chatty.pub').read_text()}"
    )
    port, link_port = free_port(), free_port()
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}\n[127.0.0.1]:{link_port} {key}\n")
    (folder / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nMaxStartups 50\n"
        "Subsystem sftp internal-sftp\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(
        [program, "-D", "-e", "-f", str(folder / "sshd.conf")], stderr=(folder / "sshd.log").open("wb")
    )
    link = Link(port, link_port)
    listener = socket.create_server(("127.0.0.1", link_port))
    threading.Thread(target=link.serve, args=(listener,), daemon=True).start()
    try:
        wait_for(port, server)
        yield World(folder, link, port)
    finally:
        listener.close()
        for end in link.sockets:
            end.close()
        server.terminate()
        server.wait(10)


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(100):
        assert server.poll() is None, "sshd ended at once"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    pytest.fail("sshd does not answer")


@pytest.fixture(autouse=True)
def fresh(world: World) -> Lock:
    """A source of 60 MB in three shards and two small files, and no folder on the other side."""
    shutil.rmtree(world.root, ignore_errors=True)
    shutil.rmtree(world.source, ignore_errors=True)
    (world.root / "weights").mkdir(parents=True)
    (world.source / "inner").mkdir(parents=True)
    content = {name: os.urandom(size) for name, size in SIZES.items()}
    content |= {"config.json": b"{}", "inner/a name with 'quotes' $(id)": b"x"}
    for name, data in content.items():
        (world.source / name).write_bytes(data)
    files = [
        LockedFile(name, len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in content.items()
    ]
    lock = Lock("owner/name", "0" * 40, tuple(sorted(files)))
    (world.folder / "lock.json").write_text(locks.dump(lock))
    world.link.passed, world.link.rate, world.link.stall_after = 0, 0.0, 0
    return lock


def assert_whole(world: World, lock: Lock) -> None:
    for entry in lock.files:
        place = world.there / entry.path
        assert hashlib.sha256(place.read_bytes()).hexdigest() == entry.digest, entry.path
        assert not place.is_symlink()
    found = {path.relative_to(world.there).as_posix() for path in world.there.rglob("*") if path.is_file()}
    assert found == {entry.path for entry in lock.files} | {NAME}


@pytest.mark.parametrize("key", ["plain", "restricted"])
def test_a_folder_goes_over_once_and_is_verified_there(world: World, fresh: Lock, key: str) -> None:
    code, told = world.replicate(key)
    assert code == 0, told
    assert told["ok"] and told["changed"] and told["files"] == 5 and told["retries"] == 0
    assert told["bytes"] == fresh.total_bytes <= told["wire_bytes"] <= 1.02 * fresh.total_bytes
    assert_whole(world, fresh)
    sent = world.link.passed
    assert sent <= 1.05 * fresh.total_bytes
    code, told = world.replicate(key)
    assert (code, told["changed"], told["files"], told["kept_files"]) == (0, False, 0, 5)
    assert world.link.passed - sent < 0.2 * MB


def test_neither_side_keeps_the_copy_in_its_page_cache_field_report_53(world: World, fresh: Lock) -> None:
    for name in SIZES:
        with (world.source / name).open("rb") as handle:
            os.fsync(handle.fileno())
            pagecache.drop(handle.fileno())
    code, told = world.replicate()
    assert code == 0, told
    for side in (world.source, world.there):
        assert sum(pagecache.resident_bytes(side / name) for name in SIZES) <= 0.05 * fresh.total_bytes


def test_links_arrive_as_plain_files(world: World, fresh: Lock) -> None:
    blob = world.folder / "blob"
    (world.source / "model-2.safetensors").rename(blob)
    (world.source / "model-2.safetensors").symlink_to(blob)
    (world.source / "inner").rename(world.folder / "elsewhere")
    (world.source / "inner").symlink_to(world.folder / "elsewhere")
    try:
        code, told = world.replicate("restricted")
        assert code == 0, told
        assert_whole(world, fresh)
        assert (world.there / "inner").is_dir() and not (world.there / "inner").is_symlink()
    finally:
        shutil.rmtree(world.folder / "elsewhere")


def test_a_flipped_byte_on_the_worker_sends_that_file_alone(world: World, fresh: Lock) -> None:
    assert world.replicate("restricted")[0] == 0
    with (world.there / "model-3.safetensors").open("r+b") as handle:
        handle.seek(7 * MB)
        byte = handle.read(1)
        handle.seek(7 * MB)
        handle.write(bytes([byte[0] ^ 0x40]))
    sent = world.link.passed
    code, told = world.replicate("restricted")
    assert (code, told["files"]) == (0, 1)
    assert world.link.passed - sent <= 1.05 * SIZES["model-3.safetensors"]
    assert_whole(world, fresh)


@pytest.mark.parametrize("key", ["plain", "restricted"])
def test_killed_at_half_it_sends_only_what_is_missing_field_report_50(
    world: World, fresh: Lock, key: str
) -> None:
    world.link.rate = 40 * MB
    first = subprocess.Popen(
        world.words(key, "--streams", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while world.link.passed < 0.5 * fresh.total_bytes:
        assert first.poll() is None, "it ended before half"
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    at_kill = world.link.passed
    world.link.rate = 0
    time.sleep(1.5)
    assert world.link.passed - at_kill < 6 * MB, "its rsync went on without it"
    assert not (world.there / NAME).exists() or json.loads((world.there / NAME).read_text())
    before = world.link.passed
    code, told = world.replicate(key)
    assert code == 0, told
    assert world.link.passed - before <= 0.6 * fresh.total_bytes
    assert_whole(world, fresh)


def test_a_flow_that_stops_moving_is_ended_and_resumed(world: World, fresh: Lock) -> None:
    world.link.rate = 60 * MB
    world.link.stall_after = 8 * MB
    code, told = world.replicate("restricted", "--stall", "2", "--streams", "2")
    assert code == 0, told
    assert told["retries"] >= 1
    assert world.link.passed <= 1.3 * fresh.total_bytes
    assert_whole(world, fresh)


def test_a_bad_source_sends_nothing_field_report_37(world: World, fresh: Lock) -> None:
    with (world.source / "model-1.safetensors").open("r+b") as handle:
        handle.write(b"\0\0\0\0\0\0\0\0")
    code, told = world.replicate("restricted")
    assert code == 1
    assert told["problems"][0]["code"] == "source-wrong-hash"
    assert "model-1.safetensors" in told["problems"][0]["found"]
    assert not world.there.exists()
    assert world.link.passed < 0.2 * MB


def test_the_wrong_key_and_the_wrong_host_key_are_told_apart(world: World) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(world.folder / "stranger")],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    code, told = world.replicate("stranger")
    assert (code, told["problems"][0]["code"]) == (1, "peer-refuses-key")
    known = (world.folder / "known").read_text()
    stranger = " ".join((world.folder / "stranger.pub").read_text().split()[:2])
    try:
        (world.folder / "known").write_text(f"[127.0.0.1]:{world.link.port} {stranger}\n")
        code, told = world.replicate()
        assert (code, told["problems"][0]["code"]) == (1, "peer-host-key")
    finally:
        (world.folder / "known").write_text(known)


def test_the_restricted_key_reaches_no_other_folder(world: World) -> None:
    words = world.words("restricted")
    words[words.index("--to") + 1] = f"{getpass.getuser()}@127.0.0.1:{world.root}/.ssh"
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "refused" in done.stderr
    assert not (world.root / ".ssh").exists()


def test_the_restricted_key_opens_no_shell_and_forwards_nothing_field_report_51(world: World) -> None:
    for words in ((), ("id",), ("sh", "-c", "id"), ("-tt", "id"), ("-s", "sftp"), ("cat", "/etc/passwd")):
        options = [word for word in words if word.startswith("-") and word != "-c"]
        done = world.ssh("restricted", *words) if not options else run_with(world, words)
        assert done.returncode not in (0,), (words, done.stdout)
        assert "uid=" not in done.stdout and "root:" not in done.stdout
    target = free_port()
    with socket.create_server(("127.0.0.1", target)):
        done = run_with(world, ("-W", f"127.0.0.1:{target}"))
        assert done.returncode != 0
        assert "prohibited" in done.stderr or "administratively" in done.stderr


def run_with(world: World, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """ssh with options before the host."""
    full = [
        *(
            "ssh",
            "-F",
            "none",
            "-p",
            str(world.port),
            "-i",
            str(world.folder / "restricted"),
            "-o",
            "BatchMode=yes",
        ),
        *(
            "-o",
            f"UserKnownHostsFile={world.folder / 'known'}",
            "-o",
            "IdentitiesOnly=yes",
            "-o",
            "LogLevel=INFO",
        ),
    ]
    login = f"{getpass.getuser()}@127.0.0.1"
    if words[0] == "-W":
        full += [*words, login]
    else:
        full += [words[0], login, *words[1:]]
    return subprocess.run(full, input="", capture_output=True, text=True, timeout=30, check=False)


def test_rsync_with_the_restricted_key_can_neither_read_nor_delete(world: World) -> None:
    world.there.mkdir(parents=True)
    (world.there / "kept").write_text("kept")
    rsh = (
        f"ssh -F none -p {world.port} -i {world.folder}/restricted -o IdentitiesOnly=yes -o BatchMode=yes"
        f" -o UserKnownHostsFile={world.folder}/known"
    )
    login = f"{getpass.getuser()}@127.0.0.1"
    out = world.folder / "stolen"
    for words in (
        ["-t", f"{login}:/etc/passwd", f"{out}/"],
        ["-rt", "--delete", f"{world.source}/", f"{login}:{world.there}/"],
        ["-rt", f"{world.source}/", f"{login}:{world.there}/../../.ssh/"],
        ["-rlt", f"{world.source}/", f"{login}:{world.there}/"],
    ):
        done = subprocess.run(
            ["rsync", "-e", rsh, *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0, words
        assert "refused" in done.stderr, done.stderr
    assert not out.exists()
    assert [path.name for path in world.there.iterdir()] == ["kept"]


@pytest.mark.parametrize("key", ["plain", "restricted"])
def test_names_that_rsync_takes_for_comments_or_options_travel_as_names(
    world: World, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    content = {name: name.encode() for name in ("#1", ";2", "-3", "inner/#4", "a:5", ".6", "*7", "inner/8 8")}
    files = [
        LockedFile(name, len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in content.items()
    ]
    lock = Lock("owner/name", "0" * 40, tuple(sorted(files)))
    (world.folder / "lock.json").write_text(locks.dump(lock))
    for source in ("w:1", "-w"):
        shutil.rmtree(world.there, ignore_errors=True)
        shutil.rmtree(world.folder / source, ignore_errors=True)
        for name, data in content.items():
            place = world.folder / source / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        monkeypatch.chdir(world.folder)
        words = world.words(key)
        index = words.index("--dir")
        words[index : index + 2] = [f"--dir={source}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert_whole(world, lock)


def test_a_shell_that_prints_is_passed_over_or_named_and_never_waited_for_field_report_51(
    world: World, fresh: Lock
) -> None:
    code, told = world.replicate("chatty")
    assert (code, told["problems"][0]["code"]) == (1, "peer-shell-prints")
    assert "Have a nice day" in told["problems"][0]["found"]
    assert world.replicate("plain")[0] == 0
    code, told = world.replicate("chatty")  # where no rsync is needed, it simply works
    assert (code, told["kept_files"]) == (0, 5)
    assert_whole(world, fresh)


@pytest.mark.parametrize("key", ["plain", "restricted"])
def test_receipts_that_can_not_be_written_end_in_a_note_field_report_50(
    world: World, fresh: Lock, key: str
) -> None:
    (world.there / NAME).mkdir(parents=True)
    code, told = world.replicate(key)
    assert code == 0, told
    assert told["files"] == 5
    assert NAME in told["notes"][0]
    assert "on 127.0.0.1" in told["notes"][0]
    for entry in fresh.files:
        assert hashlib.sha256((world.there / entry.path).read_bytes()).hexdigest() == entry.digest


def test_what_a_killed_replacement_left_is_swept_at_the_next_copy_field_report_50(
    world: World, fresh: Lock
) -> None:
    assert world.replicate("restricted")[0] == 0
    shard = world.there / "model-3.safetensors"
    shard.write_bytes(os.urandom(SIZES["model-3.safetensors"]))
    world.link.rate = 20 * MB
    first = subprocess.Popen(world.words("restricted"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (halves := list(world.there.glob(".model-3.safetensors.*"))):
        assert first.poll() is None, "it ended before"
        time.sleep(0.01)
    time.sleep(0.2)
    rsyncs = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if (words := _words(path))[:2] == ["rsync", "--server"] and f"{world.there}/" in words
    ]
    for pid in rsyncs:  # as a power cut would: it has no time to tidy up
        os.kill(pid, signal.SIGKILL)
    first.send_signal(signal.SIGKILL)
    first.wait()
    world.link.rate = 0
    time.sleep(1)
    assert halves[0].exists()
    code, told = world.replicate("restricted")
    assert code == 0, told
    assert_whole(world, fresh)


def _words(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it ended meanwhile
        return [""]


def test_a_source_that_is_cut_short_on_the_way_is_named_as_the_source(world: World, fresh: Lock) -> None:
    world.link.rate = 20 * MB
    words = world.words("restricted", "--streams", "1")
    copy = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while world.link.passed < 2 * MB:
        assert copy.poll() is None, "it ended before"
        time.sleep(0.01)
    os.truncate(world.source / "model-1.safetensors", 1 * MB)
    world.link.rate = 0
    told = json.loads(copy.communicate(timeout=60)[0])
    assert copy.returncode == 1
    assert told["problems"][0]["code"] == "source-changed"
    assert "model-1.safetensors" in told["problems"][0]["found"]
    assert f"--dir {world.source} --full" in told["problems"][0]["do"]


def _agents(world: World) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = _words(path)
        if "python" in words[0] and {"agent", str(world.root)} <= set(words):
            found.add(int(path.parent.name))
    return found


def test_a_verification_that_was_stopped_on_the_worker_is_begun_again_field_report_50(
    world: World, fresh: Lock
) -> None:
    world.link.rate = 20 * MB
    words = world.words("restricted", "--stall", "1", "--streams", "1")
    earlier = _agents(world)
    copy = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    stopped: set[int] = set()
    try:
        while world.link.passed < 2 * MB:
            assert copy.poll() is None, "it ended before"
            time.sleep(0.01)
        stopped = _agents(world) - earlier
        for agent in stopped:
            os.kill(agent, signal.SIGSTOP)
        told = json.loads(copy.communicate(timeout=90)[0])
    finally:
        copy.kill()
        for agent in stopped:
            os.kill(agent, signal.SIGCONT)
    assert stopped
    assert copy.returncode == 0, told
    assert_whole(world, fresh)
