"""The HTTP API of rank 0: OpenAI's routes, tokens both ways, Anthropic's messages, health and metrics."""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from . import VERSION, replies, tokens
from .errors import EngineError
from .keys import Keys
from .replies import Engine, Piece, Refused, Reply, Request

_MAX_BODY = 256 << 20
_IDLE_S = 120


class Api(ThreadingHTTPServer):
    """The server with what its handlers share. `open_requests` counts those that are being answered."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], engine: Engine, keys: Keys, *, metrics_open: bool) -> None:
        super().__init__(address, Handler)
        self.engine, self.keys, self.metrics_open = engine, keys, metrics_open
        self.open_requests = 0
        self.idle = threading.Condition()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"[tensorfold] {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def wait_idle(self, seconds: float) -> bool:
        """Whether every open request has ended within `seconds`."""
        with self.idle:
            return self.idle.wait_for(lambda: self.open_requests == 0, seconds)


class Handler(BaseHTTPRequestHandler):
    server: Api
    protocol_version = "HTTP/1.1"
    server_version = f"tensorfold/{VERSION}"
    sys_version = ""
    timeout = _IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged when they end, by `_serve`."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_HEAD(self) -> None:
        self._serve("GET")

    # -- one request ------------------------------------------------------------------------------------------

    def _serve(self, method: str) -> None:
        began, path = time.monotonic(), urlsplit(self.path).path.rstrip("/") or "/"
        api = self.server
        with api.idle:
            api.open_requests += 1
        self._status, self._opened = 0, False
        try:
            self._route(method, path)
        except Refused as error:
            self._json(error.status, error.body())
        except EngineError as error:  # the pair is broken: HTTP lives on, generation does not
            print(f"[tensorfold] a reply failed: {error}", file=sys.stderr, flush=True)
            if self._opened:
                self._event({"error": {"message": error.name}})
                self._event(None)
                self._end()
            else:
                self._json(500, {"error": {"message": error.name}})
        finally:
            with api.idle:
                api.open_requests -= 1
                api.idle.notify_all()
            if method == "POST":
                took = time.monotonic() - began
                print(f"[tensorfold] {method} {path} {self._status} {took:.2f}s", file=sys.stderr, flush=True)

    def _authorized(self, path: str) -> None:
        keys = self.server.keys
        if path in {"/health", "/"} or (self.server.metrics_open and path in {"/metrics", "/v1/metrics"}):
            return
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else self.headers.get("x-api-key")
        if not keys.open_to(key):
            self._body()  # read it, so that the connection stays in step
            raise Refused("a key is needed: Authorization: Bearer, or x-api-key", status=401)

    def _route(self, method: str, path: str) -> None:
        self._authorized(path)
        routes: dict[str, tuple[str, Callable[[], None]]] = {
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            "/metrics": ("GET", self._metrics),
            "/v1/metrics": ("GET", self._metrics),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/messages": ("POST", self._anthropic),
            "/v1/messages/count_tokens": ("POST", self._anthropic_count),
            "/tokenize": ("POST", self._tokenize),
            "/v1/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/v1/detokenize": ("POST", self._detokenize),
        }
        known = routes.get(path)
        if known is None or known[0] != method:
            self._body()
            raise Refused(f"{method} {path} is no route", status=404 if known is None else 405)
        known[1]()

    def _body(self) -> bytes:
        try:
            size = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            size = -1
        if not 0 <= size <= _MAX_BODY:
            self.close_connection = True
            raise Refused("Content-Length must be a number of bytes, 256 MiB at most", status=413)
        return self.rfile.read(size) if size else b""

    def _read(self) -> dict[str, Any]:
        try:
            body: Any = json.loads(self._body() or b"null")
        except (ValueError, RecursionError):
            raise Refused("the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object")
        return body

    # -- writing ----------------------------------------------------------------------------------------------

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self._status = status
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, status: int, value: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _open_stream(self) -> None:
        self._status, self._opened = 200, True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, value: Mapping[str, Any] | None, name: str = "") -> None:
        text = "[DONE]" if value is None else json.dumps(value)
        data = (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    # -- what is known without the pair -----------------------------------------------------------------------

    def _health(self) -> None:
        engine = self.server.engine
        if self.server.keys.needed:
            return self._json(200, {"status": "ok"})
        totals, pool = engine.totals, engine.pool
        return self._json(
            200,
            {
                "status": "ok",
                "busy": pool.running > 0,
                "requests_running": pool.running,
                "requests_total": totals.requests,
                "prompt_tokens_total": totals.prompt_tokens,
                "completion_tokens_total": totals.completion_tokens,
                "cached_tokens_total": 0,
                "decode_seconds_total": round(totals.decode_seconds, 3),
                "rounds_total": totals.rounds,
                "streams": pool.streams,
                "context_length": engine.defaults.context,
            },
        )

    def _models(self) -> None:
        defaults = self.server.engine.defaults
        data = [
            {"id": n, "object": "model", "created": 0, "owned_by": "tensorfold"} for n in defaults.model_ids
        ]
        self._json(200, {"object": "list", "data": data})

    def _metrics(self) -> None:
        engine = self.server.engine
        totals, pool = engine.totals, engine.pool
        rows = {
            "requests_running": ("gauge", pool.running),
            "requests_waiting": ("gauge", pool.waiting),
            "kv_cache_usage_ratio": ("gauge", round(pool.taken / pool.positions, 6)),
            "prompt_tokens_total": ("counter", totals.prompt_tokens),
            "prompt_tokens_cached_total": ("counter", 0),
            "generation_tokens_total": ("counter", totals.completion_tokens),
            "decode_rounds_total": ("counter", totals.rounds),
        }
        text = "".join(
            f"# TYPE {prefix}:{name} {kind}\n{prefix}:{name} {value}\n"
            for prefix in ("tensorfold", "vllm")
            for name, (kind, value) in rows.items()
        )
        self._send(200, "text/plain; version=0.0.4", text.encode())

    def _tokenize(self) -> None:
        body, defaults = self._read(), self.server.engine.defaults
        if isinstance(body.get("messages"), list):
            ids = tokens.encode(replies.chat(body, defaults).prompt)
        elif isinstance(body.get("prompt"), str):
            ids = tokens.encode(body["prompt"])
        else:
            raise Refused("prompt or messages is needed", param="prompt")
        self._json(200, {"count": len(ids), "max_model_len": defaults.context, "tokens": ids})

    def _detokenize(self) -> None:
        ids = self._read().get("tokens")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < tokens.VOCAB for i in ids):
            raise Refused(f"tokens must be a list of ids from 0 to {tokens.VOCAB - 1}", param="tokens")
        self._json(200, {"prompt": tokens.decode(ids)})

    # -- replies ----------------------------------------------------------------------------------------------

    def _usage(self, request: Request, reply: Reply) -> dict[str, Any]:
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": request.prompt_tokens + reply.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": reply.thought_tokens},
        }

    def _extras(self, reply: Reply) -> dict[str, Any]:
        more: dict[str, Any] = {"stop_sequence": reply.stop_sequence} if reply.stop_sequence else {}
        return more | {
            "system_fingerprint": reply.fingerprint,
            "exact_mode": "exact",
            "tensorfold": {
                "pair_digest": reply.digest,
                "rounds": reply.rounds,
                "seconds": round(reply.seconds, 3),
            },
            "speculative": {"drafted": 0, "accepted": 0, "rounds": reply.rounds},
        }

    @staticmethod
    def _tool_call(piece: Piece) -> dict[str, Any]:
        call = piece.call
        assert call is not None  # noqa: S101 - the caller has looked
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _first(self, request: Request, reply: Reply) -> tuple[Piece, Iterator[Piece]]:
        """The first piece, before a stream is opened: what fails early fails with a status."""
        pieces = self.server.engine.reply(request, reply)
        return next(pieces, Piece()), pieces

    def _chat(self) -> None:
        request = replies.chat(self._read(), self.server.engine.defaults)
        reply = Reply()
        head = {"id": f"chatcmpl-{request.id}", "created": request.created, "model": request.model}
        first, rest = self._first(request, reply)
        if request.stream:
            return self._chat_stream(request, reply, head, [first], rest)
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        thoughts = ""
        for piece in (first, *rest):
            thoughts += piece.thoughts
            message["content"] += piece.content
            if piece.call:
                message["tool_calls"] = [self._tool_call(piece)]
        if thoughts:
            message["reasoning_content"] = thoughts
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
        choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
        return self._json(
            200,
            head
            | {"object": "chat.completion", "choices": [choice], "usage": self._usage(request, reply)}
            | self._extras(reply),
        )

    def _chat_stream(
        self,
        request: Request,
        reply: Reply,
        head: dict[str, Any],
        first: list[Piece],
        rest: Iterator[Piece],
    ) -> None:
        head |= {"object": "chat.completion.chunk"}

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            return head | {
                "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]
            }

        self._open_stream()
        self._event(chunk({"role": "assistant", "content": ""}))
        for pieces in (first, rest):
            for piece in pieces:
                if piece.thoughts:
                    self._event(chunk({"reasoning_content": piece.thoughts}))
                if piece.content:
                    self._event(chunk({"content": piece.content}))
                if piece.call:
                    self._event(chunk({"tool_calls": [{"index": 0, **self._tool_call(piece)}]}))
        self._event(chunk({}, reply.finish) | self._extras(reply))
        if request.include_usage:
            self._event(head | {"choices": [], "usage": self._usage(request, reply)})
        self._event(None)
        self._end()

    def _completion(self) -> None:
        request = replies.completion(self._read(), self.server.engine.defaults)
        reply = Reply()
        head = {
            "id": f"cmpl-{request.id}",
            "object": "text_completion",
            "created": request.created,
            "model": request.model,
        }
        first, rest = self._first(request, reply)

        def choice(text: str, finish: str | None) -> dict[str, Any]:
            return {"choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}]}

        if not request.stream:
            text = "".join(p.content for p in (first, *rest))
            usage = {"usage": self._usage(request, reply)}
            return self._json(200, head | choice(text, reply.finish) | usage | self._extras(reply))
        self._open_stream()
        for pieces in ([first], rest):
            for piece in pieces:
                self._event(head | choice(piece.content, None))
        self._event(head | choice("", reply.finish) | self._extras(reply))
        if request.include_usage:
            self._event(head | {"choices": [], "usage": self._usage(request, reply)})
        self._event(None)
        return self._end()

    # -- Anthropic's messages -----------------------------------------------------------------------------------

    def _anthropic_request(self) -> Request:
        body = self._read()
        if not isinstance(body.get("max_tokens"), int) and not self.path.endswith("count_tokens"):
            raise Refused("max_tokens is needed", param="max_tokens")
        return replies.chat(openai_body(body), self.server.engine.defaults)

    def _anthropic_count(self) -> None:
        self._json(200, {"input_tokens": self._anthropic_request().prompt_tokens})

    def _anthropic(self) -> None:
        request = self._anthropic_request()
        reply = Reply()
        head: dict[str, Any] = {
            "id": f"msg_{request.id[:24]}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }
        first, rest = self._first(request, reply)
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        if not request.stream:
            blocks = list(content_blocks([first, *rest]))
            usage = {"input_tokens": request.prompt_tokens, "output_tokens": reply.completion_tokens}
            reason = "stop_sequence" if reply.stop_sequence else reasons[reply.finish]
            end = {"stop_reason": reason, "stop_sequence": reply.stop_sequence, "usage": usage}
            return self._json(200, head | {"content": blocks} | end)
        self._open_stream()
        usage = {"input_tokens": request.prompt_tokens, "output_tokens": 0}
        begin = {"type": "message_start", "message": head | {"content": [], "usage": usage}}
        self._event(begin, "message_start")
        for i, block in enumerate(content_blocks([first, *rest])):
            empty = {k: v if k in {"type", "id", "name"} else "" for k, v in block.items()}
            kind = {"text": "text_delta", "thinking": "thinking_delta"}.get(block["type"])
            delta = (
                {"type": kind, block["type"]: block[block["type"]]}
                if kind
                else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            )
            if not kind:
                empty["input"] = {}
            self._event(
                {"type": "content_block_start", "index": i, "content_block": empty}, "content_block_start"
            )
            self._event({"type": "content_block_delta", "index": i, "delta": delta}, "content_block_delta")
            self._event({"type": "content_block_stop", "index": i}, "content_block_stop")
        end = {"stop_reason": reasons[reply.finish], "stop_sequence": reply.stop_sequence}
        done = {"type": "message_delta", "delta": end, "usage": {"output_tokens": reply.completion_tokens}}
        self._event(done, "message_delta")
        self._event({"type": "message_stop"}, "message_stop")
        return self._end()


def content_blocks(pieces: list[Piece]) -> Iterator[dict[str, Any]]:
    """A reply's pieces as Anthropic's content blocks."""
    thoughts = "".join(p.thoughts for p in pieces)
    content = "".join(p.content for p in pieces)
    if thoughts:
        yield {"type": "thinking", "thinking": thoughts}
    if content:
        yield {"type": "text", "text": content}
    for piece in pieces:
        if piece.call:
            call_id = f"toolu_{secrets.token_hex(12)}"
            arguments = json.loads(piece.call.arguments)
            yield {"type": "tool_use", "id": call_id, "name": piece.call.name, "input": arguments}


def _openai_parts(content: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """An Anthropic message's content as OpenAI's parts, and the tool results in it as messages."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}], []
    parts: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content if isinstance(content, list) else []:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": str(block.get("text", ""))})
        elif kind == "image" and isinstance(block.get("source"), dict):
            source = block["source"]
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif kind == "tool_result":
            inner, _ = _openai_parts(block.get("content") or "")
            results.append({"role": "tool", "content": inner})
        elif kind not in {"tool_use", "thinking"}:
            raise Refused(f"a content block of type {kind!r}", param="messages")
    return parts, results


def openai_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """An Anthropic request as the chat request that it amounts to."""
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _openai_parts(body["system"])[0]})
    for message in body.get("messages") or []:
        if not isinstance(message, dict):
            raise Refused("messages must be objects", param="messages")
        parts, results = _openai_parts(message.get("content"))
        if parts or not results:
            messages.append({"role": message.get("role"), "content": parts})
        messages += results
    out: dict[str, Any] = {"messages": messages}
    for name in ("model", "max_tokens", "temperature", "top_p", "top_k", "stream"):
        if name in body:
            out[name] = body[name]
    if body.get("stop_sequences"):
        out["stop"] = body["stop_sequences"]
    if isinstance(body.get("thinking"), dict):
        out["chat_template_kwargs"] = {"enable_thinking": body["thinking"].get("type") == "enabled"}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        out["tool_choice"] = {"auto": "auto", "none": "none"}.get(str(choice.get("type")), "required")
    out["tools"] = [
        {
            "type": "function",
            "function": {
                "name": t.get("name"),
                "description": t.get("description"),
                "parameters": t.get("input_schema"),
            },
        }
        for t in body.get("tools") or []
        if isinstance(t, dict)
    ]
    return out
