"""The rehearsal's own decisions: subnets, environment, left-overs, what it builds and runs."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparkpair.problem import Problem

from rehearsal import (
    bootstrap,
    capabilities,
    docker_engine,
    images,
    leftovers,
    network,
    nodes,
    plan,
    rails,
    services,
    shell,
    sources,
)
from rehearsal.__main__ import build_parser, screen
from rehearsal.hub.modes import MODES as HUB_MODES
from rehearsal.node import runc
from rehearsal.plan import NODES, Plan, choose_subnet, site_environment
from rehearsal.ports import mac

HERE = Plan(Path("/srv/clone"))
NET = ipaddress.IPv4Network


def test_the_preferred_subnet_is_taken_when_it_is_free() -> None:
    assert choose_subnet([NET("192.168.1.0/24"), NET("172.18.0.0/16")]) == NET("10.77.0.0/24")


def test_a_subnet_in_use_is_left_alone() -> None:
    assert choose_subnet([NET("10.77.0.0/24")]) == NET("10.77.1.0/24")
    assert choose_subnet([NET("10.77.0.0/16")]) == NET("10.78.0.0/24")


def test_no_free_subnet_is_a_problem_that_says_so() -> None:
    with pytest.raises(Problem) as caught:
        choose_subnet([NET("10.0.0.0/8")])
    assert caught.value.code == "no-free-subnet"


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(64, 110), st.integers(0, 255), st.integers(8, 30)), max_size=6))
def test_a_chosen_subnet_overlaps_nothing(taken: list[tuple[int, int, int]]) -> None:
    networks = [NET(f"10.{b}.{c}.0/{bits}", strict=False) for b, c, bits in taken]
    try:
        chosen = choose_subnet(networks)
    except Problem:
        return
    assert not any(chosen.overlaps(other) for other in [*networks, *map(NET, plan.RESERVED)])


def test_two_clones_share_no_name() -> None:
    other = Plan(Path("/srv/clone2"))
    pairs = [(HERE.id, other.id), (HERE.bridge, other.bridge), (HERE.cable, other.cable)]
    pairs += [(HERE.container(node), other.container(node)) for node in NODES]
    assert all(mine != theirs for mine, theirs in pairs)


def test_names_fit_the_kernels_limits_in_a_deep_folder() -> None:
    deep = Plan(Path("/" + "a-rather-long-folder-name/" * 12))
    assert len(deep.bridge) <= 15
    assert all(len(end.here) <= 15 for end in rails.ENDS)
    sockets = [
        docker_engine.PrivateEngine(deep).socket,
        docker_engine.PrivateEngine(deep).run / "exec/containerd",
    ]
    assert all(len(str(path)) < 80 for path in sockets)


def test_only_what_means_the_same_in_a_node_is_handed_on() -> None:
    environment = {
        "PIP_CERT": "/etc/ssl/certs/ca-certificates.crt",
        "SSL_CERT_FILE": "/home/me/company.pem",
        "PIP_INDEX_URL": "https://packages.example/simple",
        "PIP_FIND_LINKS": "/opt/wheels",
        "https_proxy": "http://proxy.example:3128",
        "http_proxy": "http://localhost:3128",
        "HF_TOKEN": "hf_secret",
    }
    kept = site_environment(environment, NET("10.77.0.0/24"))
    assert kept == {
        "PIP_CERT": "/etc/ssl/certs/ca-certificates.crt",
        "PIP_INDEX_URL": "https://packages.example/simple",
        "https_proxy": "http://proxy.example:3128",
        "no_proxy": "10.77.0.0/24,localhost,127.0.0.1",
        "NO_PROXY": "10.77.0.0/24,localhost,127.0.0.1",
    }


def test_the_world_file_tells_all_that_an_inventory_needs() -> None:
    said = plan.world_json(HERE, "unix:///x", {"engine": "a" * 40, "kit": "b" * 40}, {})
    assert said["nodes"]["spark-b"] == {
        "address": "10.77.0.12",
        "user": "bo",
        "role": "worker",
        "rank": 1,
        "container": HERE.container(NODES[1]),
    }
    assert said["engine_repo"] == "git://10.77.0.1:7418/engine.git"
    assert json.loads(json.dumps(said)) == said


def test_an_unknown_node_is_refused_with_those_that_there_are() -> None:
    assert plan.node_named("worker").name == "spark-b"
    with pytest.raises(Problem, match="spark-c"):
        plan.node_named("spark-c")


# Left-overs of a private engine that died.


def test_mounts_of_a_dead_engine_are_found_deepest_first() -> None:
    mountinfo = (
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n"
        "2 1 0:5 / /srv/clone/.rehearsal/docker/overlay2/ab/merged rw - overlay overlay rw\n"
        "3 1 0:5 / /srv/clone/.rehearsal/docker rw - ext4 x rw\n"
        "4 1 0:5 / /srv/clone/.rehearsal/docker-of-another rw - ext4 x rw\n"
        "5 1 0:5 / /run/sparkpair-0a/with\\040space rw - tmpfs x rw\n"
    )
    places = [Path("/srv/clone/.rehearsal/docker"), Path("/run/sparkpair-0a")]
    assert leftovers.mounts_below(mountinfo, places) == [
        "/srv/clone/.rehearsal/docker/overlay2/ab/merged",
        "/srv/clone/.rehearsal/docker",
        "/run/sparkpair-0a/with space",
    ]


def test_another_engines_shims_are_never_ours() -> None:
    run = docker_engine.PrivateEngine(HERE).run
    seen = [
        (
            10,
            [
                "/usr/bin/containerd-shim-runc-v2",
                "-namespace",
                "moby",
                "-address",
                f"{run}/exec/containerd/containerd.sock",
            ],
        ),
        (
            11,
            [
                "/usr/bin/containerd-shim-runc-v2",
                "-namespace",
                "moby",
                "-address",
                "/run/containerd/containerd.sock",
            ],
        ),
        (12, ["containerd", "--config", f"{run}/exec/containerd/containerd.toml"]),
        (13, ["containerd", "--config", f"{run}-other/exec/containerd/containerd.toml"]),
        (14, ["less", f"{run}/dockerd.log"]),
    ]
    assert leftovers.shims_of(seen, run) == [10, 12]


def test_only_rules_with_our_comment_are_removed() -> None:
    saved = (
        "*filter\n:FORWARD ACCEPT [0:0]\n"
        f"-A FORWARD -i spr-1 -m comment --comment {HERE.network} -j ACCEPT\n"
        "-A FORWARD -i docker0 -j ACCEPT\nCOMMIT\n"
        "*nat\n"
        f'-A POSTROUTING -s 10.77.0.0/24 ! -o spr-1 -m comment --comment "{HERE.network}" -j MASQUERADE\n'
        "-A POSTROUTING -s 172.17.0.0/16 -m comment --comment sparkpair-999999 -j MASQUERADE\nCOMMIT\n"
    )
    found = leftovers.our_rules(saved, HERE.network)
    assert [rule[:4] for rule in found] == [
        ["-t", "filter", "-D", "FORWARD"],
        ["-t", "nat", "-D", "POSTROUTING"],
    ]
    assert found[1][-2:] == ["-j", "MASQUERADE"]


def test_every_rule_that_is_made_can_be_found_again() -> None:
    assert all(HERE.network in rule for rule in network.rules(HERE))
    assert sum("MASQUERADE" in rule for rule in network.rules(HERE)) == 1


def test_a_pid_file_whose_number_went_to_another_process_is_stale(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    pid_file.write_text(str(os.getpid()))
    assert shell.pid_of(pid_file, "dockerd", "/run/sparkpair-0a") is None
    assert shell.pid_of(pid_file, "python") == os.getpid()
    pid_file.write_text("not a number")
    assert shell.pid_of(pid_file) is None
    assert shell.pid_of(tmp_path / "absent") is None


def test_a_process_that_ended_is_not_alive_even_before_it_is_reaped() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert not shell.alive(child.pid)
    assert shell.alive(os.getpid())


def test_the_private_engine_makes_no_bridge_and_no_rules_of_its_own() -> None:
    words = docker_engine.PrivateEngine(HERE).argv()
    assert {"--bridge=none", "--iptables=false", f"--cgroup-parent=/sparkpair-{HERE.id}"} <= set(words)


def test_a_docker_host_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARKPAIR_ENGINE", raising=False)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(Problem) as caught:
        docker_engine.find(Plan(tmp_path))
    assert caught.value.code == "docker-host"


def test_no_engine_and_no_right_to_start_one_is_one_clear_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARKPAIR_ENGINE", "private")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Problem) as caught:
        docker_engine.ensure(Plan(tmp_path))
    assert caught.value.code == "no-engine"
    assert "usermod -aG docker" in caught.value.do


# Nodes.


def test_a_capability_that_the_machine_lacks_is_not_asked_for() -> None:
    assert capabilities.withheld("CapBnd:\t000001fffeffffff\n") == ["SYS_RESOURCE"]
    assert capabilities.withheld("CapBnd:\t000001ffffffffff\n") == []
    assert capabilities.withheld("Name:\tx\n") == []


def test_loopback_name_servers_mean_nothing_in_a_node() -> None:
    stub, real = "nameserver 127.0.0.53\noptions edns0\n", "nameserver 192.0.2.1\nnameserver ::1\n"
    assert nodes.nameservers(stub, real, real) == ["192.0.2.1"]


def test_a_node_with_a_failed_unit_is_unfit_unless_the_unit_is_the_projects_field_report_78() -> None:
    failed = (
        "sparkpair-rank0.service loaded failed failed sparkpair rank 0 of 2\n"
        "docker.service loaded failed failed Docker Application Container Engine\n"
        "run-u12.service loaded failed failed /bin/false\n"
    )
    assert nodes.unfit(failed) == ["docker.service"]
    assert nodes.unfit("") == []


def test_the_inner_engine_has_the_nvidia_runtime_and_runc_stays_the_default() -> None:
    config = nodes.inner_engine(["192.0.2.1"])
    assert "nvidia" in config["runtimes"]
    assert "default-runtime" not in config
    assert config["dns"] == ["192.0.2.1"]
    assert "dns" not in nodes.inner_engine([])


def test_only_the_worker_has_no_way_out() -> None:
    routes = {node.role: nodes.node_config(HERE, node, "key")["route_out"] for node in NODES}
    assert routes == {"head": True, "worker": False}


def test_ssh_asks_nobody_and_trusts_only_the_recorded_keys() -> None:
    words = nodes.ssh_argv(HERE, NODES[0], ["id"])
    assert "StrictHostKeyChecking=yes" in words
    assert words[-2:] == ["ada@10.77.0.11", "id"]


def test_each_port_has_an_address_of_its_own() -> None:
    macs = [mac(end.node.rank, end.port) for end in rails.ENDS]
    assert len(set(macs)) == len(macs) == 8
    assert all(len(rails.ends_of(rail)) == 2 for rail in (0, 1))


def test_memlock_is_dropped_only_where_it_may_not_be_raised() -> None:
    stack = {"type": "RLIMIT_STACK", "hard": 67108864, "soft": 67108864}
    unlimited = {"type": "RLIMIT_MEMLOCK", "hard": 2**64 - 1, "soft": 2**64 - 1}
    process = {"rlimits": [unlimited, stack]}
    assert runc.drop_limit(process, 8 << 20)
    assert process["rlimits"] == [stack]
    low = {"rlimits": [{"type": "RLIMIT_MEMLOCK", "hard": 65536, "soft": 65536}, stack]}
    assert not runc.drop_limit(low, 8 << 20)
    assert not runc.drop_limit({}, 8 << 20)
    assert runc.may_raise_limits("CapEff:\t000001ffffffffff\n")
    assert not runc.may_raise_limits("CapEff:\t000001fffeffffff\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--root", "/r", "--log", "/l", "create", "--bundle", "/b", "id"], (Path("/b/config.json"), False)),
        (["--root=/r", "run", "-b", "/b", "id"], (Path("/b/config.json"), False)),
        (["create", "id"], (Path("config.json"), False)),
        (["exec", "--process", "/p.json", "--detach", "id"], (Path("/p.json"), True)),
        (["--root", "/r", "delete", "id"], None),
        (["features"], None),
    ],
)
def test_runc_commands_that_carry_a_process_are_known(
    words: list[str], found: tuple[Path, bool] | None
) -> None:
    assert runc.file_to_change(words) == found


# Images.


def test_the_node_image_keeps_the_externally_managed_marker_field_report_76() -> None:
    assert not any("EXTERNALLY-MANAGED" in pattern for pattern in images.NODE.remove)
    assert "python3-venv" in images.NODE_PACKAGES


def test_keys_follow_content_and_nothing_else() -> None:
    extra = images.Extra("etc/x", b"1")
    key = images.key_of("root", [extra, images.Extra("etc/y", b"2")])
    assert key == images.key_of("root", [images.Extra("etc/y", b"2"), extra])
    changed = [
        images.Extra("etc/x", b"2"),
        images.Extra("etc/x", b"1", 0o755),
        images.Extra("etc/x", link="1"),
    ]
    assert len({images.key_of("root", [other]) for other in [extra, *changed]}) == 4
    assert (
        bootstrap.root_key(["a", "b"], [])
        == bootstrap.root_key(["b", "a"], [])
        != bootstrap.root_key(["a"], ["b"])
    )


def test_files_are_laid_over_a_root_file_system_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    root = tmp_path / "root.tar"
    with tarfile.open(root, "w") as tar:
        tar.addfile(tarfile.TarInfo("etc/passwd"))
    extras = [images.Extra("usr/local/bin/x", b"#!/bin/sh\n", 0o755), images.Extra("etc/l", link="/dev/null")]
    made = []
    for _ in range(2):
        with images.with_extras(root, extras, tmp_path) as copy:
            made.append(hashlib.sha256(copy.read_bytes()).hexdigest())
            with tarfile.open(copy) as tar:
                assert tar.getnames() == ["etc/passwd", "etc/l", "usr/local/bin/x"]
                assert tar.getmember("usr/local/bin/x").mode == 0o755
    assert made[0] == made[1]
    assert list(tmp_path.iterdir()) == [root]


def test_all_node_files_have_their_place() -> None:
    paths = {extra.path for extra in images.node_extras()}
    assert {
        "usr/local/bin/nvidia-smi",
        "usr/local/sbin/runc",
        "etc/systemd/system/spark-tree.service",
    } <= paths
    assert f"{images.NODE_LIB}/rehearsal/tree.py" in paths
    assert not any("__pycache__" in path for path in paths)


def test_what_runs_in_a_node_needs_only_the_standard_library() -> None:
    library = [extra for extra in images.node_extras() if extra.path.endswith(".py")]
    assert library
    for extra in library:
        assert b"sparkpair" not in b"\n".join(
            line for line in extra.data.splitlines() if line.lstrip().startswith((b"import ", b"from "))
        )


def test_a_cache_shared_between_clones_is_used_where_it_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Plan(tmp_path / "clone")
    monkeypatch.delenv("SPARKPAIR_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert images.cache_dir(here) == here.state / "cache"
    (tmp_path / ".cache/sparkpair").mkdir(parents=True)
    assert images.cache_dir(here) == tmp_path / ".cache/sparkpair"
    monkeypatch.setenv("SPARKPAIR_CACHE", str(tmp_path / "named"))
    assert images.cache_dir(here) == tmp_path / "named"


# Sources and services.


def test_a_commit_is_a_function_of_the_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    (source / "__pycache__").mkdir(parents=True)
    (source / "__pycache__/x.pyc").write_bytes(b"1")
    (source / "build.zig").write_text("a\n")
    first = sources.publish(source, tmp_path / "one.git", "m")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody else")
    (source / "__pycache__/x.pyc").write_bytes(b"2")
    assert sources.publish(source, tmp_path / "two.git", "m") == first
    assert sources.publish(source, tmp_path / "one.git", "m") == first
    (source / "build.zig").write_text("b\n")
    assert sources.publish(source, tmp_path / "one.git", "m") != first


def test_a_service_is_known_by_its_own_folder() -> None:
    mine, theirs = services.all_of(HERE), services.all_of(Plan(Path("/srv/clone2")))
    seen = [(number, list(service.argv)) for number, service in enumerate([*mine, *theirs])]
    assert services.strays(HERE, seen) == [0, 1]


def test_a_service_runs_again_when_its_code_changes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = services.code_key(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert services.code_key(tmp_path) != before


# The command.


def test_the_command_takes_every_mode_of_the_hub() -> None:
    for mode in HUB_MODES:
        given = build_parser().parse_args(["fault", "hub", mode, "--path", "*.safetensors", "--times", "2"])
        assert (given.mode, given.times) == (mode, 2)


def test_the_screen_says_what_is_not_there() -> None:
    assert "not up" in screen({"engine": None})
    shown = screen(
        {
            "engine": {"host": "unix:///x", "private": True, "answers": True},
            "nodes": {"spark-a": {"container": "exited", "user": "ada", "address": "10.77.0.11"}},
            "rails": {"0": "plugged", "1": "pulled"},
            "services": {"hub": 12, "git": None},
        }
    )
    assert "spark-a  exited" in shown
    assert "rail 1 pulled" in shown
    assert "git      not running" in shown
