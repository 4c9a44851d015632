"""sparkpair bias: the image routing bias of a checkpoint, or of the original repository."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import bias, fixtures, hub, modelconfig
from ..options import sha256_text


def add_to(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = subparsers.add_parser("bias", help="copy the image routing bias out of a checkpoint")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint that holds the tensors")
    where.add_argument("--repo", metavar="REPO@REV", help="fetch them from this repository, a few ranges")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--source", default=bias.SOURCE, metavar="TEXT", help="told in the file's metadata")
    parser.add_argument("--endpoint", metavar="URL", help="the Hub's address (else HF_ENDPOINT)")
    parser.add_argument(
        "--config", type=Path, metavar="CONFIG_JSON", help="tells the count (else DIR/config.json)"
    )
    parser.add_argument(
        "--expect-sha256", type=sha256_text, metavar="HEX", help="another file is not installed"
    )
    parser.add_argument("--force", action="store_true", help="make it also when it stands already")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the bias file unless it stands; returns the exit code."""
    out, wanted = arguments.out, arguments.expect_sha256
    expected = _expected(arguments)
    where = str(arguments.model or arguments.repo)
    made_from = fixtures.bias_made_from(arguments.model, arguments.repo, arguments.source, expected.count)
    sha256 = None if arguments.force else bias.standing(out, made_from, wanted)
    changed, received = sha256 is None, 0
    if sha256 is None:
        if arguments.model:
            biases = bias.from_checkpoint(arguments.model)
        else:
            repo, revision = hub.split_name(arguments.repo)
            token = hub.token_from()
            biases, received = bias.from_repo(repo, revision, endpoint=arguments.endpoint, token=token)
        sha256 = bias.install(
            biases,
            expected,
            out,
            source=where,
            source_text=arguments.source,
            made_from=made_from,
            expected_sha256=wanted,
        )
    if arguments.json:
        told = {"tensors": expected.count, "sha256": sha256, "out": str(out), "received_bytes": received}
        print(json.dumps({"ok": True, "changed": changed, **told}))
    else:
        print(f"{out}: {'made' if changed else 'unchanged'}, {expected.count} tensors of {where}")
        print(f"{sha256}  {out.name}")
    return 0


def _expected(arguments: argparse.Namespace) -> bias.Expected:
    beside = arguments.model / "config.json" if arguments.model else None
    config = arguments.config or (beside if beside and beside.is_file() else None)
    return bias.expected_of(modelconfig.load(config), str(config)) if config else bias.Expected()
