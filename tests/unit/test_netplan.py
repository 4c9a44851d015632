"""Addresses of the link: planned, kept where the user has some, persisted by netplan, and revertible."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sparkpair import linkplan, netapply, netplan, nodefacts, pairfile
from sparkpair.problem import Problem
from systree import HALVES, capture, pair_dict, put

F0 = ("enp1s0f0np0", "enP2p1s0f0np0")
F1 = ("enp1s0f1np1", "enP2p1s0f1np1")
MACS = {netdev: f"4c:bb:47:00:0a:{at:02x}" for at, netdev in enumerate(HALVES)}


def port(netdev: str, **changes: Any) -> dict[str, Any]:
    device, cage, _ = HALVES[netdev]
    usual = {
        "netdev": netdev,
        "cage": cage,
        "rdma": device,
        "mac": MACS[netdev],
        "carrier": True,
        "mtu": 1500,
    }
    said = {"netplan": [], "own": [], "live": [], "configured_mtu": None, "competing": [], "files": []}
    return {**usual, **said, "admin_up": True, **changes}


def node(host: str, cabled: Sequence[str] = F0, **changes: Any) -> dict[str, Any]:
    """Facts of one bare node: `cabled` halves have a carrier, nothing has an address."""
    return {
        "host": host,
        "machine_id": f"id-of-{host}",
        "renderer": "networkd",
        "ports": [port(netdev, carrier=netdev in cabled) for netdev in HALVES],
        "addresses": [{"netdev": "enP7s7", "address": "192.0.2.10/24"}],
        "routes": [{"dst": "default", "dev": "enP7s7"}, {"dst": "192.0.2.0/24", "dev": "enP7s7"}],
        "problems": [],
        "settled": False,
        "pair": None,
        "named": [],
        **changes,
    }


def with_ports(facts: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "ports": [{**item, **changes.get(item["netdev"], {})} for item in facts["ports"]]}


def hears(*pairs: tuple[str, str]) -> dict[str, list[linkplan.Heard]]:
    """Both hosts hear each other on these (head port, worker port)."""
    return {
        "head": [(mine, "worker", theirs) for mine, theirs in pairs],
        "worker": [(theirs, "head", mine) for mine, theirs in pairs],
    }


def by_rail(plan: linkplan.Plan) -> list[list[tuple[str, str]]]:
    return [[(end["netdev"], end["address"]) for end in ends] for ends in plan.rails]


PLANNED = [
    [("enp1s0f0np0", "10.20.0.1"), ("enp1s0f0np0", "10.20.0.2")],
    [("enP2p1s0f0np0", "10.21.0.1"), ("enP2p1s0f0np0", "10.21.0.2")],
]
STRAIGHT = hears((F0[0], F0[0]), (F0[1], F0[1]))
ALL_IN_CAGE = hears(*((mine, theirs) for mine in F0 for theirs in F0))


@pytest.mark.parametrize("heard", [None, STRAIGHT, ALL_IN_CAGE])
def test_a_bare_pair_gets_the_default_plan(heard: Any) -> None:
    """The same in a dry run, over two straight wires, and where each half of a cage hears both others."""
    plan = linkplan.make([node("head"), node("worker")], heard)
    assert by_rail(plan) == PLANNED
    assert (plan.mtu, plan.warnings) == (9000, [])
    assert set(plan.files) == {"head", "worker"}
    assert yaml.safe_load(plan.files["worker"] or "") == {
        "network": {
            "version": 2,
            "ethernets": {
                netdev: {
                    "renderer": "networkd",
                    "addresses": [f"10.{20 + rail}.0.2/24"],
                    "dhcp4": False,
                    "dhcp6": False,
                    "accept-ra": False,
                    "link-local": [],
                    "optional": True,
                    "mtu": 9000,
                }
                for rail, netdev in enumerate(F0)
            },
        }
    }


def test_crossed_wires_make_rails_of_the_ports_that_meet() -> None:
    plan = linkplan.make([node("head"), node("worker")], hears((F0[0], F0[1]), (F0[1], F0[0])))
    assert [[end[0] for end in ends] for ends in by_rail(plan)] == [[F0[0], F0[1]], [F0[1], F0[0]]]


def test_the_cable_in_different_cages_is_planned_by_each_node_s_names() -> None:
    """Field report 7."""
    plan = linkplan.make([node("head", F1), node("worker", F0)], hears((F1[0], F0[0]), (F1[1], F0[1])))
    assert [[end[0] for end in ends] for ends in by_rail(plan)] == [[F1[0], F0[0]], [F1[1], F0[1]]]
    assert [problem.code for problem in plan.warnings] == ["link-other-cage"]
    assert F0[0] in (plan.files["worker"] or "")
    assert F0[0] not in (plan.files["head"] or "")


def test_a_port_cabled_to_something_else_is_not_chosen() -> None:
    """Field report 6: carrier on both cages, the peer answers on one."""
    both = [*F0, *F1]
    plan = linkplan.make([node("head", both), node("worker", both)], hears((F1[0], F1[0]), (F1[1], F1[1])))
    assert [[end[0] for end in ends] for ends in by_rail(plan)] == [[F1[0], F1[0]], [F1[1], F1[1]]]


def test_two_cables_between_the_sparks_are_refused_until_one_is_named() -> None:
    """Field report 6: no picking of the first."""
    both = [*F0, *F1]
    heard = hears(*((name, name) for name in both))
    with pytest.raises(Problem, match="more than one cable") as caught:
        linkplan.make([node("head", both), node("worker", both)], heard)
    assert caught.value.code == "link-ambiguous"
    assert all(name in caught.value.found for name in both)
    named = [node("head", both, named=list(F1)), node("worker", both, named=list(F1))]
    assert by_rail(linkplan.make(named, heard))[0][0][0] == F1[0]
    one = [node("head", both, named=list(F1)), node("worker", both)]
    assert [end[0] for end in by_rail(linkplan.make(one, heard))[1]] == [F1[1], F1[1]]


def test_a_dry_run_says_that_the_wire_will_decide() -> None:
    both = [*F0, *F1]
    plan = linkplan.make([node("head", both), node("worker", F0)], None)
    assert [problem.code for problem in plan.warnings] == ["link-ambiguous"]
    assert plan.warnings[0].severity == "warning"


def test_a_settled_pair_keeps_its_ports_without_asking() -> None:
    both = [*F0, *F1]
    hosts = [
        node("head", both, settled=True, pair=pair_dict(0)),
        node("worker", both, settled=True, pair=pair_dict(1)),
    ]
    plan = linkplan.make(hosts, None)
    assert by_rail(plan) == PLANNED
    assert plan.warnings == []


@pytest.mark.parametrize(
    ("heard", "code"),
    [
        ({"head": [], "worker": []}, "link-leads-nowhere"),
        ({"head": [(F0[0], "worker", F0[0])], "worker": []}, "link-leads-nowhere"),
        (hears((F0[0], F0[0])), "link-too-few-rails"),
    ],
)
def test_a_cable_that_leads_nowhere_or_half_way_stops_the_plan(heard: Any, code: str) -> None:
    """Field report 6; what is heard one way only is no link."""
    with pytest.raises(Problem) as caught:
        linkplan.make([node("head"), node("worker")], heard)
    assert caught.value.code == code


def test_one_rail_is_enough_when_it_is_asked_for() -> None:
    """Field report 3."""
    plan = linkplan.make([node("head"), node("worker")], hears((F0[1], F0[1])), rails=1)
    assert by_rail(plan) == [[(F0[1], "10.20.0.1"), (F0[1], "10.20.0.2")]]


def test_a_half_that_is_dead_is_left_out_where_one_rail_is_enough() -> None:
    """Field report 4: the run goes on with one rail and says why."""
    hosts = [node("head"), node("worker", cabled=[F0[0]])]
    plan = linkplan.make(hosts, hears((F0[0], F0[0])), rails=2, required=1)
    assert by_rail(plan) == PLANNED[:1]
    assert [(problem.code, problem.severity) for problem in plan.warnings] == [
        ("link-too-few-rails", "warning")
    ]


def test_a_node_without_a_cable_tells_its_own_finding() -> None:
    finding = {"code": "link-no-device", "found": "no ConnectX-7", "needed": "one", "do": "plug it"}
    with pytest.raises(Problem) as caught:
        linkplan.make([node("head"), node("worker", ports=[], problems=[finding])], None)
    assert (caught.value.code, caught.value.host) == ("link-no-device", "worker")


def test_a_kernel_that_blocks_rdma_memory_stops_the_plan() -> None:
    """Field report 20, before any address is set."""
    finding = {"code": "rdma-kho", "found": "kernel 7.0", "needed": "memory", "do": "kho=off"}
    with pytest.raises(Problem) as caught:
        linkplan.make([node("head"), node("worker", problems=[finding])], STRAIGHT)
    assert (caught.value.code, caught.value.host) == ("rdma-kho", "worker")


def test_one_machine_by_two_names_is_no_pair() -> None:
    """Field report 16."""
    with pytest.raises(Problem, match="same /etc/machine-id"):
        linkplan.make([node("head"), node("worker", machine_id="id-of-head")], None)


def test_a_port_without_an_rdma_device_is_no_rail() -> None:
    worker = with_ports(node("worker"), **{F0[1]: {"rdma": None}})
    with pytest.raises(Problem) as caught:
        linkplan.make([node("head"), worker], STRAIGHT)
    assert (caught.value.code, caught.value.host) == ("link-no-rdma", "worker")


def test_four_ranks_on_a_switch_get_four_hosts_of_each_subnet() -> None:
    names = ["spark-a", "spark-b", "spark-c", "spark-d"]
    plan = linkplan.make([node(name) for name in names], None)
    assert [end["address"] for end in plan.rails[1]] == ["10.21.0.1", "10.21.0.2", "10.21.0.3", "10.21.0.4"]


# --- the user's own plan ---------------------------------------------------------------------


def configured(name: str, path: str = "/etc/netplan/40-cx7.yaml", text: str | None = None) -> dict[str, Any]:
    """What a recorded netplan file says of the four ports, as facts."""
    files = {path: text if text is not None else capture(name)}
    return {
        netdev: {"netplan": config.static, "configured_mtu": config.mtu, "files": config.files}
        for netdev, config in netplan.port_configs(files, MACS).items()
    }


def test_nvidia_s_two_subnets_are_kept_and_only_the_mtu_is_added() -> None:
    """The recorded 40-cx7.yaml has addresses and no mtu: ours holds the mtu alone."""
    recorded = capture("netplan-two-subnets-1.txt")
    head = with_ports(node("head", F1), **configured("", text=recorded))
    worker = with_ports(node("worker", F1), **configured("", text=recorded.replace(".10/", ".11/")))
    plan = linkplan.make([head, worker], hears((F1[0], F1[0]), (F1[1], F1[1])))
    assert by_rail(plan) == [
        [(F1[0], "192.168.100.10"), (F1[0], "192.168.100.11")],
        [(F1[1], "192.168.101.10"), (F1[1], "192.168.101.11")],
    ]
    assert yaml.safe_load(plan.files["head"] or "")["network"]["ethernets"] == {
        netdev: {"mtu": 9000} for netdev in F1
    }


def test_a_complete_plan_of_the_user_needs_no_file_of_ours() -> None:
    """The recorded jumbo file, and a peer like it on the other port."""
    recorded = capture("netplan-jumbo-1-spark-b.txt")
    other = recorded.replace(".12/", ".11/").replace(".18/", ".17/").replace("f0np0", "f1np1")
    head = with_ports(node("head", F1), **configured("", text=other))
    worker = with_ports(node("worker", F0), **configured("", text=recorded))
    plan = linkplan.make([head, worker], hears((F1[0], F0[0]), (F1[1], F0[1])))
    assert plan.files == {"head": None, "worker": None}
    assert [end["source"] for end in plan.rails[0]] == ["netplan", "netplan"]
    assert plan.rails[1][1]["address"] == "192.168.200.18"


def test_crossed_addresses_inside_a_cage_pair_up_by_subnet() -> None:
    """Each half of a cage hears both others, so the addresses may say which belong together."""
    head = with_ports(
        node("head"), **{F0[0]: {"netplan": ["10.1.0.1/24"]}, F0[1]: {"netplan": ["10.2.0.1/24"]}}
    )
    worker = with_ports(
        node("worker"), **{F0[0]: {"netplan": ["10.2.0.2/24"]}, F0[1]: {"netplan": ["10.1.0.2/24"]}}
    )
    plan = linkplan.make([head, worker], ALL_IN_CAGE)
    assert by_rail(plan) == [
        [(F0[0], "10.1.0.1"), (F0[1], "10.1.0.2")],
        [(F0[1], "10.2.0.1"), (F0[0], "10.2.0.2")],
    ]


def test_a_missing_twin_is_added_beside_the_kept_rail() -> None:
    head = with_ports(node("head"), **{F0[0]: {"netplan": ["10.1.0.1/24"]}})
    worker = with_ports(node("worker"), **{F0[0]: {"netplan": ["10.1.0.2/24"]}})
    plan = linkplan.make([head, worker], STRAIGHT)
    assert by_rail(plan)[0] == [(F0[0], "10.1.0.1"), (F0[0], "10.1.0.2")]
    assert by_rail(plan)[1] == [(F0[1], "10.21.0.1"), (F0[1], "10.21.0.2")]


def test_nvidia_s_link_local_file_is_replaced_by_static_addresses() -> None:
    """Field report 15: 169.254 addresses are no plan."""
    said = configured("netplan-link-local-one-rail-1.txt")
    plan = linkplan.make([with_ports(node("head"), **said), with_ports(node("worker"), **said)], STRAIGHT)
    assert by_rail(plan) == PLANNED


@pytest.mark.parametrize(
    "name", ["netplan-twins-same-subnet-1.txt", "netplan-four-interfaces-one-subnet-1.txt"]
)
def test_recorded_twins_in_one_subnet_are_kept_with_a_warning(name: str) -> None:
    recorded = capture(name)
    there = recorded
    for text in sorted({word.strip("[],") for word in recorded.split() if "/" in word}):
        address = ipaddress.IPv4Interface(text)
        there = there.replace(text, f"{address.ip + 8}/{address.network.prefixlen}")
    head = with_ports(node("head"), **configured("", text=recorded))
    worker = with_ports(node("worker"), **configured("", text=there))
    plan = linkplan.make([head, worker], STRAIGHT)
    assert {end["source"] for ends in plan.rails for end in ends} == {"netplan"}
    assert [problem.code for problem in plan.warnings] == ["link-same-subnet"]


def test_live_addresses_are_kept_and_said_not_to_be_persistent() -> None:
    """Field report 11: set with `ip addr` only."""
    head = with_ports(node("head"), **{F0[0]: {"live": ["10.1.0.1/24"]}})
    worker = with_ports(node("worker"), **{F0[0]: {"live": ["10.1.0.2/24"]}})
    plan = linkplan.make([head, worker], STRAIGHT)
    assert by_rail(plan)[0] == [(F0[0], "10.1.0.1"), (F0[0], "10.1.0.2")]
    assert [problem.code for problem in plan.warnings] == ["link-not-persistent"] * 2
    assert "10.1.0.1/24" in (plan.files["head"] or "")
    # The next run finds them in our own file, and plans the same.
    again = [
        with_ports(
            facts,
            **{
                ends[rank]["netdev"]: {"live": [], "own": [f"{ends[rank]['address']}/24"]}
                for ends in plan.rails
            },
        )
        for rank, facts in enumerate((head, worker))
    ]
    second = linkplan.make(again, STRAIGHT)
    assert by_rail(second) == by_rail(plan)
    assert second.files == plan.files
    assert second.warnings == []


def test_other_subnets_asked_for_replace_ours_of_an_earlier_run() -> None:
    hosts = [
        with_ports(node(host), **{F0[0]: {"own": [f"10.20.0.{at}/24"]}, F0[1]: {"own": [f"10.21.0.{at}/24"]}})
        for at, host in ((1, "head"), (2, "worker"))
    ]
    plan = linkplan.make(hosts, STRAIGHT, subnets=["10.30.0.0/24", "10.31.0.0/24"])
    assert plan.rails[0][1]["address"] == "10.30.0.2"


def test_different_mtus_in_the_user_s_files_stop_the_plan() -> None:
    """Field report 10."""
    head = with_ports(
        node("head"), **{F0[0]: {"configured_mtu": 1500, "files": ["/etc/netplan/40-cx7.yaml"]}}
    )
    worker = with_ports(node("worker"), **{F0[0]: {"configured_mtu": 9000, "files": ["/etc/netplan/x.yaml"]}})
    with pytest.raises(Problem, match="different MTUs") as caught:
        linkplan.make([head, worker], STRAIGHT)
    assert "head: enp1s0f0np0 1500 (/etc/netplan/40-cx7.yaml)" in caught.value.found


def test_one_mtu_of_the_user_s_own_wins_with_a_warning() -> None:
    head = with_ports(
        node("head"), **{F0[0]: {"configured_mtu": 1500, "files": ["/etc/netplan/40-cx7.yaml"]}}
    )
    plan = linkplan.make([head, node("worker")], STRAIGHT)
    assert (plan.mtu, [problem.code for problem in plan.warnings]) == (1500, ["link-mtu-files"])
    assert "mtu: 1500" in (plan.files["worker"] or "")
    confirmed = linkplan.make([head, node("worker")], STRAIGHT, mtu=1500)
    assert confirmed.warnings == []


def test_a_second_definition_of_a_port_is_refused_with_its_name() -> None:
    """Field report 14: two profiles match one port; only one can become active."""
    text = """
network:
  version: 2
  ethernets:
    NM-6b7a:
      renderer: NetworkManager
      match: {name: "enp1s0f0np0"}
      dhcp4: true
"""
    said = {
        netdev: {"competing": netplan.competing(config, netdev), "files": config.files}
        for netdev, config in netplan.port_configs({"/etc/netplan/90-NM.yaml": text}, MACS).items()
    }
    with pytest.raises(Problem) as caught:
        linkplan.make([with_ports(node("head"), **said), node("worker")], STRAIGHT)
    assert (caught.value.code, caught.value.host) == ("link-competing", "head")
    assert "NM-6b7a" in caught.value.found
    assert "nmcli connection delete 6b7a" in caught.value.do


def test_a_definition_for_every_port_is_to_be_narrowed() -> None:
    """networkd takes the first file that matches: `all-en` would win over ours."""
    text = "network: {ethernets: {all-en: {match: {name: 'en*'}, dhcp4: true}}}"
    config = netplan.port_configs({"/etc/netplan/01.yaml": text}, MACS)[F0[0]]
    head = with_ports(node("head"), **{F0[0]: {"competing": netplan.competing(config, F0[0])}})
    with pytest.raises(Problem) as caught:
        linkplan.make([head, node("worker")], STRAIGHT)
    assert "narrow the match of all-en" in caught.value.do


# --- subnets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subnets", "says"),
    [
        (["10.20.0.0/24"], "1 link_subnets for 2 rails"),
        (["10.20.0.1/24", "10.21.0.0/24"], "host bits"),
        (["169.254.0.0/16", "10.21.0.0/24"], "169.254"),
        (["127.0.0.0/24", "10.21.0.0/24"], "127.0.0.0/24"),
        (["10.20.0.0/31", "10.21.0.0/24"], "no room"),
        (["10.20.0.0/16", "10.20.1.0/24"], "overlaps another"),
        (["fabric", "10.21.0.0/24"], "fabric"),
    ],
)
def test_bad_subnets_fail_before_any_connection(subnets: list[str], says: str) -> None:
    """Field reports 15 and 16."""
    with pytest.raises(Problem) as caught:
        netplan.check_subnets(subnets, 2)
    assert says in caught.value.found
    assert caught.value.code == "link-subnets"


@pytest.mark.parametrize(
    ("addresses", "routes", "by"),
    [
        ([{"netdev": "enP7s7", "address": "10.20.0.77/24"}], [], "10.20.0.77/24 on enP7s7"),
        ([], [{"dst": "10.0.0.0/8", "dev": "tun0"}], "the route 10.0.0.0/8 by tun0"),
        ([{"netdev": F1[0], "address": "10.21.0.9/16"}], [], f"10.21.0.9/16 on {F1[0]}"),
    ],
)
def test_a_subnet_that_a_node_uses_elsewhere_is_refused_with_free_ones(
    addresses: list[dict[str, str]], routes: list[dict[str, str]], by: str
) -> None:
    worker = node("worker", addresses=addresses, routes=routes)
    with pytest.raises(Problem) as caught:
        linkplan.make([node("head"), worker], STRAIGHT)
    assert caught.value.code == "link-subnet-taken"
    assert f"{by} of worker" in caught.value.found
    proposed = yaml.safe_load(caught.value.do.split("-e ")[1].strip("'"))["link_subnets"]
    assert len(linkplan.make([node("head"), worker], STRAIGHT, subnets=proposed).rails) == 2


def test_the_default_route_and_our_own_ports_take_nothing() -> None:
    worker = node(
        "worker",
        addresses=[{"netdev": F0[0], "address": "10.20.0.2/24"}],
        routes=[{"dst": "default", "dev": "wlP9s9"}, {"dst": "10.20.0.0/24", "dev": F0[0]}],
    )
    assert by_rail(linkplan.make([node("head"), worker], STRAIGHT)) == PLANNED


@given(
    st.lists(
        st.builds(
            lambda number, prefix: ipaddress.IPv4Network((number, prefix), strict=False),
            st.integers(0x0A000000, 0x0AFFFFFF),
            st.integers(8, 30),
        ),
        max_size=12,
    )
)
def test_what_is_proposed_is_free(networks: list[ipaddress.IPv4Network]) -> None:
    taken = [netplan.Taken("h", network, "x") for network in networks]
    proposed = netplan.propose(taken, 2)
    assert len(netplan.check_subnets(proposed, 2)) == 2
    netplan.check_free([ipaddress.IPv4Network(text) for text in proposed], taken)


# --- netplan's files -------------------------------------------------------------------------


def test_files_are_read_in_netplan_s_order_and_run_hides_etc(tmp_path: Path) -> None:
    for folder, name in (("etc", "50-b"), ("lib", "10-a"), ("run", "50-b"), ("etc", "90-c")):
        put(tmp_path / folder / "netplan" / f"{name}.yaml", folder)
    assert netplan.list_files(tmp_path) == {
        "/lib/netplan/10-a.yaml": "lib\n",
        "/run/netplan/50-b.yaml": "run\n",
        "/etc/netplan/90-c.yaml": "etc\n",
    }


def test_settings_of_one_name_are_merged_over_files() -> None:
    files = {
        "/etc/netplan/10.yaml": "network: {ethernets: {x: {match: {macaddress: '4C:BB:47:00:0A:00'}, mtu: 1500}}}",
        "/etc/netplan/20.yaml": "network: {ethernets: {x: {addresses: [10.1.0.1/24, 'fe80::1/64'], mtu: 9000}}}",
        str(netplan.OWN_FILE): "network: {ethernets: {enp1s0f0np0: {addresses: [10.20.0.1/24]}}}",
    }
    config = netplan.port_configs(files, MACS)["enp1s0f0np0"]
    assert (config.static, config.mtu, config.definitions) == (["10.1.0.1/24"], 9000, ["x"])
    assert netplan.competing(config, "enp1s0f0np0") == ["x"]


@pytest.mark.parametrize("text", ["network: [", "\t- x", "a: b: c"])
def test_a_file_that_is_no_yaml_is_named(text: str) -> None:
    with pytest.raises(Problem, match=r"00-broken\.yaml is not YAML"):
        netplan.port_configs({"/etc/netplan/00-broken.yaml": text}, MACS)


@pytest.mark.parametrize(
    "text", ["", "network:", "- 1", "network: {ethernets: [1]}", "network: {ethernets: {x: 1}}"]
)
def test_a_file_without_ports_says_nothing(text: str) -> None:
    config = netplan.port_configs({"/etc/netplan/x.yaml": text}, MACS)["enp1s0f0np0"]
    assert config == netplan.PortConfig()


@pytest.mark.parametrize(
    ("files", "active", "by"),
    [
        ({}, False, "networkd"),
        ({}, True, "NetworkManager"),
        ({"/etc/netplan/01.yaml": "network: {renderer: NetworkManager}"}, False, "NetworkManager"),
        ({"/etc/netplan/01.yaml": "network: {version: 2}"}, True, "networkd"),
        (
            {
                "/etc/netplan/01.yaml": "network: {renderer: networkd}",
                "/etc/netplan/02.yaml": "network: {renderer: NetworkManager}",
            },
            False,
            "NetworkManager",
        ),
    ],
)
def test_the_node_s_renderer_is_kept(files: dict[str, str], active: bool, by: str) -> None:
    """Field report 11: find out who owns the interfaces, and persist there."""
    assert netplan.renderer(files, network_manager_active=active) == by
    text = netplan.render({"enp1s0f0np0": {"address": "10.20.0.1/24", "mtu": 9000}}, by)
    assert yaml.safe_load(text or "")["network"]["ethernets"]["enp1s0f0np0"]["renderer"] == by
    assert "renderer" not in yaml.safe_load(text or "")["network"]


def test_the_session_s_address_is_found_above_sudo(tmp_path: Path) -> None:
    """Field report 12: a change of the port that carries the session must be refused."""
    for pid, parent, environ in (
        (30, 20, "USER=root"),
        (20, 10, "SSH_CONNECTION=192.0.2.1 5 10.20.0.1 22"),
        (10, 1, ""),
    ):
        put(tmp_path / str(pid) / "status", f"Name:\tsh\nPPid:\t{parent}")
        (tmp_path / str(pid) / "environ").write_bytes(environ.encode() + b"\0A=1\0")
    assert nodefacts.session_address(30, tmp_path) == "10.20.0.1"
    assert nodefacts.session_address(10, tmp_path) is None
    assert nodefacts.session_address(99, tmp_path) is None


def test_a_cable_that_moved_takes_its_plan_along() -> None:
    """Our own addresses on the other cage are no foreign use of the subnet."""
    hosts = []
    for at, host in ((1, "head"), (2, "worker")):
        facts = node(
            host,
            F1,
            addresses=[{"netdev": F0[0], "address": f"10.20.0.{at}/24"}],
            routes=[{"dst": "10.20.0.0/24", "dev": F0[0]}],
        )
        hosts.append(with_ports(facts, **{F0[0]: {"own": [f"10.20.0.{at}/24"]}}))
    plan = linkplan.make(hosts, hears((F1[0], F1[0]), (F1[1], F1[1])))
    assert by_rail(plan)[0] == [(F1[0], "10.20.0.1"), (F1[0], "10.20.0.2")]
    assert F0[0] not in (plan.files["head"] or "")


# --- putting it into force -------------------------------------------------------------------


class Machine:
    """A node's programs and live addresses, as far as `apply` uses them."""

    def __init__(self, tmp_path: Path, *, works: bool = True, refuses: str = "") -> None:
        self.own, self.pending = tmp_path / "60-sparkpair-link.yaml", tmp_path / "revert"
        self.calls: list[str] = []
        self.works, self.refuses = works, refuses
        self.timer = False
        self.state = {"enp1s0f0np0": netapply.LivePort((), 1500, "aa:bb:cc:dd:ee:01")}

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        line = " ".join(words)
        self.calls.append(line)
        if self.refuses and line.startswith(self.refuses):
            return subprocess.CompletedProcess(list(words), 1, "", "refused")
        if line.startswith("systemd-run"):
            self.timer = True
        if line.startswith("systemctl stop"):
            self.timer = False
        if line.startswith("systemctl is-active"):
            return subprocess.CompletedProcess(list(words), 0 if self.timer else 3, "", "")
        if line.startswith("networkctl reconfigure") and self.works:
            self.state = {"enp1s0f0np0": netapply.LivePort(("10.20.0.1/24",), 9000, "aa:bb:cc:dd:ee:01")}
        return subprocess.CompletedProcess(list(words), 0, "", "")

    def apply(self, text: str | None = "network: {}\n", **options: Any) -> dict[str, Any]:
        wanted = [netapply.WantedPort("enp1s0f0np0", "10.20.0.1/24", 9000)]
        return netapply.apply(
            text,
            wanted,
            renderer="networkd",
            run=self.run,
            own_file=self.own,
            pending=self.pending,
            live=lambda: self.state,
            **options,
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(netapply.probe, "check_free", lambda *_: None)
    monkeypatch.setattr(netapply, "_LIVE_WAIT_S", 0.0)
    return Machine(tmp_path)


def test_a_change_is_tried_made_revertible_and_then_set(machine: Machine) -> None:
    """Field report 12: generate in a folder of its own, then the timer, then only the link's ports."""
    result = machine.apply()
    assert (result["changed"], result["pending"]) == (True, True)
    order = [
        next(at for at, line in enumerate(machine.calls) if line.startswith(start))
        for start in ("netplan generate --root-dir", "systemd-run", "networkctl reconfigure enp1s0f0np0")
    ]
    assert order == sorted(order)
    assert "netplan apply" not in machine.calls
    assert machine.own.stat().st_mode & 0o777 == 0o600
    assert machine.apply()["changed"] is False


def test_a_dry_run_shows_the_file_and_sets_nothing(machine: Machine) -> None:
    result = machine.apply(check_mode=True)
    assert result["changed"] is True
    assert result["diff"]["after"] == "network: {}\n"
    assert "MTU 1500, not 9000" in result["diff"]["before"]
    assert not machine.own.exists()
    assert machine.calls == []


@pytest.mark.parametrize(
    ("renderer", "steps"),
    [
        ("networkd", ["networkctl reload", "networkctl reconfigure a b"]),
        (
            "NetworkManager",
            ["nmcli connection reload", "nmcli connection up netplan-a", "nmcli connection up netplan-b"],
        ),
    ],
)
def test_only_the_link_s_ports_are_configured_anew(machine: Machine, renderer: str, steps: list[str]) -> None:
    """Field report 12: with NetworkManager a whole `netplan apply` would blip the management connection."""
    assert netapply.activate(renderer, ["a", "b"], machine.run) == []
    assert machine.calls[0] == "netplan generate"
    assert [line for line in machine.calls[1:] if not line.startswith("systemctl")] == steps


def test_what_the_service_could_not_do_netplan_does_as_a_whole(machine: Machine) -> None:
    machine.refuses = "networkctl reload"
    with pytest.raises(Problem):
        machine.apply()
    assert "netplan apply" in machine.calls


def test_addresses_of_an_earlier_plan_are_taken_off(machine: Machine) -> None:
    machine.own.write_text("network: {ethernets: {enp1s0f1np1: {addresses: [10.20.0.1/24]}}}")
    machine.state["enp1s0f1np1"] = netapply.LivePort(("10.20.0.1/24",), 9000, "aa:bb:cc:dd:ee:02")
    machine.apply()
    assert "networkctl reconfigure enp1s0f0np0 enp1s0f1np1" in machine.calls
    assert "ip addr del 10.20.0.1/24 dev enp1s0f1np1" in machine.calls


def test_a_session_over_the_link_is_refused_before_anything_is_written(machine: Machine) -> None:
    """Field report 12."""
    machine.state = {"enp1s0f0np0": netapply.LivePort(("10.99.0.1/24",), 1500, "aa:bb:cc:dd:ee:01")}
    with pytest.raises(Problem) as caught:
        machine.apply(session="10.99.0.1")
    assert caught.value.code == "link-ssh"
    assert not machine.own.exists()
    assert machine.calls == []


@pytest.mark.parametrize(
    ("refuses", "code"),
    [("netplan generate --root-dir", "netplan-refused"), ("systemd-run", "link-no-revert")],
)
def test_without_a_sound_file_or_a_way_back_nothing_is_set(machine: Machine, refuses: str, code: str) -> None:
    machine.refuses = refuses
    with pytest.raises(Problem) as caught:
        machine.apply()
    assert caught.value.code == code
    assert not machine.own.exists()
    assert not any(line.startswith("networkctl") for line in machine.calls)


def test_addresses_that_do_not_come_up_are_taken_back_at_once(machine: Machine) -> None:
    machine.works = False
    with pytest.raises(Problem) as caught:
        machine.apply()
    assert caught.value.code == "link-apply"
    assert "not 10.20.0.1/24" in caught.value.found
    assert machine.calls[-1] == f"/bin/sh {machine.pending / 'revert.sh'}"


def test_a_timer_that_nobody_stopped_is_told(machine: Machine) -> None:
    machine.apply()
    (machine.pending / "reverted").touch()
    with pytest.raises(Problem) as caught:
        netapply.confirm(run=machine.run, pending=machine.pending)
    assert caught.value.code == "link-reverted"
    assert netapply.confirm(run=machine.run, pending=machine.pending) == {"changed": False}


def test_a_confirmed_change_leaves_no_timer(machine: Machine) -> None:
    machine.apply()
    assert machine.apply()["pending"] is True
    assert netapply.confirm(run=machine.run, pending=machine.pending)["changed"] is True
    assert not machine.timer
    assert machine.apply()["pending"] is False


def test_the_way_back_restores_file_addresses_and_mtu(tmp_path: Path) -> None:
    """Run for real, with programs that only note what they are asked."""
    own, before, done = tmp_path / "own.yaml", tmp_path / "before.yaml", tmp_path / "reverted"
    own.write_text("new")
    before.write_text("old")
    log = tmp_path / "log"
    for name in ("netplan", "ip"):
        put(tmp_path / "bin" / name, f'#!/bin/sh\necho "{name} $*" >>{log}')
        (tmp_path / "bin" / name).chmod(0o755)
    live = {"enp1s0f0np0": netapply.LivePort(("10.9.0.1/24", "169.254.1.2/16"), 1500, "")}
    wanted = [netapply.WantedPort("enp1s0f0np0", "10.20.0.1/24", 9000)]
    script = netapply.revert_script(own, before, wanted, live, done)
    subprocess.run(["/bin/sh", "-c", script], check=True, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    assert own.read_text() == "old"
    assert done.exists()
    assert log.read_text().splitlines() == [
        "netplan apply",
        "ip addr del 10.20.0.1/24 dev enp1s0f0np0",
        "ip link set enp1s0f0np0 mtu 1500",
        "ip addr add 10.9.0.1/24 dev enp1s0f0np0",
    ]


def test_the_pair_s_file_is_made_of_the_rails_that_serve() -> None:
    heard = {
        "spark-a": [(name, "spark-b", name) for name in F0],
        "spark-b": [(name, "spark-a", name) for name in F0],
    }
    plan = linkplan.make([node("spark-a"), node("spark-b")], heard).as_dict()
    assert linkplan.pair_of(plan, 0, [0, 1], [22, 22]) == pairfile.parse(pair_dict(0))
    second = linkplan.pair_of(plan, 1, [1], [22, 2222])
    assert (second.master_address, second.me.ssh_port, second.me.rails[0].rail) == ("10.21.0.1", 2222, 0)
    assert pairfile.parse(second.as_dict()) == second
