"""The kit: every line of MANIFEST, generated files included, at each run and each start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from kit_world import BIAS, GENERATED, IN_GIT, TABLE, World, flip, git, manifest_of, put_back_time, sha256
from sparkpair import cli, kit, locks, rope, sealed
from sparkpair.problem import Problem


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("digits", [40, 12])
def test_the_pinned_commit_becomes_plain_files_with_the_generated_ones(world: World, digits: int) -> None:
    lock = kit.lay_out(world.order(world.commit[:digits]))
    assert set(lock.by_path) == {*IN_GIT, *GENERATED, kit.BIAS, "MANIFEST"}
    assert lock.revision == world.commit
    assert not (world.folder / ".git").exists()
    for name in rope.TABLES:
        assert (world.folder / name).samefile(world.fixtures / name), "a hard link, not a copy"
    assert {path.name for path in world.folder.parent.iterdir()} == {"kit", ".kit.git", "receipts"}
    assert kit.check(world.folder, lock=lock, full=True)["files"] == len(IN_GIT) + 5
    subprocess.run(["sha256sum", "--quiet", "-c", "MANIFEST"], cwd=world.folder, check=True)


def test_a_second_run_changes_nothing_and_reads_no_large_file(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched() -> bool:
        assert cli.main(world.words("fetch", "--commit", world.commit[:12])) == 0
        return bool(json.loads(capsys.readouterr().out)["changed"])

    assert fetched()
    read_bytes = Path.read_bytes

    def only_small(path: Path) -> bytes:
        assert path.stat().st_size < 2**20, f"{path} was read again"
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", only_small)
    monkeypatch.setattr("sparkpair.gitsource.obtain", lambda *_: pytest.fail("git was asked again"))
    assert not fetched()


FAULTS: list[tuple[str, Callable[[Path], object]]] = [
    ("aot/cubins/5f.cubin (changed)", lambda folder: put_back_time(folder / "aot/cubins/5f.cubin", flip)),
    ("engram.json (missing)", lambda folder: (folder / "engram.json").unlink()),
    ("rope-plain-sin.f32 (changed)", lambda folder: (folder / "rope-plain-sin.f32").write_bytes(TABLE)),
    ("vision/gate_bias_vl.safetensors (missing)", lambda folder: (folder / kit.BIAS).unlink()),
    ("aot/extra.cubin (not in the lock)", lambda folder: (folder / "aot/extra.cubin").touch()),
    ("MANIFEST (changed)", lambda folder: (folder / "MANIFEST").write_text("")),
]


@pytest.mark.parametrize(("named", "fault"), FAULTS, ids=[named for named, _ in FAULTS])
def test_a_file_changed_on_disk_is_found_and_repaired(
    world: World, named: str, fault: Callable[[Path], object]
) -> None:
    lock = kit.lay_out(world.order())
    fault(world.folder)
    assert named in [str(finding) for finding in sealed.findings(lock, world.folder)]
    with pytest.raises(Problem, match=r"kit: .*" + named.split(" ", maxsplit=1)[0]):
        sealed.require(lock, world.folder, "lay it out anew")
    world.make_fixtures()  # a table was changed through its link: it is made anew first
    assert named in kit.pending(world.order())
    again = kit.lay_out(world.order())
    assert sealed.findings(again, world.folder) == []
    assert kit.pending(world.order()) == []


def test_check_names_every_kind_of_fault(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    kit.lay_out(world.order())
    assert cli.main(world.words("check", "--full")) == 0
    assert json.loads(capsys.readouterr().out)["files"] == len(IN_GIT) + 5
    put_back_time(world.folder / "aot/aot.json", flip)
    (world.folder / "engram.json").unlink()
    (world.folder / "README.md").unlink()
    (world.folder / "README.md").symlink_to("/etc/hostname")
    (world.folder / "stray").touch()
    assert cli.main(world.words("check")) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    for named in (
        "aot/aot.json (",
        "engram.json (missing)",
        "README.md (no plain",
        "stray (not in MANIFEST)",
    ):
        assert named in problem["found"]


def test_a_bit_of_a_table_is_found_by_a_full_check(world: World) -> None:
    lock = kit.lay_out(world.order())
    put_back_time(world.folder / rope.TABLES[2], flip)
    assert kit.check(world.folder, lock=lock)["files"] == len(IN_GIT) + 5
    with pytest.raises(Problem, match=r"rope-compressed-cos\.f32"):
        kit.check(world.folder, lock=lock, full=True)


def test_a_manifest_line_without_a_file_stops_the_work_and_leaves_the_old_kit(world: World) -> None:
    kit.lay_out(world.order())
    without = {path: data for path, data in IN_GIT.items() if path != "engram.json"}
    commit = world.publish(without, manifest_of({**IN_GIT, **GENERATED, kit.BIAS: BIAS}))
    with pytest.raises(Problem, match=r"engram\.json \(missing\)"):
        kit.lay_out(world.order(commit))
    assert kit.pending(world.order(world.commit)) == []
    assert {path.name for path in world.folder.parent.iterdir()} == {"kit", ".kit.git", "receipts"}


def test_a_manifest_that_records_another_hash_is_named(world: World) -> None:
    files = {**IN_GIT, **GENERATED, kit.BIAS: BIAS}
    commit = world.publish(IN_GIT, manifest_of({**files, "engram.json": b"another"}))
    with pytest.raises(Problem, match=r"engram\.json \(44136fa355b3678a instead of"):
        kit.lay_out(world.order(commit))
    assert not world.folder.exists()


def test_the_bias_counts_by_its_own_receipt_where_no_hash_of_it_is_recorded(world: World) -> None:
    world.make_fixtures(bias=b"that of the newer checkpoint")
    with pytest.raises(Problem, match="gate_bias_vl"):
        kit.lay_out(world.order())
    order = world.order(unrecorded=(kit.BIAS,))
    lock = kit.lay_out(order)
    assert lock.by_path[kit.BIAS].digest == sha256(b"that of the newer checkpoint")
    assert kit.pending(order) == []
    assert kit.check(world.folder, lock=lock, unrecorded=[kit.BIAS])["files"] == len(IN_GIT) + 5
    (world.folder / kit.BIAS).write_bytes(b"that of a stranger, same size")
    with pytest.raises(Problem, match="gate_bias_vl"):
        kit.check(world.folder, lock=lock, unrecorded=[kit.BIAS])


def test_another_profile_changes_only_what_is_generated(world: World) -> None:
    kit.lay_out(world.order(unrecorded=(kit.BIAS,)))
    world.fixtures = world.root / "fixtures/dsv41-1017"
    world.make_fixtures(bias=b"another checkpoint's")
    order = world.order(unrecorded=(kit.BIAS,))
    assert kit.pending(order) == [f"{kit.BIAS} is that of another checkpoint"]
    kit.lay_out(order)
    assert (world.folder / kit.BIAS).read_bytes() == b"another checkpoint's"


def test_another_pin_lays_out_another_commit(world: World) -> None:
    kit.lay_out(world.order())
    newer = world.publish({**IN_GIT, "aot/aot.json": b'{"variants": 1}'})
    order = world.order(newer[:10])
    assert kit.pending(order) == [f"{world.folder} is commit {world.commit[:12]}, pinned is {newer[:10]}"]
    assert kit.lay_out(order).revision == newer
    assert (world.folder / "aot/aot.json").read_bytes() == b'{"variants": 1}'


def test_generated_files_come_first(world: World) -> None:
    (world.fixtures / rope.TABLES[0]).write_bytes(b"half a table")
    with pytest.raises(Problem) as fault:
        kit.lay_out(world.order())
    assert fault.value.code == "kit-generated"
    assert kit.pending(world.order()) == [f"{world.folder} was not laid out yet"]


@pytest.mark.parametrize("generated", [rope.TABLES[0], kit.BIAS])
def test_a_manifest_that_does_not_list_a_generated_file_is_refused(world: World, generated: str) -> None:
    files = {**IN_GIT, **GENERATED, kit.BIAS: BIAS}
    del files[generated]
    commit = world.publish(IN_GIT, manifest_of(files))
    with pytest.raises(Problem, match=f"no other lists {generated}"):
        kit.lay_out(world.order(commit))


def test_a_link_in_the_repository_is_refused(world: World) -> None:
    (world.repository / "kit/link").symlink_to("/etc/passwd")
    git(world.repository, "add", "-A")
    git(world.repository, "commit", "-q", "-m", "a link")
    with pytest.raises(Problem, match=r"link of the kit is a link to /etc/passwd"):
        kit.lay_out(world.order(git(world.repository, "rev-parse", "HEAD")))


H = "a" * 64


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "lists nothing"),
        ("# a comment\n", "line 1 is '# a comment'"),
        (f"{H} one-space\n", "line 1"),
        (f"{H[:-1]}  short\n", "line 1"),
        (f"{H.upper()}  upper\n", "line 1"),
        (f"{H}  b\n{H}  a\n", "line 2 a comes after b"),
        (f"{H}  a\n{H}  a\n", "line 2 a comes after a"),
        (f"{H}  /etc/passwd\n", "is absolute"),
        (f"{H}  a/../../b\n", "'..'"),
        (f"{H}  MANIFEST\n", "the list itself"),
        (f"{H}  .sparkpair-made.json\n", "kept for our own"),
        (f"{H}  a\n\n", "line 2 is ''"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_its_line(text: str, found: str) -> None:
    with pytest.raises(Problem) as fault:
        kit.parse_manifest(text, "kit/MANIFEST")
    assert found in fault.value.found
    assert "kit/MANIFEST line" in fault.value.found


def test_a_folder_that_is_no_kit_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["kit", "check", "--kit", str(tmp_path), "--lock", str(tmp_path / "none.json")]
    assert cli.main(words) == 1
    assert "no " + str(tmp_path / "MANIFEST") in capsys.readouterr().err


def test_the_lock_can_be_handed_to_another_node(world: World) -> None:
    lock = kit.lay_out(world.order())
    assert locks.parse(sealed.as_dict(lock), "of the play") == lock == locks.load(world.lock_file)
