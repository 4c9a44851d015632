"""What a command shows: sizes and times in words, progress on a terminal or in a log, one JSON object."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from . import atomic
from .problem import Problem

_LINE_EVERY_S = 5.0
_BAR_EVERY_S = 0.2
_WINDOW_S = 60.0
PROGRESS_FILE = "SPARKPAIR_PROGRESS"


def size(count: float) -> str:
    """Bytes in words, decimal units as disks and the Hub count them: 210600939078 -> "210.6 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1, "file" -> "1 file"; 3, "file" -> "3 files"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gib(count: float) -> str:
    """Bytes as GiB, the unit of memory: 106192000000 -> "98.9 GiB"."""
    return f"{count / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds in words: 3725 -> "1 h 02 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Forgiving:
    """A stream for remarks: the first write that fails is the last one tried, and no error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Send what is still in the buffer nowhere; else it fails again at the end, and the exit code with it."""
        with contextlib.suppress(OSError, ValueError):
            _to_nowhere(self._stream.fileno())
            self._stream.flush()


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == descriptor:
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


@contextlib.contextmanager
def forgiving_stderr() -> Iterator[None]:
    """Inside the block a stderr that is full, broken or closed neither stops the work nor spoils stdout.

    Python has None for a closed stderr, and `print(file=None)` means stdout. The closed descriptor is
    taken too: the next file opened would get its number, and the remarks of every child process.
    """
    before = sys.stderr
    stream: TextIO = before
    if before is None:
        try:
            os.fstat(2)
        except OSError:
            _to_nowhere(2)
        stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    sys.stderr = cast(TextIO, _Forgiving(stream))
    try:
        yield
    finally:
        sys.stderr = before
        if before is None:
            stream.close()


class Progress:
    """Bytes and files done, told live: a bar on a terminal, else a line every few seconds on stderr.

    A job's follower reads the same figures from the file that the environment variable
    SPARKPAIR_PROGRESS names (see `jobs.py`). Safe to call from several threads. Where either can't be
    written it is not tried again: progress never stops the work.
    """

    def __init__(
        self,
        label: str,
        total_bytes: int,
        total_files: int = 0,
        *,
        stream: TextIO | None = None,
        snapshot: Path | None = None,
        quiet: bool = False,
    ) -> None:
        self.label = label
        self.total_bytes = total_bytes
        self.total_files = total_files
        self.done_bytes = 0
        self.done_files = 0
        self.note = ""
        self._stream = stream or sys.stderr
        self._quiet = quiet or self._stream is None
        named = os.environ.get(PROGRESS_FILE)
        self._snapshot = snapshot or (Path(named) if named else None)
        self._terminal = not self._quiet and _is_terminal(self._stream)
        self._lock = threading.Lock()
        self._history: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._shown_at = time.monotonic()

    def advance(self, count: int = 0, *, files: int = 0, note: str | None = None) -> None:
        """Add `count` bytes (negative takes back what is fetched again) and `files` finished files."""
        with self._lock:
            self.done_bytes += count
            self.done_files += files
            if note is not None:
                self.note = note
            now = time.monotonic()
            every = _BAR_EVERY_S if self._terminal else _LINE_EVERY_S
            if now - self._shown_at < (min(every, 1.0) if self._snapshot else every):
                return
            self._shown_at, shown = now, self._shown_at
            self._sample(now)
            self._write_snapshot()
            if self._terminal or now - getattr(self, "_line_at", shown) >= _LINE_EVERY_S:
                self._line_at = now
                self._print(self.line())

    def begin_at(self, count: int, files: int) -> None:
        """Count what was done before this began: part of the whole, not of the rate."""
        with self._lock:
            self.done_bytes, self.done_files = count, files
            self._history = deque([(time.monotonic(), count)])

    def close(self) -> None:
        """Show the last state and end the line."""
        with self._lock:
            self._sample(time.monotonic())
            self._write_snapshot()
            self._print(self.line())
            if self._terminal:
                self._put("\n")

    def rate(self) -> float:
        """Bytes a second over the last minute."""
        (begun, first), (ended, last) = self._history[0], self._history[-1]
        return max(last - first, 0) / (ended - begun) if ended > begun else 0.0

    def snapshot(self) -> dict[str, Any]:
        """The figures as JSON: bytes, files, rate (bytes/s), eta_s (None while unknown)."""
        rate = self.rate()
        left = max(self.total_bytes - self.done_bytes, 0)
        return {
            "label": self.label,
            "bytes_done": self.done_bytes,
            "bytes_total": self.total_bytes,
            "files_done": self.done_files,
            "files_total": self.total_files,
            "rate": round(rate),
            "eta_s": round(left / rate) if rate else None,
            "note": self.note,
            "at": time.time(),
        }

    def line(self) -> str:
        return progress_line(self.snapshot())

    def _sample(self, now: float) -> None:
        self._history.append((now, self.done_bytes))
        while len(self._history) > 2 and now - self._history[0][0] > _WINDOW_S:
            self._history.popleft()

    def _write_snapshot(self) -> None:
        if self._snapshot is None:
            return
        try:
            if not self._snapshot.is_symlink():
                atomic.write_text(self._snapshot, json.dumps(self.snapshot()))
                return
        except (OSError, ValueError, Problem):
            pass  # no fault of the work
        self._snapshot = None  # nor tried again

    def _print(self, text: str) -> None:
        self._put(f"\r\033[K{text}" if self._terminal else f"{text}\n")

    def _put(self, text: str) -> None:
        if self._quiet:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._quiet = True


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError):
        return False


def progress_line(state: dict[str, Any]) -> str:
    """One line of progress from a snapshot: `fetch: 120.3 GB of 210.6 GB (57 %), 22/39 files, ...`."""
    total = state["bytes_total"]
    parts = (
        [f"{size(state['bytes_done'])} of {size(total)} ({100 * state['bytes_done'] // total} %)"]
        if total
        else []
    )
    if state["files_total"]:
        unit = "files" if total else "steps"
        parts.append(f"{state['files_done']}/{state['files_total']} {unit}")
    if state["rate"]:
        parts.append(f"{size(state['rate'])}/s")
    if state["eta_s"] and state["bytes_done"] < total:
        parts.append(f"{duration(state['eta_s'])} left")
    if state["note"]:
        parts.append(state["note"])
    return f"{state['label']}: {', '.join(parts)}" if parts else state["label"]
