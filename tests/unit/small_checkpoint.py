"""A checkpoint in small: four shards with 43 routing biases, their index and config.json, and a tokenizer."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import tokenizers

LAYERS, DRAFTS, EXPERTS = 40, 3, 384


NAMES = [f"layers.{layer}.ffn.gate.bias_vl" for layer in range(LAYERS)] + [
    f"mtp.{block}.ffn.gate.bias_vl" for block in range(DRAFTS)
]


def content_of(name: str, count: int = EXPERTS) -> bytes:
    """Bytes that no arithmetic would keep: NaN payloads, negative zeros, denormals."""
    seed = hashlib.sha256(name.encode()).digest()
    return (seed * (4 * count // len(seed) + 1))[: 4 * count]


def shard(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    entries: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + b"".join(data for _, _, data in tensors.values())


def checkpoint_files(
    changed: dict[str, tuple[str, list[int], bytes] | None] | None = None,
) -> dict[str, bytes]:
    """Four shards, each with 200 kB of other weights around its bias tensors, and their index."""
    shards: dict[str, dict[str, tuple[str, list[int], bytes]]] = {}
    weight_map = {}
    for number, name in enumerate(NAMES):
        file = f"model-{number % 4 + 1:05d}-of-00004.safetensors"
        tensors = shards.setdefault(file, {f"other.{number % 4}.weight": ("U8", [200_000], bytes(200_000))})
        tensors[name] = ("F32", [EXPERTS], content_of(name))
    for name, tensor in (changed or {}).items():
        for tensors in shards.values():
            if tensor is None:
                tensors.pop(name, None)
            elif name in tensors:
                tensors[name] = tensor
        if tensor is not None and not any(name in tensors for tensors in shards.values()):
            shards["model-00001-of-00004.safetensors"][name] = tensor
    for file, tensors in shards.items():
        weight_map.update(dict.fromkeys(tensors, file))
    config = {
        "model_type": "deepseek_v41",
        "text_config": {
            "num_hidden_layers": LAYERS,
            "num_nextn_predict_layers": DRAFTS,
            "n_routed_experts": EXPERTS,
        },
    }
    files = {file: shard(tensors) for file, tensors in shards.items()}
    files["config.json"] = json.dumps(config).encode()
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files


def checkpoint(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def small_tokenizer(tmp_path: Path, words: list[str], special: tuple[str, ...] = ()) -> Path:
    """A tokenizer whose tokens decode to `words` themselves; `special` ones are added after them."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.add_special_tokens(list(special))
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path
