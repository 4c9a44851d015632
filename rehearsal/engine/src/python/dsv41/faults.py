"""Faults on purpose, so that the pair's supervision can be tried (see README.md for the list).

Each is an environment variable TF_REHEARSAL_<NAME>, or a line `name=value` in the control file that
TF_REHEARSAL_FAULTS names (default: `faults` under TF_REHEARSAL_ROOT). The file is read again when it changes, so a
fault can begin and end while the ranks serve; `rank0.name=value` and `rank1.name=value` mean one rank only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from .errors import EngineError

PREFIX = "TF_REHEARSAL_"
NAMES = {
    "load_s": "seconds that loading takes, with a line of progress each second",
    "load_silent": "1: no progress lines while loading",
    "fail_load": "an error name that loading ends with",
    "dead": "1: /v1/models answers, generation hangs",
    "repeat": "a character that every reply repeats",
    "token_s": "seconds that each piece of a reply takes",
    "ignore_term": "1: SIGTERM does nothing",
    "exit": "exit code to leave with, at once or after exit_after",
    "exit_after": "seconds from readiness to that exit",
    "forget_peer": "1: the rank closes its link to the other and lives on",
}


class Faults:
    """The faults that are switched on for one rank."""

    def __init__(self, rank: int, environ: dict[str, str] | None = None) -> None:
        self.rank = rank
        env = dict(os.environ if environ is None else environ)
        self._env = {
            k.removeprefix(PREFIX).lower(): v for k, v in env.items() if k.startswith(PREFIX) and v != ""
        }
        root = env.get("TF_REHEARSAL_ROOT")
        named = env.get("TF_REHEARSAL_FAULTS") or (f"{root}/faults" if root else None)
        self.file = Path(named) if named else None
        self._seen: tuple[int, int, int] | None = None
        self._lines: dict[str, str] = {}

    def _from_file(self) -> dict[str, str]:
        if self.file is None:
            return {}
        try:
            stat = self.file.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen != self._seen:
                text = self.file.read_text()
                self._seen, self._lines = seen, dict(_pairs(text))
        except OSError:
            self._seen, self._lines = None, {}
        return self._lines

    def get(self, name: str) -> str | None:
        """The fault's value; None where it is off. A file's line for this rank beats one for both."""
        lines = self._from_file()
        value = lines.get(f"rank{self.rank}.{name}", lines.get(name, self._env.get(name)))
        return None if value in {None, "", "0"} and name != "exit" else value

    def on(self, name: str) -> bool:
        return self.get(name) is not None

    def seconds(self, name: str) -> float:
        """The fault's value in seconds, 0 where it is off."""
        try:
            return float(self.get(name) or 0)
        except ValueError:
            raise EngineError("BadFault", f"{name}={self.get(name)} is not a number of seconds") from None

    @property
    def any_source(self) -> bool:
        return self.file is not None or bool(set(self._env) & set(NAMES))

    def loading(self, total: int) -> None:
        """Take as long as `load_s` says, `total` being the bytes that the progress counts."""
        began, wait = time.monotonic(), self.seconds("load_s")
        while (gone := time.monotonic() - began) < wait:
            if not self.on("load_silent"):
                done = int(total * gone / wait)
                print(
                    f"rank {self.rank}: loaded {done >> 20} of {total >> 20} MiB", file=sys.stderr, flush=True
                )
            time.sleep(min(1.0, wait - gone))
        if (name := self.get("fail_load")) is not None:
            raise EngineError(name, "a fault of the rehearsal")

    def watch(self, drop_peer: threading.Event) -> None:
        """From readiness on: leave with `exit`, and set `drop_peer` once `forget_peer` is on."""
        if self.any_source:
            threading.Thread(target=self._watch, args=(drop_peer,), daemon=True).start()

    def _watch(self, drop_peer: threading.Event) -> None:
        began = time.monotonic()
        while True:
            code = self.get("exit")
            if code is not None and time.monotonic() - began >= self.seconds("exit_after"):
                print(
                    f"rank {self.rank}: leaving with {code}, a fault of the rehearsal",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(int(code))
            if self.on("forget_peer"):
                drop_peer.set()
            if self.on("ignore_term") and self.rank > 0:
                signal_ignore()
            time.sleep(0.5)


def signal_ignore() -> None:
    """Let SIGTERM pass by. Only the main thread may say so in Python, so C says it."""
    import ctypes

    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for line in text.splitlines():
        name, sep, value = line.partition("=")
        if sep and not line.startswith("#"):
            pairs.append((name.strip(), value.strip()))
    return pairs
