"""sparkpair token-map: Engram's token map of a checkpoint's tokenizer.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import modelconfig, sealed, tokenmap
from ..options import sha256_text


def add_to(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = subparsers.add_parser("token-map", help="make Engram's token map of a tokenizer.json")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="TOKENIZER_JSON")
    parser.add_argument("--config", type=Path, required=True, metavar="CONFIG_JSON")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--expect-sha256", type=sha256_text, metavar="HEX", help="another map is not installed"
    )
    parser.add_argument("--lock", type=Path, metavar="LOCK", help="also write a lock of it, to share it by")
    parser.add_argument("--force", action="store_true", help="make it also when it stands already")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the map unless it stands; returns the exit code."""
    counts = tokenmap.expectations(modelconfig.load(arguments.config), str(arguments.config))
    expected, out = arguments.expect_sha256, arguments.out
    sha256 = None if arguments.force else tokenmap.standing(arguments.tokenizer, counts, out, expected)
    changed = sha256 is None
    if sha256 is None:
        sha256 = tokenmap.make(arguments.tokenizer, counts, out, expected)
    if arguments.lock:
        files = {out.name: (out.stat().st_size, sha256)}
        sealed.write_lock(arguments.lock, "fixtures", sealed.revision_of(sha256), files)
    if arguments.json:
        told = {"ids": counts[0], "distinct": counts[1], "sha256": sha256, "out": str(out)}
        print(json.dumps({"ok": True, "changed": changed, **told}))
    else:
        how = "made" if changed else "unchanged"
        print(f"{out}: {how}, {counts[0]} ids, {counts[1]} distinct\n{sha256}  {out.name}")
    return 0
