"""Shipping, listing and pruning: by content, whole or not at all (field reports 29, 30, 36)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sparkpair_image
from ansible.module_utils.sparkpair.problem import Problem as AnsibleProblem
from docker_stub import Stub
from sparkpair import agent, cli, disk, image, imageship
from sparkpair.dockercli import Docker
from sparkpair.problem import Problem

PROJECT = Path(__file__).resolve().parents[2]
TAG = image.tag_for("26938eec8cbf")
OLD = image.tag_for("e478025526b6")
NONE = "Error: No such image: x"
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"


def rule(words: str, **more: object) -> dict[str, object]:
    return {"words": words, **more}


def captured(store: str = "overlay2", **more: Any) -> str:
    found = json.loads((PROJECT / f"tests/captures/image/inspect-{store}.json").read_text())[0]
    return json.dumps([{**found, **more}])


def other_content() -> str:
    found = json.loads(captured())[0]
    found["RootFS"]["Layers"][1] = "sha256:" + "0" * 64
    found["Id"] = "sha256:other"
    return json.dumps([found])


def info(folder: Path) -> dict[str, object]:
    return rule(
        "^info",
        out=json.dumps({"DockerRootDir": str(folder), "Driver": "overlay2", "ServerVersion": "20.10"}),
    )


@pytest.fixture
def head(tmp_path: Path) -> Stub:
    stub = Stub(tmp_path / "head")
    stub.play(
        info(tmp_path),
        rule("inspect", out=captured()),
        rule("^save", out="an archive"),
        rule("version", code=1),
    )
    return stub


@pytest.fixture
def worker(tmp_path: Path) -> Stub:
    return Stub(tmp_path / "worker")


@pytest.fixture
def reach(worker: Stub) -> imageship.Reach:
    """The worker's agent as sshd runs it, with the stand-in docker first on its PATH."""

    def command(words: Sequence[str]) -> list[str]:
        return [
            *("env", f"PATH={worker.folder}:{os.environ['PATH']}", f"SSH_ORIGINAL_COMMAND={' '.join(words)}"),
            *(sys.executable, "-c", "import sys; from sparkpair import cli; sys.exit(cli.main(['agent']))"),
        ]

    return command


def test_field_report_29_an_equal_image_with_another_id_is_not_sent(
    head: Stub, worker: Stub, reach: imageship.Reach, tmp_path: Path
) -> None:
    worker.play(info(tmp_path), rule("inspect", out=captured("containerd")))
    result = imageship.ship(head.docker, TAG, "spark-b", reach, quiet=True)
    assert result["changed"] is False and result["bytes"] == 0
    assert not any(line.startswith("save") for line in head.log)


def test_the_workers_docker_down_while_shipping_is_told_with_the_workers_name(
    head: Stub, worker: Stub, reach: imageship.Reach
) -> None:
    worker.play(rule("", err=DOWN, code=1))
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, TAG, "spark-b", reach, quiet=True)
    assert (caught.value.code, caught.value.host) == ("docker-down", "spark-b")
    assert "systemctl enable --now docker" in caught.value.do


def test_the_heads_docker_down_is_told_without_asking_the_worker(
    head: Stub, worker: Stub, reach: imageship.Reach
) -> None:
    head.play(rule("", err=DOWN, code=1))
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, TAG, "spark-b", reach, quiet=True)
    assert (caught.value.code, caught.value.host) == ("docker-down", None)
    assert worker.log == []


def test_room_on_the_worker_is_asked_before_the_first_byte(
    head: Stub, worker: Stub, reach: imageship.Reach, tmp_path: Path
) -> None:
    head.play(info(tmp_path), rule("inspect", out=captured(Size=10**18)), rule("version", code=1))
    worker.play(info(tmp_path), rule("inspect", err=NONE, code=1))
    probed = imageship._ask(reach(["image-probe", TAG]), "spark-b")
    assert probed["present"] is False and probed["free_bytes"] > 0
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, TAG, "spark-b", reach, quiet=True)
    assert caught.value.code == "disk-full"
    assert not any(line.startswith("save") for line in head.log)


def test_room_that_only_the_worker_lacks_names_the_worker(
    head: Stub, worker: Stub, reach: imageship.Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 10**19)
    head.play(info(tmp_path), rule("inspect", out=captured(Size=10**18)), rule("version", code=1))
    worker.play(info(tmp_path), rule("inspect", err=NONE, code=1))
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, TAG, "spark-b", reach, quiet=True)
    assert (caught.value.code, caught.value.host) == ("disk-full", "spark-b")


def test_an_archive_that_the_worker_can_not_load_is_told_in_the_workers_words(
    head: Stub, worker: Stub, reach: imageship.Reach, tmp_path: Path
) -> None:
    full = "Error processing tar file(exit status 1): write /x: no space left on device"
    worker.play(
        info(tmp_path), rule("inspect", err=NONE, code=1), rule("^load", reads=True, err=full, code=1)
    )
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, TAG, "spark-b", reach, quiet=True)
    assert (caught.value.code, caught.value.host) == ("disk-full", "spark-b")
    assert (worker.folder / "read").read_bytes() == b"an archive"


def test_a_save_that_breaks_off_is_the_heads_fault(
    head: Stub, worker: Stub, reach: imageship.Reach, tmp_path: Path
) -> None:
    head.play(
        info(tmp_path),
        rule("inspect", out=captured()),
        rule("version", code=1),
        rule("^save", out="half", err="write /x: no space left on device", code=1),
    )
    worker.play(
        info(tmp_path), rule("inspect", err=NONE, code=1), rule("^load", reads=True, err="EOF", code=1)
    )
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, TAG, "spark-b", reach, quiet=True)
    assert (caught.value.code, caught.value.host) == ("disk-full", None)


def test_field_report_30_one_platform_is_saved_where_docker_can(
    head: Stub, worker: Stub, reach: imageship.Reach, tmp_path: Path
) -> None:
    api = {"ApiVersion": "1.48"}
    head.play(
        info(tmp_path),
        rule("inspect", out=captured()),
        rule("version", out=json.dumps({"Client": api, "Server": api})),
        rule("^save", out="x"),
    )
    worker.play(
        info(tmp_path),
        rule("inspect", err=NONE, code=1),
        rule("^load", reads=True, err="blob sha256:bb does not exist", code=1),
    )
    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, TAG, "spark-b", reach, quiet=True)
    assert head.log[-1] == f"save --platform linux/amd64 {TAG}"
    assert caught.value.code == "image-incomplete" and caught.value.host == "spark-b"


def test_a_peer_that_gives_no_answer_is_told_by_what_ssh_said(head: Stub) -> None:
    def silent(words: Sequence[str]) -> list[str]:
        return ["sh", "-c", "echo 'ssh: connect to host 10.20.0.2 port 22: No route to host' >&2; exit 255"]

    with pytest.raises(Problem) as caught:
        imageship.ship(head.docker, TAG, "spark-b", silent, quiet=True)
    assert caught.value.code == "peer-unreachable" and "No route to host" in caught.value.found


def test_a_peer_whose_sshd_is_down_is_told_as_unreachable_by_the_link() -> None:
    with (
        pytest.raises(Problem) as caught,
        imageship.reached(imageship.Peer("sparkpair", "127.0.0.1", port=9)),
    ):
        raise AssertionError("nothing listens there")
    assert caught.value.code == "link-unreachable" and "127.0.0.1" in caught.value.found


def test_field_report_2_an_address_off_the_link_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    for folder in ("sys/class/net", "sys/class/infiniband"):
        (tmp_path / folder).mkdir(parents=True)
    off = imageship.Peer("sparkpair", "192.0.2.7", node_root=tmp_path)
    with pytest.raises(Problem) as caught, imageship.reached(off):
        raise AssertionError("no RDMA device is on the way")
    assert caught.value.code == "link-unreachable"


# On the peer


def load(worker: Stub, expected: str) -> dict[str, Any]:
    with Path(os.devnull).open("rb") as nothing:
        return imageship.load(worker.docker, TAG, expected, nothing)


def test_an_archive_with_other_content_than_announced_is_removed_again(worker: Stub) -> None:
    worker.play(
        rule("inspect", out=captured()),
        rule("^load", out=f"Loaded image: {TAG}\nLoaded image: stranger:1\n"),
        rule("image rm"),
    )
    with pytest.raises(Problem) as caught:
        load(worker, "0" * 64)
    assert caught.value.code == "image-content" and "stranger:1" in caught.value.found
    assert "image rm stranger:1" in worker.log


def test_what_the_tag_named_before_it_names_again_after_a_load_that_brought_other_content(
    worker: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = iter([json.loads(captured())[0], json.loads(other_content())[0]])
    monkeypatch.setattr(Docker, "inspect", lambda self, tag: next(shown))
    worker.play(rule("^load", out=f"Loaded image: {TAG}\n"), rule("image (rm|tag)"))
    with pytest.raises(Problem):
        load(worker, "0" * 64)
    before = json.loads(captured())[0]["Id"]
    assert worker.log == ["load", f"image rm {TAG}", f"image tag {before} {TAG}"]


def test_a_load_that_replaces_an_image_leaves_no_nameless_one(
    worker: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = json.loads(captured())[0]
    shown = iter([json.loads(other_content())[0], new])
    monkeypatch.setattr(Docker, "inspect", lambda self, tag: next(shown))
    worker.play(rule("^load", out=f"Loaded image: {TAG}\n"), rule("image rm"))
    assert load(worker, image.identity(new))["changed"] is True
    assert worker.log == ["load", "image rm sha256:other"]


@pytest.mark.parametrize(
    "words", [["image-load", "foo:bar", "x"], ["image-load", TAG], ["image-probe"], ["image-probe", "--help"]]
)
def test_the_agents_verbs_take_only_our_tags_and_their_own_words(
    words: list[str], capsys: pytest.CaptureFixture[str], worker: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.play(rule("^info", out="{}"))
    monkeypatch.setenv("PATH", f"{worker.folder}:{os.environ['PATH']}")
    assert agent.serve(" ".join(words)) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and told["problems"][0]["code"] in {"image-name", "agent-words"}
    assert set(worker.log) <= {"info --format {{json .}}"}


# Ours, and only ours


def listing() -> list[dict[str, object]]:
    tags = [TAG.split(":")[1], OLD.split(":")[1], "exl3-tp2-0123456789ab"]
    rows = "".join(json.dumps({"Repository": "tensorfold-dsv41", "Tag": tag}) + "\n" for tag in tags)
    older = json.loads(captured())[0]
    older["Config"]["Labels"]["sparkpair.key"] = "e478025526b6"
    older["Created"] = "2026-01-01T00:00:00Z"
    return [
        rule("image ls", out=rows),
        rule(f"inspect {TAG}", out=captured()),
        rule(f"inspect {OLD}", out=json.dumps([older])),
        rule("inspect .*0123456789ab", out=captured()),  # our name, another image's label
    ]


def test_the_list_holds_images_of_ours_newest_first(head: Stub) -> None:
    head.play(*listing())
    assert [row["tag"] for row in image.ours(head.docker)] == [TAG, OLD]


def test_pruning_removes_superseded_images_of_ours_and_nothing_else(head: Stub) -> None:
    head.play(*listing(), rule("image rm"))
    result = image.prune(head.docker, TAG)
    assert result["removed"] == [OLD] and result["bytes"] > 0
    assert [line for line in head.log if line.startswith("image rm")] == [f"image rm {OLD}"]


def test_an_image_that_a_container_uses_is_kept_and_said(head: Stub) -> None:
    used = "conflict: unable to remove - image is being used by running container 4c01"
    head.play(*listing(), rule("image rm", err=used, code=1))
    result = image.prune(head.docker, TAG)
    assert result["removed"] == [] and "4c01" in result["kept"][OLD]


def test_without_yes_pruning_only_says_what_it_would_do(
    head: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head.play(*listing())
    monkeypatch.setenv("PATH", f"{head.folder}:{os.environ['PATH']}")
    assert cli.main(["image", "prune", "--keep", TAG, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"ok": True, "changed": False, "would_remove": [OLD]}
    assert cli.main(["image", "list", "--json"]) == 0
    assert [row["tag"] for row in json.loads(capsys.readouterr().out)["images"]] == [TAG, OLD]


# The module


@pytest.fixture
def asked(tmp_path: Path, head: Stub, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run the module's work with the stand-in docker on PATH."""
    monkeypatch.setenv("PATH", f"{head.folder}:{os.environ['PATH']}")
    inputs = {name: data.decode() for name, data in image.read_inputs(PROJECT / "files/engine").items()}

    def ask(check_mode: bool = False, **more: Any) -> dict[str, Any]:
        params = {
            "inputs": inputs,
            "base": "nvcr.io/nvidia/pytorch:26.07-py3",
            "repository": "https://github.com/bertholomus/TensorFold",
            "commit": "59402086381a42c74d53053443224eec2790b4c5",
            **{"branch": "", "tree": "", "zig": "0.17.0", "sm": "121", "lay_out": None},
            **more,
        }
        result: dict[str, Any] = sparkpair_image.work(params, check_mode)
        return result

    return ask


def test_the_key_is_computed_without_network_on_a_node_that_has_nothing(
    asked: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    result = asked(check_mode=True)
    pins = image.Pins(
        "nvcr.io/nvidia/pytorch:26.07-py3",
        "https://github.com/bertholomus/TensorFold",
        "59402086381a42c74d53053443224eec2790b4c5",
        platform=image.platform_of(os.uname().machine),
    )
    assert result["key"] == image.content_key(image.read_inputs(PROJECT / "files/engine"), pins)
    assert result["tag"] == f"tensorfold-dsv41:exl3-tp2-{result['key']}"
    assert (result["needed"], result["present"], result["base_present"]) == (True, False, False)
    with pytest.raises(AnsibleProblem):
        asked(check_mode=False)


def test_an_image_without_the_keys_label_is_needed_still(
    asked: Callable[..., dict[str, Any]], head: Stub
) -> None:
    head.play(rule("inspect", out=captured()), rule("image ls"))
    result = asked()
    assert (result["present"], result["needed"], result["identity"]) == (False, True, "")
    labelled = json.loads(captured())
    labelled[0]["Config"]["Labels"]["sparkpair.key"] = result["key"]
    head.play(rule("inspect", out=json.dumps(labelled)), rule("image ls"))
    result = asked()
    assert (result["present"], result["needed"]) == (True, False)
    assert result["identity"] == image.identity(labelled[0])


def test_the_builds_files_are_laid_out_exactly_and_only_once(
    asked: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "cache/inputs"
    assert asked(check_mode=True, lay_out=str(folder))["changed"] is True
    assert not folder.exists()
    assert asked(lay_out=str(folder))["changed"] is True
    assert image.read_inputs(folder) == image.read_inputs(PROJECT / "files/engine")
    (folder / "stray").write_text("x")
    assert asked(lay_out=str(folder))["changed"] is True
    assert asked(lay_out=str(folder))["changed"] is False
    assert not (folder / "stray").exists()


@pytest.mark.parametrize(
    ("to", "more", "code"),
    [
        ("bo@10.20.0.2:/x", [], "target-bad"),
        ("bo@10.20.0.2:x", [], "target-bad"),
        ("bo@10.20.0.2", ["--identity", "/no/key"], "identity-missing"),
        ("bo@10.20.0.2", ["--known-hosts", "/no/file"], "known-hosts-missing"),
    ],
)
def test_a_wrong_peer_or_key_is_refused_before_docker_is_asked(
    capsys: pytest.CaptureFixture[str], to: str, more: list[str], code: str
) -> None:
    words = ["image", "ship", "--tag", "tensorfold-dsv41:exl3-tp2-0123456789ab", "--to", to, "--json", *more]
    assert cli.main(words) == 1
    assert f'"{code}"' in capsys.readouterr().out
