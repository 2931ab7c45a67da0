"""What --enable-deterministic-inference costs: the engine with it beside the engine without.

    python -m bench.deterministic                # 1.3 B Qwen3-MoE, 1, 4 and 16 requests

Both engines live in one process and take turns, so that a noisy neighbour hits both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.common import (
    SIZES,
    Range,
    Request,
    machine,
    mixed_workload,
    print_table,
    size_json,
    write_checkpoint,
    write_json,
)
from bench.ranks import PAGE, serve
from moesaic import Engine


def make_engine(folder: Path, deterministic: bool) -> Engine:
    return Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        max_total_tokens=16384,
        page_size=PAGE,
        log_level="warning",
        enable_deterministic_inference=deterministic,
    )


def compare(engines: list[Engine], requests: list[Request], repeats: int) -> dict[str, Any]:
    """Seconds of each, normal first; the ratio is that of the medians."""
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for engine, found in zip(engines, seconds, strict=True):
            found.append(serve(engine, requests))
    normal, deterministic = map(statistics.median, seconds)
    tokens = sum(request.output_len for request in requests)
    return {
        "requests": len(requests),
        "normal": tokens / normal,
        "deterministic": tokens / deterministic,
        "ratio": deterministic / normal,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.deterministic", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    size = SIZES[args.size]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder), size)
        engines = [make_engine(checkpoint, deterministic) for deterministic in (False, True)]
        rows = []
        for count in tqdm(args.requests, desc="requests"):
            work = mixed_workload(count, size.vocab, Range(64, 256), Range(16, 32), seed=count)
            rows.append(compare(engines, work, args.repeats))
        for engine in engines:
            engine.shutdown()
    print_table(
        ("requests", "normal tok/s", "deterministic tok/s", "takes"),
        [
            (
                str(row["requests"]),
                f"{row['normal']:.1f}",
                f"{row['deterministic']:.1f}",
                f"{row['ratio']:.2f}x",
            )
            for row in rows
        ],
    )
    threads = len(os.sched_getaffinity(0))
    write_json(
        f"deterministic-{args.size}",
        {"machine": machine(threads), "model": size_json(size), "rows": rows},
    )


if __name__ == "__main__":
    main()
