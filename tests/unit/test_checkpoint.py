"""The stand-in checkpoints: what is true of the originals is true of them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, hf_hub_download
from sparkpair.problem import Problem

from rehearsal import checkpoint as ck
from rehearsal.hub import NEWCOMER_TOKEN, READER_TOKEN, Hub, publish

ELEMENT = {"I16": 2, "I32": 4, "F16": 2, "F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1}
Header = dict[str, dict[str, Any]]
RECORDED = "eb2439021eb6ee2c"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    assert ck.build(root)
    return root


def header(file: Path) -> Header:
    """The header of a safetensors file, after checking that its offsets tile the file exactly."""
    with file.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        found: Header = json.loads(handle.read(length))
    assert length % 8 == 0
    at = 0
    for name, entry in found.items():
        begin, end = entry["data_offsets"]
        assert (begin, end - begin) == (at, prod(entry["shape"]) * ELEMENT[entry["dtype"]]), name
        at = end
    assert file.stat().st_size == 8 + length + at
    return found


def headers(root: Path, repo: str) -> dict[str, Header]:
    files = sorted((root / repo / "files").glob("*.safetensors"))
    return {file.name: header(file) for file in files}


def tensor_bytes(file: Path, name: str) -> bytes:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return data[8 + length + begin : 8 + length + end]


def index(root: Path, repo: str) -> dict[str, str]:
    places: dict[str, str] = json.loads((root / repo / "files/model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    return places


@pytest.mark.parametrize(
    ("repo", "count"),
    [(ck.PACK, 39), (ck.EARLIER_PACK, 39), (ck.ORIGINAL, 48), (ck.EARLIER_ORIGINAL, 48)],
)
def test_every_tensor_of_the_index_is_in_exactly_the_shard_it_names(
    root: Path, repo: str, count: int
) -> None:
    shards = headers(root, repo)
    assert list(shards) == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    held = [(name, file) for file, tensors in shards.items() for name in tensors]
    assert len(held) == len(dict(held))
    assert dict(held) == index(root, repo)
    assert all(shards.values())


def test_the_newer_pack_holds_the_43_image_biases(root: Path) -> None:
    shards = headers(root, ck.PACK)
    held = {n: t for shard in shards.values() for n, t in shard.items() if n.endswith("bias_vl")}
    layers = [f"layers.{n}" for n in range(40)] + [f"mtp.{n}" for n in range(3)]
    assert set(held) == {f"{layer}.ffn.gate.bias_vl" for layer in layers}
    assert {(entry["dtype"], *entry["shape"]) for entry in held.values()} == {("F32", 384)}


def test_the_earlier_pack_lost_the_image_biases_and_its_original_has_them(root: Path) -> None:
    assert not [name for name in index(root, ck.EARLIER_PACK) if name.endswith("bias_vl")]
    places = {n: at for n, at in index(root, ck.EARLIER_ORIGINAL).items() if n.endswith("bias_vl")}
    assert len(places) == 43
    assert len(set(places.values())) == 43  # so that a bounded fetch has to open many shards


def test_a_pack_differs_from_the_earlier_one_in_nothing_but_the_biases_and_its_numbers(root: Path) -> None:
    newer, earlier = set(index(root, ck.PACK)), set(index(root, ck.EARLIER_PACK))
    assert earlier < newer
    assert all(name.endswith("bias_vl") for name in newer - earlier)


def test_exl3_matrices_come_in_four_parts_that_fit_each_other(root: Path) -> None:
    held = {n: t for shard in headers(root, ck.PACK).values() for n, t in shard.items()}
    matrices = [name.removesuffix(".trellis") for name in held if name.endswith(".trellis")]
    assert len(matrices) > 40 * (4 * 3 + 3 + 12)
    for matrix in matrices:
        rows, columns, depth = held[f"{matrix}.trellis"]["shape"]
        assert held[f"{matrix}.suh"] | {"data_offsets": 0} == {
            "dtype": "F16",
            "shape": [16 * rows],
            "data_offsets": 0,
        }
        assert held[f"{matrix}.svh"]["shape"] == [16 * columns]
        assert (held[f"{matrix}.mul1"]["dtype"], held[f"{matrix}.mul1"]["shape"]) == ("I32", [])
        assert depth % 16 == 0


def test_bits_are_the_pack_s(root: Path) -> None:
    """Routed experts 3 bits, 2 on layers 18 to 22; attention 5; drafts 4; head 6."""
    held = {n: t for shard in headers(root, ck.PACK).values() for n, t in shard.items()}

    def bits(matrix: str) -> int:
        return int(held[f"{matrix}.trellis"]["shape"][2]) // 16

    assert [n for n in range(40) if bits(f"layers.{n}.ffn.experts.0.w1") == 2] == [18, 19, 20, 21, 22]
    assert bits("layers.0.ffn.experts.3.w2") == 3
    assert {bits(f"layers.{n}.attn.wo_b") for n in range(40)} == {5}
    assert (bits("mtp.2.ffn.experts.0.w3"), bits("head")) == (4, 6)


def test_no_number_is_infinite_or_wild(root: Path) -> None:
    import numpy as np

    name = "layers.7.ffn.gate.bias_vl"
    file = root / ck.PACK / "files" / index(root, ck.PACK)[name]
    values = np.frombuffer(tensor_bytes(file, name), "<f4")
    assert np.isfinite(values).all()
    assert (abs(values) < 2).all()
    assert len(set(values.tolist())) > 380


def test_two_ranks_can_halve_every_matrix_that_they_split(root: Path) -> None:
    for name, entry in (i for shard in headers(root, ck.PACK).values() for i in shard.items()):
        if name.endswith(("w1.trellis", "w3.trellis", "wq_b.trellis", "head.trellis")):
            assert entry["shape"][1] % 2 == 0
        if name.endswith(("w2.trellis", "wo_b.trellis")):
            assert entry["shape"][0] % 2 == 0


@pytest.mark.parametrize("repo", [ck.ORIGINAL, ck.EARLIER_ORIGINAL])
def test_engram_is_in_shards_47_and_48_under_its_true_names_and_types(root: Path, repo: str) -> None:
    shards = headers(root, repo)
    for number, layer in ((47, 1), (48, 14)):
        held = shards[f"model-000{number}-of-00048.safetensors"]
        table, scale = held[f"layers.{layer}.engram.embed.weight"], held[f"layers.{layer}.engram.embed.scale"]
        assert (table["dtype"], table["shape"][1]) == ("F8_E4M3", 256)
        assert (scale["dtype"], scale["shape"]) == ("F8_E8M0", [table["shape"][0], 8])
    others = [name for file, held in shards.items() if file[6:11] < "00047" for name in held]
    assert not [name for name in others if ".engram." in name]


def test_the_overlay_is_104_tensors_typed_and_shaped_as_stock_with_other_bytes(root: Path) -> None:
    file = root / ck.OVERLAY / "files" / ck.OVERLAY_FILE
    laid = header(file)
    assert set(laid) == {
        f"layers.{n}.attn.wo_b.{part}" for n in range(10, 36) for part in ("trellis", "suh", "svh", "mul1")
    }
    assert len(laid) == 104
    for repo in (ck.PACK, ck.EARLIER_PACK):
        stock = {n: t for shard in headers(root, repo).values() for n, t in shard.items()}
        for name, entry in laid.items():
            assert (stock[name]["dtype"], stock[name]["shape"]) == (entry["dtype"], entry["shape"])
    name = "layers.20.attn.wo_b.trellis"
    stock_file = root / ck.PACK / "files" / index(root, ck.PACK)[name]
    assert tensor_bytes(file, name) != tensor_bytes(stock_file, name)


def test_at_full_size_the_overlay_s_layout_has_the_recorded_size() -> None:
    full = ck.overlay_tensors(ck.Sizes(hidden=320, heads_out=512))
    head, laid = ck.safetensors_layout(full)
    assert len(head) + sum(tensor.size for tensor in laid) == 682_275_992


def test_the_configuration_is_the_true_one(root: Path) -> None:
    config = json.loads((root / ck.PACK / "files/config.json").read_text())
    text = config["text_config"]
    assert (config["model_type"], config["image_token_id"]) == ("deepseek_v41", 129264)
    assert (text["head_dim"], text["qk_rope_head_dim"], text["n_routed_experts"]) == (512, 64, 384)
    assert (text["rope_theta"], text["compress_rope_theta"]) == (10000, 160000)
    assert text["rope_scaling"]["factor"] == 16
    assert text["engram_num_embeddings"] == [384006168, 384016682]
    assert text["engram_compressed_vocab_size"] == 99092
    assert Counter(text["compress_ratios"]) == {0: 5, 2: 18, 1: 20}
    assert config["quantization_config"]["quant_method"] == "exl3"
    original = json.loads((root / ck.ORIGINAL / "files/config.json").read_text())
    assert original["text_config"] == text
    assert original["quantization_config"]["quant_method"] == "fp8"


def test_the_tokenizer_is_the_true_one(root: Path) -> None:
    for repo in (ck.PACK, ck.EARLIER_PACK):
        data = (root / repo / "files/tokenizer.json").read_bytes()
        assert len(data) == 6_367_146


def test_a_build_is_small_and_kept(root: Path) -> None:
    stamp = json.loads((root / ".checkpoint.json").read_text())
    assert 40e6 < sum(size for size, _ in stamp["files"].values()) < 70e6
    assert ck.build(root) is False


def test_the_same_bytes_come_out_each_time(root: Path, tmp_path: Path) -> None:
    ck.build(tmp_path)
    for repo in (ck.PACK, ck.ORIGINAL, ck.EARLIER_PACK, ck.EARLIER_ORIGINAL, ck.OVERLAY):
        kept = json.loads((root / repo / "hashes.json").read_text())
        again = json.loads((tmp_path / repo / "hashes.json").read_text())
        assert {name: row[2] for name, row in kept.items()} == {name: row[2] for name, row in again.items()}
    shards = sorted((root / ck.PACK / "files").glob("*.safetensors"))
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in shards}) == 39


def test_random_numbers_are_the_recorded_ones() -> None:
    """The bytes must not change with numpy or the machine: locks and caches of the rehearsal hold them."""
    data = b"".join(ck.random_blocks("seed", "F16", 5_000_001))
    assert len(data) == 5_000_001
    assert data[:8].hex() == RECORDED


def test_a_damaged_file_is_built_again(tmp_path: Path) -> None:
    ck.build(tmp_path)
    file = tmp_path / ck.PACK / "files" / "model-00003-of-00039.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    os.utime(file, ns=(0, 0))
    assert ck.build(tmp_path) is True
    assert file.read_bytes() == before


def test_a_build_takes_back_what_was_published_since(tmp_path: Path) -> None:
    ck.build(tmp_path)
    publish(tmp_path, ck.PACK, {"README.md": b"newer"})
    assert ck.build(tmp_path) is True
    with Hub(tmp_path) as hub:
        assert HfApi(endpoint=hub.url, token=False).model_info(ck.PACK).sha == ck.PACK_REVISION


def test_scale_grows_the_pack_and_engram_alike(tmp_path: Path) -> None:
    assert ck.build(tmp_path, scale=120_000_000)

    def taken(repo: str, pattern: str) -> int:
        return sum(file.stat().st_size for file in (tmp_path / repo / "files").glob(pattern))

    pack, engram = taken(ck.PACK, "*.safetensors"), taken(ck.ORIGINAL, "model-0004[78]-*")
    assert 57e6 < pack < 63e6
    assert 57e6 < engram < 63e6
    assert taken(ck.EARLIER_PACK, "*.safetensors") < 25e6
    assert len(headers(tmp_path, ck.PACK)) == 39
    assert ck.build(tmp_path, scale=120_000_000) is False


def test_a_scale_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="a scale of 1000 bytes") as caught:
        ck.build(tmp_path, scale=1000)
    assert caught.value.code == "scale-too-small"
    assert not list(tmp_path.iterdir())


def test_the_hub_serves_them_with_the_hashes_of_their_bytes(root: Path, tmp_path: Path) -> None:
    with Hub(root) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        info = api.model_info(ck.PACK, files_metadata=True)
        assert info.sha == ck.PACK_REVISION
        files = {each.rfilename: each for each in info.siblings or []}
        assert len([name for name in files if name.endswith(".safetensors")]) == 39
        for name in ("model-00001-of-00039.safetensors", "model.safetensors.index.json"):
            lfs = files[name].lfs
            assert lfs is not None
            data = (root / ck.PACK / "files" / name).read_bytes()
            assert lfs.sha256 == hashlib.sha256(data).hexdigest()
        assert files["tokenizer.json"].lfs is None
        assert hub.bytes_sent() == 0


def test_the_pinned_commit_is_neither_the_first_nor_the_newest(root: Path) -> None:
    with Hub(root) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        commits = [each.commit_id for each in api.list_repo_commits(ck.ORIGINAL)]
        fits = [commit for commit in commits if commit.startswith("1bae0e10")]
        assert fits == [commits[1]] == [ck.ORIGINAL_REVISION]
        assert len(commits) == 3
        assert api.model_info(ck.ORIGINAL).sha == commits[0]

        def blob(revision: str) -> str:
            found = api.get_paths_info(ck.ORIGINAL, "README.md", revision=revision)
            return str(found[0].blob_id)

        assert len({blob(commit) for commit in commits}) == 3


def test_the_earlier_revisions_are_the_recorded_ones(root: Path) -> None:
    with Hub(root) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        assert api.model_info(ck.EARLIER_PACK).sha == "64ba41b6c916a587db06eae2e19b7845f7be6e6b"
        assert api.model_info(ck.EARLIER_ORIGINAL).sha == "dba1be0a40aa45a94ad051997016db3960a90277"


def test_the_overlay_is_gated(root: Path, tmp_path: Path) -> None:
    with Hub(root) as hub:
        revision = "87bb9850e6f49fd20ad9c8516b7817215cbbf5fc"
        where = {"repo_id": ck.OVERLAY, "filename": ck.OVERLAY_FILE, "revision": revision}
        with pytest.raises(Exception, match="not in the authorized list"):
            hf_hub_download(**where, endpoint=hub.url, token=NEWCOMER_TOKEN, cache_dir=tmp_path)
        path = hf_hub_download(**where, endpoint=hub.url, token=READER_TOKEN, cache_dir=tmp_path)
        assert Path(path).stat().st_size == (root / ck.OVERLAY / "files" / ck.OVERLAY_FILE).stat().st_size


def test_the_command_builds_and_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ck.main([str(tmp_path)]) == 0
    assert "built, 5 repositories" in capsys.readouterr().out
    assert ck.main([str(tmp_path)]) == 0
    assert "as it was" in capsys.readouterr().out
    assert ck.main([str(tmp_path), "--scale", "5"]) == 1
    assert "needed: at least" in capsys.readouterr().err
