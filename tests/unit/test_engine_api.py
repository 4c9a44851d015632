"""The stand-in's API through the real client, and what no client would send."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import struct
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_pair
import openai
import pytest
from engine_pair import KEY, Launch, started

NAME = "DeepSeek-V4.1-Flash-1017"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
            },
            "required": ["city", "unit"],
        },
    },
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """A pair that serves with a key of its own file, images and four streams."""
    folder = tmp_path_factory.mktemp("api")
    keys = folder / "keys"
    keys.write_text(f"# who may ask\nme: {KEY}\n")
    keys.chmod(0o600)
    control = folder / "faults"
    launch = Launch(
        engine_pair.shared(),
        flags0={"--api-key-file": str(keys), "--alias": "deepseek"},
        env0={"TF_REHEARSAL_FAULTS": str(control)},
    )
    with started(launch, folder / "logs") as (zero, one):
        one.until('"loaded_s"')
        zero.until("serving ")
        yield launch


@pytest.fixture
def client(launch: Launch) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{launch.http}/v1", api_key=KEY, max_retries=0, timeout=20
    )


def chat(client: openai.OpenAI, text: Any, **more: Any) -> Any:
    more.setdefault("extra_body", {"chat_template_kwargs": {"enable_thinking": False}})
    return client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": text}], **more)


def http(
    launch: Launch, path: str, body: Any = None, key: str | None = KEY, **headers: str
) -> tuple[int, Any, Any]:
    """Status, headers and body of a plain request."""
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{launch.http}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read().decode()
            return answer.status, answer.headers, json.loads(text) if text[:1] in "{[" else text
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def png(width: int, height: int, pixel: tuple[int, int, int]) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + bytes(pixel) * width for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def image(data: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


# -- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 17 + 25?", "42"),
        ("What is 17 plus 25?", "42"),
        ("what's six times seven", "42"),
        ("Compute 100 - 58.", "42"),
        ("84 divided by 2?", "42"),
        ("(3 + 4) * 6 =", "42"),
        ("7 / 2", "3.5"),
        ("the sum of 40 and 2", "42"),
    ],
)
def test_sums_are_right(client: openai.OpenAI, question: str, answer: str) -> None:
    assert answer in chat(client, question).choices[0].message.content


def test_a_division_by_zero_is_no_crash(client: openai.OpenAI) -> None:
    assert "1 / 0" in chat(client, "1 / 0").choices[0].message.content


def test_a_reply_is_the_same_at_every_run(client: openai.OpenAI) -> None:
    one, two = (chat(client, "Tell me of the link.") for _ in range(2))
    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.usage == two.usage


def test_usage_adds_up(client: openai.OpenAI) -> None:
    usage = chat(client, "2 + 2", extra_body={}).usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_the_digest_takes_both_caches(launch: Launch, client: openai.OpenAI) -> None:
    """Rank 0 alone can't make it: half of it is keyed by the bytes of rank 1's cache."""
    reply = chat(client, "1 + 1").model_dump()
    world = launch.world
    secrets = [hashlib.sha256(next(world.at(f"cache{r}").iterdir()).read_bytes()).digest() for r in (0, 1)]

    def joined(text: str) -> str:
        parts = "".join(hmac.new(s, text.encode(), hashlib.sha256).hexdigest() for s in secrets)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    assert reply["system_fingerprint"] == f"fp_{joined('pair')}"
    assert reply["tensorfold"]["pair_digest"] == joined(reply["id"].removeprefix("chatcmpl-"))


@pytest.mark.parametrize(
    ("more", "thinks"),
    [
        ({}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "xhigh"}, True),
    ],
)
def test_thinking_is_switched_by_the_request(
    client: openai.OpenAI, more: dict[str, Any], thinks: bool
) -> None:
    message = chat(client, "2 + 2", extra_body=more).choices[0].message.model_dump()
    assert bool(message.get("reasoning_content")) == thinks
    assert "4" in message["content"]


def test_max_tokens_ends_a_reply_and_stop_cuts_it(client: openai.OpenAI) -> None:
    cut = chat(client, "Count from 1 to 50.", max_tokens=4)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 4)
    stopped = chat(client, "Count from 1 to 50.", stop=[" 4,"])
    assert stopped.choices[0].message.content == "1, 2, 3,"
    assert stopped.choices[0].finish_reason == "stop"


def test_ignore_eos_fills_the_reply(client: openai.OpenAI) -> None:
    """What a benchmark asks for."""
    full = chat(client, "Write.", max_tokens=200, extra_body={"ignore_eos": True, "reasoning_effort": "none"})
    assert full.usage.completion_tokens == 200
    assert full.choices[0].finish_reason == "length"


def test_a_stream_adds_up_to_the_reply(client: openai.OpenAI) -> None:
    whole = chat(client, "Count from 1 to 30.", extra_body={})
    stream = chat(
        client, "Count from 1 to 30.", extra_body={}, stream=True, stream_options={"include_usage": True}
    )
    chunks = [c.model_dump() for c in stream]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content") or "" for d in deltas) == whole.choices[0].message.content
    thoughts = "".join(d.get("reasoning_content") or "" for d in deltas)
    assert thoughts == whole.choices[0].message.model_dump()["reasoning_content"]
    assert len(deltas) > 10
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    assert all(c.usage is None for c in chat(client, "1 + 1", stream=True))


def test_characters_of_every_plane_come_back_whole(client: openai.OpenAI) -> None:
    words = "Zürich \N{CJK UNIFIED IDEOGRAPH-4E2D} \N{GRINNING FACE}\N{MUSICAL SYMBOL G CLEF}!"
    stream = chat(client, f'Say exactly "{words}"', stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == words


def test_completions_take_text_and_ids(client: openai.OpenAI, launch: Launch) -> None:
    said = client.completions.create(model=NAME, prompt="17 + 25 =", max_tokens=40)
    assert "42" in said.choices[0].text
    ids = http(launch, "/tokenize", {"prompt": "17 + 25 ="})[2]["tokens"]
    stream = client.completions.create(model=NAME, prompt=ids, max_tokens=40, stream=True)
    assert "42" in "".join(c.choices[0].text for c in stream)


# -- tools and pictures -------------------------------------------------------------------------------------------


def test_a_tool_is_called_when_it_is_offered_and_asked_for(client: openai.OpenAI) -> None:
    reply = chat(client, "Use get_weather: what is the weather in New York in kelvin?", tools=[WEATHER])
    call = reply.choices[0].message.tool_calls[0]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "New York", "unit": "kelvin"}
    after = client.chat.completions.create(
        model=NAME,
        messages=[
            {"role": "user", "content": "weather?"},
            reply.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "281 K, rain"},
        ],
        tools=[WEATHER],
    )
    assert "281 K, rain" in after.choices[0].message.content


def test_a_streamed_call_is_one_delta(client: openai.OpenAI) -> None:
    stream = chat(client, "What is the weather in Oslo?", tools=[WEATHER], stream=True)
    choices = [c.choices[0] for c in stream]
    calls = [c.delta.tool_calls for c in choices if c.delta.tool_calls]
    assert [json.loads(c[0].function.arguments)["city"] for c in calls] == ["Oslo"]
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("more", [{}, {"tool_choice": "none", "tools": [WEATHER]}])
def test_no_tool_is_called_that_is_not_offered(client: openai.OpenAI, more: dict[str, Any]) -> None:
    reply = chat(client, "What is the weather in Oslo?", **more)
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"


def test_a_tool_that_nobody_asks_for_is_left_alone(client: openai.OpenAI) -> None:
    assert "42" in chat(client, "What is 17 + 25?", tools=[WEATHER]).choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_cannot_be_forced(client: openai.OpenAI, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        chat(client, "weather?", tools=[WEATHER], tool_choice=choice)


def test_a_png_is_seen(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is this?"}, image(png(64, 48, (220, 20, 20)))]
    reply = chat(client, parts)
    assert "64x48, mostly red" in reply.choices[0].message.content
    assert reply.usage.prompt_tokens > 4


def test_other_formats_and_png_kinds_are_seen(client: openai.OpenAI) -> None:
    from PIL import Image

    picture = Image.new("RGB", (50, 30), (20, 40, 230))
    for kind, options in (("jpeg", {}), ("png", {}), ("webp", {})):
        out = io.BytesIO()
        picture.save(out, kind, **options)
        assert "50x30, mostly blue" in chat(client, [image(out.getvalue(), kind)]).choices[0].message.content
    for mode in ("P", "L", "RGBA", "1", "LA"):
        out = io.BytesIO()
        picture.convert(mode).save(out, "png")
        assert "50x30, mostly " in chat(client, [image(out.getvalue())]).choices[0].message.content


@pytest.mark.parametrize(
    "part",
    [
        image(b"no picture"),
        image(png(4, 4, (1, 2, 3))[:-20]),
        image(png(4, 4, (1, 2, 3)).replace(b"IDAT", b"IDAX")),
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}},
        {"type": "image_url"},
        {"type": "audio"},
    ],
)
def test_what_cannot_be_decoded_is_a_400(client: openai.OpenAI, part: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, [{"type": "text", "text": "?"}, part])


# -- limits, errors, keys -------------------------------------------------------------------------------------------


def test_prompt_and_reply_beyond_the_window_are_refused(client: openai.OpenAI) -> None:
    for text, limit in (("x" * 9000, 10), ("hi", engine_pair.POOL)):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, text, max_tokens=limit)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        {},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "hi"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "hi"}], "n": 2},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0},
        {"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"},
        {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "huge"},
        {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"thinking": 1}},
        {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": "hi"}], "stop": 5},
    ],
)
def test_a_wrong_request_is_a_400_with_words(launch: Launch, body: Any) -> None:
    status, _, said = http(launch, "/v1/chat/completions", body)
    assert status == 400
    assert said["error"]["message"]
    assert said["error"]["type"] == "invalid_request_error"


def test_models_name_the_served_name_then_the_alias(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [NAME, "deepseek"]
    assert client.models.list().data[0].owned_by == "tensorfold"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/v1/chat/completions", "/tokenize", "/v1/messages", "/none"]
)
def test_without_a_key_nothing_but_health_answers(launch: Launch, path: str) -> None:
    """Field report 68."""
    body = None if path in {"/v1/models", "/metrics"} else {"prompt": "x"}
    for key in (None, "sk-wrong"):
        status, headers, _ = http(launch, path, body, key)
        assert status == 401
        assert headers["WWW-Authenticate"]
    assert http(launch, "/health", key=None)[2] == {"status": "ok"}


def test_both_headers_carry_a_key(launch: Launch) -> None:
    assert http(launch, "/v1/models", key=None, **{"x-api-key": KEY})[0] == 200


def test_a_changed_key_file_is_read_again(launch: Launch) -> None:
    keys = Path(str(launch.flags0["--api-key-file"]))
    old = keys.read_text()
    keys.write_text("sk-new\n")
    try:
        assert http(launch, "/v1/models")[0] == 401
        assert http(launch, "/v1/models", key="sk-new")[0] == 200
        keys.chmod(0o644)
        keys.write_text("sk-open\n")  # a file that others may read changes nothing
        assert http(launch, "/v1/models", key="sk-open")[0] == 401
        assert http(launch, "/v1/models", key="sk-new")[0] == 200
    finally:
        keys.write_text(old)
        keys.chmod(0o600)
    assert http(launch, "/v1/models")[0] == 200


def test_unknown_routes_and_methods(launch: Launch) -> None:
    assert http(launch, "/v1/embeddings", {})[0] == 404
    assert http(launch, "/v1/chat/completions")[0] == 405


def test_tokens_go_both_ways(launch: Launch) -> None:
    text = "Grüße, 4 \N{GRINNING FACE} x"
    there = http(launch, "/tokenize", {"prompt": text})[2]
    assert there["count"] == len(there["tokens"])
    assert there["max_model_len"] == engine_pair.POOL
    assert http(launch, "/detokenize", {"tokens": there["tokens"]})[2] == {"prompt": text}
    assert http(launch, "/detokenize", {"tokens": [-1]})[0] == 400


def test_metrics_count(launch: Launch, client: openai.OpenAI) -> None:
    def counted() -> float:
        text = http(launch, "/metrics")[2]
        line = next(x for x in text.splitlines() if x.startswith("tensorfold:generation_tokens_total "))
        return float(line.split()[1])

    before = counted()
    made = chat(client, "1 + 2").usage.completion_tokens
    assert counted() == before + made


def test_streams_share_the_pool_and_the_fifth_waits(launch: Launch, client: openai.OpenAI) -> None:
    """`--parallel 4`: a full pool queues, and /metrics shows who waits."""
    control = Path(str(launch.env0["TF_REHEARSAL_FAULTS"]))
    control.write_text("dead=1\n")
    done: list[str] = []

    def one() -> None:
        done.append(chat(client, "20 + 22", max_tokens=50).choices[0].message.content)

    threads = [threading.Thread(target=one) for _ in range(5)]
    for thread in threads:
        thread.start()
    try:
        engine_pair.wait_for(lambda: "tensorfold:requests_waiting 1\n" in http(launch, "/metrics")[2], 10)
        assert "tensorfold:requests_running 4\n" in http(launch, "/metrics")[2]
        assert not done
    finally:
        control.write_text("")
        for thread in threads:
            thread.join(15)
    assert len(done) == 5
    assert all("42" in d for d in done)


def test_a_reply_that_fills_the_pool_lets_no_other_in(launch: Launch, client: openai.OpenAI) -> None:
    control = Path(str(launch.env0["TF_REHEARSAL_FAULTS"]))
    control.write_text("dead=1\n")
    replies: list[Any] = []
    big = threading.Thread(
        target=lambda: replies.append(chat(client, "1 + 1", max_tokens=engine_pair.POOL - 60))
    )
    small = threading.Thread(target=lambda: replies.append(chat(client, "1 + 1", max_tokens=60)))
    big.start()
    time.sleep(0.3)
    small.start()
    try:
        engine_pair.wait_for(lambda: "tensorfold:requests_waiting 1\n" in http(launch, "/metrics")[2], 10)
    finally:
        control.write_text("")
        big.join(15)
        small.join(15)
    assert len(replies) == 2


def test_anthropics_messages(launch: Launch) -> None:
    body = {"model": NAME, "max_tokens": 60, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    off = {"thinking": {"type": "disabled"}}
    status, _, said = http(launch, "/v1/messages", body | off, key=None, **{"x-api-key": KEY})
    assert status == 200
    assert said["content"] == [{"type": "text", "text": "17 + 25 = 42"}]
    assert said["stop_reason"] == "end_turn"
    assert said["usage"]["output_tokens"] > 0
    events = http(launch, "/v1/messages", body | off | {"stream": True})[2]
    assert "event: message_start" in events
    assert "17 + 25 = 42" in events
    assert events.rstrip().endswith('data: {"type": "message_stop"}')
    assert http(launch, "/v1/messages", {"messages": body["messages"]})[0] == 400
    assert http(launch, "/v1/messages/count_tokens", {"messages": body["messages"]})[2]["input_tokens"] > 4


def test_anthropics_tools_and_pictures(launch: Launch) -> None:
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    body = {
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "The weather in Oslo?"}],
        "tools": [tool],
    }
    said = http(launch, "/v1/messages", body)[2]
    assert said["stop_reason"] == "tool_use"
    assert said["content"][-1]["input"]["city"] == "Oslo"
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(png(8, 4, (0, 200, 0))).decode(),
    }
    shown = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    seen = http(launch, "/v1/messages", {"max_tokens": 200, "messages": shown})[2]
    assert "8x4, mostly green" in seen["content"][-1]["text"]
