"""Proving the rails on the wire: who is at the other end, who has an address already, what gets through.

Which ports meet is learned from Ethernet frames of our own before any address exists; an address in
use is found by an ARP probe with a zero sender (as RFC 5227 does); a rail counts only if full-size packets
pass both ways and TCP does on the ranks' ports (field reports 4, 6, 10, 16 and 19).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .problem import Problem

ETHERTYPE = 0x88B5  # IEEE 802: local experimental
_MAGIC = b"sparkpair1 "
_BROADCAST = b"\xff" * 6
_CALL_EVERY_S = 0.15
_LINGER_S = 1.0
_ETH_ARP = 0x0806
_IP_ICMP_BYTES = 28

Heard = tuple[str, str, str]  # own netdev, other host, its netdev


# --- who is at the other end -------------------------------------------------------------------


def encode(source: bytes, call: Mapping[str, Any]) -> bytes:
    """One broadcast frame. `call`: {"token", "host", "netdev", "heard"}."""
    return _BROADCAST + source + struct.pack("!H", ETHERTYPE) + _MAGIC + json.dumps(call).encode()


def decode(frame: bytes, token: str) -> dict[str, Any] | None:
    """The call in a frame of this run; None for anything else."""
    body = frame[14:].rstrip(b"\0")
    if frame[12:14] != struct.pack("!H", ETHERTYPE) or not body.startswith(_MAGIC):
        return None
    try:
        call = json.loads(body[len(_MAGIC) :])
    except ValueError:
        return None
    good = isinstance(call, dict) and call.get("token") == token
    good = good and all(isinstance(call.get(key), str) for key in ("host", "netdev"))
    return call if good and isinstance(call.get("heard"), list) else None


@dataclass
class Exchange:
    """What one host has heard so far, and whether the others have heard it."""

    host: str
    others: frozenset[str]
    heard: set[Heard] = field(default_factory=set)
    confirmed: set[Heard] = field(default_factory=set)

    def take(self, own: str, call: Mapping[str, Any]) -> None:
        """Note a call that came in on `own`. Calls of this host by its other half are left out."""
        if call["host"] not in self.others:
            return
        self.heard.add((own, call["host"], call["netdev"]))
        for item in call["heard"]:
            if isinstance(item, list) and len(item) == 3 and item[1] == self.host:
                # They heard us: (their netdev, us, our netdev).
                self.confirmed.add((str(item[2]), call["host"], str(item[0])))

    @property
    def complete(self) -> bool:
        """All others heard, and each of those meetings known on both ends."""
        return {host for _, host, _ in self.heard} == self.others and self.heard <= self.confirmed


def find_meetings(
    netdevs: Sequence[str], host: str, others: Iterable[str], token: str, seconds: float = 10.0
) -> list[Heard]:
    """Call on every port and listen, while the other hosts do the same (run it on all at once).

    Returns (own netdev, other host, its netdev) of every call heard. Ends a moment after everything
    heard is confirmed, else after `seconds`. Needs root.
    """
    state = Exchange(host, frozenset(others))
    with contextlib.ExitStack() as stack:
        sockets: dict[int, tuple[socket.socket, str]] = {}
        for netdev in netdevs:
            sock = stack.enter_context(
                socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETHERTYPE))
            )
            sock.bind((netdev, ETHERTYPE))
            sock.setblocking(False)
            sockets[sock.fileno()] = (sock, netdev)
        deadline = time.monotonic() + seconds
        done_at: float | None = None
        while sockets and time.monotonic() < deadline:
            for sock, netdev in sockets.values():
                _call(sock, netdev, state, token)
            _listen(sockets, state, token)
            if not state.complete:
                done_at = None
            elif done_at is None:
                done_at = time.monotonic()
            elif time.monotonic() - done_at >= _LINGER_S:
                break
    return sorted(state.heard)


def _call(sock: socket.socket, netdev: str, state: Exchange, token: str) -> None:
    call = {"token": token, "host": state.host, "netdev": netdev, "heard": sorted(state.heard)}
    with contextlib.suppress(OSError):  # a port that went down hears nothing, and is not heard
        sock.send(encode(sock.getsockname()[4], call))


def _listen(sockets: Mapping[int, tuple[socket.socket, str]], state: Exchange, token: str) -> None:
    until = time.monotonic() + _CALL_EVERY_S
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select(list(sockets), [], [], left)
        for number in ready:
            sock, netdev = sockets[number]
            with contextlib.suppress(OSError):
                call = decode(sock.recv(2048), token)
                if call:
                    state.take(netdev, call)


# --- is the address free -----------------------------------------------------------------------


def arp_frame(source: bytes, address: str) -> bytes:
    """An ARP request for `address` whose sender address is zero: it changes nobody's table."""
    target = ipaddress.IPv4Address(address).packed
    header = _BROADCAST + source + struct.pack("!H", _ETH_ARP)
    return header + struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + source + bytes(4) + bytes(6) + target


def arp_owner(frame: bytes, address: str) -> str | None:
    """The MAC address that an ARP packet shows as owner of `address`; None for any other packet.

    A reply counts, and so does another host's own claim of it (an announcement).
    """
    if len(frame) < 42 or frame[12:14] != struct.pack("!H", _ETH_ARP):
        return None
    if frame[28:32] != ipaddress.IPv4Address(address).packed:
        return None
    return ":".join(f"{byte:02x}" for byte in frame[22:28])


def find_owner(netdev: str, address: str, own: Iterable[str], seconds: float = 1.0) -> str | None:
    """The MAC address of another machine that has `address` on this link already, None if nobody answers.

    Args:
        own: this machine's MAC addresses: its other half may answer on the same cable.
    """
    mine = {mac.lower() for mac in own}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_ARP)) as sock:
        sock.bind((netdev, _ETH_ARP))
        source = sock.getsockname()[4]
        mine.add(":".join(f"{byte:02x}" for byte in source))
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            sock.send(arp_frame(source, address))
            until = min(deadline, time.monotonic() + seconds / 3)
            while (left := until - time.monotonic()) > 0:
                ready, _, _ = select.select([sock], [], [], left)
                owner = arp_owner(sock.recv(2048), address) if ready else None
                if owner and owner not in mine:
                    return owner
    return None


def check_free(netdev: str, address: str, own: Iterable[str], seconds: float = 1.0) -> None:
    """Raise Problem (code link-duplicate) if another machine answers for `address` on this link."""
    try:
        owner = find_owner(netdev, address, own, seconds)
    except OSError as error:
        raise Problem(
            found=f"{netdev} can't be asked for {address}: {error.strerror}",
            needed="a port that is up",
            do=f"sudo ip link set {netdev} up, then run again",
            code="link-probe",
        ) from error
    if owner:
        raise Problem(
            found=f"{address} is in use already on the link of {netdev}, by {owner}",
            needed="an address that no other machine has",
            do="take it off that machine (ip neigh and ip -br addr on the other Spark show it), "
            "or plan others: link_subnets",
            code="link-duplicate",
        )


# --- what gets through -------------------------------------------------------------------------


def ping(netdev: str, peer: str, payload: int) -> bool:
    """True if two unfragmented packets of `payload` bytes out of `netdev` are answered."""
    words = ["ping", "-n", "-q", "-c", "2", "-i", "0.2", "-W", "2", "-M", "do", "-s", str(payload)]
    try:
        done = subprocess.run([*words, "-I", netdev, peer], capture_output=True, timeout=15, check=False)
    except FileNotFoundError:
        raise Problem(
            found="the program ping is not installed",
            needed="iputils ping, which DGX OS and Ubuntu bring",
            do="sudo apt-get install iputils-ping",
            code="link-no-ping",
        ) from None
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def ping_rail(netdev: str, peer: str, mtu: int, wait: float) -> dict[str, bool]:
    """{"large": full-size packets pass, "small": small ones do}; asks again for up to `wait` seconds."""
    deadline = time.monotonic() + wait
    while True:
        if ping(netdev, peer, mtu - _IP_ICMP_BYTES):
            return {"large": True, "small": True}
        if time.monotonic() >= deadline:
            return {"large": False, "small": ping(netdev, peer, 56)}
        time.sleep(0.5)


@dataclass(frozen=True)
class Path:
    """One rail to one peer, as this host sees it."""

    rail: int
    address: str
    peer: str
    peer_address: str


def tcp_exchange(
    paths: Sequence[Path], free_port: int, port: int, token: str, seconds: float
) -> list[dict[str, Any]]:
    """Try TCP to every peer over every rail, while the peers do the same (run it on all at once).

    `free_port` is a random high one that both sides agreed on; on it each side tells whether it could
    take `port` too, so that a port which a running rank holds is never touched.

    Returns {"rail", "peer", "port", "ok", "error"} of each connection tried; a port in use at the other
    end is left out.
    """
    with contextlib.ExitStack() as stack:
        held: dict[str, bool] = {}
        servers = []
        for address in dict.fromkeys(path.address for path in paths):
            held[address] = False
            for number in (port, free_port):  # the master port first: what we tell of it is then true
                server = _Server.open(address, number, token, held)
                if server:
                    stack.callback(server.close)
                    servers.append(server)
                    held[address] = held[address] or number == port
            for server in servers:
                server.start()
        deadline = time.monotonic() + seconds
        results = []
        threads = [
            threading.Thread(target=lambda p=path: results.extend(_try(p, free_port, port, token, deadline)))
            for path in paths
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # The peer may be later than we are: keep answering until it has been here, or time is up.
        expected = sum(1 + held[path.address] for path in paths)
        while time.monotonic() < deadline and sum(len(server.seen) for server in servers) < expected:
            time.sleep(0.05)
    return sorted(results, key=lambda item: (item["rail"], item["peer"], item["port"]))


class _Server:
    """Answers each connection with one line: this run's token and whether the master port is ours."""

    def __init__(self, sock: socket.socket, token: str, held: Mapping[str, bool]) -> None:
        self._sock = sock
        self._token = token
        self._held = held
        self._open = True
        self._thread: threading.Thread | None = None
        self.seen: set[str] = set()

    @classmethod
    def open(cls, address: str, port: int, token: str, held: Mapping[str, bool]) -> _Server | None:
        """A server, or None where the port is taken or the address is not there."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen(8)
        except OSError:
            sock.close()
            return None
        sock.settimeout(0.1)
        return cls(sock, token, held)

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        address = self._sock.getsockname()[0]
        while self._open:
            try:
                peer, (source, _) = self._sock.accept()
            except OSError:
                continue
            with peer, contextlib.suppress(OSError):
                peer.settimeout(1)
                line = json.dumps({"token": self._token, "held": self._held[address]})
                peer.sendall(line.encode() + b"\n")
                if peer.recv(16) == b"ok\n":
                    self.seen.add(source)

    def close(self) -> None:
        self._open = False
        if self._thread:
            self._thread.join(timeout=2)
        self._sock.close()


def _try(path: Path, free_port: int, port: int, token: str, deadline: float) -> list[dict[str, Any]]:
    def result(number: int, error: str | None) -> dict[str, Any]:
        words = {"rail": path.rail, "peer": path.peer, "port": number}
        return {**words, "ok": error is None, "error": error}

    error, held = _connect(path, free_port, token, deadline)
    found = [result(free_port, error)]
    if held:
        error, _ = _connect(path, port, token, deadline)
        found.append(result(port, error))
    return found


def _connect(path: Path, port: int, token: str, deadline: float) -> tuple[str | None, bool]:
    """(None, whether the peer holds the master port) if the peer answered, else (why not, False)."""
    error = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(
                (path.peer_address, port), timeout=1.0, source_address=(path.address, 0)
            ) as sock:
                told = json.loads(sock.makefile().readline() or "{}")
                if told.get("token") == token:
                    sock.sendall(b"ok\n")
                    return None, bool(told.get("held"))
                error = "another program answers"
        except TimeoutError:
            error = "no answer"
        except ConnectionRefusedError:
            error = "refused"
        except (OSError, ValueError) as fault:
            error = str(getattr(fault, "strerror", None) or fault)
        time.sleep(0.1)
    return error, False


# --- the verdict -------------------------------------------------------------------------------


def verdict(
    plan: Mapping[str, Any], probes: Mapping[str, Mapping[str, Any]], required: int
) -> tuple[list[int], list[Problem]]:
    """Which rails of the plan serve, judged from what every host saw.

    Args:
        probes: host -> {"rails": [{"rail", "state", "mtu", "problem", "pings": {peer: {"large", "small"}},
            "tcp": [...]}], "firewall"}. Where a host has not probed (a dry run), nothing is judged.
        required: fewer rails than this is an error.
    Returns the rails to keep and a warning for each that is dropped; raises Problem with all of them
    where too few are left.
    """
    if any(not probe.get("rails") for probe in probes.values()):
        return list(range(len(plan["rails"]))), []
    keep: list[int] = []
    faults: list[Problem] = []
    for number, ends in enumerate(plan["rails"]):
        found = _rail_faults(number, ends, probes, first=not keep)
        if found:
            faults += found
        else:
            keep.append(number)
    if len(keep) < required:
        text = "\n".join(f"- {fault}".replace("\n", "\n  ") for fault in faults)
        raise Problem(
            found=f"{len(keep)} of {len(plan['rails'])} rails serve:\n{text}",
            needed=f"{required} that pass full-size packets and TCP both ways",
            do="put that right; or go on with fewer: -e rails=1"
            if keep
            else "put that right, then run again",
            code=faults[0].code if faults else "link-too-few-rails",
        )
    for fault in faults:
        fault.severity = "warning"
    return keep, faults


def _rail_faults(
    number: int, ends: Sequence[Mapping[str, Any]], probes: Mapping[str, Mapping[str, Any]], *, first: bool
) -> list[Problem]:
    by_host = {end["host"]: end for end in ends}
    faults: list[Problem] = []
    seen = {host: probe["rails"][number] for host, probe in probes.items() if probe.get("rails")}
    for host, rail in seen.items():
        # Unequal GID indexes are a fault of the second rail only: the first can serve alone.
        if rail["state"] != "ready" and not (rail["state"] == "gid-unequal" and first):
            raw = rail["problem"]
            faults.append(Problem(raw["found"], raw["needed"], raw["do"], code=raw["code"], host=host))
    for host, rail in seen.items():
        for peer, passed in rail["pings"].items():
            if not passed["large"]:
                faults.append(_ping_fault(by_host[host], by_host[peer], seen, small=passed["small"]))
    for host, rail in seen.items():
        faults += [
            _tcp_fault(host, item, by_host[item["peer"]], by_host[host], probes)
            for item in rail["tcp"]
            if not item["ok"]
        ]
    return faults


def _ping_fault(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    seen: Mapping[str, Mapping[str, Any]],
    *,
    small: bool,
) -> Problem:
    def end(item: Mapping[str, Any]) -> str:
        mtu = seen.get(item["host"], {}).get("mtu") or "unknown"
        return f"{item['host']} {item['netdev']} {item['address']} (MTU {mtu})"

    size = source["mtu"] - _IP_ICMP_BYTES
    if small:
        return Problem(
            found=f"packets of {size} bytes from {end(source)} to {end(target)} vanish, small ones pass",
            needed=f"MTU {source['mtu']} at both ends and on what is between them",
            do=f"sudo ip link set {target['netdev']} mtu {source['mtu']} where it is smaller (a switch needs "
            "jumbo frames too); persist it in netplan",
            code="link-mtu-path",
        )
    return Problem(
        found=f"no packet from {end(source)} to {end(target)} is answered",
        needed="a peer that answers on this rail",
        do="check the address and the cable at both ends (sparkpair link), and that no firewall drops ICMP",
        code="link-unreachable",
    )


def _tcp_fault(
    host: str,
    item: Mapping[str, Any],
    target: Mapping[str, Any],
    source: Mapping[str, Any],
    probes: Mapping[str, Mapping[str, Any]],
) -> Problem:
    peer, port = item["peer"], item["port"]
    wall = probes.get(peer, {}).get("firewall", "")
    allow = {
        "ufw": f"on {peer}: sudo ufw allow in on {target['netdev']} from {source['address']}",
        "nftables": f"on {peer}: let its nftables input chain accept iifname {target['netdev']} "
        f"ip saddr {source['address']}",
    }
    return Problem(
        found=f"port {port} from {host} to {peer} blocked ({target['address']}: {item['error']})",
        needed="all TCP ports open between the Sparks on the link, as NCCL picks its own; nowhere else",
        do=allow.get(wall, f"see what filters {target['netdev']} on {peer} (nft list ruleset, ufw status)"),
        code="link-blocked",
    )
