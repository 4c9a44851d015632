"""`sparkpair link`: the rails of this node (or of a recorded tree), and what is wrong with them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .. import atomic, link, options, pairfile


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "link",
        help="show the rails between the Sparks",
        description="Find the cabled port, its twins, addresses, MTUs and GID indexes; tell what is wrong.",
    )
    parser.add_argument(
        "--root", type=options.folder, default=Path("/"), metavar="DIR", help="stands in for /"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--rails", type=int, choices=(1, 2), help="rails to use (default: the pair's, else 2)"
    )
    parser.add_argument(
        "--pair",
        type=Path,
        metavar="FILE",
        help="the pair's file (default: etc/sparkpair/pair.json under DIR)",
    )
    parser.add_argument(
        "--write-env",
        type=Path,
        metavar="FILE",
        help="write the ranks' variables for what the pair's file requires, or refuse",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if the link can serve (warnings aside), else 1."""
    pair = _pair(args)
    rails = args.rails or (len(pair.me.rails) if pair else 2)
    report = link.read_link(args.root, rails=rails, pair=pair)
    if args.write_env:
        text = link.environment_text(link.environment(report))
        args.write_env.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(args.write_env, text)
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        print(human(report))
        for problem in report.problems:
            label = "warning" if problem.severity == "warning" else "problem"
            print(f"\n{label} ({problem.code})\n{problem}", file=sys.stderr)
    return 1 if report.errors else 0


def _pair(args: argparse.Namespace) -> pairfile.Pair | None:
    """The settled plan: required for --write-env, used where it is there otherwise."""
    inside = args.root / pairfile.FILE.relative_to("/")
    if args.pair:
        return pairfile.load(args.pair)
    if inside.exists():
        return pairfile.load(inside)
    return pairfile.load() if args.write_env else None


def human(report: link.Report) -> str:
    """A line for each rail; "-" stands for what is not there."""
    if not report.rails:
        return "no rail found"
    rows = [("RAIL", "NETDEV", "RDMA", "ADDRESS", "MTU", "RDMA MTU", "GID", "STATE")]
    for rail in report.rails:
        address = f"{rail.address}/{rail.prefix}" if rail.prefix else rail.address
        cells = (
            rail.rail,
            rail.netdev,
            rail.rdma,
            address,
            rail.mtu,
            rail.active_mtu,
            rail.gid_index,
            rail.state,
        )
        rows.append(tuple("-" if cell is None else str(cell) for cell in cells))  # type: ignore[arg-type]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
