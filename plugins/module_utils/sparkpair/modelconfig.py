"""A checkpoint's config.json, read strictly: each fault names the key, its value and what it must be."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .problem import Problem

FAMILY = "deepseek_v41"
_TEXT_FAMILY = "deepseek_v41_text"
_LARGEST = 4 * 2**20
_GREATEST = sys.float_info.max
_DO = "take config.json from the checkpoint of the profile again (sparkpair verify names a changed file)"


class Section:
    """One object of the configuration, with the path that leads to it (for messages)."""

    def __init__(self, values: Mapping[str, Any], source: str, path: str = "") -> None:
        self.values = values
        self.source = source
        self.path = path

    def wrong(self, key: str, value: object, needed: str) -> Problem:
        """The Problem of one key: `value` is what stands there."""
        return Problem(
            found=f"{self.source}: {self.path}{key} is {value!r:.80}",
            needed=f"{self.path}{key}: {needed}",
            do=_DO,
            code="config-wrong",
        )

    def required(self, key: str, needed: str) -> Any:
        """The value of `key`; a Problem naming the key when it is absent."""
        if key not in self.values:
            raise Problem(
                found=f"{self.source} has no {self.path}{key}",
                needed=f"{self.path}{key}: {needed}",
                do=_DO,
                code="config-missing",
            )
        return self.values[key]

    def whole(self, key: str, least: int, most: int) -> int:
        """A whole number within bounds; true and 64.0 are not whole numbers."""
        needed = f"a whole number from {least} to {most}"
        value = self.required(key, needed)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, value, needed)
        return value

    def number(self, key: str, above: float) -> float:
        """A finite number greater than `above`."""
        needed = f"a number above {above:g}"
        value = self.required(key, needed)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value <= _GREATEST:
            raise self.wrong(key, value, needed)
        return float(value)

    def word(self, key: str, *older_keys: str) -> str:
        """A text, under `key` or under a name that older files use for it; where several are, the same."""
        first, *others = [name for name in (key, *older_keys) if name in self.values] or [key]
        value = self.required(first, "a text")
        if not isinstance(value, str):
            raise self.wrong(first, value, "a text")
        for name in others:
            if self.values[name] != value:
                raise self.wrong(name, self.values[name], f"{value!r:.80}, as {first} says")
        return value

    def section(self, key: str) -> Section:
        """The object under `key`."""
        value = self.required(key, "an object")
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return Section(value, self.source, f"{self.path}{key}.")


def load(path: Path) -> dict[str, Any]:
    """Decode a config.json. Raises Problem when it is absent, huge, not JSON or no object."""
    try:
        if path.stat().st_size > _LARGEST:
            raise Problem(
                found=f"{path} has {path.stat().st_size} bytes",
                needed=f"a configuration of at most {_LARGEST} bytes",
                do="name the config.json of the checkpoint",
                code="config-unreadable",
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _unreadable(str(path), "is absent") from None
    return decode(raw, str(path))


def decode(raw: bytes | str, source: str) -> dict[str, Any]:
    """One JSON object out of text; `source` names it in messages."""
    try:
        config = json.loads(raw.decode() if isinstance(raw, bytes) else raw)
    except (ValueError, RecursionError) as error:
        raise _unreadable(source, f"is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise _unreadable(source, f"holds a {type(config).__name__}")
    return config


def _unreadable(source: str, what: str) -> Problem:
    return Problem(
        found=f"{source} {what}",
        needed="the config.json of a checkpoint: one JSON object",
        do=_DO,
        code="config-unreadable",
    )


def text_section(config: Mapping[str, Any], source: str = "config.json") -> Section:
    """The language model's part: `text_config` where there is one, else the configuration itself.

    Raises Problem (key `model_type`) when the checkpoint is of another family.
    """
    top = Section(config, source)
    nested = "text_config" in config
    if nested or top.word("model_type") != _TEXT_FAMILY:
        _same_family(top, (FAMILY,))
    if not nested:
        return top
    text = top.section("text_config")
    if "model_type" in text.values:
        _same_family(text, (FAMILY, _TEXT_FAMILY))
    return text


def _same_family(section: Section, allowed: tuple[str, ...]) -> None:
    family = section.word("model_type")
    if family not in allowed:
        raise section.wrong("model_type", family, f'"{allowed[-1]}": these tables are of that family')
