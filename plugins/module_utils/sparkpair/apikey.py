"""The API's key file: one key, mode 0600, made once. The engine refuses to start with any other mode."""

from __future__ import annotations

import hashlib
import secrets
import stat
from pathlib import Path

from . import api, atomic

AUTO, NONE = "auto", "none"
_MODE = 0o600
_OWNER = 0


def keep(path: Path, wish: str, *, dry: bool) -> tuple[bool, str]:
    """Make the key file as wished. Returns (changed, digest of the key; "" without one).

    `auto` keeps a key that is there; where one would be made, a dry run gives the digest "pending".
    """
    if wish == NONE:
        existed = path.exists()
        if existed and not dry:
            path.unlink()
        return existed, ""
    sound = path.is_file() and stat.S_IMODE(path.stat().st_mode) == _MODE and path.stat().st_uid == _OWNER
    old = api.first_key(path) if path.is_file() and path.read_text().strip() else ""
    if wish == AUTO:
        if not old and dry:
            return True, "pending"
        key = old or f"sk-{secrets.token_urlsafe(24)}"
    else:
        key = wish
    changed = key != old or not sound
    if changed and not dry:
        atomic.write_text(path, f"{key}\n", _MODE)
    return changed, hashlib.sha256(f"sparkpair:{key}".encode()).hexdigest()[:8]
