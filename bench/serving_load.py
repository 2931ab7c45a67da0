"""Loads that bench/serving.py drives a server with, over /generate with token ids, streamed.

Latencies are those of SGLang's bench_serving, which waits for text where ours waits for a token.
TTFT: from opening the connection of a request, which has one of its own, to the first event with
tokens. ITL: between two events of a stream; an event with several tokens counts as often as it has
tokens, each time with its share of the gap, and what comes with the first event counts for TTFT
alone. TPOT: from the first to the last event, by the tokens after the first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from moesaic.loadgen.args import DatasetArgs, Load
from moesaic.loadgen.client import Client
from moesaic.loadgen.datasets import DatasetSpec, draw_prompts
from moesaic.loadgen.metrics import RunMetrics, measure
from moesaic.loadgen.outcome import BenchPrompt
from moesaic.loadgen.texts import IdTexts
from moesaic.loadgen.traffic import Run, TrafficSource

WARM_TOKENS: Final = 8
# A closed loop sends nothing more after so many times --seconds.
LONGEST_CLOSED: Final = 3
# Chats that one client may have in a second; more are never asked for.
CHATS_A_SECOND: Final = 8
EVENLY: Final = 1e9  # burstiness: intervals are equal
RANGE_RATIO: Final = 0.5
LONG_OUTPUT: Final = 16


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, and how many requests or how long; lengths vary from half to whole."""

    input_len: int = 1024
    output_len: int = 128
    rounds: int = 4  # requests for each that is open at once
    seconds: float = 16.0  # for which an open load sends
    chats: int = 32  # open at once
    chat_len: int = 256
    long_len: int = 16384
    alone: int = 20  # prompts, one after the other


@dataclass(frozen=True)
class MixedFigures:
    """Chats beside long prompts, one every second, and these."""

    chats: RunMetrics
    long: RunMetrics


class LoadDriver:
    """Drives one server; every prompt is new, so that no cache helps."""

    def __init__(self, client: Client, sizes: Sizes, vocab_size: int, seed: int) -> None:
        self._client, self._sizes, self._seed = client, sizes, seed
        self._texts = IdTexts(vocab_size)

    async def closed(self, concurrency: int) -> RunMetrics:
        """As many requests as `concurrency` are open at once, after as many to warm up."""
        sizes = self._sizes
        await self._warm_up(self.draw(concurrency, sizes.input_len))
        load = Load(math.inf, concurrency, seconds=LONGEST_CLOSED * sizes.seconds)
        return await self._run(self.draw(concurrency * sizes.rounds, sizes.input_len), load)

    async def poisson(self, rate: float) -> RunMetrics:
        """Requests a second in a Poisson process, however many are open."""
        number = max(round(rate * self._sizes.seconds), 1)
        return await self._run(self.draw(number, self._sizes.input_len), Load(rate, None))

    async def alone(self) -> RunMetrics:
        """Prompts of the full length, one after the other, for one token each."""
        sizes = self._sizes
        prompts = self.draw(sizes.alone + 1, sizes.input_len, 1.0)
        first, *rest = (replace(prompt, output_len=1) for prompt in prompts)
        await self._warm_up([first])
        return await self._run(rest, Load(math.inf, 1))

    async def chats(self) -> RunMetrics:
        await self._warm_up(self.draw(self._sizes.chats, self._sizes.chat_len))
        return await self._chats()

    async def _chats(self) -> RunMetrics:
        sizes = self._sizes
        number = math.ceil(sizes.chats * sizes.seconds * CHATS_A_SECOND)
        load = Load(math.inf, sizes.chats, seconds=sizes.seconds)
        return await self._run(self.draw(number, sizes.chat_len), load)

    async def chats_beside_long(self) -> MixedFigures:
        number = max(math.floor(self._sizes.seconds), 1)
        prompts = self.draw(number + 1, self._sizes.long_len, 1.0)
        first, *rest = (replace(prompt, output_len=LONG_OUTPUT) for prompt in prompts)
        await self._warm_up([first])
        long = self._run(rest, Load(1.0, None, EVENLY))
        return MixedFigures(*await asyncio.gather(self._chats(), long))

    def draw(self, number: int, longest: int, ratio: float = RANGE_RATIO) -> list[BenchPrompt]:
        self._seed += 1
        args = DatasetArgs(
            random_input_len=longest,
            random_output_len=self._sizes.output_len,
            random_range_ratio=ratio,
        )
        return draw_prompts(DatasetSpec(args, self._texts, self._seed, number, ids=True))

    async def _warm_up(self, prompts: Sequence[BenchPrompt]) -> None:
        short = [replace(p, output_len=min(p.output_len, WARM_TOKENS)) for p in prompts]
        for outcome in await asyncio.gather(*map(self._client.ask, short)):
            if outcome.error:
                raise ValueError(f"a request to warm up failed: {outcome.error}")

    async def _run(self, prompts: Sequence[BenchPrompt], load: Load) -> RunMetrics:
        run = await TrafficSource(self._client, load, self._seed, progress=False).run(prompts)
        return measure(checked(run), {}, None)


def checked(run: Run) -> Run:
    """An answer of another length than asked for is a failure."""
    for outcome in run.outcomes:
        asked, got = outcome.prompt.output_len, outcome.output_tokens or 0
        if not outcome.error and got != asked:
            outcome.error = f"{got} tokens instead of {asked}"
    return run
