"""Fixtures of the tests on a rehearsed pair: its nodes as root sees them, the API as any client sees it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import testinfra
from openai import OpenAI

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def world() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PROJECT / ".rehearsal/world.json").read_text())
    return found


def _host(world: dict[str, Any], name: str) -> Any:
    """A node as root sees it, not through the login that the playbooks use."""
    os.environ["DOCKER_HOST"] = world["docker_host"]
    return testinfra.get_host(f"docker://{world['nodes'][name]['container']}")


@pytest.fixture(scope="session")
def head(world: dict[str, Any]) -> Any:
    return _host(world, "spark-a")


@pytest.fixture(scope="session")
def worker(world: dict[str, Any]) -> Any:
    return _host(world, "spark-b")


@pytest.fixture(scope="session", params=["spark-a", "spark-b"])
def node(request: pytest.FixtureRequest, world: dict[str, Any]) -> Any:
    return _host(world, request.param)


@pytest.fixture(scope="session")
def key(head: Any) -> str:
    found: str = head.file("/etc/sparkpair/api-keys").content_string.strip()
    return found


@pytest.fixture(scope="session")
def url(world: dict[str, Any]) -> str:
    return f"http://{world['nodes']['spark-a']['address']}:8888"


@pytest.fixture(scope="session")
def client(url: str, key: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as made:
        yield made


def run(node: Any, command: str) -> str:
    """A command's output on a node; it must succeed."""
    done = node.run(command)
    assert done.rc == 0, f"{command}: {done.stdout} {done.stderr}"
    return str(done.stdout).strip()


def rehearsal(*words: str) -> str:
    """Run one command of the rehearsal."""
    done = subprocess.run(
        [sys.executable, "-m", "rehearsal", *words],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def hub_call(world: dict[str, Any], what: str, **body: Any) -> Any:
    """One of the stand-in hub's own switches."""
    url = f"{world['hub_url']}/_rehearsal/{what}"
    request = urllib.request.Request(url, data=json.dumps(body).encode() if body else None)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


@dataclass(frozen=True)
class Play:
    """How a playbook ended: exit code, whole output, and the recap's sums."""

    code: int
    output: str

    @property
    def changed(self) -> int:
        return sum(map(int, re.findall(r"changed=(\d+)", self.output)))


def play(playbook: str, *words: str, inventory: Path | None = None, **environment: str) -> Play:
    """Run a playbook of the project as a user does."""
    program = Path(sys.executable).parent / "ansible-playbook"
    done = subprocess.run(
        [
            str(program),
            "--inventory",
            str(inventory or PROJECT / "inventory/rehearsal.yml"),
            playbook,
            *words,
        ],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), **environment},
    )
    return Play(done.returncode, done.stdout + done.stderr)
