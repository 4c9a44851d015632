"""Replicate with verification against the plain way: `rsync -a` over default ssh, then `sha256sum -c` there.

Run from the project's folder: .venv/bin/python benchmarks/replicate.py [--json] [--megabytes N] [--streams N]
Both go through the same sshd of our own on 127.0.0.1, in turn, to a folder on the same disk; the source is
verified and out of the page cache. Needs openssh-server and rsync. Budgets: >= 2 x as fast; the bytes on the
link (counted by the kernel on lo) <= 1.05 x the data.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sparkpair import locks, pagecache, verify

from benchmarks.report import tell
from benchmarks.verify import SPARKPAIR, cool, make_data, seconds

ROUNDS = 4
RATIO, WIRE = 2.0, 1.05
Row = dict[str, Any]


@dataclass
class Site:
    """A throw-away sshd and the keys to it."""

    folder: Path
    port: int

    @property
    def login(self) -> str:
        return f"{getpass.getuser()}@127.0.0.1"

    def ssh(self) -> list[str]:
        """ssh as it comes, but for the way to our sshd."""
        known = f"UserKnownHostsFile={self.folder}/known"
        return ["ssh", "-F", "none", "-p", str(self.port), "-i", f"{self.folder}/key", "-o", known]


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if not program or not shutil.which("rsync"):
        raise SystemExit("found: no sshd or rsync\nneeded: both\ndo: apt-get install openssh-server rsync")
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{name}"], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}\n")
    (folder / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nMaxStartups 50\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([program, "-D", "-f", f"{folder}/sshd.conf"], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield Site(folder, port)
    finally:
        server.terminate()
        server.wait(10)


def link_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def clear(there: Path) -> None:
    """An empty receiver and a quiet disk."""
    shutil.rmtree(there, ignore_errors=True)
    os.sync()


def plain(here: Path, there: Path, sums: Path, at: Site) -> float:
    """Seconds of the plain way."""
    rsync = ["rsync", "-a", "-e", shlex.join(at.ssh()), f"{here}/", f"{at.login}:{there}/"]
    check = [
        *at.ssh(),
        at.login,
        f"cd {shlex.quote(str(there))} && sha256sum --quiet -c {shlex.quote(str(sums))}",
    ]
    return seconds(lambda: [subprocess.run(words, check=True) for words in (rsync, check)])


def ours(here: Path, there: Path, lock: Path, at: Site, streams: int | None) -> tuple[float, dict[str, Any]]:
    """Seconds of `sparkpair replicate` as a command, and what it told."""
    words = [
        *(
            str(SPARKPAIR),
            "replicate",
            "--lock",
            str(lock),
            "--dir",
            str(here),
            "--to",
            f"{at.login}:{there}",
        ),
        *("--port", str(at.port), "--identity", f"{at.folder}/key", "--known-hosts", f"{at.folder}/known"),
        *(("--streams", str(streams)) if streams else ()),
        "--json",
    ]
    told: dict[str, Any] = {}

    def work() -> None:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        told.update(json.loads(done.stdout))

    return seconds(work), told


def rows(megabytes: int, streams: int | None, directory: Path) -> list[Row]:
    """All rows: {"name", "value", "budget", "ok", ...}."""
    directory.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=directory.absolute()) as name,
        tempfile.TemporaryDirectory(prefix="sparkpair-bench-") as keys,
        site(Path(keys)) as at,
    ):
        here, there, lock_path, sums = (Path(name, part) for part in ("here", "there", "lock.json", "sums"))
        here.mkdir()
        lock = make_data(here, megabytes)
        lock_path.write_text(locks.dump(lock))
        sums.write_text("".join(f"{entry.sha256}  {entry.path}\n" for entry in lock.files))
        verify.verify(lock, here, quiet=True)
        theirs_s, ours_s, wire, kept = [], [], 0, 0
        for _ in range(ROUNDS):
            clear(there)
            cool(here)
            theirs_s.append(plain(here, there, sums, at))
            clear(there)
            cool(here)
            before = link_bytes()
            spent, told = ours(here, there, lock_path, at, streams)
            ours_s.append(spent)
            wire = max(wire, link_bytes() - before)
            if told["files"] != len(lock.files) or not verify.verify(lock, there, quiet=True).ok:
                raise SystemExit("the copy is not whole")
            kept = sum(
                pagecache.resident_bytes(entry)
                for side in (here, there)
                for entry in side.glob("*.safetensors")
            )
        again_s = ours(here, there, lock_path, at, streams)[0]
    # Both took turns under the same load of the machine, so the sums compare better than the best of each.
    ratio, share = sum(theirs_s) / sum(ours_s), wire / lock.total_bytes
    return [
        {
            "name": "replicate against rsync -a and sha256sum -c, both verified",
            "value": round(ratio, 2),
            "budget": f">= {RATIO}",
            "ok": ratio >= RATIO,
            "seconds": {"plain": [round(s, 2) for s in theirs_s], "sparkpair": [round(s, 2) for s in ours_s]},
        },
        {
            "name": "replicate: bytes on the link, share of the data",
            "value": round(share, 4),
            "budget": f"<= {WIRE}",
            "ok": share <= WIRE,
        },
        {
            "name": "replicate: left in the page cache of both sides, share of the data",
            "value": round(kept / lock.total_bytes, 4),
            "budget": "<= 0.05",
            "ok": kept <= 0.05 * lock.total_bytes,
        },
        {
            "name": "replicate again, nothing to send (s)",
            "value": round(again_s, 2),
            "budget": None,
            "ok": True,
        },
    ]


def main() -> int:
    """Print the rows; exit code 1 when one is over its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1500, help="of data (%(default)s)")
    parser.add_argument("--streams", type=int, help="parallel copies (default: the command's own)")
    parser.add_argument("--dir", type=Path, default=Path(".cache"), help="on a real disk (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    found = rows(arguments.megabytes, arguments.streams, arguments.dir)
    return tell(found, as_json=arguments.json, details=("seconds",))


if __name__ == "__main__":
    raise SystemExit(main())
