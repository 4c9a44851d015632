"""`sparkpair overlay`: a checkpoint with changed tensors on top, as hard links."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .. import locks, overlay
from ..console import counted
from ..problem import Problem


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "overlay",
        help="lay changed tensors over a checkpoint",
        description="A folder of hard links to a checkpoint, an overlay on top and an index that says so.",
    )
    parser.add_argument("--stock", required=True, type=Path, metavar="DIR", help="the checkpoint")
    parser.add_argument("--lock", required=True, type=Path, metavar="FILE", help="its lock")
    parser.add_argument("--overlay", required=True, type=Path, metavar="FILE", help="the safetensors file")
    parser.add_argument("--overlay-lock", required=True, type=Path, metavar="FILE", help="its lock")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the result's folder")
    parser.add_argument("--lock-out", type=Path, metavar="FILE", help="where the result's lock goes (in DIR)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the result stands."""
    for given in (args.lock, args.overlay_lock):
        if args.lock_out and args.lock_out.exists() and args.lock_out.samefile(given):
            raise Problem(
                found=f"--lock-out {args.lock_out} is the lock of what the result is made of",
                needed="another file: the result has a lock of its own",
                do="name another one, or leave --lock-out away: it then lies in the result's folder",
                code="overlay-out",
            )
    result = overlay.lay(
        args.stock,
        locks.load(args.lock),
        args.overlay,
        locks.load(args.overlay_lock),
        args.out,
        lock_path=args.lock_out,
    )
    if args.json:
        print(json.dumps(result.as_dict()))
    else:
        done = "laid" if result.changed else "already there:"
        print(
            f"{args.out}: {done} {counted(result.tensors, 'tensor')} over {result.lock.repo}; lock {result.lock_path}"
        )
    return 0
