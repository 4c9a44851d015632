"""The kernel kit: a pinned commit laid out as plain files, the generated ones put in, MANIFEST held to.

Five of its files are not in git but made from the checkpoint (`fixtures/<profile>`): they come in as hard
links, so that 570 MB are neither copied nor hashed again. What was laid out is written down as a lock,
by which it is looked at later, shared with the worker and checked at each start.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import atomic, gitsource, hashing, locks, made, rope, sealed
from .locks import Lock, LockedFile, listed
from .problem import Problem
from .receipts import Receipts

MANIFEST = "MANIFEST"
BIAS = "vision/gate_bias_vl.safetensors"
# Names of the notes in a fixtures folder -> the files of the kit that they vouch for there.
_BIAS_FILE = "gate_bias_vl.safetensors"
# Path in the kit -> name in the fixtures folder.
GENERATED = {**{name: name for name in rope.TABLES}, BIAS: _BIAS_FILE}

_LINE = re.compile(r"([0-9a-f]{64})  (\S(?:.*\S)?)")
_LARGEST_MANIFEST = 2**20
_REMAKE = "ansible-playbook site.yml --tags fixtures lays the kit out anew"


@dataclass(frozen=True)
class Order:
    """What is to be laid out where.

    Args:
        folder: the served folder; its neighbours `.<name>.*` are ours too.
        repository, commit, branch: the source; the commit full or abbreviated, the branch may be empty.
        subfolder: where in the repository the kit is; a repository that is nothing but the kit needs none.
        fixtures: folder with the generated files and their notes.
        unrecorded: paths whose line in MANIFEST was recorded for another checkpoint and does not count.
        lock_file: where the lock of the laid-out folder is written.
    """

    folder: Path
    repository: str
    commit: str
    branch: str
    subfolder: str
    fixtures: Path
    unrecorded: frozenset[str]
    lock_file: Path


def parse_manifest(text: str, source: str) -> dict[str, str]:
    """MANIFEST (sha256sum form, sorted by path) as path -> sha256. Raises Problem naming the bad line."""
    files: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parsed = _LINE.fullmatch(line)
        if not parsed:
            raise _bad_manifest(source, number, f"is {line!r:.100}", "64 hex digits, two spaces, a path")
        sha256, path = parsed.groups()
        fault = locks.path_fault(path)
        if fault or path == MANIFEST:
            raise _bad_manifest(
                source, number, f"{path!r:.100} {fault or 'is the list itself'}", "a file's path"
            )
        if files and path <= next(reversed(files)):
            raise _bad_manifest(
                source, number, f"{path} comes after {next(reversed(files))}", "each path once, sorted"
            )
        files[path] = sha256
    if not files:
        raise _bad_manifest(source, 1, "lists nothing", "a line for each file of the kit")
    return files


def read_manifest(folder: Path) -> dict[str, str]:
    """The MANIFEST of a kit folder. Raises Problem when there is none or it is not one."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise _bad_manifest(str(path), 1, "belongs to a file of over 1 MiB", "a list of files")
        return parse_manifest(path.read_text(encoding="utf-8"), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise Problem(
            found=f"no {path}",
            needed="a kernel kit: a folder with its MANIFEST",
            do=_REMAKE,
            code="kit-missing",
        ) from None
    except UnicodeDecodeError:
        raise _bad_manifest(str(path), 1, "is not UTF-8", "text") from None


def _bad_manifest(source: str, line: int, found: str, needed: str) -> Problem:
    return Problem(
        found=f"{source} line {line} {found}",
        needed=needed,
        do="correct kit_commit: this is not the kit that was pinned",
        code="manifest-bad",
    )


def generated_hashes(fixtures: Path) -> dict[str, str] | None:
    """Path in the kit -> sha256 of each generated file, by the notes beside them; None while one is not made."""
    notes = {**(made.vouched(fixtures, "rope") or {}), **(made.vouched(fixtures, _BIAS_FILE) or {})}
    if not set(GENERATED.values()) <= notes.keys():
        return None
    return {path: notes[name] for path, name in GENERATED.items()}


def pending(order: Order) -> list[str]:
    """Why the kit must be laid out anew, in words; empty when it stands. Stats and small reads only."""
    try:
        lock = locks.load(order.lock_file)
    except Problem:
        return [f"{order.folder} was not laid out yet"]
    if not lock.revision.startswith(order.commit):
        return [f"{order.folder} is commit {lock.revision[:12]}, pinned is {order.commit[:12]}"]
    hashes = generated_hashes(order.fixtures)
    if hashes is None:
        return [f"a generated file in {order.fixtures} is not made yet"]
    entries = lock.by_path
    other = [path for path, sha256 in hashes.items() if path not in entries or entries[path].digest != sha256]
    return [f"{path} is that of another checkpoint" for path in other] + [
        str(finding) for finding in sealed.findings(lock, order.folder)
    ]


def renewed(order: Order) -> bool:
    """Whether laying out will give another kit than the one that stands (or stood), not just repair it."""
    try:
        lock = locks.load(order.lock_file)
    except Problem:
        return True
    hashes, entries = generated_hashes(order.fixtures), lock.by_path
    same = hashes and all(path in entries and entries[path].digest == hashes[path] for path in hashes)
    return not same or not lock.revision.startswith(order.commit)


def lay_out(order: Order) -> Lock:
    """Fetch the commit, check everything, and put the new folder in the old one's place. Returns its lock.

    Nothing takes the kit's name before every line of MANIFEST holds; containers that run keep the folder
    they were started with.
    """
    hashes = generated_hashes(order.fixtures)
    if hashes is None:
        raise Problem(
            found=f"{order.fixtures} lacks a RoPE table or the routing bias, or one was changed",
            needed="the generated files, made and vouched for",
            do="ansible-playbook site.yml --tags fixtures makes them first",
            code="kit-generated",
        )
    order.folder.parent.mkdir(parents=True, exist_ok=True)
    store = _neighbour(order.folder, "git")
    source = gitsource.obtain(order.repository, order.commit, order.branch, store)
    exported, fresh = _neighbour(order.folder, "exported"), _neighbour(order.folder, "new")
    for leftover in (exported, fresh):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        gitsource.export(source, exported)
        inside = next(
            (place for place in (exported / order.subfolder, exported) if (place / MANIFEST).is_file()), None
        )
        if inside is None:
            raise Problem(
                found=f"commit {source.commit[:12]} of the kit has no {MANIFEST}, at its top or in {order.subfolder}",
                needed="the folder that holds MANIFEST",
                do="correct fixtures_kit_subfolder or kit_commit",
                code="kit-missing",
            )
        inside.rename(fresh)
        manifest = read_manifest(fresh)
        _put_in_generated(fresh, order.fixtures, manifest)
        lock = _seal(order, fresh, manifest, hashes, source.commit)
        _swap(fresh, order.folder)
    finally:
        for leftover in (exported, fresh):
            shutil.rmtree(leftover, ignore_errors=True)
    return lock


def _neighbour(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def _put_in_generated(fresh: Path, fixtures: Path, manifest: Mapping[str, str]) -> None:
    for path, name in GENERATED.items():
        if path not in manifest:
            raise _bad_manifest(str(fresh / MANIFEST), len(manifest), f"and no other lists {path}", path)
        target = fresh / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(fixtures / name)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                raise
            shutil.copy2(fixtures / name, target)


def _seal(
    order: Order, fresh: Path, manifest: Mapping[str, str], hashes: Mapping[str, str], commit: str
) -> Lock:
    """Check each line of MANIFEST, vouch for each file by a receipt, write the lock."""
    receipts = Receipts.open(fresh)
    files: dict[str, tuple[int, str]] = {}
    wrong = [f"{path} (missing)" for path in manifest if not (fresh / path).is_file()]
    for path in sorted(sealed.files_below(fresh)):
        if (fresh / path).is_symlink():
            raise Problem(
                found=f"{path} of the kit is a link to {(fresh / path).readlink()}",
                needed="plain files: a link does not reach into a container",
                do="correct kit_commit",
                code="kit-link",
            )
        found = (fresh / path).stat()
        sha256 = hashes.get(path) or hashing.digest_file(fresh / path).hex
        counts = path in manifest and path not in order.unrecorded
        if counts and manifest[path] != sha256:
            wrong.append(f"{path} ({sha256[:16]} instead of {manifest[path][:16]})")
        files[path] = (found.st_size, sha256)
        receipts.record(LockedFile(path, found.st_size, sha256), found)
    if wrong:
        raise Problem(
            found=f"commit {commit[:12]} of the kit: {listed(wrong)} not as its MANIFEST says",
            needed=f"all {len(manifest)} lines of MANIFEST, generated files included",
            do="correct kit_commit, or the profile that the generated files were made for",
            code="kit-mismatch",
        )
    receipts.save()
    return sealed.write_lock(order.lock_file, "kit", commit, files)


def _swap(fresh: Path, folder: Path) -> None:
    old = _neighbour(folder, "old")
    shutil.rmtree(old, ignore_errors=True)
    if os.path.lexists(folder):
        folder.rename(old)
    fresh.rename(folder)
    atomic.fsync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def check(
    folder: Path, *, lock: Lock | None = None, unrecorded: Iterable[str] = (), full: bool = False
) -> dict[str, Any]:
    """Hold a kit folder to its MANIFEST and, where there is one, to its lock. Raises Problem with what differs.

    Without `full`, a file of over 1 MiB whose receipt holds is not read again. Files that neither MANIFEST
    nor the lock names are named too. Returns counts: {"files", "read_bytes"}.
    """
    manifest = read_manifest(folder)
    entries = lock.by_path if lock else {}
    receipts = Receipts.open(folder)
    exempt = set(unrecorded)
    wrong, read = [], 0
    for path, recorded in manifest.items():
        wanted = entries[path].digest if path in exempt and path in entries else recorded
        try:
            there = (folder / path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            wrong.append(f"{path} (missing)")
            continue
        if path in exempt and path not in entries:
            continue
        entry = LockedFile(path, there.st_size, wanted)
        if there.st_size >= made.SMALL and not full and receipts.holds(entry):
            continue
        try:
            digest = hashing.digest_file(folder / path)
        except Problem:
            wrong.append(f"{path} (no plain file)")
            continue
        read += there.st_size
        if digest.hex != wanted:
            wrong.append(f"{path} ({digest.hex[:16]} instead of {wanted[:16]})")
    known = {MANIFEST, *manifest, *entries}
    wrong += [f"{path} (not in {MANIFEST})" for path in sealed.files_below(folder) if path not in known]
    if wrong:
        raise Problem(
            found=f"{folder}: {listed(sorted(wrong), 10)}",
            needed=f"the {len(manifest)} files of {MANIFEST}, byte for byte, and no others",
            do=_REMAKE,
            code="kit-mismatch",
        )
    return {"files": len(manifest), "read_bytes": read}
