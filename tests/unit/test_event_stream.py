"""What a stream writes at once: its head with the first event, and the last event with its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from moesaic.server.errors import Refusal
from moesaic.server.http_protocol import ChunkWriter
from moesaic.server.responses import BODY_WRITER, DISCONNECT, DONE, DisconnectWatch, EventStream

HEAD = b"content-type: text/event-stream; charset=utf-8\r\n"


class Writer:
    """A BodyWriter that keeps what it gets; `starts`: whether it writes heads."""

    def __init__(self, starts: bool) -> None:
        self.pieces: list[bytes] = []
        self._starts = starts

    def accepts(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def start(self, headers: Iterable[tuple[bytes, bytes]], data: bytes) -> bool:
        if self._starts:
            self.pieces.append(b"head:" + data)
        return self._starts


def streamed(events: list[bytes], writer: Writer, **options: Any) -> list[Message]:
    """The messages of a stream of these events; a Refusal follows the last if it is empty."""
    sent: list[Message] = []

    async def source() -> AsyncGenerator[bytes, None]:
        for data in events:
            if not data:
                raise Refusal(500, "broken")
            yield data

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    scope = {"type": "http", BODY_WRITER: writer, DISCONNECT: DisconnectWatch()}
    asyncio.run(EventStream(source(), **options)(scope, receive, send))
    return sent


def test_the_head_is_written_with_the_first_event() -> None:
    writer, connected = Writer(True), list[object]()
    sent = streamed([b"a", b"b"], writer, on_start=connected.append, tail=lambda: b"c")
    assert writer.pieces == [b"head:a", b"b"] and connected == [writer]
    assert [message["body"] for message in sent] == [b"c" + DONE]


def test_a_writer_that_writes_no_head_leaves_it_to_a_message() -> None:
    writer, connected = Writer(False), list[object]()
    sent = streamed([b"a", b"b"], writer, on_start=connected.append)
    assert writer.pieces == [b"a", b"b"] and connected == [writer]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["body"] == DONE


@pytest.mark.parametrize("events", [[], [b""]])
def test_a_stream_without_events_has_a_head(events: list[bytes]) -> None:
    """Its last event may be its only one, or an error."""
    sent = streamed(events, Writer(True), tail=lambda: b"c", on_error=lambda _: b"error")
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["body"] == b"c" + (b"error" if events else b"") + DONE


@pytest.mark.parametrize("keep_alive", [True, False])
def test_the_bytes_of_a_head(keep_alive: bool) -> None:
    written = list[bytes]()
    cycle = SimpleNamespace(
        access_log=False,
        disconnected=False,
        keep_alive=keep_alive,
        default_headers=[(b"date", b"today")],
        response_started=False,
        chunked_encoding=None,
        waiting_for_100_continue=True,
    )
    flow = SimpleNamespace(write_paused=True)
    transport = SimpleNamespace(write=written.append)
    protocol: Any = SimpleNamespace(flow=flow, transport=transport)
    one: Any = cycle
    writer = ChunkWriter(protocol, one)
    assert not writer.start(EventStream.head, b"data") and not cycle.response_started
    flow.write_paused = False
    assert not writer.start(EventStream.head, b"")  # an empty chunk would end the response
    assert writer.start(EventStream.head, b"data") and writer.accepts()
    assert cycle.response_started and not cycle.waiting_for_100_continue
    close = b"" if keep_alive else b"connection: close\r\n"
    framing = close + b"transfer-encoding: chunked\r\n\r\n4\r\ndata\r\n"
    assert written == [b"HTTP/1.1 200 OK\r\ndate: today\r\n" + HEAD + framing]
