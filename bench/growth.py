"""Time of a decode step against context length and against batch, with the fitted growth.

    python -m bench.growth                        # contexts 128..4096, batches 1..64
    python -m bench.growth --size tiny --steps 32

A step decodes one token of every running request. An exponent of 1 means that the time of a step
grows in proportion, and nothing may be worse than that.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.common import (
    SIZES,
    Size,
    machine,
    print_table,
    size_json,
    write_checkpoint,
    write_json,
)
from moesaic import Engine


@dataclass(frozen=True)
class Point:
    context: int
    batch: int
    median_ms: float
    best_ms: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch * 1000 / self.best_ms


def step_seconds(engine: Engine, prompts: list[list[int]], steps: int) -> float:
    """Mean time of a step while all requests decode together."""
    params = {"temperature": 0, "max_new_tokens": steps + 1, "ignore_eos": True}
    answers: Any = engine.generate(input_ids=prompts, sampling_params=params)
    metas = [answer["meta_info"] for answer in answers]
    times: list[float] = [(m["e2e_latency"] - m["ttft"]) / steps for m in metas]
    return statistics.median(times)


def measure(engine: Engine, context: int, batch: int, args: argparse.Namespace) -> Point:
    rng = random.Random(args.seed)
    vocab = SIZES[args.size].vocab
    prompts = [[rng.randrange(vocab) for _ in range(context)] for _ in range(batch)]
    # Fills the prefix cache: from then on all requests begin to decode in the same step.
    step_seconds(engine, prompts, 2)
    seconds = [step_seconds(engine, prompts, args.steps) for _ in range(args.repeats)]
    return Point(context, batch, 1000 * statistics.median(seconds), 1000 * min(seconds))


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Slope of the least-squares line through (log size, log time)."""
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(t) for t in times]
    ).slope


def sweep(engine: Engine, args: argparse.Namespace) -> tuple[list[Point], list[Point]]:
    bar = tqdm(total=len(args.contexts) + len(args.batches), desc="growth", unit="point")
    by_context, by_batch = [], []
    with bar:
        for context in args.contexts:
            by_context.append(measure(engine, context, args.at_batch, args))
            bar.update()
        for batch in args.batches:
            by_batch.append(measure(engine, args.at_context, batch, args))
            bar.update()
    return by_context, by_batch


def report(title: str, sizes: list[int], points: list[Point]) -> dict[str, Any]:
    rows = [
        [str(size), f"{p.median_ms:.2f}", f"{p.best_ms:.2f}", f"{p.tokens_per_s:.1f}"]
        for size, p in zip(sizes, points, strict=True)
    ]
    print(f"\n{title}")
    print_table(["", "step ms median", "step ms best", "tok/s at best"], rows)
    best = [p.best_ms for p in points]
    half = len(points) // 2
    growth = {
        "exponent": exponent(sizes, best),
        "exponent_of_upper_half": exponent(sizes[half:], best[half:]),
    }
    print(
        f"step time grows as size^{growth['exponent']:.2f}, "
        f"in the upper half as size^{growth['exponent_of_upper_half']:.2f}"
    )
    return {"points": [asdict(p) for p in points], **growth}


def run(args: argparse.Namespace, folder: Path, size: Size) -> dict[str, Any]:
    longest = max(args.contexts) + args.steps + 128
    room = max(args.at_batch * longest, max(args.batches) * (args.at_context + args.steps + 256))
    with Engine(
        model_path=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_running_requests=max(args.batches),
        max_total_tokens=2 * room,
        num_threads=args.threads,
    ) as engine:
        by_context, by_batch = sweep(engine, args)
    contexts = f"by context, batch {args.at_batch}"
    batches = f"by batch, context {args.at_context}"
    return {
        "machine": machine(args.threads),
        "model": size_json(size),
        "by_context": report(contexts, args.contexts, by_context),
        "by_batch": report(batches, args.batches, by_batch),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.growth", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--model-path", type=Path, help="a checkpoint that --size wrote before")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096]
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--at-batch", type=int, default=4, help="batch of the context sweep")
    parser.add_argument("--at-context", type=int, default=256, help="context of the batch sweep")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    size = SIZES[args.size]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model_path or write_checkpoint(Path(temporary), size)
        payload = run(args, folder, size)
    write_json(f"growth-{args.size}", payload)


if __name__ == "__main__":
    main()
