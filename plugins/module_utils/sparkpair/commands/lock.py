"""sparkpair lock: which files a repository has at one commit, with sizes and hashes, as a lock file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import hub, pinning


def add_to(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = subparsers.add_parser(
        "lock",
        help="write down every file of a repository: size and hash",
        description="Resolve a repository and a branch, tag, full or abbreviated commit on the Hub and lock"
        " its files. A lock that is there already is compared, and written only with --refresh."
        " The token comes from the variable HF_TOKEN.",
    )
    parser.add_argument(
        "name", metavar="REPO[@REVISION]", help="owner/name, the revision main where none is said"
    )
    parser.add_argument(
        "--include", action="append", default=[], metavar="GLOB", help="only these files (may be repeated)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the lock file")
    parser.add_argument(
        "--endpoint", metavar="URL", help="the Hub (default: HF_ENDPOINT, else huggingface.co)"
    )
    parser.add_argument("--refresh", action="store_true", help="write an existing lock anew where it differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Resolve, compare, write; returns the exit code."""
    repo, revision = hub.split_name(arguments.name)
    pinned = pinning.pin(
        arguments.out,
        repo,
        revision,
        include=arguments.include,
        refresh=arguments.refresh,
        look=True,
        token=hub.token_from(),
        endpoint=arguments.endpoint,
    )
    if arguments.json:
        print(json.dumps({"ok": True, **pinned.as_dict()}))
        return 0
    for line in pinned.lines:
        print(line)
    print(pinned.message)
    print(f"{arguments.out} {'written' if pinned.changed else 'unchanged'}")
    if pinned.lines and not pinned.changed:
        print("the Hub has moved on as shown; the lock stays until you add --refresh")
    return 0
