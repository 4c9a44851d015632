"""Cages, twins and rails of one node, and each way in which they can be wrong."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparkpair import link, pairfile, sysfs
from sparkpair.cli import main
from sparkpair.problem import Problem
from systree import HALVES, RAIL0, SysTree, capture, gid_rows, healthy, pair_dict, put

PROJECT = Path(__file__).parents[2]


def codes(report: link.Report, severity: str = "error") -> list[str]:
    return [problem.code for problem in report.problems if problem.severity == severity]


def the_pair(rank: int = 0, **options: int) -> pairfile.Pair:
    return pairfile.parse(pair_dict(rank, **options))


def test_one_cable_gives_two_rails_each_once(tmp_path: Path) -> None:
    """Field report 3: both twins of the cabled cage, and nothing else."""
    healthy(tmp_path)
    report = link.read_link(tmp_path)
    assert report.problems == []
    assert [(rail.rail, rail.netdev, rail.rdma, rail.address, rail.state) for rail in report.rails] == [
        (0, "enp1s0f0np0", "rocep1s0f0", "10.20.0.1", "ready"),
        (1, "enP2p1s0f0np0", "roceP2p1s0f0", "10.21.0.1", "ready"),
    ]
    assert {(rail.mtu, rail.active_mtu, rail.gid_index, rail.prefix) for rail in report.rails} == {
        (9000, 4096, 3, 24)
    }


def test_two_pci_domains_are_one_cage(tmp_path: Path) -> None:
    """Field report 8: the port's name decides, not the PCI address."""
    tree = SysTree(tmp_path)
    recorded = [line.split()[:3] for line in capture("phys-port-name-healthy-1.txt").splitlines()]
    for netdev, port, pci in recorded:
        assert HALVES[netdev][1:] == (port.removeprefix("port="), pci.removeprefix("pci="))
    cages = link.find_cages(sysfs.read_tree(tree.root))
    assert [(cage.port, [half.name for half in cage.netdevs]) for cage in cages] == [
        ("p0", ["enp1s0f0np0", "enP2p1s0f0np0"]),
        ("p1", ["enp1s0f1np1", "enP2p1s0f1np1"]),
    ]


def test_the_byte_that_counts_pci_links_does_not_part_the_twins(tmp_path: Path) -> None:
    """Newer kernels append it to the switch id; the ports of another card stay apart."""
    healthy(tmp_path)
    for netdev, tail in (("enp1s0f0np0", "00"), ("enP2p1s0f0np0", "01")):
        put(tmp_path / "sys/class/net" / netdev / "phys_switch_id", f"4cbb470300001a16{tail}")
    for netdev in ("enp1s0f1np1", "enP2p1s0f1np1"):
        put(tmp_path / "sys/class/net" / netdev / "phys_switch_id", "0011223344556677")
        put(tmp_path / "sys/class/net" / netdev / "phys_port_name", "p0")
    cages = link.find_cages(sysfs.read_tree(tmp_path))
    assert [len(cage.netdevs) for cage in cages] == [2, 2]
    assert [rail.netdev for rail in link.read_link(tmp_path).rails] == ["enp1s0f0np0", "enP2p1s0f0np0"]


def test_without_port_names_the_function_in_the_name_groups_the_twins(tmp_path: Path) -> None:
    healthy(tmp_path, "p1")
    for netdev in HALVES:
        for file in ("phys_port_name", "phys_switch_id"):
            (tmp_path / "sys/class/net" / netdev / file).unlink()
    report = link.read_link(tmp_path)
    assert [rail.netdev for rail in report.rails] == ["enp1s0f1np1", "enP2p1s0f1np1"]


def test_a_twin_that_does_not_tell_its_switch_still_belongs_to_its_cage(tmp_path: Path) -> None:
    healthy(tmp_path)
    (tmp_path / "sys/class/net/enP2p1s0f0np0/phys_switch_id").unlink()
    assert len(link.read_link(tmp_path).rails) == 2


def test_no_device_no_carrier_and_no_address_are_told_apart(tmp_path: Path) -> None:
    """Field report 14: three states, three messages."""
    trees = {name: tmp_path / name for name in ("device", "carrier", "address")}
    SysTree(trees["device"], halves=())
    SysTree(trees["carrier"])
    SysTree(trees["address"]).cable()
    reports = {name: link.read_link(root) for name, root in trees.items()}
    assert {name: codes(report) for name, report in reports.items()} == {
        "device": ["link-no-device"],
        "carrier": ["link-no-carrier"],
        "address": ["link-no-address"],
    }
    texts = [(problem.found, problem.do) for report in reports.values() for problem in report.problems]
    assert len({found for found, _ in texts}) == 3
    assert len({do for _, do in texts}) == 3
    assert {rail.state for rail in reports["carrier"].rails} == {"no-carrier"}
    assert {rail.state for rail in reports["address"].rails} == {"no-address"}


def test_a_port_that_is_switched_off_is_told_from_one_without_a_cable(tmp_path: Path) -> None:
    SysTree(tmp_path).net("enp1s0f0np0", flags="0x1002")
    (problem,) = link.read_link(tmp_path).problems
    assert "ip link set enp1s0f0np0 up" in problem.found


def test_the_recorded_machine_with_half_an_address_names_the_twin(tmp_path: Path) -> None:
    """Field reports 3 and 15, as `ip -br addr` showed them: 169.254 on one half, fe80 alone on the other."""
    lines = [line.split() for line in capture("ip-br-addr-twin-without-ipv4-1.txt").splitlines()]
    recorded = {words[0]: [word for word in words[2:] if "." in word] for words in lines}
    tree = SysTree(tmp_path)
    tree.cable("p1", addresses=(recorded["enp1s0f1np1"], recorded["enP2p1s0f1np1"]))
    report = link.read_link(tmp_path)
    assert codes(report) == ["link-link-local", "link-twin-no-address"]
    assert "169.254.127.30" in report.problems[0].found
    assert "enP2p1s0f1np1" in report.problems[1].found


def test_a_twin_without_an_address_fails_unless_one_rail_is_asked_for(tmp_path: Path) -> None:
    """Field report 3."""
    SysTree(tmp_path).cable(addresses=((), ["10.21.0.1/24"]))
    report = link.read_link(tmp_path)
    assert codes(report) == ["link-twin-no-address"]
    assert "enp1s0f0np0" in report.problems[0].found
    assert "rails=1" in report.problems[0].do
    alone = link.read_link(tmp_path, rails=1)
    assert [rail.netdev for rail in alone.rails] == ["enP2p1s0f0np0"]
    assert (codes(alone), codes(alone, "warning")) == ([], ["link-one-rail"])


def test_a_missing_twin_is_named_as_half_a_link(tmp_path: Path) -> None:
    tree = SysTree(tmp_path, halves=["enp1s0f0np0"])
    tree.half("enp1s0f0np0", up=True, addresses=RAIL0)
    assert codes(link.read_link(tmp_path)) == ["link-no-twin"]


def test_both_cages_cabled_is_listed_not_guessed(tmp_path: Path) -> None:
    """Field report 6, on the recorded machine whose four halves are all up."""
    up = [
        line.split()[0]
        for line in capture("ip-br-link-wired-management-down-1.txt").splitlines()
        if line.split()[1] == "UP" and line.split()[0] in HALVES
    ]
    tree = SysTree(tmp_path)
    for netdev in up:
        tree.half(netdev, up=True)
    report = link.read_link(tmp_path)
    assert codes(report) == ["link-ambiguous"]
    assert all(netdev in report.problems[0].found for netdev in HALVES)
    assert "link_netdevs" in report.problems[0].do
    chosen = link.read_link(tmp_path, netdevs=["enp1s0f1np1", "enP2p1s0f1np1"])
    assert [rail.netdev for rail in chosen.rails] == ["enp1s0f1np1", "enP2p1s0f1np1"]
    assert codes(chosen) == ["link-no-address"]


@pytest.mark.parametrize(("node", "names"), [("spark-a", "f1np1"), ("spark-b", "f0np0")])
def test_each_node_has_its_own_names(tmp_path: Path, node: str, names: str) -> None:
    """Field report 7: the recorded pair with its cable in f1 on one Spark and in f0 on the other."""
    tree = SysTree(tmp_path)
    for line in capture(f"ibdev2netdev-mismatched-ports-1-{node}.txt").splitlines():
        device, _, _, _, netdev, state = line.split()
        assert HALVES[netdev][0] == device
        tree.half(netdev, up=state == "(Up)", addresses=[f"10.{len(device) + 8}.0.1/24"])
    variables = link.environment(link.read_link(tmp_path))
    assert variables["NCCL_SOCKET_IFNAME"] == f"enp1s0{names}"
    assert variables["TF_RDMA_DEVICES"].count(names[:2]) == 2


def test_no_group_variable_names_a_device() -> None:
    """Field report 7: names of devices are facts of a host."""
    files = [*PROJECT.glob("group_vars/**/*.yml"), *PROJECT.glob("roles/*/defaults/*.yml")]
    assert files
    named = {
        str(path): found
        for path in files
        if (
            found := re.findall(
                r"^[^#]*\b(en[pP]\d\w*s\d+f\d\w*|roce[pP]\d\w+)", path.read_text(), re.MULTILINE
            )
        )
    }
    assert named == {}


def test_a_named_device_that_is_not_there_is_told(tmp_path: Path) -> None:
    healthy(tmp_path)
    report = link.read_link(tmp_path, netdevs=["enp1s0f0np0", "enp9s0f0np0"])
    assert codes(report) == ["link-no-device"]
    assert "enp9s0f0np0" in report.problems[0].found


def test_an_inactive_rdma_port_and_a_missing_one_are_told(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    tree.rdma("rocep1s0f0", "enp1s0f0np0", "1: DOWN")
    for file in sorted((tmp_path / "sys/class/infiniband/roceP2p1s0f0").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (tmp_path / "sys/class/infiniband/roceP2p1s0f0").rmdir()
    assert codes(link.read_link(tmp_path)) == ["link-rdma-down", "link-no-rdma"]


def test_mtu_1500_is_slow_and_another_than_the_pair_s_is_an_error(tmp_path: Path) -> None:
    """Field report 10."""
    SysTree(tmp_path).cable(mtu=1500, addresses=(RAIL0, ["10.21.0.1/24"]))
    report = link.read_link(tmp_path)
    assert (codes(report), codes(report, "warning")) == ([], ["link-mtu", "link-mtu"])
    assert [rail.active_mtu for rail in report.rails] == [1024, 1024]
    strict = link.read_link(tmp_path, pair=the_pair())
    assert codes(strict) == ["link-mtu", "link-mtu"]
    assert {rail.state for rail in strict.rails} == {"wrong-mtu"}
    assert link.read_link(tmp_path, pair=the_pair(mtu=1500)).errors == []


def test_an_rdma_mtu_that_stayed_behind_is_a_warning(tmp_path: Path) -> None:
    healthy(tmp_path)
    put(tmp_path / "sys/class/infiniband/rocep1s0f0/ports/1/active_mtu", 1024)
    assert codes(link.read_link(tmp_path), "warning") == ["link-rdma-mtu"]


def test_twins_in_one_subnet_are_a_warning(tmp_path: Path) -> None:
    """As the recorded pair has them: .10 and .14 of one /24."""
    SysTree(tmp_path).cable(addresses=(["192.168.100.10/24"], ["192.168.100.14/24"]))
    report = link.read_link(tmp_path)
    assert (codes(report), codes(report, "warning")) == ([], ["link-same-subnet"])


def test_twins_with_different_gid_indexes_can_not_serve_together(tmp_path: Path) -> None:
    """Field report 9 and the engine's single TF_RDMA_GID_INDEX: refuse, and say how to go on with one."""
    tree = healthy(tmp_path)
    tree.gids("roceP2p1s0f0", gid_rows("enP2p1s0f0np0", ["10.99.0.1", "10.21.0.1"]))
    report = link.read_link(tmp_path, netdevs=["enp1s0f0np0", "enP2p1s0f0np0"], pair=the_pair())
    assert codes(report) == ["link-gid-unequal"]
    with pytest.raises(Problem, match="RoCE v2 row"):
        link.environment(report)
    alone = link.read_link(tmp_path, rails=1)
    assert link.environment(alone)["TF_RDMA_GID_INDEX"] == "3"


def test_the_twins_common_index_is_taken_when_one_has_more(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    tree.gids("rocep1s0f0", gid_rows("enp1s0f0np0", ["10.20.0.1", "10.20.0.1"]))
    tree.gids("roceP2p1s0f0", gid_rows("enP2p1s0f0np0", ["10.99.0.1", "10.21.0.1"]))
    report = link.read_link(tmp_path, pair=the_pair())
    assert [rail.gid_index for rail in report.rails] == [5, 5]
    assert report.errors == []


def test_the_pair_s_devices_and_addresses_are_required(tmp_path: Path) -> None:
    """Field report 11: the plan's address is gone, another one is there."""
    tree = SysTree(tmp_path)
    tree.cable("p0", addresses=(["10.99.0.1/24"], []))
    tree.cable("p1", addresses=(RAIL0, ["10.21.0.1/24"]))
    report = link.read_link(tmp_path, pair=the_pair())
    assert codes(report) == ["link-wrong-address", "link-no-address"]
    assert "10.20.0.1" in report.problems[0].found
    assert "10.21.0.1" in report.problems[1].found


def test_the_environment_has_no_empty_value(tmp_path: Path) -> None:
    """Field report 9: an empty GID index is read as 0."""
    healthy(tmp_path)
    text = link.environment_text(link.environment(link.read_link(tmp_path)))
    assert text.splitlines() == [
        "TF_RDMA_DEVICES=rocep1s0f0,roceP2p1s0f0",
        "TF_RDMA_GID_INDEX=3",
        "NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0",
        "NCCL_IB_GID_INDEX=3",
        "NCCL_SOCKET_IFNAME=enp1s0f0np0",
    ]
    for bad in ("", "a b", 'a"b', "a$b"):
        with pytest.raises(Problem):
            link.environment_text({"NCCL_IB_HCA": bad})


def write_pair(root: Path, **options: int) -> Path:
    path = root / "etc/sparkpair/pair.json"
    put(path, json.dumps(pair_dict(**options)))
    return path


def test_each_start_writes_the_index_of_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Field report 9, case (d): the rows move between provision and start."""
    tree = healthy(tmp_path)
    write_pair(tmp_path)
    env = tmp_path / "run/sparkpair/rank0.env"
    words = ["link", "--root", str(tmp_path), "--write-env", str(env)]
    assert main(words) == 0
    assert "TF_RDMA_GID_INDEX=3\n" in env.read_text()
    for device, netdev, address in (
        ("rocep1s0f0", "enp1s0f0np0", "10.20.0.1"),
        ("roceP2p1s0f0", "enP2p1s0f0np0", "10.21.0.1"),
    ):
        rows = gid_rows(netdev, [address])
        tree.gids(device, [*rows[:2], (4, *rows[3][1:])])
    assert main(words) == 0
    assert "TF_RDMA_GID_INDEX=4\n" in env.read_text()
    assert "ready" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["rail gone", "no gid", "mtu", "no pair"])
def test_a_start_is_refused_and_the_old_environment_stays(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = healthy(tmp_path)
    pair = write_pair(tmp_path)
    env = tmp_path / "rank0.env"
    put(env, "OLD=1")
    if fault == "rail gone":
        tree.half("enP2p1s0f0np0", up=False)
    elif fault == "no gid":
        tree.gids("rocep1s0f0", [])
    elif fault == "mtu":
        tree.net("enP2p1s0f0np0", mtu=1500)
    else:
        pair.unlink()
    words = ["link", "--root", str(tmp_path), "--write-env", str(env), "--json"]
    if fault == "no pair":
        words += ["--pair", str(pair)]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"] is False
    assert "found: " in captured.err
    assert env.read_text() == "OLD=1\n"


def test_the_command_tells_one_json_object_and_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy(tmp_path)
    assert main(["link", "--root", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert set(told["rails"][0]) >= {
        "rail", "netdev", "rdma", "port", "address", "prefix", "mtu", "active_mtu", "gid_index", "state",
    }  # fmt: skip
    assert told["rejected_gids"]["rocep1s0f0"][0]["reason"]
    SysTree(tmp_path / "bare", halves=())
    assert main(["link", "--root", str(tmp_path / "bare"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "link-no-device"


def test_a_root_that_is_no_folder_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(SystemExit) as ended:
            main(["link", "--root", str(wrong), "--json"])
        assert ended.value.code == 2
        assert str(wrong) in capsys.readouterr().err


def test_a_recorded_tree_is_not_mixed_with_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a program of this machine was asked about a recorded tree")

    monkeypatch.setattr(sysfs.subprocess, "run", forbidden)
    healthy(tmp_path)
    assert link.read_link(tmp_path).errors == []


def test_the_recorded_states_of_the_devices_are_understood(tmp_path: Path) -> None:
    """A port that is down shows 40 Gb/sec: a placeholder, no slow link."""
    tree = SysTree(tmp_path)
    for line in capture("sysfs-ib-rate-state-healthy-1.txt").splitlines():
        device, rate, state = re.fullmatch(r"(\S+)\s+(.*\))\s+(\d: \w+)", line).groups()  # type: ignore[union-attr]
        tree.rdma(device, None, state)
        put(tmp_path / "sys/class/infiniband" / device / "ports/1/rate", rate)
    ports = sysfs.read_tree(tmp_path).rdma
    assert {name for name, port in ports.items() if port.state == "ACTIVE"} == {"rocep1s0f1", "roceP2p1s0f1"}


def damaged(**changes: object) -> dict[str, object]:
    return {**pair_dict(), **changes}


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {},
        damaged(version=2),
        damaged(rank=2),
        damaged(master_address="10.99.0.1"),
        damaged(master_address="spark-a"),
        damaged(mtu="big"),
        damaged(ranks=[]),
        damaged(subnets=["10.20.0.1/24"]),
    ],
)
def test_a_damaged_pair_file_is_refused_with_its_path(raw: object) -> None:
    with pytest.raises(Problem, match=r"pair\.json"):
        pairfile.parse(raw)


def test_a_pair_file_survives_its_own_text() -> None:
    pair = the_pair()
    assert pairfile.parse(json.loads(pair.text())) == pair
    assert (pair.world, pair.me.host, [peer.host for peer in pair.peers]) == (2, "spark-a", ["spark-b"])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10_000),
            st.sampled_from(
                ["gone", "folder", "", "0", "-1", "up", "RoCE v2", "::ffff:10.20.0.1", "\xff", "9" * 40]
            ),
        ),
        max_size=12,
    )
)
def test_no_recorded_tree_is_too_broken(damage: list[tuple[int, str]]) -> None:
    """Missing, unreadable or nonsensical files give findings, never a traceback."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        healthy(root)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        for at, what in damage:
            path = files[at % len(files)]
            if path.is_file():
                path.unlink()
            if what == "folder":
                path.mkdir(exist_ok=True)
            elif what != "gone" and not path.is_dir():
                path.write_text(what)
        for pair in (None, the_pair()):
            report = link.read_link(root, pair=pair)
            assert json.dumps(report.as_dict())
            assert report.errors or all(rail.state == "ready" for rail in report.rails)
