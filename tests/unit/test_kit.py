"""The kit: every line of MANIFEST, generated files included, at each run and each start."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sparkpair import cli, kit, locks, made, rope, sealed
from sparkpair.problem import Problem

TABLE = bytes(range(256)) * 5000  # 1.28 MB: large enough to be known by its receipt
GENERATED = {name: name.encode() + TABLE for name in rope.TABLES}
BIAS = b"the routing bias of this checkpoint"
IN_GIT = {
    "README.md": b"a kit\n",
    "aot/aot.json": b"{}\n",
    "aot/cubins/5f.cubin": b"\x7fELF" + bytes(3000),
    "engram.json": b"{}",
    "rope.json": b"{}",
    "tools/verify_kit.sh": b"#!/bin/sh\n",
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_of(files: dict[str, bytes]) -> bytes:
    return "".join(f"{sha256(files[path])}  {path}\n" for path in sorted(files)).encode()


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(folder), *words],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


class World:
    """A kit repository, a fixtures folder and the place where the kit goes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repository = root / "repository"
        self.fixtures = root / "fixtures/dsv41"
        self.folder = root / "state/kit"
        self.lock_file = root / "state/receipts/kit.json"
        self.repository.mkdir()
        git(self.repository, "init", "-q", "-b", "main")
        self.commit = self.publish(IN_GIT)
        self.make_fixtures()

    def publish(self, in_git: dict[str, bytes], manifest: bytes | None = None) -> str:
        shutil.rmtree(self.repository / "kit", ignore_errors=True)
        everything = {**in_git, **GENERATED, kit.BIAS: BIAS}
        for path, data in {**in_git, "MANIFEST": manifest or manifest_of(everything)}.items():
            (self.repository / "kit" / path).parent.mkdir(parents=True, exist_ok=True)
            (self.repository / "kit" / path).write_bytes(data)
        (self.repository / "README.md").write_text("the recipe around the kit")
        git(self.repository, "add", "-A")
        git(self.repository, "commit", "-q", "--allow-empty", "-m", "a kit")
        return git(self.repository, "rev-parse", "HEAD")

    def make_fixtures(self, bias: bytes = BIAS) -> None:
        self.fixtures.mkdir(parents=True, exist_ok=True)
        for name, data in GENERATED.items():
            (self.fixtures / name).write_bytes(data)
        (self.fixtures / "gate_bias_vl.safetensors").write_bytes(bias)
        made.record(self.fixtures, "rope", "x", {name: sha256(data) for name, data in GENERATED.items()})
        note = "gate_bias_vl.safetensors"
        made.record(self.fixtures, note, "x", {note: sha256(bias)})

    def order(self, commit: str = "", unrecorded: tuple[str, ...] = ()) -> kit.Order:
        return kit.Order(
            folder=self.folder,
            repository=str(self.repository),
            commit=commit or self.commit,
            branch="main",
            subfolder="kit",
            fixtures=self.fixtures,
            unrecorded=frozenset(unrecorded),
            lock_file=self.lock_file,
        )

    def words(self, action: str, *more: str) -> list[str]:
        words = ["kit", action, "--kit", str(self.folder), "--lock", str(self.lock_file)]
        if action == "fetch":
            words += [
                "--repository",
                str(self.repository),
                "--branch",
                "main",
                "--fixtures",
                str(self.fixtures),
            ]
        return [*words, *more, "--json"]


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


def put_back_time(path: Path, change: Callable[[bytearray], None]) -> None:
    """Edit a file in place, as a stealthy fault would: same size, same time, same inode."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    change(data)
    with path.open("r+b") as handle:
        handle.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(data: bytearray) -> None:
    data[-1] ^= 1


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
