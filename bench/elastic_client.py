"""Clients of an elastic server that may lose their connections: they ask again by the id of their
request, and streams go on behind the last event that they have."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

# Only ends what hangs: after each loss of the supervisor ranks load again.
REQUEST_SECONDS: Final = 600.0
# Before a client that has lost its connection connects again.
RECONNECT_SECONDS: Final = 0.05
SHOWN: Final = 5
# Statuses of a server that ends or starts.
AWAY: Final = (502, 503)


@dataclass(frozen=True)
class Question:
    number: int
    length: int
    tokens: int
    temperature: float
    logprobs: bool
    text: bool
    """Over /v1/completions, else /generate."""

    @classmethod
    def draw(cls, number: int) -> Question:
        rng = random.Random(number)
        seeded, text = number % 2 == 1, number % 4 == 3
        length, tokens = rng.randint(3, 220), rng.randint(20, 90)
        logprobs = number % 6 == 0
        return cls(number, length, tokens, 0.8 if seeded else 0.0, logprobs, text)

    @property
    def path(self) -> str:
        return "/v1/completions" if self.text else "/generate"

    @property
    def streams(self) -> bool:
        return self.number % 8 != 7

    def body(self) -> dict[str, Any]:
        rng = random.Random(self.number)
        prompt = [rng.randrange(3, 250) for _ in range(self.length)]
        shared = {"temperature": self.temperature, "ignore_eos": True}
        if self.text:
            more = {"model": "default", "prompt": prompt, "max_tokens": self.tokens}
            return shared | more | {"seed": self.number, "stream": self.streams}
        sampling = shared | {"max_new_tokens": self.tokens, "sampling_seed": self.number}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        return body | ({"return_logprob": True} if self.logprobs else {})


@dataclass
class Answer:
    """What a stream has brought, and when each of its events came."""

    parts: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    broken: str = ""
    done: bool = False
    error: str = ""

    last_id: str = ""
    """Of the last event."""
    reconnects: int = 0

    def take(self, line: bytes, text: bool) -> None:
        if line.startswith(b"id: "):
            self.last_id = line[4:].decode()
            return
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            self.done = True
            return
        told = json.loads(data)
        if "error" in told:
            self.error = str(told["error"])
            return
        self.times.append(time.monotonic())
        if text:
            self.parts += [choice["text"] for choice in told["choices"]]
            return
        ids, before = told["output_ids"], len(self.parts)
        scores = told["meta_info"].get("output_token_logprobs") or [None] * len(ids)
        found = [[token, score and score[0]] for token, score in zip(ids, scores, strict=True)]
        if found[:before] != self.parts:
            self.broken = f"event {len(self.times)} does not continue the one before"
        self.parts = found
        reason = told["meta_info"]["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            self.error = str(reason)

    @property
    def value(self) -> Any:
        return "".join(self.parts) if self.parts and isinstance(self.parts[0], str) else self.parts


@dataclass
class Tally:
    right: int = 0
    wrong: int = 0
    lost: int = 0
    shown: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of the time between two events of a stream."""
    reconnects: int = 0
    waiting: list[Answer] = field(default_factory=list)
    """Streams that were asked for and have not ended."""

    @property
    def prompts(self) -> int:
        """How many wait for their first token."""
        return sum(not one.times for one in self.waiting)

    def lose(self, why: str) -> None:
        self.lost += 1
        self._show(why)

    def count(self, answer: Answer, expected: Any, what: str) -> None:
        self.reconnects += answer.reconnects
        self.gaps += list(zip(answer.times, answer.times[1:], strict=False))
        if answer.error or not answer.done:
            self.lose(f"{what}: {answer.error or 'no end'}")
        elif answer.broken or (expected is not None and answer.value != expected):
            self.wrong += 1
            self._show(f"{what}: {answer.broken or 'another answer'}")
        else:
            self.right += 1

    def _show(self, text: str) -> None:
        if len(self.shown) < SHOWN:
            self.shown.append(text[:400])


async def ask(
    session: aiohttp.ClientSession,
    url: str | Sequence[str],
    question: Question,
    answer: Answer | None = None,
) -> Answer:
    """Asks until there is an end or an error that is not that of a connection, servers in turn if
    there are several. `answer`: grows."""
    urls = [url] if isinstance(url, str) else url
    answer, request_id = answer or Answer(), uuid.uuid4().hex
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            while not (answer.done or answer.error):
                one = urls[answer.reconnects % len(urls)]
                try:
                    await _attempt(session, one, question, answer, request_id)
                    lost = not (answer.done or answer.error)
                except aiohttp.ClientError:
                    lost = True
                if lost:
                    answer.reconnects += 1
                    await asyncio.sleep(RECONNECT_SECONDS)
    except TimeoutError:
        answer.error = f"no end within {REQUEST_SECONDS:g} s"
    return answer


async def _attempt(
    session: aiohttp.ClientSession, url: str, question: Question, answer: Answer, request_id: str
) -> None:
    headers = {"X-Request-Id": request_id, "Last-Event-ID": answer.last_id}
    body = question.body()
    async with session.post(url + question.path, json=body, headers=headers) as response:
        if response.status in AWAY:
            return
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
        elif question.streams:
            async for line in _lines(response):
                answer.take(line, question.text)
        else:
            answer.take(await response.read(), question.text)
            answer.done = True


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.strip():
            yield line.strip()


async def client(
    url: str, number: int, expected: dict[Question, Any], tally: Tally, until: asyncio.Event
) -> None:
    rng = random.Random(number)
    async with aiohttp.ClientSession() as session:
        while not until.is_set():
            question = rng.choice(list(expected))
            answer = Answer()
            tally.waiting += [answer] if question.streams else []
            await ask(session, url, question, answer)
            tally.waiting = [one for one in tally.waiting if one is not answer]
            tally.count(answer, expected[question], str(question))
