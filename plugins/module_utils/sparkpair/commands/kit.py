"""sparkpair kit: lay out the kernel kit at its pinned commit, or check it against its MANIFEST."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import kit, locks, paths, sealed
from ..console import counted

_LOCK = paths.RECEIPTS / "kit.json"


def add_to(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = subparsers.add_parser("kit", help="lay out or check the kernel kit")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fetch = actions.add_parser("fetch", help="fetch the pinned commit, put in the generated files, check all")
    fetch.add_argument("--repository", required=True, metavar="URL", help="the kit's git repository")
    fetch.add_argument("--commit", required=True, metavar="HASH", help="full, or at least 7 digits")
    fetch.add_argument("--branch", default="", help="where an abbreviated commit is looked for (else all)")
    fetch.add_argument("--subfolder", default="kit", metavar="PATH", help="where in the repository it is")
    fetch.add_argument(
        "--fixtures", type=Path, required=True, metavar="DIR", help="the generated files of the profile"
    )
    check = actions.add_parser("check", help="check every line of MANIFEST and that nothing else is there")
    check.add_argument("--full", action="store_true", help="read every byte again")
    for action in (fetch, check):
        action.add_argument("--kit", type=Path, default=paths.KIT, metavar="DIR", help="the served folder")
        action.add_argument("--lock", type=Path, default=_LOCK, metavar="FILE", help="what was laid out")
        action.add_argument(
            "--unrecorded",
            action="append",
            default=[],
            metavar="PATH",
            help="a generated file that MANIFEST records for another checkpoint",
        )
        action.add_argument("--json", action="store_true", help="print one JSON object")
    fetch.set_defaults(run=run_fetch)
    check.set_defaults(run=run_check)


def run_fetch(arguments: argparse.Namespace) -> int:
    """Lay the kit out unless it stands as ordered; returns the exit code."""
    order = kit.Order(
        folder=arguments.kit,
        repository=arguments.repository,
        commit=arguments.commit,
        branch=arguments.branch,
        subfolder=arguments.subfolder,
        fixtures=arguments.fixtures,
        unrecorded=frozenset(arguments.unrecorded),
        lock_file=arguments.lock,
    )
    reasons = kit.pending(order)
    lock = kit.lay_out(order) if reasons else locks.load(order.lock_file)
    told = {"commit": lock.revision, "files": len(lock.files), "bytes": lock.total_bytes}
    if arguments.json:
        result = {
            "ok": True,
            "changed": bool(reasons),
            **told,
            "reasons": reasons,
            "lock": sealed.as_dict(lock),
        }
        print(json.dumps(result))
    else:
        print(f"{order.folder}: {'laid out' if reasons else 'unchanged'}, {counted(len(lock.files), 'file')}")
        print(f"{lock.revision}  {order.repository}")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Check the kit; returns the exit code."""
    lock = locks.load(arguments.lock) if arguments.lock.exists() else None
    told = kit.check(arguments.kit, lock=lock, unrecorded=arguments.unrecorded, full=arguments.full)
    if lock is not None:
        sealed.require(lock, arguments.kit, "ansible-playbook site.yml --tags fixtures lays the kit out anew")
    if arguments.json:
        print(json.dumps({"ok": True, "changed": False, **told}))
    else:
        print(f"kit OK: {told['files']} files match MANIFEST")
    return 0
