"""Checks inside the image build: the right compiler before it, whole programs after it.

Runs with the base image's Python, standard library only. Ends with exit code 1 and one line that says
what was found and what is needed; that line is the last of the build's log.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# The head of every embedded kernel image (fat binary), as it lies in the file.
FATBIN_MAGIC = bytes.fromhex("50ed55ba")
WITH_KERNELS = ("native/bin/tensorfold-native", "bin/tf-dsv41-lanes")
WITHOUT_KERNELS = ("bin/tf-dsv41-check", "bin/tf-dsv41-rank-cache")
# e_machine of an ELF header, by the first word of the target.
MACHINES = {"aarch64": 183, "x86_64": 62}


def check_source(source: Path, zig: Path, version: str) -> list[str]:
    """The compiler at hand, the pin and the source's own .zig-version must be one version."""
    has = subprocess.run([str(zig), "version"], capture_output=True, text=True, check=True).stdout.strip()
    stated = source / ".zig-version"
    wants = stated.read_text().strip() if stated.is_file() else "no .zig-version"
    if not has == wants == version:
        return [f"found: Zig {has}, the source wants {wants}; needed: {version}, the pinned one, in both"]
    return []


def check_program(path: Path, machine: int, kernels: bool) -> list[str]:
    """One program: there, for the target's processor, with kernels inside where it launches any."""
    if not path.is_file() or not path.stat().st_mode & 0o111:
        return [f"found: no program {path}; needed: one, from `zig build install native`"]
    data = path.read_bytes()
    if data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") != machine:
        got = int.from_bytes(data[18:20], "little")
        return [f"found: {path} is for machine {got}; needed: machine {machine}, the target's"]
    if kernels and FATBIN_MAGIC not in data:
        return [
            f"found: no GPU kernels in {path} (it would end with NoKernelImages); "
            "needed: -Dnvcc naming a working nvcc"
        ]
    return []


def check_programs(prefix: Path, target: str) -> list[str]:
    """All programs that sparkpair runs."""
    machine = MACHINES[target.split("-", maxsplit=1)[0]]
    faults = []
    for name in (*WITH_KERNELS, *WITHOUT_KERNELS):
        faults += check_program(prefix / name, machine, name in WITH_KERNELS)
    return faults


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    steps = parser.add_subparsers(dest="step", required=True)
    source = steps.add_parser("source")
    source.add_argument("--zig", type=Path, required=True)
    source.add_argument("--version", required=True)
    source.add_argument("--source", type=Path, default=Path())
    programs = steps.add_parser("programs")
    programs.add_argument("--prefix", type=Path, required=True)
    programs.add_argument("--target", required=True)
    asked = parser.parse_args(argv)
    if asked.step == "source":
        faults = check_source(asked.source, asked.zig, asked.version)
    else:
        faults = check_programs(asked.prefix, asked.target)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
