"""Folders with an owner and a mode, many in one step."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .problem import Problem


@dataclass(frozen=True)
class Folder:
    """A folder as it must be; `mode` is octal text ("0755")."""

    path: Path
    owner: str
    mode: str


def describe(folder: Path) -> str:
    """`owner:group mode`, or `absent`."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return "absent"
    if not stat.S_ISDIR(found.st_mode):
        raise Problem(
            found=f"{folder} is no folder",
            needed="a folder of that name",
            do=f"look at it (ls -ld {folder}), move it away, run again",
            code="not-a-folder",
        )
    return f"{_user(found.st_uid)}:{_group(found.st_gid)} {stat.S_IMODE(found.st_mode):04o}"


def wanted(folder: Folder) -> str:
    return f"{folder.owner}:{folder.owner} {int(folder.mode, 8):04o}"


def ensure(folders: Sequence[Folder], *, dry: bool) -> tuple[list[str], list[str]]:
    """Make every folder as wanted, parents first. Returns the lines before and after of those that differ."""
    before, after = [], []
    for folder in sorted(folders, key=lambda entry: entry.path):
        now = describe(folder.path)
        if now == wanted(folder):
            continue
        before.append(f"{folder.path} {now}")
        after.append(f"{folder.path} {wanted(folder)}")
        if not dry:
            folder.path.mkdir(parents=True, exist_ok=True)
            owner = pwd.getpwnam(folder.owner)
            os.chown(folder.path, owner.pw_uid, grp.getgrnam(folder.owner).gr_gid)
            folder.path.chmod(int(folder.mode, 8))
    return before, after


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
