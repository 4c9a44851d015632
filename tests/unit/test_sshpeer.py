"""The peer's answers and rsync's ends, without ssh: its commands run here through a shell."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from sparkpair import sshpeer, verify
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


LINE = "echo 'Welcome to spark-b {{no json}}'"


@pytest.mark.parametrize("noise", [LINE, f"{LINE}; echo; echo 5; echo '[]'", "seq 20"])
def test_lines_that_the_peers_shell_prints_first_are_passed_over_field_report_51(
    there: SshPeer, tmp_path: Path, noise: str
) -> None:
    Here.script = noise + "; {}"
    (tmp_path / "there" / ENTRY.path).write_bytes(DATA)
    assert there.survey(LOCK)["files"] == {}
    assert there.check(ENTRY, threading.Event()) is None


def test_a_shell_that_prints_on_and_on_is_named_and_not_waited_for(there: SshPeer) -> None:
    Here.script = "seq 21; {}"
    problem = refused(there)
    assert problem.code == "peer-shell-prints"
    assert "the peer's shell prints text" in problem.found
    assert ".bashrc" in problem.do


def test_rsyncs_word_for_such_a_shell_gets_the_line_that_it_printed(there: SshPeer) -> None:
    Here.script = LINE + "; {}"
    there.survey(LOCK)
    fault = there._failure(2, "protocol version mismatch -- is your shell clean?\n", 0)
    assert isinstance(fault, Problem)
    assert fault.code == "peer-shell-prints"
    assert "Welcome to spark-b" in fault.found


def test_what_a_refusing_shell_says_on_stdout_is_told(there: SshPeer) -> None:
    Here.script = "echo 'This account is not available'; exit 1; {}"
    problem = refused(there)
    assert problem.code == "peer-no-answer"
    assert "This account is not available" in problem.found


@pytest.mark.parametrize("end", ["", "exec cat >/dev/null", "exit 1"])
@pytest.mark.parametrize(
    "report",
    [
        "{}",
        '{"files": []}',
        '{"ok": false}',
        '{"ok": false, "problems": []}',
        '{"ok": false, "problems": [{}]}',
        '{"ok": false, "problems": {}}',
        '{"ok": false, "problems": [{"found": 1, "needed": "n", "do": "d", "code": "c"}]}',
        '{"files": {"a": {}}, "problems": []}',
        '{"files": {"a": {"state": 1, "expected": 1, "got": 1}}, "problems": []}',
        '{"files": {}}',
        '{"files": {}, "problems": [5]}',
    ],
)
def test_a_report_that_can_not_be_understood_is_a_problem_and_no_wait(
    there: SshPeer, report: str, end: str
) -> None:
    text = report.replace("{", "{{").replace("}", "}}")
    Here.script = f"echo '{text}'; {end}; : {{}}" if end else f"echo '{text}'; : {{}}"
    problem = refused(there)
    assert problem.code == "peer-no-answer"
    assert "understood" in problem.found


@pytest.mark.parametrize(
    "answer",
    [
        "{}",
        "[]",
        "no json",
        '{"path": 1, "bad": null}',
        '{"path": "x"}',
        '{"path": "x", "bad": {}}',
        '{"bad": null}',
    ],
)
def test_an_answer_that_can_not_be_understood_is_a_problem_and_no_wait(there: SshPeer, answer: str) -> None:
    text = answer.replace("{", "{{").replace("}", "}}")
    Here.script = (
        'echo \'{{"files": {{}}, "problems": []}}\'; read -r lock; '
        f"while read -r path; do echo '{text}'; done; : {{}}"
    )
    there.survey(LOCK)
    with pytest.raises(Problem) as caught:
        there.check(ENTRY, threading.Event())
    assert caught.value.code == "peer-no-answer"


def test_a_peer_that_stands_still_is_not_waited_for_field_report_50(there: SshPeer) -> None:
    there._silence_s = 0.3
    Here.script = "exec sleep 100; {}"
    problem = refused(there)
    assert problem.code == "peer-no-answer"
    assert "not a line for" in problem.found


def test_a_peer_that_does_not_read_its_lock_is_not_waited_for(there: SshPeer) -> None:
    there._silence_s = 0.3
    Here.script = "exec sleep 100; {}"
    files = tuple(LockedFile(f"file{number:05}", 1, sha256="0" * 64) for number in range(5000))
    with pytest.raises(Problem) as caught:
        there.survey(Lock("owner/name", "0" * 40, files))
    assert caught.value.code == "peer-no-answer"


def test_a_verification_that_was_stopped_is_ended_and_begun_again_field_report_50(
    there: SshPeer, tmp_path: Path
) -> None:
    there._silence_s = 3.0
    there.survey(LOCK)
    (tmp_path / "there" / ENTRY.path).write_bytes(DATA)
    stopped = there._questions
    assert stopped is not None
    os.killpg(stopped._process.pid, signal.SIGSTOP)
    assert there.check(ENTRY, threading.Event()) is None
    assert there._questions is not stopped
    assert stopped._process.poll() is not None


def test_the_limit_of_silence_lasts_three_heartbeats_at_least(tmp_path: Path) -> None:
    connection = Here("spark-b", Login(), tmp_path, "c0", None)
    assert SshPeer([connection], "/x", 2)._silence_s == 3 * verify.HEARTBEAT_S
    assert SshPeer([connection], "/x", 60)._silence_s == 60


def test_signs_of_life_keep_a_long_verification_going(there: SshPeer) -> None:
    there._silence_s = 0.6
    beat = "sleep 0.3; echo '{{\"alive\": 1}}'; "
    Here.script = beat * 4 + 'echo \'{{"files": {{}}, "problems": []}}\'; : {}'
    assert there.survey(LOCK)["files"] == {}


def test_the_end_of_the_copy_ends_a_session_that_is_being_begun(there: SshPeer) -> None:
    there.survey(LOCK)
    assert there._questions is not None
    there._questions.close()
    Here.script = "exec sleep 100; {}"
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    begun = time.monotonic()
    with pytest.raises(Problem):
        there.check(ENTRY, stop)
    assert time.monotonic() - begun < 4


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_receipts_that_the_peer_can_not_write_are_told_and_not_waited_for_field_report_50(
    there: SshPeer, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "there" / ".sparkpair-receipts.json")
    there.survey(LOCK)
    (tmp_path / "there" / ENTRY.path).write_bytes(DATA)
    assert there.check(ENTRY, threading.Event()) is None
    assert there.unwritten


def test_only_the_first_session_sweeps_what_killed_copies_left_field_report_50(
    there: SshPeer, tmp_path: Path
) -> None:
    half = tmp_path / "there" / f".{ENTRY.path}.a1B2c3"
    half.write_bytes(b"half")
    there.survey(LOCK)
    assert not half.exists()
    half.write_bytes(b"a copy that runs")
    assert there._questions is not None
    there._questions.close()
    there.check(ENTRY, threading.Event())
    assert half.exists()


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
        (11, "rsync: write failed: Disk quota exceeded (122)", "disk-full"),
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
