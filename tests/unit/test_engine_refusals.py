"""What each rank of the stand-in refuses before it links, by the engine's own error names and exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import engine_pair
import pytest
from engine_pair import Launch, World

Change = Callable[[World], None]


@pytest.fixture
def world() -> World:
    return engine_pair.shared()


def start(launch: Launch, rank: int) -> tuple[int, str]:
    words, env = launch.rank0() if rank == 0 else launch.rank1()
    done = subprocess.run(
        [sys.executable, "-I", *words], env=env, capture_output=True, text=True, timeout=20, check=False
    )
    return done.returncode, done.stderr + done.stdout


def refused(launch: Launch, rank: int, name: str, code: int = 1) -> None:
    found, said = start(launch, rank)
    assert name in said
    assert found == code, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("TF_TP_MASTER", None, "NoMaster"),
        ("TF_TP_MASTER", "spark-a", "BadMaster"),
        ("TF_TP_MASTER", "10.20.0", "BadMaster"),
        ("TF_TP_WORLD", "3", "NotPortedYet"),
        ("TF_TP_WORLD", "two", "BadWorld"),
        ("TF_TP_PORT", "0", "BadPort"),
        ("TF_DS_RANK_CACHE", None, "NoRankCache"),
        ("TF_DS_KIT", None, "NoKit"),
        ("TF_DS_KIT", "/nowhere", "NoKit"),
        ("TENSORFOLD_CUDA_KERNELS", None, "NoKernelSet"),
        ("TF_DS_ENGRAM", None, "NoEngramTables"),
        ("TF_DS_TOKEN_MAP", None, "NoTokenMap"),
        ("TF_DS_STREAMS", "17", "BadStreams"),
        ("TF_DS_ROUND_ROWS", "8", "BadRoundRows"),
        ("TF_DS_RDMA_KERNELS", "/nowhere", "NoRdmaKernels"),
        ("TF_RDMA_DEVICES", "mlx5_9", "NoDevice"),
        ("TF_RDMA_DEVICES", "a b", "BadDevices"),
        ("TF_RDMA_GID_INDEX", "", "InvalidRdmaGidIndex"),
        ("TF_RDMA_GID_INDEX", "256", "InvalidRdmaGidIndex"),
        ("NCCL_IB_GID_INDEX", "x", "InvalidRdmaGidIndex"),
        ("NCCL_IB_HCA", "mlx5_9", "NcclError"),
        ("NCCL_SOCKET_IFNAME", "nowhere0", "NcclError"),
    ],
)
def test_rank_0_refuses_a_wrong_environment(
    world: World, variable: str, value: str | None, name: str
) -> None:
    refused(Launch(world, env0={variable: value}), 0, name)


@pytest.mark.parametrize(
    ("flags", "name", "code"),
    [
        ({"--kv-dtype": "fp8"}, "unrecognized arguments: --kv-dtype", 2),
        ({"--spill-gib": "4"}, "unrecognized arguments", 2),
        ({"--loop-guard": ""}, "--loop-guard", 2),
        ({"--context": "2000000"}, "--context", 2),
        ({"--context": "abc"}, "--context", 2),
        ({"--backend": "mlx"}, "--backend", 2),
        ({"--parallel": "9"}, "NoFreeSlot", 1),
        ({"--parallel": "0"}, "--parallel", 2),
        ({"--context": str(engine_pair.ROWS - 16)}, "ContextTooLong", 1),
        ({"--api-key-file": "/nowhere"}, "NoKeyFile", 1),
    ],
)
def test_rank_0_refuses_flags_it_does_not_serve(
    world: World, flags: dict[str, str | None], name: str, code: int
) -> None:
    refused(Launch(world, flags0=flags), 0, name, code)


@pytest.mark.parametrize(
    ("flags", "name", "code"),
    [
        ({"--pools": "4096"}, "BadArgument", 2),
        ({"--graphs": "2"}, "BadArgument", 2),
        ({"--pool": "0"}, "BadArgument", 2),
        ({"--pool": ""}, "BadArgument", 2),
        ({"--engram": None}, "NoEngramTables", 1),
        ({"--token-map": None}, "NoTokenMap", 1),
        ({"--rdma": "mlx5_9"}, "NoDevice", 1),
        ({"--pool": str(engine_pair.ROWS - 16)}, "ContextTooLong", 1),
    ],
)
def test_rank_1_refuses_a_wrong_option(
    world: World, flags: dict[str, str | None], name: str, code: int
) -> None:
    refused(Launch(world, flags1=flags), 1, name, code)


@pytest.mark.parametrize(
    ("place", "value", "name", "code"),
    [
        (3, "2", "BadArgument", 2),
        (3, "0", "NoRequests", 1),
        (4, "3", "NotPortedYet", 1),
        (5, "head", "BadAddress", 2),
    ],
)
def test_rank_1_refuses_a_wrong_place(world: World, place: int, value: str, name: str, code: int) -> None:
    words, env = Launch(world).rank1()
    words[place] = value
    done = subprocess.run(
        [sys.executable, "-I", *words], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert f"error: {name}" in done.stderr


def test_too_few_words_show_the_usage(world: World) -> None:
    done = world.run("tf-dsv41-lanes", "model", "cache")
    assert (done.returncode, "usage: tf-dsv41-lanes" in done.stderr) == (2, True)
    assert world.run("tensorfold-native").returncode == 2


# -- files ----------------------------------------------------------------------------------------------------


def append(path: str, data: bytes) -> Change:
    def change(world: World) -> None:
        with world.at(path).open("ab") as handle:
            handle.write(data)

    return change


def remove(path: str) -> Change:
    return lambda world: world.at(path).unlink()


def text(path: str, content: str) -> Change:
    return lambda world: void(world.at(path).write_text(content))


def void(_result: object) -> None:
    """A change is made for what it does."""


def rope_size(size: int) -> Change:
    def change(world: World) -> None:
        with world.at("kit/rope-plain-sin.f32").open("r+b") as handle:
            handle.truncate(size)

    return change


def rope_rows(rows: int) -> Change:
    """All tables and rope.json agree on too few rows."""

    def change(world: World) -> None:
        told = json.loads(world.at("kit/rope.json").read_bytes()) | {"rows": rows}
        world.at("kit/rope.json").write_text(json.dumps(told))
        for name in (n for n in told if n.endswith(".f32")):
            with world.at(f"kit/{name}").open("r+b") as handle:
                handle.truncate(rows * 128)
        engine_pair.relist(world.at("kit"), "rope.json")

    return change


def second_cache(rank: int) -> Change:
    def change(world: World) -> None:
        (file,) = world.at(f"cache{rank}").iterdir()
        shutil.copy(file, file.with_name(f"rank{rank}of2-{'0' * 20}.bin"))

    return change


def cache_bytes(edit: Callable[[bytes], bytes]) -> Change:
    def change(world: World) -> None:
        for rank in (0, 1):
            (file,) = world.at(f"cache{rank}").iterdir()
            file.write_bytes(edit(file.read_bytes()))

    return change


def no_caches(world: World) -> None:
    for rank in (0, 1):
        for file in world.at(f"cache{rank}").iterdir():
            file.unlink()


def a_gap_in_the_index(data: bytes) -> bytes:
    at = int.from_bytes(data[-16:-8], "little")
    index = json.loads(data[at:-16])
    del index[1]
    return data[:at] + json.dumps(index).encode() + data[-16:]


def config_type(world: World) -> None:
    config = json.loads(world.at("model/config.json").read_bytes()) | {"model_type": "glm5_next"}
    world.at("model/config.json").write_text(json.dumps(config))


def half_an_engram_table(world: World) -> None:
    engine_pair.safetensors(
        world.at("engram/model-00048-of-00048.safetensors"),
        {"layers.14.engram.embed.weight": ("F8_E4M3", (16, 256), bytes(4096))},
    )


def bias_of_bf16(world: World) -> None:
    names = [f"{layer}.ffn.gate.bias_vl" for layer in ("layers.0", "layers.1", "mtp.0")]
    tensors = {n: ("BF16", (384,), bytes(768)) for n in names}
    engine_pair.safetensors(world.at("kit/vision/gate_bias_vl.safetensors"), tensors, {"source": "a test"})


BOTH = {
    "a changed kit file": (append("kit/cubins/linear.cubin", b"x"), "BadManifest"),
    "a missing kit file": (remove("kit/KIT-LICENSES.md"), "BadManifest"),
    "a comment in MANIFEST": (append("kit/MANIFEST", b"# a comment\n"), "BadManifest"),
    "a path that leaves the kit": (
        append("kit/MANIFEST", b"0" * 64 + b"  z/../../etc/passwd\n"),
        "BadManifest",
    ),
    "no MANIFEST": (remove("kit/MANIFEST"), "NoKit"),
    "no bias": (remove("kit/vision/gate_bias_vl.safetensors"), "NoVisionKit"),
    "a bias of the wrong type": (bias_of_bf16, "NoVisionKit"),
    "no RoPE table": (remove("kit/rope-plain-cos.f32"), "NoRopeTables"),
    "one RoPE table cut short": (rope_size(4096), "ShortRopeTable"),
    "one RoPE table of half a row": (rope_size(engine_pair.ROWS * 128 + 64), "BadRopeTable"),
    "RoPE tables without rows for a round": (rope_rows(engine_pair.POOL + 16), "ShortRopeTable"),
    "no rank cache": (no_caches, "NoRankCache"),
    "a rank cache with a bad magic": (cache_bytes(lambda d: d[:-1] + b"2"), "BadRankCache"),
    "a rank cache cut short": (cache_bytes(lambda d: d[:-100]), "BadRankCache"),
    "a rank cache whose index lies beyond": (
        cache_bytes(lambda d: d[:-16] + (1 << 40).to_bytes(8, "little") + d[-8:]),
        "BadRankCache",
    ),
    "a rank cache with a gap": (cache_bytes(a_gap_in_the_index), "BadRankCache"),
    "an Engram shard missing": (remove("engram/model-00047-of-00048.safetensors"), "NoEngramTables"),
    "half an Engram table": (half_an_engram_table, "NoEngramTables"),
    "an Engram shard cut short": (
        lambda w: void(w.at("engram/model-00048-of-00048.safetensors").write_bytes(b"\1" * 9)),
        "BadSafetensors",
    ),
    "a token map too short": (text("token_map.json", "[0, 1, 2]"), "BadTokenMap"),
    "a token map of texts": (text("token_map.json", '["0"]'), "BadTokenMap"),
    "a token map that is no JSON": (text("token_map.json", "[0,"), "BadTokenMap"),
    "a token map with too few different ids": (
        text("token_map.json", json.dumps([0] * engine_pair.VOCAB)),
        "BadTokenMap",
    ),
    "a model of another family": (config_type, "UnknownModel"),
    "no config": (remove("model/config.json"), "ModelNotFound"),
}


@pytest.mark.parametrize("case", BOTH)
def test_both_ranks_refuse_a_file_that_does_not_hold(world: World, tmp_path: Path, case: str) -> None:
    change, name = BOTH[case]
    other = world.copy(tmp_path / "w")
    change(other)
    with engine_pair.started(Launch(other), tmp_path / "logs") as ranks:
        for rank in ranks:
            assert rank.wait() == 1
            assert name in rank.said
            assert "Traceback" not in rank.said


@pytest.mark.parametrize("rank", [0, 1])
def test_two_caches_of_a_rank_are_refused(world: World, tmp_path: Path, rank: int) -> None:
    other = world.copy(tmp_path / "w")
    second_cache(rank)(other)
    refused(Launch(other), rank, "SeveralRankCaches")


def test_a_partial_of_a_crash_is_no_cache(world: World, tmp_path: Path) -> None:
    other = world.copy(tmp_path / "w")
    no_caches(other)
    other.at("cache0/.rank0of2.partial").write_bytes(b"half")
    refused(Launch(other), 0, "NoRankCache")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model/tokenizer.json", "NoTokenizer"),
        ("model/chat_template.jinja", "NoChatTemplate"),
        ("kit/vision/torch_fmha_sm120.cubin", "NoVisionKit"),
    ],
)
def test_rank_0_needs_the_text_files_and_the_tower(
    world: World, tmp_path: Path, path: str, name: str
) -> None:
    other = world.copy(tmp_path / "w")
    other.at(path).unlink()
    refused(Launch(other), 0, name)


def test_rank_1_reads_only_the_config_of_the_model(world: World, tmp_path: Path) -> None:
    """`worker_weights: slice`: the worker never holds the checkpoint."""
    other = world.copy(tmp_path / "w")
    for file in other.at("model").iterdir():
        if file.name != "config.json":
            file.unlink()
    launch = Launch(other, env1={"TF_REHEARSAL_CONNECT_S": "0"})
    refused(launch, 1, "ConnectFailed")  # it got as far as the link


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_file_that_others_may_read_is_refused(world: World, tmp_path: Path, mode: int) -> None:
    """Field report 68."""
    keys = tmp_path / "keys"
    keys.write_text("sk-a\n")
    keys.chmod(mode)
    refused(Launch(world, flags0={"--api-key-file": str(keys)}), 0, "KeyFileMode")


def test_a_build_without_kernels_loads_nothing(world: World, tmp_path: Path) -> None:
    bare = World(world.base, engine_pair.pack(tmp_path / "bin", kernels=False))
    refused(Launch(bare), 0, "NoKernelImages")
    refused(Launch(bare), 1, "NoKernelImages")


def test_caches_without_drafting_blocks_serve_only_without_drafts(world: World, tmp_path: Path) -> None:
    other = world.copy(tmp_path / "w")
    no_caches(other)
    for rank in (0, 1):
        world.run("tf-dsv41-rank-cache", other.at("model"), other.at(f"cache{rank}"), rank, 2, "--no-dspark")
    refused(Launch(other), 0, "NoDraftWeights")
    refused(Launch(other, flags1={"--drafts": "0"}, env1={"TF_REHEARSAL_CONNECT_S": "0"}), 1, "ConnectFailed")


def test_a_port_that_is_down_is_refused(world: World, tmp_path: Path) -> None:
    other = world.copy(tmp_path / "w")
    port = "sys/class/infiniband/roceP2p1s0f0/ports/1/state"
    for rank in (0, 1):
        other.at(f"tree{rank}/{port}").write_text("1: DOWN\n")
    refused(Launch(other, env0={"NCCL_IB_HCA": None}), 0, "PortDown")
    refused(Launch(other, env1={"NCCL_IB_HCA": None}), 1, "PortDown")


def test_without_a_tree_the_machines_own_devices_count(world: World) -> None:
    refused(Launch(world, env0={"TF_REHEARSAL_ROOT": "/nowhere", "NCCL_IB_HCA": None}), 0, "NoDevice")


def test_capabilities_name_the_flags_and_variables(world: World) -> None:
    said = json.loads(world.run("tensorfold-native", "capabilities", "--json").stdout)
    assert {"--context", "--parallel", "--api-key-file", "--no-thinking"} <= set(said["flags"])
    assert {"TF_TP_MASTER", "TF_RDMA_GID_INDEX"} <= set(said["environment"])
    assert world.run("tensorfold-native", "--version").stdout == "tensorfold-native 1.0.2\n"
