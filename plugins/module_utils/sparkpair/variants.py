"""Whether a checkpoint with its overlay stands: told by stats, locks and receipts, so a dry run can ask."""

from __future__ import annotations

from pathlib import Path

from . import locks, overlay, staging
from .locks import Lock
from .problem import Problem


def stands(lock: Lock, overlay_lock: Lock, overlay_name: str, out: Path) -> bool:
    """Whether `out` holds what `overlay.lay` makes of these two, whole by its receipts.

    Reads no big file and changes nothing; a folder that isn't there, or is of other inputs, stands not.
    """
    try:
        found = locks.load(out / overlay.LOCK_NAME)
    except Problem:
        return False
    laid = found.by_path
    top = overlay_lock.by_path.get(overlay_name)
    if top is None or overlay.NAME not in laid or laid[overlay.NAME].digest != top.digest:
        return False
    below = {entry.path: entry for entry in lock.files if not entry.path.endswith(".safetensors.index.json")}
    return (
        all(laid.get(path) == entry for path, entry in below.items()) and staging.survey(found, out).complete
    )
