"""The ranks' command lines: what both containers are started with, word for word.

Pure: one `Serving` in, one list of words out. The units, the dry run and the tests show the same words.
The engine's flags and variables are those of its TP=2 launch contract.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .inputs import truth
from .pairfile import MASTER_PORT
from .problem import Problem

ENGINE = "/opt/tensorfold"
RANK_LABEL = "sparkpair.rank"
CONFIG_LABEL = "sparkpair.config"
KEY_FILE = "/etc/sparkpair/api-keys"

# Both ranks must agree on these; rank 0 takes them as variables, rank 1 as options.
_SWITCHES = (
    ("TF_DS_GRAPHS", "--graphs"),
    ("TF_DS_HC_SIDE", "--side"),
    ("TF_DS_L2_PREFETCH", "--prefetch"),
    ("TF_DS_ENGRAM_AIO", "--aio"),
)


@dataclass(frozen=True)
class Serving:
    """What is served and from where; the same on every rank of the pair.

    Args:
        master: rank 0's own IPv4 address on the link; the ranks meet at `master`:29620.
        cache: folder with this rank's single `rank<R>of<W>-*.bin`.
        with_key: whether the API asks for a key (`KEY_FILE`).
        key_digest: changes when the key does, so that a new key restarts the pair; never the key.
    """

    image: str
    master: str
    model: str
    engram: str
    kit: str
    cache: str
    token_map: str
    served_name: str
    api_host: str
    api_port: int
    context: int
    parallel: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    thinking: bool
    drafts: bool
    with_key: bool
    world: int = 2
    key_digest: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Serving:
        """From a play's values, which may all be text (`-e context=524288`)."""
        kinds: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": truth, "str": str}
        return cls(**{f.name: kinds[str(f.type)](values[f.name]) for f in fields(cls) if f.name in values})


def name_of(rank: int) -> str:
    """The name of a rank's container and of its unit."""
    return f"sparkpair-rank{rank}"


def program(serving: Serving, rank: int) -> list[str]:
    """The engine's own command line of one rank, inside the container."""
    return _leader(serving) if rank == 0 else _follower(serving, rank)


def _leader(serving: Serving) -> list[str]:
    words = [f"{ENGINE}/native/bin/tensorfold-native", "serve", serving.model]
    words += ["--host", serving.api_host, "--port", str(serving.api_port), "--name", serving.served_name]
    if serving.with_key:
        words += ["--api-key-file", KEY_FILE]
    words += ["--context", str(serving.context), "--parallel", str(serving.parallel)]
    words += ["--thinking" if serving.thinking else "--no-thinking"]
    words += ["--max-tokens", str(serving.max_tokens), "--temperature", _number(serving.temperature)]
    words += ["--top-p", _number(serving.top_p), "--top-k", str(serving.top_k)]
    if not serving.drafts:
        words += ["--no-drafts"]
    return [*words, "--backend", "cuda"]


def _follower(serving: Serving, rank: int) -> list[str]:
    words = [f"{ENGINE}/bin/tf-dsv41-lanes", serving.model, serving.cache, str(rank), str(serving.world)]
    words += [serving.master, str(MASTER_PORT), serving.kit]
    words += ["--engram", serving.engram, "--token-map", serving.token_map, "--pool", str(serving.context)]
    # systemd fills it in from the file that the gate writes at each start.
    words += ["--rdma", "${TF_RDMA_DEVICES}"]
    for _, option in _SWITCHES:
        words += [option, "1"]
    return [*words, "--drafts", "1" if serving.drafts else "0"]


def environment(serving: Serving, rank: int) -> dict[str, str]:
    """A rank's variables, but for those of the link (RDMA devices, GID index), which each start finds anew."""
    shared = {"TF_DS_REPLAY_FLOOR": "1", "HF_HUB_OFFLINE": "1", "NCCL_DEBUG": "WARN"}
    if rank:
        return shared
    return {
        **shared,
        "TF_TP_WORLD": str(serving.world),
        "TF_TP_MASTER": serving.master,
        "TF_TP_PORT": str(MASTER_PORT),
        "TF_DS_RANK_CACHE": serving.cache,
        "TF_DS_KIT": serving.kit,
        "TENSORFOLD_CUDA_KERNELS": f"{serving.kit}/aot",
        "TF_DS_ENGRAM": serving.engram,
        "TF_DS_TOKEN_MAP": serving.token_map,
        **{variable: "1" for variable, _ in _SWITCHES},
    }


def docker_command(serving: Serving, rank: int, extra: Sequence[str] = ()) -> list[list[str]]:
    """The whole `docker run` of one rank, as groups of words: one group a line of the unit.

    Args:
        extra: more words for docker, a rehearsal's named difference.
    """
    if not 0 <= rank < serving.world:
        raise Problem(
            found=f"rank {rank} in a world of {serving.world}",
            needed=f"a rank from 0 to {serving.world - 1}",
            do="check the groups of the inventory",
            code="rank",
        )
    folder_of_map = serving.token_map.rpartition("/")[0]
    mounts = [serving.model, serving.engram, serving.kit, serving.cache, folder_of_map]
    groups = [
        ["/usr/bin/docker", "run", "--rm", "--name", name_of(rank)],
        ["--label", f"{RANK_LABEL}={rank}", "--label", f"{CONFIG_LABEL}={config_digest(serving)}"],
        ["--gpus", "all", "--device", "/dev/infiniband", "--cap-add", "IPC_LOCK"],
        ["--network", "host", "--ipc", "host", "--init", "--restart", "no"],
        ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--ulimit", "core=1"],
        ["--oom-score-adj", "1000"],
        ["--log-driver", "json-file", "--log-opt", "max-size=200m", "--log-opt", "max-file=3"],
        ["--env-file", f"/run/sparkpair/rank{rank}.env"],
        *(["--env", f"{name}={value}"] for name, value in environment(serving, rank).items()),
        *(["--volume", f"{path}:{path}:ro"] for path in mounts),
        *([["--volume", f"{KEY_FILE}:{KEY_FILE}:ro"]] if serving.with_key and rank == 0 else []),
        *([list(extra)] if extra else []),
        [serving.image],
    ]
    words = program(serving, rank)
    return [*groups, words[: 3 if rank == 0 else 8], *_pairs(words[3 if rank == 0 else 8 :])]


def _pairs(words: Sequence[str]) -> list[list[str]]:
    """Options with their values, one group each."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def config_digest(serving: Serving) -> str:
    """12 hex digits over all that the pair runs with, the same on both ranks."""
    values = {f.name: getattr(serving, f.name) for f in fields(serving)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _number(value: float) -> str:
    return f"{value:g}"
