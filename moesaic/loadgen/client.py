"""Sends requests to a server and notes when what came."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec

from moesaic.loadgen.endpoints import Asked, Endpoint, error_text
from moesaic.loadgen.outcome import BenchPrompt, Outcome

DATA: Final = b"data:"
DONE: Final = b"[DONE]"
# A run over a slow machine may take hours; a connection that cannot be made is known soon.
TIMEOUT: Final = aiohttp.ClientTimeout(total=6 * 3600, connect=120)
READ_BUFFER: Final = 1 << 20
LONGEST_ERROR: Final = 300


def session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Without a limit on connections: it would be a queue that nobody measures."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=600),
        timeout=TIMEOUT,
        headers=dict(headers),
        read_bufsize=READ_BUFFER,
        auto_decompress=True,
    )


class Client:
    """One server, one route."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, endpoint: Endpoint, asked: Asked
    ) -> None:
        self._session, self._endpoint, self._asked = session, endpoint, asked
        self._url = url + endpoint.path

    async def ask(self, prompt: BenchPrompt) -> Outcome:
        """The outcome of a request; what goes wrong is in it."""
        outcome = Outcome(prompt, streamed=self._asked.stream)
        body = self._endpoint.request(prompt, self._asked)
        headers = {"Content-Type": "application/json"}
        outcome.started = time.perf_counter()
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                if response.status != 200:
                    outcome.error = f"status {response.status}: {reason(await response.read())}"
                elif self._asked.stream:
                    await self._read_stream(response, outcome)
                else:
                    self._read_whole(await response.read(), outcome)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            outcome.error = _cut(f"{type(error).__name__}: {error}")
        outcome.ended = time.perf_counter()
        return outcome

    def _read_whole(self, data: bytes, outcome: Outcome) -> None:
        self._endpoint.read(data, outcome)
        outcome.arrivals.append(time.perf_counter())

    async def _read_stream(self, response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        rest = b""
        async for data in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            if self._read_lines(lines, outcome):
                outcome.arrivals.append(now)
                if outcome.output_tokens is not None:
                    outcome.counts.append(outcome.output_tokens)
            if outcome.error:
                return
        if not outcome.finished:
            outcome.error = "the stream ended before the answer did"
        elif not outcome.arrivals and outcome.output_tokens:
            # Tokens without a text: that they were there is known from the end alone.
            outcome.arrivals.append(time.perf_counter())

    def _read_lines(self, lines: list[bytes], outcome: Outcome) -> bool:
        """Whether tokens were among the events."""
        brought = False
        for line in lines:
            if not line.startswith(DATA):
                continue  # comments that keep a connection open, names of events, empty lines
            data = line[len(DATA) :].strip()
            if data and data != DONE:
                brought = self._endpoint.read(data, outcome) or brought
        return brought


def reason(body: bytes) -> str:
    """Why a server refused, from what it sent with the status."""
    try:
        content: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _cut(body.decode(errors="replace"))
    inner = content.get("error", content) if isinstance(content, dict) else content
    return _cut(error_text(inner))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_ERROR else text[:LONGEST_ERROR] + " …"
