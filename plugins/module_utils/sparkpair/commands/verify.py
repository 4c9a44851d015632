"""`sparkpair verify`: does a folder hold what its lock names?"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from .. import locks, verify
from ..console import counted, size
from ..problem import Problem

_STDIN = "on stdin"


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check a folder against its lock",
        description="Compare each file with its lock, by its receipt or else byte by byte on all cores.",
    )
    parser.add_argument("--lock", required=True, metavar="FILE", help="the lock; - reads it from stdin")
    parser.add_argument("--dir", required=True, type=Path, metavar="DIR", help="the folder")
    parser.add_argument(
        "--full", action="store_true", help="read every byte again, whatever the receipts say"
    )
    parser.add_argument(
        "--only-listed",
        action="store_true",
        help="look at the lock's files alone, not for strays and other people's files",
    )
    parser.add_argument("--follow-links", action="store_true", help="take a link for the file it leads to")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="for sparkpair replicate: the lock is stdin's first line, each further line a path (a JSON string)"
        " to check, each answered by a line",
    )
    parser.add_argument(
        "--tidy", action="store_true", help="with --follow: first remove what a killed copy left half"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if all is as the lock says, else 1."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stdin = sys.stdin.buffer
    if args.follow:
        verify.follow(_parsed(stdin.readline()), args.dir, map(_path, stdin), _answer, tidy=args.tidy)
        return 0
    lock = _parsed(stdin.read()) if args.lock == "-" else locks.load(Path(args.lock))
    report = verify.verify(
        lock,
        args.dir,
        full=args.full,
        only_listed=args.only_listed,
        follow_links=args.follow_links,
        quiet=args.quiet,
        lock_file=None if args.lock == "-" else Path(args.lock),
    )
    if args.json:
        print(json.dumps(report.as_dict()))
    elif report.ok:
        read = f"{size(report.bytes)} read" if report.bytes else "by receipts"
        print(
            f"{args.dir}: {counted(report.checked, 'file')}, {size(lock.total_bytes)}, as the lock says ({read})"
        )
    if report.unwritten and not args.json:
        print(f"note: {verify.unkept(str(args.dir), report.unwritten)}", file=sys.stderr)
    if not report.ok and not args.json:
        for problem in report.problems:
            print(f"problem ({problem.code})\n{problem}\n", file=sys.stderr)
    return 0 if report.ok else 1


def _answer(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def _path(line: bytes) -> str:
    try:
        return str(json.loads(line))
    except ValueError:
        raise Problem(
            found=f"the line {line[:100]!r} on stdin",
            needed="a path as a JSON string",
            do="leave --follow to sparkpair replicate",
            code="question-bad",
        ) from None


def _parsed(text: bytes) -> locks.Lock:
    """The lock that stdin gave, read as strictly as a lock file."""
    try:
        return locks.parse(locks.decode(text.decode(), _STDIN), _STDIN)
    except UnicodeDecodeError as error:
        raise _no_lock(f"lock {_STDIN}: it is not UTF-8 text (byte {error.start})", "JSON in UTF-8") from None
    except Problem as problem:
        raise _no_lock(problem.found, problem.needed) from None


def _no_lock(found: str, needed: str) -> Problem:
    return Problem(found, needed, do="sparkpair verify --lock - --dir DIR < LOCK", code="lock-bad")
