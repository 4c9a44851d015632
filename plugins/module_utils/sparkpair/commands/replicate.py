"""`sparkpair replicate`: a verified folder to another node, over the link."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

from .. import locks, options, peer, replicate, sshpeer, verify

_STALL_S = 60.0


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replicate",
        help="copy a verified folder to the other node",
        description="Send what the other node lacks of a folder, over the link, and verify it there.",
    )
    parser.add_argument("--lock", required=True, type=Path, metavar="FILE", help="the folder's lock")
    parser.add_argument("--dir", required=True, type=Path, metavar="DIR", help="the folder here")
    parser.add_argument("--to", required=True, metavar="USER@ADDRESS:DIR", help="the folder there")
    parser.add_argument("--identity", type=Path, metavar="KEY", help="the key to log in with")
    parser.add_argument("--known-hosts", type=Path, metavar="FILE", help="the peer's host key")
    parser.add_argument(
        "--port",
        type=options.tcp_port,
        metavar="N",
        help="of the peer's sshd (default: the pair file's, else ssh's)",
    )
    parser.add_argument("--streams", type=int, choices=range(1, 9), help="parallel copies (default: up to 4)")
    parser.add_argument(
        "--link-subnet",
        type=options.subnet,
        action="append",
        default=[],
        metavar="CIDR",
        help="the link's subnet, may be repeated (default: the pair file's, else devices with RDMA)",
    )
    parser.add_argument("--allow-lan", action="store_true", help="take any route to the peer")
    parser.add_argument(
        "--stall",
        type=options.seconds,
        default=_STALL_S,
        metavar="S",
        help="seconds without a byte before a flow is tried again (%(default)s)",
    )
    parser.add_argument(
        "--root", type=options.folder, default=Path("/"), metavar="DIR", help="stands in for / in /sys"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the peer holds the whole folder, verified."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lock = locks.load(args.lock)
    target = peer.parse_target(args.to)
    peer.require_login_files(args.identity, args.known_hosts)
    replicate.require_rsync()
    pair = peer.known_pair()
    subnets = args.link_subnet or (list(pair.subnets) if pair else [])
    addresses = peer.link_addresses(target.address, pair)
    routes = [
        peer.require_link(address, subnets, allow_lan=args.allow_lan, node_root=args.root)
        for address in addresses
    ]
    login = peer.Login(target.user, args.identity, args.known_hosts, args.port or _port(target.address, pair))
    streams = args.streams or replicate.default_streams()
    with contextlib.ExitStack() as stack:
        numbers = [route.address if route else name for route, name in zip(routes, addresses, strict=True)]
        stack.enter_context(replicate.single_flight(numbers, target.folder))
        folder = stack.enter_context(peer.private_folder())
        connections = []
        for number in range(streams):
            rail = number % len(addresses)
            route = None if args.allow_lan else routes[rail]
            device = route.device if route else None
            connections.append(peer.Connection(addresses[rail], login, folder, f"c{number}", device))
        other = stack.enter_context(sshpeer.SshPeer(connections, target.folder, args.stall))
        result = replicate.replicate(lock, args.dir, other, streams=streams, lock_file=args.lock)
        if other.unwritten:
            there = verify.unkept(target.folder, other.unwritten)
            result.notes.append(f"on {target.address}, {there}")
    devices = sorted({route.device for route in routes if route}) or ["an unknown route"]
    told: dict[str, Any] = {**result.as_dict(), "route": devices, "peer": target.address}
    for note in () if args.json else result.notes:
        print(f"note: {note}", file=sys.stderr)
    print(
        json.dumps(told)
        if args.json
        else replicate.describe(result, target.address, lock, ", ".join(devices))
    )
    return 0


def _port(address: str, pair: Any) -> int | None:
    for rank in pair.peers if pair else ():
        if any(rail.address == address for rail in rank.rails):
            return int(rank.ssh_port)
    return None
