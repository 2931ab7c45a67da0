"""Ranks of a server are killed, stopped and made to raise while clients stream, and so are its HTTP
process and its supervisor: is an answer lost, and is each the one of a run without faults?

    python -m bench.elastic                               # all layouts, a minute of faults each
    python -m bench.elastic --only deepep --faults 20 --add   # to what the JSON has of this layout
    python -m bench.elastic --markdown                    # no run: the table from the JSON

Every question is first answered without faults. Under faults its answer must be the same, token by
token and for some questions logprob by logprob, each event a continuation of the one before. The
server computes deterministically, so that "the same" needs no tolerance. Victims, kinds and moments
are drawn from a seed; a victim may be starting again, or be in the middle of a recovery. An
exception is one of the next layer that the rank computes, an error one that a handler of a signal
raises wherever the rank is. Clients of a lost HTTP process ask again by the id of their request,
and streams go on behind the last event that they have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
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
    RANKS_ALONE,
    WEIGHTS,
    Fault,
    Served,
    Victims,
    serving,
)

GROUPS: Final = "--tp 4 --ep 4 --dp 4 --enable-dp-attention --ep-num-redundant-experts 4"
LAYOUTS: Final = {
    "none": f"{GROUPS} --moe-a2a-backend none",
    "deepep": f"{GROUPS} --moe-a2a-backend deepep",
    "mooncake": f"{GROUPS} --moe-a2a-backend mooncake",
    "mori": f"{GROUPS} --moe-a2a-backend mori",
    "flashinfer": f"{GROUPS} --moe-a2a-backend flashinfer",
    "ascend_fuseep": f"{GROUPS} --moe-a2a-backend ascend_fuseep",
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


@dataclass
class Outcome:
    layout: str
    flags: str
    seconds: float
    requests: int
    wrong: int
    lost: int
    faults: dict[str, int]
    """By kind, and by what the rank was doing."""
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
    """How often a client lost its connection and asked again."""

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.lost or self.left)

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
    served: Served,
    layout: str,
    kinds: Sequence[str],
    faults: int,
    seconds: float,
    seed: int,
    pace: float,
) -> tuple[Tally, Tally, list[Fault]]:
    """Strikes `faults` times, or for `seconds`: mostly when all ranks are back, after `pace`
    seconds on average, else while they recover."""
    before, tally, struck = Tally(), Tally(), list[Fault]()
    questions = [Question.draw(number) for number in range(QUESTIONS)]
    expected: dict[Question, Any] = {}
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(ask(session, served.url, one) for one in questions))
        for question, answer in zip(questions, answers, strict=True):
            before.count(answer, None, str(question))
            expected[question] = answer.value
    victims = Victims(served.run, 4, kinds, HEAD.get(layout, RANKS_ALONE), NODES.get(layout, 1))
    rng, until = random.Random(seed), asyncio.Event()
    clients = [
        asyncio.create_task(client(served.url, number, expected, tally, until))
        for number in range(CLIENTS)
    ]
    end = time.monotonic() + seconds
    while len(struck) < faults and time.monotonic() < end and served.process.poll() is None:
        if rng.random() < CALM_SHARE:
            last = struck[-1].when if struck else 0.0
            await _recovery(victims, last + ALONE_SECONDS, end)
        await asyncio.sleep(rng.uniform(0.05, 2 * pace))
        raised = max((fault.when for fault in struck if fault.kind == EXCEPTION), default=0.0)
        fault = victims.strike(rng, may_raise=time.monotonic() > raised + SEARCH_SECONDS)
        struck += [fault] if fault else []
    until.set()
    await asyncio.gather(*clients)
    return before, tally, struck


async def _recovery(victims: Victims, since: float, until: float) -> None:
    """Waits until all ranks are live, and not before `since`."""
    while (now := time.monotonic()) < until and (now < since or not victims.is_calm):
        await asyncio.sleep(0.02)


def run_layout(
    name: str,
    faults: int,
    seconds: float,
    seed: int = 0,
    pace: float = 1.0,
    kinds: Sequence[str] = tuple(WEIGHTS),
) -> Outcome:
    flags = LAYOUTS[name]
    with serving(flags, nodes=NODES.get(name, 1)) as served:
        began = time.monotonic()
        found = asyncio.run(chaos(served, name, kinds, faults, seconds, seed, pace))
        before, tally, struck = found
        took = time.monotonic() - began
        left = _settle(served)
        served.run.learn()
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(SETTLE_SECONDS)
        served.run.await_gone()
        log = served.run.log.read_text()
        left += served.run.left()
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
    return values[min(len(values) - 1, max(0, round(part * len(values)) - 1))]


HEADER: Final = (
    *("layout", "faults", "in a start or recovery", "requests", "lost", "wrong"),
    *("stall by kill: median", "longest", "by SIGSTOP: median", "longest"),
    *("gap without faults: median", "P99", "left"),
)
HEAD_HEADER: Final = ("fault", "number", "stall: median", "longest")


def row(name: str, outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """The line of some layouts together."""
    hard = sum(one["doing"].get(state, 0) for one in outcomes for state in ("start", "recovery"))
    counts = [sum(sum(one["faults"].values()) for one in outcomes), hard]
    counts += [sum(one[key] for one in outcomes) for key in ("requests", "lost", "wrong")]
    figures = []
    for kind in ("kill -9", "SIGSTOP"):
        found = sorted(value for one in outcomes for value in one["stalls"].get(kind, ()))
        figures += [f"{_share(found, part):.2f}" if found else "" for part in (0.5, 1.0)]
    quiet = [f"{max(one['gaps_before'][part] for one in outcomes):.2f}" for part in (0, 1)]
    left = ", ".join(text for one in outcomes for text in one["left"]) or "nothing"
    return [name, *(f"{count:,}" for count in counts), *figures, *quiet, left]


def rows(outcomes: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [*(row(one["layout"], [one]) for one in outcomes), row("all", outcomes)]


def head_rows(outcomes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each fault of the HTTP process and of the supervisor: how many, and their stalls."""
    found = []
    kinds = sorted({kind for one in outcomes for kind in one["faults"] if kind.startswith(HEADS)})
    for kind in kinds:
        number = sum(one["faults"].get(kind, 0) for one in outcomes)
        stalls = sorted(value for one in outcomes for value in one["stalls"].get(kind, ()))
        figures = [f"{_share(stalls, part):.2f}" if stalls else "" for part in (0.5, 1.0)]
        found.append([kind, str(number), *figures])
    return found


def markdown(results: dict[str, Any]) -> str:
    table = [HEADER, ["---"] * len(HEADER), *rows(results["outcomes"])]
    heads = [HEAD_HEADER, ["---"] * len(HEAD_HEADER), *head_rows(results["outcomes"])]
    told = results["machine"]
    first = f"{told['cores']} cores of {told['cpu']}, torch {told['torch']}; seconds."
    lines = [[f"| {' | '.join(one)} |" for one in part] for part in (table, heads)]
    return "\n".join([first, "", *lines[0], "", *lines[1]])


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
    parser.add_argument("--add", action="store_true", help="to the outcomes of the JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table of the JSON")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads((RESULTS / "elastic.json").read_text())))
        return 0
    before = json.loads((RESULTS / "elastic.json").read_text())["outcomes"] if args.add else []
    found = []
    for name in tqdm(args.only or list(LAYOUTS), desc="layouts"):
        found.append(
            run_layout(
                name, args.faults, args.seconds, args.seed, args.pace, args.kind or [*WEIGHTS]
            )
        )
        for text in found[-1].shown:
            print(text, file=sys.stderr)
        outcomes = [asdict(outcome) for outcome in added(found, before)]
        facts = {**machine(1), "cores": len(os.sched_getaffinity(0))}
        write_json("elastic", {"machine": facts, "seed": args.seed, "outcomes": outcomes})
    print_table(HEADER, rows(outcomes))
    print_table(HEAD_HEADER, head_rows(outcomes))
    return int(not all(outcome.is_good for outcome in found))


if __name__ == "__main__":
    raise SystemExit(main())
