"""A rank is killed under load: how long until the next token, until it is back, and until the
service is as fast as before; and is an answer lost or another one?

    python -m bench.elastic_gpu                  # one H200: 4 ranks, the shape of Qwen3-30B, graphs
    python -m bench.elastic_gpu --device cpu --model-path tiny:qwen3_moe --batch 8 --requests 24 \
        --output-len 24 --redundant 4 --kills 1 --name ""      # a trial of the program itself
    python -m bench.elastic_gpu --markdown          # no run: the table from the JSON

A number of clients each send a request when their last one has ended. All requests are first
answered without faults, twice: the first time warms up. Then ranks are killed one after another,
each when the one before is back and the service is as fast as it was; answers must stay the same,
token by token (the service computes deterministically). *Next token*: from the kill to the end of
the longest time in which no client got one. *Stall*: the longest pause of a request that was open.
*As fast*: until a second begins with at least 95% of the tokens of the median one without faults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final

from bench.common import (
    RESULTS,
    Range,
    device_name,
    machine,
    mixed_workload,
    print_table,
    write_json,
)
from bench.common import Request as Question
from bench.fault_run import Run
from moesaic import Engine
from moesaic.engine.frontend.inputs import GenerateInput

NAME: Final = "h200_elastic"
VOCAB: Final = 256
ENOUGH: Final = 0.95
WINDOW: Final = 1.0
FLAGS: Final[dict[str, Any]] = {
    "enable_dp_attention": True,
    "moe_a2a_backend": "deepep",
    "elastic_ep_backend": "mooncake",
    "restart_limit": 0,
    "enable_deterministic_inference": True,
}
# A rank that is not back by then will not come.
PATIENCE: Final = 120.0
POLL: Final = 0.05


@dataclass
class Load:
    """What clients got: the times of all tokens, and of each request its answer and its times."""

    tokens: list[float] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    began: float = 0.0

    def rate(self, begin: float) -> float:
        """Tokens in the second that begins then."""
        first, last = bisect(self.tokens, begin), bisect(self.tokens, begin + WINDOW)
        return (last - first) / WINDOW

    def resumed(self, begin: float, end: float) -> float:
        """When the longest time without any token ended, between these two."""
        marks = [begin, *self.tokens[bisect(self.tokens, begin) : bisect(self.tokens, end)]]
        return max(pairwise(marks), key=lambda pair: pair[1] - pair[0], default=(begin, end))[1]

    def usual_rate(self) -> float:
        """Of the median second; the first and the last are left out, in which not all clients
        wait for tokens."""
        seconds = int(self.tokens[-1] - self.began)
        rates = [self.rate(self.began + n) for n in range(1, max(2, seconds - 1))]
        return statistics.median(rates)


@dataclass(frozen=True)
class Kill:
    """Seconds from the kill, and what the supervisor told of it."""

    rank: int
    next_token: float
    stall: float
    stall_median: float
    returned: float | None
    as_fast: float | None
    lost_ranks: int
    changes: list[dict[str, Any]]
    restart_log: list[str]


async def answer(engine: Engine, number: int, question: Question, load: Load) -> None:
    params = {"max_new_tokens": question.output_len, "ignore_eos": True, "sampling_seed": number}
    params["temperature"] = 0.8 * (number % 2)
    call = GenerateInput.from_arguments(None, params, question.prompt, {"stream": True})
    times: list[float] = []
    load.times[number] = times
    async with aclosing(engine.stream(call)) as updates:
        async for update in updates:
            new = update.progress.num_output - len(times)
            times += [time.monotonic()] * new
            load.tokens += times[len(times) - new :]
    load.answers[number] = update.request.output_ids
    if (reason := update.finish_reason) is None or reason.type != "length":
        load.lost.append(f"request {number}: {reason}")


async def run_load(engine: Engine, questions: Sequence[Question], batch: int, load: Load) -> None:
    """Answers all questions, `batch` at a time."""
    left: Iterator[tuple[int, Question]] = iter(enumerate(questions))
    load.began = time.monotonic()

    async def client() -> None:
        for number, question in left:
            await answer(engine, number, question, load)

    await asyncio.gather(*(client() for _ in range(batch)))


async def strike(engine: Engine, run: Run, rank: int, load: Load, usual: float) -> Kill:
    """Kills a rank and waits until the service is as it was."""
    info = await asyncio.to_thread(engine.get_server_info)
    before, known = info["membership"], len(run.log.read_text())
    open_then = [times for n, times in load.times.items() if n not in load.answers]
    began = time.monotonic()
    os.kill(info["ranks"][rank]["pid"], signal.SIGKILL)
    returned = as_fast = None
    told = before
    while time.monotonic() - began < PATIENCE and as_fast is None:
        await asyncio.sleep(POLL)
        now = time.monotonic()
        if returned is None:
            told = (await asyncio.to_thread(engine.get_server_info))["membership"]
            if told["lost"] > before["lost"] and len(told["live"]) == len(info["ranks"]):
                returned = time.monotonic() - began
        elif now - WINDOW > began + returned and load.rate(now - WINDOW) >= ENOUGH * usual:
            as_fast = now - WINDOW - began
    pauses = [
        end - begin for times in open_then for begin, end in pairwise(times) if begin <= began < end
    ]
    log = run.log.read_text()[known:]
    shown = re.compile(rf"rank {rank} DP|supervisor\]")
    return Kill(
        rank=rank,
        next_token=round(load.resumed(began, began + (returned or PATIENCE)) - began, 4),
        stall=round(max(pauses, default=0.0), 4),
        stall_median=round(statistics.median(pauses or [0.0]), 4),
        returned=returned and round(returned, 3),
        as_fast=as_fast and round(as_fast, 3),
        lost_ranks=told["lost"] - before["lost"],
        changes=told["changes"][len(before["changes"]) :],
        restart_log=[line for line in log.splitlines() if shown.search(line)][:40],
    )


async def faulty_load(
    engine: Engine, run: Run, questions: Sequence[Question], args: argparse.Namespace, usual: float
) -> tuple[Load, list[Kill]]:
    """The load again, in whose midst ranks are killed: never the first, and each in its turn."""
    load, kills = Load(), list[Kill]()
    work = asyncio.create_task(run_load(engine, questions, args.batch, load))
    for number in range(args.kills):
        await asyncio.sleep(args.pause)
        if work.done():
            raise RuntimeError(f"the load ended before kill {number}: give more --requests")
        rank = 1 + number % (args.ranks - 1)
        kills.append(await strike(engine, run, rank, load, usual))
    await work
    return load, kills


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    flags = FLAGS | {
        "model_path": args.model_path,
        "device": args.device,
        "tp_size": args.ranks,
        "ep_size": args.ranks,
        "dp_size": args.ranks,
        "ep_num_redundant_experts": args.redundant,
        "max_running_requests": args.batch * 2,
        "mem_fraction_static": args.mem_fraction,
        "max_total_tokens": args.max_total_tokens,
    }
    if args.model_path.startswith("shape:"):
        flags |= {"load_format": "dummy", "dtype": "bfloat16"}
    questions = mixed_workload(
        args.requests, VOCAB, Range(16, 64), Range(args.output_len // 2, args.output_len), 0
    )
    began = time.monotonic()
    with run.marked():
        engine = Engine(**flags)
    try:
        start = time.monotonic() - began
        quiet = Load()
        for _ in range(2):
            quiet = Load()
            asyncio.run(run_load(engine, questions, args.batch, quiet))
        usual = quiet.usual_rate()
        load, kills = asyncio.run(faulty_load(engine, run, questions, args, usual))
        info = engine.get_server_info()
        left = {name: info[name] for name in ("running", "waiting", "pages_used") if info[name]}
    finally:
        with suppress(Exception):
            engine.shutdown()
    wrong = [n for n, tokens in quiet.answers.items() if load.answers.get(n) != tokens]
    return {
        "machine": {**machine(1), "device": device_name(args.device)},
        "flags": {name: value for name, value in flags.items() if value is not None},
        "batch": args.batch,
        "requests": args.requests,
        "start_s": round(start, 1),
        "tok_s": round(usual, 1),
        "tok_s_with_kills": round(len(load.tokens) / (load.tokens[-1] - load.began), 1),
        "lost": load.lost + quiet.lost,
        "wrong": wrong,
        "left": left,
        "kills": [asdict(kill) for kill in kills],
    }


HEADER: Final = ("killed", "next token", "stall", "median", "back", "as fast", "ranks lost")


def rows(kills: Sequence[dict[str, Any]]) -> list[list[str]]:
    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.2f} s"

    names = ("next_token", "stall", "stall_median", "returned", "as_fast")
    return [
        [f"rank {one['rank']}", *(seconds(one[name]) for name in names), str(one["lost_ranks"])]
        for one in kills
    ]


def summary(found: dict[str, Any]) -> str:
    lost, wrong = len(found["lost"]), len(found["wrong"])
    return (
        f"{found['requests']} requests, {found['batch']} at a time, on "
        f"{found['machine']['device']}: {lost} lost, {wrong} with another answer; "
        f"{found['tok_s']:.0f} tokens/s without faults, "
        f"{found['tok_s_with_kills']:.0f} with them"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.elastic_gpu", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--model-path", default="shape:qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--redundant",
        type=int,
        default=44,
        help="--ep-num-redundant-experts: three of four ranks hold all 128 experts with 44",
    )
    parser.add_argument("--batch", type=int, default=128, help="clients")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before each kill")
    parser.add_argument("--mem-fraction", type=float, default=None, help="--mem-fraction-static")
    parser.add_argument("--max-total-tokens", type=int, default=None)
    parser.add_argument("--name", default=NAME, help="of the JSON; empty: none is written")
    parser.add_argument("--markdown", action="store_true", help="print the table of the JSON")
    args = parser.parse_args()
    if args.markdown:
        found = json.loads((RESULTS / f"{args.name}.json").read_text())
        lines = [HEADER, ["---"] * len(HEADER), *rows(found["kills"])]
        print(summary(found), *(f"| {' | '.join(line)} |" for line in lines), sep="\n")
        return 0
    run = Run()
    try:
        found = measure(args, run)
    finally:
        run.close()
    if args.name:
        write_json(args.name, found)
    print(summary(found))
    print_table(HEADER, rows(found["kills"]))
    for text in found["lost"][:5]:
        print(text)
    never = any(one["returned"] is None or one["as_fast"] is None for one in found["kills"])
    return int(bool(found["lost"] or found["wrong"] or found["left"] or never))


if __name__ == "__main__":
    raise SystemExit(main())
