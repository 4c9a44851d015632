"""The stand-in's two ranks together: order of start, what must be alike, loss of a peer, stops and faults."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import engine_pair
import pytest
from engine_pair import Launch, Rank, World, started, wait_for


@pytest.fixture
def world() -> World:
    return engine_pair.shared()


def ask(launch: Launch, text: str = "What is 17 + 25?", seconds: float = 10, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{launch.http}/v1/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return dict(json.load(answer))


def content(launch: Launch, text: str = "What is 17 + 25?", **more: Any) -> str:
    return str(ask(launch, text, **more)["choices"][0]["message"]["content"])


def models(launch: Launch) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{launch.http}/v1/models", timeout=5) as answer:
        return int(answer.status)


def ready(zero: Rank, one: Rank) -> None:
    one.until('"loaded_s"')
    zero.until("serving ")


def status_of(launch: Launch) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(launch)
    return caught.value.code


def test_both_say_what_a_log_reader_waits_for(world: World, tmp_path: Path) -> None:
    launch = Launch(world)
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        assert (
            f"serving DeepSeek-V4.1-Flash-1017 at http://127.0.0.1:{launch.http}/v1 (sampling: " in zero.said
        )
        assert f"drafts: on; context: {engine_pair.POOL}; loaded in " in zero.said
        assert '{"vision": "' in zero.said
        assert "RDMA rank 0 peer 1 rail 1: gid_index=3 path_mtu=5" in zero.said
        line = next(json.loads(x) for x in one.said.splitlines() if x.startswith("{"))
        assert line["rank"] == 1
        assert line["pool"] == engine_pair.POOL
        assert line["drafts"] is True
        assert "42" in content(launch)


def test_a_clean_stop_ends_both_with_0(world: World, tmp_path: Path) -> None:
    launch = Launch(world)
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        zero.tell(signal.SIGTERM)
        assert zero.wait() == 0
        assert one.wait() == 0
        assert '{"rank": 1, "followed": true}' in one.said


def test_rank_0_lost_ends_rank_1_with_1(world: World, tmp_path: Path) -> None:
    """Field report 63."""
    launch = Launch(world)
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        zero.tell(signal.SIGKILL)
        assert one.wait() == 1
        assert '{"rank": 1, "follow": "PeerDown"}' in one.said


def test_rank_1_lost_leaves_a_server_that_cannot_answer(world: World, tmp_path: Path) -> None:
    """Field reports 60, 62: the HTTP side lives on."""
    launch = Launch(world)
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        assert "42" in content(launch)
        one.tell(signal.SIGTERM)  # it installs no handler, so it dies of it
        assert one.wait() == -signal.SIGTERM
        assert [status_of(launch), status_of(launch)] == [500, 500]
        assert models(launch) == 200
        assert zero.process.poll() is None


def test_a_reply_that_is_open_when_rank_1_goes_ends_with_an_error(world: World, tmp_path: Path) -> None:
    launch = Launch(world, env0={"TF_REHEARSAL_TOKEN_S": "0.05"})
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.append(status_of_long(launch)))
        asking.start()
        wait_for(lambda: health(launch)["rounds_total"] >= 2, 10)
        one.tell(signal.SIGKILL)
        asking.join(10)
        assert found == [500]


def status_of_long(launch: Launch) -> int:
    """The status of a request whose reply takes many rounds of the pair."""
    try:
        ask(launch, "Count from 1 to 400.", max_tokens=1000)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def health(launch: Launch) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{launch.http}/health", timeout=5) as answer:
        return dict(json.load(answer))


def test_a_stop_with_an_open_reply_leaves_without_a_word(world: World, tmp_path: Path) -> None:
    launch = Launch(world, env0={"TF_REHEARSAL_DEAD": "1"})
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        with socket.create_connection(("127.0.0.1", launch.http)) as client:
            body = b'{"messages": [{"role": "user", "content": "hi"}]}'
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            wait_for(lambda: health(launch)["busy"], 10)
            began = time.monotonic()
            zero.tell(signal.SIGTERM)
            assert zero.wait() == 0
            assert time.monotonic() - began < 5
        assert one.wait() == 1
        assert '"follow": "PeerDown"' in one.said


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"flags1": {"--pool": "2048"}}, "PoolMismatch"),
        ({"flags1": {"--rdma": "rocep1s0f0"}}, "BadInfo"),
        ({"flags1": {"--rdma": ""}}, "BadInfo"),
        ({"env0": {"TF_RDMA_DEVICES": ""}}, "BadInfo"),
        ({"flags1": {"--graphs": "0"}}, "SwitchMismatch"),
        ({"flags1": {"--aio": None}}, "SwitchMismatch"),
        ({"env0": {"TF_DS_L2_PREFETCH": "0"}}, "SwitchMismatch"),
        ({"env1": {"TF_DS_REPLAY_FLOOR": None}}, "SwitchMismatch"),
        ({"flags1": {"--drafts": "0"}}, "DraftsMismatch"),
        ({"flags0": {"--no-drafts": ""}}, "DraftsMismatch"),
    ],
)
def test_ranks_that_are_not_alike_refuse_each_other(
    world: World, tmp_path: Path, change: dict[str, dict[str, str | None]], name: str
) -> None:
    launch = Launch(world, **change)
    if launch.flags1.get("--rdma") == "":
        launch.flags1["--rdma"] = None
    with started(launch, tmp_path) as (zero, one):
        assert (zero.wait(), one.wait()) == (1, 1)
        assert f"tensorfold: {name}" in zero.said
        assert f'{{"rank": 1, "follow": "{name}"}}' in one.said


def test_the_ring_can_be_left_out_on_both(world: World, tmp_path: Path) -> None:
    """One rail, or NCCL alone: the same number of devices on both ranks."""
    launch = Launch(world, env0={"TF_RDMA_DEVICES": "", "TF_RDMA_GID_INDEX": None}, flags1={"--rdma": None})
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        assert "gid_index" not in zero.said
        assert "42" in content(launch)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"NCCL_IB_GID_INDEX": ""}, "61 No data available"),
        ({"NCCL_IB_GID_INDEX": "2"}, "61 No data available"),
        ({"TF_RDMA_GID_INDEX": "0"}, "61 No data available"),
        ({"TF_RDMA_GID_INDEX": None}, "61 No data available"),  # the ring's own default is 5
        ({"TF_RDMA_GID_INDEX": "7"}, "61 No data available"),
    ],
)
def test_a_gid_that_is_no_rocev2_row_of_an_address_fails(
    world: World, tmp_path: Path, env: dict[str, str | None], words: str
) -> None:
    """Field report 9."""
    with started(Launch(world, env0=env), tmp_path) as (zero, one):
        assert zero.wait() == 1
        assert f"Call to ibv_modify_qp failed with {words}" in zero.said
        assert one.wait() == 1


def test_rails_that_are_paired_crosswise_fail(world: World, tmp_path: Path) -> None:
    """Field reports 4, 6: devices are paired by their place in the list."""
    with started(Launch(world, flags1={"--rdma": "roceP2p1s0f0,rocep1s0f0"}), tmp_path) as (zero, one):
        assert (zero.wait(), one.wait()) == (1, 1)
        assert "failed with 110 Connection timed out" in zero.said
        assert "local GID ::ffff:10.20.0.1, remote GID ::ffff:10.21.0.2" in zero.said


def test_the_mtu_of_the_narrower_end_counts(world: World, tmp_path: Path) -> None:
    """Field report 10."""
    other = world.copy(tmp_path / "w")
    other.at("tree1/sys/class/net/railB/mtu").write_text("1500\n")
    with started(Launch(other), tmp_path / "logs") as (zero, one):
        ready(zero, one)
        assert "rail 0: gid_index=3 path_mtu=5" in zero.said
        assert "rail 1: gid_index=3 path_mtu=3" in zero.said


def test_nccl_tells_its_devices_when_it_is_asked(world: World, tmp_path: Path) -> None:
    with started(Launch(world, env0={"NCCL_DEBUG": "INFO"}), tmp_path) as (zero, one):
        ready(zero, one)
        assert (
            "NET/IB : Using [0]rocep1s0f0:1/RoCE [1]roceP2p1s0f0:1/RoCE [RO]; OOB lo:127.0.0.1<0>"
            in zero.said
        )


def test_an_address_of_another_machine_cannot_be_bound(world: World, tmp_path: Path) -> None:
    """Field reports 2, 16: rank 0 binds its own link address."""
    env: dict[str, str | None] = {"TF_TP_MASTER": "192.0.2.1", "NCCL_SOCKET_IFNAME": None}
    zero = Rank(*Launch(world, env0=env).rank0(), tmp_path / "rank0.log")
    assert zero.wait() == 1
    assert "BindFailed" in zero.said


def test_a_socket_interface_outside_the_masters_subnet_is_refused(world: World, tmp_path: Path) -> None:
    """Field report 1."""
    zero = Rank(*Launch(world, env0={"TF_TP_MASTER": "192.0.2.1"}).rank0(), tmp_path / "rank0.log")
    assert zero.wait() == 1
    assert "NCCL_SOCKET_IFNAME=lo has 127.0.0.1/8, rank 0 is at 192.0.2.1: no common subnet" in zero.said


def test_a_taken_http_port_ends_the_start(world: World, tmp_path: Path) -> None:
    launch = Launch(world)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", launch.http))
        taken.listen()
        with started(launch, tmp_path) as (zero, one):
            assert zero.wait() == 1
            assert "BindFailed" in zero.said
            assert one.wait() == 1


def test_rank_1_gives_up_when_rank_0_never_listens(world: World, tmp_path: Path) -> None:
    launch = Launch(world, env1={"TF_REHEARSAL_CONNECT_S": "0.5"})
    one = Rank(*launch.rank1(), tmp_path / "rank1.log")
    assert one.wait() == 1
    assert "error: ConnectFailed" in one.said


def test_rank_0_waits_for_its_peer_without_an_end(world: World, tmp_path: Path) -> None:
    """Field report 61: whoever starts the pair owns the time limit. SIGTERM ends the wait."""
    launch = Launch(world)
    zero = Rank(*launch.rank0(), tmp_path / "rank0.log")
    try:
        with pytest.raises(AssertionError):
            wait_for(lambda: zero.process.poll() is not None, 0.8)
        zero.tell(signal.SIGTERM)
        assert zero.wait() == -signal.SIGTERM
    finally:
        zero.process.kill()


def test_a_stranger_at_the_rendezvous_ends_the_start(world: World, tmp_path: Path) -> None:
    """It takes one connection and asks nothing: a probe of the port is not harmless."""
    launch = Launch(world)
    zero = Rank(*launch.rank0(), tmp_path / "rank0.log")

    def knocked() -> bool:
        try:
            socket.create_connection(("127.0.0.1", launch.port), timeout=1).close()
        except OSError:
            return False
        return True

    wait_for(knocked, 10)
    assert zero.wait() == 1
    assert "PeerDown" in zero.said


# -- faults -----------------------------------------------------------------------------------------------------


def test_slow_loading_shows_progress(world: World, tmp_path: Path) -> None:
    """Field report 64."""
    with started(Launch(world, env1={"TF_REHEARSAL_LOAD_S": "1.2"}), tmp_path) as (zero, one):
        ready(zero, one)
        assert one.said.count("rank 1: loaded ") >= 2
        assert "rank 0: loaded " not in zero.said


def test_ready_but_dead_and_alive_again_by_the_control_file(world: World, tmp_path: Path) -> None:
    """Field report 62."""
    control = tmp_path / "faults"
    control.write_text("dead=1\n")
    launch = Launch(world, env0={"TF_REHEARSAL_FAULTS": str(control)})
    with started(launch, tmp_path / "logs") as (zero, one):
        ready(zero, one)
        assert models(launch) == 200
        with pytest.raises(TimeoutError):
            ask(launch, seconds=0.5)
        control.write_text("dead=0\n")
        assert "42" in content(launch)
        control.write_text("rank1.repeat=!\n")  # the other rank's fault
        assert "42" in content(launch)
        control.write_text("repeat=!\n")
        assert set(content(launch, max_tokens=4)) == {"!"}


def test_ignoring_sigterm(world: World, tmp_path: Path) -> None:
    """Field report 66."""
    faults: dict[str, str | None] = {"TF_REHEARSAL_IGNORE_TERM": "1"}
    launch = Launch(world, env0=dict(faults), env1=dict(faults))
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        zero.tell(signal.SIGTERM)
        one.tell(signal.SIGTERM)
        assert "42" in content(launch)
        assert zero.process.poll() is None
        assert one.process.poll() is None


def test_exit_with_a_code(world: World, tmp_path: Path) -> None:
    """Field report 34: the log holds a marker, the code is the one asked for."""
    launch = Launch(world, env1={"TF_REHEARSAL_EXIT": "3", "TF_REHEARSAL_EXIT_AFTER": "0.2"})
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        assert one.wait() == 3
        assert "leaving with 3" in one.said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_forgotten_leaves_both_processes_or_ends_the_other(
    world: World, tmp_path: Path, rank: int
) -> None:
    control = tmp_path / "faults"
    launch = Launch(world, **{f"env{rank}": {"TF_REHEARSAL_FAULTS": str(control)}})
    with started(launch, tmp_path / "logs") as (zero, one):
        ready(zero, one)
        control.write_text("forget_peer=1\n")
        wait_for(lambda: status_of_long(launch) == 500, 10)
        if rank == 0:
            assert one.wait() == 1
        else:
            assert one.process.poll() is None
        assert zero.process.poll() is None


def test_a_load_that_fails_by_name(world: World, tmp_path: Path) -> None:
    one = Rank(*Launch(world, env1={"TF_REHEARSAL_FAIL_LOAD": "OutOfMemory"}).rank1(), tmp_path / "rank1.log")
    assert one.wait() == 1
    assert "error: OutOfMemory" in one.said


def test_an_idle_pair_costs_next_to_nothing(world: World, tmp_path: Path) -> None:
    launch = Launch(world)
    with started(launch, tmp_path) as (zero, one):
        ready(zero, one)
        assert "42" in content(launch)
        before = [cpu_seconds(r) for r in (zero, one)]
        time.sleep(1)
        used = [cpu_seconds(r) - b for r, b in zip((zero, one), before, strict=True)]
        assert max(used) <= 0.05
        assert max(memory_mb(r) for r in (zero, one)) < 60


def cpu_seconds(rank: Rank) -> float:
    fields = Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def memory_mb(rank: Rank) -> float:
    status = Path(f"/proc/{rank.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
