"""Headers of safetensors files, read as if a stranger had written them.

Layout: 8 bytes little-endian length, that many bytes of JSON (`{name: {dtype, shape, data_offsets}}` and an
optional `__metadata__` of texts), then the tensors' bytes back to back. Every rule is checked before a
length or an offset is believed; a fault is a Problem that names the file and the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .problem import Problem

# read(offset, count) gives exactly `count` bytes, or raises.
Reader = Callable[[int, int], bytes]

# The limit of the format's own library.
LARGEST_HEADER = 100_000_000
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_LONGEST_SHAPE = 16
# Bits of one element.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class Tensor:
    """One tensor: element type, dimensions and where its bytes lie in the file (offset, count)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """The tensors of one file by name, in the order of their bytes, and the file's metadata."""

    source: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)


class _Reject(ValueError):
    """Raised inside the JSON decoder's hooks, which know no file name."""


def read_header(read: Reader, file_size: int, source: str) -> Header:
    """Read and check the header of a file of `file_size` bytes. `source` names the file in messages.

    Reads 8 bytes, then the header's bytes once their number is plausible, and nothing else. Raises
    Problem (code safetensors) at the first fault.
    """
    if file_size < _LENGTH_BYTES:
        _refuse(source, f"has {file_size} bytes", "at least the 8 bytes of a header's length")
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    room = file_size - _LENGTH_BYTES
    if length > room:
        _refuse(source, f"says its header has {length} bytes", f"at most the {room} bytes that follow")
    if not 2 <= length <= LARGEST_HEADER:
        _refuse(source, f"says its header has {length} bytes", f"a header of 2 to {LARGEST_HEADER} bytes")
    entries = _decode(read(_LENGTH_BYTES, length), source)
    metadata = _metadata(entries.pop(_METADATA, {}), source)
    start = _LENGTH_BYTES + length
    tensors = sorted(
        (_tensor(name, entry, start, source) for name, entry in entries.items()),
        key=lambda tensor: (tensor.offset, tensor.size),
    )
    _require_contiguous(tensors, start, file_size, source)
    return Header(source, {tensor.name: tensor for tensor in tensors}, metadata)


def read_file_header(path: Path) -> Header:
    """The header of a local file."""
    with path.open("rb") as handle:

        def read(offset: int, count: int) -> bytes:
            handle.seek(offset)
            data = handle.read(count)
            if len(data) != count:
                _refuse(str(path), f"ended {count - len(data)} bytes early", "a whole file")
            return data

        return read_header(read, path.stat().st_size, str(path))


def read_tensor(read: Reader, tensor: Tensor) -> bytes:
    """The bytes of one tensor, as they stand in the file."""
    return read(tensor.offset, tensor.size) if tensor.size else b""


def _decode(raw: bytes, source: str) -> dict[str, Any]:
    if raw[:1] != b"{":
        _refuse(source, f"has a header that begins with {raw[:1]!r}", "a JSON object")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(source, f"has a header that is not UTF-8 (byte {error.start})", "JSON in UTF-8")
    try:
        entries = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except _Reject as error:
        _refuse(source, f"has a header with {error}", "each name once, numbers in digits")
    except (ValueError, RecursionError) as error:
        _refuse(source, f"has a header that is not JSON ({type(error).__name__}: {error})", "a JSON object")
    return dict(entries)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _Reject(f"the name {key!r:.120} twice")
        values[key] = value
    return values


def _no_constant(word: str) -> NoReturn:
    raise _Reject(f"the number {word}")


def _metadata(values: Any, source: str) -> dict[str, str]:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        _refuse(source, f"has a {_METADATA} that is no list of texts", "an object of texts")
    return dict(values)


def _tensor(name: str, entry: Any, start: int, source: str) -> Tensor:
    def refuse(found: str, needed: str) -> NoReturn:
        _refuse(source, f"tensor {name!r:.200} {found}", needed)

    if not name or not name.isprintable():
        refuse("has a name that can't be printed", "a printable name")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse("is not described by dtype, shape and data_offsets", "exactly these three")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        refuse(f"has dtype {dtype!r:.40}", f"one of {', '.join(_BITS)}")
    if not _whole_numbers(shape) or len(shape) > _LONGEST_SHAPE:
        refuse(f"has shape {shape!r:.80}", f"at most {_LONGEST_SHAPE} whole numbers from 0 to 2^63")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"has data_offsets {offsets!r:.80}", "two whole numbers, the begin not after the end")
    bits = math.prod(shape) * _BITS[dtype]
    size = offsets[1] - offsets[0]
    if bits != 8 * size:
        refuse(
            f"has {size} bytes for {dtype} {shape!r:.80}",
            f"{bits / 8:g} bytes, as many as its shape asks for",
        )
    return Tensor(name, dtype, tuple(shape), start + offsets[0], size)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _require_contiguous(tensors: list[Tensor], start: int, file_size: int, source: str) -> None:
    at, before = start, "the header"
    for tensor in tensors:
        if tensor.offset != at:
            how = "overlaps" if tensor.offset < at else "leaves a gap after"
            _refuse(
                source,
                f"tensor {tensor.name!r:.200} {how} {before} (begins at {tensor.offset - start})",
                f"tensors back to back: begin {at - start}",
            )
        at, before = tensor.offset + tensor.size, repr(tensor.name)[:200]
        if at > file_size:
            _refuse(
                source,
                f"tensor {tensor.name!r:.200} runs past the end (to {at} of {file_size} bytes)",
                "a whole file",
            )
    if at != file_size:
        _refuse(source, f"has {file_size - at} bytes after {before}", "nothing after the last tensor")


def _refuse(source: str, found: str, needed: str) -> NoReturn:
    raise Problem(
        found=f"{source} {found}",
        needed=needed,
        do="verify the file against its lock and fetch it again: sparkpair verify, then sparkpair fetch",
        code="safetensors",
    )
