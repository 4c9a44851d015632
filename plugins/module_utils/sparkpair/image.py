"""What the engine's image is: a key over all that it is made of, and an identity of what came out.

The key (12 hex digits) is the tag and a label: the same inputs, whatever their times or order, are the
same image, and one other byte is another (field report 75). The identity compares two copies by their
layers and their run-time configuration, since an image's id differs between Docker's image stores
(field report 29).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import disk
from .console import size
from .dockercli import Docker, storage_roots
from .problem import Problem

REPOSITORY = "tensorfold-dsv41"
KEY_LABEL = "sparkpair.key"
# The files of files/engine, all of them.
INPUTS = ("Dockerfile", "check_build.py", "enter.sh", "zig.lock")
_TAG = re.compile(rf"{REPOSITORY}:exl3-tp2-([0-9a-f]{{12}})\Z")
_COMMIT = re.compile(r"[0-9a-f]{7,40}\Z")
_BASE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]{1,250}\Z")
_SOURCE = re.compile(r"(https?|git|ssh|file)://[^\s]+\Z")
_FORMAT = 1
# glibc 2.28: older than that of any base of ours, and one binary for all of them.
_TARGETS = {"linux/arm64": "aarch64-linux-gnu.2.28", "linux/amd64": "x86_64-linux-gnu.2.28"}
_PLATFORMS = {
    "aarch64": "linux/arm64",
    "arm64": "linux/arm64",
    "x86_64": "linux/amd64",
    "amd64": "linux/amd64",
}


@dataclass(frozen=True)
class Pins:
    """What the image is built from, beside the files of files/engine, as it is pinned.

    Args:
        base: the base image, `name:tag@sha256:...` (a digest is the pin; a bare tag is taken as it is).
        repository: where the engine's source is fetched from; a mirror gives the same image.
        commit: full or abbreviated (7 digits at least).
        branch: where to look for an abbreviated commit; empty for all branches.
        tree: the git tree id that the commit must have; empty when it is not pinned beside the commit.
        zig: the compiler's version.
        sm: GPU architectures, a comma list; 121 is GB10.
        platform: as Docker says it, "linux/arm64" on a Spark.
    """

    base: str
    repository: str
    commit: str
    branch: str = ""
    tree: str = ""
    zig: str = "0.17.0"
    sm: str = "121"
    platform: str = "linux/arm64"

    def __post_init__(self) -> None:
        checks = (
            (
                _BASE,
                self.base,
                "base_image",
                "an image reference such as nvcr.io/nvidia/pytorch:26.07-py3@sha256:...",
            ),
            (
                _SOURCE,
                self.repository,
                "engine_repository",
                "an address that starts with https://, git://, ssh:// or file://",
            ),
            (_COMMIT, self.commit, "engine_commit", "a git commit: 7 to 40 hexadecimal digits, lower case"),
            (
                re.compile(r"([0-9a-f]{40})?\Z"),
                self.tree,
                "engine_tree",
                "a git tree id of 40 hexadecimal digits, or nothing",
            ),
            (re.compile(r"[A-Za-z0-9._/-]*\Z"), self.branch, "engine_branch", "a branch name, or nothing"),
            (re.compile(r"\d+\.\d+\.\d+\Z"), self.zig, "image_zig", "a version such as 0.17.0"),
            (
                re.compile(r"\d{2,3}(,\d{2,3})*\Z"),
                self.sm,
                "image_sm",
                "GPU architectures such as 121 or 120,121",
            ),
        )
        for form, value, name, needed in checks:
            if not form.match(value) or value.startswith("-"):
                raise Problem(f"{name} is {redacted(value)!r}", needed, f"correct {name}", code="image-pin")
        if self.platform not in _TARGETS:
            raise Problem(
                found=f"platform {self.platform}",
                needed=f"one of {', '.join(_TARGETS)}",
                do="build on a Spark (linux/arm64), or on the rehearsal's nodes",
                code="image-platform",
            )

    @property
    def target(self) -> str:
        """Zig's name for the platform, with the oldest glibc that the programs run on."""
        return _TARGETS[self.platform]

    @property
    def engine_key(self) -> str:
        """The engine alone, for what is made by it and fits no other (rank caches): 12 digits at most."""
        return self.commit[:12]


def redacted(address: str) -> str:
    """An address without the user and password that it may hold."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", address)


def platform_of(machine: str) -> str:
    """`uname -m` as Docker's platform. Raises Problem for a processor that nothing is built for."""
    try:
        return _PLATFORMS[machine]
    except KeyError:
        raise Problem(
            found=f"a machine of type {machine}",
            needed="aarch64 (a Spark) or x86_64 (a rehearsal)",
            do="run the build on a Spark",
            code="image-platform",
        ) from None


def content_key(inputs: Mapping[str, bytes], pins: Pins) -> str:
    """12 hex digits over every byte that the image is made from.

    Args:
        inputs: the files of files/engine: name -> content. Their order and times say nothing.
        pins: see `Pins`. Its repository and branch are only ways to the commit, so they don't count.
    """
    made_of = {
        "format": _FORMAT,
        "inputs": {name: hashlib.sha256(data).hexdigest() for name, data in inputs.items()},
        "base": pins.base,
        "commit": pins.commit,
        "tree": pins.tree,
        "platform": pins.platform,
        "arguments": {"zig": pins.zig, "target": pins.target, "sm": pins.sm},
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


def tag_for(key: str) -> str:
    """The image's name: `tensorfold-dsv41:exl3-tp2-<key>`."""
    return f"{REPOSITORY}:exl3-tp2-{key}"


def key_of_tag(tag: str) -> str:
    """The key in a tag of ours. Raises Problem for any other name: nothing else is loaded or removed."""
    found = _TAG.match(tag)
    if not found:
        raise Problem(
            found=f"image name {tag!r}",
            needed=f"{REPOSITORY}:exl3-tp2- and 12 hexadecimal digits",
            do="sparkpair image list shows the images of ours",
            code="image-name",
        )
    return found.group(1)


def read_inputs(folder: Path) -> dict[str, bytes]:
    """The build's own files, name -> content: those of `INPUTS`, whatever else lies beside them."""
    missing = [name for name in INPUTS if not (folder / name).is_file()]
    if missing:
        raise Problem(
            found=f"{folder} without {', '.join(missing)}",
            needed=f"the project's files/engine: {', '.join(INPUTS)}",
            do="give --inputs that folder",
            code="image-inputs",
        )
    return {name: (folder / name).read_bytes() for name in INPUTS}


# What a container gets from its image, as `docker image inspect` names it. All else in there is either
# about one store (Id, GraphDriver, RepoTags) or left over from how it was built (Image, Hostname).
_RUNTIME = (
    "User",
    "Env",
    "Entrypoint",
    "Cmd",
    "WorkingDir",
    "Labels",
    "ExposedPorts",
    "Volumes",
    "StopSignal",
    "Healthcheck",
    "Shell",
    "OnBuild",
)


def content(inspect: Mapping[str, Any]) -> dict[str, Any]:
    """What two copies of an image must agree on: {"layers": [diff id], "platform", "config": {...}}.

    Stores differ in how they say "nothing" (absent, null, "", [], {}) and arm64's only variant.
    """
    config = inspect.get("Config") or {}
    variant = inspect.get("Variant") or ""
    architecture = str(inspect.get("Architecture") or "")
    if (architecture, variant) == ("arm64", "v8"):
        variant = ""
    parts = [str(inspect.get("Os") or ""), architecture, *([variant] if variant else [])]
    return {
        "layers": list((inspect.get("RootFS") or {}).get("Layers") or []),
        "platform": "/".join(parts),
        "config": {name: config[name] for name in _RUNTIME if config.get(name)},
    }


def identity_of(parts: Mapping[str, Any]) -> str:
    """64 hex digits over `content`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def identity(inspect: Mapping[str, Any]) -> str:
    """64 hex digits that two copies of an image share, whatever store, id and tags they have."""
    return identity_of(content(inspect))


def explain_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How two images' `content` differs, in words; empty when it does not."""
    said = []
    if one["platform"] != other["platform"]:
        said.append(f"platform {one['platform']} and {other['platform']}")
    ours, theirs = one["layers"], other["layers"]
    if ours != theirs:
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if same is None:
            said.append(f"{len(ours)} and {len(theirs)} layers")
        else:
            said.append(f"layer {same + 1} of {len(ours)}: {ours[same][:19]} and {theirs[same][:19]}")
    names = sorted({*one["config"], *other["config"]})
    for name in names:
        if one["config"].get(name) != other["config"].get(name):
            said.append(f"{name}: {_difference(one['config'].get(name), other['config'].get(name))}")
    return "; ".join(said)


def _difference(one: Any, other: Any) -> str:
    """Only what differs of two settings: an environment has dozens of entries."""
    left: Any
    right: Any
    if isinstance(one, dict) and isinstance(other, dict):
        left = {name: value for name, value in one.items() if other.get(name) != value}
        right = {name: value for name, value in other.items() if one.get(name) != value}
        one, other = left or "nothing", right or "nothing"
    elif isinstance(one, list) and isinstance(other, list):
        left, right = [v for v in one if v not in other], [v for v in other if v not in one]
        if left or right:  # else the same entries in another order: shown whole
            one, other = left or "nothing", right or "nothing"
    return " and ".join(json.dumps(value) if value is not None else "nothing" for value in (one, other))


@dataclass(frozen=True)
class Need:
    """Bytes that will be written below a path, and what for."""

    path: Path
    bytes: int
    what: str


def require_room(needs: Sequence[Need], host: str | None = None) -> None:
    """Raise Problem unless all needs fit; those on one filesystem are added up (field report 36)."""
    together: dict[int, list[Need]] = {}
    for need in needs:
        device = disk.nearest_existing(need.path).stat().st_dev
        together.setdefault(device, []).append(need)
    for group in together.values():
        short_of_room(group, disk.free_bytes(group[0].path), host)


def short_of_room(needs: Sequence[Need], free: int, host: str | None = None) -> None:
    """The same for needs on one filesystem with `free` bytes, here or on a peer."""
    total = sum(need.bytes for need in needs)
    if free >= total:
        return
    listed = " + ".join(f"{size(need.bytes)} for {need.what} in {need.path}" for need in needs if need.bytes)
    raise Problem(
        found=f"{size(free)} free on the filesystem of {needs[0].path}",
        needed=f"{size(total)}: {listed}",
        do=f"free {size(total - free)} there: sparkpair image prune --keep TAG --yes removes superseded "
        "images of ours, docker system df shows what else is kept",
        code="disk-full",
        host=host,
    )


def probe(docker: Docker, tag: str) -> dict[str, Any]:
    """What this engine has of one of our images; it must answer, the image need not be there.

    Returns {"tag", "present", "key" (the label), "identity", "content" | None, "size" (bytes of its
    archive), "disk" (bytes that it takes), "roots", "free_bytes" (the least of them), "docker" (version), "store"}.
    """
    key_of_tag(tag)
    info = docker.info()
    found = docker.inspect(tag)
    roots = storage_roots(info)
    return {
        "tag": tag,
        "present": found is not None,
        "key": label(found, KEY_LABEL) if found else "",
        "identity": identity(found) if found else "",
        "content": content(found) if found else None,
        "size": int(found.get("Size") or 0) if found else 0,
        "disk": disk_bytes(docker, found) if found else 0,
        "roots": [str(root) for root in roots],
        "free_bytes": min(disk.free_bytes(root) for root in roots),
        "docker": str(info.get("ServerVersion", "")),
        "store": str(info.get("Driver", "")),
    }


_SIZE = re.compile(r"([\d.]+)([kMGT]?B)\Z")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size_of(words: str) -> int:
    """Bytes of a size as Docker writes it ("25.4GB"); 0 for anything else."""
    found = _SIZE.match(words)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def disk_bytes(docker: Docker, inspect: Mapping[str, Any]) -> int:
    """Bytes that an image takes under Docker's root.

    With the containerd store an image's own `Size` is that of its packed layers; the listing adds the unpacked
    ones, three times as much in all.
    """
    listed = docker.run("image", "ls", "--no-trunc", "--format", "{{.ID}} {{.Size}}").splitlines()
    sizes = dict(line.split(" ", 1) for line in listed if " " in line)
    return max(int(inspect.get("Size") or 0), size_of(sizes.get(str(inspect.get("Id")), "")))


def label(inspect: Mapping[str, Any], name: str) -> str:
    return str(((inspect.get("Config") or {}).get("Labels") or {}).get(name, ""))


def ours(docker: Docker) -> list[dict[str, Any]]:
    """Every image of ours on this engine, newest first: {"tag", "key", "created", "size", "commit", "id"}.

    Ours by name and by label: an image that someone else tagged so is not listed, so never removed.
    """
    listed = docker.run(
        "image", "ls", "--filter", f"reference={REPOSITORY}:exl3-tp2-*", "--format", "{{json .}}"
    )
    rows = [json.loads(line) for line in listed.splitlines() if line.strip()]
    tags = sorted({f"{row['Repository']}:{row['Tag']}" for row in rows})
    found = []
    for tag in tags:
        inspect = docker.inspect(tag) if _TAG.match(tag) else None
        if inspect and label(inspect, KEY_LABEL) == key_of_tag(tag):
            found.append(
                {
                    "tag": tag,
                    "key": key_of_tag(tag),
                    "created": str(inspect.get("Created", "")),
                    "size": int(inspect.get("Size") or 0),
                    "commit": label(inspect, "sparkpair.engine.commit"),
                    "id": str(inspect.get("Id", "")),
                }
            )
    return sorted(found, key=lambda row: str(row["created"]), reverse=True)


def superseded(images: Iterable[Mapping[str, Any]], keep: str) -> list[str]:
    """The tags of ours that are not the one in use."""
    key_of_tag(keep)
    return [str(image["tag"]) for image in images if image["tag"] != keep]


def prune(docker: Docker, keep: str) -> dict[str, Any]:
    """Remove the superseded images of ours. One that a container was made from is kept and said.

    Returns {"removed": [tag], "kept": {tag: why}, "bytes" (sum of their sizes; shared layers stay)}.
    """
    images = ours(docker)
    sizes = {image["tag"]: image["size"] for image in images}
    removed: list[str] = []
    kept: dict[str, str] = {}
    for tag in superseded(images, keep):
        try:
            docker.run("image", "rm", tag)
        except Problem as problem:
            if problem.code != "image-in-use":
                raise
            kept[tag] = problem.found
        else:
            removed.append(tag)
    return {"removed": removed, "kept": kept, "bytes": sum(sizes[tag] for tag in removed)}
