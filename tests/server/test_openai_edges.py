"""Forms that cannot be had, streams that fail, ids of several answers, words of other servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from moesaic.engine.engine import Engine
from moesaic.server.client_warnings import HEADER, header_value
from moesaic.server.openai.choices import ChatAnswer
from tests.server.openai_client import MESSAGES, Json
from tests.server.serving import held, pieces_of, served, wait_until, wait_until_idle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
LONG = {"max_tokens": 1900, "ignore_eos": True}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["age"],
    "additionalProperties": False,
}


def of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **schema}}}


# What is sent, whether it can be had, and a piece of it that no message may repeat.
FORMS: list[tuple[dict[str, Any], bool, str]] = [
    ({"ebnf": 'x ::= "a"'}, False, "::= "),
    ({"ebnf": "start: /sec-ret/"}, False, "sec-ret"),
    ({"ebnf": "root ::= root"}, False, "::="),
    ({"ebnf": 'root ::= "a" | "b"'}, True, ""),
    ({"json_schema": "{bad"}, False, "bad"),
    ({"json_schema": "5"}, False, "{"),
    ({"json_schema": "true"}, True, ""),
    (of_schema({"schema": True}), True, ""),
    (of_schema({"schema": False}), False, "{"),
    (of_schema({"schema": {"$ref": "http://sec.ret/x"}}), False, "sec.ret"),
    (of_schema({"schema": {"type": "string", "pattern": "(sec-ret"}}), False, "sec-ret"),
    ({"regex": ""}, True, ""),
    ({"regex": "sec-ret\\"}, False, "sec-ret"),
    ({"regex": "(sec-ret"}, False, "sec-ret"),
    ({"regex": "a\\\\"}, True, ""),
    ({"guided_regex": "(sec-ret"}, False, "sec-ret"),
    ({"guided_choice": []}, True, ""),
    ({"structured_outputs": {"grammar": "sec-ret"}}, False, "sec-ret"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, False, "'b'"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="tiny:qwen3_moe", num_threads=1, log_level="warning") as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def harmony() -> Iterator[tuple[Engine, httpx.Client]]:
    with (
        Engine(model_path="tiny:gpt_oss", num_threads=1, log_level="warning") as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield engine, client


def chat(http: httpx.Client, thinking: bool = False, **body: Any) -> Any:
    kwargs = {"enable_thinking": thinking}
    sent = {"messages": USER, "max_tokens": 8, "seed": 1, "chat_template_kwargs": kwargs, **body}
    return http.post(CHAT, json=sent)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form[0])[:40])
def test_one_form_has_one_verdict(
    http: httpx.Client, harmony: tuple[Engine, httpx.Client], form: Any
) -> None:
    """Whatever is put around it: nothing, reasoning, channels."""
    body, possible, secret = form
    answers = [
        chat(http, False, **body),
        chat(http, True, **body),
        chat(harmony[1], **body),
        http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 4, **body}),
    ]
    assert [answer.status_code for answer in answers] == [200 if possible else 400] * 4
    for error in [] if possible else [answer.json()["error"] for answer in answers]:
        (field,) = body
        assert error["param"] == field and error["type"] == "invalid_request_error"
        assert error["message"].startswith(field)
        assert secret not in error["message"] and "lark" not in error["message"]


def test_tools_that_cannot_be_had(http: httpx.Client) -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "http://sec.ret/x"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = chat(http, tools=[tool], tool_choice="required")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "sec.ret" not in error["message"] and "lark" not in error["message"]


def test_strict_schemas_with_one_of(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}},
    }
    function = {"name": "f", "parameters": schema, "strict": True}
    form = {"name": "f", "schema": schema, "strict": True}
    for field, value in {
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": form},
    }.items():
        answer = chat(http, **{field: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert "are not supported: use anyOf (leave it out, or drop strict" in error["message"]
        assert "coerce" not in error["message"]


TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "maxItems": 1, "uniqueItems": True}},
}
IGNORED = "ignored uniqueItems at $.properties.tags"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_enforced_is_a_warning(http: httpx.Client, stream: bool) -> None:
    def warning(**body: Any) -> Any:
        answer = chat(http, stream=stream, max_tokens=2, **body)
        assert answer.status_code == 200, answer.text
        return answer.headers.get(HEADER)

    def form(strict: bool | None) -> Any:
        return {
            "type": "json_schema",
            "json_schema": {"name": "t", "schema": TAGS, "strict": strict},
        }

    def tools(strict: bool | None) -> Any:
        return [
            {"type": "function", "function": {"name": "f", "parameters": TAGS, "strict": strict}}
        ]

    assert warning(response_format=form(None)) == f"response_format: {IGNORED}"
    assert warning(response_format=form(False)) == f"response_format: {IGNORED}"
    assert warning(guided_json=json.dumps(TAGS)) == f"guided_json: {IGNORED}"
    assert warning(tools=tools(None), tool_choice="required") == f"tools: f: {IGNORED}"
    assert warning(tools=tools(None)) is None
    assert warning(json_schema=PERSON) is None
    sent = {"prompt": "x", "max_tokens": 2, "json_schema": TAGS, "stream": stream}
    assert http.post(COMPLETIONS, json=sent).headers[HEADER] == f"json_schema: {IGNORED}"
    for strict in (
        {"response_format": form(True)},
        {"tools": tools(True), "tool_choice": "required"},
        {"tools": tools(True)},
    ):
        answer = chat(http, stream=stream, **strict)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, next(iter(strict)))
        assert '["uniqueItems"] (leave it out, or drop strict' in error["message"]
        assert HEADER not in answer.headers


def test_warnings_are_short_and_printable() -> None:
    assert header_value(["a: é\r\nb", "c", "c"]) == "a: \\xe9??b; c"
    long = header_value(["x" * 600, "y" * 600])
    assert len(long) == 1000 and long.endswith("y...")


def test_words_of_vllm(http: httpx.Client) -> None:
    def text(**body: Any) -> str:
        answer = chat(http, max_tokens=60, **body).json()["choices"][0]
        assert answer["finish_reason"] == "stop"
        return str(answer["message"]["content"])

    choices = ["a.b", "(c|d)", "e/f\n", "^g$", "é-\\"]
    for seed in range(6):
        assert text(guided_choice=choices, seed=seed) in choices
        assert text(structured_outputs={"choice": choices}, seed=seed) in choices
    for body in (
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"structured_outputs": {"json": PERSON}},
    ):
        jsonschema.validate(json.loads(text(**body)), PERSON)
    for body in ({"guided_regex": "[0-9]{3}"}, {"structured_outputs": {"regex": "[0-9]{3}"}}):
        assert re.fullmatch("[0-9]{3}", text(**body))
    grammar = 'root ::= "xy"'
    for body in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
        assert text(**body) == "xy"
    assert chat(http, request_id="mine").json()["id"] == "mine"
    assert chat(http, request_id="mine", rid="yours").json()["error"]["param"] == "request_id"
    error = http.post(COMPLETIONS, json={"prompt": "x", "best_of": 2}).json()["error"]
    assert error["param"] == "best_of" and "must not exceed n" in error["message"]


def test_generation_prompts(http: httpx.Client, engine: Engine) -> None:
    assert engine.tokenizer is not None
    for asks in (True, False):
        text = engine.tokenizer.apply_chat_template(USER, asks)
        number = len(engine.tokenizer.encode(text, False))
        raw = http.post(
            CHAT, json={"messages": USER, "max_tokens": 1, "add_generation_prompt": asks}
        ).json()
        assert raw["usage"]["prompt_tokens"] == number
    begun = [*USER, {"role": "assistant", "content": "So"}]
    same = [
        chat(http, messages=begun, continue_final_message=True, temperature=0, **extra).json()
        for extra in ({}, {"add_generation_prompt": False})
    ]
    assert same[0]["choices"] == same[1]["choices"]
    both = chat(http, messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert both.json()["error"]["param"] == "add_generation_prompt"


def test_reasoning_that_is_left_out_and_counted(http: httpx.Client) -> None:
    """Characters of which the model has made but a part become three tokens each in the text."""
    body = {"regex": "x", "max_tokens": 40, "temperature": 1.5}
    begun = [*USER, {"role": "assistant", "content": "<think>\n"}]
    asked = {**body, "messages": begun, "continue_final_message": True}
    for seed in range(4):
        shown = chat(http, True, seed=seed, **asked).json()
        hidden = chat(http, True, seed=seed, include_reasoning=False, **asked).json()
        message = shown["choices"][0]["message"]
        assert message["reasoning_content"]
        left = {key: value for key, value in message.items() if key != "reasoning_content"}
        assert hidden["choices"][0]["message"] == left and hidden["usage"] == shown["usage"]
        used = shown["usage"]
        counted = used["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < counted <= used["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
def test_a_stream_that_fails_before_its_first_token_has_a_status(
    http: httpx.Client, engine: Engine, path: str
) -> None:
    prompt = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "x"}, "/generate": {"text": "x"}}
    with ThreadPoolExecutor() as pool:
        with held(engine):
            answer = pool.submit(http.post, path, json={**prompt[path], "stream": True})
            wait_until(lambda: len(engine._inflight) == 1)
            engine._thread.submit(lambda core: core.fail_all("a fault for this test"))
        response = answer.result()
    assert response.status_code == 500
    assert "a fault for this test" in response.json()["error"]["message"]


def test_a_failure_among_several_streams_is_one_of_them(http: httpx.Client, engine: Engine) -> None:
    with ThreadPoolExecutor() as pool:
        with held(engine):
            sent = {"text": ["x", "y"], "stream": True}
            answer = pool.submit(http.post, "/generate", json=sent)
            wait_until(lambda: len(engine._inflight) == 2)
            engine._thread.submit(lambda core: core.fail_all("a fault for this test"))
        response = answer.result()
    assert response.status_code == 200
    found = [piece["meta_info"]["finish_reason"]["type"] for piece in pieces_of(response)]
    assert found == ["abort", "abort"]


def test_a_stream_is_never_cut(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("sec-ret")

    monkeypatch.setattr(ChatAnswer, "chunks", fail)
    monkeypatch.setattr("moesaic.server.native._Outputs.event", fail)
    for path, body in ((CHAT, {"messages": USER}), ("/generate", {"text": "x"})):
        response = http.post(path, json={**body, "stream": True})
        (last,) = pieces_of(response)
        assert last["error"]["type"] == "server_error" and "sec-ret" not in response.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_abort_ends_all_samples(http: httpx.Client, engine: Engine, path: str) -> None:
    body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": ["a", "b"]}
    with ThreadPoolExecutor() as pool:
        with held(engine):
            answer = pool.submit(http.post, path, json={**body, **LONG, "n": 3, "rid": "job"})
            short = {"messages": USER, "max_tokens": 8}
            other = pool.submit(http.post, CHAT, json={**short, "rid": "job-0-7"})
            number = 3 if path == CHAT else 6
            wait_until(lambda: len(engine._inflight) == number + 1)
            told = {name: http.post("/abort_request", json={"rid": name}) for name in ("jo", "job")}
            assert told["jo"].json() == {"status": "ok", "aborted": 0}
            assert told["job"].json() == {"status": "ok", "aborted": number}
            taken = http.post(CHAT, json={**short, "rid": "job-0-7"})
            assert (taken.status_code, taken.json()["error"]["code"]) == (400, "rid_in_use")
        raw, rest = answer.result().json(), other.result().json()
    kind: Any = ChatCompletion if path == CHAT else Completion
    kind.model_validate_json(json.dumps(raw), strict=True)
    assert [choice["finish_reason"] for choice in raw["choices"]] == ["length"] * number
    assert raw["usage"]["completion_tokens"] < 100
    assert rest["id"] == "job-0-7" and rest["usage"]["completion_tokens"] > 0
    wait_until_idle(engine)


def test_an_abort_of_all(http: httpx.Client, engine: Engine) -> None:
    with ThreadPoolExecutor() as pool:
        with held(engine):
            asked = [
                pool.submit(http.post, CHAT, json={"messages": USER, **LONG}) for _ in range(3)
            ]
            wait_until(lambda: len(engine._inflight) == 3)
            told = http.post("/abort_request", json={"abort_all": True})
            assert told.json() == {"status": "ok", "aborted": 3}
        used = [one.result().json()["usage"]["completion_tokens"] for one in asked]
    assert max(used) < 100
    assert http.post("/abort_request", json={"rid": ""}).json()["error"]["param"] == "rid"


def test_who_may_end_all_and_flush(http: httpx.Client) -> None:
    flags: Any = {"api_key": "user", "admin_api_key": "admin", "num_threads": 1}
    with (
        Engine(model_path="tiny:qwen3_moe", log_level="warning", **flags) as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for key, status in (("user", 403), ("admin", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            one = client.post("/abort_request", json={"rid": "x"}, headers=headers)
            every = client.post("/abort_request", json={"abort_all": True}, headers=headers)
            flushed = client.get("/flush_cache", headers=headers)
            assert (one.status_code, every.status_code, flushed.status_code) == (
                200,
                status,
                status,
            )
    assert http.get("/flush_cache").json().keys() == {"freed_pages"}


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param("required", marks=pytest.mark.slow),
        {"type": "function", "function": {"name": "f"}},
    ],
)
def test_calls_of_gpt_oss_are_never_left_out(
    harmony: tuple[Engine, httpx.Client], choice: Any
) -> None:
    parameters = {**PERSON, "properties": {"age": {"type": "integer", "maximum": 9, "minimum": 0}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": USER, "tools": [tool], "tool_choice": choice, "n": 40, "max_tokens": 300}
    raw = harmony[1].post(CHAT, json={**body, "seed": 2}).json()
    reasons = [one["finish_reason"] for one in raw["choices"]]
    assert set(reasons) == {"tool_calls", "length"} and reasons.count("tool_calls") > 30
    for one in raw["choices"]:
        if one["finish_reason"] == "tool_calls":
            (call,) = one["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)


def test_no_answer_ends_within_its_grammar(engine: Engine) -> None:
    """A token that ends answers is allowed where it completes the grammar, and nowhere else."""
    assert engine.tokenizer is not None
    (eos,) = engine.tokenizer.eos_ids

    def answer(lark: str, seed: int) -> Any:
        params = {"lark": lark, "max_new_tokens": 20, "sampling_seed": seed}
        return engine.generate("x", {**params, "skip_special_tokens": False})

    for seed in range(5):
        assert answer(f'start: "a" (<[{eos}]> "b" | "c")', seed)["text"].startswith("ac")
        assert answer(f'start: "a" <[{eos}]>', seed)["output_ids"][-1] == eos
    with pytest.raises(RuntimeError, match="requires an end token before its end"):
        answer(f'start: "a" <[{eos}]> "b"', 0)


def test_what_a_message_repeats(http: httpx.Client) -> None:
    """Plain short words at most."""
    secret = "sec-ret 42"
    for body in (
        {"messages": [{"role": secret, "content": "x"}]},
        {"messages": USER, "logit_bias": {secret: 1}},
        {"messages": USER, "tool_choice": secret},
        {"messages": USER, "rid": "x", secret: 1},
    ):
        answer = http.post(CHAT, json=body)
        assert answer.status_code == 400 and secret not in answer.text


LINE_ENDS = "a\u2028b\u2029c\u0085d"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
def test_line_ends_of_unicode_do_not_end_an_event(http: httpx.Client, path: str) -> None:
    """httpx's `iter_lines` splits decoded text there."""
    params = {"regex": LINE_ENDS, "temperature": 0}
    limit = {"max_new_tokens" if path == "/generate" else "max_tokens": 40}
    bodies: dict[str, Json] = {
        CHAT: {"messages": MESSAGES, **params, **limit},
        COMPLETIONS: {"prompt": "x", **params, **limit},
        "/generate": {"text": "x", "sampling_params": params | limit},
    }
    with http.stream("POST", path, json={**bodies[path], "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    if path == "/generate":
        assert events[-1]["text"] == LINE_ENDS
        return
    choices = [event["choices"][0] for event in events]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    assert "".join(filter(None, texts)) == LINE_ENDS
