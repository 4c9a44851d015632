"""The hub's two HTTP servers: the site with its API, and the storage host that large files come from."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from . import answers, store
from .access import Refusal, Tokens, bearer, hidden, invalid_token
from .body import Body, requested_span
from .log import Entry as LogEntry
from .log import RequestLog
from .modes import ANSWER_MODES, BODY_MODES, Modes, Rule
from .store import Entry, Repo, Store

CONTROL = "/_rehearsal/"
_COMMITS_A_PAGE = 50
_SEND_BUFFER = 512 * 1024  # bounds what counts as sent but never left when a client is killed


class Hub:
    """A hub over a folder of repositories, served until closed. See the package for its use.

    Args:
        root: the folder; see `store`. Made where absent.
        address, port, cdn_port: where to listen; port 0 takes a free one.
        log_file: JSON lines of every request are added to it.
        redirect: False serves files in LFS from the site itself, without the second origin.
        page_size: entries in a page of a listing (the Hub: 1000).
        link_seconds: how long a signed link of the storage host holds.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        cdn_port: int = 0,
        log_file: Path | str | None = None,
        redirect: bool = True,
        page_size: int = 1000,
        link_seconds: float = 3600,
    ) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.root)
        self.tokens = Tokens(self.root)
        self.modes = Modes()
        self.log = RequestLog(Path(log_file) if log_file else None)
        self.redirect = redirect
        self.page_size = page_size
        self.link_seconds = link_seconds
        self.closing = threading.Event()
        self._secret = secrets.token_bytes(32)
        self._site = _Server((address, port), _Site, self)
        try:
            self._storage = _Server((address, cdn_port), _Storage, self)
        except OSError:
            self._site.server_close()
            raise
        self.url = f"http://{address}:{self._site.server_port}"
        self.cdn = f"http://{address}:{self._storage.server_port}"
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,), name=name, daemon=True)
            for server, name in ((self._site, "hub-site"), (self._storage, "hub-storage"))
        ]

    def __enter__(self) -> Hub:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving; answers under way, hanging ones too, are cut off."""
        self.closing.set()
        for server, thread in zip((self._site, self._storage), self._threads, strict=True):
            if thread.is_alive():
                server.shutdown()
                thread.join()
            server.hang_up()
            server.server_close()
        self.log.close()

    def mode(self, mode: str, **options: Any) -> None:
        """Order a fault, or take all back with "ok"; the options are those of `modes.Rule`."""
        self.modes.set(Rule(mode, **options))

    def requests(self, **wanted: Any) -> list[LogEntry]:
        """The requests so far: `since`, `repo`, `file` (glob), `method` and `status` narrow it."""
        return self.log.entries(**wanted)

    def bytes_sent(self, file: str = "*", **wanted: Any) -> int:
        """Bytes of files that left, over all requests that fit."""
        return sum(entry["bytes"] for entry in self.log.entries(file=file, **wanted))

    def grant(self, token: str, repos: list[str] | None = None) -> None:
        """Accept a token; `repos` are those whose terms its account accepted (None: all)."""
        self.tokens.grant(token, ["*"] if repos is None else repos)

    def revoke(self, token: str) -> None:
        self.tokens.revoke(token)

    def signed(self, path: str, expires: int) -> str:
        """The signature of a link to the storage host."""
        return hmac.new(self._secret, f"{path}\n{expires}".encode(), hashlib.sha256).hexdigest()

    def link(self, host: str, repo: str, entry: Entry, commit: str) -> str:
        """A signed link to a file, at the name by which the caller knows this host."""
        path = quote(f"/{repo}/{commit}/{entry.path}")
        expires = int(time.time() + self.link_seconds)
        query = urlencode({"Expires": expires, "Signature": self.signed(path, expires)})
        return f"http://{host.rpartition(':')[0] or host}:{self._storage.server_port}{path}?{query}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], hub: Hub) -> None:
        self.hub = hub
        self._live: set[socket.socket] = set()
        self._live_lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        with self._live_lock:
            self._live.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._live_lock:
            self._live.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Cut every open connection, idle ones too."""
        with self._live_lock:
            for connection in self._live:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the other end was first

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news; anything else is a fault of ours and shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """What both servers share: one place where an answer is made, refused and logged."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "rehearsal-hub"
    sys_version = ""
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.hub = self.server.hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: the request log has it."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_GET
    do_POST = do_GET

    def answer(self) -> None:
        raise NotImplementedError

    def _serve(self) -> None:
        begun = time.monotonic()
        split = urlsplit(self.path)
        self.url_path = unquote(split.path)
        self.segments = [unquote(part) for part in split.path.split("/")[1:]]
        self.raw_path = split.path
        self.query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        self.posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.repo_id: str | None = None
        self.file: str | None = None
        self.status = 0
        self.rule: Rule | None = None
        self.out = Body(self.connection, self.hub.closing)
        is_control = self.url_path.startswith(CONTROL)
        self.order = 0 if is_control else self.hub.log.begin()
        try:
            self.answer()
        except Refusal as refusal:
            self._refuse(refusal)
        except ConnectionError:
            self.close_connection = True
        except Exception as error:
            self._refuse(Refusal(500, f"the stand-in hub failed: {error!r}"))
            raise
        finally:
            if not is_control:
                self._record(begun)
                self.hub.log.let_go(self.order)

    def _record(self, begun: float) -> None:
        self.hub.log.add(
            order=self.order,
            method=self.command,
            path=self.url_path,
            host="site" if isinstance(self, _Site) else "storage",
            repo=self.repo_id,
            file=self.file,
            status=self.status,
            range=self.headers.get("Range"),
            bytes=self.out.sent,
            client=self.client_address[0],
            token=self.headers.get("Authorization") is not None,
            mode=self.rule.mode if self.rule else "ok",
            seconds=round(time.monotonic() - begun, 3),
        )

    def _refuse(self, refusal: Refusal) -> None:
        if self.status:  # the answer began: all that is left is to cut it
            self.close_connection = True
            return
        body = json.dumps({"error": refusal.message}).encode()
        self.send(refusal.status, body, refusal.all_headers() | {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """A whole answer at once; its body isn't counted as bytes of a file."""
        self.head(status, {"Content-Length": str(len(body))} | dict(headers))
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | dict(headers or {}))

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("X-Request-Id", secrets.token_hex(8))
        self.end_headers()

    def send_file(self, entry: Entry, headers: Mapping[str, str]) -> None:
        """The file, or the range asked for, with the fault that is in force for it."""
        etag = f'"{entry.etag}"'
        asked = self.headers.get("Range") if self.command == "GET" else None
        if self.headers.get("If-Range") not in (None, etag):
            asked = None
        span = requested_span(asked, entry.size)
        extent = range(entry.size) if span is None else span
        said = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        said |= {"Content-Length": str(len(extent))} | dict(headers)
        if span is not None:
            said["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{entry.size}"
        if self.command != "GET":
            self.head(200, said)
            return
        self.rule = self.hub.modes.take(BODY_MODES, "GET", entry.path, span=extent, size=entry.size)
        if self.rule and self.rule.mode in {"stall", "slow"}:
            self.hub.log.let_go(self.order)
        self.head(200 if span is None else 206, said)
        if not self.out.send(entry.disk, extent, self.rule):
            self.close_connection = True

    def number(self, name: str, default: int) -> int:
        value = self.query.get(name, str(default))
        if not value.isdecimal():
            raise Refusal(400, f"{name}: a whole number")
        return int(value)

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in {"true", "1"}


class _Storage(_Handler):
    """The storage host: signed links only, no tokens, no API."""

    def answer(self) -> None:
        self.repo_id, commit = "/".join(self.segments[:2]), "/".join(self.segments[2:3])
        self.file = "/".join(self.segments[3:])
        if self.headers.get("Authorization"):
            # A storage host refuses a link that is signed and comes with a token too.
            raise Refusal(400, "Only one auth mechanism allowed")
        expires = self.query.get("Expires", "0")
        expected = self.hub.signed(self.raw_path, int(expires)) if expires.isdigit() else ""
        if not expected or not hmac.compare_digest(expected, self.query.get("Signature", "")):
            raise Refusal(403, "The link's signature does not match")
        if time.time() > int(expires):
            raise Refusal(403, "The link has expired")
        self.send_file(self.hub.store.repo(self.repo_id).entry(commit, self.file), {})


class _Site(_Handler):
    """The site: the API, the files by name, and the rehearsal's own switches."""

    def answer(self) -> None:
        if self.url_path.startswith(CONTROL):
            self._control(self.url_path.removeprefix(CONTROL))
        elif self.segments[:2] == ["api", "models"] and len(self.segments) >= 4:
            self._api("/".join(self.segments[2:4]), self.segments[4:])
        elif self.segments == ["api", "whoami-v2"]:
            self._whoami()
        elif len(self.segments) >= 5 and self.segments[2] == "resolve":
            self._resolve("/".join(self.segments[:2]), self.segments[3], "/".join(self.segments[4:]))
        else:
            raise Refusal(404, "Sorry, we can't find the page you are looking for.")

    def _fault(self, *, is_file: bool) -> None:
        """Answer with the fault that is in force for this request, if there is one."""
        rule = self.hub.modes.take(ANSWER_MODES, self.command, self.file or self.url_path)
        if rule:
            self.rule = rule
            raise rule.refusal(
                self.repo_id or "",
                has_token=self.headers.get("Authorization") is not None,
                is_file=is_file,
                client=self.client_address[0],
            )

    def _open(self, name: str, *, is_file: bool) -> Repo:
        """The repository, if this caller may have it."""
        token = bearer(self.headers.get("Authorization"))
        if token is not None and token not in self.hub.tokens.known():
            raise invalid_token()
        try:
            repo = self.hub.store.repo(name)
        except Refusal:
            if token is None:
                raise hidden() from None
            raise
        gated, private = bool(repo.meta["gated"]), repo.meta["private"]
        self.hub.tokens.check(token, repo.id, gated=gated, private=private, is_file=is_file)
        return repo

    def _whoami(self) -> None:
        self._fault(is_file=False)
        token = bearer(self.headers.get("Authorization"))
        if token is None or token not in self.hub.tokens.known():
            raise invalid_token() if token else hidden()
        self.send_json(answers.whoami())

    def _resolve(self, name: str, revision: str, path: str) -> None:
        self.repo_id, self.file = name, path
        self._fault(is_file=True)
        repo = self._open(name, is_file=True)
        commit = repo.resolve(revision)
        entry = repo.entry(commit, path)
        said = {
            "X-Repo-Commit": commit,
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(entry.path)}",
        }
        if entry.is_lfs:
            said |= {"X-Linked-Etag": f'"{entry.etag}"', "X-Linked-Size": str(entry.size)}
            if self.hub.redirect:
                host = self.headers.get("Host", "")
                said |= {"Location": self.hub.link(host, name, entry, commit), "ETag": f'"{entry.etag}"'}
                self.send(302, b"", said)
                return
        self.send_file(entry, said)

    def _api(self, name: str, rest: list[str]) -> None:
        self.repo_id = name
        self._fault(is_file=False)
        what = rest[0] if rest else "revision"
        repo = self._open(name, is_file=what == "auth-check")
        if what == "auth-check" and len(rest) == 1:
            self.send(200, b"OK", {"Content-Type": "text/plain"})
            return
        if what == "refs" and len(rest) == 1:
            self.send_json(answers.refs(repo))
            return
        commit = repo.resolve(rest[1] if len(rest) > 1 else "main")
        said = {"X-Repo-Commit": commit}
        if what == "revision" and len(rest) in {0, 2}:
            self.send_json(answers.model_info(repo, commit, with_blobs=self.flag("blobs")), said)
        elif what == "tree" and len(rest) >= 2:
            expand = self.flag("expand")
            under = "/".join(rest[2:])
            found = answers.tree(repo, commit, under, recursive=self.flag("recursive"), expand=expand)
            self._page(found, min(self.hub.page_size, 50) if expand else self.hub.page_size, said)
        elif what == "commits" and len(rest) == 2:
            self._page(answers.commits(repo, commit), _COMMITS_A_PAGE, said)
        elif what == "paths-info" and len(rest) == 2 and self.command == "POST":
            paths, expand = self._posted_paths()
            self.send_json(answers.paths_info(repo, commit, paths, expand=expand), said)
        else:
            raise Refusal(404, "Sorry, we can't find the page you are looking for.")

    def _page(self, found: list[dict[str, Any]], most: int, headers: Mapping[str, str]) -> None:
        """One page of a listing, with the Link header to the next."""
        limit = min(max(self.number("limit", most), 1), most)
        begin = self.number("cursor", 0)
        said = dict(headers)
        if begin + limit < len(found):
            query = urlencode(self.query | {"limit": limit, "cursor": begin + limit})
            said["Link"] = f'<http://{self.headers.get("Host", "")}{self.raw_path}?{query}>; rel="next"'
        self.send_json(found[begin : begin + limit], said)

    def _posted_paths(self) -> tuple[list[str], bool]:
        if "json" in self.headers.get("Content-Type", ""):
            try:
                sent = json.loads(self.posted)
                return list(sent["paths"]), bool(sent.get("expand"))
            except (ValueError, TypeError, KeyError):
                raise Refusal(400, "a JSON object with paths") from None
        form = parse_qs(self.posted.decode())
        return form.get("paths", []), form.get("expand", ["false"])[-1].lower() in {"true", "1"}

    def _control(self, what: str) -> None:
        """The rehearsal's switches: GET mode and log, POST mode, token, revoke and publish."""
        if self.command == "GET" and what == "log":
            found = self.hub.log.entries(since=self.number("since", 0))
            newest = max((entry["seq"] for entry in found), default=self.number("since", 0))
            self.send_json({"requests": found, "next": newest})
            return
        if self.command == "POST":
            self._order(what)
        elif what != "mode":
            raise Refusal(404, "mode, log, token, revoke and publish are what there is")
        self.send_json({"rules": self.hub.modes.shown()})

    def _order(self, what: str) -> None:
        orders: dict[str, Callable[..., object]] = {
            "mode": self.hub.mode,
            "token": self.hub.grant,
            "revoke": self.hub.revoke,
            "publish": self._publish,
        }
        if what not in orders:
            raise Refusal(404, "mode, log, token, revoke and publish are what there is")
        try:
            orders[what](**json.loads(self.posted))
        except (ValueError, TypeError, KeyError) as error:
            raise Refusal(400, str(error)) from None

    def _publish(self, repo: str, files: dict[str, str], **options: Any) -> None:
        texts = {path: text.encode() for path, text in files.items()}
        store.publish(self.hub.root, repo, texts, **options)
