"""Verify against hashlib on one thread, the disk alone and `sha256sum -c`, on the same data in the same run.

Run from the project's folder: .venv/bin/python benchmarks/verify.py [--json] [--megabytes N] [--dir DIR]
Budgets: cold >= 0.9 x (cores x one thread of hashlib), or of what the disk gives where that is less; the page
cache grows by <= 5 % of the bytes read; 45 files by receipts <= 0.5 s with the start of Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sparkpair import hashing, locks, pagecache, verify
from sparkpair.locks import Lock, LockedFile

from benchmarks.report import tell

SPARKPAIR = Path(sys.executable).with_name("sparkpair")
# Uneven, as shards are.
SHARES = (0.2, 0.16, 0.14, 0.12, 0.1, 0.1, 0.09, 0.09)
ROUNDS = 3
RATIO, GROWTH, RECEIPTS_S = 0.9, 0.05, 0.5
Row = dict[str, Any]


def make_data(folder: Path, megabytes: int) -> Lock:
    """Random files of `megabytes` in all, written through to the disk and out of the page cache."""
    entries = []
    for number, share in enumerate(SHARES):
        path = folder / f"model-{number:05}.safetensors"
        digest, left = hashlib.sha256(), int(share * megabytes * 1e6)
        size = left
        with path.open("wb") as handle:
            while left:
                block = os.urandom(min(left, 8 << 20))
                handle.write(block)
                digest.update(block)
                left -= len(block)
            os.fsync(handle.fileno())
        entries.append(LockedFile(path.name, size, sha256=digest.hexdigest()))
    return Lock("bench/checkpoint", "0" * 40, tuple(sorted(entries)))


def cool(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as handle:
            pagecache.drop(handle.fileno())


def warm(folder: Path) -> None:
    buffer = bytearray(8 << 20)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def cached(folder: Path) -> int:
    return sum(pagecache.resident_bytes(path) for path in folder.iterdir())


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def hashlib_rate() -> float:
    """Bytes a second of one thread of hashlib over memory."""
    block = os.urandom(64 << 20)

    def work() -> None:
        digest = hashlib.sha256()
        for _ in range(8):
            digest.update(block)

    return 8 * len(block) / seconds(work)


def disk_rate(folder: Path, total: int) -> float:
    """Bytes a second that the disk gives to direct reads from several threads, nothing hashed."""
    paths = sorted(folder.glob("*.safetensors"))

    def read(path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer, offset = mmap.mmap(-1, 4 << 20), 0
        while count := os.preadv(fd, [buffer], offset):
            offset += count
        os.close(fd)

    def work() -> None:
        threads = [threading.Thread(target=read, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return total / seconds(work)


def plain_rate(folder: Path, sums: Path, total: int) -> float:
    return total / seconds(
        lambda: subprocess.run(["sha256sum", "--quiet", "-c", str(sums)], cwd=folder, check=True)
    )


def verify_rate(lock: Lock, folder: Path) -> float:
    report = verify.Report()

    def work() -> None:
        nonlocal report
        report = verify.verify(lock, folder, full=True, quiet=True)

    spent = seconds(work)
    if not report.ok or report.bytes != lock.total_bytes:
        raise SystemExit("the benchmark's own data does not verify")
    return report.bytes / spent


def speed_rows(lock: Lock, folder: Path, sums: Path) -> list[Row]:
    """Each way is measured ROUNDS times in turn; the best of each counts."""
    total, best = (
        lock.total_bytes,
        dict.fromkeys(("one", "disk", "cold", "warm", "sum_cold", "sum_warm"), 0.0),
    )
    growth = 0
    for _ in range(ROUNDS):
        cool(folder)
        before = cached(folder)
        rates = {"one": hashlib_rate(), "disk": disk_rate(folder, total)}
        rates["cold"] = verify_rate(lock, folder)
        growth = max(growth, cached(folder) - before)
        rates["sum_cold"] = plain_rate(folder, sums, total)
        warm(folder)
        rates["sum_warm"] = plain_rate(folder, sums, total)
        rates["warm"] = verify_rate(lock, folder)
        best = {name: max(best[name], rates[name]) for name in best}
    all_cores = hashing.cores() * best["one"]
    bound = min(all_cores, best["disk"])
    return [
        {
            "name": "verify, cold: share of what cores and disk allow",
            "value": round(best["cold"] / bound, 3),
            "budget": f">= {RATIO}",
            "ok": best["cold"] >= RATIO * bound,
            "rates_gb_s": {name: round(rate / 1e9, 2) for name, rate in best.items()},
            "bound_by": "disk" if bound < all_cores else "cores",
            "share_of_all_cores": round(best["cold"] / all_cores, 3),
        },
        {
            "name": "verify, from the page cache: share of cores x one thread",
            "value": round(best["warm"] / all_cores, 3),
            "budget": None,
            "ok": True,
        },
        {
            "name": "verify against sha256sum -c, cold",
            "value": round(best["cold"] / best["sum_cold"], 2),
            "budget": ">= 1",
            "ok": best["cold"] >= best["sum_cold"],
        },
        {
            "name": "verify: growth of the page cache, share of the bytes read",
            "value": round(growth / total, 4),
            "budget": f"<= {GROWTH}",
            "ok": growth <= GROWTH * total,
        },
    ]


def receipts_row(folder: Path) -> Row:
    entries = []
    for number in range(45):
        data = os.urandom(4096)
        (folder / f"model-{number:05}.safetensors").write_bytes(data)
        entries.append(
            LockedFile(f"model-{number:05}.safetensors", 4096, sha256=hashlib.sha256(data).hexdigest())
        )
    lock = folder.parent / "receipts.json"
    lock.write_text(locks.dump(Lock("bench/many", "0" * 40, tuple(entries))))
    words = [str(SPARKPAIR), "verify", "--lock", str(lock), "--dir", str(folder), "--json"]

    def work() -> dict[str, Any]:
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return dict(json.loads(done.stdout))

    work()
    if work()["bytes"] != 0:
        raise SystemExit("the receipts do not hold")
    spent = min(seconds(work) for _ in range(5))
    return {
        "name": "verify 45 files by receipts, Python's start included (s)",
        "value": round(spent, 3),
        "budget": f"<= {RECEIPTS_S}",
        "ok": spent <= RECEIPTS_S,
    }


def rows(megabytes: int, directory: Path) -> list[Row]:
    """All rows: {"name", "value", "budget", "ok", ...}."""
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory.absolute()) as name:
        data, many = Path(name, "data"), Path(name, "many")
        data.mkdir()
        many.mkdir()
        lock = make_data(data, megabytes)
        sums = Path(name, "sums")
        sums.write_text("".join(f"{entry.sha256}  {entry.path}\n" for entry in lock.files))
        return [*speed_rows(lock, data, sums), receipts_row(many)]


def main() -> int:
    """Print the rows; exit code 1 when one is over its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2000, help="of data (%(default)s)")
    parser.add_argument("--dir", type=Path, default=Path(".cache"), help="on a real disk (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    found = rows(arguments.megabytes, arguments.dir)
    return tell(found, as_json=arguments.json, details=("rates_gb_s", "bound_by", "share_of_all_cores"))


if __name__ == "__main__":
    raise SystemExit(main())
