"""Balancing while serving: throughput with and without it, and the longest step while experts move.

    python -m bench.eplb                                   # CPU ranks, a small model
    python -m bench.eplb --model-path shape:qwen3-30b-a3b --dtype bfloat16 --ranks 4 8 --batch 256 \
        --page-size 64 --redundant 16 --out h200_balance

Routers of dummy weights prefer some experts (--zipf). The same batch decodes with random routing
(--ep-dispatch-algorithm fake), which is the bound: perfect balance but for chance; with the first
placement; and with each algorithm during and after one rebalance. Steps are those of rank 0's
trace. A row's `worst_step_ratio` is the longest step while experts move, in units of the median
step without moves; `worst_other_ratio` is that of as many steps without moves: what the machine
does anyway. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from bench.common import print_table, write_json
from moesaic import Engine
from moesaic.observe.expert_load import LayerLoad, expert_loads

SMALL = (
    "tiny:qwen3_moe,hidden_size=512,moe_intermediate_size=256,num_experts=32,num_experts_per_tok=4,"
    "num_hidden_layers=6,vocab_size=4096"
)
UNIFORM, FIRST = "uniform", "none"
NEVER = 1 << 30
TOP_TOKEN = 4000
# Batches that decode one after the other until experts have moved.
MOST_DECODES = 12


@dataclass
class Row:
    """`balancedness` is of the tokens of the measured decode: mean over ranks / largest, averaged
    over layers."""

    ranks: int
    algorithm: str
    redundant: int
    balancedness: float
    tok_s: float
    of_uniform: float = 0.0
    worst_step_ratio: float = 0.0
    worst_other_ratio: float = 0.0
    moved_bytes: int = 0
    fetched: int = 0
    move_seconds: float = 0.0
    median_step_ms: float = 0.0
    slowest: list[tuple[float, float]] = field(default_factory=list)
    """The slowest steps while experts move: in units of the median, and the host's milliseconds for
    the move."""


class StepTime(NamedTuple):
    begin: float
    ms: float
    move_ms: float | None
    """What the host did for a move in it; None without one."""


@dataclass(frozen=True)
class Decode:
    """One batch: seconds, and rank 0's steps."""

    seconds: float
    steps: list[StepTime]


def decode(engine: Engine, args: argparse.Namespace, seed: int, tokens: int) -> Decode:
    draw = random.Random(seed)
    prompts = [[draw.randrange(TOP_TOKEN) for _ in range(args.prompt)] for _ in range(args.batch)]
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    engine.flush_cache()
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(folder)
        begin = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - begin
        path = engine.stop_profile()
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
    return Decode(seconds, steps_of(events))


def steps_of(events: list[dict[str, Any]]) -> list[StepTime]:
    """The first rank's steps in which all ranks decode their whole batches. The first process of a
    trace is the caller's."""
    steps = [event for event in events if event["name"] == "step"]
    first = min(event["pid"] for event in steps)
    batch = statistics.mode(event["args"]["tokens"] for event in steps)
    others = {event["args"]["step"] for event in steps if event["args"]["tokens"] != batch}
    moves = {
        event["args"]["step"]: event["dur"] / 1000
        for event in events
        if event["name"] == "move" and event["pid"] == first
    }
    found = [
        StepTime(event["ts"], event["dur"] / 1000, moves.get(event["args"]["step"]))
        for event in steps
        if event["pid"] == first and event["args"]["step"] not in others
    ]
    return sorted(found, key=lambda step: step.begin)


def balancedness_between(before: list[LayerLoad], after: list[LayerLoad]) -> float:
    values = []
    for old, new in zip(before, after, strict=True):
        ranks = [new.ranks[rank] - old.ranks[rank] for rank in new.ranks]
        values.append(statistics.mean(ranks) / max(ranks) if max(ranks) else 1.0)
    return statistics.mean(values)


def engine_flags(args: argparse.Namespace, ranks: int, algorithm: str) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "model_path": args.model_path,
        "load_format": "dummy",
        "dtype": args.dtype,
        "tp_size": ranks,
        "dp_size": ranks,
        "enable_dp_attention": True,
        "moe_a2a_backend": "deepep",
        "page_size": args.page_size,
        "skip_tokenizer_init": True,
        "max_running_requests": args.batch,
        "dummy_router_zipf": args.zipf,
        "ep_num_redundant_experts": args.redundant,
        "log_level": "warning",
        "disable_prefill_cuda_graph": True,  # which would take long to capture
    }
    if ranks > torch.cuda.device_count() > 0:
        flags["device"] = "cuda"
    if args.kv_tokens:
        flags["max_total_tokens"] = args.kv_tokens
    if algorithm == UNIFORM:
        flags["ep_dispatch_algorithm"] = "fake"
    else:
        flags |= {
            "enable_eplb": True,
            "eplb_algorithm": algorithm,
            "eplb_rebalance_num_iterations": NEVER,
            "eplb_max_bytes_per_step": args.step_bytes,
        }
    return flags


def measure(args: argparse.Namespace, ranks: int, algorithm: str) -> list[Row]:
    """The row of an algorithm, behind that of its first placement; of UNIFORM the one that it has.
    An engine takes long to start, so all are measured in one."""
    with Engine(**engine_flags(args, ranks, algorithm)) as engine:
        decode(engine, args, 0, 8)
        first = Row(ranks, UNIFORM if algorithm == UNIFORM else FIRST, args.redundant, 0.0, 0.0)
        throughput(engine, args, first)
        if algorithm == UNIFORM:
            return [first]
        row = Row(ranks, algorithm, args.redundant, 0.0, 0.0)
        move(engine, args, row)
        throughput(engine, args, row)
    return [first, row]


def throughput(engine: Engine, args: argparse.Namespace, row: Row) -> None:
    before = expert_loads(engine.get_stats())
    found = [decode(engine, args, 3 + n, args.tokens) for n in range(args.repeats)]
    row.balancedness = balancedness_between(before, expert_loads(engine.get_stats()))
    best = min(found, key=lambda one: one.seconds)
    row.tok_s = args.batch * args.tokens / best.seconds
    row.median_step_ms = statistics.median(step.ms for step in best.steps)


def move(engine: Engine, args: argparse.Namespace, row: Row) -> None:
    """A rebalance in the middle of a decode, in which its steps are compared with the others. Where
    it takes longer, the batch decodes again."""
    from threading import Timer

    timer = Timer(args.delay, lambda: engine.rebalance(timeout=0))
    timer.start()
    steps: list[StepTime] = []
    for _ in range(MOST_DECODES):
        steps += decode(engine, args, 2, 2 * args.tokens).steps
        timer.join()
        last = engine.rebalance_state()[0]["last"]
        if last is not None:
            break
    else:
        raise RuntimeError(f"experts still move after {len(steps)} steps: {row}")
    if last["outcome"] != "moved":
        raise RuntimeError(f"no experts have moved: {last['outcome']}")
    moving = [(step.ms, step.move_ms) for step in steps if step.move_ms is not None]
    still = [step.ms for step in steps if step.move_ms is None]
    median = statistics.median(still)
    row.slowest = [(ms / median, move_ms) for ms, move_ms in sorted(moving)[:-6:-1]]
    row.worst_step_ratio = max((ratio for ratio, _ in row.slowest), default=0.0)
    row.worst_other_ratio = max(still[-len(moving) :], default=0.0) / median
    row.moved_bytes, row.fetched = last["fetched_bytes"], last["fetched"]
    row.move_seconds = last["seconds"]


def report(rows: list[Row]) -> None:
    header = (
        "ranks algorithm redundant balancedness tokens/s of-uniform worst/median others fetched "
        "MiB move-s step-ms"
    )
    cells = [
        (
            str(row.ranks),
            row.algorithm,
            str(row.redundant),
            f"{row.balancedness:.3f}",
            f"{row.tok_s:.0f}",
            f"{row.of_uniform:.3f}",
            f"{row.worst_step_ratio:.2f}",
            f"{row.worst_other_ratio:.2f}",
            str(row.fetched),
            f"{row.moved_bytes / 2**20:.0f}",
            f"{row.move_seconds:.2f}",
            f"{row.median_step_ms:.2f}",
        )
        for row in rows
    ]
    print_table(header.split(), cells)
    for row in rows:
        if row.slowest:
            told = ", ".join(f"{ratio:.2f} ({ms:.1f} ms)" for ratio, ms in row.slowest)
            print(f"{row.ranks} ranks, {row.algorithm}: slowest (host's part) {told}")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.eplb", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model-path", default=SMALL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--algorithms", nargs="+", default=["incremental", "deepseek"])
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--zipf", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, default=0)
    parser.add_argument("--step-bytes", type=int, default=None)
    parser.add_argument("--delay", type=float, default=0.5, help="seconds until experts move")
    parser.add_argument("--out", default="eplb", help="name of the file in bench/results")
    args = parser.parse_args()
    rows: list[Row] = []
    cases = [(ranks, name) for ranks in args.ranks for name in (UNIFORM, *args.algorithms)]
    for ranks, name in tqdm(cases, desc="Decoding", disable=None):
        for row in measure(args, ranks, name):
            same = [one for one in rows if one.ranks == ranks]
            row.of_uniform = row.tok_s / next(iter(same), row).tok_s
            if row.algorithm not in [one.algorithm for one in same]:
                rows.append(row)
        write_json(args.out, [asdict(row) for row in rows])
    report(rows)


if __name__ == "__main__":
    main()
