"""The image's key and identity: field reports 29, 36 and 75."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker_stub import Stub
from sparkpair import disk, image
from sparkpair.problem import Problem

PROJECT = Path(__file__).resolve().parents[2]
ENGINE = PROJECT / "files/engine"
CAPTURES = PROJECT / "tests/captures/image"
DIGEST = "sha256:2140e699b3beaf7f96a0081fd9c9406bc3832b435cdb60dfa2d261f7d2f34a1c"
PINS: dict[str, Any] = {
    "base": f"nvcr.io/nvidia/pytorch:26.07-py3@{DIGEST}",
    "repository": "https://github.com/bertholomus/TensorFold",
    "commit": "59402086381a42c74d53053443224eec2790b4c5",
}


def pins(**changes: str) -> image.Pins:
    return image.Pins(**{**PINS, **changes})


def inspected(store: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CAPTURES / f"inspect-{store}.json").read_text())[0]
    return found


# The key (field report 75)


def test_touching_files_and_listing_them_in_another_order_is_the_same_image(tmp_path: Path) -> None:
    for name in reversed(image.INPUTS):
        (tmp_path / name).write_bytes((ENGINE / name).read_bytes())
        os.utime(tmp_path / name, (1, 1))
    copied = image.read_inputs(tmp_path)
    turned = dict(reversed(copied.items()))
    key = image.content_key(image.read_inputs(ENGINE), pins())
    assert image.content_key(copied, pins()) == image.content_key(turned, pins()) == key
    assert len(key) == 12 and int(key, 16) >= 0


@pytest.mark.parametrize("name", image.INPUTS)
def test_one_byte_of_any_input_is_another_image(name: str) -> None:
    inputs = image.read_inputs(ENGINE)
    changed = {**inputs, name: inputs[name][:-1] + bytes([inputs[name][-1] ^ 1])}
    assert image.content_key(changed, pins()) != image.content_key(inputs, pins())


@pytest.mark.parametrize(
    "change",
    [
        {"base": "nvcr.io/nvidia/pytorch:26.07-py3"},
        {"commit": "4e80f05ecba89a4e90d16375ade2eddbdc0a10c4"},
        {"tree": "5f302b6a3bbdc01b16deea0c920cf18008833ee3"},
        {"zig": "0.17.1"},
        {"sm": "120,121"},
        {"platform": "linux/amd64"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_pin_is_part_of_the_key(change: dict[str, str]) -> None:
    inputs = image.read_inputs(ENGINE)
    assert image.content_key(inputs, pins(**change)) != image.content_key(inputs, pins())


def test_a_mirror_of_the_source_gives_the_same_image() -> None:
    inputs = image.read_inputs(ENGINE)
    mirror = pins(repository="https://git.example.org/mirror/TensorFold.git", branch="main")
    assert image.content_key(inputs, mirror) == image.content_key(inputs, pins())


def test_an_input_moved_from_one_file_to_another_is_another_image() -> None:
    inputs = {**image.read_inputs(ENGINE), "enter.sh": b"a", "zig.lock": b"bc"}
    moved = {**inputs, "enter.sh": b"ab", "zig.lock": b"c"}
    assert image.content_key(inputs, pins()) != image.content_key(moved, pins())


def test_the_tag_holds_the_key_and_nothing_else_is_taken_for_ours() -> None:
    tag = image.tag_for("0123456789ab")
    assert tag == "tensorfold-dsv41:exl3-tp2-0123456789ab"
    assert image.key_of_tag(tag) == "0123456789ab"
    for other in (
        "tensorfold-dsv41:latest",
        f"{tag}0",
        f"{tag}\n",
        "nvcr.io/nvidia/pytorch:26.07-py3",
        f"-{tag}",
    ):
        with pytest.raises(Problem) as caught:
            image.key_of_tag(other)
        assert caught.value.code == "image-name"


def test_the_engines_own_key_is_its_commit_in_short() -> None:
    assert pins().engine_key == "59402086381a"
    assert pins(commit="5940208").engine_key == "5940208"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"commit": "main"}, "engine_commit"),
        ({"commit": "59402"}, "engine_commit"),
        ({"commit": "59402086381A"}, "engine_commit"),
        ({"repository": "--upload-pack=touch /x"}, "engine_repository"),
        ({"repository": "ext::sh -c x"}, "engine_repository"),
        ({"base": ""}, "base_image"),
        ({"base": "--privileged"}, "base_image"),
        ({"branch": "-x"}, "engine_branch"),
        ({"tree": "5f302b"}, "engine_tree"),
        ({"zig": "latest"}, "image_zig"),
        ({"sm": "all"}, "image_sm"),
        ({"platform": "linux/riscv64"}, "platform"),
    ],
)
def test_a_malformed_pin_is_named_before_anything_is_done(change: dict[str, str], named: str) -> None:
    with pytest.raises(Problem) as caught:
        pins(**change)
    assert named in caught.value.found


def test_a_password_in_the_repositorys_address_is_not_shown() -> None:
    with pytest.raises(Problem) as caught:
        pins(repository="https://user:canary@host/x y")
    assert "canary" not in str(caught.value)
    assert image.redacted("https://user:canary@host/x.git") == "https://host/x.git"


def test_a_folder_without_an_input_is_refused_and_strays_beside_them_do_not_count(tmp_path: Path) -> None:
    for name in image.INPUTS:
        (tmp_path / name).write_bytes((ENGINE / name).read_bytes())
    (tmp_path / "Dockerfile~").write_text("an editor's copy")
    assert image.read_inputs(tmp_path) == image.read_inputs(ENGINE)
    (tmp_path / "zig.lock").unlink()
    with pytest.raises(Problem, match=r"zig\.lock"):
        image.read_inputs(tmp_path)


def test_the_role_and_the_library_name_the_same_inputs() -> None:
    defaults = yaml.safe_load((PROJECT / "roles/image/defaults/main.yml").read_text())
    assert tuple(defaults["image_inputs"]) == image.INPUTS
    assert {path.name for path in ENGINE.iterdir() if path.is_file()} == set(image.INPUTS)


# The identity (field report 29). The captures are one image in three stores: overlay2 and vfs of Docker
# 20.10, and the containerd store of Docker 26.1, sent from the first by save and load.


@pytest.mark.parametrize("store", ["vfs", "containerd"])
def test_one_image_in_two_stores_is_equal_although_its_ids_differ(store: str) -> None:
    one, other = inspected("overlay2"), inspected(store)
    assert image.identity(one) == image.identity(other)
    assert image.explain_difference(image.content(one), image.content(other)) == ""
    if store == "containerd":
        assert one["Id"] != other["Id"]


def newer_shape(found: dict[str, Any]) -> dict[str, Any]:
    """The same as a Docker 29 tells it: settings that are empty are left out."""
    config = {name: value for name, value in found["Config"].items() if value}
    return {**found, "Config": config, "Size": 1, "GraphDriver": None}


def test_settings_left_out_are_settings_left_empty() -> None:
    assert image.identity(newer_shape(inspected("overlay2"))) == image.identity(inspected("overlay2"))


def test_the_only_variant_of_arm64_may_be_said_or_not() -> None:
    one = {**inspected("overlay2"), "Architecture": "arm64"}
    assert image.identity(one) == image.identity({**one, "Variant": "v8"})
    assert image.identity(one) != image.identity({**one, "Variant": "v9"})


def changed(path: list[str | int], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(inspected("overlay2"))
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return found


OTHER = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            changed(["RootFS", "Layers", 1], OTHER),
            "layer 2 of 2: sha256:da7c397e796c and sha256:000000000000",
        ),
        (changed(["RootFS", "Layers"], [OTHER]), "layer 1 of 2"),
        (changed(["Architecture"], "arm64"), "platform linux/amd64 and linux/arm64"),
        (changed(["Config", "User"], "nobody"), 'User: nothing and "nobody"'),
        (
            changed(["Config", "Entrypoint"], ["/bin/sh"]),
            'Entrypoint: ["/opt/tensorfold/enter.sh"] and ["/bin/sh"]',
        ),
        (
            changed(["Config", "Labels", "sparkpair.key"], "x"),
            'Labels: {"sparkpair.key": "26938eec8cbf"} and',
        ),
        (changed(["Config", "WorkingDir"], "/x"), "WorkingDir"),
        (changed(["Config", "ExposedPorts"], {"80/tcp": {}}), "ExposedPorts"),
        (changed(["Config", "Cmd"], ["x"]), "Cmd"),
    ],
)
def test_a_difference_is_found_and_named(other: dict[str, Any], said: str) -> None:
    one = inspected("overlay2")
    assert image.identity(one) != image.identity(other)
    assert said in image.explain_difference(image.content(one), image.content(other))


def test_an_environment_shows_only_the_entry_that_differs() -> None:
    one = inspected("overlay2")
    other = changed(["Config", "Env"], [*one["Config"]["Env"], "X=1"])
    assert image.explain_difference(image.content(one), image.content(other)) == 'Env: "nothing" and ["X=1"]'
    turned = changed(["Config", "Env"], one["Config"]["Env"][::-1])
    assert "CUDA_VERSION" in image.explain_difference(image.content(one), image.content(turned))


def test_fewer_layers_of_the_same_kind_are_told_by_their_number() -> None:
    one = inspected("overlay2")
    short = changed(["RootFS", "Layers"], one["RootFS"]["Layers"][:1])
    assert image.explain_difference(image.content(one), image.content(short)) == "2 and 1 layers"


# Room (field report 36)


def test_needs_on_one_filesystem_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 40_000_000_000)
    root, cache = tmp_path / "docker", tmp_path / "cache"
    image.require_room([image.Need(root, 39_000_000_000, "the image")])
    image.require_room([image.Need(cache, 2_000_000_000, "the context")])
    with pytest.raises(Problem) as caught:
        image.require_room(
            [image.Need(root, 39_000_000_000, "the image"), image.Need(cache, 2_000_000_000, "the context")]
        )
    problem = caught.value
    assert problem.code == "disk-full"
    assert "40.0 GB free" in problem.found
    assert "41.0 GB: 39.0 GB for the image" in problem.needed and str(cache) in problem.needed
    assert "free 1.0 GB" in problem.do


def test_needs_on_two_filesystems_are_judged_each_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 3 if path == Path("/proc") else 40)
    needs = [image.Need(tmp_path, 39, "a"), image.Need(Path("/proc"), 2, "b")]
    image.require_room(needs)
    with pytest.raises(Problem, match="/proc"):
        image.require_room([needs[0], image.Need(Path("/proc"), 4, "b")])


def test_packed_and_unpacked_layers_of_the_containerd_store_both_take_room(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "bin")
    found = inspected("containerd")
    stub.play({"words": "image ls", "out": f"sha256:other 9GB\n{found['Id']} 453MB\n"})
    assert image.disk_bytes(stub.docker, found) == 453_000_000
    stub.play({"words": "image ls", "out": "sha256:other 9GB\n"})
    assert image.disk_bytes(stub.docker, found) == found["Size"] == 217_398_040


def test_docker_s_sizes_are_decimal() -> None:
    assert image.size_of("25.4GB") == 25_400_000_000
    assert [image.size_of(words) for words in ("0B", "1.5kB", "N/A", "")] == [0, 1500, 0, 0]


def test_only_tags_of_ours_are_ever_superseded() -> None:
    keep = image.tag_for("0" * 12)
    images = [{"tag": keep}, {"tag": image.tag_for("1" * 12)}]
    assert image.superseded(images, keep) == [image.tag_for("1" * 12)]
    with pytest.raises(Problem):
        image.superseded(images, "nvcr.io/nvidia/pytorch:26.07-py3")
