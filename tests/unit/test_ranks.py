"""Both ranks' command lines against the engine's launch contract, word for word."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
from sparkpair import ranks
from sparkpair.problem import Problem

SERVING = ranks.Serving(
    image="tensorfold-dsv41:exl3-tp2-0123456789ab",
    master="10.20.0.1",
    model="/var/lib/sparkpair/weights/dsv41-1017",
    engram="/var/lib/sparkpair/engram/dsv41-1017",
    kit="/var/lib/sparkpair/kit",
    cache="/var/lib/sparkpair/rank-cache/dsv41-1017-594020863810",
    token_map="/var/lib/sparkpair/fixtures/dsv41-1017/token_map.json",
    served_name="DeepSeek-V4.1-Flash-1017",
    api_host="0.0.0.0",
    api_port=8888,
    context=1048576,
    parallel=4,
    max_tokens=32768,
    temperature=1.0,
    top_p=0.95,
    top_k=20,
    thinking=True,
    drafts=True,
    with_key=True,
)


def words(serving: ranks.Serving, rank: int) -> list[str]:
    return [word for group in ranks.docker_command(serving, rank) for word in group]


def test_rank_0_is_served_with_every_flag_spelled_out() -> None:
    assert shlex.join(ranks.program(SERVING, 0)) == (
        "/opt/tensorfold/native/bin/tensorfold-native serve /var/lib/sparkpair/weights/dsv41-1017 "
        "--host 0.0.0.0 --port 8888 --name DeepSeek-V4.1-Flash-1017 --api-key-file /etc/sparkpair/api-keys "
        "--context 1048576 --parallel 4 --thinking --max-tokens 32768 --temperature 1 --top-p 0.95 --top-k 20 "
        "--backend cuda"
    )


def test_rank_1_mirrors_rank_0() -> None:
    assert " ".join(ranks.program(SERVING, 1)) == (
        "/opt/tensorfold/bin/tf-dsv41-lanes /var/lib/sparkpair/weights/dsv41-1017 "
        "/var/lib/sparkpair/rank-cache/dsv41-1017-594020863810 1 2 10.20.0.1 29620 /var/lib/sparkpair/kit "
        "--engram /var/lib/sparkpair/engram/dsv41-1017 "
        "--token-map /var/lib/sparkpair/fixtures/dsv41-1017/token_map.json --pool 1048576 "
        "--rdma ${TF_RDMA_DEVICES} --graphs 1 --side 1 --prefetch 1 --aio 1 --drafts 1"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_docker_never_restarts_a_rank_by_itself(rank: int) -> None:
    """Field report 59: one rank coming back alone only waits for a peer."""
    command = words(SERVING, rank)
    assert command[command.index("--restart") + 1] == "no"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_kernel_sacrifices_the_rank_and_not_the_desktop(rank: int) -> None:
    """Field report 54."""
    command = words(SERVING, rank)
    assert command[command.index("--oom-score-adj") + 1] == "1000"


@pytest.mark.parametrize("rank", [0, 1])
def test_everything_mounted_is_read_only(rank: int) -> None:
    """Field report 33: serving leaves the weights' ownership alone."""
    command = words(SERVING, rank)
    mounts = [command[i + 1] for i, word in enumerate(command) if word == "--volume"]
    assert len(mounts) == (6 if rank == 0 else 5)
    assert all(mount.endswith(":ro") for mount in mounts)


def test_the_follower_gets_neither_key_nor_port() -> None:
    command = words(SERVING, 1)
    assert ranks.KEY_FILE not in " ".join(command)
    assert "8888" not in command


def test_no_key_no_key_file() -> None:
    command = words(dataclasses.replace(SERVING, with_key=False), 0)
    assert "--api-key-file" not in command
    assert ranks.KEY_FILE not in " ".join(command)


def test_drafts_off_on_both_ranks() -> None:
    serving = dataclasses.replace(SERVING, drafts=False)
    assert "--no-drafts" in ranks.program(serving, 0)
    assert ranks.program(serving, 1)[-2:] == ["--drafts", "0"]


def test_both_ranks_carry_one_configuration() -> None:
    labels = [
        [word for word in words(SERVING, rank) if word.startswith("sparkpair.config=")] for rank in (0, 1)
    ]
    assert labels[0] == labels[1] != []


@pytest.mark.parametrize("change", [{"context": 524288}, {"image": "other:1"}, {"key_digest": "0badc0de"}])
def test_any_change_changes_the_configuration(change: dict[str, object]) -> None:
    changed = dataclasses.replace(SERVING, **change)  # type: ignore[arg-type]
    assert ranks.config_digest(changed) != ranks.config_digest(SERVING)


def test_values_of_the_command_line_give_the_same_words() -> None:
    """`-e context=1048576 -e drafts=true` arrives as text; the unit must not differ by that."""
    as_text = {field.name: str(getattr(SERVING, field.name)) for field in dataclasses.fields(SERVING)}
    assert ranks.Serving.of(as_text) == SERVING


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(Problem) as caught:
        ranks.docker_command(SERVING, 2)
    assert caught.value.code == "rank"
