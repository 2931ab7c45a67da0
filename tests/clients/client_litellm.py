"""litellm: completion, text_completion, responses, and anthropic's messages."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel, Field

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "stock",
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


def at(server: Any, prefix: str = "openai") -> dict[str, Any]:
    """How litellm is pointed at a server."""
    model = f"{prefix}/{server.model}"
    return {"model": model, "api_base": server.v1, "api_key": "-", "num_retries": 0}


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
def test_completion(house: Any, problems: Any, prefix: str) -> None:
    for problem in problems:
        answer = litellm.completion(messages=user(problem["prompt"]), **at(house, prefix))
        assert answer.choices[0].message.content == problem["reply"]
        assert answer.usage.prompt_tokens == problem["prompt_tokens"]
        assert answer.usage.completion_tokens == problem["completion_tokens"]


def test_stream(house: Any, problem: Any) -> None:
    pieces = list(litellm.completion(messages=user(problem["prompt"]), stream=True, **at(house)))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == problem["reply"] and len(pieces) > 2


def test_text_completion(house: Any, problem: Any) -> None:
    answer = litellm.text_completion(
        prompt=problem["rendered"],
        max_tokens=200,
        temperature=0,
        **at(house, "text-completion-openai"),
    )
    assert answer.choices[0].text == problem["reply"]


def test_structured_output(house: Any) -> None:
    answer = litellm.completion(
        messages=user("How many lamps are there?"), response_format=Count, **at(house)
    )
    Count.model_validate_json(answer.choices[0].message.content)


def test_tool_call_and_its_result(tiny: Any) -> None:
    messages = user("How many lamps are there?")
    choice = {"type": "function", "function": {"name": "stock"}}
    answer = litellm.completion(
        messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=400, **at(tiny)
    )
    message = answer.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["stock"]
    assert json.loads(message.tool_calls[0].function.arguments)["item"] in ("lamp", "vase")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
    after = litellm.completion(
        messages=[*messages, message.model_dump(), result],
        tools=[TOOL],
        max_tokens=8,
        **at(tiny),
    )
    assert after.usage.completion_tokens <= 8


def test_responses(house: Any, problems: Any) -> None:
    for problem in problems:
        answer = litellm.responses(input=problem["prompt"], **at(house))
        assert answer.status == "completed"
        assert answer.output[-1].content[0].text == problem["reply"]
        assert answer.usage.input_tokens == problem["prompt_tokens"]
        assert answer.usage.output_tokens == problem["completion_tokens"]


def test_responses_stream(house: Any, problem: Any) -> None:
    events = list(litellm.responses(input=problem["prompt"], stream=True, **at(house)))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == problem["reply"]
    assert events[-1].type == "response.completed"


def test_anthropic(house: Any, problem: Any) -> None:
    where = at(house, "anthropic") | {"api_base": house.url}
    answer = litellm.completion(messages=user(problem["prompt"]), max_tokens=300, **where)
    assert answer.choices[0].message.content == problem["reply"]
    assert answer.usage.completion_tokens == problem["completion_tokens"]


def test_unknown_model(house: Any) -> None:
    with pytest.raises(litellm.NotFoundError, match="gpt-4o"):
        litellm.completion(messages=user("Hello"), **at(house) | {"model": "openai/gpt-4o"})
