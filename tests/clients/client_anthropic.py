"""The anthropic package: messages, streams, tools, token counts."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic, NotFoundError

TOOL: Any = {
    "name": "stock",
    "description": "How many of an item are in stock",
    "input_schema": {
        "type": "object",
        "properties": {"item": {"type": "string", "enum": ["lamp", "vase"]}},
        "required": ["item"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def asks_house(house: Any) -> Anthropic:
    return Anthropic(base_url=house.url, api_key="-", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def asks_tiny(tiny: Any) -> Anthropic:
    return Anthropic(base_url=tiny.url, api_key="-", max_retries=0, timeout=120)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_messages(asks_house: Anthropic, house: Any, problems: Any) -> None:
    for problem in problems:
        answer = asks_house.messages.create(
            model=house.model, messages=user(problem["prompt"]), max_tokens=300
        )
        assert [block.type for block in answer.content] == ["text"]
        assert answer.content[0].text == problem["reply"]
        assert answer.stop_reason == "end_turn"
        used = answer.usage
        prompt = used.input_tokens + (used.cache_read_input_tokens or 0)
        assert prompt == problem["prompt_tokens"]
        assert used.output_tokens == problem["completion_tokens"]


def test_limit_and_stop_sequence(asks_house: Anthropic, house: Any, problem: Any) -> None:
    ask = {"model": house.model, "messages": user(problem["prompt"])}
    short = asks_house.messages.create(**ask, max_tokens=5)
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 5
    stopped = asks_house.messages.create(**ask, max_tokens=300, stop_sequences=["####"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "####")
    assert stopped.content[0].text == problem["reply"].partition("####")[0]


def test_stream(asks_house: Anthropic, house: Any, problem: Any) -> None:
    with asks_house.messages.stream(
        model=house.model, messages=user(problem["prompt"]), max_tokens=300
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == problem["reply"] and len(pieces) > 1
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == problem["completion_tokens"]


def test_system_and_blocks(asks_house: Anthropic, house: Any, problem: Any) -> None:
    blocks: Any = [{"type": "text", "text": problem["prompt"]}]
    texts = [
        asks_house.messages.create(
            model=house.model,
            system=system,
            messages=[{"role": "user", "content": blocks}],
            max_tokens=300,
        )
        for system in ("Answer briefly.", [{"type": "text", "text": "Answer briefly."}])
    ]
    assert texts[0].content[0].text == texts[1].content[0].text
    assert texts[0].usage.output_tokens == texts[1].usage.output_tokens


def test_count_tokens(asks_house: Anthropic, house: Any, problems: Any) -> None:
    for problem in problems:
        counted = asks_house.messages.count_tokens(
            model=house.model, messages=user(problem["prompt"])
        )
        assert counted.input_tokens == problem["prompt_tokens"]


def test_tool_call_and_its_result(asks_tiny: Anthropic, tiny: Any) -> None:
    messages = user("How many lamps are there?")
    choice: Any = {"type": "tool", "name": "stock"}
    first = asks_tiny.messages.create(
        model=tiny.model, messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=400
    )
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and [call.name for call in calls] == ["stock"]
    assert calls[0].input["item"] in ("lamp", "vase")
    result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "7"}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = asks_tiny.messages.create(
        model=tiny.model, messages=messages, tools=[TOOL], max_tokens=8
    )
    assert second.usage.output_tokens <= 8


def test_tool_call_in_a_stream(asks_tiny: Anthropic, tiny: Any) -> None:
    with asks_tiny.messages.stream(
        model=tiny.model,
        messages=user("How many lamps are there?"),
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "stock"},
        max_tokens=400,
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[-1].input["item"] in ("lamp", "vase")


def test_unknown_model(asks_house: Anthropic) -> None:
    with pytest.raises(NotFoundError) as missing:
        asks_house.messages.create(model="claude-x", messages=user("Hello"), max_tokens=5)
    assert missing.value.body["type"] == "error"
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert "claude-x" in missing.value.body["error"]["message"]
