"""Access first, and six refusals told apart (field reports 40, 47 and R4); what a revision means."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from sparkpair import hub as client
from sparkpair import locks, pinning
from sparkpair.locks import LockedFile
from sparkpair.problem import Problem

from rehearsal.hub import NEWCOMER_TOKEN, READER_TOKEN, Hub, make_repo, publish

REPO, GATED, PRIVATE = "acme/model", "acme/gated", "acme/private"
SHARD = "model-00001-of-00001.safetensors"
FIRST, TWIN = "ab12" + "1" * 36, "ab12" + "2" * 36
GATED_COMMIT = "c" * 40
COMMAND = "from sparkpair.cli import main; raise SystemExit(main())"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    root = tmp_path / "hub"
    make_repo(root, REPO, {"config.json": b"{}", SHARD: b"x" * 1000}, revision=FIRST)
    make_repo(root, GATED, {"overlay.safetensors": b"y" * 100}, gated=True, revision=GATED_COMMIT)
    make_repo(root, PRIVATE, {"config.json": b"{}"}, private=True, revision="d" * 40)
    with Hub(root) as running:
        yield running


def code_of(hub: Hub, repo: str, revision: str, path: str, token: str | None = None) -> str:
    with pytest.raises(Problem) as caught:
        client.check_access(repo, revision, path, token=token, endpoint=hub.url)
    problem = caught.value
    assert repo in problem.found
    assert token is None or token not in str(problem)
    return problem.code


def test_access_to_a_real_file_is_one_request(hub: Hub) -> None:
    for path in ("config.json", SHARD):
        since = len(hub.requests())
        found = client.check_access(REPO, FIRST, path, endpoint=hub.url)
        asked = hub.requests(since=since)
        assert [request["method"] for request in asked] == ["HEAD"]
        assert found["commit"] == FIRST
        assert hub.bytes_sent() == 0


def test_the_refusals_are_told_apart_with_one_request_each(hub: Hub) -> None:
    """Field report 40: a missing token looks like a missing repository."""
    cases = [
        ("token-missing", (GATED, GATED_COMMIT, "overlay.safetensors", None)),
        ("token-missing", (PRIVATE, "d" * 40, "config.json", None)),
        ("token-refused", (GATED, GATED_COMMIT, "overlay.safetensors", "hf_nobody")),
        ("terms-not-accepted", (GATED, GATED_COMMIT, "overlay.safetensors", NEWCOMER_TOKEN)),
        ("repo-unknown", ("acme/misspelt", FIRST, "config.json", READER_TOKEN)),
        ("revision-unknown", (REPO, "e" * 40, "config.json", READER_TOKEN)),
        ("file-unknown", (REPO, FIRST, "model-00002-of-00001.safetensors", READER_TOKEN)),
    ]
    begun = time.monotonic()
    for expected, (repo, revision, path, token) in cases:
        since = len(hub.requests())
        assert code_of(hub, repo, revision, path, token) == expected
        assert len(hub.requests(since=since)) == 1, expected
    assert time.monotonic() - begun < 5


def test_terms_that_are_not_accepted_name_the_page_to_visit(hub: Hub) -> None:
    with pytest.raises(Problem) as caught:
        client.check_access(
            GATED, GATED_COMMIT, "overlay.safetensors", token=NEWCOMER_TOKEN, endpoint=hub.url
        )
    assert f"{hub.url}/{GATED}" in caught.value.do
    assert client.check_access(
        GATED, GATED_COMMIT, "overlay.safetensors", token=READER_TOKEN, endpoint=hub.url
    )["status"] in (200, 302)


@pytest.mark.parametrize(
    ("mode", "code"), [("401", "token-refused"), ("403", "terms-not-accepted"), ("404", "repo-unknown")]
)
def test_a_refusal_is_never_asked_again(hub: Hub, mode: str, code: str) -> None:
    hub.mode(mode)
    assert code_of(hub, REPO, FIRST, "config.json", READER_TOKEN) == code
    assert len(hub.requests()) == 1


def test_a_hub_out_of_reach_is_told_in_seconds() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers there
        port = taken.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(Problem) as caught:
            client.check_access(REPO, FIRST, "config.json", endpoint=f"http://127.0.0.1:{port}")
    assert caught.value.code == "hub-unreachable"
    assert time.monotonic() - begun < 3


def test_a_hub_that_accepts_and_says_nothing_is_out_of_reach_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Problem) as caught:
        client.check_access(
            REPO, FIRST, "config.json", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3
        )
    assert caught.value.code == "hub-unreachable"


def test_a_busy_hub_is_asked_again_after_the_time_it_names(hub: Hub) -> None:
    """Field report 41."""
    hub.mode("429", times=1, retry_after=1)
    begun = time.monotonic()
    client.check_access(REPO, FIRST, "config.json", endpoint=hub.url)
    assert time.monotonic() - begun >= 1
    assert [request["status"] for request in hub.requests()] == [429, 200]


def test_a_hub_that_stays_busy_ends_in_words(hub: Hub) -> None:
    hub.mode("503", retry_after=0)
    assert code_of(hub, REPO, FIRST, "config.json") == "hub-busy"
    hub.mode("429", retry_after=0)
    assert code_of(hub, REPO, FIRST, "config.json") == "rate-limited"


def test_a_hub_that_offers_other_bytes_than_the_lock_is_found_before_any_transfer(hub: Hub) -> None:
    for entry in (LockedFile(SHARD, 1000, "0" * 64), LockedFile("config.json", 3, None, "0" * 40)):
        with pytest.raises(Problem) as caught:
            client.check_access(REPO, FIRST, entry.path, endpoint=hub.url, expected=entry)
        assert caught.value.code == "hub-differs"
    assert hub.bytes_sent() == 0


def test_the_smallest_file_of_a_lock_is_asked_for(hub: Hub) -> None:
    lock = client.resolve(REPO, endpoint=hub.url)
    assert client.check_lock_access(lock, endpoint=hub.url)["path"] == "config.json"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 410, 418, 429, 451, 500, 503])
@pytest.mark.parametrize("with_token", [True, False])
@pytest.mark.parametrize("code", ["", "GatedRepo", "RepoNotFound", "RevisionNotFound", "EntryNotFound"])
def test_every_answer_becomes_three_sentences(status: int, with_token: bool, code: str) -> None:
    problem = client.refusal(
        status,
        {"X-Error-Code": code, "X-Error-Message": "no\r\nthanks {endpoint}"},
        repo="a/b",
        revision="main",
        path="c",
        endpoint="https://hub",
        with_token=with_token,
    )
    assert all((problem.found, problem.needed, problem.do))
    assert "\n" not in problem.found + problem.needed + problem.do


# The token


@pytest.mark.parametrize(
    ("token", "named"),
    [
        ("hf_abc\n", "a line break"),
        ("hf_\rabc", "a line break"),
        ("hf_a bc", "a space"),
        ("hf_abc\t", "a tab"),
        ("hf_äbc", "not ASCII"),
        ("hf_\x00", "control"),
        ("hf_\x7f", "not ASCII"),
    ],
)
def test_a_token_that_cannot_stand_in_a_header_is_refused_without_showing_it(token: str, named: str) -> None:
    with pytest.raises(Problem) as caught:
        client.check_token(token)
    assert caught.value.code == "token-form"
    assert named in caught.value.found
    assert "hf_" not in caught.value.found


def test_the_token_comes_from_the_units_credential_first_then_from_the_environment(tmp_path: Path) -> None:
    assert client.token_from({}) is None
    assert client.token_from({"HF_TOKEN": ""}) is None
    assert client.token_from({"HF_TOKEN": "hf_env"}) == "hf_env"
    (tmp_path / "hf_token").write_text("hf_credential")
    both = {"HF_TOKEN": "hf_env", "CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert client.token_from(both) == "hf_credential"
    (tmp_path / "hf_token").write_text("hf_credential\n")
    with pytest.raises(Problem):
        client.token_from(both)


@pytest.mark.parametrize(
    "address",
    [
        "ftp://hub",
        "hub",
        "https://",
        "https://user:secret@hub",
        "https://hub?x=1",
        "https://hub#x",
        "file:///etc",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://127.0.0.1:port",
        "http://[::1",
        "http://..",
        "http://hub..example",
        "http://" + "x" * 64,
        "http://hub example",
        "https://user:secret@[::1",
        "https://secret@hub",
    ],
)
def test_an_address_that_is_none_of_a_hub_is_refused(address: str) -> None:
    with pytest.raises(Problem) as caught:
        client.clean_endpoint(address)
    assert caught.value.code == "hub-endpoint"
    assert "secret" not in str(caught.value)


def test_the_address_comes_from_the_argument_then_the_environment() -> None:
    assert client.clean_endpoint(None, {}) == "https://huggingface.co"
    assert client.clean_endpoint(None, {"HF_ENDPOINT": "http://mirror/"}) == "http://mirror"
    assert client.clean_endpoint("http://a/b/", {"HF_ENDPOINT": "http://mirror"}) == "http://a/b"


@pytest.mark.parametrize(
    ("said", "wait"),
    [
        ("2", 2.0),
        ("0", 0.0),
        ("-5", 0.0),
        ("99999", client.LONGEST_WAIT_S),
        ("inf", client.LONGEST_WAIT_S),
        ("Fri, 13 Nov 2026 10:00:07 GMT", 7.0),
        ("Fri, 13 Nov 2020 10:00:07 GMT", 0.0),
        ("nan", None),
        ("soon", None),
        ("", None),
    ],
)
def test_the_time_to_wait_is_read_as_seconds_or_a_date_and_capped(said: str, wait: float | None) -> None:
    assert client.retry_after({"Retry-After": said}, now=1794564000.0) == wait


def test_one_site_is_one_host_and_its_effective_port_however_it_is_written() -> None:
    same = [
        ("https://hub", "https://HUB:443/path?x=1"),
        ("http://hub:80", "http://hub"),
        ("http://hub", "https://hub"),
        ("https://[::1]:7080/a", "http://[::1]:7080"),
    ]
    other = [
        ("https://hub", "https://hub:8443"),
        ("https://hub", "https://hub.example"),
        ("http://hub:443", "http://hub"),
        ("https://hub", "ftp://hub"),
        ("https://hub", "/relative"),
        ("/relative", "/relative"),
        ("https://hub:port", "https://hub:port"),
        ("http://[::1", "http://[::1"),
    ]
    for one, two in same:
        assert client.same_site(one, two), (one, two)
        assert client.same_site(two, one), (two, one)
    for one, two in other:
        assert not client.same_site(one, two), (one, two)
        assert not client.same_site(two, one), (two, one)


# What stands around the Hub: proxies, certificates, settings


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"HTTPS_PROXY": "socks5://proxy:1080"}, "HTTPS_PROXY"),
        ({"all_proxy": "SOCKS5H://proxy:1080"}, "all_proxy"),
        ({"http_proxy": "ftp://proxy:21"}, "http_proxy"),
        ({"HTTPS_PROXY": "http://proxy:99999"}, "HTTPS_PROXY"),
        ({"HTTPS_PROXY": "proxy:port"}, "HTTPS_PROXY"),
        ({"HTTPS_PROXY": "http://"}, "HTTPS_PROXY"),
        ({"HTTPS_PROXY": "http://[::1"}, "HTTPS_PROXY"),
        ({"HTTPS_PROXY": "http://user:secret@proxy:99999"}, "HTTPS_PROXY"),
        ({"HTTPS_PROXY": "socks5://user:secret@proxy:1080"}, "HTTPS_PROXY"),
        ({"SSL_CERT_FILE": "/nowhere/ca.pem"}, "/nowhere/ca.pem"),
        ({"SSL_CERT_FILE": "/"}, "SSL_CERT_FILE"),
        ({"SSL_CERT_FILE": __file__}, "SSL_CERT_FILE"),
    ],
)
def test_a_variable_that_no_client_can_use_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(Problem) as caught:
        client.require_network(environ)
    assert caught.value.code in ("proxy", "certificates")
    assert named in caught.value.found
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HTTPS_PROXY": "http://proxy.example:3128/", "HTTP_PROXY": "proxy_1:3128", "ALL_PROXY": ""},
        {"HTTPS_PROXY": "http://user:p%40ss@10.0.0.1:3128", "no_proxy": "localhost, 10.0.0.0/8"},
        {"HTTPS_PROXY": "http://[fd00::1]:3128"},
        {"HTTPS_PROXY": "socks5://proxy:1080", "https_proxy": "http://proxy:3128"},
        {"ALL_PROXY": "socks5://proxy:1080", "NO_PROXY": "localhost, *"},
        {"REQUESTS_CA_BUNDLE": "/nowhere", "SSL_CERT_DIR": "/nowhere"},  # not read, or passed over
    ],
)
def test_a_variable_that_the_clients_can_use_is_let_through(environ: dict[str, str]) -> None:
    client.require_network(environ)


@pytest.mark.parametrize("certificates", [True, False])
def test_a_bad_variable_stops_the_access_check_and_the_library(
    monkeypatch: pytest.MonkeyPatch, certificates: bool
) -> None:
    monkeypatch.setenv(*("SSL_CERT_FILE", "/nowhere") if certificates else ("ALL_PROXY", "socks4://proxy:1"))
    code = "certificates" if certificates else "proxy"
    for ask in (lambda: client.check_access(REPO, FIRST, "config.json"), client.library):
        with pytest.raises(Problem) as caught:
            ask()
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc", "hub-settings"),
        ("HF_HUB_ETAG_TIMEOUT", "x", "hub-settings"),
        ("HF_ENDPOINT", "http://127.0.0.1:99999", "hub-endpoint"),
        ("HF_ENDPOINT", "http://[::1", "hub-endpoint"),
        ("HF_ENDPOINT", "http://..", "hub-endpoint"),
        ("HTTPS_PROXY", "socks5://127.0.0.1:1", "proxy"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem", "certificates"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_object_that_names_it(
    hub: Hub, tmp_path: Path, variable: str, value: str, code: str
) -> None:
    """huggingface_hub printed to stdout on import."""
    environ = {**os.environ, "HF_ENDPOINT": hub.url, variable: value}
    words = [sys.executable, "-c", COMMAND, "lock", REPO, "--out", str(tmp_path / "x.json"), "--json"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    problem = json.loads(done.stdout)["problems"][0]
    assert problem["code"] == code
    assert variable in problem["found"] + problem["do"]
    assert value in problem["found"]


def test_a_broken_default_address_is_named_also_where_another_was_said(hub: Hub, tmp_path: Path) -> None:
    environ = {**os.environ, "HF_ENDPOINT": "http://[::1"}
    words = [sys.executable, "-c", COMMAND, "lock", REPO, "--endpoint", hub.url, "--json"]
    words += ["--out", str(tmp_path / "x.json")]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    problem = json.loads(done.stdout)["problems"][0]
    assert problem["code"] == "hub-settings"
    assert "HF_ENDPOINT" in problem["found"]


# Somebody else answers


class _Stranger(http.server.BaseHTTPRequestHandler):
    """One answer to every request: status, headers, body."""

    answer: ClassVar[tuple[int, dict[str, str], bytes]]

    def do_GET(self) -> None:
        status, headers, body = self.answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def stranger(status: int, headers: dict[str, str], body: bytes = b"") -> Iterator[str]:
    """The address of a server that is no Hub."""
    handler = type("Handler", (_Stranger,), {"answer": (status, headers, body)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


COMMIT_JSON = json.dumps({"id": REPO, "sha": FIRST, "siblings": [], "tags": [], "private": False})


@pytest.mark.parametrize(
    "body",
    [
        b"<html><title>Log in</title></html>",
        COMMIT_JSON[:20].encode(),
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"7",
        b'{"sha": "main"}',
        b'{"id": "acme/model"}',
        b'{"id": "acme/model", "sha": 7, "createdAt": "soon"}',
        COMMIT_JSON.encode(),  # and the same for the list of files
        b"[" * 100_000,
    ],
)
def test_an_answer_that_is_no_hubs_is_told_with_the_address(body: bytes) -> None:
    with stranger(200, {"Content-Type": "text/html"}, body) as address, pytest.raises(Problem) as caught:
        client.resolve(REPO, "main", endpoint=address)
    assert caught.value.code == "hub-answer"
    assert address in caught.value.found
    assert "captive portal" in caught.value.needed


@pytest.mark.parametrize("location", ["/loop", "http://[::1", "http://host:port/", "http://..", ""])
@pytest.mark.parametrize("status", [302, 307, 308])
def test_a_redirect_that_leads_nowhere_is_told_with_the_address(location: str, status: int) -> None:
    with stranger(status, {"Location": location} if location else {}) as address:
        for ask in (
            lambda: client.check_access(REPO, FIRST, "config.json", endpoint=address),
            lambda: client.resolve(REPO, "main", endpoint=address),
        ):
            with pytest.raises(Problem) as caught:
                ask()
            assert caught.value.code in ("hub-answer", "hub-unreachable")
            assert address in caught.value.found


class _Renamed(_Stranger):
    """acme/old is acme/model now; what arrives at the new name is written down."""

    arrived: ClassVar[list[tuple[str, str, str | None]]]

    def do_HEAD(self) -> None:
        renamed = self.path.replace("/acme/old/", f"/{REPO}/")
        type(self).answer = (307, {"Location": renamed}, b"") if renamed != self.path else (200, {}, b"{}")
        if renamed == self.path:
            self.arrived.append((self.command, self.path, self.headers["Authorization"]))
        self.do_GET()


def test_a_renamed_repository_is_followed_within_the_site() -> None:
    _Renamed.arrived = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Renamed) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        found = client.check_access("acme/old", FIRST, "config.json", token=READER_TOKEN, endpoint=address)
        server.shutdown()
    assert (found["status"], found["size"]) == (200, 2)
    assert _Renamed.arrived == [("HEAD", f"/{REPO}/resolve/{FIRST}/config.json", f"Bearer {READER_TOKEN}")]


def test_a_redirect_to_another_site_is_the_answer_and_the_token_stays_here(hub: Hub) -> None:
    with stranger(307, {"Location": f"{hub.url}/{REPO}/resolve/{FIRST}/config.json"}) as address:
        found = client.check_access(REPO, FIRST, "config.json", token=READER_TOKEN, endpoint=address)
    assert found["status"] == 307
    assert hub.requests() == []


def test_a_size_that_is_no_number_is_no_fault_of_ours() -> None:
    with stranger(200, {"X-Linked-Size": "many"}) as address:
        assert client.check_access(REPO, FIRST, "config.json", endpoint=address)["size"] is None
        with pytest.raises(Problem) as caught:
            client.check_access(
                REPO,
                FIRST,
                "x",
                endpoint=address,
                expected=LockedFile("x", 1, git_blob_sha1="a" * 40),
            )
    assert caught.value.code == "hub-differs"


# Revisions


@pytest.mark.parametrize(("mode", "wait"), [("429", 1), ("503", 7)])
def test_a_busy_hub_is_asked_again_for_the_list_too(
    hub: Hub, mode: str, wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 41."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    hub.mode(mode, times=2, retry_after=wait)
    assert client.resolve(REPO, "main", endpoint=hub.url).revision == FIRST
    assert [request["status"] for request in hub.requests()][:3] == [int(mode), int(mode), 200]
    assert waited == [wait, wait]


def test_a_hub_that_stays_busy_ends_the_list_in_words_too(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    hub.mode("429", retry_after=9999)
    with pytest.raises(Problem) as caught:
        client.resolve(REPO, "main", endpoint=hub.url)
    assert caught.value.code == "rate-limited"
    assert waited == [client.LONGEST_WAIT_S] * 3


def test_a_busy_hub_that_names_no_time_is_asked_again_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    with stranger(503, {}) as address:
        monkeypatch.setattr(time, "sleep", waited.append)
        with pytest.raises(Problem) as caught:
            client.resolve(REPO, "main", endpoint=address)
    assert caught.value.code == "hub-busy"
    assert waited == [1.0, 2.0, 3.0]


def test_an_empty_repository_is_told_for_what_it_is(tmp_path: Path) -> None:
    make_repo(tmp_path / "hub", REPO, {}, revision=FIRST)
    with Hub(tmp_path / "hub") as running, pytest.raises(Problem) as caught:
        client.resolve(REPO, "main", endpoint=running.url)
    assert caught.value.code == "repo-empty"
    assert "version control" not in caught.value.do


def test_a_file_that_no_lock_may_hold_is_told_for_what_it_is_unless_left_out(tmp_path: Path) -> None:
    files = {"config.json": b"{}", ".sparkpair/odd": b"x"}
    make_repo(tmp_path / "hub", REPO, files, revision=FIRST)
    with Hub(tmp_path / "hub") as running:
        with pytest.raises(Problem) as caught:
            client.resolve(REPO, "main", endpoint=running.url)
        assert caught.value.code == "hub-listing"
        assert ".sparkpair/odd" in caught.value.found
        assert "--include" in caught.value.do
        assert "version control" not in caught.value.do
        lock = client.resolve(REPO, "main", include=["*.json"], endpoint=running.url)
        assert [entry.path for entry in lock.files] == ["config.json"]
        with pytest.raises(Problem) as caught:
            client.resolve(REPO, "main", include=["*.bin"], endpoint=running.url)
        assert caught.value.code == "lock-empty"


def test_a_branch_a_full_and_an_abbreviated_commit_mean_the_same_lock(hub: Hub) -> None:
    by_branch = client.resolve(REPO, "main", endpoint=hub.url)
    assert by_branch.revision == FIRST
    assert client.resolve(REPO, FIRST, endpoint=hub.url) == by_branch
    assert client.resolve(REPO, FIRST[:8], endpoint=hub.url) == by_branch
    assert {entry.path: entry.algorithm for entry in by_branch.files} == {
        "config.json": "git_blob_sha1",
        SHARD: "sha256",
    }


def test_an_older_commit_is_found_by_its_abbreviation(hub: Hub, tmp_path: Path) -> None:
    publish(tmp_path / "hub", REPO, {"config.json": b"[]"}, revision="f" * 40)
    assert client.resolve(REPO, FIRST[:8], endpoint=hub.url).revision == FIRST
    assert client.resolve(REPO, endpoint=hub.url).revision == "f" * 40


def test_an_abbreviation_that_fits_two_commits_names_both(hub: Hub, tmp_path: Path) -> None:
    publish(tmp_path / "hub", REPO, {"config.json": b"[]"}, revision=TWIN)
    with pytest.raises(Problem) as caught:
        client.resolve(REPO, "ab12", endpoint=hub.url)
    assert caught.value.code == "revision-ambiguous"
    assert FIRST in caught.value.found
    assert TWIN in caught.value.found


@pytest.mark.parametrize("revision", ["deadbeef", "no-such-branch", "e" * 40, "../x", "a b", "-x", ""])
def test_a_revision_that_is_not_there_is_named(hub: Hub, revision: str) -> None:
    with pytest.raises(Problem) as caught:
        client.resolve(REPO, revision, endpoint=hub.url)
    assert caught.value.code == "revision-unknown"
    assert revision in caught.value.found


def test_resolving_tells_refusals_apart_as_the_access_check_does(hub: Hub) -> None:
    for repo, token, code in (
        ("acme/misspelt", READER_TOKEN, "repo-unknown"),
        ("acme/misspelt", None, "token-missing"),
        (PRIVATE, None, "token-missing"),
        (REPO, "hf_nobody", "token-refused"),
        ("a/b/c", None, "repo-unknown"),
    ):
        with pytest.raises(Problem) as caught:
            client.resolve(repo, token=token, endpoint=hub.url)
        assert caught.value.code == code, repo


def test_a_gated_repository_is_locked_as_gated(hub: Hub) -> None:
    assert client.resolve(GATED, endpoint=hub.url, token=READER_TOKEN).gated
    assert not client.resolve(REPO, endpoint=hub.url).gated


# The lock file


def test_a_first_lock_is_written_and_shows_what_it_pinned(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "locks" / "x.json"
    pinned = pinning.pin(path, REPO, "main", endpoint=hub.url)
    assert pinned.changed
    assert pinned.lines[0] == f"pinned   {REPO} @ {FIRST}"
    assert locks.load(path) == pinned.lock


def test_a_later_change_on_the_hub_changes_nothing_until_a_refresh(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    pinning.pin(path, REPO, "main", endpoint=hub.url)
    before = path.read_text()
    publish(tmp_path / "hub", REPO, {"config.json": b"[1]", "new.json": b"1"}, revision="f" * 40)
    since = len(hub.requests())
    kept = pinning.pin(path, REPO, "main", endpoint=hub.url)
    assert (kept.changed, kept.lock.revision, hub.requests(since=since)) == (False, FIRST, [])
    looked = pinning.pin(path, REPO, "main", look=True, endpoint=hub.url)
    assert not looked.changed
    assert path.read_text() == before
    assert [line.split()[:2] for line in looked.lines[1:]] == [
        ["changed", "config.json"],
        ["added", "new.json"],
    ]
    planned = pinning.pin(path, REPO, "main", refresh=True, dry_run=True, endpoint=hub.url)
    assert planned.changed
    assert path.read_text() == before
    assert pinning.pin(path, REPO, "main", refresh=True, endpoint=hub.url).lines == looked.lines
    assert locks.load(path).revision == "f" * 40
    assert not pinning.pin(path, REPO, "main", refresh=True, endpoint=hub.url).changed


def test_a_lock_edited_by_hand_stops_before_any_request(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"repo": REPO, "revision": FIRST, "files": [{"path": "../x", "size": 1}]}))
    with pytest.raises(Problem) as caught:
        pinning.pin(path, REPO, "main", look=True, endpoint=hub.url)
    assert caught.value.code == "lock-bad"
    assert "--refresh" in caught.value.do
    assert hub.requests() == []


@pytest.mark.parametrize("text", [b"", b'{"repo": "acme', b"\xff\xfe", b'{"repo": "acme/model"}'])
def test_a_refresh_replaces_a_damaged_lock_as_its_message_advises(
    hub: Hub, tmp_path: Path, text: bytes
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    foreseen = pinning.pin(path, REPO, "main", refresh=True, dry_run=True, endpoint=hub.url)
    assert foreseen.changed
    assert path.read_bytes() == text
    pinned = pinning.pin(path, REPO, "main", refresh=True, endpoint=hub.url)
    assert pinned.changed
    assert pinned.lines[0].startswith("unread   the old lock")
    assert str(path) in pinned.lines[0]
    assert locks.load(path) == pinned.lock
    assert not pinning.pin(path, REPO, "main", refresh=True, endpoint=hub.url).changed


def test_the_command_locks_what_it_is_told_and_gives_one_json_object(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    words = [f"{REPO}@{FIRST[:8]}", "--include", "*.json", "--out", str(out), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "lock", *words],
        env={**os.environ, "HF_ENDPOINT": hub.url},
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["ok"]
    assert said["changed"]
    assert said["revision"] == FIRST
    assert [entry.path for entry in locks.load(out).files] == ["config.json"]


def test_an_empty_revision_is_refused_and_none_is_main() -> None:
    assert client.split_name("owner/name") == ("owner/name", "main")
    assert client.split_name("owner/name@v1") == ("owner/name", "v1")
    repo, revision = client.split_name("owner/name@")
    with pytest.raises(Problem) as caught:
        client.resolve(repo, revision, endpoint="http://127.0.0.1:9")
    assert caught.value.code == "revision-unknown"
