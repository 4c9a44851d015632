"""RoPE tables: the recorded bytes, from numpy alone, and nothing installed that is not as expected."""

from __future__ import annotations

import copy
import ctypes.util
import hashlib
import json
import math
import platform
from pathlib import Path
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparkpair import cli, rope
from sparkpair.problem import Problem

RECORDED = Path(__file__).parents[2] / "files/fixtures/rope.json"
RECORDED_SHA256 = "78d881ad91d9dc36a53cab598e250eaf1f105ef22fbd7b637e07fbf57c08edc3"


def true_config() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41",
        "text_config": {
            "model_type": "deepseek_v41_text",
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 1_048_576,
            "rope_theta": 10_000,
            "compress_rope_theta": 160_000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65_536,
            },
        },
    }


def small_config() -> dict[str, Any]:
    """The true one with a window of 1,000 positions: tables of 8.5 MB instead of 142.6 MB."""
    config = true_config()
    config["text_config"]["max_position_embeddings"] = 1000
    return config


def written(tmp_path: Path, config: dict[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def sha256_of(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def test_the_true_configuration_gives_the_four_recorded_tables_and_rope_json(tmp_path: Path) -> None:
    config, out = written(tmp_path, true_config()), tmp_path / "out"
    assert cli.main(["rope", "--config", str(config), "--out", str(out), "--expect", str(RECORDED)]) == 0
    recorded = json.loads(RECORDED.read_text())
    for name in rope.TABLES:
        assert (out / name).stat().st_size == 142_606_336
        assert sha256_of(out / name) == recorded[name]
    assert sha256_of(out / "rope.json") == RECORDED_SHA256 == sha256_of(RECORDED)


def test_the_yarn_bounds_of_the_true_configuration_are_15_and_25() -> None:
    assert rope.correction_range(rope.parameters(true_config())) == (15, 25)


def test_frequencies_are_within_two_units_of_the_exact_ones() -> None:
    parameters = rope.parameters(true_config())
    plain, compressed = rope.frequencies(parameters)
    with mpmath.workdps(40):
        for pair in range(32):
            exponent = mpmath.mpf(2 * pair) / 64
            exact = 1 / mpmath.mpf(10_000) ** exponent
            assert abs(float(plain[pair]) / float(exact) - 1) < 2**-22
            scaled = 1 / mpmath.mpf(160_000) ** exponent
            ramp = min(max(mpmath.mpf(pair - 15) / 10, 0), 1)
            exact = scaled / 16 * ramp + scaled * (1 - ramp)
            assert abs(float(compressed[pair]) / float(exact) - 1) < 2**-21


@given(st.floats(0, 2**30, width=32))
@settings(max_examples=300)
def test_sine_and_cosine_are_within_one_unit_of_the_exact_ones(angle: float) -> None:
    sine, cosine = rope.sincos(np.array([angle], dtype=np.float32))
    with mpmath.workdps(60):
        for got, exact in ((sine[0], mpmath.sin(angle)), (cosine[0], mpmath.cos(angle))):
            unit = float(np.spacing(np.abs(np.float32(exact))))
            assert abs(mpmath.mpf(float(got)) - exact) <= 0.57 * unit


def test_float64_rounded_to_float32_would_be_another_table() -> None:
    angles = (np.arange(1, 200_000, dtype=np.float32) * np.float32(0.7498942)).astype(np.float32)
    rounded = np.sin(angles.astype(np.float64)).astype(np.float32)
    share = float((rope.sincos(angles)[0] != rounded).mean())
    assert 0 < share < 0.03  # so the polynomials can't be replaced by numpy's sine


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="compares with glibc's own sinf and cosf")
def test_every_bit_is_that_of_glibc() -> None:
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    random = np.random.default_rng(41)
    spread = np.exp(random.uniform(-40, 20, 4000))
    edges = [0.0, 2**-12, 0.75, math.pi / 4, 119.99999, 120.0, 1_114_111.0]
    angles = np.concatenate([spread, random.uniform(0, 240, 4000), edges]).astype(np.float32)
    for name, ours in zip(("sinf", "cosf"), rope.sincos(angles), strict=True):
        function = getattr(libm, name)
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
        theirs = np.array([function(float(angle)) for angle in angles], dtype=np.float32)
        assert (ours.view(np.uint32) == theirs.view(np.uint32)).all()


def test_rows_do_not_depend_on_where_a_block_begins() -> None:
    frequency, _ = rope.frequencies(rope.parameters(true_config()))
    cosines, sines = rope.rows(frequency, 100, 2000)
    later_cosines, later_sines = rope.rows(frequency, 777, 900)
    assert (cosines[677:1577] == later_cosines).all()
    assert (sines[677:1577] == later_sines).all()


def test_a_flat_configuration_gives_the_same_tables_as_a_nested_one(tmp_path: Path) -> None:
    nested = small_config()
    flat = {**nested["text_config"], "model_type": "deepseek_v41_text"}
    assert rope.parameters(flat) == rope.parameters(nested)


def test_an_older_key_for_the_kind_of_scaling_is_understood() -> None:
    config = true_config()
    config["text_config"]["rope_scaling"]["type"] = config["text_config"]["rope_scaling"].pop("rope_type")
    assert rope.parameters(config) == rope.parameters(true_config())


def test_two_names_for_the_kind_of_scaling_must_say_the_same() -> None:
    config = true_config()
    scaling = config["text_config"]["rope_scaling"]
    scaling["type"] = "yarn"
    assert rope.parameters(config) == rope.parameters(true_config())
    for other in ("linear", None):
        scaling["type"] = other
        with pytest.raises(Problem, match=r"rope_scaling\.type") as fault:
            rope.parameters(config)
        assert fault.value.code == "config-wrong"


@pytest.mark.parametrize(
    "key", ["head_dim", "qk_rope_head_dim", "rope_theta", "compress_rope_theta", "max_position_embeddings"]
)
def test_a_missing_key_is_named(key: str) -> None:
    config = true_config()
    del config["text_config"][key]
    with pytest.raises(Problem) as fault:
        rope.parameters(config)
    assert f"no text_config.{key}" in fault.value.found


@pytest.mark.parametrize(
    "key", ["rope_type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings"]
)
def test_a_missing_key_of_the_scaling_is_named(key: str) -> None:
    config = true_config()
    del config["text_config"]["rope_scaling"][key]
    with pytest.raises(Problem) as fault:
        rope.parameters(config)
    assert f"no text_config.rope_scaling.{key}" in fault.value.found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rope_scaling", "rope_type"), "linear"),
        (("rope_scaling", "factor"), "16"),
        (("rope_scaling", "factor"), 0),
        (("rope_scaling", "factor"), float("inf")),
        (("rope_scaling", "beta_fast"), 1),
        (("rope_scaling", "beta_slow"), True),
        (("rope_scaling", "original_max_position_embeddings"), 65_536.0),
        (("qk_rope_head_dim",), 63),
        (("qk_rope_head_dim",), 1024),
        (("qk_rope_head_dim",), "64"),
        (("max_position_embeddings",), 2**24),
        (("max_position_embeddings",), -1),
        (("rope_theta",), 1),
        (("compress_rope_theta",), None),
        (("rope_scaling",), "yarn"),
    ],
)
def test_a_value_that_can_not_be_is_named_with_its_key(path: tuple[str, ...], value: object) -> None:
    config = true_config()
    section = config["text_config"]
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    with pytest.raises(Problem) as fault:
        rope.parameters(config)
    assert ".".join(("text_config", *path)) in fault.value.found


def test_tables_other_than_expected_leave_the_folder_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = small_config(), tmp_path / "out"
    good = ["rope", "--config", str(written(tmp_path, config)), "--out", str(out)]
    assert cli.main(good) == 0
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.iterdir()}
    expected = json.loads((out / "rope.json").read_text())
    expected["rope-compressed-sin.f32"] = "0" * 64
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(expected))
    capsys.readouterr()
    assert cli.main([*good, "--expect", str(wrong), "--json"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == "rope-mismatch"
    assert "rope-compressed-sin.f32" in problem["found"]
    assert "rope-plain" not in problem["found"]
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.iterdir()} == before


def test_another_number_of_rows_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    parameters = rope.parameters(small_config())
    with pytest.raises(Problem, match="rows 66536"):
        rope.make(parameters, tmp_path / "out", rope.load_summary(RECORDED))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("rows", "1114112"), ("half", None), ("rope-plain-cos.f32", "EE" * 32)]
)
def test_a_rope_json_that_is_none_is_refused_by_its_key(tmp_path: Path, key: str, value: object) -> None:
    values = json.loads(RECORDED.read_text())
    values[key] = value
    path = tmp_path / "rope.json"
    path.write_text(json.dumps(values))
    with pytest.raises(Problem, match=key):
        rope.load_summary(path)


@pytest.mark.parametrize("given", ["/no/such/rope.json", "{", "[]", "{}", '{"rows": ' + "7" * 5000 + "}"])
def test_an_expectation_that_is_none_is_told_of_rope_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    words = ["rope", "--config", str(written(tmp_path, small_config())), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--expect", given, "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == "rope-expectation"
    assert "rope.json" in problem["needed"] + problem["do"]
    assert "config.json" not in problem["found"] + problem["needed"] + problem["do"]
    assert not (tmp_path / "out").exists()


def test_a_second_run_stats_and_a_changed_file_or_configuration_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def changed(config: dict[str, Any], *more: str) -> bool:
        words = ["rope", "--config", str(written(tmp_path, config)), "--out", str(out), "--json", *more]
        assert cli.main(words) == 0
        return bool(json.loads(capsys.readouterr().out)["changed"])

    config = small_config()
    assert changed(config)
    assert not changed(config)
    assert changed(config, "--force")
    assert not changed(config)
    data = bytearray((out / rope.TABLES[0]).read_bytes())
    data[5] ^= 1
    (out / rope.TABLES[0]).write_bytes(data)
    assert changed(config)
    assert not changed(config)
    other = copy.deepcopy(config)
    other["text_config"]["rope_theta"] = 20_000
    assert changed(other)
    (out / "rope.json").unlink()
    assert changed(other)


def test_too_little_room_is_told_with_needed_free_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkpair.disk.free_bytes", lambda _: 1_000_000)
    with pytest.raises(Problem) as fault:
        rope.make(rope.parameters(small_config()), tmp_path / "out")
    assert fault.value.code == "disk-full"
    assert "1000000 bytes" in fault.value.found
    assert str(tmp_path) in fault.value.found
    assert f"{4 * 66_536 * 32 * 4} bytes" in fault.value.needed
    assert not (tmp_path / "out").exists()
