"""Inputs that brought down, or opened, other servers of this kind, by the names of reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from moesaic.engine.engine import Engine
from moesaic.server.app import ROUTES, make_app
from moesaic.server.errors import LONGEST_MESSAGE, LONGEST_NOT_FOUND

PATHS = {route.path for route in ROUTES}
CHAT = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


def sampling(**params: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling_params": {"max_new_tokens": 2, **params}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": CHAT, "max_tokens": 2, **fields}


def tool(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


# name: (path, body). What is refused is refused with a 4xx; nothing is answered with a 5xx.
REFUSED: dict[str, tuple[str, Any]] = {
    "CVE-2024-8768 empty prompt": ("/generate", {"text": ""}),
    "CVE-2024-8768 no tokens": ("/generate", {"input_ids": []}),
    "CVE-2024-8768 no tokens in a list": ("/generate", {"input_ids": [[]]}),
    "CVE-2024-8939 best_of": ("/generate", sampling(best_of=10**6)),
    "CVE-2024-8939 n": ("/generate", sampling(n=10**6)),
    "n times prompts": ("/generate", {"text": ["x"] * 64, "sampling_params": {"n": 128}}),
    "n true": ("/generate", sampling(n=True)),
    "sglang 3341 float top_k": ("/generate", sampling(top_k=1.5)),
    "float n": ("/generate", sampling(n=1.0)),
    "NaN as text": ("/generate", sampling(temperature="NaN")),
    "NaN": ("/generate", '{"text": "x", "sampling_params": {"temperature": NaN}}'),
    "Infinity": ("/generate", '{"text": "x", "sampling_params": {"top_p": Infinity}}'),
    "1e400": ("/generate", '{"text": "x", "sampling_params": {"top_p": 1e400}}'),
    "integer of 5000 digits": (
        "/generate",
        '{"text": "x", "sampling_params": {"top_k": 1' + "0" * 5000 + "}}",
    ),
    "lone surrogate": ("/generate", '{"text": "\\ud800"}'),
    "lone surrogate in stop": (
        "/generate",
        '{"text": "x", "sampling_params": {"stop": "\\udfff"}}',
    ),
    "20000 brackets": ("/generate", '{"text": ' + "[" * 20_000),
    "20000 brackets that close": ("/generate", '{"text": ' + "[" * 20_000 + "]" * 20_000 + "}"),
    "token out of the vocabulary": ("/generate", {"input_ids": [10**9]}),
    "negative token": ("/generate", {"input_ids": [-1]}),
    "token of 30 digits": ("/generate", {"input_ids": [10**30]}),
    "prompt longer than the context": ("/generate", {"input_ids": [1] * 10_000}),
    "logit_bias out of the vocabulary": ("/generate", sampling(logit_bias={"999999999": 1})),
    "logit_bias of everything": (
        "/generate",
        sampling(logit_bias={str(k): 1 for k in range(2000)}),
    ),
    "logit_bias key of 5000 digits": ("/generate", sampling(logit_bias={"1" * 5000: 1})),
    "stop of thousands": ("/generate", sampling(stop=["x"] * 5000)),
    "stop of a megabyte": ("/generate", sampling(stop="x" * 1_000_000)),
    "max_new_tokens negative": ("/generate", sampling(max_new_tokens=-1)),
    "max_new_tokens beyond int64": ("/generate", sampling(max_new_tokens=2**64)),
    "all logprobs of everything": (
        "/generate",
        {**sampling(max_new_tokens=1900, n=64), "return_logprob": True, "top_logprobs_num": 500},
    ),
    "rid of a megabyte": ("/generate", {"text": "x", "rid": "x" * 1_000_000}),
    "CVE-2025-62164 prompt_embeds": ("/generate", {"text": "x", "prompt_embeds": "gASVKAAAAA=="}),
    "CVE-2025-6242 image URL": (
        "/generate",
        {"text": "x", "image_data": "http://169.254.169.254/"},
    ),
    "lora path outside": ("/generate", {"text": "x", "lora_path": "../../etc/passwd"}),
    "custom logit processor": ("/generate", {"text": "x", "custom_logit_processor": "gASV"}),
    "custom logit processor, chat": (
        "/v1/chat/completions",
        chat(custom_logit_processor="gASV"),
    ),
    "CVE-2025-48942 json_schema": ("/generate", sampling(json_schema={"type": "nonsense"})),
    "CVE-2025-48943 regex": ("/generate", sampling(regex="[")),
    "sglang 17313 regex": ("/generate", sampling(regex="(?<name")),
    "sglang 19270 ebnf": ("/generate", sampling(ebnf="root ::= (")),
    "CVE-2025-48943 guided regex, chat": ("/v1/chat/completions", chat(regex="[")),
    "CVE-2025-48942 schema, chat": ("/v1/chat/completions", chat(response_format=SCHEMA)),
    "CVE-2025-48944 tool type": (
        "/v1/chat/completions",
        chat(tools=tool({"type": "nonsense"}), tool_choice="required"),
    ),
    "CVE-2025-48944 tool pattern": (
        "/v1/chat/completions",
        chat(
            tools=tool({"properties": {"x": {"type": "string", "pattern": "("}}}),
            tool_choice="required",
        ),
    ),
    "CVE-2025-61620 chat_template": (
        "/v1/chat/completions",
        chat(chat_template="{% for a in range(10**9) %}{% endfor %}"),
    ),
    "CVE-2025-62426 chat_template_kwargs": (
        "/v1/chat/completions",
        chat(chat_template_kwargs={"chat_template": "{{ 1 }}", "tokenize": True}),
    ),
    "CVE-2026-5760 template of a model": ("/v1/rerank", {"query": "{{ ''.__class__ }}"}),
    "CVE-2025-10164 tensors": ("/update_weights_from_tensor", {"serialized": "gASV"}),
    "vllm scale below the minimum": ("/scale_elastic_ep", {"new_data_parallel_size": 0}),
    "messages empty": ("/v1/chat/completions", chat(messages=[])),
    "messages of numbers": ("/v1/chat/completions", chat(messages=[1])),
}
# What others died of, and is a good request.
SERVED: dict[str, tuple[str, Any]] = {
    "vllm 52693 no new tokens": ("/generate", sampling(max_new_tokens=0)),
    "sglang 6521 echo without new tokens": (
        "/generate",
        {**sampling(max_new_tokens=0), "return_logprob": True, "logprob_start_len": 0},
    ),
    "control characters": ("/generate", {**sampling(), "text": "\x00\x01\x7f"}),
    "keys that come twice": ("/generate", '{"text": "y", "text": "x"}'),
    "sglang 19270 ebnf of nothing": ("/generate", sampling(ebnf="root ::= ")),
    "null everywhere": ("/generate", {"text": "x", "sampling_params": None, "rid": None}),
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        Engine(model_path="tiny:qwen3_moe", num_threads=1, log_level="warning") as engine,
        TestClient(make_app(engine), base_url="http://localhost") as client,
    ):
        yield client


def send(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    return client.post(path, content=body if isinstance(body, str) else json.dumps(body))


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(client: httpx.Client, name: str) -> None:
    path, body = REFUSED[name]
    answer = send(client, path, body)
    assert answer.status_code == 400 if path in PATHS else 404, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    longest = LONGEST_MESSAGE if path in PATHS else LONGEST_NOT_FOUND
    assert len(error["message"]) <= longest + 2
    assert client.get("/health_generate").status_code == 200


@pytest.mark.parametrize("name", SERVED)
def test_is_served(client: httpx.Client, name: str) -> None:
    answer = send(client, *SERVED[name])
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["finish_reason"]["type"] in ("length", "stop")


def test_no_route_takes_code_or_tensors() -> None:
    fields = {name for route in ROUTES for name in getattr(route.body, "__struct_fields__", ())}
    assert not fields & {"prompt_embeds", "chat_template", "serialized_named_tensors"}
