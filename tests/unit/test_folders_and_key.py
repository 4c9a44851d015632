"""Folders as wanted, and one API key that is made once."""

from __future__ import annotations

import getpass
import grp
import os
from pathlib import Path

import pytest
from sparkpair import apikey, folders
from sparkpair.problem import Problem

ME = getpass.getuser()


def test_a_dry_run_makes_no_folder_and_says_which_it_would(tmp_path: Path) -> None:
    wanted = [folders.Folder(tmp_path / "a/b", ME, "0750")]
    before, after = folders.ensure(wanted, dry=True)
    assert before == [f"{tmp_path}/a/b absent"]
    assert after[0].endswith("0750")
    assert not (tmp_path / "a").exists()


def test_folders_are_made_and_mended_and_then_left_alone(tmp_path: Path) -> None:
    if grp.getgrgid(os.getgid()).gr_name != ME:
        pytest.fail("this test needs a user with a group of its own name, as Debian and Ubuntu make them")
    wanted = [folders.Folder(tmp_path / "a", ME, "0750"), folders.Folder(tmp_path / "a/b", ME, "0700")]
    folders.ensure(wanted, dry=False)
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    assert folders.ensure(wanted, dry=False) == ([], [])
    (tmp_path / "a").chmod(0o777)
    before, _ = folders.ensure(wanted, dry=False)
    assert len(before) == 1
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(Problem, match="no folder"):
        folders.ensure([folders.Folder(tmp_path / "a", ME, "0755")], dry=False)


def test_a_key_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apikey, "_OWNER", os.getuid())
    path = tmp_path / "keys"
    assert apikey.keep(path, "auto", dry=True) == (True, "pending")
    assert not path.exists()
    changed, digest = apikey.keep(path, "auto", dry=False)
    assert changed and path.stat().st_mode & 0o777 == 0o600
    assert apikey.keep(path, "auto", dry=False) == (False, digest)


def test_a_key_of_ones_own_replaces_it_and_its_digest_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apikey, "_OWNER", os.getuid())
    path = tmp_path / "keys"
    _, first = apikey.keep(path, "auto", dry=False)
    changed, second = apikey.keep(path, "sk-of-my-own", dry=False)
    assert changed and first != second
    assert "sk-of" not in second
    assert path.read_text() == "sk-of-my-own\n"


def test_a_file_that_others_may_read_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses to start with any mode but 0600."""
    monkeypatch.setattr(apikey, "_OWNER", os.getuid())
    path = tmp_path / "keys"
    apikey.keep(path, "auto", dry=False)
    path.chmod(0o644)
    key = path.read_text()
    assert apikey.keep(path, "auto", dry=False)[0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == key


def test_no_key_means_no_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-x\n")
    assert apikey.keep(path, "none", dry=True) == (True, "")
    assert path.exists()
    assert apikey.keep(path, "none", dry=False) == (True, "")
    assert apikey.keep(path, "none", dry=False) == (False, "")
