"""The RoCE v2 row of a GID table, chosen at each start (field report 9)."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparkpair import gid
from sparkpair.sysfs import GidRow, RdmaPort
from systree import capture, gid_rows, mapped

NETDEV = "enp1s0f0np0"


def port(*rows: tuple[int, str, str, str], netdevs: tuple[str, ...] = (NETDEV,)) -> RdmaPort:
    kinds = {"IB/RoCE v1": "v1", "RoCE v2": "v2"}
    table = tuple(
        GidRow(at, ipaddress.IPv6Address(text), kinds.get(kind, ""), dev) for at, text, kind, dev in rows
    )
    return RdmaPort("rocep1s0f0", netdevs=netdevs, gids=table)


def reasons(choice: gid.Choice) -> dict[int, str]:
    return {row.index: row.reason for row in choice.rejected}


def test_a_usual_table_gives_index_3() -> None:
    """Case (a): link-local v1, v2, then IPv4 v1, v2."""
    choice = gid.choose(port(*gid_rows(NETDEV, ["10.20.0.1"])), NETDEV, "10.20.0.1")
    assert choice.index == 3
    assert set(reasons(choice)) == {0, 1, 2}
    assert "link-local" in reasons(choice)[1]
    assert "v1" in reasons(choice)[2]


def test_another_index_on_the_worker_is_found_there() -> None:
    """Case (b): the IPv4 v2 row is at 5 on one node and at 3 on the other."""
    rows = gid_rows(NETDEV, ["10.9.9.9", "10.20.0.2"])
    assert gid.choose(port(*rows), NETDEV, "10.20.0.2").index == 5


def test_v1_alone_does_not_serve() -> None:
    """Case (c): the fault lists the table with the reason of each row."""
    rows = [row for row in gid_rows(NETDEV, ["10.20.0.1"]) if row[2] != "RoCE v2"]
    choice = gid.choose(port(*rows), NETDEV, "10.20.0.1")
    assert choice.index is None
    problem = gid.missing(choice)
    assert problem.code == "link-no-gid"
    assert "row 2 (::ffff:10.20.0.1): RoCE v1, not v2" in problem.found
    assert "row 0 (fe80::4ebb:47ff:fe00:a12)" in problem.found


def test_the_row_of_the_twin_or_of_another_address_does_not_serve() -> None:
    rows = [
        (3, mapped("10.20.0.1"), "RoCE v2", "enP2p1s0f0np0"),
        (5, mapped("10.99.0.1"), "RoCE v2", NETDEV),
        (7, mapped("169.254.127.30"), "RoCE v2", NETDEV),
        (9, mapped("10.20.0.1"), "", NETDEV),
    ]
    choice = gid.choose(port(*rows), NETDEV, "10.20.0.1")
    assert choice.index is None
    assert "belongs to enP2p1s0f0np0" in reasons(choice)[3]
    assert "not 10.20.0.1" in reasons(choice)[5]
    assert "another subnet" in reasons(choice)[7]
    assert "cannot be read" in reasons(choice)[9]


def test_a_link_local_address_never_serves() -> None:
    """Field report 15."""
    rows = [(3, mapped("169.254.127.30"), "RoCE v2", NETDEV)]
    assert "169.254" in reasons(gid.choose(port(*rows), NETDEV, ""))[3]


def test_a_row_without_a_netdev_counts_for_the_device_s_only_one() -> None:
    rows = [(3, mapped("10.20.0.1"), "RoCE v2", "")]
    assert gid.choose(port(*rows), NETDEV, "10.20.0.1").index == 3
    assert gid.choose(port(*rows, netdevs=()), NETDEV, "10.20.0.1").index is None


def test_an_empty_table_says_so() -> None:
    assert "is empty" in gid.missing(gid.choose(port(), NETDEV, "10.20.0.1")).found


def choice(*valid: int) -> gid.Choice:
    return gid.Choice("roce", NETDEV, "10.20.0.1", tuple(valid), ())


@pytest.mark.parametrize(
    ("choices", "shared"),
    [
        ([choice(3), choice(3)], 3),
        ([choice(3), choice(5)], None),
        ([choice(3, 5), choice(5)], 5),
        ([choice(3), choice()], None),
        ([choice(4)], 4),
        ([], None),
    ],
)
def test_rails_share_one_index_or_none(choices: list[gid.Choice], shared: int | None) -> None:
    """The engine's ring takes a single index for all of its devices."""
    assert gid.shared_index(choices) == shared


def test_unequal_twins_are_told_with_the_way_out() -> None:
    problem = gid.unequal([choice(3), choice(5)])
    assert "rails=1" in problem.do
    assert "[3]" in problem.found
    assert "[5]" in problem.found


def test_the_recorded_table_gives_index_3_on_both_twins() -> None:
    rows: dict[str, list[tuple[int, str, str, str]]] = {}
    for line in capture("show_gids-healthy-index3-1.txt").splitlines():
        words = line.split()
        if len(words) >= 6 and words[2].isdigit():
            kind = {"v1": "IB/RoCE v1", "v2": "RoCE v2"}[words[-2]]
            rows.setdefault(words[0], []).append((int(words[2]), words[3], kind, words[-1]))
    found = {
        device: gid.choose(port(*table, netdevs=(table[0][3],)), table[0][3], "").index
        for device, table in rows.items()
    }
    assert found == {"rocep1s0f0": 3, "roceP2p1s0f0": 3, "rocep1s0f1": None, "roceP2p1s0f1": None}


def test_the_recorded_launcher_found_the_same() -> None:
    assert set(re.findall(r"gid index (\d+)", capture("gid-validate-healthy-1.txt"))) == {"3"}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 255),
            st.integers(0, 2**128 - 1).map(lambda number: str(ipaddress.IPv6Address(number))),
            st.sampled_from(["IB/RoCE v1", "RoCE v2", ""]),
            st.sampled_from([NETDEV, "enP2p1s0f0np0", ""]),
        ),
        unique_by=lambda row: row[0],
        max_size=16,
    )
)
def test_every_row_is_either_valid_or_rejected_with_a_reason(rows: list[tuple[int, str, str, str]]) -> None:
    choice = gid.choose(port(*rows), NETDEV, "10.20.0.1")
    assert sorted([*choice.valid, *(row.index for row in choice.rejected)]) == sorted(row[0] for row in rows)
    assert all(row.reason for row in choice.rejected)
