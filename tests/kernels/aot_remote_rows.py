"""What the product of rows that lie with other ranks takes of a Hopper GPU.

    python -m tests.kernels.aot_remote_rows [--all]

Run without TRITON_INTERPRET. So does what leaves them there, which sends nothing but ids.
"""

from __future__ import annotations

import sys
from typing import Any

from moesaic.kernels import tuning
from moesaic.kernels.a2a import RowPlanes
from moesaic.kernels.a2a_plan import GpuModel, send_plan
from moesaic.kernels.triton import a2a, experts_remote_rows
from moesaic.kernels.tuning import FP8_FORMATS, ExpertsShape, TileConfig
from tests.kernels import aot_a2a
from tests.kernels.aot import Usage, build
from tests.kernels.aot_experts import H200, LISTS, SHAPES, check, tile_constants


def far_usage(shape: ExpertsShape, config: TileConfig, h_scales: bool) -> Usage:
    quantised = shape.format in FP8_FORMATS
    kind = "*fp8e4nv" if quantised else f"*{shape.format}"
    types = {"x": kind, "w": kind, "h": kind if h_scales else "*bf16", "bases": "*i64", **LISTS}
    types |= {"rows": "i32", "values": "i32", "scales": "i32"}
    types |= dict.fromkeys(("x_scale", "alpha", "limit"), "fp32")
    there = {"x_scales": quantised, "w_scales": quantised, "h_scales": h_scales}
    types |= {name: "*fp32" for name, is_there in there.items() if is_there}
    constants: dict[str, Any] = {name: None for name, is_there in there.items() if not is_there}
    constants |= {"bias": None, "ALIGN": 16, "P": tile_constants(shape, config), "PDL": True}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernel = experts_remote_rows._gate_up_remote_kernel
    return build(kernel, types, constants, aligned=("values", "scales"), **options)


def check_remote(shape: ExpertsShape, pairs: int) -> None:
    """As `check`; rows as well as weights must come by copies of 16 bytes."""
    plan = tuning.guess(H200, shape, pairs)
    if plan.implementation != "small":
        return
    gate = plan.gate_up
    scaled = shape.format in FP8_FORMATS and gate.block_n == 128
    usage = far_usage(shape, gate, scaled)
    check(f"{shape.format} {shape} {pairs} pairs far", gate, usage, 2 * gate.block_n)


def check_home(payload: str, hidden: int, size: int) -> None:
    """One store of a row, however many ranks there are."""
    value_bytes, scale_bytes = (hidden, hidden // 32) if payload == "fp8" else (2 * hidden, 0)
    planes = RowPlanes(payload, 0, 0, 0, -1, value_bytes, scale_bytes, local_rows=True)
    plan = send_plan(16, hidden, payload, 1, GpuModel())
    fixed = a2a.send_constants(planes, hidden, aot_a2a.TOP_K, plan) | aot_a2a.SPREAD
    absent = {"num_tokens_ptr": None, "weights_ptr": None, "RECEIVES": True}
    usage = aot_a2a.use(a2a._send_kernel, plan.warps, size, **fixed, **absent)
    each = plan.block * (1 if payload == "fp8" else 2) // (plan.warps * 32 * 16)
    assert usage.count("st.global.v4") == each, usage.count("st.global.v4")


def main() -> None:
    check_home("bf16", 2048, size=4)
    qwen = SHAPES["qwen3_30b"]
    check_remote(ExpertsShape("bf16", 32, *qwen[1:]), 256)
    check_remote(ExpertsShape("fp8_block", 32, *qwen[1:]), 256)
    if "--all" not in sys.argv:
        return
    check_home("fp8", 7168, size=8)
    for format in ("bf16", "fp8_block", "fp8_channel"):
        for experts, *size in SHAPES.values():
            for pairs in (8, 64, 256, 1024):
                check_remote(ExpertsShape(format, max(1, experts // 4), *size), pairs)


if __name__ == "__main__":
    main()
