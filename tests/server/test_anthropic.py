"""Anthropic's Messages API. The oracles are the anthropic client, its types, and the chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import anthropic
import httpx
import msgspec
import pydantic
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent

from moesaic.engine.engine import Engine
from moesaic.server.anthropic.bodies import CountTokensBody, MessagesBody
from moesaic.server.anthropic.translation import chat_body, prompt_body
from moesaic.server.anthropic.writer import MessagesWriter
from moesaic.server.app import make_app
from moesaic.server.auth import Keys
from moesaic.server.openai.request_types import FunctionName, SelectedTools
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import ResponseWriter
from tests.server.openai_client import extras
from tests.server.scripted import ARGUMENTS, CONTENT, TEXT, THOUGHT, prepared_chat, updates_of
from tests.server.serving import Listening, Running, wait_until_idle

MODEL = "tiny:qwen3_moe"
PATH, CHAT = "/v1/messages", "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
# A random model that begins to think does not end.
DISABLED: Any = {"type": "disabled"}
RAW: Any = {"model": MODEL, "temperature": 0, "thinking": DISABLED, "max_tokens": 12}
# The client of today has no temperature.
GREEDY: Any = {"temperature": 0}
PLAIN: Any = {"model": MODEL, "thinking": DISABLED, "extra_body": GREEDY}
SHORT: Any = {**PLAIN, "max_tokens": 12}
LONG: Any = {**PLAIN, "messages": HELLO, "max_tokens": 1900}
TOOL: Any = {
    "name": "lay",
    "description": "Lays a tile",
    "input_schema": {
        "type": "object",
        "properties": {"tile": {"enum": ["red", "blue"]}},
        "required": ["tile"],
        "additionalProperties": False,
    },
}
LAY = FunctionName("lay")
EVENT: Any = pydantic.TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[anthropic.Anthropic]:
    base = f"http://127.0.0.1:{running.port}"
    with anthropic.Anthropic(base_url=base, api_key="-", max_retries=0) as client:
        yield client


def checked(raw: str) -> Message:
    found = Message.model_validate_json(raw, strict=True)
    assert extras(found) == set()
    return found


def chat_choice(http: httpx.Client, messages: list[Any], **body: Any) -> Any:
    sent = {"messages": messages, "temperature": 0, "max_tokens": 12, "reasoning_effort": "none"}
    response = http.post(CHAT, json=sent | body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def chat_text(http: httpx.Client, messages: list[Any], **body: Any) -> str:
    return str(chat_choice(http, messages, **body)["message"]["content"])


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


def events_in(text: str) -> list[Any]:
    """The events of a stream, checked with the client's types; the second is a ping."""
    found = []
    for piece in text.strip().split("\n\n"):
        name, data = piece.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value != {"type": "ping"}:
            event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
            assert extras(event) == set()
            found.append(event)
    assert text.count("event: ping") == 1
    return found


def accumulated(events: list[Any]) -> Any:
    message, buffers = None, dict[int, bytes]()
    for event in events:
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    return message


def test_a_message(http: httpx.Client, client: anthropic.Anthropic) -> None:
    expected = chat_text(http, [{"role": "system", "content": "Be\nbrief."}, *HELLO])
    system = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    sent = {**RAW, "system": system, "messages": HELLO, "metadata": {"user_id": "u"}}
    message = checked(http.post(PATH, json=sent).text)
    assert text_of(message) == expected
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.model == MODEL and message.usage.output_tokens == 12
    prompt = {key: sent[key] for key in ("model", "system", "messages", "thinking")}
    counted = client.messages.count_tokens(**prompt)
    assert counted.input_tokens == message.usage.input_tokens > 0


def test_a_stream(http: httpx.Client, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=HELLO, **SHORT)
    with http.stream("POST", PATH, json={**RAW, "messages": HELLO, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_in("\n".join(response.iter_lines()))
    names = [event.type for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens
    with client.messages.stream(messages=HELLO, **SHORT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    for found in (accumulated(events), final):
        assert text_of(found) == text_of(whole) == text
        assert found.usage.output_tokens == whole.usage.output_tokens == 12
        assert found.stop_reason == whole.stop_reason == "max_tokens"


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(messages=HELLO, **SHORT))
    stop = text[3:5]
    message = client.messages.create(messages=HELLO, stop_sequences=["~never~", stop], **SHORT)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


def test_a_tool_and_its_result(http: httpx.Client, client: anthropic.Anthropic) -> None:
    sent = {**PLAIN, "max_tokens": 400, "messages": HELLO, "tools": [TOOL]}
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = client.messages.create(tool_choice=one, **sent)
    checked(message.to_json())
    (use,) = message.content
    assert message.stop_reason == "tool_use" and use.type == "tool_use" and use.name == "lay"
    assert use.input["tile"] in ("red", "blue")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "laid"}
    more = [result, {"type": "text", "text": "And now?"}]
    turns: Any = [
        *HELLO,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": more},
    ]
    after = client.messages.create(messages=turns, tools=[TOOL], **SHORT)
    arguments = msgspec.json.encode(use.input).decode()
    call = {"id": use.id, "function": {"name": "lay", "arguments": arguments}}
    function = {key: TOOL[key] for key in ("name", "description")}
    expected = chat_text(
        http,
        [
            *HELLO,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "laid", "tool_call_id": use.id},
            {"role": "user", "content": "And now?"},
        ],
        tools=[{"type": "function", "function": function | {"parameters": TOOL["input_schema"]}}],
    )
    assert text_of(after) == expected
    counted = client.messages.count_tokens(
        model=MODEL, messages=turns, tools=[TOOL], thinking=DISABLED
    )
    assert counted.input_tokens == after.usage.input_tokens


def test_choices_of_tools() -> None:
    named = {"type": "tool", "name": "lay", "disable_parallel_tool_use": True}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": SelectedTools(LAY)}
    for kind, expected in choices.items():
        sent = {"messages": HELLO, "tools": [TOOL], "tool_choice": {**named, "type": kind}}
        chat = prompt_body(msgspec.convert(sent, CountTokensBody))
        assert chat.tool_choice == expected and chat.parallel_tool_calls is False


class Tile(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    red: bool


def test_structured_output(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(messages=HELLO, output_format=Tile, max_tokens=400, **PLAIN)
    assert isinstance(parsed.parsed_output, Tile)


def test_the_start_of_an_answer(http: httpx.Client, client: anthropic.Anthropic) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The tile"}]}]
    message = client.messages.create(messages=begun, **SHORT)
    chat = [*HELLO, {"role": "assistant", "content": "The tile"}]
    assert text_of(message) == chat_text(http, chat, continue_final_message=True)


def test_thinking_until_the_limit(http: httpx.Client, client: anthropic.Anthropic) -> None:
    """The grammar of the call opens the reasoning."""
    sent: Any = {"model": MODEL, "messages": HELLO, "extra_body": GREEDY, "max_tokens": 12}
    sent |= {"tools": [TOOL], "tool_choice": {"type": "any"}}
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(thinking=enabled, **sent)
    (block,) = message.content
    assert block.type == "thinking" and block.thinking and message.stop_reason == "max_tokens"
    details = checked(message.to_json()).usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens <= 12
    turns: Any = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
    chat = [*HELLO, {"role": "assistant", "content": "", "reasoning_content": block.thinking}]
    again = client.messages.create(messages=turns, **SHORT)
    assert text_of(again) == chat_text(http, [*chat, *HELLO])
    hidden = client.messages.create(thinking={**enabled, "display": "omitted"}, **sent)
    assert hidden.content == [] and hidden.usage.output_tokens == 12
    assert hidden.usage.output_tokens_details == details


def test_a_failed_result_and_fields_of_a_chat(http: httpx.Client) -> None:
    """The edits of context_management would drop old turns: the model reads all of them."""
    keys = {"extra_key": "k", "cache_salt": "s", "stop_regex": "o|0"}
    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    use = {"type": "tool_use", "id": "t", "name": "lay", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no tile", "is_error": True}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, result | {"is_error": False}]},
    ]
    chat = chat_body(msgspec.convert({**RAW, **keys, "messages": turns}, MessagesBody), "id")
    assert [message.content for message in chat.messages[2:]] == ["Error: no tile", "no tile"]
    assert {name: getattr(chat, name) for name in keys} == keys
    whole = http.post(PATH, json={**RAW, "messages": turns}).json()
    assert http.post(PATH, json={**RAW, **edits, "messages": turns}).json() == {
        **whole,
        "id": ANY,
    }


def test_a_forced_call_that_is_cut(client: anthropic.Anthropic) -> None:
    """It has no text; an answer that is not forced has one, empty or not."""
    sent: Any = {**PLAIN, "messages": HELLO, "max_tokens": 4, "tools": [TOOL]}
    message = client.messages.create(tool_choice={"type": "any"}, **sent)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    with client.messages.stream(tool_choice={"type": "any"}, **sent) as stream:
        assert stream.get_final_message().content == []


def test_an_empty_answer(running: Running) -> None:
    *_, last = updates_of("", 1000)
    body = asyncio.run(writer_of(running).response([last], ResponseWriter()))
    assert text_of(checked(msgspec.json.encode(body).decode())) == ""


def writer_of(running: Running) -> MessagesWriter:
    return MessagesWriter(running.context.shared(OpenAISetup), prepared_chat())


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_thinking_text_and_calls(running: Running, step: int) -> None:
    writer = writer_of(running)
    data = b"".join(writer.chunks(update, 0) for update in updates_of(TEXT, step))
    streamed = accumulated(
        events_in((data + asyncio.run(writer.last_chunk(ResponseWriter()))).decode())
    )
    *_, last = updates_of(TEXT, 1000)
    body = asyncio.run(writer_of(running).response([last], ResponseWriter()))
    for message in (streamed, checked(msgspec.json.encode(body).decode())):
        thinking, text, *calls = message.content
        assert thinking.thinking.strip() == THOUGHT and text.text == CONTENT
        assert [call.input for call in calls] == [json.loads(ARGUMENTS)] * 2
        assert len({call.id for call in calls}) == 2 and message.stop_reason == "tool_use"
        assert message.usage.output_tokens_details.thinking_tokens > 0


def test_a_call_that_is_cut(running: Running) -> None:
    *_, last = updates_of(TEXT[:-30], 1000, "length")
    message = asyncio.run(writer_of(running).response([last], ResponseWriter()))
    found = checked(msgspec.json.encode(message).decode())
    assert found.stop_reason == "max_tokens"
    assert [block.input for block in found.content[2:]] == [json.loads(ARGUMENTS), {}]  # type: ignore[union-attr]


def test_a_stream_that_is_closed(client: anthropic.Anthropic, engine: Engine) -> None:
    with client.messages.create(stream=True, **LONG) as stream:
        next(iter(stream))
    wait_until_idle(engine)


def test_a_stream_that_fails(client: anthropic.Anthropic, engine: Engine) -> None:
    stream: Any = client.messages.create(stream=True, **LONG)
    next(stream)
    engine._thread.submit(lambda core: core.fail_all("a fault for this test"))
    with pytest.raises(anthropic.APIStatusError, match="a fault for this test") as caught:
        list(stream)
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]


IMAGE: Any = [{"type": "image", "source": {"type": "url", "url": "x"}}]
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"max_tokens": 1}, "messages", "missing required field"),
    "no limit": ({"messages": HELLO}, "max_tokens", "missing required field"),
    "limit": ({"messages": HELLO, "max_tokens": -1}, "max_tokens", "0 or more"),
    "empty": ({"messages": [], "max_tokens": 1}, "messages", "between 1 and 2048"),
    "a role": (
        {"messages": [{"role": "tool", "content": ""}], "max_tokens": 1},
        "messages",
        "give assistant, system or user",
    ),
    "thinking": (
        {"messages": HELLO, "max_tokens": 1, "thinking": {"type": "x"}},
        "thinking",
        "adaptive",
    ),
    "an image": ({"messages": [{"role": "user", "content": IMAGE}]}, "messages", "'image'"),
    "system": ({"messages": HELLO, "system": IMAGE}, "system", "'image'"),
    "a result": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages",
        "tool_use_id",
    ),
    "a call": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        "messages",
        "id and name",
    ),
    "search": (
        {"messages": HELLO, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools",
        "'web_search_20250305'",
    ),
    "choice": ({"messages": HELLO, "tool_choice": {"type": "tool"}}, "tool_choice", "a name"),
    "no tools": (
        {"messages": HELLO, "tool_choice": {"type": "any"}},
        "tool_choice",
        "any needs tools",
    ),
    "stops": ({"messages": HELLO, "stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16"),
    "schema": (
        {
            "messages": HELLO,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}},
        },
        "output_config.format",
        "output_config.format is not possible",
    ),
    "budget": (
        {"messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 2**40}},
        "thinking",
        "too large",
    ),
    "mcp": ({"messages": HELLO, "mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
    "other route": ({"messages": HELLO, "stop": ["x"]}, "stop", "/v1/chat/completions"),
    "unknown": ({"messages": HELLO, "stops": ["x"]}, "stops", "unknown field"),
    "too long": ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests(http: httpx.Client, name: str) -> None:
    body, param, words = WRONG[name]
    limit = {} if name.startswith("no limit") else {"max_tokens": 1}
    response = http.post(PATH, json=limit | body)
    assert response.status_code == 400, response.text
    found = response.json()
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert found["error"]["param"] == param and words in found["error"]["message"], found


def test_refusals_are_the_clients_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="claude", messages=HELLO, max_tokens=1)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(messages=[], **SHORT)


def test_keys(engine: Engine) -> None:
    keys = Keys.of(engine.args, {"MOESAIC_API_KEY": "right"})
    body = {**RAW, "messages": HELLO}
    with Listening(make_app(engine, keys=keys)).serve() as server:
        base = f"http://127.0.0.1:{server.port}"
        with anthropic.Anthropic(base_url=base, api_key="right", max_retries=0) as client:
            assert client.messages.create(messages=HELLO, **SHORT).usage.output_tokens == 12
        with anthropic.Anthropic(base_url=base, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(messages=HELLO, **SHORT)
            assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        headers: list[tuple[list[tuple[str, str]], int]] = [
            ([("x-api-key", "right")], 200),
            ([("x-api-key", "wrong")], 401),
            ([("x-api-key", "right"), ("x-api-key", "right")], 401),
            ([("authorization", "Bearer wrong"), ("x-api-key", "right")], 401),
            ([("authorization", "Bearer right"), ("x-api-key", "wrong")], 200),
        ]
        for sent, status in headers:
            version = [("anthropic-version", "2023-06-01"), *sent]
            answer = httpx.post(f"{base}{PATH}", json=body, headers=version, timeout=60)
            assert answer.status_code == status
