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
    """Requests in the order in which their answers ended, in memory and in a file of JSON lines.

    A client has the last byte before the hub knows that it left. So reading waits a moment for the answers
    that are under way, else the newest request would be missing now and then.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._entries: list[Entry] = []
        self._lock = threading.Lock()
        self._under_way: set[object] = set()
        self._ended = threading.Condition(self._lock)
        self._stream = file.open("a", buffering=1) if file else None

    def begin(self) -> object:
        """An answer is under way until `let_go`."""
        answer = object()
        with self._lock:
            self._under_way.add(answer)
        return answer

    def let_go(self, answer: object) -> None:
        """Don't wait for this answer: it has ended, or it is ordered to take its time."""
        with self._lock:
            self._under_way.discard(answer)
            self._ended.notify_all()

    def add(self, **fields: Any) -> None:
        """Record a request under the next `seq` (from 1)."""
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
        """The requests after `since` that fit; `file` is a glob over the path in the repository."""
        with self._lock:
            now_under_way = set(self._under_way)
            self._ended.wait_for(lambda: not (now_under_way & self._under_way), _SETTLE_S)
            seen = self._entries[since:]
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
