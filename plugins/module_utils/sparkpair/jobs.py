"""Long work as a transient systemd unit: it outlives the SSH session, is never doubled, and can be asked.

A job is `sparkpair-job-<name>.service`. Its folder /run/sparkpair/jobs/<name>/ holds what a follower
reads: `spec.json` (what was asked), `public/progress.json` (see `console.Progress`), `stdout` (the
command's one JSON object) and, once it ended, `exit` (systemd's own words for how).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import atomic, paths, systemd
from .console import PROGRESS_FILE, progress_line
from .problem import Problem

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,60}\Z")
_LONGEST_LOOK_S = 1.0


@dataclass(frozen=True)
class Job:
    """One piece of long work.

    Args:
        name: the unit is `sparkpair-job-<name>`.
        argv: the command, by absolute path; its stdout is one JSON object.
        user: whom it runs as.
        environment: variables without secrets.
        credentials: name -> secret, read by the command from $CREDENTIALS_DIRECTORY/<name>.
    """

    name: str
    argv: Sequence[str]
    user: str = "root"
    environment: Mapping[str, str] = field(default_factory=dict)
    credentials: Mapping[str, str] = field(default_factory=dict)
    base: Path = paths.JOBS

    def __post_init__(self) -> None:
        if not _NAME.match(self.name) or not self.argv or not str(self.argv[0]).startswith("/"):
            raise Problem(
                found=f"job {self.name!r} with command {list(self.argv)[:1]}",
                needed="a name of lower-case letters, digits and -, and a command by absolute path",
                do="correct the task that starts it",
                code="job-invalid",
            )

    @property
    def unit(self) -> str:
        return f"sparkpair-job-{self.name}.service"

    @property
    def folder(self) -> Path:
        return self.base / self.name

    def digest(self) -> str:
        """What is asked, as one value. Whoever asks, with a token or without, asks for the same work."""
        asked = {
            "argv": list(self.argv),
            "user": self.user,
            "environment": dict(sorted(self.environment.items())),
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def unit_command(job: Job) -> list[str]:
    """The `systemd-run` line of a job: every property visible, no secret in it."""
    folder = job.folder
    ended = f'echo "$SERVICE_RESULT $EXIT_CODE $EXIT_STATUS" > {folder}/exit; rm -rf {folder}/secrets'
    properties = [
        "Type=exec",
        f"Description=sparkpair: {job.name}",
        f"User={job.user}",
        # Not truncate: that would empty it again for ExecStopPost. `start` has removed an old one.
        f"StandardOutput=append:{folder}/stdout",
        # By default it would go where stdout goes, and progress would spoil the one JSON object.
        "StandardError=journal",
        # A long copy must not push the desktop or sshd aside.
        "Nice=5",
        "OOMScoreAdjust=500",
        "KillMode=mixed",
        # '+': as root, whatever the job's user; '$$' is one '$' to systemd, '%' is itself in a transient unit.
        f"ExecStopPost=+/bin/sh -c {_quoted(ended)}",
        *(f"LoadCredential={name}:{folder}/secrets/{name}" for name in sorted(job.credentials)),
    ]
    variables = {**job.environment, PROGRESS_FILE: f"{folder}/public/progress.json", "LC_ALL": "C.UTF-8"}
    return [
        "systemd-run",
        "--quiet",
        "--collect",
        f"--unit={job.unit}",
        *(f"--property={entry}" for entry in properties),
        *(f"--setenv={name}={value}" for name, value in sorted(variables.items())),
        "--",
        *map(str, job.argv),
    ]


def _quoted(script: str) -> str:
    """A shell script as one word of an Exec line of systemd."""
    escaped = script.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


def start(job: Job) -> bool:
    """Start the job, or attach to it. Returns False when it was running already, with the same request."""
    if is_active(job.unit):
        _require_same_request(job)
        return False
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    public = job.folder / "public"
    public.mkdir()
    shutil.chown(public, job.user)
    if job.credentials:
        secrets = job.folder / "secrets"
        secrets.mkdir(mode=0o700)
        for name, secret in job.credentials.items():
            with atomic.replacing(secrets / name, 0o600) as handle:
                handle.write(secret.encode())
    atomic.write_text(job.folder / "spec.json", json.dumps({"digest": job.digest(), "argv": list(job.argv)}))
    done = subprocess.run(unit_command(job), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(job.folder / "secrets", ignore_errors=True)
        raise Problem(
            found=f"systemd would not start {job.unit}: {done.stderr.strip() or done.stdout.strip()}",
            needed="a transient unit for long work",
            do=f"look at it: systemctl status {job.unit}; journalctl -u {job.unit}",
            code="job-not-started",
        )
    return True


def _require_same_request(job: Job) -> None:
    with contextlib.suppress(OSError, ValueError):
        if json.loads((job.folder / "spec.json").read_text())["digest"] == job.digest():
            return
    raise Problem(
        found=f"{job.unit} is running with another request",
        needed="one job of this name at a time",
        do=f"wait for it (journalctl -fu {job.unit}) or stop it: sudo systemctl stop {job.unit}",
        code="job-busy",
    )


def is_active(unit: str) -> bool:
    """Whether systemd holds the unit as running, starting or stopping."""
    return systemd.state(unit).active in {"active", "activating", "deactivating", "reloading"}


def query(name: str, base: Path = paths.JOBS, *, wait_s: float = 0) -> dict[str, Any]:
    """How a job stands: {"active", "progress" | None, "exit" | None, "result" | None, "log"}.

    "log" holds the last journal lines of a job that ended badly; "result" the command's JSON object.
    The answer comes when the job ends, at the latest after `wait_s` seconds: a question over SSH carries
    some 180 kB of module, so it is the node that waits, not a controller that asks again and again.
    """
    job = Job(name, ["/bin/true"], base=base)
    _await_end(job.unit, wait_s)
    active = is_active(job.unit)
    progress = _read_json(job.folder / "public" / "progress.json")
    if progress:
        progress["line"] = progress_line(progress)
    ended = None if active else _read(job.folder / "exit")
    state: dict[str, Any] = {
        "active": active,
        "progress": progress,
        "exit": ended.split() if ended else None,
        "result": None if active else _read_json(job.folder / "stdout"),
        "log": [],
    }
    if not active and (not ended or not ended.startswith("success")):
        state["log"] = systemd.last_lines(job.unit)
    return state


def _await_end(unit: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    pause = 0.1
    while (left := until - time.monotonic()) > 0 and is_active(unit):
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_LOOK_S)


def stop(name: str) -> bool:
    """End a job. Returns whether it was running."""
    job = Job(name, ["/bin/true"])
    if not is_active(job.unit):
        return False
    subprocess.run(["systemctl", "stop", job.unit], check=True)
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _read_json(path: Path) -> Any:
    text = _read(path)
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None
