"""The openai package: chat, completions, responses."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "How many of an item are in stock",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string", "enum": ["lamp", "vase"]}},
            "required": ["item"],
            "additionalProperties": False,
        },
    },
}


class Count(BaseModel):
    item: Literal["lamp", "vase"]
    number: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def asks_house(house: Any) -> OpenAI:
    return OpenAI(base_url=house.v1, api_key="-", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def asks_tiny(tiny: Any) -> OpenAI:
    return OpenAI(base_url=tiny.v1, api_key="-", max_retries=0, timeout=120)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(asks_house: OpenAI, house: Any) -> None:
    assert [model.id for model in asks_house.models.list()] == [house.model]
    assert asks_house.models.retrieve(house.model).id == house.model


def test_chat(asks_house: OpenAI, house: Any, problems: Any) -> None:
    for problem in problems:
        answer = asks_house.chat.completions.create(
            model=house.model, messages=user(problem["prompt"])
        )
        assert answer.choices[0].message.content == problem["reply"]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == problem["prompt_tokens"]
        assert answer.usage.completion_tokens == problem["completion_tokens"]


def test_chat_stream(asks_house: OpenAI, house: Any, problem: Any) -> None:
    stream = asks_house.chat.completions.create(
        model=house.model,
        messages=user(problem["prompt"]),
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == problem["reply"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == problem["completion_tokens"]


def test_developer_role(asks_house: OpenAI, house: Any, problem: Any) -> None:
    messages = [{"role": role, "content": "Answer briefly."} for role in ("system", "developer")]
    answers = [
        asks_house.chat.completions.create(
            model=house.model, messages=[first, *user(problem["prompt"])]
        )
        for first in messages
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert len({answer.usage.total_tokens for answer in answers if answer.usage}) == 1


def test_completions(asks_house: OpenAI, house: Any, problems: Any) -> None:
    answer = asks_house.completions.create(
        model=house.model,
        prompt=[problem["rendered"] for problem in problems],
        max_tokens=200,
        temperature=0,
    )
    assert [choice.text for choice in answer.choices] == [p["reply"] for p in problems]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(p["completion_tokens"] for p in problems)


def test_completions_logprobs(asks_house: OpenAI, house: Any, given: Any) -> None:
    for pair in given["continuations"]:
        text = pair["context"] + pair["continuation"]
        answer = asks_house.completions.create(
            model=house.model, prompt=text, echo=True, max_tokens=0, logprobs=0, temperature=0
        )
        logprobs = answer.choices[0].logprobs
        assert answer.choices[0].text == text and logprobs is not None
        start = logprobs.text_offset.index(len(pair["context"]))
        assert sum(logprobs.token_logprobs[start:]) == pytest.approx(pair["logprob"], abs=1e-3)


def test_parsed_chat(asks_house: OpenAI, house: Any) -> None:
    answer = asks_house.chat.completions.parse(
        model=house.model, messages=user("How many lamps are there?"), response_format=Count
    )
    assert isinstance(answer.choices[0].message.parsed, Count)


def test_tool_call_and_its_result(asks_tiny: OpenAI, tiny: Any) -> None:
    messages = user("How many lamps are there?")
    answer = asks_tiny.chat.completions.create(
        model=tiny.model,
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    calls = choice.message.tool_calls
    assert {call.function.name for call in calls} == {"stock"}
    assert all(json.loads(call.function.arguments)["item"] in ("lamp", "vase") for call in calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in calls]
    messages += [choice.message.to_dict(), *results]
    after = asks_tiny.chat.completions.create(
        model=tiny.model, messages=messages, tools=[TOOL], max_tokens=8
    )
    assert after.usage is not None and answer.usage is not None
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_responses(asks_house: OpenAI, house: Any, problems: Any) -> None:
    for problem in problems:
        answer = asks_house.responses.create(model=house.model, input=problem["prompt"])
        assert answer.status == "completed" and answer.output_text == problem["reply"]
        assert answer.usage is not None
        assert answer.usage.input_tokens == problem["prompt_tokens"]
        assert answer.usage.output_tokens == problem["completion_tokens"]
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_responses_stream(asks_house: OpenAI, house: Any, problem: Any) -> None:
    with asks_house.responses.stream(model=house.model, input=problem["prompt"]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == problem["reply"] and len(deltas) > 1


def test_responses_go_on(asks_house: OpenAI, house: Any, problems: Any) -> None:
    first = asks_house.responses.create(model=house.model, input=problems[0]["prompt"])
    assert asks_house.responses.retrieve(first.id).output_text == problems[0]["reply"]
    second = asks_house.responses.create(
        model=house.model, input=problems[2]["prompt"], previous_response_id=first.id
    )
    whole = asks_house.chat.completions.create(
        model=house.model,
        messages=[
            *user(problems[0]["prompt"]),
            {"role": "assistant", "content": problems[0]["reply"]},
            *user(problems[2]["prompt"]),
        ],
    )
    assert second.output_text == whole.choices[0].message.content
    assert second.usage is not None and whole.usage is not None
    assert second.usage.input_tokens == whole.usage.prompt_tokens


def test_parsed_responses(asks_house: OpenAI, house: Any) -> None:
    answer = asks_house.responses.parse(
        model=house.model, input="How many lamps are there?", text_format=Count
    )
    assert isinstance(answer.output_parsed, Count)


def test_responses_tool_call_and_its_result(asks_tiny: OpenAI, tiny: Any) -> None:
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    first = asks_tiny.responses.create(
        model=tiny.model,
        input="How many lamps?",
        tools=[tool],
        tool_choice={"type": "function", "name": "stock"},
        max_output_tokens=400,
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["stock"]
    assert json.loads(calls[0].arguments)["item"] in ("lamp", "vase")
    result: Any = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "7"}
    second = asks_tiny.responses.create(
        model=tiny.model, input=[result], previous_response_id=first.id, max_output_tokens=8
    )
    assert first.usage is not None and second.usage is not None
    assert second.usage.output_tokens <= 8


def test_errors(asks_house: OpenAI, house: Any) -> None:
    with pytest.raises(NotFoundError) as missing:
        asks_house.chat.completions.create(model="gpt-4o", messages=user("Hello"))
    assert missing.value.code == "model_not_found" and "gpt-4o" in missing.value.message
    with pytest.raises(BadRequestError) as bad:
        asks_house.chat.completions.create(
            model=house.model, messages=user("Hello"), temperature=-1
        )
    assert bad.value.param == "temperature"
    with pytest.raises(NotFoundError, match="embeddings"):
        asks_house.embeddings.create(model=house.model, input="Hello")
