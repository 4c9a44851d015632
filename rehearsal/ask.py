"""Ask the served model as a stranger on this machine would, and print how to."""

from __future__ import annotations

import json
import shlex
import urllib.request
from pathlib import Path
from typing import Any

from sparkpair import atomic
from sparkpair.problem import Problem

PORT = 8888
MODEL = "DeepSeek-V4.1-Flash-1017"
QUESTION = "What is 17 + 25?"


def body(question: str = QUESTION) -> dict[str, Any]:
    """A chat request for one question."""
    return {"model": MODEL, "messages": [{"role": "user", "content": question}]}


def curl_line(url: str, key_file: Path) -> str:
    """A line for a shell; the key stays in its file."""
    return (
        f"curl -s {url}/chat/completions -H 'Content-Type: application/json' "
        f'-H "Authorization: Bearer $(cat {shlex.quote(str(key_file))})" -d {shlex.quote(json.dumps(body()))}'
    )


def keep_key(folder: Path, key: str) -> Path:
    """The API key in a file that only this user reads."""
    path = folder / "api-key"
    atomic.write_text(path, f"{key}\n", 0o600)
    return path


def ask(url: str, key: str, question: str = QUESTION) -> str:
    """The model's answer. Raises Problem when none comes."""
    request = urllib.request.Request(
        f"{url}/chat/completions",
        data=json.dumps(body(question)).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            reply = json.load(answer)
    except OSError as error:
        raise Problem(
            found=f"no answer from {url}: {error}",
            needed="the pair serving",
            do="ansible-playbook -i inventory/rehearsal.yml site.yml",
            code="no-answer",
        ) from error
    return str(reply["choices"][0]["message"]["content"])


def tell(state: Path, address: str, key: str) -> None:
    """Ask once and print question, answer, URL and curl line."""
    url = f"http://{address}:{PORT}/v1"
    print(f"asked:    {QUESTION}")
    print(f"answered: {ask(url, key)}")
    print(f"url:      {url}")
    print(f"ask it:   {curl_line(url, keep_key(state, key).resolve())}")
