"""Another node by SSH: over the link and over nothing else, with our key and nobody's habits.

The route is looked at before anything is sent, and each connection is bound to the device it goes out of:
a link that goes down in the middle ends the connection, it doesn't move it to the LAN (field reports 2, 50).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import pairfile, paths, sysfs
from .link import rdma_of
from .problem import Problem

_TARGET = re.compile(
    r"(?:(?P<user>[A-Za-z_][\w.-]*)@)?(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(?P<folder>/[^ ]*)\Z"
)
_CONNECT_S = 10
_FOLDER = "sparkpair-peer-"
_FRESH_S = 5.0  # a folder this young may not have been locked yet
# Fastest first: with AES in the processor, GCM takes the least of it. The rest for peers without.
# Half the work of a login, and nothing secret travels here that would have to last against quantum computers.
_KEX = "^curve25519-sha256"
_CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr"


@dataclass(frozen=True)
class Target:
    """USER@ADDRESS:DIR taken apart. `address` is a name or an address without brackets."""

    user: str | None
    address: str
    folder: str


@dataclass(frozen=True)
class Route:
    """How packets to `address` leave this host: device, source address, whether through a gateway."""

    address: str
    device: str
    source: str
    gateway: str | None = None


@dataclass(frozen=True)
class Login:
    """How to log in. None leaves the choice to ssh and the user's own configuration.

    Without `identity` the user's ssh configuration is read; with it, only what is said here counts.
    """

    user: str | None = None
    identity: Path | None = None
    known_hosts: Path | None = None
    port: int | None = None


def parse_target(text: str) -> Target:
    """USER@ADDRESS:DIR (an IPv6 address in brackets; DIR absolute, printable, no spaces). Raises Problem.

    DIR loses its doubled slashes and its `.` parts; `..` is refused, since what it leads to depends on
    which folders are there already.
    """
    match = _TARGET.match(text) if text.isprintable() else None
    parts = match["folder"].split("/") if match else []
    if ".." in parts:
        raise Problem(
            found=f"the target {text!r} has a part '..'",
            needed="the folder by its own name",
            do="name the folder that is meant, without '..'",
            code="target-bad",
        )
    if not match or match["host"].startswith("-"):
        raise Problem(
            found=f"the target {text!r}",
            needed="USER@ADDRESS:DIR, the folder absolute and without spaces",
            do=f"name the peer by its link address: --to {paths.SERVICE_USER}@10.20.0.2:{paths.WEIGHTS}/NAME",
            code="target-bad",
        )
    return Target(
        match["user"],
        match["host"].strip("[]"),
        "/" + "/".join(part for part in parts if part not in ("", ".")),
    )


def require_login_files(identity: Path | None, known_hosts: Path | None) -> None:
    """Refuse a key or a file of host keys that is not there: ssh would only say that it was let in nowhere."""
    for path, what, option in (
        (identity, "private key", "identity"),
        (known_hosts, "file with the peer's host key", "known-hosts"),
    ):
        if path is not None and not path.is_file():
            raise Problem(
                found=f"--{option} {path} is {'no file' if path.exists() else 'absent'}",
                needed=f"the {what}",
                do="correct the path; ansible-playbook site.yml --tags link sets up both",
                code=f"{option}-missing",
            )


def route_to(address: str) -> Route | None:
    """The route that the kernel takes to `address` (a name is resolved first); None without one."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    number = str(found[4][0])
    family = "-6" if found[0] == socket.AF_INET6 else "-4"
    done = subprocess.run(
        ["ip", family, "-json", "route", "get", number], capture_output=True, text=True, check=False
    )
    return parse_route(done.stdout) if done.returncode == 0 else None


def parse_route(text: str) -> Route | None:
    """The route in what `ip -json route get` printed; None when it holds none."""
    try:
        row = json.loads(text)[0]
        return Route(row["dst"], row["dev"], row.get("prefsrc", ""), row.get("gateway"))
    except (ValueError, LookupError, TypeError):
        return None


def is_over_link(route: Route, subnets: Sequence[str], rdma_devices: Sequence[str]) -> bool:
    """Whether a route stays on this host or on the cable between the Sparks.

    With `subnets`, both ends must be in one of them; else the device must be the twin of an RDMA device.
    """
    if route.device == "lo":
        return True
    if route.gateway:
        return False
    if not subnets:
        return route.device in rdma_devices
    ends = [ipaddress.ip_address(end.partition("%")[0]) for end in (route.address, route.source) if end]
    return any(
        len(ends) == 2 and all(end in ipaddress.ip_network(subnet, strict=False) for end in ends)
        for subnet in subnets
    )


def require_link(
    address: str, subnets: Sequence[str], *, allow_lan: bool, node_root: Path = Path("/")
) -> Route | None:
    """The route to `address`. Raises Problem "link-unreachable" unless it goes over the link.

    Args:
        subnets: the link's; empty looks for RDMA twins below `node_root` instead.
        allow_lan: take any route, also an unknown one (None).
    """
    route = route_to(address)
    if allow_lan:
        return route
    tree = sysfs.read_tree(node_root)
    twins = sorted(name for name in tree.netdevs if rdma_of(tree, name))
    if route and is_over_link(route, subnets, twins):
        return route
    where = f"goes out of {route.device} (source {route.source or 'unknown'})" if route else "is unknown"
    if route and route.gateway:
        where += f" through the gateway {route.gateway}"
    raise Problem(
        found=f"link unreachable: the route to {address} {where}",
        needed=f"a route over the link ({', '.join(subnets) or ', '.join(twins) or 'no RDMA device is here'})",
        do="look at the link with sparkpair link; to copy over the LAN all the same, say so:"
        " --allow-lan (allow_lan_copy: true)",
        code="link-unreachable",
    )


def known_pair(path: Path = pairfile.FILE) -> pairfile.Pair | None:
    """This node's pair file, None where there is none yet."""
    return pairfile.load(path) if path.exists() else None


def link_addresses(address: str, pair: pairfile.Pair | None) -> list[str]:
    """All link addresses of the peer that has `address`, that one first."""
    for rank in pair.peers if pair else ():
        found = [rail.address for rail in rank.rails]
        if address in found:
            return [address, *(other for other in found if other != address)]
    return [address]


def ssh_config(login: Login, device: str | None) -> str:
    """The ssh configuration of one peer. `device`: the only network device to use."""
    lines = [
        "BatchMode yes",
        f"Ciphers {_CIPHERS}",
        f"KexAlgorithms {_KEX}",
        "Compression no",
        f"ConnectTimeout {_CONNECT_S}",
        "ServerAliveInterval 5",
        "ServerAliveCountMax 6",
        "ClearAllForwardings yes",
        "ForwardAgent no",
        "ForwardX11 no",
        "PermitLocalCommand no",
        "RequestTTY no",
        "EscapeChar none",
        "IPQoS throughput",
        "LogLevel ERROR",
        "ControlPersist no",
    ]
    if device and device != "lo":
        lines.append(f"BindInterface {device}")
    if login.port:
        lines.append(f"Port {login.port}")
    if login.known_hosts:
        lines += [f'UserKnownHostsFile "{login.known_hosts}"', "GlobalKnownHostsFile none"]
        lines.append("StrictHostKeyChecking yes")
    if login.identity:
        lines += [f'IdentityFile "{login.identity}"', "IdentitiesOnly yes"]
    else:
        lines += ["Include ~/.ssh/config", "Include /etc/ssh/ssh_config"]
    return "\n".join(lines) + "\n"


class Connection:
    """One TCP connection to a peer, kept open by a master; sessions on it start in a few milliseconds.

    Use as a context manager. The files live in `folder`, a private directory with a short name.
    """

    def __init__(self, address: str, login: Login, folder: Path, name: str, device: str | None) -> None:
        self.address = address
        self._login = login
        self._config = folder / f"{name}.conf"
        self._socket = folder / f"{name}.sock"
        self._said = folder / f"{name}.err"
        self._config.write_text(ssh_config(login, device))
        self._master: subprocess.Popen[bytes] | None = None
        self._limit = 0.0
        self._one = threading.Lock()

    @property
    def host(self) -> str:
        """What ssh is told: USER@ADDRESS."""
        return f"{self._login.user}@{self.address}" if self._login.user else self.address

    @property
    def rsync_host(self) -> str:
        """The same for rsync, which wants an IPv6 address in brackets."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self._login.user}@{address}" if self._login.user else address

    @property
    def rsh(self) -> str:
        """rsync's `-e`."""
        return shlex.join(self._ssh())

    def _ssh(self, *options: str) -> list[str]:
        return ["ssh", "-F", str(self._config), "-S", str(self._socket), *options]

    def open(self) -> None:
        """Log in, unless it is open. Raises Problem with ssh's own words. May be called from several threads."""
        with self._one:
            if self._master is None or self._master.poll() is not None:
                self._start()
            while not self._socket.exists():
                if self._master is None or self._master.poll() is not None:
                    raise _no_login(self.host, self._said.read_text(errors="replace"))
                if time.monotonic() > self._limit:
                    self.close()
                    raise _no_login(self.host, f"no login within {3 * _CONNECT_S} s")
                time.sleep(0.005)

    def _start(self) -> None:
        self._socket.unlink(missing_ok=True)
        with self._said.open("wb") as said:
            self._master = spawn(
                self._ssh("-M", "-N", "--", self.host),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        self._limit = time.monotonic() + 3 * _CONNECT_S

    def close(self) -> None:
        """End the connection and all that runs on it."""
        if self._master:
            end(self._master)
        self._master = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, words: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run `words` there to their end. Raises Problem when the connection fails (ssh's exit code 255)."""
        self.open()
        done = subprocess.run(
            self.command(words), input=stdin, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode == 255:
            raise _no_login(self.host, done.stderr)
        return done

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` there, on the open connection."""
        return self._ssh("--", self.host, shlex.join(words))


def _no_login(host: str, said: str) -> Problem:
    text = " | ".join(line.strip() for line in said.splitlines() if line.strip())[-300:] or "ssh ended"
    if "Permission denied" in text:
        needed, code = "the peer to accept this key for this user", "peer-refuses-key"
    elif "Host key verification failed" in text or "host key" in text.lower():
        needed, code = "the peer's host key as it was recorded", "peer-host-key"
    else:
        needed, code = "an sshd that answers at the link address", "link-unreachable"
    return Problem(
        found=f"no SSH to {host}: {text}",
        needed=needed,
        do="ansible-playbook site.yml --tags link sets up keys and addresses; sparkpair link shows the rails",
        code=code,
        host=host,
    )


@contextlib.contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """A directory of our own with a name short enough for a socket. Removes those of killed processes."""
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=parent) as name:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)  # gone with the process, whatever ends it
        try:
            yield Path(name)
        finally:
            os.close(fd)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                found = os.fstat(fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _FRESH_S:
                    shutil.rmtree(path)
            finally:
                os.close(fd)


def spawn(words: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own that ends when this process is killed.

    That signal comes when the *thread* ends that started the command, so one lasting thread starts all.
    """
    program = shutil.which("setpriv")
    guard = [program, "--pdeathsig", "TERM", "--"] if program else []
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    return _spawner().submit(start, [*guard, *words], start_new_session=True, **streams).result()


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="spawn")


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process that was started in its own session, and what it started."""
    for signal_number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
