"""API keys: from flags and from a file that only its owner may read."""

from __future__ import annotations

import hmac
import sys
from pathlib import Path

from .errors import EngineError


def parse(text: str) -> list[str]:
    """One key a line, optionally `label: key`; `#` begins a comment."""
    keys = []
    for raw in text.splitlines():
        line = raw.partition("#")[0].strip()
        label, sep, key = line.partition(": ")
        if line:
            keys.append(key.strip() if sep and label else line)
    return keys


class Keys:
    """The keys that open the API. The file is read again when it changes."""

    def __init__(self, given: list[str], file: Path | None) -> None:
        self._given = given
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._from_file: list[str] = []
        if file is not None:
            self._from_file = self._read(file)

    def _read(self, file: Path) -> list[str]:
        try:
            stat = file.stat()
            if stat.st_mode & 0o077:
                words = f"{file} has mode {stat.st_mode & 0o777:04o}; keys belong in a file of mode 0600"
                raise EngineError("KeyFileMode", words)
            keys = parse(file.read_text())
        except OSError as error:
            raise EngineError("NoKeyFile", f"{file}: {error.strerror}") from error
        if not keys:
            raise EngineError("EmptyKeyFile", f"{file} holds no key")
        self._seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return keys

    def refresh(self) -> None:
        """Read a changed file again; one that no longer holds leaves the old keys in force."""
        if self._file is None:
            return
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size, stat.st_ino) != self._seen:
                self._from_file = self._read(self._file)
        except (OSError, EngineError) as error:
            print(f"[tensorfold] the key file is not read again: {error}", file=sys.stderr, flush=True)

    @property
    def needed(self) -> bool:
        return bool(self._given or self._file)

    def open_to(self, key: str | None) -> bool:
        """Whether `key` opens the API; anything does where no keys are set."""
        if not self.needed:
            return True
        self.refresh()
        return any(
            hmac.compare_digest((key or "").encode(), k.encode()) for k in self._given + self._from_file
        )
