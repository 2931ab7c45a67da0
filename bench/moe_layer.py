"""One MoE layer against transformers' block and a plain loop over the experts, on the same weights.

    python -m bench.moe_layer                        # Qwen3-30B-A3B's layer, 1..2048 tokens
    python -m bench.moe_layer --shape mid --repeats 9
    python -m bench.moe_layer --deterministic        # and what deterministic mode costs
    python -m bench.moe_layer --device cuda --help   # on a GPU: bench/moe_layer_gpu.py

All take turns in every repeat on fresh tokens; routing is part of each. transformers runs with each
of its implementations of experts, and the fastest one at a number of tokens is the one to beat. The
limit is the weights of the experts touched, read once at the rate of a plain copy on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from bench import moe_layer_gpu
from bench.common import device_option, machine, parse_on_cpu, print_table, write_json
from moesaic.core.step import DECODE
from moesaic.layers.linear import LinearConfig
from moesaic.models.blocks import Router, SparseBlock
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE, MoeConfig
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from moesaic.moe.topk import TopK, TopKConfig

PEERS = ("eager", "batched_mm", "grouped_mm")
# Its copies of the weights of every token's experts do not fit into memory beyond this.
BATCHED_TOKENS = 64


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = {
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "mid": Shape(64, 8, 1024, 512),
    "mixtral-slice": Shape(8, 2, 2048, 4096),
    "tiny": Shape(8, 2, 64, 32),
}
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Point:
    tokens: int
    experts_touched: int
    limit_ms: float
    median_ms: dict[str, float]
    best_ms: dict[str, float]

    @property
    def peer(self) -> str:
        """transformers' fastest."""
        return min(
            (name for name in PEERS if name in self.median_ms), key=self.median_ms.__getitem__
        )


def make_block(shape: Shape, context: MoeContext, weights: dict[str, Tensor]) -> SparseBlock:
    config = MoeConfig(shape.experts, shape.hidden, shape.inner, shape.top_k)
    layer = FusedMoE(config, context)
    layer.weights.w13_eJH.plain, layer.weights.w2_eHI.plain = weights["w13"], weights["w2"]
    gate = Router(LinearConfig(shape.hidden, shape.experts, torch.bfloat16))
    gate.weight.data = weights["gate"]
    return SparseBlock(gate, TopK(TopKConfig(shape.top_k, renormalize=True)), layer)


def make_peer(shape: Shape, implementation: str, weights: dict[str, Tensor]) -> Run:
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    tensors = {
        "experts.gate_up_proj": weights["w13"],
        "experts.down_proj": weights["w2"],
        "gate.weight": weights["gate"],
    }
    block.load_state_dict(tensors, assign=True)
    return lambda x_TH: block(x_TH.unsqueeze(0)).squeeze(0)


def plain_loop(block: SparseBlock, weights: dict[str, Tensor]) -> Run:
    """What one would write first."""

    def run(x_TH: Tensor) -> Tensor:
        topk = block.route(x_TH)
        out_TH = torch.zeros_like(x_TH)
        for expert in topk.ids_TK.unique().tolist():
            rows, k = (topk.ids_TK == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x_TH[rows], weights["w13"][expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, weights["w2"][expert])
            out_TH.index_add_(0, rows, (y * topk.weights_TK[rows, k, None]).to(y.dtype))
        return out_TH

    return run


def copy_bandwidth() -> float:
    """Bytes a second of a plain copy, read and written counted."""
    source = torch.empty(1 << 28, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def measure(
    runs: dict[str, Run], block: SparseBlock, tokens: int, shape: Shape, repeats: int
) -> Point:
    names = [name for name in runs if name != "batched_mm" or tokens <= BATCHED_TOKENS]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    generator = torch.Generator().manual_seed(tokens)
    touched = []
    for repeat in range(repeats + 1):
        x_TH = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
        touched.append(len(block.route(x_TH).ids_TK.unique()))
        truth: Tensor | None = None
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = time.perf_counter()
            y_TH = runs[name](x_TH)
            seconds[name].append(time.perf_counter() - start)
            truth = y_TH if truth is None else truth
            assert F.cosine_similarity(truth.float(), y_TH.float()).min() > 0.99, name
    warm = {name: times[1:] for name, times in seconds.items()}
    mean_touched = round(statistics.mean(touched))
    nbytes = mean_touched * 3 * shape.hidden * shape.inner * 2
    return Point(
        tokens,
        mean_touched,
        nbytes / copy_bandwidth() * 1e3,
        {name: statistics.median(times) * 1e3 for name, times in warm.items()},
        {name: min(times) * 1e3 for name, times in warm.items()},
    )


def random_weights(shape: Shape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).bfloat16().mul_(sizes[-1] ** -0.5)

    w13 = torch.stack([draw(2 * shape.inner, shape.hidden) for _ in range(shape.experts)])
    w2 = torch.stack([draw(shape.hidden, shape.inner) for _ in range(shape.experts)])
    return {"gate": draw(shape.experts, shape.hidden), "w13": w13, "w2": w2}


def show(points: list[Point], ours: list[str]) -> None:
    header = ["tokens", "experts", "limit ms", *ours, "fastest peer", "which", "plain loop"]
    header += [f"{name} over peer" for name in ours]
    rows = []
    for point in points:
        ms, peer = point.median_ms, point.peer
        row = [str(point.tokens), str(point.experts_touched), f"{point.limit_ms:.1f}"]
        row += [f"{ms[name]:.1f}" for name in ours]
        row += [f"{ms[peer]:.1f}", peer, f"{ms['loop']:.1f}"]
        rows.append(row + [f"{ms[peer] / ms[name]:.2f}x" for name in ours])
    print_table(header, rows)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.moe_layer",
        description=__doc__.splitlines()[0],
        parents=[device_option("moe_layer")],
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--deterministic", action="store_true", help="measure that mode too")
    return parse_on_cpu(parser, words)


def main(words: Sequence[str] | None = None) -> None:
    chosen, rest = device_option("moe_layer").parse_known_args(words)
    if chosen.device == "cuda":
        moe_layer_gpu.main(rest)
    else:
        on_cpu(rest)


@torch.inference_mode()
def on_cpu(words: Sequence[str]) -> None:
    args = parse(words)
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    weights = random_weights(shape)
    problem = MoeProblem(weights=WEIGHT_FORMATS["bf16"], dtype="bf16")
    block = make_block(shape, MoeContext.make(problem, torch.bfloat16), weights)
    runs: dict[str, Run] = {"moesaic": lambda x: block(x, DECODE)}
    if args.deterministic:
        context = MoeContext.make(problem, torch.bfloat16, deterministic=True)
        fixed = make_block(shape, context, weights)
        runs["deterministic"] = lambda x: fixed(x, DECODE)
    ours = list(runs)
    runs |= {name: make_peer(shape, name, weights) for name in PEERS}
    runs["loop"] = plain_loop(block, weights)
    points = [
        measure(runs, block, tokens, shape, args.repeats)
        for tokens in tqdm(args.tokens, desc="tokens", disable=None, leave=False)
    ]
    show(points, ours)
    payload: dict[str, Any] = {
        "command": f"python -m bench.moe_layer --shape {args.shape} --repeats {args.repeats}"
        + (" --deterministic" if args.deterministic else ""),
        "machine": machine(args.threads),
        "shape": asdict(shape),
        "points": [{**asdict(point), "peer": point.peer} for point in points],
    }
    write_json(f"moe_layer-{args.shape}", payload)


if __name__ == "__main__":
    main()
