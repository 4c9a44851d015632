"""The library on a node: wheels gathered on the controller, a virtual environment made from them offline.

A node needs neither pip, nor a compiler, nor a package index: only its system Python with `venv`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import atomic, paths
from .problem import Problem

PACKAGE = Path("plugins/module_utils/sparkpair")
NODE_LOCK = Path("requirements/node.lock")
STAMP = "sparkpair.json"
# Newest first: pip takes the first tag that a wheel carries.
_PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014")


@dataclass(frozen=True)
class Target:
    """The system Python that the wheels are for.

    Args:
        machine: "aarch64" or "x86_64".
        python: "3.11", "3.12", ...
    """

    machine: str
    python: str

    def markers(self) -> dict[str, str]:
        """What environment markers in a lock are judged by (PEP 508)."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": self.machine,
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_version": "",
            "implementation_version": f"{self.python}.0",
        }


def source_key(project: Path) -> str:
    """12 hex digits over everything that a node's environment is made of."""
    digest = hashlib.sha256()
    for path in sorted([*(project / PACKAGE).rglob("*.py"), project / NODE_LOCK, project / "pyproject.toml"]):
        digest.update(f"{path.relative_to(project)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def requirements_for(lock: str, target: Target, only: Iterable[str] | None = None) -> str:
    """The lines of a hashed lock that hold for `target`, markers resolved; `only` keeps named packages."""
    from packaging.requirements import Requirement

    wanted = set(only) if only is not None else None
    kept = []
    for entry in re.split(r"\n(?=[A-Za-z0-9])", lock.strip()):
        spec, _, hashes = entry.replace("\\\n", " ").partition(" --hash=")
        requirement = Requirement(spec.strip())
        if requirement.marker and not requirement.marker.evaluate(dict(target.markers())):
            continue
        if wanted is None or requirement.name in wanted:
            kept.append(f"{requirement.name}{requirement.specifier} --hash={' '.join(hashes.split())}")
    return "".join(f"{line}\n" for line in kept)


def build_bundle(project: Path, target: Target, *, complete: bool, cache: Path) -> Path:
    """A tar of wheels for one node: pip and sparkpair, with `complete` also what the library needs.

    Made once per key and target; hashes of all that is downloaded are checked by pip.
    """
    key = source_key(project)
    kind = "complete" if complete else "library"
    bundle = cache / f"{kind}-{target.machine}-py{target.python}-{key}.tar"
    if bundle.is_file():
        return bundle
    cache.mkdir(parents=True, exist_ok=True)
    work = cache / f".{bundle.stem}.{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        only = None if complete else ["pip"]
        requirements = work / "requirements.txt"
        requirements.write_text(requirements_for((project / NODE_LOCK).read_text(), target, only))
        fetched = [*_download_options(target), f"--requirement={requirements}", f"--dest={work}"]
        _pip(project, "download", *fetched)
        _build_wheel(project, work)
        (work / "key").write_text(key)
        with atomic.replacing(bundle) as handle, tarfile.open(fileobj=handle, mode="w") as archive:
            for path in sorted(work.iterdir()):
                archive.add(path, path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _keep_newest(cache, f"{kind}-{target.machine}-py{target.python}-*.tar")
    return bundle


def _keep_newest(cache: Path, pattern: str) -> None:
    """Remove the bundles of earlier keys but one, which another play may be sending just now."""
    with contextlib.suppress(OSError):
        for old in sorted(cache.glob(pattern), key=lambda path: -path.stat().st_mtime_ns)[2:]:
            old.unlink()


def _build_wheel(project: Path, wheels: Path) -> None:
    """Build our own wheel from a copy: setuptools would take stale files from a `build/` in the project."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(project / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(project / name, source / name)
        _pip(project, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={wheels}", str(source))


def _download_options(target: Target) -> list[str]:
    tag = "cp" + target.python.replace(".", "")
    return [
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={target.python}",
        *(f"--abi={abi}" for abi in (tag, "abi3", "none")),
        *(f"--platform={platform}_{target.machine}" for platform in _PLATFORMS),
    ]


def _pip(project: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=project,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Problem(
            found=f"pip {words[0]} failed on the controller: {last}",
            needed="the wheels of requirements/node.lock for the nodes",
            do="run `make setup` in the project, check the controller's way to its package index, run again",
            code="wheels",
        )


def installed_key(venv: Path) -> tuple[str, bool]:
    """(key, complete) of a node's environment; ("", False) where there is none or it is half made."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
        same_python = stamp["python"] == _python_version()
        return (str(stamp["key"]), bool(stamp["complete"])) if same_python else ("", False)
    except (OSError, ValueError, KeyError):
        return "", False


def install(venv: Path, wheels: Path, *, complete: bool) -> None:
    """Make `venv` hold what lies in `wheels`, offline; the stamp is written last."""
    (venv / STAMP).unlink(missing_ok=True)
    if not _usable(venv):
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)])
    python = str(venv / "bin" / "python")
    pip = next(wheels.glob("pip-*.whl"), None)
    ours = next(wheels.glob("sparkpair-*.whl"), None)
    if not pip or not ours:
        raise Problem(
            found=f"{wheels} without the wheels of pip and sparkpair",
            needed="a bundle of wheels",
            do="run the playbook again from its start: ansible-playbook site.yml",
            code="wheels",
        )
    offline = [python, f"{pip}/pip", "--quiet", "install", "--no-index", f"--find-links={wheels}"]
    offline += ["--no-warn-script-location", "--root-user-action=ignore", "--disable-pip-version-check"]
    # The lock is whole, but for what is left out of it on purpose: pip need not look for more.
    _run([*offline, "--no-deps", "--require-hashes", "--requirement", str(wheels / "requirements.txt")])
    _run([*offline, "--no-deps", "--force-reinstall", str(ours)])
    stamp = {"key": (wheels / "key").read_text(), "complete": complete, "python": _python_version()}
    atomic.write_text(venv / STAMP, json.dumps(stamp))


def unpack(bundle: Path, wheels: Path) -> None:
    """Replace the folder `wheels` by a bundle's content."""
    fresh = wheels.with_name(f".{wheels.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    # Members one by one: Debian 12's Python has no extraction filters yet, and a bundle is flat.
    with tarfile.open(bundle) as archive:
        for member in archive:
            source = archive.extractfile(member) if member.isfile() and "/" not in member.name else None
            if source is None:
                raise Problem(
                    found=f"{bundle} holds {member.name!r}",
                    needed="plain files without folders",
                    do="remove .cache/wheels in the project, run the playbook again",
                    code="wheels",
                )
            with (fresh / member.name).open("wb") as target:
                shutil.copyfileobj(source, target)
    shutil.rmtree(wheels, ignore_errors=True)
    fresh.rename(wheels)


def _usable(venv: Path) -> bool:
    """A virtual environment whose Python is today's system Python."""
    done = (
        subprocess.run(
            [str(venv / "bin" / "python"), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if (venv / "bin" / "python").exists()
        else None
    )
    return done is not None and done.stdout.strip() == _python_version()


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise Problem(
            found=f"{' '.join(command[:3])} ... failed: {last}",
            needed=f"a virtual environment at {paths.VENV}",
            do=f"check the disk and the system Python, remove {paths.VENV}, run the playbook again",
            code="venv",
        )
