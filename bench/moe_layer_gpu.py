"""One MoE layer on a GPU, everything after routing, against its limit and peers in the same run.

    python -m bench.moe_layer --device cuda                       # all shapes, both dtypes: minutes
    python -m bench.moe_layer --device cuda --shapes qwen3_30b --dtypes fp8 --tokens 32 --no-peers

A layer sorts, computes both products, activates, weights and sums; quantised ones quantise their
input, too. The limit is the larger of its bytes (weights of the experts touched, tokens in and out)
over the rate of a plain copy and its operations over the rate of a large matrix product.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from bench import gpu
from bench.common import RESULTS, positive, print_table, write_json
from moesaic.core.step import DECODE
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE, MoeConfig
from moesaic.moe.quant.weights import WEIGHT_FORMATS, ExpertMatrix
from moesaic.moe.registry import MoeProblem


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = {
    "qwen3_30b": Shape(128, 8, 2048, 768),
    "dsv3_ep8": Shape(32, 1, 7168, 2048),
    "mixtral_8x7b": Shape(8, 2, 4096, 14336),
}
FORMATS = {"bf16": "bf16", "fp8": "fp8_block"}
TOKENS = [1, 8, 32, 128, 512, 2048, 8192]
# Of the k-th most liked expert: 1 / k. A batch of 64 then touches about half of 128 experts.
ROUTINGS = {"uniform": 0.0, "skewed": 1.0}
Work = Callable[[], object]


@dataclass(frozen=True)
class Point:
    shape: str
    dtype: str
    routing: str
    tokens: int
    experts_touched: int
    us: float
    limit_us: float
    peers_us: dict[str, float]
    error: float
    """Of the layer against a plain loop over experts in float32, by norm."""

    @property
    def of_limit(self) -> float:
        return self.limit_us / self.us


def draw_routing(shape: Shape, tokens: int, exponent: float, seed: int) -> TopKOutput:
    """Each token takes its experts without repetition, by their popularity."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    ranks = torch.randperm(shape.experts, device="cuda", generator=generator) + 1
    noise = torch.rand(tokens, shape.experts, device="cuda", generator=generator)
    gumbel = -torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-9)))
    ids = (gumbel - exponent * ranks.log()).topk(shape.top_k).indices.int()
    weights = torch.rand(tokens, shape.top_k, device="cuda", generator=generator)
    return TopKOutput(ids, weights / weights.sum(-1, keepdim=True))


def make_layer(shape: Shape, dtype: str, runner: str = "auto") -> FusedMoE:
    """With random weights."""
    weights = WEIGHT_FORMATS[FORMATS[dtype]]
    problem = MoeProblem(weights=weights, dtype="bf16", device="cuda", runner=runner)
    with torch.device("cuda"):
        context = MoeContext.make(problem, torch.bfloat16, max_tokens=max(TOKENS))
        config = MoeConfig(shape.experts, shape.hidden, shape.inner, shape.top_k)
        layer = FusedMoE(config, context)
    for matrix in (layer.weights.w13_eJH, layer.weights.w2_eHI):
        fill(matrix)
    return layer


def fill(matrix: ExpertMatrix) -> None:
    experts, rows, columns = matrix.shape
    for expert, part in product(range(experts), range(matrix.parts)):
        drawn = torch.randn(rows // matrix.parts, columns, device="cuda") * columns**-0.5
        planes = matrix.format.encode(drawn)
        for name, plane in matrix.part(expert, part).items():
            plane.copy_(planes[name])


def plain_loop(layer: FusedMoE, x_TH: Tensor, topk: TopKOutput) -> Tensor:
    """In float32 with the decoded weights."""
    out = torch.zeros(x_TH.shape, dtype=torch.float32, device="cuda")
    for expert in topk.ids_TK.unique().tolist():
        rows, k = (topk.ids_TK == expert).nonzero(as_tuple=True)
        w13 = layer.weights.w13_eJH.dense(expert).float()
        w2 = layer.weights.w2_eHI.dense(expert).float()
        gate, up = F.linear(x_TH[rows].float(), w13).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w2)
        out.index_add_(0, rows, y * topk.weights_TK[rows, k, None])
    return out


def limit(shape: Shape, dtype: str, tokens: int, touched: int) -> float:
    """Microseconds."""
    weights = WEIGHT_FORMATS[FORMATS[dtype]]
    sizes = ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    planes = [plane for size in sizes for plane in weights.planes(*size).values()]
    of_one = sum(prod(dimensions) * kind.itemsize for dimensions, kind in planes)
    num_bytes = touched * of_one + 2 * tokens * shape.hidden * 2
    operations = 2 * tokens * shape.top_k * 3 * shape.hidden * shape.inner
    rate = gpu.matrix_rate(torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn)
    return max(num_bytes / gpu.copy_bandwidth(), operations / rate)


def peers(layer: FusedMoE, x_TH: Tensor, topk: TopKOutput) -> Iterator[tuple[str, Work]]:
    """torch's grouped product (of both products alone, on rows already sorted) and transformers'
    experts (a whole layer)."""
    w13, w2 = layer.weights.w13_eJH.plain, layer.weights.w2_eHI.plain
    if w13 is None or w2 is None:
        return
    flat = topk.ids_TK.flatten()
    counts = torch.bincount(flat, minlength=len(w13))
    ends = counts.cumsum(0).int()
    sorted_NH = x_TH[flat.argsort(stable=True) // topk.ids_TK.shape[1]]

    def grouped() -> Tensor:
        both = torch._grouped_mm(sorted_NH, w13.transpose(1, 2), offs=ends)
        return torch._grouped_mm(both[:, : both.shape[1] // 2], w2.transpose(1, 2), offs=ends)

    yield "torch._grouped_mm (products)", grouped
    ids, weights = topk.ids_TK.long(), topk.weights_TK.to(x_TH.dtype)
    for name, experts in transformers_experts(layer, w13, w2).items():
        if name != "batched_mm" or len(flat) <= 64:  # it copies the weights of every pair
            yield f"transformers {name} (layer)", partial(experts, x_TH, ids, weights)


def transformers_experts(layer: FusedMoE, w13: Tensor, w2: Tensor) -> dict[str, Any]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    found = {}
    for name in ("grouped_mm", "batched_mm"):
        config = Qwen3MoeConfig(
            hidden_size=layer.config.hidden_size,
            moe_intermediate_size=layer.config.intermediate_size,
            num_experts=layer.config.num_experts,
            num_experts_per_tok=layer.config.top_k,
        )
        config._experts_implementation = name
        with torch.device("meta"):
            experts = Qwen3MoeExperts(config)
        experts.load_state_dict({"gate_up_proj": w13, "down_proj": w2}, assign=True)
        found[name] = experts
    return found


def measure_point(layer: FusedMoE, case: Case, with_peers: bool) -> Point:
    shape = SHAPES[case.shape]
    topk = draw_routing(shape, case.tokens, ROUTINGS[case.routing], seed=case.tokens)
    x_TH = torch.randn(case.tokens, shape.hidden, device="cuda").bfloat16()
    y_TH = layer(x_TH, topk, DECODE).float()
    truth = plain_loop(layer, x_TH, topk)
    error = float((y_TH - truth).norm() / truth.norm())
    touched = len(topk.ids_TK.unique())
    found = {}
    for name, work in peers(layer, x_TH, topk) if with_peers else ():
        try:
            found[name] = gpu.measure(work)
        except RuntimeError as problem:  # what cannot be captured, or has no room
            tqdm.write(f"{name} at {case.tokens} tokens: {str(problem).splitlines()[0]}")
            torch.cuda.empty_cache()
    us = gpu.measure(lambda: layer(x_TH, topk, DECODE))
    at_best = limit(shape, case.dtype, case.tokens, touched)
    return Point(**asdict(case), experts_touched=touched, us=us, limit_us=at_best,
                 peers_us=found, error=error)  # fmt: skip


@dataclass(frozen=True)
class Case:
    shape: str
    dtype: str
    routing: str
    tokens: int


def show(points: list[Point]) -> None:
    header = ["shape", "dtype", "routing", "tokens", "experts", "us", "limit", "of limit"]
    header += ["fastest peer here", "its us", "faster", "error"]
    rows = []
    for point in points:
        row = [point.shape, point.dtype, point.routing, str(point.tokens)]
        row += [str(point.experts_touched), f"{point.us:.1f}", f"{point.limit_us:.1f}"]
        row.append(f"{point.of_limit:.0%}")
        if point.peers_us:
            peer, us = min(point.peers_us.items(), key=lambda item: item[1])
            row += [peer, f"{us:.1f}", f"{us / point.us:.2f}x"]
        else:
            row += [""] * 3
        rows.append([*row, f"{point.error:.1e}"])
    print_table(header, rows)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.moe_layer --device cuda", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--tokens", type=positive, nargs="+", default=TOKENS)
    parser.add_argument("--runner", default="auto", help="as --moe-runner-backend")
    parser.add_argument("--no-peers", action="store_true", help="measure nobody else")
    parser.add_argument(
        "--out",
        help="name of the file in bench/results, whose other points stay; unset: GPU_moe_layer",
    )
    return parser.parse_args(words)


def merged(path: Path, points: Sequence[Point]) -> list[dict[str, Any]]:
    """A run of a part replaces its own points and loses no others."""
    rows = json.loads(path.read_text()) if path.exists() else []
    new = {_key(row): row for row in map(asdict, points)}
    return [new.pop(_key(row), row) for row in rows] + list(new.values())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[field] for field in ("shape", "dtype", "routing", "tokens"))


@torch.inference_mode()
def main(words: list[str]) -> None:
    args = parse(words)
    gpu.require()
    points = []
    for shape, dtype in product(args.shapes, args.dtypes):
        layer = make_layer(SHAPES[shape], dtype, args.runner)
        cases = [Case(shape, dtype, *rest) for rest in product(args.routings, args.tokens)]
        for case in tqdm(cases, desc=f"{shape} {dtype}", disable=None, leave=False):
            points.append(measure_point(layer, case, not args.no_peers))
        del layer
        torch.cuda.empty_cache()
    show(points)
    name = args.out or gpu.named("moe_layer")
    write_json(name, merged(RESULTS / f"{name}.json", points))


if __name__ == "__main__":
    main([])
