"""instructor: models of pydantic from a chat, by schema and by tool."""

from __future__ import annotations

import json
from typing import Any, Literal

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field


class Count(BaseModel):
    item: Literal["lamp", "vase"]
    number: int = Field(ge=0, le=99)


def at(server: Any, mode: instructor.Mode) -> Any:
    client = OpenAI(base_url=server.v1, api_key="-", max_retries=0, timeout=120)
    return instructor.from_openai(client, mode=mode)


def ask(client: Any, server: Any, **more: Any) -> tuple[Any, Any]:
    return client.chat.completions.create_with_completion(
        model=server.model,
        messages=[{"role": "user", "content": "How many lamps are there?"}],
        max_retries=0,
        **more,
    )


def test_json_schema(house: Any) -> None:
    client = at(house, instructor.Mode.JSON_SCHEMA)
    count, answer = ask(client, house, response_model=Count)
    assert isinstance(count, Count)
    assert json.loads(answer.choices[0].message.content) == count.model_dump()
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT])
def test_tools(tiny: Any, mode: Any) -> None:
    count, answer = ask(at(tiny, mode), tiny, response_model=Count, max_tokens=400)
    assert isinstance(count, Count)
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "Count" and json.loads(call.arguments) == count.model_dump()


def test_partial(house: Any) -> None:
    client = at(house, instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(
        model=house.model,
        messages=[{"role": "user", "content": "How many lamps are there?"}],
        response_model=Count,
    )
    assert last.item in ("lamp", "vase") and 0 <= last.number <= 99
