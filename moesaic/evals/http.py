"""Asks a server with OpenAI's API."""

from __future__ import annotations

import asyncio
import os
import random
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec

from moesaic.evals.args import ServerTargetArgs
from moesaic.evals.ask import Asker, ModelReply, Options
from moesaic.evals.server_url import ServerUrl
from moesaic.evals.tasks.problem import Problem
from moesaic.loadgen.client import reason, session, unreachable
from moesaic.loadgen.endpoints import FAILED, OpenAIPart, error_text, merged

TRIES: Final = 6
FIRST_WAIT: Final = 0.5  # seconds, doubled at every retry
LONGEST_WAIT: Final = 30.0
RETRY_STATUSES: Final = (429, 502, 503, 504)  # overloaded, or not ready yet


class RetryableError(Exception):
    """A failure worth a retry, after `wait` seconds if the server says so."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


def _authorization(url: ServerUrl, key: str | None) -> dict[str, str]:
    if url.login and key:
        raise ValueError(f"a name before {url.url} and --api-key: keep one")
    if url.login:
        return {"Authorization": f"Basic {b64encode(url.login.encode()).decode()}"}
    key = key or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class HttpAsker(Asker):
    def __init__(self, url: ServerUrl, server: ServerTargetArgs, extra: Mapping[str, Any]) -> None:
        self.target, self.limit = url.url, server.concurrency
        self._model, self._extra, self._seconds = server.remote_model or "", extra, server.timeout
        self._headers = _authorization(url, server.api_key)
        self._timeout = aiohttp.ClientTimeout(server.timeout, connect=min(120, server.timeout))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with session(self._headers) as self._session:
            listed = await self._listed()
            self._model = self._model or _first(listed, self.target)
            yield

    async def _listed(self) -> tuple[int, bytes]:
        """Status and body of the list of models; a missing server is reported once, here."""
        try:
            url = f"{self.target}/v1/models"
            async with self._session.get(url, timeout=self._timeout) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(self.target, error, self._why(error)) from None

    async def ask(self, problem: Problem, options: Options) -> ModelReply:
        """Ask with retries; the latency is that of the last attempt."""
        wait = FIRST_WAIT
        for number in range(1, TRIES + 1):
            try:
                return await self._once(problem, options)
            except RetryableError as error:
                if number == TRIES:
                    return ModelReply(error=f"{error}, {TRIES} times")
                # Jitter: requests rejected together must not return together.
                pause = error.wait if error.wait is not None else wait * random.uniform(0.5, 1)
                await asyncio.sleep(min(pause, LONGEST_WAIT))
                wait *= 2
        raise AssertionError("the last attempt returns")

    async def _once(self, problem: Problem, options: Options) -> ModelReply:
        url, started = f"{self.target}/v1/chat/completions", time.perf_counter()
        body = self._body(problem, options)
        try:
            async with self._session.post(url, json=body, timeout=self._timeout) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryableError(self._why(error)) from None
        if response.status != 200:
            text = f"status {response.status}: {reason(data)}"
            if response.status in RETRY_STATUSES:
                raise RetryableError(text, _seconds(response.headers.get("Retry-After")))
            return ModelReply(error=text)
        return _reply(data, time.perf_counter() - started)

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no reply within {self._seconds:g} s"
        return f"{type(error).__name__}: {error}"

    def _body(self, problem: Problem, options: Options) -> dict[str, Any]:
        turns = options.conversation(problem)
        body = {
            "model": self._model,
            "messages": [msgspec.to_builtins(message) for message in turns],
            "max_tokens": options.max_new_tokens,
            **options.sampling,
        }
        return merged(body, self._extra)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


def _first(listed: tuple[int, bytes], target: str) -> str:
    """The name of the first listed model."""
    status, data = listed
    if status in (401, 403):
        raise RuntimeError(f"{target}: status {status}: {reason(data)}; give --api-key KEY")
    try:
        models = msgspec.json.decode(data, type=_Models).data
    except msgspec.DecodeError:
        models = []
    if status != 200 or not models:
        raise RuntimeError(f"{target} lists no model (status {status}): name one with --model")
    return models[0].id


def _seconds(header: str | None) -> float | None:
    """Seconds of a Retry-After header; dates are ignored, as clocks differ."""
    return float(header) if header is not None and header.strip().isdecimal() else None


def _reply(data: bytes, seconds: float) -> ModelReply:
    """The reply in an answer; separate reasoning is not graded."""
    try:
        part = msgspec.json.decode(data, type=OpenAIPart)
    except msgspec.DecodeError as error:
        return ModelReply(error=f"the answer is not one of OpenAI's API: {error}")
    if part.error is not None:
        return ModelReply(error=error_text(part.error))
    if not part.choices or part.choices[0].message is None:
        return ModelReply(error="the answer has no message")
    choice, message = part.choices[0], part.choices[0].message
    ended = choice.finish_reason
    return ModelReply(
        message.content or "",
        ended,
        part.usage.prompt_tokens if part.usage else None,
        part.usage.completion_tokens if part.usage else None,
        seconds,
        f"it ended with finish_reason {ended!r}" if ended in FAILED else "",
    )
