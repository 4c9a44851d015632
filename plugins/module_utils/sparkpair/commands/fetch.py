"""sparkpair fetch: bring a lock's files from the Hub into a folder, verified and resumable."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any

from .. import fetch, hub, locks
from ..console import counted, size


def add_to(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = subparsers.add_parser(
        "fetch",
        help="bring a lock's files from the Hub",
        description="Bring every file of a lock into a folder, resumed where an earlier run stopped."
        " The token comes from the variable HF_TOKEN or the unit's credential hf_token.",
    )
    defaults = fetch.Options()
    parser.add_argument("--lock", type=Path, required=True, metavar="FILE", help="the lock (sparkpair lock)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument(
        "--endpoint", metavar="URL", help="the Hub (default: HF_ENDPOINT, else huggingface.co)"
    )
    parser.add_argument(
        "--workers",
        type=_at_least(1, 64),
        default=defaults.workers,
        metavar="N",
        help="files at a time (%(default)s)",
    )
    parser.add_argument(
        "--stall-seconds",
        type=_at_least(1, 86_400),
        default=int(defaults.stall_s),
        metavar="S",
        help="break off what does not move for so long (%(default)s)",
    )
    parser.add_argument(
        "--floor",
        type=_at_least(0),
        default=defaults.floor_bytes,
        metavar="BYTES",
        help="stop when less than this is free (%(default)s)",
    )
    parser.add_argument(
        "--reserve",
        type=_at_least(0),
        default=0,
        metavar="BYTES",
        help="room to keep for what is made later, such as the rank cache (%(default)s)",
    )
    parser.add_argument(
        "--tries",
        type=_at_least(1),
        default=defaults.tries,
        metavar="N",
        help="tries in a row that may bring nothing (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _at_least(low: int, high: int = 1 << 60) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not from {low} to {high}")
        return value

    return number


def run(arguments: argparse.Namespace) -> int:
    """Fetch; returns the exit code. SIGTERM ends it as Ctrl-C does, partials kept."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcome = fetch.fetch(
        locks.load(arguments.lock),
        arguments.to,
        options=fetch.Options(
            workers=arguments.workers,
            stall_s=float(arguments.stall_seconds),
            floor_bytes=arguments.floor,
            reserve_bytes=arguments.reserve,
            tries=arguments.tries,
        ),
        token=hub.token_from(),
        endpoint=arguments.endpoint,
    )
    if arguments.json:
        print(json.dumps(outcome.as_dict()))
    else:
        print(
            f"{arguments.to}: {counted(outcome.files, 'file')}, {size(outcome.bytes)}, all verified"
            f" ({outcome.fetched_files} fetched, {size(outcome.fetched_bytes)} moved,"
            f" {size(outcome.resumed_bytes)} resumed, {outcome.checked_files} checked)"
        )
    return 0
