"""python -m tests.aarch64: the library's tests and the fixtures in an aarch64 userland, emulated where need be.

A Spark's processor is aarch64. Elsewhere this unpacks a small Debian for it below .cache/aarch64, adds the
very wheels that a node gets (the bundle of role host), and runs pytest there through qemu's user emulation,
called by its name: nothing is registered in the kernel, nothing stays mounted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from sparkpair import library
from sparkpair.problem import Problem

PROJECT = Path(__file__).resolve().parents[2]
CACHE = PROJECT / ".cache/aarch64"
SUITE, PYTHON = "bookworm", "3.11"
QEMU = "qemu-aarch64-static"
# What reads the checkpoint's files and makes the fixtures, and what it all rests on. Not hashing: what it
# asks of the page cache, the emulator has no answer to.
TESTS = (
    "rope",
    "tokenmap",
    "modelconfig",
    "safetensors",
    "bias",
    "receipts",
    "locks",
    "gid",
    "sysfs",
)
_PACKAGES = {QEMU: "qemu-user-static", "mmdebstrap": "mmdebstrap"}
_IN_CHROOT = """
set -e
root=$1 project=$2 packages=$3
shift 3
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount --bind "$project" "$root/project"
mount --bind "$packages" "$root/packages"
cd /
exec chroot "$root" "$@"
"""


def missing_programs() -> list[str]:
    """Programs that this machine lacks for the emulation."""
    return [name for name in _PACKAGES if shutil.which(name) is None]


def install(names: list[str]) -> None:
    """Install what is missing, as root on Debian or Ubuntu; else say so."""
    packages = sorted(_PACKAGES[name] for name in names)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Problem(
            found=f"this machine lacks {', '.join(names)}, or this user is not root (a chroot needs it)",
            needed="root on Debian or Ubuntu, or an aarch64 machine",
            do=f"sudo apt-get install {' '.join(packages) or 'qemu-user-static mmdebstrap'}, run it as root",
            code="no-emulation",
        )
    if packages:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-q"], check=True, env=quiet, stdout=subprocess.DEVNULL)
        words = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
        subprocess.run(words, check=True, env=quiet, stdout=subprocess.DEVNULL)


def make_root(root: Path) -> None:
    """Unpack Debian for aarch64 into `root`; packages stay unconfigured, so nothing has to run for it."""
    if (root / "ready").exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    words = ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=arm64"]
    subprocess.run([*words, "--include=python3,libstdc++6", SUITE, str(root)], check=True)
    for folder in ("proc", "dev", "tmp", "project", "packages"):
        (root / folder).mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    shutil.copy(str(shutil.which(QEMU)), root / "usr/bin" / QEMU)
    (root / "ready").touch()


def unpack_wheels(packages: Path) -> None:
    """The wheels of a node's bundle, and hypothesis's, unpacked side by side as an installation would."""
    target = library.Target("aarch64", PYTHON)
    bundle = library.build_bundle(PROJECT, target, complete=True, cache=PROJECT / ".cache/wheels")
    if (packages / bundle.stem).exists():
        return
    shutil.rmtree(packages, ignore_errors=True)
    wheels = packages / ".wheels"
    wheels.mkdir(parents=True)
    with tarfile.open(bundle) as archive:
        archive.extractall(wheels, filter="data")
    download_test_tools(target, wheels)
    for path in wheels.glob("*.whl"):
        if not path.name.startswith(("pip-", "sparkpair-")):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(packages)  # noqa: S202 - its hash is in the lock
    shutil.rmtree(wheels)
    (packages / bundle.stem).touch()


def download_test_tools(target: library.Target, wheels: Path) -> None:
    """What the tests need beside the library and is not pure Python, by the controller's hashed lock."""
    lock = (PROJECT / "requirements/controller.lock").read_text()
    (wheels / "tools.txt").write_text(library.requirements_for(lock, target, ["hypothesis"]))
    words = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    words += ["--require-hashes", "--only-binary=:all:", f"--python-version={target.python}"]
    words += [f"--platform=manylinux_2_{minor}_{target.machine}" for minor in (34, 28, 17)]
    subprocess.run([*words, "-r", str(wheels / "tools.txt"), "-d", str(wheels)], check=True)


def pytest_words(tests: list[str], extra: list[str]) -> list[str]:
    """pytest's command line, from the project's folder as it is seen inside."""
    files = [f"tests/unit/test_{name}.py" for name in tests]
    return ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=5", *extra, *files]


def emulated(tests: list[str], extra: list[str]) -> int:
    """Run the tests in the emulated userland. Returns pytest's exit code."""
    install(missing_programs())
    root, packages = CACHE / "root", CACHE / "packages"
    make_root(root)
    unpack_wheels(packages)
    # Test tools are pure Python: the controller's own will do, behind the wheels for aarch64.
    controller = next((PROJECT / ".venv/lib").glob("python3.*/site-packages")).relative_to(PROJECT)
    environment = {
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis",
        "PYTHONPATH": f"/project/plugins/module_utils:/packages:/project/{controller}",
    }
    python = [f"/usr/bin/{QEMU}", f"/usr/bin/python{PYTHON}"]
    start = ["-c", "import os, sys; os.chdir('/project'); os.execv(sys.argv[1], sys.argv[1:])"]
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _IN_CHROOT, "sh"]
    words += [str(root), str(PROJECT), str(packages), *python, *start, *python, *pytest_words(tests, extra)]
    try:
        return subprocess.run(words, check=False, env=environment).returncode
    finally:
        for leftover in (root / "tmp").glob("pytest-of-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def run(tests: list[str], extra: list[str]) -> int:
    """Run natively on aarch64, else emulated. Returns the exit code."""
    if os.uname().machine == "aarch64":
        return subprocess.run(
            [sys.executable, *pytest_words(tests, extra)], check=False, cwd=PROJECT
        ).returncode
    return emulated(tests, extra)


def main() -> int:
    """Parse, run, tell problems in three parts."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.aarch64", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("tests", nargs="*", default=list(TESTS), help=f"default: {' '.join(TESTS)}")
    parser.add_argument(
        "--pytest", action="append", default=[], metavar="WORD", help="another word for pytest"
    )
    arguments = parser.parse_args()
    try:
        return run(arguments.tests, arguments.pytest)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
