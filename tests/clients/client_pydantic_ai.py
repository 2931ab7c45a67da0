"""pydantic-ai: over chat completions, the Responses API and Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from anthropic import AsyncAnthropic
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Count(BaseModel):
    item: Literal["lamp", "vase"]
    number: int = Field(ge=0, le=99)


def chat(server: Any) -> Any:
    return OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.v1, api_key="-"))


def responses(server: Any) -> Any:
    provider = OpenAIProvider(base_url=server.v1, api_key="-")
    return OpenAIResponsesModel(server.model, provider=provider)


def messages(server: Any) -> Any:
    client = AsyncAnthropic(base_url=server.url, api_key="-", max_retries=0)
    return AnthropicModel(server.model, provider=AnthropicProvider(anthropic_client=client))


@pytest.fixture(params=[chat, responses, messages], ids=["chat", "responses", "messages"])
def at(request: Any) -> Any:
    return request.param


def test_answers(at: Any, house: Any, problems: Any) -> None:
    agent = Agent(at(house))
    for problem in problems[:3]:
        result = agent.run_sync(problem["prompt"])
        assert result.output == problem["reply"]
        used = result.usage if not callable(result.usage) else result.usage()
        assert used.output_tokens == problem["completion_tokens"]
        assert used.input_tokens == problem["prompt_tokens"]


def test_stream(at: Any, house: Any, problem: Any) -> None:
    with Agent(at(house)).run_stream_sync(problem["prompt"]) as result:
        pieces = list(result.stream_text(delta=True, debounce_by=None))
    assert "".join(pieces) == problem["reply"]


def test_native_output(house: Any) -> None:
    for at in (chat, responses):
        agent = Agent(at(house), output_type=NativeOutput(Count))
        assert isinstance(agent.run_sync("How many lamps are there?").output, Count)


def test_tool_output(at: Any, tiny: Any) -> None:
    agent = Agent(at(tiny), output_type=ToolOutput(Count, name="count"))
    result = agent.run_sync("How many lamps are there?", model_settings={"max_tokens": 400})
    assert isinstance(result.output, Count)
