"""Bodies that are made to hold the server up: each gets its refusal, and others are not kept
waiting."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn

from moesaic.core.sampling import MAX_GRAMMAR_BYTES, SamplingParams
from moesaic.engine.engine import LONG_PROMPT, Engine
from moesaic.engine.frontend.engine_limits import PromptTooLong
from moesaic.engine.frontend.input_checks import MAX_SAMPLES
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.server.app import make_app
from moesaic.server.bodies import (
    MAX_BODY,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_STRINGS,
    MAX_VALUES,
    SCAN_BYTES,
    JsonExtent,
    is_decodable,
    json_extent,
)
from moesaic.server.errors import Refusal
from moesaic.server.listen import bind
from moesaic.server.openai.prompts import MAX_TOOL_BYTES
from moesaic.server.tokens import MAX_IDS
from tests.server.serving import wait_until

# Seconds of the process's own time: the machine may be busy with other things.
LONGEST_GAP = 0.25
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = '"messages": [{"role": "user", "content": "hi"}]'
TOO_LONG = "context_length_exceeded"
LETTER, MANY = '"a"', 4 * (MAX_STRINGS - 9)
WORDS = "Hello world, naïve 12 " * 170_000


def listed(entry: str, size: int = MAX_BODY - 500) -> str:
    return f"[{','.join([entry] * (size // (len(entry) + 1)))}]"


def tools(number: int, size: int, **function: Any) -> str:
    names = {f"p{k}": {"type": "string", "enum": [f"{k}"]} for k in range(size // number // 38)}
    parameters = {"type": "object", "properties": names}
    return json.dumps(
        [
            {
                "type": "function",
                "function": {"name": f"f{k}", "parameters": parameters, **function},
            }
            for k in range(number)
        ]
    )


def chat(*fields: str, messages: str = MESSAGES) -> str:
    return f"{{{', '.join([messages, *fields])}}}"


def said(**message: Any) -> str:
    return '"messages": ' + json.dumps(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", **message}],
        ensure_ascii=False,
    )


# name: path, body, status and code of the refusal.
HOSTILE: dict[str, tuple[str, str, int, str | None]] = {
    "rows": ("/generate", f'{{"input_ids": {listed("[1]")}}}', 413, None),
    "rows of little": (
        "/generate",
        f'{{"input_ids": {listed("[1]", 4 * (MAX_CONTAINERS - 9))}}}',
        400,
        None,
    ),
    "ids": ("/generate", f'{{"input_ids": {listed("1", 2 * MAX_VALUES - 9)}}}', 400, TOO_LONG),
    "ids beyond": ("/generate", f'{{"input_ids": {listed("1")}}}', 413, None),
    "text": ("/generate", json.dumps({"text": WORDS}, ensure_ascii=False), 400, TOO_LONG),
    "texts": ("/generate", f'{{"text": {listed(LETTER)}}}', 413, None),
    "many texts": ("/generate", f'{{"text": {listed(LETTER, MANY)}}}', 400, None),
    "brackets": ("/generate", f'{{"rid": "{"[" * 100}", "input_ids": {listed("[]")}}}', 413, None),
    "escapes": ("/generate", '{"rid": "[[[' + "," * 400_000 + "\\\\" * 1_500_000, 400, None),
    "objects": (
        "/generate",
        f'{{"text": "a", "sampling_params": {listed("{}", 40_000)}}}',
        400,
        None,
    ),
    "rids": ("/generate", f'{{"text": "a", "rid": {listed(LETTER, MANY)}}}', 400, None),
    "tokenize": ("/tokenize", json.dumps({"prompt": WORDS}, ensure_ascii=False), 400, TOO_LONG),
    "tokenize many": ("/tokenize", f'{{"prompt": {listed(LETTER, MANY)}}}', 400, None),
    "detokenize": ("/detokenize", f'{{"tokens": {listed("1", 2 * MAX_IDS + 9)}}}', 400, None),
    "message": (
        CHAT,
        chat(messages=f'"messages": [{{"role": "user", "content": "{WORDS}"}}]'),
        400,
        TOO_LONG,
    ),
    "answers": (CHAT, chat(messages=said(content=WORDS)), 400, TOO_LONG),
    "arguments": (
        CHAT,
        chat(
            messages=said(
                content="x" * 300_000,
                tool_calls=[
                    {"function": {"name": "f", "arguments": f'{{"x":{listed("[]", 3_000_000)}}}'}}
                ],
            )
        ),
        400,
        TOO_LONG,
    ),
    "tools": (CHAT, chat(f'"tools": {tools(8, 300_000)}'), 400, None),
    "tools forced": (
        CHAT,
        chat(f'"tools": {tools(8, 99_000)}', '"tool_choice": "required"'),
        400,
        None,
    ),
    "tools beyond": (
        CHAT,
        chat(f'"tools": {tools(8, 3_000_000)}', '"tool_choice": "required"'),
        413,
        None,
    ),
    "tools strict": (CHAT, chat(f'"tools": {tools(8, 99_000, strict=True)}'), 400, None),
    "tools described": (
        CHAT,
        chat(f'"tools": {tools(8, 8, description="x" * 490_000)}', '"tool_choice": "required"'),
        400,
        None,
    ),
    "schema": (
        CHAT,
        chat(
            '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": '
            f'{{"enum": {listed("1", 400_000)}}}}}}}'
        ),
        400,
        None,
    ),
    "echo": (
        COMPLETIONS,
        f'{{"prompt": {listed("1", 2 * MAX_VALUES - 9)}, "echo": true}}',
        400,
        TOO_LONG,
    ),
    "prompts": (COMPLETIONS, f'{{"prompt": {listed(LETTER, MANY)}}}', 400, None),
}


class Probe:
    """A server in a thread, and the most that the process computed while its event loop stood
    still."""

    def __init__(self, engine: Engine) -> None:
        self.app = make_app(engine)
        self.gap = 0.0

    @contextmanager
    def serve(self) -> Iterator[Probe]:
        listener = bind("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(self.app, log_config=None))

        async def main() -> None:
            watch = asyncio.create_task(self._watch())
            await server.serve([listener])
            watch.cancel()

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        wait_until(lambda: server.started)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=120) as self.client:
            yield self
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()

    async def _watch(self) -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.005)
            self.gap = max(self.gap, time.process_time() - before)

    def send(self, path: str, body: bytes) -> tuple[httpx.Response, float]:
        time.sleep(0.02)
        self.gap = 0.0
        answer = self.client.post(path, content=body)
        time.sleep(0.02)
        return answer, self.gap


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="tiny:qwen3_moe", num_threads=1, log_level="warning") as engine:
        yield engine


@pytest.fixture(scope="module")
def probe(engine: Engine) -> Iterator[Probe]:
    gc.freeze()  # what other tests have left would be looked at while we measure
    with Probe(engine).serve() as probe:
        probe.send(CHAT, chat('"max_tokens": 1').encode())
        yield probe
    gc.unfreeze()


@pytest.mark.parametrize("name", HOSTILE)
def test_the_loop_is_not_held_up(probe: Probe, name: str) -> None:
    path, text, status, code = HOSTILE[name]
    answer, gap = probe.send(path, text.encode())
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    assert error["message"] != "the body is not UTF-8"
    assert gap < LONGEST_GAP


def test_the_limits_are_in_the_messages(probe: Probe) -> None:
    for name, words in {
        "rows": f"lists and objects: send at most {MAX_CONTAINERS} at once",
        "texts": f"texts: send at most {MAX_STRINGS} at once",
        "ids beyond": f"values: send at most {MAX_VALUES} at once",
        "many texts": f"prompts at once: give at most {MAX_SAMPLES}",
        "tools": f"give at most {MAX_TOOL_BYTES}",
        "tools strict": f"give at most {MAX_GRAMMAR_BYTES}",
    }.items():
        path, text, *_ = HOSTILE[name]
        answer, _ = probe.send(path, text.encode())
        assert words in answer.json()["error"]["message"]


def test_what_is_large_and_fits_is_served(probe: Probe, engine: Engine) -> None:
    """Commas and brackets within a text are not counted, nor what templates leave out."""
    most = engine.limits.max_sequence
    ids = {"input_ids": [1] * (most - 1), "sampling_params": {"max_new_tokens": 1}}
    described = tools(2, 2, description='[,{"' * 25_000)
    for path, body in (
        ("/generate", json.dumps(ids)),
        ("/detokenize", json.dumps({"tokens": [1] * MAX_IDS})),
        ("/generate", json.dumps({"text": "hi", "rid": "x", "sampling_params": {"stop": "[,"}})),
        (CHAT, chat(f'"tools": {described}', '"tool_choice": "none"', '"max_tokens": 1')),
        (CHAT, chat('"user": "' + "[," * 1_000_000 + '"', '"max_tokens": 1')),
    ):
        answer, _ = probe.send(path, body.encode())
        assert answer.status_code == 200, answer.text[:300]


def outline(value: Any) -> JsonExtent:
    """By Python's own reader."""
    if isinstance(value, dict):
        parts = [JsonExtent(0, 0, 1, 0)] * len(value) + [outline(entry) for entry in value.values()]
        number = len(value)
    elif isinstance(value, list):
        parts, number = [outline(entry) for entry in value], len(value)
    else:
        return JsonExtent(0, 0, int(isinstance(value, str)), 0)
    return JsonExtent(
        1 + max((part.depth for part in parts), default=0),
        1 + sum(part.containers for part in parts),
        sum(part.strings for part in parts),
        max(0, number - 1) + sum(part.values for part in parts),
    )


def test_outline() -> None:
    """Escapes and strings lie across the pieces in which it is read, wherever they end."""
    tricky = ["\\", '"', '\\"', "[{,", "a" * 50, '\\\\\\"]', "é,"]
    entries = [tricky[k % len(tricky)] * (k % 5) for k in range(9000)]
    for shift in range(8):
        value = {
            "x" * shift: entries,
            "b": [[[]] * 70, {"c": 1, "d": [1, 2, {}]}, "\\" * SCAN_BYTES],
        }
        found = json_extent(json.dumps(value, ensure_ascii=False).encode())
        expected = outline(value)
        assert found == expected._replace(values=expected.values + 1)


def test_arguments_of_a_call_are_read_if_they_are_not_large() -> None:
    assert is_decodable('{"x": "' + "[," * MAX_VALUES + '"}')
    assert is_decodable(listed("1", 500_000))
    assert not is_decodable(listed("[]", 100_000))
    assert not is_decodable(listed("1", 2 * MAX_VALUES + 99))
    assert is_decodable("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(Refusal, match=f"nested more than {MAX_DEPTH} levels deep"):
        is_decodable("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


ROWS = [[1, 2], [3]]


@pytest.mark.parametrize(
    ("ids", "single"),
    [
        ([1, 2], True),
        ((1, 2), True),
        ([], True),
        (ROWS, False),
        (tuple(ROWS), False),
        (np.array([1, 2]), True),
        (np.array([[1, 2]]), False),
        (torch.tensor([1, 2]), True),
        (torch.tensor([[1, 2]]), False),
        ([np.int64(1)], True),
        ([torch.tensor(1)], True),
        ([torch.tensor([1])], False),
        ([np.array([1])], False),
    ],
)
def test_one_prompt_or_several(ids: Any, single: bool) -> None:
    assert GenerateInput(input_ids=ids).is_single is single


def test_is_single_looks_at_the_first_row_only() -> None:
    class Rows(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("all rows are looked at")

    assert not GenerateInput(input_ids=Rows([[1]] * 5)).is_single


def test_size() -> None:
    """What is prepared in the event loop, and what is not."""
    for params in ({"n": 128}, SamplingParams(n=128), [{"n": 128}], [{}] * 64):
        assert GenerateInput("hi", sampling_params=params).size > LONG_PROMPT
    for call in (
        GenerateInput(["a"] * 64),
        GenerateInput(["a" * 3000]),
        GenerateInput("a" * 3000),
        GenerateInput(input_ids=[1] * 3000),
        GenerateInput(input_ids=[[1] * 3000]),
        GenerateInput(input_ids=[[1]] * 64),
    ):
        assert call.size > LONG_PROMPT
    for params in (None, {}, {"n": 2}, {"n": "many"}, SamplingParams(n=2)):
        assert GenerateInput(["hi", "you"], sampling_params=params).size < LONG_PROMPT


@pytest.mark.parametrize("several", [False, True])
def test_a_text_that_cannot_fit_is_not_made_into_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    assert engine.tokenizer is not None
    most = engine.limits.max_sequence * engine.tokenizer.longest_token
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_: pytest.fail("made into tokens"))
    text = "a" * (most + 1)
    with pytest.raises(PromptTooLong, match=f"^{'prompt 1: ' * several}the text has {most + 1} "):
        engine.generate(["a", text] if several else text)
