"""The Keys overlay: hard links, a name that sorts last, an index that says so; the checkpoint untouched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sparkpair import cli, hashing, locks, overlay, verify
from sparkpair.locks import Lock, LockedFile
from sparkpair.problem import Problem
from sparkpair.receipts import Receipts

INDEX = "model.safetensors.index.json"
WO_B = "layers.10.attn.wo_b.trellis"


def shard(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def lock_of(folder: Path, repo: str = "owner/stock") -> Lock:
    files = [
        LockedFile(path.name, path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    ]
    return Lock(repo, "1" * 40, tuple(files))


class Parts:
    def __init__(self, folder: Path) -> None:
        self.stock, self.keys, self.out = folder / "stock", folder / "keys", folder / "stock-keys"
        self.stock.mkdir()
        self.keys.mkdir()
        (self.stock / "model-00001.safetensors").write_bytes(
            shard({WO_B: ("I16", [2, 2], b"stockwob"), "layers.10.ffn.w": ("U8", [3], b"abc")})
        )
        (self.stock / "model-00002.safetensors").write_bytes(shard({"head": ("F32", [1], b"head")}))
        weight_map = {
            WO_B: "model-00001.safetensors",
            "layers.10.ffn.w": "model-00001.safetensors",
            "head": "model-00002.safetensors",
        }
        (self.stock / INDEX).write_text(
            json.dumps({"metadata": {"total_size": 15}, "weight_map": weight_map})
        )
        (self.stock / "config.json").write_text("{}")
        self.write_overlay({WO_B: ("I16", [2, 2], b"keys-wob")})
        self.lock = lock_of(self.stock)
        verify.verify(self.lock, self.stock, quiet=True)

    @property
    def overlay(self) -> Path:
        return self.keys / "mia_wo_b.safetensors"

    def write_overlay(self, tensors: dict[str, Any]) -> None:
        self.overlay.write_bytes(shard(tensors))
        self.overlay_lock = lock_of(self.keys, "owner/keys")

    def lay(self) -> overlay.Result:
        return overlay.lay(self.stock, self.lock, self.overlay, self.overlay_lock, self.out, quiet=True)

    def refused(self) -> Problem:
        with pytest.raises(Problem) as caught:
            self.lay()
        assert not self.out.exists()
        return caught.value


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_the_result_is_links_to_the_checkpoint_and_the_overlay_under_a_name_that_sorts_last(
    parts: Parts,
) -> None:
    result = parts.lay()
    assert result.changed and result.tensors == 1
    for name in ("model-00001.safetensors", "model-00002.safetensors", "config.json"):
        assert (parts.out / name).samefile(parts.stock / name)
        assert not (parts.out / name).is_symlink()
    shards = sorted(path.name for path in parts.out.glob("*.safetensors"))
    assert shards[-1] == "zz_keys_overlay.safetensors"
    assert (parts.out / shards[-1]).samefile(parts.overlay)


def test_the_index_points_the_overlaid_names_at_it_and_leaves_the_rest(parts: Parts) -> None:
    before = (parts.stock / INDEX).read_text()
    parts.lay()
    index = json.loads((parts.out / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 15},
        "weight_map": {
            WO_B: "zz_keys_overlay.safetensors",
            "layers.10.ffn.w": "model-00001.safetensors",
            "head": "model-00002.safetensors",
        },
    }
    assert (parts.stock / INDEX).read_text() == before


def test_the_result_has_its_own_lock_and_receipts_and_no_shard_is_read_again(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = hashing.digest_file

    def watched(path: Path, *rest: Any, **named: Any) -> hashing.Digest:
        read.append(path.name)
        return real(path, *rest, **named)

    monkeypatch.setattr(hashing, "digest_file", watched)
    result = parts.lay()
    assert read == ["mia_wo_b.safetensors"]  # its first verification
    lock = locks.load(result.lock_path)
    assert lock == result.lock
    assert [entry.path for entry in lock.files] == sorted(
        ["config.json", "model-00001.safetensors", "model-00002.safetensors", INDEX, overlay.NAME]
    )
    assert verify.verify(lock, parts.out, quiet=True).bytes == 0
    monkeypatch.undo()
    assert verify.verify(lock, parts.out, full=True, quiet=True).ok


def test_a_second_time_nothing_is_written(parts: Parts) -> None:
    parts.lay()
    stamps = {path.name: path.lstat().st_mtime_ns for path in parts.out.iterdir()}
    assert not parts.lay().changed
    assert {path.name: path.lstat().st_mtime_ns for path in parts.out.iterdir()} == stamps


def test_the_checkpoint_stays_verified_so_back_and_forth_costs_nothing(parts: Parts) -> None:
    parts.lay()
    assert verify.verify(parts.lock, parts.stock, quiet=True).bytes == 0
    assert verify.verify(parts.lock, parts.stock, quiet=True).ok


def test_a_checkpoint_fetched_again_is_linked_again(parts: Parts) -> None:
    parts.lay()
    name = parts.stock / "model-00002.safetensors"
    data = name.read_bytes()
    name.unlink()
    name.write_bytes(data)
    assert parts.lay().changed
    assert (parts.out / name.name).samefile(name)


def test_another_overlay_or_checkpoint_makes_another_result(parts: Parts) -> None:
    first = parts.lay()
    parts.write_overlay({"head": ("F32", [1], b"keys")})
    (parts.stock / "config.json").unlink()
    parts.lock = lock_of(parts.stock)
    second = parts.lay()
    assert second.changed
    assert second.lock.revision != first.lock.revision
    assert not (parts.out / "config.json").exists()
    assert json.loads((parts.out / INDEX).read_text())["weight_map"]["head"] == overlay.NAME


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"layers.99.attn.wo_b.trellis": ("I16", [2, 2], b"keys-wob")}, "layers.99.attn.wo_b.trellis"),
        ({WO_B: ("I16", [4], b"keys-wob")}, "I16 [4]; the checkpoint: I16 [2, 2]"),
        ({WO_B: ("F16", [2, 2], b"keys-wob")}, "F16 [2, 2]; the checkpoint: I16 [2, 2]"),
        ({}, "no tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    parts: Parts, tensors: dict[str, Any], words: str
) -> None:
    parts.write_overlay(tensors)
    problem = parts.refused()
    assert problem.code == "overlay-misfit"
    assert words in problem.found


def test_a_corrupt_overlay_or_checkpoint_is_refused(parts: Parts) -> None:
    data = parts.overlay.read_bytes()
    parts.overlay.write_bytes(data[:-1] + b"X")
    assert parts.refused().code == "wrong-hash"
    parts.overlay.write_bytes(data)
    (parts.stock / "model-00002.safetensors").write_bytes(b"short")
    assert parts.refused().code == "wrong-size"


def test_an_overlay_that_its_lock_does_not_name_is_refused(parts: Parts) -> None:
    parts.overlay.rename(parts.keys / "wo_b.safetensors")
    with pytest.raises(Problem) as caught:
        overlay.lay(
            parts.stock,
            parts.lock,
            parts.keys / "wo_b.safetensors",
            parts.overlay_lock,
            parts.out,
            quiet=True,
        )
    assert caught.value.code == "overlay-unlocked"
    assert "mia_wo_b.safetensors" in caught.value.needed


@pytest.mark.parametrize("inside", [".", "keys", ".."])
def test_a_result_inside_the_checkpoint_is_refused(parts: Parts, inside: str) -> None:
    with pytest.raises(Problem) as caught:
        overlay.lay(
            parts.stock, parts.lock, parts.overlay, parts.overlay_lock, parts.stock / inside, quiet=True
        )
    assert caught.value.code == "overlay-out"


def test_another_checkpoint_is_never_taken_for_a_result(parts: Parts) -> None:
    """Its shards have the same names, and receipts as ours have."""
    shutil.copytree(parts.stock, parts.out)
    (parts.out / "extra.safetensors").write_bytes(b"extra")
    verify.verify(lock_of(parts.out), parts.out, quiet=True)
    before = {path.name: path.read_bytes() for path in parts.out.iterdir()}
    with pytest.raises(Problem) as caught:
        parts.lay()
    assert caught.value.code == "overlay-out"
    assert {path.name: path.read_bytes() for path in parts.out.iterdir()} == before


def test_the_overlays_own_folder_is_no_place_for_the_result(parts: Parts) -> None:
    with pytest.raises(Problem) as caught:
        overlay.lay(parts.stock, parts.lock, parts.overlay, parts.overlay_lock, parts.keys, quiet=True)
    assert caught.value.code == "overlay-out"
    assert parts.overlay.is_file()


def test_the_result_s_lock_does_not_take_the_place_of_the_checkpoint_s(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, keys = tmp_path / "lock.json", tmp_path / "keys.json"
    lock.write_text(locks.dump(parts.lock))
    keys.write_text(locks.dump(parts.overlay_lock))
    words = ["overlay", "--stock", str(parts.stock), "--lock", str(lock), "--overlay", str(parts.overlay)]
    words += ["--overlay-lock", str(keys), "--out", str(parts.out), "--lock-out", str(lock)]
    assert cli.main(words) == 1
    assert "is the lock of what the result is made of" in capsys.readouterr().err
    assert lock.read_text() == locks.dump(parts.lock)


def test_a_strangers_file_in_the_results_folder_is_not_removed(parts: Parts) -> None:
    parts.lay()
    (parts.out / "config.json").unlink()
    (parts.out / "mine.txt").write_text("mine")
    with pytest.raises(Problem) as caught:
        parts.lay()
    assert caught.value.code == "stray-file"
    assert (parts.out / "mine.txt").read_text() == "mine"


def test_a_run_killed_at_its_very_beginning_is_begun_again(parts: Parts) -> None:
    parts.out.mkdir()
    (parts.out / f".{overlay.MARK}.partial").write_text("This fol")
    assert parts.lay().changed


def test_a_killed_run_leaves_nothing_in_the_way(parts: Parts) -> None:
    parts.out.mkdir()
    (parts.out / overlay.MARK).write_text("")
    os.link(parts.stock / "config.json", parts.out / ".config.json.partial")
    (parts.out / f".{INDEX}.partial").write_text("half")
    assert parts.lay().changed
    assert not list(parts.out.glob(".*.partial"))


def test_another_filesystem_is_told(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(Problem) as caught:
        parts.lay()
    assert caught.value.code == "overlay-link"


def test_the_command_lays_it_and_says_where_its_lock_is(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lock in (("stock.json", parts.lock), ("keys.json", parts.overlay_lock)):
        (tmp_path / name).write_text(locks.dump(lock))
    words = ["overlay", "--stock", str(parts.stock), "--lock", str(tmp_path / "stock.json")]
    words += ["--overlay", str(parts.overlay), "--overlay-lock", str(tmp_path / "keys.json")]
    words += ["--out", str(parts.out), "--lock-out", str(tmp_path / "result.json")]
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "ok": True,
        "changed": True,
        "tensors": 1,
        "files": 5,
        "lock": str(tmp_path / "result.json"),
    }
    assert cli.main(["verify", "--lock", told["lock"], "--dir", str(parts.out)]) == 0
    assert cli.main(words) == 0
    assert "already there" in capsys.readouterr().out


def test_receipts_of_the_result_follow_a_change_of_the_linked_file(parts: Parts) -> None:
    result = parts.lay()
    with (parts.stock / "model-00002.safetensors").open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"X")
    assert not Receipts.open(parts.out).holds(result.lock.by_path["model-00002.safetensors"])


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"weight_map": %s}' % ("7" * 5000)])
def test_an_index_that_is_not_readable_is_named(parts: Parts, text: str) -> None:
    (parts.stock / INDEX).write_text(text)
    parts.lock = lock_of(parts.stock)
    problem = parts.refused()
    assert problem.code == "index-bad"
    assert INDEX in problem.found
