"""Rank caches: planned, room checked, written, checked, hashed, locked; and never two of one rank."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cache_engine import Engine, index_of, quiet
from sparkpair import cli, locks, rankcache
from sparkpair.dockercli import Docker
from sparkpair.problem import Problem

INPUTS = {"checkpoint": "a" * 40, "overlay": "", "engine": "tensorfold-dsv41:exl3-tp2-136c93b359b4"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path / "model"


def cache_of(tmp_path: Path, rank: int = 0, /, **changed: str) -> rankcache.Cache:
    lock_file = tmp_path / f"receipts/rank-cache-v-rank{rank}.json"
    return rankcache.Cache(tmp_path / "rank-cache/v", rank, 2, {**INPUTS, **changed}, lock_file)


def written(cache: rankcache.Cache, model: Path, engine: Engine | None = None) -> locks.Lock:
    return rankcache.write(cache, model, engine or Engine(), progress=quiet)[0]


def test_a_cache_is_planned_written_checked_hashed_and_locked(tmp_path: Path, model: Path) -> None:
    cache, engine = cache_of(tmp_path), Engine()
    lock, plan, warnings = rankcache.write(cache, model, engine, progress=quiet)
    assert (plan.entries, plan.bytes, warnings) == (7, 7000, [])
    folder = str(cache.folder)
    assert engine.calls == [
        (rankcache.WRITER, (str(model), folder, "0", "2", "--index-only"), False),
        (rankcache.WRITER, (str(model), folder, "0", "2"), True),
        (rankcache.CHECKER, (str(model), folder, "0", "2", "--bytes", "16"), False),
    ]
    [file] = cache.folder.glob("*.bin")
    [entry] = lock.files
    assert (entry.path, entry.size) == (file.name, file.stat().st_size)
    assert entry.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert locks.load(cache.lock_file) == lock
    assert rankcache.standing(cache) == lock


def test_a_second_look_is_a_stat_and_a_changed_byte_is_noticed(tmp_path: Path, model: Path) -> None:
    cache = cache_of(tmp_path)
    lock = written(cache, model)
    file = cache.folder / lock.files[0].path
    os.utime(file, (1, 1))
    assert rankcache.standing(cache) is None


@pytest.mark.parametrize("name", ["checkpoint", "overlay", "engine"])
def test_other_inputs_make_another_cache_in_the_place_of_the_old_one(
    tmp_path: Path, model: Path, name: str
) -> None:
    old = written(cache_of(tmp_path), model)
    cache = cache_of(tmp_path, 0, **{name: "another"})
    assert rankcache.standing(cache) is None
    new = written(cache, model)
    assert new.files == old.files, "the engine names both alike: the lock must tell them apart"
    assert new.revision != old.revision
    assert len(list(cache.folder.glob("*.bin"))) == 1


def test_another_layout_replaces_the_old_file(tmp_path: Path, model: Path) -> None:
    cache = cache_of(tmp_path)
    old = written(cache, model)
    other = cache_of(tmp_path, checkpoint="another")
    written(other, model, Engine(entries=8))
    assert not (cache.folder / old.files[0].path).exists()
    assert len(list(cache.folder.glob("*.bin"))) == 1


def test_two_caches_of_a_rank_are_named_and_nothing_is_run(tmp_path: Path, model: Path) -> None:
    cache, engine = cache_of(tmp_path), Engine()
    cache.folder.mkdir(parents=True)
    for digits in ("0" * 20, "1" * 20):
        (cache.folder / f"rank0of2-{digits}.bin").touch()
        (cache.folder / f"rank1of2-{digits[:19]}{digits[0]}.bin").touch()
    for look in (lambda: rankcache.standing(cache), lambda: rankcache.write(cache, model, engine)):
        with pytest.raises(Problem) as fault:
            look()
        assert "rank0of2-" + "0" * 20 in fault.value.found
        assert "rank0of2-" + "1" * 20 in fault.value.found
        assert "rank1of2" not in fault.value.found
    assert engine.calls == []


def test_a_leftover_of_a_crash_is_removed_and_other_ranks_are_left_alone(tmp_path: Path, model: Path) -> None:
    cache = cache_of(tmp_path)
    other = written(cache_of(tmp_path, 1), model)
    (cache.folder / ".rank0of2.partial").write_bytes(b"half")
    (cache.folder / ".rank1of2.partial").write_bytes(b"another job's")
    written(cache, model)
    assert rankcache.standing(cache_of(tmp_path, 1)) == other
    assert sorted(path.name for path in cache.folder.glob(".rank*")) == [".rank1of2.partial"]


@pytest.mark.parametrize(
    ("expected", "warnings"),
    [
        (rankcache.Expected(143_770, 98.9), []),
        (rankcache.Expected(), []),
        (rankcache.Expected(143_769, 98.9), ["the plan has 143770 entries, the profile expects 143769"]),
        (rankcache.Expected(143_770, 99.0), ["the plan has 98.9 GiB, the profile expects 99.0 GiB"]),
    ],
)
def test_a_plan_other_than_expected_is_a_warning_with_both_figures(
    expected: rankcache.Expected, warnings: list[str]
) -> None:
    plan = rankcache.Plan(143_770, 106_193_900_000, 15_000_000)
    assert rankcache.compare(plan, expected) == warnings


def test_the_plan_is_read_as_an_index_or_as_a_line_of_figures() -> None:
    text = index_of(3)
    assert rankcache.parse_plan(text) == rankcache.Plan(3, 3000, len(text))
    line = 'planning ...\n{"entries": 143770, "data_bytes": 106193900000, "index_bytes": 15000000}\n'
    assert rankcache.parse_plan(line) == rankcache.Plan(143_770, 106_193_900_000, 15_000_000)


@pytest.mark.parametrize("text", ["", "Usage: ...", "7", "{}", "[1]", '[["k", "d", [], 0]]', "[" * 100_000])
def test_a_plan_that_is_none_is_shown(text: str) -> None:
    with pytest.raises(Problem, match="index-only answered"):
        rankcache.parse_plan(text)


def test_too_little_room_is_told_before_anything_is_written_or_removed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = written(cache_of(tmp_path), model)
    monkeypatch.setattr("sparkpair.disk.free_bytes", lambda _: 1_000_000_000)
    engine = Engine(entries=9)
    with pytest.raises(Problem) as fault:
        written(cache_of(tmp_path, engine="another"), model, engine)
    assert fault.value.code == "disk-full"
    assert "1000000000 bytes" in fault.value.found
    assert str(tmp_path / "rank-cache/v") in fault.value.needed
    assert [words[-1] for _, words, _ in engine.calls] == ["--index-only"]
    assert rankcache.standing(cache_of(tmp_path)) == old


@pytest.mark.parametrize("below", ["", "for-worker"])
def test_too_little_room_names_the_variants_that_take_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """Field report 36: what was superseded stays, and nobody sees it."""
    old = tmp_path / "rank-cache/dsv41-old"
    old.mkdir(parents=True)
    (old / "rank0of2-0123456789abcdef0123.bin").touch()
    (tmp_path / "rank-cache/empty").mkdir()
    monkeypatch.setattr("sparkpair.disk.free_bytes", lambda _: 0)
    folder = tmp_path / "rank-cache/v" / below
    with pytest.raises(Problem) as fault:
        written(rankcache.Cache(folder, 0, 2, INPUTS, tmp_path / "lock.json"), model)
    assert fault.value.do.endswith(f"caches of other variants lie in {old}")


def test_what_gives_way_counts_as_room(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = written(cache_of(tmp_path), model)
    room = rankcache.MARGIN + len(Engine().index) + 7000 - old.total_bytes
    monkeypatch.setattr("sparkpair.disk.free_bytes", lambda _: room)
    written(cache_of(tmp_path, engine="another"), model)


@pytest.mark.parametrize("program", [rankcache.WRITER, rankcache.CHECKER])
def test_a_program_that_fails_leaves_no_cache_and_its_last_lines(
    tmp_path: Path, model: Path, program: str
) -> None:
    cache, engine = cache_of(tmp_path), Engine()
    engine.code[program] = 1
    with pytest.raises(Problem) as fault:
        written(cache, model, engine)
    assert ("ShortRead" if program == rankcache.WRITER else "checked") in fault.value.found
    assert list(cache.folder.glob("*.bin")) == list(cache.folder.glob(".rank*")) == []
    assert not cache.lock_file.exists()
    assert rankcache.standing(cache) is None


@pytest.mark.parametrize("told", [{"ok": False, "byte_mismatches": 3}, {}, {"ok": "yes"}])
def test_a_check_that_does_not_say_ok_refuses_the_cache(
    tmp_path: Path, model: Path, told: dict[str, Any]
) -> None:
    cache, engine = cache_of(tmp_path), Engine()
    engine.told = told
    with pytest.raises(Problem) as fault:
        written(cache, model, engine)
    assert json.dumps({key: told[key] for key in told if "mismatch" in key}) in fault.value.found
    assert not list(cache.folder.glob("*.bin"))


def test_an_interrupted_run_leaves_nothing_half_made(tmp_path: Path, model: Path) -> None:
    cache, engine = cache_of(tmp_path), Engine()
    engine.crash = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        written(cache, model, engine)
    assert list(cache.folder.glob(".rank*")) == []


def test_a_lock_from_another_node_vouches_once_its_file_is_verified_here(tmp_path: Path, model: Path) -> None:
    made = cache_of(tmp_path, 1)
    lock = written(made, model)
    there = rankcache.Cache(tmp_path / "worker", 1, 2, INPUTS, made.lock_file)
    assert rankcache.known_lock(there) == lock
    assert rankcache.standing(there) is None, "the file has not come yet"
    there.folder.mkdir()
    os.link(made.folder / lock.files[0].path, there.folder / lock.files[0].path)
    assert rankcache.standing(there) is None, "no receipt of this node yet"
    (there.folder / ".sparkpair-receipts.json").write_bytes(
        (made.folder / ".sparkpair-receipts.json").read_bytes()
    )
    assert rankcache.standing(there) == lock


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_its_world_is_refused(tmp_path: Path, rank: int) -> None:
    with pytest.raises(Problem, match=f"rank {rank} in a world of 2"):
        cache_of(tmp_path, rank)


def test_no_checkpoint_is_told_before_docker_is_asked(tmp_path: Path) -> None:
    engine = Engine()
    with pytest.raises(Problem, match="no checkpoint in"):
        written(cache_of(tmp_path), tmp_path / "absent", engine)
    assert engine.calls == []


# The real runner, against a docker command of ours


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A docker that notes its words and does what its script says."""
    path = tmp_path / "bin/docker"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        "open(os.environ['STUB_LOG'], 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "exec(os.environ.get('STUB_DOES', '') if sys.argv[1] == 'run' else '')\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def in_image(stub: Path) -> rankcache.InImage:
    return rankcache.InImage("tensorfold-dsv41:exl3-tp2-136c93b359b4", Docker(program=str(stub)), 997, 995)


def test_the_program_runs_without_network_as_the_service_user_with_few_mounts(stub: Path) -> None:
    command = in_image(stub).command(
        rankcache.WRITER, ["/w", "/c", "0", "2"], Path("/w"), Path("/c"), writable=True
    )
    line = " ".join(command[1:])
    for words in (
        "run --rm --name sparkpair-rank-cache-",
        "--network none",
        "--pull never",
        "--user 997:995",
        "--volume /w:/w:ro",
        "--volume /c:/c:rw",
        "--entrypoint /opt/tensorfold/bin/tf-dsv41-rank-cache tensorfold-dsv41:exl3-tp2-136c93b359b4 /w /c 0 2",
    ):
        assert words in line
    assert "--gpus" not in line
    assert "--privileged" not in line
    reading = in_image(stub).command(rankcache.CHECKER, [], Path("/w"), Path("/c"), writable=False)
    assert "/c:/c:ro" in reading


def test_output_errors_and_code_come_back_and_it_is_watched_meanwhile(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    does = "print('{}'); print('error: Why', file=sys.stderr); time.sleep(0.3); sys.exit(3)"
    monkeypatch.setenv("STUB_DOES", does)
    monkeypatch.setattr(rankcache, "_POLL_S", 0.02)
    looks: list[float] = []
    done = in_image(stub)(
        rankcache.WRITER,
        ["x"],
        tmp_path,
        tmp_path,
        writable=True,
        watch=lambda: looks.append(time.monotonic()),
    )
    assert done == rankcache.Done(3, "{}\n", ["error: Why"])
    assert len(looks) > 3
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first.startswith("rm --force sparkpair-rank-cache-"), "what a killed run left goes first"
    assert second.startswith("run ")


def test_an_engine_that_can_not_run_it_is_told_in_dockers_terms(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    said = "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
    monkeypatch.setenv("STUB_DOES", f"print({said!r}, file=sys.stderr); sys.exit(125)")
    with pytest.raises(Problem) as fault:
        in_image(stub)(rankcache.WRITER, [], tmp_path, tmp_path, writable=False, watch=lambda: None)
    assert fault.value.code == "docker-down"


def test_a_stopped_job_takes_its_container_with_it(tmp_path: Path, model: Path, stub: Path) -> None:
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "STUB_LOG": str(log),
        "STUB_DOES": "time.sleep(60)",
        "PATH": f"{stub.parent}:{os.environ['PATH']}",
    }
    words = ["rank-cache", "--model", str(model), "--out", str(tmp_path / "c"), "--rank", "0", "--world", "2"]
    words += ["--image", "i", "--lock", str(tmp_path / "lock.json"), "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; from sparkpair.cli import main; sys.exit(main())", *words],
        env=environment,
    ) as job:
        deadline = time.monotonic() + 30
        while not (log.exists() and "run " in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == 130
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["rm", "run", "rm"]
    assert lines[0] == lines[2]


def test_the_command_answers_with_the_lock_and_the_warnings(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rankcache, "InImage", lambda _image: Engine())
    words = ["rank-cache", "--model", str(model), "--out", str(tmp_path / "c"), "--rank", "1", "--world", "2"]
    words += ["--image", "i", "--lock", str(tmp_path / "lock.json"), "--json", "--input", "engine=i"]
    assert cli.main([*words, "--expect-entries", "143770", "--expect-gib", "98.9"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["changed"]
    assert told["warnings"] == [
        "the plan has 7 entries, the profile expects 143770",
        "the plan has 0.0 GiB, the profile expects 98.9 GiB",
    ]
    assert locks.parse(told["lock"], "told") == locks.load(tmp_path / "lock.json")
    assert cli.main(words) == 0
    assert not json.loads(capsys.readouterr().out)["changed"]
