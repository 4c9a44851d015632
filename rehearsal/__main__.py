"""`python -m rehearsal up|down|status|fault|ssh|exec`: the simulated pair on this machine."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkpair.problem import Problem, problem_from

ROOT = Path(__file__).resolve().parent.parent
MODES = ("ok", "flip", "short", "stall", "slow", "401", "403", "404", "429", "503")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rehearsal", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", help="bring the pair up, or what is missing of it")
    down = commands.add_parser("down", help="remove all of it, and verify that")
    down.add_argument("--purge", action="store_true", help="remove the cached root file systems too")
    status = commands.add_parser("status", help="what is there and how it is")
    status.add_argument("--json", action="store_true", help="one JSON object")
    ssh = commands.add_parser("ssh", help="log in to a node as its user, or run a command there")
    ssh.add_argument("node")
    ssh.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    execute = commands.add_parser("exec", help="run a command in a node as root")
    execute.add_argument("node")
    execute.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    commands.add_parser("provide", help="install the host's programs where they are missing")
    commands.add_parser("ask", help="ask the served model, and tell how to")
    head = commands.add_parser("from-head", help="run site.yml from a clone on the head itself")
    head.add_argument("words", nargs=argparse.REMAINDER, metavar="OPTION", help="for ansible-playbook")
    _add_faults(commands.add_parser("fault", help="make something go wrong"))
    return parser


def _add_faults(parser: argparse.ArgumentParser) -> None:
    faults = parser.add_subparsers(dest="fault", required=True, metavar="FAULT")
    for name, text in (("rail-down", "pull the cable of a rail"), ("rail-up", "plug it in again")):
        rail = faults.add_parser(name, help=text)
        rail.add_argument("rail", type=int, choices=(0, 1))
    kill = faults.add_parser("kill-rank", help="kill a rank's container")
    kill.add_argument("rank", type=int)
    kill.add_argument("--signal", default="KILL", help="the signal (%(default)s)")
    hub = faults.add_parser("hub", help="make the hub answer wrongly")
    hub.add_argument("mode", choices=MODES)
    hub.add_argument("--path", help="only requests for files that match this glob")
    hub.add_argument("--method", help="only requests of this method, e.g. HEAD")
    for name in ("times", "after", "rate", "offset", "retry-after"):
        hub.add_argument(f"--{name}", type=int, help=f"see rehearsal.hub.modes.Rule.{name.replace('-', '_')}")
    memory = faults.add_parser("memory", help="set the memory that the nodes show")
    memory.add_argument("gib", help="GiB available, or ok for what a Spark would have")
    memory.add_argument("--cache", type=float, metavar="GIB", help="how much of it is page cache")
    memory.add_argument("--node", help="only this node")
    reboot = faults.add_parser("reboot", help="restart a node")
    reboot.add_argument("node")
    reboot.add_argument("--hard", action="store_true", help="as by the power button")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit 0 fine, 1 a problem, 2 wrong usage, 130 interrupted."""
    given = build_parser().parse_args(argv)
    try:
        return _run(given)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # the SDK's errors are some too
        print(_from_engine(error) or problem_from(error), file=sys.stderr)
        return 1


def _from_engine(error: OSError) -> Problem | None:
    """What the Docker engine refused; None for an error of another kind."""
    import docker.errors

    if not isinstance(error, docker.errors.APIError):
        return None
    return Problem(
        found=f"the Docker engine refused: {error.explanation}",
        needed="an engine that takes this step",
        do="mend what it names; `python -m rehearsal down` and `up` starts afresh",
        code="engine-refused",
    )


def _run(given: argparse.Namespace) -> int:
    from . import world

    if given.command == "up":
        world.up(ROOT)
    elif given.command == "down":
        world.down(ROOT, purge=given.purge)
    elif given.command == "status":
        shown = world.status(ROOT)
        print(json.dumps(shown, indent=2) if given.json else screen(shown))
    elif given.command == "fault":
        print(_fault(given))
    elif given.command == "provide":
        world.provide()
    elif given.command == "ask":
        _ask()
    elif given.command == "from-head":
        return _from_head(given.words)
    else:
        return _enter(given)
    return 0


def _enter(given: argparse.Namespace) -> int:  # noqa: RET503 - execvp does not come back
    from . import nodes, world
    from .plan import node_named

    node = node_named(given.node)
    given.words = given.words[1:] if given.words[:1] == ["--"] else given.words
    plan, client = world.current(ROOT)
    if given.command == "exec":
        if not given.words:
            raise Problem(
                "exec without a command", "a command to run", f"python -m rehearsal ssh {node.name}"
            )
        return nodes.stream(client, world.containers(plan, client)[node.name], given.words)
    words = nodes.ssh_argv(plan, node, given.words)
    os.execvp(words[0], words)  # noqa: S606 - the terminal is ssh's from here


def _ask() -> None:
    from . import ask, world
    from .plan import NODES

    plan, client = world.current(ROOT)
    head = NODES[0]
    container = world.containers(plan, client)[head.name]
    code, output = container.exec_run(["cat", "/etc/sparkpair/api-keys"])
    if code or not isinstance(output, bytes):
        raise Problem(
            "no API key on the head yet",
            "a pair that site.yml has set up",
            "ansible-playbook -i inventory/rehearsal.yml site.yml",
        )
    ask.tell(plan.state, plan.address(head), output.decode().strip())


def _from_head(words: Sequence[str]) -> int:
    from . import from_head, world
    from .plan import NODES

    plan, client = world.current(ROOT)
    container = world.containers(plan, client)[NODES[0].name]
    return from_head.run(plan, NODES[0], container, words=shlex.join(words))


def _fault(given: argparse.Namespace) -> str:
    from . import faults, world
    from .plan import node_named

    plan, client = world.current(ROOT)
    with world.locked(plan):
        if given.fault in {"rail-down", "rail-up"}:
            return faults.rail(plan, client, given.rail, plugged=given.fault == "rail-up")
        if given.fault == "kill-rank":
            return faults.kill_rank(plan, client, given.rank, given.signal)
        if given.fault == "memory":
            only = node_named(given.node).name if given.node else None
            return faults.memory(plan, client, _gib(given.gib), given.cache, only)
        if given.fault == "reboot":
            return faults.reboot(plan, client, node_named(given.node), hard=given.hard)
        names = ("mode", "path", "times", "method", "after", "rate", "offset", "retry_after")
        return faults.hub(plan, {name: getattr(given, name) for name in names})


def _gib(text: str) -> float | None:
    if text == "ok":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 121.6:
        raise Problem(
            f"memory {text!r}", "GiB from 0 to 121.6, or ok", "e.g. python -m rehearsal fault memory 60"
        )
    return value


def screen(shown: dict[str, Any]) -> str:
    """The status as one screen of text."""
    engine = shown["engine"]
    if engine is None:
        return "not up (python -m rehearsal up)"
    kind = "private" if engine["private"] else "this machine's"
    lines = [f"engine   {kind}, {engine['host']}, {'answers' if engine['answers'] else 'DOES NOT ANSWER'}"]
    for name, node in shown["nodes"].items():
        state = node.get("systemd", node["container"])
        lines.append(f"{name}  {state}, {node['user']}@{node['address']}")
        lines += [f"    {line.rstrip()}" for line in node.get("links", [])]
        lines += [f"    container {line}" for line in node.get("inner_containers", [])]
    rails = ", ".join(f"rail {number} {state}" for number, state in shown["rails"].items())
    lines.append(f"cables   {rails or 'none'}")
    lines += [
        f"{name:<8} {f'pid {pid}' if pid else 'not running'}" for name, pid in shown["services"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
