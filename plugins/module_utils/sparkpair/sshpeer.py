"""The other side of a copy by SSH: rsync receives, `sparkpair verify --follow` checks what arrived."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from . import pagecache, paths, verify
from .agent import REFUSED
from .locks import Lock, LockedFile, dump
from .peer import Connection, end, spawn
from .problem import Problem
from .replicate import MOST_TRIES, Parcel, Stalled, Way, told_by

_POLL_S = 0.1
_EVICT_EVERY_S = 2.0
_END_S = 5.0  # between the last word of a session and its exit code
_HEARTBEATS = 3  # that may be lost before a session counts as dead
_NOISE_LINES = 20  # that a shell may print before the report
_LONGEST_LINE = 64 << 20
# rsync's exit codes of a connection that broke: socket, protocol, timeouts, ssh. Worth another try.
_BROKEN = {10, 12, 20, 30, 35, 255}


class _Gone(Exception):
    """The questions' session ended."""


class _Questions:
    """One `sparkpair verify --follow` on the peer: a report first, then an answer for each path asked for.

    A session that says nothing for `silence_s`, or something that can't be understood, is ended: `fault`
    says why. What the peer's shell prints before the report is passed over (`noise`).
    """

    def __init__(
        self,
        command: Sequence[str],
        lock: Lock,
        complaints: IO[bytes],
        silence_s: float,
        stop: threading.Event,
    ) -> None:
        self._process = spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints)
        self._silence_s = silence_s
        self._answers: dict[str, dict[str, Any] | None] = {}
        self._ended = False
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self.report: dict[str, Any] | None = None
        self.fault: str | None = None
        self.noise: list[str] = []
        self.unwritten: str | None = None
        threading.Thread(target=self._dispatch, name="answers", daemon=True).start()
        self._say(json.dumps(json.loads(dump(lock))))
        with self._changed:
            while self.report is None and not self._ended and not stop.is_set():
                self._changed.wait(0.2)
            if self.report is None and not self._ended:
                self.fault = "the copy ended"

    def exit_code(self) -> int:
        """Ends the session, unless it ends by itself just now."""
        if self.fault is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self.close()
        return int(self._process.wait())

    def ask(self, path: str, stop: threading.Event) -> dict[str, Any] | None:
        """What is wrong with `path`. Raises _Gone when the session ends, or `stop` is set, before that."""
        self._say(json.dumps(path))
        with self._changed:
            while path not in self._answers:
                if self._ended or stop.is_set():
                    raise _Gone
                self._changed.wait(0.2)
            return self._answers.pop(path)

    def close(self) -> None:
        end(self._process)

    def _say(self, line: str) -> None:
        # A peer that does not read holds this up until its silence ends the session.
        with self._writing, contextlib.suppress(OSError):  # when it is gone, its answer stays away
            if self._process.stdin:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    def _dispatch(self) -> None:
        try:
            for line in self._lines():
                with self._changed:
                    self._take(line)
                    self._changed.notify_all()
                if self.fault:
                    break
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            if self.fault:
                self.close()

    def _lines(self) -> Iterator[bytes]:
        """Each whole line that comes, to the end of the session or its silence."""
        if self._process.stdout is None:
            return
        fd = self._process.stdout.fileno()
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        rest = b""
        while len(rest) < _LONGEST_LINE:
            if not ready.poll(self._silence_s * 1000):
                self.fault = f"not a line for {self._silence_s:.0f} s"
                return
            data = os.read(fd, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines
        self.fault = "a line without end"

    def _take(self, line: bytes) -> None:
        """Understand one line. Sets `fault` where it is none of ours."""
        told = _object(line)
        if self.report is None:
            if told is None:
                self.noise.append(line.decode(errors="replace").strip()[:200])
                if len(self.noise) > _NOISE_LINES:
                    self.fault = "its shell prints text"
            elif "alive" not in told:
                self.report = told
                self.unwritten = told.get("unwritten")
                if not _is_report(told):
                    self.fault = f"a report that can't be understood: {_short(line)}"
        elif told is None or not (_is_answer(told) or "alive" in told):
            self.fault = f"an answer that can't be understood: {_short(line)}"
        elif "path" in told:
            self._answers[told["path"]] = told["bad"]
            self.unwritten = told.get("unwritten") or self.unwritten


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _short(line: bytes) -> str:
    return repr(line[:100].decode(errors="replace"))


def _is_report(told: dict[str, Any]) -> bool:
    """Whether it is what `sparkpair verify --json` prints, or its refusal with at least one problem."""
    files, problems = told.get("files"), told.get("problems")
    if not isinstance(problems, list) or not all(_is_problem(problem) for problem in problems):
        return False
    if files is None:
        return told.get("ok") is False and bool(problems)
    return isinstance(files, dict) and all(_is_state(state) for state in files.values())


def _is_problem(problem: Any) -> bool:
    return isinstance(problem, dict) and all(
        isinstance(problem.get(key), str) for key in ("found", "needed", "do", "code")
    )


def _is_state(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and isinstance(state.get("state"), str)
        and {"expected", "got"} <= state.keys()
    )


def _is_answer(told: dict[str, Any]) -> bool:
    return (
        isinstance(told.get("path"), str)
        and "bad" in told
        and (told["bad"] is None or _is_state(told["bad"]))
    )


class SshPeer:
    """A `replicate.Peer` behind SSH. Use as a context manager.

    Args:
        connections: one a stream; the first one also carries the questions.
        folder: the peer's folder.
        stall_s: seconds without a byte after which a flow is ended and tried again; a verification that
            gives no sign of life for so long (but for three heartbeats at least) is ended too.

    `unwritten`: why the peer could not keep its receipts, None when it could.
    """

    def __init__(self, connections: Sequence[Connection], folder: str, stall_s: float) -> None:
        self.name = connections[0].address
        self._connections = connections
        self._folder = folder
        self._stall_s = stall_s
        self._silence_s = max(stall_s, _HEARTBEATS * verify.HEARTBEAT_S)
        self._lock: Lock | None = None
        self._questions: _Questions | None = None
        self._one = threading.Lock()

    def __enter__(self) -> SshPeer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._questions:
            self._questions.close()
        for connection in self._connections:
            connection.close()

    def survey(self, lock: Lock) -> dict[str, Any]:
        self._lock = lock
        self._questions = self._begin(lock, threading.Event(), tidy=True)
        return self._questions.report or {}

    @property
    def unwritten(self) -> str | None:
        return self._questions.unwritten if self._questions else None

    def check(self, entry: LockedFile, stop: threading.Event) -> dict[str, Any] | None:
        for _ in range(MOST_TRIES):
            questions = self._questions
            with contextlib.suppress(_Gone):
                if questions:
                    return questions.ask(entry.path, stop)
            if stop.is_set():
                break
            with self._one:
                if self._questions is questions and self._lock:
                    if questions:
                        questions.close()
                    self._questions = self._begin(self._lock, stop)
        raise Problem(
            found=f"{self.name} does not answer whether {entry.path} arrived whole",
            needed="a link that holds",
            do="look at the link (sparkpair link), then run the same command again: it goes on there",
            code="peer-no-answer",
            host=self.name,
        )

    def _begin(self, lock: Lock, stop: threading.Event, *, tidy: bool = False) -> _Questions:
        """Start the questions' session, with the first sparkpair that the peer has.

        `tidy` belongs to the first session alone: at a later one, copies are under way.
        """
        self._connections[0].open()
        # Nodes are alike, so ours comes first: each wrong guess costs a round trip and a process.
        own = str(Path(sys.executable).with_name("sparkpair"))
        programs = list(dict.fromkeys([own, str(paths.VENV / "bin/sparkpair"), "sparkpair"]))
        said = refused = ""
        with tempfile.TemporaryFile() as complaints:
            for program in programs:
                words = [program, "verify", "--lock", "-", "--dir", self._folder]
                words += ["--json", "--quiet", "--follow", *(["--tidy"] if tidy else [])]
                command = self._connections[0].command(words)
                questions = _Questions(command, lock, complaints, self._silence_s, stop)
                if questions.report and "files" in questions.report and not questions.fault:
                    return questions
                code = questions.exit_code()
                if questions.report and not questions.fault:
                    raise told_by(self.name, questions.report["problems"][0])
                if len(questions.noise) > _NOISE_LINES:
                    raise shell_prints(self.name, questions.noise[0])
                complaints.seek(0)
                said = complaints.read().decode(errors="replace").strip()[-300:]
                said = said or " | ".join(questions.noise)[-300:]
                refused = said if "refused" in said else refused
                if questions.fault or code not in (126, 127):
                    raise self._no_answer(code, said, questions.fault)
        if refused:
            raise self._no_answer(REFUSED, refused)
        raise Problem(
            found=f"no sparkpair on {self.name}: {said}",
            needed=f"{paths.VENV}/bin/sparkpair, or sparkpair on PATH",
            do="ansible-playbook site.yml --tags host installs it",
            code="peer-lacks-sparkpair",
            host=self.name,
        )

    def _no_answer(self, code: int, said: str, fault: str | None = None) -> Problem:
        why = fault or f"exit code {code}"
        return Problem(
            found=f"no answer from sparkpair verify on {self.name} ({why}){': ' if said else ''}{said}",
            needed="its JSON object, from a sparkpair of the same version",
            do="try it by hand there: sparkpair verify --lock LOCK --dir DIR --json; where it is older than"
            " ours, ansible-playbook site.yml --tags host brings it up",
            code="peer-refused" if code == REFUSED and not fault else "peer-no-answer",
            host=self.name,
        )

    def send(
        self,
        stream: int,
        source: Path,
        parcel: Parcel,
        on_bytes: Callable[[int], None],
        stop: threading.Event,
    ) -> int:
        connection = self._connections[stream]
        try:
            connection.open()
        except Problem as problem:
            if problem.code != "link-unreachable":
                raise
            stop.wait(2.0)
            raise Stalled(problem.found, 0) from None
        cold = [path for path in (source / entry.path for entry in parcel.files) if _is_cold(path)]
        with contextlib.ExitStack() as stack:
            # Files, not pipes: ssh's master gets hold of these too and may live on in a dead connection.
            names, output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            # From `./`: a name that begins with `#` or `;` would be a comment.
            names.write("".join(f"./{entry.path}\0" for entry in parcel.files).encode())
            names.seek(0)
            process = spawn(
                rsync_words(source, connection, self._folder, parcel.way, self._stall_s),
                stdin=names,
                stdout=output,
                stderr=errors,
                env=_environment(),
            )
            stack.callback(_drop, cold)
            stack.callback(end, process)
            try:
                moved = self._follow(process, parcel, cold, on_bytes, stop)
            except Stalled:
                connection.close()  # nobody knows what hangs in it
                raise
            output.seek(0)
            errors.seek(0)
            if process.returncode != 0:
                raise self._failure(process.returncode, errors.read().decode(errors="replace"), moved)
            return wire_bytes(output.read().decode(errors="replace"))

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        parcel: Parcel,
        cold: list[Path],
        on_bytes: Callable[[int], None],
        stop: threading.Event,
    ) -> int:
        """Watch one rsync, by the bytes that it writes, until it ends. Returns their number."""
        moved, told = 0, 0
        moved_at = dropped_at = time.monotonic()
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            now = time.monotonic()
            count = _bytes_written(process.pid)
            if count > moved:
                moved, moved_at = count, now
                on_bytes(min(moved, parcel.size) - told)
                told = min(moved, parcel.size)
            if stop.is_set() or now - moved_at > self._stall_s:
                on_bytes(-told)
                raise Stalled(
                    "stopped" if stop.is_set() else f"no byte moved for {self._stall_s:.0f} s", moved
                )
            if now - dropped_at > _EVICT_EVERY_S:
                dropped_at = now
                _drop(cold)
        on_bytes((parcel.size if process.returncode == 0 else 0) - told)
        return moved

    def _failure(self, code: int, errors: str, moved: int) -> Stalled | Problem:
        said = " | ".join(line.strip() for line in errors.splitlines() if line.strip())[-400:]
        if "No space left" in errors or "Disk quota exceeded" in errors:
            return Problem(
                found=f"the disk of {self.name} is full: {said}",
                needed="room for the folder",
                do="free some there, then run the same command again: it goes on where it stopped",
                code="disk-full",
                host=self.name,
            )
        if "is your shell clean" in errors:
            noise = self._questions.noise if self._questions else []
            return shell_prints(self.name, noise[0] if noise else said)
        if "command not found" in errors or ("No such file or directory" in errors and code == 127):
            return Problem(
                found=f"no rsync on {self.name}: {said}",
                needed="rsync 3.2.3 or newer on both nodes",
                do="ansible-playbook site.yml --tags host installs it",
                code="peer-lacks-rsync",
                host=self.name,
            )
        if code in _BROKEN and "refused" not in errors:
            return Stalled(f"rsync ended with {code}: {said}", moved)
        return Problem(
            found=f"rsync to {self.name} ended with {code}: {said}",
            needed="a copy that ends well",
            do=f"look at {self._folder} on {self.name} (owner, room), then run the same command again",
            code="copy-failed",
            host=self.name,
        )


def shell_prints(host: str, text: str) -> Problem:
    """What comes between us and the programs on the other side: rsync can't be talked to through it."""
    return Problem(
        found=f"the peer's shell prints text: {text!r}",
        needed="a login that prints nothing where nobody is at a terminal",
        do="find the line in the start files of that user's shell there (.bashrc, .profile) and put it behind"
        " a test for a terminal: [ -t 1 ] &&",
        code="peer-shell-prints",
        host=host,
    )


def rsync_words(source: Path, connection: Connection, folder: str, way: Way, stall_s: float) -> list[str]:
    """The command line of one rsync; it reads the names of its files from stdin, each ended by NUL.

    The source is named from the root: rsync takes `w:1` for another host and `-w` for an option.
    Links are followed, so only plain files arrive. No compression, no delta pass and no checksum of its
    own: the peer hashes every file afterwards (field report 50).
    """
    whole = ["--whole-file", "--checksum-choice=none"]
    ways = {
        Way.FRESH: [*whole, "--inplace"],
        Way.RESUME: ["--append"],
        Way.REPLACE: [*whole, "--ignore-times"],
    }
    return [
        *("rsync", "--files-from=-", "--from0", "--copy-links", "--times", "--perms", "--chmod=D0755,F0644"),
        *("--mkpath", "--stats", f"--timeout={max(1, round(stall_s))}", *ways[way]),
        *("-e", connection.rsh, f"{source.absolute()}/", f"{connection.rsync_host}:{folder}/"),
    ]


def wire_bytes(stats: str) -> int:
    """The bytes that rsync's --stats says it sent."""
    match = re.search(r"^Total bytes sent: ([0-9,.]+)$", stats, re.MULTILINE)
    return int(re.sub(r"\D", "", match[1])) if match else 0


def _bytes_written(pid: int) -> int:
    """What a process has written so far, files and pipes together; 0 when it is gone."""
    try:
        match = re.search(r"^wchar: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _is_cold(path: Path) -> bool:
    """Whether less than half of the file is in the page cache: then what the copy reads is dropped again."""
    try:
        return pagecache.resident_bytes(path) < path.stat().st_size / 2
    except OSError:
        return False


def _drop(files: Sequence[Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError), path.open("rb") as handle:
            pagecache.drop(handle.fileno())


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RSYNC_")}
    return {**kept, "LC_ALL": "C"}
