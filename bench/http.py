"""What HTTP costs over the offline engine for the same requests.

    python -m bench.http                       # 1 rank and 4 EP ranks; 1, 16 and 64 clients
    python -m bench.http --ranks 1 --clients 16 --repeats 5

Ways to the same answers: one call of `Engine.generate` with all requests; `Engine.stream` from
tasks of one event loop; `/generate` and `/v1/completions` over HTTP, without streaming and with it.
The server, the client and the offline engine are a process each (ranks are more of them), with the
same flags, and computing has one thread a rank, so that the cores are not only the engine's.
Repetitions are interleaved, and prompts are new in each, so that no cache helps. All requests of a
repetition are open at once. CPU time is that of the engine or the server with its ranks and without
the client: it suffers less from neighbours than seconds do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil
import torch
from tqdm import tqdm

from bench.common import Range, Request, machine, mixed_workload, print_table, write_json
from bench.http_server import Server, started
from moesaic import Engine
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.loadgen.client import Client, session
from moesaic.loadgen.endpoints import ENDPOINTS, RequestOptions
from moesaic.loadgen.outcome import BenchPrompt

# Over HTTP: which endpoint, and whether it streams.
HTTP = {
    "/generate": ("sglang", False),
    "/generate, stream": ("sglang", True),
    "/v1/completions": ("sglang-oai", False),
    "/v1/completions, stream": ("sglang-oai", True),
}
CHAT = {"/v1/chat/completions, stream": ("sglang-oai-chat", True)}
WAYS = ("generate", "stream", *HTTP)
LATE_SECONDS = 0.02
VOCAB = 256  # bytes of the tiny model's tokenizer
RANKS: dict[int, dict[str, Any]] = {
    1: {"num_threads": 1},
    4: {
        "num_threads": 1,
        "tp": 4,
        "ep": 4,
        "dp": 4,
        "enable_dp_attention": True,
        "moe_a2a_backend": "deepep",
    },
}


@dataclass
class Sample:
    """A repetition, in seconds: until all had ended, until each had a token, of CPU."""

    seconds: float
    ttfts: list[float] = field(default_factory=list)
    cpu: float = 0.0


def sampling(request: Request) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": request.output_len, "ignore_eos": True}


def by_generate(engine: Engine, requests: list[Request]) -> Sample:
    started = time.perf_counter()
    answers = engine.generate(
        input_ids=[request.prompt for request in requests],
        sampling_params=[sampling(request) for request in requests],
    )
    seconds = time.perf_counter() - started
    assert isinstance(answers, list)
    check([len(answer["output_ids"]) for answer in answers], requests)
    return Sample(seconds, [answer["meta_info"]["ttft"] for answer in answers])


def by_stream(engine: Engine, requests: list[Request]) -> Sample:
    started = 0.0

    async def one(request: Request) -> tuple[float, int]:
        first, number = 0.0, 0
        call = GenerateInput(
            input_ids=request.prompt, sampling_params=sampling(request), stream=True
        )
        async with aclosing(engine.stream(call)) as pieces:
            async for piece in pieces:
                number = piece.progress.num_output
                first = first or time.perf_counter() - started
        return first, number

    async def all_of_them() -> list[tuple[float, int]]:
        nonlocal started
        started = time.perf_counter()
        return await asyncio.gather(*map(one, requests))

    found = asyncio.run(all_of_them())
    seconds = time.perf_counter() - started
    check([number for _, number in found], requests)
    return Sample(seconds, [first for first, _ in found])


def by_http(
    url: str, requests: list[Request], way: str, on_open: Callable[[], None] | None = None
) -> Sample:
    """With one connection a request, opened before; `on_open` is called when all are."""
    endpoint, stream = (HTTP | CHAT)[way]
    prompts = [as_prompt(r.prompt, r.output_len, way in CHAT) for r in requests]

    async def run() -> Sample:
        async with session({}) as connections:
            options = RequestOptions("default", stream, True, {})
            client = Client(connections, url, ENDPOINTS[endpoint], options)
            one = as_prompt([0], 1, way in CHAT)
            await asyncio.gather(*(client.ask(one) for _ in prompts))
            if on_open is not None:
                on_open()
            started = time.perf_counter()
            outcomes = await asyncio.gather(*map(client.ask, prompts))
            seconds = time.perf_counter() - started
            assert not any(outcome.error for outcome in outcomes), outcomes[0].error
            check([outcome.output_tokens or 0 for outcome in outcomes], requests)
            return Sample(seconds, [o.ttft for o in outcomes if o.ttft is not None])

    return asyncio.run(run())


def as_prompt(ids: list[int], output_len: int, chat: bool) -> BenchPrompt:
    """In a chat, a letter for each token."""
    text = "".join(chr(ord("a") + token_id % 26) for token_id in ids) if chat else ""
    return BenchPrompt(text, len(ids), output_len, None if chat else ids)


def check(lengths: list[int], requests: list[Request]) -> None:
    assert lengths == [request.output_len for request in requests]


def worker(ranks: int) -> None:
    """The process of the offline engine: a line of JSON asks for a repetition, one answers."""
    runs = {"generate": by_generate, "stream": by_stream}
    with Engine(model_path="tiny:qwen3_moe", log_level="warning", **RANKS[ranks]) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            requests = [Request(*request) for request in asked["requests"]]
            sample = runs[asked["way"]](engine, requests)
            print(json.dumps([sample.seconds, sample.ttfts]), flush=True)


class Contenders:
    """The process of the offline engine and that of the server, both on as many ranks."""

    def __init__(self, offline: subprocess.Popen[str], server: Server) -> None:
        self.offline, self.server = offline, server

    def run(self, way: str, requests: list[Request]) -> Sample:
        pid = (self.server if way in HTTP else self.offline).pid
        assert pid is not None
        before = cpu_seconds(pid)
        sample = self._run(way, requests)
        sample.cpu = cpu_seconds(pid) - before
        return sample

    def _run(self, way: str, requests: list[Request]) -> Sample:
        if way in HTTP:
            return by_http(self.server.url, requests, way)
        assert self.offline.stdin is not None and self.offline.stdout is not None
        plain = [[request.prompt, request.output_len] for request in requests]
        self.offline.stdin.write(json.dumps({"way": way, "requests": plain}) + "\n")
        self.offline.stdin.flush()
        return Sample(*json.loads(self.offline.stdout.readline()))


def cpu_seconds(pid: int) -> float:
    """Of a process and all below it."""
    parent = psutil.Process(pid)
    times = [child.cpu_times() for child in [parent, *parent.children(recursive=True)]]
    return sum(time.user + time.system for time in times)


@contextmanager
def offline_engine(ranks: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.http", "--worker", str(ranks)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdin is not None and child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("ready"), f"{command}: {line!r}"
        yield child
        child.stdin.close()
    finally:
        child.terminate()
        child.wait()


@contextmanager
def contenders(ranks: int) -> Iterator[Contenders]:
    flags = []
    for name, value in RANKS[ranks].items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    with started("tiny:qwen3_moe", flags) as server, offline_engine(ranks) as child:
        yield Contenders(child, server)


def late_loop(server: Server) -> dict[str, float]:
    """How late the server's event loop was at its worst, and how often by more than 20 ms."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    counts = {
        float(bound): float(number)
        for bound, number in re.findall(
            r'event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text
        )
    }
    (worst,) = re.findall(r"^moesaic_event_loop_lag_max_seconds (\S+)", text, re.MULTILINE)
    within = max(number for bound, number in counts.items() if bound <= LATE_SECONDS)
    return {"looks": counts[math.inf], "late": counts[math.inf] - within, "worst_s": float(worst)}


def measure(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    with contenders(ranks) as both:
        for clients in args.clients:
            samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
            for repeat in tqdm(range(-1, args.repeats), desc=f"{ranks} ranks, {clients} clients"):
                for place, way in enumerate(WAYS):
                    sizes = Range(args.prompt, args.prompt), Range(args.output, args.output)
                    seed = (clients * 1000 + repeat + 1) * 10 + place
                    sample = both.run(way, mixed_workload(clients, VOCAB, *sizes, seed))
                    if repeat >= 0:  # the first is to warm up
                        samples[way].append(sample)
            results += [
                result(ranks, clients, way, found, args.output) for way, found in samples.items()
            ]
        print(f"{ranks} ranks, event loop of the server: {late_loop(both.server)}")
    return results


def result(ranks: int, clients: int, way: str, found: list[Sample], output: int) -> dict[str, Any]:
    seconds = [sample.seconds for sample in found]
    ttfts = [ttft for sample in found for ttft in sample.ttfts]
    tokens = clients * output
    return {
        "ranks": ranks,
        "clients": clients,
        "way": way,
        "seconds": seconds,
        "tokens_per_s": {"median": tokens / median(seconds), "best": tokens / min(seconds)},
        "requests_per_s": {"median": clients / median(seconds), "best": clients / min(seconds)},
        "cpu_ms_per_1000_tokens": 1e6 * median(sample.cpu for sample in found) / tokens,
        "median_ttft_ms": 1000 * median(ttfts) if ttfts else None,
    }


def table(results: list[dict[str, Any]]) -> None:
    rows = []
    base: dict[str, float] = {}
    for entry in results:
        rate = entry["tokens_per_s"]
        if entry["way"] == WAYS[0]:
            base = rate
        loss = [f"{100 * (1 - rate[kind] / base[kind]):.0f}%" for kind in ("median", "best")]
        ttft = entry["median_ttft_ms"]
        rows.append(
            [
                f"{entry['ranks']} ranks, {entry['clients']} clients, {entry['way']}",
                f"{rate['median']:.0f}",
                f"{rate['best']:.0f}",
                *loss,
                f"{entry['cpu_ms_per_1000_tokens']:.0f}",
                "" if ttft is None else f"{ttft:.1f}",
            ]
        )
    costs = ["cost, median", "cost, best", "CPU ms / 1000 tok"]
    print_table(["", "tok/s median", "best", *costs, "TTFT ms"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.http", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", type=int, choices=RANKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker)
        return
    # A benchmark that is told to end must not leave its server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = [entry for ranks in args.ranks for entry in measure(ranks, args)]
    table(results)
    about = {"prompt_len": args.prompt, "output_len": args.output, "repeats": args.repeats}
    payload = {"machine": machine(torch.get_num_threads()), **about, "results": results}
    write_json("http", payload)


if __name__ == "__main__":
    main()
