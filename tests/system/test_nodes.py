"""What the playbook left on the nodes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pair import run

PROJECT = Path(__file__).resolve().parents[2]
STATE = "/var/lib/sparkpair"
TOKEN_MAP = "de40bcdd71f24430ba82752ef385093be962adbf845a1c97db39161597d5dc28"


def test_each_node_holds_exactly_its_own_rank(head: Any, worker: Any) -> None:
    assert run(head, "docker ps --format '{{.Names}}'") == "sparkpair-rank0"
    assert run(worker, "docker ps --format '{{.Names}}'") == "sparkpair-rank1"


def test_both_ranks_carry_one_configuration(head: Any, worker: Any) -> None:
    asked = "docker inspect --format '{{index .Config.Labels \"sparkpair.config\"}}' sparkpair-rank"
    assert run(head, f"{asked}0") == run(worker, f"{asked}1") != ""


def test_docker_restarts_no_rank_by_itself(node: Any) -> None:
    """Field report 59."""
    assert (
        run(node, "docker ps -q | xargs docker inspect --format '{{.HostConfig.RestartPolicy.Name}}'") == "no"
    )


def test_the_unit_shows_every_flag(head: Any, worker: Any) -> None:
    assert "--context 1048576" in run(head, "systemctl cat sparkpair-rank0")
    assert "--pool 1048576" in run(worker, "systemctl cat sparkpair-rank1")


def test_the_running_rank_uses_the_devices_and_the_gid_found_at_its_start(node: Any) -> None:
    """Field report 9: no variable is empty, the index is that of the RoCE v2 IPv4 row."""
    lines = run(node, "cat /run/sparkpair/rank*.env").splitlines()
    values = dict(line.split("=", 1) for line in lines)
    assert all(values.values())
    assert values["TF_RDMA_DEVICES"] == "rocep1s0f0,roceP2p1s0f0"
    assert values["TF_RDMA_GID_INDEX"] == values["NCCL_IB_GID_INDEX"]


@pytest.mark.parametrize(
    "name", ["rope-plain-cos", "rope-plain-sin", "rope-compressed-cos", "rope-compressed-sin"]
)
def test_the_rope_tables_are_the_recorded_ones(node: Any, name: str) -> None:
    recorded = json.loads((PROJECT / "files/fixtures/rope.json").read_text())
    assert run(node, f"sha256sum {STATE}/kit/{name}.f32").split()[0] == recorded[f"{name}.f32"]


def test_the_token_map_is_the_recorded_one(node: Any) -> None:
    assert run(node, f"sha256sum {STATE}/fixtures/dsv41-1017/token_map.json").split()[0] == TOKEN_MAP


def test_the_kit_is_whole_on_both(node: Any) -> None:
    """Every line of MANIFEST; only the bias is another one than the earlier checkpoint's."""
    done = node.run(f"cd {STATE}/kit && sha256sum --quiet -c MANIFEST")
    failed = [line for line in str(done.stdout).splitlines() if "FAILED" in line]
    assert failed == ["vision/gate_bias_vl.safetensors: FAILED"]


def test_there_is_one_cache_of_the_own_rank(head: Any, worker: Any) -> None:
    for node, rank in ((head, 0), (worker, 1)):
        found = run(node, f"ls {STATE}/rank-cache/dsv41-1017-*/ | grep -c '^rank{rank}of2-.*bin$'")
        assert found == "1"


def test_the_worker_never_held_the_checkpoint(worker: Any) -> None:
    """`worker_weights: slice`."""
    names = run(worker, f"ls {STATE}/weights/dsv41-1017").split()
    assert "config.json" in names
    assert not [name for name in names if name.endswith(".safetensors")]


def test_all_data_belongs_to_the_service_user(node: Any) -> None:
    """Field report 33."""
    foreign = run(node, f"find {STATE}/weights {STATE}/engram {STATE}/rank-cache ! -user sparkpair | head -5")
    assert foreign == ""


def test_the_api_key_is_for_root_alone(head: Any, key: str) -> None:
    found = head.file("/etc/sparkpair/api-keys")
    assert (found.user, found.mode) == ("root", 0o600)
    assert len(key) > 20


def test_the_worker_has_no_way_to_the_internet(worker: Any) -> None:
    """The rehearsal would prove little otherwise."""
    assert "default" not in run(worker, "ip route")


def test_the_library_serves_on_both_nodes(node: Any) -> None:
    assert run(node, "/opt/sparkpair/venv/bin/sparkpair --version").startswith("sparkpair ")
    assert run(node, "/opt/sparkpair/venv/bin/sparkpair link --root /run/spark-tree")


def test_the_head_has_what_its_work_needs(head: Any) -> None:
    assert (
        run(head, "/opt/sparkpair/venv/bin/python -c 'import numpy, tokenizers, huggingface_hub; print(1)'")
        == "1"
    )


def test_the_system_python_is_left_alone(node: Any) -> None:
    """Field report 76: the marker is there, and nothing was installed beside it."""
    assert run(node, "ls /usr/lib/python3*/EXTERNALLY-MANAGED") != ""
    assert run(node, "ls /usr/local/lib/python3*/dist-packages | wc -l") == "0"


def test_the_addresses_survive_a_reboot(node: Any) -> None:
    """Field report 11: persistent in netplan, mode 0600, MTU beside the address."""
    files = run(node, "grep -l mtu /etc/netplan/*.yaml").split()
    assert len(files) == 1
    assert node.file(files[0]).mode == 0o600


def test_the_peers_key_opens_no_shell(head: Any) -> None:
    """Field report 51."""
    ssh = (
        "sudo -u sparkpair ssh -i /etc/sparkpair/peer_ed25519 -o UserKnownHostsFile=/etc/sparkpair/peer_known_hosts "
        "-o BatchMode=yes sparkpair@10.20.0.2"
    )
    for words in (
        "id",
        "'rsync --server --sender . /etc'",
        "'sparkpair verify --lock /etc/passwd --dir /'",
        "",
    ):
        done = head.run(f"{ssh} {words}")
        assert done.rc == 126, f"{words}: {done.rc} {done.stdout} {done.stderr}"


def test_the_served_image_is_the_same_on_both_by_content(head: Any, worker: Any) -> None:
    """Field report 29."""
    serving = "$(docker ps -q | xargs docker inspect --format '{{.Image}}')"
    asked = "docker image inspect --format '{{.RootFS.Layers}} {{.Config.Env}}' " + serving
    assert run(head, asked) == run(worker, asked)


def test_hashes_are_of_this_project() -> None:
    text = (PROJECT / "files/fixtures/rope.json").read_bytes()
    assert (
        hashlib.sha256(text).hexdigest() == "78d881ad91d9dc36a53cab598e250eaf1f105ef22fbd7b637e07fbf57c08edc3"
    )
