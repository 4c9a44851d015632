"""The engine's source: the pinned commit, proven, byte for byte."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sparkpair import gitsource
from sparkpair.problem import Problem


def git(folder: Path, *words: str) -> str:
    environment = {
        **os.environ,
        "GIT_AUTHOR_DATE": "2026-01-01T00:00Z",
        "GIT_COMMITTER_DATE": "2026-01-01T00:00Z",
    }
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *words],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits on branch `zig`, with what makes an export differ from a tree: attributes, modes, a link."""
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "--quiet", "-b", "zig")
    (folder / ".gitattributes").write_text("secret.txt export-ignore\n*.txt eol=crlf\nid.txt export-subst\n")
    (folder / "secret.txt").write_text("kept\n")
    (folder / "id.txt").write_text("$Format:%H$\n")
    (folder / "a-b").mkdir()
    (folder / "a-b/x").write_text("1")
    (folder / "a.zig").write_text("2")
    (folder / "a").mkdir()
    (folder / "a/run").write_text("#!/bin/sh\n")
    (folder / "a/run").chmod(0o755)
    (folder / "link").symlink_to("a/run")
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "one")
    (folder / "a.zig").write_text("3")
    git(folder, "commit", "--quiet", "-am", "two")
    return folder


def commits(repository: Path) -> list[str]:
    return git(repository, "log", "--format=%H").split()


@pytest.mark.parametrize("digits", [40, 12, 7])
def test_a_commit_is_had_by_its_full_or_abbreviated_id(repository: Path, tmp_path: Path, digits: int) -> None:
    for full in commits(repository):
        found = gitsource.obtain(f"file://{repository}", full[:digits], "zig", tmp_path / "store.git")
        assert found.commit == full
        assert found.tree == git(repository, "rev-parse", f"{full}^{{tree}}")


def test_a_commit_that_is_there_needs_no_network(repository: Path, tmp_path: Path) -> None:
    full = commits(repository)[1]
    gitsource.obtain(f"file://{repository}", full, "zig", tmp_path / "store.git")
    found = gitsource.obtain("file:///nonexistent", full, "zig", tmp_path / "store.git")
    assert found.commit == full


def test_an_abbreviation_after_a_shallow_fetch_still_finds_older_commits(
    repository: Path, tmp_path: Path
) -> None:
    newest, oldest = commits(repository)
    gitsource.obtain(f"file://{repository}", newest, "zig", tmp_path / "store.git")
    assert (
        gitsource.obtain(f"file://{repository}", oldest[:10], "zig", tmp_path / "store.git").commit == oldest
    )


def test_what_is_laid_out_is_the_tree_itself_whatever_its_attributes_say(
    repository: Path, tmp_path: Path
) -> None:
    source = gitsource.obtain(f"file://{repository}", commits(repository)[0], "zig", tmp_path / "store.git")
    gitsource.export(source, tmp_path / "out")
    assert (tmp_path / "out/secret.txt").read_bytes() == b"kept\n"
    assert (tmp_path / "out/id.txt").read_bytes() == b"$Format:%H$\n"
    assert (tmp_path / "out/a/run").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out/link").readlink() == Path("a/run")
    assert not (tmp_path / "out/.git").exists()
    assert gitsource.tree_id(tmp_path / "out") == source.tree


@pytest.mark.parametrize("change", ["byte", "mode", "name", "more"])
def test_the_tree_id_tells_any_change_on_disk(repository: Path, tmp_path: Path, change: str) -> None:
    source = gitsource.obtain(f"file://{repository}", commits(repository)[0], "zig", tmp_path / "store.git")
    out = tmp_path / "out"
    gitsource.export(source, out)
    if change == "byte":
        (out / "a.zig").write_text("4")
    elif change == "mode":
        (out / "a.zig").chmod(0o755)
    elif change == "name":
        (out / "a.zig").rename(out / "b.zig")
    else:
        (out / "a/more").write_text("")
    assert gitsource.tree_id(out) != source.tree


def test_a_commit_that_is_nowhere_is_named_with_its_branch(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(Problem) as caught:
        gitsource.obtain(f"file://{repository}", "0" * 40, "zig", tmp_path / "store.git")
    assert caught.value.code == "source-commit"
    assert "0000000" in caught.value.found and "branch zig" in caught.value.found


def test_a_branch_that_is_not_there_is_told_as_such(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(Problem) as caught:
        gitsource.obtain(f"file://{repository}", "1234567", "main", tmp_path / "store.git")
    assert caught.value.code == "source-not-offered"
    assert "branch main" in caught.value.needed


def test_a_repository_out_of_reach_is_told_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(Problem) as caught:
        gitsource.obtain("http://user:canary@127.0.0.1:9/x.git", "1" * 40, "", tmp_path / "store.git")
    assert caught.value.code == "source-unreachable"
    assert "canary" not in str(caught.value)


def test_a_damaged_object_in_the_cache_is_found(repository: Path, tmp_path: Path) -> None:
    store = tmp_path / "store.git"
    source = gitsource.obtain(f"file://{repository}", commits(repository)[0], "zig", store)
    replaced = gitsource.Source(store, source.commit, git(repository, "rev-parse", "HEAD~1^{tree}"))
    with pytest.raises(Problem) as caught:
        gitsource.export(replaced, tmp_path / "out")
    assert caught.value.code in {"source-damaged", "source-git"}


def test_a_submodule_is_refused(repository: Path, tmp_path: Path) -> None:
    inner = commits(repository)[0]
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{inner},sub")
    git(repository, "commit", "--quiet", "-m", "sub")
    source = gitsource.obtain(f"file://{repository}", commits(repository)[0], "zig", tmp_path / "store.git")
    with pytest.raises(Problem) as caught:
        gitsource.export(source, tmp_path / "out")
    assert caught.value.code == "source-submodule"
    assert "sub" in caught.value.found
