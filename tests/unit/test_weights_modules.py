"""The modules of the weights phase, run as Ansible runs them: on bare hosts, in check mode, with a token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sparkpair import hub as client
from sparkpair import locks

from rehearsal.hub import NEWCOMER_TOKEN, READER_TOKEN, Hub, make_repo, publish

PROJECT = Path(__file__).resolve().parents[2]
REPO, GATED = "acme/model", "acme/gated"
SHARD = "model-00001-of-00001.safetensors"
RUN = """
import sys
import ansible.module_utils
sys.path.insert(0, {modules!r})
ansible.module_utils.__path__.append({utils!r})
import {name}
{name}.main()
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Hub]:
    root = tmp_path / "hub"
    make_repo(root, REPO, {"config.json": b"{}", SHARD: b"x" * 1000}, revision="a" * 40)
    make_repo(root, GATED, {"overlay.safetensors": b"y" * 100}, gated=True)
    with Hub(root) as running:
        yield running


def run(name: str, *, check: bool = False, bare: bool = False, **arguments: Any) -> dict[str, Any]:
    """One module in a process of its own, its arguments on stdin as Ansible gives them.

    `bare` takes away what the project's own environment brings, as on a node before its first run.
    """
    plugins = PROJECT / "plugins"
    code = RUN.format(modules=str(plugins / "modules"), utils=str(plugins / "module_utils"), name=name)
    if bare:
        hidden = ("huggingface_hub", "httpx2", "numpy", "tokenizers", "docker", "yaml")
        code = f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\n{code}"
    given = {
        "ANSIBLE_MODULE_ARGS": {**arguments, "_ansible_check_mode": check, "_ansible_remote_tmp": "/tmp"}
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(said, dict)
    return said


def locked(site: Hub, repo: str = REPO, token: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(locks.dump(client.resolve(repo, endpoint=site.url, token=token)))
    return found


def test_a_dry_run_resolves_shows_and_writes_nothing(site: Hub, tmp_path: Path) -> None:
    entry = {"path": str(tmp_path / "locks/x.json"), "repo": REPO, "revision": "aaaa", "include": ["*.json"]}
    said = run("sparkpair_lock", check=True, locks=[entry], endpoint=site.url)
    assert said["changed"]
    assert said["locks"][0]["lock"]["revision"] == "a" * 40
    assert [row["path"] for row in said["locks"][0]["lock"]["files"]] == ["config.json"]
    assert '"config.json"' in said["diff"][0]["after"]
    assert not (tmp_path / "locks").exists()


def test_a_lock_is_written_once_and_kept_without_asking(site: Hub, tmp_path: Path) -> None:
    entry = {"path": str(tmp_path / "x.json"), "repo": REPO}
    assert run("sparkpair_lock", locks=[entry], endpoint=site.url)["changed"]
    publish(tmp_path / "hub", REPO, {"config.json": b"[]"})
    since = len(site.requests())
    again = run("sparkpair_lock", locks=[entry], endpoint=site.url, bare=True)
    assert (again["changed"], again["diff"], site.requests(since=since)) == (False, [], [])
    fresh = run("sparkpair_lock", locks=[entry], endpoint=site.url, refresh=True)
    assert fresh["changed"]
    assert any("config.json" in line for line in fresh["locks"][0]["difference"])


def test_a_node_gets_its_copy_and_its_slice(site: Hub, tmp_path: Path) -> None:
    entries = [
        {"path": str(tmp_path / "etc/x.json"), "lock": locked(site)},
        {"path": str(tmp_path / "etc/x-worker.json"), "lock": locked(site), "include": ["config.json"]},
    ]
    assert run("sparkpair_lock", check=True, locks=entries, bare=True)["changed"]
    assert not (tmp_path / "etc").exists()
    assert run("sparkpair_lock", locks=entries, bare=True)["changed"]
    assert not run("sparkpair_lock", locks=entries, bare=True)["changed"]
    assert json.loads((tmp_path / "etc/x.json").read_text()) == locked(site)
    assert len(locks.load(tmp_path / "etc/x-worker.json").files) == 1


def test_a_lock_without_huggingface_hub_says_what_is_needed(site: Hub, tmp_path: Path) -> None:
    said = run("sparkpair_lock", bare=True, locks=[{"path": str(tmp_path / "x.json"), "repo": REPO}])
    assert said["failed"]
    assert said["problem"]["code"] == "no-huggingface-hub"


def test_access_is_asked_on_a_bare_node_and_in_check_mode(site: Hub) -> None:
    said = run("sparkpair_access", check=True, bare=True, locks=[locked(site)], endpoint=site.url)
    assert not said["changed"]
    assert said["answers"][0]["path"] == "config.json"


def test_a_refusal_fails_the_task_in_three_parts_and_hides_the_token(site: Hub) -> None:
    said = run(
        "sparkpair_access",
        locks=[locked(site, GATED, READER_TOKEN)],
        endpoint=site.url,
        token=NEWCOMER_TOKEN,
        bare=True,
    )
    assert said["failed"]
    assert said["problem"]["code"] == "terms-not-accepted"
    assert all(part in said["msg"] for part in ("found:", "needed:", "do:"))
    assert NEWCOMER_TOKEN not in json.dumps(said)


def test_a_token_with_a_newline_fails_the_task_and_is_not_shown(site: Hub) -> None:
    said = run("sparkpair_access", locks=[locked(site)], endpoint=site.url, token="hf_CANARY123\n")
    assert said["problem"]["code"] == "token-form"
    assert "CANARY123" not in json.dumps(said)


def test_a_bare_host_lacks_everything(site: Hub, tmp_path: Path) -> None:
    folder = {"path": str(tmp_path / "none/weights"), "lock": locked(site)}
    said = run("sparkpair_weights", check=True, bare=True, folders=[folder], owner="sparkpair")
    assert said["needed"]
    row = said["folders"][0]
    assert (row["missing_files"], row["missing_bytes"]) == (2, 1002)
    assert row["message"] == "acme/model: 2 files, 1.0 kB missing"
    assert row["need"]["bytes"] == 1002


def test_files_without_a_receipt_wait_for_their_verification(site: Hub, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/config.json").write_bytes(b"{}")
    folder = {"path": str(tmp_path / "w"), "lock": locked(site), "include": ["config.json"]}
    row = run("sparkpair_weights", folders=[folder])["folders"][0]
    assert (row["needed"], row["missing_files"], row["unread_files"]) == (True, 0, 1)


def test_more_of_the_lock_than_a_node_needs_is_no_stray(site: Hub, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / SHARD).write_bytes(b"x")
    folder = {"path": str(tmp_path / "w"), "lock": locked(site), "include": ["config.json"]}
    assert run("sparkpair_weights", folders=[folder])["folders"][0]["missing_files"] == 1
    (tmp_path / "w/zz.safetensors").write_bytes(b"x")
    assert run("sparkpair_weights", folders=[folder])["problem"]["code"] == "stray-file"


def test_a_lock_edited_by_hand_fails_every_module(site: Hub, tmp_path: Path) -> None:
    bad = locked(site)
    bad["files"][0]["path"] = "../../etc/passwd"
    for said in (
        run("sparkpair_weights", folders=[{"path": str(tmp_path), "lock": bad}]),
        run("sparkpair_access", locks=[bad]),
        run("sparkpair_lock", locks=[{"path": str(tmp_path / "x.json"), "lock": bad}]),
    ):
        assert said["problem"]["code"] == "lock-bad"
    assert not (tmp_path / "x.json").exists()


def test_room_is_added_up_for_each_filesystem(tmp_path: Path) -> None:
    """Field report 42."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/rank0").write_bytes(b"x" * 300)
    needs = [
        {"path": str(tmp_path / "weights/p"), "bytes": 1000, "what": "weights"},
        {"path": str(tmp_path / "cache"), "bytes": 500, "what": "rank cache", "less_present": True},
    ]
    said = run("sparkpair_space", check=True, bare=True, needs=needs, margin=7)
    (row,) = said["filesystems"]
    assert row["needed"] == 1000 + 200 + 7
    said = run("sparkpair_space", needs=[{"path": str(tmp_path), "bytes": 10**18, "what": "weights"}])
    assert said["problem"]["code"] == "disk-full"
    assert str(10**18) in said["problem"]["needed"]
    assert run("sparkpair_space", needs=[], margin=10**18)["filesystems"] == []
