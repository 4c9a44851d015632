"""Repositories on disk: `ROOT/<org>/<name>/{repo.json, files/, trees/<commit>/, hashes.json}`.

`repo.json` holds the commits, newest first. The oldest commit's files are `files/`; each later commit adds
or replaces those in its `trees/<commit>/` and drops the paths under its "absent".
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from .access import no_entry, no_repo, no_revision

LFS_OVER = 10_000_000
LFS_NAMES = ("*.safetensors", "*.pdf", "*.bin")
DATE = "2026-10-17T08:00:00.000Z"
_CHUNK = 1 << 20


def lfs_pointer(sha256: str, size: int) -> bytes:
    """The text that git holds in place of an LFS file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def git_blob_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _hash_file(path: Path, size: int) -> tuple[str, str]:
    """(sha256, git blob sha1) of a file in one pass."""
    sha256 = hashlib.sha256()
    blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            sha256.update(chunk)
            if size <= LFS_OVER:
                blob.update(chunk)
    return sha256.hexdigest(), blob.hexdigest()


class Hashes:
    """The hashes of a repository's files, computed once and kept beside them by size and mtime."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = directory / "hashes.json"
        self._lock = threading.Lock()
        self._known: dict[str, list[Any]] = json.loads(self._file.read_text()) if self._file.is_file() else {}

    def of(self, path: Path) -> tuple[str, str]:
        """(sha256, git blob sha1); the second is of no use for an LFS file."""
        name = path.relative_to(self._directory).as_posix()
        stat = path.stat()
        with self._lock:
            known = self._known.get(name)
            if known and known[:2] == [stat.st_size, stat.st_mtime_ns]:
                return known[2], known[3]
            found = _hash_file(path, stat.st_size)
            self._known[name] = [stat.st_size, stat.st_mtime_ns, *found]
            self._write()
            return found

    def record(self, path: Path, sha256: str, blob: str) -> None:
        """Keep hashes that the writer of the file has at hand; `save` puts them on disk."""
        stat = path.stat()
        with self._lock:
            name = path.relative_to(self._directory).as_posix()
            self._known[name] = [stat.st_size, stat.st_mtime_ns, sha256, blob]

    def save(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._known, indent=0, sort_keys=True))
        partial.replace(self._file)


@dataclass(frozen=True)
class Entry:
    """One file of a commit."""

    path: str
    disk: Path
    size: int
    commit: str  # the commit that last changed it
    is_lfs: bool
    hashes: Hashes

    @cached_property
    def sha256(self) -> str:
        return self.hashes.of(self.disk)[0]

    @cached_property
    def blob(self) -> str:
        """The git blob id: of the pointer for an LFS file."""
        if self.is_lfs:
            return git_blob_sha1(lfs_pointer(self.sha256, self.size))
        return self.hashes.of(self.disk)[1]

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.blob

    @property
    def pointer_size(self) -> int:
        return len(lfs_pointer(self.sha256, self.size))


class Repo:
    """A repository as its `repo.json` said when it was opened."""

    def __init__(self, directory: Path, meta: dict[str, Any], hashes: Hashes) -> None:
        self.directory = directory
        self.meta = meta
        self.hashes = hashes
        self.id: str = meta["id"]
        self.commits: list[dict[str, Any]] = meta["commits"]
        self.branches: dict[str, str] = meta["branches"]
        self.tags: dict[str, str] = meta.get("tags", {})

    def resolve(self, revision: str) -> str:
        """The commit of a branch, a tag or a full hash. As at the Hub, an abbreviated hash is unknown."""
        named = self.branches | self.tags
        commit = named.get(revision, revision)
        if commit not in (each["id"] for each in self.commits):
            raise no_revision(revision)
        return commit

    def history(self, commit: str) -> list[dict[str, Any]]:
        """The commits from this one back to the first."""
        return self.commits[[each["id"] for each in self.commits].index(commit) :]

    def entries(self, commit: str) -> dict[str, Entry]:
        """The files of a commit, by path, sorted."""
        found: dict[str, tuple[Path, str]] = {}
        for each in reversed(self.history(commit)):
            first = each is self.commits[-1]
            tree = self.directory / ("files" if first else f"trees/{each['id']}")
            for disk in _files_under(tree):
                found[disk.relative_to(tree).as_posix()] = (disk, each["id"])
            for path in each.get("absent", []):
                found.pop(path, None)
        return {path: self._entry(path, *found[path]) for path in sorted(found)}

    def entry(self, commit: str, path: str) -> Entry:
        entries = self.entries(commit)
        if path not in entries:
            raise no_entry()
        return entries[path]

    def _entry(self, path: str, disk: Path, commit: str) -> Entry:
        size = disk.stat().st_size
        names = (*LFS_NAMES, *self.meta.get("lfs", []))
        is_lfs = size > LFS_OVER or any(fnmatchcase(path, name) for name in names)
        return Entry(path, disk, size, commit, is_lfs, self.hashes)


def _files_under(tree: Path) -> Iterable[Path]:
    for directory, _, names in os.walk(tree):
        for name in names:
            yield Path(directory, name)


class Store:
    """All repositories under a root; a changed `repo.json` is read again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[str, tuple[int, Repo]] = {}
        self._lock = threading.Lock()

    def repo(self, name: str) -> Repo:
        """The repository `org/name`; Refusal where there is none."""
        parts = name.split("/")
        if len(parts) != 2 or any(part in {"", ".", ".."} for part in parts):
            raise no_repo()
        directory = self.root.joinpath(*parts)
        with self._lock:
            try:
                changed = (directory / "repo.json").stat().st_mtime_ns
            except OSError:
                raise no_repo() from None
            at, repo = self._open.get(name, (0, None))
            if repo is None or at != changed:
                meta = json.loads((directory / "repo.json").read_text())
                repo = Repo(directory, meta, Hashes(directory))
                self._open[name] = (changed, repo)
            return repo


def make_repo(
    root: Path,
    repo: str,
    files: Mapping[str, bytes],
    *,
    revision: str | None = None,
    gated: str | bool = False,
    private: bool = False,
    title: str = "Initial commit",
    lfs: Iterable[str] = (),
) -> str:
    """Make a repository of one commit and return its hash.

    Args:
        revision: the commit's hash (40 hex); None derives it from the name and the bytes.
        gated: False, or "auto" or "manual": files need a token whose account accepted the terms.
        lfs: globs of further files that are in LFS whatever their size.
    """
    directory = root / repo
    _write_files(directory / "files", files)
    commit = revision or _commit_id(repo, files)
    meta = {
        "id": repo,
        "title": repo.partition("/")[2],
        "gated": "auto" if gated is True else gated,
        "private": private,
        "lfs": list(lfs),
        "branches": {"main": commit},
        "tags": {},
        "commits": [commit_entry(commit, title)],
    }
    write_meta(directory, meta)
    return commit


def publish(
    root: Path,
    repo: str,
    files: Mapping[str, bytes],
    *,
    absent: Iterable[str] = (),
    revision: str | None = None,
    title: str = "Update",
) -> str:
    """Add a commit with these files on top of `main` and return its hash."""
    directory = root / repo
    meta = json.loads((directory / "repo.json").read_text())
    commit = revision or _commit_id(meta["commits"][0]["id"] + title, files)
    _write_files(directory / "trees" / commit, files)
    meta["commits"].insert(0, commit_entry(commit, title, absent))
    meta["branches"]["main"] = commit
    write_meta(directory, meta)
    return commit


def commit_entry(commit: str, title: str, absent: Iterable[str] = ()) -> dict[str, Any]:
    """One commit of `repo.json`."""
    entry: dict[str, Any] = {"id": commit, "title": title, "message": "", "date": DATE, "author": "rehearsal"}
    return entry | ({"absent": sorted(absent)} if absent else {})


def write_meta(directory: Path, meta: Mapping[str, Any]) -> None:
    """Put `repo.json` in place in one step."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / ".repo.json.partial"
    partial.write_text(json.dumps(meta, indent=1))
    partial.replace(directory / "repo.json")


def _write_files(tree: Path, files: Mapping[str, bytes]) -> None:
    tree.mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path}: a path inside the repository")
        disk = tree / path
        disk.parent.mkdir(parents=True, exist_ok=True)
        disk.write_bytes(data)


def _commit_id(seed: str, files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha1(seed.encode(), usedforsecurity=False)
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + hashlib.sha256(files[path]).digest())
    return digest.hexdigest()
