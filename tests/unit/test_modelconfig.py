"""config.json is read strictly: each fault names its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from sparkpair import modelconfig
from sparkpair.problem import Problem


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "model_type"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"model_type": "deepseek_v4", "text_config": {}}, "model_type is 'deepseek_v4'"),
        ({"model_type": 41}, "model_type is 41"),
        ({"text_config": {"model_type": "deepseek_v41_text"}}, "no model_type"),
        ({"model_type": "deepseek_v41", "text_config": {"model_type": "glm"}}, "text_config.model_type"),
        ({"model_type": "deepseek_v41", "text_config": []}, "text_config is []"),
    ],
)
def test_a_configuration_of_another_family_is_refused_by_its_key(config: dict[str, object], key: str) -> None:
    with pytest.raises(Problem) as fault:
        modelconfig.text_section(config)
    assert key in fault.value.found


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v41_text"])
def test_a_flat_configuration_is_read_like_a_nested_one(family: str) -> None:
    assert modelconfig.text_section({"model_type": family, "vocab_size": 7}).whole("vocab_size", 1, 9) == 7


@pytest.mark.parametrize("value", [True, "64", 64.0, None, 0, 10, [1]])
def test_a_whole_number_is_no_other_kind_of_number(value: object) -> None:
    section = modelconfig.text_section({"model_type": "deepseek_v41", "heads": value})
    with pytest.raises(Problem, match="heads"):
        section.whole("heads", 1, 9)


@pytest.mark.parametrize("value", [True, "16", None, float("nan"), float("inf"), 10**400, 1, -3])
def test_a_number_is_finite_and_in_range(value: object) -> None:
    section = modelconfig.text_section({"model_type": "deepseek_v41", "base": value})
    with pytest.raises(Problem, match="base"):
        section.number("base", above=1)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"a": ', b"\xff\xfe", b"[" * 100_000, b'{"a": %s}' % (b"7" * 5000)]
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(Problem) as fault:
        modelconfig.load(path)
    assert str(path) in fault.value.found


def test_an_absent_file_and_a_huge_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="absent"):
        modelconfig.load(tmp_path / "config.json")
    huge = tmp_path / "huge.json"
    with huge.open("wb") as handle:
        handle.truncate(5 * 2**20)
    with pytest.raises(Problem, match="5242880 bytes"):
        modelconfig.load(huge)
