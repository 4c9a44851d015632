"""Text as tokens and back: two ASCII characters are one id, any other character one or two.

The stand-in's own rule, not the model's tokenizer: exact both ways, and the same at every run.
"""

from __future__ import annotations

from collections.abc import Iterator

_PAIRS = 3000
_SINGLES = 20_000
_HIGH = 128_000
VOCAB = 129_280


def encode(text: str) -> list[int]:
    """The ids of `text`."""
    ids: list[int] = []
    at = 0
    while at < len(text):
        first = ord(text[at])
        second = ord(text[at + 1]) if at + 1 < len(text) else 128
        if first < 128 and second < 128:
            ids.append(_PAIRS + first * 128 + second)
            at += 2
            continue
        if first < _HIGH - _SINGLES:
            ids.append(_SINGLES + first)
        else:
            ids += [_HIGH + (first >> 12), _SINGLES + (first & 0xFFF)]
        at += 1
    return ids


def decode(ids: list[int]) -> str:
    """The text of `ids`; ids that stand for nothing give U+FFFD."""
    out: list[str] = []
    high: int | None = None
    for i in ids:
        if high is not None and i >= _SINGLES:
            out.append(chr(min(high << 12 | (i - _SINGLES), 0x10FFFF)))
            high = None
        elif _PAIRS <= i < _PAIRS + 128 * 128:
            out.append(chr((i - _PAIRS) // 128) + chr((i - _PAIRS) % 128))
        elif _SINGLES <= i < _HIGH:
            out.append(chr(i - _SINGLES))
        elif i >= _HIGH:
            high = i - _HIGH
        else:
            out.append("\N{REPLACEMENT CHARACTER}")
    return "".join(out)


def pieces(ids: list[int], size: int) -> Iterator[list[int]]:
    """The ids in runs of about `size`, no character cut in two."""
    at = 0
    while at < len(ids):
        end = min(at + size, len(ids))
        if ids[end - 1] >= _HIGH and end < len(ids):
            end += 1
        yield ids[at:end]
        at = end


def count(text: str) -> int:
    return len(encode(text))
