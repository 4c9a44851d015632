"""Frames, ARP packets and the verdict on the rails, without a wire (the wire: tests/integration)."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparkpair import probe
from sparkpair.problem import Problem

MAC = b"\x4c\xbb\x47\x00\x0a\x12"
CALL = {"token": "w", "host": "worker", "netdev": "enp1s0f0np0", "heard": []}


def test_a_call_survives_the_wire() -> None:
    frame = probe.encode(MAC, CALL) + bytes(9)  # a card pads short frames
    assert frame[:6] == b"\xff" * 6
    assert frame[6:12] == MAC
    assert probe.decode(frame, "w") == CALL


@pytest.mark.parametrize(
    "call",
    [{**CALL, "token": "x"}, {**CALL, "host": 1}, {**CALL, "heard": "all"}, {"token": "w"}],
)
def test_calls_of_other_runs_and_other_forms_are_not_heard(call: dict[str, Any]) -> None:
    assert probe.decode(probe.encode(MAC, call), "w") is None


@given(st.binary(max_size=200))
def test_no_frame_is_too_strange(data: bytes) -> None:
    assert probe.decode(data, "w") is None
    probe.decode(probe.encode(MAC, CALL)[:14] + b"sparkpair1 " + data, "w")
    probe.arp_owner(data, "10.20.0.1")


def test_a_meeting_counts_once_both_ends_know_of_it() -> None:
    state = probe.Exchange("head", frozenset({"worker"}))
    assert not state.complete
    state.take("p0", {**CALL, "netdev": "q0"})
    assert state.heard == {("p0", "worker", "q0")}
    assert not state.complete
    state.take("p0", {**CALL, "netdev": "q0", "heard": [["q0", "head", "p0"]]})
    assert state.complete
    state.take("p1", {**CALL, "netdev": "q0"})
    assert not state.complete


def test_our_own_other_half_is_not_a_peer() -> None:
    """Field report 8: two views of one port are no cable."""
    state = probe.Exchange("head", frozenset({"worker"}))
    state.take("p1", {**CALL, "host": "head", "netdev": "p0"})
    state.take("p1", {**CALL, "host": "another-pair", "netdev": "p0"})
    assert state.heard == set()


def test_the_arp_probe_names_no_sender() -> None:
    """R11: a zero sender address changes nobody's table."""
    frame = probe.arp_frame(MAC, "10.20.0.1")
    assert len(frame) == 42
    assert frame[28:32] == bytes(4)
    assert frame[38:42] == bytes([10, 20, 0, 1])
    assert probe.arp_owner(frame, "10.20.0.1") is None


def test_an_answer_and_an_announcement_show_the_owner() -> None:
    reply = bytearray(probe.arp_frame(MAC, "10.20.0.9"))
    reply[20:22] = b"\0\2"
    reply[28:32] = bytes([10, 20, 0, 1])
    assert probe.arp_owner(bytes(reply), "10.20.0.1") == "4c:bb:47:00:0a:12"
    assert probe.arp_owner(bytes(reply), "10.20.0.2") is None


def plan(rails: int = 2) -> dict[str, Any]:
    return {
        "rails": [
            [
                {
                    "host": host,
                    "netdev": f"enp{rail}s0f0np0",
                    "address": f"10.{20 + rail}.0.{at}",
                    "mtu": 9000,
                }
                for at, host in ((1, "head"), (2, "worker"))
            ]
            for rail in range(rails)
        ]
    }


def seen(**rails: dict[str, Any]) -> dict[str, Any]:
    """Probes of both hosts, all fine but for "head0", "worker1", ... = what differs."""
    found = {}
    for host, peer in (("head", "worker"), ("worker", "head")):
        listed = []
        for rail in range(2):
            fine = {"rail": rail, "state": "ready", "mtu": 9000, "problem": None, "tcp": []}
            pings = {peer: {"large": True, "small": True}}
            listed.append({**fine, "pings": pings, **rails.get(f"{host}{rail}", {})})
        found[host] = {"rails": listed, "firewall": ""}
    return found


def test_rails_that_pass_everything_are_kept() -> None:
    assert probe.verdict(plan(), seen(), 2) == ([0, 1], [])


def test_a_dry_run_holds_nothing_against_a_rail() -> None:
    probes = seen(worker1={"pings": {"head": {"large": False, "small": False}}})
    probes["head"]["rails"] = []
    assert probe.verdict(plan(), probes, 2) == ([0, 1], [])


def test_one_way_is_no_way() -> None:
    """Field report 4: both directions count."""
    probes = seen(worker1={"pings": {"head": {"large": False, "small": True}}, "mtu": 1500})
    keep, dropped = probe.verdict(plan(), probes, 1)
    assert keep == [0]
    assert len(dropped) == 1
    for word in (
        "worker enp1s0f0np0 10.21.0.2 (MTU 1500)",
        "head enp1s0f0np0 10.21.0.1 (MTU 9000)",
        "8972 bytes",
    ):
        assert word in dropped[0].found


def test_twins_with_unequal_gid_indexes_go_on_with_the_first_where_one_is_enough() -> None:
    """Field report 9: the ring takes one index for all rails of a rank."""
    finding = {"code": "link-gid-unequal", "found": "3 and 5", "needed": "one", "do": "..."}
    bad = {"state": "gid-unequal", "problem": finding}
    probes = seen(worker0=bad, worker1=bad)
    with pytest.raises(Problem) as caught:
        probe.verdict(plan(), probes, 2)
    assert caught.value.code == "link-gid-unequal"
    keep, dropped = probe.verdict(plan(), probes, 1)
    assert keep == [0]
    assert dropped[0].host == "worker"


def test_a_blocked_port_names_direction_and_the_rule_that_opens_it() -> None:
    """Field report 19, by the firewall that the peer has."""
    blocked = {"rail": 0, "peer": "worker", "port": 45123, "ok": False, "error": "no answer"}
    for wall, word in (
        ("ufw", "sudo ufw allow in on enp0s0f0np0 from 10.20.0.1"),
        ("nftables", "ip saddr 10.20.0.1"),
    ):
        probes = seen(head0={"tcp": [blocked]})
        probes["worker"]["firewall"] = wall
        with pytest.raises(Problem) as caught:
            probe.verdict(plan(), probes, 2)
        assert "port 45123 from head to worker blocked" in caught.value.found
        assert word in caught.value.found
    assert "nft list ruleset" in probe.verdict(plan(), seen(head0={"tcp": [blocked]}), 1)[1][0].do


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_tcp_works_both_ways_when_one_side_comes_later() -> None:
    high, master = free_port(), free_port()
    there = {"head": "127.0.0.11", "worker": "127.0.0.12"}
    found: dict[str, list[dict[str, Any]]] = {}

    def side(host: str, peer: str, delay: float) -> None:
        time.sleep(delay)
        paths = [probe.Path(0, there[host], peer, there[peer])]
        found[host] = probe.tcp_exchange(paths, high, master, "w", 6.0)

    threads = [
        threading.Thread(target=side, args=("head", "worker", 0.0)),
        threading.Thread(target=side, args=("worker", "head", 0.5)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {host: [item["ok"] for item in items] for host, items in found.items()} == {
        "head": [True, True],
        "worker": [True, True],
    }


def test_another_program_on_the_port_is_not_taken_for_the_peer() -> None:
    high = free_port()
    with socket.create_server(("127.0.0.13", high)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(json.dumps({"token": "another"}).encode() + b"\n")

        threading.Thread(target=answer, daemon=True).start()
        paths = [probe.Path(0, "127.0.0.1", "worker", "127.0.0.13")]
        (result,) = probe.tcp_exchange(paths, high, free_port(), "w", 0.8)
    assert result["ok"] is False
