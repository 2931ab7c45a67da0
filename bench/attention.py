"""Attention on a GPU: decoding, prefill, and what goes into the cache before them.

    python -m bench.attention                     # all shapes; results/attention.json
    python -m bench.attention --quick             # a few points of each
    python -m bench.attention --page-size 64
    python -m bench.attention --kv-cache-dtype fp8_e4m3
    python -m bench.attention --sweep --shape qwen3_30b   # which tiles and splits are fastest

The limit of decoding is the bytes of keys, values, queries and results over the bandwidth of a copy
on the same GPU; that of prefill the operations of the visible pairs over the rate of a large matrix
product. The peer of prefill is torch's scaled_dot_product_attention on keys and values that lie
side by side already, all sequences equally long.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from bench import gpu
from bench.common import positive, print_table, write_json
from moesaic.kernels.attention import (
    DecodeRows,
    HeadEntry,
    LayerPages,
    Queries,
    Softmax,
    Splits,
    decode_attention,
    enter_heads,
    prefill_attention,
)
from moesaic.layers.context import CacheSpec
from moesaic.layers.gpu_attention import GpuAttention
from moesaic.layers.paged_cache import PagedCache, SequenceSpan

CACHE_DTYPES = {"auto": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
CONTEXT = 1088


@dataclass(frozen=True)
class Shape:
    """`rest`: channels of a latent that are no values; 0 where keys and values are apart."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    rest: int = 0
    window: int | None = None
    sinks: bool = False


DECODED = {
    "qwen3_30b": Shape(32, 4, 128, 128),
    "gpt_oss_20b": Shape(64, 8, 64, 64, sinks=True),
    "gpt_oss_20b_window": Shape(64, 8, 64, 64, window=128, sinks=True),
    "deepseek_v2_lite": Shape(16, 1, 576, 512, rest=64),
}
# Latents are expanded for prefill.
PREFILLED = DECODED | {"deepseek_v2_lite": Shape(16, 16, 192, 128)}
BATCHES = (1, 8, 32, 128, 256)
PROMPTS = ((1, 1024), (16, 1024), (8, 2048), (4, 4096), (2, 8192))
ENTERED = (1, 32, 256, 8192)
QUICK_BATCHES, QUICK_PROMPTS, QUICK_ENTERED = (1, 32), ((16, 1024), (2, 8192)), (32,)


@dataclass(frozen=True)
class Row:
    kind: str
    shape: str
    batch: int
    tokens: int
    us: float
    limit_us: float
    peer_us: float | None = None
    tflops: float | None = None
    config: str = ""


@dataclass(frozen=True)
class Case:
    """A step on a cache of random numbers, its pages in any order."""

    q: Queries
    pages: LayerPages
    step: GpuAttention
    softmax: Softmax
    out_TNV: Tensor


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(dtype)


def make_case(shape: Shape, spans: list[SequenceSpan], page_size: int, dtype: torch.dtype) -> Case:
    total = 1 + max(page for span in spans for page in span.pages)
    value_dim = 0 if shape.rest else shape.value_dim
    cache = PagedCache(
        CacheSpec(1, shape.kv_heads, shape.dim, value_dim), total, page_size, dtype, "cuda"
    )
    cache.keys.copy_(draw(*cache.keys.shape, dtype=dtype))
    cache.values.copy_(draw(*cache.values.shape, dtype=dtype))
    rows = sum(span.length for span in spans)
    q = draw(rows, shape.heads, shape.dim)
    main = shape.dim - shape.rest
    return Case(
        Queries(q[..., :main].contiguous(), q[..., main:].contiguous() if shape.rest else None),
        LayerPages(cache.keys[0], None if shape.rest else cache.values[0], shape.value_dim),
        GpuAttention.from_spans(cache, spans),
        Softmax(shape.dim**-0.5, shape.window, draw(shape.heads) if shape.sinks else None),
        torch.empty(rows, shape.heads, shape.value_dim, dtype=torch.bfloat16, device="cuda"),
    )


def chosen_shapes(args: argparse.Namespace, shapes: dict[str, Shape]) -> list[str]:
    return [args.shape] if args.shape else list(shapes)


def make_spans(batch: int, new: int, kv_len: int, page_size: int) -> list[SequenceSpan]:
    count = -(-kv_len // page_size)
    free = list(range(1, batch * count + 1))
    random.Random(0).shuffle(free)
    return [
        SequenceSpan(i * new, new, kv_len, free[i * count : (i + 1) * count]) for i in range(batch)
    ]


def decode_limit(shape: Shape, batch: int, context: int, itemsize: int) -> float:
    seen = min(context, shape.window or context)
    cached = shape.kv_heads * (shape.dim + (0 if shape.rest else shape.value_dim)) * itemsize
    rows = shape.heads * (shape.dim + shape.value_dim) * 2
    return batch * (seen * cached + rows) / gpu.copy_bandwidth()


def prefill_operations(shape: Shape, batch: int, tokens: int) -> int:
    window = min(shape.window or tokens, tokens)
    pairs = window * (window + 1) // 2 + (tokens - window) * window
    return 2 * batch * shape.heads * (shape.dim + shape.value_dim) * pairs


def run_decode(case: Case, batch: DecodeRows | None = None) -> Callable[[], object]:
    batch = batch or case.step.decode
    assert batch is not None
    return lambda: decode_attention(case.q, case.pages, batch, case.softmax, case.out_TNV)


def run_prefill(case: Case) -> Callable[[], object]:
    assert case.step.prefill is not None
    rows = case.step.prefill.rows
    return lambda: prefill_attention(case.q, case.pages, rows, case.softmax, case.out_TNV)


def measure_decode(args: argparse.Namespace) -> Iterator[Row]:
    dtype = CACHE_DTYPES[args.kv_cache_dtype]
    for name, batch in product(
        chosen_shapes(args, DECODED), QUICK_BATCHES if args.quick else BATCHES
    ):
        shape, spans = DECODED[name], make_spans(batch, 1, CONTEXT, args.page_size)
        case = make_case(shape, spans, args.page_size, dtype)
        assert case.step.decode is not None
        took = gpu.measure(run_decode(case))
        limit = decode_limit(shape, batch, CONTEXT, dtype.itemsize)
        yield Row("decode", name, batch, CONTEXT, took, limit, config=str(case.step.decode.splits))


def measure_prefill(args: argparse.Namespace) -> Iterator[Row]:
    dtype = CACHE_DTYPES[args.kv_cache_dtype]
    prompts = QUICK_PROMPTS if args.quick else PROMPTS
    for name, (batch, tokens) in product(chosen_shapes(args, PREFILLED), prompts):
        shape = PREFILLED[name]
        spans = make_spans(batch, tokens, tokens, args.page_size)
        took = gpu.measure(run_prefill(make_case(shape, spans, args.page_size, dtype)))
        operations = prefill_operations(shape, batch, tokens)
        limit = operations / gpu.matrix_rate(torch.bfloat16)
        peer = None if shape.window else measure_peer(shape, batch, tokens)
        yield Row("prefill", name, batch, tokens, took, limit, peer, operations / took / 1e6)


def measure_peer(shape: Shape, batch: int, tokens: int) -> float:
    """Without sinks, which it does not know; keys and values of one size."""
    size = max(shape.dim, shape.value_dim)
    q = draw(batch, shape.heads, tokens, size)
    k, v = (draw(batch, shape.kv_heads, tokens, size) for _ in range(2))
    grouped = shape.heads != shape.kv_heads
    return gpu.measure(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    )


def measure_entry(args: argparse.Namespace) -> Iterator[Row]:
    dtype = CACHE_DTYPES[args.kv_cache_dtype]
    shape = DECODED["qwen3_30b"]
    for tokens in QUICK_ENTERED if args.quick else ENTERED:
        spans = make_spans(1, tokens, tokens, args.page_size)
        case = make_case(shape, spans, args.page_size, dtype)
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        qkv, angles = draw(tokens, width), [torch.randn(tokens, 64, device="cuda") for _ in "cs"]
        norms = [draw(shape.dim) for _ in "qk"]
        entry = HeadEntry(shape.heads, *angles, False, *norms, 1e-6)
        slots_T, pages = case.step.slots_T, case.pages
        took = gpu.measure(
            lambda qkv=qkv, entry=entry, pages=pages, slots_T=slots_T: enter_heads(
                qkv, entry, pages, slots_T
            )
        )
        written = shape.heads * shape.dim * 2 + 2 * shape.kv_heads * shape.dim * dtype.itemsize
        moved = tokens * (width * 2 + written + shape.dim * 4)
        yield Row("enter", "qwen3_30b", 1, tokens, took, moved / gpu.copy_bandwidth())


def sweep_decode(args: argparse.Namespace) -> Iterator[Row]:
    from moesaic.kernels.triton import attention_decode as module

    dtype, chosen = CACHE_DTYPES[args.kv_cache_dtype], (module.CONFIGS, module.SHORT_CONFIGS)
    module.SHORT_CONFIGS = ()
    for name, batch in product(
        chosen_shapes(args, DECODED), QUICK_BATCHES if args.quick else BATCHES
    ):
        shape, spans = DECODED[name], make_spans(batch, 1, CONTEXT, args.page_size)
        case = make_case(shape, spans, args.page_size, dtype)
        limit = decode_limit(shape, batch, CONTEXT, dtype.itemsize)
        blocks = (32, 64) if shape.dim > 256 else (64, 128)
        tiles = product(blocks, ((4, 3), (4, 4), (8, 3)), (1, 2, 4, 8))
        for block, (warps, stages), count in tiles:
            config = module.AttentionTile(16, block, warps, stages)
            module.CONFIGS = ((1 << 30, config),)
            splits = Splits(count, block)
            assert case.step.decode is not None
            took = timed(run_decode(case, replace(case.step.decode, splits=splits)))
            yield Row("decode", name, batch, CONTEXT, took, limit, config=f"{config} {splits}")
    module.CONFIGS, module.SHORT_CONFIGS = chosen


def prefill_configs(case: Case) -> Iterator[Any]:
    """One after the other in the table of the kernel that this GPU will run."""
    from moesaic.kernels.triton import attention_hopper, attention_prefill
    from moesaic.kernels.triton.attention_blocks import two_parts

    module: Any = attention_prefill
    table = "CONFIGS"
    configs: list[Any] = [
        attention_prefill.AttentionTile(rows, block, warps, stages)
        for (rows, warps), block, stages in product(((64, 4), (128, 8)), (64, 128), (2, 3))
    ]
    if attention_prefill.is_narrow(case.softmax.window):
        table = "NARROW_CONFIGS"
        configs += [
            attention_prefill.AttentionTile(64, 32, 4, 3),
            attention_prefill.AttentionTile(32, 32, 4, 3),
        ]
    elif attention_hopper.can_run(two_parts(case.q), case.pages, case.out_TNV):
        module = attention_hopper
        sizes = product((64, 128), (2, 3, 4, 6), (1, 2), (True, False))
        configs = [attention_hopper.RingConfig(*size) for size in sizes]
    chosen = getattr(module, table)
    for config in configs:
        setattr(module, table, ((1 << 30, config),))
        yield config
    setattr(module, table, chosen)


def sweep_prefill(args: argparse.Namespace) -> Iterator[Row]:
    dtype = CACHE_DTYPES[args.kv_cache_dtype]
    for name, (batch, tokens) in product(chosen_shapes(args, PREFILLED), QUICK_PROMPTS):
        shape, spans = PREFILLED[name], make_spans(batch, tokens, tokens, args.page_size)
        case = make_case(shape, spans, args.page_size, dtype)
        operations = prefill_operations(shape, batch, tokens)
        limit = operations / gpu.matrix_rate(torch.bfloat16)
        for config in prefill_configs(case):
            took = timed(run_prefill(case))
            yield Row(
                "prefill", name, batch, tokens, took, limit, None, operations / took / 1e6,
                str(config),
            )  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    """Infinite where a configuration does not fit on this GPU."""
    from triton.runtime.errors import OutOfResources

    try:
        return gpu.measure(work)
    except OutOfResources:
        return float("inf")


def best(rows: list[Row]) -> list[Row]:
    """Of each point the three fastest."""
    points: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        points.setdefault((row.kind, row.shape, row.batch, row.tokens), []).append(row)
    return [row for point in points.values() for row in sorted(point, key=lambda r: r.us)[:3]]


def show(rows: list[Row]) -> None:
    header = ["kind", "shape", "batch", "tokens", "µs", "limit", "share", "TFLOP/s", "peer µs", ""]
    print_table(
        header,
        [
            [
                row.kind,
                row.shape,
                str(row.batch),
                str(row.tokens),
                f"{row.us:.1f}",
                f"{row.limit_us:.1f}",
                f"{row.limit_us / row.us:.0%}",
                "" if row.tflops is None else f"{row.tflops:.0f}",
                "" if row.peer_us is None else f"{row.peer_us:.1f}",
                row.config,
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.attention", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a few points of each kind")
    parser.add_argument("--sweep", action="store_true", help="try other tiles and splits")
    parser.add_argument("--kind", choices=("enter", "decode", "prefill"), help="only this one")
    parser.add_argument("--shape", choices=tuple(DECODED), help="only this one")
    parser.add_argument("--page-size", type=positive, default=16)
    parser.add_argument("--kv-cache-dtype", choices=tuple(CACHE_DTYPES), default="auto")
    parser.add_argument("--out", default="attention", help="name of the file of results")
    args = parser.parse_args()
    gpu.require()
    plain = {"enter": measure_entry, "decode": measure_decode, "prefill": measure_prefill}
    sweeps = {"decode": sweep_decode, "prefill": sweep_prefill}
    kinds = sweeps if args.sweep else plain
    rows = [
        row
        for kind, measured in kinds.items()
        if args.kind in (None, kind)
        for row in tqdm(measured(args), desc=kind, unit="point")
    ]
    shown = best(rows) if args.sweep else rows
    show(shown)
    facts = gpu.device_facts() | {
        "copy_tb_s": gpu.copy_bandwidth() / 1e6,
        "bf16_tflop_s": gpu.matrix_rate(torch.bfloat16) / 1e6,
        "page_size": args.page_size,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    name = f"{args.out}_sweep" if args.sweep else args.out
    write_json(name, {"machine": facts, "rows": [asdict(row) for row in shown]})


if __name__ == "__main__":
    main()
