"""What the stand-in says: sums, counts, what a picture shows, a tool's call, else what it was told."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .pictures import Picture

_WORDS = {
    "plus": "+",
    "minus": "-",
    "times": "*",
    "multiplied by": "*",
    "divided by": "/",
    "added to": "+",
    "\N{MULTIPLICATION SIGN}": "*",
    "\N{DIVISION SIGN}": "/",
    "\N{MINUS SIGN}": "-",
}
_NUMBERS = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty",
)
_SUM = re.compile(r"[(\d](?:[\d\s+*/()-]*[\d)])?")
_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and any are at call can do for from get give in is it me my of on or please returns the this to tool "
        "use what which with you your",
    )
)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """A reply: the thoughts (shown only when thinking is on), the text, and a tool's call instead of text."""

    thoughts: str
    content: str
    call: Call | None = None


class _Sum:
    """A sum of whole numbers with + - * / and parentheses, by its grammar."""

    def __init__(self, text: str) -> None:
        self._words: list[str] = re.findall(r"\d+|[-+*/()]", text)
        self._at = 0

    def value(self) -> Fraction:
        result = self._level(("+", "-"))
        if self._at != len(self._words):
            raise ValueError("more follows")
        return result

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _take(self) -> str:
        self._at += 1
        return self._words[self._at - 1]

    def _level(self, signs: tuple[str, ...]) -> Fraction:
        result = self._below(signs)
        while self._peek() in signs:
            sign = self._take()
            result = _OPERATORS[sign](result, self._below(signs))
        return result

    def _below(self, signs: tuple[str, ...]) -> Fraction:
        return self._level(("*", "/")) if "+" in signs else self._one()

    def _one(self) -> Fraction:
        word = self._take() if self._peek() else ""
        if word == "-":
            return -self._one()
        if word == "(":
            result = self._level(("+", "-"))
            if self._peek() != ")":
                raise ValueError("an open parenthesis")
            self._take()
            return result
        return Fraction(int(word))


def find_sum(text: str) -> tuple[str, str] | None:
    """The first sum in a text and its value, as text; None where there is none.

    >>> find_sum("What is 17 plus 25?")
    ('17 + 25', '42')
    """
    plain = text.lower()
    for word, number in ((w, str(i)) for i, w in enumerate(_NUMBERS)):
        plain = re.sub(rf"\b{word}\b", number, plain)
    for name, sign in (("sum", "+"), ("product", "*"), ("difference", "-")):
        plain = re.sub(rf"\b{name} of (\d+) and (\d+)", rf"\1 {sign} \2", plain)
    for word, sign in _WORDS.items():
        plain = re.sub(rf"\b{word}\b" if word.isascii() else word, sign, plain)
    for found in _SUM.finditer(re.sub(r"(?<=\d)\s*x\s*(?=\d)", "*", plain)):
        words = re.findall(r"\d+|[-+*/()]", found.group())
        if not set(words) & set("+-*/") or len(words) > 200:
            continue
        try:
            value = _Sum(found.group()).value()
        except (ValueError, ZeroDivisionError, RecursionError):
            continue
        text_value = str(value) if value.denominator == 1 else f"{float(value):.6g}"
        return " ".join(words), text_value
    return None


def _keywords(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{3,}", text.lower().replace("_", " "))) - _STOP_WORDS


def choose_tool(text: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The tool that a text asks for: by its name, or by two words of its description."""
    asked = _keywords(text)
    best: tuple[int, Mapping[str, Any]] | None = None
    for tool in tools:
        function = tool["function"]
        name = str(function["name"])
        score = 10 * (name.lower() in text.lower()) + 2 * len(asked & _keywords(name))
        score += len(asked & _keywords(str(function.get("description") or "")))
        if score >= 2 and (best is None or score > best[0]):
            best = (score, function)
    return best[1] if best else None


def _string(name: str, text: str) -> str:
    total = find_sum(text)
    if total and name in {"expression", "formula", "equation", "query"}:
        return total[0]
    quoted = re.search(r"[\"']([^\"']+)[\"']", text)
    place = re.search(r"\b(?:in|for|at|of|to|near)\s+((?:[A-Z][\w-]*\s?)+)", text)
    capital = re.findall(r"(?<=[a-z,] )[A-Z][\w-]+", text)
    if quoted:
        return quoted.group(1)
    if place:
        return place.group(1).strip()
    return str(capital[-1]) if capital else text.strip()


def _argument(name: str, schema: Mapping[str, Any], text: str, numbers: list[str]) -> Any:
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return next((v for v in schema["enum"] if str(v).lower() in text.lower()), schema["enum"][0])
    kind = schema.get("type")
    if kind == "integer":
        return int(numbers.pop(0)) if numbers else 0
    if kind == "number":
        return float(numbers.pop(0)) if numbers else 0.0
    if kind == "boolean":
        return True
    if kind == "array":
        return [int(n) for n in numbers]
    return {} if kind == "object" else _string(name, text)


def fill(function: Mapping[str, Any], text: str) -> Call:
    """A call of a tool, its arguments taken from the text by the tool's own schema."""
    schema = function.get("parameters") or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    wanted = schema.get("required") or list(properties)
    numbers = re.findall(r"\d+", text)
    arguments = {n: _argument(n, properties.get(n) or {}, text, numbers) for n in wanted}
    return Call(str(function["name"]), json.dumps(arguments, ensure_ascii=False))


def _plain(text: str, name: str) -> tuple[str, str]:
    total = find_sum(text)
    if total:
        return f"The sum is {total[0]}, which makes {total[1]}.", f"{total[0]} = {total[1]}"
    counted = re.search(r"\bcount (?:from )?(\d+) to (\d+)", text, re.IGNORECASE)
    if counted and int(counted.group(2)) - int(counted.group(1)) < 100_000:
        numbers = range(int(counted.group(1)), int(counted.group(2)) + 1)
        return f"A count of {len(numbers)} numbers.", ", ".join(str(n) for n in numbers)
    said = re.search(
        r"\b(?:say|reply with|answer with|repeat)(?: exactly| only)?:?\s+[\"']?(.+?)[\"']?[.!]?$",
        text.strip(),
        re.IGNORECASE,
    )
    if said:
        return "The words are given.", said.group(1)
    heard = " ".join(text.split())[:200]
    return (
        "No sum, no picture and no tool in this.",
        f"{name} stands in here and computes sums. You wrote: {heard}",
    )


def answer(
    text: str,
    *,
    name: str,
    pictures: Sequence[Picture] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    tool_result: str | None = None,
) -> Answer:
    """The reply to the last user's `text`, with that turn's pictures, or to a tool's result."""
    if tool_result is not None:
        return Answer("The tool has answered.", f"The tool says: {tool_result}")
    function = choose_tool(text, tools)
    if function is not None:
        call = fill(function, text)
        return Answer(f"This is a case for {call.name}.", "", call)
    if pictures:
        shown = "; ".join(p.words for p in pictures)
        count = "the picture is" if len(pictures) == 1 else f"{len(pictures)} pictures:"
        return Answer(f"I see {shown}.", f"{count.capitalize()} {shown}.")
    return Answer(*_plain(text, name))
