"""What the experts' kernels take of a Hopper GPU with the configurations that are guessed for it.

    python -m tests.kernels.aot_experts [--all]

Run without TRITON_INTERPRET. With --all: every shape, format and size that the benchmarks have.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from moesaic.kernels import tuning
from moesaic.kernels.triton import experts_small, sort
from moesaic.kernels.triton.experts_tiles import TileConstants
from moesaic.kernels.tuning import (
    FP8_FORMATS,
    KIB,
    DeviceTuning,
    ExpertsPlan,
    ExpertsShape,
    TileConfig,
)
from tests.kernels.aot import Usage, build

H200 = DeviceTuning("NVIDIA H200", 132, 224 * KIB)
SHAPES = {"qwen3_30b": (128, 2048, 768), "dsv3_ep8": (32, 7168, 2048), "mixtral": (8, 4096, 14336)}
INTEGERS = "*i32"
LISTS = dict.fromkeys(
    ("order", "first", "count", "tile_expert", "tile_place", "num_tiles"), INTEGERS
)
MOST_SHARED = 227 * KIB


def gate_up_usage(
    shape: ExpertsShape, config: TileConfig, h_scales: bool | None = None, direct: bool = False
) -> Usage:
    kind, quantised = _kind(shape)
    h_scales = quantised if h_scales is None else h_scales
    types = {"x": kind, "w": kind, "h": kind if h_scales else "*bf16", **LISTS}
    types |= dict.fromkeys(("x_scale", "alpha", "limit"), "fp32")
    scales = {"x_scales": quantised, "w_scales": quantised, "h_scales": h_scales}
    constants = {"bias": None, "P": tile_constants(shape, config), "PDL": True}
    constants["PREFETCH"] = config.prefetch
    types |= {"num_pairs": "i32", "num_counters": "i32"}
    if direct:
        types |= {"ids": INTEGERS, "counters": INTEGERS, "load": "*i64"}
        constants |= {"E": shape.experts, "EP": shape.experts, "NP": 32}
    else:
        constants |= {"ids": None, "counters": None, "load": None, "E": 0, "EP": 0, "NP": 0}
    return _build(experts_small._gate_up_kernel, types, scales, constants, config)


def down_usage(shape: ExpertsShape, config: TileConfig) -> Usage:
    kind, quantised = _kind(shape)
    types = {"h": kind, "w": kind, "y": "*bf16", "weights": "*fp32"}
    types |= {"h_scale": "fp32", **LISTS}
    scales = {"h_scales": quantised, "w_scales": quantised}
    constants = {"bias": None, "PREFETCH": config.prefetch, "ids": None, "PDL": True}
    constants["P"] = tile_constants(shape, config)
    return _build(experts_small._down_kernel, types, scales, constants, config)


def fused_usage(shape: ExpertsShape, plan: ExpertsPlan) -> Usage:
    kind, quantised = _kind(shape)
    types = {"x": kind, "w13": kind, "w2": kind, "h": kind, "y": "*bf16", "weights": "*fp32"}
    types |= {"counters": INTEGERS, "num_slots": "i32", **LISTS}
    types |= dict.fromkeys(("x_scale", "h_scale", "alpha", "limit"), "fp32")
    scales = dict.fromkeys(("x_scales", "h_scales", "w13_scales", "w2_scales"), quantised)
    constants = {"b13": None, "b2": None, "PREFETCH": plan.down.prefetch, "PDL": True}
    constants |= {
        "P": tile_constants(shape, plan.gate_up),
        "DOWN": tile_constants(shape, plan.down),
    }
    stages = min(plan.gate_up.num_stages, plan.down.num_stages)
    config = replace(plan.gate_up, num_stages=stages)
    return _build(experts_small._gate_up_down_kernel, types, scales, constants, config)


def _kind(shape: ExpertsShape) -> tuple[str, bool]:
    quantised = shape.format in FP8_FORMATS
    return ("*fp8e4nv" if quantised else f"*{shape.format}"), quantised


def tile_constants(shape: ExpertsShape, config: TileConfig) -> TileConstants:
    return TileConstants(
        HIDDEN=shape.hidden,
        INNER=shape.inner,
        BM=config.block_m,
        BN=config.block_n,
        BK=config.block_k,
        PRECISION="tf32",
        BLOCK_SCALES=shape.format == "fp8_block",
        TOP_K=8,
        LIMITED=False,
    )


def _build(
    kernel: Any,
    types: dict[str, str],
    scales: dict[str, bool],
    constants: dict[str, Any],
    config: TileConfig,
) -> Usage:
    """`scales`: which of these arrays there are."""
    types = types | {name: "*fp32" for name, there in scales.items() if there}
    constants = constants | {name: None for name, there in scales.items() if not there}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return build(kernel, types, constants, **options)


def check(name: str, config: TileConfig, usage: Usage, lines: int) -> None:
    """Nothing spilled; weights and rows by copies of 16 bytes that do not pass through registers;
    Hopper's products where there are lines enough for them."""
    programs = min(H200.shared // (usage.shared + KIB), 65536 // (usage.registers * 32 * 4))
    print(f"{name:44} {config}: {usage.registers} registers, {usage.shared / KIB:.0f} KiB, "
          f"{programs} programs")  # fmt: skip
    assert usage.local == 0, name
    assert usage.shared <= MOST_SHARED, name
    assert usage.count("cp.async.cg.shared.global") > 0 and not usage.count("cp.async.ca"), name
    product = "wgmma.mma_async" if lines >= 64 else "mma.sync"
    assert usage.count(product) > 0, name


def check_shape(shape: ExpertsShape, pairs: int) -> None:
    plan = tuning.guess(H200, shape, pairs)
    if plan.implementation != "small":
        return
    name = f"{shape.format} {shape} {pairs} pairs"
    gate, down = plan.gate_up, plan.down
    scaled = shape.format in FP8_FORMATS and gate.block_n == 128
    check(f"{name} gate_up", gate, gate_up_usage(shape, gate, scaled), 2 * gate.block_n)
    check(f"{name} down", down, down_usage(shape, down), down.block_n)


def check_sort() -> None:
    arrays = LISTS | {"counters": INTEGERS, "ids": INTEGERS, "load": "*i64"}
    sizes = sort.constants(128, 16)
    few = build(
        sort._sort_few,
        arrays | dict.fromkeys(("num_pairs", "num_counters"), "i32"),
        sizes | {"BI": 16, "BJ": 256, "NP": 256, "PDL": True},
    )
    assert few.local == 0
    many = build(
        sort._place_chunks,
        arrays | {"hist": INTEGERS, "before": INTEGERS}
        | dict.fromkeys(("num_pairs", "num_counters", "num_chunks"), "i32"),
        sizes
        | {"CHUNK": sort.CHUNK, "PARTS": sort.chunk_parts(128), "BC": 128, "BJ": 32, "PDL": True},
        num_warps=sort.PLACE_WARPS,
    )  # fmt: skip
    # A version of ptxas puts one number there, to run two programs at once.
    assert many.local <= 8
    zeroed = build(
        sort._zero_missing_kernel,
        {"y": "*bf16", "ids": INTEGERS, "rows": "i32"},
        {"H": 7168, "BR": sort.ZEROED_ROWS, "BH": sort.ZEROED_COLUMNS, "PDL": True},
    )
    assert zeroed.local == 0 and zeroed.count("st.global.v4") == 16
    types = {"y": "*bf16", "add": "*bf16", "ids": INTEGERS, "out": "*bf16"}
    constants = {"H": 2048, "K": 8, "BH": 512, "EAGER": True, "PDL": True}
    summed = build(sort._sum_pairs, types, constants, num_warps=2)
    assert summed.local == 0 and summed.count("ld.global.v4") == 9


def check_one_row_of_fp8() -> None:
    """Weights are asked for while the row is quantised, and `down` may begin only after that."""
    shape = ExpertsShape("fp8_block", *SHAPES["qwen3_30b"])
    gate = tuning.guess(H200, shape, 8).gate_up
    usage = gate_up_usage(shape, gate, h_scales=False, direct=True)
    check("gate_up of one row in fp8", gate, usage, 2 * gate.block_n)
    wanted = ("prefetch.global.L2", "griddepcontrol.wait", "griddepcontrol.launch_dependents")
    places = [usage.ptx.index(instruction) for instruction in wanted]
    assert places == sorted(places), places


def main() -> None:
    qwen = ExpertsShape("bf16", *SHAPES["qwen3_30b"])
    plan = tuning.guess(H200, qwen, 64)
    check("gate_up", plan.gate_up, gate_up_usage(qwen, plan.gate_up), 2 * plan.gate_up.block_n)
    check_one_row_of_fp8()
    if "--all" not in sys.argv:
        return
    check_sort()
    for format in ("bf16", "fp8_block", "fp8_channel"):
        for name, size in SHAPES.items():
            shape = ExpertsShape(format, *size)
            top_k = {"qwen3_30b": 8, "dsv3_ep8": 1, "mixtral": 2}[name]
            for tokens in (1, 8, 32, 128, 512, 2048):
                check_shape(shape, tokens * top_k)
            gate = tuning.guess(H200, shape, top_k).gate_up
            usage = gate_up_usage(shape, gate, h_scales=False, direct=True)
            check(f"{format} {shape} gate_up of one row", gate, usage, 2 * gate.block_n)
            plan = tuning.guess(H200, shape, 128 * top_k)
            if plan.implementation != "small":
                continue
            usage = fused_usage(shape, plan)
            check(f"{format} {shape} fused", plan.gate_up, usage, 2 * plan.gate_up.block_n)


if __name__ == "__main__":
    main()
