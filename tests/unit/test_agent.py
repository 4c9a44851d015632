"""The head's key on the worker: receive weights, verify them, and nothing else (field report 51)."""

from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparkpair import agent, cli, locks
from sparkpair.agent import Refusal

# What our own replicate sends: rsync 3.2.7 and 3.5.0, the three ways.
OURS = [
    "rsync --server -WtpIRe.LsfxCIvu --timeout=60 --checksum-choice=none --stats --mkpath . {}/",
    "rsync --server -tpRe.LsfxCIvu --timeout=60 --stats --append --mkpath . {}/",
    "rsync --server -vWtpRe.iLsfxCIvu --timeout=60 --checksum-choice=none --inplace --stats --mkpath . {}",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "sparkpair"
    (root / "weights/dsv41").mkdir(parents=True)
    (root / ".ssh").mkdir()
    (root / "logs").mkdir()
    return root


class Ran(Exception):
    """In place of the exec that would end the test."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def execve(program: str, argv: list[str], environment: dict[str, str]) -> None:
        calls.append((program, argv, environment))
        raise Ran

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(os, "chdir", lambda _: None)
    monkeypatch.setattr(os, "umask", lambda _: None)
    monkeypatch.setattr(agent.shutil, "which", lambda *_, **__: "/usr/bin/rsync")
    return calls


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(agent.syslog, "syslog", lambda _, line: lines.append(line))
    return lines


@pytest.mark.parametrize("command", OURS)
def test_what_replicate_sends_is_run_with_a_clean_environment(
    root: Path, executed: list[Any], command: str
) -> None:
    with pytest.raises(Ran):
        agent.serve(command.format(root / "weights/dsv41"), root)
    program, argv, environment = executed[0]
    assert program == "/usr/bin/rsync"
    assert argv[:2] == ["rsync", "--server"]
    assert argv[-2:] == [".", f"{root}/weights/dsv41/"]
    assert set(environment) == {"PATH", "LC_ALL"}


RSYNC = "rsync --server -tpRe.LsfxCIvu . "


@pytest.mark.parametrize(
    "command",
    [
        "",
        "sh",
        "id",
        "bash -c 'id'",
        "/bin/sh -c id",
        "scp -t {root}/weights/dsv41",
        "internal-sftp",
        "/usr/lib/openssh/sftp-server",
        "rsync --server --sender -tpRe.LsfxCIvu . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --sender . {root}/weights/dsv41/",
        "rsync --daemon --server .",
        "rsync --server --daemon . {root}/weights/dsv41/",
        "rsync -a {root}/weights/dsv41/ /tmp",
        "/usr/bin/rsync --server -tpR . {root}/weights/dsv41/",
        RSYNC + "/etc/",
        RSYNC + "/",
        RSYNC + ".",
        RSYNC + "weights/dsv41/",
        RSYNC + "~/weights/dsv41/",
        RSYNC + "{root}/",
        RSYNC + "{root}/.ssh/",
        RSYNC + "{root}/logs/",
        RSYNC + "{root}/receipts/",
        RSYNC + "{root}/weights/../.ssh/",
        RSYNC + "{root}/weights/dsv41/../../../../etc/",
        RSYNC + "{root}/weights/./dsv41/",
        RSYNC + "{root}/weights//dsv41/",
        RSYNC + "{root}/weights/.hidden/",
        RSYNC + "{root}-other/weights/",
        RSYNC + "{root}/weights/dsv41/ /etc/",
        RSYNC + "{root}/weights/dsv41/; id",
        RSYNC + "{root}/weights/dsv41/ && id",
        RSYNC + "{root}/weights/$(id)/../../../etc",
        RSYNC + "'{root}/weights/dsv41/\nid'",
        "rsync --server -tpRe.LsfxCIvu --files-from=/etc/shadow . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --log-file=/etc/cron.d/x . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --only-write-batch=/etc/x . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --temp-dir=/etc . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --temp-dir /etc . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --partial-dir=/etc . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --backup-dir=/etc . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --link-dest=/etc . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --delete . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu --secluded-args . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu -s . {root}/weights/dsv41/",
        "rsync --server -stpR . {root}/weights/dsv41/",
        "rsync --server -ltpR . {root}/weights/dsv41/",
        "rsync --server -DtpR . {root}/weights/dsv41/",
        "rsync --server -ogtpR . {root}/weights/dsv41/",
        "rsync --server -tpR --timeout=1;id . {root}/weights/dsv41/",
        "rsync --server -tpRe.LsfxCIvu {root}/weights/dsv41/",
        "rsync --server",
        "rsync --server .",
        "sparkpair",
        "sparkpair agent",
        "sparkpair agent sh",
        "sparkpair doctor",
        "sparkpair fetch --lock x --to y",
        "sparkpair replicate --lock x",
        "/tmp/sparkpair verify --lock - --dir {root}/weights/dsv41",
        "sparkpair verify --lock - --dir /etc",
        "sparkpair verify --lock - --dir {root}/.ssh",
        "sparkpair verify --lock /etc/shadow --dir {root}/weights/dsv41",
        "sparkpair verify --lock - --dir {root}/weights/dsv41 --follow-links",
        "sparkpair verify --lock - --dir {root}/weights/dsv41 --follow --tidy=/etc",
        "sparkpair verify --lock - --lock /etc/shadow --dir {root}/weights/dsv41",
        "sparkpair verify --lock=/etc/shadow --dir {root}/weights/dsv41",
        "sparkpair verify --dir {root}/weights/dsv41",
        "sparkpair verify --lock -",
        "sparkpair verify --lock - --dir",
        "'unclosed",
        "id\x00",
        "id\n",
        "x" * 5000,
    ],
)
def test_everything_else_is_refused_and_told_to_the_journal(
    root: Path,
    executed: list[Any],
    journal: list[str],
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    code = agent.serve(
        command.replace("{root}", str(root)), root, {"SSH_CONNECTION": "10.20.0.1 5 10.20.0.2 22"}
    )
    assert code == 126
    assert not executed
    assert len(journal) == 1
    assert "refused, from 10.20.0.1" in journal[0]
    assert "\n" not in journal[0]
    told = capsys.readouterr()
    assert told.err.startswith("sparkpair agent: refused: ")
    assert told.out == ""


def test_a_link_is_no_way_out_of_the_data_folders(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "weights/link").symlink_to(outside)
    (root / "engram").symlink_to(outside)
    for text in (root / "weights/link", root / "weights/link/deeper", root / "engram", root / "engram/x"):
        with pytest.raises(Refusal, match="link"):
            agent.confined(str(text), root)
    (root / "weights/dsv41/shard").symlink_to(outside / "shard")  # rsync would be told to replace it
    with pytest.raises(Refusal, match="link"):
        agent.rsync_arguments(["-tpR", ".", f"{root}/weights/dsv41/"], root)


def test_the_data_folders_may_be_on_another_disk_behind_one_link(root: Path, tmp_path: Path) -> None:
    moved = tmp_path / "disk/sparkpair"
    moved.parent.mkdir()
    root.rename(moved)
    root.symlink_to(moved)
    assert agent.confined(f"{root}/weights/dsv41", root) == root / "weights/dsv41"


def test_a_folder_that_is_not_there_yet_may_be_received(root: Path) -> None:
    assert agent.confined(f"{root}/rank-cache/dsv41-ab12/", root) == root / "rank-cache/dsv41-ab12"


# Words near to what is allowed, so that the fuzz gets past the first comparison.
PIECES = st.sampled_from(
    [
        *(
            "rsync",
            "--server",
            "--sender",
            "-tpR",
            "-e.LsfxCIvu",
            "-s",
            ".",
            "..",
            "--mkpath",
            "--append",
            "--daemon",
        ),
        *(
            "sparkpair",
            "verify",
            "agent",
            "--lock",
            "-",
            "--dir",
            "--json",
            "--full",
            "{root}",
            "{root}/weights",
        ),
        *(
            "{root}/weights/x/",
            "{root}/weights/../.ssh",
            "/etc",
            "{root}/.ssh",
            ";",
            "&&",
            "$(id)",
            "`id`",
            "|",
            ">",
        ),
        *(
            "{root}/weights/x/../../.ssh",
            "{root}/weights/ x",
            "{root}/engram",
            "--log-file=/etc/x",
            "'",
            '"',
            "\\",
        ),
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=8), glue=st.sampled_from([" ", "", "  "])
)
def test_no_words_at_all_lead_out_of_the_data_folders(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], glue: str
) -> None:
    root = tmp_path_factory.getbasetemp() / "fuzz"
    command = glue.join(pieces).replace("{root}", str(root))
    try:
        words = agent.split(command)
    except Refusal:
        return
    allowed = [root / name for name in ("weights", "engram", "kit", "fixtures", "rank-cache")]
    try:
        arguments = agent.rsync_arguments(words[2:] if words[:2] == ["rsync", "--server"] else words, root)
        assert arguments[0] == "--server" and arguments[-2] == "."
        assert not {"--sender", "--daemon", "-s"} & set(arguments)
        place = Path(os.path.normpath(arguments[-1]))
        assert any(place.is_relative_to(folder) for folder in allowed)
    except Refusal:
        pass
    try:
        arguments = agent.verify_arguments(words, root)
        place = Path(os.path.normpath(arguments[3]))
        assert arguments[:3] == ["--lock", "-", "--dir"]
        assert any(place.is_relative_to(folder) for folder in allowed)
    except Refusal:
        pass


@given(text=st.text(max_size=60))
def test_the_splitter_refuses_or_gives_words_but_never_fails(text: str) -> None:
    try:
        words = agent.split(text)
    except Refusal:
        return
    assert words == shlex.split(text)
    assert text.isprintable()


def test_verify_runs_here_and_answers_with_json(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "weights/dsv41/config.json").write_bytes(b"hello world\n")
    entry = locks.LockedFile("config.json", 12, git_blob_sha1="3b18e512dba79e4c8300dd08aeb37f8e728b8dad")
    lock = locks.Lock("owner/name", "0" * 40, (entry,))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(locks.dump(lock).encode())))
    command = f"/opt/sparkpair/venv/bin/sparkpair verify --lock - --dir {root}/weights/dsv41 --json --quiet"
    assert agent.serve(command, root) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.parametrize("command", ["greet a b", "sparkpair agent greet a b"])
def test_other_modules_add_verbs(root: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    heard: list[Sequence[str]] = []
    monkeypatch.setitem(agent.VERBS, "greet", lambda words: heard.append(words) or 3)
    assert agent.serve(command, root) == 3
    assert heard == [["a", "b"]]


def test_a_verb_can_be_run_by_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(agent.VERBS, "greet", len)
    assert cli.main(["agent", "greet", "a", "--b"]) == 2
    assert cli.main(["agent", "no-such-verb"]) == 126  # refused, as by sshd's way
    told = capsys.readouterr()
    assert "greet" in told.err
    assert told.out == ""


def test_the_command_serves_what_sshd_was_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch, journal: list[str]
) -> None:
    monkeypatch.delenv("SSH_ORIGINAL_COMMAND", raising=False)
    assert cli.main(["agent", "--root", str(root)]) == 126  # an interactive login
    monkeypatch.setenv("SSH_ORIGINAL_COMMAND", "cat /etc/shadow")
    assert cli.main(["agent"]) == 126
    assert len(journal) == 2
