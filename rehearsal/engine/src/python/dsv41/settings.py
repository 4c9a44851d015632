"""What a rank is told: rank 0 by its environment and flags, the others by their command line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import EngineError, bad_argument

MAX_POOL = 1_048_576
DEFAULT_POOL = 262_144
DEFAULT_PORT = 29620
LANES_USAGE = (
    "usage: tf-dsv41-lanes MODEL_DIR CACHE_DIR RANK WORLD MASTER_IP PORT KIT_DIR [--pool P] [--rdma DEVICES] "
    "[--graphs 0|1] [--side 0|1] [--prefetch 0|1] [--aio 0|1] [--drafts 0|1] [--engram DIR --token-map FILE] "
    "[--arena-gib G] [--rdma-kernels FATBIN] [--round-rows N] [--streams N] [--context N]"
)


@dataclass(frozen=True)
class ModelConfig:
    """The values of a model's config.json that a rank uses."""

    vocab: int
    layers: int
    draft_layers: int
    engram_layers: tuple[int, ...]
    engram_rows: tuple[int, ...]
    engram_ngram: int
    engram_heads: int
    engram_vocab: int
    engram_head_dim: int
    compressed_vocab: int
    max_position: int
    vision: bool
    digest: str


def model_config(directory: Path) -> ModelConfig:
    """Read config.json of a model's folder.

    Raises:
        EngineError: ModelNotFound, BadConfig, UnknownModel.
    """
    file = directory / "config.json"
    try:
        whole: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise EngineError("ModelNotFound", f"{file}: {error.strerror}") from error
    except ValueError:
        raise EngineError("BadConfig", f"{file} is not JSON") from None
    if not isinstance(whole, dict) or whole.get("model_type") != "deepseek_v41":
        found = whole.get("model_type") if isinstance(whole, dict) else whole
        raise EngineError("UnknownModel", f"{file}: model_type {found!r}, this engine serves deepseek_v41")
    text = whole.get("text_config", whole)
    try:
        return ModelConfig(
            vocab=int(text["vocab_size"]),
            layers=int(text["num_hidden_layers"]),
            draft_layers=int(text["num_nextn_predict_layers"]),
            engram_layers=tuple(int(n) for n in text["engram_layer_ids"]),
            engram_rows=tuple(int(n) for n in text["engram_num_embeddings"]),
            engram_ngram=int(text["engram_max_ngram_size"]),
            engram_heads=int(text["engram_n_heads"]),
            engram_vocab=int(text["engram_vocab_size"]),
            engram_head_dim=int(text["engram_head_dim"]),
            compressed_vocab=int(text["engram_compressed_vocab_size"]),
            max_position=int(text["max_position_embeddings"]),
            vision="vision_config" in whole or "image_token_id" in whole,
            digest=hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError("BadConfig", f"{file}: {error} is missing or no number") from None


@dataclass(frozen=True)
class Options:
    """How one rank runs. `pool` counts positions shared by all streams; `rdma` empty means NCCL gathers."""

    rank: int
    world: int
    model: Path
    cache: Path
    kit: Path
    aot: Path
    master: str
    port: int
    pool: int = DEFAULT_POOL
    engram: Path | None = None
    token_map: Path | None = None
    rdma: tuple[str, ...] = ()
    rdma_kernels: str | None = None
    switches: Mapping[str, bool] = field(default_factory=dict)
    drafts: bool = True
    round_rows: int = 16
    streams: int = 4


def quad(text: str) -> str:
    """A dotted-quad IPv4 address, host names are none."""
    parts = text.split(".")
    if len(parts) != 4 or not all(re.fullmatch(r"[0-9]{1,3}", p) and int(p) < 256 for p in parts):
        raise ValueError(text)
    return ".".join(str(int(p)) for p in parts)


def devices(text: str) -> tuple[str, ...]:
    """A comma list of RDMA devices; empty text is none."""
    if text == "":
        return ()
    names = tuple(text.split(","))
    if not all(re.fullmatch(r"[A-Za-z0-9_.-]+", n) for n in names) or len(set(names)) != len(names):
        raise EngineError("BadDevices", f"{text!r} is not a comma list of RDMA devices")
    return names


def _number(env: Mapping[str, str], name: str, default: int, limits: tuple[int, int], error: str) -> int:
    text = env.get(name)
    if text is None:
        return default
    low, high = limits
    if not re.fullmatch(r"[0-9]+", text) or not low <= int(text) <= high:
        raise EngineError(error, f"{name}={text!r}: {low} to {high}")
    return int(text)


_SWITCHES = {
    "graphs": "TF_DS_GRAPHS",
    "side": "TF_DS_HC_SIDE",
    "prefetch": "TF_DS_L2_PREFETCH",
    "aio": "TF_DS_ENGRAM_AIO",
}


def from_environment(env: Mapping[str, str], model: Path, context: int, *, drafts: bool) -> Options:
    """Rank 0's options, in the order that the engine asks for them.

    Raises:
        EngineError: BadWorld, NotPortedYet, NoMaster, BadMaster, BadPort, BadArena, NoRankCache, NoKit,
            NoKernelSet, BadRoundRows, BadStreams.
    """
    world = env.get("TF_TP_WORLD", "2")
    if not world.isdigit():
        raise EngineError("BadWorld", f"TF_TP_WORLD={world!r}")
    if world not in {"2", "4"}:
        raise EngineError(
            "NotPortedYet", "the native DeepSeek-V4.1 engine runs on two GPUs or four: set TF_TP_WORLD=2 or 4"
        )
    advice = (
        "set TF_TP_MASTER to rank 0's fabric address (rank 1: tf-dsv41-lanes MODEL CACHE 1 2 MASTER PORT KIT)"
    )
    if not env.get("TF_TP_MASTER"):
        raise EngineError("NoMaster", advice)
    try:
        master = quad(env["TF_TP_MASTER"])
    except ValueError:
        raise EngineError("BadMaster", f"{advice}, found {env['TF_TP_MASTER']!r}") from None
    port = _number(env, "TF_TP_PORT", DEFAULT_PORT, (1, 65535), "BadPort")
    _number(env, "TF_DS_ARENA_GIB", 0, (0, 1024), "BadArena")
    needed = {
        "TF_DS_RANK_CACHE": ("NoRankCache", "set TF_DS_RANK_CACHE to the per-rank weight files"),
        "TF_DS_KIT": ("NoKit", "set TF_DS_KIT to the kernel kit (cubins/, the RoPE tables, engram.json)"),
        "TENSORFOLD_CUDA_KERNELS": ("NoKernelSet", "set TENSORFOLD_CUDA_KERNELS to the kit's aot/"),
    }
    for name, (error, words) in needed.items():
        if not env.get(name):
            raise EngineError(error, words)
    return Options(
        rank=0,
        world=int(world),
        model=model,
        cache=Path(env["TF_DS_RANK_CACHE"]),
        kit=Path(env["TF_DS_KIT"]),
        aot=Path(env["TENSORFOLD_CUDA_KERNELS"]),
        master=master,
        port=port,
        pool=context,
        engram=Path(env["TF_DS_ENGRAM"]) if env.get("TF_DS_ENGRAM") else None,
        token_map=Path(env["TF_DS_TOKEN_MAP"]) if env.get("TF_DS_TOKEN_MAP") else None,
        rdma=devices(env.get("TF_RDMA_DEVICES", "")),
        rdma_kernels=env.get("TF_DS_RDMA_KERNELS") or None,
        switches={k: env.get(v, "0") != "0" for k, v in _SWITCHES.items()}
        | {"replay_floor": replay_floor(env)},
        drafts=drafts,
        round_rows=_number(env, "TF_DS_ROUND_ROWS", 16, (16, 48), "BadRoundRows"),
        streams=_number(env, "TF_DS_STREAMS", 4, (1, 16), "BadStreams"),
    )


def replay_floor(env: Mapping[str, str]) -> bool:
    return env.get("TF_DS_REPLAY_FLOOR", "0") != "0"


def _count(key: str, value: str, low: int, high: int) -> int:
    if not re.fullmatch(r"[0-9]+", value) or not low <= int(value) <= high:
        raise bad_argument(f"{key} {value}: {low} to {high}")
    return int(value)


def _bit(key: str, value: str) -> bool:
    return _count(key, value, 0, 1) == 1


def from_command(words: list[str], env: Mapping[str, str]) -> Options:
    """The options of a rank that follows.

    Raises:
        EngineError: Usage (too few words), BadArgument, BadAddress, NotPortedYet.
    """
    if len(words) < 7:
        raise EngineError("Usage", LANES_USAGE, code=2)
    model, cache, rank, world, master, port, kit = words[:7]
    if world not in {"2", "4"}:
        raise EngineError("NotPortedYet", f"WORLD {world}: 2 or 4")
    number = _count("RANK", rank, 0, int(world) - 1)
    if number == 0:
        raise EngineError(
            "NoRequests", "rank 0 is tensorfold-native; here it is the gate, which needs --requests"
        )
    try:
        address = quad(master)
    except ValueError:
        raise EngineError("BadAddress", f"MASTER_IP {master!r} is not a dotted quad", code=2) from None
    rest = words[7:]
    if len(rest) % 2:
        raise bad_argument(f"{rest[-1]} has no value: options come in pairs")
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    known = {"--engram", "--token-map", "--pool", "--context", "--rdma", "--graphs", "--side", "--prefetch"}
    known |= {"--aio", "--drafts", "--arena-gib", "--rdma-kernels", "--round-rows", "--streams"}
    unknown = [k for k in rest[::2] if k not in known]
    if unknown:
        raise bad_argument(f"{unknown[0]} is no option of a rank that follows\n{LANES_USAGE}")
    if "--arena-gib" in given:
        _count("--arena-gib", given["--arena-gib"], 0, 1024)
    pool = given.get("--pool", given.get("--context", str(DEFAULT_POOL)))
    engram, token_map = given.get("--engram"), given.get("--token-map")
    return Options(
        rank=number,
        world=int(world),
        model=Path(model),
        cache=Path(cache),
        kit=Path(kit),
        aot=Path(kit) / "aot",
        master=address,
        port=_count("PORT", port, 1, 65535),
        pool=_count("--pool", pool, 1, MAX_POOL),
        engram=Path(engram) if engram else None,
        token_map=Path(token_map) if token_map else None,
        rdma=devices(given.get("--rdma", "")),
        rdma_kernels=given.get("--rdma-kernels"),
        switches={k: _bit(f"--{k}", given.get(f"--{k}", "0")) for k in _SWITCHES}
        | {"replay_floor": replay_floor(env)},
        drafts=_bit("--drafts", given.get("--drafts", "1")),
        round_rows=_count("--round-rows", given.get("--round-rows", "16"), 16, 48),
        streams=_count("--streams", given.get("--streams", "4"), 1, 16),
    )
