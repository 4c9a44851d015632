"""Ready means a right answer, nothing less (field report 62)."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sparkpair import api, ready
from sparkpair.problem import Problem

MODEL = "DeepSeek-V4.1-Flash-1017"


def reply(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]}


class Server(ThreadingHTTPServer):
    text = api.ANSWER
    status = 200
    asked = 0
    hangs_s = 0.0
    rounds = 10
    rounds_per_look = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _send(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.server.rounds:
            self.server.rounds += self.server.rounds_per_look
            lines = f"# TYPE x counter\ntensorfold:decode_rounds_total {self.server.rounds}\n"
            data = (lines + "tensorfold:requests_running 4\n").encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        else:
            self._send({"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        self.server.asked += 1
        time.sleep(self.server.hangs_s)
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer secret-key":
            self._send({}, 401)
        else:
            self._send(reply(self.server.text), self.server.status)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def endpoint(server: Server, key: str = "secret-key") -> api.Endpoint:
    return api.Endpoint(f"http://127.0.0.1:{server.server_port}", key)


@pytest.mark.parametrize("text", ["6837", "The sum is 6,837.", "4179 + 2658 = 6837"])
def test_a_right_answer_is_taken(text: str) -> None:
    assert api.judge(reply(text)) is None


@pytest.mark.parametrize("text", ["!!!!!!!!", "", "6836", "I can't say", "aaaaaaaa"])
def test_garbage_is_not_ready(text: str) -> None:
    """A reply of one repeated character once passed a smoke test."""
    assert api.judge(reply(text)) is not None


@pytest.mark.parametrize("broken", [{}, {"choices": []}, {"choices": [{"message": None}]}])
def test_a_reply_of_another_form_is_not_ready(broken: dict[str, Any]) -> None:
    assert api.judge(broken) == "a reply without choices"


def test_the_models_list_alone_is_not_ready(server: Server) -> None:
    server.status = 500
    assert api.model_names(endpoint(server)) == [MODEL]
    assert "HTTP 500" in str(api.standing(endpoint(server), MODEL, 5).wrong)


def test_the_probe_uses_the_key(server: Server) -> None:
    """Field report 68: probes need the header too."""
    assert api.standing(endpoint(server), MODEL, 5).wrong is None
    assert "HTTP 401" in str(api.standing(endpoint(server, "wrong"), MODEL, 5).wrong)


def test_another_served_name_is_told(server: Server) -> None:
    assert "not other" in str(api.standing(endpoint(server), "other", 5).wrong)


def test_waiting_ends_at_once_when_a_rank_died(server: Server) -> None:
    """Field reports 60 and 63."""
    server.text = "not yet"
    dead = {
        "unit": "sparkpair-rank1.service",
        "runs": False,
        "result": "exit-code",
        "status": "1",
        "log": ["PeerDown"],
    }
    with pytest.raises(Problem) as caught:
        ready.wait(endpoint(server), MODEL, 600, lambda: [dead], sleep=lambda _: None)
    assert caught.value.code == "rank-died"
    assert "PeerDown" in caught.value.found


SILENT = {
    "unit": "sparkpair-rank1.service",
    "host": "spark-b",
    "runs": False,
    "asked": False,
    "result": "no answer",
    "status": "?",
    "log": ["10.20.0.2: no SSH", "10.21.0.2: no SSH"],
}
RUNS = {**SILENT, "runs": True, "asked": True, "log": []}


def test_one_lost_question_does_not_end_the_wait(server: Server) -> None:
    server.text = "not yet"
    told = iter([[SILENT], [RUNS], [SILENT]])

    def reports() -> list[dict[str, Any]]:
        now = next(told, None)
        if now is None:
            server.text = api.ANSWER
        return now or [RUNS]

    assert ready.wait(endpoint(server), MODEL, 600, reports, sleep=lambda _: None)["tries"] == 5


def test_a_peer_that_is_silent_twice_in_a_row_ends_the_wait(server: Server) -> None:
    server.text = "not yet"
    with pytest.raises(Problem) as caught:
        ready.wait(endpoint(server), MODEL, 600, lambda: [SILENT], sleep=lambda _: None)
    assert (caught.value.code, caught.value.host) == ("rank-unreachable", "spark-b")
    assert "10.21.0.2" in caught.value.found
    assert server.asked == 2


def test_a_rank_that_ended_counts_at_once_though_another_is_silent(server: Server) -> None:
    server.text = "not yet"
    ended = {**RUNS, "unit": "sparkpair-rank0.service", "runs": False, "result": "exit-code"}
    with pytest.raises(Problem) as caught:
        ready.wait(endpoint(server), MODEL, 600, lambda: [SILENT, ended], sleep=lambda _: None)
    assert caught.value.code == "rank-died"
    assert "rank0" in caught.value.found
    assert server.asked == 1


def test_waiting_ends_at_the_limit_with_the_last_thing_seen(server: Server) -> None:
    server.text = "!!!!"
    with pytest.raises(Problem) as caught:
        ready.wait(endpoint(server), MODEL, 0, lambda: [], sleep=lambda _: None)
    assert caught.value.code == "not-ready"
    assert "over and over" in caught.value.found


def test_waiting_ends_with_the_right_answer(server: Server) -> None:
    server.text = "not yet"

    def later(_: float) -> None:
        server.text = api.ANSWER

    assert ready.wait(endpoint(server), MODEL, 600, lambda: [], sleep=later)["tries"] == 2


def test_a_pair_that_works_for_others_is_busy_and_not_dead(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 62: a long prompt must not cost its owner the pair."""
    server.hangs_s, server.rounds_per_look = 1.0, 1
    found = api.standing(endpoint(server), MODEL, 0.2, sleep=lambda _: None)
    assert found.busy and found.lives and "timed out" in str(found.wrong)
    monkeypatch.setattr(ready, "TRY_S", 0.2)
    assert ready.wait(endpoint(server), MODEL, 600, lambda: [], sleep=lambda _: None)["busy"]


@pytest.mark.parametrize("rounds", [10, 0])
def test_a_pair_whose_counters_stand_still_is_dead_however_many_wait(server: Server, rounds: int) -> None:
    server.hangs_s, server.rounds = 1.0, rounds
    found = api.standing(endpoint(server), MODEL, 0.2, sleep=lambda _: None)
    assert not found.busy and not found.lives


def test_a_wrong_answer_is_wrong_however_busy_the_pair_is(server: Server) -> None:
    server.text, server.rounds_per_look = "!!!!", 1
    assert not api.standing(endpoint(server), MODEL, 5, sleep=lambda _: None).lives


def test_a_key_file_has_labels_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nlaptop: sk-abc # mine\n")
    assert api.first_key(path) == "sk-abc"
    path.write_text("# none\n")
    with pytest.raises(Problem):
        api.first_key(path)


def test_nobody_there_is_told_in_words() -> None:
    assert "no answer" in str(api.standing(api.Endpoint("http://127.0.0.1:9"), MODEL, 1).wrong)
    with pytest.raises(urllib.error.URLError):
        api.Endpoint("http://127.0.0.1:9").get("/v1/models", timeout=1)
