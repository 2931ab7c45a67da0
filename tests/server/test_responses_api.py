"""The Responses API. The oracles are the openai client, its types, and the same server's chat."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any, cast

import httpx
import msgspec
import openai
import pydantic
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from moesaic.engine.engine import Engine
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.server.errors import Refusal
from moesaic.server.generation import Updates
from moesaic.server.openai.request_types import FunctionName, SelectedTools
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import AnswerEvents
from moesaic.server.responses import ResponseWriter, named_event, prepared
from moesaic.server.responses_api import writer as responses_writer
from moesaic.server.responses_api.bodies import ResponsesBody
from moesaic.server.responses_api.objects import new_response
from moesaic.server.responses_api.translation import new_messages, prompt_body
from moesaic.server.responses_api.writer import ResponsesWriter
from tests.server.openai_client import extras
from tests.server.responses_client import (
    BEYOND,
    CHAT,
    LONG,
    MODEL,
    PATH,
    PLAIN,
    SHORT,
    chat_text,
    checked,
    client_of,
)
from tests.server.scripted import (
    ARGUMENTS,
    CALL,
    CONTENT,
    TEXT,
    THOUGHT,
    prepared_chat,
    scored_updates,
    token_numbers,
    updates_of,
)
from tests.server.serving import Running, wait_until_idle

# A random model likes to repeat the white space of JSON.
LESS_SPACE: Any = {"frequency_penalty": 2.0}
TOOL: Any = {
    "type": "function",
    "name": "lay",
    "description": "Lays a tile",
    "parameters": {
        "type": "object",
        "properties": {"tile": {"enum": ["red", "blue"]}},
        "required": ["tile"],
        "additionalProperties": False,
    },
    "strict": True,
}
EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with client_of(running.port) as client:
        yield client


def events_of(http: httpx.Client, **body: Any) -> list[Any]:
    """All events of a stream, checked with the client's types."""
    with http.stream("POST", PATH, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        lines = "\n".join(response.iter_lines())
    return events_in(lines)


def events_in(text: str) -> list[Any]:
    found = []
    for number, piece in enumerate(text.strip().split("\n\n")):
        name, data = piece.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}" and event.sequence_number == number
        assert extras(event) <= BEYOND
        found.append(event)
    return found


def test_a_response(http: httpx.Client, client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = chat_text(http, messages)
    raw = http.post(PATH, json={**SHORT, "instructions": "Be brief.", "input": "Hello"})
    response = checked(raw.text)
    assert response.output_text == expected and response.model == MODEL
    assert (response.status, response.instructions) == ("incomplete", "Be brief.")
    assert response.incomplete_details is not None and response.usage is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 12
    counted = client.responses.input_tokens.count(
        model=MODEL, instructions="Be brief.", input="Hello", reasoning={"effort": "none"}
    )
    assert counted.input_tokens == response.usage.input_tokens
    given: Any = [{"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}]
    given += [{"type": "message", "role": "user", "content": "Hello"}]
    # The tiny template writes the names of roles.
    assert client.responses.create(input=given, **SHORT).output_text == chat_text(
        http, [messages[0] | {"role": "developer"}, messages[1]]
    )


def test_a_stream_ends_with_the_response(http: httpx.Client, client: openai.OpenAI) -> None:
    sent: Any = {**PLAIN, "input": "Hello", "text": {"format": TILE_FORMAT}}
    events = events_of(http, **sent, **LESS_SPACE)
    names = [event.type.removeprefix("response.") for event in events]
    start = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert names[:4] == start and names[-4:] == end
    assert set(names[4:-4]) == {"output_text.delta"}
    last = events[-1].response
    assert last.output_text == "".join(event.delta for event in events[4:-4])
    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        state.handle_event(event)
    assert snapshot_of(state) == [last.output_text]
    with client.responses.stream(extra_body=LESS_SPACE, **sent) as stream:
        final = stream.get_final_response()
    assert final.output_text == last.output_text and final.usage == last.usage
    assert client.responses.retrieve(last.id).to_dict() == last.to_dict()


def snapshot_of(state: Any) -> list[str]:
    """What the client has joined of the deltas of texts and calls."""
    items = state._ResponseStreamState__current_snapshot.output
    texts = (item.content[0].text for item in items if item.type == "message")
    return [*texts, *(item.arguments for item in items if item.type == "function_call")]


TILE_FORMAT: Any = {
    "type": "json_schema",
    "name": "tile",
    "schema": TOOL["parameters"],
    "strict": True,
}


class Tile(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    tile: str = pydantic.Field(pattern="^(red|blue)$")
    size: int = pydantic.Field(ge=1, le=9)


def test_structured_text(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        input="A tile", text_format=Tile, extra_body=LESS_SPACE, **PLAIN
    )
    tile = parsed.output_parsed
    assert isinstance(tile, Tile) and tile.tile in ("red", "blue")
    assert json.loads(parsed.output_text) == tile.model_dump()


def test_a_tool_and_its_result(http: httpx.Client, client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": "Lay one"}]
    sent = {**PLAIN, "tools": [TOOL], "parallel_tool_calls": False}
    events = events_of(http, input=given, tool_choice="required", **sent, **LESS_SPACE)
    response = events[-1].response
    (call,) = response.output
    assert call.type == "function_call" and call.name == "lay" and call.status == "completed"
    assert json.loads(call.arguments)["tile"] in ("red", "blue")
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "laid"}
    short = {**SHORT, "tools": [TOOL]}
    whole = client.responses.create(input=[*given, call.to_dict(), result], **short)
    after = client.responses.create(input=[result], previous_response_id=response.id, **short)
    function = {"name": call.name, "arguments": call.arguments}
    turn = {"role": "assistant", "tool_calls": [{"id": call.call_id, "function": function}]}
    spec = {key: value for key, value in TOOL.items() if key != "type"}
    expected = chat_text(
        http,
        [*given, turn, {"role": "tool", "content": "laid", "tool_call_id": call.call_id}],
        tools=[{"type": "function", "function": spec}],
    )
    assert whole.output_text == after.output_text == expected


def test_choices_of_tools() -> None:
    named = {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "lay"}}
    chat = prompt_body(msgspec.convert(named, ResponsesBody), [])
    assert chat.tool_choice == SelectedTools(FunctionName("lay"))
    others = [{**TOOL, "name": name} for name in ("lift", "turn")]
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "turn"}]}
    for mode in ("auto", "required"):
        choice = {**allowed, "mode": mode}
        sent = {"input": "x", "tools": [TOOL, *others], "tool_choice": choice}
        chat = prompt_body(msgspec.convert(sent, ResponsesBody), [])
        assert [tool.function.name for tool in chat.tools or ()] == ["turn"]
        assert chat.tool_choice == mode
    wrong = msgspec.convert(
        {"input": "x", "tools": others[:1], "tool_choice": choice}, ResponsesBody
    )
    with pytest.raises(Refusal, match="not in tools"):
        prompt_body(wrong, [])


def test_items_of_one_turn_are_one_message() -> None:
    thought: Any = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}
    call = {"type": "function_call", "name": "lay"}
    given = [{"role": "user", "content": "x"}]
    for number in range(3):
        given += [thought, {**call, "call_id": str(number)}]
    given += [{"role": "assistant", "content": "y"}, thought]
    body = msgspec.convert({"input": given}, ResponsesBody)
    user, turn, last = new_messages(body)
    assert (user.content, turn.content, last.content) == ("x", "y", None)
    thoughts = [message.reasoning_content for message in (user, turn, last)]
    assert thoughts == [None, "aaa", "a"]
    assert [call.id for call in turn.tool_calls or ()] == ["0", "1", "2"]


def test_a_conversation_goes_on(http: httpx.Client, client: openai.OpenAI) -> None:
    messages, last, texts = [], None, []
    for text in ("one", "two", "three"):
        response = client.responses.create(
            input=text,
            previous_response_id=last,
            instructions="Count." if text == "one" else openai.omit,
            **SHORT,
        )
        last = response.id
        messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": "Count."}] if text == "one" else []
        texts.append(chat_text(http, [*system, *messages]))
        assert response.output_text == texts[-1]
        messages.append({"role": "assistant", "content": texts[-1]})
    assert len(set(texts)) == 3
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="x", previous_response_id="resp_x", **SHORT)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_reasoning_until_the_limit(http: httpx.Client) -> None:
    sent = {"input": "Hello", "temperature": 0, "max_output_tokens": 12}
    sent |= {"tools": [TOOL], "tool_choice": "required"}  # the grammar opens the reasoning
    response = checked(http.post(PATH, json=sent).text)
    (item,) = response.output
    assert item.type == "reasoning" and item.status == "incomplete" and item.summary == []
    assert item.content is not None and item.content[0].text
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens <= 12
    again = checked(http.post(PATH, json={**sent, "input": [item.to_dict()]}).text)
    assert again.status == "incomplete"


def test_logprobs(http: httpx.Client) -> None:
    sent = {**SHORT, "input": "Hello", "top_logprobs": 2}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}
    chat |= {"reasoning_effort": "none", "logprobs": True, "top_logprobs": 2}
    expected = http.post(CHAT, json=chat).json()["choices"][0]["logprobs"]["content"]
    assert len(expected) == 12
    included = {**sent, "include": ["message.output_text.logprobs"]}
    for body in (sent, included):
        found = json.loads(http.post(PATH, json=body).text)["output"][0]["content"][0]
        assert [one["bytes"] for one in found["logprobs"]] == [one["bytes"] for one in expected]
        assert [len(one["top_logprobs"]) for one in found["logprobs"]] == [2] * 12
    events = events_of(http, **included)
    deltas = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    (done,) = [e.logprobs for e in events if e.type == "response.output_text.done"]
    streamed = [one.model_dump() for some in deltas for one in some]
    whole = [one.model_dump() for one in done]
    assert len(whole) == 12 and streamed == whole
    assert [one["bytes"] for one in whole] == [one["bytes"] for one in expected]


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({}, "input", "missing required field"),
    "empty input": ({"input": []}, "input", "input is empty"),
    "a role": ({"input": [{"role": "king", "content": "x"}]}, "input", "enum"),
    "no role": ({"input": [{"type": "message", "content": "x"}]}, "input", "needs a role"),
    "no content": ({"input": [{"role": "user"}]}, "input", "needs content"),
    "null content": ({"input": [{"role": "user", "content": None}]}, "input", "needs content"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input",
        "'input_image' is not supported",
    ),
    "an item": ({"input": [{"type": "computer_call"}]}, "input", "'computer_call'"),
    "a reference": ({"input": [{"id": "msg_1"}]}, "input", "'item_reference'"),
    "a call": ({"input": [{"type": "function_call", "name": "f"}]}, "input", "call_id"),
    "limit": ({"input": "x", "max_output_tokens": -1}, "max_output_tokens", "max_output_tokens"),
    "temperature": ({"input": "x", "temperature": -1}, "temperature", "greedy"),
    "search": ({"input": "x", "tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
    "no name": ({"input": "x", "tools": [{"type": "function"}]}, "tools", "needs a name"),
    "choice": ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
    "required": ({"input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
    "format": (
        {"input": "x", "text": {"format": {"type": "json_schema"}}},
        "text.format",
        "schema",
    ),
    "schema": (
        {"input": "x", "text": {"format": TILE_FORMAT | {"schema": {"type": "nothing"}}}},
        "text.format",
        "text.format is not possible",
    ),
    "verbosity": ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity", "supported"),
    "effort": ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning", "enum"),
    "logprobs": ({"input": "x", "top_logprobs": 21}, "top_logprobs", "20"),
    "conversation": ({"input": "x", "conversation": "c"}, "conversation", "previous_response_id"),
    "prompt": ({"input": "x", "prompt": {"id": "p"}}, "prompt", "instructions"),
    "other route": ({"input": "x", "max_tokens": 3}, "max_tokens", "give max_tokens to a chat"),
    "unknown": ({"input": "x", "max_token": 3}, "max_token", "unknown field"),
    "pairs": ({"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata", "<= 16"),
    "a key": ({"input": "x", "metadata": {"k" * 65: ""}}, "metadata", "<= 64"),
    "a value": ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata", "<= 512"),
    "two ways": ({"input": "x", "background": True, "stream": True}, "background", "stream"),
    "not kept": ({"input": "x", "background": True, "store": False}, "background", "store"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests(http: httpx.Client, name: str) -> None:
    body, param, words = WRONG[name]
    response = http.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_other_refusals(http: httpx.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="gpt-5", input="x")
    assert caught.value.code == "model_not_found"
    off = {
        "conversation": None,
        "prompt": None,
        "context_management": [],
        "previous_response_id": "",
        "user": "u",
        "store": False,
    }
    assert http.post(PATH, json={**SHORT, "input": "x", **off}).status_code == 200
    id = client.responses.create(input="x", **SHORT).id
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=x"):
        response = http.get(f"{PATH}/{id}/input_items?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.partition("=")[0]
    assert http.get(f"{PATH}/{id}?stream=true").json()["error"]["param"] == "stream"


def test_a_stream_that_is_closed(client: openai.OpenAI, engine: Engine) -> None:
    with client.responses.create(stream=True, **LONG) as stream:
        next(iter(stream))
    wait_until_idle(engine)


def test_a_stream_that_fails(client: openai.OpenAI, engine: Engine) -> None:
    stream = client.responses.create(stream=True, **LONG)
    next(stream)
    engine._thread.submit(lambda core: core.fail_all("a fault for this test"))
    *_, last = stream
    assert last.type == "response.failed" and last.response.error is not None
    assert "a fault for this test" in last.response.error.message


def writer_of(running: Running, scored: bool = False) -> ResponsesWriter:
    setup = running.context.shared(OpenAISetup)
    chat = prepared_chat(setup.vocabulary if scored else None)
    draft = new_response(ResponsesBody(input="x"), chat, "m")
    return ResponsesWriter(setup, chat, draft, lambda body, message: None)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_reasoning_text_and_calls(running: Running, step: int) -> None:
    writer = writer_of(running)
    data = b"".join(writer.chunks(update, 0) for update in updates_of(TEXT, step))
    events = events_in((data + asyncio.run(writer.last_chunk(ResponseWriter()))).decode())
    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        state.handle_event(event)
    streamed = state._completed_response
    assert [text.strip() for text in snapshot_of(state)] == [CONTENT, ARGUMENTS, ARGUMENTS]
    *_, last = updates_of(TEXT, 1000)
    body = asyncio.run(writer_of(running).response([last], ResponseWriter()))
    for response in (streamed, checked(bytes(body).decode())):
        thought, message, *calls = response.output
        assert thought.content[0].text.strip() == THOUGHT
        assert message.content[0].text == response.output_text == CONTENT
        assert [json.loads(call.arguments) for call in calls] == [json.loads(ARGUMENTS)] * 2
        assert len({item.id for item in response.output}) == 4
        assert len({call.call_id for call in calls}) == 2
        assert {item.status for item in response.output} == {"completed"}
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    answer = writer.blocks.message()
    assert answer.content == CONTENT and len(answer.tool_calls or ()) == 2


@pytest.mark.parametrize("limit", [1, 2, 5, 12])
def test_a_forced_call_that_is_cut(client: openai.OpenAI, http: httpx.Client, limit: int) -> None:
    """Before its name it is no item."""
    sent: Any = {**PLAIN, "input": "Hello", "max_output_tokens": limit, "tools": [TOOL]}
    sent |= {"tool_choice": "required", "reasoning": {"effort": "none"}}
    whole = client.responses.create(**sent)
    with client.responses.stream(**sent) as stream:
        streamed = list(stream)[-1].response  # type: ignore[union-attr]
    later = client.responses.create(background=True, **sent)
    while later.status == "in_progress":
        later = client.responses.retrieve(later.id)
    for response in (whole, streamed, later):
        assert (response.output, response.status) == ([], "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == limit
    after = {**PLAIN, "input": "And?", "max_output_tokens": 2, "previous_response_id": later.id}
    assert http.post(PATH, json=after).status_code == 200


FIRST, SECOND = "I lay them, 貝 <by> one.", "It is <tool done; é"


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_each_text_has_the_logprobs_of_its_tokens(running: Running, step: int) -> None:
    tokenizer = running.context.shared(OpenAISetup).tokenizer
    text = f"<think>\n{THOUGHT}\n</think>\n\n{FIRST}\n{CALL}\n{SECOND}"
    expected = [[-n for n in token_numbers(tokenizer, text, part)] for part in (FIRST, SECOND)]
    assert all(len(some) > 5 for some in expected)
    writer = writer_of(running, scored=True)
    data = b"".join(writer.chunks(update, 0) for update in scored_updates(tokenizer, text, step))
    events = events_in((data + asyncio.run(writer.last_chunk(ResponseWriter()))).decode())
    deltas: dict[int, list[float]] = {}
    for event in events:
        if event.type == "response.output_text.delta":
            deltas.setdefault(event.output_index, []).extend(one.logprob for one in event.logprobs)
    assert [*deltas.values()] == expected
    done = [e.logprobs for e in events if e.type == "response.output_text.done"]
    assert [[one.logprob for one in some] for some in done] == expected
    *_, last = scored_updates(tokenizer, text, 1000)
    body = asyncio.run(writer_of(running, scored=True).response([last], ResponseWriter()))
    for response in (events[-1].response, checked(bytes(body).decode())):
        texts = [item.content[0] for item in response.output if item.type == "message"]
        assert [part.text for part in texts] == [FIRST, SECOND]
        assert [[one.logprob for one in part.logprobs] for part in texts] == expected


def test_large_events_are_made_beside_the_event_loop(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update is small; the end of an item and of the response repeat all of its logprobs,
    which are encoded once for all of these."""
    made: list[tuple[str, int, bool]] = []
    num_encoded = 0

    def event(name: str, value: Any) -> bytes:
        data = named_event(name, value)
        made.append((name, len(data), threading.current_thread() is threading.main_thread()))
        return data

    def encoded(value: Any, weight: int) -> Any:
        nonlocal num_encoded
        num_encoded += len(value)
        return prepared(value, weight)

    monkeypatch.setattr(responses_writer, "named_event", event)
    monkeypatch.setattr(responses_writer, "prepared", encoded)
    tokenizer = running.context.shared(OpenAISetup).tokenizer
    text = f"{FIRST * 60}\n{CALL}\n{SECOND * 60}"

    async def updates() -> AsyncGenerator[RequestUpdate, None]:
        for update in scored_updates(tokenizer, text, 1, top=20):
            yield update

    async def streamed() -> bytes:
        answers = writer_of(running, scored=True)
        events = AnswerEvents(running.context, cast(Updates, updates()), answers)
        return b"".join([data async for data in events.read()]) + events.tail

    lines = asyncio.run(streamed()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    large = [name for name, size, _ in made if size > 100_000]
    ends = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert large == [*ends, *ends, "response.completed"]
    assert not [name for name, size, on_loop in made if size > 10_000 and on_loop]
    output = events[-1]["response"]["output"]
    texts = [item["content"][0] for item in output if item["type"] == "message"]
    assert sum(len(part["logprobs"]) for part in texts) == num_encoded > 500
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
