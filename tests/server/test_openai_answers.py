"""What becomes of answers between the engine and the client: reasoning, calls, aborts, failures,
defaults, templates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion import Choice as ChoiceType
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer

from moesaic.core.request import FinishReason, Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.engine import Engine
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.engine.schedule.request_state import Progress
from moesaic.engine.text.limited_child import Allowance, LimitedChild
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.models.tiny import make_tiny_checkpoint
from moesaic.server.client_warnings import HEADER
from moesaic.server.openai.choices import ChatAnswer, ParseOptions
from moesaic.server.openai.prompts import render, template_input
from moesaic.server.openai.request_types import ChatBody
from moesaic.server.openai.setup import HIDDEN_TOOLS
from moesaic.server.parsers.formats import choose_format
from moesaic.server.parsers.parts import Tool
from tests.server.serving import held, served, wait_until, wait_until_idle

HOUSE_TEMPLATE = Path(__file__).parents[2] / "models" / "house-moe" / "chat_template.jinja"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
LONG = {"messages": USER, "max_tokens": 1900, "ignore_eos": True, "stream": True}
# As templates of various models do: one takes arguments for a text, one for an object.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% if m.role == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "{% if m.content == 'refuse' %}{{ raise_exception('not this text') }}{% endif %}"
    "<|turn|>{{ m.role }}\n{{ m.content or '' }}{{ m.reasoning_content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '[' + call.function.name + call.function.arguments + ']' }}"
    "{{ call.function.arguments }}{{ call.function.arguments | tojson }}"
    "{{ call.function.arguments is mapping }}{{ call.function.arguments.a }}"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model"))
    settings = {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    flags: Any = {"served_model_name": "mosaic", "num_threads": 1, "log_level": "warning"}
    with Engine(model_path=str(folder), **flags) as engine:
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


def test_the_model_has_the_name_it_was_given(client: openai.OpenAI, folder: Path) -> None:
    assert [model.id for model in client.models.list()] == ["mosaic"]
    for name in ("mosaic", "default"):
        answer = client.completions.create(model=name, prompt="x", max_tokens=1)
        assert answer.model == "mosaic"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=str(folder), prompt="x")


def test_the_models_own_defaults(http: httpx.Client, engine: Engine) -> None:
    """generation_config.json says greedy; who says something else gets it."""
    greedy = engine.generate("Hello", {"temperature": 0, "max_new_tokens": 16})
    assert isinstance(greedy, dict)

    def text(**body: Any) -> str:
        raw = http.post(COMPLETIONS, json={"prompt": "Hello", **body}).json()
        return str(raw["choices"][0]["text"])

    assert text() == text(seed=5) == greedy["text"]
    assert text(temperature=1.0, seed=5) != text(temperature=1.0, seed=6)
    params = {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 5, "max_new_tokens": 16}
    sampled = engine.generate("Hello", params)
    assert isinstance(sampled, dict)
    assert text(temperature=1.0, seed=5) == sampled["text"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_abort(http: httpx.Client, engine: Engine, path: str) -> None:
    body = LONG if path == CHAT else {**LONG, "prompt": "Hello"}
    sent = {key: value for key, value in body.items() if path == CHAT or key != "messages"}
    with http.stream("POST", path, json=sent) as response:
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        with held(engine):
            assert http.post("/abort_request", json={"rid": first["id"]}).status_code == 200
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    wait_until_idle(engine)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_failure_in_a_stream_is_an_event(http: httpx.Client, engine: Engine, path: str) -> None:
    sent = {**LONG, "rid": "unlucky"} if path == CHAT else {"prompt": "x", **LONG, "rid": "unlucky"}
    if path == COMPLETIONS:
        del sent["messages"]
    with http.stream("POST", path, json=sent) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        engine._thread.submit(lambda core: core.fail_all("a fault for this test"))
        *_, last, done = lines
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error == {
        "message": "request unlucky failed: a fault for this test",
        "type": "server_error",
        "param": None,
        "code": None,
    }


def test_the_client_raises_what_a_stream_ends_with(client: openai.OpenAI, engine: Engine) -> None:
    stream: Any = client.chat.completions.create(
        model="mosaic", messages=USER, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    engine._thread.submit(lambda core: core.fail_all("a fault for this test"))
    with pytest.raises(openai.APIError, match="a fault for this test"):
        list(stream)


def test_a_failure_is_a_status(http: httpx.Client, engine: Engine) -> None:
    with ThreadPoolExecutor() as pool:
        with held(engine):
            sent = {"messages": USER, "n": 2}
            answer = pool.submit(http.post, CHAT, json=sent)
            wait_until(lambda: len(engine._inflight) == 2)
            engine._thread.submit(lambda core: core.fail_all("a fault for this test"))
        response = answer.result()
    assert response.status_code == 500
    assert "a fault for this test" in response.json()["error"]["message"]


def test_a_template_that_refuses(http: httpx.Client) -> None:
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "refuse"}], "stream": stream}
        response = http.post(CHAT, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages" and "not this text" in error["message"]


def test_a_developer_is_the_system_of_a_template_that_knows_none(http: httpx.Client) -> None:
    def tokens(role: str) -> Any:
        messages = [{"role": role, "content": "Be brief."}, *USER]
        answer = http.post(CHAT, json={"messages": messages, "max_tokens": 1, "temperature": 0})
        assert answer.status_code == 200, answer.text
        sizes = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert answer.json()["usage"]["prompt_tokens"] == len(sizes)
        return sizes

    assert tokens("developer") == tokens("system")


def test_tools_that_the_template_does_not_render(
    engine: Engine,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer is as without tools, or the call that the client forces; a header says it."""
    plain = Tokenizer.from_folder(str(folder), chat_template=HOUSE_TEMPLATE.read_text())
    monkeypatch.setattr(engine, "tokenizer", plain)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    sent = {"messages": USER, "max_tokens": 8, "temperature": 0, "reasoning_effort": "none"}
    force = {"tool_choice": "required", "max_tokens": 60}
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert [r.message for r in caplog.records if "does not render tools" in r.message] == [
            HIDDEN_TOOLS % folder
        ]
        without = http.post(CHAT, json=sent)
        auto = http.post(CHAT, json={**sent, "tools": [tool]})
        forced = http.post(CHAT, json={**sent, "tools": [tool], **force})
    plain.chat.close()
    told = "tools: the chat template does not render them, so the model does not see them"
    assert [one.headers.get(HEADER) for one in (without, auto, forced)] == [None, told, told]
    first, second = (one.json()["choices"][0]["message"] for one in (without, auto))
    assert first["content"] == second["content"]
    (call, *_) = forced.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}


def test_one_forced_call_ends_the_answer(http: httpx.Client, engine: Engine) -> None:
    """Also for a model that would rather write another call than end."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    ends = dict.fromkeys(map(str, engine.limits.eos_ids), -100)
    sent = {"messages": USER, "max_tokens": 250, "temperature": 0, "reasoning_effort": "none"}
    sent |= {"tools": [tool], "tool_choice": "required", "logit_bias": ends}
    several = http.post(CHAT, json=sent).json()["choices"][0]
    assert several["finish_reason"] == "length" and len(several["message"]["tool_calls"]) > 1
    one = http.post(CHAT, json=sent | {"parallel_tool_calls": False}).json()["choices"][0]
    assert one["finish_reason"] == "tool_calls" and len(one["message"]["tool_calls"]) == 1


def test_prompts_are_those_of_transformers(folder: Path, engine: Engine) -> None:
    text = '{"a": [1, "é"],  "b": null}'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": text}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x" * 3000},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    sent = {"messages": messages, "tools": [tool], "reasoning_effort": "none"}
    body = msgspec.convert(sent, ChatBody)
    assert engine.tokenizer is not None
    chat = template_input(body, with_tools=True)
    tokens = asyncio.run(render(chat, engine.tokenizer, engine.limits, None)).tokens
    oracle = AutoTokenizer.from_pretrained(folder)
    # What the template makes of arguments as a text, and as an object.
    objects = json.dumps(json.loads(text), ensure_ascii=False)
    shown = f"[f{text}]{text}{objects}True[1, 'é']"
    plain = [messages[0], {"role": "assistant", "content": "hm" + shown}, messages[2]]
    rendered = oracle.apply_chat_template(
        plain, tools=[tool], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert tokens == oracle(rendered, add_special_tokens=False)["input_ids"]
    assert oracle.decode(tokens).endswith("assistant\n<think></think>")


def test_a_template_that_hangs_is_ended_and_nobody_else_is(
    http: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is good for all that it is tried with, and bad for one word."""
    assert engine.tokenizer is not None
    chat, crafted = engine.tokenizer.chat, [{"role": "user", "content": "hang"}]
    setup, allowed = json.dumps(chat.texts).encode(), Allowance(0.3, 64 << 20)
    child = LimitedChild("moesaic.engine.text.template_child", setup, allowed)
    monkeypatch.setattr(chat, "_child", child)
    with ThreadPoolExecutor(2) as pool:
        paths = (CHAT, "/tokenize")
        asked = [pool.submit(http.post, path, json={"messages": crafted}) for path in paths]
        assert http.get("/health").status_code == 200
        good = http.post(CHAT, json={"messages": USER, "max_tokens": 1})
        assert good.status_code == 200
        for one in asked:
            response = one.result()
            assert response.status_code == 400
            assert "takes more than 0.3 s" in response.json()["error"]["message"]
    child.close()


def test_a_server_without_a_tokenizer(folder: Path) -> None:
    flags: Any = {"skip_tokenizer_init": True, "num_threads": 1, "log_level": "warning"}
    with (
        Engine(model_path=str(folder), **flags) as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        raw = http.post(COMPLETIONS, json={"prompt": [1, 2], "max_tokens": 3}).json()
        assert raw["usage"]["completion_tokens"] == 3 and raw["choices"][0]["text"] == ""
        wrong = (
            (CHAT, {"messages": USER}),
            (COMPLETIONS, {"prompt": "x"}),
            (COMPLETIONS, {"prompt": [1], "echo": True}),
            (COMPLETIONS, {"prompt": [1], "logprobs": 1}),
        )
        for path, body in wrong:
            response = http.post(path, json=body)
            assert response.status_code == 400 and "tokenizer" in response.text


THOUGHT = "<think>\nTiles, 貝 and more.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "lay", "arguments": {"tiles": [1, 2], "to": "é"}}\n</tool_call>'
TOOLS = [Tool("lay", "", {"type": "object"}, False)]


def reading(split_reasoning: bool = True, **changes: Any) -> ParseOptions:
    form = choose_format(None, None, "qwen3_moe")
    fields: dict[str, Any] = {
        "new_parser": partial(form.parser, TOOLS, False, split_reasoning),
        "stream_reasoning": True,
        "parallel_calls": True,
        "shows_reasoning": True,
        "vocabulary": None,
    }
    return ParseOptions(**fields | changes)


def pieces_of(text: str, step: int, reason: str = "stop") -> Iterator[RequestUpdate]:
    request = Request("r", [1], SamplingParams(), 0, 9999, 0)
    request.finish_reason = FinishReason(reason)
    for end in range(step, len(text), step):
        yield RequestUpdate(0, Progress("r", end, text[:end], False), request)
    yield RequestUpdate(0, Progress("r", len(text), text, True), request)


def streamed(how: ParseOptions, text: str, step: int = 1, reason: str = "stop") -> list[Any]:
    choice = ChatAnswer(how, 0)
    found = [chunk for piece in pieces_of(text, step, reason) for chunk in choice.chunks(piece)]
    return [msgspec.to_builtins(chunk) for chunk in found]


def gathered(chunks: list[Any]) -> Any:
    """What openai's own client makes of the chunks."""
    state: Any = ChatCompletionStreamState()
    frame = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    for chunk in chunks:
        state.handle_chunk(
            ChatCompletionChunk.model_validate_json(
                json.dumps(frame | {"choices": [chunk]}), strict=True
            )
        )
    return state.get_final_completion().choices[0]


def whole(how: ParseOptions, text: str, reason: str = "stop") -> Any:
    piece = list(pieces_of(text, len(text), reason))[-1]
    raw = msgspec.json.encode(ChatAnswer(how, 0).whole(piece))
    return ChoiceType.model_validate_json(raw, strict=True)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_reasoning_and_calls_in_streams(step: int) -> None:
    text = THOUGHT + "I lay them." + CALL + CALL
    for choice in (whole(reading(), text), gathered(streamed(reading(), text, step))):
        message = choice.message
        assert choice.finish_reason == "tool_calls"
        assert message.content == "I lay them."
        assert message.reasoning_content.strip() == "Tiles, 貝 and more."
        calls = message.tool_calls
        assert [call.function.name for call in calls] == ["lay", "lay"]
        arguments = [json.loads(call.function.arguments) for call in calls]
        assert arguments == [{"tiles": [1, 2], "to": "é"}] * 2
        assert len({call.id for call in calls}) == 2 and {call.type for call in calls} == {
            "function"
        }


def test_the_order_of_the_chunks_of_a_call() -> None:
    chunks = streamed(reading(), CALL)
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["delta"] == {} and chunks[-1]["finish_reason"] == "tool_calls"
    first, *rest = [chunk["delta"]["tool_calls"][0] for chunk in chunks[1:-1]]
    assert first["id"] and (first["index"], first["type"]) == (0, "function")
    assert first["function"] == {"name": "lay", "arguments": ""}
    assert len(rest) > 3
    assert all(call.keys() == {"index", "function"} for call in rest)
    assert all(call["function"].keys() == {"arguments"} for call in rest)


def test_one_call_only() -> None:
    text = CALL + CALL
    for choice in (
        whole(reading(parallel_calls=False), text),
        gathered(streamed(reading(parallel_calls=False), text)),
    ):
        assert len(choice.message.tool_calls) == 1
        assert choice.finish_reason == "tool_calls" and choice.message.content in (None, "")


def test_an_answer_that_was_cut_says_so() -> None:
    choice = whole(reading(), CALL, "length")
    assert choice.finish_reason == "length" and len(choice.message.tool_calls) == 1


def test_reasoning_in_one_piece_or_in_the_content() -> None:
    text = THOUGHT + "Done."
    chunks = streamed(reading(stream_reasoning=False), text)
    thoughts = [c["delta"] for c in chunks if "reasoning_content" in c["delta"]]
    assert [t["reasoning_content"].strip() for t in thoughts] == ["Tiles, 貝 and more."]
    assert gathered(chunks).message.content == "Done."
    unfinished = streamed(reading(stream_reasoning=False), "<think>so far")
    assert gathered(unfinished).message.reasoning_content == "so far"
    together = whole(reading(split_reasoning=False), text).message
    assert "Tiles" in together.content and "Done." in together.content
    assert "reasoning_content" not in (together.model_extra or {})


def test_bytes_of_tokens(engine: Engine) -> None:
    assert engine.tokenizer is not None
    text = "a é 貝\n🀄<|turn|>"
    ids = engine.tokenizer.encode(text)
    pieces = [engine.tokenizer.token_bytes(token) for token in ids]
    assert b"".join(pieces) == text.encode() and pieces[-1] == b"<|turn|>"
    named = [*"ab", "▁a", *(f"<0x{byte:02X}>" for byte in range(256)), "<unk>"]
    vocab = {name: number for number, name in enumerate(named)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    replace: Any = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    pieced = Tokenizer(backend, {}, frozenset(), {})
    found = [pieced.token_bytes(vocab[name]) for name in ("a", "▁a", "<0xE8>", "<0xB2>", "<0x9D>")]
    assert found == [b"a", b" a", b"\xe8", b"\xb2", b"\x9d"]
    assert b"".join(found[2:]).decode() == "貝"
