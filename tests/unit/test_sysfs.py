"""What /sys and /proc tell, whole, recorded or broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparkpair import link, sysfs
from systree import SysTree, capture, healthy, put


def test_all_halves_of_a_spark_are_read(tmp_path: Path) -> None:
    healthy(tmp_path)
    tree = sysfs.read_tree(tmp_path)
    half = tree.netdevs["enP2p1s0f0np0"]
    assert (half.carrier, half.mtu, half.port, half.addresses) == (True, 9000, "p0", ("10.21.0.1/24",))
    port = tree.rdma["roceP2p1s0f0"]
    assert (port.state, port.netdevs) == ("ACTIVE", ("enP2p1s0f0np0",))
    assert [row.index for row in port.gids] == [0, 1, 2, 3]
    assert str(port.gids[3].ipv4) == "10.21.0.1"


def test_a_tree_with_nothing_in_it_is_read_without_an_error(tmp_path: Path) -> None:
    assert sysfs.read_tree(tmp_path) == sysfs.Tree()
    assert sysfs.read_tree(tmp_path / "absent") == sysfs.Tree()
    assert sysfs.meminfo(tmp_path) == {}
    assert sysfs.kernel_release(tmp_path) == ""


def test_files_that_cannot_be_read_leave_their_value_unknown(tmp_path: Path) -> None:
    """Real /sys answers EINVAL for the carrier of a port that is off; a directory there fails alike."""
    tree = healthy(tmp_path)
    base = tmp_path / "sys/class/net/enp1s0f0np0"
    for name in ("carrier", "mtu", "phys_switch_id", "flags"):
        (base / name).unlink()
        (base / name).mkdir()
    gids = tmp_path / "sys/class/infiniband/rocep1s0f0/ports/1/gids"
    (gids / "3").unlink()
    (gids / "3").mkdir()
    put(gids / "2", "no gid at all")
    put(base / "operstate", "unknown")
    read = sysfs.read_tree(tree.root)
    half = read.netdevs["enp1s0f0np0"]
    assert (half.carrier, half.mtu, half.admin_up, half.switch_id) == (None, None, None, "")
    assert [row.index for row in read.rdma["rocep1s0f0"].gids] == [0, 1]


def test_a_device_without_a_net_folder_is_matched_by_its_gid_rows(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    device = tmp_path / "sys/class/infiniband/rocep1s0f0/device"
    (device / "net/enp1s0f0np0").rmdir()
    (device / "net").rmdir()
    assert sysfs.read_tree(tree.root).rdma["rocep1s0f0"].netdevs == ("enp1s0f0np0",)


def test_an_address_without_a_route_has_no_prefix(tmp_path: Path) -> None:
    healthy(tmp_path)
    (tmp_path / "proc/net/route").unlink()
    assert sysfs.read_tree(tmp_path).netdevs["enp1s0f0np0"].addresses == ("10.20.0.1",)


@pytest.mark.parametrize(
    ("mtu", "rdma"), [(1500, 1024), (9000, 4096), (4192, 4096), (4191, 2048), (576, 256), (68, 256)]
)
def test_the_rdma_mtu_follows_the_netdev(mtu: int, rdma: int) -> None:
    """Field report 10: 1500 gives an RDMA MTU of 1024, 9000 gives 4096."""
    assert sysfs.roce_mtu(mtu) == rdma


def test_active_mtu_is_read_from_the_recorded_devinfo() -> None:
    blocks = capture("ibv_devinfo-healthy-1.txt").split("hca_id:")[1:]
    found = {block.split()[0]: sysfs.devinfo_active_mtu(block) for block in blocks}
    assert found["rocep1s0f1"] == 4096
    assert found["rocep1s0f0"] == 1024
    assert sysfs.devinfo_active_mtu("Failed to get IB devices list") is None


@pytest.mark.parametrize("name", ["ip-link-many-interfaces-1.txt", "ip-br-link-healthy-1.txt"])
def test_only_the_four_halves_are_candidates_on_a_busy_machine(name: str) -> None:
    """USB Ethernet, Wi-Fi, the management port, Docker's bridges and veths are never the link."""
    words = [line.split() for line in capture(name).splitlines()]
    names = [line[1].rstrip(":").partition("@")[0] if line[0].endswith(":") else line[0] for line in words]
    found = [item for item in names if sysfs.is_candidate(sysfs.Netdev(item), has_rdma=False)]
    assert found == [item for item in names if item.startswith(("enp1s0f", "enP2p1s0f"))]
    assert len(found) == 4


def test_twins_come_in_the_order_of_the_board_not_of_the_listing() -> None:
    """The recorded listings differ in order between machines: names decide, never line numbers."""
    for name in ("ibdev2netdev-healthy-1.txt", "ibdev2netdev-healthy-2.txt"):
        names = [line.split()[4] for line in capture(name).splitlines()]
        halves = sorted((sysfs.Netdev(item) for item in names), key=lambda half: half.order)
        assert [half.name for half in halves] == [
            "enp1s0f0np0",
            "enp1s0f1np1",
            "enP2p1s0f0np0",
            "enP2p1s0f1np1",
        ]


def test_memory_lines_are_bytes_and_odd_lines_are_left_out(tmp_path: Path) -> None:
    put(tmp_path / "proc/meminfo", capture("meminfo-kho-cma-1.txt"))
    assert sysfs.meminfo(tmp_path) == {"CmaTotal": 0, "CmaFree": 940604 * 1024}


@pytest.mark.parametrize(
    ("total", "free", "kernel", "words", "fails"),
    [
        (0, 9_700_000, "7.0.0-1019-nvidia", "quiet", True),
        (32_768, 9_700_000, "7.0.0-1019-nvidia", "quiet", True),
        (0, 940_604, "7.0.0-1019-nvidia", "quiet", True),
        (0, 9_700_000, "", "quiet", True),
        (0, 9_700_000, "7.0.0-1019-nvidia", "quiet kho=off", False),
        (131_072, 69_320, "6.17.0-1032-nvidia", "quiet", False),
        (32_768, 9_700_000, "6.17.0-1032-nvidia", "quiet", False),
        (131_072, 69_320, "7.0.0-1019-nvidia", "quiet", False),
    ],
)
def test_a_kernel_that_keeps_memory_for_kexec_is_named(
    tmp_path: Path, total: int, free: int, kernel: str, words: str, *, fails: bool
) -> None:
    """Field report 20: RDMA can't pin that memory; the remedies need a reboot."""
    SysTree(tmp_path).memory(total=total, free=free, kernel=kernel, words=words)
    found = link.kho_problem(tmp_path)
    assert bool(found) is fails
    if found:
        assert found.code == "rdma-kho"
        assert "kho=off" in found.do
        assert "6.17" in found.do
        assert "reboot" in found.do


@given(st.text(max_size=400))
def test_no_route_table_is_too_strange(text: str) -> None:
    sysfs.connected_prefixes("header\n" + text)


@given(st.lists(st.text(alphabet="0123456789ABCDEF", min_size=1, max_size=9), min_size=8, max_size=8))
def test_no_route_line_is_too_strange(words: list[str]) -> None:
    sysfs.connected_prefixes("header\n" + "\t".join(words))
