"""A rank's last run as a file, with bounds: what is left when the journal has moved on (field report 34)."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from . import atomic, paths, systemd

_MOST_LINES = 50_000


def save(name: str, run: str, keep: int, folder: Path = paths.LOGS) -> Path | None:
    """Write the journal of one run of the unit to `folder`, and keep the newest `keep` of that name.

    `run` is the run's invocation id, which systemd gives to the unit's own programs.

    Returns the file; None where there was nothing to save or it could not be written. Only a convenience:
    the journal has it too, so nothing stops for its sake.
    """
    lines = systemd.journal_of(run, _MOST_LINES) if run else []
    if not lines:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = folder / f"{name}-{stamp}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, "\n".join(lines) + "\n", 0o640)
        for old in sorted(folder.glob(f"{name}-*.log"))[:-keep]:
            old.unlink()
    except (OSError, subprocess.SubprocessError):
        return None
    return path
