"""The HTTP server: every route, streams, errors, clients that leave, signals and faults."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import moesaic
from moesaic.engine.engine import Engine
from moesaic.engine.frontend import inputs, routed_experts
from moesaic.server.app import ROUTES
from moesaic.server.bodies import MAX_BODY
from tests.server.serving import held, pieces_of, served, wait_until, wait_until_idle, without_times

Answer = dict[str, Any]
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="tiny:qwen3_moe", num_threads=1, log_level="warning") as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with served(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_health(client: httpx.Client) -> None:
    healthy = {"status": "ok", "disaggregation_mode": "null"}
    for path, told in (("/health", healthy), ("/health_generate", {"status": "ok"})):
        response = client.get(path)
        assert (response.status_code, response.json()) == (200, told)


def test_server_info(client: httpx.Client, engine: Engine) -> None:
    info = client.get("/server_info").json()
    assert info.keys() == client.get("/get_server_info").json().keys()
    assert (info["tp_size"], info["port"], info["running"]) == (1, 30000, 0)
    assert info["model_path"] == engine.args.model_path


def test_generate_gives_what_the_engine_gives(client: httpx.Client, engine: Engine) -> None:
    body = {
        "text": ["Hello", "a mosaic of experts"],
        "sampling_params": [GREEDY, GREEDY | {"max_new_tokens": 3}],
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": [2, 0],
        "lora_path": None,
    }
    answers = client.post("/generate", json=body).json()
    expected = engine.generate(
        ["Hello", "a mosaic of experts"],
        [GREEDY, GREEDY | {"max_new_tokens": 3}],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=[2, 0],
    )
    plain = json.loads(json.dumps(expected))
    assert [without_times(a) for a in answers] == [without_times(a) for a in plain]
    assert [len(answer["output_ids"]) for answer in answers] == [8, 3]
    assert len(answers[0]["meta_info"]["output_top_logprobs"][7]) == 2


def test_routed_experts(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row for each token but the last; in a stream, the last event has them."""
    text = "a mosaic of experts, which many small tiles make"
    body = {"text": text, "sampling_params": GREEDY, "return_routed_experts": True}

    def experts(**more: Any) -> tuple[Any, int]:
        meta = client.post("/generate", json=body | more).json()["meta_info"]
        data = base64.b64decode(meta["routed_experts"])
        return np.frombuffer(data, "<i4").reshape(-1, 2, 2), meta["cached_tokens"]

    whole, cached = experts()
    assert len(whole) == len(text) + 8 - 1 and cached == 0
    assert whole.min() == 0 and whole.max() == 7 and (whole[..., 0] != whole[..., 1]).all()
    for start in (0, 20, 36, len(text), -1):
        found, cached = experts(routed_experts_start_len=start)
        first = start if start >= 0 else len(text) - 1
        assert (found == whole[first:]).all() and len(found) == len(whole) - first
        assert cached == min(first, len(text) - 1) // 16 * 16
    with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        *pieces, last = [piece["meta_info"] for piece in pieces_of(response)]
    assert base64.b64decode(last["routed_experts"]) == whole.tobytes()
    assert pieces and not any("routed_experts" in piece for piece in pieces)
    plain = client.post("/generate", json=body | {"return_routed_experts": False}).json()
    assert "routed_experts" not in plain["meta_info"]
    monkeypatch.setattr(routed_experts, "MAX_BYTES", 8 * (len(whole) - 1))
    response = client.post("/generate", json=body)
    assert response.status_code == 400
    assert "55 tokens, more than 54: lower" in response.json()["error"]["message"]
    assert (
        "routed_experts" in engine.generate(text, GREEDY, return_routed_experts=True)["meta_info"]
    )


def test_generate_takes_token_ids_and_an_id(client: httpx.Client, engine: Engine) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "rid": "mine"}
    answer = client.post("/generate", json=body).json()
    expected = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    assert isinstance(expected, dict)
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["meta_info"]["id"] == "mine"
    assert answer["meta_info"]["prompt_tokens"] == 3


def test_stream(client: httpx.Client) -> None:
    body = {"text": "Hello", "sampling_params": GREEDY}
    whole = client.post("/generate", json=body).json()
    with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = list(pieces_of(response))
    assert without_times(pieces[-1]) == without_times(whole)
    lengths = [len(piece["output_ids"]) for piece in pieces]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 8
    assert all(whole["text"].startswith(piece["text"]) for piece in pieces)


def test_stream_of_nothing(client: httpx.Client) -> None:
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 0}, "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        assert [piece["output_ids"] for piece in pieces_of(response)] == [[]]


def test_no_prompts_have_no_answers(client: httpx.Client) -> None:
    whole = client.post("/generate", json={"text": []})
    stream = client.post("/generate", json={"text": [], "stream": True})
    assert (whole.status_code, stream.status_code) == (200, 200)
    assert (whole.json(), stream.text) == ([], "data: [DONE]\n\n")


def test_stream_of_several(client: httpx.Client) -> None:
    body = {"text": ["one", "two", "three"], "sampling_params": GREEDY}
    whole = client.post("/generate", json=body).json()
    with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        last = {piece["index"]: piece["output_ids"] for piece in pieces_of(response)}
    assert last == {number: answer["output_ids"] for number, answer in enumerate(whole)}


def test_tokenize_and_back(client: httpx.Client, engine: Engine) -> None:
    text = "Grüße, 世界"
    told = client.post("/tokenize", json={"prompt": text}).json()
    assert engine.tokenizer is not None
    assert told == {
        "tokens": engine.tokenizer.encode(text),
        "count": len(text.encode()),
        "max_model_len": 2048,
    }
    back = client.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert back == {"text": text, "prompt": text}
    both = client.post("/tokenize", json={"prompt": ["a", "bc"]}).json()
    assert both["count"] == [1, 2]
    texts = client.post("/detokenize", json={"tokens": both["tokens"]}).json()
    assert texts["text"] == ["a", "bc"]
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    rendered = engine.tokenizer.apply_chat_template(messages)
    assert chat == engine.tokenizer.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": [258]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [1, [2]]}),
        ("/detokenize", {"tokens": [[1], 2]}),
        ("/detokenize", {"tokens": [2**70]}),
    ],
)
def test_tokens_that_cannot_be(client: httpx.Client, path: str, body: Answer) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_model_info_and_version(client: httpx.Client, engine: Engine) -> None:
    info = client.get("/model_info").json()
    assert info == client.get("/get_model_info").json()
    assert (info["model_path"], info["max_model_len"]) == (engine.args.model_path, 2048)
    assert client.get("/version").json() == {"version": moesaic.__version__}
    assert client.get("/ping").json() == client.get("/health").json()


BAD_BODIES = {
    "": "the body is empty",
    "{": "truncated",
    "[1]": "Expected `object`",
    '{"text": "x"} y': "trailing",
    '{"text": "x", "sampling_params": {"temperature": NaN}}': "invalid character",
    '{"text": "x", "sampling_params": {"temperature": -Infinity}}': "invalid character",
    '{"text": "x", "sampling_params": {"temperature": 1e400}}': "out of range",
    '{"text": "x", "sampling_params": {"temperature": 1%s}}' % ("0" * 400): "int",
    '{"text": "x", "sampling_params": {"temperature": -1}}': "give 0 (greedy) or more",
    '{"text": "x", "sampling_params": {"temprature": 1}}': "did you mean 'temperature'",
    '{"text": "x", "sampling_params": {"n": 100000}}': "ask several times",
    '{"text": "x", "sampling_params": 5}': "$.sampling_params",
    '{"text": "\\ud800"}': "a lone surrogate",
    '{"text": ""}': "must be a non-empty text",
    '{"text": "x", "input_ids": [1]}': "give exactly one of text and input_ids",
    "{}": "give exactly one of text and input_ids",
    '{"input_ids": []}': "the prompt is empty",
    '{"input_ids": [[1], 2]}': "mixes token ids and lists",
    '{"input_ids": [-1]}': "out of range",
    '{"input_ids": [true]}': "$.input_ids[0]",
    '{"input_ids": [1], "rid": 3}': "$.rid",
    '{"input_ids": [1], "stream": "yes"}': "$.stream",
    '{"input_ids": [1], "sampling_parms": {}}': "unknown field `sampling_parms`",
    '{"input_ids": [1], "lora_path": "x"}': "no adapters are served",
    '{"input_ids": [1], "logprob_start_len": 7, "return_logprob": true}': "logprob_start_len 7",
    '{"input_ids": [1], "top_logprobs_num": 99999, "return_logprob": true}': "top_logprobs_num",
    '{"input_ids": [1], "return_routed_experts": 1}': "$.return_routed_experts",
    '{"input_ids": [1], "return_routed_experts": true, "routed_experts_start_len": 2}': (
        "routed_experts_start_len 2 must be -1 (the last prompt token) or from 0 to the length"
    ),
    '{"input_ids": [1], "return_routed_experts": true, "routed_experts_start_len": -2}': (
        "routed_experts_start_len -2 must be"
    ),
    '{"input_ids": [1], "sampling_params": {"stop": '
    + "[" * 100_000: "nested more than 64 levels deep",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: body[:60])
def test_wrong_input_is_refused(
    client: httpx.Client, engine: Engine, body: str, stream: bool
) -> None:
    sent = body.replace("{", '{"stream": true, ', 1) if stream and body[:2] == '{"' else body
    response = client.post("/generate", content=sent)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert BAD_BODIES[body] in message
    assert "nan" not in message.lower() and len(message) < 600
    wait_until_idle(engine)


def test_bytes_that_are_no_text_are_refused(client: httpx.Client) -> None:
    for body in (b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}', b"\x00", b"\xfe\xff{}"):
        assert client.post("/generate", content=body).status_code == 400


def test_size_limit(client: httpx.Client) -> None:
    pieces = (b" " * 65536 for _ in range(MAX_BODY // 65536 + 1))
    response = client.post("/generate", content=pieces)
    assert response.status_code == 413
    assert str(MAX_BODY) in response.json()["error"]["message"]


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    missing, wrong = client.get("/nothing"), client.get("/generate")
    error = missing.json()["error"]
    assert missing.status_code == 404 and error.pop("message").startswith("there is no '/nothing' ")
    assert error == {"type": "not_found_error", "param": None, "code": None}
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "this path has no such method: send POST"


def test_an_id_in_use_is_refused(client: httpx.Client, engine: Engine) -> None:
    body = {"text": "Hello", "sampling_params": GREEDY, "rid": "taken"}
    with ThreadPoolExecutor() as pool, held(engine):
        first = pool.submit(client.post, "/generate", json=body)
        wait_until(lambda: len(engine._inflight) == 1)
        second = client.post("/generate", json=body | {"stream": True})
        assert second.status_code == 400
        assert "taken" in second.json()["error"]["message"]
    assert first.result().status_code == 200


def test_ids_that_would_clash_are_refused(client: httpx.Client) -> None:
    params = GREEDY | {"n": 2}
    body = {"text": ["x", "y"], "sampling_params": params, "rid": ["a", "a-1"]}
    for stream in (False, True):
        refused = client.post("/generate", json=body | {"stream": stream})
        assert refused.status_code == 400
        assert "rid 'a-1' would name two outputs" in refused.json()["error"]["message"]
    whole = client.post("/generate", json=body | {"rid": "a"}).json()
    assert [one["meta_info"]["id"] for one in whole] == ["a-0", "a-0-1", "a-1", "a-1-1"]


def test_flush_cache(client: httpx.Client, engine: Engine) -> None:
    client.post("/generate", json={"text": "x" * 64, "sampling_params": GREEDY})
    wait_until_idle(engine)
    cached = engine.get_server_info()["pages_cached"]
    assert cached >= 4
    assert client.post("/flush_cache").json() == {"freed_pages": cached}
    assert client.post("/flush_cache").json() == {"freed_pages": 0}


def test_abort_request(client: httpx.Client, engine: Engine) -> None:
    body = {"text": "Hello", "sampling_params": LONG, "rid": "long", "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        pieces = pieces_of(response)
        next(pieces)
        assert client.post("/abort_request", json={"rid": "long"}).status_code == 200
        last = list(pieces)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(last["output_ids"]) < 1500
    wait_until_idle(engine)
    assert client.post("/abort_request", json={"rid": "nobody"}).status_code == 200
    assert client.post("/abort_request", json={"rid": 1}).status_code == 400
    assert client.post("/abort_request", json={}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_request(url: str, engine: Engine, stream: bool) -> None:
    """With stream, after the first piece; without, while it waits."""
    body = json.dumps({"text": "Hello", "sampling_params": LONG, "stream": stream}).encode()
    lines = "POST /generate HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"
    head = "\r\n".join((*lines, "", "")).encode()
    steps = engine.get_server_info()["steps"]
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(head + body)
        if stream:
            assert b"data: " in connection.recv(65536) + connection.recv(65536)
        wait_until(lambda: bool(engine.get_server_info()["running"]))
    wait_until_idle(engine)
    assert engine.get_server_info()["steps"] - steps < 1500


@pytest.mark.parametrize(("logged", "level", "times"), [(False, 3, 0), (True, 1, 0), (True, 2, 6)])
def test_logs_count_the_outputs_of_a_call_once(
    engine: Engine, url: str, logged: bool, level: int, times: int
) -> None:
    """... for all of its 12 outputs, and only if a line has a prompt."""
    made: list[Any] = []
    count = inputs._num_samples
    with pytest.MonkeyPatch.context() as patch:
        args = dataclasses.replace(engine.args, log_requests=logged, log_requests_level=level)
        patch.setattr(engine, "args", args)
        patch.setattr(inputs.GenerateInput, "size", 0)
        patch.setattr(inputs, "_num_samples", lambda given: made.append(given) or count(given))
        body = {"text": list("abcdef"), "sampling_params": {"n": 2, "max_new_tokens": 1}}
        assert len(httpx.post(url + "/generate", json=body, timeout=60).json()) == 12
    assert len(made) == times


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_requests_are_logged(
    engine: Engine, url: str, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    logged = dataclasses.replace(engine.args, log_requests=True, log_requests_level=level)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(engine, "args", logged)
        body = {"text": ["a secret", "b" * 300], "sampling_params": GREEDY | {"n": 2}}
        answers = httpx.post(url + "/generate", json=body, timeout=60).json()
    lines = [r.getMessage() for r in caplog.records if r.name == "moesaic.server.request_log"]
    assert len(lines) == 4
    assert sorted(a["meta_info"]["id"] for a in answers) == sorted(
        line.split()[1].rstrip(":") for line in lines
    )
    assert all("8 generated, length, e2e " in line for line in lines)
    assert ['"temperature":0.0' in line for line in lines] == [level >= 1] * 4
    assert sum("prompt 'a secret'" in line for line in lines) == (2 if level >= 2 else 0)
    assert sum("b" * 300 in line for line in lines) == (2 if level == 3 else 0)
    assert sum("… (300 characters)" in line for line in lines) == (2 if level == 2 else 0)


def test_every_route_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", page))
    paths = {
        (r.method, re.sub(r"/page/.*", "/page/NAME", r.path.replace("{model:path}", "NAME")))
        for r in ROUTES
    }
    paths = {(method, path.replace("{response_id}", "ID")) for method, path in paths}
    assert paths <= told, sorted(paths - told)
