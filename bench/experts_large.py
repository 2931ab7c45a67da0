"""The two products of experts with many rows on a GPU, by configuration.

    python -m bench.experts_large                    # all shapes, bf16 and fp8, 8192 tokens
    python -m bench.experts_large --shape qwen3_30b --format bf16 --config default "group 4" plain

Rows are gathered and scattered as in a layer; sorting and the sum over a token's experts are not
in it. TFLOP/s count the operations of rows, not those of tiles that are not full. Every line is two
kernels to be compiled, a few seconds each.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from bench import gpu
from bench.common import positive, print_table
from bench.moe_layer_gpu import SHAPES, Shape
from moesaic.kernels.cpu.experts import SwigluSpec
from moesaic.kernels.experts import Matrices, Rows, sort_pairs
from moesaic.kernels.triton.experts_large import down_large, gate_up_large, large_config

FP8 = torch.float8_e4m3fn


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "group 4": {"group": 4},
    "group 16": {"group": 16},
    "ring of 3": {"ring": 3},
    "plain": {"specialised": False},
    "plain, 4 stages": {"specialised": False, "stages": 4},
}


def matrices(shape: Shape, weight_format: str, parts: int, rows: int, columns: int) -> Matrices:
    size = (shape.experts, parts, rows, columns)
    values = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(std=columns**-0.5)
    planes = {"values": values}
    if weight_format == "fp8_block":
        scales = torch.rand(shape.experts, parts, rows // 128, columns // 128, device="cuda")
        planes = {"values": (values * 100).to(FP8), "scales": scales / 100}
    return Matrices(weight_format, planes, (shape.experts, parts * rows, columns), parts)


def rows_of(count: int, columns: int, weight_format: str) -> Rows:
    values = torch.randn(count, columns, dtype=torch.bfloat16, device="cuda")
    if weight_format == "bf16":
        return Rows(values)
    return Rows((values * 50).to(FP8), torch.rand(count, columns // 128, device="cuda") / 50)


def measure(shape: Shape, weight_format: str, tokens: int, configs: list[str]) -> list[list[str]]:
    w13 = matrices(shape, weight_format, 2, shape.inner, shape.hidden)
    w2 = matrices(shape, weight_format, 1, shape.hidden, shape.inner)
    x = rows_of(tokens, shape.hidden, weight_format)
    ids = torch.rand(tokens, shape.experts, device="cuda").topk(shape.top_k).indices.int()
    weights = torch.rand(tokens, shape.top_k, device="cuda")
    pairs = tokens * shape.top_k
    h = rows_of(pairs, shape.inner, weight_format)
    y = torch.empty(pairs, shape.hidden, dtype=torch.bfloat16, device="cuda")
    inward = 4e-6 * pairs * shape.hidden * shape.inner
    table = []
    for name in configs:
        config = replace(large_config(x, w13), **CONFIGS[name])
        groups = sort_pairs.twin(ids, shape.experts, config.block_m)  # type: ignore[attr-defined]
        spec = SwigluSpec()
        first = gpu.measure(lambda: gate_up_large(x, w13, groups, spec, h, config))  # noqa: B023
        second = gpu.measure(lambda: down_large(h, w2, groups, weights, y, config))  # noqa: B023
        table.append(
            [
                name,
                f"{first:.0f} us, {inward / first:.0f} TFLOP/s",
                f"{second:.0f} us, {inward / 2 / second:.0f} TFLOP/s",
                f"{first + second:.0f} us, {1.5 * inward / (first + second):.0f} TFLOP/s",
            ]
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.experts_large", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--shape", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument(
        "--format", nargs="+", default=["bf16", "fp8_block"], choices=["bf16", "fp8_block"]
    )
    parser.add_argument("--config", nargs="+", default=["default", "plain"], choices=[*CONFIGS])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[8192])
    options = parser.parse_args()
    gpu.require()
    for shape in options.shape:
        for weight_format in options.format:
            for tokens in options.tokens:
                print(f"{shape}, {weight_format}, {tokens} tokens")
                rows = measure(SHAPES[shape], weight_format, tokens, options.config)
                print_table(["config", "gate and up", "down", "both"], rows)


if __name__ == "__main__":
    main()
