"""langchain-openai: ChatOpenAI over chat completions and over the Responses API, and OpenAI."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class Count(BaseModel):
    """How many of an item there are."""

    item: Literal["lamp", "vase"]
    number: int = Field(ge=0, le=99)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def options(request: Any) -> dict[str, Any]:
    return {
        "api_key": "-",
        "max_retries": 0,
        "timeout": 120,
        "use_responses_api": request.param,
    }


def test_invoke(options: Any, house: Any, problems: Any) -> None:
    model = ChatOpenAI(base_url=house.v1, model=house.model, **options)
    for problem in problems:
        answer = model.invoke(problem["prompt"])
        assert answer.text == problem["reply"]
        used = answer.usage_metadata
        assert used is not None and used["input_tokens"] == problem["prompt_tokens"]
        assert used["output_tokens"] == problem["completion_tokens"]
        assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]


def test_system_message_and_batch(options: Any, house: Any, problems: Any) -> None:
    model = ChatOpenAI(base_url=house.v1, model=house.model, **options)
    chats = [[SystemMessage("Be exact."), HumanMessage(p["prompt"])] for p in problems[:3]]
    assert [a.text for a in model.batch(chats)] == [model.invoke(c).text for c in chats]


def test_stream(options: Any, house: Any, problem: Any) -> None:
    model = ChatOpenAI(base_url=house.v1, model=house.model, stream_usage=True, **options)
    pieces = list(model.stream(problem["prompt"]))
    assert "".join(piece.text for piece in pieces) == problem["reply"] and len(pieces) > 2
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata["output_tokens"] == problem["completion_tokens"]


def test_structured_output(options: Any, house: Any) -> None:
    model = ChatOpenAI(base_url=house.v1, model=house.model, **options)
    asked = model.with_structured_output(Count, method="json_schema")
    assert isinstance(asked.invoke("How many lamps are there?"), Count)


def test_tool_call_and_its_result(options: Any, tiny: Any) -> None:
    model = ChatOpenAI(base_url=tiny.v1, model=tiny.model, max_tokens=400, **options)
    asked = model.bind_tools([Count], tool_choice="Count")
    chat = [HumanMessage("How many lamps are there?")]
    answer = asked.invoke(chat)
    assert [call["name"] for call in answer.tool_calls] == ["Count"]
    Count.model_validate(answer.tool_calls[0]["args"])
    result = ToolMessage("7", tool_call_id=answer.tool_calls[0]["id"])
    after = ChatOpenAI(base_url=tiny.v1, model=tiny.model, max_tokens=8, **options)
    assert after.invoke([*chat, answer, result]).usage_metadata["output_tokens"] <= 8


def test_completions(house: Any, problem: Any) -> None:
    model = OpenAI(base_url=house.v1, model=house.model, api_key="-", max_tokens=200, temperature=0)
    assert model.invoke(problem["rendered"]) == problem["reply"]
    assert "".join(model.stream(problem["rendered"])) == problem["reply"]
