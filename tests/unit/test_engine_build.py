"""The stand-in engine's build inputs and the base image's nvcc, short of running the Zig compiler."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from engine_pair import NVCC, SOURCES

GENCODE = "-gencode=arch=compute_121,code=sm_121"


def nvcc(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, NVCC, *(str(w) for w in words)], capture_output=True, text=True, check=False
    )


def test_the_build_packs_every_source() -> None:
    text = (SOURCES.parent / "build.zig").read_text()
    listed = re.search(r"const sources = .*?\{(.*?)\};", text, re.DOTALL)
    assert listed
    names = re.findall(r'"([\w.]+)"', listed.group(1))
    assert sorted(names) == sorted(p.name for p in (SOURCES / "python" / "dsv41").glob("*.py"))
    kernels = re.findall(r'"(\w+)"', re.search(r"const kernels = .*?\{(.*?)\};", text).group(1))  # type: ignore[union-attr]
    assert sorted(kernels) == sorted(p.stem for p in (SOURCES / "kernels").glob("*.cu"))


def test_zig_is_pinned() -> None:
    assert (SOURCES.parent / ".zig-version").read_text() == "0.17.0\n"


def test_the_flags_of_the_build_are_flags_that_nvcc_takes(tmp_path: Path) -> None:
    text = (SOURCES.parent / "build.zig").read_text()
    flags = re.findall(r'"(-[^"]+)"', re.search(r"nvcc_flags = .*?\{(.*?)\};", text).group(1))  # type: ignore[union-attr]
    out = tmp_path / "k.fatbin"
    done = nvcc(
        "-fatbin",
        *flags,
        GENCODE,
        "-MD",
        "-MF",
        tmp_path / "k.d",
        "-o",
        out,
        SOURCES / "kernels/dsv41_ops.cu",
    )
    assert done.returncode == 0, done.stderr
    assert out.read_bytes()[:4] == bytes.fromhex("50ed55ba")
    magic, version, header, size = struct.unpack("<IHHQ", out.read_bytes()[:16])
    assert (magic, version, header, size) == (0xBA55ED50, 1, 16, out.stat().st_size - 16)
    assert "dsv41_ops.cu" in (tmp_path / "k.d").read_text()
    assert "release 13.3" in nvcc("--version").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-gencode=arch=compute_121,code=sm_121", "-o", "OUT", "SRC"], "only -fatbin"),
        (["-fatbin", "-o", "OUT", "SRC"], "no target"),
        (["-fatbin", "-arch=sm_120", "-o", "OUT", "SRC"], "Unsupported gpu architecture"),
        (
            ["-fatbin", "-gencode=arch=compute_121,code=sm_120", "-o", "OUT", "SRC"],
            "Unsupported gpu architecture",
        ),
        (["-fatbin", GENCODE, "SRC"], "'-o' is needed"),
        (["-fatbin", GENCODE, "-o", "OUT"], "one .cu file"),
        (["-fatbin", GENCODE, "-o", "OUT", "none.cu"], "No such file"),
        (["-fatbin", GENCODE, "--fast", "-o", "OUT", "SRC"], "Unknown option '--fast'"),
        (["-fatbin", GENCODE, "SRC", "-o"], "expects a value"),
    ],
)
def test_nvcc_refuses_any_other_command_line(tmp_path: Path, words: list[str], says: str) -> None:
    places = {"OUT": str(tmp_path / "k.fatbin"), "SRC": str(SOURCES / "kernels/dsv41_ops.cu")}
    done = nvcc(*(places.get(w, w) for w in words))
    assert done.returncode == 1
    assert says in done.stderr
    assert not (tmp_path / "k.fatbin").exists()
