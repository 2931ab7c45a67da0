"""Dense projections on a GPU: our kernels for few rows against torch's products.

    python -m bench.linear                        # all shapes, 1..256 rows, bf16 and fp8
    python -m bench.linear --shapes qkv o --rows 1 16
    python -m bench.linear --sweep --shapes o     # every candidate tile, the best one last
    python -m bench.linear --chain --rows 1 8     # projections after each other, as in decoding
    python -m bench.linear --many                 # fp8 with 1024 rows and more

The limit is the bytes that must move (the matrix, rows in and out) at the rate of a plain copy. In
a chain each projection waits for the one before it: MOESAIC_PDL=0 shows what starting early brings.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gpu
from bench.common import positive, print_table, write_json
from moesaic.kernels.experts import Rows
from moesaic.kernels.linear import Fp8Matrix, gate_up_silu, linear, linear_fp8, quantise_groups

# Outputs and inputs: Qwen3-30B-A3B first, then DeepSeek-V3's, then a dense layer of Mixtral's size.
SHAPES = {
    "qkv": (5120, 2048),
    "o": (2048, 4096),
    "router": (128, 2048),
    "head": (151_936, 2048),
    "mla_q_a": (1536, 7168),
    "mla_q_b": (24_576, 1536),
    "mla_o": (7168, 16_384),
    "shared_up": (4096, 7168),
    "mlp_down": (4096, 14_336),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# The head and the router are not quantised.
FP8_SHAPES = tuple(name for name in SHAPES if name not in ("head", "router"))
CHAIN_LAYERS = 16
Work = Callable[[], object]


@dataclass(frozen=True)
class Point:
    """Times in µs; `plan`: tiles x splits of ours, nothing where torch computes."""

    shape: str
    dtype: str
    rows: int
    plan: str
    us: float
    torch_us: float
    limit_us: float

    def cells(self) -> list[str]:
        share = f"{self.limit_us / self.us:.0%}"
        times = [f"{time:.1f}" for time in (self.us, self.torch_us, self.limit_us)]
        return [self.shape, self.dtype, str(self.rows), self.plan, *times, share]


HEADER = ("shape", "dtype", "rows", "plan", "ours µs", "torch µs", "limit µs", "of the limit")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def limit_us(rows: int, shape: tuple[int, int], weight_size: int) -> float:
    outputs, inputs = shape
    moved = outputs * inputs * weight_size + 2 * rows * (outputs + inputs)
    return moved / gpu.copy_bandwidth()


def plan_text(rows: int, shape: tuple[int, int], size: int) -> str:
    from moesaic.kernels.triton import linear as bf16
    from moesaic.kernels.triton import linear_fp8 as fp8

    module = bf16 if size == 2 else fp8
    if rows > module.TILES[-1].rows:
        return ""
    plan = module.plan_for(rows, *shape, gpu.device_facts()["processors"])
    return f"{plan.tiles} x {plan.splits}"


def bf16_point(name: str, rows: int) -> Point:
    shape = SHAPES[name]
    x, weight = drawn(rows, shape[1]), drawn(*shape)
    ours = gpu.measure(_few_rows(x, weight) or (lambda: linear(x, weight)))
    theirs = gpu.measure(lambda: F.linear(x, weight))
    limit = limit_us(rows, shape, 2)
    return Point(name, "bf16", rows, plan_text(rows, shape, 2), ours, theirs, limit)


def _few_rows(x: Tensor, weight: Tensor) -> Work | None:
    """Our kernel, also where it is not taken: to see from where on torch's is faster."""
    from moesaic.kernels.triton import linear as bf16

    y = drawn(len(x), len(weight))
    if len(x) > bf16.TILES[-1].rows:
        return None
    return lambda: bf16.multiply(x, weight, None, y, False)


def fp8_point(name: str, rows: int) -> Point:
    """Rows come in bfloat16; torch's product gets them quantised, which is in its favour."""
    shape = SHAPES[name]
    x, matrix = drawn(rows, shape[1]), Fp8Matrix.of(drawn(*shape))
    ours = gpu.measure(lambda: linear_fp8(Rows(x), matrix, None, torch.bfloat16))
    quantised = quantise_groups(x)
    theirs = _scaled_mm(quantised, matrix)
    limit = limit_us(rows, shape, 1)
    return Point(name, "fp8", rows, plan_text(rows, shape, 1), ours, theirs, limit)


def _scaled_mm(x: Rows, matrix: Fp8Matrix) -> float:
    """nan where torch cannot."""
    from moesaic.kernels.triton import linear_fp8 as fp8

    if not fp8._torch_works(x.values.device):
        return float("nan")
    return gpu.measure(lambda: fp8._by_torch(x, matrix, torch.bfloat16))


def many_rows(name: str, rows: int) -> list[str]:
    """The product of many quantised rows: ours, torch's, and bfloat16 for comparison."""
    from moesaic.kernels.triton import linear_fp8 as fp8

    outputs, inputs = SHAPES[name]
    x, weight = drawn(rows, inputs), drawn(outputs, inputs)
    quantised, matrix = quantise_groups(x), Fp8Matrix.of(weight)
    y = drawn(rows, outputs)
    times = (
        gpu.measure(lambda: fp8.multiply_many(quantised, matrix, None, y, False)),
        _scaled_mm(quantised, matrix),
        gpu.measure(lambda: F.linear(x, weight)),
    )
    rates = [f"{2 * rows * outputs * inputs / time / 1e6:.0f}" for time in times]
    return [name, str(rows), *(f"{time:.0f}" for time in times), *rates]


def sweep(name: str, rows: int) -> list[list[str]]:
    """Times of candidate tiles in bfloat16, slowest first."""
    from moesaic.kernels.triton import linear as bf16

    shape = SHAPES[name]
    x, weight, y = drawn(rows, shape[1]), drawn(*shape), drawn(rows, shape[0])
    found = []
    for plan in _candidates(rows, shape):
        try:
            took = gpu.measure(
                lambda plan=plan: bf16.multiply(x, weight, None, y, False, plan)  # type: ignore[misc]
            )
        except Exception as error:  # too much shared memory, say
            print(f"{plan.tile}: {type(error).__name__}")
            continue
        found.append((took, plan))
    found.sort(key=lambda pair: -pair[0])
    limit = limit_us(rows, shape, 2)
    return [
        [name, str(rows), str(plan.tile), str(plan.splits), f"{took:.1f}", f"{limit / took:.0%}"]
        for took, plan in found
    ]


def _candidates(rows: int, shape: tuple[int, int]) -> Iterator:
    from moesaic.kernels.triton.linear import LinearLaunch, LinearTile

    outputs, inputs = shape
    if rows == 1:
        for out, width, warps in ((2, 1024, 4), (4, 1024, 4), (4, 2048, 8), (8, 1024, 8)):
            yield LinearLaunch(LinearTile(1, out, width, warps), -(-outputs // out), 1, True)
    block = max(16, 1 << (rows - 1).bit_length())
    for out, width in product((16, 32, 64, 128), (64, 128, 256)):
        # As many stages as leave room for a second program on the processor.
        stages = min(8, 110_000 // ((block + out) * width * 2))
        tiles, blocks = -(-outputs // out), -(-inputs // width)
        for splits in (1, 2, 4, 8, 16):
            filled = 200 <= tiles * splits <= max(800, tiles)
            if stages >= 3 and splits <= blocks // 2 and filled:
                share = -(-blocks // splits)
                warps = 4 if out * block >= 512 else 2
                yield LinearLaunch(
                    LinearTile(block, out, width, warps, stages), tiles, -(-blocks // share), True
                )


def chain(rows: int) -> list[list[str]]:
    """Projections of many layers after each other, none of whose matrices is in the cache."""
    (qkv, hidden), (_, attended) = SHAPES["qkv"], SHAPES["o"]
    layers = [(drawn(qkv, hidden) / 45, drawn(hidden, attended) / 64) for _ in range(CHAIN_LAYERS)]
    kept = [tuple(map(Fp8Matrix.of, layer)) for layer in layers]
    start = drawn(rows, hidden)

    def walk(multiply: Callable[[Tensor, object], Tensor], matrices: Sequence) -> Work:
        def run() -> Tensor:
            x = start
            for into, out in matrices:
                x = multiply(multiply(x, into)[:, :attended], out)
            return x

        return run

    runs = {
        "ours bf16": walk(lambda x, w: linear(x, w), layers),
        "torch bf16": walk(lambda x, w: F.linear(x, w), layers),
        "ours fp8": walk(lambda x, w: linear_fp8(Rows(x), w, None, torch.bfloat16), kept),
    }
    rates = {"ours bf16": 2, "torch bf16": 2, "ours fp8": 1}
    lines = []
    for label, run in runs.items():
        took = gpu.measure(run, flush=False) / CHAIN_LAYERS
        size = rates[label]
        limit = limit_us(rows, SHAPES["qkv"], size) + limit_us(rows, SHAPES["o"], size)
        lines.append([label, str(rows), f"{took:.1f}", f"{limit:.1f}", f"{limit / took:.0%}"])
    return lines


def gated(rows: int) -> list[str]:
    """Gate and up with their activation, in one kernel and in torch's three."""
    outputs, inputs = SHAPES["shared_up"]
    x, weight = drawn(rows, inputs), drawn(outputs, inputs)

    def theirs() -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        return F.silu(gate) * up

    times = gpu.measure(lambda: gate_up_silu(x, weight)), gpu.measure(theirs)
    return [str(rows), *(f"{time:.1f}" for time in times)]


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.linear", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=positive, default=list(ROWS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--many", action="store_true", help="fp8 products of 1024 rows and more")
    parser.add_argument("--out", help="name of the JSON file in results/; unset: GPU_linear")
    args = parser.parse_args()
    gpu.require()
    if args.sweep:
        lines = [line for name in args.shapes for rows in args.rows for line in sweep(name, rows)]
        print_table(("shape", "rows", "tile", "splits", "µs", "of the limit"), lines)
    elif args.chain:
        lines = [line for rows in args.rows for line in chain(rows)]
        print_table(("a layer's qkv and o", "rows", "µs", "limit µs", "of the limit"), lines)
    elif args.many:
        shapes = [name for name in args.shapes if name in FP8_SHAPES]
        lines = [many_rows(name, rows) for name in shapes for rows in (1024, 4096, 16_384)]
        times = ("ours µs", "torch µs", "bf16 µs", "TFLOP/s", "torch", "bf16")
        print_table(("shape", "rows", *times), lines)
    else:
        _all(args)


def _all(args: argparse.Namespace) -> None:
    points = [bf16_point(name, rows) for name in args.shapes for rows in args.rows]
    points += [
        fp8_point(name, rows) for name in args.shapes if name in FP8_SHAPES for rows in args.rows
    ]
    print_table(HEADER, [point.cells() for point in points])
    print_table(("rows", "gated µs", "torch µs"), [gated(rows) for rows in args.rows])
    facts = {"device": gpu.device_facts(), "copy_bytes_per_us": gpu.copy_bandwidth()}
    write_json(
        args.out or gpu.named("linear"), {**facts, "points": [asdict(point) for point in points]}
    )


if __name__ == "__main__":
    main()
