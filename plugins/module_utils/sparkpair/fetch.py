"""Bring a repository's files from the Hub: in parallel, resumed inside a file, hashed on the way.

`huggingface_hub` supplies addresses, metadata and headers; the bytes move here, on its HTTP session, since
its own downloader starts a cut-off file again and accepts flipped bytes (field reports 37 and 38). Written
pages are synced and dropped as they go: on a GB10 the page cache is the GPU's memory (field report 53).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__, atomic, disk, hub, pagecache, staging
from .console import Progress, counted, size
from .hashing import digest_file, new_hash
from .locks import Lock, LockedFile, check_index
from .problem import Problem
from .receipts import Receipts

if TYPE_CHECKING:
    from hashlib import _Hash

INDEX_SUFFIX = ".safetensors.index.json"
GIB = 2**30
_BUFFER = 1 << 20
_SYNC_EVERY = 64 << 20
_LOOK_EVERY_S = 0.5
_PARTING_S = 3.0
_PIECE = 16 << 20
# A try that brought less than this, and less than a quarter of what was left, was in vain.
_WORTHWHILE = 1 << 20
_LONGEST_PAUSE_S = 30.0
# Slower than this over a whole stall period counts as standing still.
_CRAWL_BYTES_S = 1024
_STALLS_BEFORE_PIECES = 2
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class Options:
    """How to fetch.

    Args:
        workers: files under way at the same time.
        stall_s: a transfer that moves (almost) nothing for so long is broken off and taken up again.
        floor_bytes: what must stay free on the disk during the run; also the margin of the check before it.
        reserve_bytes: what will be written to the same disk later (the rank cache).
        tries: how many tries in a row may bring nothing before a file is given up.
        pause_s: the first pause between tries; it doubles.
    """

    workers: int = 4
    stall_s: float = 60.0
    floor_bytes: int = 2 * GIB
    reserve_bytes: int = 0
    tries: int = 10
    pause_s: float = 0.5


@dataclass
class Outcome:
    """What a run did: counts, bytes that came over the network, and the incidents on the way."""

    directory: str
    files: int
    bytes: int
    fetched_files: int = 0
    fetched_bytes: int = 0
    resumed_bytes: int = 0
    checked_files: int = 0
    incidents: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": True, "changed": self.fetched_files > 0, **vars(self)}


def fetch(
    lock: Lock,
    directory: Path,
    *,
    options: Options | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    progress: Callable[[str, int, int], Progress] = Progress,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Make `directory` hold every file of `lock`, verified. Nothing is done where receipts vouch for all.

    Files of the right size without a receipt are hashed, not fetched. Where a fetch into this folder is
    under way, its progress is shown until it ends; then what it left is done here. Raises Problem with the
    code disk-full (before the first byte), disk (the floor during the run), stray-file, foreign-owner,
    link, hash-differs, stalled, index-differs, or one of `hub.check_access`; hub-unreachable
    comes at once where the very first request finds no connection, else after all tries. Partials are
    kept through all of these and through KeyboardInterrupt.
    """
    options = options or Options()
    address, token = hub.clean_endpoint(endpoint), hub.check_token(token)
    staging.require_fit(lock, directory)
    state = staging.survey(lock, directory)
    outcome = Outcome(str(directory), len(lock.files), lock.total_bytes)
    if state.complete:
        check_indexes(lock, directory)
        return outcome
    partials = staging.Partials(directory)
    say = say or _to_stderr
    with (
        contextlib.closing(_Other(lock, directory, progress, say)) as other,
        partials.single_flight(other.watch),
    ):
        other.close()
        staging.require_fit(lock, directory)
        state = staging.survey(lock, directory)
        if state.complete:  # thanks to the other one
            check_indexes(lock, directory)
            partials.clear()
            return outcome
        _require_room(state, partials, options, lock)
        check_indexes(lock, directory)
        todo = _in_order(state.unread + state.missing)
        shown = progress(f"fetch {lock.repo}", sum(entry.size for entry in todo), len(todo))
        run = _Run(
            lock=lock,
            directory=directory,
            partials=partials,
            options=options,
            endpoint=address,
            token=token,
            outcome=outcome,
            progress=shown,
            say=say,
        )
        try:
            run.work(todo, state.missing)
        finally:
            shown.close()
        partials.clear()
    return outcome


@contextlib.contextmanager
def _disk_faults(directory: Path, floor: int) -> Iterator[None]:
    """Tell a full disk as such, whichever write meets it first."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_stop(directory, floor) from None
        raise


def _disk_stop(directory: Path, floor: int) -> Problem:
    free = disk.free_bytes(directory)
    used_up = disk.is_out_of_inodes(directory)
    return Problem(
        found=f"no file can be made any more on the disk of {directory}: its inodes are used up"
        if used_up
        else f"only {size(free)} ({free} bytes) left on the disk of {directory}",
        needed=f"{'inodes' if used_up else size(floor)} free while fetching; what is there is kept",
        do=f"free room (sudo du -xh -d2 {disk.mount_point(directory)}), run again: it goes on",
        code="disk",
    )


def _require_room(state: staging.Survey, partials: staging.Partials, options: Options, lock: Lock) -> None:
    """What is to come must fit, given that partials which nothing can build on go first."""
    what = f"{counted(len(state.missing), 'file')} of {lock.repo}"
    coming = max(state.missing_bytes - partials.superseded_bytes(state.missing), 0)
    disk.require_all(
        [
            disk.Need(partials.directory, coming, what),
            disk.Need(partials.directory, options.reserve_bytes, "what is made of them later"),
        ],
        options.floor_bytes,
    )


@dataclass
class _Other:
    """Another fetch into the same folder, watched by what it puts on the disk."""

    lock: Lock
    directory: Path
    progress: Callable[[str, int, int], Progress]
    say: Callable[[str], None]
    shown: Progress | None = None

    def watch(self, pid: str) -> None:
        """Tell how far it is; called again and again while it runs."""
        state = staging.survey(self.lock, self.directory)
        if self.shown is None:
            self.say(
                f"a fetch into {self.directory} is already running, pid {pid}: attached to it."
                f" Ctrl-C ends the watching, not the fetch (that: kill {pid})"
            )
            self.shown = self.progress(
                f"fetch {self.lock.repo} (pid {pid})", self.lock.total_bytes, len(self.lock.files)
            )
            self.shown.begin_at(state.done_bytes, len(state.vouched))
        self.shown.advance(
            state.done_bytes - self.shown.done_bytes, files=len(state.vouched) - self.shown.done_files
        )
        time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        if self.shown:
            self.shown.close()
            self.shown = None


def _to_stderr(text: str) -> None:
    """In one write: several threads may have something to say."""
    sys.stderr.write(f"\r\033[K{text}\n" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()


def _in_order(entries: tuple[LockedFile, ...]) -> list[LockedFile]:
    """Indexes, other small files, then the large ones from the largest: so faults show early."""
    return sorted(
        entries,
        key=lambda entry: (
            not entry.path.endswith(INDEX_SUFFIX),
            entry.size > _SYNC_EVERY,
            -entry.size if entry.size > _SYNC_EVERY else 0,
            entry.path,
        ),
    )


def check_indexes(lock: Lock, directory: Path) -> None:
    """Each index of the lock that is on disk against the lock: the same shards in both, or a Problem."""
    for entry in lock.files:
        path = directory / entry.path
        if entry.path.endswith(INDEX_SUFFIX) and path.is_file():
            try:
                index = json.loads(path.read_bytes())
            except (ValueError, RecursionError):
                index = None
            check_index(lock, entry.path, index)


class _Again(Exception):
    """A try that failed in a way that another may not. `wait` (s): what the server asked for."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class _Stalled(_Again):
    """The transfer stood still."""


class _RateLimited(_Again):
    """The Hub wants fewer requests (429)."""


class _Unreachable(_Again):
    """No connection came about: name, route, port, proxy, certificate."""


_GIVEN_UP: dict[type[_Again], str] = {
    _Stalled: "stalled",
    _RateLimited: "rate-limited",
    _Unreachable: "hub-unreachable",
}


_AGAIN_LATER = (
    "wait some minutes and run the same command again, with HF_TOKEN set: it goes on where it stopped"
)


@dataclass
class _Run:
    """One fetch under way: shared by its worker threads."""

    lock: Lock
    directory: Path
    partials: staging.Partials
    options: Options
    endpoint: str
    token: str | None
    outcome: Outcome
    progress: Progress
    say: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)
    guard: threading.Lock = field(default_factory=threading.Lock)
    _faults: list[BaseException] = field(default_factory=list)
    _offered: set[str] = field(default_factory=set)
    _open_at: float = 0.0  # the Hub asked everybody to wait until then
    _floor_at: float = 0.0
    _promised: int = 0  # bytes that come in the place of bad copies, which the first look did not count

    def __post_init__(self) -> None:
        self._receipts = Receipts.open(self.directory)

    # The crew

    def work(self, todo: list[LockedFile], missing: Sequence[LockedFile]) -> None:
        """Bring or check all of `todo`. The Hub is asked about one file first: a refusal costs one request,

        and nothing that is on the disk.
        """
        left: queue.SimpleQueue[LockedFile] = queue.SimpleQueue()
        for entry in todo:
            left.put(entry)
        # Daemons: a thread that waits for the network must not hold up Ctrl-C.
        crew = [
            threading.Thread(target=self._member, args=(left,), name=f"fetch-{number}", daemon=True)
            for number in range(min(self.options.workers, len(todo)))
        ]
        try:
            if missing:
                self._await_offer(next(entry for entry in todo if entry in missing))
                self.partials.sweep(missing)
            for member in crew:
                member.start()
            for member in crew:
                while member.is_alive():
                    member.join(_LOOK_EVERY_S)
        finally:
            self.stop.set()
            until = time.monotonic() + _PARTING_S
            for member in crew:
                if member.is_alive():
                    member.join(max(until - time.monotonic(), 0))
        if self._faults:
            raise self._faults[0]

    def _member(self, left: queue.SimpleQueue[LockedFile]) -> None:
        while not self.stop.is_set():
            try:
                self._one(left.get_nowait())
            except queue.Empty:
                return
            except BaseException as fault:
                with self.guard:
                    self._faults.append(fault)
                self.stop.set()

    def tell(self, text: str) -> None:
        """Keep an incident and show it."""
        with self.guard:
            self.outcome.incidents.append(text)
        self.say(text)

    # One file

    def _one(self, entry: LockedFile) -> None:
        target = self.directory / entry.path
        if target.is_file():
            if self._good_already(entry, target):
                return
            # The Hub must have a better one before anything happens to this one: it may serve just now.
            self._await_offer(entry)
            self._make_room(target, entry)
        got = ""
        for attempt in (1, 2):
            part, got, fd_stat = self._bring(entry)
            if got == entry.digest:
                self._place(entry, part, fd_stat)
                return
            bad = self.partials.quarantine(part, entry)
            self._make_room(bad, entry)
            self.progress.advance(-entry.size)
            again = "fetching it once more" if attempt == 1 else "giving up"
            self.tell(f"{entry.path}: expected {entry.algorithm} {entry.digest}, got {got}; {again}")
        raise Problem(
            found=f"{entry.path} came twice with a wrong hash: {entry.algorithm} {got}, {entry.size} bytes",
            needed=f"{entry.algorithm} {entry.digest}, {entry.size} bytes, as locked for {self.lock.repo}",
            do="run it again later; if it stays, look at the proxy or mirror in between (hf_endpoint)",
            code="hash-differs",
        )

    def _good_already(self, entry: LockedFile, target: Path) -> bool:
        """Hash a file that lies there without a receipt. A bad one stays until its successor is verified."""
        if target.stat().st_size == entry.size:
            found = digest_file(target, entry.algorithm, on_bytes=self.progress.advance, stop=self.stop)
            if found.hex == entry.digest:
                self._vouch(entry, found.stat)
                with self.guard:
                    self.outcome.checked_files += 1
                self.progress.advance(files=1)
                return True
            self.progress.advance(-entry.size)
            self.tell(
                f"{entry.path}: expected {entry.algorithm} {entry.digest}, got {found.hex}; fetching it"
            )
        else:
            self.tell(f"{entry.path}: expected {entry.size} bytes, got {target.stat().st_size}; fetching it")
        with self.guard:
            self._receipts.forget(entry.path)
            self._receipts.save()
        return False

    def _make_room(self, bad: Path, entry: LockedFile) -> None:
        """A bad copy is kept to be looked at while it does not take the room of the good ones."""
        with self.guard:
            self._promised += entry.size
            if disk.free_bytes(self.directory) < self._promised + self.options.floor_bytes:
                bad.unlink(missing_ok=True)

    def _vouch(self, entry: LockedFile, found: os.stat_result) -> None:
        with self.guard:
            self._receipts.record(entry, found)
            self._receipts.save()

    def _place(self, entry: LockedFile, part: Path, found: os.stat_result) -> None:
        target = self.directory / entry.path
        self.partials.make(target.parent)
        if target.is_file():
            self.partials.quarantine(target, entry)
        part.replace(target)
        atomic.fsync_directory(target.parent)
        self.partials.journal(entry).unlink(missing_ok=True)
        self._vouch(entry, found)
        with self.guard:
            self.outcome.fetched_files += 1
        self.progress.advance(files=1)
        if entry.path.endswith(INDEX_SUFFIX):
            check_indexes(self.lock, self.directory)

    # The bytes of one file

    def _bring(self, entry: LockedFile) -> tuple[Path, str, os.stat_result]:
        """Fill the partial of `entry`, however many tries it takes. Returns it, its hash and its stat."""
        part = self.partials.part(entry)
        kept = self.partials.usable_bytes(entry)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            os.fchmod(fd, 0o644)
            self.partials.give(fd)
            os.ftruncate(fd, kept)
            sink = _Sink(self, entry, fd)
            sink.warm_up()
            with self.guard:
                self.outcome.resumed_bytes += kept
            self._fill(entry, sink)
            sink.sync(last=True)
            return part, sink.hash.hexdigest(), os.fstat(fd)
        finally:
            os.close(fd)

    def _fill(self, entry: LockedFile, sink: _Sink) -> None:
        if sink.at < entry.size:
            self._await_offer(entry)
        in_vain = stalls = 0
        while sink.at < entry.size:
            self._wait_for_gate()
            before, left = sink.at, entry.size - sink.at
            try:
                self._transfer(entry, sink, in_pieces=stalls >= _STALLS_BEFORE_PIECES)
            except _Again as reason:
                gained = sink.at - before
                in_vain = 0 if gained >= min(_WORTHWHILE, max(left // 4, 1)) else in_vain + 1
                stalls += isinstance(reason, _Stalled)
                self._tell_again(entry, sink, reason, stalls)
                self._pause(entry, reason, in_vain)

    def _await_offer(self, entry: LockedFile) -> None:
        """Size and hash as the Hub announces them, before a byte of the content moves."""
        in_vain = 0
        while entry.path not in self._offered:
            self._wait_for_gate()
            try:
                self._require_offer(entry)
            except _Again as reason:
                in_vain += 1
                if isinstance(reason, _Unreachable) and in_vain == 1 and not self._offered:
                    # The Hub never answered: a wrong address or no network, which another try does not cure.
                    raise hub.out_of_reach(self.endpoint, reason) from None
                self.tell(f"{entry.path}: {reason}; asking again")
                self._pause(entry, reason, in_vain)
            else:
                self._offered.add(entry.path)

    def _tell_again(self, entry: LockedFile, sink: _Sink, reason: _Again, stalls: int) -> None:
        how = f"going on at {size(sink.at)}"
        if isinstance(reason, _Stalled) and stalls == _STALLS_BEFORE_PIECES:
            how += f", from now on in pieces of {size(_PIECE)} over fresh connections"
        self.tell(f"{entry.path}: {reason}; {how}")

    def _given_up(self, entry: LockedFile, reason: _Again) -> Problem:
        return Problem(
            found=f"{entry.path}: {self.options.tries} tries in a row brought next to nothing; the last: {reason}",
            needed=f"a connection to {self.endpoint} that moves bytes",
            do=_AGAIN_LATER
            if isinstance(reason, _RateLimited)
            else "check the network and run the same command again: it goes on where it stopped",
            code=_GIVEN_UP.get(type(reason), "hub-busy"),
        )

    def _wait_for_gate(self) -> None:
        while not self.stop.is_set() and (left := self._open_at - time.monotonic()) > 0:
            self.stop.wait(min(left, 1.0))
        if self.stop.is_set():
            raise KeyboardInterrupt

    def _pause(self, entry: LockedFile, reason: _Again, in_vain: int) -> None:
        """Wait before another try: as long as the server says (then all wait), else longer each time."""
        if in_vain >= self.options.tries:
            raise self._given_up(entry, reason) from None
        if reason.wait is not None:
            self._open_at = max(self._open_at, time.monotonic() + reason.wait)
            return
        pause = min(self.options.pause_s * 2 ** max(in_vain - 1, 0), _LONGEST_PAUSE_S)
        self.stop.wait(pause * random.uniform(0.8, 1.2))  # noqa: S311 - only spreads the tries

    def _require_offer(self, entry: LockedFile) -> None:
        library = hub.library()
        with self._exchange(entry):
            offer = library.get_hf_file_metadata(
                self._address(entry),
                token=self.token or False,
                endpoint=self.endpoint,
                timeout=min(self.options.stall_s, hub.TIMEOUT_S),
                library_name="sparkpair",
                library_version=__version__,
            )
        hub.require_same(entry, offer.size, offer.etag, self.lock.repo)

    def _address(self, entry: LockedFile) -> str:
        return str(
            hub.library().hf_hub_url(
                self.lock.repo, entry.path, revision=self.lock.revision, endpoint=self.endpoint
            )
        )

    def _transfer(self, entry: LockedFile, sink: _Sink, *, in_pieces: bool) -> None:
        """One request for what is missing, or for the next piece of it."""
        import httpx2
        from huggingface_hub.utils import build_hf_headers, get_session

        headers = build_hf_headers(
            token=self.token or False, library_name="sparkpair", library_version=__version__
        )
        headers["Accept-Encoding"] = "identity"
        last = min(sink.at + _PIECE, entry.size) - 1
        if in_pieces:
            headers |= {"Range": f"bytes={sink.at}-{last}", "Connection": "close"}
        elif sink.at:
            headers["Range"] = f"bytes={sink.at}-"
        patience = httpx2.Timeout(self.options.stall_s, connect=min(self.options.stall_s, hub.TIMEOUT_S))
        with (
            self._exchange(entry),
            get_session().stream(
                "GET", self._address(entry), headers=headers, timeout=patience, follow_redirects=True
            ) as answer,
        ):
            self._require_good(entry, answer)
            sink.begin(answer.status_code, answer.headers)
            self._pour(answer.iter_raw(), sink)
        if sink.at < (last + 1 if in_pieces else entry.size):
            raise _Again(f"the connection ended at {size(sink.at)} of {size(entry.size)}")

    def _pour(self, chunks: Iterator[bytes], sink: _Sink) -> None:
        """Move the body, breaking off when a whole stall period brought next to nothing."""
        began, mark = time.monotonic(), 0
        try:
            for chunk in chunks:
                if self.stop.is_set():
                    raise KeyboardInterrupt
                sink.take(chunk)
                now = time.monotonic()
                mark += len(chunk)
                if now - began >= self.options.stall_s:
                    if mark < _CRAWL_BYTES_S * self.options.stall_s:
                        raise _Stalled(f"only {size(mark)} in {now - began:.0f} s")
                    began, mark = now, 0
                self._require_floor(now)
        finally:
            sink.flush()

    def _require_floor(self, now: float) -> None:
        """Stop cleanly while there is still room for others."""
        if now < self._floor_at:
            return
        self._floor_at = now + _LOOK_EVERY_S
        if disk.free_bytes(self.directory) < self.options.floor_bytes:
            self.partials.empty_quarantine()
            if disk.free_bytes(self.directory) < self.options.floor_bytes:
                raise _disk_stop(self.directory, self.options.floor_bytes)

    @contextlib.contextmanager
    def _exchange(self, entry: LockedFile) -> Iterator[None]:
        """Sort what may go wrong in one exchange into `_Again` and Problems."""
        hub.library()
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        stall = f"nothing moved for {self.options.stall_s:g} s"
        try:
            yield
        except HfHubHTTPError as error:
            self._require_good(entry, error.response)
            raise _Again(str(error)) from None
        except (
            *(OfflineModeIsEnabled, HFValidationError),
            *(httpx2.TooManyRedirects, httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.DecodingError),
        ) as error:
            raise hub.explain(error, self.endpoint, self.lock.repo) or error from None
        except (httpx2.ReadTimeout, httpx2.WriteTimeout):
            raise _Stalled(stall) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            raise _Unreachable(f"{type(error).__name__} ({error})") from None
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise _Again(f"{type(error).__name__} ({error})") from None

    def _require_good(self, entry: LockedFile, answer: Any) -> None:
        status, headers = answer.status_code, answer.headers
        if status < 400:
            return
        ours = hub.same_site(self.endpoint, str(answer.url)) or "X-Error-Code" in headers
        if status in hub.PASSING:
            kind = _RateLimited if status == 429 else _Again
            raise kind(f"the Hub answers {status}", hub.retry_after(headers))
        if status == 416:
            raise _Again("the server knows a shorter file (416)")
        if not ours:  # a signed link that ran out: the Hub gives a new one
            raise _Again(f"the storage answers {status}")
        raise hub.refusal(
            status,
            headers,
            repo=self.lock.repo,
            revision=self.lock.revision,
            path=entry.path,
            endpoint=self.endpoint,
            with_token=self.token is not None,
        )


class _Sink:
    """Where one file's bytes go: the partial, its hash, its journal; synced and dropped from the cache."""

    def __init__(self, run: _Run, entry: LockedFile, fd: int) -> None:
        self._run = run
        self._entry = entry
        self._fd = fd
        self._buffer = bytearray()
        self._written = os.fstat(fd).st_size
        self._synced = self._written
        self._flush_at = 0.0
        self.hash: _Hash = new_hash(entry.algorithm, entry.size)

    @property
    def at(self) -> int:
        """Bytes of the file taken so far."""
        return self._written + len(self._buffer)

    def warm_up(self) -> None:
        """Hash what an earlier run left, then note in the journal what this partial is of."""
        position = 0
        while position < self._written:
            chunk = os.pread(self._fd, min(4 * _BUFFER, self._written - position), position)
            if not chunk:
                raise OSError(
                    errno.EIO, "the partial became shorter", str(self._run.partials.part(self._entry))
                )
            self.hash.update(chunk)
            pagecache.drop(self._fd, position, len(chunk))
            position += len(chunk)
            self._run.progress.advance(len(chunk))
            if self._run.stop.is_set():
                raise KeyboardInterrupt
        self._run.partials.write_journal(self._entry, self._synced)

    def begin(self, status: int, headers: Any) -> None:
        """Fit an answer to what is here: go on (206 from the right byte), or begin again (200)."""
        if status == 206:
            said = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
            if said and int(said[1]) == self.at and said[3] in ("*", str(self._entry.size)):
                return
            raise _Again(f"the server sent another range: {headers.get('Content-Range')}")
        if self.at:
            self._restart()

    def _restart(self) -> None:
        self._run.progress.advance(-self.at)
        self._buffer.clear()
        os.ftruncate(self._fd, 0)
        self._written = self._synced = 0
        self.hash = new_hash(self._entry.algorithm, self._entry.size)

    def take(self, chunk: bytes) -> None:
        """Add bytes at the end; more than the file has are an error of the server's."""
        if self.at + len(chunk) > self._entry.size:
            raise _Again(f"the server sent more than {self._entry.size} bytes")
        self._buffer += chunk
        if len(self._buffer) >= _BUFFER or time.monotonic() >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Write the buffer out and hash it."""
        self._flush_at = time.monotonic() + _LOOK_EVERY_S
        if not self._buffer:
            return
        with memoryview(self._buffer) as view:
            done = 0
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], self._written + done)
            self.hash.update(view)
        count = len(self._buffer)
        self._written += count
        self._buffer.clear()
        with self._run.guard:
            self._run.outcome.fetched_bytes += count
        self._run.progress.advance(count)
        if self._written - self._synced >= _SYNC_EVERY:
            self.sync()

    def sync(self, *, last: bool = False) -> None:
        """Bring what was written to the disk, and let go of its pages; note it in the journal."""
        self.flush()
        if last:
            os.fsync(self._fd)
        else:
            os.fdatasync(self._fd)
        pagecache.drop(self._fd, self._synced // 4096 * 4096, 0)
        self._synced = self._written
        if not last:
            self._run.partials.write_journal(self._entry, self._synced)
