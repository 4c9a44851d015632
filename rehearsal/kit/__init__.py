"""The stand-in kernel kit: a git repository's content with the real kit's layout, made from nothing.

Five files that the real kit generates on the node are listed in its MANIFEST and not in the repository: the four RoPE
tables, with the hashes that are recorded for the true config, and the picture bias, with the hash recorded for the
earlier checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

ROPE_JSON = Path(__file__).resolve().parents[2] / "files" / "fixtures" / "rope.json"
BIAS = "vision/gate_bias_vl.safetensors"
BIAS_SHA256 = "0cbdebfbffed15722f096d6b8290933135d4393d0920059f7bcad4789f19387b"

# Engram of the true config: layers, n-gram sizes 2 to 4, heads, where the bucket sizes begin.
_LAYERS, _NGRAM, _HEADS, _VOCAB, _PAD = (1, 14), 4, 8, 16_000_000, 2
_MULTIPLIERS = (
    (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F),
    (0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09),
)

_CUBINS = ("experts", "experts_cb", "linear", "linear_grouped")
_VARIANTS = (
    *(("_topk_sel", {"N": n, "KK": n}) for n in (256, 512, 1024, 2048)),
    *(("_hc_mix", {"ROWS": r}) for r in (1, 4, 16)),
    *(("_rms_norm", {"D": d}) for d in (512, 1280, 5120)),
    *(("_index_scores", {"BLOCK": b}) for b in (64, 128)),
    *(("_attn_decode", {"SPLITS": s, "ROWS": r}) for s in (1, 8) for r in (1, 16)),
    *(("_markov_head", {"RANK": 256, "ROWS": r}) for r in (1, 5)),
    ("_engram_decode", {"D": 256}),
)

_README = """# Kernel kit (stand-in)

The layout of the dsv41 kernel kit for two GB10, with content that no GPU runs. `MANIFEST` lists every file but
itself, in sha256sum's format; five of them are made on the node: the RoPE tables from the model's config, the picture
bias from its checkpoint. `tools/verify_kit.sh` checks what is there.
"""
_LICENSES = """# Licenses

Everything here is made by this project's rehearsal and is under Apache-2.0 (`LICENSES/Apache-2.0.txt`). No kernel of
another project is in it.
"""
_APACHE = """Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
Distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""
_VERIFY = """#!/bin/sh
# Every file of MANIFEST, the generated ones included. Exit 0 or 1.
set -eu
cd "$(dirname "$0")/.."
sha256sum --quiet -c MANIFEST
echo "kit OK: $(wc -l <MANIFEST) files match MANIFEST"
"""


def is_prime(n: int) -> bool:
    """By division: the numbers here are small enough."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def engram_primes() -> list[list[int]]:
    """For each layer, 8 bucket sizes for each n-gram size: the next primes from 16,000,000 up, none used twice."""
    used: set[int] = set()
    layers = []
    for _ in _LAYERS:
        sizes = []
        for _ in range(_NGRAM - 1):
            at = _VOCAB
            for _ in range(_HEADS):
                while at in used or not is_prime(at):
                    at += 1
                used.add(at)
                sizes.append(at)
        layers.append(sizes)
    return layers


def _cubin(name: str) -> bytes:
    """An ELF header for a CUDA machine and bytes that only the name decides."""
    header = b"\x7fELF\x02\x01\x01\x33" + bytes(8) + struct.pack("<HHI", 2, 190, 1)
    return header + b"".join(hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(24))


def committed() -> dict[str, bytes]:
    """The repository's files, MANIFEST aside, as path -> content."""
    files = {
        "KIT-LICENSES.md": _LICENSES.encode(),
        "LICENSES/Apache-2.0.txt": _APACHE.encode(),
        "README.md": _README.encode(),
        "rope.json": ROPE_JSON.read_bytes(),
        "tools/verify_kit.sh": _VERIFY.encode(),
        "vision/torch_fmha_sm120.cubin": _cubin("torch_fmha_sm120"),
    }
    variants = []
    for kernel, constants in _VARIANTS:
        name = hashlib.sha256(f"{kernel} {sorted(constants.items())}".encode()).hexdigest()
        files[f"aot/cubins/{name}.cubin"] = _cubin(name)
        variants.append({"kernel": kernel, "constants": constants, "cubin": name, "arch": "sm_121"})
    files["aot/aot.json"] = json.dumps({"variants": variants}, indent=1).encode()
    for name in _CUBINS:
        files[f"cubins/{name}.cubin"] = _cubin(name)
    engram = {
        "layers": _LAYERS,
        "ngram": _NGRAM,
        "heads": _HEADS,
        "pad": _PAD,
        "primes": engram_primes(),
        "multipliers": _MULTIPLIERS,
    }
    files["engram.json"] = json.dumps(engram).encode()
    return files


def generated() -> dict[str, str]:
    """The files that a node makes, as path -> recorded sha256."""
    told = json.loads(ROPE_JSON.read_bytes())
    return {name: str(told[name]) for name in told if name.endswith(".f32")} | {BIAS: BIAS_SHA256}


def manifest(files: dict[str, bytes]) -> str:
    """MANIFEST in sha256sum's format, sorted by path: what is committed and what is generated."""
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()} | generated()
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests))


def build(directory: Path) -> list[str]:
    """Write the kit repository's content into `directory`. Returns the paths written, sorted."""
    files = committed()
    files["MANIFEST"] = manifest(files).encode()
    for path, data in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if path.endswith(".sh") else 0o644)
    return sorted(files)
