"""A tiny valid set of everything that the stand-in engine reads, and its two ranks as real processes."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import py_compile
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rehearsal import kit

REPO = Path(__file__).resolve().parents[2]
SOURCES = REPO / "rehearsal" / "engine" / "src"
NVCC = REPO / "rehearsal" / "base" / "nvcc"
PROGRAMS = ("tensorfold-native", "tf-dsv41-lanes", "tf-dsv41-rank-cache", "tf-dsv41-check")
POOL = 4096
ROWS = 8192
VOCAB, COMPRESSED = 64, 48
KEY = "sk-rehearsal"


def pack(directory: Path, *, sm: str = "121", kernels: bool = True) -> dict[str, Path]:
    """The four programs as the build makes them, the launcher aside: one zip under four names."""
    directory.mkdir(parents=True, exist_ok=True)
    images = {}
    for name in ("dsv41_ops", "rdma_gather") if kernels else ():
        image = directory / f"{name}.fatbin"
        words = [sys.executable, NVCC, "-fatbin", f"-gencode=arch=compute_{sm},code=sm_{sm}", "-o", image]
        subprocess.run([*words, SOURCES / "kernels" / f"{name}.cu"], check=True)
        images[f"dsv41/images/{name}.fatbin"] = image.read_bytes()
    archive = directory / PROGRAMS[0]
    with archive.open("wb") as handle:
        handle.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(archive, "a") as out:
        for file in sorted((SOURCES / "python").rglob("*.py")):
            # compiled here once, so that each of the many starts is quick
            compiled = directory / "compiled.pyc"
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(file), str(compiled), doraise=True, invalidation_mode=mode)
            out.write(compiled, f"{file.relative_to(SOURCES / 'python')}c")
        for name, data in images.items():
            out.writestr(name, data)
    for name in PROGRAMS[1:]:
        shutil.copy(archive, directory / name)
    return {name: directory / name for name in PROGRAMS}


def safetensors(
    file: Path,
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """A safetensors file of name -> (type, shape, bytes), in that order."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    if metadata:
        header["__metadata__"] = dict(metadata)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(d for _, _, d in tensors.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def noise(name: str, size: int) -> bytes:
    """Bytes that only the name decides."""
    return hashlib.shake_128(name.encode()).digest(size)


def exl3(name: str, rows: int, columns: int, salt: str = "") -> dict[str, tuple[str, Sequence[int], bytes]]:
    """The parts of an EXL3 matrix of rows x columns tiles at 3 bits."""
    return {
        f"{name}.trellis": ("I16", (rows, columns, 48), noise(f"{name}{salt}", rows * columns * 96)),
        f"{name}.suh": ("F16", (rows * 16,), noise(f"{name}.suh{salt}", rows * 32)),
        f"{name}.svh": ("F16", (columns * 16,), noise(f"{name}.svh{salt}", columns * 32)),
        f"{name}.mul1": ("I32", (), b"\1\0\0\0"),
    }


def write_model(model: Path) -> None:
    model.mkdir(parents=True)
    config = {
        "model_type": "deepseek_v41",
        "image_token_id": 60,
        "text_config": {
            "vocab_size": VOCAB,
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 1,
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384006168, 384016682],
            "engram_max_ngram_size": 4,
            "engram_n_heads": 8,
            "engram_vocab_size": 16000000,
            "engram_head_dim": 256,
            "engram_compressed_vocab_size": COMPRESSED,
            "max_position_embeddings": ROWS - 32,
        },
    }
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_text("{}")
    tensors: dict[str, tuple[str, Sequence[int], bytes]] = {
        "embed.weight": ("BF16", (VOCAB, 32), noise("embed", VOCAB * 64)),
        "norm.weight": ("BF16", (32,), noise("norm", 64)),
        **exl3("head", 2, 4),
    }
    for layer in ("layers.0", "layers.1", "mtp.0"):
        tensors[f"{layer}.attn_norm.weight"] = ("BF16", (32,), noise(layer, 64))
        tensors |= exl3(f"{layer}.attn.wq_b", 2, 4) | exl3(f"{layer}.attn.wo_b", 4, 2)
        tensors |= exl3(f"{layer}.attn.wo_a.slice.0", 2, 2) | exl3(f"{layer}.attn.wo_a.slice.1", 2, 2)
        for expert in ("experts.0", "experts.1", "shared_experts"):
            tensors |= exl3(f"{layer}.ffn.{expert}.w1", 2, 4) | exl3(f"{layer}.ffn.{expert}.w2", 4, 2)
        tensors[f"{layer}.ffn.gate.bias_vl"] = ("F32", (384,), noise(f"{layer}.b", 1536))
    tensors["vision.patch_embed.weight"] = ("BF16", (4, 4), noise("vision", 32))
    names = list(tensors)
    half = len(names) // 2
    safetensors(model / "model-00001-of-00002.safetensors", {n: tensors[n] for n in names[:half]})
    safetensors(model / "model-00002-of-00002.safetensors", {n: tensors[n] for n in names[half:]})


def write_kit(directory: Path) -> None:
    """The stand-in kit with its generated files, the RoPE tables short and their content nothing."""
    kit.build(directory)
    told = json.loads((directory / "rope.json").read_bytes()) | {"rows": ROWS}
    (directory / "rope.json").write_text(json.dumps(told))
    for name in (n for n in told if n.endswith(".f32")):
        with (directory / name).open("wb") as handle:
            handle.truncate(ROWS * 32 * 4)
    biases = {f"{layer}.ffn.gate.bias_vl": layer for layer in ("layers.0", "layers.1", "mtp.0")}
    tensors = {n: ("F32", (384,), noise(f"{layer}.b", 1536)) for n, layer in biases.items()}
    safetensors(directory / kit.BIAS, tensors, {"source": "a test"})
    relist(directory, "rope.json")


def relist(directory: Path, path: str) -> None:
    """Give a changed file its new line in MANIFEST."""
    lines = (directory / "MANIFEST").read_text().splitlines()
    digest = hashlib.sha256((directory / path).read_bytes()).hexdigest()
    new = [f"{digest}  {path}" if line[66:] == path else line for line in lines]
    (directory / "MANIFEST").write_text("\n".join(new) + "\n")


def write_engram(directory: Path) -> None:
    directory.mkdir()
    for shard, layer in ((47, 1), (48, 14)):
        name = f"layers.{layer}.engram.embed"
        tensors = {
            f"{name}.scale": ("F8_E8M0", (16, 8), noise(f"{name}.s", 128)),
            f"{name}.weight": ("F8_E4M3", (16, 256), noise(name, 4096)),
        }
        safetensors(directory / f"model-000{shard}-of-00048.safetensors", tensors)


def write_tree(root: Path, addresses: Sequence[str] = ("10.20.0.1", "10.21.0.1")) -> None:
    """Facts of two RDMA ports, as sysfs shows them: GID 3 is the RoCE v2 row of the address."""
    for device, netdev, address in zip(
        ("rocep1s0f0", "roceP2p1s0f0"), ("railA", "railB"), addresses, strict=True
    ):
        port = root / "sys/class/infiniband" / device / "ports/1"
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / folder).mkdir(parents=True, exist_ok=True)
        (port / "state").write_text("4: ACTIVE\n")
        a, b, c, d = (int(p) for p in address.split("."))
        mapped = f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
        local = "fe80:0000:0000:0000:0000:0000:0000:0001"
        for index, (gid, kind) in enumerate(
            ((local, "IB/RoCE v1"), (local, "RoCE v2"), (mapped, "IB/RoCE v1"), (mapped, "RoCE v2"))
        ):
            (port / f"gids/{index}").write_text(gid + "\n")
            (port / f"gid_attrs/types/{index}").write_text(kind + "\n")
            (port / f"gid_attrs/ndevs/{index}").write_text(netdev + "\n")
        net = root / "sys/class/net" / netdev
        net.mkdir(parents=True, exist_ok=True)
        (net / "mtu").write_text("9000\n")
    (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclasses.dataclass
class World:
    """Both ranks' inputs. A test that changes some takes a `copy` first."""

    base: Path
    programs: dict[str, Path]

    def at(self, name: str) -> Path:
        return self.base / name

    @classmethod
    def make(cls, base: Path, programs: dict[str, Path]) -> World:
        world = cls(base, programs)
        write_model(world.at("model"))
        write_kit(world.at("kit"))
        write_engram(world.at("engram"))
        write_tree(world.at("tree0"))
        write_tree(world.at("tree1"), ("10.20.0.2", "10.21.0.2"))
        ids = [*range(COMPRESSED), *range(VOCAB - COMPRESSED)]
        world.at("token_map.json").write_text(json.dumps(ids))
        world.at("keys").write_text(f"# the pair's key\nmain: {KEY}\n")
        world.at("keys").chmod(0o600)
        for rank in (0, 1):
            done = world.run("tf-dsv41-rank-cache", world.at("model"), world.at(f"cache{rank}"), rank, 2)
            assert done.returncode == 0, done.stderr
        return world

    def copy(self, base: Path) -> World:
        """The same inputs elsewhere; the large files stay sparse."""
        base.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", "--sparse=always", f"{self.base}/.", base], check=True)
        return World(base, self.programs)

    def run(
        self, program: str, *words: object, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", str(self.programs[program]), *(str(w) for w in words)]
        clean = {"PATH": os.environ["PATH"], **(env or {})}
        return subprocess.run(command, capture_output=True, text=True, env=clean, timeout=30, check=False)


@dataclasses.dataclass
class Launch:
    """How both ranks are started. Change a field, then `rank0()` and `rank1()` give command and environment."""

    world: World
    port: int = dataclasses.field(default_factory=free_port)
    http: int = dataclasses.field(default_factory=free_port)
    env0: dict[str, str | None] = dataclasses.field(default_factory=dict)
    env1: dict[str, str | None] = dataclasses.field(default_factory=dict)
    flags0: dict[str, str | None] = dataclasses.field(default_factory=dict)
    flags1: dict[str, str | None] = dataclasses.field(default_factory=dict)

    def _shared(self, rank: int) -> dict[str, str | None]:
        return {
            "PATH": os.environ["PATH"],
            "TF_DS_REPLAY_FLOOR": "1",
            "NCCL_IB_HCA": "rocep1s0f0,roceP2p1s0f0",
            "NCCL_IB_GID_INDEX": "3",
            "NCCL_SOCKET_IFNAME": "lo",
            "TF_RDMA_GID_INDEX": "3",
            "TF_REHEARSAL_ROOT": str(self.world.at(f"tree{rank}")),
            "TF_REHEARSAL_QP_DELAY_S": "0.1",
            "TF_REHEARSAL_CONNECT_S": "10",
        }

    def rank0(self) -> tuple[list[str], dict[str, str]]:
        at = self.world.at
        env = self._shared(0) | {
            "TF_TP_WORLD": "2",
            "TF_TP_MASTER": "127.0.0.1",
            "TF_TP_PORT": str(self.port),
            "TF_DS_RANK_CACHE": str(at("cache0")),
            "TF_DS_KIT": str(at("kit")),
            "TENSORFOLD_CUDA_KERNELS": str(at("kit/aot")),
            "TF_DS_ENGRAM": str(at("engram")),
            "TF_DS_TOKEN_MAP": str(at("token_map.json")),
            "TF_RDMA_DEVICES": "rocep1s0f0,roceP2p1s0f0",
            "TF_DS_GRAPHS": "1",
            "TF_DS_HC_SIDE": "1",
            "TF_DS_L2_PREFETCH": "1",
            "TF_DS_ENGRAM_AIO": "1",
        }
        flags: dict[str, str | None] = {
            "--host": "127.0.0.1",
            "--port": str(self.http),
            "--name": "DeepSeek-V4.1-Flash-1017",
            "--context": str(POOL),
            "--parallel": "4",
            "--max-tokens": "512",
            "--thinking": "",
            "--backend": "cuda",
        }
        words = [str(self.world.programs["tensorfold-native"]), "serve", str(at("model"))]
        return _merge(words, flags | self.flags0), _kept(env | self.env0)

    def rank1(self) -> tuple[list[str], dict[str, str]]:
        at = self.world.at
        flags: dict[str, str | None] = {
            "--engram": str(at("engram")),
            "--token-map": str(at("token_map.json")),
            "--pool": str(POOL),
            "--rdma": "rocep1s0f0,roceP2p1s0f0",
            **dict.fromkeys(("--graphs", "--side", "--prefetch", "--aio"), "1"),
        }
        words = [str(self.world.programs["tf-dsv41-lanes"]), str(at("model")), str(at("cache1")), "1", "2"]
        words += ["127.0.0.1", str(self.port), str(at("kit"))]
        return _merge(words, flags | self.flags1), _kept(self._shared(1) | self.env1)


def _merge(words: list[str], flags: Mapping[str, str | None]) -> list[str]:
    for flag, value in flags.items():
        if value is not None:
            words += [flag, value] if value else [flag]
    return words


def _kept(env: Mapping[str, str | None]) -> dict[str, str]:
    return {k: v for k, v in env.items() if v is not None}


class Rank:
    """A rank's process; what it says is kept."""

    def __init__(self, words: list[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-I", *words], env=dict(env), stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 15) -> int:
        return self.process.wait(seconds)

    def until(self, text: str, seconds: float = 15) -> None:
        """Wait for a line in the log, or fail with all of it."""
        wait_for(lambda: text in self.said or self.process.poll() is not None, seconds, lambda: self.said)
        assert text in self.said, self.said

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def wait_for(holds: Callable[[], bool], seconds: float, why: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s: {why()}"
        time.sleep(0.02)


@contextlib.contextmanager
def started(launch: Launch, logs: Path) -> Iterator[tuple[Rank, Rank]]:
    """Both ranks, rank 1 first; whatever still runs at the end is killed."""
    logs.mkdir(parents=True, exist_ok=True)
    one = Rank(*launch.rank1(), logs / "rank1.log")
    zero = Rank(*launch.rank0(), logs / "rank0.log")
    try:
        yield zero, one
    finally:
        for rank in (zero, one):
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()


@functools.cache
def shared() -> World:
    """One valid set for a whole run of the tests; who changes something copies it."""
    base = Path(tempfile.mkdtemp(prefix="engine-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    return World.make(base / "world", pack(base / "bin"))
