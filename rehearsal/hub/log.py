"""Every request as one JSON line: what was asked, what left, and never a token."""

from __future__ import annotations

import json
import threading
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
_SETTLE_S = 2.0


class RequestLog:
    """Requests in memory and, as they end, in a file of JSON lines.

    `seq` (from 1) counts the answers as they ended, `order` the requests as they came. A client has the last
    byte before the hub knows that it left. So reading waits a moment for the answers that are under way, else
    the newest request would be missing now and then.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._entries: list[Entry] = []
        self._lock = threading.Lock()
        self._under_way: set[int] = set()
        self._begun = 0
        self._ended = threading.Condition(self._lock)
        self._stream = file.open("a", buffering=1) if file else None

    def begin(self) -> int:
        """The request's place in the order of arrival; its answer is under way until `let_go`."""
        with self._lock:
            self._begun += 1
            self._under_way.add(self._begun)
            return self._begun

    def let_go(self, order: int) -> None:
        """Don't wait for this answer: it has ended, or it was told to take its time."""
        with self._lock:
            self._under_way.discard(order)
            self._ended.notify_all()

    def add(self, **fields: Any) -> None:
        """Record a request whose answer ended, under the next `seq`."""
        with self._lock:
            entry = {"seq": len(self._entries) + 1, "time": round(time.time(), 3), **fields}
            self._entries.append(entry)
            if self._stream:
                self._stream.write(json.dumps(entry) + "\n")

    def entries(
        self,
        *,
        since: int = 0,
        repo: str | None = None,
        file: str | None = None,
        method: str | None = None,
        status: int | None = None,
    ) -> list[Entry]:
        """The requests that fit, as they came: `since` leaves out the first so many by `seq`.

        Args:
            file: a glob over the path in the repository.
        """
        with self._lock:
            now_under_way = set(self._under_way)
            self._ended.wait_for(lambda: not (now_under_way & self._under_way), _SETTLE_S)
            seen = sorted(self._entries[since:], key=lambda entry: int(entry["order"]))
        return [
            entry
            for entry in seen
            if (repo is None or entry["repo"] == repo)
            and (file is None or (entry["file"] is not None and fnmatchcase(entry["file"], file)))
            and (method is None or entry["method"] == method)
            and (status is None or entry["status"] == status)
        ]

    def close(self) -> None:
        with self._lock:
            if self._stream:
                self._stream.close()
                self._stream = None
