"""Sends requests at their arrival times, with limited concurrency."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from tqdm import tqdm

from moesaic.loadgen.args import Load
from moesaic.loadgen.client import Client
from moesaic.loadgen.outcome import BenchPrompt, Outcome


@dataclass(frozen=True)
class Run:
    outcomes: list[Outcome]  # of the requests that ended
    duration: float
    client_cpu: float  # the share of a core that the client used
    cut: bool = False  # interrupted
    open: int = 0  # requests that did not end


def arrival_times(number: int, load: Load, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests are sent. Intervals have a gamma distribution with
    the burstiness as shape: 1 gives a Poisson process."""
    rng = random.Random(seed)
    at = 0.0
    for _ in range(number):
        yield at
        if math.isfinite(load.rate):
            at += rng.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness))


class TrafficSource:
    def __init__(self, client: Client, load: Load, seed: int, progress: bool) -> None:
        self._client, self._load, self._seed = client, load, seed
        self._progress = progress
        self._done: list[Outcome] = []
        self._until, self._unsent = math.inf, 0
        self._slots: AbstractAsyncContextManager[object] = nullcontext()
        if load.limit is not None:
            self._slots = asyncio.Semaphore(load.limit)

    async def run(self, prompts: Sequence[BenchPrompt]) -> Run:
        """Send all prompts and wait; cancelling returns the outcomes so far."""
        tasks: list[asyncio.Task[None]] = []
        cut = False
        cpu, started = time.thread_time(), time.perf_counter()
        self._until = started + self._load.seconds
        with tqdm(total=len(prompts), disable=not self._progress, unit="req") as bar:
            try:
                await self._send(prompts, started, tasks, bar.update)
                await asyncio.gather(*tasks)
            except asyncio.CancelledError:
                cut = True
        # Up to the last answer, without the cost of closing.
        ends = [outcome.ended for outcome in self._done]
        ended = time.perf_counter() if cut or not ends else max(ends)
        duration = max(ended - started, 1e-9)
        share = (time.thread_time() - cpu) / duration
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        left = len(prompts) - len(self._done) - self._unsent
        return Run(self._done, duration, share, cut, left)

    async def _send(
        self,
        prompts: Sequence[BenchPrompt],
        started: float,
        tasks: list[asyncio.Task[None]],
        tick: Callable[[], object],
    ) -> None:
        times = arrival_times(len(prompts), self._load, self._seed)
        for prompt, at in zip(prompts, times, strict=True):
            # By the clock, not by intervals: the cost of sending must not lower the rate.
            if (wait := started + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self._one(prompt, tick)))

    async def _one(self, prompt: BenchPrompt, tick: Callable[[], object]) -> None:
        async with self._slots:
            if time.perf_counter() > self._until:
                self._unsent += 1
                return
            outcome = await self._client.ask(prompt)
        self._done.append(outcome)
        tick()
