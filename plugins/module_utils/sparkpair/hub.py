"""The Hub: who may read what, which commit a name means, which files it holds.

`check_access` uses the standard library alone, so that it runs on a bare node before anything is
installed there. `resolve` and the fetcher use `huggingface_hub` for addresses, metadata and headers.
A token is never part of an address, a message or a command line.
"""

from __future__ import annotations

import email.utils
import http.client
import math
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

from . import locks
from .locks import Lock, LockedFile
from .problem import Problem

DEFAULT_ENDPOINT = "https://huggingface.co"
TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable
CREDENTIAL = "hf_token"
TIMEOUT_S = 15.0
# A Hub that asks for more patience than this is asked again after it anyway.
LONGEST_WAIT_S = 120.0
_ABBREVIATED = re.compile(r"[0-9a-f]{4,39}")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
# Statuses that another try may cure; everything else from 400 on is an answer.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


def clean_endpoint(value: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The Hub's address without a slash at its end: `value`, else HF_ENDPOINT, else huggingface.co."""
    address = (value or environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).strip().rstrip("/")
    parts = urllib.parse.urlsplit(address)
    faulty = parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment
    if faulty or parts.username or parts.password:
        shown = "an address with a password in it" if parts.password else repr(address)
        raise Problem(
            found=f"the Hub's address is {shown}",
            needed="an address such as https://huggingface.co, without user, query or fragment",
            do="correct hf_endpoint (or the variable HF_ENDPOINT)",
            code="hub-endpoint",
        )
    return address


def token_from(environ: Mapping[str, str] = os.environ) -> str | None:
    """The unit's credential `hf_token`, else the variable HF_TOKEN, else None. Checked for form."""
    folder = environ.get("CREDENTIALS_DIRECTORY")
    if folder and (Path(folder) / CREDENTIAL).is_file():
        return check_token((Path(folder) / CREDENTIAL).read_text(encoding="utf-8", errors="replace"))
    return check_token(environ.get(TOKEN_VARIABLE))


def check_token(token: str | None) -> str | None:
    """`token` itself, or None where it is empty. One that can't stand in a header is a Problem."""
    if not token:
        return None
    fault = next((character for character in token if not "!" <= character <= "~"), None)
    if fault is None:
        return token
    kind = {"\n": "a line break", "\r": "a line break", " ": "a space", "\t": "a tab"}.get(
        fault, "a character that is not ASCII" if ord(fault) > 126 else "a control character"
    )
    raise Problem(
        found=f"the Hub token holds {kind} (character {token.index(fault) + 1} of {len(token)})",
        needed="the token alone: printable ASCII characters without spaces",
        do='set it again without what surrounds it, e.g. export HF_TOKEN="$(tr -d "[:space:]" < FILE)"',
        code="token-form",
    )


def file_address(endpoint: str, repo: str, revision: str, path: str) -> str:
    """Where a file of a repository is read from."""
    return f"{endpoint}/{repo}/resolve/{urllib.parse.quote(revision, safe='')}/{urllib.parse.quote(path)}"


# kind -> found, needed, do. One sentence each, so that they can be read side by side.
_REFUSALS = {
    "token-refused": (
        "the Hub refuses the token ({status}{said}, asked for {where})",
        "a token that is valid and may read this repository",
        "make a new one of type read at {endpoint}/settings/tokens, set HF_TOKEN, run again",
    ),
    "token-missing": (
        "without a token the Hub does not show {where} ({status}): gated, private or misspelt",
        "a Hugging Face token in hf_token or the variable HF_TOKEN",
        "open {page} while logged in, accept its terms if asked, then: export HF_TOKEN=hf_...",
    ),
    "terms-not-accepted": (
        "the token is valid, but its account has not been let into {where} ({status})",
        "the repository's terms accepted by the token's account, and access granted by its owner",
        "open {page} with that account, accept the terms, then run again"
        " (a fine-grained token also needs the right to read public gated repositories)",
    ),
    "revision-unknown": (
        "{where} has no revision {revision}",
        "a branch, a tag or a commit that is there",
        "compare with {page}/commits/main, correct the revision",
    ),
    "file-unknown": (
        "{where} has no file {path} at revision {revision}",
        "the files that the lock names",
        "refresh the lock: sparkpair lock OWNER/NAME@REVISION --out FILE --refresh",
    ),
    "repo-unknown": (
        "there is no repository {where} ({status})",
        "the name of a model repository, owner/name",
        "open {endpoint}/{owner} and compare the spelling",
    ),
    "rate-limited": (
        "the Hub limits our rate ({status}, asked for {where})",
        "fewer requests, or a token: anonymous callers are limited sooner",
        "wait some minutes and run the same command again, with HF_TOKEN set",
    ),
    "hub-busy": (
        "the Hub fails by itself ({status}, asked for {where})",
        "a Hub in working order",
        "wait some minutes and run the same command again",
    ),
    "hub-answer": (
        "the Hub answers {status}{said} for {where}",
        "the file itself",
        "open {page} in a browser; if it is there, check the proxy and hf_endpoint",
    ),
}


def refusal(
    status: int,
    headers: Mapping[str, str],
    *,
    repo: str,
    revision: str,
    path: str,
    endpoint: str,
    with_token: bool,
) -> Problem:
    """What an answer of 400 or more means, as a person should be told.

    The Hub answers 401 to an anonymous caller also for a repository that does not exist, so that
    message names both; its header X-Error-Code tells the rest apart (field reports 40 and R4).
    """
    code = headers.get("X-Error-Code") or ""
    kind = _kind(status, code, with_token)
    said = "".join(filter(str.isprintable, headers.get("X-Error-Message") or code))[:200]
    values = {
        "status": status,
        "said": f": {said}" if said else "",
        "where": f"{repo} at {endpoint}",
        "page": f"{endpoint}/{repo}",
        "owner": repo.partition("/")[0],
        "endpoint": endpoint,
        "revision": revision,
        "path": path,
    }
    found, needed, do = (part.format(**values) for part in _REFUSALS[kind])
    return Problem(found=found, needed=needed, do=do, code=kind)


def _kind(status: int, code: str, with_token: bool) -> str:
    cases = (
        (status in (401, 403) and not with_token, "token-missing"),
        (status == 403 and code == "GatedRepo", "terms-not-accepted"),
        (status in (401, 403), "token-refused"),
        (code == "RevisionNotFound", "revision-unknown"),
        (code == "EntryNotFound", "file-unknown"),
        (status in (404, 410), "repo-unknown"),
        (status == 429, "rate-limited"),
        (status >= 500 or status in PASSING, "hub-busy"),
    )
    return next((kind for holds, kind in cases if holds), "hub-answer")


def out_of_reach(endpoint: str, reason: object) -> Problem:
    """No answer at all: name, route, proxy, certificate."""
    return Problem(
        found=f"{endpoint} is out of reach: {reason}",
        needed="an answer from the Hub: a working name server, route, proxy and certificate store",
        do=f"try on the head: curl -sSI {endpoint} ; behind a proxy set site_environment",
        code="hub-unreachable",
    )


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that the server asks to wait (Retry-After as seconds or as a date), at most LONGEST_WAIT_S."""
    said = (headers.get("Retry-After") or "").strip()
    if not said:
        return None
    try:
        seconds = float(said)
    except ValueError:
        try:
            at = email.utils.parsedate_to_datetime(said).timestamp()
        except (TypeError, ValueError):
            return None
        seconds = at - (time.time() if now is None else now)
    if math.isnan(seconds):
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S)


def check_lock_access(lock: Lock, *, token: str | None = None, endpoint: str | None = None) -> dict[str, Any]:
    """`check_access` for the smallest real file of a lock: that it may be read, and is the locked one."""
    entry = min(lock.files, key=lambda file: (file.size == 0, file.size, file.path))
    found = check_access(lock.repo, lock.revision, entry.path, token=token, endpoint=endpoint, expected=entry)
    return {"repo": lock.repo, "path": entry.path, **found}


class _Headers(dict[str, str]):
    """Header fields by name, whatever its case."""

    def __init__(self, fields: Message) -> None:
        super().__init__({name.lower(): value for name, value in fields.items()})

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


class _Stay(urllib.request.HTTPRedirectHandler):
    """Take a redirect for the answer: it says that the file may be read, and the token stays on the Hub."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def check_access(
    repo: str,
    revision: str,
    path: str,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    expected: LockedFile | None = None,
    timeout: float = TIMEOUT_S,
) -> dict[str, Any]:
    """One HEAD request for one real file, before anything large is begun.

    Returns {"status", "commit", "size"} as the Hub gives them. Raises Problem with the code
    token-missing, token-refused, terms-not-accepted, repo-unknown, revision-unknown or hub-unreachable,
    file-unknown, rate-limited, hub-busy; hub-differs where the file is not the `expected` one. Only a
    busy Hub is asked again, twice.
    """
    address, token = clean_endpoint(endpoint), check_token(token)
    headers = {"User-Agent": "sparkpair", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(
        file_address(address, repo, revision, path), headers=headers, method="HEAD"
    )
    for tries_left in (2, 1, 0):
        status, answer = _ask(request, address, timeout)
        if status not in PASSING or not tries_left:
            break
        asked = retry_after(answer)
        time.sleep(1.0 if asked is None else min(asked, 10.0))
    if status >= 400:
        raise refusal(
            status,
            answer,
            repo=repo,
            revision=revision,
            path=path,
            endpoint=address,
            with_token=token is not None,
        )
    size = answer.get("X-Linked-Size") or (answer.get("Content-Length") if status == 200 else None)
    if expected:
        require_same(expected, size, answer.get("X-Linked-Etag") or answer.get("ETag"), repo)
    return {"status": status, "commit": answer.get("X-Repo-Commit"), "size": int(size) if size else None}


def _ask(request: urllib.request.Request, endpoint: str, timeout: float) -> tuple[int, Mapping[str, str]]:
    opener = urllib.request.build_opener(_Stay)
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.status, _Headers(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _Headers(error.headers)
    except urllib.error.URLError as error:
        raise out_of_reach(endpoint, error.reason) from None
    except (OSError, http.client.HTTPException) as error:
        raise out_of_reach(endpoint, error or type(error).__name__) from None


def plain_etag(etag: str | None) -> str:
    """An ETag without its quotes and weakness mark."""
    return (etag or "").removeprefix("W/").strip('"')


def require_same(entry: LockedFile, size: str | int | None, etag: str | None, repo: str) -> None:
    """The Hub's own size and hash of a file against the lock, before a byte of it moves.

    The Hub's ETag is the sha256 of a file in large storage and the Git blob id of any other; one of
    another form (a mirror's) says nothing and is let through, as the content is hashed later anyway.
    """
    said = plain_etag(etag)
    other_hash = re.fullmatch(r"[0-9a-f]{%d}" % len(entry.digest), said) and said != entry.digest  # noqa: UP031
    other_size = size is not None and int(size) != entry.size
    if other_hash or other_size:
        raise Problem(
            found=f"the Hub offers another {entry.path} of {repo}: {size} bytes, {said or 'no hash'}",
            needed=f"the locked one: {entry.size} bytes, {entry.algorithm} {entry.digest}",
            do="check hf_endpoint (a mirror?); if the change is wanted, refresh the lock (--refresh)",
            code="hub-differs",
        )


@contextmanager
def answers(repo: str, revision: str, endpoint: str, token: str | None, path: str = "") -> Iterator[None]:
    """Turn what `huggingface_hub` and its HTTP client raise inside the block into a Problem."""
    library()
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError as error:
        raise refusal(
            error.response.status_code,
            error.response.headers,
            repo=repo,
            revision=revision,
            path=path,
            endpoint=endpoint,
            with_token=token is not None,
        ) from None
    except (OfflineModeIsEnabled, HFValidationError) as error:
        raise not_asked(error, repo) from None
    except (httpx2.TransportError, httpx2.InvalidURL, httpx2.TooManyRedirects) as error:
        raise out_of_reach(endpoint, str(error) or type(error).__name__) from None


def not_asked(error: Exception, repo: str) -> Problem:
    """Why `huggingface_hub` would not even send a request: told to be offline, or no name of a repository."""
    if isinstance(error, ValueError):
        return Problem(
            found=f"{repo!r} is no name of a repository",
            needed="owner/name of letters, digits and . _ -",
            do="copy the name from the repository's page",
            code="repo-unknown",
        )
    return Problem(
        found="HF_HUB_OFFLINE is set, so the Hub may not be asked",
        needed="the Hub, to resolve and fetch",
        do="unset HF_HUB_OFFLINE and run again",
        code="hub-offline",
    )


def library() -> Any:
    """`huggingface_hub`, told to send nothing but what we ask for: no telemetry, no token found elsewhere."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    os.environ.setdefault("HF_HUB_DISABLE_UPDATE_CHECK", "1")
    try:
        import huggingface_hub
    except ImportError:
        raise Problem(
            found="this Python has no huggingface_hub",
            needed="the environment of sparkpair (.venv on the controller, /opt/sparkpair/venv on a node)",
            do="run make setup and use .venv/bin/ansible-playbook, or run site.yml --tags host for a node",
            code="no-huggingface-hub",
        ) from None
    return huggingface_hub


def split_name(name: str) -> tuple[str, str]:
    """`OWNER/NAME@REVISION` into its two parts; the revision is `main` where no @ stands.

    An @ with nothing behind it gives the empty revision, which `resolve` refuses.
    """
    repo, at, revision = name.partition("@")
    return repo, revision if at else "main"


def resolve(
    repo: str,
    revision: str = "main",
    *,
    include: Iterable[str] = (),
    token: str | None = None,
    endpoint: str | None = None,
) -> Lock:
    """Ask the Hub which commit `revision` means (branch, tag, full or abbreviated commit) and lock its files.

    `include` are patterns as in `Lock.subset`; none means every file. Raises Problem as `check_access`
    does, and with the code revision-ambiguous when an abbreviation fits several commits.
    """
    address, token = clean_endpoint(endpoint), check_token(token)
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise Problem(
            found=f"the revision {revision!r} can be no branch, tag or commit",
            needed="letters, digits and . _ / - (a commit: 4 to 40 hex digits)",
            do="copy it from the repository's page",
            code="revision-unknown",
        )
    with answers(repo, revision, address, token):
        api = library().HfApi(
            endpoint=address, token=token or False, library_name="sparkpair", user_agent={"sparkpair": "lock"}
        )
        info = _info(api, repo, revision)
        rows = [
            _row(entry)
            for entry in api.list_repo_tree(repo, recursive=True, revision=info.sha)
            if hasattr(entry, "blob_id")
        ]
    source = f"{repo} at {address}"
    lock = locks.parse(
        {"repo": repo, "revision": info.sha, "gated": bool(getattr(info, "gated", False)), "files": rows},
        source,
    )
    wanted = list(include)
    return lock.subset(wanted) if wanted else lock


def _row(entry: Any) -> dict[str, Any]:
    if entry.lfs:
        return {"path": entry.path, "size": entry.lfs.size, "sha256": entry.lfs.sha256}
    return {"path": entry.path, "size": entry.size, "git_blob_sha1": entry.blob_id}


def _info(api: Any, repo: str, revision: str) -> Any:
    """The repository at `revision`. A name that is there wins over an abbreviated commit, as in Git."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return api.model_info(repo, revision=revision, timeout=TIMEOUT_S)
    except RevisionNotFoundError:
        if not _ABBREVIATED.fullmatch(revision):
            raise
        return api.model_info(repo, revision=_full_commit(api, repo, revision), timeout=TIMEOUT_S)


def _full_commit(api: Any, repo: str, abbreviated: str) -> str:
    """The one commit of any branch that begins with `abbreviated`."""
    branches = [branch.name for branch in api.list_repo_refs(repo).branches] or ["main"]
    found = {
        commit.commit_id
        for branch in branches
        for commit in api.list_repo_commits(repo, revision=branch)
        if commit.commit_id.startswith(abbreviated)
    }
    if len(found) == 1:
        return str(found.pop())
    known = f"fits {len(found)} commits: {locks.listed(sorted(found))}" if found else "fits no commit"
    raise Problem(
        found=f"{abbreviated} {known} of {repo}",
        needed="enough digits for exactly one commit, or a branch or tag",
        do=f"copy the commit from {clean_endpoint(api.endpoint)}/{repo}/commits/main",
        code="revision-ambiguous" if found else "revision-unknown",
    )
