"""The four RoPE tables of the kernel kit, made from a checkpoint's config.json by numpy alone.

The engine reads `rope-{plain,compressed}-{cos,sin}.f32`: little-endian float32, rows x half values.
They were recorded from float32 angles through the C library's `sinf` and `cosf`, so the arithmetic of
those two (the single-precision algorithm published in ARM's optimized-routines, which glibc uses) is
written out here over arrays: the bits then depend neither on the C library nor on the processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import atomic, disk, made, modelconfig
from .console import Progress
from .problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    Quadrants = NDArray[np.uint32]

TABLES = ("rope-plain-cos.f32", "rope-plain-sin.f32", "rope-compressed-cos.f32", "rope-compressed-sin.f32")
SUMMARY = "rope.json"

# The engine looks past the window by the rows of one round; the recorded tables have 65,536 to spare.
SPARE_ROWS = 65_536
# Positions become float32 numbers: whole ones are exact up to 2^24.
MAX_ROWS = 2**24

_BLOCK_ROWS = 16_384  # the unit of hashing and writing: 2 MiB a table at half = 32
_TILE_ROWS = 512  # the unit of arithmetic: its arrays stay in a core's cache
_THREADS = 2
_AHEAD = 4  # blocks in flight, which bounds the memory

# Polynomials of the published algorithm for |x| <= pi/4: x + x^3(S0 + S1 x^2 + S2 x^4), 1 + C0 x^2 + ...
_S0, _S1, _S2 = map(
    float.fromhex, ("-0x1.555545995a603p-3", "0x1.1107605230bc4p-7", "-0x1.994eb3774cf24p-13")
)
_C0, _C1 = map(float.fromhex, ("-0x1.ffffffd0c621cp-2", "0x1.55553e1068f19p-5"))
_C2, _C3 = map(float.fromhex, ("-0x1.6c087e89a359dp-10", "0x1.99343027bf8c3p-16"))
# 2/pi scaled by 2^24: after a cast to int32, 24 bits of fraction are left to round by.
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p+23")
# pi/2 in two parts of 24 and 29 bits: n * part is exact for every n that occurs below _FAST_BELOW, so that
# the difference is rounded once, as by a fused multiply-add.
_HALF_PI_HIGH = float.fromhex("0x1.921fb5p+0")
_HALF_PI_LOW = float.fromhex("0x1.921fb54442d18p+0") - _HALF_PI_HIGH
_FAST_BELOW = 120.0
# What one unit of the 62-bit fixed-point remainder is worth, in radians.
_REMAINDER_UNIT = float.fromhex("0x1.921fb54442d18p-62")
# 4/pi in binary: its first 192 bits, the leading one at bit 191.
_FOUR_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """What of a config.json decides the tables. `head_dim`: rotated dimensions; lengths in positions."""

    rows: int
    head_dim: int
    plain_base: float
    compressed_base: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_length: int

    @property
    def half(self) -> int:
        """Values in a row: one for each rotated pair."""
        return self.head_dim // 2

    @property
    def table_bytes(self) -> int:
        """Size of one table file."""
        return self.rows * self.half * 4


def parameters(config: Mapping[str, Any], source: str = "config.json") -> RopeParameters:
    """Read a checkpoint's configuration, nested under `text_config` or flat.

    Raises Problem naming the key when the family is another, a value is missing, of a wrong type or out
    of the range that the arithmetic holds for.
    """
    text = modelconfig.text_section(config, source)
    scaling = text.section("rope_scaling")
    kind = scaling.word("rope_type", "type")
    if kind != "yarn":
        raise scaling.wrong("rope_type", kind, '"yarn"')
    head_dim = text.whole("qk_rope_head_dim", 2, 4096)
    if head_dim % 2:
        raise text.wrong("qk_rope_head_dim", head_dim, "an even number: dimensions are rotated in pairs")
    if head_dim > text.whole("head_dim", 2, 65_536):
        raise text.wrong("qk_rope_head_dim", head_dim, "no more than head_dim")
    beta_slow = scaling.number("beta_slow", above=0)
    return RopeParameters(
        rows=text.whole("max_position_embeddings", 1, MAX_ROWS - SPARE_ROWS) + SPARE_ROWS,
        head_dim=head_dim,
        plain_base=text.number("rope_theta", above=1),
        compressed_base=text.number("compress_rope_theta", above=1),
        factor=scaling.number("factor", above=0),
        beta_fast=scaling.number("beta_fast", above=beta_slow),
        beta_slow=beta_slow,
        original_length=scaling.whole("original_max_position_embeddings", 1, MAX_ROWS),
    )


def correction_range(rope: RopeParameters) -> tuple[int, int]:
    """The pairs (low, high) between which YaRN blends: original up to low, scaled by the factor from high."""

    def pair_turning(turns: float) -> float:
        return (
            rope.head_dim
            * math.log(rope.original_length / (2 * math.pi * turns))
            / (2 * math.log(rope.compressed_base))
        )

    low = max(math.floor(pair_turning(rope.beta_fast)), 0)
    high = min(math.ceil(pair_turning(rope.beta_slow)), rope.head_dim - 1)
    return low, high


def frequencies(rope: RopeParameters) -> tuple[Floats, Floats]:
    """The plain and the compressed frequencies in radians a position, float32, shape (half,) each."""
    import numpy as np

    def of(base: float) -> Floats:
        exponents = np.arange(0, rope.head_dim, 2, dtype=np.float32) / np.float32(rope.head_dim)
        # float64 power rounded once: the bits of a correctly rounded powf.
        powers = np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)
        return np.float32(1) / powers

    low, high = correction_range(rope)
    # The width is never 0: a step then, as in the reference implementation.
    width = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(rope.half, dtype=np.float32) - np.float32(low)) / width, 0, 1)
    kept = np.float32(1) - ramp
    scaled = of(rope.compressed_base)
    return of(rope.plain_base), scaled / np.float32(rope.factor) * (np.float32(1) - kept) + scaled * kept


def sincos(angles: Floats) -> tuple[Floats, Floats]:
    """Sine and cosine of float32 angles >= 0 (radians, below 2^31), bit for bit as glibc's sinf and cosf.

    `angles` has any shape with at least one dimension; both results have the same.
    """
    import numpy as np

    small = angles < np.float32(_FAST_BELOW)
    if small.all():
        return _evaluate(*_reduce_small(angles))
    if not small.any():
        return _evaluate(*_reduce_large(angles))
    sine, cosine = np.empty_like(angles), np.empty_like(angles)
    for mask, reduce in ((small, _reduce_small), (~small, _reduce_large)):
        sine[mask], cosine[mask] = _evaluate(*reduce(angles[mask]))
    return sine, cosine


def _reduce_small(angles: Floats) -> tuple[Doubles, Quadrants]:
    import numpy as np

    x = angles.astype(np.float64)
    quarter = ((x * _TWO_OVER_PI).astype(np.int32) + np.int32(0x800000)) >> np.int32(24)
    turns = quarter.astype(np.float64)
    x -= turns * _HALF_PI_HIGH
    turns *= _HALF_PI_LOW
    x -= turns
    return x, quarter.view(np.uint32)


def _window_tables() -> tuple[list[int], list[int]]:
    """For each binary exponent 1..128 of a float32: the bits of 2/pi that decide its remainder.

    Of mantissa * 2^k * 2/pi only the two bits before the point (the quadrant) and what follows count, so
    three words are cut from 4/pi in steps of 8 bits and shifted by what the step leaves over. The first
    list is the factor of the product's upper bits (modulo 2^64), the second that of its last 32.
    """
    upper, lower = [], []
    for exponent in range(128):
        step, shift = exponent >> 3, exponent & 7
        words = [(_FOUR_OVER_PI >> (184 - 8 * (step + word))) & 0xFFFFFFFF for word in (0, 4, 8)]
        first, second, third = (word << shift for word in words)
        upper.append(((first << 32) + second) % 2**64)
        lower.append(third)
    return upper, lower


def _reduce_large(angles: Floats) -> tuple[Doubles, Quadrants]:
    import numpy as np

    bits = angles.view(np.uint32)
    upper, lower = (np.array(words, dtype=np.uint64) for words in _WINDOWS)
    exponent = (bits >> np.uint32(23)) & np.uint32(127)
    mantissa = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x800000)).astype(np.uint64)
    product = upper[exponent]
    product *= mantissa
    mantissa *= lower[exponent]
    mantissa >>= np.uint64(32)
    product += mantissa
    quarter = ((product + np.uint64(1 << 61)) >> np.uint64(62)).astype(np.uint32)
    # The lower 62 bits as a signed number: the distance from the nearest quarter turn.
    remainder = product.view(np.int64)
    remainder <<= np.int64(2)
    remainder >>= np.int64(2)
    return remainder.astype(np.float64) * _REMAINDER_UNIT, quarter


_WINDOWS = _window_tables()


def _evaluate(x: Doubles, quarter: Quadrants) -> tuple[Floats, Floats]:
    """Both polynomials at the reduced angle, swapped and negated as the quadrant says.

    The order of the operations is part of the result's bits: it is the published one.
    """
    import numpy as np

    x2 = x * x
    x3 = x2 * x
    high = x2 * _S2
    high += _S1
    high *= x3 * x2
    x3 *= _S0
    x += x3
    x += high
    sine = x.astype(np.float32).view(np.uint32)
    x4 = np.multiply(x2, x2, out=x)
    x6 = np.multiply(x4, x2, out=x3)
    high = np.multiply(x2, _C3, out=high)
    high += _C2
    high *= x6
    x2 *= _C0
    x2 += 1.0
    x4 *= _C1
    x2 += x4
    x2 += high
    cosine = x2.astype(np.float32).view(np.uint32)
    # All on the bits: swap where the quadrant is odd, set the sign where it turned.
    swap = (sine ^ cosine) & (~(quarter & np.uint32(1)) + np.uint32(1))
    sine ^= swap
    cosine ^= swap
    sign = np.uint32(0x80000000)
    sine ^= (quarter << np.uint32(30)) & sign
    cosine ^= ((quarter + np.uint32(1)) << np.uint32(30)) & sign
    return sine.view(np.float32), cosine.view(np.float32)


def rows(frequency: Floats, first: int, count: int) -> tuple[Floats, Floats]:
    """Cosines and sines of positions first..first+count-1: two float32 arrays of shape (count, half)."""
    import numpy as np

    cosines = np.empty((count, len(frequency)), dtype=np.float32)
    sines = np.empty_like(cosines)
    for begin in range(0, count, _TILE_ROWS):
        end = min(begin + _TILE_ROWS, count)
        positions = np.arange(first + begin, first + end, dtype=np.float32)
        # One pair a line: its angles grow along the line, so that most lines need one kind of reduction.
        angles = frequency[:, np.newaxis] * positions
        large = int((angles[:, 0] >= _FAST_BELOW).sum())
        mixed = int((angles[:, -1] >= _FAST_BELOW).sum())
        for part in (slice(0, large), slice(large, mixed), slice(mixed, None)):
            if len(angles[part]):
                sine, cosine = sincos(angles[part])
                sines[begin:end, part] = sine.T
                cosines[begin:end, part] = cosine.T
    return cosines, sines


def _blocks(rope: RopeParameters, threads: int) -> Iterator[tuple[int, memoryview]]:
    """The tables in blocks of rows: (index into TABLES, little-endian bytes), each table's in order."""
    plain, compressed = frequencies(rope)
    todo = [
        (table, frequency, first, min(_BLOCK_ROWS, rope.rows - first))
        for first in range(0, rope.rows, _BLOCK_ROWS)
        for table, frequency in ((0, plain), (2, compressed))
    ]
    waiting: deque[tuple[int, Future[tuple[Floats, Floats]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for table, frequency, first, count in todo:
            waiting.append((table, pool.submit(rows, frequency, first, count)))
            if len(waiting) == _AHEAD:
                yield from _finished(*waiting.popleft())
        while waiting:
            yield from _finished(*waiting.popleft())


def _finished(table: int, future: Future[tuple[Floats, Floats]]) -> Iterator[tuple[int, memoryview]]:
    for offset, values in enumerate(future.result()):
        yield table + offset, values.astype("<f4", copy=False).data.cast("B")


def summary(rope: RopeParameters, hashes: Mapping[str, str]) -> dict[str, int | str]:
    """What rope.json says: rows, half and the sha256 of each table, in the recorded order."""
    return {"rows": rope.rows, "half": rope.half, **{name: hashes[name] for name in TABLES}}


def dump_summary(told: Mapping[str, int | str]) -> str:
    """rope.json as text, byte for byte as the kit records it (no newline at the end)."""
    return json.dumps(dict(told), indent=1)


def load_summary(path: Path) -> dict[str, int | str]:
    """Read a rope.json. Raises Problem naming the key that is missing or not of its kind."""
    with _of_summary():
        values = modelconfig.load(path)
    return summary_of(values, str(path))


def parse_summary(text: str, source: str) -> dict[str, int | str]:
    """The same from the text of a rope.json; `source` names it in messages."""
    with _of_summary():
        values = modelconfig.decode(text, source)
    return summary_of(values, source)


@contextlib.contextmanager
def _of_summary() -> Iterator[None]:
    """What is wrong with the file as a whole, told of a rope.json."""
    try:
        yield
    except Problem as problem:
        raise _no_summary(problem.found) from None


def _no_summary(found: str) -> Problem:
    return Problem(
        found=found,
        needed="a rope.json: rows and half as whole numbers and the sha256 of each of the four tables",
        do="restore it from files/fixtures/rope.json",
        code="rope-expectation",
    )


def summary_of(values: Mapping[str, Any], source: str) -> dict[str, int | str]:
    """The keys of a decoded rope.json, checked; `source` names it in messages."""
    hex64 = re.compile(r"[0-9a-f]{64}")
    for key in ("rows", "half", *TABLES):
        value = values.get(key)
        good = isinstance(value, str) and hex64.fullmatch(value) if key in TABLES else type(value) is int
        if not good:
            raise _no_summary(f"{source}: {key} is {value!r:.80}")
    return {key: values[key] for key in ("rows", "half", *TABLES)}


def compare(told: Mapping[str, int | str], expected: Mapping[str, int | str]) -> None:
    """Raise Problem that lists every value in which `told` is not as `expected`."""
    wrong = [key for key in told if told[key] != expected.get(key)]
    if wrong:
        raise Problem(
            found="; ".join(f"{key} {told[key]}" for key in wrong),
            needed="; ".join(f"{key} {expected.get(key)}" for key in wrong),
            do="check that config.json is the checkpoint's own; for a new profile, record its tables first",
            code="rope-mismatch",
        )


def standing(
    rope: RopeParameters, out: Path, expected: Mapping[str, int | str] | None
) -> dict[str, int | str] | None:
    """What rope.json says of the tables in `out` when they were made from the same parameters, else None.

    A stat of five files and no more. Tables that are not as expected do not count.
    """
    hashes = made.vouched(out, "rope", _fingerprint(rope))
    if hashes is None or set(hashes) != {*TABLES, SUMMARY}:
        return None
    told = summary(rope, hashes)
    return None if expected is not None and dict(expected) != told else told


def _fingerprint(rope: RopeParameters) -> str:
    return made.fingerprint(dataclasses.asdict(rope))


def make(
    rope: RopeParameters,
    out: Path,
    expected: Mapping[str, int | str] | None = None,
    *,
    threads: int = _THREADS,
    progress: Progress | None = None,
) -> dict[str, int | str]:
    """Write the four tables and rope.json into `out`; returns what rope.json says.

    Every file takes its name only after all four hashes are known to be as `expected`; otherwise
    Problem is raised and `out` is as it was. Memory is bounded by a few blocks of 2 MiB.
    """
    if expected is not None:
        shape = {"rows": rope.rows, "half": rope.half}
        compare(shape, expected)
    disk.require_room(out, len(TABLES) * rope.table_bytes, "the RoPE tables")
    out.mkdir(parents=True, exist_ok=True)
    digests = [hashlib.sha256() for _ in TABLES]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(atomic.replacing(out / name)) for name in TABLES]
        for table, block in _blocks(rope, threads):
            digests[table].update(block)
            files[table].write(block)
            if progress:
                progress.advance(len(block), files=int(files[table].tell() == rope.table_bytes))
        told = summary(rope, {name: digest.hexdigest() for name, digest in zip(TABLES, digests, strict=True)})
        if expected is not None:
            compare(told, expected)
    text = dump_summary(told)
    atomic.write_text(out / SUMMARY, text)
    hashes = {name: str(told[name]) for name in TABLES}
    hashes[SUMMARY] = hashlib.sha256(text.encode()).hexdigest()
    made.record(out, "rope", _fingerprint(rope), hashes)
    return told
