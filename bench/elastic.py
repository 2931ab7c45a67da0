"""Ranks of a server are killed, stopped and made to raise while clients stream, and so are its HTTP
process and its supervisor: is an answer lost, and is each the one of a run without faults?

    python -m bench.elastic                               # all layouts, a minute of faults each
    python -m bench.elastic --only deepep --faults 20 --add   # to what the JSON has of this layout
    python -m bench.elastic --memory-group /sys/fs/cgroup/x   # ranks run out of memory, too
    python -m bench.elastic --markdown                    # no run: the tables from the JSON

Every question is first answered without faults. Under faults its answer must be the same, token by
token and for some questions logprob by logprob, each event a continuation of the one before. The
server computes deterministically, so that "the same" needs no tolerance. Victims, kinds and moments
are drawn from a seed; a victim may be starting again, or be in the middle of a recovery. An
exception is one of the next layer that the rank computes, an error one that a handler of a signal
raises wherever the rank is, and for an OOM kill the rank takes more memory than a control group of
the kernel lets it (--memory-group: one in which this process may make others). Clients of a lost
HTTP process ask again by the id of their request, and streams go on behind the last event that they
have. Prefill and decode instances have a benchmark of their own, bench.pd_faults --elastic.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from tqdm import tqdm

from bench.common import RESULTS, machine, print_table, write_json
from bench.elastic_client import Question, Tally, ask, client
from bench.elastic_faults import (
    EXCEPTION,
    HEAD_WEIGHTS,
    HEADS,
    NODE_WEIGHTS,
    OOM_KILL,
    RANKS_ALONE,
    WEIGHTS,
    Fault,
    Served,
    Victims,
    serving,
)
from bench.memory_group import MemoryGroup

BACKENDS: Final = ("none", "deepep", "mooncake", "mori", "flashinfer", "ascend_fuseep")
GROUPS: Final = "--tp 4 --ep 4 --dp 4 --enable-dp-attention --ep-num-redundant-experts 4"
GROUPS_OF_8: Final = "--tp 8 --ep 8 --dp 8 --enable-dp-attention --ep-num-redundant-experts 8"
LAYOUTS: Final = {
    **{name: f"{GROUPS} --moe-a2a-backend {name}" for name in BACKENDS},
    **{f"{name}, 8 ranks": f"{GROUPS_OF_8} --moe-a2a-backend {name}" for name in BACKENDS},
    "deepep, resized": (
        "--tp 4 --ep 4 --dp 4 --enable-dp-attention --ep-num-redundant-experts 24 "
        "--moe-a2a-backend deepep"
    ),
    "deepep, experts move": (
        f"{GROUPS} --moe-a2a-backend deepep --enable-eplb --eplb-rebalance-num-iterations 10"
    ),
    "deepep, groups of 2": (
        "--tp 4 --ep 4 --dp 2 --enable-dp-attention --ep-num-redundant-experts 4 "
        "--moe-a2a-backend deepep"
    ),
    "deepep, no redundancy": (
        "--tp 4 --ep 4 --dp 4 --enable-dp-attention --moe-a2a-backend deepep"
    ),
    "TP 2, PP 2": "--tp 2 --pp 2 --ep 2 --moe-a2a-backend deepep",
    "deepep, head too": f"{GROUPS} --moe-a2a-backend deepep",
    "deepep, two nodes": (
        "--tp 4 --ep 4 --dp 4 --enable-dp-attention --ep-num-redundant-experts 8 "
        "--moe-a2a-backend deepep"
    ),
    "flashinfer, two nodes, experts move": (
        f"{GROUPS} --moe-a2a-backend flashinfer --enable-eplb --eplb-rebalance-num-iterations 10"
    ),
}
# Layouts in which the HTTP process and the supervisor are victims, too, or a node is.
HEAD: Final = {"deepep, head too": HEAD_WEIGHTS, "deepep, two nodes": NODE_WEIGHTS}
# The sizes that are asked for meanwhile, in any order.
SIZES: Final = {"deepep, resized": (1, 2, 3, 4)}
NODES: Final = {"deepep, two nodes": 2, "flashinfer, two nodes, experts move": 2}
QUESTIONS, CLIENTS = 24, 8
START_SECONDS: Final = 300.0
SETTLE_SECONDS: Final = 60.0
# A stall that began this much after a fault is not the fault's.
BLAMED_SECONDS: Final = 0.8
# How often it waits until ranks have recovered.
CALM_SHARE: Final = 0.75
ALONE_SECONDS: Final = 1.0
# A second error in the steps that look for the cause of the first would be blamed on a request.
SEARCH_SECONDS: Final = 5.0
# Between two sizes, and how long one may take.
RESIZE_PAUSE: Final = (0.1, 2.0)
RESIZE_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Plan:
    """What happens to one layout. `pace` is the mean number of seconds between two faults."""

    faults: int
    seconds: float
    seed: int = 0
    pace: float = 1.0
    kinds: Sequence[str] = tuple(kind for kind in WEIGHTS if kind != OOM_KILL)
    memory_group: Path | None = None
    """Where ranks are killed for lack of memory."""


@dataclass
class Outcome:
    layout: str
    flags: str
    seconds: float
    requests: int
    wrong: int
    lost: int
    faults: dict[str, int]
    """By kind, and by what went on."""
    doing: dict[str, int]
    epochs: int
    stalls: dict[str, list[float]]
    """The longest gap that each fault lies in, by kind, sorted; of faults that found all ranks
    live and were not followed by another one at once."""
    gaps_before: list[float]
    """Median, P99 and longest of all gaps without faults, then with them."""
    gaps: list[float]
    left: list[str]
    shown: list[str]
    reconnects: int = 0
    """How often a client lost its connection, or was told that the server is away, and asked again:
    never where no HTTP process is a victim."""

    @property
    def is_good(self) -> bool:
        surprises = 0 if "http" in HEAD.get(self.layout, ()) else self.reconnects
        return not (self.wrong or self.lost or self.left or surprises)

    def __add__(self, other: Outcome) -> Outcome:
        """Both runs of a layout; of the gaps, the longer ones."""
        kinds = sorted({*self.stalls, *other.stalls})
        stalls = {kind: self.stalls.get(kind, []) + other.stalls.get(kind, []) for kind in kinds}
        return Outcome(
            layout=self.layout,
            flags=self.flags,
            seconds=round(self.seconds + other.seconds, 1),
            requests=self.requests + other.requests,
            wrong=self.wrong + other.wrong,
            lost=self.lost + other.lost,
            faults=dict(Counter(self.faults) + Counter(other.faults)),
            doing=dict(Counter(self.doing) + Counter(other.doing)),
            epochs=self.epochs + other.epochs,
            reconnects=self.reconnects + other.reconnects,
            stalls={kind: sorted(values) for kind, values in stalls.items()},
            gaps_before=[
                max(pair) for pair in zip(self.gaps_before, other.gaps_before, strict=True)
            ],
            gaps=[max(pair) for pair in zip(self.gaps, other.gaps, strict=True)],
            left=self.left + other.left,
            shown=self.shown + other.shown,
        )


def added(found: Sequence[Outcome], before: Sequence[dict[str, Any]]) -> list[Outcome]:
    """The outcomes of earlier runs with those of this one."""
    known = {outcome.layout: outcome for outcome in (Outcome(**one) for one in before)}
    for one in found:
        known[one.layout] = known[one.layout] + one if one.layout in known else one
    return [known[name] for name in LAYOUTS if name in known]


async def chaos(
    served: Served, layout: str, plan: Plan, group: MemoryGroup | None
) -> tuple[Tally, Tally, list[Fault]]:
    """Strikes mostly when all ranks are back, else while they recover."""
    before, tally, struck = Tally(), Tally(), list[Fault]()
    questions = [Question.draw(number) for number in range(QUESTIONS)]
    expected: dict[Question, Any] = {}
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(ask(session, served.url, one) for one in questions))
        for question, answer in zip(questions, answers, strict=True):
            before.count(answer, None, str(question))
            expected[question] = answer.value
    heads, ranks = HEAD.get(layout, RANKS_ALONE), ranks_of(LAYOUTS[layout])
    victims = Victims(served.run, ranks, plan.kinds, heads, NODES.get(layout, 1), group)
    rng, until = random.Random(plan.seed), asyncio.Event()
    tasks = [
        asyncio.create_task(client(served.url, number, expected, tally, until))
        for number in range(CLIENTS)
    ]
    if layout in SIZES:
        tasks.append(asyncio.create_task(resize(served.url, layout, victims, tally, until)))
    end = time.monotonic() + plan.seconds
    while len(struck) < plan.faults and time.monotonic() < end and served.process.poll() is None:
        if rng.random() < CALM_SHARE:
            last = struck[-1].when if struck else 0.0
            await _recovery(victims, last + ALONE_SECONDS, end)
        await asyncio.sleep(rng.uniform(0.05, 2 * plan.pace))
        raised = max((fault.when for fault in struck if fault.kind == EXCEPTION), default=0.0)
        victims.prompts = tally.prompts
        fault = victims.strike(rng, may_raise=time.monotonic() > raised + SEARCH_SECONDS)
        struck += [fault] if fault else []
    until.set()
    await asyncio.gather(*tasks)
    return before, tally, struck


async def resize(
    url: str, layout: str, victims: Victims, tally: Tally, until: asyncio.Event
) -> None:
    """Asks for one size after the other, and in the end for all ranks. Another answer than 200, or
    a size that is never reached, counts as a lost request."""
    rng, whole = random.Random(0), max(SIZES[layout])
    async with aiohttp.ClientSession() as session:
        while not until.is_set():
            size = rng.choice([one for one in SIZES[layout] if one != victims.size])
            await _reach(session, url, size, victims, tally)
            await asyncio.sleep(rng.uniform(*RESIZE_PAUSE))
        await _reach(session, url, whole, victims, tally)


async def _reach(
    session: aiohttp.ClientSession, url: str, size: int, victims: Victims, tally: Tally
) -> None:
    victims.resizes = True
    async with session.post(f"{url}/scale_elastic_ep", json={"new_ep_size": size}) as response:
        if response.status != 200:
            tally.lose(f"{size} ranks: {response.status} {await response.text()}")
            return
    victims.size, end = size, time.monotonic() + RESIZE_SECONDS
    while time.monotonic() < end:
        async with session.get(f"{url}/is_scaling_elastic_ep") as response:
            state = await response.json()
        if not state["is_scaling_elastic_ep"] and state["effective_ep_size"] == size:
            victims.resizes = False
            return
        await asyncio.sleep(0.02)
    tally.lose(f"{size} ranks were not reached in {RESIZE_SECONDS:g} s: {state}")


async def _recovery(victims: Victims, since: float, until: float) -> None:
    """Waits until all ranks are live, and not before `since`."""
    while (now := time.monotonic()) < until and (now < since or not victims.is_calm):
        await asyncio.sleep(0.02)


def run_layout(name: str, plan: Plan) -> Outcome:
    flags = LAYOUTS[name]
    with serving(flags, nodes=NODES.get(name, 1)) as served, _group(plan) as group:
        began = time.monotonic()
        before, tally, struck = asyncio.run(chaos(served, name, plan, group))
        took = time.monotonic() - began
        left = _settle(served)
        served.run.learn()
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(SETTLE_SECONDS)
        served.run.await_gone()
        log = served.run.log.read_text()
        left += served.run.left()
        planned = sum(fault.kind == OOM_KILL for fault in struck)
        if group is not None and group.kills != planned:
            left.append(f"{group.kills} of {planned} OOM kills were the kernel's")
    return Outcome(
        layout=name,
        flags=flags,
        seconds=round(took, 1),
        requests=tally.right + tally.wrong + tally.lost,
        wrong=tally.wrong + before.wrong,
        lost=tally.lost + before.lost,
        faults=dict(Counter(fault.kind for fault in struck)),
        doing=dict(Counter(fault.doing for fault in struck)),
        epochs=log.count(": adopted by "),
        reconnects=tally.reconnects,
        stalls=_stalls(tally, struck),
        gaps_before=_figures(before),
        gaps=_figures(tally),
        left=left,
        shown=before.shown + tally.shown,
    )


@contextmanager
def _group(plan: Plan) -> Iterator[MemoryGroup | None]:
    if plan.memory_group is None:
        yield None
        return
    group = MemoryGroup(plan.memory_group)
    try:
        yield group
    finally:
        group.close()


def ranks_of(flags: str) -> int:
    words = flags.split()
    return int(words[words.index("--tp") + 1]) * (
        int(words[words.index("--pp") + 1]) if "--pp" in words else 1
    )


def _settle(served: Served) -> list[str]:
    """What is not as it was before the load, once there was time."""
    end, left = time.monotonic() + SETTLE_SECONDS, ["no answer of the server"]
    while left and time.monotonic() < end:
        time.sleep(0.2)
        with suppress(OSError, ValueError):
            left = asyncio.run(_unsettled(served.url))
    return left


async def _unsettled(url: str) -> list[str]:
    async with aiohttp.ClientSession() as session, session.get(url + "/server_info") as response:
        info = await response.json()
    facts = {name: info[name] for name in ("running", "waiting", "pages_used")}
    left = [f"{name}: {count}" for name, count in facts.items() if count]
    away = [rank["rank"] for rank in info["ranks"] if rank["state"] in ("absent", "starting")]
    return left + ([f"ranks that are away: {away}"] if away else [])


def _stalls(tally: Tally, struck: Sequence[Fault]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for fault in struck:
        hit = [
            end - begin
            for begin, end in tally.gaps
            if begin < fault.when + BLAMED_SECONDS and end > fault.when
        ]
        alone = not any(0 < other.when - fault.when < ALONE_SECONDS for other in struck)
        if hit and fault.calm and alone:
            found.setdefault(fault.kind, []).append(round(max(hit), 4))
    return {kind: sorted(values) for kind, values in sorted(found.items())}


def _figures(tally: Tally) -> list[float]:
    gaps = sorted(end - begin for begin, end in tally.gaps)
    return [round(_share(gaps, part), 4) for part in (0.5, 0.99, 1.0)]


def _share(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of the sorted values does not exceed."""
    if not values:
        return 0.0
    # As 0.99 * 100 is more than 99 by what floats round.
    return values[max(0, math.ceil(round(part * len(values), 6)) - 1)]


PARTS: Final = (0.5, 0.99, 1.0)
KILLS: Final = ("kill -9", OOM_KILL)
HARD: Final = ("start", "recovery", "join", "resize")
HEADER: Final = (
    *("layout", "faults", "in a start, recovery, join or resize", "requests", "lost", "wrong"),
    *("stall by kill: median", "P99", "longest", "by SIGSTOP: median", "P99", "longest"),
    *("gap without faults: median", "P99", "left"),
)
KIND_HEADER: Final = ("fault", "number", "stall: median", "P99", "longest")
DOING_HEADER: Final = ("while", "faults")


def row(name: str, outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """The line of some layouts together."""
    hard = sum(one["doing"].get(state, 0) for one in outcomes for state in HARD)
    counts = [sum(sum(one["faults"].values()) for one in outcomes), hard]
    counts += [sum(one[key] for one in outcomes) for key in ("requests", "lost", "wrong")]
    figures = [*_stall_figures(outcomes, KILLS), *_stall_figures(outcomes, ("SIGSTOP",))]
    quiet = [f"{max(one['gaps_before'][part] for one in outcomes):.2f}" for part in (0, 1)]
    left = ", ".join(text for one in outcomes for text in one["left"]) or "nothing"
    return [name, *(f"{count:,}" for count in counts), *figures, *quiet, left]


def _stall_figures(outcomes: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[str]:
    found = sorted(
        value for one in outcomes for kind in kinds for value in one["stalls"].get(kind, ())
    )
    return [f"{_share(found, part):.2f}" if found else "" for part in PARTS]


def rows(outcomes: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [*(row(one["layout"], [one]) for one in outcomes), row("all", outcomes)]


def kind_rows(outcomes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Counts the faults of each kind and sums up their stalls."""
    numbers = sum((Counter(one["faults"]) for one in outcomes), Counter[str]())
    kinds = sorted(numbers, key=lambda kind: (kind.startswith(HEADS), kind))
    return [[kind, f"{numbers[kind]:,}", *_stall_figures(outcomes, (kind,))] for kind in kinds]


def doing_rows(outcomes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What went on when faults struck; experts move all the time in layouts of which that is
    said."""
    numbers = sum((Counter(one["doing"]) for one in outcomes), Counter[str]())
    moving = [one for one in outcomes if "experts move" in one["layout"]]
    numbers["experts move"] = sum(sum(one["faults"].values()) for one in moving)
    return [[doing, f"{number:,}"] for doing, number in sorted(numbers.items())]


def markdown(results: dict[str, Any]) -> str:
    told, outcomes = results["machine"], results["outcomes"]
    first = f"{told['cores']} cores of {told['cpu']}, torch {told['torch']}; seconds."
    tables = [
        [HEADER, *rows(outcomes)],
        [KIND_HEADER, *kind_rows(outcomes)],
        [DOING_HEADER, *doing_rows(outcomes)],
    ]
    lines = [first]
    for header, *body in tables:
        lines.append("")
        lines += [f"| {' | '.join(one)} |" for one in (header, ["---"] * len(header), *body)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.elastic", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--only", action="append", choices=[*LAYOUTS], help="this layout")
    parser.add_argument("--kind", action="append", choices=[*WEIGHTS], help="of faults")
    parser.add_argument("--faults", type=int, default=100, help="of each layout, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults, for each layout")
    parser.add_argument("--pace", type=float, default=0.8, help="seconds between two, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-group", type=Path, help="where ranks run out of memory")
    parser.add_argument("--add", action="store_true", help="to the outcomes of the JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table of the JSON")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads((RESULTS / "elastic.json").read_text())))
        return 0
    if OOM_KILL in (args.kind or ()) and args.memory_group is None:
        parser.error(f"--kind '{OOM_KILL}' needs --memory-group")
    kinds = args.kind or [kind for kind in WEIGHTS if args.memory_group or kind != OOM_KILL]
    plan = Plan(args.faults, args.seconds, args.seed, args.pace, kinds, args.memory_group)
    before = json.loads((RESULTS / "elastic.json").read_text())["outcomes"] if args.add else []
    found = []
    for name in tqdm(args.only or list(LAYOUTS), desc="layouts"):
        found.append(run_layout(name, plan))
        for text in found[-1].shown:
            print(text, file=sys.stderr)
        outcomes = [asdict(outcome) for outcome in added(found, before)]
        facts = {**machine(1), "cores": len(os.sched_getaffinity(0))}
        write_json("elastic", {"machine": facts, "seed": args.seed, "outcomes": outcomes})
    print_table(HEADER, rows(outcomes))
    print_table(KIND_HEADER, kind_rows(outcomes))
    print_table(DOING_HEADER, doing_rows(outcomes))
    return int(not all(outcome.is_good for outcome in found))


if __name__ == "__main__":
    raise SystemExit(main())
