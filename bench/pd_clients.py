"""The clients of bench.pd_faults, which ask the other router if theirs is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import openai
from tqdm import tqdm

# What a client waits for the first token, and in all, before its request counts as lost.
PATIENCE: Final = 300.0
PAUSE: Final = 0.1


@dataclass
class Answer:
    text: str
    seconds: float
    first: float
    gap: float
    """The longest time between two chunks."""
    reconnected: int
    error: str = ""


class Clients:
    """Each sends one request after the other."""

    def __init__(self, urls: Sequence[str], calls: int, seed: int) -> None:
        """`urls`: of routers with the same flags. `calls`: different ones."""
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE, connect=5.0))
        self._clients = [
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="-", max_retries=0, http_client=self._http
            )
            for url in urls
        ]
        self.calls = [call_of(number) for number in range(calls)]
        self._chooser = random.Random(seed)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, number: int) -> Answer:
        """The whole answer, whatever happens to routers."""
        call, name = self.calls[number % len(self.calls)], f"{self._chooser.getrandbits(64):x}"
        router, begun = self._chooser.randrange(2), time.monotonic()
        answer = Answer("", 0.0, 0.0, 0.0, -1)
        last = begun
        while time.monotonic() - begun < PATIENCE:
            answer.reconnected += 1
            heard, is_done = "", False
            try:
                stream = await self._clients[router].chat.completions.create(
                    **call, stream=True, extra_headers={"X-Request-Id": name}
                )
                async for chunk in stream:
                    if not chunk.choices:
                        continue
                    choice = chunk.choices[0]
                    heard += choice.delta.content or ""
                    is_done |= choice.finish_reason is not None
                    if len(heard) > len(answer.text):
                        if not heard.startswith(answer.text):
                            answer.error = "it went on with another text"
                            return answer
                        answer.text, now = heard, time.monotonic()
                        answer.gap = max(answer.gap, now - last if answer.first else 0.0)
                        answer.first = answer.first or now - begun
                        last = now
                if is_done:
                    answer.seconds = time.monotonic() - begun
                    return answer
            except (httpx.HTTPError, openai.APIConnectionError) as error:
                answer.error = f"{type(error).__name__}: {error}"
            except openai.APIError as error:
                answer.error = f"{type(error).__name__}: {error}"
                return answer
            router = 1 - router
            await asyncio.sleep(PAUSE)
        answer.error = answer.error or f"no answer in {PATIENCE:g} s"
        return answer


def call_of(number: int) -> dict[str, Any]:
    chooser = random.Random(number)
    words = [chooser.choice("mosaic tile glass gold stone pattern".split()) for _ in range(60)]
    return {
        "model": "default",
        "messages": [{"role": "user", "content": " ".join(words[: chooser.randint(1, 60)])}],
        "temperature": 0.8,
        "seed": number,
        "max_tokens": chooser.randint(4, 48),
        "extra_body": {"ignore_eos": True},
    }


async def send(
    clients: Clients, numbers: Sequence[int], width: int, until: float, name: str
) -> list[tuple[int, Answer]]:
    """The answers of these requests, `width` at a time."""
    todo, found = iter(numbers), list[tuple[int, Answer]]()
    with tqdm(total=len(numbers), desc=name, unit="request", mininterval=5) as bar:

        async def client() -> None:
            for number in todo:
                if time.monotonic() > until:
                    return
                found.append((number, await clients.ask(number)))
                bar.update()

        await asyncio.gather(*(client() for _ in range(width)))
    return found
