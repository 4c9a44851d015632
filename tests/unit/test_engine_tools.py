"""The stand-in's input tools: a rank's cache from a checkpoint, and its check (engine facts: rank cache)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import engine_pair
import pytest
from engine_pair import World


@pytest.fixture
def world() -> World:
    return engine_pair.shared()


def cache_of(folder: Path) -> tuple[Path, list[list[Any]], bytes]:
    """A cache by its format: the file, its index, its tensors' bytes."""
    (file,) = folder.glob("rank*.bin")
    data = file.read_bytes()
    assert data[-8:] == b"TFDSRK01"
    at = int.from_bytes(data[-16:-8], "little")
    return file, json.loads(data[at:-16]), data[:at]


def write(world: World, model: Path, out: Path, rank: int, *options: str) -> dict[str, Any]:
    done = world.run("tf-dsv41-rank-cache", model, out, rank, 2, *options)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_cache_is_bytes_back_to_back_then_the_index_its_offset_and_the_magic(world: World) -> None:
    file, index, data = cache_of(world.at("cache0"))
    at = 0
    for _key, dtype, shape, offset, size in index:
        count = {"bfloat16": 2, "float16": 2, "int16": 2, "float32": 4}[dtype]
        for d in shape:
            count *= d
        assert (offset, size) == (at, count)
        at += size
    assert at == len(data)
    text = json.dumps(index).encode()
    assert file.name == f"rank0of2-{hashlib.sha256(text).hexdigest()[:20]}.bin"


def test_the_ranks_hold_different_halves_of_what_is_split_and_the_same_of_the_rest(world: World) -> None:
    (_, index0, data0), (_, index1, data1) = (cache_of(world.at(f"cache{r}")) for r in (0, 1))
    both = (
        {r[0]: data0[r[3] : r[3] + r[4]] for r in index0},
        {r[0]: data1[r[3] : r[3] + r[4]] for r in index1},
    )
    assert "layers.0.attn.wq_b|(0, 32)|None|tr" in both[0]
    assert "layers.0.attn.wq_b|(32, 64)|None|tr" in both[1]
    assert "layers.1.ffn.experts.1.w2|None|(32, 64)|tr" in both[1]
    whole = engine_pair.noise("layers.0.attn.wo_b", 4 * 2 * 96)
    halves = (both[r][f"layers.0.attn.wo_b|None|({32 * r}, {32 * r + 32})|tr"] for r in (0, 1))
    assert b"".join(halves) == whole
    rows = engine_pair.noise("layers.0.attn.wq_b", 2 * 4 * 96)  # two rows of four tiles, two tiles a rank
    assert both[1]["layers.0.attn.wq_b|(32, 64)|None|tr"] == rows[192:384] + rows[576:768]
    assert both[0]["norm.weight|None"] == both[1]["norm.weight|None"]
    assert not any("vision" in k or "bias_vl" in k or "mul1" in k for k in both[0])


def test_an_overlay_gives_the_same_name_and_other_bytes(world: World, tmp_path: Path) -> None:
    """The trap of the engine facts: the name hashes the index only, so variants need folders of their own."""
    other = world.copy(tmp_path / "w")
    engine_pair.safetensors(
        other.at("model/zz_keys_overlay.safetensors"), engine_pair.exl3("layers.0.attn.wo_b", 4, 2, "other")
    )
    write(world, other.at("model"), tmp_path / "out", 0)
    stock, ablit = (cache_of(p) for p in (world.at("cache0"), tmp_path / "out"))
    assert stock[0].name == ablit[0].name
    assert stock[1] == ablit[1]
    assert stock[2] != ablit[2]


def test_a_folder_that_holds_the_rank_already_is_refused(world: World) -> None:
    done = world.run("tf-dsv41-rank-cache", world.at("model"), world.at("cache0"), 0, 2)
    assert done.returncode == 1
    assert "already holds rank0of2-" in done.stderr
    assert len(list(world.at("cache0").iterdir())) == 1


def test_writing_shows_progress_and_one_summary_and_leaves_no_partial(world: World, tmp_path: Path) -> None:
    partial = tmp_path / ".rank0of2.partial"
    partial.write_bytes(b"of an earlier crash")
    done = world.run("tf-dsv41-rank-cache", world.at("model"), tmp_path, 0, 2)
    said = json.loads(done.stdout)
    assert "rank 0 of 2: " in done.stderr
    assert said["data_bytes"] + said["index_bytes"] + 16 == (tmp_path / said["file"]).stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == [said["file"]]


def test_index_only_prints_the_index_and_writes_nothing(world: World, tmp_path: Path) -> None:
    done = world.run("tf-dsv41-rank-cache", world.at("model"), tmp_path / "none", 1, 2, "--index-only")
    assert json.loads(done.stdout) == cache_of(world.at("cache1"))[1]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "words",
    ["", "m o 0", "m o 2 2", "m o 0 3", "m o 0 2 --parity", "m o x 2", "m o 0 2 --bytes"],
)
def test_a_wrong_command_line_of_the_writer_ends_with_2(world: World, words: str) -> None:
    done = world.run("tf-dsv41-rank-cache", *words.split())
    assert done.returncode == 2
    assert "usage: tf-dsv41-rank-cache" in done.stderr


def test_a_checkpoint_without_a_part_is_refused_by_the_tensor(world: World, tmp_path: Path) -> None:
    model = world.copy(tmp_path / "w").at("model")
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    parts = engine_pair.exl3("head", 2, 4)
    del parts["head.svh"]
    engine_pair.safetensors(model / "model.safetensors", parts)
    done = world.run("tf-dsv41-rank-cache", model, tmp_path / "out", 0, 2)
    assert done.returncode == 1
    assert "head.svh" in done.stderr
    assert "MissingTensor" in done.stderr


def test_the_check_passes_what_the_writer_wrote(world: World) -> None:
    done = world.run("tf-dsv41-check", world.at("model"), world.at("cache1"), 1, 2, "--bytes", 1)
    said = json.loads(done.stdout)
    assert done.returncode == 0
    assert said["ok"] is True
    assert said["entries"] == said["planned"] == said["compared"]


def test_the_check_finds_one_flipped_byte(world: World, tmp_path: Path) -> None:
    """Field report 37: the right size is no proof."""
    other = world.copy(tmp_path / "w")
    (file,) = other.at("cache0").iterdir()
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    done = world.run("tf-dsv41-check", world.at("model"), other.at("cache0"), 0, 2, "--bytes", 8)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["byte_mismatches"] == 1
    assert "embed.weight|None differ" in done.stdout


def test_the_check_finds_a_cache_of_another_plan(world: World, tmp_path: Path) -> None:
    write(world, world.at("model"), tmp_path, 0, "--no-dspark")
    done = world.run("tf-dsv41-check", world.at("model"), tmp_path, 0, 2)
    said = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert said["entries"] < said["planned"]
    assert world.run("tf-dsv41-check", world.at("model"), tmp_path, 0, 2, "--no-dspark").returncode == 0


def test_the_check_names_its_own_errors(world: World, tmp_path: Path) -> None:
    none = world.run("tf-dsv41-check", world.at("model"), tmp_path, 0, 2)
    assert (none.returncode, none.stderr.splitlines()[-1]) == (1, "error: NoRankCache")
    wrong = world.run("tf-dsv41-check", world.at("model"), world.at("cache0"), 0, 2, "--byte", "1")
    assert (wrong.returncode, wrong.stderr.splitlines()[-1]) == (2, "error: BadArgument")
