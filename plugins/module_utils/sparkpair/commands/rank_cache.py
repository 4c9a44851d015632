"""sparkpair rank-cache: write one rank's weights with the engine's own program, checked and locked."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from types import FrameType
from typing import Any

from .. import rankcache, sealed


def add_to(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = subparsers.add_parser("rank-cache", help="write one rank's weights from the checkpoint")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the checkpoint")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the variant's folder")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--image", required=True, metavar="TAG", help="the engine's image")
    parser.add_argument("--lock", type=Path, required=True, metavar="FILE", help="what was written")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=VALUE",
        help="what the cache is made from; another value means another cache",
    )
    parser.add_argument("--expect-entries", type=int, default=0, metavar="N", help="what the profile says")
    parser.add_argument("--expect-gib", type=float, default=0.0, metavar="GIB")
    parser.add_argument(
        "--check-every",
        type=int,
        default=16,
        metavar="N",
        help="compare the bytes of every N-th expert and of all else",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: needed is NAME=VALUE")
    return name, value


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """systemd's stop: end as Ctrl-C does, which also ends the container."""
    raise KeyboardInterrupt


def run(arguments: argparse.Namespace) -> int:
    """Write the cache unless it stands; returns the exit code."""
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        return _run(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(arguments: argparse.Namespace) -> int:
    cache = rankcache.Cache(
        arguments.out, arguments.rank, arguments.world, dict(arguments.input), arguments.lock
    )
    lock, plan = rankcache.standing(cache), None
    warnings: list[str] = []
    changed = lock is None
    if lock is None:
        expected = rankcache.Expected(arguments.expect_entries, arguments.expect_gib)
        lock, plan, warnings = rankcache.write(
            cache,
            arguments.model.resolve(),
            rankcache.InImage(arguments.image),
            expected=expected,
            check_every=arguments.check_every,
        )
    if arguments.json:
        told: dict[str, Any] = {"file": lock.files[0].path, "bytes": lock.total_bytes, "warnings": warnings}
        if plan is not None:
            told |= {"entries": plan.entries, "data_bytes": plan.bytes}
        print(json.dumps({"ok": True, "changed": changed, **told, "lock": sealed.as_dict(lock)}))
    else:
        print(f"{'written' if changed else 'unchanged'}: {rankcache.describe(lock, plan)}")
        for warning in warnings:
            print(f"warning: {warning}")
    return 0
