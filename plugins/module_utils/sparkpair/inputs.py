"""What the user typed, checked before any connection: knobs, inventory, `--limit`.

Every check returns all that is wrong at once, so that one run tells everything.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .problem import Problem

MAX_CONTEXT = 1_048_576
PLACEHOLDER = "CHANGE-ME"
# Phases that are right on one host of the pair alone.
SINGLE_HOST_TAGS = frozenset({"preflight", "host"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,95}\Z")
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


@dataclass(frozen=True)
class Whole:
    """An integer within bounds, both included."""

    low: int
    high: int

    def says(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def accepts(self, value: Any) -> bool:
        number = whole(value)
        return number is not None and self.low <= number <= self.high


@dataclass(frozen=True)
class Real:
    """A decimal number within bounds, both included."""

    low: float
    high: float

    def says(self) -> str:
        return f"a number from {self.low} to {self.high}"

    def accepts(self, value: Any) -> bool:
        try:
            return not isinstance(value, bool) and self.low <= float(value) <= self.high
        except (TypeError, ValueError):
            return False


@dataclass(frozen=True)
class Truth:
    """true or false; the spellings that `-e name=value` gives are taken too."""

    def says(self) -> str:
        return "true or false"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool) or str(value).lower() in _TRUE | _FALSE


@dataclass(frozen=True)
class OneOf:
    words: tuple[str, ...]

    def says(self) -> str:
        return " or ".join(self.words)

    def accepts(self, value: Any) -> bool:
        return str(value) in self.words


@dataclass(frozen=True)
class Text:
    """A string of a given form."""

    form: re.Pattern[str]
    words: str

    def says(self) -> str:
        return self.words

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and bool(self.form.match(value))


Rule = Whole | Real | Truth | OneOf | Text


def knob_rules(profiles: Iterable[str]) -> dict[str, tuple[Rule, str]]:
    """Each knob's rule and an example, by its name."""
    return {
        "model": (OneOf(tuple(sorted(profiles))), "dsv41-1017"),
        "ablit": (Truth(), "true"),
        "served_name": (Text(_NAME, "a name of letters, digits and . _ / -"), "DeepSeek-V4.1-Flash-1017"),
        "context": (Whole(4096, MAX_CONTEXT), "524288"),
        "parallel": (Whole(1, 4), "2"),
        "drafts": (Truth(), "false"),
        "thinking": (Truth(), "false"),
        "max_tokens": (Whole(1, MAX_CONTEXT), "32768"),
        "temperature": (Real(0.0, 2.0), "0.7"),
        "top_p": (Real(0.01, 1.0), "0.95"),
        "top_k": (Whole(0, 129_280), "20"),
        "api_host": (
            Text(re.compile(r"\S+\Z"), "an IPv4 address of the head or 0.0.0.0"),
            "127.0.0.1",
        ),
        "api_port": (Whole(1, 65535), "8888"),
        "rails": (Whole(1, 2), "2"),
        "mtu": (Whole(1500, 9216), "9000"),
        "worker_weights": (OneOf(("slice", "full")), "slice"),
        "allow_lan_copy": (Truth(), "false"),
        "wait_timeout": (Whole(30, 86_400), "1800"),
        "stop_timeout": (Whole(1, 600), "30"),
        "log_keep": (Whole(1, 1000), "10"),
    }


def whole(value: Any) -> int | None:
    """An int from YAML (int) or from `-e` (str); None for anything else, booleans and 1.5 included."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,12}", value.strip()) else None


def check_knobs(knobs: Mapping[str, Any], profiles: Mapping[str, Any]) -> list[Problem]:
    """All knobs against their rules, then the combinations.

    No secret is among the values: `api_key` is "auto", "none", "own" or "malformed", and `has_token` a boolean.
    """
    problems = []
    for name, (rule, example) in knob_rules(profiles).items():
        value = knobs.get(name)
        if not rule.accepts(value):
            problems.append(
                Problem(
                    found=f"{name}={value!r}",
                    needed=rule.says(),
                    do=f"set it in inventory/group_vars/pair/ or with -e {name}={example}",
                    code=f"knob-{name.replace('_', '-')}",
                )
            )
    return problems + _check_combinations(knobs)


def _check_combinations(knobs: Mapping[str, Any]) -> list[Problem]:
    problems = []
    context, reply = whole(knobs.get("context")), whole(knobs.get("max_tokens"))
    if context and reply and reply >= context:
        problems.append(
            Problem(
                found=f"max_tokens={reply} with context={context}",
                needed="a reply shorter than the window that it shares with the prompt",
                do=f"lower it, e.g. -e max_tokens={max(context // 4, 1)}",
                code="knob-max-tokens",
            )
        )
    host = str(knobs.get("api_host"))
    if not _is_ipv4(host):
        problems.append(
            Problem(
                found=f"api_host={host!r}",
                needed="an IPv4 address: the engine takes no host names",
                do="set api_host to 0.0.0.0, 127.0.0.1 or an address of the head",
                code="knob-api-host",
            )
        )
    if knobs.get("api_key") not in ("auto", "none", "own"):
        problems.append(
            Problem(
                found="api_key of another form (its value is not shown)",
                needed="auto, none, or a key of 8 to 256 printable characters without spaces",
                do="leave api_key at auto, or put a key into a vault",
                code="knob-api-key",
            )
        )
    if truth(knobs.get("ablit")) and not knobs.get("has_token"):
        problems.append(
            Problem(
                found="ablit=true and no hf_token",
                needed="a Hugging Face token whose account has accepted the overlay's terms",
                do="export HF_TOKEN=... (or put hf_token into a vault), then run again",
                code="token-missing",
            )
        )
    if not knobs.get("token_sound", True):
        problems.append(
            Problem(
                found="hf_token holds a blank, a newline or another character that no token has",
                needed="the token alone, as its page shows it",
                do="export HF_TOKEN=hf_... anew (or correct it in the vault)",
                code="token-form",
            )
        )
    site = knobs.get("site_environment", {})
    if not isinstance(site, Mapping) or not all(isinstance(value, str) for value in site.values()):
        problems.append(
            Problem(
                found=f"site_environment of type {type(site).__name__}, or with a value that is no text",
                needed="variables with their values, each a text",
                do='e.g. site_environment: {HTTPS_PROXY: "http://proxy:3128"} in inventory/group_vars/pair/',
                code="knob-site-environment",
            )
        )
    endpoint = urlsplit(str(knobs.get("hf_endpoint")))
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
        problems.append(
            Problem(
                found=f"hf_endpoint={knobs.get('hf_endpoint')!r}",
                needed="the address of a Hub, starting with https:// or http://",
                do="leave hf_endpoint at https://huggingface.co, or name your mirror",
                code="knob-hf-endpoint",
            )
        )
    return problems


def truth(value: Any) -> bool:
    """A knob's boolean, as YAML or `-e` gives it."""
    return value if isinstance(value, bool) else str(value).lower() in _TRUE


def _is_ipv4(text: str) -> bool:
    try:
        return bool(ipaddress.IPv4Address(text))
    except ValueError:
        return False


def check_inventory(groups: Mapping[str, list[str]], hosts: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """One head, one worker, two different machines, no address of the cable as the way in.

    Args:
        groups: group name -> host names, as Ansible's `groups`.
        hosts: host name -> {"ansible_host", "ansible_connection", "link_address"} where set.
    """
    problems = []
    for group, rank in (("head", 0), ("worker", 1)):
        names = groups.get(group, [])
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            problems.append(
                Problem(
                    found=f"{len(names)} hosts in group {group} ({listed})",
                    needed=f"exactly one: the Spark of rank {rank}",
                    do="compare with inventory/hosts.example.yml: pair > head, worker, one host each",
                    code=f"inventory-{group}",
                )
            )
    pair = list(dict.fromkeys([*groups.get("head", []), *groups.get("worker", [])]))
    if len(pair) == 1 and groups.get("head") and groups.get("worker"):
        problems.append(_same_host(pair[0], pair[0], "is both head and worker"))
    for name in pair:
        problems += _check_host(name, hosts.get(name, {}))
    addresses = [(name, str(hosts.get(name, {}).get("ansible_host") or name)) for name in pair]
    if len(addresses) == 2 and addresses[0][1] == addresses[1][1] != PLACEHOLDER:
        problems.append(_same_host(pair[0], pair[1], f"both have ansible_host {addresses[0][1]}"))
    local = [name for name in pair if hosts.get(name, {}).get("ansible_connection") == "local"]
    if len(local) == 2 or (local and local[0] in groups.get("worker", [])):
        problems.append(
            Problem(
                found=f"ansible_connection: local on {', '.join(local)}",
                needed="at most the head as the machine that runs the playbook",
                do="run it from the head or from a third machine; give the worker its ansible_host",
                code="inventory-local",
            )
        )
    return problems


def _same_host(first: str, second: str, how: str) -> Problem:
    return Problem(
        found=f"{first} and {second}: {how}" if first != second else f"{first} {how}",
        needed="two different machines",
        do="give each Spark its own management address in the inventory",
        code="inventory-same-host",
    )


def _check_host(name: str, host: Mapping[str, Any]) -> list[Problem]:
    """One host's address: filled in, and not the host itself by another name."""
    address = str(host.get("ansible_host") or name)
    problems = []
    if address == PLACEHOLDER or not address.strip():
        problems.append(
            Problem(
                found=f"{name} has ansible_host {address!r}: the example's placeholder",
                needed="the management address (or host name) of that Spark",
                do="edit inventory/hosts.yml",
                code="inventory-placeholder",
                host=name,
            )
        )
    elif host.get("ansible_connection") != "local" and _is_loopback(address):
        problems.append(
            Problem(
                found=f"{name} has ansible_host {address}",
                needed="an address that the other Spark can reach too",
                do=f"if this machine is {name}, say ansible_connection: local instead",
                code="inventory-loopback",
                host=name,
            )
        )
    link = host.get("link_address")
    if link and (not _is_ipv4(str(link)) or ipaddress.IPv4Address(str(link)).is_link_local):
        problems.append(
            Problem(
                found=f"{name} has link_address {link}",
                needed="a static IPv4 address: 169.254 addresses change when the link comes up again",
                do="remove link_address (sparkpair plans the addresses) or give a static one",
                code="inventory-link-local",
                host=name,
            )
        )
    return problems


def _is_loopback(address: str) -> bool:
    return address == "localhost" or (_is_ipv4(address) and ipaddress.IPv4Address(address).is_loopback)


def check_limit(pair: Iterable[str], playing: Iterable[str], tags: Iterable[str]) -> list[Problem]:
    """`--limit` that leaves a host of the pair out, where the phase needs both.

    Args:
        pair: the hosts of the pair.
        playing: the hosts that this run acts on (`ansible_play_hosts_all`).
        tags: the tags of this run ("all" where none is given).
    """
    missing = sorted(set(pair) - set(playing))
    if not missing or set(tags) <= SINGLE_HOST_TAGS:
        return []
    return [
        Problem(
            found=f"--limit leaves {', '.join(missing)} out",
            needed="both Sparks: the pair is one server, half of it is none",
            do="run without --limit (or with it only for --tags preflight,host)",
            code="limit",
        )
    ]


def report(problems: Iterable[Problem]) -> Problem | None:
    """Several problems as one text to fail with; None when there is none."""
    listed = list(problems)
    if not listed:
        return None
    if len(listed) == 1:
        return listed[0]
    text = "\n".join(f"- {problem}".replace("\n", "\n  ") for problem in listed)
    return Problem(
        found=f"{len(listed)} things that stop the run:\n{text}",
        needed="each of them put right, as said there",
        do="correct them together, then run the same command again",
        code="+".join(problem.code for problem in listed),
    )
