"""`sparkpair image`: pull the base, build the engine's image, ship it to a peer, list and prune ours."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import image, imagebase, imagebuild, imageship, options, peer
from ..console import duration, size
from ..dockercli import Docker
from ..problem import Problem


def add_to(subparsers: Any) -> None:
    """Add the parser of this subcommand, with a parser for each of its steps."""
    parser = subparsers.add_parser("image", help="the engine's image: build, ship, list, prune")
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")

    pull = _step(steps, "pull", "have the base image here", _pull)
    pull.add_argument("--base", required=True, metavar="IMAGE", help="name:tag@sha256:...")
    _add_room(pull)

    build = _step(steps, "build", "build the image unless it is here under its key", _build)
    build.add_argument("--inputs", required=True, type=Path, metavar="DIR", help="the project's files/engine")
    build.add_argument("--base", required=True, metavar="IMAGE", help="name:tag@sha256:...")
    build.add_argument("--repository", required=True, metavar="URL", help="the engine's source")
    build.add_argument("--commit", required=True, help="the pinned commit, full or abbreviated")
    build.add_argument("--branch", default="", help="where an abbreviated commit is looked for")
    build.add_argument("--tree", default="", help="the git tree id that the commit must have")
    build.add_argument("--zig", default="0.17.0", metavar="VERSION", help="the compiler (%(default)s)")
    build.add_argument("--sm", default="121", help="GPU architectures, a comma list (%(default)s: GB10)")
    _add_room(build)

    ship = _step(steps, "ship", "make a peer have the image with equal content", _ship)
    ship.add_argument("--tag", required=True, help="one of our images")
    ship.add_argument("--to", required=True, metavar="USER@ADDRESS", help="the peer, by its link address")
    ship.add_argument("--identity", type=Path, metavar="KEY", help="the private key that the peer accepts")
    ship.add_argument("--known-hosts", type=Path, metavar="FILE", help="the file with the peer's host key")
    ship.add_argument("--port", type=options.tcp_port, metavar="N", help="the peer's SSH port")
    ship.add_argument(
        "--allow-lan", action="store_true", help="take any route to the peer, not only the link"
    )
    ship.add_argument(
        "--root", type=options.folder, default=Path("/"), metavar="DIR", help="stands in for / (RDMA facts)"
    )

    _step(steps, "list", "the images of ours on this machine, newest first", _list)

    prune = _step(steps, "prune", "remove superseded images of ours, nothing else", _prune)
    prune.add_argument("--keep", required=True, metavar="TAG", help="the image in use")
    prune.add_argument("--yes", action="store_true", help="do it; without this it only says what it would")


def _step(steps: Any, name: str, says: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = steps.add_parser(
        name, help=says, description=f"{says[0].upper()}{says[1:]}."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)
    return parser


def _add_room(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, default=Path("/var/cache/sparkpair/image"), metavar="DIR")
    parser.add_argument(
        "--free-bytes",
        type=int,
        default=35_000_000_000,
        metavar="N",
        help="what base and build take under Docker's root; a base that is there is taken off (%(default)s)",
    )


def _base(args: argparse.Namespace) -> imagebase.Base:
    return imagebase.Base(args.base, image.platform_of(os.uname().machine), args.free_bytes, args.cache)


def _pull(args: argparse.Namespace) -> int:
    with _ended_by_terminate():
        result = imagebase.pull(Docker(), _base(args), quiet=args.quiet)
    return _tell(
        args, result, f"{args.base}: {'pulled' if result['changed'] else 'here'}, {size(result['size'])}"
    )


def _build(args: argparse.Namespace) -> int:
    pins = image.Pins(
        base=args.base,
        repository=args.repository,
        commit=args.commit,
        branch=args.branch,
        tree=args.tree,
        zig=args.zig,
        sm=args.sm,
        platform=image.platform_of(os.uname().machine),
    )
    order = imagebuild.Order(args.inputs, pins, args.cache, args.free_bytes)
    with _ended_by_terminate():
        result = imagebuild.build(Docker(), order, quiet=args.quiet)
    how = f"built in {duration(result['seconds'])}" if result["changed"] else "here, nothing to build"
    return _tell(args, result, f"{result['tag']}: {how}")


def _ship(args: argparse.Namespace) -> int:
    target = peer.parse_target(f"{args.to}:/")
    if target.folder != "/":
        raise Problem(
            found=f"the peer {args.to!r}",
            needed="USER@ADDRESS alone: an image has no folder",
            do=f"leave the folder away: --to {args.to.rpartition(':/')[0]}",
            code="target-bad",
        )
    peer.require_login_files(args.identity, args.known_hosts)
    to = imageship.Peer(
        user=target.user,
        address=target.address,
        identity=args.identity,
        known_hosts=args.known_hosts,
        port=args.port,
        allow_lan=args.allow_lan,
        node_root=args.root,
    )
    image.key_of_tag(args.tag)
    with _ended_by_terminate(), imageship.reached(to) as reach:
        result = imageship.ship(Docker(), args.tag, args.to, reach, quiet=args.quiet)
    sent = f"sent {size(result['bytes'])} in {duration(result['seconds'])}"
    how = sent if result["changed"] else "there with equal content, nothing sent"
    return _tell(args, result, f"{args.tag}: {how}")


def _list(args: argparse.Namespace) -> int:
    found = image.ours(Docker())
    rows = [
        f"{row['tag']}  {size(row['size']):>8}  {row['created'][:19]}  {row['commit'][:12]}" for row in found
    ]
    return _tell(args, {"changed": False, "images": found}, "\n".join(rows) or "no image of ours")


def _prune(args: argparse.Namespace) -> int:
    docker = Docker()
    if not args.yes:
        old = image.superseded(image.ours(docker), args.keep)
        said = "\n".join(f"would remove {tag}" for tag in old) or "nothing superseded"
        return _tell(args, {"changed": False, "would_remove": old}, said)
    result = image.prune(docker, args.keep)
    lines = [f"removed {tag}" for tag in result["removed"]]
    lines += [f"kept {tag}: {why}" for tag, why in result["kept"].items()]
    return _tell(
        args, {"changed": bool(result["removed"]), **result}, "\n".join(lines) or "nothing superseded"
    )


def _tell(args: argparse.Namespace, result: dict[str, Any], words: str) -> int:
    print(json.dumps({"ok": True, **result}) if args.json else words)
    return 0


@contextlib.contextmanager
def _ended_by_terminate() -> Iterator[None]:
    """SIGTERM (the unit is stopped) ends us as Ctrl-C does: what was begun is cleaned up first."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
