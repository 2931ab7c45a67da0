"""Bad requests against a real server, with good ones beside them.

    python -m bench.fuzz_server --number 100000 --seed 1
    python -m bench.fuzz_server --markdown

starts a server on 4 expert-parallel ranks, sends it what bench/fuzz_cases.py makes, and fails if an
answer is a 5xx, comes too late, has not the shape of an error, or repeats what was sent; if a good
request's answer differs from what it was alone; if a process ends; or if afterwards the server
holds more pages, descriptors or memory than before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from tqdm import tqdm

from bench.common import RESULTS, cpu_name, write_json
from bench.fuzz_cases import MARK, Case, case_of
from bench.http_server import started
from moesaic.server.app import ROUTES
from moesaic.server.routes import Route

# For an answer to a request that is complete; one that fills the whole context takes a minute here.
HANG_SECONDS = 180.0
# Broken HTTP may be the beginning of something: nobody waits for the end of it.
PATIENCE_SECONDS = 0.1
GOOD = [
    {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
    for text in ("a mosaic of experts", "tiles", "one two three four five", "Hello there")
]
# Growth of the whole process tree that is taken for a leak; allocators keep some of what they had.
MAX_GROWTH = 256 << 20
# A server that is drained refuses the good requests, too.
LEFT_OUT = "/drain"


@dataclass
class Tally:
    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    good: int = 0
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str, case: Case | None = None) -> None:
        shown = "" if case is None else f": {case.kind} {case.data[:300]!r}"
        self.problems.append(text + shown)


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes
    body: bytes


async def read_answer(reader: asyncio.StreamReader, head_only: bool = False) -> Answer:
    """One response; IncompleteReadError where the connection ends before it does."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 100:
            break
    lower = head.lower()
    body = b""
    if head_only or status in (204, 304):
        pass
    elif b"transfer-encoding: chunked" in lower:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    else:
        length = lower.partition(b"content-length:")[2].partition(b"\r\n")[0]
        body = await reader.readexactly(int(length))
    return Answer(status, head, body)


def judge(tally: Tally, case: Case, answer: Answer) -> None:
    tally.statuses[str(answer.status)] += 1
    if answer.status >= 500:
        tally.problem(f"status {answer.status} {answer.body[:300]!r}", case)
    elif answer.status >= 400:
        if MARK.encode() in answer.body and answer.status != 404:  # which names what is missing
            tally.problem(f"the error repeats what was sent: {answer.body[:300]!r}", case)
        try:
            error = json.loads(answer.body)["error"]
            right = error.keys() == {"message", "type", "param", "code"}
        except (ValueError, KeyError, TypeError):
            right = False
        if not right and not case.data.startswith(b"HEAD"):
            tally.problem(f"status {answer.status} is not in the shape of an error", case)


class Client:
    """Keeps its connection as long as the server does."""

    def __init__(self, port: int, tally: Tally) -> None:
        self._port, self._tally = port, tally
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, case: Case) -> None:
        self._tally.kinds[case.kind] += 1
        if not case.whole:
            await self.close()
        reused = self._link is not None
        if self._link is None:
            self._link = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        try:
            reader, writer = self._link
            writer.write(case.data)
            if case.whole:
                await self._whole(case, reader)
            else:
                await self._broken(case, reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            if case.whole and reused:
                self._tally.kinds[case.kind] -= 1
                await self.send(case)
                return
            self._tally.statuses["closed"] += 1
            if case.whole:
                self._tally.problem("no answer, the connection was closed", case)

    async def close(self) -> None:
        if self._link is not None:
            self._link[1].close()
            self._link = None

    async def _whole(self, case: Case, reader: asyncio.StreamReader) -> None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                answer = await read_answer(reader)
        except TimeoutError:
            self._tally.problem(f"no answer within {HANG_SECONDS:g} s", case)
            await self.close()
            return
        judge(self._tally, case, answer)
        if b"connection: close" in answer.head.lower():
            await self.close()

    async def _broken(self, case: Case, reader: asyncio.StreamReader) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                judge(self._tally, case, await read_answer(reader, case.data[:4] == b"HEAD"))
        except (TimeoutError, ValueError):
            self._tally.statuses["left waiting"] += 1
        await self.close()


async def attack(
    port: int, routes: Sequence[Route], numbers: range, seed: int, width: int = 16
) -> Tally:
    """All cases, `width` at a time, with four good clients beside them."""
    tally, todo = Tally(), iter(tqdm(numbers, unit="request", mininterval=1.0))
    chosen = [route for route in routes if route.path != LEFT_OUT]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        alone = [(await http.post("/generate", json=body)).json() for body in GOOD]

        async def bad() -> None:
            client = Client(port, tally)
            for number in todo:
                try:
                    await client.send(case_of(chosen, seed, number))
                except OSError as error:
                    tally.problem(f"nobody listens any more at case {number}: {error}")
                    return
            await client.close()

        async def good(index: int) -> None:
            while True:
                try:
                    response = await http.post("/generate", json=GOOD[index])
                except httpx.HTTPError as error:
                    tally.problem(f"a good request failed: {error!r}")
                    return
                tally.good += 1
                same = response.status_code == 200
                if not same or response.json()["output_ids"] != alone[index]["output_ids"]:
                    tally.problem(
                        f"a good request got {response.status_code} {response.text[:300]}"
                    )
                await asyncio.sleep(0.01)

        friends = [asyncio.create_task(good(index)) for index in range(len(GOOD))]
        await asyncio.gather(*(bad() for _ in range(width)))
        for friend in friends:
            friend.cancel()
        for outcome in await asyncio.gather(*friends, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError | None):
                tally.problem(f"a good client ended: {outcome!r}")
    return tally


@dataclass(frozen=True)
class State:
    """What a server holds when it has nothing to do."""

    processes: list[int]
    pages: int
    descriptors: int
    memory: int


async def state_of(port: int, pid: int) -> State:
    """Once it is idle, with an empty prefix cache."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        end = time.monotonic() + 120
        while True:
            await http.post("/flush_cache")
            info = (await http.get("/server_info")).json()
            busy = info["running"] + info["waiting"] + info["pages_used"] + info["pages_cached"]
            if not busy or time.monotonic() > end:
                break
            await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)  # for its side of the connections to close
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return State(
        sorted(process.pid for process in family),
        info["pages_used"] + info["pages_cached"],
        sum(process.num_fds() for process in family),
        sum(process.memory_info().rss for process in family),
    )


def compare(tally: Tally, before: State, after: State) -> None:
    if after.processes != before.processes:
        tally.problem(f"processes were {before.processes} and are {after.processes}")
    if after.pages != before.pages:
        tally.problem(f"{after.pages} pages are in use, {before.pages} were before")
    if after.descriptors > before.descriptors:
        tally.problem(f"{after.descriptors} descriptors are open, {before.descriptors} were before")
    if after.memory - before.memory > MAX_GROWTH:
        tally.problem(f"memory has grown by {(after.memory - before.memory) >> 20} MiB")


MODEL = "tiny:qwen3_moe"
# The first grammar starts a process that checks them, and is kept.
STRUCTURED = {"text": "x", "sampling_params": {"regex": "[a-z]{3}"}}
FLAGS = "--tp 4 --ep 4 --num-threads 1".split()


def measure(numbers: range, seed: int) -> dict[str, Any]:
    with started(MODEL, FLAGS) as server:
        port, pid = int(server.url.rpartition(":")[2]), server.pid
        assert pid is not None
        # What is allocated once and kept is not a leak.
        warm_up = asyncio.run(attack(port, ROUTES, range(1_000_000, 1_001_000), seed))
        httpx.post(f"{server.url}/generate", json=STRUCTURED, timeout=60).raise_for_status()
        before = asyncio.run(state_of(port, pid))
        begun = time.monotonic()
        tally = asyncio.run(attack(port, ROUTES, numbers, seed))
        seconds = time.monotonic() - begun
        tally.problems += warm_up.problems
        after = before
        try:
            after = asyncio.run(state_of(port, pid))
            compare(tally, before, after)
        except (httpx.HTTPError, psutil.Error) as error:
            tally.problem(f"the server has ended: {error!r}")
    return {
        "cpu": cpu_name(),
        "model": MODEL,
        "flags": FLAGS,
        "seed": seed,
        "requests": len(numbers),
        "first": numbers.start,
        "seconds": round(seconds, 1),
        "kinds": dict(tally.kinds.most_common()),
        "statuses": dict(tally.statuses.most_common()),
        "good_requests": tally.good,
        "problems": tally.problems,
        "descriptors": [before.descriptors, after.descriptors],
        "memory_mib": [before.memory >> 20, after.memory >> 20],
        "pages": [before.pages, after.pages],
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("bad requests", f"{found['requests']:,} in {found['seconds']:.0f} s"),
        ("of them", ", ".join(f"{number:,} {kind}" for kind, number in found["kinds"].items())),
        ("answers", ", ".join(f"{s}: {number:,}" for s, number in found["statuses"].items())),
        ("good requests beside them, all with the right answer", f"{found['good_requests']:,}"),
        ("problems (5xx, hangs, deaths, wrong answers, leaks)", str(len(found["problems"]))),
        ("KV pages in use, before and after", " → ".join(map(str, found["pages"]))),
        ("open descriptors", " → ".join(map(str, found["descriptors"]))),
        ("resident memory of all processes, MiB", " → ".join(map(str, found["memory_mib"]))),
    ]


def run_fuzzer(
    name: str,
    number: int,
    description: str,
    measure: Callable[[range, int], dict[str, Any]],
    rows: Callable[[dict[str, Any]], list[tuple[str, str]]],
) -> int:
    """The command line of a fuzzer, and its exit status. `number`: cases unless told otherwise;
    `rows`: the table of what `measure` has found."""
    parser = argparse.ArgumentParser(f"python -m bench.{name}", description=description)
    parser.add_argument("--number", type=int, default=number)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="print the table of the last run")
    options = parser.parse_args()
    if options.markdown:
        found, problems = json.loads((RESULTS / f"{name}.json").read_text()), []
    else:
        found = measure(range(options.first, options.first + options.number), options.seed)
        problems = found["problems"]
        write_json(name, found)
    print("| | |\n| --- | --- |")
    for what, value in rows(found):
        print(f"| {what} | {value} |")
    for problem in problems[:50]:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(run_fuzzer("fuzz_server", 100_000, __doc__.partition("\n")[0], measure, rows))
