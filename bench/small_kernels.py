"""The small kernels of a step on a GPU: norms, routing, quantising, sampling.

    python -m bench.small_kernels [--out FILE]

Sizes are those of Qwen3-30B-A3B. Limit: bytes over the bandwidth of a large copy. Of what a step
has in its caches anyway, the time is with warm caches; the limit is still that of memory. The peer
is the same in plain torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from bench import gpu
from bench.common import print_table
from moesaic.kernels.norm import add_rms_norm
from moesaic.kernels.quantise import quantise_rows, silu_mul
from moesaic.kernels.routing import (
    MAX_ROWS,
    RouterWeights,
    TopKConfig,
    TopKInputs,
    route,
    route_rows,
)
from moesaic.kernels.sampling import RowSampling, SampleParams, greedy_rows, sample_rows

HIDDEN, INNER, EXPERTS, VOCAB = 2048, 768, 128, 151_936
SPEC = TopKConfig(8, renormalize=True)
GIVEN = TopKInputs(SPEC)
Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    work: Work
    peer: Work
    num_bytes: int
    cold: bool = False


@dataclass(frozen=True)
class Row:
    kernel: str
    rows: int
    us: float
    peer_us: float
    limit_us: float


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def step_cases(rows: int) -> Iterator[Case]:
    x, residual, weight = draw(rows, HIDDEN), draw(rows, HIDDEN), draw(HIDDEN)
    gate_up, logits = draw(rows, 2 * INNER), draw(rows, EXPERTS)

    def plain_norm() -> object:
        return F.rms_norm(x + residual, weight.shape, weight, 1e-6)

    def plain_route() -> object:
        chosen = logits.float().softmax(-1).topk(SPEC.top_k)
        return chosen.values / chosen.values.sum(-1, keepdim=True)

    def plain_quantise() -> object:
        grouped = x.float().unflatten(-1, (-1, 128))
        scales = grouped.abs().amax(-1, keepdim=True) / 448
        return (grouped / scales).to(torch.float8_e4m3fn)

    def plain_silu() -> object:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    norm_bytes, row_bytes = 4 * rows * HIDDEN * 2, rows * HIDDEN
    pairs = rows * SPEC.top_k * 8
    yield Case(
        "add_rms_norm",
        rows,
        lambda: add_rms_norm(x, residual, weight, 1e-6),
        plain_norm,
        norm_bytes,
    )
    yield Case("route", rows, lambda: route(logits, GIVEN), plain_route, rows * EXPERTS * 2 + pairs)
    yield Case(
        "quantise_rows fp8", rows, lambda: quantise_rows(x, "fp8"), plain_quantise, 3 * row_bytes
    )
    yield Case("silu_mul", rows, lambda: silu_mul(gate_up), plain_silu, 3 * rows * INNER * 2)


def router_case(rows: int) -> Case:
    """Its peer is a product of cuBLAS with our `route` behind it: where that is faster, MAX_ROWS is
    too high."""
    x, weight = draw(rows, HIDDEN), draw(EXPERTS, HIDDEN)
    router = RouterWeights(weight, None, True, torch.zeros(1, dtype=torch.int32, device="cuda"))
    return Case(
        "route_rows",
        rows,
        lambda: route_rows(x, router, GIVEN),
        lambda: route(F.linear(x, weight), GIVEN),
        EXPERTS * HIDDEN * 2,
    )


def sampling_cases(rows: int, sharp: bool) -> Iterator[Case]:
    logits = draw(rows, VOCAB, dtype=torch.float32) * (6 if sharp else 0.3)
    kind = "sharp" if sharp else "flat"
    once = rows * VOCAB * 4
    asked = {
        "plain": (RowSampling(1.0), 2),
        "top-k 20 top-p 0.95": (RowSampling(0.6, 20, 0.95), 1),
        "top-p 0.9": (RowSampling(1.0, -1, 0.9), 2),
    }

    def multinomial() -> object:
        return torch.multinomial(logits.softmax(-1), 1)

    if sharp:
        peer = lambda: logits.argmax(-1)  # noqa: E731
        yield Case("greedy_rows", rows, lambda: greedy_rows(logits), peer, once, True)
    for name, (one, passes) in asked.items():
        draws = [one._replace(seed=n) for n in range(rows)]
        packed = SampleParams.pack(draws)
        params = SampleParams(packed.values.cuda(), packed.any_top_p)
        work = lambda params=params: sample_rows(logits, params)  # noqa: E731
        yield Case(f"sample_rows {name}, {kind}", rows, work, multinomial, passes * once, True)


def cases() -> list[Callable[[], list[Case]]]:
    """Made one after the other: the logits of 256 rows are large."""
    made: list[Callable[[], list[Case]]] = []
    for rows in (1, 8, 32, 256, 8192):
        made.append(lambda rows=rows: list(step_cases(rows)))
    for rows in (1, 2, 4, MAX_ROWS):
        made.append(lambda rows=rows: [router_case(rows)])
    for rows in (1, 32, 256):
        for sharp in (True, False):
            made.append(lambda rows=rows, sharp=sharp: list(sampling_cases(rows, sharp)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.small_kernels", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the rows of the table")
    args = parser.parse_args()
    gpu.require()
    bandwidth = gpu.copy_bandwidth()
    rows = []
    for make in tqdm(cases(), desc="kernels"):
        for case in make():
            us = gpu.measure(case.work, flush=case.cold)
            peer_us = gpu.measure(case.peer, flush=case.cold)
            rows.append(Row(case.name, case.rows, us, peer_us, case.num_bytes / bandwidth))
    print_table(
        ("kernel", "rows", "µs", "torch µs", "limit µs"),
        [
            (row.kernel, str(row.rows), *(f"{n:.1f}" for n in (row.us, row.peer_us, row.limit_us)))
            for row in rows
        ],
    )
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
