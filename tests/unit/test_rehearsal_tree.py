"""The fact tree of a simulated Spark, against the recorded outputs of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from sparkpair import gid, sysfs

from rehearsal.node import nvidia_smi, rdma_tools, spark_tree
from rehearsal.ports import PORTS, RAILS, mac
from rehearsal.tree import (
    GID_ROWS,
    ZERO_GID,
    GidTable,
    Link,
    Memory,
    Symlink,
    active_mtu,
    engine_name,
    link_local_gid,
    mapped_gid,
    memory_of,
    render,
)

ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "enp1s0f0np0\t0000140A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
)


def link(name: str, *addresses: str, carrier: bool | None = True, mtu: int = 9000) -> Link:
    port = next((port for port in PORTS if port.netdev == name), None)
    return Link(
        name=name,
        index=2,
        mac=mac(0, port) if port else "02:42:0a:4d:00:0b",
        mtu=mtu,
        flags="0x1003" if carrier is not None else "0x1002",
        operstate="up" if carrier else "down",
        carrier=carrier,
        addresses=addresses,
    )


def write(root: Path, links: list[Link]) -> Path:
    tables = {port.rdma: GidTable() for port in PORTS}
    for port in PORTS:
        for each in links:
            if each.name == port.netdev:
                tables[port.rdma].follow(each.mac, each.addresses)
    files = render(links, tables, Memory(), "spark-a", ROUTES)
    for name, content in files.items():
        spark_tree.put(root / name, content)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("tree"),
        [
            link("enp1s0f0np0", "10.20.0.1"),
            link("enP2p1s0f0np0", "10.21.0.1"),
            link("enp1s0f1np1", carrier=False, mtu=1500),
            link("enP2p1s0f1np1", carrier=None, mtu=1500),
            link("enP7s7", "10.77.0.11", mtu=1500),
        ],
    )


def test_the_ipv4_v2_row_is_at_3_on_both_twins_as_in_the_healthy_show_gids(root: Path) -> None:
    tree = sysfs.read_tree(root)
    for rail, address in zip(RAILS, ("10.20.0.1", "10.21.0.1"), strict=True):
        port = tree.rdma[rail.rdma]
        assert gid.choose(port, rail.netdev, address).index == 3
        assert [(row.index, row.kind) for row in port.gids] == [(0, "v1"), (1, "v2"), (2, "v1"), (3, "v2")]


def test_show_gids_prints_the_rows_of_the_recorded_table(root: Path) -> None:
    rows = [line.split() for line in rdma_tools.show_gids(root).splitlines()[2:-1]]
    assert len(rows) == 12
    assert [
        "rocep1s0f0",
        "1",
        "3",
        "0000:0000:0000:0000:0000:ffff:0a14:0001",
        "10.20.0.1",
        "v2",
        "enp1s0f0np0",
    ] in rows
    assert ["rocep1s0f1", "1", "1", "fe80:0000:0000:0000:4ebb:47ff:fe00:0a13", "v2", "enp1s0f1np1"] in rows


def test_ibdev2netdev_prints_the_recorded_lines(root: Path) -> None:
    recorded = Path(__file__).parents[1] / "captures/ibdev2netdev-healthy-2.txt"
    wanted = {line for line in recorded.read_text().splitlines() if line and not line.startswith("#")}
    assert set(rdma_tools.ibdev2netdev(root).splitlines()) == wanted


def test_a_port_without_cable_is_down_at_the_rate_that_a_spark_shows(root: Path) -> None:
    port = root / "sys/class/infiniband/rocep1s0f1/ports/1"
    assert (port / "state").read_text() == "1: DOWN\n"
    assert (port / "rate").read_text() == "40 Gb/sec (4X QDR)\n"
    assert (root / "sys/class/infiniband/rocep1s0f0/ports/1/rate").read_text() == "200 Gb/sec (4X HDR)\n"


def test_a_port_that_is_switched_off_tells_no_carrier_as_in_sys(root: Path) -> None:
    tree = sysfs.read_tree(root)
    assert tree.netdevs["enp1s0f1np1"].carrier is False
    assert not (root / "sys/class/net/enP2p1s0f1np1/carrier").exists()
    assert tree.netdevs["enP2p1s0f1np1"].admin_up is False


def test_the_four_halves_hang_on_their_pci_functions(root: Path) -> None:
    for port in PORTS:
        device = root / "sys/class/net" / port.netdev / "device"
        assert device.resolve().name == port.pci
        assert (root / "sys/class/infiniband" / port.rdma / "device").resolve() == device.resolve()
        assert rdma_tools.netdev_of(root / "sys/class/infiniband" / port.rdma) == port.netdev
        assert (root / "sys/class/net" / port.netdev / "phys_port_name").read_text().strip() == port.port_name
    assert len({(root / "sys/class/net" / p.netdev / "phys_switch_id").read_text() for p in PORTS}) == 1


def test_the_tables_have_all_their_rows_and_the_empty_ones_no_attributes(root: Path) -> None:
    port = root / "sys/class/infiniband/rocep1s0f0/ports/1"
    assert len(list((port / "gids").iterdir())) == GID_ROWS
    assert (port / "gids/4").read_text().strip() == ZERO_GID
    assert not (port / "gid_attrs/types/4").exists()


def test_addresses_have_the_prefix_that_the_route_table_tells(root: Path) -> None:
    assert sysfs.read_tree(root).netdevs["enp1s0f0np0"].addresses == ("10.20.0.1/24",)


def test_an_address_that_goes_and_comes_again_may_move_field_report_9() -> None:
    table = GidTable()
    own = "4c:bb:47:00:0a:12"
    table.follow(own, ["10.20.0.1"])
    table.follow(own, ["10.20.0.1", "192.168.100.10"])
    table.follow(own, ["192.168.100.10"])
    assert table.rows[5] == (mapped_gid("192.168.100.10"), "RoCE v2")
    assert 3 not in table.rows
    table.follow(own, ["192.168.100.10", "10.20.0.7"])
    assert table.rows[3] == (mapped_gid("10.20.0.7"), "RoCE v2")
    table.follow(own, ["10.20.0.7", "192.168.100.10"])
    assert table.rows[5][0] == mapped_gid("192.168.100.10")


def test_gids_are_written_as_the_kernel_writes_them() -> None:
    assert link_local_gid("4c:bb:47:00:0a:12") == "fe80:0000:0000:0000:4ebb:47ff:fe00:0a12"
    assert mapped_gid("192.168.100.10") == "0000:0000:0000:0000:0000:ffff:c0a8:640a"


@pytest.mark.parametrize(("mtu", "active"), [(1500, 1024), (9000, 4096), (4200, 4096), (600, 256)])
def test_the_rdma_mtu_follows_the_netdevs(mtu: int, active: int) -> None:
    assert active_mtu(mtu) == active == sysfs.roce_mtu(mtu)


def test_an_interface_that_goes_takes_its_files_along(tmp_path: Path) -> None:
    keeper = spark_tree.Keeper(tmp_path)
    tables = {port.rdma: GidTable() for port in PORTS}
    keeper.write(render([link("enp1s0f0np0")], tables, Memory(), "spark-a", ROUTES))
    assert (tmp_path / "sys/class/net/enp1s0f0np0/mtu").exists()
    keeper.write(render([], tables, Memory(), "spark-a", ROUTES))
    assert not (tmp_path / "sys/class/net/enp1s0f0np0").is_symlink()
    assert not list(tmp_path.rglob("phys_port_name"))


def test_memory_is_a_sparks_and_a_rank_takes_most_of_it() -> None:
    idle, serving = memory_of({}, 0, False), memory_of({}, 1, False)
    assert idle.free_gib > 112  # a start needs 112 GiB available
    assert 5 <= serving.available_gib <= 8  # 5 GiB are left on a serving head
    assert memory_of({}, 2, False) == serving


def test_page_cache_counts_against_free_memory_until_it_is_dropped_field_report_53() -> None:
    ordered = {"available_gib": 115.0, "cache_gib": 95.0}
    assert memory_of(ordered, 0, False).free_gib == pytest.approx(20.0)
    assert memory_of(ordered, 0, True).free_gib > 110
    assert memory_of(ordered, 0, True).available_gib == 115.0


def test_the_memory_that_the_tree_shows_is_read_back(root: Path) -> None:
    shown = sysfs.meminfo(root)
    assert shown["MemTotal"] == 127600748 * 1024
    assert shown["MemAvailable"] > shown["MemFree"] > 112 * 2**30
    assert sysfs.kernel_release(root).startswith("6.17.")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/opt/tensorfold/native/bin/tensorfold-native", "serve"], "tensorfold-native"),
        (["/usr/bin/python3", "-I", "/opt/tensorfold/bin/tf-dsv41-lanes", "/m"], "tf-dsv41-lanes"),
        (["docker", "run", "image", "/opt/tensorfold/native/bin/tensorfold-native"], None),
        (["/sbin/docker-init", "--", "/opt/tensorfold/bin/tf-dsv41-lanes"], None),
        (["/opt/tensorfold/bin/tf-dsv41-check"], None),
        (["vim", "tensorfold-native"], None),
        ([], None),
    ],
)
def test_only_a_running_rank_counts_as_one(words: list[str], name: str | None) -> None:
    assert engine_name(words) == name


def test_symlinks_are_relative_so_that_the_tree_can_be_mounted_anywhere(root: Path) -> None:
    links = [path for path in root.rglob("*") if path.is_symlink()]
    assert links
    assert all(not path.readlink().is_absolute() and path.exists() for path in links)
    assert all(isinstance(Symlink(str(path.readlink())).target, str) for path in links)


def test_nvidia_smi_answers_as_recorded_for_a_gb10() -> None:
    asked = ["--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
    assert nvidia_smi.answer(asked, [], "now") == ("NVIDIA GB10, 12.1, 580.173.02, [N/A]\n", 0)
    assert nvidia_smi.answer(["-L"], [], "now")[0].startswith("GPU 0: NVIDIA GB10 (UUID: GPU-")


def test_nvidia_smi_shows_a_rank_among_the_compute_apps() -> None:
    asked = ["--query-compute-apps=pid,process_name,used_gpu_memory", "--format=csv"]
    idle, code = nvidia_smi.answer(asked, [], "now")
    assert (idle, code) == ("pid, process_name, used_gpu_memory [MiB]\n", 0)
    text, _ = nvidia_smi.answer(
        [*asked[:1], "--format=csv,noheader,nounits"], [(77, "tensorfold-native")], "now"
    )
    assert text == f"77, tensorfold-native, {nvidia_smi.RANK_MIB}\n"


def test_nvidia_smi_draws_its_table_as_wide_as_the_tool() -> None:
    for apps in ([], [(400721, "tensorfold-native")]):
        lines = [line for line in nvidia_smi.answer([], apps, "now")[0].splitlines()[1:] if line]
        assert {len(line) for line in lines} == {91}


def test_nvidia_smi_refuses_what_it_does_not_know() -> None:
    assert nvidia_smi.answer(["--query-gpu=nonsense", "--format=csv"], [], "now")[1] == 2
    assert nvidia_smi.answer(["--reset"], [], "now")[1] == 1


def test_ibv_devinfo_tells_the_active_mtu_that_the_library_reads(root: Path) -> None:
    assert sysfs.devinfo_active_mtu(rdma_tools.answer(["ibv_devinfo", "-d", "rocep1s0f0"], root)) == 4096
    assert sysfs.devinfo_active_mtu(rdma_tools.answer(["ibv_devinfo", "-d", "rocep1s0f1"], root)) == 1024
