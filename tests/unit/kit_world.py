"""A kit's git repository, the generated files beside it and the place where the kit is laid out."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from sparkpair import kit, made, rope

TABLE = bytes(range(256)) * 5000  # 1.28 MB: large enough to be known by its receipt


GENERATED = {name: name.encode() + TABLE for name in rope.TABLES}


BIAS = b"the routing bias of this checkpoint"


IN_GIT = {
    "README.md": b"a kit\n",
    "aot/aot.json": b"{}\n",
    "aot/cubins/5f.cubin": b"\x7fELF" + bytes(3000),
    "engram.json": b"{}",
    "rope.json": b"{}",
    "tools/verify_kit.sh": b"#!/bin/sh\n",
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_of(files: dict[str, bytes]) -> bytes:
    return "".join(f"{sha256(files[path])}  {path}\n" for path in sorted(files)).encode()


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(folder), *words],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


class World:
    """A kit repository, a fixtures folder and the place where the kit goes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repository = root / "repository"
        self.fixtures = root / "fixtures/dsv41"
        self.folder = root / "state/kit"
        self.lock_file = root / "state/receipts/kit.json"
        self.repository.mkdir()
        git(self.repository, "init", "-q", "-b", "main")
        self.commit = self.publish(IN_GIT)
        self.make_fixtures()

    def publish(self, in_git: dict[str, bytes], manifest: bytes | None = None) -> str:
        shutil.rmtree(self.repository / "kit", ignore_errors=True)
        everything = {**in_git, **GENERATED, kit.BIAS: BIAS}
        for path, data in {**in_git, "MANIFEST": manifest or manifest_of(everything)}.items():
            (self.repository / "kit" / path).parent.mkdir(parents=True, exist_ok=True)
            (self.repository / "kit" / path).write_bytes(data)
        (self.repository / "README.md").write_text("the recipe around the kit")
        git(self.repository, "add", "-A")
        git(self.repository, "commit", "-q", "--allow-empty", "-m", "a kit")
        return git(self.repository, "rev-parse", "HEAD")

    def make_fixtures(self, bias: bytes = BIAS) -> None:
        self.fixtures.mkdir(parents=True, exist_ok=True)
        for name, data in GENERATED.items():
            (self.fixtures / name).write_bytes(data)
        (self.fixtures / "gate_bias_vl.safetensors").write_bytes(bias)
        made.record(self.fixtures, "rope", "x", {name: sha256(data) for name, data in GENERATED.items()})
        note = "gate_bias_vl.safetensors"
        made.record(self.fixtures, note, "x", {note: sha256(bias)})

    def order(self, commit: str = "", unrecorded: tuple[str, ...] = ()) -> kit.Order:
        return kit.Order(
            folder=self.folder,
            repository=str(self.repository),
            commit=commit or self.commit,
            branch="main",
            subfolder="kit",
            fixtures=self.fixtures,
            unrecorded=frozenset(unrecorded),
            lock_file=self.lock_file,
        )

    def words(self, action: str, *more: str) -> list[str]:
        words = ["kit", action, "--kit", str(self.folder), "--lock", str(self.lock_file)]
        if action == "fetch":
            words += [
                "--repository",
                str(self.repository),
                "--branch",
                "main",
                "--fixtures",
                str(self.fixtures),
            ]
        return [*words, *more, "--json"]


def put_back_time(path: Path, change: Callable[[bytearray], None]) -> None:
    """Edit a file in place, as a stealthy fault would: same size, same time, same inode."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    change(data)
    with path.open("r+b") as handle:
        handle.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(data: bytearray) -> None:
    data[-1] ^= 1
