"""CPU time of the HTTP process for each streamed token.

    python -m bench.http_streams                     # 64, 256 and 1024 streams of three routes
    python -m bench.http_streams --streams 128 --free --output 400

The server is a whole one, but its rank computes nothing (bench/http_rank.py). A step follows when
all streams have the tokens of the last one, so that each token is an event of its own however busy
the machine is; with `--free` steps follow at once, and the server joins tokens. What counts are
user and system time of the process that speaks HTTP while all streams are open, over the tokens
that were generated meanwhile. The last two columns count whole requests as well, from the first
connection to the end of the last answer: over all tokens, and what a request takes besides them.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import fcntl
import json
import os
import re
import signal
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import torch
import uvloop
from tqdm import tqdm

from bench.common import machine, print_table, write_json
from bench.http_rank import MODULE, STEPS
from bench.http_server import Server, started

PROMPT: Final = list(range(97, 113))
SETTINGS: Final = {"ignore_eos": True, "stream": True, "temperature": 0}
BODIES: Final[dict[str, Callable[[int], dict[str, Any]]]] = {
    "/generate": lambda number: {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": number, "ignore_eos": True, "temperature": 0},
        "stream": True,
    },
    "/v1/completions": lambda number: {"prompt": PROMPT, "max_tokens": number, **SETTINGS},
    "/v1/chat/completions": lambda number: {
        "messages": [{"role": "user", "content": "Lay tiles."}],
        "max_tokens": number,
        **SETTINGS,
    },
}
GENERATED: Final = re.compile(r"^moesaic_generation_tokens_total (\S+)", re.MULTILINE)
# Time between steps while some streams have not begun.
START_SECONDS: Final = 0.5
# Time after which no event is on its way.
LATE_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Point:
    """`cpu_us`: of the HTTP process, per token. `events`: per token. `whole_us`: per token with all
    else that requests take, which is `request_us` for each."""

    route: str
    streams: int
    joined: bool
    cpu_us: float
    events: float
    tokens_per_s: float
    whole_us: float
    request_us: float


class StepPipe:
    """Lets the rank make steps; without a pipe it makes them by itself."""

    def __init__(self, path: str | None) -> None:
        self._pipe = None if path is None else os.open(path, os.O_RDWR)

    def allow(self, number: int = 1) -> None:
        if self._pipe is not None:
            os.write(self._pipe, b"." * number)

    def take_back(self) -> None:
        """Steps that were allowed and not made."""
        left = array.array("i", [0])
        if self._pipe is None:
            return
        fcntl.ioctl(self._pipe, termios.FIONREAD, left)
        if left[0]:
            os.read(self._pipe, left[0])


class Load:
    """What all streams of a run have had so far."""

    def __init__(self, streams: int, steps: StepPipe) -> None:
        self.streams, self._steps = streams, steps
        self._waiting = self._open = streams
        self._due = 0
        self.events = 0
        self.all_started, self.one_ended = asyncio.Event(), asyncio.Event()
        self.all_ended = asyncio.Event()

    def first(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.all_started.set()

    def received(self, number: int) -> None:
        self.events += number
        self._due -= number
        if self._due <= 0 and self.all_started.is_set() and not self.one_ended.is_set():
            self._due = self.streams
            self._steps.allow()

    def ended(self) -> None:
        self.one_ended.set()
        self._open -= 1
        if not self._open:
            self.all_ended.set()

    async def begin(self) -> None:
        """Makes few steps meanwhile: the first streams must not end before the last begins."""
        while not self.all_started.is_set():
            self._steps.take_back()
            self._steps.allow()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.all_started.wait(), START_SECONDS)
        self._steps.take_back()

    async def step_until_one_ends(self) -> None:
        """Steps on where two tokens came as one event, which leaves an event due for ever."""
        seen = -1
        while not self.one_ended.is_set():
            if seen == self.events:
                self._due = 0
                self.received(0)
            seen = self.events
            with suppress(TimeoutError):
                await asyncio.wait_for(self.one_ended.wait(), LATE_SECONDS)

    async def end(self, steps: int) -> None:
        self._steps.allow(steps)
        await self.all_ended.wait()
        self._steps.take_back()


class Stream(asyncio.Protocol):
    """Sends a request on a connection of its own and counts the events of the answer."""

    def __init__(self, request: bytes, load: Load) -> None:
        self._request, self._load = request, load
        self._begun = False
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def start(self) -> None:
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        number = data.count(b"data: ")
        if not number:
            assert data.startswith(b"HTTP/1.1 200"), data
            return
        if not self._begun:
            self._begun = True
            self._load.first()
        self._load.received(number)
        self._tail = (self._tail + data)[-32:]
        if b"[DONE]" in self._tail:
            self._transport.close()
            self._load.ended()


def request_bytes(host: str, route: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def generated(session: aiohttp.ClientSession, server: Server) -> float:
    async with session.get(server.url + "/metrics") as response:
        found = GENERATED.search(await response.text())
    assert found is not None
    return float(found[1])


def cpu_seconds(server: Server) -> float:
    """The CPU time of the server's living threads, read from the kernel in nanoseconds, as psutil
    reads a clock of 10 ms."""
    tasks = Path(f"/proc/{server.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def start_streams(server: Server, route: str, load: Load, args: argparse.Namespace) -> None:
    address, loop = urlsplit(server.url), asyncio.get_running_loop()
    request = request_bytes(address.netloc, route, BODIES[route](args.output))
    streams = [Stream(request, load) for _ in range(load.streams)]
    for stream in streams:
        await loop.create_connection(lambda s=stream: s, address.hostname, address.port)
    for stream in streams:
        stream.start()
    await load.begin()


async def measure(
    server: Server, steps: StepPipe, route: str, streams: int, args: argparse.Namespace
) -> Point:
    load = Load(streams, steps)
    async with aiohttp.ClientSession() as session:
        whole = -cpu_seconds(server)
        await start_streams(server, route, load, args)
        whole += cpu_seconds(server)  # without the requests of /metrics
        tokens, events = -await generated(session, server), -load.events
        used, start = -cpu_seconds(server), time.monotonic()
        await load.step_until_one_ends()
        used, seconds = used + cpu_seconds(server), time.monotonic() - start
        events += load.events
        tokens += await generated(session, server)
        whole += used - cpu_seconds(server)
        await load.end(args.output)
        whole += cpu_seconds(server)
    if not tokens:
        raise ValueError(f"--output {args.output}: a stream ended before all had begun: raise it")
    cost, each = 1e6 * used / tokens, 1e6 * whole / streams
    rates = cost, events / tokens, tokens / seconds
    return Point(route, streams, args.free, *rates, each / args.output, each - cost * args.output)


@contextmanager
def server_and_steps(args: argparse.Namespace) -> Iterator[tuple[Server, StepPipe]]:
    most = str(max(args.streams))
    flags = ["--num-threads", "1", "--max-running-requests", most]
    with tempfile.TemporaryDirectory() as folder:
        path = None if args.free else f"{folder}/steps"
        os.environ.pop(STEPS, None)
        if path is not None:
            os.mkfifo(path)
            os.environ[STEPS] = path
        with started("tiny:qwen3_moe", [*flags, "--skip-server-warmup"], module=MODULE) as server:
            yield server, StepPipe(path)


def run(args: argparse.Namespace) -> list[Point]:
    points = []
    with server_and_steps(args) as (server, steps):
        cases = [(route, streams) for streams in args.streams for route in args.routes]
        for route, streams in tqdm(cases, desc="streams", unit="point"):
            found = [
                uvloop.run(measure(server, steps, route, streams, args))
                for _ in range(args.repeats)
            ]
            middle = median(point.whole_us for point in found)
            points.append(min(found, key=lambda point: abs(point.whole_us - middle)))
    return points


def table(points: list[Point]) -> None:
    rows = [
        [
            f"{point.streams} streams, {point.route}",
            f"{point.cpu_us:.1f}",
            f"{point.events:.2f}",
            f"{point.tokens_per_s:.0f}",
            f"{point.whole_us:.1f}",
            f"{point.request_us:.0f}",
        ]
        for point in points
    ]
    header = ["", "CPU µs / token", "events / token", "tok/s", "with requests", "µs / request"]
    print_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.http_streams", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--routes", nargs="+", choices=BODIES, default=list(BODIES))
    parser.add_argument("--free", action="store_true", help="do not wait for the streams")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", default="http_streams", help="name of the result")
    args = parser.parse_args()
    # A benchmark that is told to end must not leave its server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    points = run(args)
    table(points)
    about = {"output_len": args.output, "repeats": args.repeats}
    results = [asdict(point) for point in points]
    write_json(
        args.save, {"machine": machine(torch.get_num_threads()), **about, "results": results}
    )


if __name__ == "__main__":
    main()
