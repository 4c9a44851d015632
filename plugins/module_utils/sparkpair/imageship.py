"""The image from the head to a peer: over the link, by content, whole or not at all.

On the head `ship` runs; on the peer the two verbs of its forced command `sparkpair agent`: `image-probe`
and `image-load`. An image that the peer has with equal content is not sent (field report 29).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from . import agent, image, pairfile, peer
from .console import Progress
from .dockercli import Docker, classify, ending, missing, plain
from .problem import Problem

_CHUNK = 1 << 20
# Beside what the image takes: the engine's notes and what else is written meanwhile.
_MARGIN = 500_000_000

# How a verb's words become the command that runs it on the peer.
Reach = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Peer:
    """A peer behind SSH and its forced command.

    Args:
        user, address: who and where; the address is one of the peer's on the link.
        identity: the private key that the peer accepts for `sparkpair agent` only; None for ssh's own choice.
        known_hosts: the file with the peer's host key; None for ssh's own.
        port: its sshd's port; None for the pair file's or ssh's own.
        allow_lan: take any route to it.
        node_root: stands in for / where a rehearsed tree has the RDMA devices.
    """

    user: str | None
    address: str
    identity: Path | None = None
    known_hosts: Path | None = None
    port: int | None = None
    allow_lan: bool = False
    node_root: Path = Path("/")


@contextlib.contextmanager
def reached(to: Peer) -> Iterator[Reach]:
    """One connection to the peer, over the first of its rails that carries it. Raises Problem of the first."""
    pair = peer.known_pair()
    subnets = list(pair.subnets) if pair else []
    port = (
        to.port or next((rank.ssh_port for rank in pair.peers if _is_at(rank, to.address)), None)
        if pair
        else to.port
    )
    login = peer.Login(to.user, to.identity, to.known_hosts, port)
    faults: list[Problem] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(peer.private_folder())
        for number, address in enumerate(peer.link_addresses(to.address, pair)):
            try:
                route = peer.require_link(address, subnets, allow_lan=to.allow_lan, node_root=to.node_root)
                device = route.device if route and not to.allow_lan else None
                connection = peer.Connection(address, login, folder, f"i{number}", device)
                stack.callback(connection.close)
                connection.open()
            except Problem as problem:
                faults.append(problem)
                continue
            yield connection.command
            return
    raise faults[0]


def _is_at(rank: pairfile.PairRank, address: str) -> bool:
    return any(rail.address == address for rail in rank.rails)


def ship(docker: Docker, tag: str, name: str, reach: Reach, *, quiet: bool = False) -> dict[str, Any]:
    """Make the peer have the image with equal content.

    Args:
        docker: the head's engine.
        tag: one of our tags.
        name: what the peer is called in messages.
        reach: how a verb is run there.

    Returns {"changed", "tag", "identity", "bytes", "seconds"}. Raises Problem, with the peer's name where the
    fault is there; then the peer keeps nothing of a part of it.
    """
    begun = time.monotonic()
    here = image.probe(docker, tag)
    if not here["present"]:
        raise Problem(
            found=f"no image {tag} on the head",
            needed="it, built",
            do="ansible-playbook site.yml --tags image",
            code="image-missing",
        )
    there = _ask(reach(["image-probe", tag]), name)
    if there["identity"] == here["identity"]:
        return {"changed": False, "tag": tag, "identity": here["identity"], "bytes": 0, "seconds": 0.0}
    image.require_room([image.Need(Path(here["roots"][-1]), here["size"], "packing the image")])
    # An engine lays the whole archive beside the images before it takes it over.
    arriving = image.Need(Path(there["roots"][-1]), here["size"] + here["disk"] + _MARGIN, "the image")
    image.short_of_room([arriving], int(there["free_bytes"]), name)
    platform = str(here["content"]["platform"])
    one = ["--platform", platform] if docker.can_save_one_platform() else []
    save, load_there = docker.argv("save", *one, tag), reach(["image-load", tag, here["identity"]])
    progress = Progress("ship the image", int(here["size"]), quiet=quiet)
    sent = _stream(docker, save, load_there, name, progress)
    arrived = _ask(reach(["image-probe", tag]), name)
    if arrived["identity"] != here["identity"]:
        raise _other_content(tag, here["content"], arrived["content"], name)
    return {
        "changed": True,
        "tag": tag,
        "identity": here["identity"],
        "bytes": sent,
        "seconds": round(time.monotonic() - begun, 1),
    }


def _other_content(tag: str, ours: Mapping[str, Any], theirs: Mapping[str, Any] | None, name: str) -> Problem:
    how = image.explain_difference(ours, theirs) if theirs else "it is not there"
    return Problem(
        found=f"{tag} arrived with other content: {how}",
        needed="the same layers and configuration on every rank",
        do="run the same again; if it stays so, compare docker image inspect on both",
        code="image-content",
        host=name,
    )


def _ask(command: list[str], name: str) -> dict[str, Any]:
    """Run a verb that reads nothing and answers with one JSON object."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return _answer(done.stdout, done.stderr, done.returncode, name)


def _answer(stdout: str, stderr: str, code: int, name: str) -> dict[str, Any]:
    """A verb's JSON object; what it says went wrong there, or that it could not be asked, as a Problem."""
    try:
        told = json.loads(stdout)
    except ValueError:
        told = None
    if isinstance(told, dict) and told.get("ok"):
        return told
    if isinstance(told, dict) and told.get("problems"):
        first = told["problems"][0]
        raise Problem(first["found"], first["needed"], first["do"], code=first["code"], host=name)
    said = (
        " | ".join(line.strip() for line in stderr.splitlines()[-3:] if line.strip()) or f"exit code {code}"
    )
    raise Problem(
        found=f"no answer from {name}: {said}",
        needed="the peer's agent, reached over the link with the pair's key",
        do="ansible-playbook site.yml --tags link lays key and agent again; then run the same again",
        code="peer-unreachable",
        host=name,
    )


def _stream(docker: Docker, save: list[str], load: list[str], name: str, progress: Progress) -> int:
    """`save` into `load`, counted on its way. Returns the bytes; the peer's words win over a broken pipe."""
    with contextlib.ExitStack() as stack:
        said, answer, complaint = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        try:
            source = subprocess.Popen(
                save,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                env=docker.environment(),
            )
        except FileNotFoundError:
            raise missing() from None
        stack.enter_context(ending(source))
        sink = subprocess.Popen(load, stdin=subprocess.PIPE, stdout=answer, stderr=complaint)
        stack.enter_context(ending(sink))
        cut = not _pump(source, sink, progress)
        saved, loaded = source.wait(), sink.wait()
        if saved != 0 and not cut:
            raise classify(_text(said), "docker save")
        _answer(_text(answer), _text(complaint), loaded, name)
    progress.total_bytes = progress.done_bytes
    progress.close()
    return progress.done_bytes


def _pump(source: subprocess.Popen[bytes], sink: subprocess.Popen[bytes], progress: Progress) -> bool:
    """Move the pipe's bytes without copying them. False when the sink stopped taking them.

    An archive that is cut off at its source ends early at the sink, which then takes over nothing of it.
    """
    if source.stdout is None or sink.stdin is None:
        raise AssertionError("both pipes were asked for")
    whole = True
    with source.stdout as outlet, sink.stdin as inlet:
        for pipe in (outlet, inlet):
            with contextlib.suppress(OSError):  # above the user's limit for pipes: slower, no fault
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _CHUNK)
        try:
            while moved := os.splice(outlet.fileno(), inlet.fileno(), _CHUNK):
                progress.advance(moved)
        except BrokenPipeError:
            whole = False
    return whole


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def load(docker: Docker, tag: str, expected: str, stream: IO[bytes] | int) -> dict[str, Any]:
    """On the peer: take an archive from `stream`, keep it only if it is the expected image, whole.

    Args:
        docker: the peer's engine.
        tag: one of our tags; the archive may hold no other name.
        expected: the identity that the sender's image has.
        stream: what `docker save` wrote.

    Returns {"changed": True, "tag", "identity"}. Raises Problem; the tag then names what it named before.
    """
    image.key_of_tag(tag)
    before = docker.inspect(tag)
    try:
        done = subprocess.run(
            docker.argv("load"),
            stdin=stream,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            env=docker.environment(),
        )
    except FileNotFoundError:
        raise missing() from None
    said = "\n".join(plain(line) for line in done.stdout.splitlines())
    names = re.findall(r"Loaded image(?: ID)?: (\S+)", said)
    after = docker.inspect(tag)
    if done.returncode == 0 and names == [tag] and after and image.identity(after) == expected:
        if before and before["Id"] != after["Id"]:
            _remove(docker, str(before["Id"]))
        return {"changed": True, "tag": tag, "identity": expected}
    _undo(docker, tag, before, after, names)
    if done.returncode != 0:
        raise _load_failure(said)
    how = image.explain_difference(image.content(after), image.content(before)) if after and before else ""
    raise Problem(
        found=f"the archive held {', '.join(names) or 'no image'}, with other content than announced {how}".strip(),
        needed=f"{tag} alone, as the head has it",
        do="run the same again: ansible-playbook site.yml --tags image",
        code="image-content",
    )


def _load_failure(said: str) -> Problem:
    problem = classify(said, "docker load")
    if problem.code == "docker-failed":
        problem.needed = "a whole archive; the connection may have been cut"
        problem.do = "run the same again: ansible-playbook site.yml --tags image"
        problem.code = "image-load"
    return problem


def _undo(
    docker: Docker,
    tag: str,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    names: Sequence[str],
) -> None:
    """Remove what a load brought; the tag names again what it named before."""
    for name in names:
        if name != tag:
            _remove(docker, name)
    if after and (not before or before["Id"] != after["Id"]):
        _remove(docker, tag)
        if before:
            docker.run("image", "tag", str(before["Id"]), tag)


def _remove(docker: Docker, reference: str) -> None:
    """Remove an image unless a container was made from it."""
    try:
        docker.run("image", "rm", reference)
    except Problem as problem:
        if problem.code not in {"image-in-use", "image-missing"}:
            raise


def _probe_here(words: Sequence[str]) -> dict[str, Any]:
    (tag,) = _words("image-probe TAG", words)
    return image.probe(Docker(), tag)


def _load_here(words: Sequence[str]) -> dict[str, Any]:
    tag, expected = _words("image-load TAG IDENTITY", words)
    docker = Docker()
    docker.info()  # an engine that is down says so before 25 GB are on their way
    return load(docker, tag, expected, sys.stdin.buffer)


def _words(form: str, words: Sequence[str]) -> Sequence[str]:
    verb, *wanted = form.split()
    if len(words) != len(wanted):
        raise Problem(
            found=f"{verb} with {len(words)} words after it",
            needed=form,
            do="ansible-playbook site.yml lays the same library on every node; run it again",
            code="agent-words",
        )
    return words


def _answering(work: Callable[[Sequence[str]], dict[str, Any]]) -> agent.Verb:
    """A verb that answers with one JSON object on stdout, faults too, and with 0 or 1."""

    def verb(words: Sequence[str]) -> int:
        try:
            answer = {"ok": True, **work(words)}
        except Problem as problem:
            answer = {"ok": False, "problems": [problem.as_dict()]}
        print(json.dumps(answer), flush=True)
        return 0 if answer["ok"] else 1

    return verb


agent.VERBS["image-probe"] = _answering(_probe_here)
agent.VERBS["image-load"] = _answering(_load_here)
