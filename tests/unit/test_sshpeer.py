"""The peer's answers and rsync's ends, without ssh: its commands run here through a shell."""

from __future__ import annotations

import hashlib
import os
import shlex
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sparkpair import sshpeer
from sparkpair.locks import Lock, LockedFile
from sparkpair.peer import Connection, Login
from sparkpair.problem import Problem
from sparkpair.replicate import Stalled
from sparkpair.sshpeer import SshPeer

DATA = b"\1" * 5000
ENTRY = LockedFile("model.safetensors", len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
LOCK = Lock("owner/name", "0" * 40, (ENTRY,))


class Here(Connection):
    """A connection to this very machine: what would run there runs here, by a shell as sshd would."""

    script = "{}"

    def open(self) -> None:
        pass

    def command(self, words: Sequence[str]) -> list[str]:
        return ["bash", "-c", self.script.format(shlex.join(words))]


@pytest.fixture
def there(tmp_path: Path) -> Iterator[SshPeer]:
    (tmp_path / "there").mkdir()
    connection = Here("spark-b", Login(), tmp_path, "c0", None)
    with SshPeer([connection], str(tmp_path / "there"), 5) as peer:
        yield peer


@pytest.fixture(autouse=True)
def script() -> Iterator[None]:
    Here.script = "{}"
    yield
    Here.script = "{}"


def refused(there: SshPeer) -> Problem:
    with pytest.raises(Problem) as caught:
        there.survey(LOCK)
    assert caught.value.host == "spark-b"
    return caught.value


def test_one_session_reports_on_the_folder_and_then_on_each_file(there: SshPeer, tmp_path: Path) -> None:
    report = there.survey(LOCK)
    assert report["files"] == {ENTRY.path: {"state": "missing", "expected": 5000, "got": None}}
    assert report["free_bytes"] > 0
    stop = threading.Event()
    bad = there.check(ENTRY, stop)
    assert bad is not None and bad["state"] == "missing"
    (tmp_path / "there" / ENTRY.path).write_bytes(DATA)
    assert there.check(ENTRY, stop) is None


def test_a_session_that_ends_is_begun_again(there: SshPeer, tmp_path: Path) -> None:
    there.survey(LOCK)
    (tmp_path / "there" / ENTRY.path).write_bytes(DATA)
    assert there._questions is not None
    there._questions.close()
    assert there.check(ENTRY, threading.Event()) is None


def test_a_peer_that_never_answers_is_given_up(there: SshPeer) -> None:
    Here.script = "exec {} > >(head -n 1)"
    there.survey(LOCK)
    with pytest.raises(Problem) as caught:
        there.check(ENTRY, threading.Event())
    assert caught.value.code == "peer-no-answer"


def test_waiting_for_an_answer_ends_when_the_copy_does(there: SshPeer) -> None:
    there.survey(LOCK)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Problem):
        there.check(ENTRY, stop)


def test_a_peer_without_sparkpair_is_told_with_the_places_that_were_looked_at(there: SshPeer) -> None:
    Here.script = "exit 127; {}"
    problem = refused(there)
    assert problem.code == "peer-lacks-sparkpair"
    assert "/opt/sparkpair/venv/bin/sparkpair" in problem.needed


def test_what_the_agent_refuses_is_told_in_its_words(there: SshPeer) -> None:
    Here.script = "echo 'sparkpair agent: refused: not this folder' >&2; exit 126; {}"
    problem = refused(there)
    assert problem.code == "peer-refused"
    assert "not this folder" in problem.found


def test_a_command_from_elsewhere_falls_back_to_the_node_s_own(
    there: SshPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkout to a node: the agent refuses our own path, and takes the one it knows."""
    node, own = "/opt/sparkpair/venv/bin/sparkpair", str(Path(sshpeer.sys.executable).with_name("sparkpair"))
    Here.script = (
        "line={0!r}; case $line in "
        f"{own}*) echo 'sparkpair agent: refused: no program of ours' >&2; exit 126;; "
        f"{node}*) exec {own} ${{{{line#{node}}}}};; *) exit 127;; esac"
    )
    assert there.survey(LOCK)["files"]


def test_a_problem_of_the_peer_keeps_its_words_and_gets_its_name(there: SshPeer) -> None:
    told = '{{"ok": false, "problems": [{{"found": "f", "needed": "n", "do": "d", "code": "c"}}]}}'
    Here.script = f"echo '{told}'; exit 1; {{}}"
    problem = refused(there)
    assert (problem.code, problem.found, problem.host) == ("c", "f", "spark-b")


@pytest.mark.parametrize(
    ("code", "errors", "expected"),
    [
        (11, "rsync: write failed: No space left on device (28)", "disk-full"),
        (12, "rsync: write failed: No space left on device (28)", "disk-full"),
        (127, "sh: 1: rsync: not found\nbash: rsync: command not found", "peer-lacks-rsync"),
        (23, "rsync: open failed: Permission denied (13)", "copy-failed"),
        (12, "sparkpair agent: refused: a link", "copy-failed"),
    ],
)
def test_what_another_try_does_not_cure_stops_the_copy(
    there: SshPeer, code: int, errors: str, expected: str
) -> None:
    fault = there._failure(code, errors, 0)
    assert isinstance(fault, Problem)
    assert fault.code == expected
    assert fault.host == "spark-b"


@pytest.mark.parametrize("code", [10, 12, 30, 255])
def test_a_broken_connection_is_tried_again(there: SshPeer, code: int) -> None:
    fault = there._failure(code, "Connection reset by peer", 77)
    assert isinstance(fault, Stalled)
    assert fault.sent == 77


def test_bytes_that_a_process_wrote_are_read_from_the_kernel() -> None:
    with Path("/dev/null").open("wb", buffering=0) as sink:
        before = sshpeer._bytes_written(os.getpid())
        sink.write(b"x" * 1000)
    assert sshpeer._bytes_written(os.getpid()) - before >= 1000
    assert sshpeer._bytes_written(2**22 + 1) == 0
