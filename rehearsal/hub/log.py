"""Every request as one JSON line: what was asked, what left, and never a token."""

from __future__ import annotations

import json
import threading
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class RequestLog:
    """Requests in the order in which their answers ended, in memory and in a file of JSON lines."""

    def __init__(self, file: Path | None = None) -> None:
        self._entries: list[Entry] = []
        self._lock = threading.Lock()
        self._stream = file.open("a", buffering=1) if file else None

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
