"""What a rank loads: the checkpoint's tensors, each whole or this rank's half of it, in the loader's order.

Heads, expert columns and the vocabulary are halved; norms, gates and what both ranks compute are held by both. An
EXL3 matrix is three parts: the trellis in tiles of 16 x 16, and one sign vector for its input and one for its output.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import EngineError
from .safetensors import Tensor, read

TORCH = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
}
_BLOCK = 1 << 20

# Read elsewhere than from the rank cache: the picture tower (rank 0), the kit's bias, Engram's tables, a marker.
_NOT_CACHED = re.compile(r"^vision\.|^model\.vision|\.bias_vl$|\.engram\.embed\.|\.mul1$")
_BY_COLUMN = re.compile(r"(^head|\.attn\.wq_b|\.(w1|w3))$")
_BY_ROW = re.compile(r"(\.attn\.wo_b|\.w2|\.engram\.wkv)$")
_GROUP = re.compile(r"\.attn\.wo_a\.slice\.(\d+)$")
_PARTS = {"trellis": "tr", "suh": "suh", "svh": "svh"}


@dataclass(frozen=True)
class Split:
    rank: int
    world: int


@dataclass(frozen=True)
class Entry:
    """One tensor of the cache: `axis` is cut to [begin, end) of the source; None takes the whole."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    source: Tensor
    axis: int | None = None
    begin: int = 0

    @property
    def size(self) -> int:
        whole = self.source.size
        return whole if self.axis is None else whole // self.source.shape[self.axis] * self.shape[self.axis]

    @property
    def expert(self) -> bool:
        return ".ffn.experts." in self.key

    def blocks(self) -> Iterator[bytes]:
        """The entry's bytes, at most about a mebibyte at a time."""
        source = self.source
        if self.axis in (None, 0):
            row = source.size // source.shape[0] if self.axis == 0 else 0
            at, left = self.begin * row, self.size
            while left:
                size = min(left, _BLOCK)
                yield read(source, at, size)
                at, left = at + size, left - size
            return
        rows, columns = source.shape[0], source.shape[1]
        row = source.size // rows
        cell = row // columns
        low, high = self.begin * cell, (self.begin + self.shape[1]) * cell
        step = max(_BLOCK // row, 1)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            data = memoryview(read(source, first * row, count * row))
            yield b"".join(data[r * row + low : r * row + high] for r in range(count))


def _natural(name: str) -> tuple[object, ...]:
    """Embedding, final norm and head first, then the layers, then the drafting blocks, numbers by value."""
    first = {"embed": 0, "norm": 1, "head": 2, "layers": 3, "mtp": 4}.get(name.split(".", 1)[0], 5)
    words = [(0, int(w), "") if w.isdigit() else (1, 0, w) for w in name.split(".")]
    return (first, *words)


def _range(per: int, split: Split) -> tuple[int, int]:
    return split.rank * per, (split.rank + 1) * per


def _exl3(tensors: dict[str, Tensor], prefix: str, split: Split) -> list[Entry]:
    parts = {}
    for name in _PARTS:
        if f"{prefix}.{name}" not in tensors:
            raise EngineError("MissingTensor", f"{prefix}.{name}: FileNotFound")
        parts[name] = tensors[f"{prefix}.{name}"]
    trellis = parts["trellis"]
    if len(trellis.shape) != 3:
        raise EngineError(
            "BadShape", f"{prefix}.trellis is {list(trellis.shape)}, three dimensions are needed"
        )
    rows, columns = trellis.shape[0] * 16, trellis.shape[1] * 16
    axis: int | None = None
    if _BY_COLUMN.search(prefix) and trellis.shape[1] % split.world == 0:
        axis = 1
    elif _BY_ROW.search(prefix) and trellis.shape[0] % split.world == 0:
        axis = 0
    if split.world == 1:
        axis = None
    low, high = _range((columns if axis == 1 else rows) // split.world, split)
    cols_text = f"({low}, {high})" if axis == 1 else "None"
    rows_text = f"({low}, {high})" if axis == 0 else "None"
    entries = []
    for name, short in _PARTS.items():
        source = parts[name]
        cut: int | None = None
        begin, shape = 0, list(source.shape)
        if name == "trellis" and axis is not None:
            cut, begin, shape[axis] = axis, low // 16, (high - low) // 16
        elif (name, axis) in {("suh", 0), ("svh", 1)} and source.shape[0] == (rows if axis == 0 else columns):
            cut, begin, shape[0] = 0, low, high - low
        key = f"{prefix}|{cols_text}|{rows_text}|{short}"
        entries.append(Entry(key, _torch(source), tuple(shape), source, cut, begin))
    return entries


def _torch(tensor: Tensor) -> str:
    try:
        return TORCH[tensor.dtype]
    except KeyError:
        raise EngineError("UnsupportedDType", f"{tensor.name} is {tensor.dtype}") from None


def _own_group(prefix: str, groups: Counter[str], split: Split) -> bool:
    """Whether an output projection's group is this rank's: the first half of them is rank 0's."""
    found = _GROUP.search(prefix)
    if found is None:
        return True
    each = max(groups[prefix.rpartition(".slice.")[0]] // split.world, 1)
    return int(found.group(1)) // each == split.rank


def wants(tensors: dict[str, Tensor], split: Split, *, dspark: bool = True) -> list[Entry]:
    """The entries of a rank's cache.

    Raises:
        EngineError: MissingTensor, BadShape, UnsupportedDType; NoWeights where nothing is left to load.
    """
    entries: list[Entry] = []
    groups = Counter(
        name.rpartition(".slice.")[0]
        for name in tensors
        if name.endswith(".suh") and _GROUP.search(name.removesuffix(".suh"))
    )
    for name in sorted(tensors, key=_natural):
        if _NOT_CACHED.search(name) or (not dspark and name.startswith("mtp.")):
            continue
        prefix, _, part = name.rpartition(".")
        if part in _PARTS:
            if not _own_group(prefix, groups, split):
                continue
            if part == "suh":  # the first of the three by name brings all three
                entries += _exl3(tensors, prefix, split)
        else:
            tensor = tensors[name]
            entries.append(Entry(f"{name}|None", _torch(tensor), tensor.shape, tensor))
    missing = [n for n in tensors if n.endswith(".trellis") and f"{n[:-8]}.suh" not in tensors]
    if missing:
        raise EngineError("MissingTensor", f"{missing[0][:-8]}.suh: FileNotFound")
    if not entries:
        raise EngineError("NoWeights", "the checkpoint holds no tensor that a rank loads")
    return entries
