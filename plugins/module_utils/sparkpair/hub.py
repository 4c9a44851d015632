"""The Hub: who may read what, which commit a name means, which files it holds.

`check_access` uses the standard library alone, so that it runs on a bare node before anything is
installed there. `resolve` and the fetcher use `huggingface_hub` for addresses, metadata and headers.
A token is never part of an address, a message or a command line.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http.client
import json
import math
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any, TypeVar

from . import locks
from .locks import Lock, LockedFile
from .problem import Problem

_Result = TypeVar("_Result")

DEFAULT_ENDPOINT = "https://huggingface.co"
TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable
CREDENTIAL = "hf_token"
TIMEOUT_S = 15.0
# A Hub that asks for more patience than this is asked again after it anyway.
LONGEST_WAIT_S = 120.0
_ABBREVIATED = re.compile(r"[0-9a-f]{4,39}")
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
_NETWORK_VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file"})
_REDIRECTS = 5
_TRIES = 4
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
_LIBRARY = "huggingface_hub.hf_api"
# Statuses that another try may cure; everything else from 400 on is an answer.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


def clean_endpoint(value: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The Hub's address without a slash at its end: `value`, else HF_ENDPOINT, else huggingface.co."""
    address = (value or environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).strip().rstrip("/")
    fault = _address_fault(address)
    if fault:
        # What stands before an @ may be a password, also where the rest is no address at all.
        shown = "an address with a user in it" if "@" in address else f"{address!r}, which {fault}"
        raise Problem(
            found=f"the Hub's address is {shown}",
            needed="an address such as https://huggingface.co, without user, query or fragment",
            do="correct hf_endpoint (or the variable HF_ENDPOINT)",
            code="hub-endpoint",
        )
    return address


def _address_fault(address: str) -> str | None:
    """Why `address` is none of an HTTP server, or None when it is one."""
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError:
        return "has brackets that are no IPv6 address"
    try:
        port = parts.port
    except ValueError:
        return "has a port that is not 1 to 65535"
    host = parts.hostname or ""
    labels = host.removesuffix(".").split(".")
    faults = (
        (parts.scheme not in ("http", "https"), "does not begin with http:// or https://"),
        (not host, "names no host"),
        (port == 0, "has a port that is not 1 to 65535"),
        ("@" in parts.netloc, "has a user in it"),
        (bool(parts.query or parts.fragment), "has a query or a fragment"),
        (any(not "!" <= character <= "~" for character in address), "has a character that no address has"),
        (":" not in host and not all(_LABEL.fullmatch(label) for label in labels), "names no host"),
    )
    return next((fault for holds, fault in faults if holds), None)


def same_site(one: str, other: str) -> bool:
    """Whether two absolute addresses are of one server: the same host in any case, the same effective port.

    http and https of a host at their own ports (80 and 443) are one site; so are `https://hub` and
    `https://HUB:443`. What is no address of an HTTP server is the same site as nothing.
    """
    sites = _site(one), _site(other)
    return sites[0] is not None and sites[0] == sites[1]


def _site(address: str) -> tuple[str, int] | None:
    try:
        parts = urllib.parse.urlsplit(address)
        own = {"http": 80, "https": 443}[parts.scheme]
        port = own if parts.port is None else parts.port
    except (ValueError, KeyError):
        return None
    # Port 0 stands for "the scheme's own", so that http and https of a host compare equal.
    return (parts.hostname, 0 if port == own else port) if parts.hostname else None


def require_network(environ: Mapping[str, str] = os.environ) -> None:
    """The variables for proxies and certificates, checked before an HTTP client trips over them.

    Raises Problem that names the variable, with the code proxy or certificates. A password in a proxy's
    address is not shown.
    """
    named = {name: value for name, value in environ.items() if name.lower() in _NETWORK_VARIABLES and value}
    _require_network(tuple(sorted(named.items())))


@functools.lru_cache(maxsize=8)  # asked for every request; reading a certificate store takes a while
def _require_network(named: tuple[tuple[str, str], ...]) -> None:
    values = dict(named)
    direct = "*" in (values.get("no_proxy") or values.get("NO_PROXY") or "").replace(" ", "").split(",")
    for name, value in named:
        # As for the clients: where both are set, the name in lower case is the one that counts.
        lower = name.lower()
        if (
            not lower.endswith("_proxy")
            or lower == "no_proxy"
            or direct
            or (name != lower and lower in values)
        ):
            continue
        fault = _proxy_fault(value)
        if fault:
            shown = "an address with a user in it" if "@" in value else repr(value)
            raise Problem(
                found=f"the variable {name} is {shown}: it {fault}",
                needed="the address of an HTTP proxy, such as http://proxy.example:3128",
                do=f"correct {name} (site_environment for the nodes), or: unset {name}",
                code="proxy",
            )
    store = values.get("SSL_CERT_FILE")
    fault = _store_fault(store) if store else None
    if fault:
        raise Problem(
            found=f"the variable SSL_CERT_FILE names {store}, {fault}",
            needed="a file of certificates in PEM form, to know the Hub by",
            do="correct SSL_CERT_FILE (site_environment for the nodes), or: unset SSL_CERT_FILE",
            code="certificates",
        )


def _proxy_fault(value: str) -> str | None:
    address = value if "://" in value else f"http://{value}"
    if address.lower().startswith("socks"):
        return "is a SOCKS proxy, which the Hub's client does not speak"
    try:
        parts = urllib.parse.urlsplit(address)
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], path="", query="", fragment="")
    except ValueError:
        return "has brackets that are no IPv6 address"
    return _address_fault(plain.geturl())


def _store_fault(path: str) -> str | None:
    """Why a file of certificates can't be used; None when it can."""
    try:
        with Path(path).open("rb"):
            pass
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        return f"which holds no certificates ({error.reason or error})"
    except (OSError, ValueError) as error:
        return f"which can't be read ({getattr(error, 'strerror', None) or error})"
    return None


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
    stranger = "CERTIFICATE_VERIFY_FAILED" in str(reason)
    return Problem(
        found=f"{endpoint} is out of reach: {reason}",
        needed="an answer from the Hub: a working name server, route, proxy and certificate store",
        do="name your network's certificates: export SSL_CERT_FILE=FILE.pem (REQUESTS_CA_BUNDLE is not read)"
        if stranger
        else f"try on the head: curl -sSI {endpoint} ; behind a proxy set site_environment",
        code="hub-unreachable",
    )


def not_the_hub(endpoint: str, where: str, what: str) -> Problem:
    """An answer that the Hub would not give: somebody else's page, a broken mirror."""
    return Problem(
        found=f"{endpoint} answers as the Hub does not, asked for {where}: {what}",
        needed="the Hub's own answer, not the page of a network's login (captive portal), proxy or mirror",
        do=f"open {endpoint}/{where} in a browser; log into the network, or correct hf_endpoint and the proxy",
        code="hub-answer",
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
    """Take a redirect for the answer, wherever it goes: `_ask_site` looks at it, and the token stays."""

    def http_error_302(self, *_: Any, **__: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


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
    busy Hub is asked again, twice. hub-answer where something else than a Hub answers.
    """
    address, token = clean_endpoint(endpoint), check_token(token)
    require_network()
    headers = {"User-Agent": "sparkpair", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(
        file_address(address, repo, revision, path), headers=headers, method="HEAD"
    )
    for tries_left in (2, 1, 0):
        status, answer = _ask_site(request, address, repo, timeout)
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
    return {
        "status": status,
        "commit": answer.get("X-Repo-Commit"),
        "size": int(size) if size and size.isdecimal() else None,
    }


def _ask_site(
    request: urllib.request.Request, endpoint: str, repo: str, timeout: float
) -> tuple[int, Mapping[str, str]]:
    """The site's own answer: redirects are followed within it (a renamed repository), never out of it."""
    for _ in range(_REDIRECTS):
        status, answer = _ask(request, endpoint, timeout)
        if not 300 <= status < 400 or status == 304:
            return status, answer
        said = answer.get("Location") or ""
        try:
            target = urllib.parse.urljoin(request.full_url, said)
            fault = _address_fault(urllib.parse.urlsplit(target)._replace(query="", fragment="").geturl())
        except ValueError:
            fault = "is no address"
        if not said or fault:
            raise not_the_hub(endpoint, repo, f"a redirect ({status}) to {said[:200]!r}, no address to go to")
        to_storage = answer.get("X-Linked-Size") or answer.get("X-Linked-Etag")
        bare = request.full_url.startswith("https:") and target.startswith("http:")  # would bare the token
        if to_storage or bare or not same_site(target, endpoint):
            return status, answer
        request = urllib.request.Request(target, headers=dict(request.header_items()), method="HEAD")
    raise not_the_hub(endpoint, repo, f"redirects without an end, {_REDIRECTS} so far")


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
    except (OSError, ValueError, http.client.HTTPException) as error:
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
    other_size = size is not None and str(size) != str(entry.size)
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
    from huggingface_hub.errors import HfHubHTTPError

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
    except Exception as error:
        problem = explain(error, endpoint, repo)
        if problem is None:
            raise
        raise problem from None


def explain(error: Exception, endpoint: str, repo: str) -> Problem | None:
    """What an error of `huggingface_hub` or its HTTP client, other than a status, means; None when not theirs."""
    import httpx2
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    said = str(error) or type(error).__name__
    if isinstance(error, (OfflineModeIsEnabled, HFValidationError)):
        return not_asked(error, repo)
    if isinstance(error, (httpx2.TooManyRedirects, httpx2.UnsupportedProtocol, httpx2.DecodingError)):
        return not_the_hub(endpoint, repo, said)
    if isinstance(error, httpx2.RemoteProtocolError) and "location" in said.lower():
        return not_the_hub(endpoint, repo, f"a redirect to no address ({said})")
    if isinstance(error, (httpx2.RequestError, httpx2.InvalidURL)):
        return out_of_reach(endpoint, said)
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, RecursionError)):
        return not_the_hub(endpoint, repo, f"no JSON ({said})")
    return None


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
    require_network()
    try:
        # It tells faults of its import on stdout, where a caller expects our one JSON object.
        with (
            contextlib.redirect_stdout(sys.stderr)
            if _LIBRARY not in sys.modules
            else contextlib.nullcontext()
        ):
            import huggingface_hub
            import huggingface_hub.hf_api
    except ImportError:
        raise Problem(
            found="this Python has no huggingface_hub",
            needed="the environment of sparkpair (.venv on the controller, /opt/sparkpair/venv on a node)",
            do="run make setup and use .venv/bin/ansible-playbook, or run site.yml --tags host for a node",
            code="no-huggingface-hub",
        ) from None
    except ValueError as error:
        raise _setting_refused(error) from None
    return huggingface_hub


def _setting_refused(error: ValueError) -> Problem:
    """`huggingface_hub` reads its variables when it is imported; which one it trips over it doesn't say."""
    named = [
        f"{name} is {value!r}"
        for name, value in sorted(os.environ.items())
        if (name.endswith("_TIMEOUT") and name.startswith("HF_") and not value.isdecimal())
        or (name == "HF_ENDPOINT" and _address_fault(value))
    ]
    return Problem(
        found=f"huggingface_hub can't be loaded: {', '.join(named) or error}",
        needed="variables HF_* that it can read: whole seconds, addresses such as https://huggingface.co",
        do="correct or unset the variable (env | grep ^HF_), then run the same command again",
        code="hub-settings",
    )


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
    wanted = list(include)
    with answers(repo, revision, address, token):
        api = library().HfApi(
            endpoint=address, token=token or False, library_name="sparkpair", user_agent={"sparkpair": "lock"}
        )
        try:
            info = _patiently(lambda: _info(api, repo, revision))
            tree = _patiently(lambda: list(api.list_repo_tree(repo, recursive=True, revision=info.sha)))
            listed = [_row(entry) for entry in tree if hasattr(entry, "blob_id")]
            rows = [row for row in listed if locks.matches(row["path"], wanted)] if wanted else listed
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # JSON, but not of the Hub's form
            other = not_the_hub(address, repo, f"other JSON ({type(error).__name__}: {error})")
            raise explain(error, address, repo) or other from None
    if not re.fullmatch(r"[0-9a-f]{40}", str(info.sha)):
        raise not_the_hub(address, repo, f"the commit {info.sha!r}")
    if not listed:
        raise Problem(
            found=f"{repo} at {address} holds no file at {info.sha}",
            needed="a repository with at least one file",
            do=f"look at {address}/{repo}/tree/{info.sha}; choose another revision or repository",
            code="repo-empty",
        )
    if not rows:
        raise locks.none_matches(repo, wanted)
    return _listing(repo, address, info, rows)


def _listing(repo: str, address: str, info: Any, rows: list[dict[str, Any]]) -> Lock:
    """The lock of what the Hub lists. What no lock may hold is the Hub's fault there, not that of a file here."""
    gated = bool(getattr(info, "gated", False))
    try:
        return locks.parse({"repo": repo, "revision": info.sha, "gated": gated, "files": rows}, repo)
    except Problem as problem:
        raise Problem(
            found=f"the Hub's list of {repo} at {address}: {problem.found.removeprefix(f'lock {repo}: ')}",
            needed=problem.needed,
            do="leave the file out (--include GLOB, or include: of the profile, names those that are wanted),"
            f" or tell the owner: {address}/{repo}/discussions",
            code="hub-listing",
        ) from None


def _patiently(ask: Callable[[], _Result]) -> _Result:
    """Ask a busy Hub again, after the time that it names (field report 41)."""
    from huggingface_hub.errors import HfHubHTTPError

    for tries_left in range(_TRIES - 1, -1, -1):
        try:
            return ask()
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status not in PASSING or not tries_left:
                raise
            asked = retry_after(error.response.headers)
        pause = float(_TRIES - tries_left) if asked is None else asked
        if sys.stderr is not None:
            print(f"the Hub answers {status}; asking again in {pause:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


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
