"""The library on a node: wheels for that very Python, hashed, no index, no compiler."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest
from sparkpair import library
from sparkpair.problem import Problem

LOCK = """\
alpha==1.0 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:ab
alpha==2.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ba
arm-only==1.0 ; platform_machine == 'aarch64' \\
    --hash=sha256:ca
windows-only==1.0 ; sys_platform == 'win32' \\
    --hash=sha256:da
pip==26.3 \\
    --hash=sha256:ea
"""


@pytest.mark.parametrize(
    ("machine", "python", "names"),
    [
        ("aarch64", "3.12", ["alpha==2.0", "arm-only==1.0", "pip==26.3"]),
        ("x86_64", "3.11", ["alpha==1.0", "pip==26.3"]),
    ],
)
def test_the_lock_is_read_for_the_node_and_not_for_the_controller(
    machine: str, python: str, names: list[str]
) -> None:
    lines = library.requirements_for(LOCK, library.Target(machine, python)).splitlines()
    assert [line.split()[0] for line in lines] == names
    assert all("--hash=sha256:" in line for line in lines)


def test_every_hash_of_a_package_is_kept() -> None:
    lines = library.requirements_for(LOCK, library.Target("x86_64", "3.11"))
    assert "alpha==1.0 --hash=sha256:aa --hash=sha256:ab\n" in lines


def test_a_part_of_the_lock_can_be_asked_for() -> None:
    assert (
        library.requirements_for(LOCK, library.Target("x86_64", "3.11"), ["pip"])
        == "pip==26.3 --hash=sha256:ea\n"
    )


def a_project(folder: Path) -> Path:
    package = folder / library.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    (folder / "requirements").mkdir()
    (folder / library.NODE_LOCK).write_text(LOCK)
    (folder / "pyproject.toml").write_text("[project]\n")
    return folder


def test_the_key_follows_the_bytes_and_nothing_else(tmp_path: Path) -> None:
    project = a_project(tmp_path)
    key = library.source_key(project)
    source = project / library.PACKAGE / "__init__.py"
    source.touch()
    assert library.source_key(project) == key
    source.write_text("x = 2\n")
    assert library.source_key(project) != key


def test_a_half_made_environment_is_none(tmp_path: Path) -> None:
    assert library.installed_key(tmp_path) == ("", False)
    (tmp_path / library.STAMP).write_text("{half")
    assert library.installed_key(tmp_path) == ("", False)


def test_an_environment_of_an_older_system_python_is_made_anew(tmp_path: Path) -> None:
    stamp = {"key": "k", "complete": True, "python": "3.8"}
    (tmp_path / library.STAMP).write_text(json.dumps(stamp))
    assert library.installed_key(tmp_path) == ("", False)
    stamp["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / library.STAMP).write_text(json.dumps(stamp))
    assert library.installed_key(tmp_path) == ("k", True)


def test_a_bundle_replaces_the_wheels_of_before(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "old.whl").write_text("old")
    (tmp_path / "new.whl").write_text("new")
    with tarfile.open(tmp_path / "bundle.tar", "w") as archive:
        archive.add(tmp_path / "new.whl", "new.whl")
    library.unpack(tmp_path / "bundle.tar", wheels)
    assert [path.name for path in wheels.iterdir()] == ["new.whl"]


def test_wheels_without_ours_are_told(tmp_path: Path) -> None:
    with pytest.raises(Problem) as caught:
        library.install(tmp_path / "venv", tmp_path, complete=True)
    assert caught.value.code == "wheels"


@pytest.mark.parametrize("name", ["../escape.whl", "folder/x.whl", "/etc/x.whl"])
def test_a_bundle_that_would_write_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text("x")
    with tarfile.open(tmp_path / "bundle.tar", "w") as archive:
        archive.add(tmp_path / "x", name)
    with pytest.raises(Problem):
        library.unpack(tmp_path / "bundle.tar", tmp_path / "wheels")
    assert not (tmp_path / "wheels").exists()


def test_the_bundles_of_earlier_keys_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, cache = a_project(tmp_path / "project"), tmp_path / "cache"
    monkeypatch.setattr(library, "_pip", lambda *words: None)
    monkeypatch.setattr(library, "_build_wheel", lambda *words: None)
    here, there = library.Target("aarch64", "3.12"), library.Target("x86_64", "3.11")
    made = [library.build_bundle(project, there, complete=True, cache=cache)]
    for number in range(4):
        (project / library.PACKAGE / "__init__.py").write_text(f"x = {number + 5}\n")
        made.append(library.build_bundle(project, here, complete=True, cache=cache))
    assert sorted(cache.iterdir()) == sorted([made[0], *made[-2:]])
