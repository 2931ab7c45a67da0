"""openai-agents: its default model class (the Responses API), and the one over chat completions."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

MODELS = [OpenAIResponsesModel, OpenAIChatCompletionsModel]


class Count(BaseModel):
    item: Literal["lamp", "vase"]
    number: int = Field(ge=0, le=99)


@pytest.fixture(params=MODELS, ids=["responses", "chat"])
def kind(request: Any) -> Any:
    return request.param


def at(kind: Any, server: Any) -> Any:
    client = AsyncOpenAI(base_url=server.v1, api_key="-", max_retries=0, timeout=120)
    return kind(model=server.model, openai_client=client)


def test_answers(kind: Any, house: Any, problems: Any) -> None:
    for problem in problems[:3]:
        agent = Agent(name="House", model=at(kind, house))
        result = asyncio.run(Runner.run(agent, problem["prompt"]))
        assert result.final_output == problem["reply"]
        used = result.context_wrapper.usage
        assert (used.requests, used.input_tokens) == (1, problem["prompt_tokens"])
        assert used.output_tokens == problem["completion_tokens"]


def test_instructions_and_session(kind: Any, house: Any, problems: Any) -> None:
    async def turns() -> list[str]:
        agent = Agent(name="House", instructions="Be exact.", model=at(kind, house))
        session = SQLiteSession("one")
        asked = [p["prompt"] for p in problems[2:4]]
        return [(await Runner.run(agent, text, session=session)).final_output for text in asked]

    first, second = asyncio.run(turns())
    assert first == problems[2]["reply"]
    assert second.partition("####")[2] == problems[3]["reply"].partition("####")[2]


def test_stream(kind: Any, house: Any, problem: Any) -> None:
    async def pieces() -> tuple[str, str]:
        result = Runner.run_streamed(Agent(name="House", model=at(kind, house)), problem["prompt"])
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        assert len(deltas) > 1
        return "".join(deltas), result.final_output

    assert asyncio.run(pieces()) == (problem["reply"], problem["reply"])


def test_output_type(kind: Any, house: Any) -> None:
    agent = Agent(name="House", model=at(kind, house), output_type=Count)
    result = asyncio.run(Runner.run(agent, "How many lamps are there?"))
    assert isinstance(result.final_output, Count)


def test_tool_runs(kind: Any, tiny: Any) -> None:
    asked = []

    @function_tool
    def stock(item: Literal["lamp", "vase"]) -> int:
        """How many of an item are in stock."""
        asked.append(item)
        return 7

    agent = Agent(
        name="Tiny",
        model=at(kind, tiny),
        tools=[stock],
        tool_use_behavior="stop_on_first_tool",
        model_settings=ModelSettings(tool_choice="stock", max_tokens=400),
    )
    result = asyncio.run(Runner.run(agent, "How many lamps are there?"))
    assert len(asked) == 1 and asked[0] in ("lamp", "vase")
    assert str(result.final_output) == "7"


def test_tool_result_goes_back(kind: Any, tiny: Any) -> None:
    @function_tool
    def stock(item: Literal["lamp", "vase"]) -> int:
        """How many of an item are in stock."""
        return 7

    agent = Agent(
        name="Tiny",
        model=at(kind, tiny),
        tools=[stock],
        output_type=Count,
        model_settings=ModelSettings(tool_choice="stock", max_tokens=400),
    )
    result = asyncio.run(Runner.run(agent, "How many lamps are there?"))
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert result.context_wrapper.usage.requests >= 2
    assert isinstance(result.final_output, Count)
