"""`python -m rehearsal.hub --root DIR --bind ADDR --port N --log FILE [--ready-file F]`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

from .server import Hub


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Exit 1 where the address can't be had."""
    parser = argparse.ArgumentParser(prog="python -m rehearsal.hub", description="The stand-in hub.")
    parser.add_argument("--root", type=Path, required=True, help="folder of the repositories")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=7080, help="port of the site (%(default)s)")
    parser.add_argument("--cdn-port", type=int, help="port of the storage host (the site's plus 1)")
    parser.add_argument("--log", type=Path, help="file that takes a JSON line a request")
    parser.add_argument("--ready-file", type=Path, help="written once the hub listens: url, cdn, pid")
    given = parser.parse_args(argv)
    cdn_port = given.cdn_port if given.cdn_port is not None else (given.port + 1 if given.port else 0)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        hub = Hub(given.root, address=given.bind, port=given.port, cdn_port=cdn_port, log_file=given.log)
    except OSError as error:
        where = f"{given.bind} port {given.port} or {cdn_port}"
        print(f"found: {where}: {error.strerror}", "needed: a free address of this machine", file=sys.stderr)
        print("do: give --bind and --port, or stop what listens there (ss -ltnp)", file=sys.stderr)
        return 1
    with hub:
        if given.ready_file:
            partial = given.ready_file.with_name(given.ready_file.name + ".partial")
            partial.write_text(json.dumps({"url": hub.url, "cdn": hub.cdn, "pid": os.getpid()}))
            partial.replace(given.ready_file)
        print(f"hub at {hub.url}, storage at {hub.cdn}", flush=True)
        ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
