"""What the products with quantised weights take of a Hopper GPU: `python -m
tests.kernels.aot_formats [all]`. Triton must not be in its interpreter's mode."""

from __future__ import annotations

import sys
from typing import Any

import triton.language as tl

from moesaic.kernels.triton import experts_formats, grid
from tests.kernels.aot import Usage, build

MOST_SHARED = 227 * 1024
# Types of values, scales, zeros and the scales of whole rows; columns of a group.
FORMATS: dict[str, tuple[str, str, str | None, str | None, int]] = {
    "int8_w8a8": ("*i8", "*fp32", None, "*fp32", 0),
    "int8_w8a16": ("*i8", "*fp32", None, "*fp32", 0),
    "int4_w4a16": ("*u8", "*fp32", "*u8", None, 128),
    "mxfp4": ("*u8", "*u8", None, None, 32),
    "nvfp4": ("*u8", "*u8", None, "*fp32", 16),
    "fp8_channel_w8a16": ("*u8", "*fp32", None, "*fp32", 0),
    "fp8_block_w8a16": ("*u8", "*fp32", None, None, 128),
}
TENSORS = ("order", "tile_expert", "tile_place", "num_tiles", "first", "count")
SIZES = ("K", "N", "width", "x_width")
FEW = (("mxfp4", 16, "down"),)
ALL = tuple((f, b, k) for f in FORMATS for b in (16, 32, 64, 128) for k in ("gate_up", "down"))


def compile_product(format: str, block: int, which: str) -> Usage:
    """In bfloat16, with sizes that are multiples of 16, as models have them."""
    values, scales, zeros, rows, group = FORMATS[format]
    packed, bytes_too = format in experts_formats.PACKED, format == "int8_w8a8"
    config = experts_formats.config_for(format, block)
    types = {
        "x": "*i8" if bytes_too else "*i32" if packed else "*bf16",
        "w": values,
        "w_scales": scales,
        "scale": "fp32",
        **dict.fromkeys(TENSORS, "*i32"),
        **dict.fromkeys(SIZES, "i32"),
    }
    constants: dict[str, Any] = {
        "FORMAT": "fp8" if format.startswith("fp8") else format,
        "GROUP": group,
        "PAIRED": packed,
        "DTYPE": tl.int8 if bytes_too else tl.bfloat16,
        "BM": block,
        "BN": config.block_n,
        "BK": config.block_k,
        "EVEN": True,
        "ASM": True,
        "PDL": True,
    }
    given = {"x_scales": "*fp32" if bytes_too else None, "w_zeros": zeros, "w_rows": rows}
    types |= {name: kind for name, kind in given.items() if kind is not None}
    constants |= {name: None for name in (*given, "bias") if name not in types}
    kernel = experts_formats.down_kernel
    if which == "gate_up":
        kernel = experts_formats.gate_up_kernel
        types |= {"h": "*bf16", "alpha": "fp32", "limit": "fp32"}
        constants |= {"TOP_K": 8, "LIMITED": False}
    else:
        types |= {"y": "*bf16", "weights": "*fp32"}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True}
    return build(kernel, types, constants, aligned=SIZES, **options)


def check(format: str, block: int, which: str) -> None:
    usage = compile_product(format, block, which)
    name = f"{format} {which} by {block}"
    print(f"{name}: {usage.registers} registers, {usage.shared / 1024:.0f} KiB shared")
    assert usage.local == 0, f"{name} spills {usage.local} bytes"
    assert usage.shared < MOST_SHARED, f"{name} takes {usage.shared} bytes"
    products = "mma.sync" if block < 64 else "wgmma.mma_async"
    assert usage.count(products) > 0, f"{name} has no {products}"
    # Weights come 16 bytes at a time, past the first cache.
    assert usage.count("cp.async.cg.shared.global") > 0, f"{name} has no wide copies"
    assert usage.count("cvt.rn.f32.u8") == 0, f"{name} converts bytes one by one"


def check_grid() -> None:
    types = {"x": "*bf16", "out": "*bf16", "groups": "i32", "scale": "fp32"}
    constants = {"GROUP": grid.GROUP, "BLOCK": grid.BLOCK, "PDL": True}
    usage = build(grid.nvfp4_grid_kernel, types, constants, launch_pdl=True)
    assert usage.local == 0 and usage.count("ld.global.v4") > 0 and usage.count("st.global.v4") > 0


def main(which: str = "") -> None:
    for case in ALL if which == "all" else FEW:
        check(*case)
    check_grid()


if __name__ == "__main__":
    main(*sys.argv[1:])
