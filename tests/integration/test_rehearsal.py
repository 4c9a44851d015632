"""The rehearsal world itself: a second one beside the project's, in a folder of its own.

It has an engine, a network and names of its own, so it disturbs nothing. Needs root.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rehearsal import docker_engine, images, leftovers, shell
from rehearsal.plan import Plan

PROJECT = Path(__file__).resolve().parents[2]
MARKER = "/usr/lib/python3.11/EXTERNALLY-MANAGED"
NETPLAN = """\
network:
  version: 2
  renderer: networkd
  ethernets:
    enp1s0f0np0: {{addresses: [10.20.0.{rank}/24], mtu: 9000, dhcp4: false, dhcp6: false}}
    enP2p1s0f0np0: {{addresses: [10.21.0.{rank}/24], mtu: 9000, dhcp4: false, dhcp6: false}}
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="starts a Docker engine of its own: needs root on Debian or Ubuntu"
)


class World:
    """A clone with its own rehearsal, driven by the command as a user would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan = Plan(root)
        self.engine = docker_engine.PrivateEngine(self.plan)

    def run(self, *words: str, check: bool = True) -> str:
        env = {
            **os.environ,
            "SPARKPAIR_ENGINE": "private",
            "SPARKPAIR_CACHE": str(images.cache_dir(Plan(PROJECT))),
        }
        done = subprocess.run(
            [sys.executable, "-m", "rehearsal", *words],
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout if check else done.stdout + done.stderr

    def at(self, node: str, script: str) -> str:
        return self.run("exec", node, "sh", "-c", script)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.run("status", "--json"))
        return answer

    def wait(self, node: str, script: str, wanted: str, seconds: float = 15) -> None:
        until = time.monotonic() + seconds
        while (seen := self.at(node, f"{script} || true").strip()) != wanted:
            assert time.monotonic() < until, f"{script} on {node}: {seen!r}, not {wanted!r}"
            time.sleep(0.3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("clone")
    for part in ("rehearsal", "files", "plugins"):
        shutil.copytree(PROJECT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    made = World(root)
    made.run("up")
    yield made
    made.run("down")


@pytest.fixture(scope="module")
def linked(world: World) -> World:
    """The world with addresses on both rails, set by netplan as the link role does."""
    for rank, node in enumerate(("spark-a", "spark-b"), start=1):
        text = NETPLAN.format(rank=rank)
        world.at(
            node, f"umask 077; cat >/etc/netplan/40-cx7.yaml <<'END'\n{text}END\nnetplan apply 2>/dev/null"
        )
    world.wait("spark-a", "ping -qc1 -W1 -Mdo -s8972 10.21.0.2 >/dev/null && echo through", "through")
    return world


def test_each_node_is_a_fit_test_host_field_report_78(world: World) -> None:
    for node in ("spark-a", "spark-b"):
        assert world.at(node, "cat /proc/1/comm").strip() == "systemd"
        assert world.at(node, "systemctl is-system-running").strip() == "running"
        assert world.at(node, "systemd-run --quiet --pipe --wait echo a unit ran").strip() == "a unit ran"


def test_the_nodes_keep_the_externally_managed_marker_field_report_76(world: World) -> None:
    for node in ("spark-a", "spark-b"):
        world.at(node, f"test -s {MARKER}")


def test_the_nodes_differ_where_two_machines_do(world: World) -> None:
    for thing in ("cat /etc/machine-id", "hostname", "cat /etc/ssh/ssh_host_ed25519_key.pub"):
        assert world.at("spark-a", thing) != world.at("spark-b", thing)


def test_each_login_user_is_another_and_needs_its_password_for_sudo(world: World) -> None:
    for node, user in (("spark-a", "ada"), ("spark-b", "bo")):
        assert world.run("ssh", node, "whoami").strip() == user
        assert "password is required" in world.run("ssh", node, "sudo -n true", check=False)
        assert world.run("ssh", node, "echo rehearsal | sudo -S -p '' whoami").strip() == "root"


def test_the_worker_has_no_way_out_and_learns_it_at_once(world: World) -> None:
    assert "default" in world.at("spark-a", "ip route")
    assert "default" not in world.at("spark-b", "ip route")
    begun = time.monotonic()
    assert "no answer" in world.at("spark-b", "getent hosts example.org || echo no answer")
    assert time.monotonic() - begun < 2


def test_a_second_world_takes_another_network(world: World) -> None:
    mine = ipaddress.ip_network(json.loads(world.plan.world_file.read_text())["subnet"])
    routes = json.loads(subprocess.run(["ip", "-j", "route"], capture_output=True, check=True).stdout)
    others = [route["dst"] for route in routes if route.get("dev") != world.plan.bridge]
    assert not any(mine.overlaps(ipaddress.ip_network(dst)) for dst in others if dst != "default")


def test_a_second_up_changes_nothing(world: World) -> None:
    before = world.at("spark-a", "cat /proc/1/stat")
    world.run("up")
    assert world.at("spark-a", "cat /proc/1/stat").split()[21] == before.split()[21]  # the same boot


def test_up_takes_a_node_whose_rank_failed_as_it_is(world: World) -> None:
    world.at("spark-a", "systemd-run --quiet --wait --unit sparkpair-rank0 false || true")
    assert world.at("spark-a", "systemctl is-system-running || true").strip() == "degraded"
    world.run("up")
    assert world.at("spark-a", "systemctl is-failed sparkpair-rank0").strip() == "failed"
    world.at("spark-a", "systemctl reset-failed")


def test_the_ranks_docker_options_are_taken_unmodified(world: World) -> None:
    options = (
        "--gpus all --network host --ipc host --init --cap-add IPC_LOCK --device /dev/infiniband "
        "--ulimit memlock=-1 --ulimit stack=67108864 --ulimit core=1 --oom-score-adj 1000 --restart no"
    )
    image = "nvcr.io/nvidia/pytorch:26.07-py3"
    run = f"docker run --rm {options} {image} sh -c 'ls /dev/infiniband && nvcc --version'"
    said = world.at("spark-a", run)
    assert "uverbs3" in said
    assert "release 13.3" in said
    world.at("spark-a", f"docker run --rm --runtime nvidia {image} true")


def test_the_base_image_is_on_the_head_alone(world: World) -> None:
    list_images = "docker image ls --format '{{.Repository}}:{{.Tag}}'"
    assert "nvcr.io/nvidia/pytorch:26.07-py3" in world.at("spark-a", list_images).split()
    assert not world.at("spark-b", list_images).split()


def test_the_source_can_be_fetched_by_its_commit(world: World) -> None:
    said = json.loads(world.plan.world_file.read_text())
    script = (
        f"rm -rf /tmp/e && git init -q /tmp/e && git -C /tmp/e fetch -q {said['engine_repo']} "
        f"{said['engine_commit']} && git -C /tmp/e rev-parse FETCH_HEAD"
    )
    assert world.at("spark-a", script).strip() == said["engine_commit"]


def test_the_gid_table_follows_the_addresses_that_netplan_set(linked: World) -> None:
    rows = linked.at("spark-a", "show_gids").split("\n")
    found = [row.split() for row in rows if "10.20.0.1" in row and "v2" in row]
    assert [(row[0], row[2]) for row in found] == [("rocep1s0f0", "3")]
    mtu = "cat /run/spark-tree/sys/class/infiniband/rocep1s0f0/ports/1/active_mtu"
    linked.wait("spark-b", mtu, "4096")


def test_a_pulled_cable_shows_on_both_ends_and_in_both_trees(linked: World) -> None:
    linked.run("fault", "rail-down", "1")
    try:
        for node in ("spark-a", "spark-b"):
            linked.wait(node, "cat /sys/class/net/enP2p1s0f0np0/carrier", "0")
            tree = "cat /run/spark-tree/sys/class/net/enP2p1s0f0np0/carrier"
            linked.wait(node, tree, "0")
            state = "cat /run/spark-tree/sys/class/infiniband/roceP2p1s0f0/ports/1/state"
            linked.wait(node, state, "1: DOWN")
        assert linked.status()["rails"] == {"0": "plugged", "1": "pulled"}
        linked.at("spark-a", "ping -qc1 -W1 -Mdo -s8972 10.20.0.2")  # the other rail is untouched
    finally:
        linked.run("fault", "rail-up", "1")
    linked.wait("spark-a", "ping -qc1 -W1 -Mdo -s8972 10.21.0.2 >/dev/null && echo through", "through")


@pytest.mark.parametrize("how", [(), ("--hard",)], ids=["clean", "hard"])
def test_a_rebooted_node_has_its_rails_and_addresses_again(linked: World, how: tuple[str, ...]) -> None:
    before = linked.at("spark-b", "cat /etc/machine-id")
    linked.run("fault", "reboot", "spark-b", *how)
    assert linked.at("spark-b", "cat /etc/machine-id") == before
    linked.wait("spark-a", "ping -qc1 -W1 -Mdo -s8972 10.20.0.2 >/dev/null && echo through", "through")
    linked.at("spark-b", "test -c /dev/infiniband/uverbs0 && docker info >/dev/null")


def test_low_memory_shows_where_it_was_ordered(world: World) -> None:
    shown = "awk '/MemAvailable/ {print int($2 / 1048576)}' /run/spark-tree/proc/meminfo"
    world.run("fault", "memory", "60", "--node", "spark-b")
    assert world.at("spark-b", shown).strip() == "60"
    assert int(world.at("spark-a", shown)) > 112
    world.run("fault", "memory", "ok")
    world.wait("spark-b", shown, "119")


def test_dropping_caches_gives_free_memory_back_field_report_53(world: World) -> None:
    free = "awk '/MemFree/ {print int($2 / 1048576)}' /run/spark-tree/proc/meminfo"
    world.run("fault", "memory", "115", "--cache", "95")
    world.wait("spark-a", free, "20")
    world.at("spark-a", "echo 3 >/run/spark-tree/proc/sys/vm/drop_caches")
    world.wait("spark-a", free, "114")
    world.run("fault", "memory", "ok")


def test_the_hub_fails_as_ordered_and_as_often(world: World) -> None:
    world.run("fault", "hub", "503", "--path", "config.json", "--times", "1")
    url = json.loads(world.plan.world_file.read_text())["hub_url"]
    ask = (
        f"curl -s -o /dev/null -w '%{{http_code}} ' "
        f"{url}/deepseek-ai/DeepSeek-V4.1-Flash-1017/resolve/main/config.json"
    )
    first, second = world.at("spark-a", f"{ask}; {ask}").split()
    assert first == "503"
    assert second != "503"
    assert "well again" in world.run("fault", "hub", "ok")


def test_a_rank_that_does_not_run_cannot_be_killed(world: World) -> None:
    said = world.run("fault", "kill-rank", "1", check=False)
    assert "found:" in said
    assert "needed: a running container sparkpair-rank1" in said


def kill_engine(world: World, *, with_shims: bool) -> None:
    """End the engine as the machine's out-of-memory killer would: nothing gets to clean up."""
    victims = [world.engine.pid()]
    if with_shims:
        victims += leftovers.shims_of(shell.processes(), world.engine.run)
    for pid in victims:
        assert pid
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)


@pytest.mark.parametrize("with_shims", [False, True], ids=["engine", "engine-and-shims"])
def test_an_engine_that_was_killed_is_cleared_away_and_started_again(world: World, with_shims: bool) -> None:
    kill_engine(world, with_shims=with_shims)
    world.run("up")
    assert world.at("spark-a", "systemctl is-system-running").strip() == "running"
    assert world.at("spark-a", "docker image ls -q nvcr.io/nvidia/pytorch").strip()
    assert set(world.status()["rails"].values()) == {"plugged"}


def test_down_leaves_nothing_even_of_a_killed_engine(tmp_path: Path, world: World) -> None:
    kill_engine(world, with_shims=True)
    said = world.run("down")
    assert "nothing is left" in said
    assert not (Path("/sys/class/net") / world.plan.bridge).exists()
    assert not world.engine.run.exists()
    assert not world.engine.data.exists()
    assert world.plan.network not in shell.run("iptables-save")
    mounts = Path("/proc/self/mountinfo").read_text()
    assert leftovers.mounts_below(mounts, [world.root]) == []
    assert not list(leftovers.CGROUPS.glob(f"*/{world.engine.cgroup}"))
    assert "not up" in world.run("status")
