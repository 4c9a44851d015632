"""tf-dsv41-check: a rank cache against the split's plan and the checkpoint's bytes. No GPU."""

from __future__ import annotations

import json
from pathlib import Path

from . import plan
from .errors import bad_argument
from .rankcache import find, load, split_of
from .safetensors import checkpoint
from .settings import model_config

USAGE = "usage: tf-dsv41-check MODEL_DIR CACHE_DIR RANK WORLD [--no-dspark] [--parity] [--bytes EVERY]"
_SHOWN = 10


def _options(words: list[str]) -> tuple[bool, int]:
    dspark, every = True, 0
    rest = iter(words)
    for word in rest:
        if word == "--no-dspark":
            dspark = False
        elif word == "--bytes":
            value = next(rest, "")
            if not value.isdigit() or int(value) < 1:
                raise bad_argument(f"--bytes takes a count, not {value!r}")
            every = int(value)
        elif word != "--parity":
            raise bad_argument(f"{word}: {USAGE}")
    return dspark, every


def _same_bytes(file: Path, offset: int, entry: plan.Entry) -> bool:
    with file.open("rb") as handle:
        handle.seek(offset)
        return all(handle.read(len(block)) == block for block in entry.blocks())


def main(words: list[str]) -> int:
    """See USAGE. One JSON line; exit 0 where everything holds, 1 where it does not, 2 wrong usage."""
    split = split_of(words, USAGE)
    if split is None:
        return 2
    dspark, every = _options(words[4:])
    model = Path(words[0])
    model_config(model)
    cache = load(find(Path(words[1]), *split))
    want = plan.wants(checkpoint(model), plan.Split(*split), dspark=dspark)
    by_key = {e.key: e for e in want}
    mismatches = layouts = compared = compared_bytes = byte_mismatches = 0
    for i, (row, entry) in enumerate(zip(cache.rows, want, strict=False)):
        if row.key != entry.key or row.dtype != entry.dtype:
            mismatches += 1
            if mismatches <= _SHOWN:
                print(f"mismatch {i}: file {row.key} {row.dtype} {list(row.shape)} | plan {entry.key}")
    for i, row in enumerate(cache.rows):
        known = by_key.get(row.key)
        if known is None or (known.dtype, known.shape, known.size) != (row.dtype, row.shape, row.size):
            layouts += 1
            if layouts <= _SHOWN:
                print(f"layout {i}: {row.key}: the checkpoint has {list(known.shape) if known else 'none'}")
            continue
        if every == 0 or (known.expert and i % every != 0):
            continue
        compared, compared_bytes = compared + 1, compared_bytes + row.size
        if not _same_bytes(cache.file, row.offset, known):
            byte_mismatches += 1
            if byte_mismatches <= _SHOWN:
                print(f"bytes {i}: {row.key} differ")
    ok = not (mismatches or layouts or byte_mismatches) and len(cache.rows) == len(want)
    result = {
        "file": cache.file.name,
        "entries": len(cache.rows),
        "planned": len(want),
        "bytes": sum(r.size for r in cache.rows),
        "index_at": cache.data_end,
        "mismatches": mismatches,
        "layout_mismatches": layouts,
        "compared": compared,
        "compared_bytes": compared_bytes,
        "byte_mismatches": byte_mismatches,
        "ok": ok,
    }
    print(json.dumps(result))
    return 0 if ok else 1
