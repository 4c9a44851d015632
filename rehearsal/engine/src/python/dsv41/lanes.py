"""tf-dsv41-lanes: a rank that follows rank 0. Its only words are JSON lines."""

from __future__ import annotations

import json
import signal
import sys
import threading

from . import link
from .errors import EngineError
from .faults import Faults
from .loading import environment, load
from .settings import from_command


def _line(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main(words: list[str]) -> int:
    """Load, link, follow. Exit 0 after rank 0's "done", 1 when it is lost or something fails, 2 wrong usage."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the real one installs no handlers
    env = environment()
    options = from_command(words, env)
    faults = Faults(options.rank, env)
    if faults.on("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loaded = load(options, env, faults)
    seconds = float(env.get("TF_REHEARSAL_CONNECT_S", str(link.CONNECT_S)))
    mine = link.hello(options, loaded.config, loaded.fabric)
    try:
        wire = link.connect(options, mine, loaded.fabric, seconds)
    except EngineError as error:
        print(f"{error.words}\nerror: {error.name}", file=sys.stderr, flush=True)
        _line(rank=options.rank, follow=error.name)
        return 1
    _line(
        rank=options.rank,
        loaded_s=round(loaded.seconds, 1),
        pool=options.pool,
        drafts=options.drafts,
        arena_used=loaded.weight_bytes,
    )
    dropped = threading.Event()
    faults.watch(dropped)
    threading.Thread(target=_forget, args=(dropped, wire), daemon=True).start()
    try:
        link.follow(wire, loaded.secret)
    except EngineError as error:
        if dropped.is_set():
            threading.Event().wait()  # forgot its peer, lives on
        _line(rank=options.rank, follow=error.name)
        return 1
    _line(rank=options.rank, followed=True)
    return 0


def _forget(dropped: threading.Event, wire: link.Wire) -> None:
    dropped.wait()
    wire.close()
