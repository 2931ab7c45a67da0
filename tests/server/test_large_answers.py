"""Large answers: how many bytes they may have, and that nobody waits while one is written."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from moesaic.core.request import FinishReason, Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.engine import Engine
from moesaic.engine.frontend import outputs as answers
from moesaic.engine.frontend.outputs import OutputFormat
from moesaic.engine.schedule.request_state import Progress
from moesaic.server import responses
from moesaic.server.app import make_app
from moesaic.server.responses import prepared
from tests.server.serving import served

MIB = 1 << 20
LISTS = (
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="tiny:qwen3_moe", num_threads=1, log_level="warning") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[httpx.Client]:
    with served(engine) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def scored(prompt: int, output: int, top: int) -> Request:
    """A request that has ended, with logprobs of everything."""
    row = [(-1.2345678901234 - number, number) for number in range(top)]
    request = Request(
        rid="r",
        prompt_ids=[5] * prompt,
        params=SamplingParams(),
        seed=1,
        max_new_tokens=output,
        request_no=0,
        return_logprob=True,
        top_logprobs_num=top,
    )
    request.token_ids += [6] * output
    request.input_logprobs = [-0.5] * (prompt - 1)
    request.output_logprobs = [-0.25] * output
    request.input_top_logprobs = [row] * (prompt - 1)
    request.output_top_logprobs = [row] * output
    request.finish_reason = FinishReason("length", length=output)
    return request


def grown(form: OutputFormat, request: Request, output: int) -> Iterator[dict[str, Any]]:
    for number in range(1, output + 1):
        yield form.answer(request, Progress("r", number, "x" * number, number == output))


def test_a_stream_repeats_few_logprobs() -> None:
    """1000 tokens after 1000, with 250 alternatives each, came to 128 MiB of which 22 are new."""
    request = scored(1000, 1000, 250)
    sizes, last = [], {}
    for last in grown(OutputFormat(None), request, 1000):
        logprobs = {name: last["meta_info"][name] for name in LISTS if name in last["meta_info"]}
        sizes.append(len(msgspec.json.encode(logprobs)))
    assert sum(sizes[:-1]) < 16 * MIB
    assert sizes[-1] < 24 * MIB
    assert [len(last["meta_info"][name]) for name in LISTS] == [1000] * 4


def test_small_streams_have_all_logprobs_in_every_event() -> None:
    request = scored(9, 100, 5)
    for number, answer in enumerate(grown(OutputFormat(None), request, 100), 1):
        meta = answer["meta_info"]
        assert [len(meta[name]) for name in LISTS] == [9, number, 9, number]


def test_the_limit_is_one_of_the_call() -> None:
    """Not of each of its answers."""
    form, told = OutputFormat(None), 0
    for _ in range(20):
        for answer in grown(form, scored(1, 300, 0), 300):
            meta = answer["meta_info"]
            if meta["finish_reason"] is None and "output_token_logprobs" in meta:
                told += len(meta["output_token_logprobs"])
    assert 0 < told <= answers.MAX_REPEATED


def test_streams_over_http(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_REPEATED", 100)
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    whole = client.post("/generate", json=body).json()["meta_info"]
    lines = client.post("/generate", json=body | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert lines[-2:] == ["data: [DONE]", ""]
    assert [name in events[0]["meta_info"] for name in LISTS] == [True] * 4
    assert {name: events[-1]["meta_info"][name] for name in LISTS} == {
        name: whole[name] for name in LISTS
    }
    lengths = [len(event["meta_info"].get("output_token_logprobs", ())) for event in events]
    assert sum((3 + length) * 2 for length in lengths[:-1] if length) <= 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1], "sampling_params": {"n": 600, "max_new_tokens": 1900}}),
        ("/v1/completions", {"prompt": [[1]] * 600, "max_tokens": 1900, "logprobs": 0}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1900, "logprobs": 20, "n": 32}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "n": 128}
            | {"max_tokens": 1900, "top_logprobs": 20},
        ),
    ],
)
def test_logprobs_of_a_call_are_limited(client: httpx.Client, path: str, body: Any) -> None:
    """Also where no alternatives are asked for; without logprobs the same is fine."""
    asked = body | {"return_logprob": True} if path == "/generate" else body
    refused = client.post(path, json=asked)
    assert refused.status_code == 400, refused.text
    assert str(1 << 20) in refused.json()["error"]["message"]


VALUES: dict[str, Any] = {
    "numbers": [1, -2.5, 1e-7, 1e22, None, True],
    "nested": {"a": {"b": [[1, 'é\n"' * 50]] * 700, "c": {}}, "d": []},
    "empty": {},
    "list": [{"x": list(range(5000))}] * 3,
    "text": "x",
}


@pytest.mark.parametrize("name", VALUES)
def test_encoding_in_runs_gives_the_same_bytes(name: str) -> None:
    encode = msgspec.json.encode
    assert encode(prepared(VALUES[name], responses.LIGHT + 1)) == encode(VALUES[name])


def test_runs_are_short() -> None:
    """The encoder lets no other thread run: no call of it may give megabytes."""
    request = scored(2000, 2000, 100)
    [answer] = [*grown(OutputFormat(None), request, 2000)][-1:]
    pieces = [len(piece) for piece in responses._encoded(answer, responses.DEPTH)]
    assert sum(pieces) == len(msgspec.json.encode(answer)) > 8 * MIB
    assert max(pieces) < 2 * responses.RUN_BYTES


LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
        | {"n": 128, "max_tokens": 60, "ignore_eos": True},
    ),
    "echo": (
        "/v1/completions",
        {"prompt": [[number] * 500 for number in range(16)], "echo": True, "logprobs": 20}
        | {"max_tokens": 1},
    ),
}


async def longest_work(engine: Engine, path: str, body: dict[str, Any]) -> tuple[float, int]:
    """The most that the event loop's thread computes at a time while it answers, and the size of
    the answer."""
    work: list[float] = []

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.005)
            work.append(time.thread_time() - before)

    transport = httpx.ASGITransport(make_app(engine))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=600
    ) as client:
        task = asyncio.create_task(watch())
        response = await client.post(path, json=body)
        await asyncio.sleep(0.05)
        task.cancel()
    assert response.status_code == 200, response.text
    return max(work), len(response.content)


@pytest.mark.parametrize("name", LARGE)
def test_nobody_waits_for_a_large_answer(engine: Engine, name: str) -> None:
    """Building and encoding it took a second, in which nobody else was served. Both are done in
    another thread, in short runs (test_runs_are_short)."""
    longest, size = asyncio.run(longest_work(engine, *LARGE[name]))
    assert size > MIB
    assert longest < 0.1
