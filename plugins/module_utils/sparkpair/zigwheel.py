"""The Zig compiler as a hash-checked wheel: from the cache, or from the package index pip is set up for."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .problem import Problem


def obtain(lock: bytes, version: str, platform: str, cache: Path) -> Path:
    """The compiler's wheel for `platform`, from the cache or the package index; its hash stands in the lock.

    Args:
        lock: content of zig.lock, a pip requirements file with hashes.
        version: "0.17.0".
        platform: "linux/arm64" or "linux/amd64".
        cache: folder for it.
    """
    machine = {"linux/arm64": "aarch64", "linux/amd64": "x86_64"}[platform]
    text = lock.decode(errors="replace")
    pinned = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))
    if f"ziglang=={version} " not in text.replace("\\\n", " \\\n"):
        raise Problem(
            found=f"zig.lock without ziglang=={version}",
            needed="the pinned compiler, by hash",
            do="make image_zig and files/engine/zig.lock agree",
            code="zig-pin",
        )
    folder = cache / "zig"
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"ziglang-{version}-*{machine}*.whl"
    for wheel in folder.glob(pattern):
        if _sha256(wheel) in pinned:
            return wheel
        wheel.unlink()  # cut off or damaged; pip fetches it again
    with tempfile.NamedTemporaryFile(prefix="zig-", suffix=".txt", dir=cache) as requirements:
        requirements.write(lock)
        requirements.flush()
        _pip_download(Path(requirements.name), machine, folder)
    found = next((wheel for wheel in folder.glob(pattern) if _sha256(wheel) in pinned), None)
    if found is None:
        raise Problem(
            found=f"no ziglang {version} for {machine} with a pinned hash",
            needed="the compiler's wheel that files/engine/zig.lock names",
            do="compare zig.lock with the package index",
            code="zig-missing",
        )
    return found


def _pip_download(requirements: Path, machine: str, folder: Path) -> None:
    tags = ("manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux2010")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--require-hashes", "--no-deps", "--only-binary=:all:"),
            *(f"--platform={tag}_{machine}" for tag in tags),
            *("--requirement", str(requirements), "--dest", str(folder)),
        ],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        return
    said = [line.strip() for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise Problem(
            found="the package index serves another ziglang wheel than zig.lock names",
            needed="the wheel with the pinned hash",
            do="do not use that index; compare with files/engine/zig.lock",
            code="zig-hash",
        )
    raise Problem(
        found=f"pip could not fetch the compiler: {' | '.join(said[-3:]) or 'no output'}",
        needed="a way from this machine to a package index that has ziglang",
        do="check the network and site_environment (HTTPS_PROXY, PIP_INDEX_URL, PIP_CERT), then run it again",
        code="zig-unreachable",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
