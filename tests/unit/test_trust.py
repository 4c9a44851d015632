"""The head's way to the worker: one key, one command, no trust on first use."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from sparkpair import trust
from sparkpair.problem import Problem

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPJx5dbYk0Mr3Yx1Tn0Cq9eWlkRk2lWcYgAxCrHTq8bo someone@somewhere"
AGENT = "/opt/sparkpair/venv/bin/sparkpair agent"
ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pwd.struct_passwd:
    """This user, with a home of its own."""
    mine = pwd.getpwuid(os.getuid())
    fields = (mine.pw_name, "x", mine.pw_uid, mine.pw_gid, "", str(tmp_path), "/bin/sh")
    made = pwd.struct_passwd(fields)
    monkeypatch.setattr(trust.pwd, "getpwnam", lambda _: made)
    return made


def test_the_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "peer_ed25519"
    made = trust.ensure_key(ME, path)
    assert made["changed"] is True
    assert made["public_key"].startswith("ssh-ed25519 ")
    assert path.stat().st_mode & 0o777 == 0o600
    again = trust.ensure_key(ME, path)
    assert again["changed"] is False
    assert trust.key_of(again["public_key"]) == trust.key_of(made["public_key"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["peer_ed25519", "peer_ed25519.pub"]


def test_a_loosened_key_is_closed_again(tmp_path: Path) -> None:
    path = tmp_path / "peer_ed25519"
    trust.ensure_key(ME, path)
    path.with_name("peer_ed25519.pub").write_text("ssh-ed25519 AAAA another\n")
    assert trust.ensure_key(ME, path, check_mode=True)["changed"] is True
    assert trust.ensure_key(ME, path)["changed"] is True
    assert trust.ensure_key(ME, path)["changed"] is False


def test_a_dry_run_makes_no_key(tmp_path: Path) -> None:
    assert trust.ensure_key(ME, tmp_path / "k", check_mode=True) == {"changed": True, "public_key": ""}
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_user_is_told_with_the_role_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="no user nobody-of-that-name") as caught:
        trust.ensure_key("nobody-of-that-name", tmp_path / "k")
    assert "--tags host" in caught.value.do
    assert list(tmp_path.iterdir()) == []


def test_the_door_opens_one_command_from_the_link_only(account: pwd.struct_passwd) -> None:
    """Design 4: a key that can run only `sparkpair agent`."""
    made = trust.ensure_door(ME, KEY, ["10.20.0.1", "10.21.0.1"], AGENT)
    path = Path(account.pw_dir) / ".ssh/authorized_keys"
    assert made["changed"] is True
    assert path.read_text() == (
        f'restrict,from="10.20.0.1,10.21.0.1",command="{AGENT}" {trust.key_of(KEY)} sparkpair-head\n'
    )
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert trust.ensure_door(ME, KEY, ["10.20.0.1", "10.21.0.1"], AGENT)["changed"] is False


def test_an_older_key_does_not_keep_its_door(account: pwd.struct_passwd) -> None:
    trust.ensure_door(ME, KEY.replace("AAAAC3", "AAAAC4"), ["10.20.0.1"], AGENT)
    trust.ensure_door(ME, KEY, ["10.20.0.1"], AGENT)
    text = (Path(account.pw_dir) / ".ssh/authorized_keys").read_text()
    assert text.count("ssh-ed25519") == 1
    assert "AAAAC4" not in text


def test_a_dry_run_opens_no_door(account: pwd.struct_passwd) -> None:
    assert trust.ensure_door(ME, KEY, ["10.20.0.1"], AGENT, check_mode=True)["changed"] is True
    assert trust.ensure_door(ME, "", ["10.20.0.1"], AGENT, check_mode=True) == {"changed": True}
    assert list(Path(account.pw_dir).iterdir()) == []


@pytest.mark.parametrize(
    ("key", "sources", "command"),
    [("no key", ["10.20.0.1"], AGENT), (KEY, [], AGENT), (KEY, ["10.20.0.1"], 'a "b"')],
)
def test_a_line_that_would_open_more_is_never_written(key: str, sources: list[str], command: str) -> None:
    with pytest.raises(Problem):
        trust.door_line(key, sources, command)


def test_host_keys_are_known_for_every_link_address() -> None:
    other = "ecdsa-sha2-nistp256 AAAAE2VjZHNh root@spark-b"
    text = trust.known_hosts(["10.20.0.2", "10.21.0.2"], [KEY, other])
    assert text.splitlines() == [
        "10.20.0.2,10.21.0.2 ecdsa-sha2-nistp256 AAAAE2VjZHNh",
        f"10.20.0.2,10.21.0.2 {trust.key_of(KEY)}",
    ]
    assert trust.known_hosts(["10.20.0.2"], [KEY], 2222).startswith("[10.20.0.2]:2222 ssh-ed25519 ")


def test_known_hosts_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "known"
    assert trust.ensure_known("a\n", path, check_mode=True)["changed"] is True
    assert not path.exists()
    assert trust.ensure_known("a\n", path)["changed"] is True
    assert trust.ensure_known("a\n", path)["changed"] is False


SSHD = "port 2222\npubkeyauthentication yes\nauthorizedkeysfile .ssh/authorized_keys .ssh/authorized_keys2\n"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("", None),
        ("allowusers ada sparkpair\n", None),
        ("allowusers spark*\n", None),
        ("allowusers sparkpair@10.20.0.1\n", None),
        ("allowgroups docker\n", None),
        ("denyusers root\n", None),
        ("allowusers ada\nallowusers bo\n", "allowusers ada bo"),
        ("allowgroups sudo\n", "allowgroups sudo"),
        ("denyusers sparkpair\n", "denyusers sparkpair"),
    ],
)
def test_settings_of_sshd_that_turn_the_key_away_are_named(extra: str, says: str | None) -> None:
    found = trust.sshd_blocks(trust.parse_sshd(SSHD + extra), "sparkpair", ["sparkpair", "docker"])
    assert (found is None) is (says is None)
    if says and found:
        assert says in found.found
        assert "sparkpair" in found.do


def test_key_logins_that_are_off_are_named() -> None:
    settings = trust.parse_sshd(SSHD.replace("pubkeyauthentication yes", "pubkeyauthentication no"))
    assert trust.sshd_blocks(settings, "sparkpair", []) is not None
    other = trust.parse_sshd(SSHD.replace(".ssh/", "/etc/ssh/keys/"))
    assert trust.sshd_blocks(other, "sparkpair", []) is not None


def test_sshd_s_port_and_host_keys_are_its_own(tmp_path: Path) -> None:
    assert trust.sshd_port(trust.parse_sshd(SSHD)) == 2222
    assert trust.sshd_port({}) == 22
    (tmp_path / "ssh_host_ed25519_key.pub").write_text(KEY)
    assert trust.host_keys({}, tmp_path) == [trust.key_of(KEY)]
    with pytest.raises(Problem, match="no host key"):
        trust.host_keys({"hostkey": [str(tmp_path / "absent")]}, tmp_path)
