"""A server grows from one rank to eight and shrinks again, every two seconds, while clients stream:
is there an answer other than that of one rank?

    python -m bench.elastic_resize                  # a minute, 1 and 8 in turn
    python -m bench.elastic_resize --sizes 1 4 2 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import aiohttp

from bench.common import machine, print_table, write_json
from bench.elastic import CLIENTS, QUESTIONS, SETTLE_SECONDS, _figures
from bench.elastic_client import Question, Tally, ask, client
from bench.elastic_faults import Served, serving

FLAGS: Final = "--tp 1 --moe-a2a-backend deepep"
# A size that takes longer than this is asked for again in vain, and another one is next.
LOOK_SECONDS: Final = 0.02


@dataclass
class Resizes:
    flags: str
    sizes: list[int]
    period: float
    seconds: float
    asked: int
    refused: list[str]
    """Answers to /scale_elastic_ep other than 200."""
    reached: dict[str, list[float]]
    """Seconds until each size was reached, of those that were before the next one was due."""
    requests: int
    wrong: int
    lost: int
    gaps_before: list[float]
    """Median, P99 and longest time between two events of a stream, of one rank, then of all."""
    gaps: list[float]
    shown: list[str]
    reconnects: int = 0
    """How often a client lost its connection, or got another status than 200, and asked again."""

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.lost or self.refused or self.reconnects)


async def resize(served: Served, sizes: Sequence[int], period: float, seconds: float) -> Resizes:
    before, tally, until = Tally(), Tally(), asyncio.Event()
    expected: dict[Question, Any] = {}
    found = Resizes(FLAGS, list(sizes), period, 0.0, 0, [], {}, 0, 0, 0, [], [], [])
    async with aiohttp.ClientSession() as session:
        questions = [Question.draw(number) for number in range(QUESTIONS)]
        answers = await asyncio.gather(*(ask(session, served.url, one) for one in questions))
        for question, answer in zip(questions, answers, strict=True):
            before.count(answer, None, str(question))
            expected[question] = answer.value
        clients = [
            asyncio.create_task(client(served.url, number, expected, tally, until))
            for number in range(CLIENTS)
        ]
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            size = sizes[found.asked % len(sizes)]
            found.asked += 1
            await _reach(session, served.url, size, now + period, found)
        until.set()
        await asyncio.gather(*clients)
    found.seconds = round(time.monotonic() - began, 1)
    found.requests = tally.right + tally.wrong + tally.lost
    found.reconnects = before.reconnects + tally.reconnects
    found.wrong, found.lost = tally.wrong + before.wrong, tally.lost + before.lost
    found.gaps_before, found.gaps = _figures(before), _figures(tally)
    found.shown = before.shown + tally.shown
    return found


async def _reach(
    session: aiohttp.ClientSession, url: str, size: int, until: float, found: Resizes
) -> None:
    """Asks for the size, and looks until the next one is due."""
    began = time.monotonic()
    async with session.post(f"{url}/scale_elastic_ep", json={"new_ep_size": size}) as response:
        if response.status != 200:
            found.refused.append(f"{response.status}: {(await response.text())[:200]}")
    is_there = False
    while (now := time.monotonic()) < until:
        if not is_there:
            async with session.get(f"{url}/is_scaling_elastic_ep") as response:
                state = await response.json()
            is_there = not state["is_scaling_elastic_ep"] and state["effective_ep_size"] == size
            if is_there:
                seconds = round(time.monotonic() - began, 3)
                found.reached.setdefault(str(size), []).append(seconds)
        await asyncio.sleep(min(LOOK_SECONDS, max(0.0, until - now)))


def run(sizes: Sequence[int], period: float, seconds: float) -> Resizes:
    with serving(f"{FLAGS} --max-ep-size {max(sizes)}") as served:
        found = asyncio.run(resize(served, sizes, period, seconds))
        served.run.learn()
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(SETTLE_SECONDS)
        served.run.await_gone()
    return found


HEADER: Final = (
    *("sizes", "asked for", "reached in time", "median seconds", "requests", "lost", "wrong"),
    *("gap of one rank: median", "P99", "gap: median", "P99", "longest"),
)


def row(found: Resizes) -> list[str]:
    counts = {size: len(times) for size, times in found.reached.items()}
    medians = {size: sorted(times)[len(times) // 2] for size, times in found.reached.items()}
    return [
        " ↔ ".join(map(str, found.sizes)),
        str(found.asked),
        ", ".join(f"{size}: {counts.get(str(size), 0)}" for size in found.sizes),
        ", ".join(f"{size}: {medians[size]:.2f}" for size in medians),
        *(f"{count:,}" for count in (found.requests, found.lost, found.wrong)),
        *(f"{value:.2f}" for value in (*found.gaps_before[:2], *found.gaps)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.elastic_resize", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8], help="in turn")
    parser.add_argument("--period", type=float, default=2.0, help="seconds from one to the next")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    found = run(args.sizes, args.period, args.seconds)
    for text in (*found.refused, *found.shown):
        print(text, file=sys.stderr)
    facts = {**machine(1), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    write_json("elastic_resize", {"machine": facts, **asdict(found)})
    print_table(HEADER, [row(found)])
    return int(not found.is_good)


if __name__ == "__main__":
    raise SystemExit(main())
