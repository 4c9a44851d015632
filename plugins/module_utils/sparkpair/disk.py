"""Room on a filesystem, asked before the first byte is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .console import size
from .problem import Problem


def nearest_existing(path: Path) -> Path:
    """The path itself or the first of its parents that exists: the filesystem it will be on."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user may still write below `path` (which need not exist yet)."""
    found = os.statvfs(nearest_existing(path))
    return found.f_bavail * found.f_frsize


def is_out_of_inodes(path: Path) -> bool:
    """Whether the filesystem counts its files and has none left."""
    found = os.statvfs(nearest_existing(path))
    return found.f_files > 0 and found.f_favail == 0


def require_room(path: Path, needed: int, what: str) -> None:
    """Raise Problem (needed, free, where) unless `needed` bytes fit below `path`."""
    free = free_bytes(path)
    if free < needed:
        raise Problem(
            found=f"{size(free)} ({free} bytes) free on the filesystem of {nearest_existing(path)}",
            needed=f"{size(needed)} ({needed} bytes) for {what} in {path}",
            do=f"free {size(needed - free)} there (df -h {nearest_existing(path)}), then run the same again",
            code="disk-full",
        )


@dataclass(frozen=True)
class Need:
    """Bytes that will be written below `path`, and what for ("the checkpoint")."""

    path: Path
    bytes: int
    what: str


def tree_bytes(folder: Path) -> int:
    """Bytes of the files below `folder` by their own sizes; 0 where there is no such folder."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(directory) / name).lstat().st_size
    return total


def by_filesystem(needs: Iterable[Need]) -> dict[Path, list[Need]]:
    """The needs of each filesystem, under the mount point that holds them: those that share one add up."""
    found: dict[Path, list[Need]] = {}
    for need in needs:
        found.setdefault(mount_point(need.path), []).append(need)
    return found


def mount_point(path: Path) -> Path:
    """Where the filesystem that will hold `path` is mounted, links resolved."""
    place = nearest_existing(path).resolve()
    while not place.is_mount() and place != place.parent:
        place = place.parent
    return place


def require_all(needs: Iterable[Need], margin: int = 0) -> list[dict[str, Any]]:
    """Check that each real filesystem holds all that is to come, and `margin` bytes beyond.

    Returns one row a filesystem: {"mount", "needed", "free" (bytes), "what"}. Raises Problem with the
    code disk-full that names every filesystem which is too small. A filesystem where nothing is to be
    written is not asked for its margin.
    """
    rows: list[dict[str, Any]] = []
    short: list[dict[str, Any]] = []
    for mount, wanted in by_filesystem(need for need in needs if need.bytes > 0).items():
        total, free = sum(need.bytes for need in wanted) + margin, free_bytes(mount)
        parts = [f"{need.what} {size(need.bytes)}" for need in wanted]
        parts += [f"left free {size(margin)}"] if margin else []
        rows.append({"mount": str(mount), "needed": total, "free": free, "what": ", ".join(parts)})
        if free < total:
            short.append(rows[-1])
    if short:
        raise Problem(
            found="; ".join(
                f"{size(row['free'])} ({row['free']} bytes) free on {row['mount']}" for row in short
            ),
            needed="; ".join(
                f"{size(row['needed'])} ({row['needed']} bytes) on {row['mount']}: {row['what']}"
                for row in short
            ),
            do="; ".join(f"free {size(row['needed'] - row['free'])} on {row['mount']}" for row in short)
            + " (sudo du -xh -d2 MOUNT shows what takes the room), then run the same again",
            code="disk-full",
        )
    return rows
