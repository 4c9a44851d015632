"""The bytes of a file on the wire: a span of it, whole or with an ordered fault."""

from __future__ import annotations

import array
import fcntl
import re
import select
import socket
import termios
import threading
import time
from pathlib import Path
from typing import BinaryIO

from .access import Refusal
from .modes import Rule

_STALL_AFTER = 1 << 20
_SINGLE_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def requested_span(header: str | None, size: int) -> range | None:
    """The bytes that a Range header asks for; None is the whole file.

    Several ranges, or a header that is none, count as no range (RFC 9110 allows it). Refusal 416 where the
    range begins at or past the end.
    """
    match = _SINGLE_RANGE.fullmatch(header.strip()) if header else None
    if not match or match[1] == match[2] == "":
        return None
    if match[1] == "":
        start, stop = max(size - int(match[2]), 0), size
    else:
        start = int(match[1])
        stop = min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= size or start >= stop:
        raise Refusal(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return range(start, stop)


class Body:
    """Sends one span of a file. `sent` counts the bytes that left, also when the other end hangs up."""

    def __init__(self, connection: socket.socket, closing: threading.Event) -> None:
        self._connection = connection
        self._closing = closing
        self.sent = 0

    def send(self, path: Path, span: range, rule: Rule | None) -> bool:
        """Send the span; False where the connection must end after it, as the answer was cut short."""
        if not span:
            return True
        with path.open("rb") as handle:
            try:
                return self._fault(handle, span, rule)
            except OSError:
                self.sent = max(self.sent - self._unsent(), 0)
                return False

    def _fault(self, handle: BinaryIO, span: range, rule: Rule | None) -> bool:
        start, stop = span.start, span.stop
        if rule is None:
            self._plain(handle, start, stop)
            return True
        if rule.mode == "flip":
            at = rule.flipped(handle.seek(0, 2))
            self._plain(handle, start, at)
            handle.seek(at)
            self._write(bytes([handle.read(1)[0] ^ 0xFF]))
            self._plain(handle, at + 1, stop)
            return True
        if rule.mode == "slow":
            self._slowly(handle, start, stop, rule)
            return True
        if rule.mode == "short":
            self._plain(handle, start, start + len(span) // 2)
            return False
        after = min(_STALL_AFTER, len(span) // 2) if rule.after is None else min(rule.after, len(span))
        self._plain(handle, start, start + after)
        self._hang(rule.taken_back)
        return False

    def _plain(self, handle: BinaryIO, start: int, stop: int) -> None:
        if stop <= start:
            return
        try:
            self.sent += self._connection.sendfile(handle, start, stop - start)
        except OSError:
            self.sent += max(handle.tell() - start, 0)  # sendfile leaves the position where it got to
            raise

    def _write(self, data: bytes) -> None:
        self._connection.sendall(data)
        self.sent += len(data)

    def _slowly(self, handle: BinaryIO, start: int, stop: int, rule: Rule) -> None:
        """At most `rate` bytes a second, in pieces of a twentieth of a second; full speed once taken back."""
        begun, at = time.monotonic(), start
        while at < stop:
            if rule.taken_back.is_set():
                return self._plain(handle, at, stop)
            piece = min(stop - at, max(rule.rate // 20, 1))
            self._plain(handle, at, at + piece)
            at += piece
            due = begun + (at - start) / rule.rate
            while (wait := due - time.monotonic()) > 0 and not rule.taken_back.is_set():
                if self._closing.wait(min(wait, 0.05)):
                    raise ConnectionAbortedError
        return None

    def _hang(self, released: threading.Event) -> None:
        """Send nothing and keep the line open until released, or the other end or the hub hangs up."""
        while not released.is_set() and not self._closing.is_set():
            readable, _, _ = select.select([self._connection], [], [], 0.05)
            if readable and not self._connection.recv(1, socket.MSG_PEEK):
                return

    def _unsent(self) -> int:
        """Bytes that the kernel took from us and could not hand on."""
        count = array.array("i", [0])
        try:
            fcntl.ioctl(self._connection, termios.TIOCOUTQ, count)
        except OSError:
            return 0
        return count[0]
