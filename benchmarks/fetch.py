"""Fetch killed at 60 % and started again: how much is transferred again, counted in the hub's own log.

Run from the project's folder: .venv/bin/python benchmarks/fetch.py [--json] [--megabytes N]
Budget: at most 45 % of the bytes in the second run. The same kill with huggingface_hub's own downloader
stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from sparkpair import disk, hub, locks  # noqa: E402

from rehearsal.hub import Hub, make_repo  # noqa: E402

REPO = "bench/checkpoint"
SHARDS = 12
KILL_AT = 0.6
BUDGET = 0.45
FETCH = "from sparkpair.cli import main; raise SystemExit(main())"
LIBRARY = (
    "import sys; from huggingface_hub import snapshot_download;"
    " snapshot_download(sys.argv[1], local_dir=sys.argv[2], max_workers=4)"
)


def make_checkpoint(root: Path, megabytes: int) -> int:
    """Random shards, as large together as asked. Returns their bytes."""
    size = megabytes * 1_000_000 // SHARDS
    names = [f"model-{number:05d}-of-{SHARDS:05d}.safetensors" for number in range(1, SHARDS + 1)]
    index = {"weight_map": {f"t{number}": name for number, name in enumerate(names)}}
    files = {name: os.urandom(size) for name in names}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    make_repo(root, REPO, files)
    return sum(map(len, files.values()))


def killed_and_resumed(
    site: Hub, words: Sequence[str], folder: Path, total: int, rate: int
) -> dict[str, Any]:
    """Run `words` slowed down, SIGKILL at KILL_AT of the bytes, then again to its end."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": site.url,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    environment.pop("HF_TOKEN", None)
    site.mode("slow", path="*.safetensors", rate=rate)
    begun, peak = len(site.requests()), 0
    first = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while disk.tree_bytes(folder) < KILL_AT * total:
        if first.poll() is not None:
            raise SystemExit(f"it ended before the kill: {first.communicate()[1].decode()[-500:]}")
        peak = peak_bytes(first.pid)
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    site.mode("ok")
    until = time.monotonic() + 10
    while time.monotonic() < until and _under_way(site, begun):
        time.sleep(0.05)
    since = len(site.requests())
    started = time.monotonic()
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {
        "again_bytes": site.bytes_sent(since=since),
        "again_share": round(site.bytes_sent(since=since) / total, 3),
        "all_share": round(site.bytes_sent(since=begun) / total, 3),
        "second_run_s": round(time.monotonic() - started, 2),
        "peak_bytes": peak,
        "left_over_bytes": disk.tree_bytes(folder) - total,
    }


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _under_way(site: Hub, since: int) -> bool:
    """Whether a redirected transfer has not been logged as ended yet."""
    redirected = len(site.requests(since=since, status=302, method="GET"))
    ended = sum(request["host"] == "storage" for request in site.requests(since=since, method="GET"))
    return bool(ended < redirected)


def measure(megabytes: int) -> dict[str, Any]:
    """Both ways on the same repository, one after the other."""
    with tempfile.TemporaryDirectory(prefix="sparkpair-bench-") as name:
        work = Path(name)
        total = make_checkpoint(work / "hub", megabytes)
        with Hub(work / "hub") as site:
            lock = hub.resolve(REPO, endpoint=site.url)
            (work / "lock.json").write_text(locks.dump(lock))
            rate = total // 16
            words = [sys.executable, "-c", FETCH, "fetch", "--lock", str(work / "lock.json"), "--floor", "0"]
            ours = killed_and_resumed(site, [*words, "--to", str(work / "ours")], work / "ours", total, rate)
            words = [sys.executable, "-c", LIBRARY, REPO, str(work / "theirs")]
            theirs = killed_and_resumed(site, words, work / "theirs", total, rate)
    return {
        "benchmark": "fetch killed at 60 % and started again",
        "total_bytes": total,
        "sparkpair": ours,
        "huggingface_hub": theirs,
        "budget_share": BUDGET,
        "ok": ours["again_share"] <= BUDGET,
    }


def main() -> int:
    """Print the row; exit code 1 when it is over its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=240, help="size of the checkpoint (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    found = measure(arguments.megabytes)
    if arguments.json:
        print(json.dumps(found))
    else:
        print(found["benchmark"])
        for way in ("sparkpair", "huggingface_hub"):
            row = found[way]
            print(
                f"  {way:16} again {row['again_share']:.1%} of the bytes, {row['all_share']:.1%} in all,"
                f" second run {row['second_run_s']} s, left over {row['left_over_bytes']} bytes,"
                f" peak memory {row['peak_bytes'] >> 20} MiB"
            )
        print(f"  budget: again <= {BUDGET:.0%}: {'met' if found['ok'] else 'MISSED'}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
