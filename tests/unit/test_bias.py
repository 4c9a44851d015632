"""The routing bias: the recorded layout, every wrong tensor named, and few bytes over the network."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_checkpoint import EXPERTS, NAMES, checkpoint, checkpoint_files, content_of, shard
from sparkpair import bias, cli, ranged, safetensors
from sparkpair.problem import Problem

from rehearsal.hub import Hub, make_repo

ORIGINAL = "example/original"


def recorded_layout(text: str) -> bytes:
    """The file by the words of its description, written a second time and in another way."""
    parts, at = [], 0
    for name in sorted(NAMES):
        parts.append(f'"{name}": {{"dtype": "F32", "shape": [384], "data_offsets": [{at}, {at + 1536}]}}')
        at += 1536
    header = "{" + ", ".join(parts) + f', "__metadata__": {{"source": "{text}"}}' + "}"
    while len(header) % 8:
        header += " "
    return struct.pack("<Q", len(header)) + header.encode() + b"".join(map(content_of, sorted(NAMES)))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    capsys.readouterr()
    assert cli.main(["bias", *words, "--json"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    return dict(problem)


def test_the_file_has_the_recorded_layout_byte_for_byte(tmp_path: Path) -> None:
    model, out = checkpoint(tmp_path / "model", checkpoint_files()), tmp_path / "gate_bias_vl.safetensors"
    assert cli.main(["bias", "--model", str(model), "--out", str(out)]) == 0
    text = "deepseek-ai/DeepSeek-V4.1-Flash (MIT): the ffn.gate.bias_vl tensors, byte for byte"
    assert out.read_bytes() == recorded_layout(text)
    header = safetensors.read_file_header(out)
    assert list(header.tensors) == sorted(NAMES)
    assert list(header.tensors)[:3] == [f"layers.{n}.ffn.gate.bias_vl" for n in (0, 1, 10)]


def test_another_source_is_told_in_the_metadata(tmp_path: Path) -> None:
    model, out = checkpoint(tmp_path / "model", checkpoint_files()), tmp_path / "bias.safetensors"
    assert cli.main(["bias", "--model", str(model), "--out", str(out), "--source", "the 1017 one"]) == 0
    assert out.read_bytes() == recorded_layout("the 1017 one")


def test_a_checkpoint_without_an_index_is_read_by_its_headers(tmp_path: Path) -> None:
    files = checkpoint_files()
    del files["model.safetensors.index.json"]
    model, out = checkpoint(tmp_path / "model", files), tmp_path / "bias.safetensors"
    assert cli.main(["bias", "--model", str(model), "--out", str(out), "--source", "x"]) == 0
    assert out.read_bytes() == recorded_layout("x")
    (model / "zz.safetensors").write_bytes(shard({NAMES[5]: ("F32", [EXPERTS], content_of("other"))}))
    with pytest.raises(Problem, match=rf"{NAMES[5]} in two files"):
        bias.from_checkpoint(model)


FLOATS = content_of("x")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({NAMES[7]: ("BF16", [EXPERTS], FLOATS[: 2 * EXPERTS])}, "layers.7.ffn.gate.bias_vl as BF16"),
        ({NAMES[7]: ("F32", [383], FLOATS[:1532])}, "layers.7.ffn.gate.bias_vl of shape [383]"),
        ({NAMES[7]: ("F32", [384, 1], FLOATS)}, "layers.7.ffn.gate.bias_vl of shape [384, 1]"),
        ({NAMES[7]: ("F32", [128], FLOATS[:512])}, "layers.7.ffn.gate.bias_vl of shape [128]"),
        ({NAMES[7]: ("F32", [2**18], bytes(2**20))}, "layers.7.ffn.gate.bias_vl of shape [262144]"),
        ({NAMES[41]: ("F32", [127], FLOATS[:508])}, "mtp.1.ffn.gate.bias_vl of shape [127]"),
        ({NAMES[7]: None}, "no layers.7.ffn.gate.bias_vl (42 of this kind in all)"),
        ({NAMES[41]: None}, "2 beside the layers' (mtp.0.ffn.gate.bias_vl, mtp.2.ffn.gate.bias_vl)"),
        ({"mtp.3.ffn.gate.bias_vl": ("F32", [EXPERTS], FLOATS)}, "4 beside the layers'"),
        ({"layers.40.ffn.gate.bias_vl": ("F32", [EXPERTS], FLOATS)}, "layers.40.ffn.gate.bias_vl"),
        ({"layers.07.ffn.gate.bias_vl": ("F32", [EXPERTS], FLOATS)}, "4 beside the layers'"),
        (dict.fromkeys(NAMES), "names no *.ffn.gate.bias_vl tensor"),
    ],
)
def test_a_wrong_tensor_is_named_and_nothing_is_written(
    tmp_path: Path,
    changed: dict[str, tuple[str, list[int], bytes] | None],
    found: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = checkpoint(tmp_path / "model", checkpoint_files(changed)), tmp_path / "out" / "bias"
    problem = refused(capsys, "--model", str(model), "--out", str(out))
    assert found in problem["found"]
    assert str(model) in problem["found"]
    assert not out.parent.exists()


def test_draft_blocks_may_have_their_own_number_of_experts(tmp_path: Path) -> None:
    files = checkpoint_files({NAMES[41]: ("F32", [128], FLOATS[:512])})
    model, out = checkpoint(tmp_path / "model", files), tmp_path / "bias.safetensors"
    assert cli.main(["bias", "--model", str(model), "--out", str(out)]) == 0
    assert safetensors.read_file_header(out).tensors[NAMES[41]].shape == (128,)


def test_a_checkpoint_of_another_size_is_measured_by_its_own_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = checkpoint_files()
    config = json.loads(files["config.json"])
    config["text_config"]["num_hidden_layers"] = 41
    files["config.json"] = json.dumps(config).encode()
    model = checkpoint(tmp_path / "model", files)
    problem = refused(capsys, "--model", str(model), "--out", str(tmp_path / "out"))
    assert "no layers.40.ffn.gate.bias_vl" in problem["found"]


@pytest.mark.parametrize(
    ("index", "found"),
    [
        (b"[]", "has no weight_map"),
        (b'{"weight_map": []}', "has no weight_map"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"weight_map": {"layers.0.ffn.gate.bias_vl": "../../etc/x.safetensors"}}', "../../etc"),
        (b'{"weight_map": {"layers.0.ffn.gate.bias_vl": 3}}', "in 3"),
        (b'{"weight_map": {"layers.0.ffn.gate.bias_vl": "model-00002-of-00004.safetensors"}}', "no tensor"),
    ],
)
def test_an_index_that_is_none_or_lies_is_refused(tmp_path: Path, index: bytes, found: str) -> None:
    files = checkpoint_files()
    files["model.safetensors.index.json"] = index
    with pytest.raises(Problem) as fault:
        bias.from_checkpoint(checkpoint(tmp_path / "model", files))
    assert found in fault.value.found


def test_a_shard_that_is_absent_or_cut_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = checkpoint(tmp_path / "model", checkpoint_files())
    third = model / "model-00003-of-00004.safetensors"
    third.write_bytes(third.read_bytes()[:-100])
    words = ("--model", str(model), "--out", str(tmp_path / "out"))
    assert "model-00003-of-00004.safetensors" in refused(capsys, *words)["found"]
    third.unlink()
    assert "model-00003-of-00004.safetensors" in refused(capsys, *words)["found"]


def test_a_second_run_stats_and_a_changed_shard_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = checkpoint(tmp_path / "model", checkpoint_files()), tmp_path / "bias.safetensors"

    def changed() -> bool:
        capsys.readouterr()
        assert cli.main(["bias", "--model", str(model), "--out", str(out), "--json"]) == 0
        return bool(json.loads(capsys.readouterr().out)["changed"])

    assert changed()
    with monkeypatch.context() as patch:
        patch.setattr(bias, "from_checkpoint", lambda _: pytest.fail("the checkpoint was read again"))
        assert not changed()
    other = checkpoint_files({NAMES[0]: ("F32", [EXPERTS], content_of("other"))})
    checkpoint(model, other)
    assert changed()
    out.write_bytes(out.read_bytes()[:-1] + b"x")
    assert changed()
    assert not changed()


# From the original repository


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    make_repo(tmp_path / "hub", ORIGINAL, checkpoint_files())
    with Hub(tmp_path / "hub") as running:
        yield running


def commit_of(hub: Hub) -> str:
    return hub.store.repo(ORIGINAL).resolve("main")


def words_for(hub: Hub, out: Path, revision: str = "") -> list[str]:
    return ["--repo", f"{ORIGINAL}@{revision or commit_of(hub)}", "--endpoint", hub.url, "--out", str(out)]


def test_index_headers_and_tensors_are_all_that_is_fetched(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bias.safetensors"
    want = hashlib.sha256(recorded_layout(bias.SOURCE)).hexdigest()
    assert cli.main(["bias", *words_for(hub, out), "--expect-sha256", want, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    files = checkpoint_files()
    index = len(files["model.safetensors.index.json"])
    headers = sum(
        8 + struct.unpack("<Q", data[:8])[0] for name, data in files.items() if name.endswith("safetensors")
    )
    assert told["received_bytes"] == index + headers + 43 * 1536
    assert hub.bytes_sent("*.safetensors") == headers + 43 * 1536
    assert out.read_bytes() == recorded_layout(bias.SOURCE)


def test_what_stands_is_not_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    words = ["bias", *words_for(hub, tmp_path / "bias.safetensors")]
    assert cli.main(words) == 0
    before = len(hub.requests())
    assert cli.main(words) == 0
    assert len(hub.requests()) == before


@pytest.mark.parametrize("digits", [8, 12])
def test_an_abbreviated_commit_is_resolved(hub: Hub, tmp_path: Path, digits: int) -> None:
    out = tmp_path / "bias.safetensors"
    assert cli.main(["bias", *words_for(hub, out, commit_of(hub)[:digits])]) == 0
    assert out.read_bytes() == recorded_layout(bias.SOURCE)


@pytest.mark.parametrize(("mode", "code"), [("401", "token-missing"), ("404", "repo-unknown")])
def test_a_refusal_is_told_at_once(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, code: str
) -> None:
    hub.mode(mode)
    out = tmp_path / "bias.safetensors"
    assert refused(capsys, *words_for(hub, out))["code"] == code
    assert len(hub.requests()) == 1
    assert not out.exists()


def test_a_busy_hub_and_a_cut_answer_are_asked_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(ranged, "_pause", pauses.append)
    hub.mode("503", path="*.index.json", times=1, retry_after=7)
    hub.mode("short", path="model-00002*", times=1)
    out = tmp_path / "bias.safetensors"
    assert cli.main(["bias", *words_for(hub, out)]) == 0
    assert out.read_bytes() == recorded_layout(bias.SOURCE)
    assert pauses == [7, 1]


def test_a_flipped_bias_is_caught_by_its_recorded_hash(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = checkpoint_files()["model-00001-of-00004.safetensors"]
    hub.mode("flip", path="model-00001*", offset=len(data) - 3)
    want = hashlib.sha256(recorded_layout(bias.SOURCE)).hexdigest()
    out = tmp_path / "bias.safetensors"
    problem = refused(capsys, *words_for(hub, out), "--expect-sha256", want)
    assert want in problem["needed"]
    assert not out.exists()


def test_a_server_without_ranges_is_refused_before_a_whole_shard_comes(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rehearsal.hub.server.requested_span", lambda *_: None)
    problem = refused(capsys, *words_for(hub, tmp_path / "bias.safetensors"))
    assert problem["code"] == "hub-no-ranges"
    assert not any(entry["status"] == 206 for entry in hub.requests())
