"""Rank 0 and the ranks that follow, over TCP: length-prefixed frames, one connection."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from typing import Any

from . import VERSION
from .errors import EngineError
from .fabric import Fabric
from .settings import ModelConfig, Options

_MAX_FRAME = 1 << 20
_RETRY_S = 0.25
CONNECT_S = 300.0
_ROUND_S = 10.0
_ERRORS = {
    "world": "BadInfo",
    "version": "BadInfo",
    "pool": "PoolMismatch",
    "devices": "BadInfo",
    "drafts": "DraftsMismatch",
    "config": "ConfigMismatch",
    "round_rows": "RowsMismatch",
    "streams": "StreamsMismatch",
    "graphs": "SwitchMismatch",
    "side": "SwitchMismatch",
    "prefetch": "SwitchMismatch",
    "aio": "SwitchMismatch",
    "replay_floor": "SwitchMismatch",
}


def down(words: str = "") -> EngineError:
    return EngineError("PeerDown", words)


def share(secret: bytes, text: str) -> str:
    """A rank's part of an answer's digest: only who has read the cache can give it."""
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def join(parts: list[str]) -> str:
    """The digest that all ranks' parts give together, 16 hex digits."""
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


class Wire:
    """One connection's frames: a length in 4 bytes, little-endian, then JSON."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        try:
            self.sock.sendall(len(data).to_bytes(4, "little") + data)
        except OSError as error:
            raise down(str(error)) from error

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = self.sock.recv(size - len(data))
            except OSError as error:
                raise down(str(error)) from error
            if not more:
                raise down("the connection is closed")
            data += more
        return data

    def receive(self) -> dict[str, Any]:
        size = int.from_bytes(self._read(4), "little")
        if size > _MAX_FRAME:
            raise EngineError("FrameTooLong", f"{size} bytes")
        try:
            message: Any = json.loads(self._read(size))
        except ValueError:
            raise EngineError("BadFrame", "no JSON") from None
        if not isinstance(message, dict):
            raise EngineError("BadFrame", "no object")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def hello(options: Options, config: ModelConfig, fabric: Fabric) -> dict[str, Any]:
    """What must be alike on all ranks, and this rank's side of the ring."""
    return {
        "version": VERSION,
        "rank": options.rank,
        "world": options.world,
        "pool": options.pool,
        "devices": len(options.rdma),
        "drafts": options.drafts,
        "config": config.digest,
        "round_rows": options.round_rows,
        "streams": options.streams,
        **options.switches,
        "rails": fabric.rails(),
    }


def mismatch(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, str] | None:
    """The first thing that two ranks do not have alike: the error's name and the words."""
    for key, name in _ERRORS.items():
        if mine.get(key) != theirs.get(key):
            here, there = mine.get(key), theirs.get(key)
            return name, f"{key}: rank {mine['rank']} has {here}, rank {theirs.get('rank')} has {there}"
    return None


class Leader:
    """Rank 0's end: the link to every rank that follows."""

    def __init__(self, wires: list[Wire]) -> None:
        self._wires = wires
        self._lock = threading.Lock()
        self._lost = False

    @classmethod
    def listen(cls, options: Options, mine: dict[str, Any], fabric: Fabric) -> Leader:
        """Take each follower's connection, without a limit of time, and agree with it.

        Raises:
            EngineError: BindFailed, a mismatch by its name, PeerDown, or what `Fabric.connect` raises.
        """
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((options.master, options.port))
        except OSError as error:
            words = f"{options.master}:{options.port}: {error.strerror}"
            raise EngineError("BindFailed", words) from error
        server.listen(options.world - 1)
        wires: dict[int, Wire] = {}
        with server:
            while len(wires) < options.world - 1:
                sock, _ = server.accept()
                wire = Wire(sock)
                theirs = wire.receive()
                found = mismatch(mine, theirs)
                rank = theirs.get("rank")
                if found is None and (
                    not isinstance(rank, int) or rank in wires or not 0 < rank < options.world
                ):
                    found = ("BadInfo", f"rank {rank!r} of {options.world}")
                if found:
                    wire.send({"refuse": found[0], "words": found[1]})
                    raise EngineError(*found)
                wires[int(theirs["rank"])] = wire
                wire.send({"hello": mine})
                fabric.connect(int(theirs["rank"]), theirs["rails"])
                wire.receive()
        for wire in wires.values():
            wire.send({"go": True})
        return cls([wires[r] for r in sorted(wires)])

    def round(self, text: str) -> list[tuple[str, str]]:
        """One round of the pair: each follower's part for `text` and for the pair as a whole.

        Raises:
            EngineError: PeerDown, from then on for every round.
        """
        with self._lock:
            if self._lost:
                raise down("rank 1 is gone")
            try:
                for wire in self._wires:
                    wire.sock.settimeout(_ROUND_S)
                    wire.send({"round": text})
                answers = [wire.receive() for wire in self._wires]
                return [(str(a["part"]), str(a["pair"])) for a in answers]
            except (EngineError, KeyError) as error:
                self._lost = True
                raise down(str(error)) from error

    def forget(self) -> None:
        """Drop the connections and live on."""
        self._lost = True
        for wire in self._wires:
            wire.close()

    def done(self) -> None:
        """Tell the followers that this was all."""
        for wire in self._wires:
            try:
                wire.send({"done": True})
            except EngineError:
                return


def connect(options: Options, mine: dict[str, Any], fabric: Fabric, seconds: float = CONNECT_S) -> Wire:
    """A follower's end: connect to rank 0, again and again while it loads, and agree with it.

    Raises:
        EngineError: ConnectFailed after `seconds`, rank 0's refusal by its name, PeerDown.
    """
    tries = int(seconds / _RETRY_S)
    for attempt in range(tries + 1):
        try:
            sock = socket.create_connection((options.master, options.port), timeout=5)
            break
        except OSError as error:
            if attempt == tries:
                words = f"{options.master}:{options.port}: {error}"
                raise EngineError("ConnectFailed", words) from error
            time.sleep(_RETRY_S)
    sock.settimeout(None)
    wire = Wire(sock)
    wire.send(mine)
    answer = wire.receive()
    if "refuse" in answer:
        raise EngineError(str(answer["refuse"]), str(answer.get("words", "")))
    theirs = answer.get("hello")
    if not isinstance(theirs, dict):
        raise EngineError("BadFrame", "rank 0 did not say hello")
    found = mismatch(mine, theirs)
    if found:
        raise EngineError(*found)
    fabric.connect(0, theirs["rails"])
    wire.send({"ready": True})
    wire.receive()
    return wire


def follow(wire: Wire, secret: bytes) -> None:
    """Answer rank 0's rounds until it says done.

    Raises:
        EngineError: PeerDown when it goes without a word.
    """
    pair = share(secret, "pair")
    while True:
        message = wire.receive()
        if message.get("done"):
            return
        if "round" not in message:
            raise EngineError("BadFrame", "neither a round nor done")
        wire.send({"part": share(secret, str(message["round"])), "pair": pair})
