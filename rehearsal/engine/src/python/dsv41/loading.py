"""Loading a rank: every input checked in the engine's order, the weights read through."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from . import engram, images, kit, rankcache, safetensors
from .errors import EngineError
from .fabric import Fabric
from .faults import Faults
from .settings import ModelConfig, Options, model_config

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Loaded:
    """A rank ready to link. `secret` is the sha256 of its whole cache, which it never sends."""

    config: ModelConfig
    secret: bytes
    weight_bytes: int
    fabric: Fabric
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def _digest(file: Path) -> bytes:
    whole = hashlib.sha256()
    buffer = bytearray(_BLOCK)
    with file.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            whole.update(memoryview(buffer)[:count])
    return whole.digest()


def _text_files(model: Path) -> None:
    """What rank 0 reads of the model's folder beyond its weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (model / name).is_file():
            raise EngineError("NoTokenizer", f"{model / name} is missing")
    if not any((model / n).is_file() for n in ("chat_template.jinja", "chat_template.json")):
        raise EngineError("NoChatTemplate", f"{model}/chat_template.jinja is missing")


def load(options: Options, env: dict[str, str], faults: Faults) -> Loaded:
    """Check and read everything that the rank needs.

    Raises:
        EngineError: the engine's own name for what does not hold.
    """
    began = time.monotonic()
    images.check(options.rdma_kernels)
    config = model_config(options.model)
    if options.pool > config.max_position:
        raise EngineError(
            "ContextTooLong", f"a pool of {options.pool}, the model ends at {config.max_position}"
        )
    if options.rank == 0:
        _text_files(options.model)
        safetensors.checkpoint(options.model)
    kit.check(options.kit, options.aot, config, options.pool + options.round_rows + 1)
    engram.check_tables(options.engram, config)
    engram.check_token_map(options.token_map, config)
    cache = rankcache.load(rankcache.find(options.cache, options.rank, options.world))
    if options.drafts and not any(r.key.startswith("mtp.") for r in cache.rows):
        raise EngineError("NoDraftWeights", f"{cache.file.name} was written with --no-dspark")
    fabric = Fabric(env, options.rdma, options.master, options.rank)
    size = cache.file.stat().st_size
    faults.loading(size)
    return Loaded(config, _digest(cache.file), size, fabric, began)


def environment() -> dict[str, str]:
    return dict(os.environ)
