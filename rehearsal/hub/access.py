"""Who may read what, and the refusals in the Hub's own words and codes."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

ANY = "*"
READER_TOKEN = "hf_rehearsalReader"  # accepted, and its account agreed to every gated repository's terms
NEWCOMER_TOKEN = "hf_rehearsalNewcomer"  # accepted, but its account agreed to nothing yet
PUBLIC_SITE = "https://huggingface.co"


@dataclass
class Refusal(Exception):
    """An answer that is not the thing asked for."""

    status: int
    message: str
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def all_headers(self) -> dict[str, str]:
        # A header holds one line of ASCII, whatever the caller's revision or path held.
        line = " ".join(self.message.split()).encode("ascii", "replace").decode()
        said = {"X-Error-Message": line}
        if self.code:
            said["X-Error-Code"] = self.code
        return said | self.headers


def invalid_token() -> Refusal:
    return Refusal(401, "Invalid credentials in Authorization header")


def hidden() -> Refusal:
    """To a caller without a token a private repository and a missing one look alike (field report 40).

    The Hub leaves the code out and the library goes by the `https` address; the rehearsal speaks plain HTTP,
    so the code stands in for that.
    """
    return Refusal(
        401,
        "Invalid username or password.",
        "RepoNotFound",
        {"WWW-Authenticate": 'Bearer realm="Authentication required"'},
    )


def no_repo() -> Refusal:
    return Refusal(404, "Repository not found", "RepoNotFound")


def no_revision(revision: str) -> Refusal:
    return Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def no_entry() -> Refusal:
    return Refusal(404, "Entry not found", "EntryNotFound")


def log_in_first(repo: str) -> Refusal:
    text = (
        f"Access to model {repo} is restricted. "
        "You must have access to it and be authenticated to access it. Please log in."
    )
    return Refusal(401, text, "GatedRepo")


def terms_not_accepted(repo: str) -> Refusal:
    text = (
        f"Access to model {repo} is restricted and you are not in the authorized list. "
        f"Visit {PUBLIC_SITE}/{repo} to ask for access."
    )
    return Refusal(403, text, "GatedRepo")


class Tokens:
    """The tokens the hub accepts, each with the repositories its account may read ("*" for all).

    They come from `tokens.json` in the hub's root (`{"token": ["org/name", ...]}`), else the two of this
    module; `grant` adds one at run time.
    """

    def __init__(self, root: Path) -> None:
        self._file = root / "tokens.json"
        self._granted: dict[str, list[str]] = {}
        self._revoked: set[str] = set()
        self._lock = threading.Lock()

    def grant(self, token: str, repos: list[str]) -> None:
        with self._lock:
            self._granted[token] = list(repos)
            self._revoked.discard(token)

    def revoke(self, token: str) -> None:
        """The hub refuses this token from now on, wherever it came from."""
        with self._lock:
            self._revoked.add(token)

    def known(self) -> dict[str, list[str]]:
        with self._lock:
            if self._file.is_file():
                base: dict[str, list[str]] = json.loads(self._file.read_text())
            else:
                base = {READER_TOKEN: [ANY], NEWCOMER_TOKEN: []}
            return {k: v for k, v in (base | self._granted).items() if k not in self._revoked}

    def check(self, token: str | None, repo: str, *, gated: bool, private: bool, is_file: bool) -> None:
        """Raise the Refusal that this caller gets for this repository.

        A gated repository hides its files only: everybody may see its name, its listing and its commits.
        """
        granted = self.known().get(token) if token is not None else None
        if token is not None and granted is None:
            raise invalid_token()
        allowed = granted is not None and (ANY in granted or repo in granted)
        if private and not allowed:
            raise hidden() if token is None else no_repo()
        if gated and is_file and not allowed:
            raise log_in_first(repo) if token is None else terms_not_accepted(repo)


def bearer(authorization: str | None) -> str | None:
    """The token of an Authorization header; any other scheme counts as a token that nobody knows."""
    if not authorization:
        return None
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else authorization
