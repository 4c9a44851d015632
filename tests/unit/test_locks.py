"""Locks are read strictly: they decide which bytes are trusted and where they are written."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparkpair import locks
from sparkpair.locks import Lock, LockedFile
from sparkpair.problem import Problem

SHIPPED = Path(__file__).parents[2] / "files" / "locks"
COMMIT = "64ba41b6c916a587db06eae2e19b7845f7be6e6b"
SHA256, BLOB = "a" * 64, "b" * 40


def good() -> dict[str, Any]:
    return {
        "repo": "owner/name",
        "revision": COMMIT,
        "files": [
            {"path": "model-00001-of-00001.safetensors", "size": 7, "sha256": SHA256},
            {"path": "config.json", "size": 2, "git_blob_sha1": BLOB},
        ],
    }


def refused(data: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        locks.parse(data, "x.json")
    assert caught.value.code == "lock-bad"
    assert "x.json" in caught.value.found
    return caught.value


def test_a_lock_is_sorted_by_path_and_adds_up() -> None:
    lock = locks.parse(good(), "x.json")
    assert [entry.path for entry in lock.files] == ["config.json", "model-00001-of-00001.safetensors"]
    assert lock.total_bytes == 9
    assert [entry.algorithm for entry in lock.files] == ["git_blob_sha1", "sha256"]


Edit = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        pytest.param(lambda lock: lock.update(note="hi"), "'note'", id="unknown key"),
        pytest.param(lambda lock: lock["files"][0].update(md5="0"), "'md5'", id="unknown key of a file"),
        pytest.param(lambda lock: lock.pop("revision"), "'revision'", id="no revision"),
        pytest.param(lambda lock: lock["files"][0].pop("size"), "'size'", id="no size"),
        pytest.param(lambda lock: lock.update(revision=COMMIT[:8]), COMMIT[:8], id="abbreviated commit"),
        pytest.param(lambda lock: lock.update(revision=COMMIT.upper()), "revision", id="upper case commit"),
        pytest.param(lambda lock: lock.update(revision="main"), "main", id="branch"),
        pytest.param(lambda lock: lock.update(repo="../../etc"), "repo", id="repo climbs"),
        pytest.param(
            lambda lock: lock.update(repo="https://huggingface.co/a/b"), "repo", id="repo is an address"
        ),
        pytest.param(lambda lock: lock.update(gated="yes"), "gated", id="gated is a word"),
        pytest.param(lambda lock: lock.update(files=[]), "no files", id="empty"),
        pytest.param(lambda lock: lock.update(files={}), "no files", id="files is an object"),
        pytest.param(lambda lock: lock["files"].append("config.json"), "files[2]", id="file is a string"),
        pytest.param(lambda lock: lock["files"].append(lock["files"][0]), "twice", id="duplicate path"),
        pytest.param(lambda lock: lock["files"][0].update(sha256=SHA256[:-1]), "64 hex", id="short sha256"),
        pytest.param(lambda lock: lock["files"][0].update(sha256=SHA256 + "a"), "64 hex", id="long sha256"),
        pytest.param(
            lambda lock: lock["files"][0].update(sha256="g" * 64), "64 hex", id="sha256 of other letters"
        ),
        pytest.param(
            lambda lock: lock["files"][0].update(sha256=SHA256 + "\n"), "64 hex", id="sha256 and newline"
        ),
        pytest.param(lambda lock: lock["files"][0].update(sha256=None), "64 hex", id="sha256 is null"),
        pytest.param(
            lambda lock: lock["files"][1].update(git_blob_sha1=BLOB[1:]), "40 hex", id="short blob id"
        ),
        pytest.param(lambda lock: lock["files"][0].update(git_blob_sha1=BLOB), "both", id="both hashes"),
        pytest.param(lambda lock: lock["files"][0].pop("sha256"), "no hash", id="no hash"),
        pytest.param(lambda lock: lock["files"][0].update(sha256=None), "sha256 null", id="null"),
        pytest.param(lambda lock: lock["files"][1].update(sha256=None), "sha256 null", id="null and a hash"),
        pytest.param(lambda lock: lock["files"][0].update(size=-1), "-1", id="negative size"),
        pytest.param(lambda lock: lock["files"][0].update(size=True), "True", id="size is a boolean"),
        pytest.param(lambda lock: lock["files"][0].update(size=1.5), "1.5", id="size is a fraction"),
        pytest.param(lambda lock: lock["files"][0].update(size="7"), "'7'", id="size is text"),
        pytest.param(lambda lock: lock["files"][0].update(size=2**60), "size", id="size beyond any disk"),
        pytest.param(
            lambda lock: lock["files"].append({"path": "config.json/x", "size": 1, "sha256": SHA256}),
            "folder",
            id="a file that is a folder too",
        ),
    ],
)
def test_a_lock_edited_by_hand_is_refused_and_the_fault_named(edit: Edit, named: str) -> None:
    data = copy.deepcopy(good())
    edit(data)
    problem = refused(data)
    assert named in f"{problem.found} {problem.needed}"


@pytest.mark.parametrize(
    "path",
    [
        "../config.json",
        "a/../../b",
        "/etc/passwd",
        "a\\b",
        "",
        ".",
        "a//b",
        "a/./b",
        "a/",
        "line\nbreak",
        "nul\0byte",
        "\ud800",
        "x" * 256,
        "a/" * 600 + "b",
        ".sparkpair-receipts.json",
        "a/.sparkpair-partial/b",
        7,
        None,
    ],
)
def test_a_path_that_leaves_the_folder_or_fits_no_filesystem_is_refused(path: Any) -> None:
    data = good()
    data["files"][0]["path"] = path
    refused(data)


@pytest.mark.parametrize(
    "path", ["config.json", "a/b/c.bin", ".gitattributes", "x..y", "ünïcode.json", "x" * 255]
)
def test_a_path_inside_the_folder_is_taken(path: str) -> None:
    assert locks.path_fault(path) is None


@given(st.text(max_size=40))
def test_no_path_that_is_taken_leaves_the_folder(path: str) -> None:
    if locks.path_fault(path) is None:
        inside = Path("/srv/weights")
        assert (inside / path).resolve().is_relative_to(inside)
        assert (inside / path).resolve() != inside


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["repo", "revision", "files", "path", "size", "sha256"]), inner, max_size=6
            )
        ),
        max_leaves=12,
    )
)
def test_any_other_json_is_refused_in_words(data: Any) -> None:
    refused(data)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"size": ' + "7" * 5000 + "}", "number that can't be read"),
        ("[" * 100_000, "nested"),
        ('{"repo": "a/b", "repo": "a/c"}', "twice"),
        ("[]", "list"),
    ],
)
def test_a_file_that_is_no_lock_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(Problem) as caught:
        locks.load(path)
    assert named in caught.value.found


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(Problem, match="UTF-8"):
        locks.load(path)


def test_a_missing_lock_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(Problem) as caught:
        locks.load(tmp_path / "x.json")
    assert caught.value.code == "lock-missing"
    assert "sparkpair lock" in caught.value.do


def test_dumping_and_parsing_is_stable(tmp_path: Path) -> None:
    lock = locks.parse({**good(), "gated": True}, "x")
    text = locks.dump(lock)
    assert text.endswith("}\n")
    (tmp_path / "x.json").write_text(text)
    assert locks.load(tmp_path / "x.json") == lock
    assert locks.dump(locks.load(tmp_path / "x.json")) == text


def test_a_subset_holds_what_matches_and_never_nothing() -> None:
    lock = locks.parse(good(), "x")
    assert [entry.path for entry in lock.subset(["*.json"]).files] == ["config.json"]
    with pytest.raises(Problem) as caught:
        lock.subset(["*.gguf"])
    assert caught.value.code == "lock-empty"
    assert "*.gguf" in caught.value.found


def test_the_difference_goes_file_by_file() -> None:
    old = Lock(
        "a/b", "1" * 40, (LockedFile("a", 1, SHA256), LockedFile("b", 2, SHA256), LockedFile("c", 3, SHA256))
    )
    new = Lock(
        "a/b", "2" * 40, (LockedFile("b", 2, SHA256), LockedFile("c", 4, SHA256), LockedFile("d", 5, SHA256))
    )
    changes = locks.difference(old, new)
    assert [(change.path, str(change).split()[0]) for change in changes] == [
        ("a", "removed"),
        ("c", "changed"),
        ("d", "added"),
    ]
    lines = locks.describe_difference(old, new)
    assert lines[0].split()[0] == "commit"
    assert lines[0].endswith("2" * 40)
    assert "3 bytes" in lines[2]
    assert "4 bytes" in lines[2]
    assert locks.describe_difference(new, new) == []


def index(*shards: str) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": {f"tensor.{number}": shard for number, shard in enumerate(shards)}}


def test_every_shard_of_an_index_must_be_in_the_lock_and_the_other_way_round() -> None:
    lock = Lock("a/b", COMMIT, tuple(LockedFile(f"model-{n}.safetensors", 1, SHA256) for n in (1, 2)))
    locks.check_index(
        lock, "model.safetensors.index.json", index("model-1.safetensors", "model-2.safetensors")
    )
    for shards, missing in (
        (["model-1.safetensors"], "model-2.safetensors"),
        (["model-1.safetensors", "model-2.safetensors", "model-3.safetensors"], "model-3.safetensors"),
    ):
        with pytest.raises(Problem) as caught:
            locks.check_index(lock, "model.safetensors.index.json", index(*shards))
        assert caught.value.code == "index-differs"
        assert missing in caught.value.found


@pytest.mark.parametrize("broken", [None, [], {}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_of_another_form_is_refused(broken: Any) -> None:
    lock = Lock("a/b", COMMIT, (LockedFile("model-1.safetensors", 1, SHA256),))
    with pytest.raises(Problem) as caught:
        locks.check_index(lock, "model.safetensors.index.json", broken)
    assert caught.value.code == "index-bad"


@pytest.mark.parametrize(
    ("name", "files", "total", "revision"),
    [
        ("dsv41-checkpoint", 45, 210_677_479_847, "64ba41b6c916a587db06eae2e19b7845f7be6e6b"),
        ("dsv41-engram", 2, 203_073_077_576, "dba1be0a40aa45a94ad051997016db3960a90277"),
        ("keys-overlay", 1, 682_275_992, "87bb9850e6f49fd20ad9c8516b7817215cbbf5fc"),
    ],
)
def test_the_shipped_locks_hold_the_recorded_values(name: str, files: int, total: int, revision: str) -> None:
    path = SHIPPED / f"{name}.json"
    lock = locks.load(path)
    assert (len(lock.files), lock.total_bytes, lock.revision) == (files, total, revision)
    assert path.read_text() == locks.dump(lock)


def test_the_39_shards_of_the_shipped_checkpoint_add_up_to_the_recorded_total() -> None:
    lock = locks.load(SHIPPED / "dsv41-checkpoint.json").subset(["model-000*-of-00039.safetensors"])
    assert len(lock.files) == 39
    assert lock.total_bytes == 210_600_939_078
    assert all(entry.sha256 for entry in lock.files)


def test_only_the_overlay_is_gated() -> None:
    gated = {path.stem for path in SHIPPED.glob("*.json") if json.loads(path.read_text()).get("gated")}
    assert gated == {"keys-overlay"}


def test_an_object_of_very_many_keys_is_read_in_no_time(tmp_path: Path) -> None:
    """60,000 keys took 52 s, as each was counted among all."""
    path = tmp_path / "lock.json"
    keys = [f'"key{number}": 1' for number in range(200_000)]
    path.write_text("{" + ", ".join(keys) + "}")
    begun = time.monotonic()
    with pytest.raises(Problem, match="has the unknown key"):
        locks.load(path)
    assert time.monotonic() - begun < 20  # seconds even on a busy machine; a count of each takes minutes
    path.write_text("{" + ", ".join([*keys, keys[0]]) + "}")
    with pytest.raises(Problem, match="'key0' is there twice"):
        locks.load(path)
