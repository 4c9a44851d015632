"""A lock file and the Hub: written on first use, kept from then on, refreshed only when told to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import atomic, hub, locks
from .console import size
from .locks import Lock
from .problem import Problem


@dataclass(frozen=True)
class Pinned:
    """What `pin` found and did.

    Args:
        path: the lock file.
        lock: what holds from now on (in a dry run: what would hold).
        lines: how the Hub differs from the file as it was, for a person; empty where it was not asked.
        changed: whether the file was written (in a dry run: would be).
        before, after: its text before and now, for a diff; "" before where there was no file.
    """

    path: Path
    lock: Lock
    lines: tuple[str, ...]
    changed: bool
    before: str
    after: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "changed": self.changed,
            "path": str(self.path),
            "repo": self.lock.repo,
            "revision": self.lock.revision,
            "files": len(self.lock.files),
            "bytes": self.lock.total_bytes,
            "difference": list(self.lines),
            "message": self.message,
        }

    @property
    def message(self) -> str:
        """The lock in one line."""
        lock, count = self.lock, len(self.lock.files)
        return f"{lock.repo} @ {lock.revision}: {count} file{'s' * (count != 1)}, {size(lock.total_bytes)}"


def pin(
    path: Path,
    repo: str,
    revision: str,
    *,
    include: Iterable[str] = (),
    refresh: bool = False,
    look: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
) -> Pinned:
    """The lock at `path`; where it is missing, or `refresh` is said, as the Hub has it now.

    An existing lock is trusted without asking the Hub, unless `look` (compare and say) or `refresh`
    (compare and write). Raises Problem as `hub.resolve` does, and for a bad lock file unless `refresh`
    replaces it.
    """
    old, fault = _old(path, refresh=refresh)
    before = path.read_text(encoding="utf-8", errors="replace") if old or fault else ""
    if old and not (refresh or look):
        return Pinned(path, old, (), False, before, before)
    new = hub.resolve(repo, revision, include=include, token=token, endpoint=endpoint)
    unread = [f"unread   the old lock, so what differs is unknown ({fault.found})"] if fault else []
    lines = (*unread, *locks.describe_difference(old, new))
    if old and not (refresh and lines):
        return Pinned(path, old, lines, False, before, before)
    return _written(path, new, lines, before, dry_run=dry_run)


def _old(path: Path, *, refresh: bool) -> tuple[Lock | None, Problem | None]:
    """The lock that stands at `path`, or why a refresh can't compare with it."""
    if not path.exists():
        return None, None
    try:
        return locks.load(path), None
    except Problem as problem:
        if not refresh:
            raise
        return None, problem


def place(path: Path, lock: Lock, *, dry_run: bool = False) -> Pinned:
    """Make `path` hold `lock`, whatever was there: a node's copy of the controller's lock."""
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if before == locks.dump(lock):
        return Pinned(path, lock, (), False, before, before)
    return _written(path, lock, (), before, dry_run=dry_run)


def _written(path: Path, lock: Lock, lines: tuple[str, ...], before: str, *, dry_run: bool) -> Pinned:
    after = locks.dump(lock)
    if not dry_run:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, after)
    return Pinned(path, lock, lines, True, before, after)
