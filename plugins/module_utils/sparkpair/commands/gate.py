"""`sparkpair gate`: what a rank's unit runs before the container, at each start."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import gate, paths


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "gate",
        help="check all that a rank needs right before it starts",
        description="Files by receipt, memory, link and container name of this node's rank.",
    )
    parser.add_argument("--order", type=Path, default=paths.ETC / "rank.json", metavar="FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    order = gate.Order.load(arguments.order)
    print(f"rank {order.rank}: {', '.join(gate.open_for(order))} fine")
    return 0
