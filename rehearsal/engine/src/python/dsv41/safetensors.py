"""Safetensors files, read by their headers: names, types, shapes and where the bytes lie."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import EngineError

_MAX_HEADER = 512 << 20
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I16": 2, "I32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


@dataclass(frozen=True)
class Tensor:
    """One tensor: `offset` counts from the start of the file, `size` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int


def _bad(file: Path, words: str) -> EngineError:
    return EngineError("BadSafetensors", f"{file}: {words}")


def read_header(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, in the header's order, and its metadata.

    Raises:
        EngineError: BadSafetensors where the header or an offset does not hold, UnsupportedDType.
    """
    total = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if total < 8 or length > min(total - 8, _MAX_HEADER):
            raise _bad(file, f"a header of {length} bytes in a file of {total}")
        try:
            header: Any = json.loads(handle.read(length))
        except ValueError:
            raise _bad(file, "the header is not JSON") from None
    if not isinstance(header, dict):
        raise _bad(file, "the header is not an object")
    metadata = header.pop("__metadata__", {})
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in header.items():
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(d) for d in entry["shape"])
            begin, finish = (int(x) for x in entry["data_offsets"])
        except (TypeError, KeyError, ValueError):
            raise _bad(file, f"{name}: dtype, shape and data_offsets are needed") from None
        if dtype not in SIZES:
            raise EngineError("UnsupportedDType", f"{file}: {name} is {dtype}")
        count = SIZES[dtype]
        for d in shape:
            count *= d
        if not 0 <= begin <= finish or finish - begin != count:
            raise _bad(file, f"{name}: {finish - begin} bytes for {dtype} {list(shape)}")
        end = max(end, finish)
        tensors[name] = Tensor(name, dtype, shape, file, 8 + length + begin, count)
    if 8 + length + end != total:
        raise _bad(file, f"{total} bytes, the header says {8 + length + end}")
    return tensors, metadata


def checkpoint(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a model's folder: all `*.safetensors` in sorted order, a later file's tensor wins.

    Raises:
        EngineError: NoShards where the folder holds none.
    """
    files = sorted(p for p in directory.iterdir() if p.suffix == ".safetensors" and p.is_file())
    if not files:
        raise EngineError("NoShards", f"{directory} holds no *.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(read_header(file)[0])
    return tensors


def read(tensor: Tensor, at: int, size: int) -> bytes:
    """`size` bytes of a tensor from its byte `at` on.

    Raises:
        EngineError: ShortRead.
    """
    fd = os.open(tensor.file, os.O_RDONLY)
    try:
        data = os.pread(fd, size, tensor.offset + at)
    finally:
        os.close(fd)
    if len(data) != size:
        raise EngineError("ShortRead", f"{tensor.file}: {tensor.name}")
    return data
