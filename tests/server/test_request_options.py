"""Fields of SGLang's and vLLM's requests: token ids, cached tokens, patterns, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from moesaic.engine.engine import Engine
from moesaic.engine.frontend import inputs
from moesaic.engine.frontend.request_options import cache_namespace
from tests.server.serving import served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    flags: Any = {"served_model_name": "mosaic", "num_threads": 1, "log_level": "warning"}
    with Engine(model_path="tiny:qwen3_moe", **flags) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    base = f"{str(http.base_url).rstrip('/')}/v1"
    with openai.OpenAI(base_url=base, api_key="-", max_retries=0) as client:
        yield client


def test_token_ids_in_answers(http: httpx.Client, engine: Engine) -> None:
    """vLLM has a chat's prompt ids beside the choices, SGLang in them."""
    asked = {"max_tokens": 6, "return_token_ids": True, "ignore_eos": True, "n": 2, "seed": 4}
    chat = http.post(CHAT, json={"messages": USER, "temperature": 1, **asked}).json()
    rendered = engine.get_tokenizer().apply_chat_template(USER, add_generation_prompt=True)
    assert chat["prompt_token_ids"] == rendered
    for choice in chat["choices"]:
        assert choice["prompt_token_ids"] == rendered
        assert choice["token_ids"] == choice["response_token_ids"]
        decoded = engine.get_tokenizer().decode(choice["token_ids"], skip_special_tokens=True)
        assert len(choice["token_ids"]) == 6 and decoded == choice["message"]["content"]
    assert chat["choices"][0]["token_ids"] != chat["choices"][1]["token_ids"]
    texts = http.post(COMPLETIONS, json={"prompt": ["ab", "c"], **asked}).json()["choices"]
    prompts = [engine.get_tokenizer().encode(text) for text in ("ab", "ab", "c", "c")]
    assert [choice["prompt_token_ids"] for choice in texts] == prompts
    assert [len(choice["token_ids"]) for choice in texts] == [6] * 4
    body = {"messages": USER, "max_tokens": 2, "return_prompt_token_ids": True}
    [alone] = http.post(CHAT, json=body).json()["choices"]
    assert alone["prompt_token_ids"] == rendered and "token_ids" not in alone
    [plain] = http.post(CHAT, json={"messages": USER, "max_tokens": 2}).json()["choices"]
    assert not {"prompt_token_ids", "token_ids"} & set(plain)

    for path, sent in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "Hello"})):
        whole = http.post(path, json={**sent, **asked}).json()["choices"]
        chunks = events(http, path, {**sent, **asked, "stream": True})
        beside = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        assert beside == ([rendered, rendered] if path == CHAT else [])
        for index, choice in enumerate(whole):
            mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            ids = [token for c in mine for token in c.get("token_ids", ())]
            assert ids == choice["token_ids"]
            assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert not any("prompt_token_ids" in c for c in mine[1:])


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(path, json=body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_cached_tokens_and_their_namespace(http: httpx.Client, engine: Engine) -> None:
    """The openai client passes further fields by `extra_body`."""
    size = engine.args.page_size
    body = {"prompt": [5] * (2 * size + 1), "max_tokens": 1, "return_cached_tokens_details": True}
    body |= {"cache_salt": "here"}

    def details(path: str = COMPLETIONS, **changes: Any) -> Any:
        return http.post(path, json=body | changes).json()["sglext"]

    def cached(number: int) -> dict[str, Any]:
        return {"cached_tokens_details": {"device": number, "host": 0}}

    assert [details(), details(), details(cache_salt="there")] == [
        cached(number) for number in (0, 2 * size, 0)
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, usage = events(http, COMPLETIONS, body | options)
    assert last["choices"] == [] and last["sglext"] == cached(2 * size)
    assert usage["usage"]["prompt_tokens"] == 2 * size + 1 and "sglext" not in usage
    found = http.post("/generate", json={"input_ids": body["prompt"], "cache_salt": "here"}).json()
    assert found["meta_info"]["cached_tokens"] == 2 * size
    assert "sglext" not in http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).json()


def test_stop_patterns_and_fields_that_are_off(client: openai.OpenAI, http: httpx.Client) -> None:
    """As SGLang's benchmark and frontend, and many others, send them."""
    plain = {"text": "Hello", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    off = {"return_routed_experts": False, "lora_path": [None], "image_data": None, "model": None}
    noise = {"stop_regex": [], "custom_params": None, "structural_tag": "", "best_of": 1}
    full = http.post("/generate", json=plain).json()
    sent = {**plain, **off, "sampling_params": plain["sampling_params"] | noise}
    sent |= {"return_prompt_token_ids": True, "return_cached_tokens_details": True}
    same = http.post("/generate", json=sent).json()
    assert same["text"] == full["text"] and same["output_ids"] == full["output_ids"]
    assert len(same["prompt_token_ids"]) == same["meta_info"]["prompt_tokens"]
    pattern = f"(?s)(never|.{{3}}(?:){re.escape(full['text'][5:7])})"
    create = partial(client.completions.create, model="mosaic", prompt="Hello", max_tokens=12)
    extra = {"stop_regex": pattern, "lora_path": None, "use_beam_search": False}
    ends = full["text"].find(full["text"][5:7], 3) - 3
    answer = create(temperature=0, extra_body=extra).choices[0]
    assert answer.text == full["text"][:ends] and answer.finish_reason == "stop"
    kept = create(temperature=0, extra_body=extra | {"include_stop_str_in_output": True})
    assert kept.choices[0].text == full["text"][: ends + 5]


def test_the_cache_keys_of_a_prompt_are_read_once(http: httpx.Client) -> None:
    given: list[Any] = []

    def counted(*keys: Any) -> str:
        given.append(keys)
        return cache_namespace(*keys)

    body = {
        "text": ["x", "y"],
        "sampling_params": {"n": 3, "max_new_tokens": 1},
        "extra_key": ["a" * 256, None],
        "cache_salt": "b" * 256,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "cache_namespace", counted)
        assert len(http.post("/generate", json=body).json()) == 6
    assert given == [("a" * 256, "b" * 256), (None, "b" * 256)]


ODD = {"json_schema": json.dumps({"properties": {"a": {}}, "allOf": None})}


@pytest.mark.parametrize(
    ("path", "body", "param", "words", "code"),
    [
        (CHAT, {"lora_path": "x"}, "lora_path", "no adapters are served", "unsupported_parameter"),
        ("/generate", {"sampling_params": {"top_p": 2}}, "top_p", "(0, 1]", None),
        ("/generate", {"sampling_params": {"topp": 1}}, "topp", "did you mean 'top_p'", None),
        ("/generate", {"sampling_params": {"stop_regex": "a*"}}, "stop_regex", "empty text", None),
        ("/generate", {"top_logprobs_num": -1}, "top_logprobs_num", "between 0 and", None),
        ("/generate", {"extra_key": ["a", "b"]}, "extra_key", "2 entries for 1 prompts", None),
        ("/generate", {"token_ids_logprob": [999]}, "token_ids_logprob", "[0, 258)", None),
        ("/generate", {"model": "gpt"}, "model", "'gpt' does not exist", "model_not_found"),
        ("/generate", {"sampling_params": ODD}, "json_schema", "allOf must be an array", None),
        (CHAT, ODD, "json_schema", "allOf must be an array", None),
        (CHAT, {"stop_regex": "("}, "stop_regex", "not a regular expression", None),
        (CHAT, {"cache_salt": ["a", "b"]}, "cache_salt", "2 entries for 1 prompts", None),
        (CHAT, {"cache_salt": "x" * 257}, "cache_salt", "give at most 256", None),
        ("/generate", {"extra_key": "é" * 257}, "extra_key", "has 257 characters", None),
        (CHAT, {"routed_dp_rank": 1}, "data_parallel_rank", "not one of the 1 groups", None),
        (
            "/generate",
            {"sampling_params": {"beam_width": 4}},
            "beam_width",
            "no beam search",
            "unsupported_parameter",
        ),
        (
            "/tokenize",
            {"return_token_strs": True},
            "return_token_strs",
            "/detokenize",
            "unsupported_parameter",
        ),
    ],
)
def test_refused_fields(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str, code: str | None
) -> None:
    least = {CHAT: {"messages": USER}, "/generate": {"text": "x"}, "/tokenize": {"prompt": "x"}}
    response = http.post(path, json=least[path] | body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]


def test_the_tokenizer_is_that_of_transformers(engine: Engine) -> None:
    ours, oracle = (
        engine.get_tokenizer(),
        PreTrainedTokenizerFast.from_pretrained(engine.args.model_path),
    )
    assert ours is engine.tokenizer_manager.tokenizer is not None
    text = "a é 貝\n🀄<|turn|>"
    ids = oracle.encode(text)
    assert ours.encode(text) == ours(text)["input_ids"] == ids
    assert ours.encode(text, add_special_tokens=False) == oracle.encode(
        text, add_special_tokens=False
    )
    assert ours.decode(ids) == oracle.decode(ids) == text
    assert ours.batch_decode([ids], skip_special_tokens=True) == [text.removesuffix("<|turn|>")]
    for name in ("eos_token", "eos_token_id", "bos_token_id", "pad_token", "chat_template"):
        assert getattr(ours, name) == getattr(oracle, name), name
    assert len(ours) == len(oracle) and ours.vocab_size == oracle.vocab_size
    assert ours.convert_ids_to_tokens(ids) == oracle.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids(["<|end|>", "a"]) == [ours.eos_token_id, ids[0]]
    for prompt in (True, False):
        how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
        rendered = ours.apply_chat_template(USER, enable_thinking=False, **how)
        assert rendered == oracle.apply_chat_template(USER, enable_thinking=False, **how)
    chats, how = [USER, [*USER, {"role": "assistant", "content": "a"}]], {"enable_thinking": False}
    for given in (USER, chats):
        theirs = oracle.apply_chat_template(given, **how)
        found = ours.apply_chat_template(given, return_dict=True, return_tensors=None, **how)
        assert found == dict(theirs) and found.input_ids == theirs.input_ids
        assert ours.apply_chat_template(given, **how) == theirs.input_ids
    assert ours.model_max_length == oracle.model_max_length
    for given in ("é", ["é", "ab"]):
        assert ours(given).input_ids == oracle(given).input_ids
        assert ours(given, padding=False).attention_mask == oracle(given).attention_mask
    with pytest.raises(AttributeError, match="no attribute 'offsets'"):
        _ = ours("x").offsets
    refused = "return_tensors='pt' is not supported"
    for call in (partial(ours.apply_chat_template, USER), partial(ours, "x")):
        with pytest.raises(ValueError, match=refused):
            call(return_tensors="pt")
    with pytest.raises(ValueError, match=refused):
        ours.encode("x", return_tensors="pt")
    with pytest.raises(TypeError, match="no option colour"):
        ours("x", colour=1)
    assert engine.server_args is engine.tokenizer_manager.server_args is engine.args
    assert engine.tokenizer_manager.served_model_name == "mosaic"
    with pytest.raises(AttributeError, match=r"Engine\.encode is not supported: .* no embeddings"):
        engine.encode("x")  # type: ignore[attr-defined]
    assert not hasattr(engine, "no_such_method")
