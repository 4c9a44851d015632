"""The engine's rank-cache programs in small, as a runner that notes what it was asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparkpair import rankcache
from sparkpair.console import Progress


def index_of(entries: int, each: int = 1000) -> str:
    return json.dumps([[f"t{n}", "torch.float32", [each // 4], n * each, each] for n in range(entries)])


class Engine:
    """Stands in for the engine's programs: plans, writes and checks a small cache, or fails as told."""

    def __init__(self, entries: int = 7) -> None:
        self.index = index_of(entries)
        self.calls: list[tuple[str, tuple[str, ...], bool]] = []
        self.code = {rankcache.WRITER: 0, rankcache.CHECKER: 0}
        self.told: dict[str, Any] = {"ok": True, "mismatches": 0, "byte_mismatches": 0}
        self.crash: BaseException | None = None
        self.names = 1

    def __call__(
        self,
        program: str,
        words: Sequence[str],
        model: Path,
        folder: Path,
        *,
        writable: bool,
        watch: Callable[[], None],
    ) -> rankcache.Done:
        self.calls.append((program, tuple(words), writable))
        if "--index-only" in words:
            return rankcache.Done(0, self.index)
        if program == rankcache.CHECKER:
            return rankcache.Done(self.code[program], f"{json.dumps(self.told)}\n", ["checked"])
        assert writable
        rank, world = words[2], words[3]
        partial = folder / f".rank{rank}of{world}.partial"
        assert not partial.exists(), "a leftover was not removed"
        data = sum(row[4] for row in json.loads(self.index))
        partial.write_bytes(bytes(data // 2))
        watch()
        if self.crash:
            raise self.crash
        if self.code[program]:
            return rankcache.Done(self.code[program], "", ["error: ShortRead"])
        partial.write_bytes(bytes(data) + self.index.encode() + data.to_bytes(8, "little") + b"TFDSRK01")
        partial.rename(
            folder / f"rank{rank}of{world}-{hashlib.sha256(self.index.encode()).hexdigest()[:20]}.bin"
        )
        return rankcache.Done(0, "{}", [])


def quiet(label: str, total: int, files: int) -> Progress:
    return Progress(label, total, files, quiet=True)
