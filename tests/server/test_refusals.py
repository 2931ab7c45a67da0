"""Messages of refusals: each names the route's own field, the value, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moesaic.engine.engine import Engine
from tests.server.serving import served

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "Hello"}]
ARGUMENTS = {"properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    flags: Any = {"served_model_name": "mosaic", "num_threads": 1, "log_level": "warning"}
    with (
        Engine(model_path="tiny:qwen3_moe", **flags) as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def refusal(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def forced(path: str, schema: Any) -> dict[str, Any]:
    """A request that must call the tool f, whose arguments have this schema."""
    if path == MESSAGES:
        tool: Any = {"name": "f", "input_schema": schema}
        choice: Any = {"type": "tool", "name": "f"}
        return {"messages": USER, "max_tokens": 90, "tools": [tool], "tool_choice": choice}
    if path == RESPONSES:
        tool, choice = {"type": "function", "name": "f"}, {"type": "function", "name": "f"}
        return {"input": "Hello", "tools": [{**tool, "parameters": schema}], "tool_choice": choice}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"messages": USER, "max_tokens": 90, "tools": [tool], "tool_choice": NAMED}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 3},
        {"type": "integer"},
        {"type": "array", "items": {}},
        {"type": "null"},
        {"type": ["string", "null"]},
        {"type": 5},
        {"enum": [1, "a"]},
        {"const": None},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"allOf": [{"type": "object"}, {"type": "string"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
    ],
)
def test_parameters_that_no_object_fits(http: httpx.Client, path: str, schema: Any) -> None:
    error = refusal(http, path, forced(path, schema))
    name = "input_schema" if path == MESSAGES else "parameters"
    assert f"tool 'f': {name} must describe an object" in error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object", "null"], **ARGUMENTS},
        {"anyOf": [{"type": "string"}, {"type": "object", **ARGUMENTS}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["null", "object"], **ARGUMENTS}}},
    ],
)
def test_parameters_that_more_than_objects_fit(http: httpx.Client, schema: Any) -> None:
    """A forced call writes the object."""
    body = {**forced(CHAT, schema), "chat_template_kwargs": {"enable_thinking": False}}
    [choice] = http.post(CHAT, json=body).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert choice["message"]["content"] is None


def test_parameters_with_a_long_chain_of_references(http: httpx.Client) -> None:
    chain = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(3000)}
    error = refusal(http, CHAT, forced(CHAT, {"$ref": "#/$defs/a0", "$defs": chain}))
    assert "tool 'f'" in error["message"] or "tools" in error["message"]


NO_TEXT = {"max_tokens": 4, "messages": USER}
ADVICE: dict[str, tuple[str, dict[str, Any], str]] = {
    "text": ("/tokenize", {"text": "Hi"}, "give it as prompt to /tokenize"),
    "strs": ("/tokenize", {"prompt": "Hi", "return_token_strs": True}, "/detokenize"),
    "item": (RESPONSES, {"input": [{}]}, "an item in input needs a type or a role"),
    "empty": (RESPONSES, {"input": ""}, "input is empty"),
    "no items": (RESPONSES, {"input": []}, "input is empty"),
    "least": (
        CHAT,
        {"messages": USER, "min_tokens": 9999, "max_tokens": 2},
        "min_tokens=9999 is not possible: give at most max_tokens=2, or raise that",
    ),
    "stop": (MESSAGES, {**NO_TEXT, "stop_sequences": [""]}, "stop_sequences='' is not possible"),
    "negative": (CHAT, {"messages": USER, "max_tokens": -1}, "max_tokens=-1"),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_holds_on_the_route(http: httpx.Client, case: str) -> None:
    path, body, said = ADVICE[case]
    message = refusal(http, path, body)["message"]
    assert said in message
    assert "None" not in message and "new_tokens" not in message


def test_a_short_grammar_does_not_hide_letters_of_the_message(http: httpx.Client) -> None:
    body = {"text": "Hi", "sampling_params": {"ebnf": "x"}}
    assert "Expected ::= at line 1" in refusal(http, "/generate", body)["message"]


def test_blanks_around_an_unknown_field_are_shown(http: httpx.Client) -> None:
    message = refusal(http, CHAT, {"messages": USER, "temperature ": 1})["message"]
    assert "'temperature '" in message and "did you mean 'temperature'?" in message


def test_warnings_name_the_field_of_the_route(http: httpx.Client) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    form = {"type": "json_schema", "schema": schema}
    sent = {
        RESPONSES: {"input": "Hi", "text": {"format": {"name": "a", **form}}},
        MESSAGES: {**NO_TEXT, "output_config": {"format": form}},
    }
    for path, name in ((RESPONSES, "text.format"), (MESSAGES, "output_config.format")):
        answer = http.post(path, json=sent[path])
        assert answer.headers["x-moesaic-warning"].startswith(f"{name}: ignored uniqueItems")


@pytest.mark.parametrize(
    ("reference", "said"), [("#/nope", "'#/nope'"), ("http://x/y", "to another document")]
)
def test_a_reference_that_leads_nowhere(http: httpx.Client, reference: str, said: str) -> None:
    body = {"text": "Hi", "sampling_params": {"json_schema": json.dumps({"$ref": reference})}}
    message = refusal(http, "/generate", body)["message"]
    assert f"$ref {said} leads nowhere" in message
    assert "references go to the schema itself only" in message


def test_a_tool_that_cannot_be_forced_is_named(http: httpx.Client) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in (("good", {"type": "object", **ARGUMENTS}), ("bad", bad))
    ]
    error = refusal(http, CHAT, {"messages": USER, "tools": tools})
    assert error["param"] == "tools"
    assert error["message"].startswith("tool 'bad' is not possible: Unimplemented keys:")
