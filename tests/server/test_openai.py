"""The OpenAI API of a server process with two expert-parallel ranks. The oracles are the openai
client, its types, which are stricter than the client itself, and transformers for templates."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import chat as chat_types
from transformers import AutoTokenizer

from moesaic.models.tiny import materialise
from tests.server.openai_bodies import TOOLS, USER, WRONG_CHATS, WRONG_COMPLETIONS
from tests.server.openai_client import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    MESSAGES,
    MODEL,
    bytes_of,
    check,
    contents,
    generate,
    openai_server,
    post,
    refused,
    stream_chunks,
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with openai_server() as url:
        yield url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(materialise(MODEL))


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.model_extra["max_model_len"]) == (MODEL, "model", 2048)
    assert client.models.retrieve(MODEL).id == MODEL
    check(http.get(f"/v1/models/{MODEL}").text)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_chat_answers_as_generate_does(
    client: openai.OpenAI, http: httpx.Client, tokenizer: Any
) -> None:
    expected = generate(http, tokenizer)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == expected["text"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected["meta_info"]["prompt_tokens"]
    assert (answer.usage.completion_tokens, answer.usage.total_tokens - 12) == (
        12,
        answer.usage.prompt_tokens,
    )
    raw = post(http, CHAT, messages=MESSAGES, **GREEDY)
    assert raw["choices"][0]["message"] == {
        "role": "assistant",
        "content": expected["text"],
        "refusal": None,
    }
    assert raw["id"].startswith("chatcmpl-")


def test_chat_stream(client: openai.OpenAI, http: httpx.Client, tokenizer: Any) -> None:
    expected = generate(http, tokenizer, sampling_params={"max_new_tokens": 40})
    body: Any = GREEDY | {"max_tokens": 40}
    pieces = list(
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **body)
    )
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == expected["text"]
    chunks = stream_chunks(http, CHAT, messages=MESSAGES, **body)
    assert contents(chunks) == {0: expected["text"]}
    assert all("usage" not in chunk for chunk in chunks)
    assert len(chunks) >= 3


def test_usage_in_streams(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "n": 3, **GREEDY}
    whole = post(http, CHAT, **body)["usage"]
    details = whole.pop("prompt_tokens_details")
    assert whole["completion_tokens"] == 36
    assert 0 < details["cached_tokens"] < whole["prompt_tokens"]
    chunks = stream_chunks(http, CHAT, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert whole.items() <= chunks[-1]["usage"].items()
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, prompt in ((CHAT, {}), (COMPLETIONS, {"prompt": "a"})):
        sent = prompt | {"n": 3, **GREEDY} if prompt else body
        chunks = stream_chunks(http, path, **sent, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 36


def test_routed_experts(client: openai.OpenAI, http: httpx.Client, tokenizer: Any) -> None:
    """The first choice gives them; a stream has them in one chunk behind all choices."""
    asked: Any = {"return_routed_experts": True, "routed_experts_start_len": 3}
    expected = generate(http, tokenizer, **asked)["meta_info"]["routed_experts"]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body=asked, **GREEDY
    )
    assert answer.model_extra == {"sglext": {"routed_experts": expected}}
    ids = np.frombuffer(base64.b64decode(expected), "<i4").reshape(-1, 2, 2)
    assert answer.usage is not None and len(ids) == answer.usage.total_tokens - 1 - 3
    prompt = {"prompt": tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)}
    prompt["prompt"] = [*prompt["prompt"]["input_ids"]]
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, prompt)):
        options = {"stream_options": {"include_usage": True}}
        whole = post(http, path, n=2, **body, **GREEDY, **asked)
        assert whole["sglext"] == {"routed_experts": expected} and len(whole["choices"]) == 2
        *chunks, last, usage = stream_chunks(http, path, n=2, **body, **GREEDY, **asked, **options)
        assert (last["choices"], last["sglext"]) == ([], {"routed_experts": expected})
        assert (last["usage"], usage["usage"]["completion_tokens"]) == (None, 24)
        assert all("sglext" not in chunk and chunk["choices"] for chunk in chunks)
        assert "sglext" not in post(http, path, **body, **GREEDY, return_routed_experts=False)


def test_async_client_with_many_streams(url: str, http: httpx.Client) -> None:
    prompts = [f"tile number {number}" for number in range(8)]

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        message: Any = {"role": "user", "content": prompt}
        found = await client.chat.completions.create(
            model=MODEL, messages=[message], stream=True, **GREEDY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in found])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    def alone(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        answer = post(http, CHAT, messages=messages, **GREEDY)
        return str(answer["choices"][0]["message"]["content"])

    assert asyncio.run(ask_all()) == [alone(prompt) for prompt in prompts]


@pytest.mark.parametrize("seed", [7, -1, 2**64 + 5])
def test_samples_and_seeds(client: openai.OpenAI, http: httpx.Client, seed: int) -> None:
    body: Any = {"n": 4, "seed": seed, "max_tokens": 12, "temperature": 1.0}
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, **body)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert contents(stream_chunks(http, CHAT, messages=MESSAGES, **body)) == dict(enumerate(texts))
    other = post(http, CHAT, messages=MESSAGES, **body | {"seed": seed + 1})
    assert other["choices"][0]["message"]["content"] != texts[0]


def test_chat_logprobs_are_those_of_generate(
    client: openai.OpenAI, http: httpx.Client, tokenizer: Any
) -> None:
    expected = generate(http, tokenizer, return_logprob=True, top_logprobs_num=3)["meta_info"]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    tokens = [(logprob, token) for logprob, token, _ in expected["output_token_logprobs"]]
    for (logprob, token), entry in zip(tokens, found.content, strict=True):
        assert entry.logprob == pytest.approx(logprob, abs=1e-4)
        assert bytes(entry.bytes or ()) == bytes_of(tokenizer, token)
    tops = expected["output_top_logprobs"]
    for row, entry in zip(tops, found.content, strict=True):
        values = [top.logprob for top in entry.top_logprobs]
        assert values == pytest.approx([logprob for logprob, _, _ in row], abs=1e-4)
        named = [bytes(top.bytes or ()) for top in entry.top_logprobs]
        assert named == [bytes_of(tokenizer, token) for _, token, _ in row]
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **GREEDY}
    chunks = stream_chunks(http, CHAT, **body)
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    streamed = [entry["bytes"] for part in parts if part for entry in part["content"]]
    assert streamed == [entry.bytes for entry in found.content]
    text = b"".join(bytes(piece) for piece in streamed).decode("utf-8", "replace")
    assert text == contents(chunks)[0] == answer.choices[0].message.content


def test_impossible_tokens_have_a_finite_logprob(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    answer = post(http, CHAT, **body, logit_bias={"70": 1e6})
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[ord("g")]] * 3
    values = [top["logprob"] for entry in entries for top in entry["top_logprobs"]]
    assert all(-9999.0 <= value <= 0 for value in values)


def test_logit_bias_stop_and_lengths(http: httpx.Client) -> None:
    bias = {"logit_bias": {"64": 100}, "temperature": 0, "messages": MESSAGES}  # a

    def answer(**body: Any) -> tuple[str, str, int]:
        raw = post(http, CHAT, **bias, **body)
        choice = raw["choices"][0]
        used = raw["usage"]["completion_tokens"]
        return choice["message"]["content"], choice["finish_reason"], used

    assert answer(max_tokens=5) == ("aaaaa", "length", 5)
    assert answer(max_completion_tokens=4) == ("aaaa", "length", 4)
    assert answer(max_tokens=0) == ("", "length", 0)
    assert answer(max_tokens=9, stop="aaa") == ("", "stop", 3)
    assert answer(max_tokens=9, stop=["x", "aaa"], no_stop_trim=True) == ("aaa", "stop", 3)
    assert answer(max_tokens=9, stop_token_ids=[64]) == ("", "stop", 1)
    assert answer(max_tokens=9, stop_token_ids=[64], min_tokens=4)[2] >= 4
    eos = {"logit_bias": {"256": 100}, "temperature": 0, "messages": MESSAGES, "max_tokens": 4}
    assert post(http, CHAT, **eos)["choices"][0]["finish_reason"] == "stop"
    ignored = post(http, CHAT, **eos, ignore_eos=True, skip_special_tokens=False)
    assert ignored["choices"][0]["message"]["content"] == "<|end|>" * 4
    hidden = post(http, CHAT, **eos, ignore_eos=True)["choices"][0]
    assert (hidden["message"]["content"], hidden["finish_reason"]) == ("", "length")


def test_without_a_limit_the_context_is_filled(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x" * 2020}]
    raw = post(http, CHAT, messages=messages, temperature=0, ignore_eos=True)
    used = raw["usage"]
    assert used["total_tokens"] == 2048 and 0 < used["completion_tokens"] < 28
    assert raw["choices"][0]["finish_reason"] == "length"


def test_sampling_fields_reach_the_engine(
    client: openai.OpenAI, http: httpx.Client, tokenizer: Any
) -> None:
    fields = {"frequency_penalty": 1.5, "presence_penalty": -0.5, "top_p": 0.7, "temperature": 0.9}
    beyond = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}
    given = {**fields, **beyond, "sampling_seed": 3, "max_new_tokens": 20}
    expected = generate(http, tokenizer, sampling_params=given)["text"]
    sent: Any = fields
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=3, max_tokens=20, extra_body=beyond, **sent
    )
    assert answer.choices[0].message.content == expected
    greedy = generate(http, tokenizer)["text"]
    for same in ({"top_p": 0}, {"top_k": 1}, {"temperature": 0, "top_k": 0}):
        raw = post(http, CHAT, messages=MESSAGES, max_tokens=12, **same)
        assert raw["choices"][0]["message"]["content"] == greedy


def test_messages_of_all_kinds(http: httpx.Client, tokenizer: Any) -> None:
    """Parts are joined, and the template sees the rest as it was sent."""
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    messages = [
        {"role": "developer", "content": parts, "name": "boss"},
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "All.", "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "Really?"},
    ]
    plain = [messages[0] | {"content": "Be\nbrief."}, *messages[1:]]
    expected = generate(http, tokenizer, plain)
    raw = post(http, CHAT, messages=messages, **GREEDY)
    assert raw["choices"][0]["message"]["content"] == expected["text"]
    assert raw["usage"]["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]


def test_continue_final_message(http: httpx.Client) -> None:
    whole = post(http, CHAT, messages=MESSAGES, max_tokens=6, logit_bias={"64": 100})
    assert whole["choices"][0]["message"]["content"] == "aaaaaa"
    opening = [*MESSAGES, {"role": "assistant", "content": "aaaa"}]
    rest = post(http, CHAT, messages=opening, continue_final_message=True, **GREEDY)
    assert rest["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] + 4
    assert refused(http, CHAT, messages=MESSAGES, continue_final_message=True)["param"] == (
        "messages"
    )


def test_fields_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    full = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        prompt_cache_key="k",
        safety_identifier="s",
        modalities=["text"],
        response_format={"type": "text"},
        tool_choice="none",
        extra_body={"chat_template_kwargs": {}, "top_k": None, "separate_reasoning": True},
        **GREEDY,
    )
    assert full.choices[0].message.content == plain.choices[0].message.content


def test_completions(client: openai.OpenAI, http: httpx.Client, tokenizer: Any) -> None:
    prompts = ["a mosaic", "of many tiles"]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    sent = {"text": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
    expected = [answer["text"] for answer in http.post("/generate", json=sent).json()]
    for prompt in (prompts, ids):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 32
    for one in (prompts[0], ids[0], [prompts[0]], [ids[0]]):
        raw = post(http, COMPLETIONS, prompt=one, temperature=0)
        assert [choice["text"] for choice in raw["choices"]] == expected[:1]
    chunks = stream_chunks(http, COMPLETIONS, prompt=prompts, temperature=0)
    for index in range(2):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == expected[index]
        assert {choice["finish_reason"] for choice in choices[:-1]} <= {None}
        assert choices[-1]["finish_reason"] == "length"


def test_samples_of_several_prompts(http: httpx.Client) -> None:
    body = {"prompt": ["one", "two"], "n": 3, "seed": 1, "max_tokens": 10, "best_of": 3}
    raw = post(http, COMPLETIONS, **body)
    texts = [choice["text"] for choice in raw["choices"]]
    assert [choice["index"] for choice in raw["choices"]] == [0, 1, 2, 3, 4, 5]
    assert len(set(texts)) == 6
    assert raw["usage"]["prompt_tokens"] == 6 and raw["usage"]["completion_tokens"] == 60
    second = post(http, COMPLETIONS, **body | {"prompt": "two"})
    assert [choice["text"] for choice in second["choices"]] == texts[3:]


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs(http: httpx.Client, tokenizer: Any, as_ids: bool) -> None:
    text = "né<|turn|>x"
    ids = tokenizer(text)["input_ids"]
    asked = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
    params = {"sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    meta = http.post("/generate", json={**asked, **params}).json()["meta_info"]
    scores = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    body = {"prompt": ids if as_ids else text, "echo": True, "logprobs": 2, "temperature": 0}
    (none,) = post(http, COMPLETIONS, max_tokens=0, **body)["choices"]
    assert none["text"] == text
    (some,) = post(http, COMPLETIONS, max_tokens=4, **body)["choices"]
    assert some["text"].startswith(text)
    for choice, number in ((none, 5), (some, 9)):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        values = [logprob for logprob, _, _ in scores[1:number]]
        assert found["token_logprobs"][1:] == pytest.approx(values, abs=1e-4)
        assert found["tokens"][3] == "<|turn|>" and len(found["tokens"]) == number
        assert found["text_offset"][:5] == [0, 1, 1, 2, 10]
        assert all(2 <= len(top) <= 3 for top in found["top_logprobs"][3:4])
    chunks = stream_chunks(http, COMPLETIONS, max_tokens=4, **body)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in streamed) == some["text"]
    for key in ("tokens", "text_offset"):
        joined = [entry for choice in streamed for entry in choice["logprobs"][key]]
        assert joined == some["logprobs"][key]


def test_offsets_point_into_the_text(http: httpx.Client) -> None:
    bias = {str(token): 50 for token in (64, 65, 66, 67)}
    raw = post(http, COMPLETIONS, prompt="x", max_tokens=12, logprobs=0, logit_bias=bias)
    choice = raw["choices"][0]
    pieces = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    assert all(choice["text"].startswith(token, offset) for token, offset in pieces)
    chosen = [{t: v} for t, v in zip(*list(choice["logprobs"].values())[:2], strict=True)]
    assert choice["logprobs"]["top_logprobs"] == chosen


@pytest.mark.parametrize("case", WRONG_CHATS)
def test_wrong_chats_are_refused(http: httpx.Client, case: str) -> None:
    body, param, message = WRONG_CHATS[case]
    for stream in (False, True):
        sent = body if "stream_options" in body else body | {"stream": stream}
        error = refused(http, CHAT, **sent)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert message in error["message"]


@pytest.mark.parametrize("case", WRONG_COMPLETIONS)
def test_wrong_completions_are_refused(http: httpx.Client, case: str) -> None:
    body, param = WRONG_COMPLETIONS[case]
    assert refused(http, COMPLETIONS, **body)["param"] == param


def test_errors_as_the_client_sees_them(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as long:
            message: Any = {"role": "user", "content": "x" * 5000}
            client.chat.completions.create(model=MODEL, messages=[message], stream=stream)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
        error = refused(http, COMPLETIONS, prompt=["a", "x" * 5000], stream=stream)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "prompt 1: the prompt has 5000 tokens" in error["message"]
    assert post(http, CHAT, messages=USER, max_tokens=1)["model"] == MODEL


def test_bad_and_good_requests_side_by_side(http: httpx.Client) -> None:
    expected = post(http, CHAT, messages=MESSAGES, **GREEDY)["choices"][0]["message"]["content"]

    def good(_: int) -> bool:
        return contents(stream_chunks(http, CHAT, messages=MESSAGES, **GREEDY)) == {0: expected}

    def bad(number: int) -> bool:
        body, param, _ = list(WRONG_CHATS.values())[number % len(WRONG_CHATS)]
        return bool(refused(http, CHAT, **body)["param"] == param)

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(good if number % 2 else bad, number) for number in range(32)]
        assert all(future.result() for future in found)


def test_structured_answers(client: openai.OpenAI, http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"tiles": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["tiles"],
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=form, max_tokens=200
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert found.keys() == {"tiles"} and 0 <= found["tiles"] <= 9
    for extra in ({"json_schema": schema}, {"json_schema": json.dumps(schema)}):
        raw = post(http, CHAT, messages=MESSAGES, max_tokens=200, **extra)
        assert json.loads(raw["choices"][0]["message"]["content"]).keys() == {"tiles"}
    raw = post(http, CHAT, messages=MESSAGES, max_tokens=20, regex="(ab){3}")
    assert raw["choices"][0]["message"]["content"] == "ababab"
    chunks = stream_chunks(
        http, COMPLETIONS, prompt="x", max_tokens=20, ebnf='root ::= "yes" | "no"'
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) in ("yes", "no")


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        pytest.param({"type": "function", "function": {"name": "lift"}}, marks=pytest.mark.slow),
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS[1:]}},
    ],
    ids=str,
)
def test_calls_that_are_forced(client: openai.OpenAI, http: httpx.Client, choice: Any) -> None:
    body: Any = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
    body |= {"parallel_tool_calls": False, "seed": 1}
    answer = client.chat.completions.create(model=MODEL, **body).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.id
    assert call.function.name in (("lay", "lift") if choice == "required" else ("lift",))
    assert json.loads(call.function.arguments)["tile"] in ("red", "blue")
    state: Any = ChatCompletionStreamState()
    for chunk in stream_chunks(http, CHAT, **body):
        state.handle_chunk(chat_types.ChatCompletionChunk.model_validate(chunk))
    (streamed,) = state.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert streamed.function.name == call.function.name


def test_forced_calls_that_are_cut(http: httpx.Client) -> None:
    body: Any = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    whole = '[TOOL_CALLS] [{"name": "lay", "arguments": {"tile": "'
    for limit in (1, 12, len(whole)):
        answer = post(http, CHAT, **body, max_tokens=limit)["choices"][0]
        parts = [c["choices"][0] for c in stream_chunks(http, CHAT, **body, max_tokens=limit)]
        assert answer["finish_reason"] == parts[-1]["finish_reason"] == "length"
        assert answer["message"]["content"] is None
        assert not any(part["delta"].get("content") for part in parts)
        calls = answer["message"].get("tool_calls") or [{"function": {"arguments": ""}}]
        deltas = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        streamed = "".join(delta["function"]["arguments"] for delta in deltas)
        assert [call["function"]["arguments"] for call in calls] == [streamed]
