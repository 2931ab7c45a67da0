"""One model on 1 to 8 ranks of one machine: start, tokens per second, waiting, memory.

    python -m bench.ranks                  # 1.3 B Qwen3-MoE, 16 requests
    python -m bench.ranks --size small --repeats 3

All ranks share the machine's cores, so the best to hope for is the speed of one rank with all of
them: the table shows what dividing the work costs, not what more machines would give. Waiting is
the share of the time of a step in which a rank sleeps until another one has come; on a machine with
more ranks than cores most of it is waiting for a core.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
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
from moesaic import Engine

MIB = 2**20
PAGE = 32
DPA: dict[str, Any] = {"enable_dp_attention": True, "moe_a2a_backend": "deepep"}
MESHES: dict[str, dict[str, Any]] = {
    "1": {},
    "tp 2, ep 1": {"tp_size": 2},
    "tp 2, ep 2": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "deepep"},
    "tp 2, ep 2, dp 2": {"tp_size": 2, "dp_size": 2, **DPA},
    "pp 2": {"pp_size": 2},
    "tp 4, ep 4": {"tp_size": 4, "ep_size": 4, "moe_a2a_backend": "deepep"},
    "tp 4, ep 4, dp 4": {"tp_size": 4, "dp_size": 4, **DPA},
    "pp 4": {"pp_size": 4},
    "tp 8, ep 8, dp 8": {"tp_size": 8, "dp_size": 8, **DPA},
    "tp 2, ep 2, dp 2, pp 4": {"tp_size": 2, "dp_size": 2, "pp_size": 4, **DPA},
}


@dataclass
class Row:
    """`waiting` and the figures in MiB are of the ranks: the mean, or the largest."""

    mesh: str
    ranks: int
    start_seconds: float
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    waiting: float = 0.0
    weight_mib: float = 0.0
    expert_mib: float = 0.0
    own_mib: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / min(self.seconds)


def serve(engine: Engine, requests: list[Request]) -> float:
    engine.flush_cache()  # or the prompts of the last repetition would be skipped
    started = time.perf_counter()
    engine.generate(
        input_ids=[request.prompt for request in requests],
        sampling_params=[
            {"temperature": 0, "max_new_tokens": r.output_len, "ignore_eos": True} for r in requests
        ],
    )
    return time.perf_counter() - started


def measure(name: str, folder: Path, requests: list[Request], args: argparse.Namespace) -> Row:
    started = time.perf_counter()
    with Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        max_total_tokens=16384,
        chunked_prefill_size=args.chunk,
        page_size=PAGE,
        log_level="warning",
        **MESHES[name],
    ) as engine:
        row = Row(name, engine.mesh.world, time.perf_counter() - started)
        row.tokens = sum(request.output_len for request in requests)
        serve(engine, requests[:2])
        before = ranks_of(engine)
        row.seconds = [serve(engine, requests) for _ in range(args.repeats)]
        note_ranks(row, before, ranks_of(engine))
    return row


def ranks_of(engine: Engine) -> list[dict[str, Any]]:
    """Of the one rank of this process nothing but its memory is known."""
    ranks: list[dict[str, Any]] = engine.get_server_info().get("ranks", [])
    if ranks:
        return ranks
    runner: Any = engine._core.runner  # type: ignore[union-attr]
    experts = sum(
        layer.weights.w13_eJH.nbytes + layer.weights.w2_eHI.nbytes for layer in runner.moe_layers
    )
    held = {"weight_bytes": runner.model.nbytes, "expert_bytes": experts}
    return [{"pid": os.getpid(), "computed": 1.0, "waited": 0.0, **held}]


def note_ranks(row: Row, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    shares = []
    for old, new in zip(before, after, strict=True):
        waited, computed = (new[key] - old[key] for key in ("waited", "computed"))
        shares.append(waited / (waited + computed) if waited + computed else 0.0)
    row.waiting = sum(shares) / len(shares)
    row.weight_mib = max(rank["weight_bytes"] for rank in after) / MIB
    row.expert_mib = max(rank["expert_bytes"] for rank in after) / MIB
    row.own_mib = max(psutil.Process(rank["pid"]).memory_full_info().uss for rank in after) / MIB


def report(rows: list[Row]) -> None:
    header = (
        "mesh",
        "ranks",
        "start s",
        "tokens/s",
        "of one rank's",
        "waiting",
        "weights MiB",
        "of experts",
        "memory MiB",
    )
    print_table(
        header,
        [
            (
                row.mesh,
                str(row.ranks),
                f"{row.start_seconds:.1f}",
                f"{row.rate:.1f}",
                f"{row.rate / rows[0].rate:.2f}",
                f"{row.waiting:.0%}",
                f"{row.weight_mib:.0f}",
                f"{row.expert_mib:.0f}",
                f"{row.own_mib:.0f}",
            )
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--meshes", nargs="*", choices=MESHES, default=list(MESHES))
    args = parser.parse_args()
    size = SIZES[args.size]
    requests = mixed_workload(args.requests, size.vocab, Range(16, 128), Range(24, 40), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder), size)
        names = [name for name in MESHES if name in args.meshes or name == "1"]
        rows = [measure(name, checkpoint, requests, args) for name in tqdm(names, desc="meshes")]
    report(rows)
    write_json(
        f"ranks-{args.size}",
        {
            "machine": machine(os.cpu_count() or 1),
            "model": size_json(size),
            "requests": args.requests,
            "rows": [{**asdict(row), "tokens_per_second": row.rate} for row in rows],
        },
    )


if __name__ == "__main__":
    main()
