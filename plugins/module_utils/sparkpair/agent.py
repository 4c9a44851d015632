"""What the head's key may do on the worker: the forced command behind `sparkpair agent`.

sshd hands over what the head asked for in SSH_ORIGINAL_COMMAND. It is split into words as a shell would,
never given to a shell, and compared with an allow list: receive files by rsync, verify a folder, and the
verbs that other modules add to `VERBS`. Everything else is refused with exit code 126 and a line in the
journal. What is run is put together anew from the parts that were understood.

Folders are confined to the data folders below /var/lib/sparkpair: that is the service user's home, so
anything else there (such as .ssh) stays out of reach.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import stat as stat_bits
import sys
import syslog
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from . import paths

Verb = Callable[[Sequence[str]], int]

# Verbs by name: what `VERB ...` or `sparkpair agent VERB ...` runs. Each gets the words after its name,
# which it must check as strictly as this module does, and returns an exit code. stdin and stdout are the
# peer's.
VERBS: dict[str, Verb] = {}

# Modules that add verbs when they are imported.
PROVIDERS = ("imageship", "ready")

REFUSED = 126
_FOLDERS = tuple(
    folder.name for folder in (paths.WEIGHTS, paths.ENGRAM, paths.KIT, paths.FIXTURES, paths.RANK_CACHE)
)
_LONGEST = 4096
_PROGRAMS = ("sparkpair", str(paths.VENV / "bin/sparkpair"))
_SEARCH = "/usr/bin:/bin:/usr/local/bin"
# Of rsync's one-letter options only: verbose, whole file, times, permissions, ignore times, relative names.
# No links, devices or owners; `s` would read further options from stdin. After `e.` come capabilities.
_RSYNC_SHORT = re.compile(r"-[vWtpIR]*(?:e\d*\.[A-Za-z]*)?\Z")
_RSYNC_LONG = re.compile(
    r"--(?:timeout=[0-9]{1,5}|checksum-choice=none|stats|mkpath|inplace|append|whole-file)\Z", re.ASCII
)
_VERIFY_FLAGS = ("--json", "--quiet", "--full", "--only-listed", "--follow", "--tidy")


class Refusal(Exception):
    """The peer asked for something that its key may not do; says what."""


def serve(command: str, root: Path = paths.STATE, environment: Mapping[str, str] = os.environ) -> int:
    """Do what `command` asks, if the key may. Returns the exit code; a receiving rsync replaces this process."""
    try:
        words = split(command)
        if words[:2] == ["rsync", "--server"]:
            _exec_rsync(rsync_arguments(words[2:], root))
        if words[0] in _PROGRAMS and words[1:2] == ["verify"]:
            return _verify(verify_arguments(words[2:], root))
        if words[0] in _PROGRAMS and words[1:2] == ["agent"]:
            words = words[2:]
        return find_verb(words[0] if words else "")(words[1:])
    except Refusal as refusal:
        return _refuse(command, str(refusal), environment)


def split(command: str) -> list[str]:
    """The words of `command`, quoting undone, nothing expanded. Raises Refusal."""
    if len(command) > _LONGEST or not command.isprintable():
        raise Refusal("the command is too long or has characters that do not print")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise Refusal(f"the command can't be split into words ({error})") from None
    if not words:
        raise Refusal("there is no shell behind this key")
    return words


def find_verb(name: str) -> Verb:
    """The function behind `sparkpair agent NAME`. Raises Refusal for an unknown name."""
    for module in PROVIDERS:
        if name in VERBS:
            break
        if importlib.util.find_spec(f"{__package__}.{module}"):
            importlib.import_module(f"{__package__}.{module}")
    if name not in VERBS:
        raise Refusal(f"{name!r} is neither a receiving rsync, sparkpair verify nor one of our verbs")
    return VERBS[name]


def rsync_arguments(words: Sequence[str], root: Path = paths.STATE) -> list[str]:
    """The arguments of a receiving `rsync --server` into a folder of ours, rebuilt. Raises Refusal."""
    *options, dot, destination = words if len(words) >= 2 else ("", "")
    if dot != ".":
        raise Refusal("rsync may only receive, into one folder")
    for option in options:
        if not (_RSYNC_SHORT.match(option) or _RSYNC_LONG.match(option)):
            raise Refusal(f"the rsync option {option!r}")
    folder = confined(destination, root)
    _require_no_links(folder)
    return ["--server", *options, ".", f"{folder}/"]


def verify_arguments(words: Sequence[str], root: Path = paths.STATE) -> list[str]:
    """The arguments of `sparkpair verify --lock - --dir DIR [flags]`, rebuilt. Raises Refusal."""
    flags, values = [], {}
    left = list(words)
    while left:
        word = left.pop(0)
        if word in ("--lock", "--dir") and left and word not in values:
            values[word] = left.pop(0)
        elif word in _VERIFY_FLAGS:
            flags.append(word)
        else:
            raise Refusal(f"the verify option {word!r}")
    if values.get("--lock") != "-" or "--dir" not in values:
        raise Refusal("verify needs --lock - and --dir")
    return ["--lock", "-", "--dir", str(confined(values["--dir"], root)), *flags]


def confined(text: str, root: Path = paths.STATE) -> Path:
    """The folder `text` if it lies in one of our data folders and no link leads to it. Raises Refusal."""
    parts = text.rstrip("/").split("/")
    if not text.startswith("/") or any(part in (".", "..") for part in parts) or "" in parts[1:]:
        raise Refusal(f"{text!r} is no plain absolute path")
    folder = Path(text)
    if not folder.is_relative_to(root):
        raise Refusal(f"{text!r} is outside {root}")
    inner = folder.relative_to(root)
    if not inner.parts or inner.parts[0] not in _FOLDERS or any(part.startswith(".") for part in inner.parts):
        raise Refusal(f"{text!r} is in none of our data folders ({', '.join(_FOLDERS)})")
    if folder.resolve() != root.resolve() / inner:
        raise Refusal(f"a link leads to or out of {text!r}")
    return folder


def _require_no_links(folder: Path) -> None:
    for place, folders, names in os.walk(folder):
        for name in folders + names:
            if stat_bits.S_ISLNK((Path(place) / name).lstat().st_mode):
                raise Refusal(f"{Path(place) / name} is a link")


def _exec_rsync(arguments: list[str]) -> NoReturn:
    program = shutil.which("rsync", path=_SEARCH)
    if program is None:
        print("sparkpair agent: there is no rsync on this node", file=sys.stderr)
        sys.exit(127)
    os.chdir("/")
    os.umask(0o022)
    # No shell is the point.
    os.execve(program, ["rsync", *arguments], {"PATH": _SEARCH, "LC_ALL": "C"})  # noqa: S606


def _verify(arguments: list[str]) -> int:
    from . import cli

    return cli.main(["verify", *arguments])


def _refuse(command: str, reason: str, environment: Mapping[str, str]) -> int:
    peer = environment.get("SSH_CONNECTION", "").split(" ")[0] or "unknown"
    syslog.openlog("sparkpair-agent", syslog.LOG_PID, syslog.LOG_AUTH)
    syslog.syslog(syslog.LOG_WARNING, f"refused, from {peer}: {reason}: {command[:300]!r}")
    syslog.closelog()
    print(f"sparkpair agent: refused: {reason}", file=sys.stderr)
    return REFUSED
