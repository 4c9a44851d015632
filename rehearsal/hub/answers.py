"""The JSON that the Hub's API gives for a repository."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .access import no_entry
from .store import DATE, Entry, Repo

Json = dict[str, Any]


def model_info(repo: Repo, commit: str, *, with_blobs: bool) -> Json:
    """`/api/models/{repo}[/revision/{rev}]`; with blobs each file has its size and hash."""
    entries = repo.entries(commit).values()
    return {
        "_id": commit[:24],
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.id.partition("/")[0],
        "sha": commit,
        "lastModified": repo.history(commit)[0]["date"],
        "createdAt": DATE,
        "private": repo.meta["private"],
        "gated": repo.meta["gated"],
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": [_sibling(entry, with_blobs) for entry in entries],
        "spaces": [],
        "usedStorage": sum(entry.size for entry in entries),
    }


def _sibling(entry: Entry, with_blobs: bool) -> Json:
    sibling: Json = {"rfilename": entry.path}
    if with_blobs:
        sibling |= {"blobId": entry.blob, "size": entry.size}
        if entry.is_lfs:
            lfs = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
            sibling["lfs"] = lfs
    return sibling


def tree(repo: Repo, commit: str, under: str, *, recursive: bool, expand: bool) -> list[Json]:
    """`/api/models/{repo}/tree/{rev}[/{under}]`: files and directories, sorted by path."""
    prefix = under.strip("/") + "/" if under.strip("/") else ""
    files = {path: each for path, each in repo.entries(commit).items() if path.startswith(prefix)}
    if prefix and not files:
        raise no_entry()
    listed: dict[str, Json] = {}
    for path, entry in files.items():
        parents = path[len(prefix) :].split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            directory = prefix + "/".join(parents[:depth])
            if recursive or depth == 1:
                listed[directory] = _directory(repo, directory, entry.commit, expand)
        if recursive or not parents:
            listed[path] = _file(repo, entry, expand)
    return [listed[path] for path in sorted(listed)]


def paths_info(repo: Repo, commit: str, paths: Iterable[str], *, expand: bool) -> list[Json]:
    """`/api/models/{repo}/paths-info/{rev}`: what exists of the paths; a missing one is left out."""
    entries = repo.entries(commit)
    found = []
    for path in paths:
        below = [entry for name, entry in entries.items() if name.startswith(path.rstrip("/") + "/")]
        if path in entries:
            found.append(_file(repo, entries[path], expand))
        elif below:
            found.append(_directory(repo, path.rstrip("/"), below[0].commit, expand))
    return found


def commits(repo: Repo, commit: str) -> list[Json]:
    """`/api/models/{repo}/commits/{rev}`, newest first."""
    return [
        {
            "id": each["id"],
            "title": each["title"],
            "message": each["message"],
            "date": each["date"],
            "authors": [{"user": each["author"], "avatar": ""}],
        }
        for each in repo.history(commit)
    ]


def refs(repo: Repo) -> Json:
    """`/api/models/{repo}/refs`."""

    def listed(kind: str, named: dict[str, str]) -> list[Json]:
        return [
            {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha} for name, sha in named.items()
        ]

    return {
        "branches": listed("heads", repo.branches),
        "tags": listed("tags", repo.tags),
        "converts": [],
        "pullRequests": [],
    }


def whoami() -> Json:
    """`/api/whoami-v2` for any accepted token."""
    return {
        "type": "user",
        "id": "0" * 24,
        "name": "rehearsal",
        "fullname": "Rehearsal",
        "isPro": False,
        "orgs": [],
        "auth": {"type": "access_token", "accessToken": {"displayName": "rehearsal", "role": "read"}},
    }


def _file(repo: Repo, entry: Entry, expand: bool) -> Json:
    found: Json = {"type": "file", "oid": entry.blob, "size": entry.size, "path": entry.path}
    if entry.is_lfs:
        found["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    if expand:
        found["lastCommit"] = _last_commit(repo, entry.commit)
        found["securityFileStatus"] = {"status": "safe", "avScan": None, "pickleImportScan": None}
    return found


def _directory(repo: Repo, path: str, commit: str, expand: bool) -> Json:
    # Nobody reads a directory's oid, but every directory has one: the commit's stands in for it.
    found: Json = {"type": "directory", "oid": commit, "size": 0, "path": path}
    return found | ({"lastCommit": _last_commit(repo, commit)} if expand else {})


def _last_commit(repo: Repo, commit: str) -> Json:
    each = repo.history(commit)[0]
    return {"id": each["id"], "title": each["title"], "date": each["date"]}
