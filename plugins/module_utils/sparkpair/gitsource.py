"""Source code at a pinned commit: fetched, proven to be that commit, laid out byte for byte.

Git's own checks hold while it fetches; what is laid out here is hashed again on its way, from the commit
over its tree to each file, so that neither a damaged cache nor an attribute of the repository
(`export-ignore`, line-end conversion) can give other bytes than the commit vouches for.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .problem import Problem

_FULL = re.compile(r"[0-9a-f]{40}\Z")
_FILE, _PROGRAM, _LINK, _SUBMODULE = "100644", "100755", "120000", "160000"


@dataclass(frozen=True)
class Source:
    """A commit that is at hand.

    Args:
        store: the bare repository that holds it.
        commit: 40 hex digits.
        tree: its git tree id, 40 hex digits.
    """

    store: Path
    commit: str
    tree: str


def obtain(repository: str, commit: str, branch: str, store: Path) -> Source:
    """Have the pinned commit in `store`, from the network only where it is not there yet.

    Args:
        repository: address of the repository.
        commit: full, or abbreviated to 7 digits at least.
        branch: where an abbreviated commit is looked for; empty for all branches.
        store: a bare repository of ours, made when absent.
    """
    if not (store / "HEAD").is_file():
        store.mkdir(parents=True, exist_ok=True)
        _git(store, "init", "--quiet", "--bare", ".")
    full = _resolve(store, commit)
    if full is None:
        _fetch(store, repository, commit, branch)
        full = _resolve(store, commit)
    if full is None:
        where = f"branch {branch} of {_shown(repository)}" if branch else _shown(repository)
        raise Problem(
            found=f"no commit {commit} in {where}",
            needed="the pinned commit",
            do="correct the commit, its branch or the repository in inventory/group_vars/pair/",
            code="source-commit",
        )
    return Source(store, full, _tree_of(store, full))


def _fetch(store: Path, repository: str, commit: str, branch: str) -> None:
    """Bring the commit: alone when its full id is known and the server allows it, else with its branch."""
    if _FULL.match(commit):
        try:
            _git(store, "fetch", "--quiet", "--depth=1", "--no-tags", "--", repository, commit)
        except Problem as problem:
            if problem.code != "source-not-offered":
                raise
        else:
            return
    shallow = _git(store, "rev-parse", "--is-shallow-repository").strip() == "true"
    names = [f"+refs/heads/{branch}:refs/heads/{branch}"] if branch else ["+refs/heads/*:refs/heads/*"]
    unshallow = ["--unshallow"] if shallow else []
    try:
        _git(store, "fetch", "--quiet", "--no-tags", *unshallow, "--", repository, *names)
    except Problem as problem:
        if problem.code != "source-not-offered":
            raise
        problem.needed = f"branch {branch} in {_shown(repository)}"
        raise


def _resolve(store: Path, commit: str) -> str | None:
    """The full id of a commit that `store` has. Raises Problem where an abbreviation fits several."""
    listed = _git(store, "rev-parse", f"--disambiguate={commit}").split()
    found = [name for name in listed if _git(store, "cat-file", "-t", name).strip() == "commit"]
    if len(found) > 1:
        raise Problem(
            found=f"{len(found)} commits that start with {commit}: {', '.join(name[:16] for name in found)}",
            needed="one",
            do="give more digits of it",
            code="source-ambiguous",
        )
    return found[0] if found else None


def _tree_of(store: Path, commit: str) -> str:
    """The tree id that a commit names, after proving that the object is that commit."""
    body = _git_bytes(store, "cat-file", "commit", commit)
    if _object_id("commit", body) != commit:
        raise _damaged(store, f"commit {commit}")
    first = body.split(b"\n", 1)[0].decode(errors="replace")
    return first.removeprefix("tree ")


def export(source: Source, target: Path) -> int:
    """Lay the commit's tree out as plain files in `target` (which must not exist). Returns their bytes."""
    target.mkdir(parents=True)
    listing = _git_bytes(source.store, "ls-tree", "-r", "-z", "--full-tree", source.tree)
    entries = [_entry(line) for line in listing.split(b"\0") if line]
    total = 0
    with subprocess.Popen(
        ["git", "-C", str(source.store), "cat-file", "--batch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
    ) as reader:
        if reader.stdin is None or reader.stdout is None:
            raise AssertionError("both pipes were asked for")
        for mode, name, path in entries:
            data = _read_object(reader.stdin, reader.stdout, name)
            if data is None or _object_id("blob", data) != name:
                raise _damaged(source.store, f"{path} ({name})")
            _write(target / path, mode, data)
            total += len(data)
        reader.stdin.close()
    laid = tree_id(target)
    if laid != source.tree:
        raise _damaged(source.store, f"tree {source.tree} (laid out: {laid})")
    return total


def _entry(line: bytes) -> tuple[str, str, str]:
    """One line of `git ls-tree -z`: (mode, object id, path)."""
    head, _, raw = line.partition(b"\t")
    mode, _, name = head.decode().split(" ")
    path = os.fsdecode(raw)
    if mode == _SUBMODULE:
        raise Problem(
            found=f"a submodule at {path}",
            needed="a source that is whole in one repository",
            do="pin a commit without submodules",
            code="source-submodule",
        )
    if path.startswith("/") or ".." in path.split("/"):
        raise Problem(
            found=f"path {path!r} in the source",
            needed="paths that stay inside it",
            do="do not use this repository",
            code="source-path",
        )
    return mode, name, path


def _read_object(stdin: IO[bytes], stdout: IO[bytes], name: str) -> bytes | None:
    stdin.write(f"{name}\n".encode())
    stdin.flush()
    words = stdout.readline().split()
    if len(words) != 3:
        return None
    data = stdout.read(int(words[2]))
    stdout.read(1)
    return data


def _write(path: Path, mode: str, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == _LINK:
        path.symlink_to(os.fsdecode(data))
        return
    path.write_bytes(data)
    path.chmod(0o755 if mode == _PROGRAM else 0o644)


def tree_id(folder: Path) -> str:
    """The git tree id of a folder as it lies on disk: 40 hex digits over names, modes and every byte."""
    rows = []
    for path in folder.iterdir():
        name = os.fsencode(path.name)
        if path.is_symlink():
            rows.append((name, _LINK, _object_id("blob", os.fsencode(path.readlink()))))
        elif path.is_dir():
            rows.append((name + b"/", "40000", tree_id(path)))
        else:
            mode = _PROGRAM if path.stat().st_mode & 0o100 else _FILE
            rows.append((name, mode, _object_id("blob", path.read_bytes())))
    body = b"".join(
        mode.encode() + b" " + name.rstrip(b"/") + b"\0" + bytes.fromhex(digest)
        for name, mode, digest in sorted(rows)  # git sorts a folder as if its name ended in "/"
    )
    return _object_id("tree", body)


def _object_id(kind: str, data: bytes) -> str:
    digest = hashlib.sha1(f"{kind} {len(data)}\0".encode(), usedforsecurity=False)
    digest.update(data)
    return digest.hexdigest()


def _damaged(store: Path, what: str) -> Problem:
    return Problem(
        found=f"{what} in {store} is not what its id says",
        needed="a whole copy of the repository",
        do=f"remove it (rm -r {store}) and run the same again: it is fetched anew",
        code="source-damaged",
    )


def _environment() -> dict[str, str]:
    """No questions, no other repository, and an end to transfers that stand still for a minute."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_DIR")}
    return {
        **inherited,
        "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
        "GIT_HTTP_LOW_SPEED_TIME": "60",
        "GIT_NO_REPLACE_OBJECTS": "1",
    }


def _git(store: Path, *words: str) -> str:
    return _git_bytes(store, *words).decode(errors="replace")


def _git_bytes(store: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(store), *words],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
    except FileNotFoundError:
        raise Problem(
            "no git on this machine",
            "git, to fetch the source",
            "sudo apt-get install git",
            code="git-missing",
        ) from None
    if done.returncode != 0:
        raise _failed(words, done.stderr.decode(errors="replace"))
    return done.stdout


def _failed(words: Sequence[str], output: str) -> Problem:
    """A failed git command as a Problem: what the server lacks is told from what the network did."""
    last = _shown(" | ".join(line.strip() for line in output.strip().splitlines()[-3:]) or "no output")
    if re.search(
        r"not our ref|couldn't find remote ref|unadvertised object|remote error: upload-pack", output
    ):
        return Problem(
            last,
            "a commit or branch that the repository offers",
            "correct the pin",
            code="source-not-offered",
        )
    if words[0] == "fetch":
        return Problem(
            found=f"git fetch failed: {last}",
            needed="a way from this machine to the source's repository",
            do="check the network and site_environment (HTTPS_PROXY, GIT_SSL_CAINFO), then run it again",
            code="source-unreachable",
        )
    return Problem(
        found=f"git {words[0]} failed: {last}",
        needed="a sound repository in the cache",
        do="remove the cache folder and run the same again",
        code="source-git",
    )


def _shown(text: str) -> str:
    """Text without the user and password that an address in it may hold."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", text)
