"""How the host's costs grow: the exponent and the constant of each, against their targets.

    python -m bench.growth                        # writes bench/results/growth-small.json
    python -m bench.growth --size quick --axes running admissions --repeats 3

A rank's costs are those of its real step loop (scheduler, planner, leader, plan codec, the filling
of batches, results) with a model that answers at once (bench/growth_rank.py). All are CPU time of
one thread, and of the HTTP processes for the axes of streams: neighbours on the machine disturb it
less. An exponent of 1 means that a cost grows in proportion to its size.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
import torch
from tqdm import tqdm

from bench.common import (
    RESULTS,
    Range,
    machine,
    mixed_workload,
    positive,
    print_table,
    write_json,
)
from bench.growth_rank import MIXED_PROMPT, Load, RankLoop, StepCost
from bench.http import VOCAB, by_http
from bench.http_server import Server, started
from moesaic.core.stats import EngineStats, RankStats
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.registry import build_model
from moesaic.models.tiny import materialise
from moesaic.models.weights import load_weights
from moesaic.observe.expert_load import expert_loads

MAX_EXPONENT: Final = 1.1
STREAM_TOKENS: Final = 128
LAYERS: Final = 48
# Axes of the HTTP server and their routes. The events of /generate repeat the text so far.
STREAMS: Final = {
    "streams": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}


@dataclass(frozen=True)
class Point:
    """`ms`: the median of the repeats; `units`: what the constant is counted in."""

    size: int
    ms: float
    units: int


@dataclass(frozen=True)
class Axis:
    """`measure` gives the point of a size; the limits are those of the largest one, if any.
    `passes`: how often all sizes are measured in turn, of which each keeps its fastest point. A
    neighbour on the machine may slow milliseconds of work twofold, and a single size with it."""

    name: str
    what: str
    unit: str
    sizes: dict[str, tuple[int, ...]]
    measure: Callable[[int, argparse.Namespace], Point]
    max_ms: float | None = None
    max_unit_us: float | None = None
    passes: int = 1


@dataclass(frozen=True)
class Growth:
    """What was measured on an axis; `constant_us`: microseconds per unit at the largest size."""

    axis: str
    what: str
    unit: str
    points: list[Point]
    exponent: float
    constant_us: float
    max_ms: float | None
    max_unit_us: float | None

    @property
    def met(self) -> bool:
        last = self.points[-1]
        return (
            self.exponent <= MAX_EXPONENT
            and (self.max_ms is None or last.ms <= self.max_ms)
            and (self.max_unit_us is None or self.constant_us <= self.max_unit_us)
        )

    @property
    def target(self) -> str:
        limits = [f"exponent {MAX_EXPONENT}"]
        limits += [] if self.max_ms is None else [f"{self.max_ms:g} ms"]
        limits += [] if self.max_unit_us is None else [f"{self.max_unit_us:g} µs"]
        return ", ".join(limits)


def exponent(points: Sequence[Point]) -> float:
    """Slope of the least-squares line through (log size, log time)."""
    return statistics.linear_regression(
        [math.log(point.size) for point in points], [math.log(point.ms) for point in points]
    ).slope


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """Median CPU time of this thread."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(1000 * (time.thread_time() - start))
    return statistics.median(times)


@cache
def decode_costs(load: Load, repeats: int) -> list[StepCost]:
    """Steps in which all requests of the load decode."""
    loop = RankLoop(load)
    loop.admit()
    costs = loop.decode(repeats)
    loop.close()
    return costs


def decode_point(load: Load, size: int, units: int, args: argparse.Namespace) -> Point:
    costs = decode_costs(load, args.repeats)
    return Point(size, 1000 * statistics.median(cost.leader for cost in costs), units)


def by_running(size: int, args: argparse.Namespace) -> Point:
    return decode_point(Load(size, args.at_context), size, size, args)


def by_mixed(size: int, args: argparse.Namespace) -> Point:
    """A prompt comes while all requests decode."""
    loop = RankLoop(Load(size, args.at_context))
    loop.admit()
    loop.decode(1)
    costs = [loop.mixed_step() for _ in range(args.repeats)]
    loop.close()
    return Point(size, 1000 * statistics.median(cost.leader for cost in costs), size)


def by_context(size: int, args: argparse.Namespace) -> Point:
    return decode_point(Load(args.at_running, size), size, args.at_running, args)


def by_follower(size: int, args: argparse.Namespace) -> Point:
    costs = decode_costs(Load(size, args.at_context), args.repeats)
    return Point(size, 1000 * statistics.median(cost.follower for cost in costs), size)


def by_admissions(size: int, args: argparse.Namespace) -> Point:
    """A burst of short prompts: their messages, and the steps until all have a token."""
    times = []
    for _ in range(args.repeats):
        loop = RankLoop(Load(size, args.at_prompt))
        times.append(1000 * loop.admit())
        loop.close()
    return Point(size, statistics.median(times), size)


def by_penalties(size: int, args: argparse.Namespace) -> Point:
    """Penalised requests that each have `size` different tokens of output."""
    load = Load(args.at_rows, args.at_prompt, emitted=size, penalised=True)
    return decode_point(load, size, size * args.at_rows, args)


def by_rows(size: int, args: argparse.Namespace) -> Point:
    load = Load(size, args.at_prompt, emitted=args.at_emitted, penalised=True)
    return decode_point(load, size, size * args.at_emitted, args)


def by_ranks(size: int, args: argparse.Namespace) -> Point:
    """The experts' loads from the statistics of all ranks, for one look at /metrics."""
    slots = 8
    ranks = [
        RankStats(
            rank,
            "",
            layers=list(range(LAYERS)),
            experts=[list(range(slots * rank, slots * rank + slots))] * LAYERS,
            expert_tokens=[[1] * slots] * LAYERS,
        )
        for rank in range(size)
    ]
    stats = EngineStats(0.0, [], ranks, num_experts=slots * size)
    assert sum(map(sum, (load.experts for load in expert_loads(stats)))) == size * slots * LAYERS
    return Point(size, cpu_ms(lambda: expert_loads(stats), args.repeats), size)


def by_tensors(size: int, args: argparse.Namespace) -> Point:
    """Loads a model whose layers have `size` experts altogether."""
    layers = 4
    sizes = f"num_hidden_layers={layers},num_experts={size // layers},num_experts_per_tok=2"
    small = "hidden_size=16,moe_intermediate_size=8,head_dim=8"
    folder = Path(materialise(f"tiny:qwen3_moe,{sizes},{small}"))
    model = build_model(RawConfig.read(folder), BuildContext.single(torch.float32, positions=8))
    tensors = len(list(model.checkpoint_slots()))
    assert tensors >= 3 * size
    return Point(size, cpu_ms(lambda: load_weights(model, folder), args.repeats), tensors)


def by_streams(route: str, size: int, args: argparse.Namespace) -> Point:
    """Streams of the HTTP server: CPU time of the processes that have its sockets."""
    flags = ["--num-threads", "1", "--max-running-requests", str(size)]
    with started("tiny:qwen3_moe", flags) as server:
        seeds = range(args.repeats + 1)
        times = [1000 * _stream(server, route, size, seed) for seed in seeds]
    return Point(size, statistics.median(times[1:]), size * STREAM_TOKENS)  # the first warms up


def _stream(server: Server, route: str, streams: int, seed: int) -> float:
    """From the moment when all connections are open."""
    lengths = Range(16, 16), Range(STREAM_TOKENS, STREAM_TOKENS)
    requests = mixed_workload(streams, VOCAB, *lengths, seed)
    processes = _http_processes(server)
    before: list[float] = []
    by_http(
        server.url,
        requests,
        f"{route}, stream",
        lambda: before.extend(map(_cpu_seconds, processes)),
    )
    return sum(map(_cpu_seconds, processes)) - sum(before)


def _http_processes(server: Server) -> list[psutil.Process]:
    """Those that listen on the server's port."""
    parent, port = psutil.Process(server.pid), urlsplit(server.url).port
    return [
        process
        for process in [parent, *parent.children(recursive=True)]
        if any(c.laddr and c.laddr.port == port for c in process.net_connections("tcp"))
    ]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def stream_axis(name: str, route: str) -> Axis:
    return Axis(
        name,
        f"HTTP, {route}, {STREAM_TOKENS} tokens a stream",
        "token",
        {"small": (16, 64, 256), "quick": (2, 4)},
        partial(by_streams, route),
        max_unit_us=20.0,
    )


def make_axes() -> dict[str, Axis]:
    many = {"small": (128, 256, 512, 1024), "quick": (4, 8)}
    context, rows = "context {at_context}", "penalised requests of {at_emitted} tokens"
    axes = (
        Axis("running", f"a leader's step, {context}", "request", many, by_running, max_ms=5.0),
        Axis(
            "mixed",
            f"a leader's step with a prompt of {MIXED_PROMPT} tokens, {context}",
            "request",
            {"small": (32, 64, 128, 256), "quick": (4, 8)},
            by_mixed,
            max_ms=3.0,
        ),
        Axis(
            "context",
            "a leader's step, {at_running} requests",
            "request",
            {"small": (1024, 2048, 4096, 8192), "quick": (32, 64)},
            by_context,
            max_ms=6.0,
        ),
        Axis("follower", f"a follower's plan, {context}", "request", many, by_follower),
        Axis(
            "admissions",
            "a burst of requests with prompts of {at_prompt} tokens",
            "request",
            many,
            by_admissions,
        ),
        Axis(
            "penalties",
            "a leader's step, {at_rows} penalised requests by their tokens",
            "token",
            {"small": (125, 250, 500, 1000), "quick": (8, 16)},
            by_penalties,
            max_ms=5.0,
        ),
        Axis("rows", f"a leader's step, {rows}", "token", many, by_rows),
        *(stream_axis(name, route) for name, route in STREAMS.items()),
        Axis(
            "ranks",
            f"loads of experts, {LAYERS} layers, 8 slots a rank",
            "rank",
            {"small": (8, 16, 32, 64, 128), "quick": (2, 4)},
            by_ranks,
            passes=8,
        ),
        Axis(
            "experts",
            "loading, experts × layers",
            "tensor",
            {"small": (256, 512, 1024, 2048), "quick": (16, 32)},
            by_tensors,
            max_unit_us=42.0,  # a fifth of what it was
        ),
    )
    return {axis.name: axis for axis in axes}


def grow(axis: Axis, args: argparse.Namespace) -> Growth:
    sizes = axis.sizes[args.size]
    found: dict[int, list[Point]] = {size: [] for size in sizes}
    cases = [size for _ in range(axis.passes) for size in sizes]
    for size in tqdm(cases, desc=axis.name, unit="size", disable=None, leave=False):
        gc.collect()
        found[size].append(axis.measure(size, args))
    points = [min(found[size], key=lambda point: point.ms) for size in sizes]
    last = points[-1]
    constant = 1000 * last.ms / last.units
    limits = (axis.max_ms, axis.max_unit_us) if args.size == "small" else (None, None)
    about = (axis.name, axis.what.format(**vars(args)), axis.unit, points)
    return Growth(*about, exponent(points), constant, *limits)


def table(growths: Sequence[Growth]) -> list[list[str]]:
    return [
        [
            f"{growth.axis}: {growth.what}",
            " ".join(str(point.size) for point in growth.points),
            " ".join(f"{point.ms:.2f}" for point in growth.points),
            f"{growth.exponent:.2f}",
            f"{growth.constant_us:.2f} a {growth.unit}",
            growth.target,
            "yes" if growth.met else "no",
        ]
        for growth in growths
    ]


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.growth", description=(__doc__ or "").partition("\n")[0]
    )
    axes = list(make_axes())
    parser.add_argument("--size", choices=("small", "quick"), default="small")
    parser.add_argument("--axes", nargs="+", choices=axes, default=axes)
    parser.add_argument("--repeats", type=positive, default=5)
    args = parser.parse_args(words)
    quick = args.size == "quick"
    args.at_running, args.at_context = (4, 32) if quick else (1024, 1024)
    args.at_rows, args.at_emitted = (4, 8) if quick else (64, 200)
    args.at_prompt = 16 if quick else 64
    return args


def run(args: argparse.Namespace) -> list[Growth]:
    torch.set_num_threads(1)
    axes = make_axes()
    return list(map(partial(grow, args=args), (axes[name] for name in args.axes)))


def main() -> None:
    args = parse_args()
    growths = run(args)
    header = ["", "sizes", "CPU ms", "exponent", "µs", "at most", "met"]
    print_table(header, table(growths))
    about = {"machine": machine(1), "repeats": args.repeats}
    rows: list[dict[str, Any]] = [
        {**asdict(growth), "target": growth.target, "met": growth.met, **about}
        for growth in growths
    ]
    name = f"growth-{args.size}"
    write_json(name, merged(RESULTS / f"{name}.json", rows))


def merged(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of this run, and those of axes that it has not measured, in the axes' order."""
    before = json.loads(path.read_text()) if path.exists() else []
    by_axis = {row["axis"]: row for row in [*before, *rows]}
    return [by_axis[axis] for axis in make_axes() if axis in by_axis]


if __name__ == "__main__":
    main()
