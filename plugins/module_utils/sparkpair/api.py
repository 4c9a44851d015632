"""Asking the served model: is it listed, and does a real completion come back?

A list of models proves a live HTTP thread and nothing more (field report 62), so readiness is a short
completion with a known answer that does not repeat itself.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .problem import Problem

# Two numbers whose sum no reply gives by chance, nor a stuck decoder by repetition.
_FIRST, _SECOND = 4179, 2658
QUESTION = f"What is {_FIRST} + {_SECOND}? Answer with the number alone."
ANSWER = str(_FIRST + _SECOND)

# What moves in /metrics while the pair works for anybody, and for how long that is looked at.
_WORK = re.compile(
    r"^tensorfold:(prompt_tokens|generation_tokens|decode_rounds)_total\s+([0-9.eE+]+)$", re.MULTILINE
)
_WATCH_S = 10


@dataclass(frozen=True)
class Endpoint:
    """Where the API is.

    Args:
        url: base with scheme and port, without /v1.
        key: the bearer key, or "" where none is asked for.
    """

    url: str
    key: str = ""

    def get(self, path: str, timeout: float = 10) -> Any:
        return self._call(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        return self._call(request, timeout)

    def text(self, path: str, timeout: float = 10) -> str:
        return self._read(urllib.request.Request(self.url + path), timeout).decode(errors="replace")

    def _call(self, request: urllib.request.Request, timeout: float) -> Any:
        return json.loads(self._read(request, timeout))

    def _read(self, request: urllib.request.Request, timeout: float) -> bytes:
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        # The API is never behind the proxy that the downloads may need.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout) as answer:
            content: bytes = answer.read()
            return content


def endpoint(host: str, port: int, key_file: Path | None) -> Endpoint:
    """The API as seen from the head itself. The key comes from the file, never from argv."""
    address = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104 - compared, not bound
    return Endpoint(f"http://{address}:{port}", first_key(key_file) if key_file else "")


def first_key(key_file: Path) -> str:
    """The first key of a key file: one a line, `label: key` allowed, # comments."""
    for line in key_file.read_text().splitlines():
        text = line.split("#", 1)[0].strip()
        if text:
            return text.rpartition(":")[2].strip()
    raise Problem(
        found=f"no key in {key_file}",
        needed="one key a line",
        do="remove the file and run the playbook again: a key is made anew",
        code="api-key-missing",
    )


def model_names(api: Endpoint) -> list[str]:
    """The ids that /v1/models lists."""
    return [str(entry["id"]) for entry in api.get("/v1/models").get("data", [])]


def ask(api: Endpoint, model: str, timeout: float) -> dict[str, Any]:
    """One short completion, thinking off, as any client would send it. Returns the whole reply."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 24,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    reply: dict[str, Any] = api.post("/v1/chat/completions", body, timeout)
    return reply


def judge(reply: dict[str, Any]) -> str | None:
    """Why a reply to `QUESTION` does not show a working model; None when it does."""
    try:
        text = reply["choices"][0]["message"]["content"] or ""
    except (KeyError, IndexError, TypeError):
        return "a reply without choices"
    if len(text) >= 4 and len(set(text.strip())) <= 1:
        return f"one character over and over: {text[:12]!r}"
    if ANSWER not in text.replace(",", "").replace(" ", ""):
        return f"a wrong answer to an easy sum: {text[:60]!r}"
    return None


@dataclass(frozen=True)
class Standing:
    """How the pair took one question: rightly where `wrong` is None. `busy`: no answer, but work for others."""

    wrong: str | None
    busy: bool = False

    @property
    def lives(self) -> bool:
        return self.wrong is None or self.busy


def standing(
    api: Endpoint, model: str, timeout: float, *, sleep: Callable[[float], None] = time.sleep
) -> Standing:
    """One try, and where no answer came in time, whether the pair is busy with others' requests.

    Four long prompts fill the pair, and it must not be started anew for that (field report 62). Our own
    question hangs in it as others' do in a dead one, so only counters that move tell the two apart.
    """
    wrong, is_late = _try(api, model, timeout)
    before = _work_done(api) if is_late else None
    for _ in range(_WATCH_S if before else 0):
        sleep(1.0)
        now = _work_done(api)
        if now and now != before:
            return Standing(wrong, busy=True)
    return Standing(wrong)


def _try(api: Endpoint, model: str, timeout: float) -> tuple[str | None, bool]:
    """What is wrong, in words (None: it answers rightly), and whether only the answer did not come in time."""
    try:
        names = model_names(api)
        if model not in names:
            return f"/v1/models lists {', '.join(names) or 'nothing'}, not {model}", False
        return judge(ask(api, model, timeout)), False
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code} from {error.url}", False
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"no answer: {reason}", isinstance(reason, TimeoutError)


def _work_done(api: Endpoint) -> dict[str, str]:
    """The counters of `_WORK`; empty where the engine does not say."""
    try:
        return dict(_WORK.findall(api.text("/metrics")))
    except (OSError, ValueError):
        return {}
