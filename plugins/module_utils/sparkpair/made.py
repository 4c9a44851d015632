"""Notes of what was made from what: made files are recognised by a stat, never read again for that.

`.sparkpair-made-<what>.json` lies beside the files and tells the fingerprint of their inputs, their sizes and
hashes; whether a file still is the one that was made, its receipt tells (see `receipts`), and of a small one
its bytes too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import atomic
from .locks import OWN_PREFIX, LockedFile
from .receipts import Receipts

# Two writes within one tick of the kernel's clock can leave the same mtime.
_CLOCK_TICK_NS = 20_000_000
# Below this a file is read again at each look.
SMALL = 2**20


def note_path(directory: Path, what: str) -> Path:
    """Where the note about `what` is kept in `directory`."""
    return directory / f"{OWN_PREFIX}-made-{what}.json"


def fingerprint(inputs: Mapping[str, Any]) -> str:
    """One short name (sha256, hex) for all inputs: JSON values, in any order of keys."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def identity(path: Path) -> dict[str, int]:
    """An input too big to be read again, by its stat: size (bytes), mtime_ns, inode."""
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def record(directory: Path, what: str, made_from: str, hashes: Mapping[str, str]) -> None:
    """Vouch for files (relative path -> sha256) as they stand in `directory` now."""
    receipts = Receipts.open(directory)
    files = {}
    for name, sha256 in sorted(hashes.items()):
        found = (directory / name).stat(follow_symlinks=False)
        while 0 <= time.time_ns() - found.st_mtime_ns < _CLOCK_TICK_NS:
            time.sleep(_CLOCK_TICK_NS / 1e9)
            found = (directory / name).stat(follow_symlinks=False)
        files[name] = {"size": found.st_size, "sha256": sha256}
        receipts.record(LockedFile(name, found.st_size, sha256), found)
    receipts.save()
    note = {"version": 1, "made_from": made_from, "files": files}
    atomic.write_text(note_path(directory, what), json.dumps(note, indent=1) + "\n")


def vouched(directory: Path, what: str, made_from: str | None = None) -> dict[str, str] | None:
    """Relative path -> sha256 of what was made, when no file changed since; else None.

    None too when the inputs were others than `made_from`, or when the note can't be read.
    """
    try:
        note = json.loads(note_path(directory, what).read_bytes())
        files = [LockedFile(name, row["size"], row["sha256"]) for name, row in sorted(note["files"].items())]
        if made_from is not None and note["made_from"] != made_from:
            return None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    receipts = Receipts.open(directory)
    if not files or not all(receipts.holds(entry) and _same_bytes(directory, entry) for entry in files):
        return None
    return {entry.path: entry.digest for entry in files}


def _same_bytes(directory: Path, entry: LockedFile) -> bool:
    if entry.size >= SMALL:
        return True
    return hashlib.sha256((directory / entry.path).read_bytes()).hexdigest() == entry.digest
