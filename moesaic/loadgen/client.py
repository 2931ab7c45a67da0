"""Sends requests to a server and records when tokens arrive."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec

from moesaic.loadgen.endpoints import Endpoint, RequestOptions, error_text
from moesaic.loadgen.outcome import BenchPrompt, Outcome

DATA: Final = b"data:"
DONE: Final = b"[DONE]"
# Runs on a slow machine take hours; a failed connection shows soon.
TIMEOUT: Final = aiohttp.ClientTimeout(total=6 * 3600, connect=120)
READ_BUFFER: Final = 1 << 20
LONGEST_ERROR: Final = 300


def unreachable(url: str, error: Exception, why: str) -> RuntimeError:
    """The error where a first request gets no answer: it says what to do."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return RuntimeError(
            f"the certificate of {url} is not trusted: {error.certificate_error}; set "
            "SSL_CERT_FILE to a file with its authority's certificate (its own if self-signed)"
        )
    return RuntimeError(
        f"no server at {url}: {why}; start one with moesaic serve MODEL, or say where it is with "
        "--base-url"
    )


def session(headers: Mapping[str, str], keep_alive: bool = True) -> aiohttp.ClientSession:
    """A session without a connection limit, which would be an unmeasured queue. Without
    `keep_alive` each request has a connection of its own, which is part of its time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=600, force_close=not keep_alive),
        timeout=TIMEOUT,
        headers=dict(headers),
        read_bufsize=READ_BUFFER,
        auto_decompress=True,
    )


class Client:
    """Sends requests to one route of one server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, endpoint: Endpoint, options: RequestOptions
    ) -> None:
        self._session, self._endpoint, self._options = session, endpoint, options
        self._url = url + endpoint.path

    async def ask(self, prompt: BenchPrompt) -> Outcome:
        """Send a request; the outcome holds errors, too."""
        outcome = Outcome(prompt, streamed=self._options.stream)
        body = self._endpoint.request(prompt, self._options)
        headers = {"Content-Type": "application/json"}
        outcome.started = time.perf_counter()
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                if response.status != 200:
                    outcome.error = f"status {response.status}: {reason(await response.read())}"
                elif self._options.stream:
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
            self._read_lines(lines, outcome, now)
            if outcome.error:
                return
        if not outcome.finished:
            outcome.error = "the stream ended before the answer did"
        elif not outcome.arrivals and outcome.output_tokens:
            # Tokens without text: only the last event shows that there were any.
            outcome.arrivals.append(time.perf_counter())

    def _read_lines(self, lines: list[bytes], outcome: Outcome, now: float) -> None:
        """Read events; each that carries tokens is an arrival."""
        for line in lines:
            if not line.startswith(DATA):
                continue  # keep-alive comments, event names, empty lines
            data = line[len(DATA) :].strip()
            if data and data != DONE and self._endpoint.read(data, outcome):
                outcome.arrivals.append(now)
                if outcome.output_tokens is not None:
                    outcome.counts.append(outcome.output_tokens)


def reason(body: bytes) -> str:
    """The reason for a refusal, from the body of the response."""
    try:
        content: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _cut(body.decode(errors="replace"))
    inner = content.get("error", content) if isinstance(content, dict) else content
    return _cut(error_text(inner))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_ERROR else text[:LONGEST_ERROR] + " …"
