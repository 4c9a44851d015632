"""The kernel kit on disk: its MANIFEST, kernel sets, RoPE tables, Engram's primes and the picture parts."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from . import safetensors
from .engram import bucket_primes
from .errors import EngineError
from .settings import ModelConfig

ROPE = ("rope-plain-cos.f32", "rope-plain-sin.f32", "rope-compressed-cos.f32", "rope-compressed-sin.f32")
BIAS = "vision/gate_bias_vl.safetensors"
TOWER = "vision/torch_fmha_sm120.cubin"
CUBINS = ("experts", "experts_cb", "linear", "linear_grouped")
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
_SMALL = 1 << 20


def manifest(text: str) -> dict[str, str]:
    """MANIFEST as path -> sha256: `sha256sum` lines sorted by path, nothing else.

    Raises:
        EngineError: BadManifest.
    """
    files: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        found = _LINE.fullmatch(line)
        if not found:
            raise EngineError("BadManifest", f"line {number}: {line[:80]!r}")
        digest, path = found.groups()
        if path.startswith("/") or ".." in path.split("/") or path in files:
            raise EngineError("BadManifest", f"line {number}: the path {path}")
        files[path] = digest
    if not files or list(files) != sorted(files):
        raise EngineError("BadManifest", "empty, or not sorted by path")
    return files


def check_manifest(kit: Path) -> None:
    """Each listed file is there; the small ones have their hash.

    The RoPE tables are told by their size, as the start must be quick; the bias depends on the checkpoint and is told
    by its layout.

    Raises:
        EngineError: NoKit, BadManifest.
    """
    try:
        files = manifest((kit / "MANIFEST").read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError("NoKit", f"{kit}/MANIFEST: {error}") from error
    needed = {*ROPE, BIAS, TOWER, "aot/aot.json", "engram.json", "rope.json"} | {
        f"cubins/{n}.cubin" for n in CUBINS
    }
    if needed - set(files):
        raise EngineError("BadManifest", f"does not list {min(needed - set(files))}")
    for path, digest in files.items():
        file = kit / path
        if not file.is_file():
            name = (
                "NoVisionKit" if path in {BIAS, TOWER} else "NoRopeTables" if path in ROPE else "BadManifest"
            )
            raise EngineError(name, f"{file} is missing")
        if path in {*ROPE, BIAS} or file.stat().st_size > _SMALL:
            continue
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != digest:
            raise EngineError("BadManifest", f"{file} has sha256 {found}, MANIFEST says {digest}")


def _json(file: Path, error: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as reason:
        raise EngineError(error, f"{file}: {reason}") from reason
    if not isinstance(value, dict):
        raise EngineError(error, f"{file} is no JSON object")
    return value


def check_rope(kit: Path, rows_needed: int) -> None:
    """The four tables have rope.json's size and rows for the pool and a round more.

    Raises:
        EngineError: NoRopeTables, BadRopeTable, ShortRopeTable.
    """
    told = _json(kit / "rope.json", "NoRopeTables")
    half, rows = told.get("half"), told.get("rows")
    if not isinstance(half, int) or not isinstance(rows, int) or half != 32 or rows < 1:
        raise EngineError("BadRopeTable", f"rope.json: half {half!r}, rows {rows!r}")
    for name in ROPE:
        if not re.fullmatch(r"[0-9a-f]{64}", str(told.get(name))):
            raise EngineError("BadRopeTable", f"rope.json has no sha256 of {name}")
        size = (kit / name).stat().st_size
        if size // (half * 4) < rows_needed:
            raise EngineError(
                "ShortRopeTable", f"{name} has {size // (half * 4)} rows, the pool needs {rows_needed}"
            )
        if size != rows * half * 4:
            raise EngineError("BadRopeTable", f"{name} has {size} bytes, {rows} rows take {rows * half * 4}")


def check_kernels(aot: Path) -> None:
    """The recorded kernel set: every cubin that aot.json names.

    Raises:
        EngineError: NoKernelSet.
    """
    told = _json(aot / "aot.json", "NoKernelSet")
    variants = told.get("variants")
    if not isinstance(variants, list) or not variants:
        raise EngineError("NoKernelSet", f"{aot}/aot.json names no variants")
    for variant in variants:
        cubin = variant.get("cubin") if isinstance(variant, dict) else None
        if not isinstance(cubin, str) or not (aot / "cubins" / f"{cubin}.cubin").is_file():
            raise EngineError("NoKernelSet", f"{aot}/cubins/{cubin}.cubin is missing")


def check_engram(kit: Path, config: ModelConfig) -> None:
    """engram.json holds the bucket primes of the model.

    Raises:
        EngineError: BadEngramKit.
    """
    told = _json(kit / "engram.json", "BadEngramKit")
    primes = bucket_primes(
        len(config.engram_layers), config.engram_ngram, config.engram_heads, config.engram_vocab
    )
    if told.get("primes") != primes:
        raise EngineError("BadEngramKit", "engram.json's primes are not the model's")
    if tuple(sum(p) for p in primes) != config.engram_rows:
        raise EngineError("BadEngramKit", "the primes do not add up to engram_num_embeddings")


def check_bias(kit: Path, config: ModelConfig) -> None:
    """The routing bias of pictures: an F32 vector for each layer and drafting block, in order of the names.

    Raises:
        EngineError: NoVisionKit.
    """
    file = kit / BIAS
    tensors, metadata = safetensors.read_header(file)
    wanted = [f"layers.{i}.ffn.gate.bias_vl" for i in range(config.layers)]
    wanted += [f"mtp.{i}.ffn.gate.bias_vl" for i in range(config.draft_layers)]
    if len(tensors) != len(wanted) or list(tensors) != sorted(tensors):
        raise EngineError(
            "NoVisionKit", f"{file} holds {len(tensors)} tensors, {len(wanted)} in order are needed"
        )
    for name, tensor in tensors.items():
        if not name.endswith(".ffn.gate.bias_vl") or tensor.dtype != "F32" or len(tensor.shape) != 1:
            raise EngineError("NoVisionKit", f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}")
    if not metadata.get("source"):
        raise EngineError("NoVisionKit", f"{file} does not name its source")


def check(kit: Path, aot: Path, config: ModelConfig, rows_needed: int) -> None:
    """Everything a rank needs of the kit, for a pool of `rows_needed` rows in all."""
    if not kit.is_dir():
        raise EngineError("NoKit", f"{kit} is no folder")
    check_manifest(kit)
    check_kernels(aot)
    check_rope(kit, rows_needed)
    check_engram(kit, config)
    if config.vision:
        check_bias(kit, config)
