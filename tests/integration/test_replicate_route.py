"""The copy goes over the rail or not at all: two network namespaces with a rail and a LAN (field reports 2, 50).

Needs root, openssh-server, rsync and iproute2. Both "nodes" share this machine's filesystem.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sparkpair import locks
from sparkpair.locks import Lock, LockedFile

SPARKPAIR = str(Path(sys.executable).with_name("sparkpair"))
HEAD, WORKER = f"sp-head-{os.getpid()}", f"sp-worker-{os.getpid()}"
SIZE = 30_000_000
RAIL, LAN = "enp1s0f0np0", "wlp9s0"


def sh(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def inside(namespace: str, *words: str) -> str:
    return sh("ip", "netns", "exec", namespace, *words)


@dataclass
class Net:
    folder: Path

    def sent(self, device: str) -> int:
        """Bytes that left the head over a device."""
        row = json.loads(inside(HEAD, "ip", "-s", "-j", "link", "show", device))[0]
        return int(row["stats64"]["tx"]["bytes"])

    def words(self, address: str, *more: str) -> list[str]:
        return [
            *("ip", "netns", "exec", HEAD, SPARKPAIR, "replicate"),
            *("--lock", str(self.folder / "lock.json"), "--dir", str(self.folder / "source")),
            *("--to", f"root@{address}:{self.folder / 'there'}", "--port", "2222", "--json"),
            *("--identity", str(self.folder / "key"), "--known-hosts", str(self.folder / "known"), *more),
        ]

    def replicate(self, address: str, *more: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            self.words(address, *more), capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, json.loads(done.stdout or "{}") or {"stderr": done.stderr}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    assert os.geteuid() == 0, "network namespaces need root"
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "no sshd: apt-get install openssh-server"
    folder = tmp_path_factory.mktemp("net")
    with contextlib.ExitStack() as stack:
        for name in (HEAD, WORKER):
            sh("ip", "netns", "add", name)
            stack.callback(sh, "ip", "netns", "del", name)
            inside(name, "ip", "link", "set", "lo", "up")
        for device, network, mtu in ((RAIL, "10.20.0", "9000"), (LAN, "192.0.2", "1500")):
            sh("ip", "link", "add", device, "netns", HEAD, "type", "veth", "peer", device, "netns", WORKER)
            for number, name in enumerate((HEAD, WORKER), start=1):
                inside(name, "ip", "addr", "add", f"{network}.{number}/24", "dev", device)
                inside(name, "ip", "link", "set", device, "up", "mtu", mtu)
        # The trap: with the rail down, the worker's rail address is still reached, through the LAN.
        inside(HEAD, "ip", "route", "add", "default", "via", "192.0.2.2")
        inside(WORKER, "ip", "route", "add", "default", "via", "192.0.2.1")
        for name in ("host", "key"):
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        key = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known").write_text(f"[10.20.0.2]:2222 {key}\n[192.0.2.2]:2222 {key}\n")
        (folder / "sshd.conf").write_text(
            f"Port 2222\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        server = subprocess.Popen(
            ["ip", "netns", "exec", WORKER, program, "-D", "-f", str(folder / "sshd.conf")],
            stderr=subprocess.DEVNULL,
        )
        stack.callback(server.wait, 10)
        stack.callback(server.terminate)
        for _ in range(100):
            if "2222" in inside(WORKER, "ss", "-Hltn"):
                break
            time.sleep(0.1)
        data = os.urandom(SIZE)
        (folder / "source").mkdir()
        (folder / "source/model.safetensors").write_bytes(data)
        entry = LockedFile("model.safetensors", SIZE, sha256=hashlib.sha256(data).hexdigest())
        (folder / "lock.json").write_text(locks.dump(Lock("owner/name", "0" * 40, (entry,))))
        yield Net(folder)


@pytest.fixture(autouse=True)
def fresh(net: Net) -> Iterator[None]:
    shutil.rmtree(net.folder / "there", ignore_errors=True)
    yield
    for name in (HEAD, WORKER):
        inside(name, "ip", "link", "set", RAIL, "up")


def test_the_bytes_go_over_the_rail_alone(net: Net) -> None:
    rail, lan = net.sent(RAIL), net.sent(LAN)
    code, told = net.replicate("10.20.0.2", "--link-subnet", "10.20.0.0/24")
    assert code == 0, told
    assert told["route"] == [RAIL]
    assert net.sent(RAIL) - rail >= SIZE
    assert net.sent(LAN) - lan < 20_000


def test_the_worker_named_by_its_lan_address_is_refused_field_report_2(net: Net) -> None:
    code, told = net.replicate("192.0.2.2", "--link-subnet", "10.20.0.0/24")
    assert (code, told["problems"][0]["code"]) == (1, "link-unreachable")
    assert LAN in told["problems"][0]["found"]
    assert not (net.folder / "there").exists()


def test_a_rail_that_is_down_stops_the_copy_though_a_route_is_left_field_report_50(net: Net) -> None:
    inside(HEAD, "ip", "link", "set", RAIL, "down")
    lan = net.sent(LAN)
    code, told = net.replicate("10.20.0.2", "--link-subnet", "10.20.0.0/24")
    assert (code, told["problems"][0]["code"]) == (1, "link-unreachable")
    assert "allow_lan_copy" in told["problems"][0]["do"]
    assert net.sent(LAN) - lan < 20_000


def test_the_lan_is_taken_when_that_is_said(net: Net) -> None:
    inside(HEAD, "ip", "link", "set", RAIL, "down")
    code, told = net.replicate("192.0.2.2", "--allow-lan")
    assert code == 0, told
    assert told["route"] == [LAN]


def test_a_rail_that_goes_down_midway_does_not_move_the_copy_to_the_lan(net: Net) -> None:
    inside(
        HEAD,
        "tc",
        "qdisc",
        "add",
        "dev",
        RAIL,
        "root",
        "tbf",
        "rate",
        "80mbit",
        "burst",
        "100kb",
        "latency",
        "1s",
    )
    try:
        rail, lan = net.sent(RAIL), net.sent(LAN)
        running = subprocess.Popen(
            net.words("10.20.0.2", "--link-subnet", "10.20.0.0/24", "--stall", "1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while net.sent(RAIL) - rail < SIZE / 4:
            assert running.poll() is None, "it ended early"
            time.sleep(0.05)
        inside(HEAD, "ip", "link", "set", RAIL, "down")
        told = json.loads(running.communicate(timeout=150)[0])
    finally:
        inside(HEAD, "tc", "qdisc", "del", "dev", RAIL, "root")
    assert running.returncode == 1
    assert told["problems"][0]["code"] in ("copy-stalled", "link-unreachable")
    assert net.sent(LAN) - lan < 50_000
