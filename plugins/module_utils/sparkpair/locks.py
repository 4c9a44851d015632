"""Locks: every file of a repository at one commit, with size and hash. Nothing is served without one.

A lock is a small JSON file: `{"repo", "revision" (40 hex), "gated"?, "files": [{"path", "size" (bytes),
"sha256" (files in large storage) or "git_blob_sha1" (the rest)}]}`. It is read strictly, since it decides
which bytes are trusted and where they are written.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .problem import Problem

_REPO = re.compile(r"(?:[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?/)?[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_HEX40 = re.compile(r"[0-9a-f]{40}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_LOCK_KEYS = {"repo", "revision", "gated", "files"}
_FILE_KEYS = {"path", "size", "sha256", "git_blob_sha1"}
# Also the prefix of what the fetcher keeps in the folder for itself.
OWN_PREFIX = ".sparkpair"
_LARGEST_FILE = 2**50
_LONGEST_NAME = 255
_LONGEST_PATH = 1024


@dataclass(frozen=True, order=True)
class LockedFile:
    """One file: path relative to the repository's top, size in bytes and exactly one of two hashes.

    `sha256` is that of the content; `git_blob_sha1` is Git's object id (sha1 over `blob <size>\\0` and
    the content), the only hash that the Hub gives for a small file.
    """

    path: str
    size: int
    sha256: str | None = None
    git_blob_sha1: str | None = None

    @property
    def algorithm(self) -> str:
        """ "sha256" or "git_blob_sha1"."""
        return "sha256" if self.sha256 is not None else "git_blob_sha1"

    @property
    def digest(self) -> str:
        """The hash in hex, of the kind that `algorithm` names."""
        return self.sha256 or self.git_blob_sha1 or ""

    def as_dict(self) -> dict[str, str | int]:
        return {"path": self.path, "size": self.size, self.algorithm: self.digest}


@dataclass(frozen=True)
class Lock:
    """A repository at one commit, files sorted by path. `gated`: its terms must be accepted first."""

    repo: str
    revision: str
    files: tuple[LockedFile, ...]
    gated: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.files)

    @property
    def by_path(self) -> dict[str, LockedFile]:
        return {entry.path: entry for entry in self.files}

    def subset(self, globs: Iterable[str]) -> Lock:
        """The files whose path matches one of `globs` (`*` crosses folders). None at all is a Problem."""
        wanted = list(globs)
        files = tuple(entry for entry in self.files if matches(entry.path, wanted))
        if not files:
            raise none_matches(self.repo, wanted)
        return replace(self, files=files)


def matches(path: str, globs: Iterable[str]) -> bool:
    """Whether `path` is meant by one of `globs` (`*` crosses folders)."""
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def none_matches(repo: str, globs: Sequence[str]) -> Problem:
    """No file of `repo` is meant by `globs`."""
    return Problem(
        found=f"no file of {repo} matches {' '.join(globs) or 'nothing'}",
        needed="patterns that match at least one file",
        do="correct the patterns (--include, or include: of the profile)",
        code="lock-empty",
    )


@dataclass(frozen=True)
class Change:
    """How one file differs between two locks. `before` is None for a new file, `after` for a removed one."""

    path: str
    before: LockedFile | None
    after: LockedFile | None

    def __str__(self) -> str:
        if self.before is None:
            return f"added    {_shown(self.after)}"
        if self.after is None:
            return f"removed  {_shown(self.before)}"
        return f"changed  {_shown(self.before)} -> {self.after.size} bytes {_hash_of(self.after)}"


def _shown(entry: LockedFile | None) -> str:
    return f"{entry.path}  {entry.size} bytes {_hash_of(entry)}" if entry else ""


def _hash_of(entry: LockedFile) -> str:
    return f"{entry.algorithm}:{entry.digest[:16]}"


def difference(old: Lock, new: Lock) -> list[Change]:
    """What became of each file, sorted by path; an empty list when all files are the same."""
    before, after = old.by_path, new.by_path
    return [
        Change(path, before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


def describe_difference(old: Lock | None, new: Lock) -> list[str]:
    """Lines for a person: the repository and the commit first, then file by file."""
    if old is None:
        return [
            f"pinned   {new.repo} @ {new.revision}",
            *(f"added    {_shown(entry)}" for entry in new.files),
        ]
    lines = []
    if (old.repo, old.revision) != (new.repo, new.revision):
        lines.append(f"commit   {old.repo} @ {old.revision} -> {new.repo} @ {new.revision}")
    if old.gated != new.gated:
        lines.append(f"gated    {old.gated} -> {new.gated}")
    return lines + [str(change) for change in difference(old, new)]


def dump(lock: Lock) -> str:
    """The lock as text: the same bytes for the same content, sorted by path, a newline at the end."""
    head: dict[str, Any] = {"repo": lock.repo, "revision": lock.revision}
    if lock.gated:
        head["gated"] = True
    head["files"] = [entry.as_dict() for entry in sorted(lock.files, key=lambda entry: entry.path)]
    return json.dumps(head, indent=1, ensure_ascii=False) + "\n"


def load(path: Path) -> Lock:
    """Read a lock file. Raises Problem naming the file and the entry when anything in it is off."""
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Problem(
            found=f"no lock file {path}",
            needed="the list of files with their sizes and hashes",
            do=f"write it: sparkpair lock OWNER/NAME@REVISION --out {path}",
            code="lock-missing",
        ) from None
    except UnicodeDecodeError as error:
        raise _bad(source, f"it is not UTF-8 text (byte {error.start})", "a JSON file in UTF-8") from None
    return parse(decode(text, source), source)


def decode(text: str, source: str) -> Any:
    """The JSON of a lock, each key once. Raises Problem that names `source`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for key, value in pairs:
            if key in row:
                raise _bad(source, f"the key {key!r} is there twice in one object", "each key once")
            row[key] = value
        return row

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise _bad(
            source, f"it is not JSON: {error.msg} (line {error.lineno})", "a whole, well-formed JSON file"
        ) from None
    except ValueError as error:  # a number of more digits than Python reads
        raise _bad(source, f"it holds a number that can't be read ({error})", "sizes in bytes") from None
    except RecursionError:
        raise _bad(source, "it is nested too deeply", "one object with a list of files") from None


def parse(data: Any, source: str) -> Lock:
    """A lock from decoded JSON; `source` names it in messages. Files are put into order by path."""
    if not isinstance(data, dict):
        raise _bad(source, f"it holds a {type(data).__name__}", "an object with repo, revision and files")
    _known(data, _LOCK_KEYS, {"repo", "revision", "files"}, source, "the lock")
    repo, revision, gated, rows = data["repo"], data["revision"], data.get("gated", False), data["files"]
    if not isinstance(repo, str) or not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise _bad(source, f"repo is {repo!r}", "a repository's name such as owner/name")
    if not isinstance(revision, str) or not _HEX40.fullmatch(revision):
        raise _bad(source, f"revision is {revision!r}", "a full commit: 40 hex digits in lower case")
    if not isinstance(gated, bool):
        raise _bad(source, f"gated is {gated!r}", "true or false")
    if not isinstance(rows, list) or not rows:
        raise _bad(source, "it lists no files", "at least one file")
    files = sorted(
        (_entry(row, number, source) for number, row in enumerate(rows)), key=lambda entry: entry.path
    )
    _apart(files, source)
    return Lock(repo, revision, tuple(files), gated)


def _entry(row: Any, number: int, source: str) -> LockedFile:
    where = f"files[{number}]"
    if not isinstance(row, dict):
        raise _bad(source, f"{where} is a {type(row).__name__}", "an object with path, size and a hash")
    _known(row, _FILE_KEYS, {"path", "size"}, source, where)
    path, size = row["path"], row["size"]
    fault = path_fault(path)
    if fault:
        raise _bad(source, f"{where} has the path {path!r}, which {fault}", "a path inside the folder")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _LARGEST_FILE:
        raise _bad(source, f"{path} has the size {size!r}", "a whole number of bytes, 0 or more")
    for key, form, length in (("sha256", _HEX64, 64), ("git_blob_sha1", _HEX40, 40)):
        value = row.get(key)
        if key in row and not (isinstance(value, str) and form.fullmatch(value)):
            said = "null" if value is None else repr(value)
            raise _bad(source, f"{path} has {key} {said}", f"{length} hex digits in lower case")
    if ("sha256" in row) == ("git_blob_sha1" in row):
        count = "both hashes" if "sha256" in row else "no hash"
        raise _bad(source, f"{path} has {count}", "exactly one of sha256 and git_blob_sha1")
    return LockedFile(path, size, row.get("sha256"), row.get("git_blob_sha1"))


def path_fault(path: Any) -> str | None:
    """Why `path` may not name a file inside a folder of ours, or None when it may."""
    if not isinstance(path, str):
        return "is no text"
    parts = path.split("/")
    faults = (
        (not path, "is empty"),
        (path.startswith("/"), "is absolute"),
        ("\\" in path, "has a backslash"),
        (not path.isprintable(), "has a character that does not print"),
        (any(part in ("", ".", "..") for part in parts), "has an empty part, '.' or '..'"),
        (len(path.encode(errors="replace")) > _LONGEST_PATH, "is too long"),
        (any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in parts), "has too long a name"),
        (
            any(part.startswith(OWN_PREFIX) for part in parts),
            f"has a part that starts with {OWN_PREFIX}, kept for our own files",
        ),
    )
    return next((fault for holds, fault in faults if holds), None)


def _apart(files: Sequence[LockedFile], source: str) -> None:
    names = {entry.path for entry in files}
    for earlier, later in itertools.pairwise(files):
        if earlier.path == later.path:
            raise _bad(source, f"{later.path} is listed twice", "each path once")
    for entry in files:
        for parent in map(str, Path(entry.path).parents):
            if parent in names:
                raise _bad(source, f"{parent} is a file and the folder of {entry.path}", "one or the other")


def _known(row: dict[str, Any], allowed: set[str], required: set[str], source: str, where: str) -> None:
    unknown, missing = sorted(row.keys() - allowed), sorted(required - row.keys())
    if unknown:
        raise _bad(
            source, f"{where} has the unknown key {unknown[0]!r}", f"only {', '.join(sorted(allowed))}"
        )
    if missing:
        raise _bad(source, f"{where} has no {missing[0]!r}", f"{', '.join(sorted(required))}")


def _bad(source: str, found: str, needed: str) -> Problem:
    return Problem(
        found=f"lock {source}: {found}",
        needed=needed,
        do="restore the file from version control, or write it again with sparkpair lock ... --refresh",
        code="lock-bad",
    )


def check_index(lock: Lock, index_path: str, index: Any) -> None:
    """Compare a checkpoint's index (`weight_map`: tensor -> shard) with the lock, both ways.

    Raises Problem that names the shards which only one of the two knows. `index_path` is the index's
    own path in the lock; shards are named relative to its folder.
    """
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise Problem(
            found=f"{index_path} of {lock.repo} has no usable weight_map",
            needed="an object that maps each tensor to its shard",
            do="refresh the lock (sparkpair lock ... --refresh) or report it to the repository's owner",
            code="index-bad",
        )
    folder = index_path.rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    named = {prefix + shard for shard in shards.values()}
    locked = {
        entry.path
        for entry in lock.files
        if entry.path.endswith(".safetensors") and entry.path.rpartition("/")[0] == folder
    }
    for names, found in (
        (named - locked, f"{index_path} names shards that the lock of {lock.repo} does not hold"),
        (locked - named, f"the lock of {lock.repo} holds shards that {index_path} does not name"),
    ):
        if names:
            raise Problem(
                found=f"{found}: {listed(sorted(names))}",
                needed="the same shards in both",
                do="lock the whole checkpoint: sparkpair lock OWNER/NAME@REVISION --out FILE --refresh",
                code="index-differs",
            )


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
