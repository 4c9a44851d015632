"""The served model through the `openai` client, as its users use it."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, OpenAI
from PIL import Image

MODEL = "DeepSeek-V4.1-Flash-1017"


def ask(client: OpenAI, text: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=200, **more)  # type: ignore[arg-type]


def test_the_model_is_listed(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]


def test_it_counts(client: OpenAI) -> None:
    reply = ask(client, "What is 17 + 25?")
    assert "42" in reply.choices[0].message.content
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_it_thinks_unless_told_not_to(client: OpenAI) -> None:
    thinking = ask(client, "What is 2 + 2?").choices[0].message
    plain = (
        ask(client, "What is 2 + 2?", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        .choices[0]
        .message
    )
    assert thinking.reasoning_content  # the engine's own field
    assert not getattr(plain, "reasoning_content", None)


def test_it_streams_with_usage(client: OpenAI) -> None:
    pieces = list(ask(client, "What is 6 * 7?", stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert "42" in text
    assert pieces[-1].usage.completion_tokens > 0


def test_it_calls_a_tool(client: OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    reply = ask(client, "Call get_weather for the city Paris.", tools=[tool])
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_it_sees_an_image(client: OpenAI) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 48), (220, 20, 20)).save(picture, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    parts = [
        {"type": "text", "text": "What is in this picture?"},
        {"type": "image_url", "image_url": {"url": address}},
    ]
    text = ask(client, parts).choices[0].message.content
    assert "64" in text and "48" in text and "red" in text


def test_a_wrong_key_is_refused(url: str) -> None:
    """Field report 68."""
    with (
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.models.list()


def test_a_reply_past_the_window_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=1_048_576
        )
    assert caught.value.code == "context_length_exceeded"
