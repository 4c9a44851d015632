"""Faults to order: which requests go wrong, how, and how often."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from .access import Refusal, hidden, invalid_token, no_entry, no_repo, terms_not_accepted

BODY_MODES = frozenset({"flip", "short", "stall", "slow"})
ANSWER_MODES = frozenset({"401", "403", "404", "429", "503"})
MODES = BODY_MODES | ANSWER_MODES | {"ok"}


@dataclass
class Rule:
    """One ordered fault.

    Args:
        mode: a name of MODES.
        path: a glob over the file's path in its repository, or over the URL's path where no file is
            asked for; None is every request.
        times: the number of requests it lasts for; None is until it is taken back.
        method: only requests of this method.
        after: stall: bytes sent before it hangs (default the lesser of 1 MiB and half of the answer).
        rate: slow: bytes a second for each answer.
        offset: flip: the byte of the file to change (default the middle one). Only an answer that holds
            this byte counts as a match.
        retry_after: 429 and 503: seconds in Retry-After; None leaves the header out.
    """

    mode: str
    path: str | None = None
    times: int | None = None
    method: str | None = None
    after: int | None = None
    rate: int = 1_000_000
    offset: int | None = None
    retry_after: int | None = 2
    left: int | None = field(default=None, init=False)
    taken_back: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r}: one of {', '.join(sorted(MODES))}")
        if self.times is not None and self.times < 1:
            raise ValueError(f"times {self.times}: at least 1")
        if self.rate < 1:
            raise ValueError(f"rate {self.rate}: at least 1 byte a second")
        self.left = self.times

    def matches(self, method: str, path: str) -> bool:
        return (self.method is None or self.method == method) and (
            self.path is None or fnmatchcase(path, self.path)
        )

    def shown(self) -> dict[str, Any]:
        names = ("mode", "path", "times", "left", "method", "after", "rate", "offset", "retry_after")
        return {name: getattr(self, name) for name in names}

    def flipped(self, size: int) -> int:
        return self.offset if self.offset is not None else size // 2

    def refusal(self, repo: str, *, has_token: bool, is_file: bool, client: str) -> Refusal:
        """The answer of an answer mode, as the Hub words it."""
        wait = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.mode == "401":
            return invalid_token() if has_token else hidden()
        if self.mode == "403":
            return terms_not_accepted(repo)
        if self.mode == "404":
            return no_entry() if is_file and self.path is not None else no_repo()
        if self.mode == "429":
            text = f"We had to rate limit your IP ({client}). To continue, log in and send a token."
            return Refusal(429, text, headers=wait)
        return Refusal(503, "Service Temporarily Unavailable", headers=wait)


class Modes:
    """The rules in force; the newest that matches wins. Safe from several threads."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._spent: list[Rule] = []  # used up, but an answer may still hang in one
        self._lock = threading.Lock()

    def set(self, rule: Rule) -> None:
        """Add a rule; one of the same path and method is replaced. "ok" without a path takes all back."""
        with self._lock:
            everything = rule.mode == "ok" and rule.path is None and rule.method is None
            kept: list[Rule] = []
            for old in self._rules + self._spent:
                if everything or (old.path, old.method) == (rule.path, rule.method):
                    old.taken_back.set()
                elif old in self._rules:
                    kept.append(old)
            self._spent = [old for old in self._spent if not old.taken_back.is_set()]
            self._rules = kept if rule.mode == "ok" else [rule, *kept]

    def take(
        self, kind: frozenset[str], method: str, path: str, *, span: range | None = None, size: int = 0
    ) -> Rule | None:
        """The rule for this request, counted as used; None when all is well.

        Args:
            kind: BODY_MODES or ANSWER_MODES, the sort of fault this step of an answer can show.
            span: the bytes of the file that the answer carries, out of `size`.
        """
        with self._lock:
            for rule in self._rules:
                if rule.mode not in kind or not rule.matches(method, path):
                    continue
                if rule.mode == "flip" and span is not None and rule.flipped(size) not in span:
                    continue
                if rule.left is not None:
                    rule.left -= 1
                    if rule.left == 0:
                        self._rules.remove(rule)
                        self._spent.append(rule)
                return rule
        return None

    def shown(self) -> list[dict[str, Any]]:
        with self._lock:
            return [rule.shown() for rule in self._rules]
