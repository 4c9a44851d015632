"""Programs of the host, run and reported on in one way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkpair.problem import Problem


def run(
    *argv: str | Path,
    check: bool = True,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a program to its end. Returns stdout; a failure is a Problem with the last lines it wrote."""
    words = [str(word) for word in argv]
    done = subprocess.run(
        words, input=stdin, capture_output=True, check=False, cwd=cwd, env={**os.environ, **(env or {})}
    )
    if check and done.returncode:
        tail = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-8:]
        raise Problem(
            found=f"{' '.join(words)} ended with {done.returncode}: {' / '.join(tail) or 'no output'}",
            needed="this step of the rehearsal to work",
            do="mend what the message names, then run the same command again",
            code="command-failed",
        )
    return done.stdout.decode(errors="replace")


def start(
    argv: Sequence[str | Path], log: Path, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> int:
    """Start a program that outlives this one: own session, own log. Returns its pid."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    return child.pid


def command_line(pid: int) -> list[str]:
    """The words of a running process; empty when there is none (or it has none, as a zombie)."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.rstrip(b"\0").decode(errors="replace").split("\0") if raw else []


def alive(pid: int) -> bool:
    """True while a process runs. A zombie does not; one that is just becoming another program does."""
    _reap(pid)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes() -> Iterator[tuple[int, list[str]]]:
    """Each process of this machine with its words."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = command_line(int(entry.name))
            if words:
                yield int(entry.name), words


def pid_of(pid_file: Path, *marks: str) -> int | None:
    """The live process that a pid file names, if its command line holds each mark.

    A pid file outlives its process, and the number goes to another one: the marks tell them apart.
    """
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return None
    line = " ".join(command_line(pid))
    return pid if line and all(mark in line for mark in marks) else None


def stop(pid: int, wait_s: float = 10.0) -> None:
    """End one process, by force when it has not gone after `wait_s`."""
    for sign, patience in ((signal.SIGTERM, wait_s), (signal.SIGKILL, 5.0)):
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            return
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if not alive(pid):
                return
            time.sleep(0.05)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"  # Ubuntu comes without it

# Debian's and Ubuntu's package for each program that the rehearsal starts on the host, and for a file it reads.
_PACKAGE_OF = {
    "dockerd": "docker.io",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "git": "git",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "sshd": "openssh-server",
    "ping": "iputils-ping",
    "nft": "nftables",
    DEBIAN_KEYRING: "debian-archive-keyring",
}


def may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def ensure_programs(*names: str) -> list[str]:
    """Install what is missing of `names`. Returns the packages that were installed."""
    missing = sorted({_PACKAGE_OF[name] for name in names if not _is_there(name)})
    if not missing:
        return []
    if not may_install():
        raise Problem(
            found=f"this machine lacks {', '.join(missing)}, and this user may not install packages",
            needed=f"the programs {', '.join(names)}",
            do=f"sudo apt-get install {' '.join(missing)}",
            code="missing-programs",
        )
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-q", _PATIENT, env=quiet)
    _install_quietly(missing, quiet)
    return missing


_PATIENT = "-oDPkg::Lock::Timeout=300"  # unattended upgrades hold the lock for minutes


def _is_there(name: str) -> bool:
    if name.startswith("/"):
        return Path(name).exists()
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # a user's PATH lacks them on Debian
    return shutil.which(name, path=path) is not None


def _install_quietly(packages: Sequence[str], env: Mapping[str, str]) -> None:
    """Install without starting a service: the rehearsal runs a Docker engine and an sshd of its own.

    `policy-rc.d` with exit code 101 is Debian's way to say "start nothing"; an existing one is kept.
    """
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        run("apt-get", "install", "-y", "-q", _PATIENT, "--no-install-recommends", *packages, env=env)
    finally:
        if ours:
            policy.unlink()
