"""The way to the other node: over the link or not at all (field reports 2 and 50)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sparkpair import pairfile, peer
from sparkpair.peer import Login, Route
from sparkpair.problem import Problem

SUBNETS = ["10.20.0.0/24", "10.21.0.0/24"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sparkpair@10.20.0.2:/var/lib/x", ("sparkpair", "10.20.0.2", "/var/lib/x")),
        ("sparkpair@10.20.0.2:/var/lib/x/", ("sparkpair", "10.20.0.2", "/var/lib/x")),
        ("sparkpair@10.20.0.2://var//lib/./x//", ("sparkpair", "10.20.0.2", "/var/lib/x")),
        ("spark-b:/weights", (None, "spark-b", "/weights")),
        ("bo@[fe80::1%enp1s0f0np0]:/w-w", ("bo", "fe80::1%enp1s0f0np0", "/w-w")),
        ("bo@host:/", ("bo", "host", "/")),
    ],
)
def test_a_target_is_user_address_and_folder(text: str, parts: tuple[str | None, str, str]) -> None:
    target = peer.parse_target(text)
    assert (target.user, target.address, target.folder) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/local/folder",
        "host",
        "host:",
        "@host:/x",
        "-oProxyCommand=id:/x",
        "a@-x:/y",
        "a@b@c:/x",
        "a b:/x",
        "h:/x\n",
        "u@h:rel",
        "u@h:~/x",
        "u@h:/x y",
        "u@h:/x\u00a0y",
        "u@h: /x",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Problem) as caught:
        peer.parse_target(text)
    assert caught.value.code == "target-bad"
    assert "--to " in caught.value.do


@pytest.mark.parametrize("folder", ["/x/..", "/..", "/x/../y", "/missing/../../etc/"])
def test_a_target_with_two_dots_is_refused_since_it_would_leave_folders_behind(folder: str) -> None:
    with pytest.raises(Problem) as caught:
        peer.parse_target(f"bo@spark-b:{folder}")
    assert caught.value.code == "target-bad"
    assert "'..'" in caught.value.found
    assert peer.parse_target("bo@spark-b:/a..b/...").folder == "/a..b/..."


@pytest.mark.parametrize(("option", "code"), [(0, "identity-missing"), (1, "known-hosts-missing")])
def test_a_key_or_host_key_file_that_is_not_there_is_refused(tmp_path: Path, option: int, code: str) -> None:
    there = tmp_path / "there"
    there.write_text("x")
    peer.require_login_files(None, None)
    peer.require_login_files(there, there)
    for wrong in (tmp_path / "absent", tmp_path):
        files = [there, there]
        files[option] = wrong
        with pytest.raises(Problem) as caught:
            peer.require_login_files(*files)
        assert caught.value.code == code
        assert str(wrong) in caught.value.found


def test_a_route_is_read_from_what_ip_prints() -> None:
    told = '[{"dst":"10.20.0.2","dev":"enp1s0f0np0","prefsrc":"10.20.0.1","flags":[],"uid":0,"cache":[]}]'
    assert peer.parse_route(told) == Route("10.20.0.2", "enp1s0f0np0", "10.20.0.1")
    told = '[{"dst":"10.9.0.2","gateway":"192.0.2.1","dev":"wlp9s0","prefsrc":"192.0.2.7","flags":[]}]'
    assert peer.parse_route(told) == Route("10.9.0.2", "wlp9s0", "192.0.2.7", "192.0.2.1")
    for broken in ("", "[]", "{}", "[{}]", "[1]"):
        assert peer.parse_route(broken) is None


LINK = Route("10.20.0.2", "enp1s0f0np0", "10.20.0.1")
LAN = Route("192.0.2.12", "wlp9s0", "192.0.2.11")


@pytest.mark.parametrize(
    ("route", "subnets", "rdma", "over"),
    [
        (LINK, SUBNETS, [], True),
        (LINK, [], ["enp1s0f0np0"], True),
        (LINK, [], ["enP2p1s0f0np0"], False),
        (LINK, ["10.21.0.0/24"], ["enp1s0f0np0"], False),  # the subnets were said: they count
        (LAN, SUBNETS, ["enp1s0f0np0"], False),
        (LAN, [], ["enp1s0f0np0"], False),
        (Route("10.20.0.2", "eth0", "192.0.2.11"), SUBNETS, [], False),  # the rail has no address any more
        (Route("10.20.0.2", "enp1s0f0np0", "10.20.0.1", "10.20.0.254"), SUBNETS, ["enp1s0f0np0"], False),
        (Route("10.20.0.2", "eth0", ""), SUBNETS, [], False),
        (Route("127.0.0.1", "lo", "127.0.0.1"), SUBNETS, [], True),  # nothing leaves the host
    ],
)
def test_only_the_link_counts_as_the_link(
    route: Route, subnets: list[str], rdma: list[str], over: bool
) -> None:
    assert peer.is_over_link(route, subnets, rdma) is over


def test_a_peer_over_the_lan_is_refused_and_the_override_named_field_report_50(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "route_to", lambda _: LAN)
    with pytest.raises(Problem) as caught:
        peer.require_link("192.0.2.12", SUBNETS, allow_lan=False, node_root=tmp_path)
    assert caught.value.code == "link-unreachable"
    assert "wlp9s0" in caught.value.found
    assert "10.20.0.0/24" in caught.value.needed
    assert "allow_lan_copy" in caught.value.do
    assert peer.require_link("192.0.2.12", SUBNETS, allow_lan=True, node_root=tmp_path) == LAN


def test_no_route_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "route_to", lambda _: None)
    with pytest.raises(Problem) as caught:
        peer.require_link("10.20.0.2", SUBNETS, allow_lan=False, node_root=tmp_path)
    assert "unknown" in caught.value.found


def test_the_kernel_is_asked_for_the_route_to_this_host() -> None:
    route = peer.route_to("127.0.0.1")
    assert route is not None
    assert route.device == "lo"
    assert peer.route_to("no-such-host.invalid") is None


def pair() -> pairfile.Pair:
    def rails(last: int) -> list[dict[str, object]]:
        return [
            {
                "rail": 0,
                "netdev": "enp1s0f0np0",
                "rdma": "rocep1s0f0",
                "port": 1,
                "address": f"10.20.0.{last}",
                "prefix": 24,
            },
            {
                "rail": 1,
                "netdev": "enP2p1s0f0np0",
                "rdma": "roceP2p1s0f0",
                "port": 1,
                "address": f"10.21.0.{last}",
                "prefix": 24,
            },
        ]

    return pairfile.parse(
        {
            "version": 1,
            "rank": 0,
            "world": 2,
            "mtu": 9000,
            "master_address": "10.20.0.1",
            "master_port": 29620,
            "subnets": SUBNETS,
            "ranks": [
                {"rank": 0, "host": "spark-a", "ssh_port": 22, "rails": rails(1)},
                {"rank": 1, "host": "spark-b", "ssh_port": 2222, "rails": rails(2)},
            ],
        }
    )


def test_both_rails_to_a_known_peer_are_used() -> None:
    assert peer.link_addresses("10.21.0.2", pair()) == ["10.21.0.2", "10.20.0.2"]
    assert peer.link_addresses("192.0.2.12", pair()) == ["192.0.2.12"]
    assert peer.link_addresses("10.20.0.2", None) == ["10.20.0.2"]


def test_the_pair_file_may_be_absent_but_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    assert peer.known_pair(path) is None
    path.write_text(json.dumps(pair().as_dict()))
    assert peer.known_pair(path) == pair()
    path.write_text("{")
    with pytest.raises(Problem):
        peer.known_pair(path)


def test_with_our_key_nothing_of_the_users_ssh_configuration_counts(tmp_path: Path) -> None:
    login = Login("sparkpair", tmp_path / "peer key", tmp_path / "known", 2222)
    lines = peer.ssh_config(login, "enp1s0f0np0").splitlines()
    assert f'IdentityFile "{tmp_path}/peer key"' in lines
    assert {"IdentitiesOnly yes", "StrictHostKeyChecking yes", "BatchMode yes", "Compression no"} <= set(
        lines
    )
    assert {"BindInterface enp1s0f0np0", "Port 2222", "GlobalKnownHostsFile none"} <= set(lines)
    assert not [line for line in lines if line.startswith("Include")]
    assert next(line for line in lines if line.startswith("Ciphers")).startswith(
        "Ciphers aes128-gcm@openssh.com,"
    )


def test_without_a_key_the_users_own_way_in_counts() -> None:
    lines = peer.ssh_config(Login("bo"), "lo").splitlines()
    assert "Include ~/.ssh/config" in lines
    assert not [line for line in lines if line.startswith(("Port", "IdentityFile", "BindInterface"))]


def test_a_failed_login_says_what_is_wrong_with_it() -> None:
    for said, code in (
        ("sparkpair@10.20.0.2: Permission denied (publickey).", "peer-refuses-key"),
        ("Host key verification failed.", "peer-host-key"),
        ("ssh: connect to host 10.20.0.2 port 22: No route to host", "link-unreachable"),
        ("", "link-unreachable"),
    ):
        problem = peer._no_login("sparkpair@10.20.0.2", said)
        assert problem.code == code
        assert "10.20.0.2" in problem.found


def test_what_killed_processes_left_is_swept_and_what_lives_is_not(tmp_path: Path) -> None:
    with peer.private_folder(tmp_path) as living:
        dead, strange = tmp_path / "sparkpair-peer-dead", tmp_path / "other"
        for folder in (dead, strange, living):
            folder.mkdir(exist_ok=True)
            (folder / "c0.conf").write_text("")
            os.utime(folder, (0, 0))
        with peer.private_folder(tmp_path) as second:
            assert second.stat().st_mode & 0o777 == 0o700
            assert living.exists() and strange.exists() and not dead.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
