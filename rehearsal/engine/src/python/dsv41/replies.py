"""From a request to a reply: what is asked is checked, room in the pool is taken, text comes in rounds of the pair."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import answers, link, tokens
from .faults import Faults
from .link import Leader
from .pictures import Picture, Undecodable, from_url

EFFORTS = {"minimal": 25, "low": 50, "medium": 62, "high": 75, "xhigh": 88, "max": 100}
_ROUND_TOKENS = 5
_REPEATED = 64
_FILLER = " The rehearsal goes on: both ranks take part in every round, and each round is a few tokens more."


class Refused(Exception):
    """A request that gets an error instead of a reply."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        error: dict[str, Any] = {"message": str(self)}
        if self.status < 500:
            error["type"] = "authentication_error" if self.status == 401 else "invalid_request_error"
        if self.code or self.param:
            error |= {"param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class Defaults:
    """What a request gets where it says nothing."""

    name: str
    model_ids: tuple[str, ...]
    context: int
    max_tokens: int
    thinking: bool
    round_rows: int
    sampling: Mapping[str, float]


@dataclass
class Request:
    prompt: str
    prompt_tokens: int
    max_tokens: int
    thinking: bool
    stop: list[str]
    stream: bool
    include_usage: bool
    model: str
    text: str
    pictures: list[Picture] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_result: str | None = None
    fill: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))


class Pool:
    """The positions and streams that requests share: first come, first served; a full pool makes them wait."""

    def __init__(self, positions: int, streams: int) -> None:
        self.positions, self.streams = positions, streams
        self.taken = 0
        self.running = 0
        self._queue: deque[object] = deque()
        self._change = threading.Condition()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextlib.contextmanager
    def room(self, positions: int) -> Iterator[None]:
        """Hold `positions` and one stream for the length of the block."""
        want, ticket = min(positions, self.positions), object()
        with self._change:
            self._queue.append(ticket)
            self._change.wait_for(
                lambda: (
                    self._queue[0] is ticket
                    and self.running < self.streams
                    and self.taken + want <= self.positions
                )
            )
            self._queue.popleft()
            self.running, self.taken = self.running + 1, self.taken + want
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self.running, self.taken = self.running - 1, self.taken - want
                self._change.notify_all()


@dataclass
class Totals:
    """Counters since the start, as /health and /metrics show them."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    decode_seconds: float = 0.0


def _whole(body: Mapping[str, Any], name: str, low: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise Refused(f"{name} must be an integer of at least {low}", param=name)
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> None:
    value = body.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(f"{name} must be a number from {low:g} to {high:g}", param=name)


def _parts(content: Any, where: str) -> tuple[str, list[Picture]]:
    """Text and pictures of a message's content."""
    if content is None:
        return "", []
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise Refused(f"{where} is neither text nor a list of parts", param="messages")
    texts, pictures = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url":
            url = part["image_url"].get("url") if isinstance(part.get("image_url"), dict) else None
            try:
                pictures.append(from_url(str(url)))
            except Undecodable as error:
                raise Refused(f"the image cannot be decoded: {error}", param="messages") from None
        else:
            raise Refused(f"{where} has a part of type {kind!r}", param="messages")
    return "\n".join(texts), pictures


def _thinking(body: Mapping[str, Any], default: bool) -> bool:
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise Refused("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name in ("enable_thinking", "thinking"):
        if name in (kwargs or {}):
            value = (kwargs or {})[name]
            if not isinstance(value, bool):
                raise Refused(f"chat_template_kwargs.{name} must be a boolean", param="chat_template_kwargs")
            return value
    effort = body.get("reasoning_effort", (kwargs or {}).get("reasoning_effort"))
    if effort is None:
        return default
    if effort != "none" and effort not in EFFORTS:
        raise Refused(
            f"reasoning_effort must be none or one of {', '.join(EFFORTS)}", param="reasoning_effort"
        )
    return bool(effort != "none")


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(t, dict)
        and isinstance(t.get("function"), dict)
        and isinstance(t["function"].get("name"), str)
        for t in tools
    ):
        raise Refused("tools must be a list of functions with names", param="tools")
    choice = body.get("tool_choice", "auto")
    if choice == "required" or isinstance(choice, dict):
        raise Refused(
            "tool_choice: this engine has no gates for a call that must be made", param="tool_choice"
        )
    if choice not in {"auto", "none", None}:
        raise Refused(f"tool_choice {choice!r} is not auto or none", param="tool_choice")
    return [] if choice == "none" else tools


def _common(body: Mapping[str, Any], defaults: Defaults) -> tuple[int | None, list[str], bool, bool]:
    if _whole(body, "n", 1) not in {None, 1}:
        raise Refused("n must be 1", param="n")
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in {None, "text"}:
        raise Refused("response_format: this engine has no structures", param="response_format")
    for name, high in (("temperature", 2.0), ("top_p", 1.0), ("min_p", 1.0)):
        _number(body, name, 0.0, high)
    _whole(body, "top_k", 0)
    limit = _whole(body, "max_tokens", 1)
    if limit is None:
        limit = _whole(body, "max_completion_tokens", 1)
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise Refused("stop must be text or a list of texts", param="stop")
    options = body.get("stream_options") or {}
    include = bool(options.get("include_usage")) if isinstance(options, dict) else False
    return limit, [s for s in stops if s], bool(body.get("stream")), include


def _size(defaults: Defaults, prompt_tokens: int, limit: int | None, param: str) -> int:
    """The reply's limit in tokens.

    Raises:
        Refused: context_length_exceeded where prompt and reply do not fit the window.
    """
    wanted = prompt_tokens + (limit or 1)
    if wanted > defaults.context:
        words = f"the prompt ({prompt_tokens} tokens) and its reply do not fit the context window of {defaults.context}"
        raise Refused(words, code="context_length_exceeded", param=param)
    return limit or min(defaults.max_tokens, defaults.context - prompt_tokens)


def _model(body: Mapping[str, Any], defaults: Defaults) -> str:
    asked = body.get("model")
    return asked if isinstance(asked, str) and asked in defaults.model_ids else defaults.name


def chat(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Read a chat request.

    Raises:
        Refused: for whatever in it does not hold.
    """
    limit, stop, stream, include = _common(body, defaults)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list that is not empty", param="messages")
    tools = _tools(body)
    rendered, last, result, total = [], "", None, 0
    shown: list[Picture] = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in {"system", "developer", "user", "assistant", "tool"}:
            raise Refused(f"messages[{number}] has the role {role!r}", param="messages")
        text, pictures = _parts(message.get("content"), f"messages[{number}]")
        if pictures and role not in {"user", "tool"}:
            raise Refused("images come in user turns and tool results", param="messages")
        total += sum(p.tokens for p in pictures)
        rendered.append(f"<{role}>{text}{message.get('tool_calls') or ''}")
        result = (text or "; ".join(p.words for p in pictures)) if role == "tool" else None
        if role == "user":
            last, shown = text, pictures
    prompt = "\n".join(rendered) + "".join(str(t) for t in tools) + "\n<assistant>"
    prompt_tokens = tokens.count(prompt) + total
    return Request(
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=_size(defaults, prompt_tokens, limit, "messages"),
        thinking=_thinking(body, defaults.thinking),
        stop=stop,
        stream=stream,
        include_usage=include,
        model=_model(body, defaults),
        text=last,
        pictures=shown,
        tools=tools,
        tool_result=result,
        fill=_fill(body),
    )


def _fill(body: Mapping[str, Any]) -> int:
    """How many tokens the reply must have at least: all that are allowed with `ignore_eos`."""
    least = _whole(body, "min_tokens", 0) or 0
    return tokens.VOCAB * 100 if body.get("ignore_eos") is True else least


def completion(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Read a request for the continuation of a text or of token ids.

    Raises:
        Refused: for whatever in it does not hold.
    """
    limit, stop, stream, include = _common(body, defaults)
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        if not all(0 <= i < tokens.VOCAB for i in prompt):
            words = f"prompt token ids must be integers in the valid range 0 to {tokens.VOCAB - 1}"
            raise Refused(words, param="prompt")
        count, prompt = len(prompt), tokens.decode(prompt)
    else:
        if isinstance(prompt, list) and all(isinstance(p, str) for p in prompt):
            prompt = "\n".join(prompt)
        if not isinstance(prompt, str):
            raise Refused("prompt must be text, a list of texts or token ids", param="prompt")
        count = tokens.count(prompt)
    return Request(
        prompt=prompt,
        prompt_tokens=count,
        max_tokens=_size(defaults, count, limit, "prompt"),
        thinking=False,
        stop=stop,
        stream=stream,
        include_usage=include,
        model=_model(body, defaults),
        text=prompt,
        fill=_fill(body),
    )


@dataclass
class Piece:
    """A part of a reply: thoughts, content, or the call of a tool."""

    thoughts: str = ""
    content: str = ""
    call: answers.Call | None = None


@dataclass
class Reply:
    """A reply as it ends: why, what was counted, and the digests that both ranks gave together."""

    finish: str = "stop"
    completion_tokens: int = 0
    thought_tokens: int = 0
    rounds: int = 0
    stop_sequence: str | None = None
    digest: str = ""
    fingerprint: str = ""
    seconds: float = 0.0


class Engine:
    """Rank 0's side of serving: the pool, the pair's rounds, the counters."""

    def __init__(self, leader: Leader, secret: bytes, defaults: Defaults, pool: Pool, faults: Faults) -> None:
        self.leader, self.defaults, self.pool, self.faults = leader, defaults, pool, faults
        self._secret = secret
        self.totals = Totals()
        self.stopping = threading.Event()
        self._count = threading.Lock()

    def _round(self, request: Request, reply: Reply, size: int) -> None:
        """One round of the pair: nothing is said that the other rank has not taken part in."""
        while self.faults.on("dead") and not self.stopping.wait(0.2):
            pass
        if wait := self.faults.seconds("token_s"):
            time.sleep(wait)
        theirs = self.leader.round(request.id)
        reply.digest = link.join([link.share(self._secret, request.id), *(p for p, _ in theirs)])
        reply.fingerprint = "fp_" + link.join([link.share(self._secret, "pair"), *(p for _, p in theirs)])
        reply.rounds += 1
        with self._count:
            self.totals.rounds += 1
            self.totals.completion_tokens += size

    def _texts(self, request: Request, reply: Reply) -> tuple[str, str, answers.Call | None]:
        said = answers.answer(
            request.text,
            name=self.defaults.name,
            pictures=request.pictures,
            tools=request.tools,
            tool_result=request.tool_result,
        )
        content = said.content
        if (repeated := self.faults.get("repeat")) is not None:
            return "", repeated[:1] * 2 * min(request.max_tokens, _REPEATED), None
        short = min(request.fill, request.max_tokens) - tokens.count(content)
        if short > 0 and said.call is None:
            content += _FILLER * (2 * short // len(_FILLER) + 1)
        for stop in request.stop:
            at = content.find(stop)
            if at >= 0:
                content, reply.stop_sequence = content[:at], stop
        return said.thoughts if request.thinking else "", content, said.call

    def reply(self, request: Request, reply: Reply) -> Iterator[Piece]:
        """The pieces of a reply, as they come; `reply` is filled in on the way.

        Raises:
            EngineError: PeerDown, when the other rank is lost.
        """
        with self._count:
            self.totals.requests += 1
        with self.pool.room(request.prompt_tokens + request.max_tokens + self.defaults.round_rows):
            began = time.monotonic()
            with self._count:
                self.totals.prompt_tokens += request.prompt_tokens
            thoughts, content, call = self._texts(request, reply)
            left = request.max_tokens
            for text, kind in ((thoughts, "thoughts"), (content, "content")):
                ids = tokens.encode(text)
                if len(ids) > left:
                    ids, reply.finish = ids[:left], "length"
                left -= len(ids)
                for part in tokens.pieces(ids, _ROUND_TOKENS):
                    self._round(request, reply, len(part))
                    reply.completion_tokens += len(part)
                    reply.thought_tokens += len(part) if kind == "thoughts" else 0
                    text_part = tokens.decode(part)
                    yield Piece(thoughts=text_part) if kind == "thoughts" else Piece(content=text_part)
            if call is not None and reply.finish == "stop":
                size = tokens.count(call.name + call.arguments)
                self._round(request, reply, size)
                reply.completion_tokens += size
                reply.finish = "tool_calls"
                yield Piece(call=call)
            if reply.rounds == 0:
                self._round(request, reply, 0)
            reply.seconds = time.monotonic() - began
            with self._count:
                self.totals.decode_seconds += reply.seconds
