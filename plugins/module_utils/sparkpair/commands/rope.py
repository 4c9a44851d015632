"""sparkpair rope: the RoPE tables of a checkpoint's config.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import modelconfig, rope
from ..console import Progress


def add_to(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = subparsers.add_parser("rope", help="make the RoPE tables of a config.json")
    parser.add_argument("--config", type=Path, required=True, metavar="CONFIG_JSON", help="the checkpoint's")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the five files go")
    parser.add_argument(
        "--expect",
        metavar="ROPE_JSON",
        help="recorded hashes, a file or its JSON in one word: other tables are not installed",
    )
    parser.add_argument("--force", action="store_true", help="make them also when they stand already")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the tables unless they stand; returns the exit code."""
    parameters = rope.parameters(modelconfig.load(arguments.config), str(arguments.config))
    expected = _expected(arguments.expect) if arguments.expect else None
    told = None if arguments.force else rope.standing(parameters, arguments.out, expected)
    changed = told is None
    if told is None:
        progress = Progress("rope", 4 * parameters.table_bytes, 4)
        told = rope.make(parameters, arguments.out, expected, progress=progress)
        progress.close()
    if arguments.json:
        print(json.dumps({"ok": True, "changed": changed, "out": str(arguments.out), **told}))
    else:
        print(f"{arguments.out}: {'made' if changed else 'unchanged'}, {told['rows']} rows of {told['half']}")
        for name in rope.TABLES:
            print(f"{told[name]}  {name}")
    return 0


def _expected(given: str) -> dict[str, int | str]:
    if given.lstrip().startswith(("{", "[")):
        return rope.parse_summary(given, "--expect")
    return rope.load_summary(Path(given))
