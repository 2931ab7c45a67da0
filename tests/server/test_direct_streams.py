"""Tokens that are written past the task that reads their stream."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from typing import Any
from weakref import ref

import httpx
import pytest

from moesaic.engine.engine import Engine
from moesaic.server import native
from moesaic.server.http_protocol import ChunkWriter
from moesaic.server.openai import choices, streams
from tests.server.serving import Running, post_head, wait_until

TOKENS = 60
PROMPT = "Lay the tiles"
BODIES: dict[str, Any] = {
    "/generate": {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
    },
    "/v1/completions": {"prompt": PROMPT, "max_tokens": TOKENS},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": TOKENS,
    },
}
EVENTS = {
    "/generate": native.GenerateEvents,
    "/v1/completions": streams.AnswerEvents,
    "/v1/chat/completions": streams.AnswerEvents,
}


def body_of(path: str) -> dict[str, Any]:
    return BODIES[path] | ({} if path == "/generate" else {"temperature": 0, "ignore_eos": True})


def text_of(path: str, value: dict[str, Any], part: str = "message") -> str:
    if path == "/generate":
        return str(value["text"])
    choice = value["choices"][0]
    text = choice["text"] if path == "/v1/completions" else choice[part].get("content")
    return text or ""


def events_of(http: httpx.Client, path: str) -> Iterator[dict[str, Any]]:
    with http.stream("POST", path, json=body_of(path) | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def streamed_text(http: httpx.Client, path: str) -> str:
    found = list(events_of(http, path))
    if path == "/generate":
        return text_of(path, found[-1])
    return "".join(text_of(path, event, "delta") for event in found if event["choices"])


@pytest.mark.parametrize("path", BODIES)
def test_tokens_are_written_directly(
    http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[bytes]()
    write = ChunkWriter.write

    def record(self: ChunkWriter, data: bytes) -> None:
        written.append(data)
        write(self, data)

    monkeypatch.setattr(ChunkWriter, "write", record)
    expected = text_of(path, http.post(path, json=body_of(path)).json())
    for _ in range(20):  # on a busy machine all tokens of a stream may come at once
        assert streamed_text(http, path) == expected
        if written:
            return
    raise AssertionError("no token was written directly")


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_has_ended_is_freed(
    http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, kept = EVENTS[path], list[ref[Any]]()
    write_to = events.write_to

    def record(self: Any, body: Any) -> None:
        kept.append(ref(self))
        write_to(self, body)

    monkeypatch.setattr(events, "write_to", record)
    gc.disable()
    try:
        streamed_text(http, path)
        wait_until(lambda: kept[0]() is None)
    finally:
        gc.enable()


def test_nothing_is_buffered_for_a_client_that_does_not_read(engine: Engine) -> None:
    """The events of this stream repeat the text: 2.5 MB in all."""
    params = {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True}
    data = json.dumps({"text": "x", "sampling_params": params, "stream": True}).encode()
    with Running(engine).serve() as running, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", running.port))
        connections = running.server.server_state.connections
        wait_until(lambda: bool(connections))
        (protocol,) = connections
        server_side = protocol.transport.get_extra_info("socket")
        server_side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        before = engine.get_server_info()["steps"]
        connection.sendall(post_head(data) + data)
        wait_until(lambda: engine.get_server_info()["steps"] > before)
        wait_until(lambda: engine.get_server_info()["running"] == 0)
        assert 0 < protocol.transport.get_write_buffer_size() < 300_000


def test_an_error_while_a_token_is_written_is_the_servers(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no answer to a wrong value of the client's, and it is logged."""
    calls = 0

    def fail(self: Any, update: Any) -> bytes | None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("index 3 of a list")
        return None

    monkeypatch.setattr(choices.ChatAnswer, "text_choice", fail)
    last = list(events_of(http, "/v1/chat/completions"))[-1]
    assert last["error"]["type"] == "server_error" and "index" not in str(last)
    assert "a stream failed" in caplog.text and "index 3 of a list" in caplog.text
