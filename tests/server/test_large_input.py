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
from moesaic.engine.inputs import MAX_SAMPLES, GenerateInput, PromptTooLong
from moesaic.server.app import make_app
from moesaic.server.bodies import (
    MAX_BODY,
    MAX_CONTAINERS,
    MAX_VALUES,
    PIECE,
    Outline,
    is_moderate,
    outline_of,
)
from moesaic.server.listen import bind
from moesaic.server.openai.prompts import MAX_TOOL_BYTES
from moesaic.server.tokens import MAX_IDS
from tests.server.serving import wait_until

# A bound on hanging and no more: tests share their machine with others.
LONGEST_GAP = 0.25
TRIES = 4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = '"messages": [{"role": "user", "content": "hi"}]'
TOO_LONG = "context_length_exceeded"
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
    "texts": ("/generate", f'{{"text": {listed(json.dumps("a"))}}}', 413, None),
    "many texts": ("/generate", f'{{"text": {listed(json.dumps("a"), 999_999)}}}', 400, None),
    "brackets": ("/generate", f'{{"rid": "{"[" * 100}", "input_ids": {listed("[]")}}}', 413, None),
    "escapes": ("/generate", '{"rid": "[[[' + "," * 400_000 + "\\\\" * 1_500_000, 400, None),
    "objects": (
        "/generate",
        f'{{"text": "a", "sampling_params": {listed("{}", 40_000)}}}',
        400,
        None,
    ),
    "rids": ("/generate", f'{{"text": "a", "rid": {listed(json.dumps("a"), 999_999)}}}', 400, None),
    "tokenize": ("/tokenize", json.dumps({"prompt": WORDS}, ensure_ascii=False), 400, TOO_LONG),
    "tokenize many": ("/tokenize", f'{{"prompt": {listed(json.dumps("a"), 999_999)}}}', 400, None),
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
        chat(f'"tools": {tools(8, 3_500_000)}', '"tool_choice": "required"'),
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
    "prompts": (COMPLETIONS, f'{{"prompt": {listed(json.dumps("a"), 999_999)}}}', 400, None),
}


class Probe:
    """A server in a thread, and the longest time for which its event loop did nothing else."""

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
            before = time.monotonic()
            await asyncio.sleep(0.005)
            self.gap = max(self.gap, time.monotonic() - before)

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
    body, gaps = text.encode(), []
    for _ in range(TRIES):
        answer, gap = probe.send(path, body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] == code, error
        assert error["message"] != "the body is not UTF-8"
        gaps.append(gap)
        if gap < LONGEST_GAP:
            break
    assert min(gaps) < LONGEST_GAP
