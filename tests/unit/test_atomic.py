"""A file is the old one or the new one, and nothing but a file is ever replaced."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from sparkpair import atomic
from sparkpair.problem import Problem


def test_a_block_that_raises_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic.replacing(path) as handle:
        handle.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_bytes_are_no_change(tmp_path: Path) -> None:
    assert atomic.write_text(tmp_path / "f", "x")
    assert not atomic.write_text(tmp_path / "f", "x")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def a_link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


@pytest.mark.parametrize("make", [a_pipe, a_socket, a_link_to_a_pipe, Path.mkdir])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, make: object) -> None:
    """As root, a rename onto /dev/null would take it from the whole machine."""
    place = tmp_path / "x"
    make(place)  # type: ignore[operator]
    kind = stat.S_IFMT(place.lstat().st_mode)
    with pytest.raises(Problem) as caught:
        atomic.write_text(place, "x")
    assert caught.value.code == "not-a-file"
    assert stat.S_IFMT(place.lstat().st_mode) == kind
    assert not place.with_name(".x.partial").exists()
