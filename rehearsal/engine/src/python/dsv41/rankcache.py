"""tf-dsv41-rank-cache: one rank's weight file from the checkpoint; and that file's format.

Tensor bytes back to back, then a JSON index of [key, dtype, shape, offset, bytes], then the index's offset in 8 bytes
(little-endian) and the word TFDSRK01. The file's name holds the first 20 hex digits of the index's sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plan
from .errors import EngineError
from .safetensors import SIZES, checkpoint
from .settings import model_config

MAGIC = b"TFDSRK01"
USAGE = "usage: tf-dsv41-rank-cache MODEL_DIR OUT_DIR RANK WORLD [--parity] [--no-dspark] [--index-only]"
_REPORT = 8 << 30
_TORCH_SIZES = {torch: SIZES[name] for name, torch in plan.TORCH.items()}


@dataclass(frozen=True)
class Row:
    """One entry of a cache's index; offset and size in bytes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Cache:
    file: Path
    rows: list[Row]
    data_end: int


def find(directory: Path, rank: int, world: int) -> Path:
    """The rank's one file in a folder.

    Raises:
        EngineError: NoRankCache, SeveralRankCaches.
    """
    prefix = f"rank{rank}of{world}-"
    try:
        names = [p for p in sorted(directory.iterdir()) if p.name.startswith(prefix) and p.suffix == ".bin"]
    except OSError as error:
        raise EngineError("NoRankCache", f"{directory}: {error.strerror}") from error
    found = [p for p in names if p.is_file()]
    if not found:
        raise EngineError("NoRankCache", f"{directory} holds no {prefix}*.bin")
    if len(found) > 1:
        raise EngineError("SeveralRankCaches", f"{directory}: {', '.join(p.name for p in found)}")
    return found[0]


def _bad(file: Path, words: str) -> EngineError:
    return EngineError("BadRankCache", f"{file}: {words}")


def _row(file: Path, raw: Any, at: int, end: int) -> Row:
    try:
        key, dtype, shape, offset, size = raw
        row = Row(str(key), str(dtype), tuple(int(d) for d in shape), int(offset), int(size))
    except (TypeError, ValueError):
        raise _bad(file, f"the index holds {raw!r}") from None
    if row.dtype not in _TORCH_SIZES:
        raise EngineError("UnsupportedDType", f"{file}: {row.key} is {row.dtype}")
    count = _TORCH_SIZES[row.dtype]
    for d in row.shape:
        count *= d
    if count != row.size or row.offset != at or row.offset + row.size > end:
        raise _bad(file, f"{row.key} lies at {row.offset} with {row.size} bytes, {at} was next")
    return row


def load(file: Path) -> Cache:
    """The index of a cache, checked: magic, offset, rows that follow one another up to the index.

    Raises:
        EngineError: BadRankCache, UnsupportedDType.
    """
    total = file.stat().st_size
    with file.open("rb") as handle:
        if total < 16:
            raise _bad(file, f"{total} bytes, a trailer alone takes 16")
        handle.seek(total - 16)
        tail = handle.read(16)
        if tail[8:] != MAGIC:
            raise _bad(file, f"ends with {tail[8:]!r}, not {MAGIC!r}")
        end = int.from_bytes(tail[:8], "little")
        if end > total - 16 or total - 16 - end > 1 << 30:
            raise _bad(file, f"the index is said to start at {end} of {total}")
        handle.seek(end)
        try:
            raw: Any = json.loads(handle.read(total - 16 - end))
        except ValueError:
            raise _bad(file, "the index is not JSON") from None
    if not isinstance(raw, list):
        raise _bad(file, "the index is not a list")
    rows: list[Row] = []
    at = 0
    for item in raw:
        rows.append(_row(file, item, at, end))
        at += rows[-1].size
    if at != end or len({r.key for r in rows}) != len(rows):
        raise _bad(file, f"entries end at {at}, the index starts at {end}, or a key comes twice")
    return Cache(file, rows, end)


def index_text(entries: list[plan.Entry]) -> str:
    """The index as the loader writes it: one list, Python's default spacing."""
    rows, at = [], 0
    for entry in entries:
        rows.append([entry.key, entry.dtype, list(entry.shape), at, entry.size])
        at += entry.size
    return json.dumps(rows)


def write(entries: list[plan.Entry], out: Path, rank: int, world: int) -> dict[str, Any]:
    """Write a rank's file: a dot file until it is whole, then its name. Returns what the summary line says."""
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(EngineError):
        old = find(out, rank, world)
        print(f"{out} already holds {old.name}: remove it or name an empty OUT_DIR", file=sys.stderr)
        return {}
    # a leftover of an earlier crash goes, a folder with two caches is what find() refuses
    partial = out / f".rank{rank}of{world}.partial"
    index = index_text(entries).encode()
    total = sum(e.size for e in entries)
    step = min(_REPORT, max(total // 8, 1))
    at, report = 0, step
    try:
        with partial.open("wb") as handle:
            for entry in entries:
                for block in entry.blocks():
                    at += handle.write(block)
                if at >= report:
                    print(
                        f"rank {rank} of {world}: {at >> 20} of {total >> 20} MiB",
                        file=sys.stderr,
                        flush=True,
                    )
                    report += step
            handle.write(index + at.to_bytes(8, "little") + MAGIC)
            handle.flush()
            os.fsync(handle.fileno())
        name = f"rank{rank}of{world}-{hashlib.sha256(index).hexdigest()[:20]}.bin"
        partial.rename(out / name)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return {"file": name, "entries": len(entries), "data_bytes": at, "index_bytes": len(index)}


def split_of(words: list[str], usage: str) -> tuple[int, int] | None:
    """RANK and WORLD of a command line; None, with the usage shown, where they are none."""
    if len(words) < 4 or not all(re.fullmatch(r"[0-9]+", w) for w in words[2:4]):
        print(usage, file=sys.stderr)
        return None
    rank, world = int(words[2]), int(words[3])
    if world not in {1, 2, 4} or rank >= world:
        print(f"WORLD is 1, 2 or 4, RANK below it; --parity needs WORLD 4\n{usage}", file=sys.stderr)
        return None
    return rank, world


def main(words: list[str]) -> int:
    """See USAGE. Exit 0 written, 1 refused, 2 wrong usage."""
    split = split_of(words, USAGE)
    if split is None:
        return 2
    options = words[4:]
    if set(options) - {"--parity", "--no-dspark", "--index-only"}:
        print(USAGE, file=sys.stderr)
        return 2
    rank, world = split
    if "--parity" in options and world != 4:
        print(f"WORLD is 1, 2 or 4, RANK below it; --parity needs WORLD 4\n{USAGE}", file=sys.stderr)
        return 2
    model, dspark = Path(words[0]), "--no-dspark" not in options
    model_config(model)
    entries = plan.wants(checkpoint(model), plan.Split(rank, world), dspark=dspark)
    if "--index-only" in options:
        sys.stdout.write(index_text(entries))
        return 0
    done = write(entries, Path(words[1]), rank, world)
    if not done:
        return 1
    parity = "--parity" in options
    print(json.dumps({**done, "rank": rank, "world": world, "parity": parity, "dspark": dspark}))
    return 0
