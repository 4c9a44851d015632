"""A verified folder from one node to another, over the link: what the peer lacks, once, and verified there.

Several streams of rsync over SSH, each with its own connection; the largest file first; the peer hashes a
file as soon as it is there, while the next ones travel. A killed copy goes on where it stopped: whole files
are known by the peer's receipts, half ones grow by appending, and the hash decides in the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import posixpath
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from . import hashing, verify
from .console import Progress, counted, size
from .locks import Lock, LockedFile
from .problem import Problem

_BATCH_BYTES = 64 << 20  # smaller files travel together
MOST_TRIES = 3  # again, for one file
_MARGIN = 64 << 20  # bytes of the peer's disk that stay free


class Way(Enum):
    """How a file gets to its place."""

    FRESH = "fresh"  # nothing is there: written in place, so that a killed copy can be resumed
    RESUME = "resume"  # the beginning is there: the rest is appended
    REPLACE = "replace"  # something else is there: written beside it, then renamed


@dataclass(frozen=True)
class Parcel:
    """Files that one rsync takes at a time."""

    files: tuple[LockedFile, ...]
    way: Way

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)


class Stalled(Exception):
    """A flow whose bytes stopped moving, or whose connection broke. `sent` bytes had gone out."""

    def __init__(self, why: str, sent: int) -> None:
        super().__init__(why)
        self.sent = sent


class Peer(Protocol):
    """What replicate needs of the other side; see `sshpeer`. `check` and `send` come from several threads."""

    name: str

    def survey(self, lock: Lock) -> dict[str, Any]:
        """What `sparkpair verify --json` says of the peer's folder. Called first, once."""

    def check(self, entry: LockedFile, stop: threading.Event) -> dict[str, Any] | None:
        """What is wrong with one file of the peer ("state", "expected", "got"), None when it is right."""

    def send(
        self,
        stream: int,
        source: Path,
        parcel: Parcel,
        on_bytes: Callable[[int], None],
        stop: threading.Event,
    ) -> int:
        """Copy a parcel. Returns the bytes on the wire; raises Stalled or Problem."""


@dataclass
class Result:
    """What was sent: files, their bytes and the bytes on the wire (all tries), and what was there already.

    `notes` says what went wrong without doing the copy any harm.
    """

    files: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    kept_files: int = 0
    retries: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": True,
            "changed": self.files > 0,
            "files": self.files,
            "bytes": self.bytes,
            "wire_bytes": self.wire_bytes,
            "kept_files": self.kept_files,
            "retries": self.retries,
            "seconds": round(self.seconds, 3),
            "rate": round(self.bytes / self.seconds) if self.seconds else 0,
            "notes": self.notes,
        }


def replicate(
    lock: Lock,
    source: Path,
    peer: Peer,
    *,
    streams: int | None = None,
    quiet: bool = False,
    lock_file: Path | None = None,
) -> Result:
    """Bring the folder of `peer` to what `lock` says, from `source`.

    Raises Problem before anything is sent when the source is not what its lock says (field report 37), or
    the peer's folder holds what doesn't belong or has too little room; later when a file arrived wrong
    twice or its flow stalled too often. The folder of the peer then keeps what is whole. Before a fault is
    laid at the peer's door, the source is looked at again ("source-changed"). `lock_file` is where `lock`
    was read from, for the commands that messages name.
    """
    begun = time.monotonic()
    origin = _Source(lock, source, lock_file)
    with _in_background(lambda: peer.survey(lock)) as answer:
        unwritten = origin.require(quiet=quiet)
    there = answer()
    plan, present = plan_for(lock, there, peer.name)
    result = Result(kept_files=len(lock.files) - len(plan))
    if unwritten:
        result.notes.append(verify.unkept(str(source), unwritten))
    if plan:
        _require_room(plan, present, there, peer.name)
        count = streams or default_streams()
        _Transfer(origin, peer, result, quiet=quiet).run(parcels(plan), count)
    result.seconds = time.monotonic() - begun
    return result


def default_streams() -> int:
    """Two to four: a stream fills about one core at each end, and the hashing wants some too."""
    return max(2, min(4, hashing.cores() // 2))


def plan_for(lock: Lock, report: dict[str, Any], peer: str) -> tuple[dict[LockedFile, Way], int]:
    """Which files have to go and how, from the peer's report; and how many of their bytes are there.

    Raises Problem (with the peer's words) for faults of the folder that sending files doesn't cure.
    """
    states = report.get("files", {})
    cured = {verify.MISSING, verify.WRONG_SIZE, verify.WRONG_HASH}
    for problem in report.get("problems", []):
        if problem["code"] not in cured:
            raise told_by(peer, problem)
    plan = {}
    present = 0
    for entry in lock.files:
        state = states.get(entry.path)
        if state is None:
            continue
        got = state.get("got")
        if state["state"] == verify.MISSING:
            plan[entry] = Way.FRESH
        elif state["state"] == verify.WRONG_SIZE and isinstance(got, int) and 0 < got < entry.size:
            plan[entry] = Way.RESUME
            present += got
        else:
            plan[entry] = Way.REPLACE
    return plan, present


def parcels(plan: dict[LockedFile, Way]) -> list[Parcel]:
    """The files as parcels, the largest first; small ones of one way together."""
    result = [Parcel((entry,), way) for entry, way in plan.items() if entry.size >= _BATCH_BYTES]
    for way in Way:
        together: list[LockedFile] = []
        for entry in sorted(entry for entry, wanted in plan.items() if wanted is way):
            if entry.size >= _BATCH_BYTES:
                continue
            if together and sum(other.size for other in together) + entry.size > _BATCH_BYTES:
                result.append(Parcel(tuple(together), way))
                together = []
            together.append(entry)
        if together:
            result.append(Parcel(tuple(together), way))
    return sorted(result, key=lambda parcel: -parcel.size)


@contextlib.contextmanager
def _in_background(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run `work` in a thread; what is yielded waits for its result or raises its exception."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error

    def wait() -> Any:
        thread.join()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    thread = threading.Thread(target=run, name="ask", daemon=True)
    thread.start()
    yield wait


class _Source:
    """The folder that is sent: verified before the first byte, and remembered by its stat from then on."""

    def __init__(self, lock: Lock, folder: Path, lock_file: Path | None) -> None:
        self.folder = folder
        self._lock = lock
        self._lock_file = lock_file
        self._stamps = {entry.path: self._stamp(entry) for entry in lock.files}

    def require(self, *, quiet: bool) -> str | None:
        """Raise Problem "source-..." unless the folder is what its lock says.

        Returns why new receipts could not be kept, None when they could.
        """
        report = verify.verify(
            self._lock,
            self.folder,
            only_listed=True,
            follow_links=True,
            quiet=quiet,
            lock_file=self._lock_file,
        )
        if not report.ok:
            first = report.problems[0]
            more = f" (and {len(report.problems) - 1} more problems)" if len(report.problems) > 1 else ""
            raise Problem(first.found + more, first.needed, first.do, code=f"source-{first.code}")
        return report.unwritten

    def changed(self, files: Sequence[LockedFile], *, full: bool = False) -> Problem | None:
        """What became of `files` here since they were verified; None when it is not their fault.

        Args:
            full: read them, also where their stat says that nothing happened.
        """
        for entry in files:
            if not full and self._stamp(entry) == self._stamps[entry.path]:
                continue
            bad = verify.examine(self.folder / entry.path, entry, follow=True)
            if bad:
                return self._problem(entry, bad)
        return None

    def _stamp(self, entry: LockedFile) -> tuple[int, ...]:
        try:
            found = (self.folder / entry.path).stat()
        except OSError:
            return ()
        return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    def _problem(self, entry: LockedFile, bad: verify.Bad) -> Problem:
        words = ["sparkpair", "verify", "--lock", str(self._lock_file or "LOCK")]
        words += ["--dir", str(self.folder), "--full"]
        return Problem(
            found=f"{self.folder / entry.path} changed here after it was verified:"
            f" {bad.state}, expected {bad.expected}, got {bad.got}",
            needed="a source that nothing writes to before the copy's end",
            do=f"{shlex.join(words)}, mend what it names, then run the same command again",
            code="source-changed",
        )


def _require_room(plan: dict[LockedFile, Way], present: int, report: dict[str, Any], peer: str) -> None:
    free = report.get("free_bytes")
    needed = sum(entry.size for entry in plan) - present + _MARGIN
    if isinstance(free, int) and free < needed:
        raise Problem(
            found=f"{size(free)} ({free} bytes) free on {peer}",
            needed=f"{size(needed)} ({needed} bytes) for {counted(len(plan), 'file')}",
            do=f"free {size(needed - free)} there, then run the same command again",
            code="disk-full",
            host=peer,
        )


def told_by(peer: str, problem: dict[str, Any]) -> Problem:
    """A problem that the peer found, with its name."""
    words = {key: problem[key] for key in ("found", "needed", "do", "code")}
    return Problem(**words, host=problem.get("host") or peer)


@dataclass
class _Board:
    """What the streams and the verifier share. `open` counts the files that are not vouched for yet."""

    waiting: deque[Parcel]
    open: int
    arrived: deque[LockedFile] = field(default_factory=deque)
    fault: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)


class _Transfer:
    """One run: streams take parcels from the front; what arrived is checked, and bad files are queued again."""

    def __init__(self, source: _Source, peer: Peer, result: Result, *, quiet: bool) -> None:
        self._source = source
        self._peer = peer
        self._result = result
        self._quiet = quiet
        self._stop = threading.Event()
        self._stalls: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()

    def run(self, work: Sequence[Parcel], streams: int) -> None:
        files = sum(len(parcel.files) for parcel in work)
        self._board = _Board(deque(work), files)
        self._progress = Progress(
            f"copy to {self._peer.name}", sum(parcel.size for parcel in work), files, quiet=self._quiet
        )
        threads = [
            threading.Thread(target=self._guarded, args=(self._stream, number), name=f"stream{number}")
            for number in range(min(streams, len(work)))
        ]
        threads += [
            threading.Thread(target=self._guarded, args=(self._verifier,), name=f"verifier{number}")
            for number in range(streams + 2)  # some wait for the peer's disk
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():  # so that Ctrl-C gets through
                    thread.join(0.2)
        except BaseException:
            self._fail(KeyboardInterrupt())
            raise
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
            self._progress.close()
        if self._board.fault:
            raise self._board.fault

    def _guarded(self, work: Callable[..., None], *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._board.changed:
            self._board.fault = self._board.fault or error
            self._stop.set()
            self._board.changed.notify_all()

    def _over(self) -> bool:
        return self._stop.is_set() or self._board.open == 0

    def _stream(self, number: int) -> None:
        while parcel := self._next():
            try:
                wire = self._peer.send(
                    number, self._source.folder, parcel, self._progress.advance, self._stop
                )
            except Stalled as stall:
                self._again(parcel, stall)
                continue
            except Problem as problem:
                if problem.code == "copy-failed":
                    ours = "[sender]" in problem.found  # rsync's word for this side
                    raise self._source.changed(parcel.files, full=ours) or problem from None
                raise
            with self._board.changed:
                self._result.wire_bytes += wire
                self._board.arrived += parcel.files
                self._board.changed.notify_all()

    def _next(self) -> Parcel | None:
        with self._board.changed:
            while not self._board.waiting and not self._over():
                self._board.changed.wait()
            return None if self._over() else self._board.waiting.popleft()

    def _again(self, parcel: Parcel, stall: Stalled) -> None:
        """Queue a parcel again after its flow broke; `MOST_TRIES` times for one file."""
        with self._board.changed:
            if self._stop.is_set():
                return
            self._result.wire_bytes += stall.sent
            self._result.retries += 1
            for entry in parcel.files:
                self._stalls[entry.path] += 1
            worst = parcel.files[0].path
            if self._stalls[worst] > MOST_TRIES:
                raise self._source.changed(parcel.files) or Problem(
                    found=f"the copy of {worst} to {self._peer.name} broke {self._stalls[worst]} times: {stall}",
                    needed="a link over which bytes keep moving",
                    do="look at the link (sparkpair link), then run the same command again: it goes on there",
                    code="copy-stalled",
                    host=self._peer.name,
                )
            way = Way.REPLACE if parcel.way is Way.REPLACE else Way.RESUME
            self._board.waiting.appendleft(replace(parcel, way=way))
            self._progress.advance(note=f"retry {self._result.retries} ({stall})")
            self._board.changed.notify_all()

    def _verifier(self) -> None:
        while entry := self._take_arrived():
            bad = self._peer.check(entry, self._stop)
            if bad:
                self._blame(entry, bad)
            with self._board.changed:
                if bad:
                    self._send_again(entry)
                else:
                    self._result.files += 1
                    self._result.bytes += entry.size
                    self._progress.advance(files=1)
                    self._board.open -= 1
                self._board.changed.notify_all()

    def _take_arrived(self) -> LockedFile | None:
        with self._board.changed:
            while not self._board.arrived and not self._over():
                self._board.changed.wait()
            return None if self._over() else self._board.arrived.popleft()

    def _blame(self, entry: LockedFile, state: dict[str, Any]) -> None:
        """Raise Problem when a file arrived wrong because it changed here, or when it did so twice."""
        self._bad[entry.path] += 1
        last = self._bad[entry.path] > 1
        if fault := self._source.changed([entry], full=last):
            raise fault
        if last:
            raise Problem(
                found=f"{entry.path} arrived wrong twice on {self._peer.name}:"
                f" {state['state']}, expected {state['expected']}, got {state['got']}",
                needed="the bytes that its lock names",
                do="look for errors of memory, disk or network card in the journals of both nodes",
                code="copy-corrupt",
                host=self._peer.name,
            )

    def _send_again(self, entry: LockedFile) -> None:
        self._result.retries += 1
        self._progress.advance(-entry.size, note=f"{entry.path} arrived wrong, sent again")
        self._board.waiting.append(Parcel((entry,), Way.REPLACE))


@contextlib.contextmanager
def single_flight(addresses: Sequence[str], folder: str) -> Iterator[None]:
    """Be the only copy into this folder of this peer. Raises Problem "already-running".

    The lock is a name in the kernel's abstract socket space: it goes with the process, however that ends.
    It is the same from whatever source, by whatever user and over whichever of the peer's `addresses`.
    """
    place = posixpath.normpath(folder).lstrip("/")
    host = min(_plain_address(address) for address in addresses)
    digest = hashlib.sha256(f"{host}\0{place}".encode()).hexdigest()[:24]
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0sparkpair-replicate-{digest}")
        except OSError:
            raise Problem(
                found=f"a copy to {folder} on {addresses[0]} is already running",
                needed="one at a time",
                do="wait for it (in a play: run the play again, it attaches)",
                code="already-running",
            ) from None
        yield


def _plain_address(text: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text))
    return text.lower()


def require_rsync() -> None:
    """Raise Problem unless this node has an rsync that knows what we ask of it."""
    program = shutil.which("rsync")
    said = (
        subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        if program
        else None
    )
    match = re.search(r"version v?(\d+)\.(\d+)\.(\d+)", said.stdout) if said else None
    if not match or tuple(map(int, match.groups())) < (3, 2, 3):
        raise Problem(
            found=f"rsync {'.'.join(match.groups())}" if match else "no rsync on this node",
            needed="rsync 3.2.3 or newer on both nodes",
            do="ansible-playbook site.yml --tags host installs it (apt-get install rsync)",
            code="rsync-missing",
        )


def describe(result: Result, peer: str, lock: Lock, route: str) -> str:
    """The outcome in one line."""
    if not result.files:
        return f"{peer} has all of {lock.repo} already ({counted(len(lock.files), 'file')})"
    rate = size(result.bytes / result.seconds) if result.seconds else "?"
    again = f", tried again {counted(result.retries, 'time')}" if result.retries else ""
    return (
        f"{counted(result.files, 'file')}, {size(result.bytes)} to {peer} over {route} in {result.seconds:.1f} s"
        f" ({rate}/s), verified there; {result.kept_files} were there already{again}"
    )
