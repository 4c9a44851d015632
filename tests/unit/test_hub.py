"""The stand-in hub against the real client: huggingface_hub asks, and gets what the Hub would say."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import (
    HfApi,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from rehearsal.hub import NEWCOMER_TOKEN, READER_TOKEN, Hub, make_repo, publish

disable_progress_bars()

REPO, GATED, PRIVATE = "acme/model", "acme/gated", "acme/private"
DATA = random.Random(7).randbytes(3_000_001)  # noqa: S311
CONFIG = b'{"model_type": "deepseek_v41"}'
DATA_SHA = hashlib.sha256(DATA).hexdigest()
SHARD = "model-00001-of-00001.safetensors"
BUILT = "b" * 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "hub"
    make_repo(root, REPO, {"config.json": CONFIG, SHARD: DATA, "docs/a/b.md": b"b"}, revision="a" * 40)
    make_repo(root, GATED, {"config.json": CONFIG, "overlay.safetensors": DATA[:1000]}, gated=True)
    make_repo(root, PRIVATE, {"config.json": CONFIG}, private=True)
    return root


@pytest.fixture
def hub(root: Path) -> Iterator[Hub]:
    with Hub(root) as running:
        yield running


def api(hub: Hub, token: str | bool = False) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def ask(
    hub: Hub, path: str, method: str = "GET", headers: dict[str, str] | None = None, body: bytes | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One plain request, no redirect followed: status, headers (lower case) and body."""
    host = urlsplit(path if path.startswith("http") else hub.url)
    connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=10)
    target = path.removeprefix(f"{host.scheme}://{host.netloc}")
    try:
        connection.request(method, target, body=body, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def storage_link(hub: Hub, path: str = SHARD) -> str:
    return ask(hub, f"/{REPO}/resolve/main/{path}")[1]["location"]


def control(hub: Hub, what: str, **order: Any) -> tuple[int, dict[str, Any]]:
    status, _, body = ask(hub, f"/_rehearsal/{what}", "POST", body=json.dumps(order).encode())
    return status, json.loads(body)


def wait_for(happened: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


# The API


def test_model_info_has_size_and_hash_of_each_file(hub: Hub) -> None:
    info = api(hub).model_info(REPO, files_metadata=True)
    assert info.sha == "a" * 40
    files = {each.rfilename: each for each in info.siblings or []}
    assert sorted(files) == ["config.json", "docs/a/b.md", SHARD]
    shard, config = files[SHARD], files["config.json"]
    assert shard.lfs is not None
    assert (shard.size, shard.lfs.sha256, shard.lfs.size) == (len(DATA), DATA_SHA, len(DATA))
    assert shard.lfs.pointer_size == 132  # as git-lfs writes a pointer to a file of seven digits
    assert config.lfs is None
    blob = b"blob %d\0" % len(CONFIG) + CONFIG
    assert config.blob_id == hashlib.sha1(blob, usedforsecurity=False).hexdigest()


def test_model_info_without_metadata_lists_names_only(hub: Hub) -> None:
    info = api(hub).model_info(REPO, revision="a" * 40)
    assert info.siblings is not None
    config = info.siblings[0]
    assert (config.rfilename, config.size, config.lfs) == ("config.json", None, None)


@pytest.mark.parametrize("expand", [False, True])
def test_tree_lists_files_and_directories(hub: Hub, expand: bool) -> None:
    found = list(api(hub).list_repo_tree(REPO, recursive=True, expand=expand))
    assert [each.path for each in found] == ["config.json", "docs", "docs/a", "docs/a/b.md", SHARD]
    assert [each.path for each in api(hub).list_repo_tree(REPO)] == ["config.json", "docs", SHARD]
    assert [each.path for each in api(hub).list_repo_tree(REPO, "docs/a")] == ["docs/a/b.md"]
    last = [getattr(each, "last_commit", None) for each in found]
    assert all((commit is not None) == expand for commit in last)


def test_tree_comes_in_pages(root: Path) -> None:
    make_repo(root, "acme/many", {f"{n:03}.txt": b"" for n in range(25)})
    with Hub(root, page_size=10) as hub:
        found = [each.path for each in api(hub).list_repo_tree("acme/many", recursive=True)]
        assert found == [f"{n:03}.txt" for n in range(25)]
        assert len(hub.requests()) == 3


def test_commits_and_refs_show_the_history_newest_first(root: Path, hub: Hub) -> None:
    newer = publish(root, REPO, {"config.json": b"{}"}, title="Change the config", absent=["docs/a/b.md"])
    commits = api(hub).list_repo_commits(REPO)
    assert [each.commit_id for each in commits] == [newer, "a" * 40]
    assert commits[0].title == "Change the config"
    assert [each.commit_id for each in api(hub).list_repo_commits(REPO, revision="a" * 40)] == ["a" * 40]
    branches = api(hub).list_repo_refs(REPO).branches
    assert [(each.name, each.target_commit) for each in branches] == [("main", newer)]


def test_a_commit_keeps_its_files_when_main_moves_on(root: Path, hub: Hub) -> None:
    publish(root, REPO, {"config.json": b"{}", "new.txt": b"n"}, absent=["docs/a/b.md"])
    names = [each.path for each in api(hub).list_repo_tree(REPO) if each.path != SHARD]
    assert names == ["config.json", "new.txt"]
    assert ask(hub, f"/{REPO}/resolve/main/config.json")[2] == b"{}"
    assert ask(hub, f"/{REPO}/resolve/{'a' * 40}/config.json")[2] == CONFIG
    assert ask(hub, f"/{REPO}/resolve/{'a' * 40}/docs/a/b.md")[0] == 200


def test_more_commits_than_a_page_holds(root: Path, hub: Hub) -> None:
    for number in range(55):
        publish(root, REPO, {"n.txt": str(number).encode()})
    assert len(api(hub).list_repo_commits(REPO)) == 56


def test_paths_info_leaves_out_what_is_missing(hub: Hub) -> None:
    found = api(hub).get_paths_info(REPO, [SHARD, "docs", "nowhere"], expand=True)
    assert [each.path for each in found] == [SHARD, "docs"]
    status, _, body = ask(
        hub,
        f"/api/models/{REPO}/paths-info/main",
        "POST",
        {"Content-Type": "application/json"},
        json.dumps({"paths": ["config.json"]}).encode(),
    )
    assert (status, [each["path"] for each in json.loads(body)]) == (200, ["config.json"])


def test_whoami_knows_a_good_token_from_a_bad_one(hub: Hub) -> None:
    assert api(hub, READER_TOKEN).whoami()["name"] == "rehearsal"
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        api(hub, "hf_wrong").whoami()


# Files


def test_metadata_of_a_large_file_is_on_the_redirect(hub: Hub) -> None:
    """The client must take hash, size and commit from the first answer: the storage host knows no commit."""
    meta = get_hf_file_metadata(hf_hub_url(REPO, SHARD, endpoint=hub.url), token=False)
    assert (meta.commit_hash, meta.etag, meta.size) == ("a" * 40, DATA_SHA, len(DATA))
    assert meta.location.startswith(hub.cdn)
    assert meta.xet_file_data is None


def test_metadata_of_a_small_file_comes_directly(hub: Hub) -> None:
    meta = get_hf_file_metadata(hf_hub_url(REPO, "config.json", endpoint=hub.url), token=False)
    assert (meta.commit_hash, meta.size) == ("a" * 40, len(CONFIG))
    assert meta.location.startswith(hub.url)


def test_a_hub_without_redirects_serves_large_files_itself(root: Path) -> None:
    with Hub(root, redirect=False) as hub:
        status, headers, body = ask(hub, f"/{REPO}/resolve/main/{SHARD}")
        assert (status, hashlib.sha256(body).hexdigest()) == (200, DATA_SHA)
        assert (headers["x-linked-etag"], headers["x-linked-size"]) == (f'"{DATA_SHA}"', str(len(DATA)))


def test_snapshot_download_brings_every_byte(hub: Hub, tmp_path: Path) -> None:
    path = Path(snapshot_download(REPO, endpoint=hub.url, token=False, cache_dir=tmp_path / "cache"))
    assert (path / SHARD).read_bytes() == DATA
    assert (path / "config.json").read_bytes() == CONFIG
    assert hub.bytes_sent() == len(DATA) + len(CONFIG) + 1
    assert hub.bytes_sent("*.safetensors") == len(DATA)


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-0", range(0, 1)),
        ("bytes=100-199", range(100, 200)),
        (f"bytes={len(DATA) - 5}-", range(len(DATA) - 5, len(DATA))),
        ("bytes=-7", range(len(DATA) - 7, len(DATA))),
        (f"bytes=10-{len(DATA) * 2}", range(10, len(DATA))),
        (f"bytes=-{len(DATA) * 2}", range(0, len(DATA))),
    ],
)
def test_a_range_is_answered_in_part(hub: Hub, header: str, span: range) -> None:
    status, headers, body = ask(hub, storage_link(hub), headers={"Range": header})
    assert status == 206
    assert headers["content-range"] == f"bytes {span.start}-{span.stop - 1}/{len(DATA)}"
    assert body == DATA[span.start : span.stop]
    assert hub.requests(method="GET")[-1]["range"] == header
    assert hub.bytes_sent() == len(span)


@pytest.mark.parametrize("header", ["bytes=5-2", "bytes=-", "pages=1-2", "bytes=0-1,5-6"])
def test_a_range_that_is_none_gets_the_whole_file(hub: Hub, header: str) -> None:
    status, headers, body = ask(hub, f"/{REPO}/resolve/main/config.json", headers={"Range": header})
    assert (status, body) == (200, CONFIG)
    assert "content-range" not in headers


@pytest.mark.parametrize("header", [f"bytes={len(CONFIG)}-", "bytes=99999-100000", "bytes=-0"])
def test_a_range_past_the_end_is_refused_with_the_size(hub: Hub, header: str) -> None:
    status, headers, _ = ask(hub, f"/{REPO}/resolve/main/config.json", headers={"Range": header})
    assert (status, headers["content-range"]) == (416, f"bytes */{len(CONFIG)}")


def test_a_range_of_another_version_gets_the_whole_file(hub: Hub) -> None:
    etag = ask(hub, f"/{REPO}/resolve/main/config.json", "HEAD")[1]["etag"]
    for condition, status in ((etag, 206), ('"other"', 200)):
        headers = {"Range": "bytes=1-", "If-Range": condition}
        assert ask(hub, f"/{REPO}/resolve/main/config.json", headers=headers)[0] == status


def test_an_empty_file_has_an_answer(root: Path, hub: Hub) -> None:
    make_repo(root, "acme/empty", {"nothing.txt": b""})
    assert ask(hub, "/acme/empty/resolve/main/nothing.txt")[::2] == (200, b"")


def test_one_connection_carries_many_requests(hub: Hub) -> None:
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc, timeout=5)
    for path, status in ((f"/{REPO}/resolve/main/config.json", 200), ("/nowhere", 404)) * 3:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
        assert not answer.will_close
    connection.close()


def test_nothing_outside_a_repository_is_served(root: Path, hub: Hub) -> None:
    (root / "tokens.json").write_text('{"hf_x": ["*"]}')
    for path in (
        f"/{REPO}/resolve/main/..%2F..%2F..%2Ftokens.json",
        f"/{REPO}/resolve/main/../repo.json",
        "/../x/resolve/main/tokens.json",
        f"/{REPO}/resolve/main/%2Fetc%2Fpasswd",
    ):
        assert ask(hub, path)[0] in {401, 404}
    assert hub.bytes_sent() == 0


# Refusals (field report 40)


def test_a_missing_and_a_private_repository_look_alike_without_a_token(hub: Hub) -> None:
    """R4: 401 reads as "repository not found"."""
    for repo in ("acme/none", PRIVATE):
        for call in (api(hub).model_info, api(hub).auth_check):
            with pytest.raises(RepositoryNotFoundError) as caught:
                call(repo)
            assert caught.value.response.status_code == 401


def test_with_a_token_a_missing_repository_is_404(hub: Hub) -> None:
    with pytest.raises(RepositoryNotFoundError) as caught:
        api(hub, READER_TOKEN).model_info("acme/none")
    assert caught.value.response.status_code == 404
    assert api(hub, READER_TOKEN).model_info(PRIVATE).private is True
    with pytest.raises(RepositoryNotFoundError):
        api(hub, NEWCOMER_TOKEN).model_info(PRIVATE)


def test_a_gated_repository_shows_its_listing_but_not_its_files(hub: Hub) -> None:
    """Only a request for a real file tells whether the terms were accepted."""
    assert api(hub).model_info(GATED, files_metadata=True).gated == "auto"
    with pytest.raises(GatedRepoError, match="Please log in") as caught:
        hf_hub_download(GATED, "config.json", endpoint=hub.url, token=False)
    assert caught.value.response.status_code == 401
    with pytest.raises(GatedRepoError):
        api(hub).auth_check(GATED)


def test_terms_not_accepted_is_403_with_the_page_to_visit(hub: Hub) -> None:
    with pytest.raises(GatedRepoError, match=f"Visit https://huggingface.co/{GATED}") as caught:
        hf_hub_download(GATED, "overlay.safetensors", endpoint=hub.url, token=NEWCOMER_TOKEN)
    assert caught.value.response.status_code == 403


def test_terms_accepted_gives_the_file(hub: Hub, tmp_path: Path) -> None:
    path = hf_hub_download(
        GATED, "overlay.safetensors", endpoint=hub.url, token=READER_TOKEN, cache_dir=tmp_path
    )
    assert Path(path).read_bytes() == DATA[:1000]
    api(hub, READER_TOKEN).auth_check(GATED)


def test_a_bad_token_is_refused_even_where_none_is_needed(hub: Hub) -> None:
    with pytest.raises(HfHubHTTPError, match="Invalid credentials in Authorization header") as caught:
        api(hub, "hf_wrong").model_info(REPO)
    assert caught.value.response.status_code == 401
    assert not isinstance(caught.value, RepositoryNotFoundError)


def test_tokens_are_granted_and_revoked_at_run_time(hub: Hub) -> None:
    hub.grant("hf_new", [GATED])
    api(hub, "hf_new").auth_check(GATED)
    assert control(hub, "revoke", token="hf_new")[0] == 200
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        api(hub, "hf_new").auth_check(GATED)
    assert control(hub, "token", token="hf_new", repos=[])[0] == 200
    with pytest.raises(GatedRepoError):
        api(hub, "hf_new").auth_check(GATED)


@pytest.mark.parametrize("revision", ["c" * 40, "aaaaaaaa", "dev", "sch\u00f6n"])
def test_an_unknown_or_abbreviated_revision_is_refused(hub: Hub, revision: str) -> None:
    """As the Hub asks for the full hash: an abbreviated one must be looked up among the commits."""
    with pytest.raises(RevisionNotFoundError):
        api(hub).model_info(REPO, revision=revision)


def test_a_missing_file_is_no_missing_repository(hub: Hub) -> None:
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "nowhere.json", endpoint=hub.url, token=False)
    with pytest.raises(EntryNotFoundError):
        list(api(hub).list_repo_tree(REPO, "nowhere"))


# The storage host


def test_the_storage_host_refuses_a_token(hub: Hub) -> None:
    """A token that follows a redirect to another host has leaked; the log would show it."""
    link = storage_link(hub)
    assert ask(hub, link, headers={"Authorization": f"Bearer {READER_TOKEN}"})[0] == 400
    assert ask(hub, link)[2] == DATA


def test_the_client_leaves_its_token_at_the_site(hub: Hub, tmp_path: Path) -> None:
    hf_hub_download(GATED, "overlay.safetensors", endpoint=hub.url, token=READER_TOKEN, cache_dir=tmp_path)
    seen = {(each["host"], each["token"]) for each in hub.requests()}
    assert seen == {("site", True), ("storage", False)}


def test_a_link_that_was_changed_or_is_old_is_refused(root: Path) -> None:
    with Hub(root, link_seconds=-1) as hub:
        assert ask(hub, storage_link(hub))[0] == 403
    with Hub(root) as hub:
        link = storage_link(hub)
        assert ask(hub, link.replace(SHARD, "config.json"))[0] == 403
        assert ask(hub, link.partition("?")[0])[0] == 403
        assert ask(hub, link, "HEAD")[0] == 200


# Modes


def fetch(hub: Hub, path: Path) -> Path:
    return Path(hf_hub_download(REPO, SHARD, endpoint=hub.url, token=False, cache_dir=path))


def test_flip_passes_the_library_unseen(hub: Hub, tmp_path: Path) -> None:
    """R1, field report 37: its name says the expected hash, its content is another."""
    hub.mode("flip", path="*.safetensors", times=1)
    got = fetch(hub, tmp_path)
    assert got.resolve().name == DATA_SHA
    data = got.read_bytes()
    assert [at for at in range(len(DATA)) if data[at] != DATA[at]] == [len(DATA) // 2]
    assert ask(hub, storage_link(hub))[2] == DATA  # once was ordered


def test_flip_waits_for_the_answer_that_holds_its_byte(hub: Hub) -> None:
    hub.mode("flip", offset=1000, times=1)
    link = storage_link(hub)
    assert ask(hub, link, headers={"Range": "bytes=0-999"})[2] == DATA[:1000]
    got = ask(hub, link, headers={"Range": "bytes=1000-1009"})[2]
    assert (got[0], got[1:]) == (DATA[1000] ^ 0xFF, DATA[1001:1010])
    assert [each["mode"] for each in hub.requests(method="GET")[-2:]] == ["ok", "flip"]


def test_short_ends_after_half_and_the_library_begins_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2, R3: a cut is noticed, other than a flip; what came before it is fetched once more."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.mode("short", path="*.safetensors", times=1)
    assert fetch(hub, tmp_path).read_bytes() == DATA
    first, second = hub.requests(file=SHARD, method="GET")
    assert (first["bytes"], first["mode"]) == (len(DATA) // 2, "short")
    assert (second["bytes"], second["range"]) == (len(DATA), None)


def begin(link: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    split = urlsplit(link)
    connection = http.client.HTTPConnection(split.netloc, timeout=5)
    connection.request("GET", f"{split.path}?{split.query}")
    return connection, connection.getresponse()


def test_stall_sends_so_many_bytes_and_then_nothing(hub: Hub) -> None:
    """Field report 39."""
    hub.mode("stall", after=200_000, times=1)
    connection, answer = begin(storage_link(hub))
    assert answer.read(200_000) == DATA[:200_000]
    assert connection.sock is not None
    connection.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        answer.read(1)
    connection.close()
    answer.close()
    wait_for(lambda: hub.requests(file=SHARD, method="GET", status=200))
    assert hub.bytes_sent() == 200_000


def test_a_stall_that_is_taken_back_cuts_the_line(hub: Hub) -> None:
    hub.mode("stall", after=10, times=1)
    connection, answer = begin(storage_link(hub))
    assert answer.read(10) == DATA[:10]
    hub.mode("ok")
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    connection.close()


def test_slow_keeps_to_its_rate_until_taken_back(hub: Hub) -> None:
    hub.mode("slow", rate=1_000_000)
    begun = time.monotonic()
    connection, answer = begin(storage_link(hub))
    answer.read(500_000)
    assert 0.35 < time.monotonic() - begun < 2.5
    hub.mode("ok")
    assert len(answer.read()) == len(DATA) - 500_000
    assert time.monotonic() - begun < 2.7
    connection.close()


@pytest.mark.parametrize(
    ("mode", "token", "error", "status"),
    [
        ("401", False, RepositoryNotFoundError, 401),
        ("401", READER_TOKEN, HfHubHTTPError, 401),
        ("403", READER_TOKEN, GatedRepoError, 403),
        ("404", READER_TOKEN, RepositoryNotFoundError, 404),
        ("429", False, HfHubHTTPError, 429),
        ("503", False, HfHubHTTPError, 503),
    ],
)
def test_an_ordered_refusal_is_the_library_s_own_error(
    hub: Hub, mode: str, token: str | bool, error: type[Exception], status: int
) -> None:
    hub.mode(mode, times=1)
    with pytest.raises(error) as caught:
        api(hub, token).model_info(REPO)
    assert getattr(caught.value, "response").status_code == status  # noqa: B009
    assert api(hub, token).model_info(REPO).sha == "a" * 40
    assert [(each["status"], each["mode"]) for each in hub.requests()] == [(status, mode), (200, "ok")]


def test_404_for_a_path_is_a_missing_file(hub: Hub) -> None:
    hub.mode("404", path="*.safetensors")
    with pytest.raises(EntryNotFoundError):
        get_hf_file_metadata(hf_hub_url(REPO, SHARD, endpoint=hub.url), token=False)


def test_429_says_when_to_come_back(hub: Hub) -> None:
    """Field report 41."""
    hub.mode("429", retry_after=2, times=2)
    for _ in range(2):
        status, headers, body = ask(hub, f"/{REPO}/resolve/main/{SHARD}")
        assert (status, headers["retry-after"]) == (429, "2")
        assert "rate limit" in json.loads(body)["error"]
    assert ask(hub, f"/{REPO}/resolve/main/{SHARD}")[0] == 302
    hub.mode("503", retry_after=None)
    assert "retry-after" not in ask(hub, f"/{REPO}/resolve/main/{SHARD}")[1]


def test_modes_stand_side_by_side_by_path_and_method(hub: Hub) -> None:
    hub.mode("503", path="*.json")
    hub.mode("429", path="/api/*")
    hub.mode("404", path="docs/*", method="HEAD")
    assert ask(hub, f"/{REPO}/resolve/main/config.json")[0] == 503
    assert ask(hub, f"/api/models/{REPO}")[0] == 429
    assert ask(hub, f"/{REPO}/resolve/main/docs/a/b.md", "HEAD")[0] == 404
    assert ask(hub, f"/{REPO}/resolve/main/docs/a/b.md")[0] == 200
    hub.mode("ok", path="*.json")
    assert ask(hub, f"/{REPO}/resolve/main/config.json")[0] == 200
    assert ask(hub, f"/api/models/{REPO}")[0] == 429
    hub.mode("ok")
    assert ask(hub, f"/api/models/{REPO}")[0] == 200


def test_modes_are_ordered_over_http(hub: Hub) -> None:
    status, shown = control(hub, "mode", mode="flip", path="*.safetensors", times=1)
    assert status == 200
    assert [(each["mode"], each["path"], each["left"]) for each in shown["rules"]] == [
        ("flip", "*.safetensors", 1)
    ]
    assert ask(hub, storage_link(hub))[2] != DATA
    assert json.loads(ask(hub, "/_rehearsal/mode")[2]) == {"rules": []}


@pytest.mark.parametrize(
    "order",
    [{"mode": "burn"}, {"mode": "flip", "times": 0}, {"mode": "ok", "x": 1}, {}, {"mode": "slow", "rate": 0}],
)
def test_an_order_that_makes_no_sense_is_refused(hub: Hub, order: dict[str, Any]) -> None:
    assert control(hub, "mode", **order)[0] == 400
    assert ask(hub, f"/{REPO}/resolve/main/config.json")[0] == 200


def test_a_commit_is_published_over_http(hub: Hub) -> None:
    assert control(hub, "publish", repo=REPO, files={"README.md": "new"}, revision="d" * 40)[0] == 200
    assert api(hub).model_info(REPO).sha == "d" * 40
    assert ask(hub, f"/{REPO}/resolve/main/README.md")[2] == b"new"


# The log


def test_the_log_counts_bytes_and_never_holds_a_token(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "hub.jsonl"
    with Hub(root, log_file=file) as hub:
        hf_hub_download(
            GATED, "overlay.safetensors", endpoint=hub.url, token=READER_TOKEN, cache_dir=tmp_path / "c"
        )
        first = json.loads(ask(hub, "/_rehearsal/log")[2])
        ask(hub, f"/{REPO}/resolve/main/config.json", headers={"Range": "bytes=0-3"})
        more = json.loads(ask(hub, f"/_rehearsal/log?since={first['next']}")[2])
        assert [each["bytes"] for each in more["requests"]] == [4]
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert hub.requests() == first["requests"] + more["requests"]
        assert sorted(lines, key=lambda line: int(line["order"])) == hub.requests()
    assert [each["seq"] for each in lines] == list(range(1, len(lines) + 1))
    assert sum(each["bytes"] for each in lines) == 1004
    assert {each["repo"] for each in lines} == {GATED, REPO}
    assert lines[0]["client"] == "127.0.0.1"
    assert READER_TOKEN not in file.read_text()
    assert "Signature" not in file.read_text()


def test_bytes_that_never_left_are_not_counted(root: Path) -> None:
    """A killed client's bytes are counted by what left, else a resumed transfer looks cheaper than it was."""
    make_repo(root, "acme/big", {"big.safetensors": bytes(64_000_000)})
    with Hub(root, redirect=False) as hub:
        connection, answer = begin(f"{hub.url}/acme/big/resolve/main/big.safetensors")
        answer.read(1_000_000)
        connection.close()
        answer.close()
        wait_for(lambda: hub.requests(file="big.safetensors"))
        assert 1_000_000 <= hub.bytes_sent() < 16_000_000


def test_hashes_are_kept_and_follow_a_changed_file(root: Path) -> None:
    with Hub(root) as hub:
        api(hub).model_info(REPO, files_metadata=True)
    kept = json.loads((root / REPO / "hashes.json").read_text())
    assert kept[f"files/{SHARD}"][2] == DATA_SHA
    (root / REPO / "files" / SHARD).write_bytes(DATA[::-1])
    with Hub(root) as hub:
        meta = get_hf_file_metadata(hf_hub_url(REPO, SHARD, endpoint=hub.url), token=False)
        assert meta.etag == hashlib.sha256(DATA[::-1]).hexdigest()


def test_many_clients_at_once_get_their_own_bytes(hub: Hub) -> None:
    got: dict[int, bytes] = {}
    link = storage_link(hub)

    def read(at: int) -> None:
        got[at] = ask(hub, link, headers={"Range": f"bytes={at}-{at + 99_999}"})[2]

    threads = [threading.Thread(target=read, args=(at,)) for at in range(0, 2_400_000, 100_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(got[at] == DATA[at : at + 100_000] for at in got)
    assert len(got) == 24


# The command


def test_the_command_tells_when_it_is_ready_and_ends_on_sigterm(root: Path, tmp_path: Path) -> None:
    ready, log = tmp_path / "ready.json", tmp_path / "log.jsonl"
    words = ["-m", "rehearsal.hub", "--root", str(root), "--port", "0", "--log", str(log)]
    process = subprocess.Popen(
        [sys.executable, *words, "--ready-file", str(ready)], cwd=Path(__file__).parents[2]
    )
    try:
        wait_for(ready.exists, 10)
        said = json.loads(ready.read_text())
        assert said["pid"] == process.pid
        assert HfApi(endpoint=said["url"], token=False).model_info(REPO).sha == "a" * 40
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
    assert json.loads(log.read_text())["repo"] == REPO


def test_a_taken_port_is_said_plainly(root: Path, hub: Hub) -> None:
    port = str(urlsplit(hub.url).port)
    words = ["-m", "rehearsal.hub", "--root", str(root), "--port", port, "--cdn-port", "0"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"127.0.0.1 port {port}" in done.stderr
