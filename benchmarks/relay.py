"""ssh's ProxyCommand that counts: `relay.py HOST PORT FOLDER` passes the bytes on and notes how many went each way."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
from pathlib import Path

COUNTS = struct.Struct("<QQ")  # sent, received
_CHUNK = 1 << 16


def relay(host: str, port: int, folder: Path) -> None:
    """Pass stdin to HOST:PORT and its answers to stdout. The counts are on disk after each chunk."""
    notes = os.open(folder / f"{os.getpid()}.count", os.O_WRONLY | os.O_CREAT)
    with socket.create_connection((host, port)) as there, selectors.DefaultSelector() as ready:
        ready.register(0, selectors.EVENT_READ)
        ready.register(there, selectors.EVENT_READ)
        sent = received = 0
        while True:
            for key, _ in ready.select():
                outward = key.fileobj == 0
                chunk = os.read(0, _CHUNK) if outward else there.recv(_CHUNK)
                if not chunk:
                    return
                if outward:
                    there.sendall(chunk)
                    sent += len(chunk)
                else:
                    received += len(chunk)
                    left = memoryview(chunk)
                    while left:
                        left = left[os.write(1, left) :]
                os.pwrite(notes, COUNTS.pack(sent, received), 0)


def counted(folder: Path) -> int:
    """The bytes of all relays that noted theirs in `folder`, both ways together."""
    return sum(sum(COUNTS.unpack(path.read_bytes())) for path in folder.glob("*.count"))


if __name__ == "__main__":
    relay(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
