"""Engram on disk: the tables of hashed n-grams, the map of compressed token ids, the bucket primes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import safetensors
from .errors import EngineError
from .settings import ModelConfig

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(n: int) -> bool:
    """Miller and Rabin's test with witnesses that are exact far beyond the bucket sizes."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for a in _WITNESSES:
        x = pow(a, odd, n)
        if x in {1, n - 1}:
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def bucket_primes(layers: int, ngram: int, heads: int, vocab: int) -> list[list[int]]:
    """For each layer: `heads` primes for each n-gram size from 2 on, upward from `vocab`, none used twice."""
    used: set[int] = set()
    tables = []
    for _ in range(layers):
        table = []
        for _ in range(ngram - 1):
            at = vocab - 1
            for _ in range(heads):
                at += 1
                while at in used or not is_prime(at):
                    at += 1
                used.add(at)
                table.append(at)
        tables.append(table)
    return tables


def check_tables(directory: Path | None, config: ModelConfig) -> int:
    """Both halves of each layer's table, one row of values and scales each. Returns the bytes of all tables.

    Raises:
        EngineError: NoEngramTables, BadEngramTables.
    """
    if directory is None:
        raise EngineError("NoEngramTables", "this checkpoint reads Engram: name its folder")
    try:
        files = sorted(p for p in directory.iterdir() if p.suffix == ".safetensors")
    except OSError as error:
        raise EngineError("NoEngramTables", f"{directory}: {error.strerror}") from error
    tensors: dict[str, safetensors.Tensor] = {}
    for file in files:
        tensors.update(safetensors.read_header(file)[0])
    total = 0
    for layer in config.engram_layers:
        halves = []
        for part, dtype, width in (
            ("weight", "F8_E4M3", config.engram_head_dim),
            ("scale", "F8_E8M0", config.engram_head_dim // 32),
        ):
            name = f"layers.{layer}.engram.embed.{part}"
            if name not in tensors:
                raise EngineError("NoEngramTables", f"{directory} has no {name}")
            tensor = tensors[name]
            if tensor.dtype != dtype or len(tensor.shape) != 2 or tensor.shape[1] != width:
                raise EngineError("BadEngramTables", f"{name} is {tensor.dtype} {list(tensor.shape)}")
            halves.append(tensor.shape[0])
            total += tensor.size
        if halves[0] != halves[1]:
            raise EngineError("BadEngramTables", f"layer {layer}: {halves[0]} rows and {halves[1]} scales")
    return total


def check_token_map(file: Path | None, config: ModelConfig) -> None:
    """A JSON list of one compressed id for each token, as many different ones as the config says.

    Raises:
        EngineError: NoTokenMap, BadTokenMap.
    """
    if file is None:
        raise EngineError("NoTokenMap", "Engram needs the map of compressed token ids")
    try:
        ids: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise EngineError("NoTokenMap", f"{file}: {error.strerror}") from error
    except ValueError:
        raise EngineError("BadTokenMap", f"{file} is not JSON") from None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise EngineError("BadTokenMap", f"{file} is no list of integers")
    if len(ids) != config.vocab:
        raise EngineError("BadTokenMap", f"{file} has {len(ids)} ids, the vocabulary {config.vocab}")
    distinct = set(ids)
    if distinct != set(range(config.compressed_vocab)):
        raise EngineError(
            "BadTokenMap", f"{file} has {len(distinct)} different ids, the config {config.compressed_vocab}"
        )
